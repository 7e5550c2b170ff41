"""How long may rows be in an exact run? `python tests/long/lengths.py` prints the table of docs/exact.md (4 minutes).

A model of two layers, heads of 64, four of them on two key heads. Prompts of several lengths near the longest.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
THREADS, DTYPES, LENGTHS = (1, 2, 4), ("float32", "bfloat16"), (256, 512, 1024, 2048, 4096)
NEW = 64  # response tokens


def measure(dtype: str) -> list[str]:
    """By longest row: "exact", "refused", or the share of tokens that differ."""
    import torch
    from helpers import close_live_engine, small_model

    from config import GrpoConfig, ParityFlags
    from engine_adapter import Sampling
    from extras.shared_engine import SharedEngine
    from rl import Policy, frozen_logprobs, make_batch

    found, generator = [], torch.Generator().manual_seed(0)
    shape = dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8192)
    for longest in LENGTHS:
        with tempfile.TemporaryDirectory() as folder:
            small_model("Llama", False, **shape).save_pretrained(folder)
            policy = Policy.load(folder, getattr(torch, dtype), "cpu")
            try:
                engine = SharedEngine(policy, folder, ParityFlags(), exact=True, max_model_len=longest, kv_cache_gib=1)
            except ValueError as error:
                assert "exact must be off" in str(error), error
                found.append("refused")
                continue
            engine.load(policy.weights(), policy.response_logprobs)
            sizes = [longest - NEW - row * longest // 7 for row in range(4)]
            prompts = [torch.randint(96, (size,), generator=generator).tolist() for size in sizes]
            rollouts = engine.generate(prompts, 2, Sampling(temperature=0.7, max_new_tokens=NEW), seeds=[0, 10, 20, 30])
            batch = make_batch(rollouts)
            logprobs = frozen_logprobs(policy, batch, GrpoConfig(temperature=0.7))
            differing = (logprobs != batch.behavior_logprobs).sum().item() / batch.mask.sum().item()
            found.append(f"{differing:.1%} differ" if differing else "exact")
            close_live_engine()
    return found


def main() -> None:
    print(f"| threads | dtype | {' | '.join(f'{length:,} tokens' for length in LENGTHS)} |")
    print("| --- " * (2 + len(LENGTHS)) + "|")
    for threads in THREADS:
        for dtype in DTYPES:
            environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
            result = subprocess.run([sys.executable, __file__, dtype], check=True, capture_output=True, text=True,
                                    env=environment)  # fmt: skip
            cells = json.loads(result.stdout.splitlines()[-1])
            print(f"| {threads} | {dtype} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
    else:
        main()
