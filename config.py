"""Every option of a run, in groups, with its reason and its rule; a broken rule is a ValueError.

Each group checks itself, and `Config` has a table of the rules that concern two groups. The command
line is flat; the comment of an option is its text in --help.
"""

from dataclasses import asdict, dataclass, field
from math import exp, inf
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

import tasks.options
import verify
from engine_adapter import ParityFlags, check_mask, has_sampling_mask
from objectives import (
    MAX_LOG_WEIGHT,
    NO_REJECTION,
    OBJECTIVES,
    REJECTIONS,
    WEIGHTS,
    Clip,
    Rejection,
)
from report.errors import LARGEST, MANY, SMALLEST, printable, within

ROUNDINGS = ("int8", "fp8", "int6", "int4", "int3")  # of --rollout-weights
MAX_SEED = 2**32 - 1  # numpy's
# May change at --resume; the prompts have a digest of their own.
NOT_OF_THE_EXPERIMENT = {"resume", "out", "cache_dir", "reward_workers", "chat_template_args",
                         "tracker"}


def given_or(value: Any, usual: Any) -> Any:
    """The user's value, or the usual one if there is none."""
    return usual if value is None else value


@dataclass(frozen=True)
class JobConfig:
    """The defaults are the toy job: a small model unlearns a wrong habit on two CPU cores."""

    out: str = "runs/toy"  # Folder for config.json, metrics.jsonl, curves.png, checkpoints/.
    resume: bool = False  # Go on from the newest checkpoint in `out`, with the same options.
    seed: int = 0  # Decides the toy, the held-out split, the problems and the samples.
    steps: int = 60  # Batches; 0: one evaluation. With --lr-decay none a resumed run may have more.
    model: str = "toy"  # `toy`, a folder with a Hugging Face causal language model, or a hub name.
    # `toy` (addition), `digits`, `countdown`; a file of rows with a question and an answer (JSON
    # lines, a JSON array, CSV, parquet, each also as .gz); a dataset: a folder, or NAME or
    # NAME:CONFIG on a hub; a Python file with `sample` or `problems`, and `reward` or `rewards`.
    task: str = "toy"
    # Of the model on both sides. In 16 bits the optimizer keeps fp32 masters.
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    # The numbers of each step also go to this library; it must be installed.
    tracker: Literal["none", "trackio", "tensorboard", "wandb"] = "none"
    checkpoint_every: int = 20  # Steps between checkpoints, and after the last; two are kept.
    cache_dir: str = str(Path(__file__).parent / ".cache")  # Keeps the toy model once it is taught.

    def __post_init__(self):
        printable(self, "out", "model", "task", "cache_dir")
        within(self, 0, 999_999, "steps")  # six digits in the name of a checkpoint
        within(self, 1, MANY, "checkpoint_every")
        within(self, 0, MAX_SEED, "seed")


