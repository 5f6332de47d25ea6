"""Exact times give back what they were made of; times that tell nothing are refused."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings, strategies as st

from zero_ref.lab.config import COMPARED, GPTConfig, TrainConfig
from zero_ref.simulator.cluster import Link, cluster
from zero_ref.simulator.traffic import traffic
from zero_ref_course.calibration import (
    ADAMW_BYTES,
    OPS,
    NoRateError,
    Piece,
    calibrate,
    fit,
    predict_step,
    training_flops,
    undisturbed_ms,
)

SIZES = [1024 * 4**power for power in range(9)]
MODELS = [(28, 1e8), (52, 2e8), (52, 8e8), (28, 9e8), (52, 6e9), (100, 8e9), (100, 3e10)]
SMALL = GPTConfig(layers=1, heads=2, width=16, context=8)
LOOPBACK = cluster("loopback")


def times(link: Link, sizes: Iterable[float] = SIZES) -> list[Piece]:
    return [Piece("broadcast", 1, size, link.ms(1, size)) for size in sizes]


def pieces(link: Link, train: Link, update: Link, world_size: int = 2) -> list[Piece]:
    """The pieces of a machine on which every link is `link`, and computing has a cost a tensor and a rate."""
    loads = [(op, traffic(op, size, world_size, backend="gloo")) for op in OPS for size in SIZES]
    sent = [(op, load.rounds, load.total_bytes, link) for op, load in loads]
    computed = [(kind, *of, rate) for kind, rate in (("train", train), ("update", update)) for of in MODELS]
    return [
        Piece(what, calls, amount, rate.ms(calls, amount)) for what, calls, amount, rate in sent + computed
    ]


def test_two_times_make_a_line() -> None:
    fitted = fit([Piece("broadcast", 2, 1e6, 1.2), Piece("broadcast", 2, 5e6, 5.2)])
    assert (fitted.link.latency_us, fitted.link.gb_per_s) == pytest.approx((100, 1))  # 0.1 ms a round, 1 a MB


def test_slow_repeats_and_a_size_that_was_always_slow_do_not_move_the_fit() -> None:
    samples = times(Link(100, 2))
    samples[5] = samples[5]._replace(ms=samples[5].ms * 3)
    assert fit(samples).giga_per_s == pytest.approx(2, rel=0.01)
    samples += times(Link(100, 2)) * 3 + [one._replace(ms=one.ms * 40) for one in times(Link(100, 2))]
    fitted = fit(samples)
    assert fitted.overhead_us == pytest.approx(100, rel=0.01)
    assert fitted.giga_per_s == pytest.approx(2, rel=0.01)


def test_the_flops_of_a_published_model() -> None:
    # GPT-3: 3.14e23 for 300 billion tokens (arXiv:2005.14165, table D.1), which leaves attention out.
    matrices_only = training_flops(174_600_000_000, 300_000_000_000, layers=96, width=12288, context=0)
    assert matrices_only == pytest.approx(3.14e23, rel=0.01)


@given(st.floats(0, 5e3), st.floats(0.05, 500), st.integers(2, 8))
@settings(max_examples=40)
def test_exact_times_give_back_the_machine_and_predict_what_was_held_out(
    overhead_us: float, giga_per_s: float, world_size: int
) -> None:
    link = Link(overhead_us, giga_per_s)
    found = calibrate(pieces(link, link, link, world_size))
    machine = replace(LOOPBACK, within=link)
    for op in OPS:
        for size in (SIZES[0], 3e5, SIZES[-1]):
            foreseen = found.cluster.ms(op, size, world_size)
            assert foreseen == pytest.approx(machine.ms(op, size, world_size), rel=2e-3)
    # The fit looks for the least error to a thousandth.
    assert all(found.worst_error(one.what) < 2e-3 for one in found.fits)


def test_every_other_size_is_held_out_and_its_error_told() -> None:
    made = pieces(Link(200, 2), Link(80, 70), Link(30, 12))
    slow = [one._replace(ms=one.ms * 2) if one.amount == SIZES[3] else one for one in made]
    found = calibrate(slow)
    assert len(found.held_out["broadcast"]) == len(SIZES[1:-1:2])
    assert found.worst_error("broadcast") == pytest.approx(0.5)
    device = found.cluster.device
    assert device.compute_ms(7e10, tensors=100) == pytest.approx(100 * 0.08 + 1000)
    assert device.touch_ms(12e9, tensors=100) == pytest.approx(100 * 0.03 + 1000)
    assert (found.cluster.nodes(1024), found.cluster.shared, found.cluster.overlaps) == (1, True, False)


@given(st.lists(st.floats(1e-3, 1e4), min_size=9, max_size=9))
@settings(max_examples=60)
def test_no_times_give_a_negative_cost(ms: list[float]) -> None:
    samples = [Piece("broadcast", 1, size, time) for size, time in zip(SIZES, ms)]
    try:
        fitted = fit(samples)
    except NoRateError:
        assume(False)  # times that do not grow with size have no rate
    assert fitted.overhead_us >= 0
    assert fitted.giga_per_s > 0


@given(st.lists(st.floats(0.1, 10), min_size=4, max_size=20), st.integers(0, 3))
def test_late_repeats_hardly_count(ms: list[float], late: int) -> None:
    assert min(ms) <= undisturbed_ms(ms + [1e6] * min(late, len(ms) // 4)) <= sorted(ms)[len(ms) // 2]


def test_too_little_to_fit_says_what_to_measure() -> None:
    with pytest.raises(ValueError, match=r"broadcast: 1 size\(s\) cannot tell .* at least two"):
        fit(times(Link(100, 2), sizes=[1e6]) * 5)
    with pytest.raises(NoRateError, match="took no longer than"):
        fit([Piece("broadcast", 1, size, 1 / size) for size in SIZES])
    with pytest.raises(ValueError, match="broadcast: 2 sizes; give 3 or more"):
        calibrate(times(Link(100, 2))[:2])


# ------------------------------------------------------------------------------------- whole iterations


CONFIGS = [TrainConfig(strategy, batch_size=1, model=SMALL) for strategy in COMPARED]


def test_an_iteration_is_the_sum_of_its_parts_where_nothing_overlaps() -> None:
    plain = predict_step(CONFIGS[0], LOOPBACK, 2)
    assert plain.ms == pytest.approx(plain.played.timeline().serial_ms)
    device = replace(LOOPBACK.device, overhead_us=100, update_overhead_us=10)
    slower = replace(LOOPBACK, device=device)
    ddp, zero = (
        predict_step(config, slower, 2).ms - predict_step(config, LOOPBACK, 2).ms for config in CONFIGS[:2]
    )
    tensors = 2 + 12 + 2  # embeddings, a block, the last norm
    assert ddp == pytest.approx(tensors * 0.110)
    assert tensors * 0.105 <= zero < ddp, "the update of half of the tensors or more"


def test_an_update_moves_the_bytes_that_the_calibration_counted() -> None:
    ddp = predict_step(CONFIGS[0], LOOPBACK, 2)
    step_ms = ddp.played.critical_ms()["step"]
    numel = ddp.plan.parameter_bytes[0] // 4
    assert step_ms == pytest.approx(LOOPBACK.device.touch_ms(ADAMW_BYTES * numel))
