"""The memory of a run in each phase of a step, from the model's configuration alone.

The trainer's own code runs on fake tensors, which have a shape and a dtype but no content, and the
bytes alive at once are counted. The engine's memory beside its weights and KV cache is an estimate.
"""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import tyro
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from config import POSITIVE, Config
from engine_adapter import CANARY_PROMPTS
from examples.toys import toy_config, toy_tokenizer
from extras.checkpointing import checkpoint_layers
from extras.offload import OffloadedOptimizer
from extras.reference import kv_bytes_per_token
from lab import table
from models import attention_for, load_tokenizer
from records import one_sentence, stage
from rl import Batch, Optimizer, Policy, TargetLogprobs, Vocabulary, head_chunk
from tasks import encode
from train import find_task

GIB = 2**30
# Estimate: CUDA context, cuBLAS workspaces, vLLM's buffers that sleep does not free.
CONTEXT = 1.5 * GIB
BATCHED_TOKENS = 8192  # tokens that the engine prefills at once, as in engine_adapter.Engine
# (sequences, V) in fp32: logits, log-probabilities, probabilities, noise of the sampler.
SAMPLER_COPIES = 4


class Memory(TorchDispatchMode):
    """Counts the bytes of the tensors that operations create, fake ones too, while they live."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._counted: set[int] = set()  # storages, by address

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in filter(torch.is_tensor, tree_leaves(result)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._counted:
                self._counted.add(storage._cdata)
                weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
        return result

    def _forget(self, address: int, num_bytes: int) -> None:
        self._counted.remove(address)
        self.live -= num_bytes

    def added_by(self, function: Callable[[], Any]) -> int:
        """The most bytes alive during a call, less those alive before it."""
        before = self.peak = self.live
        function()
        return self.peak - before


def _causal_without_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """No mask tensor for causal attention: transformers would decide by a mask's values."""
    return sdpa_mask(*args, **kwargs | {"allow_is_causal_skip": True})


AttentionInterface.register("planned_sdpa", sdpa_attention_forward)
AttentionMaskInterface.register("planned_sdpa", _causal_without_mask)


@dataclass(frozen=True)
class Parts:
    """Bytes on the device in one phase."""

    weights: float = 0
    copies: float = 0
    masters: float = 0
    moments: float = 0
    gradients: float = 0
    activations: float = 0
    engine: float = 0
    kv_cache: float = 0
    sampling: float = 0
    context: float = CONTEXT
    pinned: float = 0  # in host memory: no part of the total

    @property
    def total(self) -> float:
        return sum(vars(self).values()) - self.pinned


