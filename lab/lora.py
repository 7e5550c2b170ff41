"""How much of an update of adapters reaches a bfloat16 engine, by the size of the update.

    python -m lab.lora RUN docs/records/lora.json

RUN is a folder of train.py with --lora-rank. The engine has round(W + s B A), so it never gets what
rounding swallows; with --lora-forward added the trainer computes with all of it. Here the learned B
is scaled to each size |s B A| / |W| (mean over the layers), and the same tokens are scored in fp32
with W, with W + s B A, and with the latter rounded to bfloat16. `arrived` is the slope of the
rounded change of log-probability over the whole change.
"""

import json
from pathlib import Path
from statistics import fmean as mean

import torch
import tyro
from torch import Tensor

from config import Config, ParityFlags
from engine_adapter import reseed
from records import provenance
from rl import make_batch
from train import load_policy, prepare, start_engine

SIZES = 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2


@torch.no_grad()
def main(folder: tyro.conf.Positional[Path], record: tyro.conf.Positional[Path]) -> None:
    options = json.loads((folder / "config.json").read_text())["config"]
    options |= {"parity": ParityFlags(), "out": str(folder / "lost"), "engine": "transformers",
                "prefix_cache": "off", "dtype": "float32", "lora_forward": "merged"}
    run = prepare(Config.of(**options))
    policy = load_policy(run)
    for each in policy.model.parameters():
        each.copy_(each.bfloat16())  # W is that of a bfloat16 run
    learned = torch.load(max(folder.glob("checkpoints/*.pt")))["policy"]
    policy.model.load_state_dict(policy.model.state_dict() | learned)
    engine = start_engine(run, policy)
    engine.load(policy.weights(), policy.response_logprobs)
    reseed("lab.lora")
    prompts = [each.prompt_ids for each in run.task.held_out]
    batch = make_batch(engine.generate(prompts[: options["eval_problems"]], 1, run.sampling))

    def scored(weights: dict[str, Tensor]) -> Tensor:
        with policy.using(weights):
            return policy.logprobs(batch, run.sampling.temperature)[batch.mask > 0]  # (N,)

    layers = policy.layers()
    whole = mean(float((each.merged() - each.weight).norm() / each.weight.norm())
                 for each in layers.values())
    without = {f"{name}.lora_B": 0 * each.lora_B for name, each in layers.items()}
    start, rows = scored(without), []
    for size in SIZES:
        scaled = {f"{name}.lora_B": each.lora_B * size / whole for name, each in layers.items()}
        change = scored(scaled) - start
        with policy.using(scaled):
            rounded = {f"{name}.weight": each.merged().bfloat16().float()
                       for name, each in layers.items()}
        arrived = scored(without | rounded) - start
        slope = change @ arrived / (change @ change)
        row = {"size": size, "change": change.abs().mean(), "arrived": slope,
               "mismatch": (arrived - change).abs().mean()}
        rows.append({name: float(value) for name, value in row.items()})
        print(rows[-1], flush=True)
    found = provenance(policy.device) | {"options": options | {"parity": {}}, "rows": rows}
    found |= {"tokens": len(start), "learned_size": whole}
    record.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
