"""The pictures of what collectives cost: bytes on the wire."""

from __future__ import annotations

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


# -------------------------------------------------------------------------------------------- all pictures

PICTURES: dict[str, Plot] = {
    "bytes_on_wire, gloo": gloo,
    "bytes_on_wire, theory alone": lambda ax: plots.bytes_on_wire(LINES, LINE_OF_OP, {}, ax),
    "bytes_on_wire, sixteen ranks": lambda ax: plots.bytes_on_wire(
        LINES, LINE_OF_OP, {"broadcast": {16: 15.0}}, ax
    ),
}
