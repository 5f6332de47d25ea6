"""The time of a whole iteration, predicted after a calibration and measured, at sizes that no fit has seen:

    .venv/bin/python bench/step_times.py --ranks 2 --turns 15

Turns of calibration and of whole iterations follow one another, so that whatever else the machine does meets
both. With `--pictures FOLDER` the scatter is drawn.
"""

from __future__ import annotations

import argparse
import os
import statistics
from dataclasses import replace
from pathlib import Path

from zero_ref.lab import plots, ranks
from zero_ref.lab.benchmark import Effort, TrainingSize
from zero_ref.lab.config import TRAINED, GPTConfig, TrainConfig
from zero_ref.lab.step_times import StepTime, compare_steps, take_turns
from zero_ref.simulator.calibrate import Interval, calibrate

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
    rounds=0,
)
HELD_OUT = [
    TrainConfig(strategy, batch_size=size, model=GPTConfig(layers=layers, width=width))
    for layers, width, size in ((4, 96, 6), (4, 160, 3), (4, 160, 6), (3, 192, 5), (4, 224, 4), (6, 112, 4))
    for strategy in TRAINED
]


def main() -> None:
    """A line for each held-out size and strategy, then how many are within 25%."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--pictures", type=Path)
    arguments = parser.parse_args()
    print(f"load average before: {os.getloadavg()[0]:.1f}")
    effort = replace(CALIBRATED, rounds=arguments.turns)
    trials = ranks.run(take_turns, arguments.ranks, HELD_OUT, effort, timeout=1800)
    print(f"load average after: {os.getloadavg()[0]:.1f}")
    calibration = calibrate(*trials[0].times)
    for fitted in calibration.fits:
        print(
            f"{fitted.what:<11} {fitted.overhead_us:6.0f} us {_text(fitted.overhead_us_interval)} "
            f"{fitted.giga_per_s:6.2f} G/s {_text(fitted.giga_per_s_interval)}, pieces held out: median "
            f"{calibration.error_bound(fitted.what, 0.5):.0%}, "
            f"worst {calibration.error_bound(fitted.what):.0%}"
        )
    compared = compare_steps(HELD_OUT, calibration.cluster, trials)
    print("layers width batch  strategy     predicted measured error")
    for one in compared:
        model = one.config.model
        print(
            f"{model.layers:>6} {model.width:>5} {one.config.batch_size:>5}  {one.config.strategy:<12} "
            f"{one.predicted_ms:>9.1f} {one.measured_ms:>8.1f} {one.error:>+5.0%}"
            + ("" if one.as_planned else "  NOT AS PLANNED")
        )
    errors = [abs(one.error) for one in compared]
    usual = [abs(one.predicted_ms / statistics.median(one.repeats_ms) - 1) for one in compared]
    print(f"{_within(errors)}; against the median of the repeats {_within(usual)}")
    if arguments.pictures:
        arguments.pictures.mkdir(parents=True, exist_ok=True)
        draw(compared, arguments.pictures / f"step_times_{arguments.ranks}.png")


def _within(errors: list[float]) -> str:
    within = sum(error <= 0.25 for error in errors)
    return (
        f"{within} of {len(errors)} within 25%, median {statistics.median(errors):.0%}, "
        f"worst {max(errors):.0%}"
    )


def _text(interval: Interval) -> str:
    return f"({interval.low:.3g} to {interval.high:.3g})"


def draw(compared: list[StepTime], path: Path) -> None:
    """The scatter, a name for each size."""
    fig, ax = plots.figure(6, 5)
    plots.scatter(
        [
            (
                one.config.strategy,
                f"{one.config.model.layers}x{one.config.model.width}, {one.config.batch_size}",
                one.predicted_ms,
                one.measured_ms,
            )
            for one in compared
        ],
        ax,
    )
    plots.save(fig, path)


if __name__ == "__main__":
    try:
        main()
    finally:
        ranks.shutdown()
