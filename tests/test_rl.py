"""The trainer's half against plain float64 computations that share no code with it."""

import copy
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import DEVICES, config_of, qwen2

import objectives
from engine_adapter import Rollout
from extras.offload import OffloadedOptimizer
from extras.prompts_once import policy_options
from extras.rejection import REJECTIONS, Rejection
from objectives import CORRECTIONS, OBJECTIVES
from report.metrics import agreement
from rl import Batch, Head, Optimizer, Policy, entropies, head_chunk, in_micro_batches, longest_first, make_batch
from train import Config, TokenFilter, update


# ------------------------------------------------------------------------------------------------ batch
# That each value is at the position that predicts it: test_exercises.py.
def test_rows_of_one_prompt_share_a_micro_batch_where_fewer_positions_are_computed_then():
    """Positions are counted as the model sees them. Their values are in test_architectures.py."""
    model, seen, counts = qwen2(tied=True), [], []
    policy = Policy(model, **policy_options(model))
    lengths = [1 + 11 * row % 29 for row in range(32)]
    batch = make_batch([Rollout([row % 4 + 3] * 100, None, [5] * length, [0.0] * length)
                        for row, length in enumerate(lengths)])
    model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].numel()))
    for pack in (longest_first, policy.pack):
        micro_batches = pack(batch, torch.arange(32), 480)
        assert sorted(torch.cat(micro_batches).tolist()) == list(range(32))
        assert all(len(rows) == 1 or len(rows) * batch.input_lengths[rows].max() <= 480 for rows in micro_batches)
        in_micro_batches(policy.score, batch, [micro_batches])
        counts.append(sum(seen))
        seen.clear()
    assert counts[1] < 0.9 * counts[0]


def test_rows_without_a_signal_have_micro_batches_of_their_own_and_the_longest_come_first():
    batch = make_batch([Rollout([1], None, [5] * n, [0.0] * n) for n in (9, 3, 7, 5, 8, 2, 6, 4)])
    minibatches = batch.minibatches(torch.tensor([0, 1, 0, 1, 1, 0, 0, 1]) > 0, 2, 100)
    assert [[rows.tolist() for rows in micros] for micros in minibatches] == [[[3, 1], [0, 2]], [[4, 7], [6, 5]]]


# ------------------------------------------------------------------------------------------------ head and policy
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("softcap, scale, rows, dtype", [
    (3.0, 0.6, 1, torch.float32), (None, 1.4, 7, torch.bfloat16), (3.0, 0.6, 64, torch.float16),
])
def test_the_heads_values_and_gradients_are_those_of_plain_float64(softcap, scale, rows, dtype, device):
    """In chunks of so many rows. test_architectures.py has kept sets, padding and masked tokens."""
    hidden, weight, bias = torch.randn(64, 48), torch.randn(500, 48) / 3, torch.randn(500) / 7
    targets, loss_weights = torch.randint(500, (64,)).to(device), torch.randn(64).to(device)
    ours = [each.to(device, dtype).requires_grad_() for each in (hidden, weight, bias)]
    exact = [each.detach().double().requires_grad_() for each in ours]
    logits = exact[0] @ exact[1].T + exact[2]
    logits = scale / 0.7 * (logits if softcap is None else softcap * torch.tanh(logits / softcap))
    agrees = torch.arange(64, device=device) % 2
    targets = torch.where(agrees > 0, logits.argmax(dim=-1), targets)
    head = Head(*ours[1:], scale, softcap, chunk_elements=500 * rows, temperature=0.7)
    scores = head.score(ours[0], targets, measures=(entropies, agreement))
    truth = torch.distributions.Categorical(logits=logits)
    assert torch.equal(scores["agrees"], agrees.float())
    expected = {"logprobs": truth.log_prob(targets), "entropy": truth.entropy(),
                "varentropy": (truth.probs * (truth.logits + truth.entropy()[:, None]) ** 2).sum(dim=-1)}
    for name, values in expected.items():
        assert (scores[name] - values).norm() < 1e-5 * values.norm(), name
    gradients = torch.autograd.grad(scores["logprobs"], ours, loss_weights)
    truths = torch.autograd.grad(expected["logprobs"], exact, loss_weights.double())
    rounding = 1e-5 if dtype == torch.float32 else 2**-8  # gradients are stored in it
    for gradient, truth in zip(gradients, truths, strict=True):
        assert (gradient - truth).norm() < rounding * truth.norm()


def test_the_head_computes_a_64th_of_a_gpus_memory_at_once_and_on_a_cpu_2_to_the_25():
    assert [head_chunk(gib).bit_length() - 1 for gib in (0, 8, 15.9, 16, 24, 80, 999)] == [25, 25, 25, 26, 26, 28, 28]


