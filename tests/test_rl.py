"""The trainer's half against plain float64 computations that share no code with it."""

import copy
import math
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy
import pytest
import torch
from helpers import DEVICES, ROUNDING, config_of, frozen_logprobs, minibatches_of, qwen2

import objectives
from config import LearningConfig
from extras.fast import FastHead, fast_parts
from extras.offload import OffloadedOptimizer
from extras.sampling_mask import SamplingMask, mask_outside
from objectives import OBJECTIVES, REJECTIONS, WEIGHTS, backend_metrics, correct
from probe.noise import observe_self_noise, self_noise
from rl import (
    Batch,
    Head,
    Optimizer,
    Policy,
    Scoring,
    longest_first,
    make_batch,
    update,
)
from rollouts import Rollout, Sampling


def rollouts(lengths=((3, 4), (5, 2), (2, 6), (4, 1))) -> list[Rollout]:
    generator = torch.Generator().manual_seed(1)
    draw = lambda n: torch.randint(3, 90, (n,), generator=generator).tolist()  # noqa: E731
    return [Rollout(draw(p), 0, draw(r), [-0.1 * (i + 1) for i in range(r)]) for p, r in lengths]


def plain_logits(model, rollout: Rollout) -> torch.Tensor:
    """The logits that predict each response token, one row at a time, in float64: (N, V)."""
    with torch.no_grad():
        logits = model(torch.tensor([rollout.prompt_ids + rollout.token_ids])).logits.double()[0]
    return logits[len(rollout.prompt_ids) - 1 : -1]


# ------------------------------------------------------------------------------------------------ batch
def test_make_batch_puts_each_value_at_the_position_that_predicts_it():
    a = Rollout([5, 6], 0, [7, 8], [-0.1, -0.2], trained=[False, True])
    b = Rollout([9], 0, [4], [-0.3])
    batch = make_batch([a, b])
    assert batch.inputs.tolist() == [[5, 6, 7], [9, 4, 0]]
    assert batch.targets.tolist() == [[6, 7, 8], [4, 0, 0]]
    assert batch.mask.tolist() == [[0, 0, 1], [1, 0, 0]]
    torch.testing.assert_close(batch.behavior_logprobs, torch.tensor([[0, 0, -0.2], [-0.3, 0, 0]]))


@pytest.mark.parametrize("prompt, bound", [(100, 0.9), (2, 1.0)])
def test_rows_of_one_prompt_share_a_micro_batch_where_fewer_positions_are_computed_then(prompt, bound):
    """Positions are counted as the model sees them. Their values are in test_architectures.py."""
    model, seen, counts = qwen2(tied=True), [], []
    policy = Policy(model, **fast_parts(model))
    lengths = [1 + 11 * row % 29 for row in range(32)]
    batch = make_batch([Rollout([row // 8 + 3] * prompt, None, [5] * length, [0.0] * length)
                        for row, length in enumerate(lengths)])
    model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].numel()))
    for pack in (longest_first, policy.pack):
        minibatches = batch.minibatches(torch.ones(32) > 0, 1, 480, pack)
        assert sorted(torch.cat(minibatches[0]).tolist()) == list(range(32))
        assert all(len(rows) == 1 or len(rows) * batch.input_lengths[rows].max() <= 480 for rows in minibatches[0])
        frozen_logprobs(policy, batch, minibatches)
        counts.append(sum(seen))
        seen.clear()
    assert counts[1] <= bound * counts[0]


def test_rows_without_a_signal_have_micro_batches_of_their_own_and_the_longest_come_first():
    batch = make_batch(rollouts([(1, n) for n in [9, 3, 7, 5, 8, 2, 6, 4]]))
    minibatches = minibatches_of(batch, 2, 100, has_signal=[0, 1, 0, 1, 1, 0, 0, 1])
    assert [[rows.tolist() for rows in micros] for micros in minibatches] == [[[3, 1], [0, 2]], [[4, 7], [6, 5]]]


