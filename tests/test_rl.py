"""The trainer's half against plain float64 computations that share no code with it."""

import copy
import math
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from extras.prompts import compute_prompts_once
from helpers import DEVICES, by_the_book, qwen2
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig

from config import Config, GrpoConfig
from engine_adapter import Rollout, Sampling
from extras.checkpointing import checkpoint_layers
from extras.masks import KeptTokens, mask_outside
from extras.offload import OffloadedOptimizer, host_views
from objectives import OBJECTIVES, Objective, TokenLoss, backend_metrics
from probe.noise import observe_self_noise, rounded_otherwise, self_noise
from probe.traces import process_logits
from rl import (
    Optimizer,
    Policy,
    TargetLogprobs,
    frozen_logprobs,
    frozen_measures,
    head_chunk,
    make_batch,
    product,
    update,
)
from train import Step


def rollouts(lengths=((3, 4), (5, 2), (2, 6), (4, 1)), vocabulary: int = 90) -> list[Rollout]:
    generator = torch.Generator().manual_seed(1)
    draw = lambda n: torch.randint(3, vocabulary, (n,), generator=generator).tolist()  # noqa: E731
    return [Rollout(draw(p), 0, draw(r), [-0.1 * (i + 1) for i in range(r)], [1] * r, "stop") for p, r in lengths]


def plain_logprobs(model, rollout: Rollout, temperature: float) -> torch.Tensor:
    """log softmax(logits / T) of each response token, one row at a time, in float64."""
    ids = torch.tensor([rollout.prompt_ids + rollout.token_ids])
    with torch.no_grad():
        logits = model(ids).logits.double()[0] / temperature
    positions = range(len(rollout.prompt_ids), ids.shape[1])
    return torch.stack([logits[p - 1, ids[0, p]] - torch.logsumexp(logits[p - 1], 0) for p in positions])


def test_make_batch_puts_each_value_at_the_position_that_predicts_it():
    a = Rollout([5, 6], 0, [7, 8], [-0.1, -0.2], [1, 1], "stop")
    b = Rollout([9], 0, [4], [-0.3], [1], "length")
    batch = make_batch([a, b], torch.tensor([1.0, -1.0]))
    assert batch.inputs.tolist() == [[5, 6, 7], [9, 4, 0]]
    assert batch.targets.tolist() == [[6, 7, 8], [4, 0, 0]]
    assert batch.mask.tolist() == [[0, 1, 1], [1, 0, 0]]
    torch.testing.assert_close(batch.behavior_logprobs, torch.tensor([[0, -0.1, -0.2], [-0.3, 0, 0]]))


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_logprobs_and_entropy_equal_float64_whatever_the_padding_and_chunks(temperature):
    model, rows = qwen2(tied=True), rollouts()
    batch = make_batch(rows)
    for chunk_elements in (2**25, 96 * 2, 1):
        policy = Policy(model, chunk_elements=chunk_elements)
        measured = policy.measure(batch, temperature)
        logprobs, entropy = measured["logprobs"], measured["entropy"]
        assert torch.equal(policy.logprobs(batch, temperature), logprobs)
        for row, rollout in enumerate(rows):
            expected = plain_logprobs(model, rollout, temperature)
            torch.testing.assert_close(logprobs[row][batch.mask[row] > 0].double(), expected, atol=2e-5, rtol=0)
        assert (logprobs[batch.mask == 0] == 0).all()
        assert (entropy[batch.mask == 0] == 0).all()
    ids = torch.tensor([rows[0].prompt_ids + rows[0].token_ids])
    probabilities = torch.softmax(model(ids).logits.double()[0, 2] / temperature, -1)
    expected = -(probabilities * probabilities.log()).sum().item()
    assert entropy[0, 2].item() == pytest.approx(expected, abs=1e-5)


def test_without_metrics_only_the_log_probabilities_are_computed_and_they_are_the_same():
    policy, batch = Policy(qwen2(tied=True), chunk_elements=96 * 3), make_batch(rollouts())
    options = GrpoConfig(temperature=0.7, num_minibatches=1, micro_batch_tokens=13)
    policy.support = KeptTokens(Sampling(0.7, 8, top_p=0.9))
    measured, alone = frozen_measures(policy, batch, options), frozen_logprobs(policy, batch, options)
    assert measured.keys() == {"logprobs", "entropy", "kept_mass", "outside_frac"}
    assert torch.equal(alone, measured["logprobs"])
    assert not alone.requires_grad


