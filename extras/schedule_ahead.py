"""`--schedule-ahead`: vLLM schedules a step ahead, as V1 does by default.

Without requests in flight every token is out before a load, so none is labelled with other weights.
"""

from typing import Any

from extras import Extra


class Options(Extra):
    """Scheduling ahead."""

    # A GPU then does not wait for the scheduler's Python. The tokens are other samples.
    schedule_ahead: bool = False

    def check(self, config: Any) -> None:
        if self.schedule_ahead and not config.parity.uncached_runtime:
            raise ValueError("schedule_ahead must be off without uncached_runtime (V1's default"
                             " has it already, and --variants decides)")
        if self.schedule_ahead and config.given & {"inflight_groups", "engine", "resume"}:
            raise ValueError("schedule_ahead must be off with inflight_groups (a load would meet"
                             " tokens that vLLM has not returned), resume (no checkpoint has a step"
                             " that is scheduled ahead) and engine transformers")

    def install(self, run: Any) -> None:
        if self.schedule_ahead:
            run.further["async_scheduling"] = True