# ------------------------------------------------------------------------------------------------ head and policy
def in_chunks(policy: Policy) -> Policy:
    """The policy with a head that computes two rows at once."""
    return policy.changed(head=replace(policy.head, chunk_elements=2 * 96))


@pytest.mark.parametrize("parts", [lambda _: {}, fast_parts], ids=["plain", "fast"])
def test_logprobs_entropy_and_agreement_equal_float64_whatever_the_padding_and_chunks(parts):
    model, rows = qwen2(tied=True), rollouts()
    rows[0].token_ids[-1] = plain_logits(model, rows[0])[-1].argmax().item()
    batch, policy = make_batch(rows), in_chunks(Policy(model, Scoring(0.7), **parts(model)))
    measured, agrees = policy.token_metrics(batch), policy.agreement(batch)["agrees"]
    assert torch.equal(policy.logprobs(batch), measured["logprobs"])
    assert not any(values[batch.mask == 0].any() for values in (*measured.values(), agrees))
    for row, rollout in enumerate(rows):
        inside, tokens, logits = batch.mask[row] > 0, torch.tensor(rollout.token_ids), plain_logits(model, rollout)
        logprobs = (logits / 0.7).log_softmax(-1)
        found = torch.stack([measured[name] for name in ("logprobs", "entropy", "varentropy")])[:, row, inside]
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        varentropy = (logprobs.exp() * (-logprobs - entropy[:, None]) ** 2).sum(-1)
        expected = torch.stack([logprobs[range(len(tokens)), tokens], entropy, varentropy])
        torch.testing.assert_close(found.double(), expected, atol=ROUNDING, rtol=0)
        assert agrees[row][inside].tolist() == (logits.argmax(-1) == tokens).tolist()
    assert agrees.sum() > 0


def test_an_untrained_token_has_no_value_and_the_others_keep_theirs_with_their_kept_sets():
    """Also in a row of its own, and beside a row without a loss. What the values are is in test_sampling_mask.py."""
    rows = rollouts([(3, 4), (5, 3), (2, 5)])
    for rollout in rows:
        rollout.kept = [numpy.array([token, token + 1, 90 + at]) for at, token in enumerate(rollout.token_ids)]
    scoring = Scoring(0.7, support=SamplingMask(Sampling(0.7, 8, top_p=0.9)))
    policy = in_chunks(Policy(qwen2(tied=True), scoring))
    whole = policy.logprobs(make_batch(rows))
    rows[0].trained, rows[2].trained = [True, False, False, True], [False, True, True, True, False]
    fewer = make_batch(rows).mask_rows([True, False, True])
    for micro_batch_tokens in (1, 4096):
        found = frozen_logprobs(policy, fewer, minibatches_of(fewer, 1, micro_batch_tokens))
        torch.testing.assert_close(found, whole * fewer.mask, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [Head, FastHead])
@pytest.mark.parametrize("softcap, scale, rows, masked, dtype", [
    (None, 1.0, 7, False, torch.bfloat16), (None, 1.4, 64, True, torch.float32), (3.0, 0.6, 1, True, torch.float32),
    (3.0, 0.6, 7, False, torch.float16),
])  # fmt: skip
def test_the_heads_loss_and_gradients_are_those_of_plain_float64(softcap, scale, rows, masked, dtype, kind, device):
    """With kept sets of 1 to about 64 ids; one of them has a probability of about exp(-60)."""
    hidden, weight, bias = torch.randn(64, 48), torch.randn(500, 48) / 3, torch.randn(500) / 7
    targets, loss_weights = torch.randint(500, (64,)), torch.randn(64).to(device)
    allowed = torch.rand(64, 500) < torch.arange(64)[:, None] / 500
    allowed[range(64), targets] = True
    kept = [row.nonzero()[:, 0].int().numpy() for row in allowed]
    row = weight[targets[3]]
    hidden[3] = -60 / row.square().sum() * row
    restrict = lambda logits, chunk: mask_outside(logits, kept[chunk]) if masked else logits  # noqa: E731
    ours = [each.to(device, dtype).requires_grad_() for each in (hidden, weight, bias)]
    exact = [each.detach().double().requires_grad_() for each in ours]
    head = kind(*ours[1:], scale, softcap, chunk_elements=500 * rows).at(0.7, torch.float32)
    logprobs = head.logprobs(ours[0], targets.to(device), restrict)
    logits = exact[0] @ exact[1].T + exact[2]
    logits = scale / 0.7 * (logits if softcap is None else softcap * torch.tanh(logits / softcap))
    if masked:
        logits = logits.masked_fill(~allowed.to(device), -math.inf)
    expected = logits.log_softmax(dim=-1)[range(64), targets.to(device)]
    gradients = torch.autograd.grad(logprobs, ours, loss_weights)
    truths = torch.autograd.grad(expected, exact, loss_weights.double())
    rounding = 1e-5 if dtype == torch.float32 else 2**-8  # gradients are stored in it
    assert (logprobs - expected).norm() < 1e-5 * expected.norm()
    for gradient, truth in zip(gradients, truths, strict=True):
        assert (gradient - truth).norm() < rounding * truth.norm()


