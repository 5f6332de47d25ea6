"""What was said before a run beside what the run did: calls, bytes, and the time of whole iterations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from rich.console import Console

from zero_ref.bench.pieces import Effort, TrainingSize
from zero_ref.bench.results import Figure
from zero_ref.bench.step_times import StepTime, calibrate_in_turns, compare_steps
from zero_ref.lab.compare import compare
from zero_ref.lab.config import COMPARED, GPTConfig, TrainConfig
from zero_ref.lab.train import Outcome
from zero_ref.simulator.calibrate import Calibration

KIB = 2**10
CALIBRATED = Effort(
    nbytes=tuple(KIB * size for size in (1, 16, 64, 256, 1024, 4096, 16384)),
    training=tuple(
        TrainingSize(GPTConfig(layers=layers, width=width), size)
        for layers, width, size in (
            (4, 64, 2),
            (4, 64, 8),
            (4, 128, 2),
            (4, 128, 8),
            (2, 96, 4),
            (2, 256, 4),
            (4, 256, 2),
            (4, 256, 8),
        )
    ),
    rounds=15,
)
"""The pieces that the cluster is fitted to."""

HELD_OUT = [
    TrainConfig(strategy, batch_size=size, model=GPTConfig(layers=layers, width=width))
    for layers, width, size in ((4, 96, 6), (4, 160, 3), (4, 160, 6), (3, 192, 5), (4, 224, 4), (6, 112, 4))
    for strategy in COMPARED
]
"""Whole iterations, of other sizes than any piece."""

TURNS_SECONDS = 1800.0


class Times(NamedTuple):
    """Whole iterations, predicted and measured, and the calibration that predicted them."""

    calibration: Calibration
    compared: list[StepTime]


def step_times(world_size: int, turns: int = CALIBRATED.rounds) -> Times:
    """Calibrate, and time iterations of other sizes, in turns."""
    effort = replace(CALIBRATED, rounds=turns)
    trials, calibration = calibrate_in_turns(HELD_OUT, effort, world_size, timeout=TURNS_SECONDS)
    return Times(calibration, compare_steps(HELD_OUT, calibration.cluster, trials))


def predicted(
    world_sizes: Sequence[int], *, turns: int = CALIBRATED.rounds, steps: int = 4
) -> Iterator[Figure]:
    """How far predictions were off: a count for each strategy, an error for each size and strategy.

    Args:
        turns: of the step times.
        steps: of the run whose calls and bytes are compared; of those each step has the same.
    """
    for world_size in world_sizes:
        config = TrainConfig(steps=steps)
        for run in compare(COMPARED, config, world_size, Console(quiet=True)):
            yield _of_outcome(run.outcome)
        for one in step_times(world_size, turns).compared:
            yield from _of_time(one, world_size)


def _of_outcome(outcome: Outcome) -> Figure:
    wrong = [name for name, pair in outcome.pairs().items() if pair.predicted != pair.measured]
    wrong += ["calls"] * (not outcome.calls_equal)
    return Figure("predicted", "quantities not as predicted", outcome.strategy, outcome.ranks, len(wrong), "")


def _of_time(one: StepTime, world_size: int) -> Iterator[Figure]:
    model = one.config.model
    case = f"{one.config.strategy}: {model.layers} x {model.width}, batch {one.config.batch_size}"
    yield Figure("predicted", "iteration as predicted", case, world_size, one.predicted_ms, "ms")
    yield Figure("predicted", "as measured", case, world_size, one.measured_ms, "ms")
    yield Figure("predicted", "relative error", case, world_size, abs(one.error), "")
