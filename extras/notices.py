"""Notices of what is often wrong and no error: prompts, a rate, switches that change no figure."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from extras import Extra


class Options(Extra):
    """None: it acts in each run."""

    def install(self, run: Any) -> None:
        """Print each sentence that applies."""
        for sentences in of_the_rate, of_the_prompts, of_a_turn:
            for sentence in sentences(run):
                print(f"notice: {sentence}")
        run.at_begin.append(name_idle)


def of_the_rate(run: Any) -> Iterator[str]:
    config = run.config
    if config.model != "toy" and config.steps and "lr" not in config.given:
        yield (f"the learning rate is the toy's, {config.lr:g}, which destroys a pretrained model;"
               " try --lr 1e-6, or 1e-4 with --lora-rank (docs/run.md has measured ones)")


def of_the_prompts(run: Any) -> Iterator[str]:
    problems, stop = run.task.problems, run.task.stop_token_ids
    if ends := sum(problem.prompt_ids[-1] in stop for problem in problems):
        yield (f"{ends} prompts end with a stop token, after which a model has nothing to say: does"
               " the tokenizer append it?")
    roles = [problem.messages[-1]["role"] for problem in problems if problem.messages]
    if begun := roles.count("assistant"):
        yield (f"{begun} chats end with an assistant's message, with which the response begins: it"
               " must not be the answer")
    if run.task.tokenizer.decode(problems[0].prompt_ids).rstrip().endswith("<think>"):
        yield "the prompt opens <think> (the chat template does), so no response begins with it"


def of_a_turn(run: Any) -> Iterator[str]:
    """Nothing of a template that refuses the turn of an assistant."""
    data, tokenizer, stop = run.config.data, run.task.tokenizer, run.task.stop_token_ids
    if not data.chat_template:
        return
    turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "ANSWER"}]
    with suppress(Exception):
        text = tokenizer.apply_chat_template(turn, tokenize=False, **data.template_args)
        end = text.rpartition("ANSWER")[2]
        if not {*stop} & {*tokenizer(end, add_special_tokens=False)["input_ids"]}:
            names = ", ".join(map(str, tokenizer.convert_ids_to_tokens(stop)))
            yield (f"the chat template ends a turn with {end!r}, which has no stop token of the"
                   f" model ({names}): a response can go on with turns that the model invents; name"
                   " the token in eos_token_id of generation_config.json")


def name_idle(sides: Any, record: dict[str, Any]) -> None:
    """Print which switches do nothing, once the engine has its settings."""
    run, engine = sides.run, sides.engine
    config, parity = run.config, run.config.parity
    block = engine.settings.get("block_size", 0)  # transformers has no blocks
    idle = [
        # The last token is always computed.
        (not parity.uncached_runtime and engine.wanted["enable_prefix_caching"]
         and max(map(len, run.task.prompts)) <= block,
         "uncached_runtime: of its settings the prefix cache",
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
