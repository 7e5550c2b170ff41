"""Notices at the start of a run: what is often wrong with prompts, and is no error."""

from contextlib import suppress
from typing import Any

from tasks import Task, time_limit


def notices(tokenizer: Any, task: Task, data: Any) -> list[str]:
    """The sentences that apply. `data` is a config.DataConfig."""
    problems = task.train + task.held_out
    stop = {each: tokenizer.convert_ids_to_tokens(each) or f"unknown token {each}"
            for each in task.stop_token_ids}
    ends = sum(problem.prompt_ids[-1] in stop for problem in problems)
    inside = sum(any(token in problem.question for token in stop.values()) for problem in problems)
    begun = sum(problem.messages[-1]["role"] == "assistant" for problem in problems
                if problem.messages)
    found = {
        f"{ends} prompts end with a stop token, after which a model has nothing to say: does the"
        " tokenizer append it?": ends,
        f"{inside} questions contain a stop token ({', '.join(stop.values())})": inside,
        f"{begun} chats end with an assistant's message, with which the response begins: it must"
        " not be the answer": begun,
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
