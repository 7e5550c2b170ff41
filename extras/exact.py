"""What `--exact` promises, and what broke the promise. Each `engine` is a SharedEngine."""

import torch
from torch import Tensor

from engine_adapter import Engine
from objectives import Batch
from rl import make_batch
from sampling import Rollout, Sampling

TOGETHER, COMPARED = 64, 8  # rows of a product; tokens that are also computed alone


class ExactError(RuntimeError):
    """A log-probability of the trainer is not the sampler's, bit for bit."""


def verify(engine: Engine, batch: Batch) -> dict[str, int]:
    """The number of tokens whose `old_logprobs` equal the sampler's values.

    Raises: ExactError with the first token that differs, and the cause.
    """
    # NaN differs from itself.
    differing = (batch.old_logprobs != batch.behavior_logprobs) & (batch.mask > 0)
    compared = int(batch.mask.sum())
    if not differing.any():
        return {"exact_tokens": compared}
    row, column = differing.nonzero()[0].tolist()
    prompt = int(batch.prompt_lengths[row])
    theirs, ours = batch.behavior_logprobs[row, column], batch.old_logprobs[row, column]
    raise ExactError(
        f"exact: token {column + 1 - prompt} of request {row} (after a prompt of {prompt} tokens)"
        f" has log-probability {theirs:.9g} in the engine and {ours:.9g} in the trainer;"
        f" {int(differing.sum())} of {compared} tokens differ,"
        f" inputs {tuple(batch.inputs.shape)}, {engine.policy.model.dtype}."
        f" Cause: {cause(engine, batch.inputs[row, :prompt].tolist())}")


def cause(engine: Engine, prompt_ids: list[int]) -> str:
    """Why a request with this prompt is not exact: the first test that fails tells."""
    if engine.policy.body != engine.kernel_body:
        attention = engine.policy.model.config._attn_implementation
        return f"the trainer scored with {attention}, not with vLLM's kernel"
    if reason := why_not(engine):
        return reason
    if not _agrees(engine, engine.sample_canary()):
        return "the engine's kernel, products or sampler compute other values than the trainer's"
    once = Sampling(temperature=1.0, max_new_tokens=1)
    if not _agrees(engine, engine._submit([Rollout(prompt_ids, 0, sampling=once)])):
        return ("a prompt in the prefix cache is stale, or so long that the kernel computes its end"
                " differently alone")
    return ("the weights were changed after this token was sampled, or vLLM preempted the request;"
            " new samples are exact")


def _agrees(engine: Engine, rollouts: list[Rollout]) -> bool:
    """Finish what is sampled now, and score it now: are the values equal?"""
    while any(rollout.finish_reason is None for rollout in rollouts):
        engine.step()
    batch = make_batch(rollouts, torch.zeros(len(rollouts)))
    with torch.no_grad():
        return torch.equal(engine.policy.logprobs(batch, 1.0), batch.behavior_logprobs)


@torch.no_grad()
def why_not(engine: Engine) -> str | None:
    """Why a value depends on what is computed beside it; None if it does not.

    Single tokens are computed alone and beside others; with several threads the longest prompt too.
    """
    if engine.on_gpu:
        return "the kernels of a GPU have not been measured"
    policy, longest = engine.policy, engine.llm.vllm_config.model_config.max_model_len
    kind = f"({policy.model.config.model_type}, {engine.dtype}, {torch.get_num_threads()} threads)"
    ids = [token * 7 % len(policy.head.weight) for token in range(max(longest, TOGETHER + 1))]
    pairs = [ids[row : row + 2] for row in range(TOGETHER)]
    together = _hidden(engine, pairs, [1] * TOGETHER)  # (TOGETHER, H)
    alone = torch.cat([_hidden(engine, [pair], [1]) for pair in pairs[:COMPARED]])  # (COMPARED, H)
    logits = torch.cat([policy.logits(each[None]) for each in alone])
    same_logits = torch.equal(logits, policy.logits(together)[:COMPARED])
    if not (torch.equal(alone, together[:COMPARED]) and same_logits):
        return (f"a product of few rows is rounded differently {kind}; experts in float32 have such"
                " products")
    # Several threads divide the queries of a long prompt according to what is beside it.
    if torch.get_num_threads() > 1:
        prompts = [ids[: max(1, longest - COMPARED - row * longest // 5)] for row in range(4)]
        rows, lengths = [prompt + ids[:COMPARED] for prompt in prompts], list(map(len, prompts))
        alone = _hidden(engine, rows[:1], lengths[:1])  # (COMPARED, H)
        besides = [_hidden(engine, rows[row::-1], lengths[row::-1])[-COMPARED:]
                   for row in (1, 2, 3)]
        if not all(torch.equal(each, alone) for each in besides):
            return (f"vLLM's kernel computes a prompt of {lengths[0]} tokens differently alone and"
                    f" beside others {kind}; try OMP_NUM_THREADS=1, or a smaller"
                    " --max-prompt-tokens")
    return None


def _hidden(engine: Engine, sequences: list[list[int]], prompt_lengths: list[int]) -> Tensor:
    """Last hidden states from which the tokens after the prompts are predicted: (N, H)."""
    rollouts = [Rollout(ids[:length], None, ids[length:], [0.0] * (len(ids) - length))
                for ids, length in zip(sequences, prompt_lengths, strict=True)]
    batch = make_batch(rollouts, torch.zeros(len(rollouts)))
    return engine.kernel_body(batch, batch.mask > 0)
