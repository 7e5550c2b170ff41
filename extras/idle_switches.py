"""Switches that cannot change a figure of a run: for those who compare runs with a fix off."""

from typing import Any


def install(run: Any, options: Any, parts: Any) -> None:
    """Print which switches do nothing, once the engine has its settings."""
    config, parity = run.config, run.config.parity

    def name_idle(state: Any, *_: Any) -> None:
        block = state.engine.settings.get("block_size", 0)  # transformers has no blocks
        idle = [
            # The last token is always computed.
            (not parity.uncached_runtime and state.engine.wanted["enable_prefix_caching"]
             and max(map(len, run.task.prompts)) <= block,
             "uncached_runtime: of its settings the prefix cache",
             f"no prompt is longer than a block of {block} tokens; try --block-size 32"),
            (not parity.processed_logprobs and config.temperature == 1
             and not {"top_k", "top_p", "min_p"} & config.given,
             "processed_logprobs", "raw values are processed at temperature 1 without a mask"),
            (not parity.inflight_keep and "inflight_groups" not in config.given,
             "inflight_keep", "no load meets an unfinished rollout; try --inflight-groups"),
            (not parity.fp32_head and config.dtype == "float32",
             "fp32_head", "the model's dtype is float32; try --dtype bfloat16"),
        ]
        for applies, switch, why in idle:
            if applies:
                print(f"{switch} is switched WITHOUT EFFECT: {why}")

    if parity.off():
        parts.at_begin.append(name_idle)
