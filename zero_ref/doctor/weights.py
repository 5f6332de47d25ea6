"""One equation: the weights with which known tensors add up to what is there, and what they say in words.

A gradient in `.grad` is a sum of the gradients of every rank and micro-batch. The right weights are equal, or
those of the tokens; another factor, a missing rank or only the last micro-batch can be read off.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

import torch

LEFT = 1e-3
"""The relative part of a tensor that weights may leave unexplained: rounding leaves less."""
CLOSE = 1e-3
"""The tolerance of a weight, a factor or a ratio that is read off."""


def solve(
    columns: Sequence[torch.Tensor], seen: torch.Tensor, floor: torch.Tensor | float = 0.0
) -> torch.Tensor | None:
    """The weights with which the columns add up to `seen`; None if there are none, or too few elements.

    >>> solve([torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 0.0, 1.0])], torch.tensor([3.0, 4.0, 7.0]))
    tensor([2.0000, 1.0000], dtype=torch.float64)

    Args:
        columns: (numel,) each. Every element counts alike, however small it is.
        floor: elements below it count less.
    """
    if not columns or len(seen) <= len(columns) or not seen.isfinite().all():
        return None
    matrix, target = torch.stack([column.double() for column in columns], 1), seen.double()
    if (target[matrix.abs().sum(1) == 0] != 0).any() or (matrix == 0).all(0).any():
        return None
    sizes = matrix.abs().sum(1) + floor
    used = matrix.abs().sum(1) > 0
    if int(used.sum()) <= len(columns):
        return None
    matrix, target = matrix[used] / sizes[used, None], target[used] / sizes[used]
    found = torch.linalg.lstsq(matrix, target[:, None], driver="gelsd").solution[:, 0]
    left = (matrix @ found - target).norm() / target.norm().clamp(min=1e-300)
    return found if bool(left <= LEFT) or not target.any() else None


def rounded(matrix: torch.Tensor) -> list[list[float]]:
    """The rows of a matrix, to four decimals."""
    return [[round(one, 4) + 0.0 for one in row] for row in matrix.tolist()]


def in_words(weights: torch.Tensor) -> str:
    """The weights of each rank's gradients, one number where those of all micro-batches agree.

    >>> in_words(torch.tensor([[0.5, 0.5], [0.0, 1.0]]))
    'rank 0: 0.5, rank 1: (0, 1)'
    """
    parts = []
    for rank, row in enumerate(rounded(weights)):
        numbers = ["none" if isnan(one) else f"{one:.4g}" for one in row]
        parts.append(f"rank {rank}: " + (numbers[0] if len(set(numbers)) == 1 else f"({', '.join(numbers)})"))
    return ", ".join(parts)


def meaning(seen: dict[int, torch.Tensor], right: torch.Tensor) -> str:
    """What weights on ranks say, where it can be said in words.

    Args:
        seen: for each rank the weights of all ranks' gradients, (ranks, micro-batches).
        right: the right ones.
    """
    counts = {"ranks": right.shape[0], "micro-batches": right.shape[1]}
    known = [row for row in range(right.shape[0]) if not any(one[row].isnan().any() for one in seen.values())]
    ratios = {rank: one[known] / right[known] for rank, one in seen.items()}
    ratio = next(iter(ratios.values()))
    if not known:
        return "other weights than in one process with all data"
    if all(_close(one, ratio) for one in ratios.values()):
        return _of_one(ratio, known, counts)
    if len(ratios) > 1 and all(
        rank in known and _only(one, row=known.index(rank)) for rank, one in ratios.items()
    ):
        return "each rank has the gradient of its own data alone: it is not reduced"
    return "ranks have different gradients"


def _of_one(ratio: torch.Tensor, known: Sequence[int], counts: dict[str, int]) -> str:
    """The words for weights that are the same on all ranks, given by their ratios to the right ones.

    Args:
        known: the ranks whose gradients are there, one for each row.
    """
    ranks, micro = ratio.shape
    if _close(ratio, ratio[0, 0].expand_as(ratio)):
        return times(ratio[0, 0].item(), counts)
    for row, rank in enumerate(known if ranks > 1 else ()):
        if _only(ratio, row=row):
            return f"the gradient of rank {rank} alone"
    for column in range(micro if micro > 1 else 0):
        if _only(ratio, column=column):
            which = {0: "first", micro - 1: "last"}.get(column, f"{column + 1}th")
            return f"only the {which} micro-batch is there"
    missing = [
        rank for row, rank in enumerate(known) if (ratio[row].abs() <= CLOSE * ratio.abs().max()).all()
    ]
    if missing:
        return f"the gradient of rank {', '.join(map(str, missing))} is missing"
    return "other weights than in one process with all data"


def times(factor: float, counts: dict[str, int]) -> str:
    """A factor in words, with the counts that give it.

    >>> times(0.25, {"ranks": 4, "micro-batches": 5})
    '0.25 times the right gradient, which is 1 / the number of ranks'
    """
    said = f"{factor:.4g} times the right gradient"
    for name, count in counts.items():
        for power, words in POWERS.items():
            if count > 1 and abs(factor - count**power) <= CLOSE * count**power:
                return f"{said}, which is {words.format(f'the number of {name}')}"
    if abs(factor + 1) <= CLOSE:
        return f"{said}: its sign is turned"
    return said


POWERS = {
    1.0: "{}",
    -1.0: "1 / {}",
    0.5: "the root of {}",
    -0.5: "1 / the root of {}",
    -2.0: "1 / {} squared",
}


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=CLOSE, atol=CLOSE * float(other.abs().max()))


def _only(ratio: torch.Tensor, row: int | None = None, column: int | None = None) -> bool:
    rest = ratio.clone()
    kept = ratio[row] if row is not None else ratio[:, column]
    rest[row if row is not None else slice(None), slice(None) if column is None else column] = 0.0
    least = CLOSE * ratio.abs().max()
    return bool((kept.abs() > least).all()) and bool((rest.abs() <= least).all())
