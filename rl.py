"""The trainer's half: the batch, the policy with its fp32 head, the optimizer, and one update.

Words and shapes as in objectives.py; V is the vocabulary, H the hidden width, N a number of response tokens.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from engine_adapter import Rollout, Sampling
from objectives import OBJECTIVES, Batch, UpdateOptions, loss_weights, weighted_loss

FEWEST_ROWS = 16  # of a product: torch's CPU product of fewer rows rounds a row differently (docs/exact.md)


def make_batch(rollouts: list[Rollout], advantages: Tensor, device: torch.device | str = "cpu") -> Batch:
    """Shift once, pad once: position t of every (B, T) tensor belongs to the prediction of token t + 1.

    Shapes: B rollouts, advantages (B,) -> Batch with T = longest (prompt + response) - 1.
    """
    for rollout in rollouts:
        assert len(rollout.logprobs) == len(rollout.token_ids), f"{len(rollout.logprobs)=} {len(rollout.token_ids)=}"
        masked = len(rollout.token_ids) if rollouts[0].kept else 0
        assert len(rollout.kept) == masked, f"{len(rollout.kept)=} {masked=}: of all tokens, or of none"
    prompt_lengths = torch.tensor([len(r.prompt_ids) for r in rollouts])
    ends = prompt_lengths + torch.tensor([len(r.token_ids) for r in rollouts])
    columns = torch.arange(int(ends.max()))
    row, response = columns < ends[:, None], columns >= prompt_lengths[:, None]  # (B, T + 1)
    flat_ids = torch.tensor([token for r in rollouts for token in (*r.prompt_ids, *r.token_ids)])
    flat_logprobs = torch.tensor([logprob for r in rollouts for logprob in r.logprobs])
    # Padding has id 0, but any would do: no token attends to positions on its right.
    ids = torch.zeros(row.shape, dtype=torch.long).masked_scatter(row, flat_ids)
    behavior_logprobs = torch.zeros(row.shape).masked_scatter(row & response, flat_logprobs)
    per_token = ids[:, :-1], ids[:, 1:], (row & response).float()[:, 1:], behavior_logprobs[:, 1:]  # (B, T)
    kept = None
    if rollouts[0].kept:
        kept = numpy.full(per_token[2].shape, None)  # (B, T), of arrays
        kept[per_token[2].bool().numpy()] = numpy.fromiter((each for r in rollouts for each in r.kept), object)
    return Batch(*(each.to(device) for each in per_token), advantages.to(device), ends - 1, prompt_lengths, kept)


def has_mask(sampling: Sampling | UpdateOptions) -> bool:
    """Whether the sampler can cut a token off."""
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


def masked_logits(logits: Tensor, sampling: Sampling | UpdateOptions) -> Tensor:
    """(N, V) logits after temperature, with -inf where the sampler's mask cuts them off: min-p, then top-k, then top-p.

    Source: vLLM's v1/sample/sampler.py and ops/topk_topp_sampler.py; V0 applied min-p last.
    """
    if sampling.min_p > 0:
        ratios = torch.exp(logits - logits.amax(dim=-1, keepdim=True))
        logits = logits.masked_fill(ratios < sampling.min_p, -math.inf)
    if 0 < sampling.top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[:, -1:], -math.inf)
    if sampling.top_p < 1:
        for size in (min(512, logits.shape[-1]), logits.shape[-1]):  # 512 are usually enough, and sorted much faster
            likely, order = logits.topk(size)  # (N, size), in descending order
            probabilities = torch.exp(likely - logits.logsumexp(dim=-1, keepdim=True))
            kept = probabilities.cumsum(dim=-1) - probabilities < sampling.top_p  # by the sum of all likelier ones
            if not kept[:, -1].any():
                break
        logits = torch.full_like(logits, -math.inf).scatter(-1, order, likely.masked_fill(~kept, -math.inf))
    return logits


def mask_outside(logits: Tensor, kept: numpy.ndarray | None, part: slice) -> Tensor:
    """-inf outside the kept sets of the targets in `part`, in place: (n, V) -> (n, V). `kept`: N arrays of ids."""
    if kept is None or not len(logits):
        return logits
    rows = numpy.repeat(numpy.arange(len(logits)), [len(ids) for ids in kept[part]])
    indices = torch.from_numpy(numpy.stack([rows, numpy.concatenate(kept[part])])).to(logits.device)  # (2, ids)
    outside = torch.ones_like(logits, dtype=torch.bool)
    outside[indices[0], indices[1]] = False
    return logits.masked_fill_(outside, -math.inf)


# ------------------------------------------------------------------------------------------------ head
def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right in `dtype`. On a GPU, fp32 products of a 16-bit `right` use the tensor cores, as vLLM's head does.

    They multiply 16-bit numbers exactly and add in fp32. `left` is rounded to 16 bits: nothing changes for hidden
    states, and gradients of logits are rounded as in any 16-bit model.
    """
    if dtype == torch.float32 != right.dtype and right.is_cuda:
        return torch.mm(left.to(right.dtype), right, out_dtype=dtype)
    return left.to(dtype) @ right.to(dtype)