@pytest.mark.parametrize("softcap, scale", [(None, 1.0), (None, 1.4), (3.0, 0.6)])
@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("masked", [False, True])
def test_the_heads_loss_and_gradients_are_those_of_plain_float64(softcap, scale, rows, masked):
    """With kept sets of 1 to 64 ids; one of them has a probability of about exp(-60)."""
    torch.manual_seed(0)
    hidden, targets, loss_weights = torch.randn(64, 48), torch.randint(500, (64,)), torch.randn(64)
    policy = Policy(qwen2(tied=False), chunk_elements=500 * rows)
    policy.head, policy.softcap, policy.scale = torch.nn.Linear(48, 500), softcap, scale
    policy.head.weight.data.copy_(torch.randn(500, 48) / 3)
    sets = [torch.cat([targets[i : i + 1], torch.randint(500, (i,))]).unique() for i in range(64)]
    row = policy.head.weight[targets[3]].detach()
    hidden[3] = -60 / row.square().sum() * row
    kept = [ids.int().numpy() for ids in sets]
    restrict = lambda logits, part: mask_outside(logits, kept[part]) if masked else logits  # noqa: E731
    ours = [hidden.clone().requires_grad_(), policy.head.weight, policy.head.bias]
    exact = [each.detach().double().requires_grad_() for each in ours]
    logprobs = TargetLogprobs.apply(*ours, targets, restrict, policy.projection(0.7))
    loss = (logprobs * loss_weights).sum()
    loss.backward()
    logits = exact[0] @ exact[1].T + exact[2]
    logits = scale / 0.7 * (logits if softcap is None else softcap * torch.tanh(logits / softcap))
    for row, ids in enumerate(sets if masked else []):
        logits[row, [token for token in range(500) if token not in ids]] = -math.inf
    expected = torch.log_softmax(logits, dim=-1)
    exact_loss = (expected[torch.arange(64), targets] * loss_weights.double()).sum()
    exact_loss.backward()
    relative = lambda value, truth: ((value.double() - truth).norm() / truth.norm()).item()  # noqa: E731
    assert relative(loss.detach(), exact_loss.detach()) < 1e-6
    for value, truth in zip(ours, exact, strict=True):
        assert relative(value.grad, truth.grad) < 1e-6


@pytest.mark.parametrize("gib, power", [
    (0, 25), (7.7, 25), (15.6, 25), (23.5, 26), (39.4, 27), (79.2, 28), (139.8, 28),
])  # fmt: skip
def test_a_chunk_of_the_head_takes_at_most_a_64th_of_a_gpus_memory_and_1_gib(gib, power):
    assert head_chunk(gib) == 2**power
    if 25 < power < 28:  # the next larger chunk would take more
        assert 4 * 2**power <= gib * 2**30 / 64 < 8 * 2**power


def test_on_a_cpu_a_chunk_of_the_head_has_the_size_it_always_had():
    assert Policy(qwen2(tied=True)).chunk_elements == 2**25


@pytest.mark.parametrize("lengths", [(4, 2, 6, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize("device", DEVICES)
def test_each_distinct_prompt_of_a_micro_batch_is_computed_once(lengths, device):
    """The body sees 2 prompts instead of 4, and the responses without their last tokens."""
    plain, rows = qwen2(tied=True), rollouts([(5, length) for length in lengths])
    model = copy.deepcopy(plain).to(device)
    rows[1].prompt_ids, rows[3].prompt_ids = rows[0].prompt_ids, rows[2].prompt_ids[:3]
    rows[2].prompt_ids = rows[3].prompt_ids  # shorter than the others: padded
    policy, seen = Policy(model), []
    compute_prompts_once(policy)
    model.model.embed_tokens.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0].shape))
    logprobs = policy.logprobs(make_batch(rows, device), 0.7)
    assert seen == [(2, 5), (4, max(lengths) - 1)][: 1 + (max(lengths) > 1)]
    for row, rollout in enumerate(rows):
        own = logprobs[row, len(rollout.prompt_ids) - 1 :][: len(rollout.token_ids)].cpu().double()
        allowed = 2e-5 if device == "cpu" else 1e-3
        torch.testing.assert_close(own, plain_logprobs(plain, rollout, 0.7), atol=allowed, rtol=0)


def test_rows_that_are_masked_out_change_no_other_row():
    rows = rollouts([(3, 4), (3, 2), (3, 6), (3, 1)])
    for row in rows:
        row.prompt_ids = rows[0].prompt_ids
    policy, batch = Policy(qwen2(tied=True)), make_batch(rows)
    whole = policy.logprobs(batch, 0.7)
    without = torch.tensor([False, True, False, True])
    fewer = policy.logprobs(batch.only((~without).tolist()), 0.7)
    torch.testing.assert_close(fewer[~without], whole[~without], atol=1e-6, rtol=0)
    assert not fewer[without].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_16_bit_numbers_are_exact_in_fp32(dtype):
    """Each single product; their sum is rounded to fp32. The GPU's way, through the tensor cores, gives the same."""
    left, right = torch.randn(40, 300).to(dtype), torch.randn(300, 50).to(dtype)
    truth = left.double() @ right.double()
    for device in ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]:
        found = product(left.to(device), right.to(device), torch.float32)
        assert found.dtype == torch.float32
        assert (found.cpu() - truth).norm() < 1e-6 * truth.norm()
        assert (product(left.to(device), right.to(device), dtype).cpu() - truth).norm() > 1e-4 * truth.norm()


def test_chunked_head_has_the_gradient_of_the_plain_one():
    gradients = []
    for chunk_elements in (2**25, 96 * 3):
        model = qwen2(tied=True)
        batch = make_batch(rollouts())
        Policy(model, chunk_elements=chunk_elements).logprobs(batch, 0.7).sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for whole, chunked in zip(*gradients, strict=True):
        torch.testing.assert_close(whole, chunked, atol=1e-4, rtol=1e-4)


