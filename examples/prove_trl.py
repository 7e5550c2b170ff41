"""The proof of each weight sync of TRL's GRPOTrainer, before it samples.

    generation = trainer.vllm_generation
    generation.sync_weights = proven(generation)

prints which tensors vLLM holds otherwise than the trainer. TRL has no callback between its sync and
its samples, so the sync itself is wrapped. Tested with TRL 1.16.0 (colocate, one process); proof.py
must be importable.
"""

from proof import differing


def proven(generation, say=print):
    """`generation.sync_weights`, and after it `say` with the `Report` of proof.py."""
    sync = generation.sync_weights

    def sync_and_compare():
        sync()
        say(differing(generation.llm, generation.model.state_dict()))  # not what TRL has sent

    return sync_and_compare
