"""How much memory a run will take in each phase, from the model's configuration alone.

No weights, no GPU: the trainer's own code runs on tensors without content, and what would be alive at once is counted.
What the engine holds beside its weights and its KV cache is vLLM's business and is estimated by hand.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import torch
import tyro
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from examples.toys import describe_toy
from records import one_sentence
from reference import kv_bytes_per_token
from rl import Optimizer, Policy, attention_for
from tasks import load_task, read_model
from train import Config, encode_prompts

GIB = 2**30
CONTEXT = 1.5 * GIB  # CUDA context, cuBLAS workspaces, vLLM's buffers that survive sleep: an estimate
BATCHED_TOKENS = 8192  # the engine's prefill, see Engine
SAMPLER_COPIES = 4  # (sequences, V) in fp32: logits, log-probabilities, probabilities, the race's noise


class Memory(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make, while they live; on fake tensors as on real ones."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._seen: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor):
                self._see(each.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._seen:
            return

        def forget(_):
            del self._seen[key]
            self.live -= num_bytes

        self._seen[key] = weakref.ref(storage, forget)
        self.live += num_bytes
        self.peak = max(self.peak, self.live)

    @contextmanager
    def above(self) -> Iterator[SimpleNamespace]:
        """The peak within, less what was alive before; filled in at the end."""
        measured, before = SimpleNamespace(bytes=0), self.live
        self.peak = before
        yield measured
        measured.bytes = self.peak - before


def _skipped_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """No mask where causality says it all; transformers reads values to know that, and fake tensors have none."""
    return sdpa_mask(*args, **kwargs | {"allow_is_causal_skip": True})


AttentionInterface.register("planned_sdpa", sdpa_attention_forward)
AttentionMaskInterface.register("planned_sdpa", _skipped_mask)


@dataclass(frozen=True)
class Trainer:
    """Bytes of the trainer's parts. `forward` is the most that a pass without gradient takes, `backward` one with:
    activations, chunks of logits, and a gradient on its way to the others."""

    weights: int
    masters: int
    moments: int
    gradients: int
    forward: int
    backward: int


def measure_trainer(config: Config, model_config: PretrainedConfig, max_prompt_tokens: int) -> Trainer:
    """Run the trainer's largest micro-batch, twice, on tensors without content."""
    width = max_prompt_tokens + config.max_new_tokens - 1
    minibatch = config.num_prompts * config.group_size // config.num_minibatches
    rows = min(max(1, config.micro_batch_tokens // width), minibatch)
    dtype, memory = getattr(torch, config.dtype), Memory()
    attention = {"sdpa": "planned_sdpa"}.get(kind := attention_for(model_config), kind)
    with FakeTensorMode(), memory:
        model = AutoModelForCausalLM.from_config(model_config, dtype=dtype, attn_implementation=attention)
        policy = Policy(model, config.parity.fp32_head, gradient_checkpointing=config.gradient_checkpointing,
                        check=False)
        with memory.above() as masters:
            optimizer = Optimizer(model, config.weight_decay)
        ids = torch.zeros(rows, width, dtype=torch.long)

        def loss() -> torch.Tensor:
            hidden = policy.hidden(ids)[:, -config.max_new_tokens :].flatten(0, 1)  # (N, H)
            return policy.target_logprobs(hidden, ids.new_zeros(len(hidden)), config.temperature)[0].sum()

        with memory.above() as forward, torch.no_grad():
            loss()
        optimizer.backward(loss())
        with memory.above() as backward:  # the gradients of the micro-batch before are there
            optimizer.backward(loss())
        with memory.above() as moments:
            optimizer.adamw.step()
    parameters, gradients = list(model.parameters()), sum(master.grad.nbytes for master in optimizer.masters)
    return Trainer(sum(p.nbytes for p in parameters), masters.bytes, moments.bytes, gradients, forward.bytes,
                   backward.bytes)


@dataclass(frozen=True)
class Parts:
    """Bytes on the device in one phase."""

    weights: float = 0
    copies: float = 0
    masters: float = 0
    moments: float = 0
    gradients: float = 0
    activations: float = 0
    engine: float = 0
    kv_cache: float = 0
    sampling: float = 0
    context: float = CONTEXT

    @property
    def total(self) -> float:
        return sum(getattr(self, each.name) for each in fields(self))


def sampling_bytes(config: Config, model_config: PretrainedConfig) -> int:
    """What the engine needs while it runs: a prefill's widest layer, or the sampler's copies of the logits."""
    inner = getattr(model_config, "intermediate_size", None) or 4 * model_config.hidden_size
    prefill = BATCHED_TOKENS * (3 * inner + 4 * model_config.hidden_size) * getattr(torch, config.dtype).itemsize
    return max(prefill, SAMPLER_COPIES * config.max_num_seqs * model_config.vocab_size * 4)


def phases(config: Config, model_config: PretrainedConfig, max_prompt_tokens: int) -> dict[str, Parts]:
    """What is on a GPU in each phase of a step, and while the trainer alone is evaluated."""
    trainer = measure_trainer(config, model_config, max_prompt_tokens)
    copies = bool(config.kl_coef) + bool(config.probe_every or config.probe_on_alarm)  # first policy; one step before
    training = Parts(weights=trainer.weights, copies=copies * trainer.weights, masters=trainer.masters,
                     moments=trainer.moments)
    between = replace(training, masters=0, moments=0) if config.offload_optimizer else training
    vllm, cache = config.engine == "vllm", config.kv_cache_gib * GIB
    engine = dict(engine=trainer.weights if vllm else 0, kv_cache=cache)
    awake = engine | {"sampling": sampling_bytes(config, model_config)}
    kept = vllm and config.inflight_groups and config.parity.inflight_keep  # a kept cache keeps the engine from sleep
    asleep = engine if kept else {}
    table = {
        "generate": replace(between, **awake),
        "old_logprobs": replace(between, activations=trainer.forward, **asleep),
        "update": replace(training, gradients=trainer.gradients, activations=trainer.backward, **asleep),
        "sync": replace(between, **awake),
    }
    if vllm and config.eval_with_trainer:  # a second cache, within the same budget
        table["evaluate"] = replace(table["generate"], kv_cache=2 * cache)
    return table


def peak(table: dict[str, Parts]) -> float:
    return max(parts.total for parts in table.values())


TRY = {  # what lowers a phase's memory, the cheapest first
    "update": "--gradient-checkpointing, a smaller --micro-batch-tokens, --dtype bfloat16",
    "old_logprobs": "a smaller --micro-batch-tokens, --offload-optimizer",
    "evaluate": "--no-eval-with-trainer",
    "generate": "a smaller --max-num-seqs or --kv-cache-gib, --offload-optimizer",
}


def print_plan(config: Config, model_config: PretrainedConfig, max_prompt_tokens: int, gib: float) -> bool:
    """The table, the verdict, and what to try. Returns whether it fits."""
    table, dtype = phases(config, model_config, max_prompt_tokens), getattr(torch, config.dtype)
    update = table["update"]
    columns = [each.name for each in fields(Parts) if any(getattr(parts, each.name) for parts in table.values())]
    millions = update.weights / dtype.itemsize / 1e6
    print(f"{model_config.model_type}, {millions:,.1f} million parameters, {config.dtype}; prompts of"
          f" {max_prompt_tokens} and responses of {config.max_new_tokens} tokens; GiB on one GPU:\n")
    print("| phase | " + " | ".join(name.replace("_", " ") for name in columns) + " | total |")
    print("| --- |" + " --- |" * (len(columns) + 1))
    for phase, parts in table.items():
        row = [getattr(parts, name) for name in columns]
        print(f"| {phase} | " + " | ".join(f"{value / GIB:.2f}" for value in row) + f" | {parts.total / GIB:.2f} |")
    length = max_prompt_tokens + config.max_new_tokens
    bytes_per_rollout = length * kv_bytes_per_token(model_config, dtype)
    held = int(config.kv_cache_gib * GIB / bytes_per_rollout)
    print(f"\n--kv-cache-gib {config.kv_cache_gib:g} holds {held:,} rollouts of {length:,} tokens, --max-num-seqs is"
          f" {config.max_num_seqs}" + (": the others will wait" if held < config.max_num_seqs else ""))
    if config.offload_optimizer:
        print(f"host memory, pinned: {(update.masters + update.moments) / GIB:.2f}")
    fits, largest = peak(table) <= gib * GIB, max(table, key=lambda phase: table[phase].total)
    advice = "" if fits else f"; for the phase {largest} try {TRY[largest]}"
    print(f"peak {peak(table) / GIB:.2f}: {'fits' if fits else 'does NOT fit'} {gib:g} GiB{advice}")
    return fits


@dataclass(frozen=True)
class Options(Config):
    """The options of train.py, and the GPU."""

    gib: float = 80.0
    """The GPU's memory that the plan is held against."""


def main(arguments: list[str] | None = None) -> None:
    with one_sentence(2):
        config = tyro.cli(Options, args=arguments, description=__doc__)
        if config.model == "toy":
            model_config, tokenizer, _ = describe_toy(config.task)
        else:
            model_config, tokenizer = read_model(config.model, with_weights=False)
        longest = config.max_prompt_tokens
        if longest is None:
            if tokenizer is None:
                raise ValueError(f"max_prompt_tokens must be given where no tokenizer is, got {config.model}")
            task = load_task(config.task, config.seed, config.eval_task, config.reward_limit_s)
            longest = max(map(len, encode_prompts(tokenizer, task).values()))
        print_plan(config, model_config, longest, config.gib)


if __name__ == "__main__":
    main()