def test_an_unknown_operation_after_the_head_is_refused():
    model = qwen2(tied=False)
    model.lm_head.register_forward_hook(lambda _module, _inputs, logits: logits * 1.01)
    with pytest.raises(ValueError, match="does more after its head"):
        Policy(model)


# ------------------------------------------------------------------------------------------------ one update, by hand
# Four rows of at most four tokens. Row b has the prompt [b], so (B, T) has B = T.
LENGTHS = [4, 2, 3, 4]
TRAINED = [[True] * 4, [True] * 2, [True] * 3, [True, False, True, True]]
OLD = torch.tensor([[-0.5, -1.0, -0.3, -2.0], [-0.7, -0.2, 0, 0], [-0.1, -0.9, -1.2, 0], [-0.4, -0.6, -0.8, -0.5]])
MISMATCH = torch.tensor([[1e-3, -2e-3, 1e-3, 5e-4], [0.02, -0.03, 0, 0], [5.0, -0.1, 0.9, 0], [1.1, -0.1, -0.7, 0.05]])
MOVED = torch.tensor([[0.3, -0.4, 0.05, 0.1], [0.1, 0.2, 0, 0], [-0.3, 0.3, 0.02, 0], [0.25, 0.1, -0.3, -0.2]])
CLIPS = {objectives.grpo: (0.2, 0.28), objectives.gspo: (0.05, 0.1), objectives.cispo: (None, 1.2)}


def sums_by_hand(
    now, rows: range, batch: Batch, weights, kept, counted, learning: LearningConfig
) -> dict[str, torch.Tensor]:
    """Loss and weighted diagnostics of a minibatch, token by token in float64."""
    (low, high), row = learning.clip, OBJECTIVES[learning.objective]
    old = (batch.behavior_logprobs if learning.old_policy == "rollout" else batch.old_logprobs).double()
    sums = dict.fromkeys(("loss", "clip_rate", "ratio_mean", "kl_old_new", "kl_ref", "weight"), 0.0)
    for b, t in counted.nonzero().tolist():
        if b not in rows:
            continue
        share = {"token": 1 / counted[rows].sum(), "sequence": 1 / (len(rows) * counted[b].sum()),
                 "constant": 1 / (len(rows) * learning.max_new_tokens)}[row.normalizer]  # fmt: skip
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
        loss = kept[b, t] * weights[b, t] * surrogate + learning.kl_coef * divergence
        terms = loss, clipped, log_ratio.exp(), torch.expm1(log_ratio) - log_ratio, divergence, 1.0
        for name, term in zip(sums, terms, strict=True):
            sums[name] += share * term
    return sums


# What a case adds to one optimizer step for four rows at once, without a KL term: two minibatches (halves), rows one at
# a time (alone), no token or no advantage of row b (masked, flat), an advantage for each token (tokens), a KL term,
# the mean over kept tokens (kept). Any two of the words occur together, each without the other, and neither of them.
CASES = ["", "halves alone flat kl", "halves masked tokens kl", "halves flat tokens kept", "alone masked tokens kept",
         "alone masked flat kl kept"]  # fmt: skip


