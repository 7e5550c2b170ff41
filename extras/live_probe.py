"""`--probe-every`, `--probe-on-alarm`, `--self-noise-every`: what probe/ measures during a run."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from extras import Extra
from report.errors import MANY, within
from report.metrics import of_mismatch
from rl import Batch, Policy, in_micro_batches, longest_first
from verify.own_noise import precise_body
from verify.parity import wide_dtype


class Options(Extra):
    """Which layer a mismatch comes from, and the trainer's own noise, during a run."""

    probe_every: int = 0  # Steps between probes of the mismatch, the first included; 0: none.
    probe_on_alarm: bool = False  # Probe after a step that exceeds one of the probe's ALARMS.
    self_noise_every: int = 0  # Steps between measurements of the noise floor; 0: none.

    def __post_init__(self):
        within(self, 0, MANY, "probe_every", "self_noise_every")

    @property
    def probes(self) -> bool:
        return self.probe_on_alarm or self.probe_every > 0

    def check(self, config: Any) -> None:
        if self != Options() and not config.steps:
            raise ValueError("probe_every, probe_on_alarm and self_noise_every must be off with"
                             " steps 0 (they measure after a step)")
        if self.probes and config.given & {"lora_rank", "rollout_weights"}:
            raise ValueError("probe_every and probe_on_alarm must be off with lora_rank and"
                             " rollout_weights (they take the model's own tensors); try"
                             " verify/parity.py with the saved policy")

    def install(self, run: Any) -> None:
        if self != Options():
            run.at_begin.append(self._begin)

    def _begin(self, sides: Any, record: dict[str, Any]) -> None:
        from probe.diagnose import StepProbe

        run = sides.run
        if self.probes:
            run.step_metrics.append(StepProbe(sides, self))  # it copies the first weights
        if self.self_noise_every:
            run.step_metrics.append(
                partial(observe_self_noise, sides.policy, run.config, self.self_noise_every))


@torch.no_grad()
def observe_self_noise(policy: Policy, config: Any, every: int, step: Any) -> dict[str, float]:
    """Mean difference of the log-probabilities to those in twice the precision, in nats.

    It is measured with the updated weights, once in `every` steps, the first included.
    """
    batch = step.batch
    # --mask-truncated may leave no token.
    if (step.metrics["step"] - 1) % every or not batch.mask.any():
        return {}
    rows = torch.arange(len(batch.inputs))
    minibatches = [longest_first(batch, rows, config.micro_batch_tokens)]

    def logprobs(policy: Policy, batch: Batch) -> Tensor:
        of_tokens = partial(policy.token_metrics, metrics=())
        return in_micro_batches(of_tokens, batch, minibatches)["logprobs"]

    wide = wide_dtype(policy.model)
    precise = policy.with_(body=precise_body, head=replace(policy.head, dtype=wide))
    exact = logprobs(precise, replace(batch, mask=batch.mask.to(wide)))
    difference = of_mismatch(logprobs(policy, batch), exact, batch.mask)["mismatch_abs_mean"]
    return {"self_noise_abs_mean": difference}
