"""`--lora-rank`: adapters of low rank are trained, and the model's own weights frozen.

A linear layer with the weight W gets A (R, in) and B (out, R), and counts their product s times,
s = lora_alpha / R. B is 0 at the start. Each load sends the engine round(W + s B A), and with
`--lora-forward merged` the trainer computes with this very weight. docs/fixes.md has the reasons.
"""

from functools import partial
from pathlib import Path
from typing import Any, Literal

from extras import Extra
from report.errors import stage
from report.files import read_json
from report.ranges import CountOrZero, Positive


class Options(Extra):
    """Adapters of low rank, trained in place of the model's weights."""

    # R: fp32 adapters B A on all linear layers of the body; 0: full training.
    lora_rank: CountOrZero = 0
    lora_alpha: Positive = 32.0  # The product B A counts lora_alpha / R times.
    # merged: the trainer computes with the rounded weight that the engine gets. added: with the
    # model's weight and the adapter apart, as in most libraries; with vLLM a fix that is off.
    lora_forward: Literal["merged", "added"] = "merged"

    def check(self, config: Any) -> None:
        if config.given & {"lora_alpha", "lora_forward"} and not self.lora_rank:
            raise ValueError("lora_alpha and lora_forward need lora_rank (without it there are no"
                             " adapters), got 0; try --lora-rank 16")
        if self.lora_forward == "added" and "engine" not in config.given:
            # Counts as a fix that is off: the engine's weights are rounded, the trainer's not.
            for correction in config.given & {"tis", "reject"}:
                config.check_correction(correction, [*config.parity.off(), "lora_forward merged"])

    def install(self, run: Any) -> None:
        if not self.lora_rank:
            return
        with stage("importing peft, which lora_rank needs"):
            from extras.shared.adapters import Adapters

        def adapt(model: Any) -> None:
            is_part = "text_config" in read_json(Path(run.folder) / "config.json")
            adapters = Adapters(model, self, run.config.seed, is_part)
            adapters.config.base_model_name_or_path = run.config.model
            run.send = adapters
            run.save_weights = adapters.save
            run.load_weights = adapters.load
            run.save_policy = partial(adapters.save_merged, run.save_policy)

        run.with_model.append(adapt)
