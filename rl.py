"""The trainer's half: the policy with its fp32 head, the batch, and one update.

Words and shapes as in objectives.py: P prompts, G group size, B = P * G rows group-major, T target positions,
V vocabulary, H hidden width. Log-probabilities in nats.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from engine_adapter import Rollout
from objectives import OBJECTIVES, TisKind, kl_k3, loss_weights, tis_weights

HEAD_CHUNK_ELEMENTS = 2**25  # logits held at once by the head, N_chunk * V: 128 MiB in fp32


# ------------------------------------------------------------------------------------------------ batch
@dataclass(frozen=True)
class Batch:
    """Rollouts as tensors, shifted once and padded once: row b predicts `targets[b, t]` from `inputs[b, : t + 1]`.

    Shapes: per-token tensors (B, T); advantages (B,); lengths (B,), the positions of a row, prompt included. `mask` is
    1.0 on response tokens, the stop token included.
    """

    inputs: Tensor
    targets: Tensor
    mask: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    lengths: Tensor
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None

    def rows(self, rows: Tensor) -> "Batch":
        """Some rows, cut to the longest of them: causal attention sees neither right padding nor its absence."""
        longest = int(self.lengths[rows].max())
        values = (getattr(self, each.name) for each in fields(self))
        return Batch(*(v if v is None else v[rows] if v.dim() == 1 else v[rows, :longest] for v in values))

    def cut(self, num_minibatches: int, micro_batch_tokens: int) -> list[list[Tensor]]:
        """The rows of each micro-batch of each optimizer step.

        Rows of like length go together, so that little is padded: rows * longest <= micro_batch_tokens, and one row
        where it alone is longer. The longest go first: what does not fit into memory fails at once. Lengths alone
        decide, so that all passes over a batch see the same micro-batches and in 16 bits the ratio starts at 1.
        """
        steps = []
        for rows in torch.arange(len(self.inputs)).split(len(self.inputs) // num_minibatches):
            left = rows[self.lengths[rows].argsort(descending=True, stable=True)]
            steps.append([])
            while len(left):
                count = max(1, micro_batch_tokens // int(self.lengths[left[0]]))
                steps[-1].append(left[:count])
                left = left[count:]
        return steps

    def without(self, rows: Tensor) -> "Batch":
        """Some rows masked out: no loss, but they count in the B of `objectives.loss_weights`. Rows (B,) bool."""
        kept = ~rows.to(self.mask.device)[:, None]
        named = {name: getattr(self, name) for name in ("mask", "behavior_logprobs", "old_logprobs", "ref_logprobs")}
        # The log-probabilities too: a new one is 0 there, and exp(0 - old) may be infinite.
        return replace(self, **{name: value if value is None else value * kept for name, value in named.items()})


def make_batch(rollouts: list[Rollout], advantages: Tensor, device: torch.device | str = "cpu") -> Batch:
    """Shift once, pad once: position t of every (B, T) tensor belongs to the prediction of token t + 1.

    Shapes: B rollouts, advantages (B,) -> Batch with T = longest prompt + response - 1.
    """
    longest = max(len(r.prompt_ids) + len(r.token_ids) for r in rollouts)
    ids, mask, behavior_logprobs = [], [], []  # B rows of T + 1
    for rollout in rollouts:
        prompt, response = len(rollout.prompt_ids), len(rollout.token_ids)
        assert len(rollout.logprobs) == response, f"{len(rollout.logprobs)=} {response=}"
        padding = [0] * (longest - prompt - response)  # any id pads: causal attention never looks right
        ids.append(rollout.prompt_ids + rollout.token_ids + padding)
        mask.append([0.0] * prompt + [1.0] * response + padding)
        behavior_logprobs.append([0.0] * prompt + rollout.logprobs + padding)
    ids, mask, behavior_logprobs = (torch.tensor(rows, device=device) for rows in (ids, mask, behavior_logprobs))
    lengths = torch.tensor([len(r.prompt_ids) + len(r.token_ids) - 1 for r in rollouts])  # a plan of the host
    return Batch(ids[:, :-1], ids[:, 1:], mask[:, 1:], behavior_logprobs[:, 1:], advantages.to(device), lengths)


# ------------------------------------------------------------------------------------------------ head
@dataclass(frozen=True)
class Shape:
    """What becomes of a product: scale * cap(hidden W^T + bias), cap(z) = softcap * tanh(z / softcap) if there is one.

    `scale` holds the model's logit scale and 1 / temperature; `dtype` is the product's; what follows is in fp32.
    """

    dtype: torch.dtype
    rows: int  # of a chunk
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | float]:
        """(N, H), (V, H), (V,) -> (N, V) fp32, and d logits / d product: (N, V), or one number for all."""
        logits, slope = F.linear(hidden.to(self.dtype), weight, bias).float(), self.scale
        if self.softcap is not None:
            capped = torch.tanh(logits / self.softcap)
            logits, slope = self.softcap * capped, self.scale * (1 - capped.square())
        return (logits if self.scale == 1.0 else logits * self.scale), slope


class TargetLogprobs(torch.autograd.Function):
    """log softmax(logits)[target] and, without a gradient, the entropy -sum p log p.

    d logprob / d logits = onehot(target) - softmax(logits). Gradients of the weight add up in fp32 over the chunks.

    Shapes: hidden (N, H), weight (V, H), bias (V,) or None, targets (N,) -> (N,), (N,). Units: nats.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, shape: Shape):
        wide, wide_bias = weight.to(shape.dtype), None if bias is None else bias.to(shape.dtype)
        scored = []
        for chunk, wanted in zip(hidden.split(shape.rows), targets.split(shape.rows), strict=True):
            logits, _ = shape.logits(chunk, wide, wide_bias)  # (n, V)
            norms = logits.logsumexp(dim=-1)
            chosen = logits.gather(-1, wanted[:, None])[:, 0]
            all_logprobs = logits.sub_(norms[:, None])
            entropy = -(all_logprobs.exp() * all_logprobs).sum(dim=-1)
            scored.append((chosen - norms, entropy, norms))
        logprobs, entropy, norms = (torch.cat(parts) for parts in zip(*scored, strict=True))
        ctx.save_for_backward(hidden, weight, bias, targets, norms)
        ctx.shape = shape
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _entropy: None):
        hidden, weight, bias, targets, norms = ctx.saved_tensors
        shape = ctx.shape
        wide, wide_bias = weight.to(shape.dtype), None if bias is None else bias.to(shape.dtype)
        hidden_grads, weight_grad = [], torch.zeros(weight.shape, device=weight.device)
        bias_grad = None if bias is None else torch.zeros(bias.shape, device=bias.device)
        chunks = zip(*(each.split(shape.rows) for each in (hidden, targets, norms, gradient)), strict=True)
        for chunk, wanted, norm, grad in chunks:
            logits, slope = shape.logits(chunk, wide, wide_bias)  # (n, V)
            logits_grad = logits.sub_(norm[:, None]).exp_().mul_(-grad[:, None])
            logits_grad.scatter_add_(1, wanted[:, None], grad[:, None])
            product_grad = logits_grad.mul_(slope).to(shape.dtype)
            hidden_grads.append((product_grad @ wide).to(hidden.dtype))
            if shape.dtype == torch.float32:
                weight_grad.addmm_(product_grad.T, chunk.to(shape.dtype))
            else:
                weight_grad += product_grad.T @ chunk
            if bias_grad is not None:
                bias_grad += product_grad.sum(dim=0)
        return torch.cat(hidden_grads), weight_grad.to(weight.dtype), bias_grad, None, None


