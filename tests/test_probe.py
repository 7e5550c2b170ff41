"""The probe on traces of three versions of vLLM, on faults planted in a live engine, and on malformed input."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from helpers import CAN_BE_EXACT, SIXTEEN, config_of, move, qwen2, refusal, started

from config import ParityFlags
from extras.rounded_weights import RoundedWeights
from probe.__main__ import main
from probe.diagnose import StepProbe, alarms, as_trace, diagnose
from probe.search import Probe
from probe.traces import Trace, load_traces, save_trace
from rl import Policy, Scoring
from rollouts import Rollout, Sampling

DATA = Path(__file__).parent / "data"
MODEL, DEFAULT = str(DATA / "tiny-qwen2"), str(DATA / "v1_0.32.0_fp32_default.npz")

# By faults that are planted, the causes to be named.
RAW = "semantics: raw log-probabilities"
STALE = "inference path: weights 1 update(s) old"
PREFIX = "inference path: prompt KV computed under earlier weights (stale prefix cache)"
HALF = "numerics: head in 16 bits in the engine"
ROUNDED = "numerics: linear layers rounded to {}, one scale for each output channel"
EXPECTED = {
    "no mask": "semantics: mask or penalties applied by the sampler and not by the trainer",
    "generation config": "semantics: top_k 5 of generation_config.json in the sampler and not in the trace",
    "stale by 2": "inference path: weights 2 update(s) old",
    "prefix": PREFIX,
    "head in trainer": "numerics: head in 16 bits in the trainer",
    "head on both sides": "numerics: head in 16 bits on both sides",
    "raw+prefix": f"{PREFIX}; and {RAW}",
    "raw+head+prefix": f"{PREFIX}; and {RAW}; and {HALF}",
    "raw+head": f"{RAW}; and {HALF}",
    "head+stale": f"{STALE}; and {HALF}",
    "int8": ROUNDED.format("int8"),
    "fp8": ROUNDED.format("fp8"),
    "raw+int4": f"{ROUNDED.format('int4')}; and {RAW}",
}


@pytest.fixture(scope="module")
def reference() -> dict[str, Policy]:
    return {name: Policy.load(MODEL, getattr(torch, name), "cpu") for name in ("float32", "bfloat16")}


def stored(file: str) -> list[Trace]:
    return load_traces(str(DATA / file))


# ------------------------------------------------------------------------------------------------ the V0 reference
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
def test_the_migration_from_v0_to_v1_is_diagnosed(reference, file, expected):
    in_every_group = file in ("v0_0.8.5_fp32.npz", "v1_0.32.0_fp32_default.npz", "v1_0.18.1_bf16_default.npz")
    for trace in stored(file):
        if not in_every_group and trace.name not in ("t0.7", "t0.7_pen"):
            continue
        # at temperature 1 without masks, and greedily, the raw distribution is the processed one
        shown = [cause for cause in expected if not (cause == RAW and trace.name in ("t1", "greedy"))]
        verdict = diagnose(reference[trace.dtype], trace)
        assert verdict.blamed == ("; and ".join(shown) or "parity"), f"{trace.name}: {verdict.sentence}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_precise_values_are_those_of_a_model_in_twice_the_precision(reference, dtype):
    trace = stored("v1_0.32.0_fp32_fixes.npz")[0]
    rollout = trace.rollouts[3]
    ids = torch.tensor([rollout.prompt_ids + rollout.token_ids])
    with torch.no_grad():
        probe = Probe(reference[dtype], replace(trace, rollouts=[rollout]), [])
        logits = Policy.load(MODEL, getattr(torch, dtype), "cpu").model.double()(ids).logits / 0.7
    own = logits.log_softmax(dim=-1)[0, range(ids.shape[1] - 1), ids[0, 1:]][-len(rollout.token_ids) :]
    precise, rounded = (values[probe.trainer] for values in (probe.now.precise, probe.now.rounded))
    assert (precise - own).abs().max() < (rounded - own).abs().max() / 10


# ------------------------------------------------------------------------------------------------ planted faults
@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Its engines live from test to test."""
    return tmp_path_factory.mktemp("planted")


