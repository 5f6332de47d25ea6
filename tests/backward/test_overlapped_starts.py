"""`tests/overlapped_starts.py` finds what hangs and what loses an update, and in a right run neither."""

from __future__ import annotations

from collections.abc import Callable

import overlapped_starts
import pytest
from overlapped_starts import Outcome, starts

from zero_ref.lab import ranks

pytestmark = pytest.mark.ranks


def test_overlapped_runs_start_and_update_in_the_first_iteration() -> None:
    result = starts(2, 2)
    assert result == ((), (), result.smallest_move, 1, (6,))
    assert result.smallest_move > 0


def test_starting_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, not 0"):
        starts(2, 0)


def no_hook(hook, ddp, zero, shard_buckets):  # type: ignore[no-untyped-def]
    return hook


def half_of_each_bucket(hook, ddp, zero, shard_buckets):  # type: ignore[no-untyped-def]
    return lambda state, bucket: hook(state, (bucket.buffer().mul_(0.5), bucket)[1])


def start_of(way: Callable[..., object]) -> Outcome:
    ways = overlapped_starts.WAYS[:]
    overlapped_starts.WAYS[:] = [(way, False, None)]
    try:
        return overlapped_starts._start(0)
    finally:
        overlapped_starts.WAYS[:] = ways


@pytest.mark.parametrize(("way", "same"), [(no_hook, True), (half_of_each_bucket, False)])
def test_an_update_that_backward_does_not_make_or_makes_wrong_shows(
    way: Callable[..., object], same: bool
) -> None:
    for outcome in ranks.run(start_of, 2, way, backend="gloo"):
        assert (outcome.same, outcome.first_update) == (same, None)


def test_of_many_starts_the_worst_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = iter([[Outcome(True, 2.0, 1, 6), Outcome(True, 1.0, 3, 6)], [Outcome(False, 0.5, 1, 4)], None])

    def run(*_: object, **__: object) -> list[Outcome]:
        of_ranks = next(outcomes)
        if of_ranks is None:
            raise ranks.RankError("no end", 0, "no end")
        return of_ranks

    monkeypatch.setattr(ranks, "run", run)
    hung, lost, smallest_move, first_update, buckets = starts(2, 3)
    assert (smallest_move, first_update, buckets) == (0.5, 3, (4, 6))
    assert [text.partition(",")[0] for text in (*lost, *hung)] == ["start 1", "start 2"]
    assert hung[0].endswith("no end")