# ------------------------------------------------------------------------------------------------ policy
class Policy:
    """A Hugging Face causal language model, its final projection taken out of its hands.

    The body runs as transformers runs it; the head runs here, in fp32 (or in the model's dtype without `fp32_head`), on
    response positions only and in chunks, so that a (B, T, V) tensor never exists.

    With `gradient_checkpointing` only the input of each layer is kept for backward, which computes the layer again.

    Raises: ValueError if the head here and the model's own forward disagree (an architecture that does more after the
    head than soft-capping and scaling); `check=False` is for weights that are not there (lab/plan.py).
    """

    def __init__(self, model: PreTrainedModel, fp32_head: bool = True, chunk_elements: int = HEAD_CHUNK_ELEMENTS,
                 gradient_checkpointing: bool = False, check: bool = True):
        self.model, self.fp32_head, self.chunk_elements = model.eval(), fp32_head, chunk_elements  # eval: no dropout
        self.checkpointed = _checkpointed_layers(model) if gradient_checkpointing else []
        # vLLM's Transformers backend (OLMo 2, SmolLM3) patches the body's class for compilation, and with it the
        # trainer's body; this attribute is the patch's own way out.
        model.base_model.do_not_compile = True
        self.head = model.get_output_embeddings()
        config = model.config.get_text_config()
        self.softcap = getattr(config, "final_logit_softcapping", None)  # Gemma 2: cap * tanh(logits / cap)
        # Cohere multiplies by logit_scale, Falcon-H1 by lm_head_multiplier; Granite divides by logits_scaling.
        self.scale = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None) or 1.0
        self.scale /= getattr(config, "logits_scaling", None) or 1.0
        if check:
            self._check_head()

    @classmethod
    def load(cls, path: str, dtype: torch.dtype, device: str, fp32_head: bool = True,
             gradient_checkpointing: bool = False) -> "Policy":
        """From a folder or a hub name.

        Raises: ValueError if a tensor of the model is missing in the checkpoint, not finite, or of another shape there.
        """
        attention = attention_for(AutoConfig.from_pretrained(path).get_text_config())
        model, report = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=attention, output_loading_info=True, ignore_mismatched_sizes=True
        )
        if report["missing_keys"] or report["mismatched_keys"]:
            raise ValueError(
                f"the checkpoint in {path} must bring every tensor of {type(model).__name__}: missing"
                f" {sorted(report['missing_keys'])}, wrongly shaped {sorted(map(str, report['mismatched_keys']))}"
            )
        if bad := [name for name, parameter in model.named_parameters() if not parameter.isfinite().all()]:
            raise ValueError(f"the checkpoint in {path} must be finite, it is not in {', '.join(bad)}")
        return cls(model.to(device), fp32_head, gradient_checkpointing=gradient_checkpointing)

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    def audit(self) -> dict[str, str | bool]:
        """What is in force on the trainer's side."""
        return {
            "attention": self.model.config._attn_implementation,
            "model_dtype": str(self.model.dtype).removeprefix("torch."),
            "head_dtype": "float32" if self.fp32_head else str(self.head.weight.dtype).removeprefix("torch."),
            "gradient_checkpointing": bool(self.checkpointed),
        }

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """(N, H), (V, H), (V,) -> (N, V) in fp32, with all the model does after its head."""
        return Shape(weight.dtype, len(hidden), self.scale, self.softcap).logits(hidden, weight, bias)[0]

    def head_weights(self) -> tuple[Tensor, Tensor | None]:
        """(V, H) and the bias (V,), if there is one, in the dtype the head computes in."""
        weight, bias = self.head.weight, getattr(self.head, "bias", None)
        return (weight.float(), None if bias is None else bias.float()) if self.fp32_head else (weight, bias)

    def logprobs(self, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probability of each target and entropy of its distribution, both of the distribution sampled from.

        log softmax(logits / temperature)[target], and -sum p log p (without gradient); zero outside the mask.

        Shapes: Batch (B, T) -> (B, T), (B, T). Units: nats. Memory: chunks of `chunk_elements` logits, see above.
        """
        response = batch.mask > 0
        hidden = self.hidden(batch.inputs)[response]  # (N, H)
        scored = self.target_logprobs(hidden, batch.targets[response], temperature)  # (N,), (N,)
        zeros = torch.zeros_like(batch.mask)
        return tuple(zeros.masked_scatter(response, values) for values in scored)

    def hidden(self, inputs: Tensor) -> Tensor:
        """The body's last hidden states: (B, T) token ids, right padding -> (B, T, H)."""
        for layer in self.checkpointed:  # transformers checkpoints layers in training mode, without a KV cache then
            layer.training = torch.is_grad_enabled()
        hidden = self.model.base_model(input_ids=inputs, use_cache=False).last_hidden_state
        for layer in self.checkpointed:
            layer.training = False
        return hidden

    def target_logprobs(self, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """(N, H) hidden states, (N,) targets -> log-probabilities (N,) and entropies (N,) after temperature."""
        weight, bias = self.head.weight, getattr(self.head, "bias", None)
        rows = max(1, self.chunk_elements // weight.shape[0])
        shape = Shape(torch.float32 if self.fp32_head else weight.dtype, rows, self.scale / temperature, self.softcap)
        return TargetLogprobs.apply(hidden, weight, bias, targets, shape)

    @torch.no_grad()
    def score(self, sequences: list[list[int]], prompt_length: int) -> list[list[float]]:
        """Log-probabilities at temperature 1 of all after the first `prompt_length` tokens; sequences of one length."""
        ids = torch.tensor(sequences, device=self.device)  # (N, prompt_length + R)
        mask = torch.zeros(ids.shape, device=self.device)
        mask[:, prompt_length:] = 1.0
        lengths = torch.full((len(sequences),), ids.shape[1] - 1)
        batch = Batch(ids[:, :-1], ids[:, 1:], mask[:, 1:], mask[:, 1:], mask[:, 0], lengths)
        return self.logprobs(batch, temperature=1.0)[0][:, prompt_length - 1 :].tolist()

    def weights(self) -> dict[str, Tensor]:
        """Every tensor by its checkpoint name, as views of the live weights; a tied head under its own name too."""
        return revert_weight_conversion(self.model, dict(self.model.state_dict()))

    def copied_weights(self) -> dict[str, Tensor]:
        """Every parameter by its name, kept while others are in the policy."""
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    @torch.no_grad()
    def _check_head(self) -> None:
        ids = torch.arange(8, device=self.device)[None] % self.head.weight.shape[0]
        theirs = self.model(input_ids=ids, use_cache=False).logits[0].float()
        hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        ours = self.logits(hidden, *self.head_weights())
        # fp32 agrees to rounding; a 16-bit head rounds each logit to 8 or 11 bits, and soft-capping does it twice.
        allowed = theirs.abs().max() * (1e-5 if self.model.dtype == torch.float32 else 2**-6) + 1e-6
        if not (ours - theirs).abs().max() <= allowed:
            raise ValueError(
                f"{type(self.model).__name__} does more after its head than the trainer reproduces: the logits differ"
                f" by {(ours - theirs).abs().max():.1e}, more than {allowed:.1e}"
            )


def attention_for(config: PretrainedConfig) -> str:
    """sdpa, but eager where sdpa drops soft-capping and where the class has no sdpa (Mamba 2, without attention)."""
    has_sdpa = getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None), "_supports_sdpa", True)
    return "sdpa" if has_sdpa and not getattr(config, "attn_logit_softcapping", None) else "eager"


def _checkpointed_layers(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    model.gradient_checkpointing_enable({"use_reentrant": False})  # raises ValueError where the model has no support
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"gradient_checkpointing must be off: {type(model).__name__} has no layers that do it")
    return layers


# ------------------------------------------------------------------------------------------------ optimizer
class Optimizer:
    """AdamW on fp32 master weights; for an fp32 model the masters are the parameters themselves.

    Each 16-bit gradient is added to its fp32 master during backward and then freed; each step rounds the masters into
    the parameters. fp16 uses dynamic loss scaling. With `offload`, masters and moments are in host memory (pinned, on a
    GPU) except during an update.
    """

    def __init__(self, model: PreTrainedModel, weight_decay: float, offload: bool = False):
        trained = [p for p in model.parameters() if p.requires_grad]
        self.masters = [p if p.dtype == torch.float32 else p.detach().float().requires_grad_() for p in trained]
        self.rounded = [(p, m) for p, m in zip(trained, self.masters, strict=True) if p is not m]  # the 16-bit ones
        self.adamw = torch.optim.AdamW(self.masters, lr=0.0, weight_decay=weight_decay, fused=True)
        self.device, self.offload = trained[0].device, offload
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=any(p.dtype == torch.float16 for p in trained))
        self._host: dict[tuple[int, str], Tensor] = {}  # pinned once: pinning takes longer than copying
        for parameter, master in self.rounded:
            parameter.register_post_accumulate_grad_hook(partial(_accumulate, master))
        self.to_host()

    def backward(self, loss: Tensor) -> None:
        """Add the micro-batch's gradients to those of the masters."""
        self.scaler.scale(loss).backward()

    @torch.no_grad()
    def step(self, lr: float, grad_clip: float) -> float:
        """Clip, step, round into the model; returns the gradient's norm before clipping.

        In fp16 a norm that is not finite is an overflow: no step is taken and the scale is halved.

        Raises: FloatingPointError if the norm is not finite otherwise; the weights are untouched then.
        """
        self.scaler.unscale_(self.adamw)
        norm = torch.nn.utils.clip_grad_norm_(self.masters, grad_clip).item()
        if not math.isfinite(norm) and not (self.scaler.is_enabled() and self.scaler.get_scale() > 1):
            raise FloatingPointError(f"the gradient's norm is {norm}")
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.scaler.step(self.adamw)  # none where a scaled gradient has overflowed
        self.scaler.update()
        self.adamw.zero_grad(set_to_none=True)
        for parameter, master in self.rounded:
            parameter.copy_(master)
        return norm

    def to_device(self) -> None:
        """Bring masters and moments back, if they are offloaded."""
        if self.offload:
            self._move(lambda _, tensor: tensor.to(self.device, non_blocking=True, copy=True))

    def to_host(self) -> None:
        """Move masters and moments to the host, if they are to be offloaded."""
        if self.offload:
            self._move(self._host_copy)

    def _host_copy(self, key: tuple[int, str], tensor: Tensor) -> Tensor:
        if key not in self._host:
            self._host[key] = torch.empty_like(tensor, device="cpu", pin_memory=self.device.type == "cuda")
        return self._host[key].copy_(tensor)

    def _move(self, moved: Callable[[tuple[int, str], Tensor], Tensor]) -> None:
        for index, master in enumerate(self.masters):
            if self.rounded:  # an fp32 model's masters are its parameters, which the engine's load needs
                master.data = moved((index, "master"), master.data)
            for name, moment in self.adamw.state.get(master, {}).items():
                self.adamw.state[master][name] = moved((index, name), moment)

    def state_dict(self) -> dict:
        return {"adamw": self.adamw.state_dict(), "masters": [master.detach() for _, master in self.rounded],
                "scaler": self.scaler.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        self.adamw.load_state_dict(state["adamw"])
        self.scaler.load_state_dict(state["scaler"])
        for (_, master), saved in zip(self.rounded, state["masters"], strict=True):
            master.copy_(saved)
        self.to_host()


def _accumulate(master: Tensor, parameter: Tensor) -> None:
    """Called by backward with each 16-bit gradient."""
    if master.grad is None:
        master.grad = parameter.grad.float()
    else:
        master.grad += parameter.grad
    parameter.grad = None


# ------------------------------------------------------------------------------------------------ update
@dataclass(frozen=True)
class UpdateOptions:
    """What one update needs to know; part of train.Config."""

    temperature: float = 0.7
    """Of the sampler, and of the distribution the objective is about; not 1, so raw log-probabilities would show."""
    max_new_tokens: int = 8
    """Response limit in tokens; the toy's longest answer has 4, end of sequence included."""
    objective: Literal["grpo", "dr_grpo", "gspo", "cispo"] = "grpo"
    """Formulas and sources in objectives.py."""
    old_policy: Literal["recompute", "rollout"] = "recompute"
    """recompute: three policies, the ratio is to the trainer's old value; rollout: two, it is to the engine's."""
    clip_low: float | None = None
    """Lower clip distance of the ratio; if not given, the value usual for the objective."""
    clip_high: float | None = None
    """Upper clip distance (cispo: the absolute cap); if not given, the value usual for the objective."""
    kl_coef: float = 0.0
    """Weight of the KL to the frozen initial policy; above 0 a second copy of the model stays in memory."""
    tis: TisKind = "off"
    """Truncated importance sampling for what the parity fixes leave of the mismatch; refused before parity."""
    tis_cap: float = 2.0
    """Largest importance weight (token, sequence: truncated to it; masked: dropped above it)."""
    tis_floor: float = 0.5
    """Smallest importance weight that masked keeps (IcePop's value)."""
    num_minibatches: int = 2
    """Optimizer steps per batch of rollouts; from the second on the ratio leaves 1 and the clip has work."""
    micro_batch_tokens: int = 4096
    """Tokens per forward and backward, prompts and padding included: memory depends on it, loss and gradient do not."""
    grad_clip: float = 1.0
    """Largest gradient norm per optimizer step."""

    @property
    def clip(self) -> tuple[float, float]:
        low, high = OBJECTIVES[self.objective].clip
        return (low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high)


@torch.no_grad()
def frozen_logprobs(policy: Policy, batch: Batch, options: UpdateOptions) -> tuple[Tensor, Tensor]:
    """`policy.logprobs` over the whole batch without gradients, cut as `update` cuts it: two tensors (B, T)."""
    width = batch.mask.shape[1]
    micros = [rows for step in batch.cut(options.num_minibatches, options.micro_batch_tokens) for rows in step]
    parts = [policy.logprobs(batch.rows(rows), options.temperature) for rows in micros]
    place = torch.cat(micros).argsort()  # of each row among the parts
    columns = zip(*parts, strict=True)
    return tuple(torch.cat([F.pad(p, (0, width - p.shape[1])) for p in column])[place] for column in columns)


def weighted_loss(logprobs: Tensor, micro: Batch, weights: Tensor, options: UpdateOptions, sums: dict) -> Tensor:
    """sum_t w_t (tis_t * surrogate_t + kl_coef * k3(pi, ref)_t); adds the weighted diagnostics to `sums`.

    Shapes: (B, T), Batch, (B, T) -> (). The losses of micro-batches add up to the loss of the optimizer batch.
    """
    old_logprobs = micro.old_logprobs if options.old_policy == "recompute" else micro.behavior_logprobs
    surrogate = OBJECTIVES[options.objective].surrogate
    loss, clipped = surrogate(logprobs, old_logprobs, micro.advantages, micro.mask, *options.clip)
    mismatch_policies = micro.old_logprobs, micro.behavior_logprobs
    tis, cut = tis_weights(options.tis, *mismatch_policies, micro.mask, options.tis_cap, options.tis_floor)
    loss = tis * loss
    if options.kl_coef:
        kl_ref = kl_k3(logprobs, micro.ref_logprobs)
        loss = loss + options.kl_coef * kl_ref
        sums["kl_ref"] += (kl_ref.detach() * weights).sum()
    with torch.no_grad():
        ratio, kl_new_old = torch.exp(logprobs - old_logprobs), kl_k3(micro.old_logprobs, logprobs)
        terms = dict(ratio_mean=ratio, clip_rate=clipped, tis_clip_frac=cut, kl_new_old=kl_new_old, weight=1.0)
        for name, term in terms.items():
            sums[name] += (term * weights).sum()
    return (loss * weights).sum()


def update(policy: Policy, optimizer: Optimizer, batch: Batch, options: UpdateOptions, lr: float) -> dict:
    """One pass over the batch: `num_minibatches` optimizer steps, each over micro-batches whose losses simply add up.

    A minibatch without signal (all its groups flat or masked, no KL term) takes no step and counts in
    `skipped_updates`: AdamW would otherwise move the weights on momentum alone. `overflowed_updates` counts the steps
    that fp16 has lost; `updates` those that changed the weights. Diagnostics are means over all minibatches with a
    signal, None if none had one.

    Raises: FloatingPointError if a loss or, but for fp16's overflows, a gradient is not finite.
    """
    sums, losses, norms = defaultdict(float), [], []
    optimizer.to_device()
    for micro_batches in batch.cut(options.num_minibatches, options.micro_batch_tokens):
        rows = torch.cat(micro_batches)
        mask = batch.mask[rows]  # (rows, T)
        if not (mask if options.kl_coef else mask * batch.advantages[rows, None]).any():
            continue
        weights = loss_weights(mask, OBJECTIVES[options.objective].normalizer, options.max_new_tokens)
        losses.append(0.0)
        for micro_rows, micro_weights in zip(micro_batches, weights.split(list(map(len, micro_batches))), strict=True):
            micro = batch.rows(micro_rows)
            logprobs, _ = policy.logprobs(micro, options.temperature)  # (rows, T)
            loss = weighted_loss(logprobs, micro, micro_weights[:, : logprobs.shape[1]], options, sums)
            optimizer.backward(loss)
            losses[-1] += loss.item()
        if not math.isfinite(losses[-1]):
            raise FloatingPointError(f"the loss is {losses[-1]}")
        norms.append(optimizer.step(lr, options.grad_clip))
    optimizer.to_host()
    unmeasured = dict.fromkeys(("ratio_mean", "clip_rate", "tis_clip_frac", "kl_new_old", "loss", "grad_norm"))
    skipped, finite = options.num_minibatches - len(norms), [norm for norm in norms if math.isfinite(norm)]
    counts = {"updates": len(finite), "skipped_updates": skipped, "overflowed_updates": len(norms) - len(finite)}
    if not norms:
        return unmeasured | counts
    weight = sums.pop("weight")
    return unmeasured | {name: float(value / weight) for name, value in sums.items()} | counts | {
        "loss": sum(losses) / len(losses),
        "grad_norm": sum(finite) / len(finite) if finite else None,
    }
