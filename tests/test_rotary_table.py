"""One rotary table for a run, also where transformers chooses it by the longest position of a batch."""

from copy import deepcopy
from dataclasses import replace
from shutil import copytree

import pytest
import torch
from helpers import WARM, built, rewrite, small_model

from engine_adapter import Rollout, Sampling
from extras.prompts_once import prompts_once
from extras.rotary_table import give_one_table, with_one_table
from extras.transformers_engine import TransformersEngine
from probe.traces import Trace
from rl import Policy, make_batch, row_by_row
from verify.decode import decoded_body

SHORT, LONG = torch.full((16,), 1.1), 1.0 + torch.arange(16)  # factors of 16 angles
# 256 / 16 tokens scale cosine and sine by sqrt(1 + log 16 / log 16), if no key says otherwise
ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16,
        "short_factor": SHORT.tolist(), "long_factor": LONG.tolist()}  # fmt: skip
SCALES = {"short_mscale": 1.1, "long_mscale": 1.2}
BY_LAYERS = {"sliding_attention": ROPE, "full_attention": ROPE}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0, "max_trained_positions": 8}  # of a context of 16


@pytest.mark.parametrize("name, rope, longest, factors, scale", [
    ("Phi3", ROPE, None, LONG, 2**0.5), ("Phi3", ROPE, 16, SHORT, 2**0.5), ("Phi3", ROPE, 17, LONG, 2**0.5),
    ("PhiMoE", ROPE | SCALES, 17, LONG, 1.2), ("Qwen2", ROPE | {"attention_factor": 1.3}, 17, LONG, 1.3),
    ("Gemma3Text", BY_LAYERS, 17, LONG, 2**0.5), ("Llama", DYNAMIC, 16, torch.ones(16), 1.0),
])  # fmt: skip
def test_all_bodies_compute_with_one_table_whatever_rows_stand_together(name, rope, longest, factors, scale):
    context = {"original_max_position_embeddings": 16, "max_position_embeddings": 16 if rope is DYNAMIC else 256}
    model = small_model(name, rope_parameters=deepcopy(rope), **context).double()
    model.set_experts_implementation("eager")  # torch has no grouped float64 product
    oracle, exported = deepcopy(model), model.config.to_dict()
    give_one_table(model, longest)
    policy = Policy(model, fp32_head=False)
    assert model.config.to_dict() == exported
    assert "max_trained_positions" not in str(with_one_table(model.config, longest))  # which only vLLM would follow

    def table(states: torch.Tensor, position_ids: torch.Tensor, *_, **__) -> list[torch.Tensor]:
        angles = (position_ids[..., None] / (factors * 1e4 ** (torch.arange(16) / 16))).repeat(1, 1, 2)
        return [(scale * each).to(states) for each in (angles.cos(), angles.sin())]

    oracle.base_model.rotary_emb.forward = table
    engine = TransformersEngine(policy)
    engine.state = "ready"
    rollouts = [each for size in (4, 40, 12, 13, 14) for each in engine.generate([[5, 6, 0]], 1, Sampling(1.0, size))]
    batch = make_batch(rollouts)
    batch, response = replace(batch, mask=batch.mask.double()), batch.mask > 0
    with torch.no_grad():
        logits = torch.cat([oracle(torch.tensor([row.prompt_ids + row.token_ids])).logits[0, 2:-1] for row in rollouts])
        found = {body.__name__: policy.changed(body=body).score(batch)["logprobs"][response]
                 for body in (row_by_row, prompts_once, decoded_body)}  # fmt: skip
    alone = logits.log_softmax(dim=-1).gather(1, batch.targets[response][:, None])[:, 0]
    found["sampled"] = batch.behavior_logprobs[response].double()
    for body, logprobs in found.items():
        torch.testing.assert_close(logprobs, alone, atol=1e-5, rtol=0, msg=body)


def test_a_run_has_the_table_of_its_longest_row_and_a_trace_that_of_its_engine(good, tmp_path):
    copytree(good / "model", tmp_path / "model")
    rewrite("config.json", rope_parameters=ROPE)(tmp_path / "model")
    for new, factors in ((4, SHORT), (16, LONG)):
        trainer = built(good, tmp_path / str(new), model=str(tmp_path / "model"), max_new_tokens=new)
        frequencies = trainer.policy.model.base_model.rotary_emb.inv_freq
        torch.testing.assert_close(frequencies * factors, 1e4 ** (-torch.arange(16) / 16))
    metas = {}, {"audit": {"max_model_len": 64}}, {"settings": {"model_config.max_model_len": 65}}
    assert [Trace("", [Rollout([5], None, [6])], WARM, meta).longest for meta in metas] == [2, 64, 65]
