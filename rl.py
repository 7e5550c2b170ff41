"""The trainer's half: the batch, the policy with its fp32 head, the optimizer.

Words and shapes as in objectives.py, which is read first; V is the vocabulary, H the hidden width,
N a number of response tokens. Plumbing, which a reader of the method can leave out: HeadGradient,
and in Optimizer what keeps fp32 masters of 16-bit parameters.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

import model_folder
from engine_adapter import Rollout

Minibatches = list[list[Tensor]]  # by optimizer step and micro-batch: rows


# ---------------------------------------------------------------------------------- batch
@dataclass(frozen=True)
class Batch:
    """Rollouts as tensors, shifted once and padded once.

    Row b predicts `targets[b, t]` from `inputs[b, : t + 1]`.

    Shapes: per-token values (B, T); input_lengths (B,), a row's inputs, its prompt included;
    prompt_lengths (B,). Lengths are on the CPU. What make_batch does not know is None at first.
    """

    inputs: Tensor
    targets: Tensor
    mask: Tensor
    behavior_logprobs: Tensor
    input_lengths: Tensor
    prompt_lengths: Tensor
    rollouts: list[Rollout] = field(default_factory=list)  # for what is not a tensor
    extra: Tensor | None = None  # `Rollout.extra`, 0 outside the mask
    old_logprobs: Tensor | None = None
    entropy: Tensor | None = None  # before the update, nats
    ref_logprobs: Tensor | None = None
    advantages: Tensor | None = None  # (B, 1), or (B, T) for one per token
    # The next four are set by train.with_loss_terms.
    denominator: Tensor | None = None  # log-probabilities of the ratio's denominator
    correction: Tensor | None = None  # importance weight of each token
    learns: Tensor | None = None  # bool: the tokens that have a policy gradient
    token_weights: Tensor | None = None  # `loss_weights` of the minibatch

    def select(self, rows: Tensor) -> "Batch":
        """Some rows, cut to the longest of them. Right padding does not change causal attention."""
        longest = int(self.input_lengths[rows].max())

        def pick(values: Any) -> Any:
            if isinstance(values, Tensor):
                return values[rows] if values.ndim == 1 else values[rows, :longest]
            return values and [values[row] for row in rows.tolist()]

        return Batch(**{name: pick(values) for name, values in vars(self).items()})

    def minibatches(
        self, has_signal: Tensor, num_minibatches: int, micro_batch_tokens: int, pack: "Pack",
    ) -> Minibatches:
        """The rows of each micro-batch of each optimizer step (minibatch).

        `pack` cuts rows into micro-batches. All passes over a batch use the same ones, so that the
        ratio starts at exactly 1 (in 16 bits, if no row is masked in between). `has_signal` is
        (B,), bool.
        """
        minibatches = []
        for rows in torch.arange(len(self.inputs)).split(len(self.inputs) // num_minibatches):
            # Kept apart, because `update` skips the backward of rows without a signal.
            with_signal, without = rows[has_signal[rows]], rows[~has_signal[rows]]
            minibatches.append(pack(self, with_signal, micro_batch_tokens)
                               + pack(self, without, micro_batch_tokens))
        return minibatches

    def cut(self, rows: Tensor, micro_batch_tokens: int) -> list[Tensor]:
        """Micro-batches of neighbours in `rows`, each of as many rows as fit.

        At most `micro_batch_tokens` positions, padding included, or one row that is longer.
        """
        micro_batches = []
        longest = 0
        for row, length in zip(rows.tolist(), self.input_lengths[rows].tolist(), strict=True):
            longest = max(longest, length)
            if not micro_batches or longest * (len(micro_batches[-1]) + 1) > micro_batch_tokens:
                micro_batches.append([])
                longest = length
            micro_batches[-1].append(row)
        return [torch.tensor(micro_batch) for micro_batch in micro_batches]

    def mask_rows(self, keep: list[bool]) -> "Batch":
        """The batch with a loss on the rows to `keep` only.

        The others still count in the B of `loss_weights`, and keep their log-probabilities.
        """
        rows = torch.tensor(keep, device=self.mask.device)[:, None]  # (B, 1)
        return replace(self, mask=self.mask * rows)


def make_batch(rollouts: list[Rollout], device: torch.device | str = "cpu") -> Batch:
    """Shift once, pad once: position t of every (B, T) tensor is the prediction of token t + 1.

    The prompt [5, 6] with the response [7, 2] is a row with the inputs [5, 6, 7], the targets
    [6, 7, 2] and the mask [0, 1, 1].

    Shapes: B rollouts -> Batch with T = longest (prompt + response) - 1.
    """
    sequences = [rollout.prompt_ids + rollout.token_ids for rollout in rollouts]
    prompt_lengths = torch.tensor([len(rollout.prompt_ids) for rollout in rollouts])
    ends = torch.tensor([*map(len, sequences)])
    columns = torch.arange(int(ends.max()))
    real = columns < ends[:, None]  # (B, T + 1), the prompt and the response
    response = real & (columns >= prompt_lengths[:, None])  # (B, T + 1)

    def place(values: Iterable[list], where: Tensor, dtype: torch.dtype) -> Tensor:
        flat = torch.tensor([*chain(*values)], dtype=dtype)
        return torch.zeros(where.shape, dtype=dtype).masked_scatter(where, flat).to(device)

    # Padding has id 0, but any would do: no token attends to positions on its right.
    ids = place(sequences, real, torch.long)
    logprobs = place((rollout.logprobs for rollout in rollouts), response, torch.float32)
    trained = (rollout.trained or [True] * len(rollout.token_ids) for rollout in rollouts)
    mask = place(trained, response, torch.float32)[:, 1:]
    extra = None
    if rollouts[0].extra:
        values = (rollout.extra for rollout in rollouts)
        extra = place(values, response, torch.float32)[:, 1:] * mask
    return Batch(
        inputs=ids[:, :-1],
        targets=ids[:, 1:],
        mask=mask,
        behavior_logprobs=logprobs[:, 1:] * mask,
        input_lengths=ends - 1,
        prompt_lengths=prompt_lengths,
        rollouts=rollouts,
        extra=extra,
    )


def longest_first(batch: Batch, rows: Tensor, micro_batch_tokens: int) -> list[Tensor]:
    """The rows in micro-batches: rows of like length need little padding.

    The longest come first, because then a batch that does not fit into memory fails at once.
    """
    order = batch.input_lengths[rows].argsort(descending=True, stable=True)
    return batch.cut(rows[order], micro_batch_tokens)


# ---------------------------------------------------------------------------------- head
Restriction = Callable[[Tensor, slice], Tensor]  # (n, V) logits, which n of the N tokens -> (n, V)


def head_chunk(gpu_gib: float) -> int:
    """Logits that the head computes at once, n * V: 2^25 on a CPU (0 GiB), up to 2^28 on a GPU.

    Each chunk also moves the weight's gradient, (V, H), so a GPU has few and large ones.
    """
    fitting = int(gpu_gib * 2**30 / 64 / 4)  # fp32 numbers in 1/64 of the memory
    # A power of two, so that cards of nearly the same memory round alike.
    return 2 ** min(28, max(25, fitting.bit_length() - 1))


def no_restriction(logits: Tensor, chunk: slice) -> Tensor:
    """The softmax is over the whole vocabulary."""
    return logits


class Chunk(NamedTuple):
    """What a token metric is computed from."""

    logits: Tensor  # (n, V), at the temperature
    restricted: Tensor  # (n, V), `logits` with -inf outside kept sets, or `logits` itself
    logprobs: Tensor  # (n, V), log softmax(restricted), at least -1e4
    targets: Tensor  # (n,)


TokenMetric = Callable[[Chunk], dict[str, Tensor]]  # -> (n,) by name


@dataclass(frozen=True)
class Head:
    """The final projection: logits = scale * cap(hidden W^T + bias).

    cap(z) = softcap * tanh(z / softcap), if the model has a soft cap. hidden W^T + bias is computed
    in `dtype`, the rest in fp32 and in the order of vLLM's sampler.

    Shapes: hidden (N, H), weight (V, H), bias (V,).
    """

    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None
    chunk_elements: int  # logits that are computed at once
    temperature: float = 1.0
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, model: torch.nn.Module, **options: Any) -> "Head":
        layer, config = model.get_output_embeddings(), model.config.get_text_config()
        gpu_gib = 0.0
        if layer.weight.is_cuda:
            gpu_gib = torch.cuda.mem_get_info(layer.weight.device)[1] / 2**30
        bias, shape = getattr(layer, "bias", None), model_folder.shape_of_logits(config)
        return cls(layer.weight, bias, *shape, head_chunk(gpu_gib), **options)

    def chunks(self, count: int) -> list[slice]:
        """The chunks of `count` rows; one that is empty if there are none."""
        rows = max(1, self.chunk_elements // len(self.weight))
        return [slice(start, start + rows) for start in range(0, max(1, count), rows)]

    def product(self, left: Tensor, right: Tensor, total: Tensor | None = None) -> Tensor:
        """left @ right in `dtype`; if `total` (fp32) is given, added to it in place.

        A GPU's tensor cores multiply 16-bit numbers exactly and add in fp32, as vLLM's head.
        """
        on_tensor_cores = left.is_cuda and left.dtype == right.dtype != self.dtype
        if total is None:
            if on_tensor_cores:
                return torch.mm(left, right, out_dtype=self.dtype)
            return left.to(self.dtype) @ right.to(self.dtype)
        if on_tensor_cores:
            return torch.addmm(total, left, right, out_dtype=self.dtype, out=total)
        if right.dtype == total.dtype:
            return total.addmm_(left, right)
        return total.add_(self.product(left, right))

    def affine(self, hidden: Tensor) -> Tensor:
        """hidden W^T + bias, computed in `dtype`, as fp32: (N, H) -> (N, V)."""
        logits = self.product(hidden, self.weight.T)
        if self.bias is not None:
            logits = logits + self.bias.to(self.dtype)
        return logits.to(torch.promote_types(self.dtype, torch.float32))  # float64 stays

    def scaled(self, logits: Tensor) -> Tensor:
        """The model's logits from `affine`, before the temperature: (N, V) -> (N, V)."""
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits if self.scale == 1.0 else logits * self.scale

    def tempered(self, scaled: Tensor | float) -> Tensor | float:
        """The only line that takes a temperature: the gradient's factor is tempered(scale)."""
        return scaled if self.temperature == 1.0 else scaled / self.temperature

    @torch.no_grad()
    def token_metrics(
        self, hidden: Tensor, targets: Tensor, restrict: Restriction,
        metrics: Sequence[TokenMetric],
    ) -> dict[str, Tensor]:
        """`logprobs` without a gradient, and `metrics` of the same logits, chunk by chunk.

        Shapes: (N, H), (N,) -> (N,) by name.
        """
        def of_chunk(rows: slice) -> dict[str, Tensor]:
            logits = self.tempered(self.scaled(self.affine(hidden[rows])))  # (n, V)
            restricted = restrict(logits, rows)
            chunk = Chunk(logits, restricted, restricted.log_softmax(dim=-1), targets[rows])
            values = {"logprobs": at_targets(chunk.logprobs, chunk.targets)}
            if metrics and restricted is not logits:
                chunk.logprobs.clamp_(min=-1e4)  # p log p of what is cut off: 0 * -inf would be nan
            for metric in metrics:
                values |= metric(chunk)
            return values

        chunks = [of_chunk(rows) for rows in self.chunks(len(hidden))]
        return {name: torch.cat([values[name] for values in chunks]) for name in chunks[0]}

    def logprobs(self, hidden: Tensor, targets: Tensor, restrict: Restriction) -> Tensor:
        """log softmax(restrict(logits / temperature))[target], with gradient.

        Shapes: (N, H), (N,) -> (N,). Units: nats.
        """
        return HeadGradient.apply(hidden, self.weight, self.bias, targets, restrict, self)


