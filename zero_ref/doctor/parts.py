"""Ways in which programs divide parameters among ranks: who has which elements of which parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from zero_ref.plan import rules

Named = Sequence[tuple[str, nn.Parameter]]
Parts = list[list[tuple[str, slice]]]
"""For each rank the elements that it has: a parameter's name, and a slice of it flattened."""
PartsOf = Callable[[Named, int], Parts]
"""A function of named parameters and a number of ranks."""


def by_rule(rule: Any) -> PartsOf:
    """The parts of a rule of this package."""

    def parts_of(named: Named, ranks: int) -> Parts:
        partition = rule([param.numel() for _, param in named], ranks)
        return [
            [(named[piece.param][0], slice(piece.start, piece.stop)) for piece in slices]
            for slices in partition.slices_of_rank
        ]

    return parts_of


def by_rows(named: Named, ranks: int) -> Parts:
    """Each parameter's first dimension in chunks, as DTensor cuts it."""
    of_ranks: Parts = [[] for _ in range(ranks)]
    for name, param in named:
        start = 0
        for rank, chunk in enumerate(param.detach().chunk(ranks)):
            of_ranks[rank].append((name, slice(start, start + chunk.numel())))
            start += chunk.numel()
    return of_ranks


def by_turns(named: Named, ranks: int) -> Parts:
    """Parameter i belongs to rank i modulo the number of ranks."""
    return [[(name, slice(None)) for name, _ in named[rank::ranks]] for rank in range(ranks)]


def by_number(named: Named, ranks: int) -> Parts:
    """The list of parameters in chunks."""
    size = -(-len(named) // ranks)
    return [[(name, slice(None)) for name, _ in named[rank * size :][:size]] for rank in range(ranks)]


def end_to_end(named: Named, ranks: int) -> Parts:
    """All parameters flattened end to end, in equal shares of which the last is padded."""
    size = -(-sum(param.numel() for _, param in named) // ranks)
    of_ranks: Parts = [[] for _ in range(ranks)]
    at = 0
    for name, param in named:
        for rank in range(ranks):
            start, stop = max(rank * size - at, 0), min((rank + 1) * size - at, param.numel())
            if start < stop:
                of_ranks[rank].append((name, slice(start, stop)))
        at += param.numel()
    return of_ranks


ALL: tuple[PartsOf, ...] = (
    *(by_rule(rule) for rule in (rules.sorted_greedy, rules.registration_greedy, rules.even)),
    *(by_rows, by_turns, by_number, end_to_end),
)
