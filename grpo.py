"""GRPO on one page: a transformers trainer and a vLLM engine (0.32) take turns in one process.

The engine samples, the trainer has the gradients, and each has its own copy of the policy.
One step: sample, sleep, score, old log-probabilities, update, wake, load, canary.

Three policies give a log-probability to each sampled token, always by these names:

    behavior_logprobs   the engine, while it samples
    old_logprobs        the trainer before the update, without gradient
    logprobs            the trainer during the update, with gradient

old_logprobs - behavior_logprobs is the mismatch. It is the fault of the backend, and should be as
small as rounding. logprobs - old_logprobs is what the update has moved; the clip of GRPO limits it.

Backend first, then correction. An importance weight (--tis-cap) corrects a mismatch, and so it also
hides a broken backend. It is refused while a fix is off. Three of the five fixes are here, with a
switch each, such as --no-fp32-head. Two would have no effect here: inflight_keep is for requests
that a weight load interrupts (engine_adapter.py), sampling_mask for top-k (extras/masks.py).

Left out, with the file that has it:

    resume, records, clear errors, checked options       prepare.py, records.py, config.py
    other objectives, other importance weights, KL       objectives.py
    chat templates, other rewards, data sets             tasks.py
    fp32 masters for 16 bits, soft-capping               rl.py
    CUDA graphs, experts; the audit of all settings      engine_adapter.py, fixes.py
    groups in flight; top-k and top-p                    extras/inflight.py, extras/masks.py
    shared prompts; the trainer as the engine            extras/prompts.py, extras/reference.py

train.py has all of it, and tests/test_grpo.py holds the two programs equal. The first command here
teaches a model to add, with a wrong habit. The second unlearns it, on a CPU; no GPU has run it yet:

    python -m examples.toys runs/page
    python grpo.py                     # reward 0.23 at step 1; the last line is: held_out 1
"""

import argparse
import json
import os
import random
import re
from collections import Counter
from dataclasses import dataclass, fields
from decimal import Decimal, InvalidOperation
from hashlib import sha256

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.nn.utils import clip_grad_norm_, rnn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, set_seed

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # an engine in this process can take tensors
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["TRITON_F32_DEFAULT"] = "ieee"  # attention in fp32 on a GPU would round to TF32
os.environ["TORCHDYNAMO_DISABLE"] = "0" if ON_GPU else "1"  # a CPU would compile for 17 s
from vllm import LLM, RequestOutput, SamplingParams  # noqa: E402, it reads the variables above

# A minus sign counts unless it follows a number or a word: "10-12" ends in 12, "x = -3" in -3.
# U+2212 is a minus sign too, and a currency may follow it: "-$5" is -5. tasks.py has the same rule.
NUMBER = re.compile(
    r"(?:(?<![\w.%)])[-\u2212])?\\?[$€£]?"  # \$5 is LaTeX
    r"(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+\u2212]?\d+)?"
)


# ------------------------------------------------------------ options; the defaults are the toy job
@dataclass(frozen=True)
class Options:
    model: str = "runs/page/model"  # folder of a Hugging Face causal language model
    problems: str = "runs/page/problems.jsonl"  # lines {"question": ..., "answer": a number}
    seed: int = 0  # decides the held-out problems, the problems of each step and the samples
    steps: int = 60  # the learning rate decays to zero over them
    num_prompts: int = 128  # P problems per step
    group_size: int = 8  # G responses per problem; their mean reward is the baseline
    max_new_tokens: int = 8  # the toy answers with 5, the stop token included
    temperature: float = 0.7  # of both sides; at 1, raw and processed log-probabilities are equal
    lr: float = 1e-3  # for the toy; a pretrained model needs a thousandth of it
    warmup_steps: int = 5  # Adam's second moments are noise at first
    num_minibatches: int = 2  # optimizer steps per batch; from the second on the clip can act
    micro_batch_rows: int = 256  # rows per forward and backward; only memory depends on it
    clip: float = 0.2  # the ratio is clipped to [1 - clip, 1 + clip]
    grad_clip: float = 1.0  # largest norm of a gradient
    tis_cap: float = 0.0  # largest importance weight; 0 is off
    dtype: str = "float32"  # bfloat16 makes fp32_head visible, but rounds small updates away
    kv_cache_gib: float = 0.25  # fixed, because the trainer needs the other memory later


