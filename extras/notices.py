"""Notices of what is often wrong and no error: prompts, a rate, switches that change no figure.

And why the first loss is 0.
"""

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from extras import Extra
from tasks.prompts import time_limit


class Options(Extra):
    """None: it acts in each run."""

    def install(self, run: Any) -> None:
        """Print each sentence that applies."""
        for sentences in of_the_rate, of_special_tokens, of_chats, of_the_prompt, of_a_turn:
            for sentence in sentences(run):
                print(f"notice: {sentence}")
        run.reports.append(partial(explain_first_loss, run.config))
        run.at_begin.append(name_idle)


def of_the_rate(run: Any) -> Iterator[str]:
    config = run.config
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
    bos = str(tokenizer.bos_token)
    twice = sum(problem.prompt_ids.count(tokenizer.bos_token_id) > problem.question.count(bos) > 0
                for problem in problems)
    if twice:
        yield (f"{twice} questions contain {bos}, to which the tokenizer or the chat template adds"
               " one more")


def of_chats(run: Any) -> Iterator[str]:
    begun = [problem.messages[-1] for problem in run.task.problems
             if problem.messages and problem.messages[-1]["role"] == "assistant"]
    if not begun:
        return
    yield (f"{len(begun)} chats end with an assistant's message, with which the response begins: it"
           " must not be the answer")
    if lost := {key for message in begun for key in message} - {"role", "content"}:
        yield ("a response begins with the content of the assistant's last message alone, not with"
               f" its {', '.join(sorted(lost))}")


def of_the_prompt(run: Any) -> Iterator[str]:
    template = template_of(run)
    prompt = run.task.tokenizer.decode(run.task.problems[0].prompt_ids)
    if template and prompt.rstrip().endswith("<think>"):
        yield ("the chat template opens <think>: it is part of the prompt, and no response begins"
               " with it")


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


def name_idle(trainer: Any, record: dict[str, Any]) -> None:
    """Print which switches do nothing, once the engine has its settings."""
    run, engine = trainer.run, trainer.engine
    config, parity = run.config, run.config.parity
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
