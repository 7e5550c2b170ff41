"""Eight functions of a GRPO step, to be written: `python -m pytest exercises` tests them.

B rows, one for each response; G responses to each prompt; T columns, one for each target token; N
tokens; H hidden width; V vocabulary. Log-probabilities are in nats. What stands outside a mask does
not count, whatever it is.
"""


def shift_and_pad(prompts, responses, candidates):
    """Token ids as tensors: inputs, targets, mask and behavior_logprobs.

    `inputs[b, : t + 1]` predict `targets[b, t]`. The mask is 1 on the targets that the policy has
    sampled, else 0. Rows are padded with 0 on the right. For each token of a response the engine
    returns a dictionary, {token id: log-probability} of several candidates; the sampled token is
    one of them, and behavior_logprobs has its value, and 0 outside the mask.

    Shapes: `prompts` and `responses`, B lists of ids each (a stop token, if one was sampled, is the
    last id); `candidates`, B lists of dictionaries -> four tensors (B, T), where T + 1 is the
    length of the longest prompt with its response.
    """
    raise NotImplementedError


def group_advantages(rewards, group_size):
    """(reward - mean of the group) / (standard deviation of the group + 1e-4).

    The standard deviation is the unbiased one. Equal rewards have an advantage of exactly 0.

    Shapes: rewards (B,) in float32, the G responses to a prompt are neighbours -> (B, 1).
    """
    raise NotImplementedError


def token_logprobs(hidden, weight, targets, temperature, kept):
    """The log-probability with which the sampler drew each target, as exact as float32 allows.

    The sampler divided the logits, hidden W^T, by the temperature. Then it drew one of the tokens
    that its top-k had kept.

    Shapes: hidden (N, H) and weight (V, H), in bfloat16; targets (N,); kept, N lists of ids -> (N,)
    in float32.
    """
    raise NotImplementedError


def clipped_loss(logprobs, old_logprobs, advantages, mask, clip_low, clip_high):
    """The loss of PPO and GRPO for each token, with its gradient; 0 outside the mask.

    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), where r is the ratio of the probability now
    to the old one.

    Shapes: (B, T), advantages (B, 1) -> (B, T).
    """
    raise NotImplementedError


def accumulate(losses, mask, micro_batches):
    """Adds up the gradient of one optimizer step, a micro-batch at a time; returns the step's loss.

    That loss is the mean over all response tokens of the batch. `losses(rows)` computes the losses
    of some rows, of any finite value outside the mask, so that memory holds the activations of one
    micro-batch only.

    Shapes: mask (B, T); micro_batches, a list of row numbers (b,); losses(rows) (b, T) -> a float.
    """
    raise NotImplementedError


def importance_weights(old_logprobs, behavior_logprobs, mask, cap, two_policy):
    """What each token's loss is multiplied by, because another policy has sampled the token.

    A constant, truncated to the cap, and 0 outside the mask. Truncated importance sampling repairs
    what the loss's own ratio does not: that is pi / pi_old or, with two_policy, pi / mu. The
    trainer before the update is pi_old (old_logprobs), the engine is mu (behavior_logprobs).

    Shapes: (B, T) each -> (B, T).
    """
    raise NotImplementedError


def mismatch_figures(old_logprobs, behavior_logprobs, mask):
    """How far the trainer (old) is from the engine (behavior), on tokens that the engine drew.

    A dictionary. mismatch_abs_mean and mismatch_max: of the absolute difference. mismatch_kl: the
    mean of Schulman's k3, exp(d) - 1 - d, such that it estimates KL(engine || trainer). ess: the
    effective sample size, (sum w)^2 / (n sum w^2), of the n weights w = trainer / engine.

    Shapes: (B, T) each -> floats. Units: nats; ess is a share.
    """
    raise NotImplementedError


def audit_head(engine, asked):
    """The dtype in which a running engine computes its logits, "float32" or "bfloat16".

    At the start somebody asked for `asked`; None left the choice to the engine. engine.config, a
    dictionary, repeats what was asked. engine.logits() returns logits (N, V) that the engine has
    computed in either dtype and then cast to float32.

    Raises: RuntimeError that names both dtypes if the one in force is not the one that was asked.
    """
    raise NotImplementedError