def head_chunk(gpu_gib: float) -> int:
    """Logits that the head computes at once, n * V: 2^25 on a CPU (0 GiB), up to 2^28 on a GPU.

    Each chunk also moves the weight's gradient, (V, H), so a GPU has few: one takes up to 1/64 of the memory, in fp32.
    """
    return 2 ** max(25, min(28, int(gpu_gib * 2**22).bit_length() - 1))


@dataclass(frozen=True)
class Projection:
    """The head: logits = scale * cap(hidden W^T + bias) / temperature, cap(z) = softcap * tanh(z / softcap), if any.

    The product is computed in `dtype`, the rest in fp32 and in the order of vLLM's sampler.
    """

    dtype: torch.dtype
    rows: int  # of a chunk
    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    def parts(self, count: int) -> list[slice]:
        """The chunks of `count` rows; one that is empty if there are none."""
        return [slice(start, start + self.rows) for start in range(0, max(1, count), self.rows)]

    def cast(self, weight: Tensor) -> Tensor:
        """The weight for all chunks. On a CPU it is cast once; on a GPU `product` takes it as it is."""
        return weight if weight.is_cuda else weight.to(self.dtype)

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | float]:
        """(N, H), (V, H), (V,) -> (N, V) fp32, and d logits / d product: (N, V), or one number for all."""
        padded = pad(hidden, (0, 0, 0, max(0, FEWEST_ROWS - len(hidden))))
        logits, slope = product(padded, weight.T, self.dtype)[: len(hidden)], self.scale / self.temperature
        logits = (logits if bias is None else logits + bias.to(self.dtype)).float()
        if self.softcap is not None:
            capped = torch.tanh(logits / self.softcap)
            logits, slope = self.softcap * capped, slope * (1 - capped.square())
        return (logits if self.scale == 1.0 else logits * self.scale).div_(self.temperature), slope


class TargetLogprobs(torch.autograd.Function):
    """log softmax(logits)[target], the softmax over the target's kept set, or over the vocabulary without a mask.

    d logprob / d logits = onehot(target) - softmax(logits). Gradients of the weight add up in fp32 over the chunks.

    Shapes: hidden (N, H), weight (V, H), bias (V,) or None, targets (N,), N kept sets or None -> (N,). Units: nats.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor,
                kept: numpy.ndarray | None, projection: Projection):
        cast, logprobs = projection.cast(weight), []
        for part in projection.parts(len(hidden)):
            logits, _ = projection.logits(hidden[part], cast, bias)  # (n, V)
            logprobs.append(_at(targets[part], mask_outside(logits, kept, part).log_softmax(dim=-1)))
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.projection, ctx.kept = projection, kept
        return torch.cat(logprobs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):
        hidden, weight, bias, targets = ctx.saved_tensors
        projection, dtype, cast = ctx.projection, ctx.projection.dtype, ctx.projection.cast(weight)
        hidden_grads, weight_grad = [], torch.zeros(weight.shape, device=weight.device)
        bias_grad = None if bias is None else torch.zeros(bias.shape, device=bias.device)
        for part in projection.parts(len(hidden)):
            logits, slope = projection.logits(hidden[part], cast, bias)  # (n, V)
            logits_grad = mask_outside(logits, ctx.kept, part).softmax(dim=-1)
            logits_grad.mul_(-gradient[part, None]).scatter_add_(1, targets[part, None], gradient[part, None])
            product_grad = logits_grad.mul_(slope).to(dtype)
            hidden_grads.append(product(product_grad, cast, dtype).to(hidden.dtype))
            if hidden.dtype == torch.float32:
                weight_grad.addmm_(product_grad.T, hidden[part])
            elif weight.is_cuda and dtype == torch.float32:  # as `product` does, but added up in place
                left = product_grad.T.to(hidden.dtype)
                torch.addmm(weight_grad, left, hidden[part], out_dtype=dtype, out=weight_grad)
            else:
                weight_grad += product(product_grad.T, hidden[part], dtype)
            if bias_grad is not None:
                bias_grad += product_grad.sum(dim=0)
        return torch.cat(hidden_grads), weight_grad.to(weight.dtype), bias_grad, None, None, None


def _at(targets: Tensor, values: Tensor) -> Tensor:
    """Each row's value at its target: (n,), (n, V) -> (n,)."""
    return values.gather(-1, targets[:, None])[:, 0]


