"""What several tests share, and the checks in tests/long/ with them: engines, models, runs and planted faults.

No test file imports another one. Fixtures and the rules for markers are in conftest.py.
"""

import atexit
import gc
import json
import math
import os
import random
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from multiprocessing import Process, get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")  # models this small lose more by waking threads than they gain
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs a hub: what asks for one fails at once

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1]))
import examples.toys as toys
import train
from config import Config, ParityFlags
from engine_adapter import Engine
from extras.sampling_mask import collect_kept_sets
from extras.shared_engine import SharedEngine
from objectives import mismatch_metrics
from probe.traces import Trace
from rl import Batch, Policy, frozen_logprobs, make_batch
from rollouts import Rollout, Sampling
from run import Run, TrainingState, begin, build, find_checkpoint, load_policy, prepare, start_engine
from tasks import Task, encode, exact_match

logging.disable_progress_bar()
ROOT = Path(__file__).parents[1]


# ------------------------------------------------------------------------------------------------ other seeds
SHIFT = int(os.environ.get("TEST_SEED", "0"))  # added to each seed in this process: of tests, runs, engine and samples
CACHE = ROOT / ".cache"


class ShiftedGenerator(torch.Generator):
    def manual_seed(self, seed: int) -> torch.Generator:
        return super().manual_seed(seed + SHIFT)


class ShiftedRandom(random.Random):
    def seed(self, *given) -> None:
        super().seed(repr((given, SHIFT)) if given and given[0] is not None else None)


if SHIFT:
    usual_seed, usual_toy = torch.manual_seed, toys.toy_model
    torch.manual_seed = lambda seed: usual_seed(seed + SHIFT)
    torch.Generator, random.Random = ShiftedGenerator, ShiftedRandom
    CACHE = CACHE / f"test-seed-{SHIFT}"  # the toys are other ones
    toys.toy_model = lambda cache_dir, *given, **named: usual_toy(str(Path(cache_dir) / CACHE.name), *given, **named)


# ------------------------------------------------------------------------------------------------ one live engine
DEVICES = "cpu", pytest.param("cuda", marks=pytest.mark.gpu)
OWN_PROCESS = "PYTEST_OWN_PROCESS"  # in the child process of a test: the id of its parent
shared: dict[Engine, str] = {}  # the live engine, if `started` made it, and its arguments
# vLLM freezes all objects when it starts. It unfreezes them when it closes, and then collects garbage three times in
# all imported modules (1.3 s). Without a GPU only `close_live_engine` freezes, and nothing unfreezes. So the imported
# modules stay frozen, an engine is never frozen, and the same collections free it in 0.1 s.
freeze, unfreeze = gc.freeze, gc.unfreeze
if not torch.cuda.is_available():
    atexit.register(unfreeze)
    gc.freeze = gc.unfreeze = lambda: None


def close_live_engine() -> None:
    """Before anything but `started` starts an engine: a process holds one."""
    if Engine.live is not None:
        Engine.live.close()
    shared.clear()
    freeze()  # vLLM collects garbage five times while it starts, each time in all imported modules (0.4 s)


def train_here(arguments: list[str]) -> None:
    """train.py in this process."""
    close_live_engine()
    train.main(arguments)


def run_script(name: str, *words: object) -> None:
    """A file of ours as a command, in this process."""
    close_live_engine()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *map(str, words)])
        runpy.run_path(str(ROOT / name), run_name="__main__")
    gc.collect()  # an engine of the page ends here


# A fork of a process with several threads waits for ever in OpenMP, which waits for the threads.
CHILD = get_context("fork" if os.environ["OMP_NUM_THREADS"] == "1" else "spawn")


def forked(function: Callable, *arguments) -> Process:
    """A child process that calls a function of a module. It starts at once, with all that this process has imported."""
    close_live_engine()
    process = CHILD.Process(target=function, args=arguments)
    process.start()
    return process


def built(root: Path, out: Path, **options) -> tuple[Run, TrainingState, int]:
    """All of train.py up to the first step, whose number comes last, with the model and the problems of a good run."""
    usual = dict(model=str(root / "model"), task=str(root / "task.jsonl"), out=str(out), num_prompts=4, group_size=2,
                 engine="transformers")  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    run = prepare(Config.of(**usual | options))
    policy = load_policy(run)
    state = build(run, policy, start_engine(run, policy))
    return run, state, begin(run, state, find_checkpoint(run))