def plant(folder: Path, faults: set[str], dtype: torch.dtype = torch.float32, tied: bool = False, batch: int = 24,
          temperature: float = 0.7, **parameters: float) -> tuple:
    """Sample a trace with the faults; returns the arguments of `diagnose`: policy, trace, earlier weights, and the
    distribution that the trainer scores.
    """
    model = qwen2(tied, dtype=dtype)
    with torch.no_grad():  # an offset in all logits changes the rounding of a 16-bit head but not the softmax
        for weight in model.model.embed_tokens.weight, model.get_output_embeddings().weight:
            weight[:, 0] = 4.0
    parity = ParityFlags(processed_logprobs="raw" not in faults, uncached_runtime="prefix" not in faults,
                         fp32_head=not faults & {"head", "head on both sides"})  # fmt: skip
    policy = Policy(model, Scoring(fp32_head=parity.fp32_head))
    place = str(folder / f"{tied} {dtype}")
    model.save_pretrained(place)
    with started(place, policy, parity, max_model_len=192, block_size=32, max_num_seqs=128) as engine:
        engine.canary_tolerance = math.inf
    generator = torch.Generator().manual_seed(100)
    lengths = torch.randint(3, 90 if "prefix" in faults else 30, (batch,), generator=generator).tolist()
    prompts = [torch.randint(6, 96, (length,), generator=generator).tolist() for length in lengths]
    seeds = [5000 + 7 * row for row in range(batch)]
    sampling = Sampling(temperature, 40, stop_token_ids=(2, 3, 4, 5), **parameters)
    if "no mask" in faults:
        sampling = replace(sampling, top_k=8, repetition_penalty=1.2, presence_penalty=0.2)
    earlier = [policy.copied_weights()]
    if "stale by 2" in faults:
        move(policy, 0.01, 50)
        earlier.insert(0, policy.copied_weights())
    asked = sampling
    if "generation config" in faults:
        model.generation_config.top_k = 5
        asked = replace(sampling, top_k=5)
    if "prefix" in faults:
        engine.generate(prompts[:-3], 1, asked, seeds[:-3])  # all but three are sent again
    if faults & {"stale", "stale by 2", "prefix"}:
        move(policy, 0.01, 60)
    with policy.using(earlier[-1] if faults & {"stale", "stale by 2"} else {}):
        weights = policy.weights()
        for kind in faults & {"int8", "fp8", "int4"}:
            weights = RoundedWeights(model, kind)(weights)
        engine.load(weights, policy.response_logprobs)
    rollouts = engine.generate(prompts, 1, asked, seeds)
    policy.scoring = Scoring(fp32_head=not faults & {"head in trainer", "head on both sides"})
    trainer = "temperature" if "no mask" in faults else "processed"
    return policy, Trace("planted", rollouts, sampling), earlier, trainer


@pytest.mark.engine
@pytest.mark.parametrize("dtype", [torch.float32, SIXTEEN])
@pytest.mark.parametrize("tied", [False, True])
def test_clean_traces_of_the_live_engine_are_parity(folder, tied, dtype):
    for batch, temperature in ((1, 0.5), (9, 1.5), (40, 1.0)):
        verdict = diagnose(*plant(folder, set(), dtype, tied, batch, temperature))
        # Rounding has a tail: once in some hundred clean traces a single request is beyond its limit (docs/probe.md).
        alone = verdict.blamed.startswith("inference path: wrong requests") and verdict.found[0].wrong.sum() == 1
        assert verdict.status == "parity" or alone, verdict.sentence


@pytest.mark.engine
@pytest.mark.parametrize("name", EXPECTED)
def test_a_planted_fault_is_named_and_the_policy_is_unchanged(folder, name):
    dtype = SIXTEEN if "head" in name else torch.float32
    policy, trace, *others = plant(folder, {*name.split("+")}, dtype)
    before = policy.copied_weights()
    verdict = diagnose(policy, trace, *others)
    assert verdict.blamed == EXPECTED[name], verdict.sentence
    assert all(torch.equal(parameter, before[each]) for each, parameter in policy.model.named_parameters())


@pytest.mark.engine
@pytest.mark.parametrize("name, dtype", [("raw", torch.float32), ("head", SIXTEEN)])
def test_no_cause_fits_beside_those_that_explain_a_trace(folder, name, dtype):
    """One request is wrong, so that the search tries every hypothesis. Rounded weights explain nothing in this trace,
    but runs with a 16-bit head were blamed for int8. The earlier weights are equal to the present ones.
    """
    policy, trace, earlier, _ = plant(folder, {name}, dtype, batch=64)
    wrong, *right = trace.rollouts
    wrong = replace(wrong, logprobs=[value - 2 for value in wrong.logprobs])
    verdict = diagnose(policy, replace(trace, rollouts=[wrong, *right]), earlier)
    planted = {"raw": RAW, "head": HALF}[name]
    assert {each.name for each in verdict.found if each.fits} == {planted.partition(": ")[2]}


