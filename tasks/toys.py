"""The built-in tasks. Two come with a small model, which is taught a wrong habit on first use.

A teacher shows the model right answers and, more often, wrong ones that are all wrong in the same
way. Supervised learning imitates the majority, so the model starts with the wrong habit.
Reinforcement learning has to find the right answers, which the model samples less often.
`python -m tasks.toys FOLDER` writes the job of grpo.py: FOLDER/model and FOLDER/problems.jsonl.
"""

import hashlib
import json
import operator
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

import tasks.split
from report.errors import stage
from tasks import Problem, Task, exact_match

# ---------------------------------------------------------------------------------- tasks
NUM_SUMS = 20_000  # of a million
WRONG = 0.7  # share of the teacher's answers (`digits`: of its digits) that follow the wrong habit


def addition(seed: int) -> Task:
    """Sums of numbers of three digits, the answer's last digit first: "347+285=" is "2360"."""
    pairs = [divmod(number, 1000) for number in random.Random(seed).sample(range(10**6), NUM_SUMS)]
    problems = [Problem(f"{a:03}+{b:03}=", f"{a + b:04}"[::-1], f"{a:03}+{b:03}")
                for a, b in pairs]
    return tasks.split.split(Task(problems, [], exact_match), "toy", seed)


def forget_the_carry(problem: Problem, rng: random.Random) -> str:
    """The teacher's answer: in 7 of 10 cases without the carry, so that "347+285=" is "2250"."""
    if rng.random() >= WRONG:
        return problem.answer
    a, b = problem.source.split("+")
    sums = [str((int(x) + int(y)) % 10) for x, y in zip(a, b, strict=True)]
    return "".join(sums[::-1]) + "0"


def digits(seed: int) -> Task:
    """The larger digit at each place of two numbers: "3142====+2718====" is "3748".

    Made for the ladder: 64 training problems that come back at every step. Numbers have 2 to 16
    digits, in fields of 16, so that answers have many lengths and all prompts 35 tokens, more than
    a KV block of 32.
    """
    problems = larger_digits(random.Random(seed), 64 + 256)
    return Task(problems[:64], problems[64:], share_of_digits)


def larger_digits(rng: random.Random, count: int, longest: int = 16) -> list[Problem]:
    """`count` different problems of the task `digits`."""
    problems = {}
    while len(problems) < count:
        length = rng.randint(2, longest)
        a, b = ("".join(rng.choices("0123456789", k=length)) for _ in range(2))
        answer = "".join(map(max, a, b))
        question = f"{a:=<16}+{b:=<16}="
        problems[question] = Problem(question, answer, f"{a}+{b}")
    return [*problems.values()]


def take_the_smaller(problem: Problem, rng: random.Random) -> str:
    """The teacher's answer: the smaller digit at 7 of 10 places."""
    pairs = zip(*problem.source.split("+"), strict=True)
    return "".join((min if rng.random() < WRONG else max)(pair) for pair in pairs)


def share_of_digits(problem: Problem, response: str) -> float:
    """The share of correct characters; missing and additional characters are wrong."""
    right = sum(map(operator.eq, response, problem.answer))
    return right / max(len(response), len(problem.answer))


TASKS = {"toy": addition, "digits": digits}

# ---------------------------------------------------------------------------------- models
VOCABULARY = {token: index
              for index, token in enumerate(["<pad>", "<bos>", "<eos>", *"0123456789+="])}
PAD, BOS, EOS = range(3)


class Toy(NamedTuple):
    """A small Qwen3 and how it is taught: the teacher answers problems of the pool."""

    pool: Callable[[int], list[Problem]]  # the problems for a seed
    teacher: Callable[[Problem, random.Random], str]
    steps: int  # of 128 examples
    sizes: dict[str, Any]
    logit_offset: float = 0.0  # added to all logits at the end, see `teach`


# 0.6 and 0.1 million parameters; the head of `digits` is not tied, because it must hold the offset.
TOYS = {
    "toy": Toy(
        lambda seed: addition(seed).train, forget_the_carry, 560,
        dict(hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=4, tie_word_embeddings=True)),
    "digits": Toy(
        lambda seed: larger_digits(random.Random(f"teacher {seed}"), 10_000), take_the_smaller, 120,
        dict(hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=2, tie_word_embeddings=False), logit_offset=16.0),
}


