"""Small real models in real folders, a small run, and the rule for tests that start a vLLM engine.

A process holds one live engine at a time, because vLLM's parallel groups are global to a process. A test that starts
an engine, in this process or in a child process, has the marker `engine`; `make check` leaves these tests out. On a GPU
vLLM refuses an engine if the process still holds memory of an earlier one: a test that starts one in this process and
needs a GPU has the marker `own_process` too.
"""

import atexit
import gc
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # models this small lose more by waking threads than they gain
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs a hub: what asks for one fails at once

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1]))
from config import GrpoConfig
from engine_adapter import Engine, ParityFlags, Rollout, Sampling
from extras.masks import collect_kept_sets
from extras.shared_engine import SharedEngine
from objectives import mismatch_metrics
from rl import Policy, frozen_logprobs, make_batch

logging.disable_progress_bar()


# ------------------------------------------------------------------------------------------------ the marker `engine`
DEVICES = "cpu", pytest.param("cuda", marks=pytest.mark.gpu)
NO_ENGINE = str(Path(__file__).parent / "no_engine")  # its sitecustomize.py refuses the import of vllm
shared: dict[Engine, str] = {}  # the live engine, if `started` made it, and its arguments
OWN_PROCESS = "PYTEST_OWN_PROCESS"  # in a child process of `pytest_pyfunc_call`: the id of its parent
# vLLM freezes all objects when it starts. It unfreezes them when it closes, and then collects garbage three times in
# all imported modules (1.3 s). Without a GPU only `close_live_engine` freezes, and nothing unfreezes. So the imported
# modules stay frozen, an engine is never frozen, and the same collections free it in 0.1 s.
freeze, unfreeze = gc.freeze, gc.unfreeze
if not torch.cuda.is_available():
    atexit.register(unfreeze)
    gc.freeze = gc.unfreeze = lambda: None


def pytest_configure(config):
    config.addinivalue_line("markers", "engine: starts a vLLM engine, in this process or in a child process")
    config.addinivalue_line("markers", "gpu: needs a CUDA device; a GPU machine runs `pytest -m gpu tests`")
    config.addinivalue_line("markers", "own_process: runs in a child process")


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    # The longest test goes first, beside all others: at the end it would run alone.
    items.sort(key=lambda item: item.name != "test_the_default_job_learns_at_parity")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """A test with the marker `own_process` passes if it passes in a child process."""
    if "own_process" not in pyfuncitem.keywords or OWN_PROCESS in os.environ:
        return None
    program = [sys.executable, "-m", "pytest", "-q", "--runxfail", f"{pyfuncitem.path}::{pyfuncitem.name}"]
    environment = os.environ | {OWN_PROCESS: str(os.getpid())}
    child = subprocess.run(program, env=environment, capture_output=True, text=True, check=False, timeout=500)
    if child.returncode:
        pytest.fail(f"in a process of its own:\n{child.stdout[-5000:]}{child.stderr[-2000:]}", pytrace=False)
    return True


@pytest.fixture(autouse=True)
def engine_rule(request):
    """Only a test with the marker `engine` imports vllm, in this process or in a child process."""
    allowed, before = "engine" in request.keywords, sys.modules.get("vllm")
    path = os.environ.get("PYTHONPATH")
    if not allowed:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [NO_ENGINE, path]))
    yield
    if path is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = path
    if not allowed and before is None and sys.modules.get("vllm") is not None:
        pytest.fail("this test starts an engine: mark it @pytest.mark.engine")


# ------------------------------------------------------------------------------------------------ one live engine
def close_live_engine() -> None:
    """Before anything but `started` starts an engine: a process holds one."""
    if Engine.live is not None:
        Engine.live.close()
    shared.clear()
    freeze()  # vLLM collects garbage five times while it starts, each time in all imported modules (0.4 s)


def train_here(arguments: list[str]) -> None:
    """train.py in this process."""
    from train import main

    close_live_engine()
    main(arguments)


@contextmanager
def started(
    folder: str, policy: Policy, parity: ParityFlags | None = None, load: bool = True, kind: str = "vllm", **options
) -> Iterator[Engine]:
    """A live engine for the architecture in `folder`. It holds the policy's weights, or with `load=False` none at all.

    The engine stays alive for the next call with equal arguments, unless it is asleep or broken by then. Of the kind
    "shared" or "exact" it is a SharedEngine, which stays alive for the same policy object only.
    """
    contract = {name: tensor.shape for name, tensor in policy.weights().items()}
    parity, options = parity or ParityFlags(), {"max_model_len": 160, "max_num_seqs": 64} | options
    usual = options if kind != "vllm" else {"dtype": policy.model.dtype} | options
    key = repr((folder, contract, parity, kind, kind != "vllm" and id(policy.model), usual))
    if shared.get(Engine.live) != key or not load or Engine.live.state not in ("ready", "empty"):
        close_live_engine()
        policy.body = policy.own_body  # of an engine that has been closed
        if kind == "vllm":
            shared[Engine(folder, contract, parity, **usual)] = key
        else:
            shared[SharedEngine(policy, folder, parity, exact=kind == "exact", **usual)] = key
    engine = Engine.live
    engine.collect = collect_kept_sets
    engine.abort(list(engine._requests.values()))  # left unfinished
    try:
        if load:
            engine.load(policy.weights(), policy.response_logprobs)
        yield engine
    except BaseException:  # a failed test may leave anything behind
        close_live_engine()
        raise


PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13] * 9, [14, 15]]
SEEDS = [1000, 2000, 3000, 4000]
WARM = Sampling(temperature=0.7, max_new_tokens=12, stop_token_ids=(2,))


def mismatch_of(policy: Policy, rollouts: list[Rollout], temperature: float) -> dict[str, float]:
    batch = make_batch(rollouts, torch.zeros(len(rollouts)), policy.device)
    old = frozen_logprobs(policy, batch, GrpoConfig(temperature=temperature))
    return mismatch_metrics(old, batch.behavior_logprobs, batch.mask)


def mismatch(policy: Policy, engine: Engine, sampling: Sampling = WARM, prompts=PROMPTS) -> dict[str, float]:
    return mismatch_of(policy, engine.generate(prompts, 4, sampling, SEEDS[: len(prompts)]), sampling.temperature)


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


# ------------------------------------------------------------------------------------------------ small models
def qwen2(tied: bool, seed: int = 0, dtype: torch.dtype = torch.float32, **changes) -> Qwen2ForCausalLM:
    """Random, with logits wide enough (std about 2) that temperature, head dtype and staleness show."""
    torch.manual_seed(seed)
    options = dict(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=tied, initializer_range=0.1,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )
    model = Qwen2ForCausalLM(Qwen2Config(**options | changes))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(3)
    return model.to(dtype).eval()


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[bool, str]:
    """Model folders by `tied`."""
    root = tmp_path_factory.mktemp("models")
    for tied in (False, True):
        qwen2(tied).save_pretrained(root / str(tied))
    return {tied: str(root / str(tied)) for tied in (False, True)}


def prompt_ids(tokenizer, problem) -> list[int]:
    from tasks import Task, encode, exact_match

    return encode(tokenizer, Task([problem], [], exact_match)).train[0].prompt_ids


@pytest.fixture(scope="session")
def engine_folders(folders, tmp_path_factory) -> dict[bool, str]:
    """The same models with a generation_config.json that asks for another distribution in every way it can."""
    traps = {"repetition_penalty": 1.8, "top_k": 3, "top_p": 0.5, "temperature": 0.2, "min_p": 0.3, "eos_token_id": 50}
    root = tmp_path_factory.mktemp("engine")
    for tied, folder in folders.items():
        shutil.copytree(folder, root / str(tied))
        (root / str(tied) / "generation_config.json").write_text(json.dumps(traps))
    return {tied: str(root / str(tied)) for tied in folders}


# ------------------------------------------------------------------------------------------------ a small run
TASK = [{"question": f"{i}+1=", "answer": i + 1} for i in range(40)]
PYTHON = '''
import itertools, os, time
calls = itertools.count(1)
def sample(rng):
    number = rng.randint(1, 60)
    return f"{number}+1=", str(number + 1)
def reward(problem, response):
    if next(calls) == int(os.environ.get("SIGNAL_IN_CALL", 0)):  # a child process stops or kills itself
        os.kill(os.getpid(), int(os.environ["SIGNAL"]))
    return float(len(response) % 3)
'''


@pytest.fixture(scope="session")
def good(tmp_path_factory) -> Path:
    """A folder with all that a run needs: model/, task.jsonl, task.py."""
    from examples.toys import toy_tokenizer

    root = tmp_path_factory.mktemp("good")
    qwen2(tied=True).save_pretrained(root / "model")
    toy_tokenizer().save_pretrained(root / "model")
    (root / "task.jsonl").write_text("\n".join(map(json.dumps, TASK)))
    (root / "task.py").write_text(PYTHON)
    return root


def train_process(arguments: list[str], signal: int | None = None, call: int = 0, **how) -> subprocess.Popen:
    """train.py in a child process, which sends the signal to itself in that call of the reward in task.py."""
    if signal is not None:
        how["env"] = os.environ | {"SIGNAL": str(int(signal)), "SIGNAL_IN_CALL": str(call)}
    program = [sys.executable, str(Path(__file__).parents[1] / "train.py"), *arguments]
    return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how)


def command(root: Path, options: str, *more: str) -> list[str]:
    """The options in place of a good run's own of the same name."""
    usual = {"--out": root / "run", "--model": root / "model", "--task": root / "task.jsonl", "--num-prompts": 4,
             "--group-size": 2}  # fmt: skip
    given = [*options.format(root=root).split(), *more]
    names = [word.partition("=")[0] for word in given]
    return [*(str(word) for name, value in usual.items() if name not in names for word in (name, value)), *given]


def refusal(arguments: list[str], capsys, main: Callable | None = None) -> str:
    """What the command (train.py, if not given) says on stderr as it refuses."""
    import train

    with pytest.raises(SystemExit) as stop:
        (main or train.main)(arguments)
    printed = capsys.readouterr()
    assert stop.value.code == 2, printed
    assert "Traceback" not in printed.err
    assert "toy model" not in printed.out
    return re.sub(r"[╭╮╰╯│─\s]+", " ", printed.err)  # without the box that tyro draws around a message