def check_update(learning: LearningConfig, case: list[str]) -> None:
    behavior = (OLD - MISMATCH).tolist()
    batch = make_batch([Rollout([b], None, [5] * length, behavior[b][:length], trained=TRAINED[b])
                        for b, length in enumerate(LENGTHS)])  # fmt: skip
    batch = batch.mask_rows([True, "masked" not in case, True, True])
    advantages = torch.tensor([[1.3], [0.0 if "flat" in case else -0.7], [0.4], [-1.1]])  # (B, 1)
    if "tokens" in case:
        advantages = advantages * torch.tensor([1.0, -0.5, 0.0, 2.0])  # (B, T)
    old = OLD.where(batch.mask > 0, -200.0)  # of no token: exp(200) is infinite in fp32
    ref = (OLD - 0.1).where(batch.mask > 0, 200.0)
    batch = replace(batch, old_logprobs=old, ref_logprobs=ref, advantages=advantages)
    num_minibatches, micro_batch_tokens = 1 + ("halves" in case), 1 if "alone" in case else 4096
    minibatches = minibatches_of(batch, num_minibatches, micro_batch_tokens, advantages.any(dim=1).tolist())
    # The parameters are the log-probabilities themselves, so a gradient is that of a token's log-probability.
    table, gradients = torch.nn.Parameter(OLD + MOVED), []  # of the backward passes
    table.register_hook(gradients.append)
    policy = SimpleNamespace(logprobs=lambda micro: table[micro.inputs[:, 0], : micro.mask.shape[1]] * micro.mask)
    optimizer = Optimizer(torch.nn.ParameterList([table]), weight_decay=0.0)
    metrics = update(policy, optimizer, batch, minibatches, learning, lr=0.0)

    corrected = correct(old, batch.behavior_logprobs, batch.mask, learning.tis, learning.tis_cap, learning.rejection)
    kept = (batch.mask > 0) & ~corrected.rejected
    assert (0 < corrected.rejected.sum() < 12) == (learning.reject != "off")
    counted = kept if learning.rejection.mean == "kept" else batch.mask > 0
    now, width, expected = table.detach().double().requires_grad_(), 4 // num_minibatches, []
    for first in range(0, 4, width):
        rows = range(first, first + width)
        if (kept * advantages)[rows].any() or (learning.kl_coef and counted[rows].any()):  # else no step
            expected.append(sums_by_hand(now, rows, batch, corrected.weights, kept, counted, learning))
    assert metrics["skipped_updates"] == num_minibatches - len(expected)
    losses = [each["loss"] for each in expected]
    assert metrics["loss"] == pytest.approx(sum(losses).item() / len(losses), rel=1e-4)
    gradient = sum(gradients)  # each row is in one minibatch
    torch.testing.assert_close(gradient.double(), *torch.autograd.grad(sum(losses), now), atol=1e-6, rtol=1e-4)
    assert gradient[kept].any()
    if not learning.kl_coef:
        assert not gradient[~kept].any(), "a token that is rejected or not trained has a gradient"
    if learning.reject == "off" and num_minibatches == 1:
        for name in {"clip_rate", "ratio_mean", "kl_old_new", "kl_ref"} & metrics.keys():
            by_hand = (expected[0][name] / expected[0]["weight"]).item()
            assert metrics[name] == pytest.approx(by_hand, rel=1e-4, abs=1e-6), name
    if learning.old_policy == "rollout":  # the first minibatch of two policies, had no weight moved before
        options = dict(objective=learning.objective, clip=learning.clip, max_length=learning.max_new_tokens)
        moved = table.detach() * batch.mask
        backend = backend_metrics(moved, batch.behavior_logprobs, advantages, batch.mask, **options)
        for name in ("clip_rate", "ratio_mean"):
            assert metrics[name] == pytest.approx(backend[f"backend_{name}"], rel=1e-5)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("reject", ["off", *REJECTIONS])
