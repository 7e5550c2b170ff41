"""Notices: what is often wrong with a run's prompts and is no error, and why its first loss is 0.

And which switches cannot change a figure of the run, for those who compare runs.
"""

import json
import re
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from report.errors import one_line
from report.log import shown
from tasks import Problem
from tasks.prompts import encode, time_limit


def check_task(run: Any, options: Any) -> None:
    """Print each sentence that applies."""
    config, data, task = run.config, run.config.data, run.task
    tokenizer, problems = task.tokenizer, task.problems
    stop = {token: tokenizer.convert_ids_to_tokens(token) or f"unknown token {token}"
            for token in task.stop_token_ids}
    tokens = ", ".join(stop.values())
    ends = sum(problem.prompt_ids[-1] in stop for problem in problems)
    inside = sum(any(token in problem.question for token in stop.values()) for problem in problems)
    bos = str(tokenizer.bos_token)
    twice = sum(problem.prompt_ids.count(tokenizer.bos_token_id) > problem.question.count(bos) > 0
                for problem in problems)
    # A configuration for another tokenizer names the number of some text.
    plain = [stop[token] for token in sorted(stop.keys() - {tokenizer.eos_token_id})
             if token not in getattr(tokenizer, "added_tokens_decoder", stop)]
    begun = [problem for problem in problems
             if problem.messages and problem.messages[-1]["role"] == "assistant"]
    continued = [texts for problem in begun if (texts := both_texts(tokenizer, problem, data))]
    keys = {key for problem in problems for message in problem.messages for key in message}
    template = str((data.chat_template and tokenizer.chat_template) or "")
    hidden = [key for key in sorted(keys - {"role", "content"})
              if not re.search(rf"\b{re.escape(key)}\b", template)]
    lost = {key for problem in begun for key in problem.messages[-1]}
    lost -= {"role", "content", *hidden}
    prompt = tokenizer.decode(problems[0].prompt_ids)
    notices = [
        (0 < config.steps <= config.lr_warmup_steps,
         f"a warm-up of {config.lr_warmup_steps} steps in a run of {config.steps}: the learning"
         f" rate stays below its peak of {config.lr:.1e}"),
        (lost, "a response begins with the content of the assistant's last message alone, not with"
               f" its {', '.join(sorted(lost))}"),
        (hidden, f"the chat template shows no {', '.join(hidden)} of the messages"),
        (config.model != "toy" and config.steps and "lr" not in config.given,
         f"the learning rate is the toy's, {config.lr:g}, which destroys a pretrained model; try"
         " --lr 1e-6, or 1e-4 with --lora-rank (docs/run.md has measured ones)"),
        (ends, f"{ends} prompts end with a stop token, after which a model has nothing to say: does"
               " the tokenizer append it?"),
        (plain, f"a response ends with {', '.join(map(repr, plain))}, which is no special token: is"
                " eos_token_id right in config.json and generation_config.json?"),
        (inside, f"{inside} questions contain a stop token ({tokens})"),
        (twice, f"{twice} questions contain {bos}, to which the tokenizer or the chat template adds"
                " one more"),
        *((changes_no_prompt(name, run),
           f"without {name} of chat_template_args the first prompt is the same")
          for name in data.template_args),
        (begun, f"{len(begun)} chats end with an assistant's message, with which the response"
                " begins: it must not be the answer"),
        (continued, f"the chat template itself would continue {len(continued)} of these chats"
                    f" differently: {''.join(continued[:1])}"),
        (template and prompt.rstrip().endswith("<think>"),
         "the chat template opens <think>: it is part of the prompt, and no response begins with"
         " it"),
        (template and (data.system_prompt or "").strip() not in prompt,
         "the chat template leaves the system prompt out"),
    ]
    # A template can refuse the turn of an assistant.
    with suppress(Exception), time_limit(data.reward_limit_s):
        turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "ANSWER"}]
        rendered = tokenizer.apply_chat_template(turn, tokenize=False, **data.template_args)
        begin, _, end = rendered.rpartition("ANSWER")
        ids = tokenizer(end, add_special_tokens=False)["input_ids"]
        notices.append((
            data.chat_template and not stop.keys() & {*ids},
            f"the chat template ends a turn with {end!r}, which has no stop token of the model"
            f" ({tokens}): a response can go on with turns that the model invents; name the token"
            " in eos_token_id of generation_config.json"))
        asked = tokenizer.apply_chat_template(
            turn[:1], add_generation_prompt=True, tokenize=False, **data.template_args)
        header = begin.partition(asked)[2]
        notices.append((
            template and "add_generation_prompt" not in template and header.strip(),
            "the chat template has no generation prompt (add_generation_prompt): a response must"
            f" begin with {header!r}, which the reward sees"))
    for applies, sentence in notices:
        if applies:
            print(f"notice: {sentence}")


def changes_no_prompt(name: str, run: Any) -> bool:
    """Whether the first prompt is the same without this variable of the chat template."""
    task, data = run.task, run.config.data
    others = {other: value for other, value in data.template_args.items() if other != name}
    first = replace(task, train=task.problems[:1], held_out=[])
    try:
        without = encode(task.tokenizer, first, task.stop_token_ids,
                         replace(data, chat_template_args=json.dumps(others)))
    except ValueError:  # the template needs it
        return False
    return without.prompts == first.prompts


def both_texts(tokenizer: Any, problem: Problem, data: Any) -> str:
    """Of a chat that begins the response: its prompt and the template's own, from shortly before
    the beginning. Empty if they are equal.
    """
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
    parts.writers.append(partial(explain_first_loss, run.config))
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
