"""Before the first step: both sides against the stated distribution, computed separately.

The canary samples at temperature 1 and from the whole vocabulary, and if both sides forget the
temperature the mismatch is 0 and shows nothing.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from engine_adapter import Engine, Sampling
from rl import Policy, make_batch
from tasks import Problem
from verify.canary import NATS, UNMEASURED, attempted
from verify.head import checked_logits
from verify.parity import SIXTEEN, drawn_from, sampling_of, twice_as_precise
from verify.settings import AuditError
from vllm_cases import CANARY_NEW_TOKENS, CANARY_PROMPTS


@torch.no_grad()
def check(
    policy: Policy, engine: Engine, problems: list[Problem], sampling: Sampling,
    not_stated: Collection[str],
) -> None:
    """Sample a few responses to the first problems, and compare trainer and engine with the softmax
    that `sampling` states.

    transformers' own head gives the logits. A side that a switched-off fix changes is left out, and
    those of `not_stated`.

    Raises: AuditError that names the side whose distribution is not the stated one; ValueError if
    the trainer's head is not transformers'.
    """
    length = min(32, engine.settings["block_size"]) - 1  # they fill no block of V1's prefix cache
    prompts = [problem.prompt_ids[:length] for problem in problems[:CANARY_PROMPTS]]
    rollouts = engine.sample_beside(prompts, CANARY_NEW_TOKENS, sampling)
    batch = make_batch(rollouts, policy.device)
    response = batch.mask > 0  # (B, T)
    targets = batch.targets[response]  # (N,)

    def logprobs(logits: Tensor) -> Tensor:  # (B, T, V) -> (N,); no run has penalties
        drawn = drawn_from(logits[response].float(), targets[:0], targets,
                           **sampling_of(sampling))
        return drawn.gather(-1, targets[:, None])[:, 0]

    def in_float32() -> Tensor:
        with twice_as_precise(policy.model):
            return logprobs(policy.model(input_ids=batch.inputs, use_cache=False).logits)

    with policy.using(policy.send.engine_parameters()):
        scored = policy.logprobs(batch)  # (B, T)
        rounded = logprobs(checked_logits(policy, batch.inputs))
        precise = attempted(in_float32) if policy.model.dtype in SIXTEEN else rounded
    if precise is None:
        precise, limit = rounded, UNMEASURED
    else:
        # Medians, because in 16 bits single tokens can differ more. A right side's, of 12 tokens,
        # is up to 8 times the noise (in 2,000 trials).
        limit = max(NATS, 8 * (rounded - precise).abs().median().item())
    parity = engine.parity
    for side, of_side, is_fixed in (
            ("trainer", scored, parity.sampling_mask and "trainer" not in not_stated),
            ("engine", batch.behavior_logprobs, parity.processed_logprobs)):
        if not is_fixed:
            continue
        difference = (of_side[response] - precise).abs().median().item()
        if not difference <= limit:
            raise AuditError(f"the {side}'s log-probabilities are not those of the stated"
                             f" distribution ({sampling}): they differ by {difference:.2e} nats,"
                             f" more than {limit:.1e}")
        print(f"the {side} differs from the stated distribution by {difference:.1e} nats (limit"
              f" {limit:.1e})")
