"""The plan against the memory that a process really takes, and the benchmark for a GPU at a small size on the CPU."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from helpers import close_live_engine, qwen2, refusal
from transformers import Gemma2Config, LlamaConfig, Qwen2Config

from config import Config
from extras.offload import OffloadedOptimizer
from extras.reference import kv_bytes_per_token
from lab.bench_gpu import CASES, SHAPES
from lab.bench_gpu import main as bench_gpu_main
from lab.plan import GIB, TRY, Memory, Parts, measure_trainer, phases, print_plan
from lab.plan import main as plan_main
from rl import Optimizer, head_chunk

ROOT = Path(__file__).parents[1]
MODEL = dict(vocab_size=8192, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=2, tie_word_embeddings=True)  # fmt: skip
JOB = Config.of(max_new_tokens=96, micro_batch_tokens=4096, num_prompts=8, group_size=4, num_minibatches=1)
PROMPT = 32


@cache
def planned(vocab_size: int = MODEL["vocab_size"], **changes) -> dict[str, Parts]:
    return phases(JOB.but(**changes), Qwen2Config(**MODEL | {"vocab_size": vocab_size}), PROMPT)


def peak(by_phase: dict[str, Parts]) -> float:
    return max(parts.total for parts in by_phase.values())


REAL = """
import ctypes, gc, json, sys
from dataclasses import replace
import torch
from transformers import AutoModelForCausalLM, Qwen2Config
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/tests"]
from test_plan import JOB, MODEL, PROMPT
from engine_adapter import Rollout
from extras.checkpointing import checkpoint_layers
from rl import Optimizer, Policy, frozen_logprobs, make_batch, update
from records import memory_gib, reset_peak

job = JOB.but(dtype=sys.argv[2], gradient_checkpointing=sys.argv[3] == "True")
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(Qwen2Config(**MODEL), dtype=getattr(torch, job.run.dtype))
policy = Policy(model)
if job.grpo.gradient_checkpointing:
    checkpoint_layers(policy)
optimizer = Optimizer(model, 0.0)
draw = lambda n: torch.randint(3, 8000, (n,)).tolist()
rollouts = [Rollout(draw(PROMPT), 0, draw(96), [-9.0] * 96, [1] * 96, "length") for _ in range(32)]
batch = make_batch(rollouts, torch.randn(32))

def taken(function):
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = memory_gib()
    reset_peak()
    result = function()
    return memory_gib(peak=True) - before, result