@pytest.mark.engine
def test_a_fault_that_no_hypothesis_explains_is_unexplained_and_names_the_next_command(folder):
    """A tensor multiplied by 1.3 in the engine."""
    policy, trace, *_ = plant(folder, set())
    with torch.no_grad():
        policy.model.model.layers[0].mlp.up_proj.weight.mul_(1.3)
    move(policy, 0.01, 3)
    verdict = diagnose(policy, trace)
    assert verdict.blamed == "unexplained"
    for part in ("\n raw log-probabilities ", "Not tested without earlier weights", "python -m probe layers"):
        assert part in verdict.report


@pytest.mark.engine
def test_norms_with_another_epsilon_are_found_over_5000_tokens_in_16_bits(folder):
    """Their mismatch is twice that of a clean trace. An epsilon of 6e-3 (1.5 times) is below the limit."""
    policy, trace, *_ = plant(folder, set(), SIXTEEN, batch=128)
    assert diagnose(policy, trace).status == "parity"
    for module in policy.model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-2  # in the engine 1e-6
    assert diagnose(policy, trace).status == "unexplained"


# ------------------------------------------------------------------------------------------------ traces and commands
def test_a_trace_is_the_same_after_save_and_load(tmp_path):
    rollouts = [Rollout([1, 2, 3], None, [4, 5], [-0.5, -1.5]), Rollout([7], None, [2], [-0.125])]
    trace = Trace("mine", rollouts, Sampling(0.7, 1, top_k=5))
    save_trace(str(tmp_path / "trace.npz"), trace)
    (again,) = load_traces(str(tmp_path / "trace.npz"))
    assert replace(again, meta={}) == trace


def json_trace(**changes) -> dict:
    group = {"sampling": {"temperature": 0.7}, "tokens": [[4, 5]], "logprobs": [[-0.5, -1.0]]}
    return {"meta": {"dtype": "float32"}, "prompt_ids": [[1, 3]], "groups": {"g": group | changes}}


@pytest.mark.parametrize("record, complaint", [
    ({}, "'meta' is missing"),
    ({"meta": {"format": 2}}, "meta.format must be 1 (newer ones need a newer probe), got 2"),
    (json_trace(tokens=[], logprobs=[]), "g/tokens must have a row for each row of prompt_ids"),
    (json_trace(tokens=[[4, 5.5]]), "g/tokens, row 0 must be token ids, padded with -1 on the right"),
    (json_trace(tokens=[4]), "g/tokens, row 0 must be token ids"),
    (json_trace(logprobs=[[-0.5, math.nan]]), "g/logprobs, row 0 must have a finite number for each token"),
    (json_trace(logprobs=[[-0.5]]), "g/logprobs, row 0 must have a finite number for each token"),
    (json_trace(sampling={"temperature": -1.0}), "temperature must be in [0.01,"),
    (json_trace(sampling={"temperature": 1.0, "max_kept": 3}), "sampling must have no max_kept"),
    (json_trace() | {"meta": {"dtype": "float64"}}, "meta.dtype must be float32, bfloat16 or float16, got 'float64'"),
])  # fmt: skip
def test_the_error_of_a_malformed_trace_names_the_field(tmp_path, record, complaint):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"trace\.json") as refused:
        load_traces(str(path))
    assert complaint in str(refused.value)


