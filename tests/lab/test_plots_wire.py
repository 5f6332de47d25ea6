"""The pictures of what collectives cost: a ring's rounds, bytes on the wire, time against bytes."""

from __future__ import annotations

from typing import Any

import pytest
from library.pictures import Plot, drawn, written
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.lines import Line2D

from zero_ref.lab import plots
from zero_ref.live.palette import ALARM, INK
from zero_ref.simulator.traffic import traffic

# --------------------------------------------------------------------------------------- bytes on the wire

LINES = {"2 (N - 1)": lambda n: 2 * (n - 1), "N - 1": lambda n: n - 1}
OPS = ("all_reduce", "broadcast", "all_gather", "exchange", "reduce_scatter")
LINE_OF_OP = {op: "2 (N - 1)" if op == "all_reduce" else "N - 1" for op in OPS}
GLOO = {op: {n: 1.003 * traffic(op, 1, n, backend="gloo").total_bytes for n in (2, 4, 8)} for op in OPS}


def gloo(ax: Axes) -> Axes:
    return plots.bytes_on_wire(LINES, LINE_OF_OP, GLOO, ax)


def lines(ax: Axes, label: str) -> list[Line2D]:
    return [line for line in ax.lines if line.get_label() == label]


def points(ax: Axes, label: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for line in lines(ax, label) for x, y in zip(*line.get_data())]


def test_marks_lie_where_they_were_measured_and_lines_where_theory_is():
    ax = drawn(gloo)
    for op in OPS:
        assert points(ax, op) == list(GLOO[op].items())
    for name, height in LINES.items():
        assert points(ax, name) == [(n, height(n)) for n in range(1, 9)]
    assert set(OPS) <= set(written(ax))


def test_what_is_off_its_line_stands_out_and_nothing_else():
    ax = drawn(gloo)
    for op in OPS:
        expected = ALARM if op == "reduce_scatter" else INK
        for mark in lines(ax, op):
            assert to_hex(mark.get_markeredgecolor()).upper() == expected
    assert points(ax, "off: reduce_scatter") == [
        (n, y) for n, times in GLOO["reduce_scatter"].items() for y in (n - 1, times)
    ]
    assert [op for op in OPS if lines(ax, f"off: {op}")] == ["reduce_scatter"]


@pytest.mark.parametrize(
    ("line_of_op", "measured", "message"),
    [
        ({"reduce": "N"}, {}, r"no line for 'reduce': give one of 2 \(N - 1\), N - 1"),
        ({}, {"send": {2: 1.0}}, "no line for 'send'"),
        (dict.fromkeys("abcde", "N - 1"), {}, "5 operations on the line 'N - 1': at most 4"),
        ({str(number): "N - 1" for number in range(9)}, {}, "9 operations: there are marks for 8"),
    ],
)
def test_operations_without_a_line_or_a_mark_are_refused(line_of_op, measured, message):
    with pytest.raises(ValueError, match=message):
        plots.bytes_on_wire(LINES, line_of_op, measured, plots.figure()[1])


# -------------------------------------------------------------------------------------- time against bytes

SIZES = [10.0**power for power in range(3, 11)]


def line_of_time(latency_ms: float, ms_per_byte: float) -> dict[float, float]:
    return {size: latency_ms + ms_per_byte * size for size in SIZES}


CURVES = {"slow": line_of_time(1.0, 1e-6), "fast": line_of_time(0.04, 4e-9), "far": line_of_time(0.5, 5e-9)}


def times(ax: Axes) -> Axes:
    return plots.time_against_bytes(CURVES, ax, turns={"slow": 1e6, "fast": 1e7, "far": 1e8})


def test_curves_are_drawn_as_given_and_dots_lie_on_them():
    ax = drawn(times)
    for name, curve in CURVES.items():
        assert points(ax, name) == list(curve.items())
    assert dict(points(ax, "turn")) == pytest.approx({1e6: 2.0, 1e7: 0.08, 1e8: 1.0})
    assert {"1 MB", "10 MB", "100 MB", "slow", "fast", "far"} <= set(written(ax))


@pytest.mark.parametrize(
    ("curves", "turns", "message"),
    [
        ({"a": {1e3: 1.0}}, {}, "a: give two payloads or more"),
        ({"a": {}}, {}, "a: give two payloads or more"),
        ({"a": {0.0: 1.0, 1e3: 1.0}}, {}, "sizes and times above 0"),
        ({"a": {1.0: 1.0, 1e3: 0.0}}, {}, "sizes and times above 0"),
        ({"a": CURVES["slow"]}, {"b": 1e6}, "a dot for 'b', which is not a curve"),
        ({"a": CURVES["slow"]}, {"a": 0.0}, "a: the payload of a dot must be above 0"),
    ],
)
def test_what_has_no_logarithm_is_refused(curves: Any, turns: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plots.time_against_bytes(curves, plots.figure()[1], turns=turns)


# -------------------------------------------------------------------------------------------- all pictures

PICTURES: dict[str, Plot] = {
    "bytes_on_wire, gloo": gloo,
    "bytes_on_wire, theory alone": lambda ax: plots.bytes_on_wire(LINES, LINE_OF_OP, {}, ax),
    "bytes_on_wire, sixteen ranks": lambda ax: plots.bytes_on_wire(
        LINES, LINE_OF_OP, {"broadcast": {16: 15.0}}, ax
    ),
    "time_against_bytes": times,
    "time_against_bytes, one curve": lambda ax: plots.time_against_bytes(
        {"slow": CURVES["slow"]}, ax, turns={}
    ),
}
