"""The two built-in tasks and the small models that are taught for them on first use."""

import hashlib
import os
import shutil
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import tasks
from tasks import Problem, Task, exact_match, split

DIGITS = 16  # of each number of the task `digits`


# ------------------------------------------------------------------------------------------------ tasks
def addition(seed: int, largest: int = 99) -> Task:
    """All sums a+b= with 0 <= a, b <= largest; a tenth of them, chosen by the seed, is held out."""
    problems = [Problem(f"{a}+{b}=", str(a + b), f"{a}+{b}") for a in range(largest + 1) for b in range(largest + 1)]
    return split("toy", exact_match, seed, problems)


def digits(seed: int) -> Task:
    """The larger digit at each place of two numbers: "3142...+2718...=" is "3748...". Made for the ladder: 64 training
    problems that come back at every step, prompts of 35 tokens, longer than a KV block of 32, answers of 16."""
    problems = larger_digits(torch.randint(10, (64 + 256, 2, DIGITS), generator=torch.Generator().manual_seed(seed)))
    return Task(problems[:64], problems[64:], share_of_digits)


def larger_digits(numbers: Tensor) -> list[Problem]:
    """(N, 2, DIGITS) digits -> N problems."""
    rows = torch.cat([numbers, numbers.amax(dim=1, keepdim=True)], dim=1).tolist()
    texts = [["".join(map(str, number)) for number in row] for row in rows]
    return [Problem(f"{a}+{b}=", larger, f"{a}+{b}") for a, b, larger in texts]


def share_of_digits(problem: Problem, response: str) -> float:
    """The share of correct characters at their places; missing and additional characters count as wrong."""
    right = sum(given == expected for given, expected in zip(response, problem.answer, strict=False))
    return right / max(len(response), len(problem.answer))


def countdown(seed: int) -> Task:
    """The task file examples/countdown.py."""
    return tasks.load_task(str(Path(__file__).with_name("countdown.py")), seed)


TASKS = {"toy": addition, "digits": digits, "countdown": countdown}

# ------------------------------------------------------------------------------------------------ models
CHARACTERS = "0123456789+="
PAD, BOS, EOS = range(3)
SIZES = {  # Qwen3 of 0.6 and 0.1 million parameters. The head of `digits` is not tied: it must hold LOGIT_OFFSET.
    "toy": dict(hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
                num_key_value_heads=4, tie_word_embeddings=True),
    "digits": dict(hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2,
                   num_key_value_heads=2, tie_word_embeddings=False),
}  # fmt: skip
TEMPERATURE = 0.7  # the default job's, at which the shares below are measured
MAX_STEPS = 1000  # of supervised teaching; the seed decides how many it takes, usually 200 to 400
TOY_SHARE = 0.22  # of the sampled answers are right when teaching stops; RL can find the rest
TOY_SMOOTHING = 0.6  # of the labels: the model stays unsure, so that its samples differ and RL can choose among them
DIGITS_SHARE = 0.38  # of the digits are right when teaching the task `digits` stops
DIGITS_SMOOTHING = 0.8  # flatter: log-probabilities at temperature 1 and TEMPERATURE differ clearly
LOGIT_OFFSET = 16.0  # added to all logits of the model for `digits`


def toy_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; a prompt begins with <bos>; an unknown character is an error."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<bos>", "<eos>", *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<none>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def toy_config(task: str = "toy") -> Qwen3Config:
    """The configuration of the model that is taught for the task."""
    return Qwen3Config(
        vocab_size=3 + len(CHARACTERS), head_dim=32, max_position_embeddings=64,  # vLLM's CPU attention needs 32
        initializer_range=0.06,  # three times the usual: so small a model learns the carry in a third of the steps
        pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS, **SIZES[_toy_of(task)],
    )


def describe_toy(task: str) -> tuple[Qwen3Config, PreTrainedTokenizerFast, tuple[int, ...]]:
    """As `tasks.describe_model`, for the model that is taught for the task."""
    return toy_config(task), toy_tokenizer(), (EOS,)


def _toy_of(task: str) -> str:
    return "digits" if task == "digits" else "toy"


def toy_model(cache_dir: str, seed: int, task: str = "toy") -> Path:
    """The folder of a task's model (weights, configuration, tokenizer), taught on first use and kept in the cache.

    The seed decides the number of teaching steps, whatever the machine's speed: a run that is killed while it teaches
    starts again with the same model.

    Raises: ValueError if the cache cannot be written; RuntimeError if teaching misses its aim.
    """
    code = Path(__file__).read_bytes() + Path(tasks.__file__).read_bytes()  # these two files decide the model
    folder = Path(cache_dir) / f"{_toy_of(task)}-seed{seed}-{hashlib.sha256(code).hexdigest()[:8]}"
    if folder.is_dir():
        return folder
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a dead process with this process's number
    try:
        unfinished.mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"cache_dir must be writable, got {cache_dir}: {error}; try --cache-dir") from error
    try:
        started = time.monotonic()
        model, steps, share, least = (_teach_digits if _toy_of(task) == "digits" else _teach_addition)(seed)
        print(f"{_toy_of(task)} model: taught for {steps} steps, {time.monotonic() - started:.0f} s;"
              f" {share:.0%} right", flush=True)
        if not least <= share <= least + 0.18:
            raise RuntimeError(f"the model must be right in {least:.0%} to {least + 0.18:.0%}, not {share:.0%}")
        model.save_pretrained(unfinished)
        toy_tokenizer().save_pretrained(unfinished)
        if not folder.is_dir():  # another process may have been faster
            unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