update(policy, optimizer, replace(batch, old_logprobs=batch.behavior_logprobs), job.grpo, 1e-5)  # warms up
forward, old = taken(lambda: frozen_logprobs(policy, batch, job.grpo))
backward, _ = taken(lambda: update(policy, optimizer, replace(batch, old_logprobs=old), job.grpo, 1e-5))
print(json.dumps([forward, backward]))
"""


@pytest.mark.parametrize("dtype, checkpointing", [("float32", False), ("bfloat16", True)])
def test_a_real_pass_and_a_real_update_take_the_planned_memory_within_15_percent(dtype, checkpointing):
    job = JOB.but(dtype=dtype, gradient_checkpointing=checkpointing)
    update_parts, forward_bytes = measure_trainer(job, Qwen2Config(**MODEL), PROMPT)
    # By default glibc keeps freed blocks of less than 32 MiB. With a fixed threshold it returns them at once.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_MMAP_MAX_": "1000000"}
    command = [sys.executable, "-c", REAL, str(ROOT), dtype, str(checkpointing)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    forward, update = json.loads(result.stdout.splitlines()[-1])
    assert forward_bytes / GIB == pytest.approx(forward, rel=0.15)
    assert (update_parts.gradients + update_parts.activations) / GIB == pytest.approx(update, rel=0.15)


def test_the_shared_engine_has_no_copy_of_the_weights():
    with_copy, shared = planned(), planned(engine="shared")
    assert with_copy["generate"].engine - shared["generate"].engine == with_copy["generate"].weights
    assert shared["generate"].engine > 0  # the sampler's counts
    assert shared["generate"].kv_cache == with_copy["generate"].kv_cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_masters_moments_and_gradients_are_those_of_a_real_optimizer(dtype):
    model = qwen2(tied=True, dtype=dtype)
    optimizer = Optimizer(model, 0.0)
    optimizer.backward(model(torch.tensor([[5, 6, 7]])).logits.sum())
    gradients = sum(master.grad.nbytes for master in optimizer.masters)
    optimizer.step(1e-3, 1.0)
    moments = sum(each.nbytes for state in optimizer.adamw.state.values() for each in state.values())
    job = JOB.but(dtype=str(dtype).removeprefix("torch."))
    update, _ = measure_trainer(job, model.config, 8)
    assert update.weights == sum(each.nbytes for each in model.parameters())
    assert update.masters == sum(master.nbytes for _, master in optimizer.rounded)
    assert (update.gradients, update.moments) == (gradients, moments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pinned_memory_is_that_of_a_real_optimizers_slabs(dtype, capsys):
    model = qwen2(tied=True, dtype=dtype, vocab_size=9000)  # one large tensor: its slab has a gap
    optimizer = OffloadedOptimizer(model, 0.0)
    optimizer.backward(model(torch.tensor([[5, 6, 7]])).logits.sum())
    with optimizer.on_device():
        optimizer.step(1e-3, 1.0)
    slabs = {view.untyped_storage().data_ptr(): view.untyped_storage().nbytes() for view in optimizer.host.values()}
    job = JOB.but(dtype=str(dtype).removeprefix("torch."))
    without, _ = measure_trainer(job, model.config, 8)
    offloaded, _ = measure_trainer(job.but(offload_optimizer=True), model.config, 8)
    assert sum(slabs.values()) > 1.1 * (offloaded.masters + offloaded.moments)
    assert offloaded == replace(without, pinned=sum(slabs.values()))
    assert without.pinned == 0
    assert offloaded.total == without.total
    print_plan(job.but(offload_optimizer=True), model.config, 8, 12.0)
    assert f"pinned host memory: {sum(slabs.values()) / GIB:.2f}\n" in capsys.readouterr().out


def test_fp32_with_grouped_queries_is_planned_with_the_scores_of_each_layer(capsys):
    """By reading: torch has no fused CUDA kernel for it. Its math kernel keeps (rows, heads, T, T) for backward."""
    scores, prompt = 4 * 8 * 1024**2 * 4, 929  # heads, rows, T, bytes; 929 + 96 - 1 = 1024 tokens
    job = JOB.but(micro_batch_tokens=8 * 1024)
    grouped, ungrouped = (Qwen2Config(**MODEL | {"num_key_value_heads": heads}) for heads in (2, 4))

    def added(model_config, dtype: str) -> float:
        """The activations that phases() plans beyond those of fused attention, in layers' scores."""
        changed = job.but(dtype=dtype)
        fused, _ = measure_trainer(changed, model_config, prompt)
        more = (phases(changed, model_config, prompt)["update"].activations - fused.activations) / scores
        print_plan(changed, model_config, prompt, 12.0)
        said = "take 0.12 (counted in activations)" in capsys.readouterr().out
        assert said == bool(more)
        return more

    layers = MODEL["num_hidden_layers"]
    assert layers <= added(grouped, "float32") <= 2 * layers
    assert added(grouped, "bfloat16") == added(ungrouped, "float32") == 0


def test_the_plan_has_the_larger_chunks_of_a_larger_gpu(capsys):
    """3,072 response tokens and 65,536 ids: six chunks of 2^25 logits, or one chunk of them all."""
    config, update, printed = Qwen2Config(**MODEL | {"vocab_size": 65536}), {}, {}
    for gib in (8.0, 80.0):
        update[gib] = phases(JOB, config, PROMPT, head_chunk(gib))["update"]
        print_plan(JOB, config, PROMPT, gib)
        row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| update"))
        printed[gib] = f" {update[gib].activations / GIB:.2f} " in row
    more, chunk = update[80.0].activations - update[8.0].activations, 3072 * 65536 * 4
    assert chunk < more < 3 * chunk
    assert update[8.0] == planned(65536)["update"]  # of a CPU
    assert all(printed.values())


