"""The trainer's half against plain float64 computations that share no code with it."""

import copy
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import DEVICES, config_of, parametrize, qwen2

import objectives
from engine_adapter import Rollout
from extras.offload import OffloadedOptimizer
from extras.prompts_once import policy_options
from objectives import CORRECTIONS, OBJECTIVES
from rl import Head, Optimizer, entropies, longest_first, make_batch, no_restriction
from train import update


# ------------------------------------------------------------------------------------------------ batch
# That each value is at the position that predicts it: test_exercises.py.
def test_rows_of_one_prompt_share_a_micro_batch_where_fewer_positions_are_computed_then():
    """Eight of each prompt. Four fit into a micro-batch."""
    batch = make_batch([Rollout([row % 4] * 100, None, [5] * length, [0.0] * length)
                        for row in range(32) for length in [1 + 3 * row % 32]])
    micro_batches = policy_options(qwen2())["pack"](batch, torch.arange(32), 4 * 131)
    assert sorted(torch.cat(micro_batches).tolist()) == [*range(32)]
    assert [len({*(rows % 4).tolist()}) for rows in micro_batches] == [1] * 8


def test_rows_without_a_signal_have_micro_batches_of_their_own_and_the_longest_come_first():
    batch = make_batch([Rollout([1], None, [5] * length, [0.0] * length) for length in (9, 3, 7, 5)])
    (minibatch,) = batch.minibatches(torch.tensor([0, 1, 0, 1]) > 0, 1, 100, longest_first)
    assert [rows.tolist() for rows in minibatch] == [[3, 1], [0, 2]]


# ------------------------------------------------------------------------------------------------ head and policy
@parametrize("device", DEVICES)
@parametrize("rows, dtype", [(1, torch.float32), (7, torch.bfloat16), (64, torch.float16)])
def test_the_head_computes_in_float32_in_chunks_of_any_number_of_rows(rows, dtype, device):
    """Soft cap, scale, bias, kept sets, padding and masked tokens: test_architectures.py."""
    ours = [(0.6 * torch.randn(count, 48)).to(device, dtype).requires_grad_() for count in (64, 500)]
    exact = [each.detach().double().requires_grad_() for each in ours]
    truth = torch.distributions.Categorical(logits=exact[0] @ exact[1].T / 0.7)
    targets = torch.randint(500, (64,)).to(device)
    head = Head(ours[1], None, 1.0, None, chunk_elements=500 * rows, temperature=0.7)
    metrics = head.token_metrics(ours[0], targets, no_restriction, (entropies,))
    expected = {"logprobs": truth.log_prob(targets), "entropy": truth.entropy(),
                "varentropy": (truth.probs * (truth.logits + truth.entropy()[:, None]) ** 2).sum(dim=-1)}
    for name, values in expected.items():
        assert (metrics[name] - values).norm() < 1e-5 * values.norm(), name
    loss_weights = torch.randn(64, device=device)
    logprobs = head.logprobs(ours[0], targets, no_restriction)
    assert torch.equal(logprobs, metrics["logprobs"])
    gradients = torch.autograd.grad(logprobs, ours, loss_weights)
    truths = torch.autograd.grad(expected["logprobs"], exact, loss_weights.double())
    rounding = 1e-5 if dtype == torch.float32 else 2**-8  # gradients are stored in it
    for gradient, truth in zip(gradients, truths, strict=True):
        assert (gradient - truth).norm() < rounding * truth.norm()


def test_a_gpu_multiplies_16_bit_states_on_tensor_cores_and_does_not_round_wider_ones(monkeypatch):
    """CPU tensors are taken for a GPU's: torch has no product of 16-bit numbers with a 32-bit sum on a CPU."""
    def mm(left, right, out_dtype):
        products.append(left.dtype)
        return left.to(out_dtype) @ right.to(out_dtype)

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", lambda total, *factors, out, **dtype: out.add_(mm(*factors, **dtype)))
    weight = torch.nn.Parameter((torch.randn(500, 48) / 3).bfloat16())
    head, targets = Head(weight, None, 1.0, None, chunk_elements=500 * 7), torch.randint(500, (20,))
    for dtype, count in (torch.bfloat16, 3 * (1 + 3)), (torch.float32, 0):  # 3 chunks: 1 product forward, 3 backward
        products, states = [], torch.randn(20, 48).to(dtype).requires_grad_()
        head.logprobs(states, targets, no_restriction).sum().backward()
        assert products == [torch.bfloat16] * count


