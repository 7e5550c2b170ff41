"""grpo.py and train.py are two programs for one method: from the same job they make the same tokens and figures."""

import gc
import json
import random
import re
import shutil
from collections import Counter
from dataclasses import replace
from itertools import chain
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from helpers import ROUNDING, built, close_live_engine, contents, qwen2, rewrite, run_script, tensors
from transformers import AutoModelForCausalLM, AutoTokenizer

import train
from engine_adapter import ParityFlags
from tasks.answers import last_number
from tasks.toys import toy_tokenizer

pytestmark = pytest.mark.engine  # some start none, but the page imports vllm
FIGURES = "reward", "updates", "loss", "grad_norm", "clip_rate"


def rows_of_page(job):
    """One for each step."""
    import grpo

    close_live_engine()
    rows = []
    for metrics, rollouts in grpo.train(grpo.Config(**job, micro_batch_tokens=800, eval_every=100)):
        rows.append(metrics | {"tokens": [list(rollout.outputs[0].token_ids) for rollout in rollouts]})
    gc.collect()  # the engine of this job ends here
    return rows


def rows_of_core(job):
    """One for each step, the last one with the held-out reward."""
    del job["out"]
    trainer = built(Path(job["model"]).parent, Path(mkdtemp()), engine="vllm", micro_batch_tokens=1000,
                    prompts_once=False, **job)  # fmt: skip
    trainer.source.task = replace(trainer.run.task, in_passes=False)
    rows = []
    for step in range(1, job["steps"] + 1):
        metrics, _, batch, _ = train.train_step(trainer, step)
        rows.append(metrics | {"tokens": [rollout.token_ids for rollout in batch.rollouts]})
    rows[-1]["held_out"] = train.evaluate(trainer, step)["eval_reward_greedy"]
    return rows


def of_both(options, page, core):
    """The same job in the options of each program."""
    return rows_of_page(options | page), rows_of_core(options | core)


def without(fix):
    return {fix: False}, {"parity": ParityFlags(**{fix: False})}


