"""The probe against faults planted in the real engine, and against clean traces: the confusion table of the README.

    .venv/bin/python tests/planted.py            # all of it: singles, pairs, clean; fp32 and bf16; three seeds
    .venv/bin/python tests/planted.py --seeds 1 --only raw stale raw+stale

The faults are in the live engine, not in the trace: weights are not loaded, caches are kept, flags are off, sampling
parameters and KV blocks are changed, outputs are read wrongly.
"""

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for models this small threads cost more than they save

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from conftest import qwen2

from engine_adapter import Engine, ParityFlags, Sampling
from probe.diagnose import diagnose
from probe.traces import Trace
from rl import Policy

BLOCK = 32
STOPS = (2, 3, 4, 5)
# fault -> (layer, part of the cause's name)
EXPECTED = {
    "raw": ("semantics", "raw log-probabilities"),
    "top-1": ("semantics", "likeliest token"),
    "shift": ("semantics", "predecessor's value"),
    "stop": ("semantics", "stop token without"),
    "hidden temperature": ("semantics", "temperature 1."),
    "hidden top-k": ("semantics", "top_k 5 "),
    "hidden top-p": ("semantics", "top_p 0.8"),
    "hidden penalty": ("semantics", "repetition_penalty 1."),
    "trainer without mask": ("semantics", "mask applied by the sampler and not by the trainer"),
    "trainer without penalties": ("semantics", "penalties applied by the sampler and not by the trainer"),
    "cold": ("semantics", "not in force in the sampler"),
    "mask not in force": ("semantics", "not in force in the sampler"),
    "rounded weights": ("numerics", "weights rounded to bfloat16"),
    "stale": ("inference path", "weights 1 update(s) old"),
    "stale by 2": ("inference path", "weights 2 update(s) old"),
    "tensor": ("inference path", "tensors 1 update(s) old: model.layers.1.mlp.down_proj.weight"),
    "tensors": ("inference path", "tensors 1 update(s) old: "),
    "prefix": ("inference path", "stale prefix cache"),
    "kept": ("inference path", "KV kept over an in-flight update"),
    "recomputed": ("inference path", "KV recomputed"),
    "staggered": ("inference path", "KV kept over an in-flight update"),
    "async": ("inference path", "one token off at an update"),
    "one request": ("inference path", "wrong requests"),
    "head": ("numerics", "head in 16 bits in the engine"),
    "head in trainer": ("numerics", "head in 16 bits in the trainer"),
    "head on both sides": ("numerics", "head in 16 bits on both sides"),
    "body": ("numerics", "whole body in bfloat16"),
    "moved on": ("objective", "moved on by 1"),
}
SEMANTIC, PATH = ("raw", "top-1", "shift", "stop"), ("stale", "tensor", "prefix", "kept", "one request", "head")
PAIRS = [f"{a}+{b}" for a, b in product(SEMANTIC, PATH)] + ["head+stale", "head+tensor", "head+prefix", "raw+moved on"]
ONLY_FP32 = {"body", "rounded weights"}
IN_FLIGHT = {"kept", "recomputed", "async", "staggered"}
ONLY_BF16 = {"head in trainer", "head on both sides"}


# ------------------------------------------------------------------------------------------------ the live engine
class Bench:
    """One engine at a time, reused while the next trial needs the same one."""

    def __init__(self):
        self.folders = TemporaryDirectory()
        self.key, self.engine, self.spoiled = None, None, None

    def get(self, policy: Policy, parity: ParityFlags) -> Engine:
        config = policy.model.config
        key = (str(config), policy.model.dtype, parity)
        if key != self.key or Engine.live is not self.engine:
            self.close()
            folder = Path(self.folders.name) / str(abs(hash(key)))
            policy.model.save_pretrained(folder)
            contract = {name: tensor.shape for name, tensor in policy.weights().items()}
            self.engine = Engine(str(folder), contract, parity, max_model_len=192, dtype=policy.model.dtype,
                                 block_size=BLOCK, max_num_seqs=128)
            self.key = key
        self.engine.load(policy.weights(), policy.response_logprobs)
        return self.engine

    def close(self):
        if Engine.live is not None:  # this one, or another test's
            Engine.live.close()
        self.engine, self.key = None, None


