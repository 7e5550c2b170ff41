"""The values that an option may have, in its type: `Annotated[int, Range(0, 9)]`."""

from dataclasses import dataclass, fields
from typing import Annotated, Any, get_args

MANY = 2**31 - 1
SMALLEST, LARGEST = 1e-30, 1e30  # in float32


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, multiples of `step`."""

    low: float
    high: float
    step: int = 1

    def check(self, name: str, value: float) -> None:
        """Raises: ValueError that names the option, if its value is outside."""
        if not self.low <= value <= self.high:
            raise ValueError(f"{name} must be in [{self.low}, {self.high}], got {value}")
        if self.step > 1 and value % self.step:
            raise ValueError(f"{name} must be a multiple of {self.step}, got {value}")


class Printable:
    """Texts that a terminal can show, not empty."""

    def check(self, name: str, value: str) -> None:
        """Raises: ValueError that names the option."""
        if not (value and value.isprintable()):
            raise ValueError(f"{name} must be a printable name, got {value!a}")


Count = Annotated[int, Range(1, MANY)]
CountOrZero = Annotated[int, Range(0, MANY)]
Positive = Annotated[float, Range(SMALLEST, LARGEST)]
NotNegative = Annotated[float, Range(0, LARGEST)]
Name = Annotated[str, Printable()]


def check_ranges(options: Any) -> None:
    """Check the options of a dataclass by the rules in their types; None (not given) passes.

    Raises: ValueError that names the option.
    """
    for option in fields(options):
        value = getattr(options, option.name)
        for kind in (option.type, *get_args(option.type)):
            for rule in getattr(kind, "__metadata__", ()):
                if value is not None and isinstance(rule, Range | Printable):
                    rule.check(option.name, value)  # other metadata is tyro's
