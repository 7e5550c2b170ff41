"""The probe: on traces of three versions of vLLM, on faults planted in the live engine, and on malformed input."""

import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import clean
import numpy
import planted
import pytest
import torch
from conftest import qwen2

from engine_adapter import Rollout, Sampling
from probe import traces
from probe.diagnose import Trace, diagnose
from probe.hypotheses import Noise, Probe, Readout
from probe.noise import KEY_BLOCK, rounded_otherwise
from probe.search import Search
from probe.traces import Weights, load_traces, save_trace
from rl import Policy

ROOT, DATA = Path(__file__).parents[1], Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def bench():
    bench = planted.Bench()
    yield bench
    bench.close()


@pytest.fixture(scope="module")
def reference() -> dict[str, Policy]:
    model = str(DATA / "tiny-qwen2")
    return {name: Policy.load(model, getattr(torch, name), "cpu") for name in ("float32", "bfloat16")}


def verdicts(file: str, policies: dict[str, Policy], **options) -> dict[str, object]:
    return {t.name: diagnose(policies[t.meta["dtype"]], t, **options) for t in load_traces(str(DATA / file))}


def blamed(verdict) -> list[str]:
    return [f"{cause.layer}: {cause.name}" for cause in verdict.causes]


# ------------------------------------------------------------------------------------------------ the V0 reference
RAW = "semantics: raw log-probabilities"
HALF = "numerics: head in 16 bits in the engine"


@pytest.mark.parametrize("file, expected", [
    ("v0_0.8.5_fp32.npz", []),
    ("v0_0.8.5_fp32_small.json", []),
    ("v1_0.18.1_fp32_default.npz", [RAW]),
    ("v1_0.18.1_fp32_fixes.npz", []),
    ("v1_0.32.0_fp32_default.npz", [RAW]),
    ("v1_0.32.0_fp32_fixes.npz", []),
    ("v1_0.18.1_bf16_default.npz", [RAW, HALF]),
    ("v1_0.18.1_bf16_fixes.npz", [HALF]),
    ("v1_0.18.1_bf16_fixes_headpatch.npz", []),
    ("v1_0.32.0_bf16_default.npz", [RAW, HALF]),
    ("v1_0.32.0_bf16_fixes.npz", [HALF]),
    ("v1_0.32.0_bf16_fixes_headovr.npz", []),
])  # fmt: skip
def test_the_migration_from_v0_to_v1_is_diagnosed_in_every_group(reference, file, expected):
    for group, verdict in verdicts(file, reference).items():
        # at temperature 1 without masks, and greedily, the raw distribution is the processed one
        shown = [cause for cause in expected if not (cause == RAW and group in ("t1", "greedy"))]
        assert blamed(verdict) == shown, f"{group}: {verdict.sentence}"
        assert verdict.status == ("mismatch" if shown else "parity")


def test_a_trainer_that_scores_the_temperature_alone_is_told_of_masks_and_penalties(reference):
    found = verdicts("v0_0.8.5_fp32.npz", reference, trainer="temperature")
    for group in ("t0.7_k20", "t0.7_p0.9", "t0.7_k20_p0.9"):
        assert blamed(found[group]) == ["semantics: mask applied by the sampler and not by the trainer"]
    assert blamed(found["t0.7_pen"]) == ["semantics: penalties applied by the sampler and not by the trainer"]
    assert {found[group].status for group in ("t0.7", "t1", "greedy")} == {"parity"}


def test_the_floor_is_measured_and_the_engines_noise_is_no_larger(reference):
    """Recorded values of three engines against the trainer's own noise along another path: within a fifth."""
    for file in ("v0_0.8.5_fp32.npz", "v1_0.32.0_fp32_fixes.npz", "v1_0.32.0_bf16_fixes_headovr.npz"):
        verdict = verdicts(file, reference)["t0.7"]
        assert 0.8 < verdict.start.noise.mean / verdict.start.floor.mean < 1.2


