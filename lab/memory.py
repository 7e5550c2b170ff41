"""The memory of a run on one GPU, computed by the formulas of extras/memory.py.

    python -m lab.memory --gpu-memory-gib 40 --model PATH --dtype bfloat16 \\
        --max-prompt-tokens 512 --max-new-tokens 1024 --kv-cache-gib 4

It takes the options of train.py, and needs no GPU and no weights. --gpu-memory-gib is the memory of
the GPU, 80 if it is not given.
"""

import tyro

import extras
from extras.memory import GIB, phases, without_memory
from report.errors import exit_with_message, stage
from rl import head_chunk
from train import Config


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 fits, 1 does not, 2 bad input."""
    with exit_with_message(2):
        config = tyro.cli(Config, args=arguments, description=__doc__)
        name, gib = config.model, config.flat().get("gpu_memory_gib") or 80.0
        with stage(f"reading a model folder or a reachable hub name, {name},"):
            model = without_memory(extras.folder(name).config())
    prompt_tokens = config.data.max_prompt_tokens or 0
    by_phase = phases(config, model, prompt_tokens, head_chunk(gib))
    print("GiB on one GPU:")
    for phase, terms in by_phase.items():
        print(f"{phase}:", ", ".join(f"{name} {size / GIB:.2f}" for name, size in terms.items()))
    peak = max(sum(terms.values()) for terms in by_phase.values()) / GIB
    fits = peak <= gib
    print(f"peak {peak:.2f}: {'fits' if fits else 'does NOT fit'} {gib:g} GiB (without CUDA"
          " graphs and fragmentation)")
    return int(not fits)


if __name__ == "__main__":
    raise SystemExit(main())
