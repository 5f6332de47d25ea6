"""The time of a whole iteration, predicted after a calibration and measured, at sizes that no fit has seen:

    .venv/bin/python bench/step_times.py --ranks 2 --turns 15

Turns of calibration and of whole iterations follow one another, so that whatever else the machine does meets
both. `zero-ref bench predicted` does the same; here the fits are printed as well, and `--pictures FOLDER`
draws the scatter.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path

from zero_ref.bench.predicted import step_times
from zero_ref.bench.step_times import StepTime
from zero_ref.lab import plots, ranks
from zero_ref.simulator.calibrate import Interval


def main() -> None:
    """A line for each held-out size and strategy, then how many are within 25%."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--pictures", type=Path)
    arguments = parser.parse_args()
    print(f"load average before: {os.getloadavg()[0]:.1f}")
    calibration, compared = step_times(arguments.ranks, arguments.turns)
    print(f"load average after: {os.getloadavg()[0]:.1f}")
    for fitted in calibration.fits:
        print(
            f"{fitted.what:<11} {fitted.overhead_us:6.0f} us {_text(fitted.overhead_us_interval)} "
            f"{fitted.giga_per_s:6.2f} G/s {_text(fitted.giga_per_s_interval)}, pieces held out: median "
            f"{calibration.error_bound(fitted.what, 0.5):.0%}, "
            f"worst {calibration.error_bound(fitted.what):.0%}"
        )
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
