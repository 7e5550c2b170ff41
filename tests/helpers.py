"""What several tests share: engines, models and runs.

No test file imports another one. Fixtures and the rules for markers are in conftest.py.
"""

import atexit
import gc
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, is_dataclass, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import Process, get_context
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # models this small lose more by waking threads than they gain
os.environ["HF_HUB_OFFLINE"] = "1"  # no test needs a hub: what asks for one fails at once

import gpu_path  # noqa: F401  # before torch
import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1]))

import train
import verify
from engine_adapter import Engine, ParityFlags, Rollout, Sampling
from extras.inflight import InflightEngine
from extras.shared.masks import collect_kept_sets
from extras.transformers_engine import NothingToCompare
from model_folder import load
from report.metrics import of_mismatch
from rl import Batch, Policy, make_batch
from tasks import Task
from tasks.options import Options
from tasks.problem_files import load_task
from train import Config, Run, Sides, complete_run, first_load, load_policy
from vllm_cases import prepare_environment

logging.disable_progress_bar()
ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data"


def read_json(path) -> Any:
    return json.loads(path.read_text())


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


DESCRIBED = read_json(DATA / "classes.json")
TINY = str(DATA / "tiny-qwen2")  # the model of the stored traces
CLASSES = DESCRIBED["classes"]


# ------------------------------------------------------------------------------------------------ other seeds
SHIFT = int(os.environ.get("TEST_SEED", "0"))  # added to the seeds of models, runs, and what a test draws without one
# In this process vLLM takes the kernels of a CPU without BF16 instructions (avx512), or without AVX-512 too (avx2).
for each in {"avx512": ["bf16_"], "avx2": ["bf16_", ""]}.get(os.environ.get("VLLM_KERNELS"), []):
    setattr(torch.cpu, f"_is_avx512_{each}supported", lambda: False)


# ------------------------------------------------------------------------------------------------ one live engine
parametrize = pytest.mark.parametrize
DEVICES = "cpu", pytest.param("cuda", marks=pytest.mark.gpu)
OWN_PROCESS = "PYTEST_OWN_PROCESS"  # in the child process of a test: the id of its parent
shared: dict[Engine, str] = {}  # the live engine, if `started` made it, and its arguments
checks: dict[Engine, verify.Checks] = {}  # and its checks
# vLLM freezes all objects when it starts. It unfreezes them when it closes, and then collects garbage three times in
# all imported modules (1.3 s). Without a GPU only `close_live_engine` freezes, and nothing unfreezes. So the imported
# modules stay frozen, an engine is never frozen, and the same collections free it in 0.1 s.
freeze, unfreeze = gc.freeze, gc.unfreeze
if not torch.cuda.is_available():
    atexit.register(unfreeze)
    gc.freeze = gc.unfreeze = lambda: None


def close_live_engine():
    """Before anything but `started` starts an engine: a process holds one."""
    if Engine.live is not None:
        Engine.live.close()
    shared.clear()
    checks.clear()
    freeze()  # vLLM collects garbage five times while it starts, each time in all imported modules (0.4 s)


def train_here(arguments):
    """train.py in this process, without pictures, which take more time than a small run. test_watching.py draws."""
    close_live_engine()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.draw_at_evaluation", lambda *_: None)
        train.main(arguments)


def run_script(name, *words):
    """A file of ours as a command, in this process."""
    close_live_engine()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *map(str, words)])
        runpy.run_path(str(ROOT / name), run_name="__main__")
    gc.collect()  # an engine of the page ends here


def python(*words, folder=ROOT, status=0, **environment) -> subprocess.CompletedProcess:
    """A Python of its own in the folder. It must end with this status."""
    program = [sys.executable, *map(str, words)]
    done = subprocess.run(program, cwd=folder, env=os.environ | environment, capture_output=True, text=True,
                          errors="replace", check=False, timeout=500)  # fmt: skip
    assert done.returncode == status, done.stderr
    return done


def copied(folder, *without) -> Path:
    """All that a run needs, in a folder of its own, except for files and folders of these names."""
    left_out = ".*", "docs", "tests", "runs", "exercises", *without
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*left_out))
    (ROOT / ".cache").mkdir(exist_ok=True)
    (folder / ".cache").symlink_to(ROOT / ".cache")
    return folder


# A fork of a process with several threads waits for ever in OpenMP, which waits for the threads.
CHILD = get_context("fork" if os.environ["OMP_NUM_THREADS"] == "1" else "spawn")


def forked(function, *arguments) -> Process:
    """A child process that calls a function of a module. It starts at once, with all that this process has imported."""
    close_live_engine()
    process = CHILD.Process(target=function, args=arguments)
    process.start()
    return process


