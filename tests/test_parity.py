"""The check beside a stranger's program: planted faults, clean engines, and that it leaves nothing behind."""

import json
import os
import sys
from contextlib import contextmanager

import pytest
import torch
from helpers import (
    ROOT,
    TINY,
    close_live_engine,
    parametrize,
    policy_in,
    python,
    qwen2,
    read_json,
    run_script,
    small_model,
    stored,
    value_error,
)
from transformers import AutoModelForCausalLM

from verify import parity, proof
from verify.parity import check
from vllm_cases import prepare_environment

pytestmark = pytest.mark.engine
SMALL = dict(enforce_eager=True, max_model_len=128, block_size=32, kv_cache_memory_bytes=2**26,
             skip_tokenizer_init=True)  # fmt: skip
FIXED = dict(logprobs_mode="processed_logprobs", enable_prefix_caching=False, async_scheduling=False,
             hf_overrides={"head_dtype": "float32"})  # fmt: skip
Q, K, V, UP = (f"model.layers.1.{name}_proj.weight" for name in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.up"))


class Stack:
    """What a handwritten trainer has: an engine, the model, and a load, into which `plant` puts a fault."""

    def __init__(self, folder, dtype, **arguments):
        from vllm import LLM

        self.llm = LLM(folder, dtype=dtype, **SMALL | arguments)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self.plant = None

    def sync(self):
        weights = dict(self.model.state_dict())
        if self.plant:
            self.plant(weights)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})

    def clean_sync(self):
        self.sync()
        self.llm.reset_prefix_cache()

    def lines(self, **options):
        return {line.name: line for line in check(self.llm, self.model, **options)}

    def verdicts(self, **options):
        return {name: line.verdict for name, line in self.lines(**options).items()}

    def trainer(self, temperature=0.7, top_k=None, place=-1):
        """A trainer's log-probabilities. Every argument has a wrong value."""

        def logprobs(prompt, response):
            logits = self.model(torch.tensor([prompt + response])).logits[0, len(prompt) + place:].float()
            logits = logits[: len(response)] / temperature
            smallest = logits.topk(top_k or logits.shape[-1]).values[:, -1:]
            logits = logits.masked_fill(logits < smallest, -torch.inf)
            return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0].tolist()

        return logprobs


@contextmanager
def stack(folder, dtype="float32", **arguments):
    close_live_engine()
    prepare_environment()
    made = Stack(str(folder), dtype, **arguments)
    yield made
    made.llm.llm_engine.engine_core.shutdown()


@parametrize("file, expected", [("v0_0.8.5_fp32", "processed"), ("v1_0.18.1_fp32_default", "raw")])
@torch.no_grad()
def test_values_under_penalties_of_two_versions_of_vllm_are_recognised(file, expected):
    trace = stored(file)["t0.7_pen"]
    given, rollouts = parity.sampling_of(trace.sampling), trace.rollouts[:16]
    reported = [value for rollout in rollouts for value in rollout.logprobs]
    rows = [(rollout.prompt_ids, rollout.token_ids) for rollout in rollouts]
    sampled = parity.Sampled(policy_in(TINY).model, given, torch.float32, rows, reported)
    assert sampled.judged(sampled.reported, parity.hypotheses(given))[:2] == (expected, True)


