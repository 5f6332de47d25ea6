"""Chapter 16: what a reader may plausibly write, and what the check must say about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

# ------------------------------------------------------------------------------------------ may it be cut?

Pieces = list[torch.Tensor]


def flat_pieces(matrix: torch.Tensor) -> Pieces:
    return list(matrix.flatten().split([448, 1472]))


def whole(matrix: torch.Tensor) -> Pieces:
    return [matrix]


def stepped(
    optimizer_class: Any, options: dict[str, Any], tensors: Pieces, grads: list[Pieces], apart: bool = True
) -> torch.Tensor:
    """The tensors after a step for each list of gradients, with an optimizer each, or one for all."""
    params = [nn.Parameter(tensor.clone()) for tensor in tensors]
    optimizers = [
        optimizer_class(of, **options) for of in ([[param] for param in params] if apart else [params])
    ]
    for of_params in grads:
        for param, grad in zip(params, of_params, strict=True):
            param.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    return torch.cat([param.detach().flatten() for param in params])


def trial(
    optimizer_class: Any,
    options: dict[str, Any],
    *,
    start: tuple[int, ...] = (40, 48),
    steps: int = 3,
    cut: Callable[[torch.Tensor], Pieces] = flat_pieces,
    same: Callable[[torch.Tensor, torch.Tensor], bool] = torch.equal,
    constant: bool = False,
    apart: bool = True,
) -> bool:
    generator = torch.Generator().manual_seed(0)
    values, *grads = torch.randn(1 + steps, *start, generator=generator)
    if constant:
        grads = [torch.ones_like(values) for _ in grads]
    try:
        one = stepped(optimizer_class, options, [values], [[grad] for grad in grads])
        two = stepped(optimizer_class, options, cut(values), [cut(grad) for grad in grads], apart)
    except ValueError:
        return False
    return same(one, two)


def one_step(optimizer_class: Any, options: dict[str, Any]) -> bool:
    return trial(optimizer_class, options, steps=1)


def one_dimension(optimizer_class: Any, options: dict[str, Any]) -> bool:
    return trial(optimizer_class, options, start=(1920,))


def wide_tolerance(optimizer_class: Any, options: dict[str, Any]) -> bool:
    return trial(optimizer_class, options, same=partial(torch.allclose, atol=1e-3))


def between_rows(optimizer_class: Any, options: dict[str, Any]) -> bool:
    return trial(optimizer_class, options, cut=lambda matrix: list(matrix.split([12, 28])))


def the_same_gradient_everywhere(optimizer_class: Any, options: dict[str, Any]) -> bool:
    return trial(optimizer_class, options, constant=True)


def one_optimizer_for_both(optimizer_class: Any, options: dict[str, Any]) -> bool:
    return trial(optimizer_class, options, apart=False)


def other_gradients(optimizer_class: Any, options: dict[str, Any]) -> bool:
    values = torch.randn(40, 48, generator=torch.Generator().manual_seed(0))
    one, two = (
        stepped(optimizer_class, options, cut(values), [[torch.randn_like(one) for one in cut(values)]])
        for cut in (whole, flat_pieces)
    )
    return torch.equal(one, two)


def lets_it_raise(optimizer_class: Any, options: dict[str, Any]) -> bool:
    values, grad = torch.randn(2, 40, 48, generator=torch.Generator().manual_seed(0))
    one = stepped(optimizer_class, options, [values], [[grad]])
    return torch.equal(one, stepped(optimizer_class, options, flat_pieces(values), [flat_pieces(grad)]))


def always(optimizer_class: Any, options: dict[str, Any]) -> bool:
    return True


def the_difference(optimizer_class: Any, options: dict[str, Any]) -> float:
    return 0.0


# ------------------------------------------------------------------------------------- the cost of a matrix


def not_transposed(rows: int, columns: int, iterations: int) -> int:
    return iterations * (4 * rows**2 * columns + 2 * rows**3)


def without_the_square(rows: int, columns: int, iterations: int) -> int:
    m, n = sorted((rows, columns))
    return iterations * 4 * m**2 * n


def one_product_short(rows: int, columns: int, iterations: int) -> int:
    m, n = sorted((rows, columns))
    return iterations * (2 * m**2 * n + 2 * m**3)


def multiplications_alone(rows: int, columns: int, iterations: int) -> int:
    m, n = sorted((rows, columns))
    return iterations * (2 * m**2 * n + m**3)


def one_iteration(rows: int, columns: int, iterations: int) -> int:
    m, n = sorted((rows, columns))
    return 4 * m**2 * n + 2 * m**3


def the_elements(rows: int, columns: int, iterations: int) -> int:
    return iterations * rows * columns


def a_float(rows: int, columns: int, iterations: int) -> float:
    return one_iteration(rows, columns, iterations) * iterations / 1


# ----------------------------------------------------------------------------------------- balance by cost

Shapes = Sequence[tuple[int, int]]


def cost(shape: tuple[int, int]) -> int:
    return 5 * one_iteration(*shape, 5)


def packed(matrices: Shapes, world_size: int, order: Sequence[int], weights: Sequence[int]) -> list[int]:
    loads, owners = [0] * world_size, [0] * len(matrices)
    for i in order:
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += weights[i]
    return owners


def by_elements(matrices: Shapes, world_size: int) -> list[int]:
    numels = [rows * columns for rows, columns in matrices]
    order = sorted(range(len(matrices)), key=lambda i: -numels[i])
    return packed(matrices, world_size, order, numels)


def in_registration_order(matrices: Shapes, world_size: int) -> list[int]:
    return packed(matrices, world_size, range(len(matrices)), list(map(cost, matrices)))


def dealt_in_turn(matrices: Shapes, world_size: int) -> list[int]:
    return [i % world_size for i in range(len(matrices))]


def positions_lost(matrices: Shapes, world_size: int) -> list[int]:
    matrices = sorted(matrices, key=cost, reverse=True)
    return packed(matrices, world_size, range(len(matrices)), list(map(cost, matrices)))


def cheapest_first(matrices: Shapes, world_size: int) -> list[int]:
    costs = list(map(cost, matrices))
    return packed(matrices, world_size, sorted(range(len(matrices)), key=lambda i: costs[i]), costs)


def matrices_of_each_rank(matrices: Shapes, world_size: int) -> list[list[int]]:
    owners = dealt_in_turn(matrices, world_size)
    return [[i for i, owner in enumerate(owners) if owner == rank] for rank in range(world_size)]


WRONG: list[tuple[str, Callable[..., Any], str]] = [
    ("matrices.may_be_cut", one_step, r"WarmsUp may be cut\. .*make several steps"),
    ("matrices.may_be_cut", one_dimension, r"RowsAndColumns may be cut\. .*Step a matrix"),
    ("matrices.may_be_cut", wide_tolerance, r"LAMB may be cut\. .*allow for none"),
    ("matrices.may_be_cut", between_rows, r"NormalizedRows may be cut\. .*inside a row"),
    ("matrices.may_be_cut", the_same_gradient_everywhere, r"RowsAndColumns.*not the same everywhere"),
    ("matrices.may_be_cut", one_optimizer_for_both, r"ClipsTogether.*each piece one of its own"),
    ("matrices.may_be_cut", other_gradients, r"AdamW may not be cut\. .*same values and gradients"),
    ("matrices.may_be_cut", lets_it_raise, r"raised ValueError: Muon only supports 2D"),
    ("matrices.may_be_cut", always, r"Muon may be cut\. It refuses pieces"),
    ("matrices.may_be_cut", the_difference, r"returned 0\.0\. It must return True or False"),
    ("matrices.operations", not_transposed, r"\(32, 4, 3\) returned .*more rows than columns"),
    ("matrices.operations", without_the_square, r"A with itself is missing"),
    ("matrices.operations", one_product_short, r"One product is missing"),
    ("matrices.operations", multiplications_alone, r"multiplications alone"),
    ("matrices.operations", one_iteration, r"\(4, 32, 3\) returned .*That is one iteration"),
    ("matrices.operations", the_elements, r"\(2, 3, 1\) returned 6, and torch\.optim\.Muon makes 64"),
    ("matrices.operations", a_float, r"returned 64\.0\. It must return a whole number"),
    ("matrices.by_cost", by_elements, r"This balances the elements"),
    ("matrices.by_cost", in_registration_order, r"in the order given.*costliest first"),
    ("matrices.by_cost", dealt_in_turn, r"balances the number of matrices"),
    ("matrices.by_cost", positions_lost, r"right owners in the wrong places"),
    ("matrices.by_cost", cheapest_first, r"the fullest rank has .*costliest matrix that is left"),
    ("matrices.by_cost", matrices_of_each_rank, r"returned \[\[.*for each of the 5 matrices"),
    ("matrices.may_be_cut", lets_it_raise, r"^lets_it_raise\(Muon, \.\.\.\) raised .*catch the error"),
]
