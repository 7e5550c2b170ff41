"""Switches that cannot change a figure of a run: for those who compare runs with a fix off."""

from typing import Any

from engine_adapter import has_sampling_mask


def name_idle_switches(run: Any, block: int) -> None:
    """Print which switches do nothing. `run` is a run.Run, `block` the tokens of a KV block."""
    parity, learning = run.config.parity, run.config.learning

    def name_idle(switch: str, why: str) -> None:
        print(f"{switch} is switched WITHOUT EFFECT: {why}", flush=True)

    # The last token is always computed.
    if parity.stale_cache and max(map(len, run.task.prompts)) <= block:
        name_idle("uncached_runtime: of its settings the prefix cache",
                  f"no prompt is longer than a block of {block} tokens; try --block-size 32")
    without_effect = learning.temperature == 1 and not has_sampling_mask(learning)
    if not parity.processed_logprobs and without_effect:
        name_idle("processed_logprobs", "raw values are processed at temperature 1 without a mask")
    if not parity.inflight_keep and not run.config.backend.inflight_groups:
        name_idle("inflight_keep", "no load meets an unfinished rollout; try --inflight-groups")
    if not parity.fp32_head and run.config.job.dtype == "float32":
        name_idle("fp32_head", "the model's dtype is float32; try --dtype bfloat16")
