"""One batch with all its numbers: `python -m examples.one_step` prints docs/one-step.md anew.

The rows of each table are computed again, with the functions of train.py and the job of grpo.py.
"""

from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch

from config import GrpoConfig, ParityFlags
from engine_adapter import Engine
from examples.toys import EOS, share_of_digits
from extras.model_folder import load_tokenizer
from extras.problem_files import load_task
from models import load_model
from objectives import group_advantages, grpo, loss_weights, mismatch_metrics
from rl import Optimizer, Policy, Scoring, frozen_logprobs, make_batch, update
from rollouts import Sampling, reseed
from tasks import encode

PAGE, MODEL = Path(__file__).parents[1] / "docs/one-step.md", "runs/page/model"
GRPO = GrpoConfig(num_prompts=2, group_size=4, max_new_tokens=6, old_policy="rollout", lr=2e-4)
SAMPLING = Sampling(GRPO.temperature, GRPO.max_new_tokens, stop_token_ids=(EOS,))
MINIBATCHES = [[rows] for rows in torch.arange(8).split(4)]  # a problem each
SHOWN = [3, 6]  # the rows whose tokens are printed
BACKENDS = (
    ("parity", torch.float32, ParityFlags()),
    ("raw log-probabilities", torch.float32, ParityFlags(processed_logprobs=False)),
    ("a stale prompt", torch.float32, ParityFlags(uncached_runtime=False)),
    ("parity, bfloat16", torch.bfloat16, ParityFlags()),
    ("a 16-bit head", torch.bfloat16, ParityFlags(fp32_head=False)),
)


def sample(policy: Policy, engine: Engine, tokenizer, problems: list, step: int) -> tuple:
    """The batch of a step, as in train.train_step, with texts and rewards: shares of digits."""
    engine.load(policy.weights(), policy.response_logprobs)
    reseed(0, "train", step)
    rollouts = engine.generate([each.prompt_ids for each in problems], GRPO.group_size, SAMPLING)
    texts = tokenizer.batch_decode([each.token_ids for each in rollouts], skip_special_tokens=True)
    rewards = [share_of_digits(problems[row // 4], text) for row, text in enumerate(texts)]
    batch = make_batch(rollouts)
    old_logprobs = frozen_logprobs(policy, batch, MINIBATCHES)  # (B, T)
    advantages = group_advantages(torch.tensor(rewards, dtype=torch.double), 4, None)
    return replace(batch, old_logprobs=old_logprobs, advantages=advantages), texts, rewards


def one_step(tokenizer, problems: list, name: str, dtype, parity) -> tuple[list, list, tuple]:
    """Rows of the three tables: responses, shown tokens, and the summary of the step."""
    policy = Policy(load_model(MODEL, dtype), Scoring(GRPO.temperature))
    optimizer = Optimizer(policy.model, weight_decay=0.0)
    engine = Engine(MODEL, policy.weights(), parity, dtype=dtype, max_model_len=64, block_size=32)
    earlier, _, _ = sample(policy, engine, tokenizer, problems, step=1)  # computes the prompts
    update(policy, optimizer, earlier, MINIBATCHES, replace(GRPO, old_policy="recompute"), GRPO.lr)
    batch, texts, rewards = sample(policy, engine, tokenizer, problems, step=2)
    engine.close()
    parts, figures = [], []
    for minibatch in MINIBATCHES:
        parts.append(frozen_logprobs(policy, batch, MINIBATCHES)[minibatch[0]])
        found = update(policy, optimizer, batch, [minibatch], GRPO, GRPO.lr)
        figures += [found["clip_rate"], found["loss"], found["grad_norm"]]
    now, behavior, old = torch.cat(parts), batch.behavior_logprobs, batch.old_logprobs  # (B, T)
    loss = grpo(now, behavior, batch.advantages, batch.mask, GRPO.clip)
    weights = torch.cat([loss_weights(batch.mask[rows], "token", 6) for (rows,) in MINIBATCHES])
    columns = (batch.targets, behavior, old, now, old - behavior, torch.exp(now - behavior),
               batch.advantages.expand_as(now), weights, loss.clipped)  # (B, T) each
    shown = batch.mask[SHOWN] > 0
    tokens = zip(*(each[SHOWN][shown].tolist() for each in columns), strict=True)
    asked = [each.question.replace("=", "") for each in problems for _ in range(4)]
    moved = mismatch_metrics(old, behavior, batch.mask)
    return ([*zip(asked, texts, rewards, batch.advantages[:, 0].tolist(), strict=True)],
            [(tokenizer.decode(token), *others) for token, *others in tokens],
            (name, moved["mismatch_abs_mean"], moved["mismatch_max"], *figures))


def tables() -> list[list[tuple]]:
    tokenizer = load_tokenizer(MODEL)
    pool = encode(tokenizer, load_task("runs/page/problems.jsonl", seed=0)).train
    problems = [each for each in pool if len(each.answer) == 3][1::-1]
    steps = [one_step(tokenizer, problems, *backend) for backend in BACKENDS]
    responses, tokens, summaries = zip(*steps, strict=True)
    return [responses[0], *tokens, summaries]


if __name__ == "__main__":
    computed = iter(tables())
    for is_table, group in groupby(PAGE.read_text().splitlines(), lambda line: line[:1] == "|"):
        print(*list(group)[: 2 if is_table else None], sep="\n")  # of a table: its head
        for row in next(computed) if is_table else ():
            cells = [f"{each:.3g}" if type(each) is float else str(each) for each in row]
            print(f"| {' | '.join(cells)} |")