# ------------------------------------------------------------------------------------------------ one update, by hand
# Four rows of at most four tokens. Row b has the prompt [b], so (B, T) has B = T.
LENGTHS = [4, 2, 3, 4]
TRAINED = [[True] * 4, [True] * 2, [True] * 3, [True, False, True, True]]
OLD, MISMATCH, MOVED = (torch.tensor([[*map(float, row.split())] for row in rows.split("; ")]) for rows in (
    "-0.5 -1 -0.3 -2; -0.7 -0.2 0 0; -0.1 -0.9 -1.2 0; -0.4 -0.6 -0.8 -0.5",
    "1e-3 -2e-3 1e-3 5e-4; 0.02 -0.03 0 0; 5 -0.1 0.9 0; 1.1 -0.1 -0.7 0.05",
    "0.3 -0.4 0.05 0.1; 0.1 0.2 0 0; -0.3 0.3 0.02 0; 0.25 0.1 -0.3 -0.2"))  # fmt: skip
CLIPS = {objectives.grpo: (0.2, 0.28), objectives.gspo: (0.05, 0.1), objectives.cispo: (None, 1.2)}


def batch_of_four(advantages: torch.Tensor, keep: tuple[bool, ...] = (True,) * 4) -> Batch:
    """Values outside the mask are such that their ratio and their k3 are infinite in fp32."""
    behavior = (OLD - MISMATCH).tolist()
    batch = make_batch([Rollout([b], None, [5] * length, behavior[b][:length], trained=TRAINED[b])
                        for b, length in enumerate(LENGTHS)]).mask_rows(list(keep))  # fmt: skip
    return replace(batch, advantages=advantages, old_logprobs=OLD.where(batch.mask > 0, -200.0),
                   ref_logprobs=(OLD - 0.1).where(batch.mask > 0, 200.0))  # fmt: skip


def updated(
    table: torch.nn.Parameter, batch: Batch, config: Config, num_minibatches: int = 1,
    micro_batch_tokens: int = 4096, reject: TokenFilter | None = None,
) -> dict:
    """The metrics. The parameters are the log-probabilities themselves, so a gradient is that of a token's one."""
    minibatches = batch.minibatches(batch.advantages.any(dim=1), num_minibatches, micro_batch_tokens)
    policy = SimpleNamespace(score=lambda micro: {
        "logprobs": table[micro.inputs[:, 0], : micro.mask.shape[1]] * micro.mask})  # fmt: skip
    optimizer = Optimizer(torch.nn.ParameterList([table]), grad_clip=1e9)
    return update(policy, optimizer, batch, minibatches, config, 1e-3, reject)


def sums_by_hand(
    now, rows: range, batch: Batch, weights, kept, counted, config: Config
) -> dict[str, torch.Tensor]:
    """Loss and weighted diagnostics of a minibatch, token by token in float64."""
    (low, high), row = config.clip, OBJECTIVES[config.objective]
    old = (batch.behavior_logprobs if config.two_policy else batch.old_logprobs).double()
    sums = dict.fromkeys(("loss", "clip_rate", "ratio_mean", "kl_old_new", "kl_ref", "weight"), 0.0)
    for b, t in counted.nonzero().tolist():
        if b not in rows:
            continue
        share = {"token": 1 / counted[rows].sum(), "sequence": 1 / (len(rows) * counted[b].sum()),
                 "constant": 1 / (len(rows) * config.max_new_tokens)}[row.normalizer]  # fmt: skip
        log_ratio, advantage = now[b, t] - old[b, t], batch.advantages.expand(4, 4)[b, t]
        ratio, to_ref = log_ratio.exp(), batch.ref_logprobs[b, t] - now[b, t]
        if row.surrogate is objectives.gspo and kept[b].any():
            ratio = (now[b] - old[b])[kept[b]].mean().exp()
        if row.surrogate is objectives.cispo:
            clipped = ratio > high and advantage != 0
            surrogate = -min(ratio.item(), high) * advantage * now[b, t]
        else:
            clipped = ratio > 1 + high if advantage > 0 else advantage < 0 and ratio < 1 - low
            surrogate = -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
        divergence = torch.expm1(to_ref) - to_ref
        kl = config.kl_coef * divergence * (log_ratio.exp() if config.kl_gradient == "exact" else 1)
        loss = kept[b, t] * weights[b, t] * surrogate + kl
        terms = loss, clipped, log_ratio.exp(), torch.expm1(log_ratio) - log_ratio, divergence, 1.0
        for name, term in zip(sums, terms, strict=True):
            sums[name] += share * term
    return sums


