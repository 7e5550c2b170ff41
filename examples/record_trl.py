"""A callback for TRL's GRPOTrainer: each batch of rollouts as a trace, with its weights.

    trainer.add_callback(TraceRecorder(trainer, "traces", steps=3))  # the first 3 batches

writes traces/step_000000.json (docs/audit.md) and the folder traces/step_000000 for each,
for `python -m probe diagnose --model traces/step_000002 --earlier traces/step_000000 --
traces/step_000002.json`. Tested with TRL 1.16.0 (colocate). Only the first process writes its rows.
"""

import json
from itertools import compress
from pathlib import Path

from transformers import TrainerCallback

COLUMNS = {"prompt_ids": "prompt_mask", "completion_ids": "completion_mask",
           "sampling_per_token_logps": "completion_mask", "old_per_token_logps": "completion_mask"}
SAMPLING = "temperature", "top_p", "top_k", "min_p", "repetition_penalty"


class TraceRecorder(TrainerCallback):
    def __init__(self, trainer, folder, steps=1):
        self.trainer, self.folder, self.left, self.last = trainer, Path(folder), steps, None

    def on_pre_optimizer_step(self, args, state, control, **_):
        """Before the first optimizer step on a batch: the weights are those that sampled it."""
        batches = self.trainer._buffered_inputs
        if self.left and batches is not self.last:
            self.left, self.last = self.left - 1, batches
            folder = self.folder / f"step_{state.global_step:06d}"
            self.trainer.save_model(str(folder))
            if state.is_world_process_zero:
                trace = self.trace(batches, state.global_step)
                folder.with_suffix(".json").write_text(json.dumps(trace))

    def trace(self, batches, step):
        if not COLUMNS.keys() <= batches[0].keys():
            raise ValueError("it needs use_vllm=True and vllm_importance_sampling_correction=True")
        columns = [[row[mask.bool()].tolist() for batch in batches
                    for row, mask in zip(batch[name], batch[masks], strict=True)]
                   for name, masks in COLUMNS.items()]
        # Without the rows that TRL has masked out, which have no tokens.
        prompts, tokens, reported, ours = ([*compress(column, columns[1])] for column in columns)
        given = {name: getattr(self.trainer, name) for name in SAMPLING}
        sampling = {name: value for name, value in given.items() if value is not None}
        dtype = str(self.trainer.accelerator.unwrap_model(self.trainer.model).dtype)
        meta = {"format": 1, "dtype": dtype.removeprefix("torch."), "step": step}
        group = {"sampling": sampling, "tokens": tokens, "logprobs": reported,
                 "trainer_logprobs": ours}
        return {"meta": meta, "prompt_ids": prompts, "groups": {"trl": group}}
