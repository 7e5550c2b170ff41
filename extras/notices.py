"""Notices at the start of a run: what is often wrong with prompts, and is no error."""

import re
from contextlib import suppress
from typing import Any

from config import Config, DataConfig, LearningConfig
from report.errors import one_line
from report.log import shown
from tasks import Problem, Task, time_limit


def notices(tokenizer: Any, task: Task, config: Config) -> list[str]:
    """The sentences that apply."""
    job, learning, data = config.job, config.learning, config.data
    problems = task.train + task.held_out
    stop = {each: tokenizer.convert_ids_to_tokens(each) or f"unknown token {each}"
            for each in task.stop_token_ids}
    ends = sum(problem.prompt_ids[-1] in stop for problem in problems)
    inside = sum(any(token in problem.question for token in stop.values()) for problem in problems)
    begun = [problem for problem in problems
             if problem.messages and problem.messages[-1]["role"] == "assistant"]
    continued = [both for each in begun if (both := both_texts(tokenizer, each, data))]
    keys = {key for each in problems for message in each.messages for key in message}
    template = str(tokenizer.chat_template) if data.chat_template else ""
    hidden = [key for key in sorted(keys - {"role", "content"})
              if not re.search(rf"\b{re.escape(key)}\b", template)]
    lost = {key for each in begun for key in each.messages[-1]} - {"role", "content", *hidden}
    found = {
        "a response begins with the content of the assistant's last message alone, not with its"
        f" {', '.join(sorted(lost))}": lost,
        f"the chat template shows no {', '.join(hidden)} of the messages": hidden,
        f"the learning rate is the toy's, {learning.lr:g}, which destroys a pretrained model; try"
        " --lr 1e-6, or 1e-4 with --lora-rank (docs/run.md has measured ones)":
            job.model != "toy" and job.steps and learning.lr == LearningConfig.lr,
        f"{ends} prompts end with a stop token, after which a model has nothing to say: does the"
        " tokenizer append it?": ends,
        f"{inside} questions contain a stop token ({', '.join(stop.values())})": inside,
        f"{len(begun)} chats end with an assistant's message, with which the response begins: it"
        " must not be the answer": begun,
        f"the chat template itself would continue {len(continued)} of these chats differently:"
        f" {''.join(continued[:1])}": continued,
    }
    prompt = tokenizer.decode(problems[0].prompt_ids)
    if tokenizer.chat_template and data.chat_template:
        found |= {
            "the chat template opens <think>: it is part of the prompt, and no response begins"
            " with it": prompt.rstrip().endswith("<think>"),
            "the chat template leaves the system prompt out":
                (data.system_prompt or "").strip() not in prompt,
        }
    # A template can refuse the turn of an assistant.
    with suppress(Exception), time_limit(data.reward_limit_s):
        answer = "ANSWER"
        turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
        rendered = tokenizer.apply_chat_template(turn, tokenize=False, **data.template_args)
        end = rendered.rpartition(answer)[2]
        ids = tokenizer(end, add_special_tokens=False)["input_ids"]
        found |= {
            f"the chat template ends a turn with {end!r}, which has no stop token of the model"
            f" ({', '.join(stop.values())}): a response can go on with turns that the model"
            " invents; name the token in eos_token_id of generation_config.json":
                not stop.keys() & {*ids} and data.chat_template,
        }
    return [notice for notice, applies in found.items() if applies]


def both_texts(tokenizer: Any, problem: Problem, data: DataConfig) -> str:
    """Of a chat that begins the response: its prompt and the template's own, from shortly before
    the beginning. Empty if they are equal.
    """
    chat = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    chat += problem.messages
    try:
        theirs = tokenizer.apply_chat_template(
            chat, continue_final_message=True, **data.template_args)["input_ids"]
    except Exception as error:  # some templates refuse such a chat
        return f"with {problem.source} it fails, {one_line(error)}"
    if theirs == problem.prompt_ids:
        return ""
    start = -60 - len(chat[-1]["content"])
    ours, theirs = (shown(tokenizer.decode(ids)[start:], 160, 0)
                    for ids in (problem.prompt_ids, theirs))
    return f"the prompt of {problem.source} has {ours}, the template's own {theirs}"