@contextmanager
def started(
    folder: str, policy: Policy, parity: ParityFlags | None = None, load: bool = True, kind: str = "vllm", **options
) -> Iterator[Engine]:
    """A live engine for the architecture in `folder`. It holds the policy's weights, or with `load=False` none at all.

    The engine stays alive for the next call with equal arguments, unless it is asleep or broken by then. Of the kind
    "shared" or "exact" it is a SharedEngine, which stays alive for the same model only; its own policy then trains.
    """
    contract = {name: tensor.shape for name, tensor in policy.weights().items()}
    parity, options = parity or ParityFlags(), {"max_model_len": 160, "max_num_seqs": 64} | options
    options["collect"] = collect_kept_sets
    if kind == "vllm":
        options.setdefault("dtype", policy.model.dtype)
    key = repr((folder, contract, parity, kind, kind != "vllm" and id(policy.model), options))
    if shared.get(Engine.live) != key or not load or Engine.live.state not in ("ready", "empty"):
        close_live_engine()
        if kind == "vllm":
            shared[Engine(folder, contract, parity, **options)] = key
        else:
            shared[SharedEngine(policy, folder, parity, exact=kind == "exact", **options)] = key
    engine = Engine.live
    engine.abort(list(engine._requests.values()))  # left unfinished
    trainer = policy if kind == "vllm" else engine.policy
    try:
        if load:
            engine.load(trainer.weights(), trainer.response_logprobs)
        yield engine
    except BaseException:  # a failed test may leave anything behind
        close_live_engine()
        raise


# ------------------------------------------------------------------------------------------------ values of both sides
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13] * 9, [14, 15]]
SEEDS = [1000, 2000, 3000, 4000]
WARM = Sampling(temperature=0.7, max_new_tokens=12, stop_token_ids=(2,))


def minibatches_of(batch: Batch, num_minibatches: int = 1, micro_batch_tokens: int = 2**14, has_signal=None):
    has_signal = torch.ones(len(batch.mask)) if has_signal is None else torch.tensor(has_signal)
    return batch.minibatches(has_signal != 0, num_minibatches, micro_batch_tokens)


def scored(policy: Policy, rollouts: list[Rollout], temperature: float, micro_batch_tokens: int = 2**14) -> Batch:
    """The batch with the trainer's log-probabilities."""
    batch = make_batch(rollouts, policy.device)
    minibatches = minibatches_of(batch, 1, micro_batch_tokens)
    return replace(batch, old_logprobs=frozen_logprobs(at(policy, temperature), batch, minibatches))


def at(policy: Policy, temperature: float) -> Policy:
    """The policy that scores at this temperature."""
    return policy.changed(scoring=replace(policy.scoring, temperature=temperature))


def mismatch_of(policy: Policy, rollouts: list[Rollout], temperature: float) -> dict[str, float]:
    batch = scored(policy, rollouts, temperature)
    return mismatch_metrics(batch.old_logprobs, batch.behavior_logprobs, batch.mask)


def mismatch(policy: Policy, engine: Engine, sampling: Sampling = WARM, prompts=PROMPTS) -> dict[str, float]:
    return mismatch_of(policy, engine.generate(prompts, 4, sampling, SEEDS[: len(prompts)]), sampling.temperature)


@torch.no_grad()
def floors_of(policy: Policy, rollouts: list[Rollout], temperature: float) -> float:
    """The mismatch (mean or largest, whichever is worse) over the noise floor, which is the distance of the trainer's
    values from those of its model in twice the precision. If both sides are right, it is about 1 on any CPU.
    """
    batch, model = scored(policy, rollouts, temperature), deepcopy(policy.model).double()
    model.set_experts_implementation("eager")
    logprobs = (model(input_ids=batch.inputs, use_cache=False).logits / temperature).log_softmax(dim=-1)  # (B, T, V)
    precise = logprobs.gather(-1, batch.targets[..., None])[..., 0]
    apart, floor = ((batch.old_logprobs - other).double().abs()[batch.mask > 0]
                    for other in (batch.behavior_logprobs, precise))  # fmt: skip
    if hasattr(model.config, "num_experts_per_tok"):  # a tie within rounding sends a token to another expert
        return (apart.median() / floor.median()).item()
    return max(apart.mean() / floor.mean(), apart.max() / floor.max()).item()


