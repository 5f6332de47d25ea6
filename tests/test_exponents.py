"""Exponents of growth: of lines made to have one; what counts as faster than its work."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from benchmarks.comparisons import amount, exponent, growing_ms, growths, upper_half, work
from benchmarks.results import GROWING, SuiteResult, Taken


def point(size: int, *times_ms: float, what: str = "step", axis: str = "parameters") -> SuiteResult:
    """Of one contender; what is not varied is 2 ranks, 100 tensors, a million parameters."""
    sizes = {"ranks": 2, "tensors": 100, "parameters": 10**6, axis: size}
    return SuiteResult(what, axis, **sizes, taken={"ours": Taken([*times_ms], [2 * ms for ms in times_ms])})


# ------------------------------------------------------------------------------------------------ exponents


def test_exponents_by_hand():
    assert exponent([1, 10, 100], [5, 5, 5]) == pytest.approx(0)
    assert exponent([1, 10], [1, 100]) == pytest.approx(2)
    assert exponent([4, 1, 2], [8, 1, 2.8284271247461903]) == pytest.approx(1.5)


@given(
    st.lists(st.integers(1, 10**9), min_size=2, max_size=8, unique=True),
    st.floats(-1, 3),
    st.floats(1e-3, 1e3),
)
def test_a_power_has_its_own_exponent(sizes, power, factor):
    assert exponent(sizes, [factor * size**power for size in sizes]) == pytest.approx(power, abs=1e-5)


# ----------------------------------------------------------------------------------------------------- work


def test_work_by_hand():
    two_ranks = {what: work(point(10, 1.0, what=what)) for what in GROWING}
    # 28 bytes of the update and 16 on the way to the other; of 8 bytes of state half copied, half sent
    assert two_ranks == {"step": 440, "sync": 160, "consolidate": 40 * 2 + 40 * 4, "construct": 160}
    assert work(point(300, 1.0, axis="tensors")) == 300


def test_nothing_is_sent_to_nobody():
    assert work(point(1, 1.0, what="sync", axis="ranks")) == 0
    assert work(point(1, 1.0, what="step", axis="ranks")) == 28 * 10**6


@given(st.sampled_from(GROWING), st.integers(1, 64), st.integers(1, 1000))
def test_work_is_proportional_to_the_parameters(what, ranks, times):
    one, many = (work(SuiteResult(what, "parameters", ranks, 1, n, {})) for n in (8, 8 * times))
    assert many == pytest.approx(times * one)


def test_processor_time_counts_where_ranks_share_cores():
    for axis, ms in (("ranks", 2.0), ("tensors", 1.0)):
        one = point(4, 1.0, axis=axis)
        assert growing_ms(one, one.taken["ours"]) == [ms]


# --------------------------------------------------------------------------------------------------- growths


def test_the_upper_half_begins_at_the_middle_of_a_logarithmic_axis():
    points = [point(size, 1.0) for size in (1, 300, 3, 10, 100, 30)]
    assert [amount(one) for one in upper_half(points)] == [30, 100, 300]
    assert upper_half([]) == []


def test_a_latency_below_the_middle_does_not_count():
    (found,) = growths([point(10**power, 5 + 10**power / 1e6, 5 + 10**power / 1e6) for power in range(4, 10)])
    assert found.points == 3
    assert 0.9 < found.exponent.low <= found.exponent.high <= 1
    assert found.of_work == pytest.approx(1)
    assert not found.faster_than_work


def test_what_is_quadratic_is_found_and_what_is_noisy_is_not():
    quadratic = [point(n, n * n / 1e6, n * n / 1e6, n * n / 1e6, axis="tensors") for n in (10, 100, 1000)]
    assert growths(quadratic)[0].faster_than_work
    noisy = [point(1, 1.0, 1.0, 1.0, 1.0), point(100, 1.0, 1.0, 1.0, 1.0), point(1000, 5.0, 10.0, 20.0, 10.0)]
    assert not growths(noisy)[0].faster_than_work


def test_of_ranks_the_work_has_its_own_exponent():
    sent = [point(n, *[float(n - 1)] * 3, what="sync", axis="ranks") for n in (1, 2, 4, 8)]
    (found,) = growths(sent)
    assert found.of_work == pytest.approx(found.exponent.median)
    assert found.of_work > 1.1
    assert not found.faster_than_work


def test_a_single_point_has_no_growth():
    assert growths([point(100, 1.0, 2.0)]) == []
    assert growths([]) == []
