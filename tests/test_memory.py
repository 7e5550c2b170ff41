"""The memory of a run by hand, beside what a GPU measured; what is refused."""

import re
import shlex
from types import SimpleNamespace

import torch
import tyro
from helpers import ROOT, bare_run, built, config_of, parametrize, read_json, small_model
from torch.nn import Linear, Parameter
from transformers import AutoModelForCausalLM, Qwen2Config

from extras import memory_check
from extras.memory_check import GIB, activations, certain
from rl import head_chunk
from train import Config

SHAPE = dict(vocab_size=1000, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=2)  # fmt: skip
# Embedding; per layer: queries and output, keys and values of half the heads, biases, the MLP, two norms; a last norm
PARAMETERS = 1000 * 256 + 4 * (2 * 256**2 + 2 * 256 * 128 + 256 + 2 * 128 + 3 * 256 * 1024 + 2 * 256) + 256


def qwen2(dtype="bfloat16", rank=0, tied=True, **shape):
    """Without memory; with a rank its weights are frozen, beside numbers of adapters."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen2Config(**shape or SHAPE, tie_word_embeddings=tied))
        model.to(getattr(torch, dtype))
        if rank:
            model.requires_grad_(False)
        for layer in [each for each in model.model.modules() if type(each) is Linear and rank]:
            layer.adapter = Parameter(torch.empty(rank, layer.in_features + layer.out_features))
    return model


# Model, options, bytes a parameter in generation and update, KV caches of 2 GiB in the update.
PHASES = [(qwen2(), {}, 2 + 12 + 2, 18, 0), (qwen2("float32"), {}, 4 + 8 + 4, 16, 0),
          (qwen2(), dict(offload_optimizer=True), 4, 18, 0), (qwen2(), dict(inflight_groups=4), 16, 20, 1),
          (qwen2(), dict(kl_coef=0.1), 18, 20, 0)]  # fmt: skip


def test_full_training_has_18_bytes_a_parameter_in_16_bits_and_20_with_a_kl_term_or_groups_in_flight():
    """Adapters: in the table of the page, below."""
    for model, options, generate, update, caches in PHASES:
        phases = certain(config_of(kv_cache_gib=2.0, **options), model, copies_weights=True)
        assert phases == {"generate": generate * PARAMETERS + 2 * GIB, "update": update * PARAMETERS + caches * 2 * GIB}


# ------------------------------------------------------------------------------------------------ the page
SIZED = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "vocab_size"]  # fmt: skip


SIZES = {"0.5B": "896 4864 24 14 2 151936", "1.5B": "1536 8960 28 12 2 151936", "3B": "2048 11008 36 16 2 151936",
         "7B": "3584 18944 28 28 4 152064"}  # fmt: skip


def peaks(size, words, gib, longest, rank=0):
    """Computed for generation and update, in GiB."""
    model = qwen2(rank=rank, tied=size != "7B", **dict(zip(SIZED, map(int, SIZES[size].split()), strict=True)))
    config = tyro.cli(Config, args=shlex.split(words))
    phases = certain(config, model, copies_weights=True)
    kept = activations(config, model, longest, head_chunk(gib))
    return phases["generate"] / GIB, (phases["update"] + kept) / GIB


def test_the_pages_figures_are_computed_and_those_of_a_gpu_are_near():
    page = " ".join((ROOT / "docs" / "run.md").read_text().replace("\\\n", " ").split())
    ours = re.search(r"and `(--dtype bfloat16 .*?)`", page)[1]
    for size in SIZES:
        row = [max(peaks(size, f"{ours} {more}", 40, 512 + 1024, rank))
               for rank in (0, 32) for more in ("", "--gradient-checkpointing")]
        assert f"| {size} | {' | '.join(f'{each:.1f}' for each in row)} |" in page
    recipe = re.search(r"train\.py (--out runs/gsm8k.*?) For", page)[1]
    smaller = re.search(r"For 24 GB: `(.*?)`", page)[1]
    assert f"(computed peak {max(peaks('0.5B', recipe, 40, 1024)):.1f} GiB with 40 GB;" in page
    assert max(peaks("0.5B", f"{recipe} {smaller}", 24, 1024)) < 18
    record = read_json(ROOT / "docs" / "records" / "gpu-h100.json")
    generate, update = peaks("0.5B", record["workload"].replace("--self-noise-every 1", ""), 80, 128 + 512)
    for cell in ("parity", "cuda-graphs"):
        measured = record["cells"][cell]["metrics"]
        assert 0.85 < measured["update_gib"][0] / update < 1.05
        assert measured["generate_gib"][0] > generate


# ------------------------------------------------------------------------------------------------ a run
def test_cuda_graphs_count_and_recurrent_layers_have_none(monkeypatch, capsys):
    """For vLLM would refuse more slots than blocks. Of 128 * 8 rows 512 run at once, and the canary's 4."""
    models, said = {name: small_model(name) for name in ("Qwen2", "FalconH1", "Mamba2", "Lfm2")}, {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = config_of(kv_cache_gib=1.0)
    for name, model in models.items():
        run = bare_run(config, SimpleNamespace(prompts=[[0]]), sampling=SimpleNamespace(max_new_tokens=31))
        config.extra.cuda_graphs.install(run)
        for change in run.with_model:
            change(model)
        memory_check.compare(run, (80 * GIB, 80 * GIB), model)
        sizes = run.further.get("compilation_config.cudagraph_capture_sizes", [])
        said[name] = len(sizes), sizes[-1:], re.search(r"at least (\S+) GiB", capsys.readouterr().out)[1]
    assert said == {"Qwen2": (68, [516], "1.1")} | dict.fromkeys(("FalconH1", "Mamba2", "Lfm2"), (0, [], "1.0"))


@parametrize("free, rank, outcome", [
    (1.0, 4, "of 1.0 free"), (0.55, 4, "it may NOT fit"), (0.3, 4, "must fit"), (1.0, 0, "must fit")])  # fmt: skip
def test_a_run_says_what_it_needs_of_what_was_free_and_only_what_cannot_fit_is_refused(
    good, tmp_path, monkeypatch, capsys, free, rank, outcome
):
    """In MiB. Adapters are counted, so memory_check is installed after them."""
    cuda = SimpleNamespace(is_available=lambda: True, mem_get_info=lambda: (int(free * 2**20), 0))
    monkeypatch.setattr(memory_check, "torch", SimpleNamespace(cuda=cuda, bfloat16=torch.bfloat16))
    monkeypatch.setattr(memory_check, "GIB", 2**20)
    try:
        built(good, tmp_path, dtype="bfloat16", lora_rank=rank)
        said = capsys.readouterr().out
    except ValueError as error:
        said = str(error)
    assert outcome in said