def largest_micro_batch(config: Config, max_prompt_tokens: int) -> tuple[int, int]:
    """Its rows and its width."""
    width = max_prompt_tokens + config.grpo.max_new_tokens - 1
    minibatch = config.grpo.num_prompts * config.grpo.group_size // config.grpo.num_minibatches
    return min(max(1, config.grpo.micro_batch_tokens // width), minibatch), width


def measure_trainer(config: Config, model_config: PretrainedConfig, max_prompt_tokens: int,
                    chunk_elements: int | None = None) -> tuple[Parts, int]:
    """Run the trainer's largest micro-batch on fake tensors; `chunk_elements` as in `Policy`.

    Returns the bytes of the trainer during an update, and those that a pass without gradients adds
    to the weights. `activations` are a forward and backward's peak: activations, chunks of logits,
    gradients not yet accumulated.
    """
    rows, width = largest_micro_batch(config, max_prompt_tokens)
    dtype, memory = getattr(torch, config.run.dtype), Memory()
    attention = attention_for(model_config).replace("sdpa", "planned_sdpa")
    with FakeTensorMode(), memory:
        model = AutoModelForCausalLM.from_config(model_config, dtype=dtype,
                                                 attn_implementation=attention)
        policy = Policy(model, config.parity.trainer_fp32_head, chunk_elements, check=False)
        if config.grpo.gradient_checkpointing:
            checkpoint_layers(policy)
        make_optimizer = OffloadedOptimizer if config.grpo.offload_optimizer else Optimizer
        optimizer = make_optimizer(model, config.grpo.weight_decay)
        for master in optimizer.masters:
            master.grad = torch.zeros_like(master)  # accumulated over earlier micro-batches
        ids = torch.zeros(rows, width, dtype=torch.long)

        def loss() -> torch.Tensor:
            hidden = policy.hidden(ids)[:, -config.grpo.max_new_tokens :].flatten(0, 1)  # (N, H)
            head, bias = policy.projection(config.grpo.temperature), policy.head_bias
            targets = ids.new_zeros(len(hidden))
            restrict = Vocabulary().restriction(Batch(*[None] * 7), ids)
            return TargetLogprobs.apply(hidden, policy.head.weight, bias, targets, restrict,
                                        head).sum()

        forward = memory.added_by(torch.no_grad()(loss))
        backward = memory.added_by(lambda: optimizer.backward(loss()))
    storages = [tensor.untyped_storage() for tensor in getattr(optimizer, "host", {}).values()]
    slabs = {storage._cdata: storage.nbytes() for storage in storages}
    moments = sum(each.nbytes for state in optimizer.adamw.state.values()
                  for each in state.values())
    return Parts(
        weights=sum(parameter.nbytes for parameter in model.parameters()),
        masters=sum(master.nbytes for _, master in optimizer.rounded), moments=moments,
        gradients=sum(master.grad.nbytes for master in optimizer.masters), activations=backward,
        pinned=sum(slabs.values()),
    ), forward


def sampling_bytes(config: Config, model_config: PretrainedConfig) -> int:
    """The engine's work space: a prefill's widest layer, or the sampler's copies of logits."""
    inner = getattr(model_config, "intermediate_size", None) or 4 * model_config.hidden_size
    itemsize = getattr(torch, config.run.dtype).itemsize
    prefill = BATCHED_TOKENS * (3 * inner + 4 * model_config.hidden_size) * itemsize
    return max(prefill, SAMPLER_COPIES * config.backend.max_num_seqs * model_config.vocab_size * 4)


def needs_math_attention(config: Config, model_config: PretrainedConfig) -> bool:
    """Whether CUDA has no fused attention: flash has no fp32, mem-efficient no grouped queries.

    Source: sdp_utils_cpp.h in torch 2.13; transformers leaves the repetition of keys and values to
    torch.
    """
    heads = getattr(model_config, "num_attention_heads", None)
    key_value_heads = getattr(model_config, "num_key_value_heads", None) or heads
    return config.run.dtype == "float32" and key_value_heads != heads


def phases(config: Config, model_config: PretrainedConfig, max_prompt_tokens: int,
           chunk_elements: int | None = None) -> dict[str, Parts]:
    """The bytes on a GPU in each phase of a step and of the evaluation by the trainer."""
    needs_math = needs_math_attention(config, model_config)
    with sdpa_kernel(SDPBackend.MATH) if needs_math else nullcontext():
        update, forward = measure_trainer(config, model_config, max_prompt_tokens, chunk_elements)
    probed = config.measure.probe_every or config.measure.probe_on_alarm
    copies = bool(config.grpo.kl_coef) + bool(probed)  # first weights; the step before
    update = replace(update, copies=copies * update.weights)
    idle = replace(update, gradients=0, activations=0)
    if config.grpo.offload_optimizer:
        idle = replace(idle, masters=0, moments=0)
    vllm, cache = config.backend.engine != "transformers", config.backend.kv_cache_gib * GIB
    # The shared engine has the trainer's.
    copy = update.weights if config.backend.engine == "vllm" else 0
    # vLLM's `output_bin_counts`
    penalties = (config.backend.max_num_seqs + CANARY_PROMPTS) * model_config.vocab_size * 4
    engine = dict(engine=copy + penalties if vllm else 0, kv_cache=cache)
    # Sleep would drop the kept KV cache.
    stays_awake = vllm and config.backend.inflight_groups and config.parity.inflight_keep
    asleep = engine if stays_awake else {}
    awake = replace(idle, **engine, sampling=sampling_bytes(config, model_config))
    by_phase = {"generate": awake, "old_logprobs": replace(idle, activations=forward, **asleep),
                "update": replace(update, **asleep), "sync": awake}
    if vllm and config.measure.eval_with_trainer:  # the trainer's own KV cache has the same size
        by_phase["evaluate"] = replace(awake, kv_cache=2 * cache)
    return by_phase


TRY = {  # options that lower the memory of a phase, the cheapest first
    "update": "--gradient-checkpointing, a smaller --micro-batch-tokens, --dtype bfloat16",
    "old_logprobs": "a smaller --micro-batch-tokens, --offload-optimizer",
    "evaluate": "--no-eval-with-trainer",
    "generate": "a smaller --max-num-seqs or --kv-cache-gib, --offload-optimizer",
}


def print_plan(config: Config, model_config: PretrainedConfig, max_prompt_tokens: int,
               gib: float) -> bool:
    """Print table, verdict, and options that lower the peak. Returns whether the run fits."""
    by_phase = phases(config, model_config, max_prompt_tokens, head_chunk(gib))
    dtype = getattr(torch, config.run.dtype)
    update = by_phase["update"]
    print(f"{model_config.model_type}, {update.weights / dtype.itemsize / 1e6:,.1f} million"
          f" parameters, {config.run.dtype}; prompts of {max_prompt_tokens} and responses of"
          f" {config.grpo.max_new_tokens} tokens; GiB on one GPU:\n")
    columns = [name for name in vars(update)
               if any(getattr(parts, name) for parts in by_phase.values())]
    columns = [name for name in columns if name != "pinned"] + ["total"]
    print(table(
        ["phase", *(name.replace("_", " ") for name in columns)],
        [[phase, *(f"{getattr(parts, name) / GIB:.2f}" for name in columns)]
         for phase, parts in by_phase.items()],
    ))
    length = max_prompt_tokens + config.grpo.max_new_tokens
    backend = config.backend
    held = int(backend.kv_cache_gib * GIB / (length * kv_bytes_per_token(model_config, dtype)))
    waiting = ": the others wait" if held < backend.max_num_seqs else ""
    print(f"\n--kv-cache-gib {backend.kv_cache_gib:g} holds {held:,} rollouts of {length:,} tokens,"
          f" --max-num-seqs is {backend.max_num_seqs}{waiting}")
    if config.grpo.offload_optimizer:
        print(f"pinned host memory: {update.pinned / GIB:.2f}")
    if needs_math_attention(config, model_config):
        rows, width = largest_micro_batch(config, max_prompt_tokens)
        scores = rows * model_config.num_attention_heads * width**2 * 4
        print("float32 with grouped-query attention has no fused kernel on CUDA for whole rows: the"
              f" scores of each layer, (rows, heads, T, T), take {scores / GIB:.2f} (counted in"
              " activations)")
    print("not counted: CUDA graphs, fragmentation")
    largest = max(by_phase, key=lambda phase: by_phase[phase].total)
    peak = by_phase[largest].total / GIB
    advice = "" if peak <= gib else f"; for the phase {largest} try {TRY[largest]}"
    print(f"peak {peak:.2f}: {'fits' if peak <= gib else 'does NOT fit'} {gib:g} GiB{advice}")
    return peak <= gib


@dataclass(frozen=True)
class Options(Config):
    """The options of train.py, and the memory of the GPU."""

    gib: float = 80.0  # Memory of the GPU in GiB; the command says whether the run fits.

    def __post_init__(self):
        super().__post_init__()
        POSITIVE.check(self, "gib")


def main(arguments: list[str] | None = None) -> None:
    with one_sentence(2):
        config = tyro.cli(Options, args=arguments, description=__doc__)
        toy, longest = config.run.model == "toy", config.data.max_prompt_tokens
        name = config.run.model
        with stage(f"reading a model folder or a reachable hub name, {name},"):
            model_config = toy_config(config.run.task) if toy else AutoConfig.from_pretrained(name)
        if longest is None:
            with stage("max_prompt_tokens must be given if there is no tokenizer; loading it"):
                tokenizer = toy_tokenizer() if toy else load_tokenizer(config.run.model)
            longest = max(map(len, encode(tokenizer, find_task(config)).prompts))
        print_plan(config, model_config.get_text_config(), longest, config.gib)


if __name__ == "__main__":
    main()