# ------------------------------------------------------------------------------------------------ one update, by hand
# Four rows of at most four tokens. Row b has the prompt [b], so (B, T) has B = T.
LENGTHS = [4, 2, 3, 4]
TRAINED = [[True] * 4, [True] * 2, [True] * 3, [True, False, True, True]]
OLD, MISMATCH, MOVED = (torch.tensor([[*map(float, row.split())] for row in rows.split("; ")]) for rows in (
    "-0.5 -1 -0.3 -2; -0.7 -0.2 0 0; -0.1 -0.9 -1.2 0; -0.4 -0.6 -0.8 -0.5",
    "1e-3 -2e-3 1e-3 5e-4; 0.02 -0.03 0 0; 5 -0.1 0.9 0; 1.1 -0.1 -0.7 0.05",
    "0.3 -0.4 0.05 0.1; 0.1 0.2 0 0; -0.3 0.3 0.02 0; 0.25 0.1 -0.3 -0.2"))  # fmt: skip
REJECTED = MISMATCH.abs() > 0.8  # tokens of two rows
CLIPS = {objectives.grpo: (0.2, 0.28), objectives.gspo: (0.05, 0.1), objectives.cispo: (None, 1.2)}


def batch_of_four(advantages, masked=""):
    """Values outside the mask are such that their ratio and their k3 are infinite in fp32."""
    behavior = (OLD - MISMATCH).tolist()
    batch = make_batch([Rollout([b], None, [5] * length, behavior[b][:length], trained=TRAINED[b])
                        for b, length in enumerate(LENGTHS)]).mask_rows([str(b) not in masked for b in range(4)])
    return replace(batch, advantages=advantages, old_logprobs=OLD.where(batch.mask > 0, -200.0),
                   ref_logprobs=(OLD - 0.1).where(batch.mask > 0, 200.0))  # fmt: skip


def updated(table, batch, config, case="", change=None):
    """The metrics. The parameters are the log-probabilities themselves, so a gradient is that of a token's one."""
    minibatches = batch.minibatches(batch.advantages.any(dim=1), 1 + ("halves" in case), 1 if "alone" in case else 99,
                                    longest_first)
    policy = SimpleNamespace(logprobs=lambda micro: table[micro.inputs[:, 0], : micro.mask.shape[1]] * micro.mask)
    reject = (lambda batch: (REJECTED & (batch.mask > 0), batch.mask * ~(REJECTED & ("kept" in case)))
              ) if "reject" in case else None  # fmt: skip
    optimizer = Optimizer(torch.nn.ParameterList([table]), grad_clip=1e9)
    return update(policy, optimizer, batch, minibatches, config, 1e-3, reject, change)


FIGURES = "clip_rate", "ratio_mean", "kl_old_new", "kl_ref"


def sums_by_hand(now, batch, weights, counted, config):
    """Of a minibatch in float64: the loss, FIGURES, and the weight of all tokens. `weights` are 0 on rejected ones."""
    (low, high), row, kept = config.clip, OBJECTIVES[config.objective], weights > 0
    old, to = (values.double().where(counted, now.detach()) for values in (
        batch.behavior_logprobs if config.two_policy else batch.old_logprobs, batch.ref_logprobs))  # fmt: skip
    lengths, rows = counted.sum(dim=1, keepdim=True), len(now)
    share = counted / {"token": lengths.sum(), "sequence": rows * lengths.clamp(min=1),
                       "constant": rows * config.max_new_tokens}[row.normalizer]  # fmt: skip
    of_token = ratio = (now - old).exp()
    if row.surrogate is objectives.gspo:  # the geometric mean
        ratio = ratio.where(kept, 1).prod(dim=1, keepdim=True) ** (1 / kept.sum(dim=1, keepdim=True).clamp(min=1))
    if row.surrogate is objectives.cispo:
        clipped = (ratio > high) & (batch.advantages != 0)
        surrogate = -ratio.detach().clamp(max=high) * batch.advantages * now
    else:  # clipped where a larger gain would go on
        bound = torch.where(batch.advantages > 0, 1 + high, 1 - low)
        clipped = (ratio - bound) * batch.advantages > 0
        surrogate = -batch.advantages * bound.where(clipped, ratio)
    to_old, to_ref = ((other - now).exp() - 1 - (other - now) for other in (2 * now - old, to))
    kl = config.kl_coef * to_ref * (of_token if config.kl_gradient == "exact" else 1)
    terms = weights * surrogate + kl, clipped, of_token, to_old, to_ref, 1.0
    return torch.stack([(share * term).sum() for term in terms])