def assert_equal(page, core):
    assert page["tokens"] == core["tokens"]
    for name in FIGURES:  # a step without a signal has no loss
        assert (page.get(name) or 0) == pytest.approx(core.get(name) or 0, rel=1e-4, abs=1e-6), name
    # At parity a mismatch is rounding, which depends on the rows of a micro-batch.
    assert page["mismatch_abs_mean"] == pytest.approx(core["mismatch_abs_mean"], rel=1e-3, abs=ROUNDING)


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """A small job. Its prompts are longer than a block of the prefix cache and come back in later steps.

    The answer to a question is the last number in a quarter or more of the model's own responses: each step has signal.
    The model names a second stop token, "9", in generation_config.json alone, that with a chat template in config.json.
    """
    root, rng, tokenizer = tmp_path_factory.mktemp("page"), random.Random(0), toy_tokenizer()
    model, rows = qwen2(vocab_size=len(tokenizer)), []

    def save(name):
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)

    stop = tokenizer.convert_tokens_to_ids("9")
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, stop]
    save("model")
    torch.manual_seed(0)
    while len(rows) < 12:
        question = "".join(rng.choices("0123456789+", k=140))
        sampled = model.generate(**tokenizer(question, return_tensors="pt"), do_sample=True, top_k=0, temperature=0.7,
                                 max_new_tokens=3, eos_token_id=stop, num_return_sequences=16)[:, 140:]  # fmt: skip
        texts = tokenizer.batch_decode(sampled, skip_special_tokens=True)
        number, count = Counter(map(last_number, texts)).most_common(1)[0]
        if number is not None and 4 <= count <= 12:
            rows.append({"question": question, "answer": f"so #### {number}.0"})
    (root / "problems.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    model.config.eos_token_id, model.generation_config.eos_token_id = stop, tokenizer.eos_token_id
    tokenizer.chat_template = ("{% for message in messages %}1+{{ message.content }}{% endfor %}"
                               "{% if add_generation_prompt %}={% endif %}")  # fmt: skip
    save("chat")
    tokenizer.chat_template = None
    # As in pretrained models all logits have an offset, which only rounding notices.
    model.model.embed_tokens.weight.data[:, 0] = 4.0
    model.lm_head.weight.data[:, 0] = 16.0
    save("offset")
    return dict(model=str(root / "model"), task=str(root / "problems.jsonl"), out=str(root / "policy"), seed=1,
                steps=3, num_prompts=4, group_size=6, max_new_tokens=3, temperature=0.7, lr=1e-3, block_size=128)


def test_page_and_core_make_the_same_three_steps(options):
    """The importance weights of the first job are all 0.9. In the second job a minibatch is a group of odd size, so
    that some have no signal, and there is a chat template. The third job has the two-policy form with raw values."""
    by_group = {"group_size": 5, "num_minibatches": 4, "model": str(Path(options["model"]).with_name("chat"))}
    page, core = without("processed_logprobs")
    jobs = [of_both(options, *changes) for changes in (
        ({"tis_cap": 0.9}, {"tis_cap": 0.9, "tis": "token"}), (by_group, by_group),
        (page | {"two_policy": True}, core | {"two_policy": True}))]  # fmt: skip
    for page, core in jobs:
        for page_row, core_row in zip(page, core, strict=True):
            assert_equal(page_row, core_row)
        assert page[-1]["held_out"] == core[-1]["held_out"]
    with_tis, by_group, raw = (page for page, _ in jobs)
    assert any(row.get("clip_rate") for row in raw)
    assert min(row["mismatch_abs_mean"] for row in raw) > 0.1
    assert max(row["mismatch_abs_mean"] for row in with_tis + by_group) < ROUNDING


def test_without_a_fix_the_same_figure_moves_in_page_and_core(options):
    """In fp32 the head has the model's dtype with and without the fix, so fp32_head needs bfloat16. There the page has
    no fp32 masters: only the first step is equal."""
    narrow = options | {"model": str(Path(options["model"]).with_name("offset")), "dtype": "bfloat16", "steps": 1}
    stale = of_both(options, *without("uncached_runtime"))
    head, no_head = of_both(narrow, {}, {}), of_both(narrow, *without("fp32_head"))
    # Here the tokens differ: vLLM has no async scheduling on a CPU, and the core forces it there.
    for first, *rows in stale:
        assert first["mismatch_abs_mean"] < ROUNDING  # no weights have changed yet
        assert max(row["mismatch_abs_mean"] for row in rows) > 1e-3
    for (page,), (core,) in (head, no_head):
        assert page["tokens"] == core["tokens"]
        assert page["mismatch_abs_mean"] == pytest.approx(core["mismatch_abs_mean"], rel=0.3, abs=0)
    assert no_head[0][0]["mismatch_abs_mean"] > 2 * head[0][0]["mismatch_abs_mean"]


def test_page_proves_that_a_load_has_renewed_each_tensor(tmp_path):
    """vLLM's CPU build keeps a packed copy of a tied head, which a load renews only under the head's own name."""
    import grpo

    close_live_engine()
    model = qwen2(tied=True)
    model.save_pretrained(tmp_path)
    llm = grpo.start_engine(grpo.Config(model=str(tmp_path)), 64)
    grpo.load(llm, model)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.01)
    weights = model.state_dict()
    del weights["lm_head.weight"]
    model.state_dict = lambda: weights
    with pytest.raises(AssertionError, match=r"^the engine holds other values in \['lm_head.weight'\]$"):
        grpo.load(llm, model)
    del llm
    gc.collect()


def test_page_refuses_a_mismatch_at_parity_that_is_no_rounding(options, monkeypatch):
    import grpo

    close_live_engine()
    monkeypatch.setattr(grpo, "score", lambda *given, score=grpo.score: score(*given) + 1e-3)
    with pytest.raises(AssertionError, match=r"^mismatch of \d\.\de-0\d nats$"):
        next(grpo.train(grpo.Config(**options)))
    gc.collect()


