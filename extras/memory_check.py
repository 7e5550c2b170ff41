"""`--gpu-memory-gib`: a run prints its computed peak. If it cannot fit, it is refused.

extras/memory.py has the formulas. On a CPU nothing is computed without the option.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from extras.memory import GIB, phases, without_memory
from report.errors import SMALLEST, one_line, within
from rl import head_chunk

# Measured peaks were 0.98 to 1.18 times the computed ones (H200 and H100, test_memory.py).
UNCERTAINTY = 0.2
ESTIMATES = {"context", "sampler", "activations"}  # the other terms are exact


@dataclass(frozen=True)
class Options:
    """The memory that a run may need."""

    # Memory in GiB that the run must fit into, for example of a GPU on another machine; if not
    # given, that of this machine's GPU. A run that cannot fit is refused before its weights are
    # loaded.
    gpu_memory_gib: float | None = None

    def __post_init__(self):
        within(self, SMALLEST, 1e6, "gpu_memory_gib")


NOT_OF_THE_EXPERIMENT = {"gpu_memory_gib"}


def install(run: Any, options: Options, parts: Any) -> None:
    """Print the computed peak, and which option lowers it most.

    Raises: ValueError if the exact terms of a phase exceed the memory, or if all its terms exceed
    it by more than UNCERTAINTY. With --steps 0 there is no update.
    """
    config, gib = run.config, options.gpu_memory_gib
    if gib is None and torch.cuda.is_available():
        gib = torch.cuda.mem_get_info()[1] / GIB
    if gib is None:
        return

    def terms_of(config: Any) -> dict[str, dict[str, float]]:
        return phases(config, model, run.max_model_len - config.max_new_tokens, head_chunk(gib))

    try:
        model = without_memory(parts.folder.config())
        by_phase = terms_of(config)
    except Exception as error:  # not every class of transformers can be built without memory
        print(f"notice: the memory of this run cannot be computed: {one_line(error)}")
        return
    peaks = {phase: sum(terms.values()) / GIB for phase, terms in by_phase.items()}
    peak = max(peaks.values())
    of_phases = ", ".join(f"{phase} {size:.1f}" for phase, size in peaks.items())
    computed = f"a computed peak of {peak:.1f} of {gib:.1f} GiB ({of_phases})"
    with_option = {}
    for name, value in smaller(run, model.config).items():
        option = f"--{name.replace('_', '-')}"
        if value is not True:
            option += f" {value}"
        with suppress(ValueError):  # rules of other options
            changed = terms_of(type(config).from_flat(config.flat() | {name: value}))
            with_option[option] = max(sum(terms.values()) for terms in changed.values()) / GIB
    best = min(with_option, key=with_option.get)
    if with_option[best] < peak:
        computed += f"; try {best} ({with_option[best]:.1f} GiB)"
    if not config.steps:
        del by_phase["update"]
    for terms in by_phase.values():
        exact = sum(size for name, size in terms.items() if name not in ESTIMATES)
        if max(exact, sum(terms.values()) / (1 + UNCERTAINTY)) > gib * GIB:
            raise ValueError("the run must fit into the GPU (or into --gpu-memory-gib), got"
                             f" {computed}")
    if peak * (1 + UNCERTAINTY) > gib:
        computed += f"; it may NOT fit (measured peaks were up to {UNCERTAINTY:.0%} larger)"
    print(f"memory: {computed}")


def smaller(run: Any, of_model: Any) -> dict[str, Any]:
    """Values of options that need less memory, by name. No half is below what one row needs."""
    config = run.config
    size = getattr(torch, config.dtype).itemsize
    # Upper bound of a row's KV cache: usually there are fewer heads of keys than of queries.
    row = 2 * of_model.num_hidden_layers * of_model.hidden_size * size * run.max_model_len / GIB
    values = {
        "gradient_checkpointing": True, "offload_optimizer": True,
        "micro_batch_tokens": max(config.micro_batch_tokens // 2, run.max_model_len),
        "kv_cache_gib": round(max(config.kv_cache_gib / 2, row), 3),
        "max_num_seqs": config.max_num_seqs // 2, "kl_coef": 0, "dtype": "bfloat16",
        "lora_rank": 16}
    return {name: values[name] for name in values if name in config.flat()}  # an option has a file