def test_loss_and_gradient_of_an_update_are_those_of_a_float64_loop(objective, reject):
    """With each weight and in each case. The gradient of a rejected token, and of one without a loss, is exactly 0."""
    row = OBJECTIVES[objective]
    low, high = (None, None) if objective == "reinforce" else CLIPS[row.surrogate]  # reinforce takes no bounds
    usual = dict(objective=objective, clip_low=low, clip_high=high, max_new_tokens=7, grad_clip=1e9)
    for tis, words in product(("off", *WEIGHTS), CASES):
        case, mean = words.split(), None
        kl_coef = 0.3 if "kl" in case else 0.0
        if reject != "off" and (kl_coef or row.normalizer == "token"):  # else a mean is refused: it might do nothing
            mean = "kept" if "kept" in case else "all"
        cap = {} if tis == "off" else {"tis_cap": 1.5}
        check_update(LearningConfig(**usual, tis=tis, reject=reject, reject_mean=mean, kl_coef=kl_coef, **cap), case)
    if reject == "off":
        check_update(LearningConfig(**usual, old_policy="rollout"), [])


def step(policy: Policy, optimizer: Optimizer, learning: LearningConfig, advantages=(1.0, -1.0, 0.5, -0.5), keep=True,
         far=0.0) -> dict:
    """The metrics of one update. One token is `far` nats below the reference."""
    batch = make_batch(rollouts(), policy.device).mask_rows([keep] * 4)
    minibatches = minibatches_of(batch, learning.num_minibatches, learning.micro_batch_tokens, has_signal=advantages)
    old = frozen_logprobs(policy, batch, minibatches)
    advantages = torch.tensor(advantages, device=policy.device)[:, None]
    ref = old.clone()
    ref[0, 2] += far  # its first token
    batch = replace(batch, old_logprobs=old, ref_logprobs=ref, advantages=advantages)
    return update(policy, optimizer, batch, minibatches, learning, lr=1e-3)


def fresh(kind: type = Optimizer, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Policy, Optimizer]:
    policy = Policy(qwen2(tied=True, dtype=dtype).to(device))
    return policy, kind(policy.model, weight_decay=0.0)


def moved(policy: Policy) -> bool:
    own = zip(qwen2(tied=True).parameters(), policy.model.parameters(), strict=True)
    return any(not torch.equal(start, now) for start, now in own)


@pytest.mark.parametrize("learning, advantages, keep, skipped", [
    ({}, (0.0, 0.0, 0.0, 0.0), 1, 2), ({}, (1.0, -1.0, 0.0, 0.0), 1, 1),
    ({"kl_coef": 0.1}, (1.0, -1.0, 2.0, 0.5), 0, 2),
    ({"reject": "binary_tv", "reject_high": 1e-12, "reject_mean": "all"}, (1.0, -1.0, 2.0, 0.5), 1, 2),
])  # fmt: skip
def test_a_minibatch_without_a_signal_takes_no_step_and_says_so(learning, advantages, keep, skipped):
    policy, optimizer = fresh()
    metrics = step(policy, optimizer, LearningConfig(num_minibatches=2, **learning), advantages, bool(keep))
    assert (metrics["skipped_updates"], metrics["updates"]) == (skipped, 2 - skipped)
    assert (metrics["loss"] is None) == (skipped == 2)
    assert moved(policy) == (skipped < 2)


def test_the_largest_kl_term_is_a_metric_and_a_loss_that_is_no_number_stops_the_update_before_the_weights_move():
    learning = LearningConfig(kl_coef=0.1, num_minibatches=1, micro_batch_tokens=1)
    metrics = step(*fresh(), learning, far=20.0)
    largest = metrics["kl_ref_max"]
    assert largest == pytest.approx(math.expm1(20) - 20, rel=1e-4)
    assert metrics["kl_ref"] == pytest.approx(largest / 13)  # of 13 tokens
    assert step(*fresh(), learning, keep=False)["kl_ref_max"] is None
    not_a_number = dict(advantages=(math.nan, 1.0, 0.0, 0.0))
    for wrong, reason in (dict(far=100.0), "inf, its KL inf"), (not_a_number, "nan, its KL 0"):
        policy, optimizer = fresh()
        with pytest.raises(FloatingPointError, match=f"the loss is {reason}"):
            step(policy, optimizer, learning, **wrong)
        assert not moved(policy)


