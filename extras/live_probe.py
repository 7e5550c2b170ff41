"""`--probe-every`, `--probe-on-alarm`: steps of a run are probed while it trains."""

from dataclasses import dataclass
from typing import Any

from report.errors import MANY, within


@dataclass(frozen=True)
class Options:
    """Which layer a mismatch comes from, during a run."""

    probe_every: int = 0  # Steps between probes of the mismatch, the first included; 0: none.
    probe_on_alarm: bool = False  # Probe after a step that exceeds one of the probe's ALARMS.

    def __post_init__(self):
        within(self, 0, MANY, "probe_every")


def check(config: Any, options: Options) -> None:
    if not (options.probe_every or options.probe_on_alarm):
        return
    if not config.steps:
        raise ValueError("probe_every and probe_on_alarm must be off with steps 0 (they measure"
                         " after a step)")
    if config.given & {"lora_rank", "rollout_weights"}:
        raise ValueError("probe_every and probe_on_alarm must be off with lora_rank and"
                         " rollout_weights (they take the model's own tensors); try"
                         " python -m probe with the saved policy")


def install(run: Any, options: Options, parts: Any) -> None:
    def begin(trainer: Any, record: dict[str, Any]) -> None:  # it copies the first weights
        from probe.diagnose import StepProbe

        parts.observers.append(StepProbe(trainer, options))

    if options.probe_every or options.probe_on_alarm:
        parts.at_begin.append(begin)