SMALL = dict(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=1, head_dim=32, pad_token_id=0, bos_token_id=1, eos_token_id=2)  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(**SMALL, final_logit_softcapping=0.5),
        CohereConfig(**{k: v for k, v in SMALL.items() if k != "head_dim"}, logit_scale=0.3),
        GraniteConfig(**{k: v for k, v in SMALL.items() if k != "head_dim"}, logits_scaling=5.0),
    ],
    ids=["soft-capping", "logit scale", "logits scaling"],
)
def test_what_a_model_does_after_its_head_is_honoured(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    rows = rollouts()
    batch = make_batch(rows)
    logprobs = Policy(model).logprobs(batch, 0.7)
    for row, rollout in enumerate(rows):
        torch.testing.assert_close(
            logprobs[row][batch.mask[row] > 0].double(), plain_logprobs(model, rollout, 0.7), atol=2e-5, rtol=0
        )


def test_an_unknown_operation_after_the_head_is_refused():
    model = qwen2(tied=False)
    model.lm_head.register_forward_hook(lambda _module, _inputs, logits: logits * 1.01)
    with pytest.raises(ValueError, match="does more after its head"):
        Policy(model)


def test_fp32_head_differs_from_the_model_dtype_head_as_rounding_does():
    model = qwen2(tied=False, dtype=torch.bfloat16)
    batch = make_batch(rollouts())
    fine = Policy(model, fp32_head=True).logprobs(batch, 0.7)
    coarse = Policy(model, fp32_head=False).logprobs(batch, 0.7)
    assert 1e-4 < (fine - coarse).abs().max() < 0.3


def test_score_agrees_with_plain_logprobs():
    model = qwen2(tied=True)
    rows = rollouts(((3, 4), (3, 4)))
    scored = Policy(model).response_logprobs([r.prompt_ids + r.token_ids for r in rows], 3)
    for values, rollout in zip(scored, rows, strict=True):
        assert values == pytest.approx(plain_logprobs(model, rollout, 1.0).tolist(), abs=2e-5)


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path, folders):
    from safetensors.torch import load_file, save_file

    source = AutoModelForCausalLM.from_pretrained(folders[False])
    source.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj"):
        Policy.load(str(tmp_path), torch.float32, "cpu")


class CountedOptimizer(Optimizer):
    backward_passes = 0

    def backward(self, loss: torch.Tensor) -> None:
        self.backward_passes += 1
        super().backward(loss)


def stepped(options: GrpoConfig, advantages=(1.0, -1.0, 0.5, -0.5), lr: float = 1e-3, dtype=torch.float32):
    """Weights, metrics and Adam's first moments after one update of a fresh model."""
    model = qwen2(tied=True, dtype=dtype)
    policy, optimizer = Policy(model), CountedOptimizer(model, weight_decay=0.0)
    batch = make_batch(rollouts(), torch.tensor(advantages))
    old = frozen_logprobs(policy, batch, options)
    reference = old - 0.1 * batch.mask
    metrics = update(policy, optimizer, replace(batch, old_logprobs=old, ref_logprobs=reference), options, lr)
    metrics["backward_passes"] = optimizer.backward_passes
    moments = [state["exp_avg"].flatten() for state in optimizer.adamw.state.values()]  # 0.1 * gradient after one step
    return torch.cat([p.detach().flatten() for p in model.parameters()]), metrics, moments


@pytest.mark.parametrize("rejection", [{}, {"reject": "token", "reject_low": 1e-6, "reject_mean": "kept"}])
@pytest.mark.parametrize("objective", ["grpo", "dr_grpo", "gspo", "cispo"])
def test_loss_and_gradient_do_not_depend_on_the_micro_batches(objective, rejection):
    options = GrpoConfig(objective=objective, num_minibatches=1, kl_coef=0.1, tis="sequence", **rejection)
    _, metrics, moments = stepped(options)
    assert (0 < metrics["rejected_frac"] < 1) == bool(rejection)
    assert metrics.pop("backward_passes") == 1
    for tokens in (1, 13):  # one row each; the two longest together, then the two others
        _, split_metrics, split_moments = stepped(replace(options, micro_batch_tokens=tokens))
        assert split_metrics.pop("backward_passes") == {1: 4, 13: 3}[tokens]
        torch.testing.assert_close(torch.cat(moments), torch.cat(split_moments), atol=1e-6, rtol=1e-4)
        assert split_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)


def test_micro_batches_hold_each_row_once_with_few_tokens_and_less_padding_than_unsorted_ones():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 40, (64,), generator=generator).tolist()
    batch = make_batch(rollouts([(3, n) for n in lengths]))
    steps = batch.cut(num_minibatches=2, micro_batch_tokens=128)
    assert [sorted(torch.cat(micros).tolist()) for micros in steps] == [list(range(32)), list(range(32, 64))]
    padded = 0
    for micros in steps:
        longest = [int(batch.lengths[rows].max()) for rows in micros]
        assert longest == sorted(longest, reverse=True)
        assert all(len(rows) * width <= 128 for rows, width in zip(micros, longest, strict=True))
        assert all(batch.rows(rows).inputs.shape == (len(rows), w) for rows, w in zip(micros, longest, strict=True))
        padded += sum(len(rows) * width for rows, width in zip(micros, longest, strict=True))
    assert padded < 1.15 * batch.lengths.sum() < 0.8 * 64 * batch.lengths.max()
    assert all(len(rows) == 1 for micros in batch.cut(1, 1) for rows in micros)  # a longer row goes alone