# ------------------------------------------------------------------------------------------------ verdicts
@parametrize("family, fixed, dtype", [
    ("Qwen2", True, "float32"), ("Qwen2", False, "bfloat16"), ("Llama", True, "bfloat16"), ("Llama", False, "float32"),
])  # fmt: skip
def test_each_planted_fault_is_hit_and_nothing_else(tmp_path, family, fixed, dtype):
    usual = set() if fixed else {"semantics", "head"} if dtype == "bfloat16" else {"semantics"}
    masked = {"sampling": {"temperature": 0.7, "top_k": 4}}
    small_model(family).save_pretrained(tmp_path)
    with stack(TINY if family == "Qwen2" else tmp_path, dtype, **FIXED if fixed else {}) as own:
        def hits(wanted, plant=None, **options):
            own.plant = plant
            verdicts = own.verdicts(**options)
            own.plant = None
            if plant:  # a skipped tensor is memory that nothing has written; NaN from it stays in the KV cache
                own.clean_sync()
                own.llm.collective_rpc(lambda worker: [cache.zero_() for cache in worker.model_runner.kv_caches][:0])
            found = {name for name, verdict in verdicts.items() if verdict == "hit"}
            # A wrong load shows in these, too, as far as rounding lets it.
            assert found - ({"numerics", "cache"} if "loads" in wanted else set()) == usual | set(wanted), verdicts

        stale = [] if fixed else ["cache"]
        hits(stale, sync=own.sync, trainer=own.trainer())
        hits([])
        hits(["loads"], lambda weights: weights.pop(UP), sync=own.sync)
        hits(["loads"], lambda weights: weights.update({K: weights[V], V: weights[K]}), sync=own.sync)
        with torch.no_grad():
            own.model.get_parameter(Q)[3, 5] *= 1.01  # the engine's is stale
        hits(["loads"])
        own.sync()
        hits([], sync=own.clean_sync)
        for wrong in ({"temperature": 1.0}, {"place": 0}):
            hits(["trainer"], trainer=own.trainer(**wrong))
        hits([], trainer=own.trainer(top_k=4), **masked)
        for wrong in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 4}):
            hits(["trainer"], trainer=own.trainer(**wrong), **masked)
        hits([], sampling={"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2})
        hits([], sampling={"min_p": 0.02, "presence_penalty": 0.9, "frequency_penalty": 0.4})
        if dtype == "bfloat16" and family == "Qwen2":  # float32 weights, whose step the engine's rounding undoes
            own.model.float()
            ids = torch.arange(4, 60)[None]
            own.model(ids, labels=ids).loss.backward()
            with torch.no_grad():
                for each in own.model.parameters():
                    each.sub_(each.abs() * each.grad.sign(), alpha=0.9 * 2**-9)
            hits(["weights"], sync=own.clean_sync, trainer=own.trainer())


def test_values_of_generation_config_that_act_are_named(tmp_path):
    qwen2().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, "top_k": 3}))
    with stack(tmp_path, **FIXED) as own:
        lines = own.lines()
        assert lines["defaults"].verdict == "cannot tell"
        assert "'top_k': 3" in lines["defaults"].text
        assert own.verdicts(sampling={"temperature": 0.7})["defaults"] == "ok"
        assert own.verdicts(sampling=own.llm.get_default_sampling_params())["defaults"] == "ok"


# ------------------------------------------------------------------------------------------------ no trace
def test_a_check_changes_no_bit_of_what_comes_after():
    """Weights, gradients, random states, samples without a seed, and dropout."""
    def outcome(checks):
        with stack(TINY, **FIXED) as own:
            from vllm import SamplingParams

            free = SamplingParams(temperature=1.0, max_tokens=16, logprobs=0, ignore_eos=True)

            def sampled():
                done = own.llm.generate([{"prompt_token_ids": [5, 6, 7]}] * 4, free, use_tqdm=False)
                return [(each.outputs[0].token_ids, each.outputs[0].cumulative_logprob) for each in done]

            torch.manual_seed(3)
            own.model.train()
            own.sync()
            first, ids = sampled(), torch.tensor([[5, 6, 7]])
            own.model(ids, labels=ids).loss.backward()
            if checks:
                assert "hit" not in own.verdicts(sync=own.sync, trainer=own.trainer()).values()
            held = own.llm.apply_model(lambda model: [tensor.tolist() for tensor in model.state_dict().values()])
            weights = [tensor.tolist() for each in own.model.parameters() for tensor in (each, each.grad)]
            return first, sampled(), torch.rand(3).tolist(), own.model.training, weights, held

    assert outcome(False) == outcome(True)


