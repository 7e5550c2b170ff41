"""What rl.py computes, faster: on by default, left out by `--plain`.

The body computes each prompt once for all its responses, the micro-batches keep answers to one
prompt together, and the head has a backward of its own. A test holds both versions equal.
"""

from collections import defaultdict
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from extras.kv_cache import left_padded, states_after
from rl import Batch, Head, Policy, Restriction, longest_first, plain_body


def fast_parts(model: torch.nn.Module) -> dict[str, Any]:
    """Arguments of `Policy`."""
    parts = {"head": FastHead.of(model)}
    if can_share_prompts(model):
        parts |= {"body": prompts_once, "pack": siblings_together}
    return parts


# ---------------------------------------------------------------------------------- micro-batches
def siblings_together(batch: Batch, rows: Tensor, micro_batch_tokens: int) -> list[Tensor]:
    """As `longest_first`, or with answers to one prompt together if fewer positions are computed.
    """
    by_length = longest_first(batch, rows, micro_batch_tokens)
    siblings = defaultdict(list)
    for row in map(int, chain(*by_length)):
        siblings[tuple(batch.rollouts[row].prompt_ids)].append(row)
    ordered = torch.tensor([*chain(*siblings.values())], dtype=torch.long)
    by_prompt = batch.cut(ordered, micro_batch_tokens)

    def num_positions(micro_batches: list[Tensor]) -> int:
        """Positions that `prompts_once` computes: each prompt, and each response."""
        total = 0
        for micro in micro_batches:
            prompts = {tuple(each.prompt_ids) for each in batch.rollouts[micro.numpy()]}
            starts = batch.prompt_lengths[micro]
            responses = batch.input_lengths[micro] - starts
            total += len(prompts) * int(starts.max()) + len(micro) * int(responses.max())
        return total

    return min(by_length, by_prompt, key=num_positions)


# ---------------------------------------------------------------------------------- body
def prompts_once(policy: Policy, batch: Batch, response: Tensor) -> Tensor:
    """As `plain_body`, with each distinct prompt computed once for all its responses.

    Two passes with one KV cache. The first computes the D prompts, padded on the left to S columns,
    so that all end in one column. The second has B rows of R columns, the responses without their
    last tokens: a row of the cache is then [padding, prompt, response, padding]. The last state of
    a prompt predicts the first token of the response. Gradients are included.
    """
    # The prompts, with -1 at padding, and which of them each row has: (D, S), (B,).
    prompts, rows = left_padded(each.prompt_ids for each in batch.rollouts).unique(
        dim=0, return_inverse=True)
    if len(prompts) == len(rows):
        return plain_body(policy, batch, response)  # nothing to share
    from transformers import DynamicCache

    prompts, rows = prompts.to(policy.device), rows.to(policy.device)
    cache, is_prompt = DynamicCache(config=policy.model.config), prompts >= 0  # (D, S)
    of_prompts = states_after(cache, policy.model, prompts.clamp(min=0), is_prompt)  # (D, S, H)
    hidden = of_prompts[:, -1:].index_select(0, rows)  # (B, 1, H)

    starts = batch.prompt_lengths.to(policy.device)[:, None]  # (B, 1), where the responses begin
    longest = int((batch.input_lengths - batch.prompt_lengths).max())
    # (B, R + 1), the columns of `hidden` in the batch: the prompt's last one, and the response's.
    columns = starts - 1 + torch.arange(longest + 1, device=policy.device)
    # Row by row, which is the order of `[response]` in plain_body.
    wanted = pad(response, (0, longest)).gather(1, columns)
    if longest:
        cache.reorder_cache(rows)  # D rows become B
        of_responses = starts + torch.arange(longest, device=policy.device)  # (B, R), columns
        ids = pad(batch.inputs, (0, longest)).gather(1, of_responses)  # (B, R)
        # Padding after a response counts as real: only other padding attends to it.
        real = torch.cat([is_prompt[rows], torch.ones_like(ids, dtype=torch.bool)], dim=1)
        further = states_after(cache, policy.model, ids, real)  # (B, R, H)
        hidden = torch.cat([hidden, further], dim=1)  # (B, R + 1, H)
    return hidden[wanted]


