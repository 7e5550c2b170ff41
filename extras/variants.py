"""`--variants`: with a fix off, half of V1's default, or another fault in its place."""

from typing import Any, Literal

import torch

from extras import Extra

OF_FIX = {  # the fix that must be off
    "prefix-cache": "uncached_runtime", "async-scheduling": "uncached_runtime",
    "recompute": "inflight_keep", "both-heads": "fp32_head", "both-raw": "processed_logprobs",
}  # fmt: skip
# Of vLLM's EngineArgs.
ARGUMENTS = {"prefix-cache": "enable_prefix_caching", "async-scheduling": "async_scheduling"}


class Options(Extra):
    """Variants of a fix that is off."""

    # In place of V1's defaults. prefix-cache, async-scheduling: without uncached_runtime this alone
    # goes back to V1's default. recompute: without inflight_keep, unfinished requests stay and
    # their KV cache is computed again under the new weights. both-heads: without fp32_head, the
    # trainer's head in the model's dtype too. both-raw: without processed_logprobs, the trainer
    # forgets the temperature too: no mismatch.
    variants: tuple[Literal[tuple(OF_FIX)], ...] = ()

    @property
    def fixed_still(self) -> set[str]:
        """Of the settings of uncached_runtime, those that stay fixed because the other is named."""
        named = ARGUMENTS.keys() & self.variants
        return ARGUMENTS.keys() - named if named else set()

    def check(self, config: Any) -> None:
        for variant in self.variants:
            flag = OF_FIX[variant]
            if getattr(config.parity, flag):
                raise ValueError(f"variants must not have {variant} with {flag} (it would do"
                                 f" nothing); try --parity.no-{flag.replace('_', '-')}")
        fixed = config.parity.uncached_runtime or "prefix-cache" in self.fixed_still
        if "recompute" in self.variants and not fixed:
            raise ValueError("variants must not have recompute while V1's prefix cache is on"
                             " (recompute clears the cache too, and so repairs the other fault)")

    def install(self, run: Any) -> None:
        for name in self.fixed_still:
            run.further[ARGUMENTS[name]] = False
        if "recompute" in self.variants and "inflight_groups" in run.config.given:
            run.engine["recomputes"] = True  # else notices.py names inflight_keep
        if "both-heads" in self.variants:
            run.policy["head_dtype"] = getattr(torch, run.config.dtype)
        if "both-raw" in self.variants:
            run.policy["temperature"] = 1.0
            run.not_stated.add("trainer")