@dataclass(frozen=True)
class Fixes:
    """Off is vLLM's default."""

    processed_logprobs: bool = True  # semantics: log-probabilities after the temperature
    explicit_runtime: bool = True  # inference path: no stale cache, late token or hidden default
    fp32_head: bool = True  # numerics: the engine's last projection in fp32, as the trainer's is


# -------------------------------------------------------------------------------------- the engine
def start_engine(options: Options, fixes: Fixes, max_model_len: int) -> LLM:
    return LLM(
        logprobs_mode="processed_logprobs" if fixes.processed_logprobs else "raw_logprobs",
        enable_prefix_caching=not fixes.explicit_runtime,  # it outlives a load, not a GPU's sleep
        async_scheduling=not fixes.explicit_runtime,  # returns each token one step late
        generation_config="vllm" if fixes.explicit_runtime else "auto",  # auto: as the model says
        hf_overrides={"head_dtype": "float32" if fixes.fp32_head else "model"},
        model=options.model,
        dtype=options.dtype,
        load_format="dummy",  # random weights: the canary finds a tensor that is never loaded
        skip_tokenizer_init=True,  # token ids in, token ids out
        max_model_len=max_model_len,
        max_num_seqs=512,  # decoded at once; the others wait
        kv_cache_memory_bytes=int(options.kv_cache_gib * 2**30),
        gpu_memory_utilization=0.1,  # the share that must be free at the start
        enforce_eager=True,  # no compilation and no CUDA graphs
        enable_sleep_mode=ON_GPU,  # vLLM has none on a CPU
    )


def sample(llm: LLM, problems: list[dict], temperature: float, length: int, stop: list[int]):
    """One RequestOutput per problem. All that shapes the distribution is said: no default acts."""
    params = SamplingParams(
        temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, max_tokens=length, min_tokens=0,
        stop_token_ids=stop, ignore_eos=True, seed=None, logit_bias=None, allowed_token_ids=None,
        repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, bad_words=None,
        logprobs=0, flat_logprobs=True, detokenize=False,  # 0: of the sampled token only
    )  # fmt: skip
    prompts = [{"prompt_token_ids": problem["prompt_ids"]} for problem in problems]
    return llm.generate(prompts, params, use_tqdm=False)


def wake_and_load(llm: LLM, model, canary: list[dict]) -> None:
    """Give the trainer's weights to the engine. Compare both on a few sampled tokens: a canary."""
    torch.cuda.empty_cache()  # what the trainer has freed
    llm.wake_up(tags=["weights"])  # without effect if the engine is awake
    weights = iter(model.state_dict().items())  # names a tied head too, as vLLM's CPU build needs
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    llm.wake_up(tags=["kv_cache"])

    batch = make_batch(sample(llm, canary, temperature=1.0, length=3, stop=[]))
    _, _, mask, behavior_logprobs = batch
    with torch.no_grad():
        logprobs = token_logprobs(model, batch, torch.arange(len(canary)), 1.0)
    nats = ((logprobs - behavior_logprobs).abs().sum() / mask.sum()).item()
    rounding = 1e-4 if model.dtype == torch.float32 else 0.15  # usual: 1e-6, and a few 1e-2
    assert nats < rounding, f"after a load, engine and trainer differ by {nats:.1e} nats"


