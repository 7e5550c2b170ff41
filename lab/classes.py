"""The table of models: each class, small and random, in the trainer and in a live engine.

    python -m lab.classes                    # all of lab/classes.json, in float32 and bfloat16
    python -m lab.classes Llama Gemma3 PATH  # some of them, and the model of a folder
    python -m lab.classes --print            # the table of docs/records/classes.json

A class is written as the hub's folders are; a folder is read where it is. Each case is a process of
its own, in which trainer and engine are compared before and after two loads of changed weights. The
record is written after each case. A second call measures what is missing, or everything if commit,
versions or device have changed.

lab/classes.json has for each class whether it is measured with tied embeddings, and options of its
configuration, which override the sizes.
"""

import json
import re
import shlex
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from math import inf, nan
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from config import MANY, ParityFlags, within
from engine_adapter import Engine, check_vllm_version, prepare_environment
from examples.toys import toy_tokenizer
from extras.fast import fast_parts
from lab.study import GPU, RECORDS, Errors, Record, distinct, in_processes, markdown, read_json
from models import write_folder
from records import end_of_process, one_line, one_sentence, provenance, replace_file
from rl import Policy, Scoring, make_batch
from rollouts import Sampling

DESCRIBED = read_json(Path(__file__).with_name("classes.json"))
CLASSES = DESCRIBED["classes"]
DEVICE = "cuda" if GPU else "cpu"
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
# With the responses 56 tokens, so that a window of 16 cuts.
PROMPTS = [list(range(5 + row, 29 + row)) for row in range(4)]
SAMPLING = Sampling(temperature=0.7, max_new_tokens=32)
SEEDS = [1000, 2000, 3000, 4000]
# What differs between the sentences of classes that are refused alike.
DIFFERS = (r"^[\w.]+Error: |vLLM [\d.]+ \S+ cannot start .*?\): |after load .*: (?=the canary)"
           r"|vLLM refused the weights, build a new engine: |Value error, "
           r"| \|trainer - engine\|.*| \['\w+'\]|\. Supported .*|\. The available .*"
           r"| \[\d.*| <class .*")  # fmt: skip
NATS = re.compile(r"is (\S+) nats")  # the canary's difference
NEAR = 2.0  # times the own noise


@dataclass(frozen=True)
class Options:
    """What to measure, or what to print."""

    models: tyro.conf.Positional[tuple[str, ...]] = tuple(CLASSES)  # Classes or folders.
    dtype: tuple[Literal[tuple(SHORT)], ...] = ("float32", "bfloat16")  # Of the weights.
    out: str = "runs/classes"  # Folder of models, logs and the record.
    jobs: int = 1  # Cases at the same time.
    limit_s: float = 600.0  # Seconds after which a case is killed.
    # Print the table of a record and measure nothing; without a path, of docs/records/classes.json.
    print: tuple[str, ...] | None = None

    def __post_init__(self):
        within(self, 1, MANY, "jobs")


