"""Bad input of every kind: one sentence on stderr, exit status 2, no traceback, no model taught."""

import json
import re
import shutil
import socket

import pytest
import torch
from helpers import PYTHON, TASK, close_live_engine, command, parametrize, refusal, rewrite, tensors, value_error
from huggingface_hub import constants

from model_folder import reach_hub

# ------------------------------------------------------------------------------------------------ options
# One of each rule: options, and what is said of them. Then of two groups, and of a job, a model or a task.
OPTIONS = """--no-such-option => Unrecognized options: --no-such-option
--steps x => invalid literal for int()
--temperature nan => temperature must be in [0.01, 2]
--num-minibatches 3 => num_minibatches must divide
--objective cispo --clip-low 0.1 => clip_low must not
--objective reinforce --clip-high 2 => clip_high must not be given with reinforce
--kl-gradient exact => kl_gradient needs kl_coef
--tis-cap 5 => tis_cap needs tis (without it there is no weight), got 5.0; try --tis token
--reject-high 3 => reject_mean need reject
--reject token --reject-high 0.9 => must keep a token without a mismatch
--reject token --reject-low 1e-30 --reject-high 1e30 => and reject one of 80 nats
--reject binary_tv --reject-high 1 => and reject one of 80 nats
--objective dr_grpo --reject token --reject-mean kept => reject_mean must not be given with dr_grpo and reject
--objective gspo --reject geometric --reject-mean kept => reject_mean must not be given with gspo and reject
--lora-alpha 8 => lora_forward need lora_rank
--variants both-heads => would do nothing
--variants recompute --parity.no-inflight-keep --parity.no-uncached-runtime => repairs the other fault
--block-size 24 => block_size must be a multiple of 16
--max-staleness 3 => try --inflight-groups
--block-size 32 --engine transformers => block_size must not be given with engine transformers
--verify-loads 2 --engine transformers => verify_loads must not be given with engine transformers
--chat-template-args [1] => must be a JSON object
--stop= => stop must not contain an empty text
--system-prompt= => system_prompt must not be empty
--engine transformers --parity.no-fp32-head => without fp32_head
--lora-rank 4 --lora-forward added --tis token => the broken backend), got tis token without lora_forward
--rollout-weights int8 --engine transformers => rollout_weights must be own with engine transformers
--inflight-groups 33 => must be at most num_prompts * max_staleness = 32
--resume --parity.no-uncached-runtime => resume must be off without uncached_runtime
--schedule-ahead --parity.no-uncached-runtime => schedule_ahead must be off without uncached_runtime
--schedule-ahead --inflight-groups 2 => schedule_ahead must be off with inflight_groups
--prefix-cache off --parity.no-uncached-runtime => prefix_cache must not be off without uncached_runtime
--parity.no-sampling-mask => top_p and min_p (no mask)
--max-kept 8 => max_kept must be given with top_k, top_p or min_p and
--top-p 0.9 --parity.no-processed-logprobs => try --parity.no-sampling-mask
--steps 0 --probe-every 5 => probe_every must be off with steps 0
--rollout-weights int8 --probe-every 1 => must be off with lora_rank and rollout_weights
--num-prompts 37 => must be at most 36 (all there are)
--inflight-groups 33 --max-staleness 9 => must be at most 36
--offload-optimizer => without a GPU
--tracker tensorboard => such as trackio or wandb (TensorBoard is gone: its SummaryWriter.add_scalar takes
--max-new-tokens 256 => max_new_tokens must be below the model's context of 256
--task toy --reward {root}/task.py => reward must be given with a data file only
--task toy --eval-task {root}/task.jsonl --answer-column q => answer_column must be a column of
--question-column q => question_column must be a column of {root}/task.jsonl, got q; it has question, answer
--eval-task {root}/absent.jsonl => as UTF-8 failed: FileNotFoundError
--eval-task {root}/task.jsonl => task.jsonl has 40 without repeats, all of them held out
--task tyo => loading the dataset tyo (task must be toy,
--task {root}/absent.py => FileNotFoundError
--model owner/absent => reading the model owner/absent (toy, a folder or a hub name;
--out {root}/\udcff => out must be a printable name, got '{root}/\\udcff'
--out {root}/task.py/run => out must be a writable folder
--cache-dir {root}/task.py --model toy --task digits => teaching a model for --cache-dir"""


