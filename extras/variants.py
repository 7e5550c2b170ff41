"""`--variants`: with a fix off, half of V1's default, or another fault in its place."""

from dataclasses import dataclass
from typing import Any, Literal

OF_FIX = {  # the fix that must be off
    "prefix-cache": "uncached_runtime", "async-scheduling": "uncached_runtime",
    "recompute": "inflight_keep", "both-heads": "fp32_head", "both-raw": "processed_logprobs",
}  # fmt: skip
# Of vLLM's EngineArgs.
ARGUMENTS = {"prefix-cache": "enable_prefix_caching", "async-scheduling": "async_scheduling"}


@dataclass(frozen=True)
class Options:
    """Variants of a fix that is off."""

    # In place of V1's defaults. prefix-cache, async-scheduling: without uncached_runtime this alone
    # goes back to V1's default. recompute: without inflight_keep, unfinished requests stay and
    # their KV cache is computed again under the new weights. both-heads: without fp32_head, the
    # trainer's head in the model's dtype too. both-raw: without processed_logprobs, the trainer
    # forgets the temperature too: no mismatch.
    variants: tuple[Literal[tuple(OF_FIX)], ...] = ()


def check(config: Any, options: Options) -> None:
    for variant in options.variants:
        flag = OF_FIX[variant]
        if getattr(config.parity, flag):
            raise ValueError(f"variants must not have {variant} with {flag} (it would do"
                             f" nothing); try --parity.no-{flag.replace('_', '-')}")
    fixed = config.parity.uncached_runtime or "prefix-cache" in fixed_still(options.variants)
    if "recompute" in options.variants and not fixed:
        raise ValueError("variants must not have recompute while V1's prefix cache is on"
                         " (recompute clears the cache too, and so repairs the other fault)")


def fixed_still(variants: tuple[str, ...]) -> list[str]:
    """Of the settings of uncached_runtime, those that stay fixed because the other is named."""
    named = ARGUMENTS.keys() & set(variants)
    return [name for name in ARGUMENTS if named and name not in named]


def install(run: Any, options: Options, parts: Any) -> None:
    for name in fixed_still(options.variants):
        parts.engine.setdefault("further", {})[ARGUMENTS[name]] = False
    if "recompute" in options.variants and "inflight_groups" in run.config.given:
        parts.engine["recomputes"] = True  # else notices.py names inflight_keep
    if "both-heads" in options.variants:
        parts.policy["fp32_head"] = False
    if "both-raw" in options.variants:
        parts.policy["temperature"] = 1.0
        parts.not_stated.add("trainer")