# ------------------------------------------------------------------------------------------------ policy
class Policy:
    """A Hugging Face causal language model whose final projection (the head) is computed here.

    transformers computes the body. The head is computed in fp32 (without `fp32_head` in the model's dtype), on response
    positions only and in chunks, so that a (B, T, V) tensor never exists. With `gradient_checkpointing` only the input
    of each layer is kept for backward, which computes the layer again.

    Raises: ValueError if the head here and the model's own forward disagree (an architecture that does more after the
    head than soft-capping and scaling). `check=False` skips that, for models without weights (lab/plan.py).
    """

    def __init__(self, model: torch.nn.Module, fp32_head: bool = True, chunk_elements: int | None = None,
                 gradient_checkpointing: bool = False, check: bool = True):
        self.model, self.fp32_head = model.eval(), fp32_head  # eval: no dropout
        layers = DynamicCache(config=model.config).layers
        if any(getattr(layer, "sliding_window", 2) < 2 for layer in layers):
            raise ValueError("sliding_window must be at least 2 (at 1 transformers' KV cache keeps all keys), got 1")
        # Each distinct prompt of a micro-batch is computed once, but a recurrent state would see the padding.
        kinds = {type(layer).__name__ for layer in layers}
        attention_alone = not model._is_stateful and kinds <= {"DynamicLayer", "DynamicSlidingWindowLayer"}
        self.shares_prompts = attention_alone and not gradient_checkpointing
        self.checkpointed = _checkpointed_layers(model) if gradient_checkpointing else []
        # Set by the engine of --exact: as `shared_hidden`, with vLLM's attention kernel.
        self.kernel_hidden: Callable[[Batch, Tensor], Tensor] | None = None
        # vLLM's Transformers backend (OLMo 2, SmolLM3) patches the Python class of the body for compilation, and so the
        # trainer's body too. This attribute switches the patch off for one object.
        model.base_model.do_not_compile = True
        self.head, config = model.get_output_embeddings(), model.config.get_text_config()
        self.head_bias = getattr(self.head, "bias", None)  # (V,)
        gpu_gib = torch.cuda.mem_get_info(self.device)[1] / 2**30 if self.device.type == "cuda" else 0.0
        self.chunk_elements = chunk_elements or head_chunk(gpu_gib)
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
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.backends.cuda.enable_cudnn_sdp(False)  # 1 s for each new shape; vLLM switches it off too
        attention = attention_for(AutoConfig.from_pretrained(path).get_text_config())
        model, report = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=attention, output_loading_info=True, ignore_mismatched_sizes=True
        )
        if report["missing_keys"] or report["mismatched_keys"]:
            raise ValueError(
                f"the checkpoint in {path} must have every tensor of {type(model).__name__}: missing"
                f" {sorted(report['missing_keys'])}, wrongly shaped {sorted(map(str, report['mismatched_keys']))}"
            )
        _check_unexpected(model, path, sorted(report["unexpected_keys"]))
        if bad := [name for name, parameter in model.named_parameters() if not parameter.isfinite().all()]:
            raise ValueError(f"the checkpoint in {path} must be finite, it is not in {', '.join(bad)}")
        return cls(model.to(device), fp32_head, gradient_checkpointing=gradient_checkpointing)

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    def audit(self) -> dict[str, str | bool]:
        """What is in force on the trainer's side."""
        return {
            "attention": self.model.config._attn_implementation + (" (values by vLLM)" if self.kernel_hidden else ""),
            "model_dtype": str(self.model.dtype).removeprefix("torch."),
            "head_dtype": str(self._head_dtype).removeprefix("torch."),
            "gradient_checkpointing": bool(self.checkpointed),
            "shared_prompts": self.shares_prompts,
        }

    # -------------------------------------------------------------------------------------------- log-probabilities
    def logprobs(self, batch: Batch, temperature: float) -> Tensor:
        """log softmax(logits / temperature)[target], 0 outside `batch.mask`: (B, T), nats.

        The softmax is over the kept set that the sampler returned with the token, if it has a mask (top-k, top-p,
        min-p) and `parity.sampling_mask` is on; otherwise over the whole vocabulary.
        """
        response = batch.mask > 0  # (B, T), N of them true
        head, (hidden, targets, kept) = self.projection(temperature), self._response(batch, response)
        logprobs = TargetLogprobs.apply(hidden, self.head.weight, self.head_bias, targets, kept, head)
        return torch.zeros_like(batch.mask).masked_scatter(response, logprobs)

    @torch.no_grad()
    def measure(self, batch: Batch, options: UpdateOptions, metrics: bool = True) -> dict[str, Tensor]:
        """`logprobs` and, of the same distribution, `entropy`, -sum p log p: (B, T) by name, nats, 0 as in `logprobs`.

        With top-k, top-p or min-p the trainer also applies the sampler's mask to its own logits. `kept_mass`: the
        probability of the tokens that this mask keeps, in the softmax over the vocabulary. `outside_frac`: 1 if this
        mask cuts off the sampled token (by rounding or staleness), else 0. Without `metrics` only `logprobs`.
        """
        if not metrics:
            return {"logprobs": self.logprobs(batch, options.temperature)}
        response, measured = batch.mask > 0, []  # (B, T), N of them true
        head, (hidden, targets, kept) = self.projection(options.temperature), self._response(batch, response)
        weight = head.cast(self.head.weight)
        for part in head.parts(len(hidden)):
            logits, _ = head.logits(hidden[part], weight, self.head_bias)  # (n, V)
            recomputed = {}
            if has_mask(options):
                masked = masked_logits(logits, options)
                kept_mass = (masked.logsumexp(dim=-1) - logits.logsumexp(dim=-1)).exp()  # (n,)
                recomputed = {"kept_mass": kept_mass, "outside_frac": _at(targets[part], masked).isinf().float()}
            logits = mask_outside(logits, kept, part).log_softmax(dim=-1)  # (n, V); the name frees the logits
            logprobs = _at(targets[part], logits)
            entropy = torch.special.entr(logits.exp_()).sum(dim=-1)
            measured.append({"logprobs": logprobs, "entropy": entropy} | recomputed)
        flat = {name: torch.cat([each[name] for each in measured]) for name in measured[0]}  # (N,) each
        return {name: torch.zeros_like(batch.mask).masked_scatter(response, flat[name]) for name in flat}

    def _response(self, batch: Batch, response: Tensor) -> tuple[Tensor, Tensor, numpy.ndarray | None]:
        """Last hidden states (N, H), targets (N,) and N kept sets of the response tokens."""
        if self.kernel_hidden is not None:
            hidden = self.kernel_hidden(batch, response)
        else:
            hidden = self.shared_hidden(batch, response) if self.shares_prompts else self.hidden(batch.inputs)[response]
        return hidden, batch.targets[response], None if batch.kept is None else batch.kept[response.cpu().numpy()]

    def shared_hidden(self, batch: Batch, response: Tensor) -> Tensor:
        """`hidden(inputs)[response]`, (N, H), but each distinct prompt is computed once and its keys and values are
        repeated for the rows that start with it, gradients included.

        Prompts are padded on the left: all P of them end in the same column.
        """

        def body(ids: Tensor, real: Tensor, positions: Tensor) -> Tensor:
            """The last hidden states of `ids`, after what is in the cache; `real` is false where there is padding."""
            return self.model.base_model(input_ids=ids, attention_mask=real, position_ids=positions,
                                         past_key_values=cache, use_cache=True).last_hidden_state

        cache, lengths, last = DynamicCache(config=self.model.config), batch.prompt_lengths, batch.inputs.shape[1] - 1
        steps = partial(torch.arange, device=self.device)
        starts = lengths.to(self.device)[:, None]  # (B, 1), the columns of the responses' first tokens
        before = starts + steps(-int(lengths.max()), 0)  # (B, S), the prompts' columns, negative for padding
        after = starts + steps(int((batch.lengths - lengths).max()))  # (B, R), the responses' but their last tokens
        prompts = batch.inputs.gather(1, before.clamp(min=0)).where(before >= 0, -1)
        prompts, rows = prompts.unique(dim=0, return_inverse=True)  # (P, S), (B,)
        if len(prompts) == len(rows):
            return self.hidden(batch.inputs)[response]  # nothing to share
        real = prompts >= 0  # (P, S)
        hidden = body(prompts.clamp(min=0), real, (real.cumsum(dim=1) - 1).clamp(min=0))[:, -1:].index_select(0, rows)
        if after.shape[1]:
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys.index_select(0, rows), layer.values.index_select(0, rows)
            real = torch.cat([real[rows], real.new_ones(after.shape)], dim=1)  # (B, S + R)
            responses = batch.inputs.gather(1, after.clamp(max=last))
            hidden = torch.cat([hidden, body(responses, real, after)], dim=1)  # (B, R + 1, H)
        scored = torch.cat([starts - 1, after], dim=1)  # (B, R + 1), the columns of `hidden`
        return hidden[response.gather(1, scored.clamp(max=last)) & (scored <= last)]

    def hidden(self, inputs: Tensor) -> Tensor:
        """The body's last hidden states: (B, T) token ids, right padding -> (B, T, H)."""
        for layer in self.checkpointed:  # transformers checkpoints a layer only in training mode, without a KV cache
            layer.training = torch.is_grad_enabled()
        hidden = self.model.base_model(input_ids=inputs, use_cache=False).last_hidden_state
        for layer in self.checkpointed:
            layer.training = False
        return hidden

    def projection(self, temperature: float, head_dtype: torch.dtype | None = None) -> Projection:
        rows = max(1, self.chunk_elements // self.head.weight.shape[0])
        # The only line of the trainer that applies the temperature.
        return Projection(head_dtype or self._head_dtype, rows, self.scale, self.softcap, temperature)

    def logits(self, hidden: Tensor, head_dtype: torch.dtype | None = None) -> Tensor:
        """(N, H) -> (N, V) in fp32 at temperature 1; the head is computed in `head_dtype`, if given."""
        return self.projection(1.0, head_dtype).logits(hidden, self.head.weight, self.head_bias)[0]

    @property
    def _head_dtype(self) -> torch.dtype:
        return torch.float32 if self.fp32_head else self.head.weight.dtype

    @torch.no_grad()
    def response_logprobs(self, sequences: list[list[int]], prompt_length: int) -> list[list[float]]:
        """Log-probabilities at temperature 1 of all tokens after the prompt; sequences and prompts of one length."""
        rollouts = [Rollout(ids[:prompt_length], None, ids[prompt_length:], [0.0] * (len(ids) - prompt_length))
                    for ids in sequences]
        batch = make_batch(rollouts, torch.zeros(len(rollouts)), self.device)
        return self.logprobs(batch, temperature=1.0)[:, prompt_length - 1 :].tolist()

    # -------------------------------------------------------------------------------------------- weights
    def weights(self) -> dict[str, Tensor]:
        """Every tensor by its checkpoint name, a tied head under its own name too: views of the live weights, except
        that the gate and up projections of experts are copies, because transformers keeps both in one tensor."""
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self.model, dict(self.model.state_dict()))

    def copied_weights(self) -> dict[str, Tensor]:
        """A copy of every parameter by its name."""
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    @contextmanager
    def using(self, weights: Mapping[str, Tensor] | None) -> Iterator[None]:
        """The policy with these weights in its parameters. Tensors are swapped, not copied, and swapped back."""
        parameters = dict(self.model.named_parameters())
        own = {name: parameters[name].data for name in weights or ()}
        try:
            for name in own:
                parameters[name].data = weights[name]
            yield
        finally:
            for name, tensor in own.items():
                parameters[name].data = tensor

    @torch.no_grad()
    def _check_head(self) -> None:
        ids = torch.arange(8, device=self.device)[None] % self.head.weight.shape[0]
        theirs = self.model(input_ids=ids, use_cache=False).logits[0].float()
        ours = self.logits(self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0])
        # fp32 agrees to rounding; a 16-bit head rounds each logit to 8 or 11 bits, and soft-capping does it twice.
        allowed = theirs.abs().max() * (1e-5 if self.model.dtype == torch.float32 else 2**-6) + 1e-6
        if not (ours - theirs).abs().max() <= allowed:
            raise ValueError(
                f"{type(self.model).__name__} does more after its head than the trainer reproduces: the logits differ"
                f" by {(ours - theirs).abs().max():.1e}, more than {allowed:.1e}"
            )


