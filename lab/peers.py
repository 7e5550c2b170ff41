"""The default job with TRL's GRPOTrainer beside train.py: step times, rewards (docs/peers.md).

In an environment with TRL 1.16 this command trains with TRL, on the model, problems, batch and
learning rates of train.py. With `--trl-python` it runs train.py and TRL in turns and prints a
Markdown table.
"""

import json
import os
import random
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

import torch
import tyro
from transformers import AutoModelForCausalLM, PrinterCallback, TrainerCallback

from config import Config
from examples.record_trl import TraceRecorder
from lab import table
from lab.compare import STORED
from lab.translate import to_trl, view
from records import append_rows, steps_of
from train import prepare


@dataclass(frozen=True)
class Options:
    """One run, or a comparison."""

    out: str  # New folder of the run, or of all runs.
    trl_python: str | None = None  # Compare; this Python is that of the environment with TRL.
    turns: int = 3  # Of a comparison.
    samplers: tuple[Literal["vllm", "transformers"], ...] = ("vllm", "transformers")  # Compared.
    # Of one run: vLLM in TRL's process, or `generate`.
    generation: Literal["vllm", "transformers"] = "vllm"
    steps: int = 30  # Batches of rollouts; each is two optimizer steps.
    seed: int = 0  # Decides the model and the problems.
    # Further options of train.py, with an equals sign: --job="--model PATH --task FILE.py".
    job: str = ""
    # JSON: vLLM's arguments in place of TRL's own, which name no dtype.
    engine: str = '{"dtype": "float32"}'
    # Of one run: traces of so many batches, in `out`/traces (examples/record_trl.py).
    record: int = 0
    # Draw this PNG: rewards of the runs in the folders `out`/*, and of the stored runs.
    curves: str | None = None
    # Of one run: lab.translate's options alone, with TRL's own schedule and without TIS.
    translated: bool = False


def sync_weights(generation: Any) -> None:
    """Replaces TRL's method, whose `load_weights` fails on vLLM's CPU build: that packs the weights
    after a load, and `reload_weights` packs them again. The engine must get a tied head under its
    own name too, or it keeps the old head. state_dict() has this name, named_parameters() has not.
    """
    weights = ((name, tensor.detach()) for name, tensor in generation.model.state_dict().items())
    generation.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    generation.llm.reset_prefix_cache()


class Recorder(TrainerCallback):
    """A row of metrics.jsonl for each log of TRL, one per batch.

    `step_s`: all the time since the row before.
    """

    started = time.perf_counter()  # step 1 includes the set-up

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "reward" in logs:  # not in the summary at the end
            seconds, self.started = time.perf_counter() - self.started, time.perf_counter()
            row = {"step": state.global_step // args.logging_steps, "step_s": seconds,
                   "reward": logs["reward"],
                   "mismatch_abs_mean": logs.get("sampling/sampling_logp_difference/mean")}
            append_rows(Path(args.output_dir) / "metrics.jsonl", [logs | row])
            print(row, flush=True)


def train(options: Options) -> None:
    """One run with TRL.

    Raises: ValueError if TRL's prompts have other token ids than those of train.py.
    """
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # as train.py does
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation

    vllm_generation.VLLMGeneration.sync_weights = sync_weights
    start, arguments_of_vllm = vllm_generation.LLM, json.loads(options.engine)
    vllm_generation.LLM = lambda **given: start(**given | arguments_of_vllm)
    given = tyro.cli(Config, args=shlex.split(options.job))
    config = given.but(out=options.out, steps=options.steps, seed=options.seed)
    run, rng, updates = prepare(config), random.Random(config.run.seed), config.grpo.num_minibatches
    batches = [run.task.sample(rng, config.grpo.num_prompts) for _ in range(config.run.steps)]
    sampled = [problem for batch in batches for problem in batch]
    # With the chat template, if the model has one: TRL adds none to a prompt that is a string.
    texts = run.tokenizer.batch_decode([problem.prompt_ids for problem in sampled])
    problems = dict(zip(texts, sampled, strict=True))

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [run.task.reward(problems[asked], text)
                for asked, text in zip(prompts, completions, strict=True)]

    # Else TRL logs no mismatch.
    logged = {} if options.translated else {"vllm_importance_sampling_correction": True}
    options_of_trl, _ = to_trl(view(config.flat()))
    arguments = GRPOConfig(**options_of_trl | logged | dict(
        use_vllm=options.generation == "vllm", vllm_max_model_length=run.max_model_len,
        use_cpu=True, output_dir=options.out, save_strategy="no", report_to="none",
        disable_tqdm=True,
    ))
    model = AutoModelForCausalLM.from_pretrained(run.model_path, dtype=torch.float32,
                                                 attn_implementation="sdpa")
    adamw = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=config.grpo.weight_decay,
                              fused=True)
    factor = lambda done: config.lr_at(done // updates + 1)  # noqa: E731
    schedule = torch.optim.lr_scheduler.LambdaLR(adamw, factor)
    trainer = GRPOTrainer(model, reward, arguments, Dataset.from_dict({"prompt": texts}),
                          processing_class=run.tokenizer,
                          optimizers=(None, None) if options.translated else (adamw, schedule))
    expected = [problem.prompt_ids for problem in sampled]
    if trainer._tokenize_prompts(texts)[0] != expected:
        raise ValueError("prompts must have the same token ids in TRL as in train.py")
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Recorder)
    if options.record:
        trainer.add_callback(TraceRecorder(trainer, run.out / "traces", options.record))
    trainer.train()
    print("seconds a step {:.2f}, reward {:.3f}".format(*summary(run.out)))


