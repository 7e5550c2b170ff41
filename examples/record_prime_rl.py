"""The rollouts of a prime-rl step as a trace (docs/trace-format.md): the engine's side.

    python record_prime_rl.py RUN_DIR/rollouts/step_3/rollouts.bin trace.json bfloat16

Written after src/prime_rl/transport/types.py; prime-rl itself was not run. It reads the two layouts
of `TrainingSample` that have a temperature for each token: `prompt_ids, prompt_mask,
completion_ids, completion_mask, completion_logprobs, completion_temperatures, ...` and the later
`token_ids, mask, logprobs, temperatures, ...`. Another layout is an error. The transport must be
the file system. Masks and penalties of your sampling options: a fourth argument, JSON.
"""

import json
import sys
from pathlib import Path

import msgspec  # installed with prime-rl and with vLLM


def split(sample):
    """Prompt, response, its log-probabilities and temperatures; None with a tool's turn."""
    if all(isinstance(value, int) for value in sample[2]):
        prompt, _, tokens, mask, logprobs, temperatures = sample[:6]
    else:
        start = sample[1].index(True)
        prompt = sample[0][:start]
        tokens, mask, logprobs, temperatures = (part[start:] for part in sample[:4])
    if not len(tokens) == len(mask) == len(logprobs) == len(temperatures):
        raise ValueError("columns of unequal length")
    return (prompt, tokens, logprobs, temperatures) if all(mask) and tokens else None


def record(path, out, dtype, more=None):
    try:
        # Structs are arrays: no field names.
        examples, step, *_ = msgspec.msgpack.decode(Path(path).read_bytes())
        samples = [split(sample) for sample in examples]
    except (msgspec.DecodeError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ValueError(f"{path} must be a TrainingBatch in a layout that this recorder knows:"
                         f" {error}") from error
    kept = [sample for sample in samples if sample]
    temperatures = {value for *_, values in kept for value in values}
    if len(temperatures) != 1:
        raise ValueError(f"{path} must have responses of one temperature, it has"
                         f" {sorted(temperatures) or 'none'}")
    prompts, tokens, logprobs, _ = map(list, zip(*kept, strict=True))
    sampling = {"temperature": temperatures.pop()} | (more or {})
    meta = {"format": 1, "dtype": dtype, "step": step, "engine": "vLLM of prime-rl"}
    groups = {"prime-rl": {"sampling": sampling, "tokens": tokens, "logprobs": logprobs}}
    Path(out).write_text(json.dumps({"meta": meta, "prompt_ids": prompts, "groups": groups}))
    print(f"{out}: {len(kept)} responses; {len(samples) - len(kept)} left out (turns of tools)")


if __name__ == "__main__":
    try:
        record(*sys.argv[1:4], *map(json.loads, sys.argv[4:]))
    except Exception as error:  # of this file, of the file system: one sentence
        print(f"error: {type(error).__name__}:", *str(error).split()[:200], file=sys.stderr)
        sys.exit(2)
