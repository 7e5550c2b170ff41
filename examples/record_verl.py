"""A batch of verl as a trace (docs/trace-format.md).

Written after the code of verl 0.9.1; verl itself was not run.

Both sides, from a subclass of the V1 trainer (`tq` and `batch` as in its `_compute_old_log_prob`,
after that method):

    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id,
                           select_fields=[*record_verl.FIELDS])
    record_verl.record(data, "trace.json", {"temperature": 1.0}, "bfloat16", step=self.global_steps)

In the trainer of main_ppo_v0 `data` is `batch.batch`. The engine's side alone, in verl's
environment, from a rollout that main_ppo_v0 has stored (skip.rollout.enable=True
skip.rollout.steps=[1] writes gen_batch.dp):

    python record_verl.py gen_batch.dp trace.json '{"temperature": 1.0}' bfloat16

The batch must have `rollout_log_probs`: actor_rollout_ref.rollout.calculate_log_probs=True. With
bypass_mode verl copies them to `old_log_probs`: the trainer's side then says nothing. Save the
actor's weights of that step, too.
"""

import json
import pickle
import sys
from importlib import metadata
from pathlib import Path

FIELDS = ("prompts", "responses", "response_mask", "rollout_log_probs", "old_log_probs")


def record(data, out, sampling, dtype, step=0):
    """`data`: tensors by name, jagged (V1 trainer) or padded on the outer sides."""
    columns = {name: data[name].unbind() for name in (*FIELDS, "attention_mask")
               if name in set(data.keys())}
    if "rollout_log_probs" not in columns:
        raise ValueError("rollout_log_probs is missing; set"
                         " actor_rollout_ref.rollout.calculate_log_probs=True")
    prompts, rows, total = [], [], len(columns["responses"])
    for index, mask in enumerate(columns["response_mask"]):
        prompt, length = columns["prompts"][index], int(mask.sum())
        if not data["prompts"].is_nested:
            prompt = prompt[columns["attention_mask"][index][: len(prompt)].bool()]
        # Not padding, and no turns of tools, which a trace cannot express.
        if length and mask[:length].all():
            prompts.append(prompt.tolist())
            present = [name for name in ("responses", *FIELDS[3:]) if name in columns]
            rows.append([columns[name][index][:length].tolist() for name in present])
    if not rows:
        raise ValueError("the batch must have a response without turns of tools, it has none")
    tokens, reported, *ours = map(list, zip(*rows, strict=True))
    group = {"sampling": sampling, "tokens": tokens, "logprobs": reported,
             "versions": [[step] * len(row) for row in tokens]}
    group |= {"trainer_logprobs": ours[0]} if ours else {}
    installed = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    versions = {name: installed[name] for name in ("verl", "vllm", "sglang", "torch")
                if name in installed}
    meta = {"format": 1, "dtype": dtype, "step": step, "versions": versions}
    trace = {"meta": meta, "prompt_ids": prompts, "groups": {"verl": group}}
    Path(out).write_text(json.dumps(trace))
    print(f"{out}: {len(rows)} responses; {total - len(rows)} left out (padding, or turns of"
          " tools)")


if __name__ == "__main__":
    try:
        path, out, sampling, dtype = sys.argv[1:]
        record(pickle.loads(Path(path).read_bytes()).batch, out, json.loads(sampling), dtype)
    except Exception as error:  # of this file, of pickle, of the file system: one sentence
        print(f"error: {type(error).__name__}: {' '.join(str(error).split())[:1000]}",
              file=sys.stderr)
        sys.exit(2)