def test_a_floor_of_exactly_0_in_16_bits_is_an_error(reference):
    """A model whose own attention is the floor's second path; padding by a whole block changes nothing."""
    policy, trace = reference["bfloat16"], load_traces(str(DATA / "v1_0.32.0_bf16_fixes_headovr.npz"))[0]
    usual, traces.FLOOR_PADDING = traces.FLOOR_PADDING, KEY_BLOCK
    try:
        with rounded_otherwise(policy), pytest.raises(RuntimeError, match="noise floor must be above 0 in 16 bits"):
            diagnose(policy, trace)
    finally:
        traces.FLOOR_PADDING = usual


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_clean_traces_of_a_model_with_soft_capping_are_parity(dtype):
    """Gemma 2: the trainer itself runs eager attention on the CPU."""
    rows = clean.alone("Gemma2", "True", dtype, "7")
    assert {row["status"] for row in rows} == {"parity"}, rows
    assert 0.7 < rows[-1]["mismatch"] / rows[-1]["floor"] < 1.3


# ------------------------------------------------------------------------------------------------ constructed faults
def drawn(policy: Policy, num_rows: int) -> Trace:
    """Responses of 40 tokens that the policy draws at temperature 0.7."""
    torch.manual_seed(0)
    prompts = torch.randint(6, 96, (num_rows, 12))
    ids = policy.model.generate(prompts, max_new_tokens=40, min_new_tokens=40, do_sample=True, temperature=0.7, top_k=0)
    rollouts = [Rollout(p.tolist(), 0, row[12:].tolist(), [0.0] * 40, []) for p, row in zip(prompts, ids, strict=True)]
    return Trace("drawn", rollouts, Sampling(0.7, 40))


def report(policy: Policy, trace: Trace, weights: Weights) -> None:
    """Log-probabilities as an engine with these weights reports them: rounded as on the floor's second path."""
    probe = Probe(policy, trace, [])
    with torch.no_grad(), probe.replay.using(weights):
        other = Probe(policy, trace, []).second
    values = other.logprobs(Readout()).split([len(r.token_ids) for r in trace.rollouts])
    for rollout, row in zip(trace.rollouts, values, strict=True):
        rollout.logprobs = row.tolist()


def test_an_old_tensor_of_small_effect_is_named_beside_one_of_large_effect():
    """The large one alone comes within the tolerance of the floor; both together leave a third less."""
    policy, generator = Policy(qwen2(False, dtype=torch.bfloat16)), torch.Generator().manual_seed(0)
    trace, old = drawn(policy, 24), policy.copied_weights()
    large, small = "model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.o_proj.weight"
    for name, tensor in old.items():
        noise = torch.randn(tensor.shape, generator=generator)
        old[name] = (tensor.float() + (0.0005 if name == small else 0.02) * noise).bfloat16()
    report(policy, trace, {name: old[name] for name in (large, small)})
    with torch.no_grad():
        alone = Search(Probe(policy, trace, [old]))._with_old(frozenset({large}), 1, old, Readout())
    verdict = diagnose(policy, trace, [old])
    assert alone.fits
    assert alone.noise.mean > 1.2 * verdict.best.noise.mean
    assert blamed(verdict) == [f"inference path: tensors 1 update(s) old: {small}, {large}"]


def test_a_scaled_final_norm_is_named_as_the_temperature_it_is():
    """Most tokens of this tied model are reported exactly, so that the median of the mismatch says nothing."""
    policy = Policy(qwen2(True))
    trace, norm = drawn(policy, 24), "model.norm.weight"
    report(policy, trace, {norm: policy.copied_weights()[norm] * 1.1})
    assert blamed(diagnose(policy, trace)) == ["semantics: temperature 0.636 in the sampler and not in the trace"]


# ------------------------------------------------------------------------------------------------ planted faults
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_clean_traces_of_the_live_engine_are_parity(bench, tied, dtype):
    for batch, temperature in ((1, 0.5), (9, 1.5), (40, 1.0)):
        given = planted.plant(bench, set(), tied, getattr(torch, dtype), 0, batch, temperature)
        trace, policy, earlier, version, _ = given
        verdict = diagnose(policy, trace, earlier, version)
        assert verdict.status == "parity", verdict.sentence


