"""`--gpu-memory-gib`: a run prints its computed peak. If it cannot fit, it is refused.

extras/memory.py has the formulas. On a CPU nothing is computed without the option.
"""

from contextlib import suppress
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch

from extras.memory import GIB, phases, without_memory
from report.errors import SMALLEST, one_line, within
from rl import head_chunk

# Peaks measured on an H200 and an H100 were 0.98 to 1.18 times the computed ones (test_memory.py).
ERROR = 0.2
ESTIMATES = {"context", "sampler", "activations"}  # the other terms are certain


@dataclass(frozen=True)
class Options:
    """The memory that a run may need."""

    # GiB that a run must fit into, also those of a GPU that is not here; if not given, all of the
    # GPU that is here. A run that cannot fit is refused.
    gpu_memory_gib: float | None = None

    def __post_init__(self):
        within(self, SMALLEST, 1e6, "gpu_memory_gib")


NOT_OF_THE_EXPERIMENT = {"gpu_memory_gib"}


def install(run: Any, options: Options, parts: Any) -> None:
    """Print the computed peak, and which option lowers it most.

    Raises: ValueError if the certain terms of a phase exceed the memory, or if all its terms exceed
    it by more than ERROR. With --steps 0 there is no update.
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
        print(f"notice: the memory of this run cannot be computed: {one_line(error)}", flush=True)
        return
    peaks = {phase: sum(terms.values()) / GIB for phase, terms in by_phase.items()}
    (other, lower), (phase, peak) = sorted(peaks.items(), key=lambda pair: pair[1])
    computed = f"computed peak {peak:.1f} of {gib:.1f} GiB in {phase} ({other} {lower:.1f})"
    saving = {}
    for name, value in smaller(run, model.config).items():
        words = f"--{name.replace('_', '-')}" + f" {value}" * (value is not True)
        with suppress(ValueError):  # by the rules of other options
            changed = terms_of(with_value(config, name, value)).values()
            saving[words] = max(sum(terms.values()) for terms in changed) / GIB
    best = min(saving, key=saving.get)
    if saving[best] < peak:
        computed += f"; most is saved by {best} ({saving[best]:.1f})"
    if not config.steps:
        del by_phase["update"]
    for terms in by_phase.values():
        certain = sum(size for name, size in terms.items() if name not in ESTIMATES)
        if max(certain, sum(terms.values()) / (1 + ERROR)) > gib * GIB:
            raise ValueError("the run must fit into the GPU (or into --gpu-memory-gib), got a"
                             f" {computed}")
    if peak > gib:
        computed += f"; it may NOT fit (measured peaks are within {ERROR:.0%} of computed ones)"
    print(f"memory: {computed}", flush=True)


def smaller(run: Any, of_model: Any) -> dict[str, Any]:
    """Values of options that need less memory, each by the option's name.

    Half of a value is not less than one row needs.
    """
    config = run.config
    size = getattr(torch, config.dtype).itemsize
    # Keys and values, with as many heads as queries have: usually there are fewer.
    row = 2 * of_model.num_hidden_layers * of_model.hidden_size * size * run.max_model_len / GIB
    values = {
        "gradient_checkpointing": True, "offload_optimizer": True,
        "micro_batch_tokens": max(config.micro_batch_tokens // 2, run.max_model_len),
        "kv_cache_gib": round(max(config.kv_cache_gib / 2, row), 3),
        "max_num_seqs": config.max_num_seqs // 2, "kl_coef": 0, "dtype": "bfloat16",
        "lora_rank": 16}
    return {name: values[name] for name in values if name in config.flat()}  # its file is there


def with_value(config: Any, name: str, value: Any) -> Any:
    """The options with another value of one. Raises: ValueError by their own rules."""
    change = {name: value}
    for group, held in vars(config).items():
        if is_dataclass(held) and name in vars(held):
            change = {group: replace(held, **change)}
    return replace(config, **change)
