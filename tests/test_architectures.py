"""Each architecture as a small random model of its real configuration class: trainer and live engine agree."""

import sys
import tempfile

import pytest
import torch
import transformers
from test_engine_adapter import mismatch, move, started
from transformers import AutoModelForCausalLM

from engine_adapter import Sampling
from rl import Policy

SIZES = dict(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=1, max_position_embeddings=256, initializer_range=0.1,
             pad_token_id=0, bos_token_id=1, eos_token_id=2)  # fmt: skip
WINDOW = dict(head_dim=32, sliding_window=16)
NAMES = ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2", "Gemma3Text", "Phi3", "Granite", "Olmo2", "SmolLM3", "Cohere",
         "GPT2"]  # fmt: skip
ALWAYS_TIED = ("Gemma2", "Cohere")  # vLLM takes their logits from the embedding
CASES = [(name, tied) for name in NAMES for tied in ((True,) if name in ALWAYS_TIED else (True, False))]
OPTIONS = {
    "Qwen3": dict(head_dim=32), "Mistral": WINDOW, "Gemma2": WINDOW | dict(query_pre_attn_scalar=32),
    "Gemma3Text": WINDOW | dict(query_pre_attn_scalar=32), "Granite": dict(logits_scaling=5.0),
    "Cohere": dict(logit_scale=0.3), "GPT2": dict(n_embd=64, n_layer=2, n_head=2, n_positions=256),
}  # fmt: skip
PROMPTS = [list(range(5 + i, 29 + i)) for i in range(4)]  # with the responses 56 tokens: a window of 16 cuts
SAMPLING = Sampling(temperature=0.7, max_new_tokens=32)


def measure(name: str, tied: bool, folder: str) -> tuple[str, str, float, list[float]]:
    """Trainer attention, vLLM's class, mean |trainer - engine| before and after each of three changed loads, nats."""
    torch.manual_seed(0)
    config = getattr(transformers, name + "Config")(**SIZES | OPTIONS.get(name, {}), tie_word_embeddings=tied)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    policy = Policy.load(folder, torch.float32, "cpu")
    with started(folder, policy) as engine:
        before, after = mismatch(policy, engine, SAMPLING, PROMPTS)["mismatch_abs_mean"], []
        for seed in range(3):
            move(policy, 0.02, seed)
            engine.load(policy.weights(), policy.score)
            after.append(mismatch(policy, engine, SAMPLING, PROMPTS)["mismatch_abs_mean"])
        return policy.model.config._attn_implementation, type(engine._model).__name__, before, after


@pytest.mark.parametrize("name, tied", CASES)
def test_trainer_and_engine_agree_before_and_after_three_loads(name, tied, tmp_path):
    _, _, before, after = measure(name, tied, str(tmp_path))
    assert max(before, *after) <= 2e-5


def main(names: list[str]) -> None:
    """The README's table: `python tests/test_architectures.py [NAME ...]`."""
    print("| architecture | tied | trainer attention | vLLM implementation | before | after three loads |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    for name, tied in CASES:
        if not names or name in names:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    attention, implementation, before, after = measure(name, tied, folder)
                    row = f"{attention} | {implementation} | {before:.1e} | {max(after):.1e}"
                except Exception as error:
                    row = f"FAILED: {type(error).__name__}: {str(error)[:150]}"
            print(f"| {name} | {'yes' if tied else 'no'} | {row} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