class HeadGradient(torch.autograd.Function):
    """Plumbing: the log-probabilities of `token_metrics`, d logprob / d logits = onehot - softmax.

    Autograd would store all logits, and torch's checkpoints take up to 1.35 times as long. Backward
    computes the logits again, chunk by chunk; gradients of the weight add up in fp32.

    Shapes: hidden (N, H), weight (V, H), bias (V,) or None, targets (N,) -> (N,).
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor,
                restrict: Restriction, head: Head) -> Tensor:
        ctx.save_for_backward(hidden, targets)
        ctx.restrict, ctx.head = restrict, head
        return head.token_metrics(hidden, targets, restrict, ())["logprobs"]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, targets = ctx.saved_tensors
        head, gradient = ctx.head, gradient[:, None]
        hidden_grads, weight_grad = [], None
        if ctx.needs_input_grad[1]:  # not with adapters
            wide = torch.promote_types(head.dtype, torch.float32)
            weight_grad = torch.zeros_like(head.weight, dtype=wide)
        bias_grad = None if head.bias is None else 0.0
        for rows in head.chunks(len(hidden)):
            affine = head.affine(hidden[rows])  # (n, V)
            restricted = ctx.restrict(head.tempered(head.scaled(affine)), rows)
            # gradient * (onehot(target) - softmax)
            logits_grad = restricted.softmax(dim=-1).mul_(-gradient[rows])
            logits_grad.scatter_add_(1, targets[rows, None], gradient[rows])
            slope = head.tempered(head.scale)  # d logits / d affine
            if head.softcap is not None:
                logits_grad *= slope * (1 - torch.tanh(affine / head.softcap).square())
            elif slope != 1.0:
                logits_grad *= slope
            if bias_grad is not None:
                bias_grad += logits_grad.sum(dim=0)
            if hidden.is_cuda:  # for tensor cores; any 16-bit model rounds gradients of logits
                logits_grad = logits_grad.to(hidden.dtype)
            hidden_grads.append(head.product(logits_grad, head.weight).to(hidden.dtype))
            if weight_grad is not None:
                head.product(logits_grad.T, hidden[rows], weight_grad)
        # Autograd rounds the fp32 gradients to the parameters' dtype.
        return torch.cat(hidden_grads), weight_grad, bias_grad, None, None, None


def at_targets(values: Tensor, targets: Tensor) -> Tensor:
    """Each row's value at its target: (n, V), (n,) -> (n,)."""
    return values.gather(-1, targets[:, None])[:, 0]