# ------------------------------------------------------------------------------------- the trainer
def make_batch(outputs: list[RequestOutput]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """inputs, targets, mask, behavior_logprobs: (B, T) each. Position t predicts token t + 1."""
    id_rows, mask_rows, logprob_rows = [], [], []
    for output in outputs:
        response = output.outputs[0]
        zeros = [0.0] * len(output.prompt_token_ids)
        id_rows.append(torch.tensor([*output.prompt_token_ids, *response.token_ids]))
        mask_rows.append(torch.tensor(zeros + [1.0] * len(response.token_ids)))
        logprob_rows.append(torch.tensor(zeros + response.logprobs.logprobs))
    # Padding is on the right, where no token attends to it.
    ids = rnn.pad_sequence(id_rows, batch_first=True).to(DEVICE)  # (B, T + 1)
    mask = rnn.pad_sequence(mask_rows, batch_first=True).to(DEVICE)  # (B, T + 1)
    logprobs = rnn.pad_sequence(logprob_rows, batch_first=True).to(DEVICE)  # (B, T + 1)
    return ids[:, :-1], ids[:, 1:], mask[:, 1:], logprobs[:, 1:]


def token_logprobs(model, batch: tuple, rows: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature)[target] of some rows, 0 outside the mask: (b, T)."""
    inputs, targets, mask, _ = (each[rows] for each in batch)
    response = mask > 0  # (b, T), N of them true
    hidden = model.base_model(input_ids=inputs, use_cache=False).last_hidden_state  # (b, T, H)
    weight = model.get_output_embeddings().weight  # (V, H)
    logits = linear(hidden[response].float(), weight.float()) / temperature  # (N, V)
    logprobs = logits.log_softmax(dim=-1).gather(-1, targets[response][:, None])  # (N, 1)
    return torch.zeros_like(mask).masked_scatter(response, logprobs)


def last_number(text: str) -> Decimal | None:
    """The last number in a text, without thousands separators: 42 in GSM8K's "... #### 42"."""
    try:
        return Decimal(re.sub(r"[\\$€£,]", "", NUMBER.findall(text)[-1]).replace("\u2212", "-"))
    except (IndexError, InvalidOperation):  # no number, or an exponent of twenty digits
        return None


def score(problems: list[dict], outputs: list[RequestOutput], tokenizer) -> Tensor:
    """1.0 for a response whose last number is the answer, else 0.0: (B,)."""
    rewards = []
    for problem, output in zip(problems, outputs, strict=True):
        text = tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True)
        given = last_number(text)
        rewards.append(float(given is not None and given == last_number(str(problem["answer"]))))
    return torch.tensor(rewards, device=DEVICE)


