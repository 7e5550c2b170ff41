"""A batch of verl as a trace (docs/trace-format.md), after verl 0.9.1, which was not run.

Both sides, in a subclass of the V1 trainer, after `_compute_old_log_prob` (main_ppo_v0: `data` is
`batch.batch`), with actor_rollout_ref.rollout.calculate_log_probs=True:

    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id,
                           select_fields=[*record_verl.FIELDS])
    record_verl.record(data, "trace.json", {"temperature": 1.0}, "bfloat16", step=self.global_steps)

The engine's side, from a stored rollout of main_ppo_v0 (skip.rollout.enable=True, .steps=[1]):

    python record_verl.py gen_batch.dp trace.json '{"temperature": 1.0}' bfloat16

With bypass_mode the trainer's side is the engine's copy. Save the actor's weights of that step.
"""

import json
import pickle
import sys
from importlib import metadata
from pathlib import Path

FIELDS = ("prompts", "responses", "response_mask", "rollout_log_probs", "old_log_probs")


def record(data, out, sampling, dtype, step=0):
    """`data`: tensors by name, jagged (V1 trainer) or padded on the outer sides."""
    names = {*FIELDS, "attention_mask"} & set(data.keys())
    columns = {name: data[name].unbind() for name in names}
    if "rollout_log_probs" not in columns:
        raise ValueError("rollout_log_probs is missing; set rollout.calculate_log_probs=True")
    prompts, rows, total = [], [], len(columns["responses"])
    for index, mask in enumerate(columns["response_mask"]):
        prompt, length = columns["prompts"][index], int(mask.sum())
        if not data["prompts"].is_nested:
            prompt = prompt[columns["attention_mask"][index][: len(prompt)].bool()]
        if length and mask[:length].all():  # else it is padding, or has turns of tools
            prompts.append(prompt.tolist())
            present = [name for name in ("responses", *FIELDS[3:]) if name in columns]
            rows.append([columns[name][index][:length].tolist() for name in present])
    if not rows:
        raise ValueError("the batch must have a response without turns of tools, it has none")
    tokens, reported, *ours = map(list, zip(*rows, strict=True))
    group = {"sampling": sampling, "tokens": tokens, "logprobs": reported,
             "versions": [[step] * len(row) for row in tokens]}
    groups = {"verl": group | ({"trainer_logprobs": ours[0]} if ours else {})}
    found = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    versions = {name: found[name] for name in ("verl", "vllm", "sglang", "torch") if name in found}
    meta = {"format": 1, "dtype": dtype, "step": step, "versions": versions}
    Path(out).write_text(json.dumps({"meta": meta, "prompt_ids": prompts, "groups": groups}))
    print(f"{out}: {len(rows)} responses; {total - len(rows)} left out (padding, turns of tools)")


if __name__ == "__main__":
    try:
        path, out, sampling, dtype = sys.argv[1:]
        record(pickle.loads(Path(path).read_bytes()).batch, out, json.loads(sampling), dtype)
    except Exception as error:  # of this file, of pickle, of the file system: one sentence
        print(f"error: {type(error).__name__}:", *str(error).split()[:200], file=sys.stderr)
        sys.exit(2)
