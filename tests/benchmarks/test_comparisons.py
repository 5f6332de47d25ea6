"""Ours beside the others of a suite: which pairs there are, and what their ratios say."""

from __future__ import annotations

from benchmarks.comparisons import comparisons
from benchmarks.results import SuiteResult, Taken


def suite(name: str, wall_ms: dict[str, list[float]]) -> SuiteResult:
    return SuiteResult(
        name, "gpt", 2, 148, 31, {who: Taken(ms, [2 * x for x in ms]) for who, ms in wall_ms.items()}
    )


STEP = suite(
    "step",
    {
        "zero_ref": [9.0, 9.0, 9.0],
        "zero_ref, best": [2.0, 4.0, 3.0],
        "torch": [4.0, 8.0, 9.0],
        "limit: copy": [1.0, 1.0, 1.0],
    },
)
CHECKPOINT = suite(
    "checkpoint",
    {
        "zero_ref: consolidate": [1.0, 1.0],
        "torch: consolidate": [80.0, 90.0],
        "zero_ref: load": [5.0, 5.0],
        "zero_ref, best: load": [4.0, 4.0],
        "torch, best: load": [3.0, 3.0],
    },
)


def test_ours_stands_beside_peers_and_limits_and_not_beside_itself():
    rows = comparisons([STEP])
    assert [(row.thing, row.ours, row.other, row.is_limit) for row in rows] == [
        ("step", "zero_ref, best", "torch", False),
        ("step", "zero_ref, best", "limit: copy", True),
    ]
    assert rows[0].wall.median == rows[0].cpu.median == 2.0  # of 2, 2 and 3: paired, not 8 by 3


def test_the_halves_of_a_checkpoint_are_not_mixed():
    rows = comparisons([CHECKPOINT])
    assert [(row.thing, row.ours, row.other, row.wall.median) for row in rows] == [
        ("consolidate", "zero_ref", "torch", 85.0),
        ("load", "zero_ref, best", "torch, best", 0.75),
    ]
