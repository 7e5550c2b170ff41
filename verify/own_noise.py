"""The trainer's own noise: the distance of its values from those in twice its precision."""

from collections.abc import Callable

from torch import Tensor

from rl import Batch, Policy
from verify.parity import twice_as_precise

UNMEASURED = 0.15  # nats, more than bf16 rounds


def attempted(compute: Callable[[], Tensor]) -> Tensor | None:
    """What needs float32; None, with a notice, if a kernel takes 16 bits alone."""
    try:
        return compute()
    except Exception as error:  # of the library whose kernel it is
        print(f"notice: the trainer's own noise is NOT MEASURED, {error!r}: the limit is"
              f" {UNMEASURED} nats")
        return None


def precise_body(policy: Policy, batch: Batch, response: Tensor) -> Tensor:
    """As `rl.row_by_row`, in twice the precision."""
    with twice_as_precise(policy.model):
        return policy.hidden(batch.inputs)[response]
