"""Bad input of every kind: one sentence on stderr, exit status 2, no traceback, no model taught."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import PYTHON, TASK, close_live_engine, command, qwen2, refusal
from safetensors.torch import load_file, save_file

from rl import Policy

MANY_DIGITS = "9" * 6000


# ------------------------------------------------------------------------------------------------ options
OPTIONS = {
    "--steps 0": "steps must be at least 1", "--steps 1.5": "invalid literal for int()",
    "--steps x": "invalid literal for int()", "--num-prompts 0": "num_prompts must be at least 1",
    f"--steps {MANY_DIGITS}": "Exceeds the limit", f"--seed {MANY_DIGITS}": "Exceeds the limit",
    "--seed -1": "seed must be in [0, 2^32)", "--seed 4294967296": "seed must be in [0, 2^32)",
    "--group-size 1": "group_size must be in [2, 65536]", "--group-size 0": "group_size must be in [2, 65536]",
    "--num-prompts 37": "must be at most 36 (all there are)",
    "--inflight-groups 33": "must be at most 36 (all there are)", "--inflight-groups -1": "inflight_groups must be",
    "--max-new-tokens 0": "max_new_tokens must be at least 1",
    "--max-new-tokens 100000": "below the model's context of 256",
    "--max-new-tokens 256": "below the model's context of 256", "--max-prompt-tokens 0": "max_prompt_tokens must be",
    "--max-prompt-tokens 1": "prompts are longer than 1 tokens (--max-prompt-tokens)",
    "--num-minibatches 3": "num_minibatches must divide",
    "--micro-batch-tokens 0": "micro_batch_tokens must be at least 1", "--eval-every 0": "eval_every must be",
    "--checkpoint-every 0": "checkpoint_every must be", "--eval-samples 0": "eval_samples must be",
    "--max-num-seqs 0": "max_num_seqs must be", "--temperature 0": "temperature must be in [0.01, 2]",
    "--group-size 1000000000000000": "in [2, 65536]", "--eval-samples 65537": "must be in [1, 65536]",
    "--temperature 0.001": "temperature must be in [0.01, 2], vLLM's range, got 0.001", "--out=": "out must be a name",
    "--temperature 2.5": "temperature must be in [0.01, 2], vLLM's range, got 2.5",
    "--model=": "model must be a name", "--temperature nan": "temperature must be in [0.01, 2]",
    "--temperature inf": "temperature must be in [0.01, 2]", "--lr inf": "lr must be positive and finite",
    "--lr nan": "lr must be", "--lr 0": "lr must be", "--lr x": "could not convert string to float",
    "--grad-clip 0": "grad_clip must be", "--kl-coef -1": "kl_coef must be", "--kl-coef nan": "kl_coef must be",
    "--weight-decay -1": "weight_decay must be", "--kv-cache-gib 0": "kv_cache_gib must be",
    "--kv-cache-gib -1": "kv_cache_gib must be", "--kv-cache-gib nan": "kv_cache_gib must be",
    "--reward-limit-s 0": "reward_limit_s must be", "--clip-low 1.5": "clip_low must be in [0, 1)",
    "--clip-high 0": "clip_high must be positive", "--clip-high inf": "clip_high must be positive",
    "--objective ppo": "invalid choice 'ppo'", "--objective cispo --clip-low 0.1": "clip_low must not",
    "--dtype int8": "invalid choice 'int8'", "--engine sglang": "invalid choice 'sglang'",
    "--no-such-option": "Unrecognized options: --no-such-option", "--top-p 0": "top_p must be in (0, 1]",
    "--top-p 1.1": "top_p must be in (0, 1]", "--top-k -1": "top_k must be non-negative", "--min-p 1": "min_p must be",
    "--max-kept 8": "max_kept must be given with top_k,", "--max-kept 0": "max_kept must be at least 1",
    "--top-k 9 --max-kept 9 --parity.no-sampling-mask": "max_kept must be given with top_k, top_p or min_p and",
    "--parity.no-sampling-mask": "top_p and min_p (no mask)",
    "--top-p 0.9 --parity.no-processed-logprobs": "try --parity.no-sampling-mask",
    "--tis token --top-p 0.9 --parity.no-sampling-mask": "a correction hides the broken backend",
    "--repetition-penalty 1.1": "Unrecognized options: --repetition-penalty", "--offload-optimizer": "without a GPU",
    "--tis nonsense": "invalid choice 'nonsense'", "--tis token --parity.no-fp32-head": "without fp32_head",
    "--tis token --old-policy rollout": "count the mismatch twice",
    "--reject worst --old-policy rollout": "got reject worst", "--reject nonsense": "invalid choice 'nonsense'",
    "--reject token --reject-high 0.9": "must keep a token without a mismatch",
    "--reject trm --reject-low 0.5": "its divergence 0), got 0.5 and None with trm",
    "--reject token --reject-low 1": "reject_low must be in (0, 1)", "--reject token --reject-low 0": "reject_low must",
    "--reject trm --reject-high 0": "reject_high must be positive", "--reject-high 3": "reject must be given with",
    "--reject-low 0.4": "reject must be given with", "--tis token --reject-mean kept": "reject must be given with",
    "--reject token --reject-mean some": "invalid choice 'some'", "--tis masked": "invalid choice 'masked'",
    "--tis token --tis-cap 0": "tis_cap must be positive",
    "--tis-cap 5": "tis_cap must be given with tis (it does nothing without), got 5.0; try --tis token",
    "--task toy --eval-task {root}/task.jsonl": "eval_task must not be given",
    "--task {root}/task.py --eval-task x": "eval_task must not be given",
    "--parity.inflight-otherwise recompute": "would do nothing", "--parity.head-otherwise both": "would do nothing",
    "--engine transformers --parity.no-fp32-head": "without fp32_head",
    "--cuda-graphs": "cuda_graphs must not be given",
    "--prefix-cache on": "invalid choice",
    "--prefix-cache versioned --engine transformers": "prefix_cache and cuda_graphs must be off",
    "--engine transformers --cuda-graphs": "prefix_cache and cuda_graphs must be off with engine transformers",
    "--prefix-cache versioned --parity.no-explicit-runtime": "prefix_cache must be off without explicit_runtime",
    "--engine transformers --parity.no-processed-logprobs": "engine must be vllm",
    "--exact": "exact must be off without --engine shared", "--exact --engine transformers": "exact must be off",
    "--exact --engine shared --parity.no-fp32-head": "exact must be off if a fix is off",
    "--exact --engine shared --parity.no-inflight-keep": "exact must be off",
    "--exact --engine shared --gradient-checkpointing": "with gradient_checkpointing",
    "--eval-task {root}/absent.jsonl": "No such file or directory",
    "--eval-task {root}/task.jsonl": "has 40 without repeats and 40 held out",
    "--model {root}/absent": "Repo id must be in the form", "--model {root}/task.py": "not a valid JSON file",
    "--model owner/absent": "reachable hub name", "--task tyo": "or a reachable hub name), got tyo",
    "--task {root}/absent.py": "FileNotFoundError", "--task owner/absent": "loading the dataset owner/absent failed",
    "--out {root}/task.py/run": "out must be a writable folder",
    "--cache-dir {root}/task.py --model toy --task digits": "cache_dir must be",
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options[:40])
def test_an_option_that_cannot_work(good, options, capsys):
    assert OPTIONS[options] in refusal(command(good, options), capsys)


# ------------------------------------------------------------------------------------------------ tasks
LINE = json.dumps(TASK[0])
JSONL = {
    "empty": (b"", "has none"), "blank": (b"\n\n", "has none"),
    "one problem": (LINE.encode(), "has 1 without repeats and 1 held out"),
    "cut off": (LINE.encode() + b'\n{"question": "1', "line 2 as JSON failed: json.decoder.JSONDecodeError: Untermin"),
    "a list": (b"[1, 2]", "line 1 must be an object"), "no question": (b'{"answer": 1}', "line 1"),
    "blank question": (b'{"question": " ", "answer": 1}', "line 1"), "no answer": (b'{"question": "1"}', "a number"),
    "words": (b'{"question": "1", "answer": "two"}', "a number"),
    "nested": (b'{"question": ' + b"[" * 100_000, "line 1 as JSON failed: RecursionError"),
    "many digits": (b'{"question": "1", "answer": %s}' % MANY_DIGITS.encode(), "line 1 as JSON failed: ValueError"),
    "latin-1": ('{"question": "\xe4", "answer": 1}'.encode("latin-1"), "as UTF-8 failed: UnicodeDecodeError"),
    "bytes": (bytes(range(256)), "as UTF-8 failed: UnicodeDecodeError"),
    "unknown character": (
        b'{"question": "x", "answer": 1}\n' + LINE.encode(), "line 1 failed: Exception: WordLevel error"
    ),
    "two answers": (
        LINE.encode() + b'\n{"question": "1+1=", "answer": 2}\n{"question": "0+1= ", "answer": 5}', "line 1 has '1' and"
    ),
    "repeated": ((LINE.encode() + b"\n") * 40, "has 1 without repeats and 1 held out"),
}  # fmt: skip
SAMPLE, REWARD = PYTHON.split("def reward")
TASKS = {
    "raises": ("1 / 0", "ZeroDivisionError"), "exits": ("raise SystemExit(0)", "SystemExit"),
    "syntax": ("def", "SyntaxError"), "endless import": ("while True: pass", "no answer within 0.3 s"),
    "no reward": (SAMPLE, "has no reward"), "no sample": ("def reward" + REWARD, "has no sample"),
    "one question": (PYTHON.replace("(1, 60)", "(1, 1)"), "has 1 without repeats and 1 held out"),
    "endless sample": (PYTHON.replace("number =", "while True: pass\n    number ="), "no answer within 0.3 s"),
    "waiting sample": (PYTHON.replace("number =", "time.sleep(99)\n    number ="), "no answer within 0.3 s"),
    "sample raises": (PYTHON.replace("number =", "1 / 0\n    number ="), "ZeroDivisionError"),
    "no strings": (PYTHON.replace("str(number + 1)", "number + 1"), "two strings"),
    "two answers": (PYTHON.replace("str(number + 1)", "str(rng.random())"), "a question must have one answer"),
}  # fmt: skip


@pytest.mark.parametrize("kind", JSONL)
def test_a_file_of_questions(good, tmp_path, kind, capsys):
    text, complaint = JSONL[kind]
    (tmp_path / "bad.jsonl").write_bytes(text)
    assert complaint in refusal(command(good, f"--task {tmp_path}/bad.jsonl"), capsys)


@pytest.mark.parametrize("kind", TASKS)
def test_a_task_file(good, tmp_path, kind, capsys):
    text, complaint = TASKS[kind]
    (tmp_path / "bad.py").write_text(text)
    limit = "--reward-limit-s 0.3" if "0.3 s" in complaint else ""
    assert complaint in refusal(command(good, f"--task {tmp_path}/bad.py {limit}"), capsys)


# ------------------------------------------------------------------------------------------------ models
def rewrite(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def tensors(folder: Path, change) -> None:
    table = load_file(folder / "model.safetensors")
    change(table)
    save_file(table, folder / "model.safetensors", {"format": "pt"})


def cut(path: Path, keep: float) -> None:
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])


def shards(folder: Path) -> None:
    """Two by the index, one in the folder."""
    names = sorted(load_file(folder / "model.safetensors"))
    files = {name: f"model-0000{1 + (name == names[-1])}-of-00002.safetensors" for name in names}
    (folder / "model.safetensors").rename(folder / files[names[0]])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def stop_token(folder: Path, value) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))


NORM = "model.norm.weight"
MODELS = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "it has no weights"),
    "cut off": (lambda f: cut(f / "model.safetensors", 0.9), "file not fully covered"),
    "cut in the header": (lambda f: cut(f / "model.safetensors", 0.001), "invalid header length"),
    "empty weights": (lambda f: cut(f / "model.safetensors", 0), "header too small"),
    "garbage": (lambda f: (f / "model.safetensors").write_bytes(b"garbage" * 999), "header too large"),
    "a shard missing": (shards, "model-00002-of-00002.safetensors"),
    "a tensor missing": (lambda f: tensors(f, lambda t: t.pop(NORM)), f"missing ['{NORM}']"),
    "fewer layers": (lambda f: rewrite(f, num_hidden_layers=1, layer_types=None), "more tensors of Qwen2ForCausalLM"),
    "window of one": (
        lambda f: rewrite(f, use_sliding_window=True, sliding_window=1, max_window_layers=0, layer_types=None),
        "sliding_window must be at least 2",
    ),
    "another shape": (lambda f: tensors(f, lambda t: t.update({NORM: torch.ones(3)})), "wrongly shaped"),
    "nan": (lambda f: tensors(f, lambda t: t[NORM].fill_(torch.nan)), f"must be finite, it is not in {NORM}"),
    "int8": (lambda f: tensors(f, lambda t: t.update({n: t[n].char() for n in t})), "must have floating-point weights"),
    "quantised": (lambda f: rewrite(f, quantization_config={"quant_method": "gptq"}), "must not be quantised"),
    "small vocabulary": (lambda f: rewrite(f, vocab_size=8), "outside the vocabulary of 8"),
    "no configuration": (lambda f: (f / "config.json").unlink(), "Should have a `model_type` key"),
    "empty configuration": (lambda f: (f / "config.json").write_text(""), "not a valid JSON file"),
    "nested configuration": (
        lambda f: (f / "config.json").write_text('{"a": ' + "[" * 100_000), "maximum recursion depth"
    ),
    "no language": (lambda f: (f / "config.json").write_text('{"model_type": "vit"}'), "no attribute 'vocab_size'"),
    "broken generation": (lambda f: (f / "generation_config.json").write_text("{"), "generation_config.json' is not a"),
    "a word for a stop token": (lambda f: stop_token(f, "x"), "name an end-of-sequence token"),
    "a negative stop token": (lambda f: stop_token(f, -1), "name an end-of-sequence token"),
    "a stop token too large": (lambda f: stop_token(f, 96), "its token 96 is outside the vocabulary of 96"),
    "unknown type": (lambda f: rewrite(f, model_type="nonsense"), "nonsense"),
    "odd heads": (lambda f: rewrite(f, num_attention_heads=0), "ZeroDivisionError"),
    "text for a number": (lambda f: rewrite(f, hidden_size="wide"), "expected int, got str"),
    "no tokenizer": (lambda f: [path.unlink() for path in f.glob("tokenizer*")], "folder with a tokenizer"),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), "Expecting property name"),
    "pickle": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "Weights only load failed"),
}  # fmt: skip


def test_tensors_that_the_architecture_does_not_have_are_named(good, tmp_path, capsys):
    shutil.copytree(good / "model", tmp_path / "model")
    tensors(tmp_path / "model", lambda table: table.update({"value_head.weight": torch.ones(3)}))
    Policy.load(str(tmp_path / "model"), torch.float32, "cpu")
    assert "that Qwen2ForCausalLM does not have: value_head.weight\n" in capsys.readouterr().out


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_folder(good, tmp_path, kind, capsys):
    spoil, complaint = MODELS[kind]
    shutil.copytree(good / "model", tmp_path / "model")
    spoil(tmp_path / "model")
    assert complaint in refusal(command(good, f"--model {tmp_path}/model --out {tmp_path}/run"), capsys)


# ------------------------------------------------------------------------------------------------ the engine
@pytest.mark.engine
@pytest.mark.parametrize("options, complaint", [
    ("--block-size 7", "No common block size for 7"), ("--block-size 0", "Input should be greater than 0"),
    ("--kv-cache-gib 1e-6", "No available memory for the cache blocks"),
    ("--kv-cache-gib 1e6", "requested memory for kv"),
    ("--model {head16}", "head_dim=16"),
])  # fmt: skip
def test_what_the_engine_refuses(good, tmp_path, options, complaint, capsys):
    if "head16" in options:
        shutil.copytree(good / "model", tmp_path / "model")
        model = qwen2(tied=True, num_attention_heads=4, num_key_value_heads=2)
        model.save_pretrained(tmp_path / "model")
        options = options.format(head16=tmp_path / "model")
    close_live_engine()
    said = refusal(command(good, f"--out {tmp_path}/run {options}"), capsys)
    reason = said.partition("error: vLLM ")[2].partition("): ")[2]  # after "cannot start qwen2 (its sizes): "
    assert complaint in reason
    assert "Traceback" in (tmp_path / "run" / "error.txt").read_text()
