"""The interval around a prediction: how it follows from ratios, and what follows from it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from zero_ref.simulator.cluster import cluster
from zero_ref.simulator.spread import (
    KINDS,
    MEMORY,
    OTHERS,
    TIME,
    Spread,
    around,
    fits,
    four_cases,
    interval_of_memory,
    interval_of_time,
    spread_of,
    spread_of_kind,
)


def test_a_source_counts_once_however_many_runs_it_has() -> None:
    many = {"many": [1.0] * 96, **{name: [2.0, 3.0] for name in "abc"}}
    # Of 4 sources, 5/4 of a share of 0.4 is a half: one source's weight is outside at each end.
    assert spread_of(many, share=0.4) == Spread(2.0, 3.0)
    assert spread_of({"one": [1.0] * 96 + [2.0, 3.0]}, share=0.4) == Spread(1.0, 1.0)


@given(st.dictionaries(st.text("ab", max_size=2), st.lists(st.floats(0.1, 10), min_size=1), min_size=1))
def test_an_interval_holds_its_share(ratios: dict[str, list[float]]) -> None:
    spread = spread_of(ratios)
    held = [sum(spread.low <= one <= spread.high for one in some) / len(some) for some in ratios.values()]
    assert sum(held) / len(held) >= 0.8 - 1e-9


def test_a_kind_of_few_sources_takes_those_of_all_kinds() -> None:
    four = {name: [ratio] for name, ratio in zip("abcd", (0.9, 1.0, 1.1, 1.2), strict=True)}
    few = {"e": [2.0], "a": [3.0]}  # one source may have programs of two kinds
    assert spread_of_kind({"pytorch": four, "vendor": few}, "pytorch") == Spread(0.9, 1.2)
    assert spread_of_kind({"pytorch": four, "vendor": few}, "vendor") == Spread(0.9, 3.0)
    three = dict(list(four.items())[1:])
    assert spread_of_kind({"pytorch": three, "vendor": few}, "pytorch") == Spread(1.0, 3.0)
    assert spread_of_kind({"pytorch": four}, "hand-written") == Spread(0.9, 1.2)


def test_an_interval_is_asked_of_what_there_is() -> None:
    with pytest.raises(ValueError, match="at least one published figure"):
        spread_of({})
    with pytest.raises(ValueError, match="share is above 0 and below 1, got 1"):
        spread_of({"one": [1.0]}, share=1)
    for low, high in ((0.0, 1.0), (2.0, 1.0), (1.0, math.inf)):
        with pytest.raises(ValueError, match="factors 0 < low <= high"):
            Spread(low, high)


def test_what_fits_follows_from_the_memory_of_published_runs() -> None:
    assert fits(80e9 / MEMORY.high, 80e9) is True
    assert fits(80e9 / MEMORY.high * 1.001, 80e9) is None
    assert fits(80e9 / MEMORY.low * 1.001, 80e9) is False
    assert around(100.0) == (100 * TIME.low, 100 * TIME.high)


def test_every_kind_has_intervals_and_no_other_name() -> None:
    assert {"pytorch", *OTHERS} == set(KINDS)
    assert around(100.0, "deepspeed")[1] == 100 * interval_of_time("deepspeed").high
    assert fits(80e9 / interval_of_memory("deepspeed").high * 1.001, 80e9, "deepspeed") is None
    for interval in (interval_of_time, interval_of_memory):
        with pytest.raises(ValueError, match="kind of program"):
            interval("megatron")


def test_in_four_cases_computing_and_sending_take_either_end_of_their_time() -> None:
    h100 = cluster("h100-ib")
    factors = [(one, other) for one in (TIME.low, TIME.high) for other in (TIME.low, TIME.high)]
    for machine, (computing, sending) in zip(four_cases(h100), factors, strict=True):
        assert machine.device.tflops * computing == pytest.approx(h100.device.tflops)
        assert machine.device.memory_gb_per_s * computing == pytest.approx(h100.device.memory_gb_per_s)
        for nbytes in (4, 10**9):
            sent = machine.ms("all_reduce", nbytes, 64)
            assert sent == pytest.approx(sending * h100.ms("all_reduce", nbytes, 64))
