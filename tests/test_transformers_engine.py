"""The transformers engine against the trainer's own forward, plain counting, and the vLLM contract."""

import math
from collections import Counter
from types import SimpleNamespace

from helpers import AT_PARITY, PROMPTS, WARM, floors_of, move_and_load, parametrize, small_model, value_error

from engine_adapter import Sampling
from extras.transformers_engine import TransformersEngine
from rl import Policy


def ready(policy, **options):
    engine = TransformersEngine(policy, **options)
    engine.load(policy.weights())
    return engine


@parametrize("name, changes, max_num_seqs", [
    ("Qwen2", {}, 64), ("GPT2", {}, 3),  # 3: rollouts queue, cohorts of all sizes; GPT2 has learned positions
    ("Gemma2", dict(sliding_window=8), 3),
])  # fmt: skip
def test_it_has_no_mismatch_before_and_after_updates(name, changes, max_num_seqs):
    policy = Policy(small_model(name, name == "Gemma2", **changes))
    for parameter in policy.model.parameters():  # so that a wrong position shows
        parameter.data *= 1.5
    engine = ready(policy, max_num_seqs=max_num_seqs)
    for seed in range(2):
        rollouts = engine.generate(PROMPTS, 4, WARM)
        assert [each.prompt_ids for each in rollouts] == [prompt for prompt in PROMPTS for _ in range(4)]  # group-major
        assert floors_of(policy, rollouts, WARM.temperature) < AT_PARITY
        move_and_load(policy, engine, 0.05, seed)


def test_it_samples_from_the_distribution_it_reports(policy):
    rollouts = ready(policy, max_num_seqs=4096).generate([[5, 6, 7]], 4096, Sampling(0.7, 1))
    counts = Counter((r.token_ids[0], math.exp(r.logprobs[0])) for r in rollouts)
    likely = {share: count / 4096 for (_, share), count in counts.items() if share > 0.02}
    assert len(likely) > 2
    assert all(abs(count - share) < 6 * (share / 4096) ** 0.5 for share, count in likely.items())


def test_an_argument_of_vllm_is_refused():
    run = SimpleNamespace(further={"kv_cache_dtype": "fp8"})
    with value_error("engine must be vllm with an option that sets an argument of vLLM"):
        TransformersEngine.start(run, None)