def check_update(config: Config, case: list[str], reject: Rejection | None = None) -> None:
    advantages = torch.tensor([[1.3], [-0.7], [0.4], [-1.1]])  # (B, 1)
    if "flat" in case:
        advantages[1] = 0
    if "silent" in case:
        advantages[:2] = 0
    if "tokens" in case:
        advantages = advantages * torch.tensor([1.0, -0.5, 0.0, 2.0])  # (B, T)
    some = "no rows" not in case
    batch = batch_of_four(advantages, (some, some and "masked" not in case, some, some))
    table, gradients = torch.nn.Parameter(OLD + MOVED), []  # of the backward passes
    table.register_hook(gradients.append)
    num_minibatches = 1 + ("halves" in case)
    metrics = updated(table, batch, config, num_minibatches, 1 if "alone" in case else 4096, reject)

    sides = batch.old_logprobs, batch.behavior_logprobs, batch.mask
    weights = CORRECTIONS[config.tis](*sides, config.tis_cap)
    rejected, counted = reject(batch) if reject else (batch.mask > 1, batch.mask)
    kept, counted = (batch.mask > 0) & ~rejected, counted > 0
    assert (0 < rejected.sum() < 12) == bool(reject)
    now, width, expected, by_kl = (OLD + MOVED).double().requires_grad_(), 4 // num_minibatches, [], 0
    for first in range(0, 4, width):
        rows = range(first, first + width)
        from_reward = (kept * advantages)[rows].any()
        if from_reward or (config.kl_coef and counted[rows].any()):  # else no step
            expected.append(sums_by_hand(now, rows, batch, weights, kept, counted, config))
            by_kl += not from_reward
    assert (metrics["skipped_updates"], metrics["kl_only_updates"]) == (num_minibatches - len(expected), by_kl)
    if not expected:
        assert metrics["loss"] is None and torch.equal(table, OLD + MOVED)
        return
    losses = [each["loss"] for each in expected]
    assert metrics["loss"] == pytest.approx(sum(losses).item() / len(losses), rel=1e-4)
    gradient = sum(gradients)  # each row is in one minibatch
    torch.testing.assert_close(gradient.double(), *torch.autograd.grad(sum(losses), now), atol=1e-6, rtol=1e-4)
    if not config.kl_coef:
        assert not gradient[~kept].any(), "a token that is rejected or not trained has a gradient"
    if not reject:
        for name in ("clip_rate", "ratio_mean", "kl_old_new", "kl_ref"):
            by_hand = sum(each[name] for each in expected) / sum(each["weight"] for each in expected)
            assert metrics[name] == pytest.approx(by_hand.item(), rel=1e-4, abs=1e-6), name


# What a case adds to one optimizer step for four rows at once, without a KL term: two minibatches (halves), rows one at
# a time (alone), no token or no advantage of row b (masked, flat), no advantage in the first minibatch (silent), an
# advantage for each token (tokens), a KL term (k3, exact), the mean over kept tokens (kept). Each case meets each
# objective and each rule; the weights take turns.
CASES = ["", "halves silent", "halves silent k3", "halves alone flat exact", "halves masked tokens k3",
         "halves flat tokens kept", "alone masked tokens kept", "alone masked flat exact kept"]  # fmt: skip


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("rule", ["off", *REJECTIONS])
def test_loss_and_gradient_of_an_update_are_those_of_a_float64_loop(objective, rule):
    """The gradient of a rejected token, and of one without a loss, is exactly 0."""
    row = OBJECTIVES[objective]
    low, high = (None, None) if objective == "reinforce" else CLIPS[row.surrogate]  # reinforce takes no bounds
    usual = dict(objective=objective, clip_low=low, clip_high=high, max_new_tokens=7)
    for turn, words in enumerate(CASES, [*REJECTIONS, "off"].index(rule)):
        case, tis = words.split(), [*CORRECTIONS][turn % 3]
        options = usual | {"tis": tis} | ({} if tis == "off" else {"tis_cap": 1.5})
        gradient = {"k3", "exact"} & {*case}
        if gradient:
            options |= {"kl_coef": 0.3, "kl_gradient": gradient.pop()}
        reject = None
        if rule != "off":
            reject = REJECTIONS[rule]._replace(mean="kept" if "kept" in case else "all")
        check_update(config_of(**options), case, reject)
    if rule == "off":
        check_update(config_of(**usual, two_policy=True), [])
        check_update(config_of(**usual, kl_coef=0.1), ["no rows"])


def test_a_step_that_fp16_has_lost_is_no_update():
    table = torch.nn.Parameter((OLD + MOVED).half())
    metrics = updated(table, batch_of_four(torch.full((4, 1), 99.0)), config_of(), num_minibatches=2)
    assert (metrics["updates"], metrics["overflowed_updates"], metrics["grad_norm"]) == (0, 2, None)