def floors(policy: Policy, engine: Engine, sampling: Sampling = WARM, prompts=PROMPTS) -> float:
    return floors_of(policy, engine.generate(prompts, 4, sampling, SEEDS[: len(prompts)]), sampling.temperature)


AT_PARITY = 10  # floors; the least planted fault has 300
ROUNDING = 1e-4  # nats in float32, where no floor is measured: 50 times what CPUs show, a hundredth of a planted fault


def move(policy: Policy, scale: float = 0.02, seed: int = 7) -> None:
    """Stands for an optimizer step."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(scale * torch.randn_like(parameter))


def by_the_book(row: list[float], prompt: set[int], counts: list[int], sampling: Sampling) -> list[float]:
    """Probabilities of one token, entry by entry, in plain Python."""
    row = list(row)
    for token, count in enumerate(counts):
        if token in prompt or count:
            rate = sampling.repetition_penalty
            row[token] = row[token] / rate if row[token] > 0 else row[token] * rate
        row[token] -= sampling.frequency_penalty * count + sampling.presence_penalty * (count > 0)
    row = [value / (sampling.temperature or 1.0) for value in row]
    kept = set(range(len(row)))
    if sampling.temperature:
        kept = {t for t in kept if math.exp(row[t] - max(row)) >= sampling.min_p}
        if sampling.top_k:
            bar = sorted((row[t] for t in kept), reverse=True)[: sampling.top_k][-1]
            kept = {t for t in kept if row[t] >= bar}
        total, mass, nucleus = sum(math.exp(row[t]) for t in kept), 0.0, set()
        for token in sorted(kept, key=lambda t: -row[t]):
            if mass >= sampling.top_p and nucleus:
                break
            nucleus.add(token)
            mass += math.exp(row[token]) / total
        kept = nucleus
    total = sum(math.exp(row[t]) for t in kept)
    return [math.exp(row[t]) / total if t in kept else 0.0 for t in range(len(row))]


def read_back(engine: Engine) -> dict[str, torch.Tensor]:
    """The engine's weights by checkpoint name, read through its own layers: vLLM's CPU build keeps linear layers
    packed, but a layer applied to the identity gives its weight back exactly (one product by 1, the others by 0)."""
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    found, contract = {}, engine.contract
    for name, module in engine.vllm_model.named_modules():
        if not hasattr(module, "quant_method"):
            found |= {f"{name}.{kind}": tensor for kind, tensor in module.named_parameters(recurse=False)}
            continue
        if "embed" in name:
            found[f"{name}.weight"] = module(torch.arange(contract[f"{name}.weight"][0]))
            continue
        path, _, last = name.rpartition(".")
        names = [f"{path}.{part}" if path else part for part in parts.get(last, (last,))]
        identity = torch.eye(contract[f"{names[0]}.weight"][1], dtype=engine.dtype)
        held = {"weight": module.quant_method.apply(module, identity, None).T}  # (all parts' outputs, inputs)
        if getattr(module, "bias", None) is not None:
            held["bias"] = module.bias  # (all parts' outputs,)
        sizes = [contract[f"{part}.weight"][0] for part in names]
        for kind, tensor in held.items():  # vLLM pads the vocabulary
            pieces = tensor[: sum(sizes)].split(sizes)
            found |= {f"{part}.{kind}": piece for part, piece in zip(names, pieces, strict=True)}
    return found


def differing(engine: Engine, policy: Policy) -> list[str]:
    """The tensors that are not bit-identical on both sides."""
    found, sent = read_back(engine), policy.weights()
    assert found.keys() | {"lm_head.weight"} == sent.keys() | {"lm_head.weight"}  # a tied head is the embedding
    return [name for name, tensor in found.items() if not torch.equal(tensor, sent[name].detach())]


# ------------------------------------------------------------------------------------------------ in flight
def move_and_load(policy: Policy, engine, scale: float = 0.02, seed: int = 0) -> None:
    """Sleep, an optimizer step, wake, load: as train_step does it."""
    engine.sleep()
    move(policy, scale, seed)
    engine.wake()
    engine.load(policy.weights(), policy.response_logprobs)


def over_a_kept_state(old: Policy, new: Policy, rollout: Rollout) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the response if `old` computed the caches (the recurrent state, and keys and values) up to
    the update and `new` goes on from them one token at a time; and if each policy had computed everything itself.

    Shapes: -> (N,), (N,).
    """
    ids, before = torch.tensor([rollout.prompt_ids + rollout.token_ids]), rollout.versions.count(rollout.versions[0])
    first = len(rollout.prompt_ids) - 1
    cut = first + (before if len(set(rollout.versions)) > 1 else 0)  # the token sampled last is not in the cache yet
    cache, parts = DynamicCache(config=new.model.config), []
    word = "cache_params" if new.model.config.model_type == "mamba2" else "past_key_values"
    for policy, inputs in ((old, ids[:, :cut]), *((new, ids[:, t : t + 1]) for t in range(cut, ids.shape[1] - 1))):
        body = policy.model.base_model(input_ids=inputs, use_cache=True, **{word: cache})
        parts.append(policy.logits(body.last_hidden_state[0]))
    alone = [policy.logits(policy.hidden(ids[:, :-1])[0]) for policy in (old, new)]
    kept, own = torch.cat(parts), torch.cat([alone[0][:cut], alone[1][cut:]])  # (L - 1, V)
    scored = (torch.log_softmax(logits.double() / 0.7, dim=-1).gather(1, ids[0, 1:, None])[first:, 0]
              for logits in (kept, own))  # fmt: skip
    return tuple(scored)


