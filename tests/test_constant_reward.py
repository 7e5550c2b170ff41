"""A reward that is the same for all responses moves no weight: a cover of all pairs of engine, dtype and options.

Without a KL term no optimizer step is taken. With a KL term the gradient is that of KL(pi || ref) between equal
weights. It is exactly 0 only if the same arithmetic computes both sides, and AdamW turns any other value into full
steps.
"""

import pytest
import torch
from helpers import CAN_BE_EXACT, PYTHON, command, rows, train_here
from safetensors.torch import load_file

BACKENDS = ["vllm", "shared", "transformers", "shared --exact"]
DTYPES = ["float32", "bfloat16", "float16"]
OPTIONS = [
    "",
    "--kl-coef 0.05 --tis sequence --inflight-groups 4 --max-staleness 2",
    "--kl-coef 0.05 --tis token --reject token --top-k 20 --top-p 0.9 --min-p 0.01",
    "--kl-coef 0.05 --gradient-checkpointing",
]
MARKS = {"transformers": [], "shared --exact": [pytest.mark.engine, CAN_BE_EXACT]}
CASES = [pytest.param(backend, DTYPES[(i + j) % 3], options, marks=MARKS.get(backend, [pytest.mark.engine]))
         for i, backend in enumerate(BACKENDS) for j, options in enumerate(OPTIONS)
         if "exact" not in backend or "checkpointing" not in options]  # fmt: skip


@pytest.mark.parametrize("backend, dtype, options", CASES)
def test_a_constant_reward_moves_no_weight(good, tmp_path, backend, dtype, options):
    (tmp_path / "task.py").write_text(PYTHON.replace("float(len(response) % 3)", "1.0"))
    train_here(command(good, f"--out {tmp_path}/run --task {tmp_path}/task.py --steps 3 --lr 1e-4 --lr-warmup-steps 0"
                       " --max-new-tokens 6 --micro-batch-tokens 40 --eval-problems 1"
                       f" --dtype {dtype} --engine {backend} {options}"))  # fmt: skip
    steps = rows(tmp_path / "run")[1:]
    assert len(steps) == 3
    if options:
        assert [(step["kl_ref"], step["grad_norm"], step["updates"]) for step in steps] == [(0.0, 0.0, 2)] * 3
    else:
        assert [step["skipped_updates"] for step in steps] == [2] * 3
    before = load_file(good / "model" / "model.safetensors")
    after = load_file(tmp_path / "run" / "policy" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].to(after[name].dtype), after[name]) for name in before)
