"""What transformers has read of a model's folder. It imports nothing of ours."""

from typing import Any

import torch


def check_loaded(path: str, model: torch.nn.Module, report: dict[str, Any]) -> None:
    """`report`: names of tensors that transformers did not load as they are.

    Raises: ValueError if a tensor of the model is missing in the checkpoint, not finite, or of
    another shape there, or if the checkpoint has a head of its own and the configuration ties the
    head to the embedding.
    """
    missing, mismatched = report["missing_keys"], report["mismatched_keys"]
    if missing or mismatched:
        raise ValueError(f"the checkpoint in {path} must have every tensor of"
                         f" {type(model).__name__}: missing {sorted(missing)}, wrongly shaped"
                         f" {sorted(mismatched)}")
    # transformers unties a head that differs from the embedding; vLLM does not.
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if model.config.tie_word_embeddings and head.weight is not embedding.weight:
        raise ValueError(f"config.json in {path} must not tie head and embedding (the weights have"
                         " a head of their own); set tie_word_embeddings to false there")
    bad = [name for name, parameter in model.named_parameters() if not parameter.isfinite().all()]
    if bad:
        raise ValueError(f"the checkpoint in {path} must be finite, it is not in {', '.join(bad)}")
