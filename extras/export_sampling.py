"""generation_config.json of an export says how the run has sampled."""

from collections.abc import Callable
from typing import Any


def install(run: Any, options: None, parts: Any) -> None:
    parts.with_model.append(lambda model: parts.at_end.append(lambda: declare(run, model)))


def declare(run: Any, model: Any) -> Callable[[], None]:
    """All of the sampling but its length, until the function that is returned is called.

    transformers' own top_k would be 50.
    """
    from transformers import GenerationConfig

    sampling, before = run.sampling, model.generation_config
    masks = {name: getattr(sampling, name, off)
             for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))}
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=sampling.temperature, **masks,
        eos_token_id=list(sampling.stop_token_ids), pad_token_id=run.task.tokenizer.pad_token_id)
    return lambda: setattr(model, "generation_config", before)
