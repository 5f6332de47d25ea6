"""Suites by name: those in which contenders take turns, and those of single figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from benchmarks import paper, state, training
from benchmarks.predicted import Tell, predicted
from benchmarks.results import Figure, SuiteResult

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
        repeats: of a plan and a simulation, of which the best counts.
        tell: of step times, called with the fits and all that was compared.
    """

    rounds: int
    repeats: int
    tell: Tell


SINGLES: dict[str, Callable[[Sequence[int], Amount], Iterable[Figure]]] = {
    "plan": lambda _, amount: paper.plan(amount.repeats),
    "simulate": lambda _, amount: paper.simulate(amount.repeats),
    "predicted": lambda world_sizes, amount: predicted(world_sizes, amount.rounds, amount.tell),
}
"""Nobody takes turns: figures of some numbers of ranks, or on paper of others."""
