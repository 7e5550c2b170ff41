"""`--prefix-cache versioned`: vLLM's prefix cache, which finds no block of other weights."""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Options:
    """A KV cache that requests share."""

    # versioned: a group shares the KV cache of its prompt, keyed by the weight version. A resumed
    # run starts with an empty cache, and can then differ by rounding.
    prefix_cache: Literal["off", "versioned"] = "off"


def check(config: Any, options: Options) -> None:
    if options.prefix_cache != "off" and not config.parity.uncached_runtime:
        raise ValueError("prefix_cache must be off without uncached_runtime (which switches V1's"
                         f" own cache on), got {options.prefix_cache}")


def install(run: Any, options: Options, parts: Any) -> None:
    """The weight version enters the key of each block (vLLM's `cache_salt`)."""
    if options.prefix_cache == "versioned":
        parts.engine.setdefault("further", {})["enable_prefix_caching"] = True
        parts.engine["cache_salt"] = str
