"""Whether the trainer's head gives the logits of transformers' own, which no code of ours computes.
"""

import torch
from torch import Tensor

from rl import Policy


@torch.no_grad()
def checked_logits(policy: Policy, inputs: Tensor) -> Tensor:
    """transformers' logits of token ids: (B, T) -> (B, T, V), compared with the trainer's.

    Raises: ValueError if they disagree: the architecture does more after the head than soft-capping
    and scaling.
    """
    theirs = policy.model(input_ids=inputs, use_cache=False).logits
    head, states = policy.head, policy.hidden(inputs).flatten(0, 1)  # (B T, H)
    ours = head.scaled(head.affine(states))  # (B T, V)
    # fp32 agrees to rounding; a 16-bit head rounds each logit to 8 or 11 bits, and soft-capping
    # does it twice.
    allowed = theirs.abs().max() * (1e-5 if policy.model.dtype == torch.float32 else 2**-6) + 1e-6
    difference = (ours - theirs.flatten(0, 1).float()).abs().max()
    if not difference <= allowed:
        raise ValueError(f"{type(policy.model).__name__} does more after its head than the trainer"
                         f" reproduces: the logits differ by {difference:.1e}, more than"
                         f" {allowed:.1e}")
    return theirs


def check_head(policy: Policy) -> None:
    """For a policy without an engine, and for a failed canary: a wrong head is not vLLM's fault.

    Raises: ValueError, as `checked_logits`.
    """
    ids = torch.arange(8, device=policy.device)[None] % len(policy.head.weight)
    checked_logits(policy, ids)
