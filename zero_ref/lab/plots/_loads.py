"""How much each rank owns, and how that changes with the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from zero_ref.lab.plots._style import SMALL_PT, bare, colour_key, in_style, label_box, rank_ticks
from zero_ref.live.numbers import short, short_bytes, short_count
from zero_ref.live.palette import FAINT, INK, PAPER, SERIES_COLOURS, rank_colour, text_colour_on
from zero_ref.plan.choice import RULES
from zero_ref.plan.partition import Partition

MOST_BARS = 64
"""Above this many ranks a bar is thinner than a line: one filled outline says more."""


@in_style
def loads(
    partition: Partition, ax: Axes, *, bytes_per_element: float | None = None, fullest_first: bool = False
) -> Axes:
    """How much each rank owns, beside an even share and beside the largest tensor.

    No partition of whole tensors gets its fullest rank below the largest tensor, and none gets it below the
    mean: the two lines show which of them binds.

    >>> from zero_ref.lab.plots import figure
    >>> from zero_ref.plan.rules import sorted_greedy
    >>> fig, ax = figure(6, 3)
    >>> _ = loads(sorted_greedy([6, 5, 4, 1], 2), ax, bytes_per_element=8)     # Adam's two means in fp32

    Args:
        partition: any number of ranks; above 64 one outline replaces the bars.
        bytes_per_element: draw bytes, this many an element. Elements if None.
        fullest_first: sort the ranks by what they own.
    """
    scale = 1.0 if bytes_per_element is None else bytes_per_element
    show = short_count if bytes_per_element is None else short_bytes
    ranks = list(range(partition.world_size))
    if fullest_first:
        ranks.sort(key=lambda rank: -partition.loads[rank])
    heights = [scale * partition.loads[rank] for rank in ranks]
    mean = sum(heights) / len(heights)
    largest = scale * max(partition.numels, default=0)

    bare(ax, keep=("bottom",))
    ax.grid(axis="y", color=FAINT, linewidth=0.6)
    if len(ranks) <= MOST_BARS:
        colours = [rank_colour(rank, len(ranks)) for rank in ranks]
        ax.bar(range(len(ranks)), heights, width=0.82 if len(ranks) <= 16 else 1.0, color=colours)
    else:
        ax.stairs(heights, [i - 0.5 for i in range(len(ranks) + 1)], fill=True, color="#8A94A6")
    # Far above all bars, the largest tensor would press them flat: its line is left out, its name stays.
    far = largest > 3 * max(heights)
    top = (1.35 * max(heights) if far else max(*heights, largest)) or 1
    if len(ranks) <= 8:
        for place, (rank, height) in enumerate(zip(ranks, heights)):
            colour = text_colour_on(rank_colour(rank, len(ranks)) if height > 0.16 * top else PAPER)
            label_box(ax, (place - 0.41, 0, place + 0.41, 0.16 * top), [show(height)], color=colour)
    _reference_lines(ax, {"mean": mean, "largest tensor": largest}, top, show)

    ax.set_xlim(-0.6, len(ranks) - 0.4)
    ax.set_ylim(0, 1.06 * top)
    ax.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: show(value)))
    _name_ranks(ax, ranks, fullest_first)
    ax.set_title(_verdict(heights, mean))
    return ax


def _name_ranks(ax: Axes, ranks: Sequence[int], fullest_first: bool) -> None:
    places = rank_ticks(len(ranks))
    if fullest_first and len(ranks) > 16:
        # Count 1st, 2nd, ...: the numbers of the few ranks that can be named would seem picked at random.
        places = [max(0, place - 1) for place in places[:-1]] + places[-1:]
        ax.set_xticks(places, [f"{place + 1:,}" for place in places])
    else:
        ax.set_xticks(places, [f"{ranks[place]:,}" for place in places])
    ax.set_xlabel("ranks, the fullest first" if fullest_first else "rank")


def _verdict(heights: Sequence[float], mean: float) -> str:
    if not mean:
        return "Nothing to own"
    idle = sum(height == 0 for height in heights)
    owning = f"; {idle:,} of {len(heights):,} ranks own nothing" if idle else ""
    return f"Fullest rank: {short(max(heights) / mean)} × the mean{owning}"


def _reference_lines(ax: Axes, values: Mapping[str, float], top: float, show: Callable[[float], str]) -> None:
    """Named levels, their names to the right; names that would touch are moved apart."""
    dashes = dict(zip(values, ((4, 2), (1, 1.5))))
    lowest = 0.07 - 0.2
    for name, value in sorted(values.items(), key=lambda item: item[1]):
        above = value > 1.001 * top
        if not above:
            ax.axhline(value, color=INK, linewidth=1.1, linestyle=(0, dashes[name]), label=name)
        lowest = max(min(value / top, 1.0), lowest + 0.2)
        ax.annotate(
            f"{name}{' ↑' if above else ''}\n{show(value)}",
            xy=(1.02, lowest * top),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=SMALL_PT,
            color=INK,
            annotation_clip=False,
        )


# ----------------------------------------------------------------------------------- balance against ranks


@in_style
def balance_against_ranks(
    numels: Sequence[int],
    world_sizes: Sequence[int],
    ax: Axes,
    *,
    strategies: Sequence[str] = ("sorted_greedy", "even"),
    bytes_per_element: float | None = None,
) -> Axes:
    """How full the fullest rank is as ranks are added, and where whole tensors stop helping.

    Below the shaded line no partition of whole tensors can go: some rank owns the largest tensor. An even
    split goes below it, because it may cut that tensor.

    >>> from zero_ref.lab.plots import figure
    >>> fig, ax = figure(6, 3)
    >>> _ = balance_against_ranks([525, 60, 60, 60, 60], [1, 2, 4, 8], ax, bytes_per_element=8)

    Args:
        numels: elements per parameter, in registration order.
        world_sizes: numbers of ranks, rising.
        strategies: names in `zero_ref.plan.choice.RULES`.
        bytes_per_element: draw the fullest rank's bytes, this many an element (8: Adam's two running means in
            fp32). Its load divided by the mean if None.
    Raises:
        ValueError: the model has no elements, a strategy is unknown.
    """
    total, largest = sum(numels), max(numels, default=0)
    if not total:
        raise ValueError("the model has no elements: there is nothing to balance.")
    unknown = [name for name in strategies if name not in RULES]
    if unknown:
        raise ValueError(f"unknown partition {unknown[0]!r}; choose of {', '.join(RULES)}.")

    def height(load: int, world_size: int) -> float:
        return load * world_size / total if bytes_per_element is None else load * bytes_per_element

    def show(value: float) -> str:
        return f"{short(value)} ×" if bytes_per_element is None else short_bytes(value)

    floor = [height(largest, n) for n in world_sizes]
    curves = {
        name: [height(max(RULES[name](numels, n).loads), n) for n in world_sizes] for name in strategies
    }
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    lowest = min(min(curve) for curve in curves.values())
    highest = max(max(curve) for curve in curves.values())
    ax.set_ylim(lowest / 1.4, highest * 1.6)
    ax.set_xlim(min(world_sizes) / 1.15, max(world_sizes) * 1.02)
    ax.fill_between(world_sizes, floor, lowest / 1.4, color=FAINT, alpha=0.55, linewidth=0, label="floor")
    for index, ((name, curve), colour) in enumerate(zip(curves.items(), SERIES_COLOURS)):
        # Ever narrower: where curves coincide, the one below still shows.
        width = 2.0 + 3.0 * (len(curves) - 1 - index) / len(curves)
        ax.plot(
            world_sizes, curve, "o-", color=colour, linewidth=width, ms=width + 2.4, label=name, clip_on=False
        )
    _end_labels(ax, {name: curve[-1] for name, curve in curves.items()}, show)
    size = "" if bytes_per_element is None else f" ({show(floor[-1])})"
    colour_key(ax, {f"below the largest tensor{size}: only by cutting it": FAINT})

    bare(ax, keep=("bottom",))
    every = -(-len(world_sizes) // 8)
    named = list(world_sizes)[::-1][::every]
    ax.set_xticks(named, [f"{n:,}" for n in named])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0,) if highest > 50 * lowest else (1.0, 2.0, 5.0)))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: show(value)))
    ax.grid(axis="y", color=FAINT, linewidth=0.6)
    ax.set_xlabel("ranks")
    what = "load over the mean" if bytes_per_element is None else "bytes"
    ax.set_title(f"Fullest rank: {what}", pad=30)
    return ax


def _end_labels(ax: Axes, ends: Mapping[str, float], show: Callable[[float], str]) -> None:
    """Name each curve at its right end, in its own colour; names that would touch are moved apart."""
    to_fraction = ax.transData + ax.transAxes.inverted()
    taken = -1.0
    for (name, value), colour in sorted(zip(ends.items(), SERIES_COLOURS), key=lambda item: item[0][1]):
        fraction = float(to_fraction.transform((ax.get_xlim()[1], value))[1])
        taken = max(fraction, taken + 0.17)
        ax.text(
            1.03,
            taken,
            f"{name.replace('_', ' ')}\n{show(value)}",
            transform=ax.transAxes,
            va="center",
            fontsize=SMALL_PT,
            color=colour,
        )
