"""Suites by name: those in which contenders take turns, and those of single figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from benchmarks import paper, state, training
from benchmarks.predicted import predicted
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

SINGLES: dict[str, Callable[[Sequence[int], int], Iterable[Figure]]] = {
    "plan": lambda _, rounds: paper.plan(rounds),
    "simulate": lambda _, rounds: paper.simulate(min(rounds, 3)),
    "predicted": predicted,
}
"""Called with numbers of ranks and of rounds. Nobody takes turns; the ranks are real, or on paper others."""
