"""One file for each option that the method does without. A new option is a file and a line here.

`train.Config` has a group for each file: lora.py gives config.lora.lora_rank, and --lora-rank on
the command line. A file has what it needs of, in the order in which a run uses it:

    Options                          a frozen dataclass; the comment of a field is its help text
    check(config, options)           rules, also those that concern options of others
    check_machine(config, options)   what it needs of the device or of a library
    Folder                           reads a model's folder in place of rl.Folder
    check_task(run, options)         what it needs of the task; may return another train.Run
    install(run, options, parts)     replaces a part of train.Parts, or adds to it
    ENDINGS                          what the line of a step says of its figures (report/log.py)
    NOT_OF_THE_EXPERIMENT            options that may change at --resume

Each hook of each file is called, so a file asks itself whether its option is given. Checks raise a
ValueError. inflight.py replaces the engine (`parts.engine_kind`) and the source of rollouts
(`parts.source`). lora.py adds a function of the loaded model to `parts.with_model`, which also sets
what the policy sends, `parts.send`, and adds to `parts.while_saved` a context in which the model is
as its folder has it. It also replaces what a checkpoint has of the model, and how this is read
(`parts.save_weights`, `parts.load_weights`).

A file that is not there has no options, and all else works without it. Nothing heavy is imported at
the top of a file: --help imports all of them. What two files share stands in a file that is not one
of NAMES.
"""

from collections.abc import Callable, Iterator
from dataclasses import MISSING, asdict, field, fields, is_dataclass, make_dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from inspect import isfunction, signature
from types import ModuleType
from typing import Any

import tyro

# In the order in which they are installed.
NAMES = (
    "sampling_mask", "stop_texts", "prefix_cache", "cuda_graphs",
    "inflight", "variants", "transformers_engine", "rounded_weights",
    "gradient_checkpointing", "lora", "memory_check", "prompts_once", "offload",
    "rejection", "resume", "notices", "live_probe", "tracker", "multimodal",
    "export_sampling", "keep_best", "training_answers")  # fmt: skip
HOOKS = {"check", "check_machine", "check_task", "install"}


def read(name: str) -> ModuleType:
    """The file of one name. Raises a TypeError for a function like a hook that is none."""
    file = import_module(f"extras.{name}")
    for word, function in vars(file).items():
        own = isfunction(function) and function.__module__ == file.__name__
        if own and word not in HOOKS and "options" in signature(function).parameters:
            raise TypeError(f"{word} of {file.__name__} has options but is no hook, so"
                            f" nothing would call it; hooks are {', '.join(sorted(HOOKS))}")
    return file


FILES = {name: read(name) for name in NAMES if find_spec(f"extras.{name}")}
Flat = tyro.conf.OmitArgPrefixes  # --lora-rank, not --lora.lora-rank
# May change at --resume; the prompts have a digest of their own.
NOT_OF_THE_EXPERIMENT = {"out", "cache_dir", "chat_template_args"}.union(
    *(getattr(file, "NOT_OF_THE_EXPERIMENT", ()) for file in FILES.values()))
ENDINGS = {name: sentence for file in FILES.values()
           for name, sentence in getattr(file, "ENDINGS", {}).items()}


def in_groups(kind: type, flat: dict[str, Any]) -> Any:
    """The options of a dataclass and of its groups, from those by their own names."""
    values = {}
    for option in fields(kind):
        if is_dataclass(option.default_factory):
            values[option.name] = in_groups(option.default_factory, flat)
        elif option.name in flat:
            value = flat[option.name]
            values[option.name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


class ByName:
    """Options of several groups by their own names."""

    def flat(self) -> dict[str, Any]:
        """All options by their own names, those of extras too, as in config.json."""
        flat = {}
        for name, value in vars(self).items():
            group = is_dataclass(value) and name != "parity"
            flat |= asdict(value) if group else {name: value}
        return flat | {"parity": asdict(self.parity)}

    @classmethod
    def from_flat(cls, flat: dict[str, Any]) -> Any:
        """The inverse of `flat`, also from JSON; other names in it are ignored."""
        return in_groups(cls, flat | flat["parity"])

    def defaults(self) -> dict[str, Any]:
        """The default of each option by its own name, without those of `parity`."""
        groups = [self, *filter(is_dataclass, vars(self).values())]
        return {option.name: option.default for group in groups for option in fields(group)
                if option.default is not MISSING and group is not self.parity}

    @property
    def given(self) -> set[str]:
        """The names of the options that are not at their defaults."""
        flat = self.flat()
        return {name for name, default in self.defaults().items() if flat[name] != default}

    @property
    def experiment(self) -> dict[str, Any]:
        """The options that a resumed run must keep."""
        free = NOT_OF_THE_EXPERIMENT
        if self.lr_decay == "none":
            free = free | {"steps"}
        return {name: value for name, value in self.flat().items() if name not in free}


Options = make_dataclass(
    "Options", [(name, Flat[file.Options], field(default_factory=file.Options))
                for name, file in FILES.items() if hasattr(file, "Options")],
    bases=(ByName,), frozen=True)
Options.__module__ = __name__  # for pickle


def folder(path: str) -> Any:
    """An rl.Folder."""
    from rl import Folder

    for file in FILES.values():
        Folder = getattr(file, "Folder", Folder)
    return Folder(path)


class OneOwner:
    """An object whose attributes are replaced once, and only those that it has when it is made."""

    replaced: frozenset[str] | None = None  # None: it is being made

    def complete(self) -> None:
        vars(self)["replaced"] = frozenset()

    def __setattr__(self, name: str, value: Any) -> None:
        if self.replaced is not None and value is not vars(self).get(name):  # as `|=` does
            if name not in vars(self) or isinstance(vars(self)[name], (list, dict)):
                raise AttributeError(f"{name} is no part to replace; a list or a dictionary takes"
                                     " more entries")
            if name in self.replaced:
                raise ValueError(f"two options replace the part {name}: they cannot be given"
                                 " together")
            vars(self)["replaced"] |= {name}
        super().__setattr__(name, value)


def each(hook: str, config: Any) -> Iterator[Callable]:
    """The hook of this name of each file that has it, with the file's own options."""
    for name, file in FILES.items():
        if hasattr(file, hook):
            yield partial(getattr(file, hook), options=getattr(config, name, None))