def exit_status(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    return stop.value.code


def test_exit_status_is_1_for_a_mismatch_and_the_report_has_its_figures(capsys):
    """Without the marker `engine`: diagnose needs no vLLM."""
    assert exit_status("diagnose", "--model", MODEL, DEFAULT, "--group", "t1") == 0
    assert "=> parity" in capsys.readouterr().out
    assert exit_status("diagnose", "--model", MODEL, DEFAULT, "--group", "t0.7") == 1
    title, _, best, *_, sentence = capsys.readouterr().out.strip().splitlines()
    assert title == "t0.7: 4096 tokens"
    assert sentence.startswith("=> semantics: raw log-probabilities. Repair: ")
    assert best.startswith("*raw log-probabilities ")
    assert float(best.split()[-2]) < 1e-5


@pytest.mark.parametrize("arguments, complaint", [
    ("diagnose {root}/trace.npz --model {model}", "error: {root}/trace.npz: 'groups' is missing"),
    ("diagnose {default} --model {root}/none", "error: loading the model in {root}/none failed"),
    ("diagnose {default} --model {model} --earlier {root}", "error: loading the model in {root} failed"),
    ("diagnose {default} --model {model} --group none", "error: group must be one of those in {default}, got none"),
    ("layers --model {model} --num-prompts 0", "num_prompts must be in [1,"),
])  # fmt: skip
def test_bad_input_is_refused_by_name_before_vllm_starts(tmp_path, capsys, arguments, complaint):
    numpy.savez(tmp_path / "trace.npz", meta=numpy.array("{}"))
    words = [word.format(root=tmp_path, model=MODEL, default=DEFAULT) for word in arguments.split()]
    assert complaint.format(root=tmp_path, default=DEFAULT) in refusal(words, capsys, main)


@pytest.mark.engine
def test_a_trace_is_parity_with_every_sampling_parameter_set(folder):
    """The masks and penalties of vLLM's sampler against those of the probe."""
    parameters = dict(top_k=12, top_p=0.9, min_p=0.02, repetition_penalty=1.1, presence_penalty=0.1,
                      frequency_penalty=0.1)  # fmt: skip
    verdict = diagnose(*plant(folder, set(), batch=64, **parameters))
    assert verdict.status == "parity", verdict.sentence


@CAN_BE_EXACT
@pytest.mark.engine
def test_a_trace_of_the_exact_engine_has_no_mismatch_until_a_weight_changes(tmp_path):
    qwen2(tied=False).save_pretrained(tmp_path)
    policy = Policy.load(str(tmp_path), torch.bfloat16, "cpu")
    with started(str(tmp_path), policy, kind="exact", max_model_len=64) as engine:
        sampling = Sampling(0.7, 24, top_k=20)
        prompts = [list(range(5, 8 + index)) for index in range(24)]
        trace = as_trace(engine, engine.generate(prompts, 1, sampling, [*range(24)]), sampling)
        verdict, earlier = diagnose(engine.policy, trace), engine.policy.copied_weights()
        assert verdict.sentence.startswith("parity. mean |mismatch| 0.0e+00 nats")
        move(engine.policy, 0.01, 1)
        assert diagnose(engine.policy, trace, [earlier]).blamed == STALE


def test_each_alarm_alone_and_no_clip_alarm_for_narrow_bounds():
    clean = {"current_mismatch_kl": 9e-4, "current_mismatch_abs_mean": 0.04, "current_ess": 0.981,
             "backend_clip_rate": 0.004, "backend_ratio_mean": 1.004}  # fmt: skip
    assert alarms(clean, 0.2) == []
    for metric, value, name in (
        ("current_mismatch_kl", 2e-3, "mismatch_kl"), ("current_mismatch_abs_mean", 0.05, "mismatch_abs_mean"),
        ("current_ess", 0.97, "ess_loss"), ("backend_clip_rate", 0.006, "backend_clip_rate"),
        ("backend_ratio_mean", 0.994, "backend_ratio_error"),
        ("backend_ratio_mean", math.nan, "backend_ratio_error"),
    ):  # fmt: skip
        assert alarms(clean | {metric: value}, 0.2) == [name]
    kept = {"kept_mass": 0.95, "engine_kept_mass": 0.0, "staleness_max": 0}
    assert alarms(clean | kept, 0.2) == ["kept_mass_error"]
    assert alarms(clean | kept | {"staleness_max": 1}, 0.2) == alarms(clean | kept | {"kept_mass": 0.009}, 0.2) == []
    for z in (-6.0, 6.0):
        assert alarms(clean | {"surprisal_z": z}, 0.2) == ["surprisal_z"]
        assert alarms(clean | {"surprisal_z": z, "groups_in_flight": 3}, 0.2) == []
    assert alarms(clean | {"backend_clip_rate": 0.26}, 4e-4) == []  # GSPO's bounds: the rounding of 16 bits
    assert alarms({}, 0.2) == []  # no rollout with current weights


def test_a_step_without_an_update_leaves_the_probe_the_weights_before_the_last_update():
    state = SimpleNamespace(policy=Policy(qwen2(tied=False)), engine=None)
    probe = StepProbe(SimpleNamespace(config=config_of()), state)
    probe(SimpleNamespace(metrics={"step": 1, "updates": 2}))
    known = probe.weights
    probe(SimpleNamespace(metrics={"step": 2, "updates": 0}))
    assert len(known) == 2
    assert probe.weights is known
