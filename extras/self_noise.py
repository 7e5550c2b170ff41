"""`--self-noise-every`: the noise floor is measured during a run, as probe/noise.py computes it."""

from dataclasses import dataclass
from typing import Any

from report.errors import MANY, within


@dataclass(frozen=True)
class Options:
    """The trainer's own noise."""

    self_noise_every: int = 0  # Steps between measurements of the noise floor; 0: none.

    def __post_init__(self):
        within(self, 0, MANY, "self_noise_every")


def check(config: Any, options: Options) -> None:
    if options.self_noise_every and not config.steps:
        raise ValueError("self_noise_every must be off with steps 0 (it measures after a step)")


def install(run: Any, options: Options, parts: Any) -> None:
    def begin(trainer: Any, record: dict[str, Any]) -> None:
        from probe.noise import observe_self_noise

        def observe(step: Any) -> dict[str, float]:
            """Of the updated weights."""
            planned = (step.metrics["step"] - 1) % options.self_noise_every == 0
            return observe_self_noise(trainer.policy, run.config, step.batch) if planned else {}

        parts.observers.append(observe)

    if options.self_noise_every:
        parts.at_begin.append(begin)
