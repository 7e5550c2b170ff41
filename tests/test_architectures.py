"""Each architecture as a small random model of its real configuration class: trainer and live engine agree.

`python tests/test_architectures.py [NAME ...]` prints the README's table.
"""

import json
import subprocess
import sys
import tempfile
from typing import Any

import pytest
import torch
import transformers
from test_engine_adapter import mismatch, move, started
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine_adapter import Sampling
from rl import Policy, attention_for

SIZES = dict(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=1, max_position_embeddings=256, initializer_range=0.1,
             pad_token_id=0, bos_token_id=1, eos_token_id=2)  # fmt: skip
WINDOW = dict(head_dim=32, sliding_window=16)
NAMES = ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2", "Gemma3Text", "Phi3", "Granite", "Olmo2", "SmolLM3", "Cohere",
         "GPT2"]  # fmt: skip
ALWAYS_TIED = ("Gemma2", "Cohere")  # vLLM takes their logits from the embedding
# vLLM serves these through its Transformers backend, which leaves their Python class patched: one a process.
PATCHED = ("Olmo2", "SmolLM3")
EXTRAS = {"Gemma2": "soft-capping", "Granite": "logits / 5", "Cohere": "logits x 0.3"}
CASES = [(name, tied) for name in NAMES for tied in ((True,) if name in ALWAYS_TIED else (True, False))]
OPTIONS = {
    "Qwen3": dict(head_dim=32), "Mistral": WINDOW, "Gemma2": WINDOW | dict(query_pre_attn_scalar=32),
    "Gemma3Text": WINDOW | dict(query_pre_attn_scalar=32), "Granite": dict(logits_scaling=5.0),
    "Cohere": dict(logit_scale=0.3), "GPT2": dict(n_embd=64, n_layer=2, n_head=2, n_positions=256),
}  # fmt: skip
PROMPTS = [list(range(5 + i, 29 + i)) for i in range(4)]  # with the responses 56 tokens: a window of 16 cuts
SAMPLING = Sampling(temperature=0.7, max_new_tokens=32)


def small_model(name: str, tied: bool, **changes) -> PreTrainedModel:
    torch.manual_seed(0)
    options = SIZES | OPTIONS.get(name, {}) | changes | {"tie_word_embeddings": tied}
    config = getattr(transformers, name + "Config")(**options)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")  # sdpa would lose soft-capping
    if not tied:  # logits wide enough that a lost scale, cap or window shows; a tied model would only echo its input
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(3)
    return model.eval()


def measure_alone(name: str, tied: bool) -> dict[str, Any]:
    """In a process of its own."""
    command = [sys.executable, __file__, "--json", name, str(tied)]
    result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    return json.loads(result.stdout.splitlines()[-1])


def measure(name: str, tied: bool, folder: str) -> dict[str, Any]:
    """Trainer attention, vLLM's class, mean |trainer - engine| before and after each of three changed loads, nats."""
    small_model(name, tied).save_pretrained(folder)
    policy = Policy.load(folder, torch.float32, "cpu")
    with started(folder, policy) as engine:
        before, after = mismatch(policy, engine, SAMPLING, PROMPTS)["mismatch_abs_mean"], []
        for seed in range(3):
            move(policy, 0.02, seed)
            engine.load(policy.weights(), policy.score)
            after.append(mismatch(policy, engine, SAMPLING, PROMPTS)["mismatch_abs_mean"])
        return {"attention": policy.model.config._attn_implementation, "vllm": type(engine._model).__name__,
                "before": before, "after": after}


@pytest.mark.parametrize("name, tied", CASES)
def test_trainer_and_engine_agree_before_and_after_three_loads(name, tied, tmp_path):
    found = measure_alone(name, tied) if name in PATCHED else measure(name, tied, str(tmp_path))
    assert max(found["before"], *found["after"]) <= 2e-5


@pytest.mark.parametrize("name, tied", CASES)
def test_the_chunked_head_is_the_models_own_forward(name, tied):
    model = small_model(name, tied)
    policy = Policy(model, chunk_elements=96 * 5)
    prompts = torch.tensor(PROMPTS)  # (4, 24)
    ours = torch.tensor(policy.score(prompts.tolist(), 1))  # (4, 23)
    with torch.no_grad():
        theirs = torch.log_softmax(model(input_ids=prompts).logits.double(), dim=-1)  # (4, 24, V)
    expected = torch.stack([theirs[:, t].gather(1, prompts[:, t + 1, None])[:, 0] for t in range(23)], dim=1)
    torch.testing.assert_close(ours.double(), expected, atol=2e-5, rtol=0)
    assert theirs[:, -1].std() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name, tied", CASES)
def test_the_second_path_of_the_noise_floor_differs_by_rounding_alone(name, tied, dtype):
    """Not at all would be no floor; by more would be another attention: a lost window, cap, scale or group of heads."""
    policy = Policy(small_model(name, tied).to(dtype))
    policy.model.set_attn_implementation(attention_for(policy.model.config))
    ids = torch.tensor(PROMPTS)
    with torch.no_grad():
        ours = policy.hidden(ids).double()
        with policy.attending("blockwise"):
            other = policy.hidden(ids).double()
    apart = ((ours - other).norm() / ours.norm()).item()
    low, high = {torch.float32: (1e-8, 1e-5), torch.bfloat16: (1e-3, 3e-2)}[dtype]
    assert low < apart < high


def test_fp16_is_refused_by_name_where_a_model_overflows_in_it(tmp_path):
    small_model("Gemma2", True).save_pretrained(tmp_path)
    policy = Policy.load(str(tmp_path), torch.float16, "cpu")
    with pytest.raises(ValueError, match="'gemma2' does not support float16"), started(str(tmp_path), policy):
        pass


def test_a_sliding_window_and_soft_capping_really_shape_these_models():
    """Else the matrix would prove nothing about them."""
    ids = torch.arange(5, 61)[None]
    for name, change in (("Mistral", {"sliding_window": 500}), ("Gemma2", {"attn_logit_softcapping": 0.1}),
                         ("Gemma2", {"final_logit_softcapping": 1.0}), ("Gemma3Text", {"sliding_window": 500})):
        model, other = small_model(name, True), small_model(name, True, **change)
        other.load_state_dict(model.state_dict())
        with torch.no_grad():
            assert (model(input_ids=ids).logits - other(input_ids=ids).logits).abs().max() > 1e-3, (name, change)


def main(names: list[str]) -> None:
    print("| architecture | tied | after the head | trainer's attention | in vLLM | before | after three loads |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for name, tied in CASES:
        if not names or name in names:
            with tempfile.TemporaryDirectory() as folder:
                found = measure_alone(name, tied) if name in PATCHED else measure(name, tied, folder)
            cells = (name, "yes" if tied else "no", EXTRAS.get(name, ""), found["attention"], found["vllm"],
                     f"{found['before']:.1e}", f"{max(found['after']):.1e}")
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--json"]:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(sys.argv[2], sys.argv[3] == "True", folder)))
    else:
        main(sys.argv[1:])