def config_of(parity=None, **options) -> Config:
    """From options by their own names, whatever their group."""
    assert options.keys() <= Config().flat().keys(), options
    return changed(Config(), options | asdict(parity or ParityFlags()))


def changed(group, options) -> object:
    """A dataclass of options, and of groups of them, with these."""
    return replace(group, **{
        name: changed(value, options) if is_dataclass(value) else options.get(name, value)
        for name, value in vars(group).items()})  # fmt: skip


def bare_run(config, task=None, sampling=None, **parts) -> Run:
    """A run of which only its options and these parts count."""
    return Run(config, "", task, sampling, None, set(), {}, [], **parts)


def built(root, out, **options) -> Sides:
    """All of train.py up to the first step, with the model and the problems of a good run."""
    usual = dict(model=str(root / "model"), task=str(root / "task.jsonl"), out=str(out), num_prompts=4, group_size=2,
                 engine="transformers", seed=SHIFT)  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    run = complete_run(config_of(**usual | options))
    close_live_engine()
    policy = load_policy(run)
    return first_load(run, policy, run.engine_kind.start(run, policy))


def task_of(name, seed=0, **options) -> Task:
    """The task of --task `name`."""
    return load_task(str(name), seed, Options(**options))


def load_into(engine, policy, weights=None, is_new_version=True):
    """Load the policy's weights, or others, into an engine of `started`, and check it as a run does."""
    weights = policy.weights() if weights is None else weights
    engine.load(weights, is_new_version)
    checks_of(engine).prove(weights)
    checks_of(engine).run_canary(policy)


def checks_of(engine) -> verify.Checks:
    """Those of an engine of `started`, or of a `TransformersEngine`."""
    return checks.get(engine) or NothingToCompare(engine, verify.Options())


@contextmanager
def started(folder, policy, parity=None, in_flight=False, **options) -> Iterator[Engine]:
    """A live engine for the architecture in `folder`. It holds the policy's weights.

    The engine stays alive for the next call with equal arguments, unless it is asleep or broken by then. With
    `in_flight` its requests may be unfinished at a load.
    """
    folder, shapes = str(folder), {name: tensor.shape for name, tensor in policy.weights().items()}
    parity = parity or ParityFlags()
    how = verify.Options(**{name: options.pop(name) for name in ("verify_loads", "canary_nats") if name in options})
    options = {"max_model_len": 160, "max_num_seqs": 64, "dtype": policy.model.dtype,
               "collect": collect_kept_sets} | options  # fmt: skip
    key = repr((folder, shapes, parity, in_flight, how, options))
    live = Engine.live
    if shared.get(live) == key and in_flight:
        live.abort()  # left unfinished
    if shared.get(live) != key or live.state not in ("ready", "awake") or live._requests:
        close_live_engine()
        made = InflightEngine if in_flight else Engine
        engine = made(folder, shapes, parity, **options)
        shared[engine] = key
        checks[engine] = verify.Checks(engine, how)
    engine = Engine.live
    try:
        load_into(engine, policy)
        yield engine
    except BaseException:  # a failed test may leave anything behind
        close_live_engine()
        raise


# ------------------------------------------------------------------------------------------------ values of both sides
def drawn_ids(count, generator=None) -> list[int]:
    """Random ids, with 0 at both ends and the vocabulary's last one: no id stands for padding."""
    return [*[0, 95, *torch.randint(96, (count,), generator=generator).tolist()][: count - 1], 0][:count]


IDS = torch.tensor([[5 + row, 6, 7, 8, 9 + row, 10] for row in range(4)])
ROWS = make_batch([Rollout(row[:1], None, row[1:], [0.0] * 5) for row in IDS.tolist()])
PROMPTS = [[0, 6, 7], [8, 9, 10, 11, 95], [13] * 9, [0]]
SEEDS = [1000, 2000, 3000, 4000]
VERSIONED = {"further": {"enable_prefix_caching": True}, "cache_salt": str}  # as of --prefix-cache versioned
WARM = Sampling(temperature=0.7, max_new_tokens=12, stop_token_ids=(2,))


@torch.no_grad()
def scored(policy, rollouts, temperature) -> Batch:
    """The batch with the trainer's log-probabilities."""
    batch = make_batch(rollouts, policy.device)
    return replace(batch, old_logprobs=at(policy, temperature).logprobs(batch))


def at(policy, temperature) -> Policy:
    """The policy that scores at this temperature."""
    return policy.with_(head=replace(policy.head, temperature=temperature))


def mismatch(policy, engine, sampling=WARM, prompts=PROMPTS) -> dict[str, float]:
    batch = scored(policy, engine.generate(prompts, 4, sampling, SEEDS[: len(prompts)]), sampling.temperature)
    return of_mismatch(batch.old_logprobs, batch.behavior_logprobs, batch.mask)


