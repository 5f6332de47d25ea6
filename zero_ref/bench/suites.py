"""Suites by name: those in which contenders take turns, and those of single figures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from zero_ref.bench import paper, state, training
from zero_ref.bench.predicted import Tell, predicted
from zero_ref.bench.results import Figure, SuiteResult
from zero_ref.bench.starts import ITERATIONS, Starts, starts

SUITES: dict[str, Callable[[str, int], SuiteResult]] = {
    "step": training.step,
    "sync": training.sync,
    "iteration": training.iteration,
    "checkpoint": state.checkpoint,
    "memory": state.memory,
    "construction": state.construction,
}
"""Called on every rank of a process group, with a set and a number of rounds; all ranks get the same."""


class Amount(NamedTuple):
    """How much is measured.

    Args:
        rounds: how often each piece and each iteration is timed, to predict it and to measure it.
        starts: of an overlapped run.
        repeats: of a plan and a simulation, of which the best counts.
        tell: of step times, called with the fits and all that was compared.
    """

    rounds: int
    starts: int
    repeats: int
    tell: Tell


def of_starts(found: Starts, world_size: int, count: int) -> Iterator[Figure]:
    """What came of many starts, as figures."""
    case = f"{count} starts"
    bad = len(found.hung) + len(found.lost)
    first = ITERATIONS + 1 if found.first_update is None else found.first_update  # later than all there were
    yield Figure("starts", "hung, failed or lost an update", case, world_size, bad)
    yield Figure("starts", "first iteration that updates", case, world_size, first)
    yield Figure("starts", "smallest move of a parameter", case, world_size, found.smallest_move)


def _starts(world_sizes: Sequence[int], amount: Amount) -> Iterator[Figure]:
    for world_size in world_sizes:
        found = starts(world_size, amount.starts)
        for text in (*found.hung, *(f"{what} lost an update" for what in found.lost)):
            print(f"zero-ref: {world_size} ranks, {text}", file=sys.stderr)
        yield from of_starts(found, world_size, amount.starts)


SINGLES: dict[str, Callable[[Sequence[int], Amount], Iterable[Figure]]] = {
    "starts": _starts,
    "plan": lambda _, amount: paper.plan(amount.repeats),
    "simulate": lambda _, amount: paper.simulate(amount.repeats),
    "predicted": lambda world_sizes, amount: predicted(world_sizes, amount.rounds, amount.tell),
}
"""Nobody takes turns: figures of some numbers of ranks, or on paper of others."""