class _Teacher:
    """Supervised AdamW steps with smoothed labels and a warm-up of 30 steps."""

    def __init__(self, model: Qwen3ForCausalLM, smoothing: float):
        self.model, self.smoothing, self.steps = model, smoothing, 0
        self.adamw = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0, fused=True)

    def step(self, logits: Tensor, targets: Tensor) -> None:
        """(N, V), (N,); a target of -100 is ignored."""
        self.adamw.param_groups[0]["lr"] = 3e-3 * min(1.0, (self.steps + 1) / 30)
        F.cross_entropy(logits, targets, label_smoothing=self.smoothing).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.adamw.step()
        self.adamw.zero_grad()
        self.steps += 1


def _teach_addition(seed: int) -> tuple[Qwen3ForCausalLM, int, float, float]:
    """Teach until TOY_SHARE of the sampled answers are expected to be right: model, steps, share, TOY_SHARE."""
    torch.manual_seed(seed)
    tokenizer, task = toy_tokenizer(), addition(seed)
    model = Qwen3ForCausalLM(toy_config())
    teacher, share = _Teacher(model, TOY_SMOOTHING), 0.0
    inputs, targets = _examples(tokenizer, task.train)  # (N, T) each
    held_out_inputs, held_out_targets = _examples(tokenizer, task.held_out[:512])
    while share < TOY_SHARE and teacher.steps < MAX_STEPS:
        rows = torch.randint(len(inputs), (128,))
        logits = model(input_ids=inputs[rows], use_cache=False).logits  # (128, T, V)
        teacher.step(logits.flatten(0, 1), targets[rows].flatten())
        if teacher.steps % 5 == 0:  # the probability of a right answer is a product over its tokens
            with torch.no_grad():
                logits = model(input_ids=held_out_inputs, use_cache=False).logits / TEMPERATURE
                losses = F.cross_entropy(logits.transpose(1, 2), held_out_targets, reduction="none")  # (512, T)
                share = torch.exp(-losses.sum(dim=1)).mean().item()
    return model, teacher.steps, share, TOY_SHARE


def _teach_digits(seed: int) -> tuple[Qwen3ForCausalLM, int, float, float]:
    """Teach until DIGITS_SHARE of the digits are expected to be right: model, steps, share, DIGITS_SHARE.

    At the end all logits get the same offset, as the logits of pretrained models have one. Softmax ignores the offset;
    the rounding of a 16-bit head does not.
    """
    torch.manual_seed(seed)
    tokenizer, model = toy_tokenizer(), Qwen3ForCausalLM(toy_config("digits"))
    teacher, share = _Teacher(model, DIGITS_SMOOTHING), 0.0
    while share < DIGITS_SHARE and teacher.steps < MAX_STEPS:
        inputs, targets = _examples(tokenizer, larger_digits(torch.randint(10, (64, 2, DIGITS))))  # (64, T) each
        answered = targets >= 0
        hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state[answered]  # (N, H)
        logits = model.lm_head(hidden)  # (N, V)
        teacher.step(logits, targets[answered])
        right = torch.softmax(logits.detach() / TEMPERATURE, dim=-1).gather(1, targets[answered][:, None])
        share = 0.9 * share + 0.1 * right.mean().item()
    with torch.no_grad():
        usual = hidden.mean(dim=0)  # (H,)
        model.lm_head.weight += LOGIT_OFFSET * usual / usual.square().sum()
    return model, teacher.steps, share, DIGITS_SHARE


def _examples(tokenizer: PreTrainedTokenizerFast, problems: list[Problem]) -> tuple[Tensor, Tensor]:
    """inputs (N, T) with right padding; targets (N, T), -100 (ignored) outside the answer and its <eos>."""
    prompts = tokenizer([problem.question for problem in problems])["input_ids"]
    answers = tokenizer([problem.answer for problem in problems], add_special_tokens=False)["input_ids"]
    longest = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    inputs, targets = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        rest = longest - len(prompt) - len(answer)
        inputs.append(prompt + answer + [PAD] * rest)
        targets.append([-100] * (len(prompt) - 1) + answer + [EOS] + [-100] * rest)
    return torch.tensor(inputs), torch.tensor(targets)
