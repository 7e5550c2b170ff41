"""GRPO on one page: a transformers trainer and a vLLM engine (0.32) take turns in one process.

Each sampled token has three log-probabilities: behavior_logprobs of the engine while it samples,
old_logprobs of the trainer before the update, and logprobs of the trainer during the update.
old_logprobs - behavior_logprobs is the mismatch, the fault of the backend: with all fixes it is as
small as rounding. An importance weight (--tis-cap) also hides a broken backend, so it is refused
while a fix is off. The first command makes a model that should write the larger digit at each place
of two numbers, and mostly writes the smaller one. The second unlearns it, and the third does not:

    python -m tasks.toys runs/page
    python grpo.py --two-policy
    python grpo.py --two-policy --no-processed-logprobs

Raw log-probabilities are those at temperature 1, so before any update a ratio is p_0.7 / p_1, far
below 1 for unlikely tokens. The clip removes the gradient of those in wrong answers, and the policy
drifts to random ones (docs/page.png). tests/test_grpo.py holds page and train.py equal.
Left out, but in train.py: settings that are read back (verify/), fp32 masters (rl.py), --objective,
--kl-coef, passes over a file (tasks/); in extras/ --resume, --inflight-groups, --reject, --top-p.
"""

import json
import os
import random
import re
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, HfArgumentParser, PreTrainedTokenizerFast, set_seed

from verify.proof import differing  # one file: all that a copy of this page needs beside it

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # an engine in this process can take tensors
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["TRITON_F32_DEFAULT"] = "ieee"  # attention in fp32 on a GPU would round to TF32
os.environ["TORCHDYNAMO_DISABLE"] = "0" if ON_GPU else "1"  # a CPU would compile for 17 s
from vllm import LLM, RequestOutput, SamplingParams  # noqa: E402, it reads the variables above


@dataclass(frozen=True)
class Config:
    """The defaults are the toy job. The first three are fixes: off is vLLM's default."""
    processed_logprobs: bool = True  # semantics: log-probabilities after the temperature
    uncached_runtime: bool = True  # inference path: no stale cache, late token or hidden default
    fp32_head: bool = True  # numerics: the engine's last projection in fp32, as the trainer's is
    two_policy: bool = False  # the ratio is pi / behavior, in place of pi / old
    model: str = "runs/page/model"  # folder of a Hugging Face causal language model
    task: str = "runs/page/problems.jsonl"  # lines {"question": ..., "answer": a number}
    out: str = "runs/page/policy"  # folder for the trained model
    seed: int = 0  # decides the held-out problems, the problems of each step and the samples
    steps: int = 40  # the learning rate decays to zero over them
    eval_every: int = 10  # steps between evaluations with the held-out tenth of the problems
    num_prompts: int = 48  # P problems per step
    group_size: int = 8  # G responses per problem; their mean reward is the baseline
    max_new_tokens: int = 10  # the toy answers with up to 9, the stop token included
    temperature: float = 0.7  # of both sides; at 1, raw and processed log-probabilities are equal
    lr: float = 2e-3  # for the toy; a pretrained model needs a thousandth of it
    num_minibatches: int = 2  # optimizer steps per batch; from the second on the clip can act
    micro_batch_tokens: int = 8192  # of a forward; the head needs 12 bytes * tokens * vocabulary
    clip: float = 0.2  # the ratio is clipped to [1 - clip, 1 + clip]
    tis_cap: float = 0.0  # largest importance weight; 0 is off
    dtype: str = "float32"  # bfloat16 makes fp32_head visible; a small lr is rounded away
    block_size: int = 32  # tokens of a KV block, the smallest on a CPU; only full ones are cached
    kv_cache_gib: float = 0.25  # fixed, because the trainer needs the other memory later

    def check(self, longest_prompt: int, num_training: int) -> None:
        """Refuse what cannot work, and name the switches that cannot show with these options."""
        raw, cached = not self.processed_logprobs, not self.uncached_runtime
        if self.tis_cap and (raw or cached or self.two_policy or not self.fp32_head):
            raise ValueError("tis_cap needs all fixes, and two_policy off")
        for name, value in vars(self).items():
            free = type(value) in (bool, str) or name == "seed" or (name, value) == ("tis_cap", 0)
            if not free and not 0 < value < torch.inf:
                raise ValueError(f"{name} must be positive and finite, got {value}")
        if self.dtype != "float32" and (self.dtype != "bfloat16" or self.lr < 1e-3):
            raise ValueError("dtype must be float32, or bfloat16 with lr >= 1e-3 (no fp32 masters)")
        if self.num_prompts * self.group_size % self.num_minibatches:
            raise ValueError("num_minibatches must divide num_prompts * group_size")
        if self.group_size < 2 or self.num_prompts > num_training:
            raise ValueError(f"group_size must be 2 or more, num_prompts at most {num_training}")
        if Path(self.out).resolve() == Path(self.model).resolve():
            raise ValueError("out must not be the model's folder")
        if raw and (self.temperature == 1 or not self.two_policy):
            print("note: raw values change the loss only with --two-policy, temperature not 1")
        if cached and (ON_GPU or longest_prompt <= self.block_size):
            print("note: no cached block is stale: a GPU's sleep clears it, or no prompt fills it")
        if not self.fp32_head and self.dtype == "float32":
            print("note: in float32 each head is fp32")


