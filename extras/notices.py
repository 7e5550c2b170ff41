"""Notices of what is often wrong and no error: prompts, a rate, switches that change no figure.

And why the first loss is 0.
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from report.errors import one_line
from report.log import shown
from tasks import Problem
from tasks.prompts import first_encoded, time_limit


def check_task(run: Any, options: Any) -> None:
    """Print each sentence that applies."""
    for sentences in of_the_rate, of_special_tokens, of_chats, of_the_prompt, of_a_turn:
        for sentence in sentences(run):
            print(f"notice: {sentence}")


def of_the_rate(run: Any) -> Iterator[str]:
    config = run.config
    if 0 < config.steps <= config.lr_warmup_steps:
        yield (f"a warm-up of {config.lr_warmup_steps} steps in a run of {config.steps}: the"
               f" learning rate stays below its peak of {config.lr:.1e}")
    if config.model != "toy" and config.steps and "lr" not in config.given:
        yield (f"the learning rate is the toy's, {config.lr:g}, which destroys a pretrained model;"
               " try --lr 1e-6, or 1e-4 with --lora-rank (docs/run.md has measured ones)")


def of_special_tokens(run: Any) -> Iterator[str]:
    tokenizer, problems, stop = run.task.tokenizer, run.task.problems, stop_tokens(run)
    if ends := sum(problem.prompt_ids[-1] in stop for problem in problems):
        yield (f"{ends} prompts end with a stop token, after which a model has nothing to say: does"
               " the tokenizer append it?")
    # A configuration for another tokenizer names the number of some text.
    plain = [stop[token] for token in sorted(stop.keys() - {tokenizer.eos_token_id})
             if token not in getattr(tokenizer, "added_tokens_decoder", stop)]
    if plain:
        yield (f"a response ends with {', '.join(map(repr, plain))}, which is no special token: is"
               " eos_token_id right in config.json and generation_config.json?")
    inside = sum(any(token in problem.question for token in stop.values()) for problem in problems)
    if inside:
        yield f"{inside} questions contain a stop token ({', '.join(stop.values())})"
    bos = str(tokenizer.bos_token)
    twice = sum(problem.prompt_ids.count(tokenizer.bos_token_id) > problem.question.count(bos) > 0
                for problem in problems)
    if twice:
        yield (f"{twice} questions contain {bos}, to which the tokenizer or the chat template adds"
               " one more")


def of_chats(run: Any) -> Iterator[str]:
    problems = run.task.problems
    keys = {key for problem in problems for message in problem.messages for key in message}
    hidden = [key for key in sorted(keys - {"role", "content"})
              if not re.search(rf"\b{re.escape(key)}\b", template_of(run))]
    if hidden:
        yield f"the chat template shows no {', '.join(hidden)} of the messages"
    begun = [problem for problem in problems
             if problem.messages and problem.messages[-1]["role"] == "assistant"]
    if not begun:
        return
    yield (f"{len(begun)} chats end with an assistant's message, with which the response begins: it"
           " must not be the answer")
    lost = {key for problem in begun for key in problem.messages[-1]}
    if lost := lost - {"role", "content", *hidden}:
        yield ("a response begins with the content of the assistant's last message alone, not with"
               f" its {', '.join(sorted(lost))}")
    continued = [texts for problem in begun if (texts := both_texts(run, problem))]
    if continued:
        yield (f"the chat template itself would continue {len(continued)} of these chats"
               f" differently: {continued[0]}")


def of_the_prompt(run: Any) -> Iterator[str]:
    data, template = run.config.data, template_of(run)
    for name in data.template_args:
        if changes_no_prompt(name, run):
            yield f"without {name} of chat_template_args the first prompt is the same"
    prompt = run.task.tokenizer.decode(run.task.problems[0].prompt_ids)
    if template and prompt.rstrip().endswith("<think>"):
        yield ("the chat template opens <think>: it is part of the prompt, and no response begins"
               " with it")
    if template and (data.system_prompt or "").strip() not in prompt:
        yield "the chat template leaves the system prompt out"


def of_a_turn(run: Any) -> Iterator[str]:
    """Nothing of a template that refuses the turn of an assistant."""
    data, template, stop = run.config.data, template_of(run), stop_tokens(run)
    if not data.chat_template:
        return
    tokenizer = run.task.tokenizer
    turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "ANSWER"}]
    render = partial(tokenizer.apply_chat_template, tokenize=False, **data.template_args)
    with suppress(Exception), time_limit(data.reward_limit_s):
        begin, _, end = render(turn).rpartition("ANSWER")
        if not stop.keys() & {*tokenizer(end, add_special_tokens=False)["input_ids"]}:
            yield (f"the chat template ends a turn with {end!r}, which has no stop token of the"
                   f" model ({', '.join(stop.values())}): a response can go on with turns that the"
                   " model invents; name the token in eos_token_id of generation_config.json")
        header = begin.partition(render(turn[:1], add_generation_prompt=True))[2]
        if "add_generation_prompt" not in template and header.strip():
            yield ("the chat template has no generation prompt (add_generation_prompt): a response"
                   f" must begin with {header!r}, which the reward sees")


def stop_tokens(run: Any) -> dict[int, str]:
    """Their texts by id."""
    return {token: run.task.tokenizer.convert_ids_to_tokens(token) or f"unknown token {token}"
            for token in run.task.stop_token_ids}


def template_of(run: Any) -> str:
    """The chat template; empty if there is none or it is not used."""
    return str((run.config.data.chat_template and run.task.tokenizer.chat_template) or "")


def changes_no_prompt(name: str, run: Any) -> bool:
    """Whether the first prompt is the same without this variable of the chat template."""
    task, data = run.task, run.config.data
    others = {other: value for other, value in data.template_args.items() if other != name}
    try:
        without = first_encoded(
            task.tokenizer, task, replace(data, chat_template_args=json.dumps(others)))
    except ValueError:  # the template needs it
        return False
    return without.prompts[0] == task.prompts[0]


def both_texts(run: Any, problem: Problem) -> str:
    """Of a chat that begins the response: its prompt and the template's own, from shortly before
    the beginning. Empty if they are equal.
    """
    tokenizer, data = run.task.tokenizer, run.config.data
    chat = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    chat += problem.messages
    try:
        ids = tokenizer.apply_chat_template(
            chat, continue_final_message=True, **data.template_args)["input_ids"]
    except Exception as error:  # some templates refuse such a chat
        return f"with {problem.source} it fails, {one_line(error)}"
    if ids == problem.prompt_ids:
        return ""
    start = -60 - len(chat[-1]["content"])
    ours, theirs = (shown(tokenizer.decode(prompt)[start:], 160, 0)
                    for prompt in (problem.prompt_ids, ids))
    return f"the prompt of {problem.source} has {ours}, the template's own {theirs}"


def install(run: Any, options: Any, parts: Any) -> None:
    parts.reports.append(partial(explain_first_loss, run.config))
    parts.at_begin.append(partial(name_idle, run))


def name_idle(run: Any, trainer: Any, record: dict[str, Any]) -> None:
    """Print which switches do nothing, once the engine has its settings."""
    config, parity, engine = run.config, run.config.parity, trainer.engine
    block = engine.settings.get("block_size", 0)  # transformers has no blocks
    shares = "prefix_cache" in config.given  # never without uncached_runtime
    idle = [
        # The last token is always computed.
        ((shares or not parity.uncached_runtime) and engine.wanted["enable_prefix_caching"]
         and max(map(len, run.task.prompts)) <= block,
         "prefix_cache" if shares else "uncached_runtime: of its settings the prefix cache",
         f"no prompt is longer than a block of {block} tokens; try --block-size 32"),
        (not parity.processed_logprobs and config.temperature == 1
         and not {"top_k", "top_p", "min_p"} & config.given,
         "processed_logprobs", "raw values are processed at temperature 1 without a mask"),
        (not parity.inflight_keep and "inflight_groups" not in config.given,
         "inflight_keep", "no load meets an unfinished rollout; try --inflight-groups"),
        (not parity.fp32_head and config.dtype == "float32",
         "fp32_head", "the model's dtype is float32; try --dtype bfloat16"),
    ]
    for applies, switch, why in idle:
        if applies:
            print(f"{switch} is WITHOUT EFFECT: {why}")


def explain_first_loss(config: Any, row: dict[str, Any]) -> None:
    """Print after step 1 that a loss of about 0 is right.

    Not for cispo and reinforce, whose losses contain log-probabilities.
    """
    norm = row.get("grad_norm")
    if row["step"] != 1 or not norm or config.clip[0] is None:
        return
    if max(abs(row["loss"]), abs(row["ratio_mean"] - 1)) < 0.05:  # small beside usual rewards
        print(f"    loss {row['loss']:.1e}, about 0 as it should be: the ratio is about 1 (mean"
              f" {row['ratio_mean']:.4f}) and the advantages of a group sum to 0; the gradient is"
              f" not 0 (gnorm {norm:.3g})")