def can_share_prompts(model: torch.nn.Module) -> bool:
    """Whether the model's layers allow `prompts_once`.

    A recurrent state would see the padding, and a checkpointed layer has no cache. With a window of
    1 transformers' cache keeps all keys, by the slice [-(1 - 1):].
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    layers = DynamicCache(config=model.config).layers
    if model._is_stateful or model.is_gradient_checkpointing:
        return False
    kinds = DynamicLayer, DynamicSlidingWindowLayer
    return all(type(layer) in kinds and getattr(layer, "sliding_window", None) != 1
               for layer in layers)


# ---------------------------------------------------------------------------------- head
class FastHead(Head):
    """As `Head`, on a GPU with tensor cores, and with `TargetLogprobs`."""

    def at(self, temperature: float, dtype: torch.dtype) -> Head:
        if self.weight.is_cuda:  # `product` takes the weight as it is
            return replace(self, temperature=temperature, dtype=dtype)
        return super().at(temperature, dtype)

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """On a GPU the fp32 product of a 16-bit `right` uses tensor cores, as vLLM's head does.

        They multiply 16-bit numbers exactly and add in fp32. `left` is rounded to 16 bits: nothing
        changes for hidden states, and gradients of logits are rounded as in any 16-bit model.
        """
        if right.is_cuda and self.dtype == torch.float32 and right.dtype != torch.float32:
            return torch.mm(left.to(right.dtype), right, out_dtype=self.dtype)
        return super().product(left, right)

    def add_product(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """total += left @ right, in place; `total` is fp32, the product as in `product`."""
        if right.dtype == torch.float32:  # of an fp32 model
            total.addmm_(left, right)
        elif right.is_cuda and self.dtype == torch.float32:
            torch.addmm(total, left.to(right.dtype), right, out_dtype=self.dtype, out=total)
        else:
            total += self.product(left, right)  # a temporary of total's size

    def logprobs(self, hidden: Tensor, targets: Tensor, restrict: Restriction) -> Tensor:
        return TargetLogprobs.apply(hidden, self.weight, self.bias, targets, restrict, self)


class TargetLogprobs(torch.autograd.Function):
    """`Head.logprobs`: d logprob / d logits = onehot(target) - softmax.

    Gradients of the weight add up in fp32.

    Shapes: hidden (N, H), weight (V, H), bias (V,) or None, targets (N,) -> (N,). Units: nats.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor,
                restrict: Restriction, head: FastHead) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.head, ctx.restrict = head, restrict
        return Head.logprobs(head, hidden, targets, restrict)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        head = ctx.head
        wide = torch.promote_types(head.dtype, torch.float32)
        hidden_grads, weight_grad, bias_grad = [], None, None
        if ctx.needs_input_grad[1]:  # not with adapters
            weight_grad = torch.zeros_like(weight, dtype=wide)
        if bias is not None:
            bias_grad = torch.zeros_like(bias, dtype=wide)
        for chunk in head.chunks(len(hidden)):
            affine = head.affine(hidden[chunk])  # (n, V)
            # gradient * (onehot(target) - softmax)
            logits_grad = ctx.restrict(head.scaled(affine), chunk).softmax(dim=-1)
            logits_grad.mul_(-gradient[chunk, None])
            logits_grad.scatter_add_(1, targets[chunk, None], gradient[chunk, None])
            slope = head.scale / head.temperature  # d logits / d affine
            if head.softcap is not None:
                slope = slope * (1 - torch.tanh(affine / head.softcap).square())
            product_grad = logits_grad.mul_(slope).to(head.dtype)
            hidden_grads.append(head.product(product_grad, weight).to(hidden.dtype))
            if weight_grad is not None:
                head.add_product(weight_grad, product_grad.T, hidden[chunk])
            if bias_grad is not None:
                bias_grad += product_grad.sum(dim=0)
        # Autograd rounds the fp32 gradients to the parameters' dtype.
        return torch.cat(hidden_grads), weight_grad, bias_grad, None, None, None