@dataclass(frozen=True)
class LearningConfig:
    """What is sampled and what is learnt from it."""

    objective: Literal[tuple(OBJECTIVES)] = "grpo"  # Formulas and sources in objectives.py.
    num_prompts: int = 128  # Problems per step (P).
    group_size: int = 8  # Samples per problem (G).
    max_new_tokens: int = 8  # Longest response in tokens; the toy answers with 5, its end included.
    temperature: float = 0.7  # Of sampler and trainer; at 1, raw and processed values are equal.
    top_k: int = 0  # The sampler's mask: keep the K likeliest tokens; 0 is off.
    top_p: float = 1.0  # Keep the fewest likeliest tokens that sum to at least top_p; 1 is off.
    min_p: float = 0.0  # Keep tokens with min_p times the largest probability or more; 0 is off.
    lr: float = 1e-3  # AdamW's peak, for the toy; docs/run.md has rates of pretrained models.
    # Denominator of the ratio: the trainer before the update (three policies), or the engine (two).
    old_policy: Literal["recompute", "rollout"] = "recompute"
    clip_low: float | None = None  # Lower clip distance; if not given, the objective's usual one.
    clip_high: float | None = None  # Upper clip distance (cispo: the absolute cap); as clip_low.
    kl_coef: float = 0.0  # Weight of the KL to the initial policy, a frozen copy of it in memory.
    # k3: the gradient of the estimator alone, as in GRPO; on policy it is that of KL(ref || pi).
    # exact: of KL(pi || ref), by the ratio, as in TRL.
    kl_gradient: Literal["k3", "exact"] = "k3"
    # Corrections of a mismatch, refused while a parity fix is off; docs/objectives.md.
    tis: Literal[("off", *WEIGHTS)] = "off"  # Importance weight: of the token, or of its response.
    tis_cap: float = 2.0  # Largest importance weight; a larger one is truncated to it.
    reject: Literal[("off", *REJECTIONS)] = "off"  # Rule by which tokens get no policy gradient.
    reject_low: float | None = None  # Smallest ratio that is kept; if not given, the rule's own.
    # Largest ratio, or divergence, that is kept; if not given, the rule's own.
    reject_high: float | None = None
    # Tokens that the loss's mean counts; if not given, the rule's own.
    reject_mean: Literal["all", "kept"] | None = None
    # Allow them although a fix is off: only to study how a correction hides a broken backend.
    correct_a_broken_backend: bool = False
    # No loss for truncated responses; their rewards still count in the group's mean (DAPO).
    mask_truncated: bool = False
    num_minibatches: int = 2  # Optimizer steps per batch; from the second on the clip can act.
    micro_batch_tokens: int = 4096  # Tokens per forward and backward: memory, speed and rounding.
    lr_warmup_steps: int = 5  # Linear warm-up: Adam's second moments are noise at first.
    lr_decay: Literal["linear", "none"] = "linear"  # To zero after the last step, or a constant lr.
    weight_decay: float = 0.0  # Decoupled; a few hundred steps of RL have nothing to regularise.
    grad_clip: float = 1.0  # Largest gradient norm per optimizer step.
    plain: bool = False  # Without extras/fast.py: only slower, equal to rounding.
    gradient_checkpointing: bool = False  # Compute each layer again in backward: less memory.
    offload_optimizer: bool = False  # Masters and moments in host memory between updates.

    def __post_init__(self):
        check_mask(self)
        within(self, 0.01, 2, "temperature")  # vLLM's range
        within(self, 1, MANY, "num_prompts", "max_new_tokens", "num_minibatches",
               "micro_batch_tokens")
        within(self, 0, MANY, "lr_warmup_steps")
        within(self, 2, 2**16, "group_size")  # its mean is the baseline
        within(self, SMALLEST, LARGEST, "lr", "clip_high", "tis_cap", "reject_high", "grad_clip")
        within(self, 0, LARGEST, "kl_coef", "weight_decay")
        within(self, 0, 1, "clip_low")
        within(self, SMALLEST, 1, "reject_low")
        objective = OBJECTIVES[self.objective]
        if self.clip_low is not None and objective.clip[0] is None:
            raise ValueError(f"clip_low must not be given with {self.objective} (it has an upper"
                             f" cap only), got {self.clip_low}")
        if self.clip_high is not None and self.objective == "reinforce":
            raise ValueError("clip_high must not be given with reinforce (its ratio is not bounded;"
                             f" cispo has a cap), got {self.clip_high}")
        if objective.old_policy not in (None, self.old_policy):
            raise ValueError(f"old_policy must be {objective.old_policy} with objective"
                             f" {self.objective}, got {self.old_policy}")
        rows = self.num_prompts * self.group_size
        if rows % self.num_minibatches:
            raise ValueError(f"num_minibatches must divide num_prompts * group_size = {rows} (all"
                             f" optimizer steps weigh alike), got {self.num_minibatches}")
        if not self.kl_coef and self.kl_gradient != "k3":
            raise ValueError("kl_gradient needs kl_coef (without it there is no KL term), got"
                             f" {self.kl_gradient}")
        if self.tis == "off" and self.tis_cap != LearningConfig.tis_cap:
            raise ValueError("tis_cap needs tis (without it there is no weight), got"
                             f" {self.tis_cap}; try --tis token")
        if self.reject == "off":
            if self.reject_low or self.reject_high or self.reject_mean:
                raise ValueError("reject_low, reject_high and reject_mean need reject (without it"
                                 " they do nothing), got off")
        else:
            self._check_bounds()
        whole_rows = objective.normalizer == "sequence" and self.rejection.whole_rows
        if self.reject_mean and not self.kl_coef and (
                objective.normalizer == "constant" or whole_rows):
            raise ValueError(f"reject_mean must not be given with {self.objective} and reject"
                             f" {self.reject} (it would change no loss)")
        if self.corrections and self.old_policy == "rollout":
            raise ValueError("tis and reject must be off with old_policy rollout (a weight would"
                             " count the mismatch twice: its ratio holds it), got"
                             f" {self.corrections}")

    def _check_bounds(self) -> None:
        """The bounds of `reject` are around the value of a token without a mismatch."""
        low, high = self.rejection.bounds
        if REJECTIONS[self.reject].bounds[0] == -inf:  # of a divergence
            neutral = 0.0
            acts = self.reject != "binary_tv" or high < 1  # of probabilities
        else:  # of a ratio, which MAX_LOG_WEIGHT limits
            neutral = 1.0
            acts = low > exp(-MAX_LOG_WEIGHT) or high < exp(MAX_LOG_WEIGHT)
        if not low <= neutral <= high or not acts:
            raise ValueError("reject_low and reject_high must keep a token without a mismatch (its"
                             " ratio is 1, its divergence 0) and reject one of 80 nats, got"
                             f" {self.reject_low} and {self.reject_high} with {self.reject}")

    @property
    def corrections(self) -> str:
        """The corrections in use, such as `tis token, reject worst`; empty if there is none."""
        used = {"tis": self.tis, "reject": self.reject}
        return ", ".join(f"{name} {kind}" for name, kind in used.items() if kind != "off")

    @property
    def rejection(self) -> Rejection:
        """The rule of `reject`, with the user's bounds and mean in place of the usual ones."""
        rule = REJECTIONS.get(self.reject, NO_REJECTION)
        low, high = rule.bounds
        bounds = given_or(self.reject_low, low), given_or(self.reject_high, high)
        return rule._replace(bounds=bounds, mean=self.reject_mean or rule.mean)

    @property
    def clip(self) -> Clip:
        """(low, high), the objective's usual bounds where the user gives none."""
        low, high = OBJECTIVES[self.objective].clip
        return given_or(self.clip_low, low), given_or(self.clip_high, high)


