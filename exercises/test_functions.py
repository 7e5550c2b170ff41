"""What each function must return, by figures that were computed by hand."""

from math import log
from types import SimpleNamespace

import numpy
import pytest
import torch

from exercises import functions


def table(text):
    return torch.tensor(numpy.loadtxt(text.split("/"), ndmin=2))


def equal(found, expected, what):
    """Equal up to rounding in float32."""
    numpy.testing.assert_allclose(found, expected, 1e-4, 1e-5, err_msg=what)


def test_shift_and_pad():
    """Prompt 1 5 with response 5 0, which the stop token 0 ends; prompt 3 with response 6."""
    candidates = [[{7: -1.0, 5: -6.0, 8: -3.0}, {0: 0.0}], [{6: -4.0}]]
    found = torch.stack(functions.shift_and_pad([[1, 5], [3]], [[5, 0], [6]], candidates))
    equal(found[:, 0], table("1 5 5 / 5 5 0 / 0 1 1 / 0 -6 0"),
          "inputs, targets, mask, log-probabilities of prompt 1 5 with response 5 0 (0 stops)")
    equal(found[1:, 1], table("6 0 0 / 1 0 0 / -4 0 0"),
          "targets, mask, log-probabilities of prompt 3 with response 6, padded")
    equal(found[0, 1, [0, 2]], [3, 0], "first and last input of prompt 3 with response 6")


def test_group_advantages():
    """Group 3 4 8: -2, -1, 3 divided by sqrt(7); group 4 4 7: -1, -1, 2 divided by sqrt(3)."""
    found = functions.group_advantages(torch.tensor([3.0, 4.0, 8.0, 4.0, 4.0, 7.0]), 3)
    equal(found, table("-0.75590 / -0.37795 / 1.13385 / -0.57732 / -0.57732 / 1.15463"),
          "advantages of the groups 3 4 8 and 4 4 7")
    found = functions.group_advantages(torch.tensor([0.0, 1e-4]), 2)
    equal(found, table("-0.29289 / 0.29289"), "advantages of rewards that are 1e-4 apart")
    for size in range(2, 20):
        found = functions.group_advantages(torch.full([size], 0.1), size)
        assert not found.any(), f"{size} rewards of 0.1 carry no signal: advantages {found}"


def test_token_logprobs():
    """At two temperatures from the whole vocabulary, and from what top-k has kept."""
    hidden = table("8 0.03125 / -8 0.03125").bfloat16()
    weight = table("1 1 / 1 2 / 0.75 1").bfloat16()
    every = [0, 1, 2]
    for temperature, kept, expected in (
        (1.0, [every, every], "-0.773380 -0.242920"),
        (0.5, [every, every], "-0.733718 -0.037115"),
        (0.5, [[0, 2], [1, 2]], "-0.018150 -0.019309"),
    ):
        found = functions.token_logprobs(hidden, weight, torch.tensor([0, 2]), temperature, kept)
        equal(found, table(expected)[0],
              "log-probabilities of token 0 (logits 8.03125, which has more digits than bfloat16,"
              " 8.0625 and 6.03125) and of token 2 (logits -7.96875, -7.9375 and -5.96875),"
              f" temperature {temperature}, kept {kept}")


def test_clipped_loss():
    """Ratios 0.5, 1.1, 4, and exp(900) outside the mask; bounds 0.8 and 1.3."""
    mask, advantages = table("1 1 1 0 / 1 1 1 0"), table("1 / -1")
    logprobs = table("0.5 1.1 4 1 / 0.5 1.1 4 1").log().requires_grad_()
    loss = functions.clipped_loss(logprobs, 900 * (mask - 1), advantages, mask, 0.2, 0.3)
    equal(loss.detach(), table("-0.5 -1.1 -1.3 0 / 0.8 1.1 4 0"),
          "losses at the ratios 0.5, 1.1, 4; advantage 1, then -1; last column: padding")
    loss.sum().backward()
    equal(logprobs.grad, table("-0.5 -1.1 0 0 / 0 1.1 4 0"),
          "gradients at the ratios 0.5, 1.1, 4; advantage 1, then -1; last column: padding")


def test_accumulate():
    for cut in [[0, 1]], [[1], [0]]:
        losses, mask, gradients = table("1 2 / 3 9").requires_grad_(), table("1 1 / 1 0"), []

        def of_rows(rows):
            gradients.append(losses.grad is not None)  # noqa: B023
            return losses[rows]  # noqa: B023

        logged = functions.accumulate(of_rows, mask, [*map(torch.tensor, cut)])
        assert all(gradients[1:]), "a micro-batch's gradient comes before the next one's losses"
        equal(losses.grad, mask / 3, f"gradient of a mean over three tokens, micro-batches {cut}")
        equal(logged, 2, f"loss of the step, a mean over three tokens, micro-batches {cut}")


def test_importance_weights():
    """Ratios 0.01, 3, and a hundred times 0.99; exp(900) outside the mask; the cap is 2."""
    ratios, mask = table("0.01 3" + " 0.99" * 101), table("1 " * 102 + "0")
    given = ratios.log().requires_grad_(), 900 * (mask - 1), mask, 2.0
    found = functions.importance_weights(*given, two_policy=False)
    assert not found.requires_grad, "a weight is a constant: the loss has no gradient through it"
    equal(found, table("0.01 2" + " 0.99" * 100 + " 0"),
          "weights of the ratios 0.01, 3, 0.99, 0.99, ... of one response; the cap is 2")
    equal(functions.importance_weights(*given, two_policy=True), mask,
          "weights where the loss has the ratio pi / mu: it needs no second correction")


def test_mismatch_figures():
    """Ratios trainer / engine 0.5 or 2, and 1.5 in either row; outside the mask 100."""
    for first, kl, ess in (0.5, 0.5 - log(1.125), 3.5**2 / 4.75), (2, 2 - log(4.5), 5**2 / 8.5):
        old, mask = table(f"{first} 1.5 / 1.5 100").log(), table("1 1 / 1 0")
        found = functions.mismatch_figures(old - 2, mask - mask - 2, mask)
        for name, value in {"mismatch_abs_mean": log(4.5) / 3, "mismatch_max": log(2),
                            "mismatch_kl": kl / 3, "ess": ess / 3}.items():
            equal(found[name], value, f"{name} at the ratios trainer / engine {first}, 1.5 / 1.5")


def test_audit_head():
    """Engines that compute in float32 and in bfloat16, whatever they were asked for."""
    values = torch.randn(16, 16)
    for dtype in torch.float32, torch.bfloat16:
        logits, name = (values.to(dtype) @ values.to(dtype)).float, str(dtype)[6:]
        for asked in "float32", "bfloat16", None:
            engine = SimpleNamespace(config={"head_dtype": asked}, logits=logits)
            if asked in (name, None):
                assert functions.audit_head(engine, asked) == name, f"{asked} was asked"
            else:
                with pytest.raises(RuntimeError, match=f"{name}.*{asked}|{asked}.*{name}"):
                    found = functions.audit_head(engine, asked)
                    pytest.fail(f"{asked} asked, {name} in force, no error: found {found}")