def test_rows_without_an_advantage_have_micro_batches_of_their_own_and_the_longest_come_first():
    lengths, advantages = [9, 3, 7, 5, 8, 2, 6, 4], torch.tensor([0.0, 1.0, 0.0, -1.0, 2.0, 0.0, 0.0, -1.0])
    batch = make_batch(rollouts([(1, n) for n in lengths]), advantages)
    cut = batch.cut(num_minibatches=2, micro_batch_tokens=100)
    assert [[rows.tolist() for rows in micros] for micros in cut] == [[[3, 1], [0, 2]], [[4, 7], [6, 5]]]


@pytest.mark.parametrize("objective", ["grpo", "dr_grpo", "gspo", "cispo"])
def test_without_a_backward_for_flat_rows_gradient_and_diagnostics_are_those_of_all_rows(objective):
    """A KL term with a weight of 1e-30 needs a backward for every row and changes no figure."""
    options = GrpoConfig(objective=objective, micro_batch_tokens=1)  # two minibatches, each row alone
    found = []
    for kl_coef, expected in ((0.0, 2), (1e-30, 4)):
        weights, metrics, moments = stepped(replace(options, kl_coef=kl_coef), advantages=(1.0, 0.0, 0.0, -1.0))
        assert metrics.pop("backward_passes") == expected
        metrics.pop("kl_ref", None)
        found.append((weights, metrics, torch.cat(moments)))
    (weights, metrics, moments), (all_weights, all_metrics, all_moments) = found
    assert metrics == all_metrics
    assert metrics["kl_old_new"] > 0  # the second minibatch is measured on moved weights, its flat row too
    assert torch.equal(weights, all_weights)
    assert torch.equal(moments, all_moments)


