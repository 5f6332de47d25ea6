"""The memory that an optimizer's update needs while it lasts, and the bytes it moves, by kind of kernels.

torch.optim has three ways to run the same arithmetic. They give the same results, and differ in what is there
beside parameters, gradients and state while the update lasts, and in how often these are read and written.
"""

from __future__ import annotations

from typing import NamedTuple

from zero_ref.simulator._checks import check_name
from zero_ref.simulator.ledger import StateRule, state_rule

UPDATES: dict[str, str] = {
    "fused": "one kernel does all and needs no memory: torch's fused=True, or a compiled step",
    "foreach": "a kernel for each operation on all tensors, with copies of them: what torch chooses on GPUs",
    "for-loop": "a kernel for each operation on each tensor: what torch chooses on CPUs",
}
"""The ways to make an update. With neither `fused` nor `foreach` given, torch takes the second on a GPU.

Source: torch/optim/optimizer.py, `_default_to_fused_or_foreach`.
"""


class UpdateKernels(NamedTuple):
    """Tensors that the kernels of an update need and move, each of the size of one of the state.

    Args:
        copies: that are there at one time, beside parameters, gradients and state. Under "foreach" they are
            of all parameters that the rank updates, under "for-loop" of one.
        touched: tensors that are read or written, counted as often as they are.
    """

    copies: int
    touched: int


FOREACH: dict[str, UpdateKernels] = {
    "SGD": UpdateKernels(0, 3),
    "SGD+momentum": UpdateKernels(0, 8),
    "Adam": UpdateKernels(1, 18),
    "Adam+amsgrad": UpdateKernels(1, 21),
    "AdamW": UpdateKernels(1, 20),
    "AdamW+amsgrad": UpdateKernels(1, 23),
    "NAdam": UpdateKernels(1, 22),
    "RAdam": UpdateKernels(1, 22),
    "Adamax": UpdateKernels(1, 16),
    "Adadelta": UpdateKernels(2, 27),
    "Adagrad": UpdateKernels(2, 13),
    "RMSprop": UpdateKernels(1, 13),
    "RMSprop+momentum": UpdateKernels(1, 18),
    "RMSprop+centered": UpdateKernels(1, 19),
    "Rprop": UpdateKernels(1, 36),
    "ASGD": UpdateKernels(1, 12),
}
"""By the names of `ledger.STATE_RULES`, with torch's default options. AdamW's copy has the square roots of
the second moments.

Source: counted from the kernels that torch calls (tests/simulator/test_updates.py)."""

FOR_LOOP: dict[str, UpdateKernels] = {
    "SGD": UpdateKernels(0, 3),
    "SGD+momentum": UpdateKernels(0, 8),
    "Adam": UpdateKernels(3, 18),
    "Adam+amsgrad": UpdateKernels(3, 20),
    "AdamW": UpdateKernels(3, 20),
    "AdamW+amsgrad": UpdateKernels(3, 22),
    "NAdam": UpdateKernels(3, 22),
    "RAdam": UpdateKernels(5, 28),
    "Adamax": UpdateKernels(1, 15),
    "Adadelta": UpdateKernels(3, 27),
    "Adagrad": UpdateKernels(2, 11),
    "RMSprop": UpdateKernels(2, 13),
    "RMSprop+momentum": UpdateKernels(2, 18),
    "RMSprop+centered": UpdateKernels(2, 19),
    "Rprop": UpdateKernels(3, 35),
    "ASGD": UpdateKernels(0, 8),
}
"""The same, one tensor after another. Of the copies, some are still those of the tensor before."""


def update_kernels(optimizer: str | StateRule, update: str) -> UpdateKernels:
    """Return the tensors that an update needs and moves.

    >>> update_kernels("AdamW", "fused"), update_kernels("AdamW", "foreach")
    (UpdateKernels(copies=0, touched=7), UpdateKernels(copies=1, touched=20))

    A fused update reads value, gradient and state, and writes value and state.

    Raises:
        ValueError: the update is unknown, or the kernels of this optimizer were not counted.
    """
    check_name("update", update, UPDATES)
    if update == "fused":
        return UpdateKernels(0, 3 + 2 * state_rule(optimizer).tensors)
    counted = FOREACH if update == "foreach" else FOR_LOOP
    if optimizer not in counted:
        raise ValueError(
            f"update {update}: the kernels of {optimizer} were not counted. Leave the update fused, or "
            f"choose one of {', '.join(counted)}."
        )
    return counted[str(optimizer)]