# ---------------------------------------------------------------------------------------- the loop
def train(options: Options, fixes: Fixes):
    """Yields metrics and outputs of each step, and at the end those of the held-out problems."""
    assert all(vars(fixes).values()) or not options.tis_cap, "tis_cap needs all fixes to be on"
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, fused=True)

    tokenizer = PreTrainedTokenizerFast.from_pretrained(options.model)
    stop = [tokenizer.eos_token_id]
    with open(options.problems) as lines:
        problems = [json.loads(line) for line in lines]
    for problem in problems:
        problem["prompt_ids"] = tokenizer(problem["question"])["input_ids"]
    shuffled = random.Random(options.seed).sample(problems, len(problems))
    held_out = shuffled[: round(0.1 * len(problems))]
    training = shuffled[len(held_out) :]
    draw = random.Random(options.seed)
    longest = max(len(problem["prompt_ids"]) for problem in problems)
    llm = start_engine(options, fixes, longest + options.max_new_tokens)
    canary = [{"prompt_ids": each["prompt_ids"][:5]} for each in training[:4]]  # under one block
    wake_and_load(llm, model, canary)

    for step in range(1, options.steps + 1):
        # Sample G responses to each of P problems: B = P * G rows. Seed and step decide them.
        drawn = draw.sample(training, options.num_prompts)
        asked = [problem for problem in drawn for _ in range(options.group_size)]
        stream = repr((options.seed, "train", step)).encode()
        seed = int.from_bytes(sha256(stream).digest()[:6], "big")
        set_seed(seed % 2**32)  # numpy's generator, which vLLM uses on a GPU
        torch.manual_seed(seed)  # torch's generator, which vLLM uses on a CPU
        outputs = sample(llm, asked, options.temperature, options.max_new_tokens, stop)
        if ON_GPU:
            llm.sleep(level=2)  # frees the engine's weights and its cache

        # Score: A = (R - mean_group) / (std_group + 1e-4).
        rewards = score(asked, outputs, tokenizer)  # (B,)
        groups = rewards.view(-1, options.group_size)  # (P, G)
        centred = groups - groups.mean(dim=1, keepdim=True)
        advantages = (centred / (groups.std(dim=1, keepdim=True) + 1e-4)).view(-1, 1)  # (B, 1)

        # Old log-probabilities. The weights are still those that the engine sampled with.
        batch = make_batch(outputs)
        _, _, mask, behavior_logprobs = batch
        row_numbers = torch.arange(len(outputs))
        with torch.no_grad():
            parts = row_numbers.split(options.micro_batch_rows)
            old = [token_logprobs(model, batch, rows, options.temperature) for rows in parts]
        old_logprobs = torch.cat(old)  # (B, T)
        mismatch = old_logprobs - behavior_logprobs  # (B, T)
        weights = mask  # (B, T), of each token in the loss
        if options.tis_cap:  # truncated importance sampling
            weights = mask * mismatch.exp().clamp(max=options.tis_cap)

        # Update: the mean of -min(r A, clip(r) A) over the tokens of each minibatch. A minibatch
        # without signal takes no step, because AdamW would move the weights by momentum alone.
        warmup = min(1.0, step / (options.warmup_steps + 1))
        decay = 1 - (step - 1) / options.steps
        optimizer.param_groups[0]["lr"] = options.lr * warmup * decay
        sums = Counter()  # over the minibatches
        minibatches = row_numbers.split(len(outputs) // options.num_minibatches)
        minibatches = [rows for rows in minibatches if advantages[rows].any()]
        for minibatch in minibatches:
            num_tokens = mask[minibatch].sum()  # so the losses of its micro-batches add up
            for rows in minibatch.split(options.micro_batch_rows):
                logprobs = token_logprobs(model, batch, rows, options.temperature)
                ratio = torch.exp(logprobs - old_logprobs[rows])  # (b, T)
                unclipped = ratio * advantages[rows]
                clipped = ratio.clamp(1 - options.clip, 1 + options.clip) * advantages[rows]
                loss = -(torch.minimum(unclipped, clipped) * weights[rows]).sum() / num_tokens
                loss.backward()
                sums["loss"] += loss.item()
                sums["clip_rate"] += ((clipped < unclipped) * mask[rows] / num_tokens).sum().item()
            sums["grad_norm"] += clip_grad_norm_(model.parameters(), options.grad_clip).item()
            optimizer.step()
            optimizer.zero_grad()

        wake_and_load(llm, model, canary)

        response = mismatch[mask > 0].double()  # (N,)
        metrics = {"step": step, "reward": rewards.mean().item(), "updates": len(minibatches)}
        metrics |= {name: total / len(minibatches) for name, total in sums.items()}
        metrics["mismatch_abs_mean"] = response.abs().mean().item()
        metrics["mismatch_kl"] = (response.expm1() - response).mean().item()
        yield metrics, outputs

    outputs = sample(llm, held_out, 0.0, options.max_new_tokens, stop)
    yield {"held_out": score(held_out, outputs, tokenizer).mean().item()}, outputs


if __name__ == "__main__":
    cli = argparse.ArgumentParser(description="The reasons are beside the fields, in grpo.py.")
    for each in fields(Options):
        cli.add_argument(f"--{each.name.replace('_', '-')}", type=each.type, default=each.default)
    for fix in fields(Fixes):
        cli.add_argument(f"--no-{fix.name.replace('_', '-')}", dest=fix.name, action="store_false")
    given = vars(cli.parse_args())
    fixes = Fixes(*[given.pop(fix.name) for fix in fields(Fixes)])
    for metrics, _ in train(Options(**given), fixes):
        print(" | ".join(f"{name} {value:.3g}" for name, value in metrics.items()), flush=True)