@pytest.mark.parametrize("tokens", [1, 4096])
def test_an_advantage_per_token_needs_no_change_of_the_update(tokens):
    """As docs/fork.md says: a batch with (B, T) advantages and a surrogate without `[:, None]`."""

    def surrogate(logprobs, old_logprobs, batch, clip):
        if batch.advantages.ndim == 2:
            weighted = torch.exp((logprobs - old_logprobs) * batch.mask) * batch.advantages
            return TokenLoss(-weighted, torch.zeros_like(weighted, dtype=torch.bool))
        return surrogate(logprobs, old_logprobs, replace(batch, advantages=batch.advantages[:, None]), clip)

    OBJECTIVES["per_token"] = Objective(surrogate)
    try:
        options = GrpoConfig(objective="per_token", micro_batch_tokens=tokens)
        per_row, metrics, _ = stepped(options, advantages=(1.0, 0.0, 0.0, -1.0))
        width = make_batch(rollouts()).mask.shape[1]
        columns = torch.tensor([1.0, 0.0, 0.0, -1.0])[:, None].expand(4, width)
        per_token, same, _ = stepped(options, advantages=columns.tolist())
        first, _, _ = stepped(options, advantages=(columns * (torch.arange(columns.shape[1]) < 3)).tolist())
    finally:
        del OBJECTIVES["per_token"]
    assert torch.equal(per_row, per_token)
    assert metrics == same
    assert not torch.equal(per_row, first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_the_ratio_starts_at_exactly_1_whatever_the_micro_batches(dtype):
    for tokens in (1, 13, 4096):
        options = GrpoConfig(num_minibatches=1, micro_batch_tokens=tokens)
        _, metrics, _ = stepped(options, dtype=dtype)
        assert metrics["ratio_mean"] == 1.0
        assert metrics["kl_old_new"] == 0.0


def test_self_noise_is_rounding_of_the_dtype_and_leaves_the_policy_as_it_was():
    sizes = {}
    for dtype in (torch.float32, torch.bfloat16):
        policy, batch = Policy(qwen2(tied=True, dtype=dtype)), make_batch(rollouts())
        before = frozen_logprobs(policy, batch, GrpoConfig())
        noise = self_noise(policy, replace(batch, old_logprobs=before), GrpoConfig())
        assert (noise[batch.mask == 0] == 0).all()
        assert torch.equal(before, frozen_logprobs(policy, batch, GrpoConfig()))
        sizes[dtype] = (noise.abs().sum() / batch.mask.sum()).item()
    assert 0 < sizes[torch.float32] < 1e-5
    assert 1e-3 < sizes[torch.bfloat16] < 0.1


def test_self_noise_of_a_step_without_a_token_is_not_measured():
    """--mask-truncated may mask every response."""
    policy, batch = Policy(qwen2(tied=True)), make_batch(rollouts())
    config = Config.of(self_noise_every=1)
    masked = batch.only([False] * 4)
    assert observe_self_noise(policy, config, Step({"step": 1}, batch, []))["self_noise_abs_mean"] > 0
    assert observe_self_noise(policy, config, Step({"step": 1}, masked, [])) == {}


def test_self_noise_of_exactly_0_in_16_bits_is_an_error():
    policy = Policy(qwen2(tied=True, dtype=torch.bfloat16))
    batch = make_batch(rollouts([(3, 8)] * 4))
    with rounded_otherwise(policy):
        before = frozen_logprobs(policy, batch, GrpoConfig())
    with rounded_otherwise(policy), pytest.raises(RuntimeError, match="noise floor must be above 0 in 16 bits"):
        self_noise(policy, replace(batch, old_logprobs=before), GrpoConfig())


def test_gradient_checkpointing_keeps_less_and_changes_no_gradient():
    def run(model, policy) -> tuple[int, list[torch.Tensor]]:
        own = {each.untyped_storage().data_ptr() for each in model.parameters()}
        kept = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logprobs = policy.logprobs(make_batch(rollouts()), 0.7)
        calls = []
        hook = model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
        logprobs.sum().backward()
        hook.remove()
        return len(calls), sum(kept.values()), [each.grad for each in model.parameters()]

    plain, again = qwen2(tied=True), qwen2(tied=True)
    policy = Policy(plain)
    calls, kept, gradients = run(plain, policy)
    checkpointed = Policy(again)
    checkpoint_layers(checkpointed)
    calls_again, kept_again, gradients_again = run(again, checkpointed)
    assert (calls, calls_again) == (0, 1)  # the layer is computed once more, in backward
    assert kept_again < 0.4 * kept
    assert all(torch.equal(a, b) for a, b in zip(gradients, gradients_again, strict=True))
    with torch.no_grad():  # and only there: the reference engine samples from the same modules with a KV cache
        assert again(torch.tensor([[5, 6]]), use_cache=True).past_key_values.get_seq_length() == 2


def test_a_masked_row_has_no_loss_and_no_share_in_a_token_mean():
    whole = make_batch(rollouts(), torch.tensor([1.0, -1.0, 2.0, 0.5]))
    fewer = make_batch([rollouts()[i] for i in (0, 2)], torch.tensor([1.0, 2.0]))
    moments = []
    for masked in (whole.only([True, False, True, False]), fewer):
        model = qwen2(tied=True)
        policy, optimizer = Policy(model), Optimizer(model, weight_decay=0.0)
        options = GrpoConfig(num_minibatches=1)
        batch = replace(masked, old_logprobs=frozen_logprobs(policy, masked, options))
        assert update(policy, optimizer, batch, options, 1e-3)["skipped_updates"] == 0
        moments.append(torch.cat([state["exp_avg"].flatten() for state in optimizer.adamw.state.values()]))
    torch.testing.assert_close(*moments, atol=1e-7, rtol=1e-4)
    unlikely = torch.tensor([[-200.0], [-200.0], [-200.0], [-2.0]]) * whole.mask  # exp(200) is infinite in fp32
    extreme = replace(whole, old_logprobs=unlikely, ref_logprobs=unlikely)
    one = extreme.only([False, False, False, True])
    metrics = update(policy, optimizer, one, replace(options, kl_coef=0.1), 1e-3)
    assert all(value is None or math.isfinite(value) for value in metrics.values())
    nothing = extreme.only([False] * 4)
    for kl_coef in (0.0, 0.1):
        metrics = update(policy, optimizer, nothing, replace(options, kl_coef=kl_coef), 1e-3)
        assert metrics["skipped_updates"] == 1


def test_first_loss_equals_the_formula_by_hand():
    options = GrpoConfig(objective="grpo", num_minibatches=1)
    _, metrics, _ = stepped(options, advantages=(1.0, -1.0, 2.0, 0.5))
    lengths, advantages = [4, 2, 6, 1], [1.0, -1.0, 2.0, 0.5]  # at ratio 1 the surrogate is -A on every token
    expected = -sum(n * a for n, a in zip(lengths, advantages, strict=True)) / sum(lengths)
    assert metrics["loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["clip_rate"] == 0.0


def by_hand(options: GrpoConfig) -> list[tuple[float, float]]:
    """(log pi, log mu) of every response token at the start, from plain float64 computations."""
    model = qwen2(tied=True)
    return [
        (value, mu)
        for rollout in rollouts()
        for value, mu in zip(plain_logprobs(model, rollout, 0.7).tolist(), rollout.logprobs, strict=True)
    ]


def test_two_policy_ratio_is_to_the_behavior_policy():
    options = GrpoConfig(old_policy="rollout", num_minibatches=1)
    _, metrics, _ = stepped(options)
    ratios = [math.exp(value - mu) for value, mu in by_hand(options)]
    assert metrics["ratio_mean"] == pytest.approx(sum(ratios) / len(ratios), rel=1e-4)
    k3 = [math.expm1(value - mu) - (value - mu) for value, mu in by_hand(options)]
    assert sum(k3) / len(k3) > 1e-3
    assert metrics["kl_old_new"] == pytest.approx(sum(k3) / len(k3), rel=1e-4)  # of the ratio's "old"


@pytest.mark.parametrize("objective", ["grpo", "dr_grpo", "gspo", "cispo"])
def test_the_first_minibatch_of_two_policies_shows_the_backends_clip_rate_and_ratio(objective):
    options = GrpoConfig(objective=objective, old_policy="rollout", num_minibatches=1)
    _, metrics, _ = stepped(options)
    batch = make_batch(rollouts(), torch.tensor((1.0, -1.0, 0.5, -0.5)))
    batch = replace(batch, old_logprobs=frozen_logprobs(Policy(qwen2(tied=True)), batch, options))
    backend = backend_metrics(batch, objective, options.clip, options.max_new_tokens)
    assert metrics["clip_rate"] > 0 or objective == "cispo"  # its cap of 5 is far away
    assert metrics["clip_rate"] == pytest.approx(backend["backend_clip_rate"], rel=1e-5)
    assert abs(metrics["ratio_mean"] - 1) > 0.01
    assert metrics["ratio_mean"] == pytest.approx(backend["backend_ratio_mean"], rel=1e-5)


def test_loss_with_tis_and_kl_equals_the_formula_by_hand():
    tokens = by_hand(GrpoConfig())
    cap = sorted(math.exp(value - mu) for value, mu in tokens)[6] * 1.01  # seven of the thirteen tokens are below it
    options = GrpoConfig(num_minibatches=1, tis="token", tis_cap=cap, kl_coef=0.3)
    advantages = (1.0, -1.0, 2.0, 0.5)
    _, metrics, _ = stepped(options, advantages)
    of_row = [a for rollout, a in zip(rollouts(), advantages, strict=True) for _ in rollout.token_ids]
    k3 = math.exp(-0.1) - 1 + 0.1  # `stepped` has a reference 0.1 nats below the policy, on every token
    weights = [min(math.exp(value - mu), cap) for value, mu in tokens]
    expected = sum(-w * a + 0.3 * k3 for w, a in zip(weights, of_row, strict=True)) / len(tokens)
    assert metrics["loss"] == pytest.approx(expected, rel=1e-4)
    assert metrics["kl_ref"] == pytest.approx(k3, rel=1e-3)
    assert metrics["tis_clip_frac"] == pytest.approx(6 / 13, rel=1e-4)


@pytest.mark.parametrize("tis", ["off", "token"])
@pytest.mark.parametrize("mean", ["all", "kept"])
def test_loss_with_rejected_tokens_equals_the_formula_by_hand(mean, tis):
    """Rejected tokens lose their surrogate. Of the KL term and of the mean they are a part only if `mean` is "all"."""
    tokens = by_hand(GrpoConfig())
    ratios = [math.exp(value - mu) for value, mu in tokens]
    low = sorted(ratios)[6] * 0.99  # seven of the thirteen tokens are above it
    cap = {"tis_cap": sorted(ratios)[10]} if tis == "token" else {}
    options = GrpoConfig(num_minibatches=1, tis=tis, kl_coef=0.3, reject="token", reject_low=low, reject_mean=mean,
                         **cap)  # fmt: skip
    advantages = (1.0, -1.0, 2.0, 0.5)
    _, metrics, _ = stepped(options, advantages)
    of_row = [a for rollout, a in zip(rollouts(), advantages, strict=True) for _ in rollout.token_ids]
    k3 = math.exp(-0.1) - 1 + 0.1
    losses = []
    for advantage, ratio in zip(of_row, ratios, strict=True):
        weight = min(ratio, options.tis_cap) if tis == "token" else 1.0
        surrogate = -weight * advantage if ratio >= low else 0.0
        losses.append(surrogate + 0.3 * k3 * (ratio >= low or mean == "all"))
    assert metrics["loss"] == pytest.approx(sum(losses) / (7 if mean == "kept" else 13), rel=1e-4)
    assert metrics["rejected_frac"] == pytest.approx(6 / 13, rel=1e-4)


@pytest.mark.parametrize("mean", ["all", "kept"])
def test_a_minibatch_whose_tokens_are_all_rejected_takes_no_step(mean):
    start = torch.cat([p.detach().flatten() for p in qwen2(tied=True).parameters()])
    options = GrpoConfig(num_minibatches=2, reject="binary_tv", reject_high=1e-12, reject_mean=mean)
    weights, metrics, _ = stepped(options, advantages=(1.0, -1.0, 2.0, 0.5))
    assert torch.equal(weights, start)
    assert (metrics["skipped_updates"], metrics["rejected_frac"], metrics["weights_ess"]) == (2, 1.0, 0.0)


def test_a_batch_without_signal_takes_no_step_and_says_so():
    start = torch.cat([p.detach().flatten() for p in qwen2(tied=True).parameters()])
    weights, metrics, _ = stepped(GrpoConfig(num_minibatches=2), advantages=(0.0, 0.0, 0.0, 0.0))
    assert torch.equal(weights, start)
    assert metrics["skipped_updates"] == 2
    assert metrics["loss"] is None
    half, metrics, _ = stepped(GrpoConfig(num_minibatches=2), advantages=(1.0, -1.0, 0.0, 0.0))
    assert metrics["skipped_updates"] == 1
    assert not torch.equal(half, start)


def test_a_nan_stops_the_update_before_the_weights_move():
    model = qwen2(tied=True)
    policy, optimizer = Policy(model), Optimizer(model, weight_decay=0.0)
    start = [p.detach().clone() for p in model.parameters()]
    batch = make_batch(rollouts(), torch.tensor([float("nan"), 1.0, 0.0, 0.0]))
    options = GrpoConfig(num_minibatches=1)
    batch = replace(batch, old_logprobs=frozen_logprobs(policy, batch, options))
    with pytest.raises(FloatingPointError):
        update(policy, optimizer, batch, options, 1e-3)
    assert all(torch.equal(a, b) for a, b in zip(start, model.parameters(), strict=True))


def test_bf16_masters_add_up_steps_too_small_for_bf16():
    parameter = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = Optimizer(torch.nn.ParameterList([parameter]), weight_decay=0.0)
    for _ in range(100):  # bf16 alone cannot leave 1.0 by steps of 1e-4: its spacing there is 4e-3
        optimizer.backward(parameter.sum())
        optimizer.step(lr=1e-4, grad_clip=1e9)
    assert parameter[0].item() == pytest.approx(0.99, abs=4e-3)
    assert optimizer.masters[0][0].item() == pytest.approx(0.99, abs=1e-4)


def test_gradients_of_micro_batches_add_up_in_fp32():
    parameter = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = Optimizer(torch.nn.ParameterList([parameter]), weight_decay=0.0)
    for gradient in [1.0] + [2**-10] * 64:  # bf16 has 8 bits: 1 + 2^-10 is 1 there
        optimizer.backward(gradient * parameter.sum())
        assert parameter.grad is None
    assert optimizer.masters[0].grad.item() == 1 + 64 * 2**-10


def test_fp16_halves_the_scale_after_an_overflow_and_skips_that_step_alone():
    def minibatch(optimizer: Optimizer, parameter: torch.nn.Parameter, slope: float) -> float:
        optimizer.backward((parameter.float() * slope).sum())
        return optimizer.step(lr=0.1, grad_clip=1e9)

    parameter = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
    optimizer = Optimizer(torch.nn.ParameterList([parameter]), weight_decay=0.0)
    assert not math.isfinite(minibatch(optimizer, parameter, 1.5))  # 1.5 * 2^16 is beyond fp16
    assert torch.equal(parameter, torch.ones_like(parameter))
    assert minibatch(optimizer, parameter, 1.5) == pytest.approx(3.0)  # at half the scale, and unscaled again
    assert parameter[0].item() == pytest.approx(0.9, abs=1e-3)
    tiny = 2.0**-30  # no fp16 number: the scale carries it
    assert minibatch(optimizer, parameter, tiny) == pytest.approx(2 * tiny, rel=1e-3)
    resumed = Optimizer(torch.nn.ParameterList([torch.nn.Parameter(parameter.detach().clone())]), weight_decay=0.0)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.scaler.get_scale() == optimizer.scaler.get_scale() == 2**15
    with pytest.raises(FloatingPointError):
        for _ in range(20):
            minibatch(optimizer, parameter, float("nan"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_offloaded_optimizer_goes_on_exactly_and_lies_in_its_host_memory_between_updates(dtype, device):
    weights = []
    for offload in (False, True):
        model = qwen2(tied=True, dtype=dtype).to(device)
        policy, optimizer = Policy(model), (OffloadedOptimizer if offload else Optimizer)(model, weight_decay=0.0)
        for _ in range(3):
            batch, options = make_batch(rollouts(), torch.tensor([1.0, -1.0, 0.5, -0.5]), device), GrpoConfig()
            batch = replace(batch, old_logprobs=frozen_logprobs(policy, batch, options))
            update(policy, optimizer, batch, options, 1e-3)
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        weights.append([each.detach().clone() for each in model.parameters()])
        host = optimizer.host if offload else {}
        held = {name for _, name in host}
        assert held == ({"step", "exp_avg", "exp_avg_sq"} | ({"master"} if dtype != torch.float32 else set())
                        if offload else set())
        for master in optimizer.masters:
            for name, moment in optimizer.adamw.state[master].items():
                assert (host.get((master, name)) is moment) == offload
            if offload and dtype != torch.float32:
                assert master.data_ptr() == host[master, "master"].data_ptr()
        assert all(each.is_pinned() == (device == "cuda") for each in host.values())
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_offload_leaves_masters_that_are_the_models_parameters_where_they_are():
    """transformers keeps some tensors of a 16-bit model in fp32. The engine's load and the forward pass need them."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(2, dtype=dtype))
                                    for dtype in (torch.float32, torch.bfloat16)])  # fmt: skip
    optimizer = OffloadedOptimizer(model, weight_decay=0.0)
    assert [master for master, name in optimizer.host if name == "master"] == [optimizer.masters[1]]


def uneven() -> torch.nn.ParameterList:
    """The last of the parameters never gets a gradient."""
    values = torch.arange(12.0).view(3, 4)
    return torch.nn.ParameterList(map(torch.nn.Parameter, (values.clone(), values[0].bfloat16(), values[1].clone())))


def step_uneven(optimizer: Optimizer, model: torch.nn.ParameterList) -> None:
    optimizer.backward((model[0] * model[0]).sum() + model[1].sum())
    optimizer.step(lr=1e-2, grad_clip=1.0)


def test_the_moments_are_there_at_the_start_as_torch_would_create_them():
    """In memory that is not mixed with activations. torch creates them in the first step: here one of gradients 0."""
    model = uneven()
    model.append(torch.nn.Parameter(torch.ones(3, 4).T))
    optimizer = Optimizer(model, weight_decay=0.1)
    theirs = torch.optim.AdamW(optimizer.masters, lr=0.0, fused=True)
    for master in optimizer.masters:
        master.grad = torch.zeros_like(master)
    theirs.step()
    for master in optimizer.masters:
        ours, expected = optimizer.adamw.state[master], theirs.state[master]
        assert list(ours) == list(expected)
        for name, value in ours.items():
            assert not value.any()
            for form in ("dtype", "device", "shape", "requires_grad"):
                assert getattr(value, form) == getattr(expected[name], form)
            assert value.stride() == expected[name].stride()


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("state", ["of the start", "of torch", "of an earlier build, saved before its first step"])
def test_moments_of_the_start_change_no_bit(state, offload):
    expected, model = uneven(), uneven()
    lazy, optimizer = Optimizer(expected, 0.1), (OffloadedOptimizer if offload else Optimizer)(model, 0.1)
    lazy.adamw.state.clear()  # torch creates them in the first step
    if state == "of torch":
        optimizer.adamw.state.clear()
    if state.startswith("of an earlier"):
        optimizer.load_state_dict(copy.deepcopy(lazy.state_dict()))
    for _ in range(3):
        step_uneven(lazy, expected)
        with optimizer.on_device():
            step_uneven(optimizer, model)
    assert all(torch.equal(a, b) for a, b in zip(expected, model, strict=True))
    assert len(lazy.adamw.state) == 2


def test_a_load_frees_the_moments_of_the_start_first():
    model = uneven()
    optimizer, held = Optimizer(model, 0.0), []
    step_uneven(optimizer, model)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.adamw.register_load_state_dict_pre_hook(lambda adamw, _: held.append(len(adamw.state)))
    optimizer.load_state_dict(state)
    assert held == [0]
    assert [each["step"] for each in optimizer.adamw.state.values()] == [1, 1, 0]


@pytest.mark.parametrize("shapes", [
    [(151_936, 896), *[(4864, 896), (896, 4864), (896, 4864), (896, 896), (128, 896), (128,), (896,), ()] * 24],
    [(152_064, 3584), (152_064, 3584), *[(18_944, 3584)] * 84, *[(3584, 3584)] * 56, *[(512, 3584)] * 56, (3584,)],
    [(3, 5), (7,), (), (2, 2, 2)], [(1000,)], [],
])  # fmt: skip
def test_host_views_do_not_overlap_and_their_slabs_are_powers_of_two_with_small_gaps(shapes):
    with FakeTensorMode():  # up to 30 GiB, of which nothing is allocated
        tensors = {index: torch.empty(shape) for index, shape in enumerate(shapes)}
        views = host_views(tensors, torch.device("cpu"))
    assert {key: (view.shape, view.dtype) for key, view in views.items()} == {
        key: (tensor.shape, torch.float32) for key, tensor in tensors.items()}  # fmt: skip
    by_slab = defaultdict(list)
    for view in views.values():
        by_slab[view.untyped_storage()].append((view.storage_offset(), view.storage_offset() + view.numel()))
    for slab, ranges in by_slab.items():
        assert slab.nbytes() & (slab.nbytes() - 1) == 0  # torch would round any other size up
        ranges.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
        assert 4 * ranges[-1][1] <= slab.nbytes()
    wanted = sum(tensor.nbytes for tensor in tensors.values())
    if len(shapes) > 100:
        assert sum(slab.nbytes() for slab in by_slab) < 1.01 * wanted


def test_a_restored_optimizer_goes_on_exactly_masters_included():
    def fresh() -> tuple[torch.nn.Parameter, Optimizer]:
        parameter = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
        return parameter, Optimizer(torch.nn.ParameterList([parameter]), weight_decay=0.0)

    def step(parameter: torch.nn.Parameter, optimizer: Optimizer, seed: int) -> None:
        slopes = torch.randn(8, generator=torch.Generator().manual_seed(seed)).bfloat16()
        optimizer.backward((slopes * parameter).sum())
        optimizer.step(lr=1e-4, grad_clip=1.0)

    parameter, optimizer = fresh()
    step(parameter, optimizer, 0)
    again, restored = fresh()
    with torch.no_grad():
        again.copy_(parameter)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(parameter, optimizer, 1)
    step(again, restored, 1)
    assert torch.equal(optimizer.masters[0], restored.masters[0])


def test_rows_are_cut_to_the_longest_of_them():
    batch = make_batch(rollouts())
    assert batch.inputs.shape[1] == 7
    assert batch.rows(torch.tensor([3])).inputs.shape == (1, 4)
    assert batch.rows(torch.tensor([0, 3])).inputs.shape == (2, 6)


# ------------------------------------------------------------------------------------------------ processed logits
@pytest.mark.parametrize("options", [
    {}, {"temperature": 0.3}, {"temperature": 0.0, "top_k": 2, "presence_penalty": 1.0}, {"top_k": 3}, {"top_p": 0.6},
    {"min_p": 0.1}, {"top_k": 5, "top_p": 0.7}, {"min_p": 0.05, "top_k": 6, "top_p": 0.95}, {"repetition_penalty": 1.5},
    {"presence_penalty": 0.7}, {"frequency_penalty": 0.4}, {"top_k": 99}, {"top_p": 0.01},
    {"repetition_penalty": 0.8, "presence_penalty": -0.3, "frequency_penalty": 0.2, "temperature": 0.6, "top_p": 0.8},
])  # fmt: skip
def test_processed_distribution_is_the_one_of_the_book_in_vllms_order(options):
    sampling = Sampling(**{"temperature": 1.0, "max_new_tokens": 1} | options)
    generator = torch.Generator().manual_seed(5)
    logits = 2 * torch.randn(6, 12, generator=generator, dtype=torch.float64)
    in_prompt = torch.rand(6, 12, generator=generator) < 0.3
    counts = torch.randint(0, 3, (6, 12), generator=generator)
    found = torch.softmax(process_logits(logits, sampling, in_prompt, counts), dim=-1)
    for row in range(6):
        prompt = set(in_prompt[row].nonzero()[:, 0].tolist())
        expected = by_the_book(logits[row].tolist(), prompt, counts[row].tolist(), sampling)
        assert found[row].tolist() == pytest.approx(expected, abs=1e-12)