# ------------------------------------------------------------------------------------------------ small models
SIZES = dict(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=1, max_position_embeddings=256, initializer_range=0.1,
             pad_token_id=0, bos_token_id=1, eos_token_id=2)  # fmt: skip


def qwen2(tied: bool, seed: int = 0, dtype: torch.dtype = torch.float32, **changes) -> Qwen2ForCausalLM:
    """Random, with logits wide enough (std about 2) that temperature, head dtype and staleness show."""
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES | {"tie_word_embeddings": tied} | changes))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(3)
    return model.to(dtype).eval()


# ------------------------------------------------------------------------------------------------ the matrix
WINDOW = dict(head_dim=32, sliding_window=16)
MIXED = dict(layer_types=["sliding_attention", "full_attention"])
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
STATE = dict(mamba_d_ssm=128, mamba_n_heads=4, mamba_d_head=32, mamba_d_state=16, mamba_chunk_size=16)
# By the configuration's class; what follows a comma names a variant of the row before, which is measured untied only.
ARCHITECTURES = {
    "Llama": {},
    "Llama, biases": dict(attention_bias=True, mlp_bias=True),
    "Llama, yarn": dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=4.0,
                                             original_max_position_embeddings=64)),
    "Llama, llama3 rope": dict(rope_parameters=dict(rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0,
                                                    high_freq_factor=4.0, original_max_position_embeddings=32)),
    # Within max_position_embeddings, which train.py never leaves; beyond it both sides would compute something else.
    "Llama, dynamic rope": dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)),
    "Qwen2": {}, "Qwen3": dict(head_dim=32), "Mistral": WINDOW, "Gemma2": WINDOW | dict(query_pre_attn_scalar=32),
    "Gemma3Text": WINDOW | dict(query_pre_attn_scalar=32),
    "Gemma3Text, sliding and full": WINDOW | MIXED | dict(query_pre_attn_scalar=32),
    "Phi3": {}, "StableLm": {}, "Granite": dict(logits_scaling=5.0), "Olmo2": {},
    "Olmo3": MIXED | dict(sliding_window=16), "SmolLM3": {},
    "GPTNeoX": dict(num_key_value_heads=2),  # has no grouped heads: transformers ignores the number, vLLM does not
    "Cohere": dict(logit_scale=0.3), "GPT2": dict(n_embd=64, n_layer=2, n_head=2, n_positions=256),
    "Qwen3Moe": EXPERTS | dict(head_dim=32), "Qwen2Moe": EXPERTS | dict(shared_expert_intermediate_size=96),
    "Qwen3Moe, padded experts": EXPERTS | dict(head_dim=32, moe_intermediate_size=48),  # vLLM pads them to 64
    "Mixtral": dict(head_dim=32, sliding_window=16, num_local_experts=4, num_experts_per_tok=2),
    "FalconH1": STATE | dict(head_dim=32, lm_head_multiplier=0.3),
    "Mamba2": dict(num_heads=4, head_dim=32, n_groups=1, state_size=16, chunk_size=16, intermediate_size=128),
}  # fmt: skip
ALWAYS_TIED = ("Gemma2", "Cohere")  # vLLM takes their logits from the embedding
RECURRENT = ("FalconH1", "Mamba2")
MIXTURES = ("Qwen3Moe", "Qwen2Moe", "Mixtral")
MATRIX_PROMPTS = [list(range(5 + i, 29 + i)) for i in range(4)]  # with the responses 56 tokens: a window of 16 cuts
MATRIX_SAMPLING = Sampling(temperature=0.7, max_new_tokens=32)


