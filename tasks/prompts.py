"""Prompts: the tokens of a question or of a chat, and which prompts are too long."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from report.errors import stage
from tasks import Problem, Task
from tasks.options import Options
from tasks.split import refuse_or_drop


def encode(tokenizer: Any, task: Task, stop_token_ids: tuple[int, ...], data: Options) -> Task:
    """The task with the token ids of every prompt, in the model's chat template if it has one.

    Raises: ValueError.
    """
    template = tokenizer.chat_template if data.chat_template else None
    if template is None and data.system_prompt:
        raise ValueError("system_prompt needs a chat template, the model has none or"
                         " --chat-template is off")
    unknown = [name for name in data.template_args if not re.search(rf"\b{name}\b", str(template))]
    if unknown:
        raise ValueError("chat_template_args must be variables of the model's chat template, it has"
                         f" no {', '.join(unknown)}")

    def token_ids(problem: Problem) -> list[int]:
        messages = problem.messages or [{"role": "user", "content": problem.question}]
        if template is None:
            if problem.messages:
                raise ValueError(f"{len(messages)} chat messages need a chat template")
            return tokenizer(problem.question)["input_ids"]
        if data.system_prompt:
            if messages[0]["role"] == "system":
                raise ValueError("system_prompt must not be given, the messages have their own")
            messages = [{"role": "system", "content": data.system_prompt}, *messages]
        # The beginning of a response follows the generation prompt to the character. Templates
        # trim it, or put a closed thought before it.
        beginning = ""
        if messages[-1]["role"] == "assistant":
            *messages, last = messages
            beginning = last["content"]
        render = partial(tokenizer.apply_chat_template, add_generation_prompt=True, tokenize=False,
                         **data.template_args)
        refuse_lost(render, messages)
        return tokenizer(render(messages) + beginning, add_special_tokens=False)["input_ids"]

    def encoded(problem: Problem) -> Problem:
        with stage(f"encoding the question of {problem.source}"):
            return problem._replace(prompt_ids=token_ids(problem))

    return replace(task, train=list(map(encoded, task.train)),
                   held_out=list(map(encoded, task.held_out)), tokenizer=tokenizer,
                   stop_token_ids=stop_token_ids)


def refuse_lost(render: Callable[..., str], messages: list[dict[str, Any]]) -> None:
    """Raises: ValueError if the chat template leaves a message out, as one without a branch for its
    role does. A marker stands in for each content: earlier thoughts may be stripped from it.
    """
    marked = [message | {"content": message["content"].strip() and f"message {number}."}
              for number, message in enumerate(messages)]
    text = render(marked)
    lost = [message["role"] for message in marked if message["content"] not in text]
    if lost:
        raise ValueError("the chat template must print each message, it leaves out that of role"
                         f" {lost[0]}; put the text (of --system-prompt, say) into the question")


def fitting(task: Task, context: float, max_new_tokens: int, data: Options) -> Task:
    """The task without the problems whose prompts are too long, if these are to be dropped.

    `context`, the model's, is in tokens; infinity is no limit. Raises: ValueError.
    """
    room = context - max_new_tokens
    if room < 1:
        raise ValueError(f"max_new_tokens must be below the model's context of {context}, got"
                         f" {max_new_tokens}")
    limit = min(room, data.max_prompt_tokens or math.inf)
    overlong = [f"{problem.source} has {len(problem.prompt_ids)}" for problem in task.problems
                if len(problem.prompt_ids) > limit]
    what = (f"of {len(task.problems)} prompts are longer than {limit} tokens, the smaller of"
            f" --max-prompt-tokens and the context of {context} less --max-new-tokens")
    refuse_or_drop(overlong, what, data.overlong_prompts == "drop", "--overlong-prompts")
    train, held_out = ([problem for problem in problems if len(problem.prompt_ids) <= limit]
                       for problems in (task.train, task.held_out))
    if not train or not held_out:
        raise ValueError(f"{len(overlong)} {what}, all of the"
                         f" {'held-out' if train else 'training'} problems")
    return replace(task, train=train, held_out=held_out, num_dropped=len(overlong))
