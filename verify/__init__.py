"""What is checked of an engine, and when: as it starts, in force, around a load, after a load.

An `engine` is an engine_adapter.Engine, but nothing here imports the engine's file. proof.py can
also stand alone, beside another trainer. The comparison of both sides with the stated distribution
is in distribution.py.
"""

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from report.errors import MANY, SMALLEST, within
from verify import batch, buffers, canary, experts, model_cases  # noqa: F401
from verify.errors import WeightLoadError
from verify.proof import differing
from verify.settings import audit  # noqa: F401  # a check like the others
from verify.start import check_machine, reason, start_errors  # noqa: F401


@dataclass(frozen=True)
class Options:
    """How an engine is checked."""

    # Loads within which each tensor of the engine is compared with what was sent, bit for bit. The
    # first two loads compare all.
    verify_loads: int = 16
    # Largest mean |trainer - engine| of the canary; if not given, 1e-4; in 16 bits it is measured.
    canary_nats: float | None = None
    allow_untested_vllm: bool = False  # Try another version than 0.26 to 0.33.

    def __post_init__(self):
        within(self, 1, MANY, "verify_loads")
        within(self, SMALLEST, 100, "canary_nats")


USUAL = Options()


@dataclass
class Checked:
    """What the checks of one engine remember."""

    constants: dict[str, Tensor]  # copies of its buffers, which no load may change
    canary_limits: dict[int, float] = field(default_factory=dict)  # measured, by a prompt's length
    loads: int = 0
    limit: float = canary.NATS  # the largest of its canaries, in nats


def at_start(engine: Any) -> Checked:
    """Of vLLM's model with random weights. Raises: ValueError if vLLM cannot compute it rightly."""
    model_cases.refuse_or_repair(engine.vllm_model, engine.dtype, engine.tensor_names)
    canary.sample(engine)  # a model that vLLM cannot compute fails here
    first = {name: tensor.clone() for name, tensor in buffers.buffers(engine).items()}
    return Checked(first)


def check_names(engine: Any, weights: Mapping[str, Tensor]) -> None:
    """Raises: WeightLoadError for other names than at the start."""
    others = weights.keys() ^ engine.tensor_names
    if others:
        raise WeightLoadError("weights must be those that the engine was started for, missing"
                              f" or unknown are {', '.join(sorted(others))}")


@contextmanager
def loading(engine: Any) -> Iterator[set[str]]:
    """Around the transfer of the tensors: the names that vLLM has for them.

    Raises: WeightLoadError if vLLM refuses one.
    """
    packing = nullcontext() if engine.on_gpu else experts.packed_again(engine)
    try:
        with packing:
            yield engine.tensor_names - model_cases.heads_without_a_name(engine)
    except Exception as error:
        raise WeightLoadError("vLLM refused the weights, build a new engine:"
                              f" {reason(error)}") from error


def after_load(
    engine: Any, weights: Mapping[str, Tensor], trainer_logprobs: canary.TrainerLogprobs
) -> dict[str, float]:
    """The proof, the buffers, the canary; returns the seconds of the first and of the others.

    Raises: WeightLoadError if the engine holds other values than were sent, if a buffer has
    changed, or if the canary fails.
    """
    began = time.perf_counter()
    prove(engine, weights)
    proven = time.perf_counter()
    buffers.check(engine)
    canary.check(engine, trainer_logprobs)
    beyond = model_cases.scaled_length(engine, canary.longest(engine))
    if beyond and engine.weight_version == 1:
        canary.check(engine, trainer_logprobs, beyond)
    return {"proof_s": proven - began, "canary_s": time.perf_counter() - proven}


def prove(engine: Any, weights: Mapping[str, Tensor]) -> None:
    """Compare the tensors that the engine holds with those that were sent, bit for bit.

    The first two loads compare all of them, later loads a part, so that each tensor is compared
    again within `verify_loads` loads. Raises: WeightLoadError that names those that differ.
    """
    checked = engine.checked
    every = engine.checks.verify_loads if checked.loads >= 2 else 1
    part = slice(checked.loads % every, None, every)  # of vLLM's modules
    checked.loads += 1
    report = differing(engine.llm, weights, part)
    if report.differing:
        raise WeightLoadError("the engine holds other values than were sent in"
                              f" {', '.join(report.differing)}")
    if checked.loads == 1:  # of all modules
        left = {re.sub(r"\.experts\..*", ".experts", name)
                for name in (*report.not_compared, *report.not_given)}
        engine.settings["not_proven"] = sorted(left - model_cases.tied_heads(engine))