def attention_for(config: Any) -> str:
    """sdpa, but eager where sdpa drops soft-capping and where the class has no sdpa (Mamba 2, without attention)."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    has_sdpa = getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None), "_supports_sdpa", True)
    return "sdpa" if has_sdpa and not getattr(config, "attn_logit_softcapping", None) else "eager"


def _check_unexpected(model: torch.nn.Module, path: str, names: list[str]) -> None:
    """Print the tensors that the model does not use.

    Raises: ValueError if one of them differs from a tensor of the model in a number only: config.json has fewer layers.
    """
    patterns = {re.sub(r"\d+", "N", name) for name in model.state_dict()}
    if more := [name for name in names if re.sub(r"\d+", "N", name) in patterns]:
        raise ValueError(f"config.json must be that of the checkpoint in {path}, which has {len(more)} more tensors of"
                         f" {type(model).__name__}: {', '.join(more[:8])}")
    if names:
        print(f"tensors of the checkpoint that {type(model).__name__} does not have: {', '.join(names)}", flush=True)


def _checkpointed_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.gradient_checkpointing_enable({"use_reentrant": False})  # raises ValueError where the model has no support
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"gradient_checkpointing must be off: {type(model).__name__} has no layers that support it")
    return layers


# ------------------------------------------------------------------------------------------------ optimizer
class Optimizer:
    """AdamW on fp32 master weights; for an fp32 model the masters are the parameters themselves.

    Each 16-bit gradient is added to its fp32 master during backward and then freed; each step rounds the masters into
    the parameters. fp16 uses dynamic loss scaling. With `offload`, masters and moments are in host memory (pinned, on a
    GPU; see `host_views`) except during an update.
    """

    def __init__(self, model: torch.nn.Module, weight_decay: float, offload: bool = False):
        trained = [p for p in model.parameters() if p.requires_grad]
        self.masters = [p if p.dtype == torch.float32 else p.detach().float().requires_grad_() for p in trained]
        self.rounded = [(p, m) for p, m in zip(trained, self.masters, strict=True) if p is not m]  # the 16-bit ones
        self.adamw = torch.optim.AdamW(self.masters, lr=0.0, weight_decay=weight_decay, fused=True)
        self.device, self.offload = trained[0].device, offload
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=any(p.dtype == torch.float16 for p in trained))
        self.host: dict[tuple[Tensor, str], Tensor] = {}  # pinned once: pinning takes longer than copying
        for master in self.masters:  # torch does this in the first step, in blocks that activations have freed
            zeros = partial(torch.zeros_like, master)
            self.adamw.state[master] = {"step": master.new_zeros(()), "exp_avg": zeros(), "exp_avg_sq": zeros()}
        for parameter, master in self.rounded:
            parameter.register_post_accumulate_grad_hook(partial(_accumulate, master))
        self.move(to_host=True)

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
        self.scaler.step(self.adamw)  # the scaler skips the step after an overflow
        self.scaler.update()
        self.adamw.zero_grad(set_to_none=True)
        for parameter, master in self.rounded:
            parameter.copy_(master)
        return norm

    def move(self, to_host: bool) -> None:
        """Move masters and moments to the host after an update, or back before one, if they are offloaded."""
        copies = {master for _, master in self.rounded}  # other masters are parameters, which the engine's load needs
        held = {(master, name): tensor for master in self.masters if self.offload for name, tensor in
                (self.adamw.state.get(master, {}) | ({"master": master.data} if master in copies else {})).items()}
        self.host |= host_views({key: tensor for key, tensor in held.items() if key not in self.host}, self.device)
        for (master, name), tensor in held.items():
            host = self.host[master, name]
            moved = host.copy_(tensor) if to_host else tensor.to(self.device, non_blocking=True, copy=True)
            if name == "master":
                master.data = moved
            else:
                self.adamw.state[master][name] = moved

    def state_dict(self) -> dict:
        return {"adamw": self.adamw.state_dict(), "masters": [master.detach() for _, master in self.rounded],
                "scaler": self.scaler.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        self.adamw.state.clear()  # there is no room for two sets of moments
        self.adamw.load_state_dict(state["adamw"])
        self.scaler.load_state_dict(state["scaler"])
        for (_, master), saved in zip(self.rounded, state["masters"], strict=True):
            master.copy_(saved)
        self.move(to_host=True)


def host_views(tensors: dict[Any, Tensor], device: torch.device) -> dict[Any, Tensor]:
    """Uninitialised host memory for fp32 tensors. torch rounds pinned memory up to powers of two, so they share slabs.

    The largest tensors come first, and later ones fill the gaps. A slab has at most 4 GiB, unless one tensor is larger.
    """
    free, views, left = [], {}, sum(map(Tensor.numel, tensors.values()))  # the free rest of each slab
    for key, tensor in sorted(tensors.items(), key=lambda item: -item[1].numel()):
        size = tensor.numel()
        slab = next((index for index, rest in enumerate(free) if len(rest) >= size), len(free))
        if slab == len(free):
            room = max(1 << (size - 1).bit_length(), min(2**30, 1 << (left.bit_length() - 1)))
            free.append(torch.empty(room, dtype=torch.float32, pin_memory=device.type == "cuda"))
        views[key], free[slab], left = free[slab][:size].view(tensor.shape), free[slab][size:], left - size
    return views


def _accumulate(master: Tensor, parameter: Tensor) -> None:
    """Called by backward with each 16-bit gradient."""
    if master.grad is None:
        master.grad = parameter.grad.float()
    else:
        master.grad += parameter.grad
    parameter.grad = None


# ------------------------------------------------------------------------------------------------ update
def frozen_logprobs(policy: Policy, batch: Batch, options: UpdateOptions, metrics: bool = True) -> dict[str, Tensor]:
    """`policy.measure` of the whole batch, in the micro-batches of `update`: tensors (B, T) by name."""
    measured: dict[str, Tensor] = {}
    for rows in chain(*batch.cut(options.num_minibatches, options.micro_batch_tokens)):
        for name, values in policy.measure(batch.rows(rows), options, metrics).items():
            measured.setdefault(name, torch.zeros_like(batch.mask))[rows, : values.shape[1]] = values
    return measured


def update(
    policy: Policy, optimizer: Optimizer, batch: Batch, options: UpdateOptions, lr: float
) -> dict[str, Any]:
    """One pass over the batch: `num_minibatches` optimizer steps, each over micro-batches whose losses simply add up.

    A minibatch without signal (all its groups are flat or masked, and there is no KL term) takes no step and counts in
    `skipped_updates`: otherwise AdamW would move the weights by momentum alone. `overflowed_updates` counts the steps
    that fp16 has lost, `updates` those that changed the weights. Diagnostics are means over all minibatches with a
    signal, None if none had one.

    Raises: FloatingPointError if a loss is not finite, or a gradient (fp16's overflows aside).
    """
    losses, norms, sums = [], [], {}
    optimizer.move(to_host=False)
    for micro_batches in batch.cut(options.num_minibatches, options.micro_batch_tokens):
        rows = torch.cat(micro_batches)
        mask = batch.mask[rows]  # (rows, T)
        if not (mask if options.kl_coef else mask * batch.advantages[rows, None]).any():
            continue
        weights = loss_weights(mask, OBJECTIVES[options.objective].normalizer, options.max_new_tokens)
        losses.append(0.0)
        for micro_rows, micro_weights in zip(micro_batches, weights.split(list(map(len, micro_batches))), strict=True):
            micro = batch.rows(micro_rows)
            logprobs = policy.logprobs(micro, options.temperature)  # (rows, T)
            loss, terms = weighted_loss(logprobs, micro, micro_weights[:, : logprobs.shape[1]], options)
            optimizer.backward(loss)
            losses[-1] += loss.item()
            sums = {name: sums.get(name, 0.0) + term for name, term in terms.items()}
        if not math.isfinite(losses[-1]):
            raise FloatingPointError(f"the loss is {losses[-1]}")
        norms.append(optimizer.step(lr, options.grad_clip))
    optimizer.move(to_host=True)
    finite, weight = [norm for norm in norms if math.isfinite(norm)], sums.pop("weight", None)
    unmeasured = dict.fromkeys(("ratio_mean", "clip_rate", "tis_clip_frac", "kl_new_old"))
    return unmeasured | {name: float(value / weight) for name, value in sums.items()} | {
        "loss": sum(losses) / len(losses) if losses else None,
        "grad_norm": sum(finite) / len(finite) if finite else None,
        "updates": len(finite), "overflowed_updates": len(norms) - len(finite),
        "skipped_updates": options.num_minibatches - len(norms),
    }