def check_update(config, case="", masked=""):
    advantages = torch.tensor([[1.3], [-0.7], [0.4], [-1.1]])  # (B, 1)
    if "flat" in case:
        advantages[1] = 0
    if "silent" in case:
        advantages[:2] = 0
    if "tokens" in case:
        advantages = advantages * torch.tensor([1.0, -0.5, 0.0, 2.0])  # (B, T)
    batch = batch_of_four(advantages, masked)
    table, gradients = torch.nn.Parameter(OLD + MOVED), []  # of the backward passes
    table.register_hook(gradients.append)
    metrics = updated(table, batch, config, case)

    kept = (batch.mask > 0) & ~(REJECTED & ("reject" in case))
    weights = kept * CORRECTIONS[config.tis](batch.old_logprobs, batch.behavior_logprobs, batch.mask, config.tis_cap)
    counted = kept if "kept" in case else batch.mask > 0
    now, by_kl, expected = (OLD + MOVED).double().requires_grad_(), 0, []
    minibatches = torch.arange(4).chunk(1 + ("halves" in case))
    for rows in minibatches:
        from_reward = (kept * advantages)[rows].any()
        if from_reward or (config.kl_coef and counted[rows].any()):
            expected.append(sums_by_hand(now[rows], batch.select(rows), weights[rows], counted[rows], config))
            by_kl += not from_reward
    assert metrics["skipped_updates"] == len(minibatches) - len(expected) and metrics["kl_only_updates"] == by_kl
    if not expected:
        assert metrics["loss"] is None and torch.equal(table, OLD + MOVED)
        return
    losses, *figures, weight = torch.stack(expected).T
    assert metrics["loss"] == pytest.approx(losses.mean().item(), rel=1e-4)
    gradient = sum(gradients)  # each row is in one minibatch
    torch.testing.assert_close(gradient.double(), *torch.autograd.grad(losses.sum(), now), atol=1e-6, rtol=1e-4)
    if not config.kl_coef:
        assert not gradient[~kept].any(), "a token that is rejected or not trained has a gradient"
    if "reject" not in case:
        for name, figure in zip(FIGURES, figures, strict=True):
            assert metrics[name] == pytest.approx((figure.sum() / weight.sum()).item(), rel=1e-4, abs=1e-6), name


# What a case adds to one optimizer step for four rows at once, without a KL term: two minibatches (halves), rows one at
# a time (alone), no token or no advantage of row 1 (masked, flat), no advantage in the first minibatch (silent), an
# advantage for each token (tokens), a KL term (k3, exact), rejected tokens (reject), the mean over the others (kept).
CASES = ["", "halves silent", "halves silent k3", "halves alone flat exact", "halves masked tokens k3", "reject k3",
         "halves flat tokens reject kept", "alone masked tokens reject", "alone masked flat exact reject kept"]


@parametrize("tis", CORRECTIONS)
@parametrize("objective", OBJECTIVES)
def test_loss_and_gradient_of_an_update_are_those_of_float64(objective, tis):
    """The gradient of a rejected token, and of one without a loss, is exactly 0."""
    row = OBJECTIVES[objective]
    low, high = (None, None) if objective == "reinforce" else CLIPS[row.surrogate]  # reinforce takes no bounds
    usual = dict(objective=objective, clip_low=low, clip_high=high, max_new_tokens=7)
    weighted = usual if tis == "off" else usual | {"tis": tis, "tis_cap": 1.5}
    for case in CASES:
        gradient = {"kl_coef": 0.3, "kl_gradient": "exact" if "exact" in case else "k3"}
        divergence = gradient if {"k3", "exact"} & {*case.split()} else {}
        check_update(config_of(**weighted, **divergence), case, "1" if "masked" in case else "")
    check_update(config_of(**usual, two_policy=True))
    check_update(config_of(**usual, kl_coef=0.1), masked="0123")


def test_a_changed_micro_batch_has_the_loss_of_ppo_ewma():
    """pi_prox / pi_old min(r A, clip(r) A), r = pi / pi_prox: pi_prox as the old policy, and weighted advantages.

    It has no gradient, although it is computed from the parameters.
    """
    def around(policy, optimizer, micro):
        proximal = 0.5 * policy.logprobs(micro)  # so far that the ratio is clipped in some tokens
        weight = ((proximal - micro.denominator) * micro.mask).exp()
        return replace(micro, denominator=proximal, correction=weight)

    batch, proximal = batch_of_four(torch.tensor([[1.3], [-0.7], [0.4], [-1.1]])), 0.5 * (OLD + MOVED)
    old = replace(batch, old_logprobs=proximal, advantages=batch.advantages * (proximal - OLD).exp())
    found = []
    for given, change in (batch, around), (old, None):
        gradients, table = [], torch.nn.Parameter(OLD + MOVED)
        table.register_hook(gradients.append)
        found.append([torch.tensor(updated(table, given, config_of(), "halves", change)["loss"]), *gradients])
    torch.testing.assert_close(*found)
    with pytest.raises(AssertionError, match=r"micro\.denominator="):
        updated(table, batch, config_of(), change=lambda *given: replace(given[2], denominator=OLD[:1, :1]))


