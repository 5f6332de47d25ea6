"""The suites by name, in each of which contenders take turns."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks import state, training
from benchmarks.results import SuiteResult

SUITES: dict[str, Callable[[str, int], SuiteResult]] = {
    "step": training.step,
    "sync": training.sync,
    "iteration": training.iteration,
    "checkpoint": state.checkpoint,
    "memory": state.memory,
    "construction": state.construction,
}
"""Called on every rank of a process group, with a set and a number of rounds; all ranks get the same."""