def test_memory_counts_living_tensors_and_forgets_freed_ones():
    with Memory() as memory:
        kept = [torch.zeros(1000)]

        def function() -> None:
            kept.append(kept[0][:10])  # a view is no new memory
            passing = torch.ones(500)
            del passing
            torch.ones(300)

        added = memory.added_by(function)
    assert (memory.live, added) == (4000, 2000)


def test_the_plan_knows_attention_that_keeps_its_scores_and_heads_that_share_keys():
    """Gemma 2 runs eager attention and keeps (heads, T, T) scores of each row: four times as many at twice the T."""
    small = dict(vocab_size=500, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=32)  # fmt: skip
    job = JOB.but(micro_batch_tokens=1)
    short, long = (measure_trainer(job, Gemma2Config(**small), prompt)[0].activations for prompt in (417, 929))
    assert long > 3 * short
    short, long = (measure_trainer(job, LlamaConfig(**small), prompt)[0].activations for prompt in (417, 929))
    assert long < 2.1 * short
    assert kv_bytes_per_token(LlamaConfig(**small), torch.bfloat16) == 2 * 2 * 2 * 32 * 2  # k and v, layers, heads


def test_a_plan_that_does_not_fit_names_the_largest_phase_and_the_options_that_lower_it(capsys):
    config, table = Qwen2Config(**MODEL), planned(kv_cache_gib=0.01, max_num_seqs=16)
    job = JOB.but(kv_cache_gib=0.01, max_num_seqs=16)
    assert peak(table) == table["update"].total > table["evaluate"].total
    assert print_plan(job, config, PROMPT, 1.001 * peak(table) / GIB)
    assert not print_plan(job, config, PROMPT, 0.999 * peak(table) / GIB)
    fits, fails = (line for line in capsys.readouterr().out.splitlines() if line.startswith("peak"))
    assert fits.endswith("GiB")
    assert "for the phase update try --gradient-checkpointing, " in fails
    print_plan(JOB.but(kv_cache_gib=9.0), config, PROMPT, 12.0)
    assert capsys.readouterr().out.endswith("does NOT fit 12 GiB; for the phase evaluate try --no-eval-with-trainer\n")
    assert peak(planned(kv_cache_gib=9.0, eval_with_trainer=False)) < 12 * GIB


@pytest.mark.parametrize("phase, changes", [
    ("update", dict(gradient_checkpointing=True)), ("update", dict(micro_batch_tokens=1024)),
    ("update", dict(dtype="bfloat16")), ("old_logprobs", dict(micro_batch_tokens=1024)),
    ("old_logprobs", dict(offload_optimizer=True)), ("generate", dict(max_num_seqs=16)),
    ("generate", dict(kv_cache_gib=0.1)), ("generate", dict(offload_optimizer=True)),
])  # fmt: skip
def test_each_advised_option_lowers_its_phase(phase, changes):
    (name,) = changes
    assert f"--{name.replace('_', '-')}" in TRY[phase]
    assert planned(65536, **changes)[phase].total < planned(65536)[phase].total


def test_each_option_changes_only_its_phases():
    def totals(**changes) -> dict[str, float]:
        return {name: parts.total for name, parts in planned(dtype="bfloat16", **changes).items()}

    plain, weights = totals(), planned(dtype="bfloat16")["update"].weights
    offloaded = totals(offload_optimizer=True)
    assert offloaded["update"] == plain["update"]
    state = 6 * weights  # a master and two moments in fp32, over weights in bf16
    assert plain["generate"] - offloaded["generate"] == pytest.approx(state, rel=1e-4)
    assert totals(kl_coef=0.1)["update"] - plain["update"] == weights
    in_flight = totals(inflight_groups=4)
    counts = (JOB.backend.max_num_seqs + 4) * MODEL["vocab_size"] * 4  # the sampler's, of each token id
    assert in_flight["update"] - plain["update"] == weights + counts + JOB.backend.kv_cache_gib * GIB  # no sleep
    assert "evaluate" not in totals(eval_with_trainer=False)


