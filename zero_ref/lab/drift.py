"""The distances between ranks, and which of them agree: functions of the parameters that a run returned.

Nothing here uses the network, so a run that is looked at makes the calls of one that is not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def distances(params_of_ranks: Sequence[torch.Tensor]) -> list[float]:
    """Return for each rank the 2-norm of its parameters' difference from the mean of all ranks.

    The mean is taken in float64, where sums of few equal float32 numbers are exact: all distances are 0 if
    and only if all ranks hold the same values.

    >>> distances([torch.tensor([1.0, 3.0]), torch.tensor([1.0, 5.0])])
    [1.0, 1.0]

    Args:
        params_of_ranks: for each rank all its parameters end to end, (numel,) float32.
    Raises:
        ValueError: there are no ranks.
    """
    if not params_of_ranks:
        raise ValueError("no ranks: give the parameters of at least one.")
    params = torch.stack(list(params_of_ranks)).double()
    of_ranks: list[float] = (params - params.mean(0)).norm(dim=1).tolist()
    return of_ranks


def who_agrees(params_of_ranks: Sequence[torch.Tensor]) -> list[int]:
    """Return for each rank the lowest rank with the same parameters, bit for bit, which may be itself.

    >>> who_agrees([torch.ones(2), torch.ones(2), torch.zeros(2)])
    [0, 0, 2]

    Args:
        params_of_ranks: as `distances`, in any dtype.
    """
    return [
        next(lowest for lowest, other in enumerate(params_of_ranks) if torch.equal(params, other))
        for params in params_of_ranks
    ]


def in_groups(agreeing: int, world_size: int) -> list[int]:
    """Return the result of `who_agrees` if groups of `agreeing` consecutive ranks agree, as a schedule plans.

    >>> in_groups(2, world_size=4)
    [0, 0, 2, 2]
    """
    return [rank - rank % agreeing for rank in range(world_size)]