def train(config: Config):
    """Yields metrics and rollouts of each step; saves the policy after the last one."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(config.model)
    problems = read_problems(config.task, tokenizer)
    shuffled = random.Random(config.seed).sample(problems, len(problems))
    held_out = shuffled[: max(1, round(0.1 * len(problems)))]
    training = shuffled[len(held_out) :]
    longest_prompt = max(len(problem["prompt_ids"]) for problem in problems)
    config.check(longest_prompt, len(training))
    model, report = AutoModelForCausalLM.from_pretrained(config.model, dtype=config.dtype,
        use_safetensors=True, trust_remote_code=False, output_loading_info=True)  # fmt: skip
    misfits = report["missing_keys"] | report["unexpected_keys"]  # left random, left out
    untied = model.config.tie_word_embeddings and not model.all_tied_weights_keys
    if untied or misfits:
        raise ValueError(f"{config.model}: not of config.json, {untied=}, {misfits}")
    optimizer = torch.optim.AdamW(model.to(DEVICE).parameters(), weight_decay=0.0, fused=True)
    named = set()
    for source in (tokenizer, model.generation_config, model.config):  # a chat model has several
        eos = getattr(source, "eos_token_id", None)  # a number, a list or None
        named |= set(eos if type(eos) is list else [eos])
    stop = sorted(named - {None})
    if not stop:
        raise ValueError(f"{config.model} must name a stop token, or no response ends")
    Path(config.out).mkdir(parents=True, exist_ok=True)  # an error comes now, not after the steps
    llm = start_engine(config, longest_prompt + config.max_new_tokens)
    load(llm, model)
    draw = random.Random(config.seed)
    for step in range(1, config.steps + 1):
        # 1. Sample G responses to each of P problems: B = P * G rows. Seed and step decide them.
        drawn = draw.sample(training, config.num_prompts)
        asked = [problem for problem in drawn for _ in range(config.group_size)]
        seed = int(sha256(repr((config.seed, "train", step)).encode()).hexdigest()[:12], 16)
        set_seed(seed % 2**32)  # numpy's generator, of vLLM's samples on a GPU
        torch.manual_seed(seed)  # torch's generator, of its samples on a CPU
        rollouts = generate(llm, asked, config.temperature, config.max_new_tokens, stop)
        if ON_GPU:
            llm.sleep(level=2)  # frees the engine's weights and its cache
        # 2. Score. A = (R - mean_group) / (std_group + 1e-4), exactly 0 for equal rewards.
        rewards = grade(asked, rollouts, tokenizer)  # (B,)
        groups = rewards.view(-1, config.group_size)  # (P, G)
        groups = groups - groups[:, :1]  # the mean of equal numbers can be rounded
        centred = groups - groups.mean(dim=1, keepdim=True)
        advantages = (centred / (groups.std(dim=1, keepdim=True) + 1e-4)).view(-1, 1)  # (B, 1)
        # 3. The trainer's own log-probabilities, with the weights that the engine sampled with.
        batch = make_batch(rollouts)
        mask, behavior_logprobs = batch[2:]
        micro = torch.arange(len(mask)).split(max(1, config.micro_batch_tokens // mask.shape[1]))
        with torch.no_grad():
            old_logprobs = torch.cat([score(model, batch, rows, config) for rows in micro])
        mismatch = old_logprobs - behavior_logprobs  # (B, T)
        mismatch_abs_mean = (mismatch.abs().sum() / mask.sum()).item()
        if config.processed_logprobs and config.uncached_runtime and config.fp32_head:
            rounding = 1e-4 if model.dtype == torch.float32 else 0.15  # usual: 1e-6, a few 1e-2
            assert mismatch_abs_mean < rounding, f"mismatch of {mismatch_abs_mean:.1e} nats"
        # 4. Update, with weights of truncated importance sampling if there is a cap: (B, T).
        correction = mask * mismatch.exp().clamp(max=config.tis_cap) if config.tis_cap else mask
        denominator = behavior_logprobs if config.two_policy else old_logprobs  # (B, T)
        warmup = min(1.0, step / 6)  # Adam's second moments are noise at first
        optimizer.param_groups[0]["lr"] = config.lr * warmup * (1 - (step - 1) / config.steps)
        metrics = {"step": step, "reward": rewards.mean().item()}
        metrics |= update(model, optimizer, batch, advantages, denominator, correction, config)
        metrics["mismatch_abs_mean"] = mismatch_abs_mean
        # 5. Wake, load, verify.
        torch.cuda.empty_cache()  # what the trainer has freed
        llm.wake_up(tags=["weights"])  # without effect if the engine is awake
        load(llm, model)
        if step == config.steps or step % config.eval_every == 0:
            answers = generate(llm, held_out, 0.0, config.max_new_tokens, stop)
            metrics["held_out"] = grade(held_out, answers, tokenizer).mean().item()
            print(held_out[0]["question"], tokenizer.decode(answers[0].outputs[0].token_ids))
        yield metrics, rollouts
    model.save_pretrained(config.out)
    tokenizer.save_pretrained(config.out)


def read_problems(path: str, tokenizer) -> list[dict]:
    """question, answer and prompt_ids of each line, in the chat template if there is one."""
    problems = []
    for number, line in enumerate(Path(path).read_text("utf-8-sig").rstrip().split("\n"), 1):
        try:
            row = json.loads(line)
            question, answer = row["question"], str(row["answer"])
            plain = re.search(r"(\A|####)\s*" + NUMBER + r"\s*\Z", answer)
            if not (question.strip() and plain):
                raise ValueError("no question, or an answer that is no plain number")
            ids = tokenizer(question)["input_ids"]
            if tokenizer.chat_template:
                chat = [{"role": "user", "content": question}]
                ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        except Exception as error:
            raise ValueError(f"{path}, line {number}, is no problem: {error!r}") from error
        problems.append({"question": question, "answer": last_number(answer), "prompt_ids": ids})
    return problems


# The last digits of a text if they are a plain number, not the 2 of 3/2, 10^2, 5-2 or x_2.
NUMBER = r"(?<![\w.,:/^])(?<!\w[-+])[-+]?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?![\w/^])(?=\D*\Z)"


def last_number(text: str) -> Decimal | None:
    """42 in GSM8K's "... #### 42"; None if the last digits of a text are something else."""
    found = re.search(NUMBER, text)
    return found and Decimal(re.sub("[$,]", "", found[0]))