def test_what_cannot_be_checked_or_arrives_nowhere_is_said_in_a_sentence(monkeypatch):
    with stack(TINY, block_size=128) as own:
        from vllm import SamplingParams

        own.llm.llm_engine.add_request("0", {"prompt_token_ids": [5]}, SamplingParams(max_tokens=4))
        with value_error("must have no unfinished request"):
            own.lines()
        while own.llm.llm_engine.has_unfinished_requests():
            own.llm.llm_engine.step()
        assert own.verdicts(sampling={"temperature": 0.7, "min_p": None})["semantics"] == "hit"  # as TRL gives it
        up = own.model.get_parameter(UP).data
        for complaint, options in (
            ("sampling must have some of temperature, top_k", dict(sampling={"temperature": 0})),
            ("sampling must have some of temperature, top_k", dict(sampling={"temperature": "0.7"})),
            ("a number for each token", dict(trainer=lambda prompt, response: [0.0])),
            ("one row of numbers", dict(trainer=lambda prompt, response: None)),
            ("new_tokens must be from 1 to 127 ", dict(new_tokens=128)),
            ("sync must not change the model", dict(sync=lambda: up.add_(1))),
        ):
            with value_error(complaint):
                own.lines(**options)
        up -= 2  # of both calls
        own.clean_sync()
        nan = own.lines(trainer=lambda *row: [torch.nan, *own.trainer()(*row)[1:]])["trainer"]
        assert (nan.verdict, nan.text) == ("hit", "16 of 512 values are not finite")
        assert own.verdicts(sync=own.sync)["cache"] == "cannot tell"  # no prompt fills a block
        with monkeypatch.context() as patch:
            patch.setattr(proof, "differing", lambda *given: (_ for _ in ()).throw(ValueError("other names")))
            loads = own.lines(sync=lambda: None)["loads"]
            assert (loads.verdict, loads.text) == ("hit", "the moved weights did not arrive")
        own.llm.apply_model(lambda model: model.model.norm.weight.data[:1].fill_(torch.nan))
        lines = own.lines()
        assert lines["numerics"].verdict == lines["loads"].verdict == "hit"
        assert lines["numerics"].text == "512 of 512 log-probabilities not finite"
        own.sync()
        up += 1
        lines = own.lines(sync=own.sync)  # the engine is not moved
        assert lines["loads"].text == f"wrong: {UP} (1)"
        assert lines["cache"].verdict == "cannot tell"


@pytest.mark.own_process
def test_an_engine_in_another_process_is_reached_through_its_worker(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "verify"), prepend=os.pathsep)
    sys.path.insert(0, str(ROOT / "verify"))  # a stranger has both files beside his own
    import parity
    from vllm import LLM

    model = qwen2(tied=True)
    model.save_pretrained(tmp_path)
    for extension, reached in (("", False), ("parity.Worker", True)):
        llm = LLM(str(tmp_path), **SMALL | FIXED, worker_extension_cls=extension)
        assert not hasattr(llm.llm_engine, "model_executor")  # it is in a child process
        lines = {line.name: line for line in parity.check(llm, model)}
        assert lines["semantics"].verdict == lines["numerics"].verdict == "ok"
        assert lines["head"].verdict == lines["loads"].verdict == ("ok" if reached else "cannot tell")
        assert reached or "VLLM_ENABLE_V1_MULTIPROCESSING=0" in lines["loads"].text
        if reached:
            lone = dict(model.named_parameters())  # the tied head has a copy on a CPU
            assert parity.proof.differing(llm, lone) == ([], [], ["lm_head.weight"])
            model.get_parameter(UP).data.view(torch.int32)[3, 5] ^= 2**16
            assert parity.proof.differing(llm, model.state_dict()) == ([UP], [], [])
        llm.llm_engine.engine_core.shutdown()


# ------------------------------------------------------------------------------------------------ the command
def test_the_command_says_it_without_a_trainer(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "verify")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; else the command's own would stay for later tests
    arguments = SMALL | {"dtype": "float32"}
    words = ["verify/parity.py", "--model", TINY]
    with pytest.raises(SystemExit, match=r"^1$"):
        run_script(*words, "--json", tmp_path / "lines.json", "--engine-args", json.dumps(arguments))
    lines = {line["name"]: line for line in read_json(tmp_path / "lines.json")}
    assert {name for name, line in lines.items() if line["verdict"] == "hit"} == {"semantics", "cache"}
    assert lines["semantics"]["figures"]["raw"] < 1e-5 < 0.1 < lines["semantics"]["figures"]["processed"]
    with pytest.raises(SystemExit, match=r"^0$"):
        run_script(*words, "--engine-args", json.dumps(arguments | FIXED))


def test_the_command_refuses_bad_input_in_a_sentence(tmp_path):
    done = python("verify/parity.py", "--model", tmp_path, "--sampling", '{"min_tokens": 4}', status=2)
    assert done.stderr.splitlines()[-1].startswith("parity.py: error: ")

