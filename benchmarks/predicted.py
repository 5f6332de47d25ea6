"""What was said before a run beside what the run did: calls, bytes, and the time of whole iterations."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.console import Console

from benchmarks.results import Figure
from zero_ref.cli.calibrate import print_calibration
from zero_ref.lab.compare import compare
from zero_ref.lab.config import COMPARED, GPTConfig, TrainConfig
from zero_ref.lab.pieces import KIB, Effort, TrainingSize
from zero_ref.lab.step_times import StepTime, calibrate_in_turns, compare_steps
from zero_ref.simulator.calibrate import Calibration

# layers, width, batch
FITTED = ((4, 64, 2), (4, 64, 8), (4, 128, 2), (4, 128, 8), (2, 96, 4), (2, 256, 4), (4, 256, 2), (4, 256, 8))
OTHERS = ((4, 96, 6), (4, 160, 3), (4, 160, 6), (3, 192, 5), (4, 224, 4), (6, 112, 4))

CALIBRATED = Effort(
    nbytes=tuple(KIB * size for size in (1, 16, 64, 256, 1024, 4096, 16384)),
    training=tuple(TrainingSize(GPTConfig(layers=deep, width=wide), size) for deep, wide, size in FITTED),
    rounds=15,
)
"""The pieces that the cluster is fitted to."""

HELD_OUT = [
    TrainConfig(strategy, batch_size=size, model=GPTConfig(layers=deep, width=wide))
    for deep, wide, size in OTHERS
    for strategy in COMPARED
]
"""Whole iterations, of other sizes than any piece."""

TURNS_SECONDS = 1800.0


def predicted(world_sizes: Sequence[int], turns: int) -> Iterator[Figure]:
    """How far predictions were off: a count for each strategy, an error for each size and strategy.

    The fits behind the predictions, and how many of these came close, are printed.

    Args:
        turns: of calibration and of iterations of other sizes, one after the other.
    """
    for world_size in world_sizes:
        # Of calls and bytes each step has the same.
        for run in compare(COMPARED, TrainConfig(steps=4), world_size, Console(quiet=True)):
            pairs, name = run.outcome.pairs().values(), "quantities not as predicted"
            wrong = sum(pair.predicted != pair.measured for pair in pairs) + (not run.outcome.calls_equal)
            yield Figure("predicted", name, run.outcome.strategy, run.outcome.ranks, wrong)
        effort = replace(CALIBRATED, rounds=turns)
        trials, calibration = calibrate_in_turns(HELD_OUT, effort, world_size, timeout=TURNS_SECONDS)
        compared = compare_steps(HELD_OUT, calibration.cluster, trials)
        print_errors(world_size, calibration, compared)
        for one in compared:
            model = one.config.model
            case = f"{one.config.strategy}: {model.layers} x {model.width}, batch {one.config.batch_size}"
            yield Figure("predicted", "iteration as predicted", case, world_size, one.predicted_ms, "ms")
            yield Figure("predicted", "as measured", case, world_size, one.measured_ms, "ms")
            yield Figure("predicted", "relative error", case, world_size, abs(one.error))


def print_errors(world_size: int, calibration: Calibration, compared: Sequence[StepTime]) -> None:
    """Print the fits behind the predicted step times, and how many of these came close."""
    print()
    print_calibration(calibration, f"{world_size} ranks")
    against_median = [one.predicted_ms / statistics.median(one.repeats_ms) - 1 for one in compared]
    for what, errors in (
        ("lower quartile", [one.error for one in compared]),
        ("median", against_median),
    ):
        off = [abs(error) for error in errors]
        print(
            f"iterations against the {what} of their repeats: {sum(error <= 0.25 for error in off)} of "
            f"{len(off)} within 25%, median {statistics.median(off):.0%}, worst {max(off):.0%}"
        )
    print(f"calls and bytes held as planned: {sum(one.as_planned for one in compared)} of {len(compared)}")
