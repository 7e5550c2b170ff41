"""`--probe-every N`: which layer a mismatch comes from, by the rules of verify/parity.py.

What a step has sampled is explained: the engine gets no request, so a probed run is the run without
the probe. docs/probe.md has how it decides, and what it cannot find.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine_adapter import Sampling
from extras import Extra
from extras.shared.kv_cache import has_recurrent_layers
from report.ranges import CountOrZero
from rl import Batch, Policy
from verify import parity
from verify.parity import CANNOT_TELL, HIT, OK, PROCESSED, Line

MOST_ROWS = 64  # of a step; as many tokens as parity.py has
# Times the noise: how much a token counts at most. At a mask's edge, and where a nearly certain
# policy rounds, single tokens are far off.
MOST = 20.0
MOST_SURPRISAL = 5.0  # 542 clean steps: at most 2.7
# How the engine may have computed what it reports.
NOW, STALE = "", "prompt KV computed under earlier weights"


class Options(Extra):
    """Which layer a mismatch comes from, during a run."""

    # Steps between probes of the mismatch, the first included; 0: none.
    probe_every: CountOrZero = 0

    def check(self, config: Any) -> None:
        if self.probe_every and not config.steps:
            raise ValueError("probe_every must be off with steps 0 (it explains what a step has"
                             " sampled)")
        if self.probe_every and config.given & {"lora_rank", "rollout_weights"}:
            raise ValueError("probe_every must be off with lora_rank and rollout_weights (it takes"
                             " the model's own tensors); try verify/parity.py with the saved"
                             " policy")

    def install(self, run: Any) -> None:
        if self.probe_every:
            # It copies the first weights.
            run.at_begin.append(lambda sides, record: run.step_metrics.append(
                StepProbe(sides, self.probe_every)))


class StepProbe:
    """Observes the steps of train.py.

    The rollouts that the weights before the update have sampled alone are compared with these
    weights, and with those one update earlier.
    """

    def __init__(self, sides: Any, every: int):
        self.run, self.policy, self.engine = sides.run, sides.policy, sides.engine
        self.every = every
        self.weights = self.policy.copied_weights()  # before the update
        self.before: dict[str, Tensor] = {}  # and before the one before it

    def __call__(self, step: Any) -> dict[str, str]:
        """The verdict for the step's metrics, {} without a probe.

        Writes the report to probe/step_N.txt in the run's folder and prints a line.
        """
        number, metrics = step.metrics["step"], {}
        if (number - 1) % self.every == 0:
            with self.policy.using(self.weights):
                lines = explain(self.policy, step.current, self.run.sampling,
                                self.engine.settings, self.before)
            # With groups in flight short responses end first.
            surprisal = step.metrics.get("surprisal_z", 0.0)
            if abs(surprisal) > MOST_SURPRISAL and "groups_in_flight" not in step.metrics:
                lines.append(Line("semantics", HIT, "tokens drawn from another distribution than"
                                  f" the reported one, surprisal_z {surprisal:.1f}", {}))
            metrics["probe"] = verdict(lines)
            path = self.run.out / "probe" / f"step_{number:06d}.txt"
            path.parent.mkdir(exist_ok=True)
            path.write_text("\n".join(map(str, lines)) + "\n")
            print(f"probe of step {number}: {metrics['probe']}")
        if step.metrics["updates"]:
            self.before, self.weights = self.weights, self.policy.copied_weights()
        return metrics


def verdict(lines: list[Line]) -> str:
    """The layers that are hit and what was found, in one line."""
    if not lines:
        return "no rollout of the weights before the update alone"
    found = [f"{line.name}: {line.text.partition(',')[0]}" for line in lines if line.verdict == HIT]
    if CANNOT_TELL in [line.verdict for line in lines]:
        found.append("unexplained")
    return "; and ".join(found) or "parity"


@torch.no_grad()
def explain(policy: Policy, batch: Batch, sampling: Sampling, engine: dict[str, Any],
            before: dict[str, Tensor]) -> list[Line]:
    """What the engine reported of the masked rows of a batch, and what the trainer has scored.

    `engine`: the audit's record. `before`: the trainer's weights before its last update, or none.
    The policy has those that the batch was sampled with. Returns the lines of a parity.Report; none
    if no row was sampled with these weights alone.
    """
    rows, reported, scored = [], [], []
    for row in batch.mask.any(dim=1).nonzero()[:MOST_ROWS, 0].tolist():
        rollout = batch.rollouts[row]
        # Up to the first word of an environment, which the engine did not sample.
        end = [*rollout.trained, False].index(False) if rollout.trained else len(rollout.token_ids)
        start = len(rollout.prompt_ids) - 1
        rows.append((rollout.prompt_ids, rollout.token_ids[:end]))
        reported += rollout.logprobs[:end]
        scored += batch.old_logprobs[row, start : start + end].tolist()
    if not rows:
        return []
    stated = parity.sampling_of(sampling)
    sampled = partial(parity.Sampled, policy.model, stated, policy.model.dtype, rows, reported)
    passes, block = {NOW: sampled()}, engine.get("block_size")  # transformers has no blocks
    if before and block and not has_recurrent_layers(policy.model):
        passes[STALE] = sampled(before, block)
    heads = engine["head_dtype"], parity.name_of(policy.head.dtype)
    noise = passes[NOW].noise[
        parity.FLOAT32 if heads[0] == parity.FLOAT32 else parity.IN_16_BITS]
    noise = max(noise, parity.FLOOR / parity.NOISE)
    errors = {(how, name): parity.size_of(each.reported - each.values[name])  # (N,)
              for how, each in passes.items() for name in parity.hypotheses(stated)}

    def left(how: str) -> float:
        """The error that remains, in multiples of the noise. Some prompts may be `how`, others not.
        """
        error = torch.fmin(errors[how, reports], errors[NOW, reports])
        return error.clamp(max=MOST * noise).nanmean().item() / noise

    how, reports = min(errors, key=lambda each: errors[each].nanmean())
    by_processed, error = errors[how, PROCESSED], errors[how, reports]
    if not parity.beyond_chance(by_processed - error):
        reports = PROCESSED
    is_nearer = parity.beyond_chance(errors[NOW, reports] - errors[how, reports])
    if left(how) >= parity.NOISE or not (is_nearer or left(NOW) >= parity.NOISE):
        how = NOW
    times = left(how)

    distribution = OK if reports == PROCESSED else HIT
    if times > parity.WRONG and by_processed.nanmean() < 2 * error.nanmean():
        distribution = CANNOT_TELL  # far from each
    lines = [Line("semantics", distribution, f"{reports} log-probabilities", {})]
    if how:
        lines.append(Line("cache", HIT, how, {}))
    if {*heads} != {parity.FLOAT32} and passes[NOW].by_head > parity.HEAD:
        lines.append(Line("head", HIT, "{} in the engine and {} in the trainer".format(*heads), {}))
    names = {*parity.hypotheses(stated), *parity.SHIFTS}
    scores, is_sure, by_trainer = passes[NOW].judged(torch.tensor(scored).double(), names)
    if is_sure and scores != PROCESSED:
        lines.append(Line("trainer", HIT, f"scores what is {scores}", by_trainer))
    rest = OK if times < parity.NOISE else CANNOT_TELL
    return [*lines, Line("numerics", rest, f"{times:.1f} times the model's own noise", {})]
