"""The proof of a load for an engine in another process of this machine, such as the default LLM.

    import prove_remote  # with proof.py beside it

    llm = LLM(..., worker_extension_cls="prove_remote.Prover")
    print(prove_remote.differing(llm, model.state_dict()))  # after the load

The weights go to the worker through a file (TMPDIR=/dev/shm: in memory), and names come back. With
VLLM_ALLOW_INSECURE_SERIALIZATION=1 an engine needs no Prover:
`collective_rpc(differing_from, args=(path,))`. An engine of several workers is refused.
"""

from tempfile import NamedTemporaryFile

import proof
import torch


def differing_from(worker, path):
    """In the worker: the `Report` of proof.py for the weights in a file of `torch.save`."""
    return list(proof.differing(worker, torch.load(path, "cpu", mmap=True)))


class Prover:
    """What vLLM adds to its worker."""

    differing_from = differing_from


def differing(engine, weights):
    """The `Report` of proof.py for an LLM."""
    with NamedTemporaryFile() as file:
        torch.save(dict(weights), file.name)
        (report,) = engine.collective_rpc("differing_from", args=(file.name,))
    return proof.Report(*report)