def test_the_largest_kl_term_is_a_metric_and_a_loss_that_is_no_number_stops_the_update_before_the_weights_move():
    table, batch = torch.nn.Parameter(OLD + MOVED), batch_of_four(torch.ones(4, 1))

    def far(nats: float) -> Batch:
        """One token is so many nats below the reference."""
        reference = batch.ref_logprobs.clone()
        reference[2, 2] = (OLD + MOVED)[2, 2] + nats
        return replace(batch, ref_logprobs=reference)

    config, not_a_number = config_of(kl_coef=0.1), replace(batch, advantages=torch.full((4, 1), math.nan))
    for wrong, reason in (far(100.0), "inf, the largest KL of a token inf"), (not_a_number, "nan"):
        with pytest.raises(FloatingPointError, match=f"the loss is {reason}"):
            updated(table, wrong, config)
        assert torch.equal(table, OLD + MOVED)
    table.grad = None
    metrics = updated(table, far(20.0), config, micro_batch_tokens=1)
    assert metrics["kl_ref_max"] == pytest.approx(math.expm1(20) - 20, rel=1e-4)


# ------------------------------------------------------------------------------------------------ optimizer
def one_parameter(
    dtype: torch.dtype, kind: type = Optimizer, device: str = "cpu"
) -> tuple[torch.nn.Parameter, Optimizer]:
    parameter = torch.nn.Parameter(torch.ones(4, dtype=dtype, device=device))
    return parameter, kind(torch.nn.ParameterList([parameter]), grad_clip=1e9)


def test_bf16_masters_add_up_steps_too_small_for_bf16_and_micro_batches_in_fp32():
    parameter, optimizer = one_parameter(torch.bfloat16)
    for _ in range(100):  # bf16 alone cannot leave 1.0 by steps of 1e-4: its spacing there is 4e-3
        optimizer.backward(parameter.sum())
        optimizer.step(lr=1e-4)
    assert parameter[0].item() == pytest.approx(0.99, abs=4e-3)
    assert optimizer.masters[0][0].item() == pytest.approx(0.99, abs=1e-4)
    for gradient in [1.0] + [2**-10] * 64:  # bf16 has 8 bits: 1 + 2^-10 is 1 there
        optimizer.backward(gradient * parameter.sum())
        assert parameter.grad is None
    assert optimizer.masters[0].grad[0].item() == 1 + 64 * 2**-10


def test_fp16_halves_the_scale_after_an_overflow_and_skips_that_step_alone():
    def minibatch(slope: float) -> float:
        optimizer.backward((parameter.float() * slope).sum())
        return optimizer.step(lr=0.1)

    parameter, optimizer = one_parameter(torch.float16)
    assert not math.isfinite(minibatch(1.5))  # 1.5 * 2^16 is beyond fp16
    assert torch.equal(parameter, torch.ones_like(parameter))
    assert minibatch(1.5) == pytest.approx(3.0)  # at half the scale, and unscaled again
    assert parameter[0].item() == pytest.approx(0.9, abs=1e-3)
    tiny = 2.0**-30  # no fp16 number: the scale carries it
    assert minibatch(tiny) == pytest.approx(2 * tiny, rel=1e-3)
    _, resumed = one_parameter(torch.float16)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.scaler.get_scale() == optimizer.scaler.get_scale() == 2**15
    with pytest.raises(FloatingPointError):
        for _ in range(20):
            minibatch(float("nan"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_or_offloaded_optimizer_goes_on_exactly_masters_included(dtype, device):
    """Between updates masters and moments of the offloaded one are on the host, if they are not the model's own."""
    found = []
    for kind, restored in ((Optimizer, False), (Optimizer, True), (OffloadedOptimizer, True)):
        parameter, optimizer = one_parameter(dtype, kind, device)
        for slope in (1.0, -0.3, 0.2):
            with optimizer.on_device():
                optimizer.backward((slope * parameter).sum())
                optimizer.step(lr=0.01)
            if restored:
                values, state = parameter.detach(), copy.deepcopy(optimizer.state_dict())
                parameter, optimizer = one_parameter(dtype, kind, device)
                parameter.data.copy_(values)
                optimizer.load_state_dict(state)
        found.append(torch.stack([parameter.detach().float(), *optimizer.masters]).cpu())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    held = [tensor for state in optimizer.adamw.state.values() for tensor in state.values()]
    assert {each.device.type for each in held + [master for _, master in optimizer.rounded]} == {"cpu"}
    assert parameter.device.type == device
