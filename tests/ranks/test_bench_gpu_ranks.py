"""The overlap trace of `python -m benchmarks gpu`, on two ranks of a CPU."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch

from benchmarks import contenders, tables, training
from benchmarks.gpu import overlap
from benchmarks.gpu.budget import Budget
from zero_ref.lab import ranks
from zero_ref.lab.config import GPTConfig

pytestmark = pytest.mark.ranks

SMALL = GPTConfig(layers=2, heads=2, width=32, context=16)


def test_a_trace_has_what_was_sent_and_what_was_computed() -> None:
    found = overlap.overlap(torch.device("cpu"), Budget(600), world_size=2, config=SMALL)
    assert [one["way"] for one in found["traces"]] == list(overlap.OVERLAPPED)
    for one in found["traces"]:
        assert one["computing_ms"] > 0
    of_ddp = found["traces"][0]
    assert of_ddp["way"] == contenders.REFERENCE
    assert of_ddp["communication_ms"] > 0, "the all-reduces of DDP"
    assert 0 <= of_ddp["hidden_share"] <= 1
    assert contenders.REFERENCE in "".join(tables.SECTIONS["overlap"](found))


def under_way_at_the_end_of_a_trace() -> list[int]:
    """How many calls of `gather_in_forward` are not waited for when a trace begins, and when it ends."""
    made: list[training.Training] = []
    make, found = training.wrapped, list[int]()

    def keep(*of: object) -> training.Training:
        made.append(make(*of))  # type: ignore[arg-type]
        return made[-1]

    def count() -> None:
        found.append(len(made[0].optimizer.arriving._works))  # type: ignore[attr-defined]

    def spans(run: Callable[[], object]) -> list[tuple[str, bool, float, float]]:
        count()
        run()
        count()
        return []

    with patch.object(training, "wrapped", keep), patch.object(overlap, "_spans", spans):
        overlap.traced(contenders.OWN_HOOKS_BEST, SMALL)
    return found


def test_nothing_is_under_way_when_a_trace_ends() -> None:
    # A message that ends under the next profile kills the process sooner or later.
    assert ranks.run(under_way_at_the_end_of_a_trace, 2) == [[0, 0, 0, 0]] * 2


def test_what_has_no_time_left_is_not_traced() -> None:
    found = overlap.overlap(torch.device("cpu"), Budget(0), world_size=2)
    assert {one["left_out"] for one in found["traces"]} == {"no time was left"}
