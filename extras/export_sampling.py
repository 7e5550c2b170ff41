"""generation_config.json of an export says how the run has sampled."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from extras import Extra


class Options(Extra):
    """None: it acts in each run."""

    def install(self, run: Any) -> None:
        run.with_model.append(lambda model: run.while_saved.append(lambda: declared(run, model)))


@contextmanager
def declared(run: Any, model: Any) -> Iterator[None]:
    """Inside, generation_config has all of the sampling but its length.

    transformers' own top_k would be 50.
    """
    from transformers import GenerationConfig

    sampling, before = run.sampling, model.generation_config
    masks = {name: getattr(sampling, name, off)
             for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))}
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=sampling.temperature, **masks,
        eos_token_id=list(sampling.stop_token_ids), pad_token_id=run.task.tokenizer.pad_token_id)
    yield
    model.generation_config = before