@parametrize("line", OPTIONS.split("\n"), ids=lambda line: ascii(line.partition(" => ")[0][:40]))
def test_an_option_that_cannot_work(good, line, capsys):
    options, complaint = line.split(" => ")
    assert complaint.format(root=good) in refusal(command(good, options), capsys)
    assert not [*good.glob("run/*")]


def test_a_hub_that_does_not_answer(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        hub = f"http://127.0.0.1:{mute.getsockname()[1]}"
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", hub)
        with value_error(rf"^owner/name is no folder, and reaching {hub} \(HF_HUB_OFF"):
            reach_hub("owner/name", limit_s=0.3)


# ------------------------------------------------------------------------------------------------ tasks
LINE, (SAMPLE, REWARD) = json.dumps(TASK[0]), PYTHON.split("def reward")
TASKS = {  # by the file's name and the case
    "a.jsonl empty": ("\n\n", "has none"), "a.jsonl latin-1": ("\xe4", "as UTF-8 failed: UnicodeDecodeError"),
    "a.jsonl.gz": ("\xff", "must be .parquet: unpack .gz, convert .arrow) as UTF-8"),
    "a.jsonl twins": ('{"x": {"question": "1", "question": "2"}}', "must have each column once, got two question"),
    "a.jsonl cut off": (LINE + '\n{"question": "1', "line 2 as JSON failed: json.decoder.JSONDecodeError: Untermin"),
    "a.jsonl no rows": (LINE + "\n3", "line 2: its question must be a text, or a list of chat messages with"),
    "a.jsonl unknown character": ('{"question": "x", "answer": 1}\n' + LINE, "line 1 failed: Exception: WordLevel"),
    "a.csv": ("question,answer\n1+1,2\n", "(of a table: pandas.read_csv(PATH, dtype=str, keep_default_na=False).to_j"),
    "random.py": (PYTHON, "must not have the name of a loaded module, got random; rename the file"),
    "a.py raises": ("1 / 0", "the import of {path} fails (ZeroDivisionError"),
    "a.py no reward": (SAMPLE, "it has no reward"),
    "a.py no answer": (PYTHON.replace(", str(number + 1)", ""), "a problem of {path} must be a question, an answer"),
    "a.py one argument": (PYTHON.replace("problem, response", "response"), "perhaps `rollout`, it is reward(resp"),
    "a.py own class": (PYTHON.replace("return f", "return lambda: f"), "sample of {path} fails (AttributeError"),
}  # fmt: skip


@parametrize("kind", TASKS)
def test_a_task_file(good, tmp_path, kind, capsys):
    text, complaint = TASKS[kind]
    path = tmp_path / kind.split()[0]
    path.write_text(text, "latin-1")
    said = refusal(command(good, f"--task {path} --reward-limit-s 60"), capsys)
    assert complaint.replace("{path}", str(path)) in said


# ------------------------------------------------------------------------------------------------ models
def added(new):
    return tensors(lambda table: table.update(new))


NORM, UP, HEAD = "model.norm.weight", "model.layers.0.mlp.up_proj.weight", torch.ones(96, 64)
CONFIG, WEIGHTS, SETTINGS = "config.json", "model.safetensors", "generation_config.json"
INDEX = f"{WEIGHTS}.index.json"
CUSTOM = {"auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}, "model_type": "nonsense"}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 13,
            "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}  # fmt: skip
MODELS = {
    "pickle": (lambda f: (f / WEIGHTS).rename(f / "pytorch_model.bin"), "no file named model.safetensors"),
    "cut off": (lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-99]),
                "reading {folder}/model.safetensors (cut off, or a pointer that git-lfs has not fetched?) failed"),
    "cut off tokens": (lambda f: (f / "tokenizer.json").write_text("{"), "reading {folder}/tokenizer.json failed"),
    "a tensor missing": (tensors(lambda t: t.pop(NORM)), f"missing ['{NORM}']"),
    "another shape": (added({NORM: torch.ones(3)}), "wrongly shaped"),
    "nan": (tensors(lambda t: t[NORM].fill_(torch.nan)), f"must be finite, it is not in {NORM}"),
    "a head of its own": (added({"lm_head.weight": HEAD}), "set tie_word_embeddings to false"),
    "scales": (tensors(lambda t: t.update({UP: t[UP].to(torch.float8_e4m3fn), f"{UP}_scale": torch.ones(1),
                                           f"{UP}_scale_inv": torch.ones(1)})), UP + "_scale and 1 more scales"),
    "a bias lost": (added({"lm_head.bias": HEAD}), "has lm_head.bias and 0 more, which config.json leaves out"),
    "a tensor twice": (added({"model.language_model.norm.weight": HEAD}), f"has two of {NORM}"),
    "quantised": (rewrite(CONFIG, quantization_config={"quant_method": "gptq"}), "must not be quantised"),
    "adapters": (rewrite("adapter_config.json"), "{folder} has adapter_config.json; merge"),
    "weights twice": (rewrite(INDEX, weight_map={"a": "model-1.safetensors"}),
                      "{folder} has model.safetensors, which would be read, and " + INDEX),
    "small vocabulary": (rewrite(CONFIG, vocab_size=8), "outside the vocabulary of 8"),
    "code of its own": (rewrite(CONFIG, **CUSTOM), "reading the model {folder} (toy, a folder or a hub name; code from"
                        " a model's folder is never run) failed: ValueError: The repository"),
    "no language": (rewrite(CONFIG, model_type="vit"), "must be a causal language model that transformers"),
    "pictures": (rewrite(CONFIG, model_type="llava"), "is a llava; try a folder with its llama alone"),
    "not causal": (rewrite(CONFIG, is_causal=False), "model must be causal (a token must not attend to later ones)"),
    "embeddings": (lambda f: (f / CONFIG).write_text(
        '{"model_type": "gemma3_text", "use_bidirectional_attention": true}'), "must be causal"),
    "longrope": (rewrite(CONFIG, rope_parameters=LONGROPE), "original context of 13 tokens (beyond it longrope rotates"
                 " by the other rows of a batch), the longest have 14; try"),
    "no stop token": (rewrite(SETTINGS, eos_token_id="x"), "name an end-of-sequence token"),
    "a stop token too large": (rewrite(SETTINGS, eos_token_id=96), "its token 96 is outside the vocabulary of 96"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "must be a folder with tokenizer.json, {folder} has"),
}  # fmt: skip


@parametrize("kind", MODELS)
def test_a_model_folder(good, tmp_path, kind, capsys):
    spoil, complaint = MODELS[kind]
    folder = shutil.copytree(good / "model", tmp_path / "model")
    (folder / "code.py").write_text(f"open({str(tmp_path / 'has_run')!r}, 'w')")
    spoil(folder)
    said = refusal(command(good, f"--engine transformers --model {folder} --out {tmp_path}/run"), capsys)
    assert complaint.replace("{folder}", str(folder)) in said
    assert not (tmp_path / "has_run").exists()


# ------------------------------------------------------------------------------------------------ the engine
@pytest.mark.engine
@parametrize("gib, complaint", [
    ("1e-6", "No available memory for the cache blocks. Try increasing --kv-cache-gib"),
    ("1e6", "requested memory for kv"),
])  # fmt: skip
def test_what_the_engine_refuses(good, tmp_path, gib, complaint, capsys):
    close_live_engine()
    said = refusal(command(good, f"--out {tmp_path}/run --kv-cache-gib {gib}"), capsys)
    assert re.search(rf"error: vLLM .*\): .*{complaint}", said)
    assert "Traceback" in (tmp_path / "run" / "error.txt").read_text()
