"""Pictures of a simulated iteration: memory over time, and the time of a step as ranks are added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from zero_ref.lab.plots._ends import end_labels, level
from zero_ref.lab.plots._style import colours_of, in_style, numbered, stacked_rows, with_levels
from zero_ref.live.numbers import short, short_bytes
from zero_ref.live.palette import ALARM, MUTED
from zero_ref.simulator.play import Played

FAR = 3.0
"""A level this many times above all that is drawn would press it flat: it is named, not drawn."""

STEP_COLOURS = {"computing": "#8A94A6", "exposed communication": ALARM, "waiting": "#E5D8B8"}


@in_style
def memory_curve(
    curves: Mapping[str, Sequence[tuple[float, float]]], ax: Axes, *, device_bytes: float | None = None
) -> Axes:
    """Bytes that a rank holds, moment by moment, and where each curve has its peak.

    >>> from zero_ref.lab.plots import figure
    >>> from zero_ref.plan.partition import ParamSpec
    >>> from zero_ref.simulator.cluster import cluster
    >>> from zero_ref.simulator.play import play
    >>> from zero_ref.simulator.price import Workload
    >>> from zero_ref.simulator.recipe import recipe
    >>> from zero_ref.simulator.schedule import schedule
    >>> params = [ParamSpec(10**8, "bfloat16")] * 4
    >>> plans = {name: schedule(name, params, 8) for name in ("ddp", "zero-2")}
    >>> plays = {name: play(plan, cluster("h100-ib"), Workload(4096)) for name, plan in plans.items()}
    >>> fig, ax = figure(6, 3)
    >>> _ = memory_curve({name: one.memory() for name, one in plays.items()}, ax, device_bytes=80e9)

    Args:
        curves: name -> (milliseconds, bytes from then on), as `Played.memory(rank)` gives them.
        device_bytes: of the device's memory, drawn as a line; far above all curves it is only named.
    Raises:
        ValueError: there is no curve, more than 7, or one without a point.
    """
    colours = colours_of(curves)
    peaks = {name: max(nbytes for _, nbytes in curve) for name, curve in curves.items()}
    top = max(peaks.values()) or 1.0
    far = device_bytes is not None and device_bytes > FAR * top
    drawn_top = top if far or device_bytes is None else max(top, device_bytes)
    for index, (name, curve) in enumerate(curves.items()):
        width = 1.8 + 2.4 * (len(curves) - 1 - index) / len(curves)  # curves that coincide are both seen
        times, nbytes = zip(*curve)
        ax.plot(
            times,
            nbytes,
            drawstyle="steps-post",
            color=colours[name],
            linewidth=width,
            solid_joinstyle="miter",
            label=name,
        )
        at = next(ms for ms, held in curve if held == peaks[name])
        ax.plot([at], [peaks[name]], "o", color=colours[name], ms=width + 4, clip_on=False, label="peak")
    end_ms = max(curve[-1][0] for curve in curves.values())
    ax.set_xlim(0, 1.01 * end_ms or 1.0)
    ax.set_ylim(0, 1.12 * drawn_top)
    if device_bytes is not None and not far:
        level(ax, device_bytes, f"the device's {short_bytes(device_bytes)}")
    with_levels(ax)
    numbered(ax.xaxis, short, MaxNLocator(6, steps=[1, 2, 5, 10]))
    numbered(ax.yaxis, short_bytes, MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    ax.set_xlabel("ms since the iteration began")
    end_labels(ax, peaks, colours, lambda nbytes: f"peak {short_bytes(nbytes)}")
    far_above = f" (the device has {short_bytes(device_bytes or 0)})" if far else ""
    ax.set_title(f"Bytes on a rank{far_above}")
    return ax


class StepParts(NamedTuple):
    """The parts of an iteration's time on one rank.

    Args:
        computing_ms: this rank computes, whatever the network does.
        exposed_ms: the rank does not compute, and the network works.
        waiting_ms: neither works, because another rank is late.
    """

    computing_ms: float
    exposed_ms: float
    waiting_ms: float


def step_parts(played: Played, rank: int = 0) -> StepParts:
    """Divide the time of an iteration into three parts, which add up to `played.iteration_ms`.

    >>> from zero_ref.plan.partition import ParamSpec
    >>> from zero_ref.simulator.cluster import cluster
    >>> from zero_ref.simulator.play import play
    >>> from zero_ref.simulator.price import Workload
    >>> from zero_ref.simulator.schedule import schedule
    >>> plan = schedule("ddp", [ParamSpec(10**8, "bfloat16")] * 4, world_size=64)
    >>> late = play(plan, cluster("h100-ib"), Workload(4096), slow={7: 1.5})
    >>> [round(ms, 1) for ms in step_parts(late)], [round(ms, 1) for ms in step_parts(late, rank=7)]
    ([18.6, 4.0, 6.6], [27.8, 1.3, 0.0])

    Raises:
        ValueError: there is no such rank.
    """
    timeline = played.timeline(rank)
    computing_ms = timeline.makespan_ms - timeline.idle_ms
    exposed_ms = timeline.exposed_ms
    waiting_ms = max(0.0, played.makespan_ms - computing_ms - exposed_ms)
    return StepParts(*(ms / played.schedule.iterations for ms in (computing_ms, exposed_ms, waiting_ms)))


@in_style
def step_time_against_ranks(parts: Mapping[str, Mapping[int, tuple[float, float, float]]], ax: Axes) -> Axes:
    """The time of an iteration, strategy by strategy, as ranks are added: what of it is computing.

    >>> from zero_ref.lab.plots import figure
    >>> fig, ax = figure(6, 3)
    >>> ddp = {8: (40.0, 2.0, 0.0), 64: (40.0, 9.0, 0.0)}
    >>> zero = {8: (33.0, 3.0, 0.0), 64: (32.0, 12.0, 1.0)}
    >>> _ = step_time_against_ranks({"ddp": ddp, "zero-even": zero}, ax)

    Args:
        parts: strategy -> number of ranks -> (computing, exposed communication, waiting) in milliseconds, as
            `step_parts` gives them. A figure needs 0.3 inches for each bar, and 1 more.
    Raises:
        ValueError: there is no strategy, or the strategies have different numbers of ranks.
    """
    counts = {name: tuple(of_name) for name, of_name in parts.items()}
    if len(set(counts.values())) != 1 or () in counts.values():
        raise ValueError(f"each strategy needs the same numbers of ranks, at least one; got {counts}.")
    longest = max(sum(one) for of_name in parts.values() for one in of_name.values()) or 1.0
    bars = {
        f"{world_size:,} rank{'s' if world_size > 1 else ''}": {
            name: of_name[world_size] for name, of_name in parts.items()
        }
        for world_size in next(iter(counts.values()))
    }
    stacked_rows(ax, bars, STEP_COLOURS, lambda ms: f"{short(ms)} ms", between=1.25)
    ax.set_xlim(0, 1.18 * longest)
    ax.tick_params(axis="y", labelcolor=MUTED)
    ax.set_title("Time of an iteration", pad=30)
    return ax