# ---------------------------------------------------------------------------------- token metrics
def entropies(chunk: Chunk) -> dict[str, Tensor]:
    """`entropy`, -sum p log p (nats), and `varentropy`, the variance of -log p (nats^2)."""
    weighted = chunk.logprobs.exp().mul_(chunk.logprobs)
    entropy = -weighted.sum(dim=-1)
    second_moment = torch.linalg.vecdot(weighted, chunk.logprobs)
    return {"entropy": entropy, "varentropy": second_moment - entropy.square()}


# ---------------------------------------------------------------------------------- policy
# policy, batch, response (B, T) bool -> hidden states of the N response tokens (N, H)
Body = Callable[["Policy", Batch, Tensor], Tensor]
Pack = Callable[[Batch, Tensor, int], list[Tensor]]  # batch, rows, tokens -> micro-batches


def row_by_row(policy: "Policy", batch: Batch, response: Tensor) -> Tensor:
    """Hidden states of the response tokens, each row computed whole: (B, T) bool -> (N, H)."""
    return policy.hidden(batch.inputs)[response]


def placed(values: Tensor, batch: Batch) -> Tensor:
    """Values of the response tokens (N,) at their places (B, T), 0 elsewhere."""
    return torch.zeros_like(batch.mask).masked_scatter(batch.mask > 0, values)