@dataclass(frozen=True)
class LoraConfig:
    """Adapters of low rank, trained in place of the model's weights."""

    lora_rank: int = 0  # R: fp32 adapters B A on all linear layers of the body; 0: full training.
    lora_alpha: float = 32.0  # The product B A counts lora_alpha / R times.
    # merged: the trainer computes with the rounded weight that the engine gets. added: with the
    # model's weight and the adapter apart, as in most libraries; with vLLM a fix that is off.
    lora_forward: Literal["merged", "added"] = "merged"

    def __post_init__(self):
        within(self, 0, MANY, "lora_rank")
        within(self, SMALLEST, LARGEST, "lora_alpha")
        if not self.lora_rank and (self.lora_alpha, self.lora_forward) != (32.0, "merged"):
            raise ValueError("lora_alpha and lora_forward need lora_rank (without it there are no"
                             " adapters), got 0; try --lora-rank 16")


@dataclass(frozen=True)
class BackendConfig(verify.Options):
    """The sampler, its share of the memory, and how it is checked."""

    # transformers: the trainer's own module alone, slow, without mismatch, the known-good curve.
    engine: Literal["vllm", "transformers"] = "vllm"
    kv_cache_gib: float = 0.25  # Size of the KV cache; fixed: the trainer needs the free memory.
    # Format of the engine's linear layers; the trainer keeps its own weights. A mismatch by choice
    # and no fault: corrections are for it. It saves nothing here.
    rollout_weights: Literal[("own", *ROUNDINGS)] = "own"
    # Groups in flight: N that stay unfinished while weights are loaded, besides the P of a step.
    inflight_groups: int = 0
    # Largest staleness of a token in updates: a step waits for the groups that would become older.
    max_staleness: int = 8
    max_kept: int | None = None  # Largest set of a mask; by default 512, or above top_k (for ties).
    max_num_seqs: int = 512  # Sequences the engine decodes at once; the others wait.
    block_size: int | None = None  # Tokens per KV block; if not given, vLLM's (CPU 128, GPU 16).
    # versioned: a group shares the KV cache of its prompt, keyed by the weight version. A resumed
    # run starts with an empty cache, and can then differ by rounding.
    prefix_cache: Literal["off", "versioned"] = "off"
    cuda_graphs: bool = False  # Decode with CUDA graphs, without compilation; docs/run.md.

    def __post_init__(self):
        super().__post_init__()
        within(self, 1, MANY, "max_num_seqs", "max_kept")
        within(self, 0, MANY, "inflight_groups", "max_staleness")
        within(self, SMALLEST, 1e6, "kv_cache_gib")
        within(self, 16, MANY, "block_size")
        if self.block_size and self.block_size % 16:
            raise ValueError("block_size must be a multiple of 16 (vLLM's CPU build: of 32), got"
                             f" {self.block_size}")
        if not self.inflight_groups and self.max_staleness != 8:
            raise ValueError("max_staleness needs inflight_groups (without them nothing is stale);"
                             " try --inflight-groups")
        if self.engine == "transformers" and (
                self.prefix_cache != "off" or self.cuda_graphs or self.block_size
                or self.canary_nats):
            raise ValueError("prefix_cache, cuda_graphs, block_size and canary_nats must not be"
                             " given with engine transformers")
        if self.engine != "vllm" and self.verify_loads != BackendConfig.verify_loads:
            raise ValueError("verify_loads must not be given without engine vllm (there is one copy"
                             f" of the weights), got {self.verify_loads}")


