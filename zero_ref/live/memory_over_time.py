"""A picture of a rank's memory during an iteration, by kind: a panel for each run, on the same scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby

from zero_ref.live.lanes import time_axis
from zero_ref.live.numbers import short_bytes, short_time
from zero_ref.live.palette import ALARM, FAINT, INK, ITEM_COLOURS, MUTED, PART_COLOURS
from zero_ref.live.svg import LINE, MARGIN, Drawing, Stacked, element, key, line, text, text_width, ticks
from zero_ref.simulator.scenario import SimulatedRun

COLOURS = {
    "allocator, libraries": FAINT,
    "parameters": PART_COLOURS["parameters"],
    "optimizer state": PART_COLOURS["optimizer state"],
    "gradients": PART_COLOURS["gradients"],
    "communication": ITEM_COLOURS["communication"],
    "activations": ITEM_COLOURS["activations"],
    "temporaries": ITEM_COLOURS["other"],
}
"""By kind, from the bottom of the pile to its top: what stays is below what comes and goes."""

HIGH, LEAST_HIGH = 210.0, 40.0
"""Pixels of the panel of the run that holds most, and of the lowest panel."""

CELL = 2.0
"""Pixels of time in which the moment with most bytes stands for all."""

Curve = Sequence[tuple[float, Mapping[str, float]]]


def memory_over_time(runs: Mapping[str, SimulatedRun]) -> Drawing:
    """Bytes on the fullest rank during one iteration, piled up by kind, a panel for each run.

    All panels have one scale of time and one of bytes. A dot is where most is there. A dashed line is the
    memory of the device, in the panels that reach it.

    >>> from zero_ref.simulator.cluster import cluster
    >>> from zero_ref.simulator.models import MODELS
    >>> from zero_ref.simulator.scenario import Scenario
    >>> from zero_ref.simulator.stages import runs_by_stage
    >>> runs = runs_by_stage(Scenario(MODELS["llama3-8b"], cluster("h100-ib"), 64, checkpointing="full"))
    >>> memory_over_time({name: runs[name] for name in ("DDP", "stage 3")}).words
    'DDP: at most 184 GB in 1,469 ms; stage 3: at most 25.5 GB in 1,409 ms; the device has 85.5 GB'

    Args:
        runs: for each title a simulated run, on the same device.
    Raises:
        ValueError: there is no run, or the runs are on several devices.
    """
    devices = {run.scenario.cluster.device for run in runs.values()}
    if len(devices) != 1:
        raise ValueError(f"give runs on one device, at least one of them; got {len(devices)} devices.")
    memory_gb = devices.pop().memory_gb
    device_bytes = None if memory_gb is None else 1e9 * memory_gb
    said = [
        f"{name}: at most {short_bytes(run.peak_bytes)} in {short_time(run.played.makespan_ms)}"
        for name, run in runs.items()
    ]
    if device_bytes is not None:
        said.append(f"the device has {short_bytes(device_bytes)}")
    return Drawing(
        "; ".join(said), lambda width: _panels(runs, device_bytes, MARGIN, 14.0, width - 2 * MARGIN)
    )


def _panels(
    runs: Mapping[str, SimulatedRun], device_bytes: float | None, x: float, y: float, width: float
) -> Stacked:
    curves = {name: run.memory_by_kind() for name, run in runs.items()}
    parts, y = key(COLOURS, x, y, width)
    tops = {name: max(sum(held.values()) for _, held in curve) for name, curve in curves.items()}
    longest_ms = max(run.played.makespan_ms for run in runs.values())
    levels = ticks(max(tops.values()), 4)
    names_wide = max(text_width(short_bytes(level)) for level in levels) + 8
    panel = _Panel(x + names_wide, width - names_wide, longest_ms, HIGH / max(tops.values()))
    grid_top = y
    for name, run in runs.items():
        over = device_bytes is not None and run.fits is False
        peak = f"{name}: peak {short_bytes(run.peak_bytes)}"
        parts.append(text(x, y + 13, peak, fill=ALARM if over else INK, bold=True))
        y += LINE + 6
        bottom = y + max(LEAST_HIGH, panel.px_per_byte * tops[name])
        for level in levels:
            at = bottom - panel.px_per_byte * level
            if at >= y:
                parts.append(line(panel.x, at, x + width, at))
                named = short_bytes(level) if level else "0"
                parts.append(text(panel.x - 6, at + 4, named, fill=MUTED, anchor="end"))
        parts += panel.pile(curves[name], run.played.makespan_ms, bottom)
        if device_bytes is not None and y <= bottom - panel.px_per_byte * device_bytes:
            at = bottom - panel.px_per_byte * device_bytes
            parts.append(line(panel.x, at, x + width, at, ALARM, 1.6, "5 3"))
            words = f"the device's {short_bytes(device_bytes)}"
            parts.append(text(x + width, at - 5, words, fill=ALARM, anchor="end", halo=True))
        y = bottom + 14
    axis = time_axis({"forward"}, panel.x, panel.width, grid_top, y - 8, longest_ms)
    return axis + parts, y + 32


class _Panel:
    """The scales of all panels.

    Args:
        x, width: of the time's axis, in pixels.
        longest_ms: of the time at its right end.
        px_per_byte: pixels.
    """

    def __init__(self, x: float, width: float, longest_ms: float, px_per_byte: float) -> None:
        self.x, self.width, self.px_per_byte = x, width, px_per_byte
        self.px_per_ms = width / longest_ms

    def pile(self, curve: Curve, end_ms: float, bottom: float) -> list[str]:
        """The kinds on top of each other, and a dot at the peak."""
        parts = []
        steps = thinned(curve, CELL / self.px_per_ms)
        end = self.x + self.px_per_ms * end_ms
        heights = [list(accumulate(held.get(kind, 0.0) for kind in COLOURS)) for _, held in steps]
        # The highest pile first, so that each lower one covers all of it but what lies above.
        for place, (kind, colour) in reversed(list(enumerate(COLOURS.items()))):
            most = max(held.get(kind, 0.0) for _, held in curve)
            if not most:
                continue
            drawn = [f"M{self.x:.1f} {bottom:.1f}"]
            before = None
            for (ms, _), height in zip(steps, heights):
                top = f"{bottom - self.px_per_byte * height[place]:.1f}"
                if top != before:
                    drawn.append(f"H{self.x + self.px_per_ms * ms:.1f}V{top}")
                before = top
            drawn.append(f"H{end:.1f}V{bottom:.1f}Z")
            hint = element("title", f"{kind}: at most {short_bytes(most)}")
            parts.append(element("path", hint, d="".join(drawn), fill=colour))
        most, at_ms = max((sum(held.values()), -ms) for ms, held in curve)
        dot = {"cx": self.x - self.px_per_ms * at_ms, "cy": bottom - self.px_per_byte * most}
        return [*parts, element("circle", **dot, r=3.5, fill=INK)]


def thinned(curve: Curve, cell_ms: float) -> list[tuple[float, Mapping[str, float]]]:
    """A point for each cell of time in which something changes: what is there when most is there.

    >>> thinned([(0.0, {"a": 1}), (0.2, {"a": 5}), (0.4, {"a": 2}), (3.0, {"a": 0})], cell_ms=1.0)
    [(0.0, {'a': 5}), (1.0, {'a': 2}), (3.0, {'a': 2})]
    """
    points: list[tuple[float, Mapping[str, float]]] = []
    held: Mapping[str, float] = {}
    behind = 0  # the cell behind the last one with a change
    for cell, of_cell in groupby(curve, key=lambda point: int(point[0] // cell_ms)):
        if points and behind < cell:
            points.append((behind * cell_ms, held))
        there = [held, *(after for _, after in of_cell)]
        points.append((cell * cell_ms, max(there, key=lambda one: sum(one.values()))))
        held, behind = there[-1], cell + 1
    return points
