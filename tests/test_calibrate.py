"""Exact times give back what they were made of, noisy ones an interval around it; mistakes are named."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings, strategies as st

from zero_ref.simulator.calibrate import (
    COMPUTATIONS,
    Computation,
    Measurement,
    Sample,
    calibrate,
    fit,
    fit_device,
    fit_links,
    training_flops,
    undisturbed_ms,
)
from zero_ref.simulator.cluster import Cluster, Link, cluster
from zero_ref.simulator.traffic import OPERATIONS

SIZES = [1024 * 4**power for power in range(9)]
MODELS = [(28, 1e8), (52, 2e8), (52, 8e8), (28, 9e8), (52, 6e9), (100, 8e9), (100, 3e10)]


def times(link: Link, rounds: float = 1, sizes: Iterable[float] = SIZES) -> list[Sample]:
    return [Sample(rounds, size, link.ms(rounds, size)) for size in sizes]


def measured(link: Link, world_size: int = 2, ops: Iterable[str] = OPERATIONS) -> list[Measurement]:
    """Collectives of a machine on which every link is `link`."""
    of_machine = replace(cluster("loopback"), within=link)
    return [
        Measurement(op, size, world_size, of_machine.ms(op, size, world_size)) for op in ops for size in SIZES
    ]


def worked(train: Link, update: Link) -> list[Computation]:
    """Computation on a device with a cost for each tensor and a rate, written as links."""
    return [
        Computation(kind, tensors, amount, link.ms(tensors, amount))
        for kind, link in (("train", train), ("update", update))
        for tensors, amount in MODELS
    ]


def test_two_times_make_a_line() -> None:
    fitted = fit("broadcast", [Sample(2, 1e6, 1.2), Sample(2, 5e6, 5.2)])  # 0.1 ms a round, 1 ms a MB
    assert (fitted.link.latency_us, fitted.link.gb_per_s) == pytest.approx((100, 1))
    assert fitted.errors == pytest.approx((0, 0))


def test_one_slow_size_and_slow_repeats_do_not_move_the_fit() -> None:
    link = Link(100, 2)
    samples = times(link)
    samples[3] = samples[3]._replace(ms=samples[3].ms * 5)
    samples += times(link) * 3 + [sample._replace(ms=sample.ms * 40) for sample in times(link)]
    fitted = fit("broadcast", samples)
    assert fitted.overhead_us == pytest.approx(100, rel=0.01)
    assert fitted.giga_per_s == pytest.approx(2, rel=0.01)


def test_a_size_that_was_always_slow_is_outvoted() -> None:
    samples = times(Link(100, 2))
    samples[5] = samples[5]._replace(ms=samples[5].ms * 3)
    assert fit("broadcast", samples).giga_per_s == pytest.approx(2, rel=0.01)


def test_the_flops_of_a_published_model() -> None:
    # GPT-3: 3.14e23 for 300 billion tokens (arXiv:2005.14165, table D.1), which leaves attention out.
    matrices_only = training_flops(174_600_000_000, 300_000_000_000, layers=96, width=12288, context=0)
    assert matrices_only == pytest.approx(3.14e23, rel=0.01)


def test_a_calibrated_cluster_is_one_like_any_other() -> None:
    found = calibrate(measured(Link(200, 2)), worked(Link(80, 70), Link(30, 12)), source="made up")
    machine = found.cluster
    assert Cluster.from_json(machine.to_json()) == machine
    assert (machine.backend, machine.shared, machine.overlaps) == ("gloo", True, False)
    assert machine.ms("all_reduce", 1e6, 2) == pytest.approx(2 * 0.2 + 2e6 / 2e6)
    assert machine.device.compute_ms(7e10, tensors=100) == pytest.approx(100 * 0.08 + 1000)
    assert machine.device.touch_ms(12e9, tensors=100) == pytest.approx(100 * 0.03 + 1000)
    assert machine.nodes(1024) == 1
    assert {each.what for each in found.fits} == {*OPERATIONS, *COMPUTATIONS}


def test_gpus_do_not_share_their_links() -> None:
    of_gpus = [Measurement("all_reduce", size, 4, Link(10, 100).ms(6, 1.5 * size)) for size in SIZES]
    machine = calibrate(of_gpus, worked(Link(8, 7e4), Link(3, 3e3)), backend="nccl").cluster
    assert (machine.shared, machine.overlaps) == (False, True)
    assert machine.link_of_op["all_reduce"].gb_per_s == pytest.approx(100)


def test_every_other_size_is_held_out_and_its_error_told() -> None:
    slow = SIZES[3]
    collectives = [
        replace(each, ms=each.ms * 2) if each.nbytes == slow else each
        for each in measured(Link(200, 2), ops=["broadcast"])
    ]
    found = calibrate(collectives, worked(Link(80, 70), Link(30, 12)))
    held_out = [each for each in found.held_out if each.what == "broadcast"]
    assert [each.size for each in held_out] == SIZES[1:-1:2]
    assert found.error_bound("broadcast") == pytest.approx(0.5)
    assert found.error_bound("broadcast", share=0.75) == pytest.approx(0, abs=1e-3)
    with pytest.raises(ValueError, match="0 sizes of 'send'"):
        found.error_bound("send")


latencies_us = st.floats(0, 5e3)
rates = st.floats(0.05, 500)


@given(latencies_us, rates, st.integers(2, 8))
@settings(max_examples=40)
def test_exact_times_give_back_the_link_of_every_operation(
    latency_us: float, gb_per_s: float, world_size: int
) -> None:
    link = Link(latency_us, gb_per_s)
    for fitted in fit_links(measured(link, world_size), resamples=0).values():
        for size in (SIZES[0], 3e5, SIZES[-1]):
            assert fitted.ms(1, size) == pytest.approx(link.ms(1, size), rel=1e-3)


@given(latencies_us, rates)
@settings(max_examples=40)
def test_exact_times_predict_the_sizes_held_out(overhead_us: float, giga_per_s: float) -> None:
    link = Link(overhead_us, giga_per_s)
    found = calibrate(measured(link), worked(link, link), resamples=0)
    # The fit looks for the least error to a thousandth.
    assert all(abs(prediction.error) < 2e-3 for prediction in found.held_out)


@given(st.lists(st.floats(1e-3, 1e4), min_size=9, max_size=9))
@settings(max_examples=60)
def test_no_times_give_a_negative_cost(ms: list[float]) -> None:
    samples = [Sample(1, size, time) for size, time in zip(SIZES, ms)]
    try:
        fitted = fit("broadcast", samples, resamples=10)
    except ValueError:
        assume(False)  # times that do not grow with size have no rate
    assert fitted.overhead_us >= 0
    assert fitted.giga_per_s > 0
    for interval, value in (
        (fitted.overhead_us_interval, fitted.overhead_us),
        (fitted.giga_per_s_interval, fitted.giga_per_s),
    ):
        assert 0 <= interval.low <= value <= interval.high


def test_of_noisy_times_the_interval_holds_the_truth_in_most_seeds() -> None:
    covered = 0
    for seed in range(30):
        draw = random.Random(seed)
        noisy = [
            # Each size is a little off for good; each repeat is; and a third are held up by something else.
            Sample(1, size, Link(150, 2).ms(1, size) * off * draw.gauss(1, 0.02) * draw.choice((1, 1, 1.8)))
            for size in SIZES
            for off in [draw.gauss(1, 0.1)]
            for _ in range(9)
        ]
        found = fit("broadcast", noisy, resamples=60, seed=seed)
        low, high = found.overhead_us_interval
        slowest, fastest = found.giga_per_s_interval
        covered += (low <= 150 <= high) + (slowest <= 2 <= fastest)
    assert covered >= 45, "of 60 intervals that are to hold the truth nine times in ten"


def test_the_same_seed_gives_the_same_interval() -> None:
    samples = [
        sample._replace(ms=sample.ms * (1 + 0.2 * (n % 3))) for n, sample in enumerate(times(Link(9, 1)))
    ]
    assert fit("send", samples) == fit("send", samples)
    assert fit("send", samples) != fit("send", samples, seed=1)


@given(st.lists(st.floats(0.1, 10), min_size=4, max_size=20), st.integers(0, 3))
def test_late_repeats_hardly_count(ms: list[float], late: int) -> None:
    assert min(ms) <= undisturbed_ms(ms + [1e6] * min(late, len(ms) // 4)) <= sorted(ms)[len(ms) // 2]


@pytest.mark.parametrize(
    ("values", "answer"),
    [
        (("all_redcue", 8, 2, 1.0), "unknown operation 'all_redcue'; choose one of all_reduce"),
        (("send", 0, 2, 1.0), "at least 1 byte, got 0"),
        (("send", 8, 1, 1.0), "a single rank sends nothing"),
        (("send", 8, 2, -1.0), "send: a measured time is above 0 ms, got -1"),
        (("send", 8, 2, float("nan")), "above 0 ms, got nan"),
    ],
)
def test_a_measurement_that_makes_no_sense_is_refused(
    values: tuple[str, int, int, float], answer: str
) -> None:
    with pytest.raises(ValueError, match=answer):
        Measurement(*values)


@pytest.mark.parametrize(
    ("values", "answer"),
    [
        (("trian", 1, 1.0, 1.0), "unknown kind of work 'trian'; choose one of train, update"),
        (("train", 0, 1.0, 1.0), "at least 1 tensor"),
        (("train", 1, 0.0, 1.0), "an amount above 0"),
        (("update", 1, 1.0, 0.0), "update: a measured time is above 0 ms, got 0"),
    ],
)
def test_work_that_makes_no_sense_is_refused(values: tuple[str, int, float, float], answer: str) -> None:
    with pytest.raises(ValueError, match=answer):
        Computation(*values)


def test_too_little_to_fit_says_what_to_measure() -> None:
    link, works = Link(100, 2), worked(Link(80, 70), Link(30, 12))
    with pytest.raises(ValueError, match=r"broadcast: 1 size\(s\) cannot tell .* at least two"):
        fit("broadcast", times(link, sizes=[1e6]) * 5)
    with pytest.raises(ValueError, match="took no longer than"):
        fit("broadcast", [Sample(1, size, 1 / size) for size in SIZES])
    with pytest.raises(ValueError, match="broadcast: 0 size"):
        fit("broadcast", [])
    with pytest.raises(ValueError, match="no collective was measured"):
        fit_links([])
    with pytest.raises(ValueError, match="no 'update' was measured"):
        fit_device(works[: len(MODELS)])
    with pytest.raises(ValueError, match="all_reduce: 2 sizes; it takes 3 or more"):
        calibrate(measured(link)[:2], works)