def move(policy: Policy, seed: int, scale: float = 0.01) -> None:
    """A random update of every weight; its size is a tenth of the initial weights' standard deviation."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_((scale * noise).to(parameter.dtype))


def load(engine: Engine, policy: Policy, old: dict, names: list[str]) -> None:
    """Load some tensors in their old version. The canary is scored with the same mixture, so that it passes."""
    parameters = dict(policy.model.named_parameters())
    held = {name: parameters[name].data for name in names}
    for name in names:
        parameters[name].data = old[name]
    try:
        engine.load({n: t.clone() for n, t in policy.weights().items()}, policy.response_logprobs)
    finally:
        for name, tensor in held.items():
            parameters[name].data = tensor


class Meddler:
    """Changes requests and outputs between the adapter and vLLM's core, but not those of the canary.

    Requests get sampling parameters that the trace does not have. Log-probabilities are taken from another column, from
    the token before, or left out at the stop token.
    """

    EXTRA = {"hidden temperature": ("temperature", 1.1), "hidden top-k": ("top_k", 5), "hidden top-p": ("top_p", 0.8),
             "hidden penalty": ("repetition_penalty", 1.2), "top-1": ("logprobs", 1), "cold": ("temperature", 1.0),
             "mask not in force": ("top_k", 0)}

    def __init__(self, engine: Engine, faults: set[str]):
        self.engine, self.faults, self.active, self.marked, self.previous = engine, faults, True, set(), {}

    def __enter__(self):
        self.core = self.engine.llm.engine_core
        self.add, self.output = self.core.add_request, self.core.get_output
        self.core.add_request, self.core.get_output = self.faulty_add, self.faulty_output
        return self

    def __exit__(self, *_):
        self.core.add_request, self.core.get_output = self.add, self.output

    def faulty_add(self, request):
        if self.active:
            self.marked.add(request.request_id)
            for fault, (name, value) in self.EXTRA.items():
                if fault in self.faults:
                    setattr(request.sampling_params, name, value)
        self.add(request)

    def faulty_output(self):
        outputs = self.output()
        for new in outputs.outputs:
            if new.request_id not in self.marked:
                continue
            values = new.new_logprobs.logprobs.copy()  # (tokens, entries), of the sampled tokens in column 0
            for row in values:
                if "top-1" in self.faults:
                    row[0] = row.max()
                if "shift" in self.faults:
                    own, row[0] = row[0], self.previous.get(new.request_id, 0.0)
                    self.previous[new.request_id] = own
            if "stop" in self.faults and str(new.finish_reason) == "stop":
                values[-1, 0] = 0.0
            new.new_logprobs = new.new_logprobs._replace(logprobs=values)
        return outputs


def spoil_kv(engine: Engine, place: int) -> int:
    """Overwrite the first KV block of one running request; returns the request's number."""
    scheduler = engine.core.scheduler
    request = scheduler.running[place].request_id
    block = scheduler.kv_cache_manager.get_block_ids(request)[0][0]
    for cache in engine.runner.kv_caches:  # (blocks, heads, tokens, 2 * head size)
        cache[block].neg_()
    return int(request)


# ------------------------------------------------------------------------------------------------ a trial
def shifted(tied: bool, seed: int, dtype: torch.dtype):
    """The tests' model with an offset in all logits. It changes the rounding of a 16-bit head but not the softmax."""
    model = qwen2(tied=tied, seed=seed, dtype=dtype)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 4.0
        model.get_output_embeddings().weight[:, 0] = 4.0
    return model