def test_a_plan_needs_neither_weights_nor_tokenizer_nor_an_engine(tmp_path, capsys):
    qwen2(tied=False).config.save_pretrained(tmp_path)
    command = ["--model", str(tmp_path)]
    plan_main([*command, "--dtype", "bfloat16", "--max-prompt-tokens", "50", "--gib", "1.9"])
    said = capsys.readouterr().out
    assert "prompts of 50 and responses of 8 tokens" in said
    assert "does NOT fit 1.9 GiB; for the phase evaluate try --no-eval-with-trainer" in said
    assert {path.name for path in tmp_path.iterdir()} == {"config.json"}
    assert "max_prompt_tokens must be given" in refusal(command, capsys, plan_main)
    assert "a model folder or a reachable hub name" in refusal(["--model", str(tmp_path / "absent")], capsys, plan_main)


# ------------------------------------------------------------------------------------------------ the GPU benchmark
def figures(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "figures.jsonl").read_text().splitlines()]


BENCHMARK = {  # a case, and figures with their goals; those that are not named have no goal
    "sleep": {"memory freed by sleep / (weights + KV cache)": (0.95, None), "load": (None, 0.5),
              "sleep": (None, None), "wake": (None, None)},
    "speed-graphs": {},
    "speed-defaults": {"generation without log-probabilities": (None, None),
                       "generation with log-probabilities": (None, None)},
    "parity-head": {f"engine's batch {batch}, heads bfloat16 and {head}: mismatch{over}": (None, None)
                    for batch in (64, 1) for head in ("fp32", "bfloat16") for over in ("", " / self-noise")},
    "parity-float16": {f"engine's batch {batch}, heads fp32 and {head}: mismatch / self-noise": (None, goal)
                       for batch in (64, 1) for head, goal in (("fp32", 1.2), ("float16", None))},
    "step-1.5b": {"step": (None, 30), "sleep, wake and load / step": (None, 0.03),
                  **{f"{phase}, peak memory / plan": (0.85, 1.15)
                     for phase in ("generate", "old_logprobs", "update", "sync")}},
}  # fmt: skip


@pytest.mark.engine
def test_each_case_of_the_gpu_benchmark_runs_at_a_small_size(tmp_path, capfd):  # vLLM 0.26 needs a real stdout
    close_live_engine()
    for case, expected in BENCHMARK.items():
        bench_gpu_main([case, "--out", str(tmp_path), "--rollouts", "16"])
        printed, rows = capfd.readouterr().out, [row for row in figures(tmp_path) if row["case"] == case]
        found = {row["name"]: row for row in rows}
        assert {name: (row["at_least"], row["at_most"]) for name, row in found.items() if name in expected} == expected
        goals = {name for name, row in found.items() if row["at_least"] is not None or row["at_most"] is not None}
        assert goals <= expected.keys()
        assert all(f"{row['name']}: {row['value']:.4g} {row['unit']}\n" in printed for row in rows)
        if case == "speed-graphs":
            assert printed == "speed-graphs is LEFT OUT: CUDA graphs need a GPU\n"
        else:
            assert rows[0]["name"] == "start of trainer and engine"
        if case.startswith("parity"):  # rounding of 16 bits
            assert all(0.2 < row["value"] < 5 for name, row in found.items() if name.endswith("/ self-noise"))
            mismatches = {row["value"] for name, row in found.items() if name.endswith("mismatch")}
            assert len(mismatches) == 4  # both heads and both batches are other arithmetic
            assert all(0 < value < 1e-2 for value in mismatches)
        if case.startswith("step"):
            for phase in ("generate", "old_logprobs", "update", "sync"):
                assert found[phase]["value"] > 0
                assert found[f"{phase}, peak memory"]["value"] > 0.3
            assert sum(row["name"] == "step" for row in rows) == 3
    for row in figures(tmp_path):
        assert {"case", "shape", "options", "name", "value", "unit", "device", "versions", "commit"} < row.keys()
        assert "vllm 0." in row["versions"]
    without = {row["case"]: (row["options"]["parity"], row["options"]["dtype"]) for row in figures(tmp_path)}
    assert without["parity-head"] == ("without fp32_head", "bfloat16")
    assert without["parity-float16"] == ("without nothing", "float16")
    assert without["speed-defaults"][0].count(",") == 3


