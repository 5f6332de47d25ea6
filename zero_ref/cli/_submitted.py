"""What `zero-ref validate --run FILE` prints: each run of the file, beside what the simulator says of it."""

from __future__ import annotations

from typing import Any

from zero_ref.cli._common import CommandError, planning
from zero_ref.simulator.published import Published
from zero_ref.simulator.submission import LESS, Scored, read_submission, score

UNITS = {"time": "tokens/s a GPU", "memory": "GiB"}


def scored_file(path: str) -> tuple[str, Published, list[Scored]]:
    """The key of the file's source, all runs, and those of the file with their predictions.

    Raises:
        CommandError: the file cannot be read, or a run of it cannot be simulated.
    """
    try:
        key, data = read_submission(path)
        with planning():
            return key, data, [score(run, data) for run in data.runs if run.source == key]
    except OSError as error:
        raise CommandError(f"--run {path} cannot be read: {error.strerror or error}.") from None
    except ValueError as error:
        raise CommandError(f"--run {path}: {str(error).rstrip('.')}.") from None


def scores_as_json(key: str, data: Published, scores: list[Scored]) -> dict[str, Any]:
    """Plain numbers; a time is tokens a second a GPU, and memory is GiB."""
    return {
        "source": key,
        "runs": [
            {
                "run": scored.run.id,
                "use": scored.run.use,
                "supposed": data.supposed(scored.run),
                "ran": scored.run.ran,
                "fits": scored.said.fits,
                "figures": [
                    {
                        "figure": one.figure,
                        "reported": one.published,
                        "predicted": one.predicted,
                        "interval": [*scored.interval(one)],
                        "inside": scored.inside(one),
                        "error": one.error,
                        "effects": scored.effects[one.figure],
                    }
                    for one in scored.compared
                ],
            }
            for scored in scores
        ],
    }


def print_scores(key: str, data: Published, scores: list[Scored]) -> None:
    """The same for people, on standard output."""
    for scored in scores:
        kept = "for testing only" if scored.run.use == "test" else "for fitting"
        print(f"{scored.run.id}, of source {key}, which would be {kept}")
        if scored.said.fits is not None or not scored.run.ran:
            print(f"  {_verdict(scored)}")
        if supposed := data.supposed(scored.run):
            print(f"  supposed: {', '.join(supposed)}")
        for one in scored.compared:
            low, high = scored.interval(one)
            where = "inside" if scored.inside(one) else "outside"
            print(
                f"  {one.figure}, {UNITS[one.figure]}: reported {shown(one.published)}, predicted "
                f"{shown(one.predicted)}, interval {shown(low)} to {shown(high)} ({where}), "
                f"error {one.error:+.0%}"
            )
            effects = scored.effects[one.figure]
            moving = [f"{name} {effect:+.1%}" for name, effect in effects.items() if abs(effect) >= 5e-4]
            still = [name for name, effect in effects.items() if abs(effect) < 5e-4]
            less = f"{1 - LESS:.0%} less of"
            if moving:
                print(f"    {less} these changes the predicted {one.figure}: {', '.join(moving)}")
            print(f"    {less} these changes nothing: {', '.join(still)}")
        print()


def _verdict(scored: Scored) -> str:
    said = {True: "predicted to fit", False: "predicted not to fit", None: "undecided whether it fits"}
    reported = "" if scored.run.ran else "; reported that it ended out of memory"
    return said[scored.said.fits] + reported


def shown(value: float) -> str:
    """A rate or an amount with three or more digits.

    >>> shown(5762.4), shown(82.44), shown(331.0)
    ('5,762', '82.4', '331')
    """
    return f"{value:,.0f}" if value >= 200 else f"{value:.1f}"