# ------------------------------------------------------------------------------------------------ noise, memory
def test_self_noise_is_rounding_of_the_dtype_and_needs_a_token():
    for dtype, low, high in ((torch.float32, -1, ROUNDING), (torch.bfloat16, ROUNDING, 1)):
        policy, batch = Policy(qwen2(tied=True, dtype=dtype)), make_batch(rollouts())
        before = frozen_logprobs(policy, batch, minibatches_of(batch))
        batch = replace(batch, old_logprobs=before, advantages=torch.ones(4, 1))
        noise = self_noise(policy, batch, LearningConfig())
        assert not noise[batch.mask == 0].any()
        assert low < (noise.abs().sum() / batch.mask.sum()).item() < high
    step = SimpleNamespace(metrics={"step": 1}, batch=batch.mask_rows([False] * 4))  # as --mask-truncated may
    assert observe_self_noise(policy, config_of(self_noise_every=1), step) == {}


# ------------------------------------------------------------------------------------------------ optimizer
def one_parameter(dtype: torch.dtype) -> tuple[torch.nn.Parameter, Optimizer]:
    parameter = torch.nn.Parameter(torch.ones(4, dtype=dtype))
    return parameter, Optimizer(torch.nn.ParameterList([parameter]), weight_decay=0.0)


def test_bf16_masters_add_up_steps_too_small_for_bf16_and_micro_batches_in_fp32():
    parameter, optimizer = one_parameter(torch.bfloat16)
    for _ in range(100):  # bf16 alone cannot leave 1.0 by steps of 1e-4: its spacing there is 4e-3
        optimizer.backward(parameter.sum())
        optimizer.step(lr=1e-4, grad_clip=1e9)
    assert parameter[0].item() == pytest.approx(0.99, abs=4e-3)
    assert optimizer.masters[0][0].item() == pytest.approx(0.99, abs=1e-4)
    for gradient in [1.0] + [2**-10] * 64:  # bf16 has 8 bits: 1 + 2^-10 is 1 there
        optimizer.backward(gradient * parameter.sum())
        assert parameter.grad is None
    assert optimizer.masters[0].grad[0].item() == 1 + 64 * 2**-10


def test_fp16_halves_the_scale_after_an_overflow_and_skips_that_step_alone():
    def minibatch(slope: float) -> float:
        optimizer.backward((parameter.float() * slope).sum())
        return optimizer.step(lr=0.1, grad_clip=1e9)

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
    weights = []
    for kind, restored in ((Optimizer, False), (Optimizer, True), (OffloadedOptimizer, True)):
        policy, optimizer = fresh(kind, dtype, device)
        for _ in range(3):
            step(policy, optimizer, LearningConfig())
            if restored:
                saved = copy.deepcopy([policy.model.state_dict(), optimizer.state_dict()])
                policy, optimizer = fresh(kind, dtype, device)
                policy.model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
        weights.append([each.detach().clone() for each in (*policy.model.parameters(), *optimizer.masters)])
        if kind is OffloadedOptimizer:
            held = [tensor for state in optimizer.adamw.state.values() for tensor in state.values()]
            assert {each.device.type for each in held + [master for _, master in optimizer.rounded]} == {"cpu"}
            assert {each.device.type for each in policy.model.parameters()} == {device}
    for other in weights[1:]:
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(weights[0], other, strict=True))


def test_the_moments_are_there_at_the_start_and_a_load_frees_them_first():
    """In memory that is not mixed with activations. torch creates them in the first step."""
    (_, optimizer), held = one_parameter(torch.bfloat16), []
    state = optimizer.state_dict()
    assert state["adamw"]["state"][0].keys() == {"step", "exp_avg", "exp_avg_sq"}
    optimizer.adamw.register_load_state_dict_pre_hook(lambda adamw, _: held.append(len(adamw.state)))
    optimizer.load_state_dict(state)
    assert held == [0]
