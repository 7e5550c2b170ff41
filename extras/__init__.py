"""One file for each option that the method does without: its class of `Extra` has all of it.

A new option is a new file of this folder, and nothing else changes. lora.py gives
config.extra.lora.lora_rank, and --lora-rank on the command line. The files are called in
alphabetical order, each in every run, so a file asks itself whether its option is given.

A file that is not there has no options, and all else works without it. Nothing heavy is imported at
the top of a file: --help imports all of them. What two files share is in shared/.
"""

from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, make_dataclass
from difflib import get_close_matches
from importlib import import_module
from inspect import isfunction
from pathlib import Path
from typing import Any

import tyro

from report.ranges import check_ranges

Flat = tyro.conf.OmitArgPrefixes  # --lora-rank, not --extra.lora.lora-rank
HOOKS = {"check", "install"}
KINDS: list[type] = []


class Extra:
    """A frozen dataclass of options. The comment of a field is its help text; its type can have the
    range of its values (report/ranges.py). Further rules go into `check`.
    """

    may_change = ()  # names of its options that a resumed run may change
    __post_init__ = check_ranges

    def __init_subclass__(cls) -> None:
        for name, member in vars(cls).items():
            is_method = name not in HOOKS and isfunction(getattr(member, "__func__", member))
            if is_method and (name[0] != "_" or get_close_matches(name, [*HOOKS, "__post_init__"])):
                raise SystemExit(f"error: {name} of {cls.__module__} is no hook, so nothing would"
                                 f" call it; hooks are {', '.join(sorted(HOOKS))}")
        kind = dataclass(frozen=True)(cls)
        if others := {*kind.may_change} - {option.name for option in fields(kind)}:
            raise SystemExit(f"error: may_change of {cls.__module__} must be a tuple of its own"
                             f" options, got {', '.join(sorted(others))}")
        KINDS.append(kind)

    def check(self, config: Any) -> None:
        """Rules, also those that concern options of others. Raises: ValueError."""

    def install(self, run: Any) -> None:
        """Replace a part of the train.Run, or add to it. The weights are not read yet.

        Raises: ValueError if the machine, a library or the task lacks what the option needs.
        """


OWN = {}
for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
    file = import_module(f"extras.{path.stem}")
    own = [kind for kind in KINDS if kind.__module__ == file.__name__]
    if len(own) != 1 or HOOKS & vars(file).keys():
        raise SystemExit(f"error: {path} must have one class of extras.Extra, with its options and"
                         " its hooks")
    OWN[path.stem] = own[0]
Options = make_dataclass(
    "Options", [(name, Flat[kind], field(default_factory=kind)) for name, kind in OWN.items()],
    frozen=True)
Options.__module__ = __name__  # for pickle


def options_of(group: Any) -> Iterator[tuple[str, Any, Any]]:
    """Name, default and value of each option of a dataclass and of its groups but `parity`."""
    for option in fields(group):
        value = getattr(group, option.name)
        if not is_dataclass(value):
            yield option.name, option.default, value
        elif option.name != "parity":
            yield from options_of(value)


def call(hook: str, config: Any, argument: Any) -> None:
    """The hook of each file. Raises: TypeError if one returns what nothing would read."""
    for name, extra in vars(config.extra).items():
        if getattr(extra, hook)(argument) is not None:
            raise TypeError(f"{hook} of extras.{name} must return nothing (none would read it)")


class ByName:
    """Options of several groups by their own names."""

    def flat(self) -> dict[str, Any]:
        """All options by their own names, those of extras too, as in config.json."""
        flat = {name: value for name, _, value in options_of(self)}
        return flat | {"parity": asdict(self.parity)}

    def defaults(self) -> dict[str, Any]:
        """The default of each option by its own name, without those of `parity`."""
        return {name: default for name, default, _ in options_of(self)}

    @property
    def given(self) -> set[str]:
        """The names of the options that are not at their defaults."""
        return {name for name, default, value in options_of(self) if value != default}

    @property
    def experiment(self) -> dict[str, Any]:
        """The options that a resumed run must keep; its prompts have a digest of their own."""
        free = {"out", "cache_dir", "chat_template_args"}
        free = free.union(*(extra.may_change for extra in vars(self.extra).values()))
        if self.lr_decay == "none":
            free |= {"steps"}
        return {name: value for name, value in self.flat().items() if name not in free}


class OneOwner:
    """Its parts are the fields of its dataclass. Each that has a default is replaced once; of the
    others, what is no collection can be wrapped again and again.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        usual = {part.name: part.default for part in fields(self)}
        if name not in usual:
            raise ValueError(f"{name} is no part of a run, which has {', '.join(usual)}")
        now = vars(self).get(name, usual[name])
        can_wrap = usual[name] is MISSING and not isinstance(now, dict | list | set)
        if not (now is value or now is usual[name] or can_wrap):
            raise ValueError(f"two options replace the part {name}: they cannot be given together"
                             " (a list or a dictionary is not replaced, it takes more entries)")
        super().__setattr__(name, value)