def plant(bench: Bench, faults: set[str], tied: bool, dtype: torch.dtype, seed: int, batch: int = 24,
          temperature: float = 0.7, tokens: int = 40):
    """Sample a trace with the faults; returns (trace, policy, earlier, version, trainer) for `diagnose`."""
    policy = Policy(shifted(tied, seed, dtype))
    parity = ParityFlags(processed_logprobs="raw" not in faults,
                         explicit_runtime=not faults & {"prefix", "async"},
                         fp32_head=not (faults & {"head", "head on both sides"} and dtype == torch.bfloat16))
    in_engine = Policy(shifted(tied, seed, torch.bfloat16)) if "body" in faults else policy
    policy.fp32_head = parity.fp32_head
    engine = bench.get(in_engine, parity)
    policy.fp32_head = True
    generator = torch.Generator().manual_seed(100 + seed)
    lengths = torch.randint(3, 90 if "prefix" in faults else 30, (batch,), generator=generator)
    prompts = [torch.randint(6, 96, (int(n),), generator=generator).tolist() for n in lengths]
    seeds = [5000 * (seed + 1) + 7 * i for i in range(batch)]
    sampling = Sampling(temperature, tokens, STOPS)
    if faults & {"trainer without mask", "mask not in force"}:
        sampling = replace(sampling, top_k=8)
    if "trainer without penalties" in faults:
        sampling = replace(sampling, repetition_penalty=1.2, presence_penalty=0.2)
    oldest = policy.copied_weights()
    if "stale by 2" in faults:
        move(policy, 50 + seed)
    old = policy.copied_weights()
    names = list(dict(policy.model.named_parameters()))
    chosen = {"tensor": ["model.layers.1.mlp.down_proj.weight"],
              "tensors": [n for n in names if "layers.0.self_attn" in n and n.endswith("weight")],
              "stale": names, "stale by 2": names}
    half_head = "head" in faults and dtype == torch.float32  # set in the live engine after the canary
    moving = {"stale", "stale by 2", "tensor", "tensors", "prefix", "moved on"} | IN_FLIGHT
    rollouts = []
    with Meddler(engine, faults) as meddler:
        if "prefix" in faults:
            engine.generate(prompts[:-3], 1, sampling, seeds[:-3])  # all but three are sent again
        if faults & IN_FLIGHT:
            for prompt, sample_seed in zip(prompts, seeds, strict=True):
                rollouts += engine.submit(prompt, 1, sampling, sample_seed)
                if "staggered" in faults and len(rollouts) % 2:
                    engine.step()
            for _ in range(11):
                engine.step()
        if faults & moving:
            move(policy, 60 + seed)
        if "recomputed" in faults:
            assert engine.llm.reset_prefix_cache(reset_running_requests=True)
        meddler.active = False
        if "rounded weights" in faults:
            rounded = {name: tensor.bfloat16().float() for name, tensor in old.items()}
            load(engine, policy, rounded, names)
        elif not faults & {"moved on", "body"}:
            policy.fp32_head = parity.fp32_head
            kept_old = next((chosen[fault] for fault in chosen if fault in faults), [])
            load(engine, policy, oldest if "stale by 2" in faults else old, kept_old)
        meddler.active = True
        if half_head:
            engine._model.logits_processor.head_dtype = torch.bfloat16
        rollouts = rollouts or [engine.submit(p, 1, sampling, s)[0] for p, s in zip(prompts, seeds, strict=True)]
        first = min(map(int, engine._requests))
        steps = 0
        while engine.num_unfinished:
            engine.step()
            steps += 1
            if "one request" in faults and steps == 6:
                bench.spoiled = spoil_kv(engine, batch // 3) - first
    if half_head:
        engine._model.logits_processor.head_dtype = torch.float32
    meta = {"vllm": engine.version, "dtype": str(policy.model.dtype).removeprefix("torch."),
            "stop_token_ids": list(STOPS)}
    policy.fp32_head = not faults & {"head in trainer", "head on both sides"}
    version = engine.weight_version + ("moved on" in faults)
    earlier = [old, oldest] if "stale by 2" in faults else [old]
    trainer = "temperature" if faults & {"trainer without mask", "trainer without penalties"} else "processed"
    return Trace("planted", rollouts, sampling, meta), policy, earlier, version, trainer


def right(faults: list[str], verdict) -> tuple[bool, bool]:
    """Does the verdict name the layers of the faults, and does it name their causes?"""
    layers = {EXPECTED[fault][0] for fault in faults}
    causes = [cause.name for cause in verdict.causes]
    wanted = [EXPECTED[fault][1] for fault in faults]
    named = all(any(part in cause for cause in causes) for part in wanted)
    extra = len(causes) - len(wanted) - (1 if "async" in faults else 0)
    return set(verdict.layers) == layers, named and extra <= 0


# ------------------------------------------------------------------------------------------------ the table
def trials(arguments) -> list[tuple[str, bool, torch.dtype, int]]:
    names = arguments.only or [*EXPECTED, *PAIRS]
    wanted = []
    for name, dtype, seed in product(names, arguments.dtypes, range(arguments.seeds)):
        faults = set(name.split("+"))
        if not faults & (ONLY_BF16 if dtype == "float32" else ONLY_FP32):
            wanted.append((name, bool(seed % 2), getattr(torch, dtype), seed))
    # trials with the same engine follow each other
    return sorted(wanted, key=lambda t: (str(t[2]), t[1], "raw" in t[0], "prefix" in t[0] or "async" in t[0],
                                         "head" in t[0], t[0], t[3]))


def clean_trials():
    """Trials without a fault: tied and untied, batches of 1 to 128, temperatures 0.5 to 1.5."""
    for dtype, tied in product((torch.float32, torch.bfloat16), (False, True)):
        for index, (batch, temperature) in enumerate(product((1, 2, 8, 33, 128), (0.5, 0.7, 1.0, 1.5))):
            yield dtype, tied, batch, temperature, index % 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--json")
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    bench, rows, table = Bench(), [], defaultdict(list)
    started = time.perf_counter()
    for name, tied, dtype, seed in trials(arguments):
        faults = name.split("+")
        trace, policy, earlier, version, trainer = plant(bench, set(faults), tied, dtype, seed)
        verdict = diagnose(policy, trace, earlier, version, trainer)
        layer, cause = right(faults, verdict)
        table[name, str(dtype)].append((layer, cause))
        rows.append({"fault": name, "dtype": str(dtype), "seed": seed, "layer": layer, "cause": cause,
                     "sentence": verdict.sentence, "status": verdict.status})
        if arguments.verbose or not cause:
            print(f"{'ok ' if cause else 'BAD'} {name} {dtype} {seed}: {verdict.sentence[:700]}", flush=True)
    alarms = 0
    if not arguments.only:
        clean = list(clean_trials())
        for dtype, tied, batch, temperature, seed in clean:
            given = plant(bench, set(), tied, dtype, seed, batch, temperature)
            verdict = diagnose(given[1], given[0], given[2], given[3])
            if verdict.status != "parity":
                alarms += 1
                print(f"FALSE ALARM {dtype} tied {tied} batch {batch} T {temperature}: {verdict.sentence}", flush=True)
        print(f"clean traces: {alarms} false alarms in {len(clean)}")
    bench.close()
    print(f"{'fault':<30} {'dtype':<9} {'layer':>6} {'cause':>6}")
    for (name, dtype), outcomes in sorted(table.items()):
        print(f"{name:<30} {dtype.removeprefix('torch.'):<9} {sum(o[0] for o in outcomes):>3}/{len(outcomes)}"
              f" {sum(o[1] for o in outcomes):>4}/{len(outcomes)}")
    total = [o for outcomes in table.values() for o in outcomes]
    layers, causes = (sum(o[part] for o in total) for part in (0, 1))
    seconds = time.perf_counter() - started
    print(f"right layer {layers}/{len(total)}, right cause {causes}/{len(total)}, {seconds:.0f} s")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1))
    return int(alarms > 0 or not all(o[0] for o in total))


if __name__ == "__main__":
    sys.exit(main())
