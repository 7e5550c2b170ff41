"""The verdict on a step's rollouts: layer, cause and repair of a mismatch, or "unexplained"."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from engine_adapter import Rollout, Sampling
from probe import causes
from probe.causes import Cause
from probe.replay import Weights
from probe.search import Explanation, Probe, size_of
from rl import Policy


# ---------------------------------------------------------------------------------- verdict
@dataclass
class Verdict:
    """What the probe found."""

    probe: Probe
    causes: list[Cause]  # none: parity or unexplained
    explanations: list[Explanation]  # all hypotheses tried, the best first

    def __post_init__(self):
        probe = self.probe
        mismatch = size_of(probe.recomputed - probe.reported).nanmean().item()
        self.figures = (f"mean |mismatch| {mismatch:.1e} nats, error of the engine"
                        f" {probe.start.mean:.1e}, of the trainer {probe.start.trainer_error:.1e}")
        unnamed = "parity" if self.explanations[0].fits else "unexplained"
        self.status = "mismatch" if self.causes else unnamed
        named = "; and ".join(f"{cause.layer}: {cause.name}" for cause in self.causes)
        self.blamed = named or unnamed

    @property
    def sentence(self) -> str:
        """The verdict in words, with repairs and figures."""
        parts = [self.blamed]
        if self.causes:
            parts.append("Repair: " + "; ".join(dict.fromkeys(each.repair for each in self.causes)))
        parts.append(self.figures)
        if self.status == "unexplained":
            parts.append("Next: python -m probe layers says which layer of the model differs")
        if causes.WRONG_REQUESTS in self.causes:
            rows = self.explanations[0].wrong.nonzero()[:, 0].tolist()
            parts.append(f"Requests wrong: {', '.join(map(str, rows))}")
        return ". ".join(parts)

    @property
    def report(self) -> str:
        """All hypotheses, each at its best (*: it fits), and the sentence."""
        rows = {}
        for each in self.explanations:
            rows.setdefault(each.name, each)
        lines = [f"{len(self.probe.reported)} tokens",
                 f"{'hypothesis':<72} {'error':>8} {'limit':>8}"]
        for name, each in rows.items():
            lines.append(f"{'*' if each.fits else ' '}{name[:70]:<71} {each.mean:8.1e}"
                         f" {each.allowed:8.1e}")
        return "\n".join([*lines, f"=> {self.sentence}"])


@torch.no_grad()
def diagnose(
    policy: Policy, rollouts: list[Rollout], sampling: Sampling,
    before: Weights | None = None, block: int = 0,
    trainer: Literal["processed", "temperature"] = "processed", observed: Sequence[Cause] = (),
) -> Verdict:
    """Explain how the rollouts' log-probabilities differ from the trainer's own of their tokens.

    `before` are the trainer's weights before its last update, by parameter name. `block` is the
    number of tokens in a block of the engine's prefix cache, 0 without one. `trainer` is the
    distribution that the trainer scores: all sampling parameters, or the temperature alone
    (train.py without sampling_mask). `observed` are causes already known. The policy's weights do
    not change.
    """
    probe = Probe(policy, rollouts, sampling, before, block, trainer)
    explanations = probe.search()
    best = explanations[0]
    named = list(observed)
    if best.fits:
        named += best.causes
        if probe.trainer.head != torch.float32 and best.readout.head == torch.float32:
            named.append(causes.HEAD.of("in the trainer"))
        if best.wrong.any():
            named.append(causes.WRONG_REQUESTS)
    return Verdict(probe, named, explanations)


# ---------------------------------------------------------------------------------- a live engine
# Metrics of a step, of its rollouts with current weights, and the values above which train.py
# probes the engine (--probe-on-alarm).
ALARMS = {
    "mismatch_kl": 1e-3,  # k3; healthy bfloat16 rollouts stay below it (verl, prime-rl)
    "ess_loss": 0.02,  # 1 - ess; smoke checks of verl users require an ess of 0.98
    # Of clean runs in bfloat16 the largest are 0.0016 and 0.0004 (docs/probe.md).
    "backend_clip_rate": 0.005,
    "backend_ratio_error": 0.005,
    "kept_mass_error": 0.01,  # |engine_kept_mass - kept_mass|; clean bfloat16 steps: 0.0005
    "surprisal_z": 5.0,  # 542 clean steps: at most 2.7
}
NARROW_CLIP = 0.1  # bounds below it, such as GSPO's 4e-4, are left by the rounding of 16 bits alone


def alarms(metrics: dict[str, Any], clip_high: float) -> list[str]:
    """The names of the ALARMS that a step exceeds."""
    if metrics.get("current_ess") is None:
        return []
    values = {"mismatch_kl": metrics["current_mismatch_kl"],
              "ess_loss": 1 - metrics["current_ess"],
              "backend_ratio_error": abs(1 - metrics["backend_ratio_mean"])}
    if clip_high >= NARROW_CLIP:
        values["backend_clip_rate"] = metrics["backend_clip_rate"]
    # Old weights have masked otherwise too.
    if "engine_kept_mass" in metrics and not metrics.get("staleness_max"):
        values["kept_mass_error"] = abs(metrics["engine_kept_mass"] - metrics["kept_mass"])
    if "groups_in_flight" not in metrics:  # with them short responses end first
        values["surprisal_z"] = abs(metrics.get("surprisal_z", 0.0))
    return [name for name, value in values.items() if not value <= ALARMS[name]]


class StepProbe:
    """Observes the steps of train.py: probes what a step has sampled, and asks the engine nothing.

    The rollouts that the weights before the update have sampled alone are compared with these
    weights, and with those one update earlier. So a probed run is the run without the probe.
    """

    def __init__(self, sides: Any, options: Any):
        self.run, self.options = sides.run, options
        self.policy, self.engine = sides.policy, sides.engine
        self.weights = self.policy.copied_weights()  # before the update
        self.before: Weights | None = None  # and before the one before it

    def __call__(self, step: Any) -> dict[str, str]:
        """The status for the step's metrics, {} without a probe.

        A step is probed if it is planned or its metrics exceed ALARMS. Writes the report to
        probe/step_N.txt in the run's folder and prints a line.
        """
        number = step.metrics["step"]
        exceeded = alarms(step.metrics, self.run.config.clip[1])
        planned = self.options.probe_every and (number - 1) % self.options.probe_every == 0
        status = {}
        if planned or (exceeded and self.options.probe_on_alarm):
            status = self._probe(step, exceeded)
        if step.metrics["updates"]:
            self.before, self.weights = self.weights, self.policy.copied_weights()
        return status

    def _probe(self, step: Any, exceeded: list[str]) -> dict[str, str]:
        run = self.run
        current = step.current
        number = step.metrics["step"]
        why = f"alarm of {', '.join(exceeded)}" if exceeded else "as planned"
        title = f"probe after step {number} ({why})"
        rollouts = [_sampled_part(rollout) for rollout, mask
                    in zip(current.rollouts, current.mask, strict=True) if mask.any()]
        if not rollouts:
            print(f"{title}: no rollout of the weights before it alone")
            return {"probe": "no rollouts"}
        scored = "processed" if getattr(run.sampling, "max_kept", 0) else "temperature"
        observed = []
        if exceeded == ["surprisal_z"]:  # a fault of the reported values moves it too
            observed = [causes.SAMPLER]
        block = self.engine.settings.get("block_size", 0)  # transformers has no blocks
        with self.policy.using(self.weights):
            verdict = diagnose(
                self.policy, rollouts, run.sampling, self.before, block, scored, observed)
        path = run.out / "probe" / f"step_{number:06d}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{title}\n{verdict.report}\n")
        print(f"{title}: {verdict.blamed}. {verdict.figures}")
        return {"probe": verdict.blamed}


def _sampled_part(rollout: Rollout) -> Rollout:
    """The response up to the first word of an environment, which the engine did not sample."""
    end = rollout.trained.index(False) if False in rollout.trained else None
    return Rollout(rollout.prompt_ids, None, rollout.token_ids[:end], rollout.logprobs[:end])