def whole_vocabulary(batch: Batch, response: Tensor) -> Restriction:
    """The usual `restrict` of a policy."""
    return no_restriction


class EngineWeights:
    """What the engine gets of a policy's weights: all tensors as they are."""

    name = "weights as they are"  # for the audit

    def __call__(self, weights: dict[str, Tensor]) -> Mapping[str, Tensor]:
        """Tensors by checkpoint name."""
        return weights

    def engine_parameters(self) -> dict[str, Tensor]:
        """Parameters whose values differ in the engine, by name."""
        return {}


class Policy:
    """A Hugging Face causal language model whose final projection (the head) is computed here.

    transformers computes the body. The head is computed in `head_dtype`, on response positions only
    and in chunks: no step has a (B, T, V) tensor.

    What options replace:
        restrict          of a batch and its response tokens: a function of their logits
        metrics           of tokens, before the update
        body              computes hidden states
        pack              cuts rows of a batch into micro-batches
        send              what the engine gets of the weights
        has_reference     whether a copy of the weights is kept as they are now

    verify/head.py tells whether the head here gives the logits of the model's own forward pass.
    """

    def __init__(
        self, model: torch.nn.Module, *, temperature: float = 1.0,
        head_dtype: torch.dtype = torch.float32,
        restrict: Callable[[Batch, Tensor], Restriction] = whole_vocabulary,
        metrics: tuple[TokenMetric, ...] = (entropies,), body: Body = row_by_row,
        pack: Pack = longest_first, send: EngineWeights | None = None, has_reference: bool = False,
    ):
        if model.base_model is model:
            raise ValueError(f"{type(model).__name__} must have a body apart from its head (a"
                             " base_model): the head is computed here")
        self.model = model.eval()  # no dropout
        self.head = Head.of(model, temperature=temperature, dtype=head_dtype)
        self.device = self.head.weight.device
        self.restrict = restrict
        self.metrics = metrics
        self.body = body
        self.pack = pack
        self.send = send or EngineWeights()
        # The first policy's weights, in a resumed run too: a checkpoint comes later.
        self.reference = self.copied_weights() if has_reference else None
        # vLLM's Transformers backend (OLMo 2, SmolLM3) patches the Python class of the body for
        # compilation, which is the trainer's too. This attribute switches the patch off.
        model.base_model.do_not_compile = True

    def with_(self, **attributes: Any) -> "Policy":
        """A policy of the same model with other attributes."""
        assert attributes.keys() <= vars(self).keys(), f"{attributes.keys()=}"
        policy = copy(self)
        vars(policy).update(attributes)
        return policy

    # ------------------------------------------------------------------- log-probabilities
    def logprobs(self, batch: Batch) -> Tensor:
        """Log-probabilities of the targets (B, T), 0 outside `batch.mask`.

        The update calls it with gradient. Before the update `token_metrics` computes the
        denominator of the ratio by the same code.
        """
        return placed(self.head.logprobs(*self._inputs_of_head(batch)), batch)

    @torch.no_grad()
    def token_metrics(
        self, batch: Batch, metrics: Sequence[TokenMetric] | None = None
    ) -> dict[str, Tensor]:
        """`logprobs` and these metrics of each token: (B, T) by name, 0 outside `batch.mask`.

        If none are asked for: all that a step needs before its update, also `ref_logprobs` if there
        is a reference.
        """
        usual = metrics is None
        found = self.head.token_metrics(
            *self._inputs_of_head(batch), self.metrics if usual else metrics)
        found = {name: placed(values, batch) for name, values in found.items()}
        if usual and self.reference is not None:
            with self.using(self.reference):
                found["ref_logprobs"] = self.logprobs(batch)
        return found

    def hidden(self, inputs: Tensor) -> Tensor:
        """The body's last hidden states: (B, T) token ids, right padding -> (B, T, H)."""
        return self.model.base_model(input_ids=inputs, use_cache=False).last_hidden_state

    def _inputs_of_head(self, batch: Batch) -> tuple[Tensor, Tensor, Restriction]:
        """Hidden states (N, H), targets (N,), and what restricts the softmax."""
        response = batch.mask > 0  # (B, T), N of them true
        hidden = self.body(self, batch, response)
        return hidden, batch.targets[response], self.restrict(batch, response)

    # ------------------------------------------------------------------------------ weights
    def weights(self) -> Mapping[str, Tensor]:
        """What the engine gets: every tensor by its checkpoint name. A tied head has two names.

        They are views of the live weights, except for two kinds of copies: the gate and up
        projections of experts, which are one tensor in transformers, and what `send` changes.
        """
        from transformers.core_model_loading import revert_weight_conversion

        return self.send(revert_weight_conversion(self.model, dict(self.model.state_dict())))

    def copied_weights(self) -> dict[str, Tensor]:
        """A copy of every trained parameter by its name."""
        return {name: parameter.detach().clone()
                for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    @contextmanager
    def using(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """The policy with these weights in its parameters. Tensors are swapped, and then back."""
        parameters = dict(self.model.named_parameters())
        own = {name: parameters[name].data for name in weights}
        try:
            for name in own:
                parameters[name].data = weights[name]
            yield
        finally:
            for name, tensor in own.items():
                parameters[name].data = tensor


# ---------------------------------------------------------------------------------- optimizer
class Optimizer:
    """AdamW on fp32 master weights; for an fp32 model the masters are the parameters themselves.

    Each 16-bit gradient is added to its fp32 master during backward and then freed; each step
    rounds the masters into the parameters. fp16 uses dynamic loss scaling.
    """

    def __init__(self, model: torch.nn.Module, grad_clip: float = 1.0,
                 device: torch.device | None = None):
        """`device`: of masters and moments; if not given, the model's."""
        self.grad_clip = grad_clip  # largest norm of a step's gradient
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.masters = [_master(parameter, device) for parameter in trained]
        pairs = zip(trained, self.masters, strict=True)
        # (16-bit parameter, its master)
        self.rounded = [pair for pair in pairs if pair[0] is not pair[1]]
        self.adamw = torch.optim.AdamW(self.masters, lr=0.0, weight_decay=0.0, fused=True)
        for master in self.masters:
            # torch would make them in the first step, in memory between freed activations.
            moments = {name: torch.zeros_like(master, device=device)
                       for name in ("exp_avg", "exp_avg_sq")}
            step = torch.zeros((), device=device or master.device)
            self.adamw.state[master] = {"step": step} | moments
        first = next(model.parameters())  # the model's own one: adapters are in fp32
        self.scaler = torch.amp.GradScaler(first.device.type, enabled=first.dtype == torch.float16)
        for parameter, master in self.rounded:  # a gradient goes to its master once it is computed
            parameter.register_post_accumulate_grad_hook(partial(_accumulate, master))

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Masters and moments on the model's device: here always."""
        yield

    def backward(self, loss: Tensor) -> None:
        """Add the micro-batch's gradients to those of the masters."""
        self.scaler.scale(loss).backward()

    @torch.no_grad()
    def step(self, lr: float) -> float:
        """Clip, step, round into the model; returns the gradient's norm before clipping.

        In fp16 a norm that is not finite is an overflow: no step is taken and the scale is halved.

        Raises: FloatingPointError if the norm is not finite otherwise; the weights are untouched.
        """
        self.scaler.unscale_(self.adamw)
        norm = torch.nn.utils.clip_grad_norm_(self.masters, self.grad_clip).item()
        # At scale 1 or less the scaling is not the cause.
        can_overflow = self.scaler.is_enabled() and self.scaler.get_scale() > 1
        if not math.isfinite(norm) and not can_overflow:
            raise FloatingPointError(f"the gradient's norm is {norm}, the learning rate {lr:.2g}")
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.scaler.step(self.adamw)  # the scaler skips the step after an overflow
        self.scaler.update()
        self.adamw.zero_grad(set_to_none=True)
        for parameter, master in self.rounded:
            parameter.copy_(master)
        return norm

    def state_dict(self) -> dict[str, Any]:
        masters = [master.detach() for _, master in self.rounded]
        return {"adamw": self.adamw.state_dict(), "masters": masters,
                "scaler": self.scaler.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adamw.state.clear()  # there is no room for two sets of moments
        self.adamw.load_state_dict(state["adamw"])
        self.scaler.load_state_dict(state["scaler"])
        for (_, master), saved in zip(self.rounded, state["masters"], strict=True):
            master.copy_(saved)


def _master(parameter: Tensor, device: torch.device | None) -> Tensor:
    """The fp32 tensor that AdamW updates: the parameter itself, or an fp32 copy of it."""
    if parameter.dtype == torch.float32:
        return parameter
    return parameter.detach().to(device or parameter.device, torch.float32).requires_grad_()


def _accumulate(master: Tensor, parameter: Tensor) -> None:
    """Called by backward with each 16-bit gradient."""
    if master.grad is None:
        master.grad = parameter.grad.float()
    else:
        master.grad += parameter.grad
    parameter.grad = None


# ---------------------------------------------------------------------------------- micro-batches
@torch.no_grad()
def in_micro_batches(
    values_of: Callable[[Batch], dict[str, Tensor]], batch: Batch, minibatches: Minibatches
) -> dict[str, Tensor]:
    """A function of each micro-batch, such as `policy.token_metrics`, for the batch: (B, T)."""
    collected = {}
    for rows in chain(*minibatches):
        for name, values in values_of(batch.select(rows)).items():
            whole = collected.setdefault(name, torch.zeros_like(batch.mask))
            whole[rows, : values.shape[1]] = values
    return collected