@torch.no_grad()
def floors_of(policy, rollouts, temperature) -> float:
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


def floors(policy, engine, sampling=WARM, prompts=PROMPTS) -> float:
    return floors_of(policy, engine.generate(prompts, 4, sampling, SEEDS[: len(prompts)]), sampling.temperature)


AT_PARITY = 10  # floors; the least planted fault has 300
ROUNDING = 1e-4  # nats in float32, where no floor is measured: 50 times what CPUs show, a hundredth of a planted fault


def move(policy, scale=0.02, seed=7):
    """Stands for an optimizer step."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(scale * torch.randn_like(parameter))


@torch.no_grad()
def flip_a_bit(tensor):
    """The last bit of the largest value."""
    number = {4: torch.int32, 2: torch.int16}[tensor.itemsize]
    tensor.view(-1).view(number)[tensor.abs().argmax()] ^= 1


# ------------------------------------------------------------------------------------------------ in flight
def move_and_load(policy, engine, scale=0.02, seed=0):
    """Sleep, an optimizer step, wake, load: as train_step does it."""
    engine.sleep()
    move(policy, scale, seed)
    engine.wake()
    load_into(engine, policy)


# ------------------------------------------------------------------------------------------------ small models
def qwen2(tied=False, dtype=torch.float32, **changes) -> Qwen2ForCausalLM:
    """Random, with logits wide enough (std about 2) that temperature, head dtype and staleness show."""
    torch.manual_seed(SHIFT)
    model = Qwen2ForCausalLM(Qwen2Config(**DESCRIBED["sizes"] | {"tie_word_embeddings": tied, "pad_token_id": None}
                                        | changes))  # a token for padding would have an embedding of zeros
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(3)
    return model.to(dtype).eval()


# ------------------------------------------------------------------------------------------------ the matrix
# Of data/classes.json. What follows a comma names a variant of the row before, which is measured untied only.
# vLLM pads the last mixture's experts from 48 to 64.
ARCHITECTURES = re.split("; |\n", """Llama; Llama, biases; Llama, yarn; Llama, llama3 rope; Llama, dynamic rope; Qwen2
Qwen3; Mistral; Gemma2; Gemma3Text; Gemma3Text, sliding and full; Phi3; Phi3, longrope; StableLm; Granite; Olmo2; Olmo3
SmolLM3; GPTNeoX; Cohere; GPT2; Mixtral; FalconH1; Mamba2; Qwen3Moe; Qwen2Moe; Qwen3Moe, padded experts""")
MULTIMODAL = [name for name, each in CLASSES.items() if "text_config" in each["options"]]
RECURRENT = ("FalconH1", "Mamba2")
# vLLM serves these through its Transformers backend, which leaves their Python class patched: one model of each a
# process.
PATCHED = ("Olmo2", "Olmo3", "SmolLM3", "GPTNeoX")
MATRIX_PROMPTS = [[95, *range(i, 23 + i)] for i in range(4)]  # with the responses 56 tokens: a window of 16 cuts
MATRIX_SAMPLING = Sampling(temperature=0.7, max_new_tokens=32)


def dtypes_of(name) -> list[torch.dtype]:
    """Those in which the CPU build is right: recurrent layers are refused in 16 bits."""
    if name == "Qwen3_5":
        return [torch.bfloat16]
    return [torch.float32] if name in RECURRENT else [torch.float32, torch.bfloat16]


@cache
def import_qwen3_5():
    """vLLM imports torchvision for it, also for text alone. Where there is none, empty modules stand for it."""
    if find_spec("torchvision"):
        return
    prepare_environment()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
            patch.setitem(sys.modules, name, ModuleType(name))
        sys.modules[name].functional = None
        import_module("vllm.model_executor.models.qwen3_5")


def small_model(name, tied=False, **changes) -> PreTrainedModel:
    """Random; untied, its logits are so wide that a lost scale or cap shows. `changes` are of the text model."""
    if name == "Qwen3_5":
        import_qwen3_5()
    tied = tied or CLASSES[name]["tied"] == [True]  # vLLM ties it always
    options, auto, tie = CLASSES[name]["options"], AutoModelForCausalLM, {"tie_word_embeddings": tied}
    if "text_config" in options:
        auto = AutoModelForImageTextToText
        text = DESCRIBED["sizes"] | options["text_config"] | changes | tie
        options = options | tie | {"text_config": text}
    else:
        options = DESCRIBED["sizes"] | options | changes | tie
    torch.manual_seed(0)
    # sdpa would lose soft-capping
    model = auto.from_config(AutoConfig.for_model(**options), attn_implementation="eager")
    if not tied:  # a tied model would only echo its input
        model.get_output_embeddings().weight.data.mul_(3)
    return model.eval()


def policy_in(folder, dtype=torch.float32, device="cpu") -> Policy:
    return Policy(load(str(folder), dtype).to(device))


def policy_of(folder, name, tied=False, dtype=torch.float32, device="cpu", **changes) -> Policy:
    """The policy of a small model that is saved in the folder."""
    small_model(name, tied, **changes).save_pretrained(folder)
    return policy_in(folder, dtype, device)


class Stored(NamedTuple):
    """What a version of vLLM has sampled."""

    sampling: dict[str, float]
    rollouts: list[Rollout]
    dtype: str


def stored(file):
    """The groups of a file in tests/data."""
    arrays = dict(numpy.load(DATA / f"{file}.npz"))
    meta, prompts = json.loads(arrays["meta"].item()), arrays["prompt_ids"].tolist()
    groups = {}
    for name, sampling in meta["groups"].items():
        rollouts = []
        for prompt, row, logprobs in zip(prompts, arrays[f"{name}/tokens"], arrays[f"{name}/logprobs"], strict=True):
            length = (row >= 0).sum()
            rollouts.append(Rollout(prompt, None, row[:length].tolist(), logprobs[:length].tolist()))
        groups[name] = Stored(sampling, rollouts, meta["dtype"])
    return groups


# ------------------------------------------------------------------------------------------------ tokenizers
TOKENIZERS = read_json(DATA / "tokenizers.json")


def published(form) -> Tokenizer:
    """As in a tokenizer.json that somebody has published, with a small vocabulary. A token of "no text" is empty."""
    parts = TOKENIZERS["forms"][form]
    return Tokenizer.from_str(json.dumps(parts | {"model": TOKENIZERS["models"][parts["model"]]}))


# ------------------------------------------------------------------------------------------------ a spoilt model folder
def rewrite(name, **changes) -> Callable[[Path], None]:
    """Change a JSON file of the folder."""
    def change(folder):
        known = read_json(folder / name) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps(known | changes))

    return change


def tensors(change, name="model.safetensors") -> Callable[[Path], None]:
    """Change the table of tensors."""
    def rewrite(folder):
        table = load_file(folder / name)
        change(table)
        save_file(table, folder / name, {"format": "pt"})

    return rewrite


# ------------------------------------------------------------------------------------------------ a small run
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
# Prompts of 37 tokens: they fill a block of the KV cache.
LONG = PYTHON.replace('f"{number}+1="', 'f"{number:02d}" * 18 + "="')


def command(root, options, *more) -> list[str]:
    """A good run's options and then the given ones: of two with one name the second counts."""
    usual = f"--seed {SHIFT} --out {{root}}/run --model {{root}}/model --task {{root}}/task.jsonl --num-prompts 4 "
    usual += "--group-size 2 "
    return [*(usual + options).format(root=root).split(), *more]