def summary(out: Path) -> tuple[float, float]:
    """Median seconds of a step (not of the first three), mean reward of the last five."""
    rows = [row for row in steps_of(out) if row["step"]]  # train.py's row 0 is an evaluation
    step_s = median(row["step_s"] for row in rows[3:] or rows)
    return step_s, fmean(row["reward"] for row in rows[-5:])


def compare(options: Options) -> None:
    """Whole commands in turns, because the speed of a machine changes within minutes."""
    end = str(options.steps)  # no evaluation and no checkpoint before the end
    ours = [sys.executable, "train.py", "--eval-every", end, "--checkpoint-every", end,
            *shlex.split(options.job), "--engine"]
    theirs = [options.trl_python, "-m", "lab.peers", f"--job={options.job}", "--generation"]
    commands = {"train.py": ours, "TRL": theirs}
    runs = {(trainer, sampler): [] for sampler in options.samplers for trainer in commands}
    for turn in range(options.turns):
        for trainer, sampler in runs:
            out = Path(options.out) / f"{turn}-{trainer}-{sampler}"
            job = ["--steps", end, "--seed", str(options.seed), "--out", out]
            subprocess.run([*commands[trainer], sampler, *job], check=True)
            runs[trainer, sampler].append(summary(out))
    rows = []
    for (trainer, sampler), found in runs.items():
        seconds, rewards = zip(*found, strict=True)
        ratios = [one / other
                  for one, (other, _) in zip(seconds, runs["train.py", sampler], strict=True)]
        spreads = (f"{median(of):.3g} ({min(of):.3g} to {max(of):.3g})"
                   for of in (seconds, ratios, rewards))
        rows.append([f"{trainer}, {sampler}", *spreads])
    print(table(["", "seconds a step", "times train.py's", "reward, last 5 steps"], rows))


def draw(options: Options) -> None:
    """Mean and range of the reward per step, over TRL's runs and as many of train.py."""
    from matplotlib.figure import Figure

    theirs = [steps_of(folder) for folder in sorted(Path(options.out).iterdir())]
    ours = json.loads((STORED / "default.json").read_text())["runs"][: len(theirs)]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    for label, runs in ((f"train.py, {len(ours)} seeds", ours),
                        (f"TRL, translated, {len(theirs)} seeds", theirs)):
        rewards = [[row["reward"] for row in run if row.get("reward") is not None] for run in runs]
        steps, columns = range(1, len(rewards[0]) + 1), [*zip(*rewards, strict=True)]
        axis.plot(steps, [*map(fmean, columns)], label=label)
        axis.fill_between(steps, [*map(min, columns)], [*map(max, columns)], alpha=0.2)
        print(label, *(f"step {at}: {fmean(columns[at - 1]):.3f}"
                       for at in (1, 5, 10, 20, 40, len(columns))), sep=", ")
    axis.set(xlabel="step", ylabel="reward of the samples")
    axis.legend()
    figure.savefig(options.curves, dpi=110)


if __name__ == "__main__":
    options = tyro.cli(Options, description=__doc__)
    (draw if options.curves else compare if options.trl_python else train)(options)