# ------------------------------------------------------------------------------------------------ the command
def command(options, *further):
    pairs = [(f"--{name.replace('_', '-')}", value) for name, value in options.items()]
    run_script("grpo.py", *chain(*pairs), *further)


def test_the_command_trains_prints_an_answer_and_saves_the_policy(options, capsys):
    command(options | {"steps": 2, "eval_every": 2, "block_size": 256}, "--two-policy", "--no-processed-logprobs",
            "--no-fp32-head", "--no-uncached-runtime")  # fmt: skip
    printed = capsys.readouterr().out.splitlines()
    notes, steps = ([line for line in printed if line.startswith(word)] for word in ("note: ", "step "))
    assert [note[:21] for note in notes] == ["note: no cached block", "note: in float32 each"]
    assert len(steps) == 2 and "mismatch_abs_mean" in steps[0] and "held_out" in steps[1]
    assert any(re.match(r"[\d+]{140} ", line) for line in printed)  # an answer
    before, after = (AutoModelForCausalLM.from_pretrained(options[name]) for name in ("model", "out"))
    assert not torch.equal(before.lm_head.weight, after.lm_head.weight)
    assert len(AutoTokenizer.from_pretrained(options["out"])) > 3


FILES = {"": "line 1, ", '{"question": "1+1=", "answer": 2}\n{"answer": 2}': "line 2, .*question",
         '{"question": "1+1=", "answer": "2 or 3"}': "line 1, .*plain num"}  # fmt: skip
MODELS = {
    "a head of its own": (rewrite("config.json", tie_word_embeddings=True), "not of config.json, untied=True, set()"),
    "fewer layers": (rewrite("config.json", num_hidden_layers=1, layer_types=None), "untied=False, {'model.layers.1."),
    "a tensor missing": (tensors(lambda table: table.pop("model.norm.weight")), "untied=False, {'model.norm.weight'}"),
}
OPTIONS = """--tis-cap 2 --no-fp32-head: tis_cap needs all fixes, and two_policy off
--tis-cap 2 --no-uncached-runtime: tis_cap needs all fixes
--tis-cap 2 --no-processed-logprobs: tis_cap needs all fixes
--tis-cap 2 --two-policy: tis_cap needs all fixes
--tis-cap -1: error: tis_cap must be positive and finite, got -1.0
--steps 0: must be positive and finite
--clip nan: must be positive and finite
--lr inf: must be positive and finite
--dtype bfloat16 --lr 1e-6: dtype must be float32, or bfloat16 with lr
--num-minibatches 5: num_minibatches must divide num_prompts * group_size
--group-size 1: group_size must be 2 or more
--num-prompts 12: num_prompts at most 11
--out {task}: File exists: '{task}'
--out {model}/: out must not be the model's folder"""


def test_page_refuses_before_the_engine_starts(options, tmp_path):
    """A file that is no list of problems, a model whose weights are not those of its config.json, and options that
    cannot work.
    """
    def refusal(*words):
        with pytest.raises(SystemExit) as refused:
            command(options, *words)
        return str(refused.value)

    path, before = tmp_path / "problems.jsonl", contents(options["model"])
    for text, complaint in FILES.items():
        path.write_text(text)
        assert re.match(re.escape(f"error: {path}, ") + complaint, refusal("--task", str(path))), text
    for name, (spoil, complaint) in MODELS.items():
        folder = shutil.copytree(options["model"], tmp_path / name)
        spoil(folder)
        assert complaint in refusal("--model", str(folder)), name
    for line in OPTIONS.format(**options).splitlines():
        words, _, complaint = line.partition(": ")
        assert complaint in refusal(*words.split()), words
    assert contents(options["model"]) == before


NUMBERS = "42 is 42; so 1,200.50 left. is 1200.50; x = -3 is -3; -$7 is -7; #### 8 is 8; 2x is None; 1+2 is None; "
NUMBERS += "3/2 is None; x_2 is None; 1,2 is None; 12:30 is None; none is None"


def test_what_page_reads_as_a_number():
    import grpo

    for text, number in (case.split(" is ") for case in NUMBERS.split("; ")):
        assert str(grpo.last_number(text)) == number, text
