"""What is checked of both sides, and when: as the engine starts, and after each load.

Both sides are known here by their classes, and neither imports this folder. proof.py and parity.py
can also stand alone, beside another trainer.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from engine_adapter import Engine, Sampling
from report.ranges import SMALLEST, Count, Range, check_ranges
from rl import Policy
from tasks import Problem
from verify import batch, distribution  # noqa: F401
from verify.agreement import agreement  # noqa: F401
from verify.buffers import buffers, changed_buffers
from verify.canary import Canary
from verify.proof import differing
from verify.settings import audit
from vllm_cases import WeightLoadError, tied_heads


@dataclass(frozen=True)
class Options:
    """How an engine is checked."""

    # Loads within which each tensor of the engine is compared with what was sent, bit for bit. The
    # first two loads compare all.
    verify_loads: Count = 16
    # Largest mean |trainer - engine| of the canary; if not given, 1e-4; in 16 bits it is measured.
    canary_nats: Annotated[float | None, Range(SMALLEST, 100)] = None
    allow_untested_vllm: bool = False  # Try another version than 0.26 to 0.33.

    __post_init__ = check_ranges


class Checks:
    """The checks of one engine. After each load come `prove` and `run_canary`.

    Raises: AuditError if a setting is not in force in the live engine.
    """

    def __init__(self, engine: Engine, options: Options | None = None):
        self.engine, self.options = engine, options or Options()
        engine.settings |= audit(engine)
        self.buffers = {name: tensor.clone() for name, tensor in buffers(engine).items()}
        self.canary = Canary(engine, self.options.canary_nats)
        self.proofs = 0

    def prove(self, weights: Mapping[str, Tensor]) -> None:
        """Compare the tensors that the engine holds with those that were sent, bit for bit, and its
        buffers with those at its start.

        The first two loads compare all of the weights, later loads a part, so that each tensor is
        compared again within `verify_loads` loads. Raises: WeightLoadError that names those that
        differ.
        """
        every, part = self.options.verify_loads, slice(None)  # vLLM's modules: all
        if self.proofs >= 2:
            part = slice(self.proofs % every, None, every)
        self.proofs += 1
        report = differing(self.engine.llm, weights, part)
        if report.differing:
            raise WeightLoadError("the engine holds other values than were sent in"
                                  f" {', '.join(report.differing)}")
        if self.proofs == 1:  # of all modules
            left = {re.sub(r"\.experts\..*", ".experts", name)
                    for name in (*report.not_compared, *report.not_given)}
            self.engine.settings["not_proven"] = sorted(left - tied_heads(self.engine))
        if changed := changed_buffers(self.engine, self.buffers):
            raise WeightLoadError(f"after load {self.engine.weight_version} buffers of the engine"
                                  f" differ from those at its start: {', '.join(sorted(changed))}")
        self.engine.passed("proof")

    def run_canary(self, policy: Policy) -> None:
        """Sample a few tokens, whose log-probabilities the trainer computes too.

        Raises: WeightLoadError if the two differ; ValueError if the trainer's head is at fault.
        """
        self.canary.check(policy)
        self.engine.passed("canary")

    def compare_with_stated(
        self, policy: Policy, problems: list[Problem], sampling: Sampling,
        not_stated: Collection[str],
    ) -> None:
        """Before the first step. Raises: AuditError, as `distribution.check`."""
        distribution.check(policy, self.engine, problems, sampling, not_stated)
