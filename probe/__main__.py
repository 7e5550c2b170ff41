"""Measure the mismatch between engine and trainer on the same tokens, and name the layer that
causes it.

Exit status: 0 parity, 1 mismatch, 2 bad input, or an error of the probe itself (with a traceback).
"""

import sys
from dataclasses import dataclass
from typing import Literal

import torch
import tyro

import model_folder
import verify
from engine_adapter import Engine, ParityFlags
from probe.diagnose import diagnose
from probe.layers import compare_layers, report
from probe.traces import load_traces
from report.errors import MANY, exit_with_message, stage, within
from rl import Policy
from verify.head import check_head

NUM_PROMPTS = 8  # of random tokens, one after another
Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Tell which layer of the model differs in the installed vLLM, and which half of it."""

    model: str  # Folder or hub name of a Hugging Face causal language model.
    dtype: Dtype = "float32"  # Of the model, in the engine too.
    prompt_tokens: int = 48  # Length of each prompt.
    max_new_tokens: int = 64  # Length of each response.

    def __post_init__(self):
        within(self, 1, MANY, "prompt_tokens", "max_new_tokens")

    def run(self) -> int:
        policy = load_policy(self.model, self.dtype)
        engine = Engine(
            self.model, policy.weights(), ParityFlags(), dtype=policy.model.dtype,
            max_model_len=self.prompt_tokens + self.max_new_tokens)
        # A wrong engine is to be measured, not refused.
        checks, weights = verify.Checks(engine, verify.Options(canary_nats=100)), policy.weights()
        engine.load(weights)
        checks.prove(weights)
        checks.run_canary(policy)
        draw = torch.Generator().manual_seed(0)
        shape = NUM_PROMPTS, self.prompt_tokens
        prompts = torch.randint(policy.head.weight.shape[0], shape, generator=draw).tolist()
        rows = compare_layers(policy, engine, prompts, self.max_new_tokens)
        engine.close()
        print(report(rows, f"vLLM {engine.vllm_version}, {self.dtype}"))
        return int(any(row["beyond"] for row in rows))


@dataclass(frozen=True)
class Diagnose:
    """Name layer, cause and repair of the mismatch in a trace, or list what was excluded."""

    model: str  # Folder or hub name of the trainer's weights.
    trace: tyro.conf.Positional[str]  # File, .npz or .json; docs/audit.md has the layout.
    # Folders with the trainer's weights 1, 2, ... updates back, newest first.
    earlier: tuple[str, ...] = ()
    # Distribution that the trainer scores: all sampling parameters, or the temperature alone.
    trainer: Literal["processed", "temperature"] = "processed"
    # Dtype of the trainer's final projection.
    trainer_head: Literal["float32", "model"] = "float32"

    def run(self) -> int:
        traces = load_traces(self.trace)
        dtype = traces[0].dtype
        policy = load_policy(self.model, dtype, self.trainer_head == "float32")
        earlier = [dict(load_policy(path, dtype).model.named_parameters())
                   for path in self.earlier]
        status = 0
        for trace in traces:
            verdict = diagnose(policy, trace, earlier, self.trainer)
            print(f"\n{verdict.report}")
            status |= verdict.status != "parity"
        return int(status)


def load_policy(path: str, dtype: str, fp32_head: bool = True) -> Policy:
    """The trainer of the probe. Raises: ValueError for every error in loading it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with stage(f"loading the model in {path}"):
        model = model_folder.load(path, getattr(torch, dtype)).to(device)
        policy = Policy(model, head_dtype=torch.float32 if fp32_head else model.dtype)
        check_head(policy)
        return policy


def main(arguments: list[str] | None = None) -> None:
    commands = {"diagnose": Diagnose, "layers": Layers}
    command = tyro.extras.subcommand_cli_from_dict(
        commands, prog="python -m probe", description=__doc__, args=arguments)
    with exit_with_message(2):
        sys.exit(command.run())


if __name__ == "__main__":
    main()