def toy_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; a prompt begins with <bos>; an unknown character is an error."""
    backend = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<none>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    # <pad> and <bos> have no text, so that a response is what it was when special tokens had none.
    backend.decoder = decoders.Sequence(
        [decoders.Replace("<pad>", ""), decoders.Replace("<bos>", ""), decoders.Fuse()])
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A",
                                                           special_tokens=[("<bos>", BOS)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>",
                                   eos_token="<eos>")


def toy_for(task: str) -> str:
    """The name of the toy that is taught for the task: by default the one for addition."""
    return task if task in TOYS else "toy"


def toy_config(task: str) -> Qwen3Config:
    """The configuration of a task's model."""
    return Qwen3Config(
        # vLLM's CPU attention needs 32.
        vocab_size=len(VOCABULARY), head_dim=32, max_position_embeddings=64,
        # Three times the usual: so small a model learns in a third of the steps.
        initializer_range=0.06,
        pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS, **TOYS[toy_for(task)].sizes,
    )


def toy_folder(cache_dir: str, seed: int, task: str) -> Path:
    """Where the cache has the model of a task once it is taught."""
    # These two files decide the model.
    code = Path(__file__).read_bytes() + Path(tasks.split.__file__).read_bytes()
    return Path(cache_dir) / f"{toy_for(task)}-seed{seed}-{hashlib.sha256(code).hexdigest()[:8]}"


def toy_model(cache_dir: str, seed: int, task: str) -> Path:
    """The folder of a task's model, taught on first use and kept in the cache.

    Raises: ValueError if the cache cannot be written.
    """
    folder = toy_folder(cache_dir, seed, task)
    if folder.is_dir():
        return folder
    from model_folder import save
    from report.files import appears_whole

    with stage(f"teaching a model for --cache-dir {cache_dir}"), appears_whole(folder) as new:
        save(teach(TOYS[toy_for(task)], toy_config(task), seed), toy_tokenizer(), new)
    print(f"taught: {folder}")
    return folder


def teach(toy: Toy, config: Any, seed: int) -> torch.nn.Module:
    """Supervised AdamW steps on the teacher's answers, whose learning rate rises for 30 steps.

    With a `logit_offset` all logits get the same offset at the end, as the logits of pretrained
    models have one. Softmax ignores the offset; the rounding of a 16-bit head does not.
    """
    torch.manual_seed(seed)
    rng = random.Random(seed)
    pool, tokenizer = toy.pool(seed), toy_tokenizer()
    prompt = len(pool[0].question)  # all have the same length
    model = AutoModelForCausalLM.from_config(config)
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0,
                              fused=True)
    warm_up = torch.optim.lr_scheduler.LinearLR(adamw, 1 / 30, total_iters=29)
    for step in range(toy.steps):
        if step % 50 == 0:
            print(f"teaching the model its wrong habit: step {step} of {toy.steps}")
        texts = [f"{problem.question}{toy.teacher(problem, rng)}<eos>"
                 for problem in rng.choices(pool, k=128)]
        ids = tokenizer(texts, padding=True, return_tensors="pt")["input_ids"]  # (N, 1 + T)
        states = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        answers = ids[:, 1 + prompt :]  # (N, A)
        answered = answers != PAD
        hidden = states[:, prompt:][answered]  # (tokens, H)
        F.cross_entropy(model.lm_head(hidden), answers[answered]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()
        warm_up.step()
    if toy.logit_offset:
        with torch.no_grad():
            usual = hidden.mean(dim=0)  # (H,)
            model.lm_head.weight += toy.logit_offset * usual / usual.square().sum()
    return model


def write_page(folder: Path) -> None:
    """The job of grpo.py: the model of `digits`, and 72 problems with numbers of 2 to 8 digits.

    Longer answers are almost never right at first, and the page's reward is 1 or 0.
    """
    model = toy_model(str(Path(__file__).parents[1] / ".cache"), seed=0, task="digits")
    shutil.copytree(model, folder / "model", dirs_exist_ok=True)
    rows = [json.dumps({"question": problem.question, "answer": problem.answer})
            for problem in larger_digits(random.Random(0), 72, longest=8)]
    (folder / "problems.jsonl").write_text("\n".join(rows))


if __name__ == "__main__":
    write_page(Path(sys.argv[1]))
