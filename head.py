"""The head in chunks: log-probabilities of N targets without their (N, V) logits ever existing at once.

Neither forward nor backward holds more than a chunk: forward keeps one number a token, the logsumexp; backward computes
a chunk's logits again and turns them, in place, into their gradient. The price is one matrix product in four.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


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
