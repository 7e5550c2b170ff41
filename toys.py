"""The built-in models: two toys, taught on first use."""

import hashlib
import os
import shutil
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import tasks
from tasks import DIGITS, Problem, addition, larger_digits

TOY_CHARACTERS = "0123456789+="
PAD, BOS, EOS = range(3)
TOY_STEPS = 1000  # of supervised teaching at most; the seed decides how many it takes, 200 to 400 as a rule
TOY_SHARE = 0.22  # of attempts at TOY_TEMPERATURE that are right when teaching stops: the rest is for RL to find
TOY_TEMPERATURE = 0.7  # the default job's
TOY_SMOOTHING = 0.6  # of the labels: the toy is unsure of what it knows, so its samples differ and RL has a choice
DIGITS_SHARE = 0.38  # of the digits right at TOY_TEMPERATURE when teaching the task `digits` stops
DIGITS_SMOOTHING = 0.8  # flatter still: the log-probabilities at temperature 1 and TOY_TEMPERATURE are far apart
LOGIT_OFFSET = 16.0  # added to all logits of the model for `digits`


def toy_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; a prompt begins with <bos>; a character it does not know is an error."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<bos>", "<eos>", *TOY_CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<none>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def toy_config() -> Qwen3Config:
    """A Qwen3 of 0.6 million parameters. Heads of 32 are the smallest that vLLM's CPU attention takes."""
    return Qwen3Config(
        vocab_size=3 + len(TOY_CHARACTERS), hidden_size=128, intermediate_size=384, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, head_dim=32, max_position_embeddings=64,
        initializer_range=0.06,  # three times the usual: so small a model learns the carry in a third of the steps
        tie_word_embeddings=True, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS,
    )


def digits_config() -> Qwen3Config:
    """A Qwen3 of 0.1 million parameters for the task `digits`; its head is its own, to carry LOGIT_OFFSET."""
    return Qwen3Config(
        vocab_size=3 + len(TOY_CHARACTERS), hidden_size=64, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=32, max_position_embeddings=64,
        initializer_range=0.06, tie_word_embeddings=False, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS,
    )


def describe_toy(task: str) -> tuple[Qwen3Config, PreTrainedTokenizerFast, tuple[int, ...]]:
    """As `tasks.describe_model`, of the toy that the task teaches."""
    return digits_config() if task == "digits" else toy_config(), toy_tokenizer(), (EOS,)


def toy_model(cache_dir: str, seed: int, task: str = "toy") -> Path:
    """The folder of a built-in task's toy (weights, configuration, tokenizer), taught on first use, then in the cache.

    Teaching is a number of steps that the seed decides, whatever the machine's speed: a run that is killed while it
    teaches starts again with the same toy.

    Raises: ValueError if the cache cannot be written; RuntimeError if teaching misses its aim.
    """
    code = Path(__file__).read_bytes() + Path(tasks.__file__).read_bytes()  # all that decides the toy is in these two
    recipe = hashlib.sha256(code).hexdigest()[:8]
    folder = Path(cache_dir) / f"{task}-seed{seed}-{recipe}"
    if folder.is_dir():
        return folder
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a dead process with this process's number
    try:
        unfinished.mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"cache_dir must be writable, got {cache_dir}: {error}; try --cache-dir") from error
    try:
        {"toy": _teach, "digits": _teach_digits}[task](seed).save_pretrained(unfinished)
        toy_tokenizer().save_pretrained(unfinished)
        if not folder.is_dir():  # another process may have been faster
            unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _teach(seed: int) -> Qwen3ForCausalLM:
    """Supervised examples with smoothed labels until TOY_SHARE of the samples are expected to be right."""
    torch.manual_seed(seed)
    tokenizer, task = toy_tokenizer(), addition(seed)
    model, started = Qwen3ForCausalLM(toy_config()), time.monotonic()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    inputs, targets = _examples(tokenizer, task.train)  # (N, T) each
    held_out_inputs, held_out_targets = _examples(tokenizer, task.held_out[:512])
    share, step = 0.0, 0
    while share < TOY_SHARE and step < TOY_STEPS:
        rows = torch.randint(len(inputs), (128,))
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (step + 1) / 30)
        logits = model(input_ids=inputs[rows], use_cache=False).logits  # (128, T, V)
        F.cross_entropy(logits.flatten(0, 1), targets[rows].flatten(), label_smoothing=TOY_SMOOTHING).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 5 == 0:  # the probability of a right answer is a product over its tokens: no sampling is needed
            with torch.no_grad():
                logits = model(input_ids=held_out_inputs, use_cache=False).logits / TOY_TEMPERATURE
                losses = F.cross_entropy(logits.transpose(1, 2), held_out_targets, reduction="none")  # (512, T)
                share = torch.exp(-losses.sum(dim=1)).mean().item()
    seconds = time.monotonic() - started
    print(f"toy model: taught for {step} steps, {seconds:.0f} s; right in {share:.0%} of attempts", flush=True)
    if not TOY_SHARE <= share <= 0.40:
        raise RuntimeError(f"the toy must be right in {TOY_SHARE:.0%} to 40% of attempts, not {share:.0%}")
    return model


def _teach_digits(seed: int) -> Qwen3ForCausalLM:
    """Random problems with smoothed labels until DIGITS_SHARE of the digits are expected to be right.

    At the end all logits get the same offset, as pretrained models' logits have one: softmax ignores it, the rounding
    of a 16-bit head does not.
    """
    torch.manual_seed(seed)
    tokenizer, model, started = toy_tokenizer(), Qwen3ForCausalLM(digits_config()), time.monotonic()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    share, step = 0.0, 0
    while share < DIGITS_SHARE and step < TOY_STEPS:
        inputs, targets = _examples(tokenizer, larger_digits(torch.randint(10, (64, 2, DIGITS))))  # (64, T) each
        answered = targets >= 0
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (step + 1) / 30)
        hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state[answered]  # (N, H)
        logits = model.lm_head(hidden)  # (N, V)
        F.cross_entropy(logits, targets[answered], label_smoothing=DIGITS_SMOOTHING).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        right = torch.softmax(logits.detach() / TOY_TEMPERATURE, dim=-1).gather(1, targets[answered][:, None])
        share = 0.9 * share + 0.1 * right.mean().item()
    with torch.no_grad():
        usual = hidden.mean(dim=0)  # (H,)
        model.lm_head.weight += LOGIT_OFFSET * usual / usual.square().sum()
    seconds = time.monotonic() - started
    print(f"digits model: taught for {step} steps, {seconds:.0f} s; {share:.0%} of the digits right", flush=True)
    if share < DIGITS_SHARE:
        raise RuntimeError(f"{DIGITS_SHARE:.0%} of the digits must be right after {step} steps, not {share:.0%}")
    return model


def _examples(tokenizer: PreTrainedTokenizerFast, problems: list[Problem]) -> tuple[torch.Tensor, torch.Tensor]:
    """inputs, and targets that are -100 (ignored) but for the answer and its <eos>: (N, T) each, right padding."""
    prompts = tokenizer([problem.question for problem in problems])["input_ids"]
    answers = tokenizer([problem.answer for problem in problems], add_special_tokens=False)["input_ids"]
    longest = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    inputs = [prompt + answer + [PAD] * (longest - len(prompt) - len(answer))
              for prompt, answer in zip(prompts, answers, strict=True)]
    targets = [[-100] * (len(prompt) - 1) + answer + [EOS] + [-100] * (longest - len(prompt) - len(answer))
               for prompt, answer in zip(prompts, answers, strict=True)]
    return torch.tensor(inputs), torch.tensor(targets)
