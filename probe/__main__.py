"""Tell which layer of the model differs in the installed vLLM, and which half of it.

Exit status: 0 none, 1 a layer, 2 bad input, or an error of the probe itself (with a traceback).
"""

import sys
from dataclasses import dataclass
from typing import Literal

import torch
import tyro

import model_folder
import verify
from engine_adapter import Engine, ParityFlags
from probe.layers import compare_layers, report
from report.errors import MANY, exit_with_message, stage, within
from rl import Policy
from verify.head import check_head

NUM_PROMPTS = 8  # of random tokens, one after another


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Tell which layer of the model differs in the installed vLLM, and which half of it."""

    model: str  # Folder or hub name of a Hugging Face causal language model.
    # Of the model, in the engine too.
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    prompt_tokens: int = 48  # Length of each prompt.
    max_new_tokens: int = 64  # Length of each response.

    def __post_init__(self):
        within(self, 1, MANY, "prompt_tokens", "max_new_tokens")

    def run(self) -> int:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with stage(f"loading the model in {self.model}"):
            model = model_folder.load(self.model, getattr(torch, self.dtype)).to(device)
            policy = Policy(model)
            check_head(policy)
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


def main(arguments: list[str] | None = None) -> None:
    command = tyro.extras.subcommand_cli_from_dict(
        {"layers": Layers}, prog="python -m probe", description=__doc__, args=arguments)
    with exit_with_message(2):
        sys.exit(command.run())


if __name__ == "__main__":
    main()