@pytest.mark.parametrize("name", [
    "raw", "top-1", "shift", "stop", "stale", "tensor", "kept", "staggered", "recomputed", "one request",
    "moved on", "cold", "hidden temperature", "hidden top-k", "hidden penalty", "mask not in force",
    "rounded weights", "prefix", "async", "head", "body", "raw+tensor", "shift+kept", "stop+prefix", "head+stale",
])  # fmt: skip
def test_a_planted_fault_is_named(bench, name):
    trace, policy, earlier, version, trainer = planted.plant(bench, set(name.split("+")), False, torch.float32, 0)
    before = {n: p.clone() for n, p in policy.model.named_parameters()}
    verdict = diagnose(policy, trace, earlier, version, trainer)
    assert planted.right(name.split("+"), verdict) == (True, True), verdict.sentence
    assert all(torch.equal(p, before[n]) for n, p in policy.model.named_parameters())  # the probe leaves no trace
    assert policy.model.config._attn_implementation == "sdpa"
    assert all(p.grad is None for p in policy.model.parameters())


@pytest.mark.parametrize("name", ["head", "head in trainer", "head on both sides", "raw+head"])
def test_the_head_is_told_apart_from_the_noise_of_a_bfloat16_body(bench, name):
    trace, policy, earlier, version, trainer = planted.plant(bench, set(name.split("+")), False, torch.bfloat16, 0)
    verdict = diagnose(policy, trace, earlier, version, trainer)
    assert planted.right(name.split("+"), verdict) == (True, True), verdict.sentence


def test_a_fault_that_is_no_hypothesis_is_unexplained_and_says_what_was_excluded(bench):
    """A tensor multiplied by 1.3 in the engine: neither an old one nor any other cause."""
    trace, policy, *_ = planted.plant(bench, set(), False, torch.float32, 0)
    parameters = dict(policy.model.named_parameters())
    with torch.no_grad():
        parameters["model.layers.0.mlp.up_proj.weight"].mul_(1.3)
    planted.move(policy, 3)
    verdict = diagnose(policy, trace, [])
    assert verdict.status == "unexplained"
    assert not verdict.causes
    assert "Excluded: " in verdict.sentence
    assert "raw log-probabilities" in verdict.sentence
    assert "not tested without earlier weights" in verdict.sentence


def test_a_fault_half_as_large_as_the_noise_shows_over_2000_tokens(bench):
    """Another constant in all norms: the mismatch is 1.5 times the floor, where clean traces lie at 1.0 to 1.1."""
    trace, policy, *_ = planted.plant(bench, set(), False, torch.bfloat16, 0, batch=128)
    assert diagnose(policy, trace).status == "parity"
    for module in policy.model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 3e-3  # in the engine 1e-6
    verdict = diagnose(policy, trace)
    assert verdict.start.noise.mean < 1.6 * verdict.start.floor.mean
    assert verdict.status == "unexplained"


def test_the_place_of_an_update_and_the_wrong_request_are_found(bench):
    trace, policy, earlier, version, _ = planted.plant(bench, {"kept"}, False, torch.float32, 1)
    assert "before token 11 of the response" in diagnose(policy, trace, earlier, version).sentence
    trace, policy, earlier, version, _ = planted.plant(bench, {"one request"}, False, torch.float32, 1)
    assert diagnose(policy, trace, earlier, version).requests["wrong"] == [bench.spoiled]


def test_old_tensors_cost_few_forwards_however_many_tensors_there_are(bench):
    counts = []
    for name in ("tensor", "tensors"):
        trace, policy, earlier, version, _ = planted.plant(bench, {name}, False, torch.float32, 0)
        verdict = diagnose(policy, trace, earlier, version)
        num_tensors = len(list(policy.model.parameters()))
        counts.append(verdict.replay.forwards)
        assert verdict.replay.forwards <= 25 + 6 * math.log2(num_tensors), counts


# ------------------------------------------------------------------------------------------------ broken output
def test_values_that_are_not_finite_are_named_by_request(reference):
    trace = load_traces(str(DATA / "v0_0.8.5_fp32.npz"))[0]
    trace.rollouts[5].logprobs[3], trace.rollouts[9].logprobs[0] = math.nan, -math.inf
    verdict = diagnose(reference["float32"], trace)
    assert verdict.status == "mismatch"
    assert verdict.requests["not finite"] == [5, 9]
    assert "not finite" in verdict.sentence


def test_text_the_policy_would_not_write_is_found_although_its_values_are_right(reference):
    """Tokens drawn uniformly and scored correctly: only their improbability gives them away."""
    policy, generator = reference["float32"], torch.Generator().manual_seed(0)
    trace = load_traces(str(DATA / "v0_0.8.5_fp32.npz"))[0]
    odd = trace.rollouts[7]
    odd.token_ids = torch.randint(128, (64,), generator=generator).tolist()
    right = Probe(policy, replace(trace, rollouts=[odd]), [])
    odd.logprobs = right.current.logprobs(Readout()).tolist()
    verdict = diagnose(policy, trace)
    assert verdict.requests["implausible"] == [7]
    assert verdict.status == "mismatch"


