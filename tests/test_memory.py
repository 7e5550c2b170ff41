"""The formulas of memory by hand, and beside what autograd keeps and GPUs measured; what is refused by them."""

import re
import shlex
from types import SimpleNamespace

import pytest
import torch
import tyro
from helpers import ROOT, command, config_of, read_json, rows, train_here
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

from extras.memory import CONTEXT, GIB, phases, without_memory
from extras.memory_check import UNCERTAINTY, install
from lab.memory import main
from rl import head_chunk
from train import Config

SHAPE = dict(vocab_size=1000, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=2, tie_word_embeddings=True)  # fmt: skip
SHAPES = {
    "qwen2.5-0.5b": dict(vocab_size=151_936, hidden_size=896, intermediate_size=4864,
                         num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2),
    "qwen2.5-1.5b": dict(vocab_size=151_936, hidden_size=1536, intermediate_size=8960,
                         num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2),
}  # fmt: skip
# Embedding; per layer: queries and output, keys and values of half the heads, biases, the MLP, two norms; a last norm
PARAMETERS = 1000 * 256 + 4 * (2 * 256**2 + 2 * 256 * 128 + 256 + 2 * 128 + 3 * 256 * 1024 + 2 * 256) + 256
HEAD = 4 * 2**18 * 4  # chunks of 2^18 logits


def terms(phase: str, kind: str = "qwen2", **options) -> dict[str, float]:
    job = dict(dtype="bfloat16", micro_batch_tokens=1024, max_new_tokens=64, kv_cache_gib=2.0, max_num_seqs=10,
               prompts_once=False)  # fmt: skip
    return phases(config_of(**job | options), without_memory(AutoConfig.for_model(kind, **SHAPE)), 100,
                  2**18)[phase]


def test_full_training_has_18_bytes_a_parameter_in_16_bits_and_adapters_have_16_each_beside_the_frozen_2():
    activations = 4 * 1024 * (16 * 256 + 2 * (8 * 256 + 4 * 1024)) + HEAD
    assert terms("update") == dict(weights=2 * PARAMETERS, optimizer=12 * PARAMETERS, gradients=4 * PARAMETERS,
                                   activations=activations, context=CONTEXT)  # fmt: skip
    assert terms("generate")["engine"] == 2 * PARAMETERS + 2 * GIB
    assert terms("generate")["sampler"] == 4 * 10 * 1000 * 4
    assert terms("update", inflight_groups=4)["engine"] == 2 * PARAMETERS + 2 * GIB

    def held(**options) -> float:
        update = terms("update", **options)
        return update["weights"] + update["optimizer"] + update["gradients"]

    assert held(dtype="float32") == 16 * PARAMETERS
    # Of a layer: queries and output, keys and values, the MLP
    adapters = 8 * 4 * (2 * 512 + 2 * (256 + 128) + 3 * (256 + 1024))
    assert held(lora_rank=8, kl_coef=0.1) == 2 * PARAMETERS + (16 + 4) * adapters  # with the KL's reference


def test_a_prompt_that_is_computed_once_for_six_rows_and_a_small_batch_need_less():
    def positions(**options) -> float:
        return (terms("update", **options)["activations"] - HEAD) / (terms("update")["activations"] - HEAD) * 1024

    assert positions(prompts_once=True) == pytest.approx(1024 * (64 + 100 / 6) / 164)
    assert positions(prompts_once=True, gradient_checkpointing=True) == positions(gradient_checkpointing=True)
    assert positions(num_prompts=3, group_size=2) == 3 * 164  # rows of a minibatch


def test_the_formulas_are_right_for_what_an_h200_and_an_h100_measured():
    """The update of the H200's run is not here: all its groups were flat, so it had none."""
    model = without_memory(Qwen2Config(**SHAPES["qwen2.5-0.5b"], tie_word_embeddings=True))
    measured = {("gpu", "parity"): ["generate"], ("gpu-h100", "parity"): ["generate", "update"],
                ("gpu-h100", "cuda-graphs"): ["generate", "update"]}  # fmt: skip
    for (name, cell), names in measured.items():
        record = read_json(ROOT / "docs" / "records" / f"{name}.json")
        run = record["cells"][cell]
        config = tyro.cli(Config, args=shlex.split(f"{record['workload']} {run['options']}"))
        by_phase = phases(config, model, 128, 2**28)
        for phase in names:
            ratio = run["metrics"][f"{phase}_gib"][0] * GIB / sum(by_phase[phase].values())
            assert abs(ratio - 1) < UNCERTAINTY, (name, cell, phase)


@pytest.mark.parametrize(("kind", "dtype"), [  # the last one has torch's LayerNorm and an MLP without a gate
    ("qwen2", "bfloat16"), ("qwen2", "float32"), ("starcoder2", "bfloat16")])  # fmt: skip
def test_the_activations_are_what_autograd_keeps(kind, dtype):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPE)).to(getattr(torch, dtype))
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model.model(input_ids=torch.zeros(4, 256, dtype=torch.long)).last_hidden_state
    for parameter in model.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    computed = terms("update", kind, dtype=dtype)["activations"] - HEAD
    assert computed / sum(kept.values()) == pytest.approx(1.0, abs=0.15)
    assert hidden.requires_grad  # the graph was alive while the bytes were counted