# ---------------------------------------------------------------------------------- a case
def small_model(name: str, tied: bool, **changes: Any) -> torch.nn.Module:
    """The random model of a class; untied, its logits are so wide that a lost scale or cap shows.

    A multimodal class has the sizes and `changes` in its text model. Raises: ValueError if
    transformers does not have the class.
    """
    from transformers import (
        CONFIG_MAPPING,
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    options, auto = CLASSES[name]["options"], AutoModelForCausalLM
    tie = {"tie_word_embeddings": tied}
    if "text_config" in options:
        auto = AutoModelForImageTextToText
        text = DESCRIBED["sizes"] | options["text_config"] | changes | tie
        options = options | {"text_config": text} | tie
    else:
        options = DESCRIBED["sizes"] | options | changes | tie
    if options["model_type"] not in CONFIG_MAPPING:
        raise ValueError("not in this version of transformers")
    torch.manual_seed(0)
    # sdpa would lose soft-capping
    model = auto.from_config(AutoConfig.for_model(**options), attn_implementation="eager")
    if not tied:  # a tied model would only echo its input
        model.get_output_embeddings().weight.data.mul_(3)
    return model.eval()


@torch.no_grad()
def agreement(folder: str, dtype: torch.dtype) -> Record:
    """The largest means of |trainer - engine| and of the trainer's own noise, of three loads.

    The noise is the distance from the trainer's values with a body of twice the precision: float64,
    or float32 for 16 bits. It is NaN if the class has a dtype of its own. Units: nats.
    """
    policy = Policy.load(folder, dtype, DEVICE)
    scoring = Scoring(SAMPLING.temperature)
    policy = policy.changed(scoring=scoring, **fast_parts(policy.model))
    engine = Engine(folder, policy.weights(), ParityFlags(), max_model_len=160, dtype=dtype)
    twice = torch.float64 if dtype == torch.float32 else torch.float32
    nats, noise = [], []
    for seed in range(3):
        engine.load(policy.weights(), policy.response_logprobs)
        batch = make_batch(engine.generate(PROMPTS, 4, SAMPLING, SEEDS), DEVICE)
        logprobs = policy.logprobs(batch)  # as the engine's, 0 outside the mask: (B, T)
        nats.append((logprobs - batch.behavior_logprobs).abs().sum() / batch.mask.sum())
        with suppress(RuntimeError):  # two dtypes in one product
            model = deepcopy(policy.model).to(twice)
            model.set_experts_implementation("eager")  # torch has no grouped float64 product
            precise = Policy(model, scoring).logprobs(batch)
            noise.append((logprobs - precise).abs().sum() / batch.mask.sum())
        torch.manual_seed(seed)
        for tensor in policy.model.state_dict().values():  # also buffers, such as a router's bias
            tensor.add_(0.01 * torch.randn_like(tensor))
    not_proven = {re.sub(r"\.\d+\.", ".N.", name) for name in engine.settings["not_proven"]}
    return {"nats": float(max(nats)), "noise": float(max(noise, default=nan)),
            "tied": policy.model.config.get_text_config().tie_word_embeddings,
            "not_proven": sorted(not_proven), "served_by": type(engine.vllm_model).__name__}


def measure(folder: Path, model: str, tied: bool | None, dtype: str) -> None:
    """Write FOLDER.json: the case's `agreement`, or the sentence that refuses it."""
    result = {"model": model, "tied": tied, "dtype": dtype}
    file = folder.with_suffix(".json")
    replace_file(file, json.dumps(result | {"refused": "its process was killed or crashed"}))
    with end_of_process():
        try:
            if model in CLASSES:
                write_folder(small_model(model, tied), toy_tokenizer(), folder)
                model = str(folder)
            result |= agreement(model, getattr(torch, dtype))
        except Exception as error:  # any: it is the finding
            traceback.print_exc()
            result["refused"] = one_line(error)[:500]
        replace_file(file, json.dumps(result))


def run_all(options: Options, command: str) -> Record:
    """Measure what the record in OUT does not have yet. Returns the record."""
    for model in options.models:
        if model not in CLASSES and not Path(model).is_dir():
            raise ValueError(f"models must be classes of lab/classes.json or folders, got {model}")
    out = Path(options.out).resolve()
    path = out / "classes.json"
    prepare_environment()
    origin = provenance(torch.device(DEVICE)) | {"vllm": check_vllm_version()}
    record = {"command": command, "origin": origin, "cases": {}}
    earlier = read_json(path) if path.exists() else record
    if earlier["origin"] == origin:
        record["cases"] = earlier["cases"]
    tasks = []
    for model in options.models:
        for tied, dtype in product(CLASSES.get(model, {"tied": [None]})["tied"], options.dtype):
            name = re.sub(r"\W+", "-", f"{model} {'tied ' * bool(tied)}{dtype}")
            if name not in record["cases"]:
                tasks.append((options.limit_s, measure, out / name, model, tied, dtype))

    def note(name: str, _crashed: Errors) -> None:
        record["cases"][name] = read_json(out / f"{name}.json")
        replace_file(path, json.dumps(record, indent=1))

    in_processes(tasks, options.jobs, inf, note)
    return record


# ---------------------------------------------------------------------------------- the table
def grouped(items: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list]:
    """The items by their key."""
    found = defaultdict(list)
    for item in items:
        found[key(item)].append(item)
    return found


def table(record: Record) -> str:
    """A row for classes that agree alike, with their largest figures. Then the refusals."""
    all_cases = record["cases"].values()
    agreeing = grouped((case for case in all_cases if "refused" not in case), itemgetter("model"))
    refused = grouped((case for case in all_cases if "refused" in case), reason)
    rows = [["classes", "largest difference, nats (times own noise)", "not proven"]]
    alike = grouped(agreeing, lambda model: kind(model, agreeing[model]))
    for (_, not_proven, _), models in alike.items():
        cases = [case for model in models for case in agreeing[model]]
        figures = []
        for dtype, found in grouped(cases, itemgetter("dtype")).items():
            nats = max(case["nats"] for case in found)
            ratio = max(case["nats"] / case["noise"] for case in found)
            figures.append(f"{SHORT[dtype]} {nats:.0e} ({ratio:.1f})")
        names = [model + mark(agreeing[model]) for model in models]
        rows.append(["; ".join(names), ", ".join(figures), not_proven])
    text = f"`{record['command']}`: {json.dumps(record['origin'])}\n\n{markdown(rows)}"
    if refused:
        text += "\n\nRefused:\n"
    for sentence, cases in refused.items():
        names = []
        for model, found in grouped(cases, itemgetter("model")).items():
            details = distinct(" ".join([SHORT[case["dtype"]], *NATS.findall(case["refused"])])
                               for case in found)
            shown = model in agreeing or "canary" in sentence
            names.append(f"{model} ({details})" if shown else model)
        text += f"\n- {sentence}: {'; '.join(names)}"
    return text


def kind(model: str, cases: list[Record]) -> tuple:
    """What the classes of a row have in common; a class that is not near its noise has its own."""
    is_near = all(case["nats"] <= NEAR * case["noise"] for case in cases)
    not_proven = distinct(name.rpartition("layers.N.")[2]
                          for case in cases for name in case["not_proven"])
    return is_near or model, not_proven, frozenset(case["dtype"] for case in cases)


def mark(cases: list[Record]) -> str:
    """T: with tied embeddings too, t: with tied ones alone."""
    tied = {case["tied"] for case in cases}
    if True not in tied:
        return ""
    return " T" if False in tied else " t"


def reason(case: Record) -> str:
    """The beginning of the refusal, without what differs between classes."""
    return " ".join(re.sub(DIFFERS, "", case["refused"]).split()[:12]).rstrip(":;.(")


def main(arguments: list[str] | None = None) -> None:
    """Exit status: 0, also if classes are refused; 2 for bad input."""
    words = sys.argv[1:] if arguments is None else arguments
    with one_sentence(2):
        options = tyro.cli(Options, args=words, description=__doc__)
        if options.print is None:
            record = run_all(options, shlex.join(["python", "-m", "lab.classes", *words]))
        else:
            record = read_json(Path(*options.print or [RECORDS / "classes.json"]))
        print(table(record))


if __name__ == "__main__":
    main()