def start_engine(config: Config, max_model_len: int) -> LLM:
    return LLM(
        logprobs_mode="processed_logprobs" if config.processed_logprobs else "raw_logprobs",
        enable_prefix_caching=not config.uncached_runtime,  # outlives a load, not a GPU's sleep
        async_scheduling=not config.uncached_runtime,  # returns each token one step late
        generation_config="vllm" if config.uncached_runtime else "auto",  # auto: the model's
        hf_overrides={"head_dtype": "float32" if config.fp32_head else "model"},
        model=config.model, dtype=config.dtype, block_size=config.block_size,
        skip_tokenizer_init=True,  # token ids in, token ids out
        load_format="dummy",  # random weights: the proof names a tensor that is never sent
        max_model_len=max_model_len, max_num_seqs=512, enforce_eager=True, enable_sleep_mode=ON_GPU,
        kv_cache_memory_bytes=int(config.kv_cache_gib * 2**30), gpu_memory_utilization=0.1)


def generate(llm: LLM, problems: list[dict], temperature: float, length: int, stop: list[int]):
    """One rollout per problem. All that shapes the distribution is said: no default acts."""
    params = SamplingParams(
        temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, max_tokens=length, min_tokens=0,
        stop_token_ids=stop, ignore_eos=True, seed=None, logit_bias=None, allowed_token_ids=None,
        repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, bad_words=None,
        logprobs=0, flat_logprobs=True, detokenize=False)  # logprobs=0: of the sampled token only
    prompts = [{"prompt_token_ids": problem["prompt_ids"]} for problem in problems]
    return llm.generate(prompts, params, use_tqdm=False)


