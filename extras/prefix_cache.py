"""`--prefix-cache versioned`: vLLM's prefix cache, which finds no block of other weights."""

from typing import Any, Literal

from extras import Extra


class Options(Extra):
    """A KV cache that requests share."""

    # versioned: a group shares the KV cache of its prompt, keyed by the weight version. A resumed
    # run starts with an empty cache, and can then differ by rounding.
    prefix_cache: Literal["off", "versioned"] = "off"

    def check(self, config: Any) -> None:
        if self.prefix_cache != "off" and not config.parity.uncached_runtime:
            raise ValueError("prefix_cache must be off without uncached_runtime (which switches"
                             f" V1's own cache on), got {self.prefix_cache}")

    def install(self, run: Any) -> None:
        """The weight version enters the key of each block (vLLM's `cache_salt`)."""
        if self.prefix_cache == "versioned":
            run.further["enable_prefix_caching"] = True
            run.engine["cache_salt"] = str