def dtypes_of(name: str) -> list[torch.dtype]:
    """Those in which the CPU build is right: recurrent layers are refused in 16 bits."""
    return [torch.float32] if name in RECURRENT else [torch.float32, torch.bfloat16]


def small_model(name: str, tied: bool, seed: int = 0, **changes) -> PreTrainedModel:
    torch.manual_seed(seed)
    options = SIZES | ARCHITECTURES.get(name, {}) | changes | {"tie_word_embeddings": tied}
    config = getattr(transformers, name.split(",")[0] + "Config")(**options)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")  # sdpa would lose soft-capping
    if not tied:  # logits wide enough that a lost scale, cap or window shows; a tied model would only echo its input
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(3)
    return model.eval()


# ------------------------------------------------------------------------------------------------ a small run
def prompt_ids(tokenizer, problem) -> list[int]:
    return encode(tokenizer, Task([problem], [], exact_match)).train[0].prompt_ids


TASK = [{"question": f"{i}+1=", "answer": i + 1} for i in range(40)]
PYTHON = '''
import itertools, os, time
calls = itertools.count(1)
def sample(rng):
    number = rng.randint(1, 60)
    return f"{number}+1=", str(number + 1)
def reward(problem, response):
    if next(calls) == int(os.environ.get("SIGNAL_IN_CALL", 0)):  # the run is stopped or killed
        os.kill(os.getppid(), int(os.environ["SIGNAL"]))
    return float(len(response) % 3)
'''


def command(root: Path, options: str, *more: str) -> list[str]:
    """The options in place of a good run's own of the same name."""
    usual = {"--out": root / "run", "--model": root / "model", "--task": root / "task.jsonl", "--num-prompts": 4,
             "--group-size": 2}  # fmt: skip
    given = [*options.format(root=root).split(), *more]
    names = [word.partition("=")[0] for word in given]
    return [*(str(word) for name, value in usual.items() if name not in names for word in (name, value)), *given]


def refusal(arguments: list[str], capsys, main: Callable | None = None) -> str:
    """What the command (train.py, if not given) says on stderr as it refuses."""
    with pytest.raises(SystemExit) as stop:
        (main or train.main)(arguments)
    printed = capsys.readouterr()
    assert stop.value.code == 2, printed
    assert "Traceback" not in printed.err
    assert "toy model" not in printed.out
    return re.sub(r"[╭╮╰╯│─\s]+", " ", printed.err)  # without the box that tyro draws around a message


SMALL = ("--num-prompts", "8", "--group-size", "4", "--eval-problems", "4", "--max-new-tokens", "4")


def rows(out: Path, table: str = "metrics") -> list[dict]:
    return [json.loads(line) for line in (out / f"{table}.jsonl").read_text().splitlines()]


def timeless(out: Path) -> list[dict]:
    """The rows without seconds and memory."""
    return [{name: value for name, value in row.items() if not re.search("_s$|_gib$", name)} for row in rows(out)]


def outcome(out: Path) -> tuple:
    """All of a run that must not depend on its being interrupted."""
    return timeless(out), (out / "samples.jsonl").read_text(), (out / "policy" / "model.safetensors").read_bytes()


# ------------------------------------------------------------------------------------------------ planted faults
BLOCK = 32
STOPS = (2, 3, 4, 5)
# fault -> (layer, part of the cause's name)
EXPECTED = {
    "raw": ("semantics", "raw log-probabilities"),
    "top-1": ("semantics", "likeliest token"),
    "trainer without mask": ("semantics", "mask applied by the sampler and not by the trainer"),
    "trainer without penalties": ("semantics", "penalties applied by the sampler and not by the trainer"),
    "generation config": ("semantics", "top_k 5 of generation_config.json"),
    "stale": ("inference path", "weights 1 update(s) old"),
    "stale by 2": ("inference path", "weights 2 update(s) old"),
    "prefix": ("inference path", "stale prefix cache"),
    "kept": ("inference path", "KV kept over an in-flight update"),
    "recomputed": ("inference path", "KV recomputed"),
    "staggered": ("inference path", "KV kept over an in-flight update"),
    "async": ("inference path", "one token off at an update"),
    "one request": ("inference path", "wrong requests"),
    "exchanged": ("inference path", "requests exchanged"),
    "head": ("numerics", "head in 16 bits in the engine"),
    "head in trainer": ("numerics", "head in 16 bits in the trainer"),
    "head on both sides": ("numerics", "head in 16 bits on both sides"),
    "moved on": ("objective", "moved on by 1"),
}
IN_FLIGHT = {"kept", "recomputed", "async", "staggered"}


