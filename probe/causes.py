"""The causes that a verdict can name: layer, name, and the setting that repairs it."""

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Cause:
    """One thing that the engine (or the trainer) does differently."""

    layer: Literal["semantics", "inference path", "numerics", "trainer"]
    name: str
    repair: str

    def of(self, *what: object) -> "Cause":
        """The same cause with the gaps in its name filled."""
        return replace(self, name=self.name.format(*what))


RAW = Cause("semantics", "raw log-probabilities",
            'logprobs_mode="processed_logprobs" (--parity.processed-logprobs)')
SAMPLER = Cause("semantics", "tokens drawn from another distribution than the reported one",
                "compare the sampler's temperature, mask and seeds with the request's")
NO_MASK = Cause("semantics", "mask applied by the sampler and not by the trainer",
                "sample without it, or score the processed distribution in the trainer too"
                " (--parity.sampling-mask)")

PREFIX = Cause("inference path", "prompt KV computed under earlier weights (stale prefix cache)",
               "enable_prefix_caching=False, or reset_prefix_cache() at each load"
               " (--parity.uncached-runtime)")
STALE = Cause("inference path", "weights one update old", "load every tensor before sampling")
WRONG_REQUESTS = Cause("inference path", "wrong requests among right ones",
                       "match responses to prompts by request id, or send these again, alone")

HEAD = Cause("numerics", "head in 16 bits {}",
             'an fp32 head on both sides, hf_overrides={"head_dtype": "float32"} in vLLM'
             " (--parity.fp32-head)")