def test_a_step_that_fp16_has_lost_is_no_update():
    table = torch.nn.Parameter((OLD + MOVED).half())
    metrics = updated(table, batch_of_four(torch.full((4, 1), 99.0)), config_of(), case="halves")
    assert (metrics["updates"], metrics["overflowed_updates"], metrics["grad_norm"]) == (0, 2, None)


def test_a_loss_that_is_no_number_stops_the_update_before_the_weights_move_and_the_largest_kl_term_is_named():
    table = torch.nn.Parameter(OLD + MOVED)
    for nats, advantage, reason in (100.0, 1.0, "inf, the .* inf"), (20.0, math.nan, r"nan, the .* 4.9e\+08"):
        batch = batch_of_four(torch.full((4, 1), advantage))
        batch.ref_logprobs[2, 2] = (OLD + MOVED)[2, 2] + nats
        with pytest.raises(FloatingPointError, match=f"the loss is {reason}"):
            updated(table, batch, config_of(kl_coef=0.1))
        assert torch.equal(table, OLD + MOVED)


# ------------------------------------------------------------------------------------------------ optimizer
def one_parameter(dtype, kind=Optimizer, device="cpu"):
    parameter = torch.nn.Parameter(torch.ones(4, dtype=dtype, device=device))
    return parameter, kind(torch.nn.ParameterList([parameter]), grad_clip=0.9)


@parametrize("device", DEVICES)
@parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@parametrize("kind", [Optimizer, OffloadedOptimizer])
def test_masters_add_up_micro_batches_and_take_adamws_steps_in_fp32_also_restored_and_offloaded(kind, dtype, device):
    """Of two micro-batches 16 bits would lose one. Offloaded masters and moments are on the host between updates."""
    parameter, optimizer = one_parameter(dtype, kind, device)
    exact = torch.nn.Parameter(torch.ones(4))
    adamw = torch.optim.AdamW([exact], lr=1e-3, weight_decay=0.0)
    for slopes in ([0.5, 2**-12], [-0.25, 2**-3], [2**-9]):
        with optimizer.on_device():
            for slope in slopes:
                optimizer.backward((slope * parameter.float()).sum())
            norm = optimizer.step(lr=1e-3)
        exact.grad = torch.full((4,), sum(slopes))
        assert norm == pytest.approx(exact.grad.norm().item())
        torch.nn.utils.clip_grad_norm_(exact, optimizer.grad_clip)
        adamw.step()
        values, state = parameter.detach(), copy.deepcopy(optimizer.state_dict())
        parameter, optimizer = one_parameter(dtype, kind, device)
        parameter.data.copy_(values)
        optimizer.load_state_dict(state)
    masters = [master.detach().cpu() for master in optimizer.masters]
    torch.testing.assert_close(masters, [exact.detach()], rtol=0, atol=1e-6)
    assert torch.equal(parameter.detach().cpu(), masters[0].to(dtype))
    if kind is OffloadedOptimizer:
        held = [tensor for state in optimizer.adamw.state.values() for tensor in state.values()]
        assert {each.device.type for each in held + [master for _, master in optimizer.rounded]} == {"cpu"}


def test_fp16_halves_the_scale_after_an_overflow_and_skips_that_step_alone():
    def minibatch(slope):
        optimizer.backward((parameter.float() * slope).sum())
        return optimizer.step(lr=0.1)

    parameter, optimizer = one_parameter(torch.float16)
    assert not math.isfinite(minibatch(1.5))  # 1.5 * 2^16 is beyond fp16
    assert torch.equal(parameter, torch.ones_like(parameter))
    assert minibatch(1.5) == pytest.approx(3.0)  # at half the scale, and unscaled again
    assert parameter[0].item() == pytest.approx(0.9, abs=1e-3)
    tiny = 2.0**-30  # no fp16 number: the scale carries it
    assert minibatch(tiny) == pytest.approx(2 * tiny, rel=1e-3)
    with pytest.raises(FloatingPointError):
        for _ in range(20):
            minibatch(float("nan"))


