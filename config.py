"""Every option of a run, in groups, each with its reason and its rule. The flags of the command line are flat.

`Config` checks what concerns two groups; each group checks itself. A broken rule is a ValueError
before any model is loaded.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import tyro

from engine_adapter import ParityFlags
from objectives import OBJECTIVES, Tis

BUILT_IN = ("toy", "digits", "countdown")  # tasks in examples/
NOT_OF_THE_EXPERIMENT = {"resume", "out", "cache_dir"}  # options that a resumed run may change
LARGEST_GROUP = 2**16  # samples of one problem, which are queued at once


class Rule(NamedTuple):
    """What the value of an option must be, in words and as a test. None, "not given", always passes."""

    words: str
    holds: Callable[[Any], bool]

    def check(self, options: Any, *names: str) -> None:
        """Raises: ValueError that names the first of these options that breaks the rule."""
        for name in names:
            value = getattr(options, name)
            if value is not None and not self.holds(value):
                raise ValueError(f"{name} must be {self.words}, got {value}")


NAME = Rule("a name", bool)
COUNT = Rule("at least 1", lambda value: value >= 1)
WHOLE = Rule("non-negative", lambda value: value >= 0)
POSITIVE = Rule("positive and finite", lambda value: 0 < value < math.inf)
NON_NEGATIVE = Rule("non-negative and finite", lambda value: 0 <= value < math.inf)


@dataclass(frozen=True)
class RunConfig:
    """The defaults are the toy job: a small model unlearns a wrong habit on two CPU cores."""

    # Folder of the run: config.json, metrics.jsonl, curves.png, checkpoints/.
    out: str = "runs/toy"
    # Go on from the newest checkpoint in `out`, with the options of the first start.
    resume: bool = False
    # Decides the toy model, the held-out split, the problems of each step and the samples.
    seed: int = 0
    steps: int = 60  # Batches of rollouts; the learning rate decays to zero over them.
    model: str = "toy"  # `toy`, a folder with a Hugging Face causal language model, or a hub name.
    # `toy` (addition), `digits` (for the ladder), `countdown`; a JSONL file of {"question", "answer"}
    # with numbers as answers; a Python file with `sample` and `reward`; a folder or hub name of a
    # dataset with such columns.
    task: str = "toy"
    # Of the model on both sides. In 16 bits the optimizer keeps fp32 masters; float16 uses dynamic
    # loss scaling too.
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    # Steps between checkpoints, and after the last; the newest two are kept.
    checkpoint_every: int = 20
    # Where the toy model is kept once it has been taught.
    cache_dir: str = str(Path(__file__).parent / ".cache")

    def __post_init__(self):
        NAME.check(self, "out", "model", "task", "cache_dir")
        COUNT.check(self, "steps", "checkpoint_every")
        Rule("in [0, 2^32), numpy's range", lambda value: 0 <= value < 2**32).check(self, "seed")


@dataclass(frozen=True)
class GrpoConfig:
    """What is sampled and what is learnt from it."""

    objective: Literal[tuple(OBJECTIVES)] = "grpo"  # Formulas and sources in objectives.py.
    num_prompts: int = 128  # Problems per step (P).
    group_size: int = 8  # Samples per problem (G).
    # Longest response in tokens; the toy answers with 5, end of sequence included.
    max_new_tokens: int = 8
    # Of sampler and trainer; at 1, raw and processed log-probabilities are equal.
    temperature: float = 0.7
    # The sampler's mask: keep the K likeliest tokens; 0 is off. The trainer takes the softmax over
    # the tokens that the mask kept (parity.sampling_mask).
    top_k: int = 0
    # Keep the fewest likeliest tokens whose probabilities sum to at least top_p; 1 is off.
    top_p: float = 1.0
    # Keep tokens with at least min_p times the probability of the likeliest one; 0 is off.
    min_p: float = 0.0
    # AdamW's peak learning rate, for the toy; a pretrained model needs a thousandth of it.
    lr: float = 1e-3
    # Denominator of the ratio. recompute: the trainer before the update (three policies); rollout:
    # the engine (two).
    old_policy: Literal["recompute", "rollout"] = "recompute"
    # Lower clip distance of the ratio; if not given, the value usual for the objective.
    clip_low: float | None = None
    # Upper clip distance (cispo: the absolute cap); if not given, the usual one.
    clip_high: float | None = None
    # Weight of the KL to the initial policy; above 0 a frozen copy of it stays in memory.
    kl_coef: float = 0.0
    # Truncated importance sampling for the remaining mismatch; refused while a parity fix is off.
    tis: Tis = "off"
    # Largest importance weight (token, sequence: truncated to it; masked: dropped above it).
    tis_cap: float = 2.0
    tis_floor: float = 0.5  # Smallest importance weight that masked keeps (IcePop's value).
    # Allow `tis` although a parity fix is off: only to study how a correction hides a broken backend.
    tis_over_a_broken_backend: bool = False
    # No loss for responses cut off at max_new_tokens; they stay in the baseline (DAPO).
    mask_truncated: bool = False
    # Optimizer steps per batch; from the second on the ratio leaves 1 and the clip binds.
    num_minibatches: int = 2
    # Tokens per forward and backward, padding included; only memory depends on it.
    micro_batch_tokens: int = 4096
    lr_warmup_steps: int = 5  # Linear warm-up: Adam's second moments are noise at first.
    weight_decay: float = 0.0  # Decoupled; a few hundred steps of RL have nothing to regularise.
    grad_clip: float = 1.0  # Largest gradient norm per optimizer step.
    # Compute each layer again in backward: less memory, more time.
    gradient_checkpointing: bool = False
    # Keep master weights and moments in pinned host memory except during the update.
    offload_optimizer: bool = False

    def __post_init__(self):
        COUNT.check(self, "num_prompts", "max_new_tokens", "num_minibatches", "micro_batch_tokens")
        WHOLE.check(self, "top_k", "lr_warmup_steps")
        POSITIVE.check(self, "lr", "clip_high", "tis_cap", "grad_clip")
        NON_NEGATIVE.check(self, "kl_coef", "tis_floor", "weight_decay")
        Rule(f"in [2, {LARGEST_GROUP}] (the group's mean is the baseline)",
             lambda value: 2 <= value <= LARGEST_GROUP).check(self, "group_size")
        Rule("in [0.01, 2], vLLM's range", lambda value: 0.01 <= value <= 2).check(self, "temperature")
        Rule("in (0, 1]", lambda value: 0 < value <= 1).check(self, "top_p")
        Rule("in [0, 1)", lambda value: 0 <= value < 1).check(self, "min_p", "clip_low")
        if self.clip_low is not None and OBJECTIVES[self.objective].clip[0] is None:
            raise ValueError(f"clip_low must not be given with {self.objective} (it has an upper cap"
                             f" only), got {self.clip_low}")
        rows = self.num_prompts * self.group_size
        if rows % self.num_minibatches:
            raise ValueError(f"num_minibatches must divide num_prompts * group_size = {rows} (all"
                             f" optimizer steps weigh alike), got {self.num_minibatches}")
        if self.tis == "masked" and self.tis_floor >= self.tis_cap:
            raise ValueError(f"tis_floor must be below tis_cap = {self.tis_cap}, got {self.tis_floor}")
        if self.tis != "off" and self.old_policy == "rollout":
            raise ValueError("tis must be off with old_policy rollout (its ratio holds the mismatch"
                             " already: a weight would count it twice),"
                             f" got {self.tis}; try --old-policy recompute")

    @property
    def clip(self) -> tuple[float | None, float]:
        """(low, high), the objective's usual bounds where the user gives none."""
        low, high = OBJECTIVES[self.objective].clip
        if self.clip_low is not None:
            low = self.clip_low
        if self.clip_high is not None:
            high = self.clip_high
        return low, high

    @property
    def has_mask(self) -> bool:
        """Whether the sampler can cut a token off."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True)
class BackendConfig:
    """The sampler, and its share of the memory."""

    # vllm; shared: vLLM around the trainer's own module, no copy and no load of the weights;
    # transformers: the trainer's own module alone, slow, without mismatch, the known-good curve.
    engine: Literal["vllm", "shared", "transformers"] = "vllm"
    # With --engine shared, on a CPU: the trainer scores with vLLM's attention kernel; a mismatch
    # above 0 stops the run.
    exact: bool = False
    # Size of the engine's KV cache; fixed: the trainer needs the free memory later.
    kv_cache_gib: float = 0.25
    # Groups in flight (N) beyond the P of a step, unfinished while the weights change.
    inflight_groups: int = 0
    # Largest staleness of a token in updates; groups with an older token are dropped.
    max_staleness: int = 8
    # Largest set that the mask may keep; if not given, 512, or above top_k (for ties).
    max_kept: int | None = None
    # Sequences the engine decodes at once; the others wait, so memory does not grow.
    max_num_seqs: int = 512
    # Tokens per KV block; if not given, vLLM's choice (CPU 128, GPU 16).
    block_size: int | None = None
    # versioned: the samples of a group share the KV cache of their prompt, keyed by the weight
    # version. A resumed run starts with an empty cache, and can then differ by rounding.
    prefix_cache: Literal["off", "versioned"] = "off"
    # Decode with CUDA graphs, captured without compilation; not measured on a GPU yet.
    cuda_graphs: bool = False
    allow_untested_vllm: bool = False  # Try a vLLM version outside the tested range.

    def __post_init__(self):
        COUNT.check(self, "max_num_seqs", "max_kept")
        WHOLE.check(self, "inflight_groups", "max_staleness")
        POSITIVE.check(self, "kv_cache_gib")
        if self.prefix_cache != "off" and self.engine == "transformers":
            raise ValueError("prefix_cache must be off with the reference engine (it has none),"
                             f" got {self.prefix_cache}")
        if self.exact and self.engine != "shared":
            raise ValueError(f"exact must be off without --engine shared, got --engine {self.engine}")


@dataclass(frozen=True)
class DataConfig:
    """Problems, prompts and rewards."""

    # JSONL file of held-out problems; if not given, a tenth of `task` is held out.
    eval_task: str | None = None
    # Longest prompt in tokens; if not given, the model's context minus max_new_tokens.
    max_prompt_tokens: int | None = None
    # Longer prompts: refuse the run, or drop and count them.
    overlong_prompts: Literal["refuse", "drop"] = "refuse"
    # Limit for a task file's import, and for a call of its sample or reward.
    reward_limit_s: float = 10.0
    # If a reward raises, hangs or is not a finite number: stop the run, or count it and go on with
    # reward 0.
    reward_errors: Literal["stop", "count"] = "stop"

    def __post_init__(self):
        COUNT.check(self, "max_prompt_tokens")
        Rule("in (0, 1e9), a timer's range", lambda limit: 0 < limit < 1e9).check(self, "reward_limit_s")


@dataclass(frozen=True)
class MeasureConfig:
    """Evaluations and measurements."""

    # Steps between evaluations on held-out problems; also before the first step and at the end.
    eval_every: int = 20
    eval_problems: int = 256  # Held-out problems per evaluation (or all there are).
    eval_samples: int = 1  # Sampled answers per problem; the greedy evaluation has one.
    # Evaluate without the engine as well (eval_gap); slow if the model is large.
    eval_with_trainer: bool = True
    # Steps between measurements of the mismatch's noise floor (probe/noise.py); 0: none.
    self_noise_every: int = 0
    # Steps between probes of the mismatch (probe/), from the first step on; 0: none.
    probe_every: int = 0
    probe_on_alarm: bool = False  # Probe after a step whose mismatch exceeds probe.diagnose.ALARMS.

    def __post_init__(self):
        COUNT.check(self, "eval_every", "eval_problems")
        WHOLE.check(self, "self_noise_every", "probe_every")
        Rule(f"in [1, {LARGEST_GROUP}]", lambda value: 1 <= value <= LARGEST_GROUP).check(self, "eval_samples")


Flat = tyro.conf.OmitArgPrefixes  # --lr, not --grpo.lr


@dataclass(frozen=True)
class Config:
    """All options of a run; checks the rules that concern two groups."""

    run: Annotated[RunConfig, Flat] = field(default_factory=RunConfig)
    grpo: Annotated[GrpoConfig, Flat] = field(default_factory=GrpoConfig)
    parity: ParityFlags = field(default_factory=ParityFlags)
    backend: Annotated[BackendConfig, Flat] = field(default_factory=BackendConfig)
    data: Annotated[DataConfig, Flat] = field(default_factory=DataConfig)
    measure: Annotated[MeasureConfig, Flat] = field(default_factory=MeasureConfig)

    def __post_init__(self):
        off = self.parity.off()
        # Fix the backend first, then correct the remaining mismatch.
        if self.grpo.tis != "off" and off and not self.grpo.tis_over_a_broken_backend:
            raise ValueError("tis must be off while a fix is off (a correction hides the broken"
                             f" backend), got {self.grpo.tis} without {', '.join(off)};"
                             " to study that, --tis-over-a-broken-backend")
        of_vllm = sorted(set(off) - {"fp32_head", "sampling_mask"})
        if self.backend.engine == "transformers" and of_vllm:
            raise ValueError("engine must be vllm to leave out a fix of vLLM's (the reference has no"
                             f" such faults), got transformers without {', '.join(of_vllm)}")
        if self.backend.exact and (off or self.grpo.gradient_checkpointing):
            raise ValueError("exact must be off without a parity fix and with gradient_checkpointing")
        if self.backend.prefix_cache != "off" and not self.parity.explicit_runtime:
            raise ValueError("prefix_cache must be off without explicit_runtime (which switches V1's"
                             f" own cache on), got {self.backend.prefix_cache}")
        if not self.grpo.has_mask and not self.parity.sampling_mask:
            raise ValueError("sampling_mask must be on without top_k, top_p and min_p (there is no"
                             " mask to leave out); give one")
        if self.backend.max_kept is not None and not self.max_kept:
            raise ValueError("max_kept must be given with top_k, top_p or min_p and sampling_mask only"
                             f" (else no kept set is returned), got {self.backend.max_kept}")
        if self.max_kept and not self.parity.processed_logprobs:
            raise ValueError("sampling_mask needs processed_logprobs if top_k, top_p or min_p is given"
                             " (raw log-probabilities do not show which tokens were kept);"
                             " try --parity.no-sampling-mask")
        if self.data.eval_task and (self.run.task in BUILT_IN or self.run.task.endswith(".py")):
            raise ValueError(f"eval_task must not be given with task {self.run.task} (it holds problems"
                             f" out itself), got {self.data.eval_task}")

    @property
    def max_kept(self) -> int:
        """`Sampling.max_kept` of the training; 0: the trainer's softmax is over the vocabulary."""
        if not self.grpo.has_mask or not self.parity.sampling_mask:
            return 0
        if self.backend.max_kept is not None:
            return self.backend.max_kept
        if self.grpo.top_k:
            return self.grpo.top_k + self.grpo.top_k // 4 + 16  # many 16-bit logits are equal
        return 512

    def lr_at(self, step: int) -> float:
        """Linear warm-up times linear decay to zero after the last step; steps count from 1."""
        warm_up = min(1.0, step / (self.grpo.lr_warmup_steps + 1))
        return self.grpo.lr * warm_up * (1 - (step - 1) / self.run.steps)

    def flat(self) -> dict[str, Any]:
        """All options by their own names, as in config.json."""
        groups = [asdict(getattr(self, each.name)) for each in fields(self) if each.name != "parity"]
        merged = {name: value for group in groups for name, value in group.items()}
        return merged | {"parity": asdict(self.parity)}

    @classmethod
    def of(cls, parity: ParityFlags | None = None, **options: Any) -> "Config":
        """From options by their own names, whatever their group. Raises: TypeError for others."""
        groups = {}
        for each in fields(cls):
            if each.name != "parity":
                names = {option.name for option in fields(each.default_factory)}
                given = {name: options.pop(name) for name in names & options.keys()}
                groups[each.name] = each.default_factory(**given)
        if options:
            raise TypeError(f"options must be those of Config, got {', '.join(options)}")
        return cls(parity=parity or ParityFlags(), **groups)

    def but(self, **changes: Any) -> "Config":
        """With other values of some options."""
        return Config.of(**(self.flat() | {"parity": self.parity} | changes))