class FaultBench:
    """Folders of models, and the request that the newest trial has spoiled."""

    def __init__(self):
        self.folders, self.spoiled = TemporaryDirectory(), None

    def get(self, policy: Policy, parity: ParityFlags) -> Engine:
        """The live engine, if it is as the trial needs it, or a new one."""
        folder = f"{self.folders.name}/{policy.model.config.tie_word_embeddings}{policy.model.dtype}"
        policy.model.save_pretrained(folder)
        with started(folder, policy, parity, max_model_len=192, block_size=BLOCK, max_num_seqs=128) as engine:
            return engine

    def close(self):
        close_live_engine()


def nudge(policy: Policy, seed: int, scale: float = 0.01) -> None:
    """A random update of every weight; its size is a tenth of the initial weights' standard deviation."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_((scale * noise).to(parameter.dtype))


def load_as(engine: Engine, policy: Policy, weights: dict | None) -> None:
    """Load other weights in place of the policy's. The canary is scored with them, so that it passes."""
    with policy.using(weights):
        engine.load({name: tensor.clone() for name, tensor in policy.weights().items()}, policy.response_logprobs)


EXTRA = {"generation config": ("top_k", 5), "top-1": ("logprobs", 1)}


@contextmanager
def meddler(engine: Engine, faults: set[str]) -> Iterator[SimpleNamespace]:
    """Changes requests and outputs between the adapter and vLLM's core, but those of the canary: while not `active`."""
    core, state, marked = engine.llm.engine_core, SimpleNamespace(active=True), set()
    usual = core.add_request, core.get_output

    def add(request):
        if state.active:
            marked.add(request.request_id)
            for fault in EXTRA.keys() & faults:
                setattr(request.sampling_params, *EXTRA[fault])
        usual[0](request)

    def output():
        outputs = usual[1]()
        for new in outputs.outputs:
            if new.request_id in marked and "top-1" in faults:
                values = new.new_logprobs.logprobs.copy()  # (tokens, entries), of the sampled tokens in column 0
                values[:, 0] = values.max(axis=1)
                new.new_logprobs = new.new_logprobs._replace(logprobs=values)
        return outputs

    core.add_request, core.get_output = add, output
    try:
        yield state
    finally:
        core.add_request, core.get_output = usual


def spoil_kv(engine: Engine, place: int) -> int:
    """Overwrite the first KV block of one running request; returns the request's number."""
    scheduler = engine.core.scheduler
    request = scheduler.running[place].request_id
    block = scheduler.kv_cache_manager.get_block_ids(request)[0][0]
    for cache in engine.runner.kv_caches:  # (blocks, heads, tokens, 2 * head size)
        cache[block].neg_()
    return int(request)


def shifted(tied: bool, seed: int, dtype: torch.dtype):
    """The tests' model with an offset in all logits. It changes the rounding of a 16-bit head but not the softmax."""
    model = qwen2(tied=tied, seed=seed, dtype=dtype)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 4.0
        model.get_output_embeddings().weight[:, 0] = 4.0
    return model