@dataclass(frozen=True)
class MeasureConfig:
    """Evaluations and measurements."""

    eval_every: int = 20  # Steps between evaluations, also before the first step and at the end.
    # Held-out problems per evaluation (or all there are): always the same, chosen by the seed.
    eval_problems: int = 256
    eval_samples: int = 1  # Sampled answers per problem; the greedy evaluation has one.
    eval_trainer_alone: bool = False  # Also sample with the trainer's own modules (eval_gap); slow.
    self_noise_every: int = 0  # Steps between measurements of the noise floor; 0: none.
    probe_every: int = 0  # Steps between probes of the mismatch, the first included; 0: none.
    probe_on_alarm: bool = False  # Probe after a step that exceeds one of the probe's ALARMS.

    def __post_init__(self):
        within(self, 1, MANY, "eval_every", "eval_problems")
        within(self, 1, 2**16, "eval_samples")
        within(self, 0, MANY, "self_noise_every", "probe_every")


Flat = tyro.conf.OmitArgPrefixes  # --lr, not --learning.lr


@dataclass(frozen=True)
class Config:
    """All options of a run; checks the rules that concern two groups."""

    job: Annotated[JobConfig, Flat] = field(default_factory=JobConfig)
    learning: Annotated[LearningConfig, Flat] = field(default_factory=LearningConfig)
    lora: Annotated[LoraConfig, Flat] = field(default_factory=LoraConfig)
    parity: ParityFlags = field(default_factory=ParityFlags)
    backend: Annotated[BackendConfig, Flat] = field(default_factory=BackendConfig)
    data: Annotated[tasks.options.Options, Flat] = field(default_factory=tasks.options.Options)
    measure: Annotated[MeasureConfig, Flat] = field(default_factory=MeasureConfig)

    def __post_init__(self):
        self._check_corrections()
        learning, parity, backend = self.learning, self.parity, self.backend
        lora_rank, off = self.lora.lora_rank, parity.off()
        faults_of_vllm = [fix for fix in off if fix != "sampling_mask"]
        if not parity.trainer_fp32_head:  # a 16-bit head on both sides needs no vLLM
            faults_of_vllm.remove("fp32_head")
        rounded = backend.rollout_weights != "own"
        most = learning.num_prompts * backend.max_staleness
        probed = self.measure.probe_every or self.measure.probe_on_alarm
        rules = (  # what must be, whether it is not, why, and how the sentence may end
            # What other engines, rounded weights and groups in flight do not support.
            (f"engine must be vllm without {', '.join(faults_of_vllm)}",
             backend.engine == "transformers" and faults_of_vllm,
             "only vLLM has that fault"),
            ("rollout_weights must be own with engine transformers, and with lora_rank",
             rounded and (backend.engine != "vllm" or lora_rank),
             "only full training with engine vllm rounds what it sends",
             f", got {backend.rollout_weights}"),
            (f"inflight_groups must be at most num_prompts * max_staleness = {most}",
             backend.inflight_groups > most,
             "num_prompts groups leave at each step", f", got {backend.inflight_groups}"),
            # Caches.
            ("resume must be off with V1's prefix cache",
             self.job.resume and parity.stale_cache,
             "it is in no checkpoint, and an empty cache has no stale block",
             "; try another --out"),
            ("prefix_cache must be off without uncached_runtime",
             backend.prefix_cache != "off" and not parity.uncached_runtime,
             "which switches V1's own cache on", f", got {backend.prefix_cache}"),
            # The sampler's mask.
            ("sampling_mask must be on without top_k, top_p and min_p",
             not parity.sampling_mask and not has_sampling_mask(learning),
             "no mask"),
            ("max_kept must be given with top_k, top_p or min_p and sampling_mask only",
             backend.max_kept and not self.max_kept,
             "else no kept set is returned", f", got {backend.max_kept}"),
            ("sampling_mask needs processed_logprobs if top_k, top_p or min_p is given",
             self.max_kept and not parity.processed_logprobs,
             "raw log-probabilities do not show which tokens were kept",
             "; try --parity.no-sampling-mask"),
            # The probe and the noise floor.
            ("probe_every, probe_on_alarm and self_noise_every must be off with steps 0",
             (probed or self.measure.self_noise_every) and not self.job.steps,
             "they measure after a step"),
            ("probe_every and probe_on_alarm must be off with lora_rank and rollout_weights",
             probed and (lora_rank or rounded),
             "they take the model's own tensors", "; try python -m probe with the saved policy"),
        )
        for what, broken, why, *end in rules:
            if broken:
                raise ValueError(f"{what} ({why}){''.join(end)}")

    def _check_corrections(self) -> None:
        """Fix the backend first, then correct the remaining mismatch."""
        learning, off = self.learning, self.parity.off()
        if self.lora.lora_forward == "added" and self.backend.engine == "vllm":
            # Counts as a fix that is off: the engine's weights are rounded, the trainer's not.
            off.append("lora_forward merged")
        if learning.corrections and off and not learning.correct_a_broken_backend:
            raise ValueError("tis and reject must be off while a fix is off (a correction hides the"
                             f" broken backend), got {learning.corrections} without"
                             f" {', '.join(off)}; to study that, --correct-a-broken-backend")

    @property
    def max_kept(self) -> int:
        """`Sampling.max_kept` of the training; 0: the trainer's softmax is over the vocabulary."""
        if not has_sampling_mask(self.learning) or not self.parity.sampling_mask:
            return 0
        top_k = self.learning.top_k
        # More than top_k, because of ties: many logits of a 16-bit head are equal.
        usual = top_k + top_k // 4 + 16 if top_k else 512
        return self.backend.max_kept or usual

    def lr_at(self, step: int) -> float:
        """Linear warm-up times linear decay to zero after the last step; steps count from 1."""
        warm_up = min(1.0, step / (self.learning.lr_warmup_steps + 1))
        decay = 1 - (step - 1) / self.job.steps if self.learning.lr_decay == "linear" else 1.0
        return self.learning.lr * warm_up * decay

    def flat(self) -> dict[str, Any]:
        """All options by their own names, as in config.json."""
        groups = asdict(self)
        merged = {"parity": groups.pop("parity")}
        for options in groups.values():
            merged |= options
        return merged

    @property
    def experiment(self) -> dict[str, Any]:
        """The options that a resumed run must keep."""
        flat, free = self.flat(), NOT_OF_THE_EXPERIMENT
        if self.learning.lr_decay == "none":
            free = free | {"steps"}
        return {name: value for name, value in flat.items() if name not in free}
