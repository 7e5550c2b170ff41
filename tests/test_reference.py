"""The reference backend against the trainer's own forward, plain counting, and the vLLM contract."""

import math
from collections import Counter

import pytest
import torch
from helpers import PROMPTS, SEEDS, WARM, mismatch, move, qwen2
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, MistralConfig

from engine_adapter import EngineStateError, Sampling, WeightLoadError, reseed
from extras.reference import ReferenceEngine
from rl import Policy


def ready(policy: Policy, **options) -> ReferenceEngine:
    engine = ReferenceEngine(policy, **options)
    engine.load(policy.weights(), policy.response_logprobs)
    return engine


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("max_num_seqs", [3, 64])  # 3: rollouts queue, cohorts of all sizes
def test_it_has_no_mismatch_before_and_after_updates(tied, max_num_seqs):
    policy = Policy(qwen2(tied=tied))
    engine = ready(policy, max_num_seqs=max_num_seqs)
    for seed in range(3):
        assert mismatch(policy, engine)["mismatch_abs_mean"] < 1e-5
        engine.sleep()
        move(policy, 0.05, seed)
        engine.wake()
        engine.load(policy.weights(), policy.response_logprobs)
    greedy = engine.generate(PROMPTS, 1, Sampling(0.0, 5), SEEDS)
    assert max(abs(r.logprobs[0] - policy.response_logprobs([r.prompt_ids + r.token_ids], len(r.prompt_ids))[0][0])
               for r in greedy) < 1e-4  # fmt: skip


@pytest.mark.parametrize("config", [
    GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=2, n_positions=256),
    MistralConfig(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
                  num_key_value_heads=1, sliding_window=8),
    Gemma2Config(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
                 num_key_value_heads=1, head_dim=32, sliding_window=8),
], ids=["learned positions", "sliding window", "soft-capping"])  # fmt: skip
def test_padding_positions_and_windows_are_those_of_the_trainer(config, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    model.save_pretrained(tmp_path)
    policy = Policy.load(str(tmp_path), torch.float32, "cpu")
    assert mismatch(policy, ready(policy, max_num_seqs=3))["mismatch_abs_mean"] < 1e-5


@pytest.mark.parametrize("seeds", [[10**6], None])
def test_it_samples_from_the_distribution_it_reports(seeds):
    policy = Policy(qwen2(tied=False))
    engine = ready(policy, max_num_seqs=4096)
    rollouts = engine.generate([[5, 6, 7]], 4096, Sampling(0.7, 1), seeds)
    expected = {r.token_ids[0]: math.exp(r.logprobs[0]) for r in rollouts}
    counts = Counter(r.token_ids[0] for r in rollouts)
    likely = {token: p for token, p in expected.items() if 4096 * p > 20}
    chi2 = sum((counts[t] - 4096 * p) ** 2 / (4096 * p * (1 - p)) for t, p in likely.items())
    assert len(likely) > 5
    assert chi2 < 2.5 * len(likely)


def test_seeds_decide_the_samples_whatever_runs_beside_them():
    policy = Policy(qwen2(tied=False))
    first = ready(policy).generate(PROMPTS, 3, WARM, SEEDS)
    again = ready(policy, max_num_seqs=2).generate(PROMPTS, 3, WARM, SEEDS)
    alone = ready(policy).generate(PROMPTS[1:2], 1, WARM, [SEEDS[1] + 2])
    assert [r.token_ids for r in first] == [r.token_ids for r in again]
    assert alone[0].token_ids == first[5].token_ids
    assert len({tuple(r.token_ids) for r in first}) == 12
    assert [r.prompt_ids for r in first] == [p for p in PROMPTS for _ in range(3)]  # group-major


def test_states_foreign_weights_and_penalties_are_refused():
    policy = Policy(qwen2(tied=False))
    engine = ReferenceEngine(policy)
    with pytest.raises(EngineStateError, match=r"empty: load\(\) the weights first"):
        engine.generate(PROMPTS, 1, WARM, SEEDS)
    earlier = {name: tensor.clone() for name, tensor in policy.weights().items()}
    move(policy)
    with pytest.raises(WeightLoadError, match="its policy's own weights"):
        engine.load(earlier, policy.response_logprobs)
    engine.load(policy.weights(), policy.response_logprobs)
    with pytest.raises(ValueError, match="without penalties"):
        engine.generate(PROMPTS, 1, Sampling(1.0, 4, presence_penalty=0.5), SEEDS)
    engine.sleep()
    for call in (engine.sleep, lambda: engine.load(policy.weights(), policy.response_logprobs)):
        with pytest.raises(EngineStateError):
            call()
    engine.wake()
    with pytest.raises(EngineStateError, match="wake needs"):
        engine.wake()


def test_without_seeds_of_their_own_the_seed_of_the_process_decides_the_samples():
    engine, batches = ready(Policy(qwen2(tied=False))), []
    for seed in (5, 5, 6):
        reseed(seed)
        batches.append([rollout.token_ids for rollout in engine.generate(PROMPTS, 3, WARM)])
    assert batches[0] == batches[1] != batches[2]
    assert len(set(map(tuple, batches[0]))) == 12
