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

MOST_ROWS = 64  # responses of a step: a probe's time is bounded
# Times the noise: how much a token counts at most. At a mask's edge, and where a nearly certain
# policy rounds, single tokens are far off.
MOST = 20.0
FEWEST = 4  # tokens of a response that can be wrong as a whole: half of them are far off
MOST_SURPRISAL = 5.0  # 542 clean steps: at most 2.7
# How the engine may have computed what it reports.
FRESH, STALE = "fresh", "prompt KV computed under earlier weights"


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
                lines.append(Line("sampler", HIT, "tokens drawn from another distribution than the"
                                  f" reported one, surprisal_z {surprisal:.1f}", {}))
            metrics["probe"] = verdict(lines)
            path = self.run.out / "probe" / f"step_{number:06d}.txt"
            path.parent.mkdir(exist_ok=True)
            path.write_text("".join(f"{line.name:<10} {line.verdict:<12} {line.text}\n"
                                    for line in lines))
            print(f"probe of step {number}: {metrics['probe']}")
        if step.metrics["updates"]:
            self.before, self.weights = self.weights, self.policy.copied_weights()
        return metrics


def verdict(lines: list[Line]) -> str:
    """The layers that are hit and what was found, in one line; lab/cells.py splits it again."""
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
        if end:
            rows.append((rollout.prompt_ids, rollout.token_ids[:end]))
            reported += rollout.logprobs[:end]
            scored += batch.old_logprobs[row, start : start + end].tolist()
    if not rows:
        return []
    stated = parity.sampling_of(sampling)
    sampled = partial(parity.Sampled, policy.model, stated, policy.model.dtype, rows, reported)
    now, block = sampled(), engine.get("block_size")  # transformers has no blocks
    passes = {FRESH: now}
    if before and block and not has_recurrent_layers(policy.model):
        passes[STALE] = sampled(before, block)
    heads = engine["head_dtype"], parity.name_of(policy.head.dtype)
    engine_noise, trainer_noise = (
        now.noise.get(head, now.noise[parity.IN_16_BITS]) for head in heads)
    errors = {(how, name): parity.size_of(each.reported - each.values[name])  # (N,)
              for how, each in passes.items() for name in parity.hypotheses(stated)}

    # Which distribution the engine reports.
    how, nearest = min(errors, key=lambda each: errors[each].nanmean())
    by_processed, by_nearest = errors[how, PROCESSED], errors[how, nearest]
    reports = nearest if parity.beyond_chance(by_processed - by_nearest) else PROCESSED

    # Whether some prompts come from a stale cache: it must explain all, and fresh values must not.
    fresh, stale = errors[FRESH, reports], errors[how, reports]
    remaining, if_stale = (multiples(each, now.values[reports], engine_noise)
                           for each in (fresh, torch.fmin(fresh, stale)))
    is_stale = if_stale.nanmean() < parity.NOISE <= remaining.nanmean()
    if is_stale:
        remaining = if_stale
    times = remaining.nanmean().item()
    by_response = remaining.split([len(response) for _, response in rows])
    wrong = [row for row, each in enumerate(by_response)
             if len(each) >= FEWEST and each.nanmean() >= MOST / 2]

    distribution = OK if reports == PROCESSED else HIT
    if times > parity.WRONG and by_processed.nanmean() < 2 * by_nearest.nanmean():
        distribution = CANNOT_TELL  # far from each
    lines = [Line("semantics", distribution, f"{reports} log-probabilities", {})]
    if is_stale:
        lines.append(Line("cache", HIT, STALE, {}))
    if {*heads} != {parity.FLOAT32} and now.head_noise_ratio > parity.HEAD:
        lines.append(Line("head", HIT, "{} in the engine and {} in the trainer".format(*heads), {}))

    # Which distribution the trainer scores.
    of_trainer = torch.tensor(scored).double()
    scores, is_sure, by_trainer = now.judged(of_trainer, parity.hypotheses(stated))
    error = parity.size_of(of_trainer - now.values[PROCESSED])
    apart = multiples(error, now.values[PROCESSED], trainer_noise)
    if is_sure and scores != PROCESSED:
        lines.append(Line("trainer", HIT, f"its values are {scores}", by_trainer))
    elif apart.nanmean() >= parity.NOISE:
        lines.append(Line("trainer", CANNOT_TELL, "other values than the model's", by_trainer))
    rest = CANNOT_TELL if wrong or times >= parity.NOISE else OK
    return [*lines, Line("numerics", rest, f"{times:.1f} times the model's own noise; far off are"
                         f" the probed responses {wrong}", {})]


def multiples(error: Tensor, logprobs: Tensor, noise: float) -> Tensor:
    """The error in multiples of each token's noise, which is in proportion to 1 - p: (N,).

    `noise`: the mean over the tokens. A token counts at most MOST.
    """
    others = parity.FLOOR - logprobs.expm1()
    of_token = noise * others / others.mean() + parity.FLOOR / parity.NOISE
    return (error / of_token).clamp(max=MOST)
