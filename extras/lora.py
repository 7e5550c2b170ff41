"""`--lora-rank`, `--adapter`: adapters of low rank are trained, and the model's own weights frozen.

A linear layer with the weight W gets A (R, in) and B (out, R), and counts their product s times,
s = lora_alpha / R. B is 0 at the start. Each load sends the engine round(W + s B A), and with
`--lora-forward merged` the trainer computes with this very weight. docs/fixes.md has the reasons.
"""

from functools import partial
from pathlib import Path
from typing import Any, Literal

from extras import Extra
from model_folder import load_tokenizer
from report.errors import LARGEST, MANY, SMALLEST, printable, stage, within
from report.files import digest_of, read_json
from report.log import shown
from tasks.prompts import first_encoded

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"  # of a folder of PEFT


class Options(Extra):
    """Adapters of low rank, trained in place of the model's weights."""

    lora_rank: int = 0  # R: fp32 adapters B A on all linear layers of the body; 0: full training.
    lora_alpha: float = 32.0  # The product B A counts lora_alpha / R times.
    # merged: the trainer computes with the rounded weight that the engine gets. added: with the
    # model's weight and the adapter apart, as in most libraries; with vLLM a fix that is off.
    lora_forward: Literal["merged", "added"] = "merged"
    # A folder of PEFT: training starts from the adapters in it, on the model of --model, with their
    # rank, alpha and layers.
    adapter: str | None = None

    def __post_init__(self):
        within(self, 0, MANY, "lora_rank")
        within(self, SMALLEST, LARGEST, "lora_alpha")
        printable(self, "adapter")

    def check(self, config: Any) -> None:
        has_adapters = config.given & {"lora_rank", "adapter"}
        if config.given & {"lora_alpha", "lora_forward"} and not has_adapters:
            raise ValueError("lora_alpha and lora_forward need lora_rank (without it there are no"
                             " adapters), got 0; try --lora-rank 16")
        if self.adapter and config.given & {"lora_rank", "lora_alpha"}:
            raise ValueError("lora_rank and lora_alpha must not be given with adapter (its folder"
                             f" has them), got {self.lora_rank} and {self.lora_alpha:g}")
        if self.lora_forward == "added" and "engine" not in config.given:
            # Counts as a fix that is off: the engine's weights are rounded, the trainer's not.
            for correction in config.given & {"tis", "reject"}:
                config.check_correction(correction, [*config.parity.off(), "lora_forward merged"])

    def install(self, run: Any) -> None:
        if not self.lora_rank and not self.adapter:
            return
        if self.adapter:
            check_prompts(run, self.adapter)
        with stage("importing peft, which lora_rank and adapter need"):
            from extras.shared.adapters import Adapters
        if self.adapter:
            for file in Path(self.adapter, CONFIG), Path(self.adapter, TENSORS):
                with stage(f"reading {file}"):
                    run.further_files[str(file)] = digest_of(file)

        def adapt(model: Any) -> None:
            is_part = "text_config" in read_json(Path(run.folder) / "config.json")
            adapters = Adapters(model, self, run.config.seed, is_part)
            adapters.config.base_model_name_or_path = run.config.model
            run.send = adapters
            run.save_weights = adapters.save
            run.load_weights = adapters.load
            run.save_policy = partial(adapters.save_merged, run.save_policy)

        run.with_model.append(adapt)


def check_prompts(run: Any, folder: str) -> None:
    """Raises: ValueError if a tokenizer in the folder of adapters, with its chat template, makes
    another first prompt than the model's."""
    task = run.task
    if not Path(folder, "tokenizer_config.json").exists():
        return
    with stage(f"encoding a question with the tokenizer in {folder}"):
        other = first_encoded(load_tokenizer(folder), task, run.config.data)
    if other.prompts[0] != task.prompts[0]:
        made, theirs = shown(task.prompts_record["first"]), shown(other.prompts_record["first"])
        raise ValueError(f"adapter must be for the model's prompts (the first is {made}), the"
                         f" tokenizer in {folder} makes {theirs}; copy its files into the model's"
                         " folder, or move them away")
