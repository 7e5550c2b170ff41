"""The values that an option may have, in its type: `Annotated[int, Range(0, 9)]`."""

from dataclasses import dataclass, fields
from typing import Annotated, Any, get_args

from report.errors import LARGEST, MANY, SMALLEST, printable, within


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, multiples of `step`. None (not given) passes."""

    low: float
    high: float
    step: int = 1

    def check(self, options: Any, name: str) -> None:
        """Raises: ValueError if the option of this name is outside."""
        within(options, self.low, self.high, name)
        value = getattr(options, name)
        if self.step > 1 and value and value % self.step:
            raise ValueError(f"{name} must be a multiple of {self.step}, got {value}")


class Printable:
    """Texts that a terminal can show, not empty."""

    check = staticmethod(printable)


Count = Annotated[int, Range(1, MANY)]
CountOrZero = Annotated[int, Range(0, MANY)]
Positive = Annotated[float, Range(SMALLEST, LARGEST)]
NotNegative = Annotated[float, Range(0, LARGEST)]
Name = Annotated[str, Printable]


def check_ranges(options: Any) -> None:
    """Raises: ValueError for an option of a dataclass that its type does not allow."""
    for option in fields(options):
        for kind in (option.type, *get_args(option.type)):
            for rule in getattr(kind, "__metadata__", ()):
                if rule is Printable or isinstance(rule, Range):  # tyro has marks of its own
                    rule.check(options, option.name)