def test_the_command_says_whether_a_job_fits(good, capsys):
    for gib, status, words in (("8", 0, ": fits 8 GiB"), ("3", 1, ": does NOT fit 3 GiB")):
        assert main(["--model", str(good / "model"), "--kv-cache-gib", "2", "--gpu-memory-gib", gib]) == status
        assert words in capsys.readouterr().out


def shape(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, int]:
    return dict(hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
                num_key_value_heads=kv_heads, vocab_size=vocabulary)


SIZES = {"0.5B": SHAPES["qwen2.5-0.5b"], "1.5B": SHAPES["qwen2.5-1.5b"],
         "3B": shape(2048, 11008, 36, 16, 2, 151_936), "7B": shape(3584, 18944, 28, 28, 4, 152_064)}  # fmt: skip


def peak(size: str, words: str) -> str:
    config = tyro.cli(Config, args=shlex.split(words))
    model = without_memory(Qwen2Config(**SIZES[size], tie_word_embeddings=size != "7B"))
    chunk = head_chunk(config.memory_check.gpu_memory_gib)
    by_phase = phases(config, model, config.data.max_prompt_tokens or 0, chunk)
    return f"{max(sum(terms.values()) for terms in by_phase.values()) / GIB:.1f}"


def test_the_pages_figures_are_those_of_its_commands():
    page = " ".join((ROOT / "docs" / "run.md").read_text().replace("\\\n", " ").split())
    ours = re.search(r"lab\.memory (--gpu-memory-gib .*?) The", page)[1]
    recipe = re.search(r"train\.py (--out runs/gsm8k.*?) For", page)[1]
    smaller = re.search(r"For 24 GB: `(.*?)`", page)[1]
    for size in SIZES:
        row = [peak(size, f"{ours} {lora} {checkpointing}")
               for lora in ("", "--lora-rank 32") for checkpointing in ("", "--gradient-checkpointing")]
        assert f"| {size} | {' | '.join(row)} |" in page
    assert f"(computed peak {peak('0.5B', f'{recipe} --gpu-memory-gib 40')} GiB with 40 GB;" in page
    assert float(peak("0.5B", f"{recipe} {smaller} --gpu-memory-gib 24")) < 24


# ------------------------------------------------------------------------------------------------ a run
def said(capsys, gib: float, model: object = None, **options) -> str:
    """What the check says of a run with prompts of 512 tokens, or why it refuses it."""
    job = dict(dtype="bfloat16", max_new_tokens=1024, micro_batch_tokens=8192, kv_cache_gib=16.0, steps=1)
    config = config_of(gpu_memory_gib=gib, **job | options)
    model = model or Qwen2Config(**SHAPES["qwen2.5-1.5b"], tie_word_embeddings=True)
    run, folder = SimpleNamespace(config=config, max_model_len=512 + 1024), SimpleNamespace(config=lambda: model)
    try:
        install(run, config.memory_check, SimpleNamespace(folder=folder))
    except ValueError as error:
        return f"refused: {error}"
    return capsys.readouterr().out


@pytest.mark.parametrize(("gib", "steps", "outcome"), [  # certain are 26.0 GiB in the update, and 39.1 to generate
    (60, 1, "fits"), (41, 1, "may NOT"), (39.5, 1, "refused"), (39.5, 0, "may NOT"), (39, 0, "refused")])
def test_only_what_cannot_fit_is_refused(gib, steps, outcome, capsys):
    line = said(capsys, gib, steps=steps)
    assert f"computed peak of 48.3 of {gib:.1f} GiB (generate 41.7, update 48.3); try --lora-rank 16 (" in line
    assert outcome in line or (outcome == "fits" and line.endswith("(25.6 GiB)\n"))


def test_the_option_that_saves_most_is_one_that_the_run_may_have(capsys):
    """Adapters cannot be probed, and experts get none. A model that cannot be built is a notice."""
    adapters = {"lora_rank": 16, "gradient_checkpointing": True}
    assert "try --kv-cache-gib 8.0 (16.6 GiB)" in said(capsys, 1000, **adapters)
    assert "try --gradient-checkpointing (47.4 GiB)" in said(capsys, 1000, probe_every=1)
    assert "try --offload" in said(capsys, 1000, AutoConfig.for_model("mixtral", num_hidden_layers=2))
    unknown = said(capsys, 1, AutoConfig.for_model("gemma3n_text"))
    assert unknown.startswith("notice: the memory of this run cannot be computed: TypeError")


@pytest.mark.engine
def test_the_first_lines_of_a_run_have_its_peak_and_the_run_goes_on(good, tmp_path, capsys):
    train_here(command(good, f"--out {tmp_path} --steps 0 --eval-problems 4 --gpu-memory-gib 24"))
    assert "\nmemory: a computed peak of 1.8 of 24.0 GiB (generate 1.8, update 1.5); try" in capsys.readouterr().out
    assert len(rows(tmp_path)) == 1