def test_a_trace_without_log_probabilities_is_bad_input(reference):
    trace = load_traces(str(DATA / "v0_0.8.5_fp32.npz"))[0]
    for rollout in trace.rollouts:
        rollout.logprobs = [0.0] * len(rollout.logprobs)
    with pytest.raises(ValueError, match=r"logprobs must be what the engine reported, all of t0\.7's are 0"):
        diagnose(reference["float32"], trace)


def test_repetition_is_listed_and_is_no_mismatch(reference):
    found = verdicts("v0_0.8.5_fp32.npz", reference)
    assert found["t0.7"].status == "parity"
    assert 22 in found["t0.7"].requests["repetitive"]
    assert len(found["greedy"].requests["repetitive"]) > 30
    assert not found["t1"].requests["repetitive"]


# ------------------------------------------------------------------------------------------------ traces and commands
def test_a_trace_survives_its_file(tmp_path):
    rollouts = [Rollout([1, 2, 3], 2**40, [4, 5], [-0.5, -1.5], [1, 2]),
                Rollout([7], 0, [8, 9, 2], [-0.1, -2.0, -3.0], [2, 2, 2])]
    trace = Trace("mine", rollouts, Sampling(0.7, 3, (2,), top_k=5), {"dtype": "float32", "stop_token_ids": [2]})
    save_trace(str(tmp_path / "trace.npz"), trace)
    (again,) = load_traces(str(tmp_path / "trace.npz"))
    for ours, theirs in zip(trace.rollouts, again.rollouts, strict=True):
        for name in ("prompt_ids", "seed", "token_ids", "versions"):
            assert getattr(ours, name) == getattr(theirs, name)
        assert theirs.logprobs == pytest.approx(ours.logprobs)
    assert (again.name, again.sampling) == ("mine", trace.sampling)


def json_trace(**changes) -> dict:
    group = {"sampling": {"temperature": 0.7}, "tokens": [[4, 5]], "logprobs": [[-0.5, -1.0]]}
    return {"meta": {"dtype": "float32"}, "prompt_ids": [[1, 3]], "groups": {"g": group | changes}}


@pytest.mark.parametrize("record, complaint", [
    ({}, "'prompt_ids' is missing"),
    ([], "meta, prompt_ids and groups must be as in the README"),
    ({"prompt_ids": [[1]], "meta": {}}, "'groups' is missing"),
    (json_trace() | {"groups": {}}, "groups must name at least one group"),
    (json_trace(tokens=[]), "g/tokens must have a non-empty row for each non-empty row of prompt_ids"),
    (json_trace(tokens=[[4, 5.5]]), "g/tokens must be rows of token ids"),
    (json_trace(tokens=[[4, "a"]]), "g/tokens must be rows of token ids"),
    (json_trace(tokens=[[4, -3]]), "g/tokens must be rows of token ids"),
    (json_trace(tokens=[4, 5]), "g/tokens must be rows of token ids"),
    (json_trace(logprobs=[[-0.5]]), "g/logprobs must have the shape of g/tokens"),
    (json_trace(logprobs=[[-0.5, -1.0], [-1.0]]), "g/logprobs must have the shape of g/tokens"),
    (json_trace(logprobs=[[-0.5, None]]), "g/logprobs must be numbers"),
    (json_trace(versions=[[1]]), "g/versions must have the shape of g/tokens"),
    (json_trace(sampling={}), "temperature"),
    (json_trace(sampling={"temperature": -1.0}), "temperature must be 0 (greedy) or at least 0.01"),
    (json_trace(sampling={"temperature": 1.0, "top_k": 1.5}), "top_k must be a whole number"),
    (json_trace(tokens=[[4, float("inf")]]), "g/tokens must be rows of token ids"),
    (json_trace(sampling={"temperature": 1.0, "logit_bias": {}}), "has logit_bias, which the probe does not reproduce"),
])  # fmt: skip
def test_a_malformed_trace_gets_a_sentence_that_names_the_field(tmp_path, record, complaint):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"trace\.json") as refused:
        load_traces(str(path))
    assert complaint in str(refused.value)


