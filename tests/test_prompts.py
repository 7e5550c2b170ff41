"""Prompts: chat messages, the template and its variables, what the start prints, and what a response's text is."""

import json
import math
import re
import shutil

from helpers import bare_run, command, config_of, parametrize, read_json, refusal, rewrite, train_here, value_error
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine_adapter import Rollout
from model_folder import load_tokenizer
from tasks import Problem, Task, exact_match
from tasks.options import Options
from tasks.prompts import encode, fitting

SPECIAL = ["<pad>", "<end>", "<turn>", "<think>", "</think>"]
CHATML = ("{% for m in messages %}<turn>{{ m.role }} {{ m.content }}<end>{% endfor %}"
          "{% if add_generation_prompt %}<turn>assistant {% endif %}")  # fmt: skip


def tokenizer(template=CHATML):
    """One token per character, and the special ones."""
    words = {token: number for number, token in enumerate([*SPECIAL, "\n", *map(chr, range(32, 127))])}
    backend = Tokenizer(models.WordLevel(words, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>",
                                   additional_special_tokens=SPECIAL[2:])  # fmt: skip
    made.chat_template = template
    return made


def encoded(template, *problems, stop=(1,), **options):
    return encode(tokenizer(template), Task([*problems], [], exact_match), stop, Options(**options))


def prompts(*problems, template=CHATML, **options):
    task = encoded(template, *problems, **options)
    return [task.tokenizer.decode(ids) for ids in task.prompts]


def chat(*turns):
    messages = [dict(zip(("role", "content"), turn.split(": "), strict=True)) for turn in turns]
    return Problem("", "", "line 1", messages=messages)


QUESTION = Problem("1+1", "2", "line 1")
DATED = CHATML.replace("{% for", "{{ date_string | default('26 Jul') }}{% for", 1)


def test_a_prompt_is_a_question_or_a_chat_in_the_models_template_or_plain_text():
    assert prompts(QUESTION, chat("system: Add.", "user: 1+1")) == [
        "<turn>user 1+1<end><turn>assistant ", "<turn>system Add.<end><turn>user 1+1<end><turn>assistant "]  # fmt: skip
    assert prompts(QUESTION, system_prompt="Think.") == [
        "<turn>system Think.<end><turn>user 1+1<end><turn>assistant "]  # fmt: skip
    assert prompts(chat("user: 1", "assistant: 2", "user: 3"), system_prompt="Add.") == [
        "<turn>system Add.<end><turn>user 1<end><turn>assistant 2<end><turn>user 3<end><turn>assistant "]
    assert prompts(QUESTION, chat_template=False) == prompts(QUESTION, template=None) == ["1+1"]
    assert prompts(QUESTION, template=DATED, chat_template_args='{"date_string": "1 Jan"}')[0].startswith("1 Jan<turn>")


def test_a_response_begins_right_after_the_generation_prompt():
    trims = CHATML.replace("m.content", "m.content | trim")
    for template, opens in ((trims, ""), (CHATML.replace("assistant ", "assistant <think>"), "<think>")):
        for beginning in ("It is", "", " <think>a</think>b "):
            begun = chat("user: 1", "assistant: " + beginning)
            prompt = f"<turn>system Add.<end><turn>user 1<end><turn>assistant {opens}{beginning}"
            assert prompts(begun, template=template, system_prompt="Add.") == [prompt]


# As published ones: no branch for other roles, and of earlier responses no thoughts.
STRICT = CHATML.replace("<turn>{{ m.role", "{% if m.role in ('user', 'assistant') %}<turn>{{ m.role").replace(
    "{{ m.content }}<end>", "{{ m.content.split('</think>')[-1] }}<end>{% endif %}")  # fmt: skip
LOST = "of line 1 failed: ValueError: the chat template must print each message, it leaves out that of role "


def test_earlier_thoughts_and_empty_messages_may_be_left_out():
    thought = chat("system: ", "user: 1", "assistant: <think>So</think>", "user: 2", "assistant: <think>b</think>3")
    assert prompts(thought, template=STRICT) == [
        "<turn>user 1<end><turn>assistant <end><turn>user 2<end><turn>assistant <think>b</think>3"]


@parametrize("problem, options, complaint", [
    (chat("system: Add.", "user: 1+1"), {"system_prompt": "x"}, "of line 1 failed: ValueError: system_prompt must not"),
    (chat("system: Add.", "user: 1+1"), {"chat_template": False}, "2 chat messages need a chat template"),
    (QUESTION, {"template": None, "system_prompt": "x"}, "needs a chat template, the model has none"),
    (QUESTION, {"chat_template_args": '{"enable_thinking": false}'}, "it has no enable_thinking"),
    (QUESTION, {"template": STRICT, "system_prompt": "x"}, LOST + r"system; put the text \(of --system-prompt, say\)"),
    (chat("user: 1", "assistant: 2", "tool: 3", "user: 4"), {"template": STRICT}, LOST + "tool"),
])  # fmt: skip
def test_what_a_template_cannot_do_is_refused(problem, options, complaint):
    with value_error(complaint):
        prompts(QUESTION, problem, **options)


def of_lengths(*parts):
    return Task(*([Problem("", "", f"line {length}", [0] * length) for length in part] for part in parts), exact_match)


def test_overlong_prompts_are_refused_by_name_or_dropped_and_counted(capsys):
    task, drop = of_lengths(range(1, 8), [4]), Options(overlong_prompts="drop")
    said = r"^2 of 8 prompts are longer than 5 tokens, .*--max-.*context of %s less.*%s: line 6 has 6; line 7 has 7"
    with value_error(said % ("inf", r" \(to leave them out, --overlong-prompts drop\)")):
        fitting(task, math.inf, 4, Options(max_prompt_tokens=5))
    left = fitting(task, 9, 4, drop)
    assert re.match(said % (9, "") + ": DROPPED", capsys.readouterr().out)
    assert (left.train, left.num_dropped) == (task.train[:5], 2)
    for train, held_out, name in (([1], [2], "held-out"), ([2], [1], "training")):
        task = of_lengths(train, held_out)
        with value_error(f"1 of 2 prompts .*, all of the {name} problems"):
            fitting(task, 5, 4, drop)
        assert fitting(task, 6, 4, drop) == task


@parametrize("template, options, said", [
    (CHATML, {"system_prompt": "Be brief."}, ""),
    (CHATML + "<end>", {}, "1 prompts end with a stop token"),
    (CHATML, {"stop": 0}, "ends a turn with '<end>', which has no stop token of the model (<pad>)"),
    (CHATML.replace("assistant ", "assistant <think>\n"), {}, "the prompt opens <think>"),
    (CHATML, {"problem": chat("user: 1+1", "assistant: 2")}, "1 chats end with an assistant's message"),
    (CHATML.replace("{{ m.role }}", "{{ m.role if m.role == 'user' else raise_exception('no') }}"), {"stop": 0}, ""),
    (CHATML, {"model": "M", "lr": 1e-6}, ""),
    (CHATML, {"model": "M"}, "the learning rate is the toy's, 0.001"),
])  # fmt: skip
def test_what_is_often_wrong_with_prompts_is_said_at_the_start(capsys, template, options, said):
    options = {"problem": QUESTION, "stop": 1} | options
    problem, stop = options.pop("problem"), options.pop("stop")
    config = config_of(**options)
    task = encoded(template, problem, stop=(stop,), system_prompt=config.data.system_prompt)
    config.extra.notices.install(bare_run(config, task))
    printed = capsys.readouterr().out
    assert said in printed and printed.count("notice: ") == bool(said)


@parametrize("own", [None, DATED])
def test_a_chat_template_that_a_folder_keeps_for_a_processor_is_the_tokenizers(tmp_path, own):
    tokenizer(own).save_pretrained(tmp_path)
    rewrite("chat_template.json", chat_template=CHATML)(tmp_path)
    assert load_tokenizer(str(tmp_path)).chat_template == (own or CHATML)


def test_the_record_of_prompts_has_a_digest_of_all():
    one, other = (encoded(CHATML, QUESTION, Problem(text, "", "")).prompts_record for text in ("a", "b"))
    assert one["first"] == other["first"]
    assert one["digest"] != other["digest"]


def test_the_stop_token_alone_is_cut_off_a_response():
    made = tokenizer()
    ids = made("<think>2+2=4</think>4<turn>x<end>")["input_ids"]
    task = Task([QUESTION], [], exact_match, tokenizer=made, stop_token_ids=(1, 2))
    texts = [task.text_of(Rollout([], 0, tokens)) for tokens in (ids, ids[:-1], [1], [])]
    assert texts == ["<think>2+2=4</think>4<turn>x"] * 2 + [""] * 2


# ------------------------------------------------------------------------------------------------ whole runs
def test_the_first_prompt_is_printed_and_stored_and_a_date_in_the_template_is_found_at_resume(good, tmp_path, capsys):
    folder = shutil.copytree(good / "model", tmp_path / "model")  # its tokenizer knows digits, + and =
    (folder / "chat_template.jinja").write_text("{{ day | default('26') }}={{ messages[0].content }}")
    words = f"--model {folder} --out {tmp_path}/run --engine transformers --steps 1 --eval-problems 1"
    train_here(command(good, words))
    first = read_json(tmp_path / "run" / "config.json")["prompts"]["first"]
    assert first.startswith("26=")
    assert f"first prompt: {json.dumps(first)}\n" in capsys.readouterr().out
    again = command(good, words + " --resume")
    train_here([*again, "--chat-template-args", '{"day": "26"}'])
    capsys.readouterr()
    said = refusal([*again, "--chat-template-args", '{"day": "27"}'], capsys)
    assert "must keep its prompts: the same questions have other tokens now, such as '" in said
    assert "27=" in said and "26=" in said and "try --chat-template-args" in said
