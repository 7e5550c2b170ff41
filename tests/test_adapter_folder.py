"""Adapters of PEFT (--adapter): a run from a folder of PEFT's to one that PEFT and vLLM load, and what is refused."""

import shutil
from pathlib import Path

import pytest
import torch
from helpers import ROUNDING, at, built, close_live_engine, command, policy_in, qwen2, refusal, rewrite, tensors
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from engine_adapter import Rollout
from extras.adapter_folder import CONFIG, TENSORS, load_into, read
from extras.lora import Adapters, Options
from report.files import checkpoints, save_checkpoint, save_policy
from rl import make_batch
from tasks.toys import toy_tokenizer
from train import train_step

IDS = torch.tensor([[5 + row, 6, 7, 8, 9 + row, 10] for row in range(4)])
BATCH = make_batch([Rollout(row[:1], None, row[1:], [0.0] * 5) for row in IDS.tolist()])


@torch.no_grad()
def of_peft(model: Path, adapter: Path) -> torch.Tensor:
    """Log-probabilities of IDS after the first column, (4, 5)."""
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter).eval()
    return loaded(input_ids=IDS).logits[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:, None])[..., 0]


def of_vllm(model: Path, adapter: Path) -> torch.Tensor:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    close_live_engine()
    llm = LLM(str(model), skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, dtype="float32",
              kv_cache_memory_bytes=2**24, enable_prefix_caching=False, enable_lora=True, max_lora_rank=8)
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": row} for row in IDS.tolist()]
    answers = llm.generate(prompts, sampling, lora_request=LoRARequest("trained", 1, str(adapter)), use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    return torch.tensor([[column[token].logprob for column, token in
                          zip(answer.prompt_logprobs[1:], answer.prompt_token_ids[1:], strict=True)]
                         for answer in answers])


@pytest.fixture(scope="module")
def tuned(good, tmp_path_factory) -> Path:
    """PEFT's folder after three steps: rsLoRA with a dropout, on two layers of 14."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(good / "model"), LoraConfig(
        r=3, lora_alpha=8, use_rslora=True, lora_dropout=0.1, target_modules=["q_proj", "down_proj"],
        layers_to_transform=[1], task_type="CAUSAL_LM"))  # fmt: skip
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(3):
        model(input_ids=IDS, labels=IDS).loss.backward()
        adam.step()
        adam.zero_grad()
    folder = tmp_path_factory.mktemp("tuned")
    model.save_pretrained(folder)
    return folder


@pytest.mark.engine
def test_a_run_starts_from_adapters_of_peft_and_leaves_some_that_peft_and_vllm_load(good, tuned, tmp_path):
    model, out, begun = good / "model", tmp_path / "run", shutil.copytree(tuned, tmp_path / "tuned")
    options = dict(engine="vllm", adapter=str(begun), kl_coef=0.1, task=str(good / "task.py"), max_new_tokens=4,
                   lr=1e-2, group_size=8, num_minibatches=1, temperature=2.0, gradient_checkpointing=True)  # fmt: skip
    trainer = built(good, out, **options)
    policy = at(trainer.policy, 1.0)
    first = policy.score(BATCH)["logprobs"].detach()
    assert (first - of_peft(model, begun)).abs().max() < ROUNDING
    to_first = [train_step(trainer, step).metrics["kl_ref"] for step in (1, 2, 3)]
    assert to_first[0] == 0 < to_first[2]  # the reference is the policy that PEFT has trained
    save_policy(trainer.run, policy.model, trainer.parts, out / "policy")
    save_checkpoint(trainer, 3)
    last = policy.score(BATCH)["logprobs"].detach()
    assert (last - first).abs().max() > 100 * ROUNDING
    assert (last - policy_in(out / "policy").score(BATCH)["logprobs"]).abs().max() < ROUNDING
    for load in of_peft, of_vllm:
        assert (last - load(model, *checkpoints(out))).abs().max() < ROUNDING
    tensors(lambda table: table.popitem()[1].add_(1), TENSORS)(begun)
    with pytest.raises(ValueError, match=f"changed are {begun}/{TENSORS};"):
        built(good, out, resume=True, **options)


@pytest.mark.parametrize("options", [
    {"target_modules": "all-linear"}, {"target_modules": r".*\.1\..*(q_proj|k|up_proj)", "exclude_modules": ".*up.*"},
    {"target_modules": ["layers.0.self_attn.q_proj", "v_proj"], "layers_to_transform": 0},
])  # fmt: skip
def test_the_layers_with_adapters_are_those_of_peft(options, tmp_path):
    get_peft_model(qwen2(tied=False), LoraConfig(init_lora_weights=False, **options)).save_pretrained(tmp_path)
    rewrite(CONFIG, **options)(tmp_path)  # PEFT has written all-linear as a list
    adapters = Adapters(qwen2(tied=False), Options(8), 0)
    config, expected = read(str(tmp_path))
    load_into(adapters, config, expected)
    assert all(torch.equal(expected[name], tensor) for name, tensor in adapters.tensors().items())


def templated():
    """The model's tokenizer, with a chat template that a fine-tuning has added."""
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = "={{ messages[0].content }}="
    return tokenizer


UNKNOWN = {"alpha_pattern": {"q_proj": 4}, "bias": "all", "init_lora_weights": "pissa", "loftq_config": {"bits": 4},
           "lora_bias": True, "modules_to_save": ["lm_head"], "peft_type": "ADALORA", "rank_pattern": {"q_proj": 4},
           "trainable_token_indices": [1], "use_dora": True, "of_a_newer_peft": 1}  # fmt: skip
HEAD = "base_model.model.lm_head.lora_A.weight"
A = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"
REFUSED = {
    f"{{folder}} has {UNKNOWN}; try": rewrite(CONFIG, **UNKNOWN),
    f"it lacks [] and has ['{HEAD}'] besides": tensors(lambda table: table.update({HEAD: torch.ones(3, 64)}), TENSORS),
    f"it lacks ['{A}'] and has [] besides": tensors(lambda table: table.pop(A), TENSORS),
    f"it lacks [] and has ['{A}'": rewrite(CONFIG, target_modules=["q_proj"]),
    f"{A} must be finite, got NaN or an infinity": tensors(lambda table: table[A].fill_(torch.nan), TENSORS),
    "lora_A.weight must have the shape [4, 64], got [3, 64]": rewrite(CONFIG, r=4),
    "failed: KeyError: 'r'": lambda folder: (folder / CONFIG).write_text("{}"),
    "failed: FileNotFoundError": lambda folder: (folder / TENSORS).unlink(),
    "lora_rank must not be given with adapter ({folder} has R = 3 and alpha = 13.8564)": "--lora-rank 3",
    """the tokenizer in {folder} makes "=32+1=="; copy its files""": lambda folder: templated().save_pretrained(folder),
    "probe_every and probe_on_alarm must be off with lora_rank": "--lora-forward added --probe-every 1",
}  # fmt: skip


@pytest.mark.parametrize("complaint", REFUSED, ids=lambda complaint: complaint[-30:])
def test_what_is_not_supported_or_does_not_fit_is_refused_by_its_name(good, tuned, tmp_path, complaint, capsys):
    folder, spoil = shutil.copytree(tuned, tmp_path / "tuned"), REFUSED[complaint]
    options = f"--engine transformers --adapter {folder} --out {tmp_path}/run "
    if isinstance(spoil, str):
        options += spoil
    else:
        spoil(folder)
    said = refusal(command(good, options), capsys)
    assert complaint.replace("{folder}", str(folder)) in said
