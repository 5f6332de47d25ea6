"""The style of all pictures: colours, text sizes, a figure to draw in, files that are the same every time."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence, Sized
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backend_bases import RendererBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, Locator, NullLocator
from matplotlib.transforms import ScaledTranslation

from zero_ref.live.palette import FAINT, INK, MUTED, PAPER, SERIES_COLOURS, text_colour_on
from zero_ref.live.svg import Drawing

MARKERS = "osD^vP*X"
"""One for each rank or series, so that lines which lie on each other are still told apart."""

TEXT_PT, SMALL_PT = 11.5, 10.0
"""A picture 6 inches wide shrinks to 60% on a phone: 10 points are then 8 pixels tall, and still read."""

# Any: matplotlib's own type for it lists every name that one version has.
_STYLE: Any = {
    "font.family": ["DejaVu Sans"],  # comes with matplotlib: the same letters on every machine
    "font.size": TEXT_PT,
    "text.color": INK,
    "text.parse_math": False,  # a $ in a name is a $
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.labelsize": SMALL_PT,
    "axes.titlesize": TEXT_PT,
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.unicode_minus": False,
    "axes.linewidth": 0.8,
    "hatch.linewidth": 0.8,
    "legend.fontsize": SMALL_PT,
    "legend.frameon": False,
    "figure.constrained_layout.w_pad": 0.14,
    "figure.constrained_layout.h_pad": 0.12,
    "svg.fonttype": "path",
    "svg.hashsalt": "zero_ref",
    "savefig.dpi": 200,
}

P = ParamSpec("P")


def in_style(plot: Callable[P, Axes]) -> Callable[P, Axes]:
    """Make a plot look the same whatever the caller's rcParams, and leave those as they were."""

    @wraps(plot)
    def styled(*args: P.args, **kwargs: P.kwargs) -> Axes:
        with matplotlib.rc_context(_STYLE):
            return plot(*args, **kwargs)

    return styled


class Picture(Figure):
    """A Figure that a notebook shows as SVG, without pyplot and the list of open figures it keeps."""

    def _repr_svg_(self) -> str:
        return _svg(self)


def figure(width: float = 6.0, height: float = 3.4) -> tuple[Picture, Axes]:
    """An empty picture and its Axes.

    Six inches of width suit both a phone and a column of text; worth changing is the height.

    >>> fig, ax = figure(6, 2)
    >>> fig.get_size_inches().tolist()
    [6.0, 2.0]

    Args:
        width, height: in inches.
    """
    fig, (ax,) = panels([height], width)
    return fig, ax


def panels(heights: Sequence[float], width: float = 6.0) -> tuple[Picture, tuple[Axes, ...]]:
    """A picture of several Axes, one below the other.

    >>> fig, (upper, lower) = panels([2.5, 3])
    >>> fig.get_size_inches().tolist()
    [6.0, 5.5]

    Args:
        heights: of each, in inches, with what is written around it.
    Raises:
        ValueError: there is none.
    """
    if not heights:
        raise ValueError("a picture has at least one panel: give its height in inches.")
    with matplotlib.rc_context(_STYLE):
        fig = Picture(figsize=(width, sum(heights)), layout="constrained")
        FigureCanvasAgg(fig)
        axes = fig.subplots(len(heights), squeeze=False, height_ratios=list(heights))
        return fig, tuple(axes[:, 0])


def save(picture: Figure | Drawing, path: str | Path) -> None:
    """Write a picture as SVG, or a figure as PNG; the same picture gives the same bytes every time.

    Raises:
        ValueError: `path` ends neither in .svg nor in .png, or in .png for a Drawing, which has no pixels.
    """
    path = Path(path)
    if path.suffix == ".svg":
        svg = picture.svg() if isinstance(picture, Drawing) else _svg(picture)
        path.write_text(svg, encoding="utf-8")
    elif isinstance(picture, Drawing):
        raise ValueError(f"cannot save a drawing as {path.name!r}: the name must end in .svg.")
    elif path.suffix == ".png":
        _render(picture, path, format="png", metadata={"Software": None})
    else:
        raise ValueError(f"cannot save a picture as {path.name!r}: the name must end in .svg or .png.")


def _svg(fig: Figure) -> str:
    text = io.StringIO()
    _render(fig, text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _render(fig: Figure, to: Path | io.StringIO, **how: Any) -> None:
    # A layout starts from the one before and comes out a little different: start each from the grid.
    for ax in fig.axes:
        cell = ax.get_subplotspec()
        if cell is not None:
            ax.set_subplotspec(cell)
    with matplotlib.rc_context(_STYLE):
        fig.savefig(to, **how)


# --------------------------------------------------------------------------------------------- small parts


def bare(ax: Axes, *, keep: Sequence[str] = ("left", "bottom")) -> None:
    """Take away what carries nothing: frames and tick marks."""
    for side, spine in ax.spines.items():
        spine.set_visible(side in keep)
        spine.set_color(FAINT)
    ax.tick_params(length=0, labelsize=SMALL_PT, labelcolor=MUTED, pad=5)
    ax.set_axisbelow(True)


def colours_of(curves: Mapping[str, Sized]) -> dict[str, str]:
    """A colour for each curve.

    Raises:
        ValueError: there is none, there are more than colours, or one has no point.
    """
    points = {name: len(curve) for name, curve in curves.items()}
    if not 0 < len(curves) <= len(SERIES_COLOURS) or min(points.values()) < 1:
        raise ValueError(
            f"give 1 to {len(SERIES_COLOURS)} curves with a point or more each; got points {points}."
        )
    return dict(zip(curves, SERIES_COLOURS))


def with_levels(ax: Axes) -> None:
    """Bare but for the axis below, and with a faint line at each number beside."""
    bare(ax, keep=("bottom",))
    ax.grid(axis="y", color=FAINT, linewidth=0.6)


def numbered(axis: Axis, show: Callable[[float], str], at: Locator | None = None) -> None:
    """Write an axis's numbers like this, and only at these places; None for those where they are."""
    if at is not None:
        axis.set_major_locator(at)
        axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: show(float(value))))