def plant(bench: FaultBench, faults: set[str], tied: bool, dtype: torch.dtype, seed: int, batch: int = 24,
          temperature: float = 0.7, tokens: int = 40):
    """Sample a trace with the faults; returns (trace, policy, earlier, version, trainer) for `diagnose`."""
    policy = Policy(shifted(tied, seed, dtype))
    parity = ParityFlags(processed_logprobs="raw" not in faults,
                         uncached_runtime=not faults & {"prefix", "async"},
                         fp32_head=not (faults & {"head", "head on both sides"} and dtype == torch.bfloat16))
    policy.scoring = replace(policy.scoring, fp32_head=parity.fp32_head)
    engine = bench.get(policy, parity)
    policy.scoring = replace(policy.scoring, fp32_head=True)
    if "generation config" in faults:
        policy.model.generation_config.top_k = 5
    generator = torch.Generator().manual_seed(100 + seed)
    lengths = torch.randint(3, 90 if "prefix" in faults else 30, (batch,), generator=generator)
    prompts = [torch.randint(6, 96, (int(n),), generator=generator).tolist() for n in lengths]
    seeds = [5000 * (seed + 1) + 7 * i for i in range(batch)]
    sampling = Sampling(temperature, tokens, STOPS)
    if "trainer without mask" in faults:
        sampling = replace(sampling, top_k=8)
    if "trainer without penalties" in faults:
        sampling = replace(sampling, repetition_penalty=1.2, presence_penalty=0.2)
    oldest = policy.copied_weights()
    if "stale by 2" in faults:
        nudge(policy, 50 + seed)
    old = policy.copied_weights()
    moving = {"stale", "stale by 2", "prefix", "moved on"} | IN_FLIGHT
    rollouts = []
    with meddler(engine, faults) as meddling:
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
            nudge(policy, 60 + seed)
        if "recomputed" in faults:
            assert engine.llm.reset_prefix_cache(reset_running_requests=True)
        meddling.active = False
        if "moved on" not in faults:
            policy.scoring = replace(policy.scoring, fp32_head=parity.fp32_head)
            load_as(engine, policy, oldest if "stale by 2" in faults else old if "stale" in faults else None)
        meddling.active = True
        rollouts = rollouts or [engine.submit(p, 1, sampling, s)[0] for p, s in zip(prompts, seeds, strict=True)]
        first = min(map(int, engine._requests))
        steps = 0
        while engine.num_unfinished:
            engine.step()
            steps += 1
            if "one request" in faults and steps == 6:
                bench.spoiled = spoil_kv(engine, batch // 3) - first
    if "exchanged" in faults:
        rollouts[3].prompt_ids, rollouts[9].prompt_ids = rollouts[9].prompt_ids, rollouts[3].prompt_ids
    meta = {"vllm": engine.version, "dtype": str(policy.model.dtype).removeprefix("torch."),
            "stop_token_ids": list(STOPS)}
    policy.scoring = replace(policy.scoring, fp32_head=not faults & {"head in trainer", "head on both sides"})
    version = engine.weight_version + ("moved on" in faults)
    earlier = [old, oldest] if "stale by 2" in faults else [old]
    trainer = "temperature" if faults & {"trainer without mask", "trainer without penalties"} else "processed"
    return Trace("planted", rollouts, sampling, meta), policy, earlier, version, trainer


def rightly_named(faults: list[str], verdict) -> tuple[bool, bool]:
    """Does the verdict name the layers of the faults, and does it name their causes?"""
    layers = {EXPECTED[fault][0] for fault in faults}
    causes = [cause.name for cause in verdict.causes]
    wanted = [EXPECTED[fault][1] for fault in faults]
    named = all(any(part in cause for cause in causes) for part in wanted)
    extra = len(causes) - len(wanted) - (1 if "async" in faults else 0)
    return {cause.layer for cause in verdict.causes} == layers, named and extra <= 0


# ------------------------------------------------------------------------------------------------ one layer
LAYERS, FIRST_LATE = 4, 64
SHAPES = {"Llama": dict(attention_bias=True, mlp_bias=True), "Qwen2": {}, "Gemma2": dict(attention_bias=True),
          "GPT2": dict(n_layer=LAYERS), "Mixtral": {}}  # fmt: skip
LAYER_SAMPLING = Sampling(temperature=0.7, max_new_tokens=40)


def layered_model(name: str, seed: int = 0) -> PreTrainedModel:
    """Four layers. Norm weights and biases are random too: transformers starts with 1 and 0."""
    model = small_model(name, name in ALWAYS_TIED, seed, num_hidden_layers=LAYERS, **SHAPES[name])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def layer_requests(seed: int, requests: int = 3) -> tuple[list[list[int]], list[int]]:
    """Prompts of 50 to 90 tokens and the seeds of their responses."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(50, 91, (requests,), generator=generator).tolist()
    prompts = [torch.randint(3, 96, (length,), generator=generator).tolist() for length in lengths]
    return prompts, [100 * seed + row for row in range(requests)]


def of_layer(weights: dict[str, torch.Tensor], layer: int, *parts: str) -> list[str]:
    """The names of a layer's tensors that contain one of these parts."""
    own = [name for name in weights if re.search(rf"\.(layers|h)\.{layer}\.", name)]
    return [name for name in own if not parts or any(part in name for part in parts)]


def named_layers(rows: list[dict]) -> dict[int, list[str]]:
    """The halves that `compare_layers` finds beyond the noise floor, by layer, the first one first."""
    named: dict[int, list[str]] = {}
    for row in rows:
        if row["beyond"]:
            halves = named.setdefault(row["layer"], [])
            half = "attention" if row["part"].endswith("attention") else "MLP"
            if half not in halves and row["title"] not in ("embedding", "final norm"):
                halves.append(half)
    return named


def faulty_weights(fault: str, policy: Policy, layer: int, seed: int) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The weights that the engine is given, and the halves of the layer that are wrong in them."""
    weights = {name: tensor.clone() for name, tensor in policy.weights().items()}
    halves = ["attention"]
    if fault == "rows of a head swapped":
        (name,) = of_layer(weights, layer, "q_proj.weight", "attn.c_attn.weight")
        rows = weights[name].T if "c_attn" in name else weights[name]  # (out, in)
        rows[:32] = rows[:32].roll(16, dims=0)
    elif fault == "bias dropped":
        names = of_layer(weights, layer, "q_proj.bias", "k_proj.bias", "v_proj.bias", "c_attn.bias")
        if seed % 2 and of_layer(weights, layer, "down_proj.bias", "mlp.c_proj.bias"):
            names, halves = of_layer(weights, layer, "down_proj.bias", "mlp.c_proj.bias"), ["MLP"]
        for name in names:
            weights[name].zero_()
    elif fault == "MLP in 8 bits":
        halves = ["MLP"]
        for name in of_layer(weights, layer, "mlp", "experts"):
            if weights[name].dim() == 2:  # a scale for each output
                step = weights[name].abs().amax(dim=0 if ".c_" in name else 1, keepdim=True) / 127
                weights[name] = (weights[name] / step).round() * step
    elif fault == "stale layer":
        halves = ["attention", "MLP"]
        torch.manual_seed(seed)
        for name in of_layer(weights, layer):
            weights[name] += 0.01 * torch.randn_like(weights[name])
    return weights, halves


@contextmanager
def layer_fault(fault: str, name: str, engine: Engine, policy: Policy, layer: int, seed: int) -> Iterator[tuple]:
    """A fault in one layer of a live engine. Yields the layer and the halves to be named."""
    weights, halves = faulty_weights(fault, policy, layer, seed)
    engine.canary_tolerance = math.inf
    engine.load(weights, policy.response_logprobs)
    model = engine.runner.get_model()
    module = next(each for each in model.modules() if isinstance(each, torch.nn.ModuleList))[layer]
    if fault == "rope base x 1.2":
        shared_rope = module.self_attn.rotary_emb
        rope = module.self_attn.rotary_emb = deepcopy(shared_rope)
        rope.base *= 1.2
        rope.cos_sin_cache = rope._compute_cos_sin_cache().to(rope.cos_sin_cache)
        rope.cos_sin_cache_bf16 = rope.cos_sin_cache.bfloat16()
        yield layer, halves
        module.self_attn.rotary_emb = shared_rope
    elif fault == "window one short":
        module.self_attn.attn.impl.sliding_window -= 1
        yield layer, halves
        module.self_attn.attn.impl.sliding_window += 1
    elif fault == "norm x 1.01":
        norms = [("input_layernorm", "ln_1"), ("pre_feedforward_layernorm", "post_attention_layernorm", "ln_2")]
        norm = next(getattr(module, each) for each in norms[seed % 2] if hasattr(module, each))
        offset = float(name == "Gemma2")  # its weight is added to 1
        with torch.no_grad():
            norm.weight.add_(offset).mul_(1.01).sub_(offset)
        yield layer, ["MLP"] if seed % 2 else ["attention"]
    elif fault == "positions + 1 from 64":
        def later(_module, _args, kwargs):
            return _args, kwargs | {"positions": kwargs["positions"] + (kwargs["positions"] >= FIRST_LATE)}

        hook = model.register_forward_pre_hook(later, with_kwargs=True)
        yield (-1, []) if name == "GPT2" else (0, ["attention"])
        hook.remove()
    else:
        yield layer, halves
