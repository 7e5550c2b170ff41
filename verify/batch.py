"""What a source of rollouts, an advantage function and a token filter must return."""

from torch import Tensor

from report.log import shown


def check_rollouts(
    problems: list, rollouts: list, num_prompts: int, group_size: int, version: int
) -> None:
    """Raises: ValueError unless these are P problems, and G finished rollouts of each, group-major,
    of weights up to this version.
    """
    prompts = [problem.prompt_ids for problem in problems for _ in range(group_size)]
    if len(problems) != num_prompts or len(rollouts) != len(prompts):
        raise ValueError(f"a source must return {num_prompts} problems and {group_size} rollouts of"
                         f" each, got {len(problems)} problems and {len(rollouts)} rollouts")
    for row, (prompt, rollout) in enumerate(zip(prompts, rollouts, strict=True)):
        tokens, trained = rollout.token_ids, rollout.trained
        lengths = {*map(len, (tokens, rollout.logprobs, rollout.versions, trained or tokens))}
        if (rollout.prompt_ids[: len(prompt)] != prompt or not rollout.finish_reason or not tokens
                or len(lengths) > 1 or {*trained} - {True, False}
                or max(rollout.versions) > version):
            raise ValueError(f"rollout {row} of a source must begin with its problem's prompt"
                             f" {shown(str(prompt), 60, 60)}, be finished, have at least one token,"
                             " and for each token an entry in its lists (a bool in `trained`, in"
                             f" `versions` at most {version}), got {shown(str(rollout))}")


def check_returned(value: object) -> None:
    """Raises: TypeError if a function of `before_scores` returns what nothing would read."""
    if value is not None:
        raise TypeError("a function of before_scores must set rewards, scores or extra of the"
                        f" rollouts and return nothing, got {shown(str(value))}")


def check_extra(rollouts: list) -> None:
    """Raises: ValueError unless `extra` has a number for each token in all rollouts, or in none."""
    given = [rollout for rollout in rollouts if type(rollout.extra) is not list or rollout.extra]
    for row, rollout in enumerate(rollouts if given else []):
        if type(rollout.extra) is not list or len(rollout.extra) != len(rollout.token_ids):
            raise ValueError("Rollout.extra must be a list with one number a token in all rollouts"
                             f" of a step, or in none, got {shown(str(rollout.extra))} for"
                             f" {len(rollout.token_ids)} tokens in rollout {row}")


def check_gradients(masters: list[Tensor]) -> None:
    """Raises: ValueError if there are some before the update, which would add its own to them."""
    if any(master.grad is not None for master in masters):
        raise ValueError("a step's metric must leave no gradient (the next update would add it),"
                         " try torch.no_grad()")


def check_advantages(advantages: Tensor, mask: Tensor) -> None:
    """Raises: ValueError unless they are (B, 1) or (B, T), floating, and finite."""
    right = advantages.shape in (mask.shape, mask[:, :1].shape) and advantages.is_floating_point()
    if not (right and advantages.isfinite().all()):  # outside the mask too: 0 * nan is nan
        raise ValueError("advantages must be finite floating numbers, (B, 1) or (B, T) ="
                         f" {tuple(mask.shape)}, got {tuple(advantages.shape)}: {advantages}")


def check_averaged(averaged: Tensor, kept: Tensor, mask: Tensor) -> None:
    """Raises: ValueError unless the mean of the loss counts all tokens that a filter has kept, and
    none outside the mask. Shapes: (B, T) each.
    """
    if averaged.shape != mask.shape or not ((kept <= averaged) & (averaged <= mask)).all():
        raise ValueError("a token filter's second mask, what the mean of the loss counts, must be"
                         f" (B, T) = {tuple(mask.shape)} with 1 on each token of the batch's mask"
                         f" that is not rejected, and 0 outside that mask, got {averaged}")
