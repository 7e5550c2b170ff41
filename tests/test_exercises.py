"""exercises/: the core's functions pass the students' tests, and traps that public code fell into turn one red."""

import inspect
import re

import numpy
import pytest
import torch
from helpers import parametrize

import objectives
import rl
from engine_adapter import Rollout
from exercises import functions, mystery
from exercises import test_functions as student
from extras.sampling_mask import mask_outside
from report import metrics
from verify.parity import dtype_of_values


# ------------------------------------------------------------------------------------------------ the core's functions
def shift_and_pad(*given):
    rollouts = [Rollout(prompt, None, ids, [*map(dict.get, found, ids)])
                for prompt, ids, found in zip(*given, strict=True)]  # fmt: skip
    batch = rl.make_batch(rollouts)
    return batch.inputs, batch.targets, batch.mask, batch.behavior_logprobs


def group_advantages(*given):
    return objectives.group_advantages(*given, None)


def token_logprobs(hidden, weight, targets, temperature, kept):
    head = rl.Head(weight, None, 1.0, None, 100, temperature, torch.float32)
    return head.logprobs(hidden, targets, lambda logits, chunk: mask_outside(logits, kept[chunk]))


def clipped_loss(*given):
    return objectives.grpo(*given[:4], given[4:]).loss * given[3]


def accumulate(losses, mask, micro_batches):
    logged = 0.0
    for rows in micro_batches:
        loss = (losses(rows) * objectives.loss_weights(mask, "token", 1)[rows]).sum()
        loss.backward()
        logged += loss.item()
    return logged


def importance_weights(*policies, two_policy):
    tis = "off" if two_policy else "token"
    return objectives.CORRECTIONS[tis](*policies)


def mismatch_figures(*policies):
    return metrics.of_mismatch(*policies)


def audit_head(engine, asked):
    found = dtype_of_values(engine.logits(), torch.bfloat16)
    if asked not in (None, found):
        raise RuntimeError(f"{asked} was asked, {found} is in force")
    return found


# ------------------------------------------------------------------------------------------------ the traps
# A function | its right code | the wrong one | the message of a student's test.
TRAPS = r"""# Token 0 outside the mask.
rl.make_batch | torch.float32)[:, 1:] | torch.float32)[:, 1:] * (ids[:, 1:] != 0) | response 5 0
# Probability 1 outside the mask; the response where its first token is.
rl.make_batch | mask=mask | mask=(logprobs[:, 1:] != 0).float() | response 5 0
shift_and_pad | batch.mask | batch.mask.roll(-1) | response 5 0
# The std of equal rewards.
objectives.centre | groups - first | groups | carry no signal
# The product in 16 bits; a full softmax under top-k.
token_logprobs | torch.float32 | torch.bfloat16 | more digits than bfloat16
token_logprobs | mask_outside(logits, kept[chunk]) | logits | kept \[\[0, 2], \[1, 2]]
# 0 times infinity outside the mask.
objectives.grpo | (logprobs - denominator) * mask | (logprobs - denominator) | losses at the ratios
# A bound for a negative advantage; a lower one for weights.
clipped_loss | objectives.grpo(*given[:4] | objectives.grpo(given[0].clamp(max=0.47), *given[1:4] | losses at the ratios
objectives.truncated | .clamp(max=cap) | .clamp(cap**-2, cap) | weights of the ratios 0.01
# Another epsilon; inputs padded with 1.
objectives.group_advantages | 1e-4 | 1e-8 | 1e-4 apart
rl.make_batch | inputs=ids[:, :-1] | inputs=ids[:, :-1] + (ids[:, :-1] == 0) | first and last input
# A normaliser per micro-batch; the loss of the last one.
accumulate | (mask, "token", 1)[rows] | (mask[rows], "token", 1) | gradient of .* \[\[1], \[0]]
accumulate | += loss | = loss | loss of .* \[\[1], \[0]]
# A weight with gradient; a weight on top of a two-policy ratio.
objectives.truncated | ratio.detach() | ratio | a weight is a constant
importance_weights | "off" | "token" | no second correction
# KL the wrong way round.
metrics.of_mismatch | (old_logprobs - behavior | (behavior_logprobs - old | mismatch_kl
# The largest of one side; a mean of means.
metrics.of_mismatch | mismatch.abs().max() | mismatch.neg().max() | mismatch_max at the ratios trainer / engine 2
metrics.of_mismatch | mismatch.abs().mean() | mismatch[[0, 1, 2, 2]].abs().mean() | mismatch_abs_mean
# The dtype after the cast.
audit_head | if asked | if (found := str(engine.logits().dtype)[6:]) and asked | no error"""


def red(monkeypatch):
    """Messages of the students' tests that are red with the core's functions, as they are now."""
    found = []
    for name in re.findall(r"^def (\w+)", inspect.getsource(functions), re.M):
        monkeypatch.setattr(functions, name, globals()[name])
        try:
            getattr(student, f"test_{name}")()
        except (AssertionError, pytest.fail.Exception) as error:
            found.append(str(error))
    return found


def test_all_is_green_with_the_cores_functions_and_no_solution_is_shipped(monkeypatch):
    assert red(monkeypatch) == []
    assert inspect.getsource(functions).count("raise NotImplementedError") == 8


@parametrize("trap", [line for line in TRAPS.splitlines() if line[0] != "#"])
def test_a_trap_turns_one_test_red_whose_message_names_it(trap, monkeypatch):
    name, right, wrong, message = trap.split(" | ")
    function = eval(name)
    world = {**function.__globals__}
    exec(inspect.getsource(function).replace(right, wrong), world)
    monkeypatch.setitem(function.__globals__, function.__name__, world[function.__name__])
    (found,) = red(monkeypatch)
    assert re.search(message, found)


# ------------------------------------------------------------------------------------------------ the mysteries
def test_each_mystery_shows_what_is_off_and_nothing_else():
    for number, fix in enumerate(mystery.ORDER, 1):
        run = numpy.genfromtxt(mystery.HERE / f"mystery-{number}.csv", delimiter=",", names=True)
        mismatch = run["current_mismatch_abs_mean"]
        assert (run["backend_ratio_mean"][0] > 1.01) == (fix == "processed_logprobs")
        assert (mismatch[1] > 5 * mismatch[0]) == (fix == "uncached_runtime")
        assert (run["tokens_wasted"][-1] > 0) == (fix == "inflight_keep")
        assert (mismatch[0] > 1.5 * run["self_noise_abs_mean"][0]) == (fix in ("processed_logprobs", "fp32_head"))
        assert mystery.verdict(number, fix).startswith("Yes. ")
