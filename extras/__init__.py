"""One file for each option that the method does without. A new option is a file and a line here.

A file has what it needs of:

    Options                          a frozen dataclass; the comment of a field is its help text
    check(config, options)           rules, also those that concern options of others
    check_machine(config, options)   what it needs of the device or of a library
    check_task(run, options)         what it needs of the task
    install(run, options, parts)     replaces a part of train.Parts, or adds to it
    NOT_OF_THE_EXPERIMENT            options that may change at --resume
    ENDINGS                          what the line of a step says of its figures (report/log.py)

Checks raise a ValueError. A file that is not there has no options, and all else works without it.
Nothing heavy is imported at the top of a file: --help imports all of them.
"""

from collections.abc import Callable, Iterator
from dataclasses import field, make_dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import tyro

# In the order in which they are installed.
NAMES = (
    "rotary_table", "sampling_mask", "prefix_cache", "cuda_graphs", "inflight",
    "transformers_engine", "rounded_weights", "lora", "gradient_checkpointing", "prompts_once",
    "offload", "rejection", "resume", "notices", "idle_switches", "live_probe", "self_noise",
    "tracker")  # fmt: skip
FILES = {name: import_module(f"extras.{name}") for name in NAMES if find_spec(f"extras.{name}")}
Flat = tyro.conf.OmitArgPrefixes  # --lora-rank, not --lora.lora-rank
Options = make_dataclass(
    "Options", [(name, Flat[file.Options], field(default_factory=file.Options))
                for name, file in FILES.items() if hasattr(file, "Options")], frozen=True)
Options.__module__ = __name__  # for pickle
NOT_OF_THE_EXPERIMENT = {name for file in FILES.values()
                         for name in getattr(file, "NOT_OF_THE_EXPERIMENT", ())}
ENDINGS = {name: sentence for file in FILES.values()
           for name, sentence in getattr(file, "ENDINGS", {}).items()}


def each(hook: str, config: Any) -> Iterator[Callable]:
    """The hook of this name of each file that has it, with the file's own options."""
    for name, file in FILES.items():
        if hasattr(file, hook):
            yield partial(getattr(file, hook), options=getattr(config, name, None))