# Without BF16 instructions vLLM's CPU kernels cut numbers off to bfloat16 where all others round: the engine then has
# another noise floor than the trainer. float16 is rounded everywhere.
SIXTEEN = torch.bfloat16 if torch.cuda.is_available() or torch.cpu._is_avx512_bf16_supported() else torch.float16


def value_error(sentence) -> pytest.RaisesExc:
    return pytest.raises(ValueError, match=sentence)


def exit_status(main, arguments) -> int:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    return stop.value.code


def refusal(arguments, capsys, main=None) -> str:
    """What the command (train.py, if not given) says on stderr as it refuses."""
    os.environ["COLUMNS"] = "999"  # tyro would break a long path
    status, printed = exit_status(main or train.main, arguments), capsys.readouterr()
    assert status == 2, printed
    assert "Traceback" not in printed.err
    assert "toy model" not in printed.out
    return re.sub(r"[╭╮╰╯│─\s]+", " ", printed.err)  # without the box that tyro draws around a message


SMALL = ("--num-prompts", "8", "--group-size", "4", "--eval-problems", "4", "--max-new-tokens", "4")


def rows(out, table="metrics") -> list[dict]:
    return [json.loads(line) for line in (out / f"{table}.jsonl").read_text().splitlines()]


def rows_of_run(root, out, options, *more) -> list[dict]:
    """What a run in this process measures, the arguments as in `command`."""
    train_here(command(root, f"{options} --out {out}", *more))
    return rows(out)


def timeless(out) -> list[dict]:
    """The rows without seconds and memory."""
    return [{name: value for name, value in row.items() if not re.search("_s$|_gib$", name)} for row in rows(out)]


def outcome(out) -> tuple:
    """All of a run that must not depend on its being interrupted."""
    return timeless(out), (out / "samples.jsonl").read_text(), (out / "policy" / "model.safetensors").read_bytes()