def write_beside(
    ax: Axes, words: str, place: tuple[float, float], shift: tuple[float, float], **look: Any
) -> None:
    """Small words `shift` points away from a place, in data units unless `xycoords` says otherwise."""
    look = {"fontsize": SMALL_PT, "color": INK, **look}
    ax.annotate(words, place, shift, textcoords="offset points", **look)


def colour_key(ax: Axes, colours: Mapping[str, str], columns: int = 4) -> None:
    """Rows of coloured squares with their meaning, above the Axes."""
    squares = [Patch(facecolor=colour, label=name) for name, colour in colours.items()]
    key_above(ax, squares, columns, handlelength=1, handleheight=1, handletextpad=0.5)


def key_above(ax: Axes, handles: Sequence[Artist], columns: int, **look: Any) -> None:
    """Rows of what stands for something with its meaning, above the Axes and in line with its left edge."""
    ax.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        bbox_transform=ax.transAxes + ScaledTranslation(0, 7 / 72, ax.figure.dpi_scale_trans),
        ncols=columns,
        borderpad=0,
        borderaxespad=0,
        columnspacing=1.4,
        **look,
    )


def stacked_rows(
    ax: Axes,
    bars: Mapping[str, Mapping[str, Sequence[float]]],
    colours: Mapping[str, str],
    show: Callable[[float], str],
    *,
    between: float,
) -> None:
    """Groups of horizontal bars below their titles, each bar stacked of its parts, with their sum behind it.

    Args:
        bars: title of a group -> name of a bar -> the lengths of its parts.
        colours: of the parts, in their order.
        show: how a sum is written.
        between: from the last bar of a group to the title of the next one; a bar is 0.72 high.
    """
    place = 0.0
    ticks: dict[float, str] = {}
    for title, of_group in bars.items():
        ax.text(0, place, title, va="center", color=INK)
        for name, lengths in of_group.items():
            place += 0.9
            end = 0.0
            for (part, colour), length in zip(colours.items(), lengths):
                ax.barh(place, length, 0.72, left=end, color=colour, label=part)
                end += length
            write_beside(ax, show(end), (end, place), (4, 0), va="center")
            ticks[place] = name
        place += between
    bare(ax, keep=())
    ax.set_ylim(place - 0.7, -0.5)
    ax.set_xticks([])
    ax.set_yticks(list(ticks), list(ticks.values()))
    colour_key(ax, colours)


class FittingText(Text):
    """A label inside a box: the longest of `choices` that fits, or nothing.

    Decided when drawn, because only then is the size of the box on paper known.
    """

    def __init__(self, box: tuple[float, float, float, float], choices: Sequence[str], **text: Any) -> None:
        left, bottom, right, top = box
        super().__init__(
            (left + right) / 2, (bottom + top) / 2, "", ha="center", va="center", linespacing=1.15, **text
        )
        self.box, self.choices = box, tuple(choices)
        self.set_in_layout(False)

    def draw(self, renderer: RendererBase) -> None:
        corners = self.get_transform().transform([self.box[:2], self.box[2:]])
        width, height = (abs(float(stop - start)) for start, stop in zip(*corners))
        pad = float(renderer.points_to_pixels(1))  # type: ignore[arg-type]  # annotated for arrays only
        for choice in self.choices:
            self.set_text(choice)
            extent = self.get_window_extent(renderer)
            if extent.width <= width - 6 * pad and extent.height <= height - 2 * pad:
                super().draw(renderer)
                return
        self.set_text("")


def label_box(
    ax: Axes, box: tuple[float, float, float, float], choices: Sequence[str], **text: Any
) -> FittingText:
    """Write the longest of `choices` that fits into `box` (left, bottom, right, top, in data units)."""
    label = FittingText(box, choices, transform=ax.transData, clip_on=True, **text)
    ax.add_artist(label)
    return label


def filled_box(
    ax: Axes,
    box: tuple[float, float, float, float],
    colour: str,
    words: Sequence[str] = (),
    *,
    text: Mapping[str, Any] | None = None,
    **look: Any,
) -> None:
    """A filled rectangle, and in it the longest of `words` that fits, in black or white.

    Args:
        box: as `label_box` takes it.
        text: how the words look, where they are not small, or neither black nor white.
        look: how the rectangle looks beside its colour.
    """
    left, bottom, right, top = box
    corner = left, min(bottom, top)
    ax.add_patch(Rectangle(corner, right - left, abs(top - bottom), facecolor=colour, **look))
    if words:
        label_box(ax, box, words, **{"color": text_colour_on(colour), "fontsize": SMALL_PT, **(text or {})})
