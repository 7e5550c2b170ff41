"""lab.memory: its terms by hand, and its activations beside what autograd keeps."""

import re
import shlex

import pytest
import torch
import tyro
from helpers import ROOT, config_of, refusal
from transformers import Qwen2Config, Qwen2ForCausalLM

from lab.memory import CONTEXT, GIB, Options, main, phases
from lab.models import SHAPES
from rl import head_chunk

SHAPE = dict(vocab_size=1000, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=2, tie_word_embeddings=True)  # fmt: skip
# Embedding; per layer: queries and output, keys and values of half the heads, biases, the MLP, two norms; a last norm
PARAMETERS = 1000 * 256 + 4 * (2 * 256**2 + 2 * 256 * 128 + 256 + 2 * 128 + 3 * 256 * 1024 + 2 * 256) + 256


def terms(phase: str, **options) -> dict[str, float]:
    job = dict(dtype="bfloat16", micro_batch_tokens=4096, kv_cache_gib=2.0, max_num_seqs=10)
    return phases(config_of(**job | options), Qwen2Config(**SHAPE), 100, 2**25)[phase]


def test_full_training_in_16_bits_has_18_bytes_a_parameter_in_the_update():
    weights, optimizer = 2 * PARAMETERS, {"masters": 4 * PARAMETERS, "moments": 8 * PARAMETERS}
    activations = 4 * 4096 * (16 * 256 + 2 * (8 * 256 + 4 * 1024))
    update = {"weights": weights, "adapters": 0, "context": CONTEXT, "gradients": 4 * PARAMETERS,
              "activations": activations, "head": 4 * 2**25 * 4} | optimizer  # fmt: skip
    assert terms("update") == update
    generate = {"weights": weights, "adapters": 0, "context": CONTEXT, "engine": weights, "kv cache": 2 * GIB,
                "sampler": 4 * 10 * 1000 * 4} | optimizer  # fmt: skip
    assert terms("generate") == generate
    wide = terms("update", dtype="float32")
    assert [wide[name] / PARAMETERS for name in ("weights", "masters", "moments", "gradients")] == [4, 0, 8, 4]
    assert terms("update", kl_coef=0.1)["weights"] == 2 * weights  # and the first policy's
    checkpointed = terms("update", gradient_checkpointing=True)["activations"]
    assert checkpointed == 4 * 4096 * 2 * 256 + activations / 4
    assert not terms("generate", offload_optimizer=True).keys() & optimizer.keys()
    assert terms("generate", engine="shared") == generate | {"engine": 0}
    assert terms("update", inflight_groups=4) == update | {"engine": weights, "kv cache": 2 * GIB}


def test_adapters_have_16_bytes_each_and_the_frozen_model_2_a_parameter():
    update = terms("update", lora_rank=8, kl_coef=0.1)
    # Of a layer: queries and output, keys and values, the MLP
    adapters = 8 * 4 * (2 * 512 + 2 * (256 + 128) + 3 * (256 + 1024))
    names = "weights", "adapters", "masters", "moments", "gradients"
    assert sum(update[name] for name in names) == 2 * PARAMETERS + (16 + 4) * adapters  # with the KL's reference


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_activations_are_what_autograd_keeps(dtype):
    model, kept = Qwen2ForCausalLM(Qwen2Config(**SHAPE)).to(getattr(torch, dtype)), {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model.model(input_ids=torch.zeros(4, 1024, dtype=torch.long)).last_hidden_state
    for parameter in model.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    assert terms("update", dtype=dtype)["activations"] / sum(kept.values()) == pytest.approx(1.0, abs=0.15)
    assert hidden.requires_grad  # the graph was alive while the bytes were counted


def test_the_command_says_whether_a_job_fits(capsys):
    for gib, status, words in (("8", 0, ": fits 8 GiB"), ("3", 1, ": does NOT fit 3 GiB")):
        assert main(["--dtype", "bfloat16", "--kv-cache-gib", "2", "--gib", gib]) == status
        assert words in capsys.readouterr().out
    said = refusal(["--model", "/absent"], capsys, main)
    assert "reading a model folder or a reachable hub name, /absent, failed" in said


COLUMNS = (("weights",), ("masters", "moments"), ("gradients",), ("activations", "head"),
           ("engine", "kv cache", "sampler"), ("context",))  # fmt: skip
ROWS = ["generate, load", "update", "generate, with checkpointing and offload", "update, the same"]
SMALL, LARGE = "--gradient-checkpointing --offload-optimizer", "--gradient-checkpointing --lora-rank 16"
QWEN = SHAPES | {"3B": dict(vocab_size=151936, hidden_size=2048, intermediate_size=11008, num_hidden_layers=36,
                            num_attention_heads=16, num_key_value_heads=2),
                 "7B": dict(vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
                            num_attention_heads=28, num_key_value_heads=4)}  # fmt: skip


def test_the_pages_figures_are_those_of_its_commands():
    page = " ".join((ROOT / "docs" / "run.md").read_text().replace("\\\n", " ").split())
    ours = re.search(r"lab\.memory (--gib .*?) The", page)[1]
    recipe = re.search(r"train\.py (--out runs/gsm8k.*?) For", page)[1]

    def computed(shape: str, words: str) -> dict[str, dict[str, float]]:
        config = tyro.cli(Options, args=shlex.split(words))
        model = Qwen2Config(**QWEN[shape], tie_word_embeddings=shape != "7B")
        return phases(config, model, config.data.max_prompt_tokens or 0, head_chunk(config.gib))

    def peak(*job: str) -> str:
        return f"{max(sum(each.values()) for each in computed(*job).values()) / GIB:.1f}"

    terms = [row for words in (ours, f"{ours} {SMALL}") for row in computed("qwen2.5-1.5b", words).values()]
    for title, row in zip(ROWS, terms, strict=True):
        sizes = [sum(row.get(name, 0) for name in names) for names in COLUMNS]
        cells = [f"{size / GIB:.1f}" if size else "0" for size in (*sizes, sum(sizes))]
        assert f"| {title} | {' | '.join(cells)} |" in page
    half, three, seven = (peak(shape, f"{ours} {SMALL}") for shape in ("qwen2.5-0.5b", "3B", "7B"))
    assert f"are {half} (0.5B), {three} (3B) and {seven} GiB (7B)" in page
    assert f"and checkpointing has {peak('7B', f'{ours} {LARGE}')}." in page
    assert f"(computed peak {peak('qwen2.5-0.5b', f'{recipe} --gib 40')} GiB with 40 GB;" in page
    smaller = re.search(r"For 24 GB: `(.*?)`", page)[1]
    assert f"(computed peak {peak('qwen2.5-0.5b', f'{recipe} {smaller} --gib 24')} GiB)" in page