def command(*arguments: str, before: str = "pass") -> subprocess.CompletedProcess:
    program = f"import sys; {before}; sys.argv = {['probe', *arguments]!r}; from probe.__main__ import main; main()"
    whole = [sys.executable, "-c", program]
    return subprocess.run(whole, capture_output=True, text=True, check=False, cwd=ROOT, timeout=600)


def test_exit_status_is_0_for_parity_1_for_mismatch_2_for_bad_input_and_needs_no_vllm(tmp_path):
    model, absent = str(DATA / "tiny-qwen2"), "sys.modules['vllm'] = None"
    file = str(DATA / "v1_0.32.0_fp32_default.npz")
    one = command("diagnose", "--model", model, file, "--group", "t1", "--plot", str(tmp_path / "p.png"), before=absent)
    assert one.returncode == 0, one.stderr
    assert "=> parity" in one.stdout
    assert (tmp_path / "p.png").stat().st_size > 10_000
    asked = ("diagnose", "--model", model, file, "--group", "t0.7", "--json", str(tmp_path / "v.json"))
    two = command(*asked, before=absent)
    assert two.returncode == 1
    assert "semantics: raw log-probabilities" in two.stdout
    (record,) = json.loads((tmp_path / "v.json").read_text())
    assert record["layers"] == ["semantics"]
    assert record["best"]["share"] > 0.99
    malformed = tmp_path / "trace.npz"
    numpy.savez(malformed, meta=numpy.array("{}"))
    three = command("diagnose", "--model", model, str(malformed), before=absent)
    assert three.returncode == 2
    assert "'groups' is missing" in three.stderr
    assert "Traceback" not in three.stderr
    for wrong in (("--model", str(tmp_path / "none"), file), ("--model", model, file, "--earlier", str(ROOT / "tests")),
                  ("--model", model, "--json", str(tmp_path / "no" / "x.json"), file)):
        refused = command("diagnose", *wrong, before=absent)
        assert refused.returncode == 2, refused.stderr
        assert refused.stderr.count("\n") == 1
        assert refused.stderr.startswith("error: ")


def test_a_recorded_workload_is_diagnosed_and_covers_every_sampling_parameter(tmp_path):
    """record on a live engine; min-p and both masks against vLLM itself. 64 x 64 tokens in well under 30 s."""
    folder, out = tmp_path / "model", tmp_path / "trace.npz"
    qwen2(tied=False).save_pretrained(folder)
    settings = "--top-k 12 --top-p 0.9 --min-p 0.02 --repetition-penalty 1.1 --presence-penalty 0.1"
    done = command("record", "--model", str(folder), "--out", str(out), *settings.split(), "--frequency-penalty", "0.1")
    assert done.returncode == 0, done.stderr[-2000:]
    (trace,) = load_traces(str(out))
    assert trace.meta["audit"]["logprobs_mode"] == "processed_logprobs"
    assert sum(len(r.token_ids) for r in trace.rollouts) == 64 * 64
    started = time.perf_counter()
    verdict = diagnose(Policy.load(str(folder), torch.float32, "cpu"), trace)
    assert verdict.status == "parity", verdict.sentence
    assert time.perf_counter() - started < 30


def test_noise_over_few_tokens_is_given_more_room():
    floor = Noise(1e-3, 5e-4, 2e-3, 1e-2, 0.0, 2e-3, 0, 4096)
    assert Noise(0, 0, 0, 0, 0, 0, 0, 1, step=2**-7).allowed_mean(1) > 0.05  # a floor of 0 over one token is luck
    assert floor.allowed_mean(4096) == pytest.approx(1.3e-3 + 3 * 2e-3 / 64, rel=1e-3)
    assert floor.allowed_mean(4) == pytest.approx(1.3e-3 + 3 * 2e-3 / 2, rel=1e-3)
    assert floor.allows(replace(floor, mean=1.35e-3))
    assert not floor.allows(replace(floor, mean=1.45e-3))
    assert floor.allows(replace(floor, mean=1.45e-3, tokens=100))
    assert not floor.allows(replace(floor, median=2e-3))  # a heavy tail would hide it from the mean
    assert not floor.allows(replace(floor, max=0.2))
    assert not floor.allows(replace(floor, infinite=1))