def grade(problems: list[dict], rollouts: list[RequestOutput], tokenizer) -> Tensor:
    """1.0 for a response whose last number is the answer, else 0.0: (B,)."""
    rewards = []
    for problem, rollout in zip(problems, rollouts, strict=True):
        response = rollout.outputs[0]
        stopped = response.finish_reason == "stop"  # then the last token is a stop token
        text = tokenizer.decode(response.token_ids[:-1] if stopped else response.token_ids)
        rewards.append(float(last_number(text) == problem["answer"]))
    return torch.tensor(rewards, device=DEVICE)


def make_batch(rollouts: list[RequestOutput]) -> list[Tensor]:
    """inputs, targets, mask, behavior_logprobs: (B, T), padded right; position t predicts t + 1."""
    rows = []
    for rollout in rollouts:
        response = rollout.outputs[0]
        ids = torch.tensor([*rollout.prompt_token_ids, *response.token_ids])
        of_prompt = torch.zeros(len(rollout.prompt_token_ids) - 1)  # its first token is no target
        mask = torch.cat([of_prompt, torch.ones(len(response.token_ids))])
        logprobs = torch.cat([of_prompt, torch.tensor(response.logprobs.logprobs)])
        rows.append((ids[:-1], ids[1:], mask, logprobs))
    return [nn.utils.rnn.pad_sequence(part, True).to(DEVICE) for part in zip(*rows, strict=True)]


def score(model, batch: list[Tensor], rows: Tensor, config: Config) -> Tensor:
    """log softmax(logits / temperature)[target] of some rows, 0 outside the mask: (b, T)."""
    inputs, targets, mask, _ = (values[rows] for values in batch)
    response = mask > 0  # (b, T), N of them true
    hidden = model.base_model(input_ids=inputs, use_cache=False).last_hidden_state  # (b, T, H)
    weight = model.get_output_embeddings().weight  # (V, H)
    logits = hidden[response].float() @ weight.float().T / config.temperature  # (N, V)
    logprobs = logits.log_softmax(dim=-1).gather(-1, targets[response][:, None])  # (N, 1)
    return torch.zeros_like(mask).masked_scatter(response, logprobs)


def update(model, optimizer, batch, advantages, denominator, correction, config) -> dict:
    """One pass with loss -mean min(r A, clip(r) A), A (B, 1), log r = logprobs - denominator."""
    mask, sums = batch[2], Counter()  # sums over the minibatches
    for minibatch in torch.arange(len(mask)).split(len(mask) // config.num_minibatches):
        if not advantages[minibatch].any():
            continue  # AdamW would move the weights by momentum alone
        num_tokens = mask[minibatch].sum()  # so the losses of its micro-batches add up
        for rows in minibatch.split(max(1, config.micro_batch_tokens // mask.shape[1])):
            logprobs = score(model, batch, rows, config)
            ratio = torch.exp(logprobs - denominator[rows])  # (b, T)
            unclipped = ratio * advantages[rows]
            clipped = ratio.clamp(1 - config.clip, 1 + config.clip) * advantages[rows]
            loss = -(torch.minimum(unclipped, clipped) * correction[rows]).sum() / num_tokens
            loss.backward()
            sums["loss"] += loss.item()
            sums["clip_rate"] += ((clipped < unclipped) * mask[rows] / num_tokens).sum().item()
        sums["grad_norm"] += nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0).item()
        sums["updates"] += 1
        optimizer.step()
        optimizer.zero_grad()
    means = {name: total / sums["updates"] for name, total in sums.items()}
    return means | {"updates": sums["updates"]}


def load(llm: LLM, model) -> None:
    """Give the trainer's weights to the engine, and prove that it holds them bit for bit."""
    weights = model.state_dict()  # names a tied head too, as vLLM's CPU build needs
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
    llm.wake_up(tags=["kv_cache"])
    differ, _, never_sent = differing(llm, weights)
    assert not differ + never_sent, f"the engine holds other values in {differ + never_sent}"


if __name__ == "__main__":
    try:
        for metrics, _ in train(*HfArgumentParser(Config).parse_args_into_dataclasses()):
            print(" | ".join(f"{name} {value:.3g}" for name, value in metrics.items()), flush=True)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