@pytest.mark.engine
def test_a_killed_case_leaves_the_figures_that_it_had_measured_and_the_table_has_them(tmp_path, capsys):
    program = [sys.executable, "-m", "lab.bench_gpu", "step", "--out", str(tmp_path), "--new-tokens", "500"]
    with subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        printed = []
        for line in process.stdout:
            printed.append(line)
            if line.startswith("start of trainer and engine"):  # the first figure, before any step
                break
        else:
            pytest.fail("".join(printed)[-2000:])
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert "sync, peak memory / plan" not in {row["name"] for row in figures(tmp_path)}  # the last one
    bench_gpu_main(["table", "--out", str(tmp_path)])
    assert "start of trainer and engine" in capsys.readouterr().out


@pytest.mark.engine
def test_a_case_that_takes_too_long_ends_itself_and_says_where(tmp_path):
    program = [sys.executable, "-m", "lab.bench_gpu", "sleep", "--out", str(tmp_path), "--limit-s", "0.2"]
    result = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)
    assert result.returncode == 1
    assert "Timeout (0:00:00.2" in result.stderr
    assert "bench_gpu.py" in result.stderr


def test_the_table_has_the_newest_value_of_each_figure_and_whether_its_goal_is_met(tmp_path, capsys):
    def row(name: str, value: float, low: float | None, high: float | None, case: str = "step", **changes) -> str:
        options, where = CASES[case][1], {"device": "NVIDIA H100", "versions": "torch 3", "commit": "abc"} | changes
        figure = {"name": name, "value": value, "unit": "s", "at_least": low, "at_most": high}
        return json.dumps({"case": case, "shape": options.shape, "options": options.settings()} | figure | where)

    lines = [row("step", 40.0, None, 30), row("step", 20.0, None, 30), row("late", 31.0, None, 30),
             row("less", 0.4, 0.5, None), row("within", 1.0, 0.85, 1.15), row("below", 0.8, 0.85, 1.15),
             row("above", 1.2, 0.85, 1.15), row("free", 1.0, None, None), row("slow", 31.0, None, 30, device="CPU, 2"),
             row("other", 1.0, None, None, "parity", options=CASES["parity"][1].settings() | {"dtype": "float16"})]
    command = ["table", "--out", str(tmp_path)]
    assert "figures.jsonl, which the other cases write" in refusal(command, capsys, bench_gpu_main)
    (tmp_path / "figures.jsonl").write_text("\n".join(lines) + "\n")
    bench_gpu_main(command)
    printed = capsys.readouterr().out.splitlines()
    cells = {each[2]: each for each in ([cell.strip() for cell in line.split("|")[1:-1]] for line in printed)
             if len(each) > 2}  # fmt: skip
    assert len(printed) == len(cells) + 3  # each figure once; an empty line and two origins
    assert cells["step"] == ["step", "qwen2.5-0.5b", "step", "20 s", "at most 30", "yes"]
    assert [cells[name][5] for name in ("late", "less", "within", "below", "above", "free", "slow")] == [
        "NO", "NO", "yes", "NO", "NO", "", "not a GPU"]  # fmt: skip
    assert cells["within"][4] == "at least 0.85 and at most 1.15"
    assert cells["other"][:2] == ["parity, dtype float16", "qwen2.5-0.5b"]
    assert printed[-2:] == ["NVIDIA H100; torch 3; commit abc", "CPU, 2; torch 3; commit abc"]


@pytest.mark.parametrize("case, gigabytes", [("step", 80), ("step-1.5b", 80), ("step-24gb", 24)])
def test_the_gpu_benchmark_fits_its_gpu_by_the_plan(case, gigabytes):
    options = CASES[case][1]
    job = Config.of(dtype=options.dtype, max_new_tokens=options.new_tokens, kv_cache_gib=options.kv_cache_gib,
                 micro_batch_tokens=options.micro_batch_tokens, eval_with_trainer=False)  # fmt: skip
    model_config, chunk = Qwen2Config(**SHAPES[options.shape], tie_word_embeddings=True), head_chunk(gigabytes)
    planned = phases(job, model_config, options.prompt_tokens, chunk)
    assert peak(planned) < 0.75e9 * gigabytes  # a quarter for fragmentation and what is not counted
