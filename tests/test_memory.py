"""lab.memory: its terms by hand, and its activations beside what autograd keeps."""

import re
import shlex

import pytest
import torch
import tyro
from helpers import ROOT, config_of
from transformers import Qwen2Config, Qwen2ForCausalLM

from lab.memory import CONTEXT, GIB, Options, main, phases
from lab.models import SHAPES
from rl import head_chunk

SHAPE = dict(vocab_size=1000, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=2, tie_word_embeddings=True)  # fmt: skip
# Embedding; per layer: queries and output, keys and values of half the heads, biases, the MLP, two norms; a last norm
PARAMETERS = 1000 * 256 + 4 * (2 * 256**2 + 2 * 256 * 128 + 256 + 2 * 128 + 3 * 256 * 1024 + 2 * 256) + 256
HEAD = 4 * 2**25 * 4  # chunks of 2^25 logits


def terms(phase: str, **options) -> dict[str, float]:
    job = dict(dtype="bfloat16", micro_batch_tokens=1024, max_new_tokens=64, kv_cache_gib=2.0, max_num_seqs=10)
    return phases(config_of(**job | options), Qwen2Config(**SHAPE), 100, 2**25)[phase]


def test_full_training_has_18_bytes_a_parameter_in_16_bits_and_adapters_have_16_each_beside_the_frozen_2():
    activations = 4 * 1024 * (16 * 256 + 2 * (8 * 256 + 4 * 1024)) + HEAD
    assert terms("update") == dict(weights=2 * PARAMETERS, optimizer=12 * PARAMETERS, gradients=4 * PARAMETERS,
                                   activations=activations, context=CONTEXT)  # fmt: skip
    assert terms("generate")["engine"] == 2 * PARAMETERS + 2 * GIB + 4 * 10 * 1000 * 4
    assert terms("update", inflight_groups=4)["engine"] == 2 * PARAMETERS + 2 * GIB

    def held(**options) -> float:
        update = terms("update", **options)
        return update["weights"] + update["optimizer"] + update["gradients"]

    assert held(dtype="float32") == 16 * PARAMETERS
    # Of a layer: queries and output, keys and values, the MLP
    adapters = 8 * 4 * (2 * 512 + 2 * (256 + 128) + 3 * (256 + 1024))
    assert held(lora_rank=8, kl_coef=0.1) == 2 * PARAMETERS + (16 + 4) * adapters  # with the KL's reference


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_activations_are_what_autograd_keeps(dtype):
    model, kept = Qwen2ForCausalLM(Qwen2Config(**SHAPE)).to(getattr(torch, dtype)), {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model.model(input_ids=torch.zeros(4, 256, dtype=torch.long)).last_hidden_state
    for parameter in model.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    assert (terms("update", dtype=dtype)["activations"] - HEAD) / sum(kept.values()) == pytest.approx(1.0, abs=0.15)
    assert hidden.requires_grad  # the graph was alive while the bytes were counted


def test_the_command_says_whether_a_job_fits(good, capsys):
    for gib, status, words in (("8", 0, ": fits 8 GiB"), ("3", 1, ": does NOT fit 3 GiB")):
        assert main(["--model", str(good / "model"), "--kv-cache-gib", "2", "--gib", gib]) == status
        assert words in capsys.readouterr().out


COLUMNS = "weights", "optimizer", "gradients", "activations", "engine", "context"
SMALL = "--gradient-checkpointing --offload-optimizer"


def computed(shape: str, words: str) -> list[list[str]]:
    """Columns of the page's table, and their sum, for each phase."""
    config = tyro.cli(Options, args=shlex.split(words))
    model = Qwen2Config(**SHAPES[shape], tie_word_embeddings=True)
    by_phase = phases(config, model, config.data.max_prompt_tokens or 0, head_chunk(config.gib))
    sizes = [[*(row.get(name, 0) for name in COLUMNS), sum(row.values())] for row in by_phase.values()]
    return [[f"{size / GIB:.1f}" if size else "0" for size in row] for row in sizes]


def peak(shape: str, words: str) -> str:
    return max((row[-1] for row in computed(shape, words)), key=float)


def test_the_pages_figures_are_those_of_its_commands():
    page = " ".join((ROOT / "docs" / "run.md").read_text().replace("\\\n", " ").split())
    ours = re.search(r"lab\.memory (--gib .*?) The", page)[1]
    recipe = re.search(r"train\.py (--out runs/gsm8k.*?) For", page)[1]
    smaller = re.search(r"For 24 GB: `(.*?)`", page)[1]
    for row in (*computed("qwen2.5-1.5b", ours), *computed("qwen2.5-1.5b", f"{ours} {SMALL}")):
        assert f"| {' | '.join(row)} |" in page
    assert f"(computed peak {peak('qwen2.5-0.5b', f'{recipe} --gib 40')} GiB with 40 GB;" in page
    assert f"(computed peak {peak('qwen2.5-0.5b', f'{recipe} {smaller} --gib 24')} GiB)" in page
