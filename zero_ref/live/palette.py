"""The colours of every picture, those of the plots and those that a page draws by itself."""

from __future__ import annotations

# Pictures bring their own light ground: they read the same on a light page and on a dark one.
PAPER = "#FCFBF9"
INK = "#20242A"
MUTED = "#5C6470"
FAINT = "#DEDCD6"
ALARM = "#B3001B"

RANK_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
"""Okabe and Ito's colours, which colour-blind readers can tell apart."""

PART_COLOURS = {"parameters": "#332288", "gradients": "#44AA99", "optimizer state": "#DDCC77"}
SERIES_COLOURS = (
    "#332288", "#CC6677", "#117733", "#882255", "#77722A", "#2B7A9B", "#661100", "#9944CC",
)  # fmt: skip
"""Not the ranks' colours, so that no line is taken for a rank. All but the last are Paul Tol's muted ones."""

MANY_RANKS = (
    "#471063", "#453581", "#38588C", "#2B748E", "#21918C", "#25AC82", "#52C569", "#98D83E", "#E5E419",
)  # fmt: skip
"""For more than 8 ranks: from dark to light, nine points of matplotlib's viridis without its ends."""


def rank_colour(rank: int, world_size: int) -> str:
    """The colour of a rank, the same in every picture with as many ranks.

    Up to 8 ranks: colours with names, the same for rank 0 whether there are 2 ranks or 8. Above: a scale
    from dark to light, whose order shows.

    >>> rank_colour(0, 2), rank_colour(0, 8), rank_colour(7, 8), rank_colour(4, 9)
    ('#0072B2', '#0072B2', '#999999', '#21918C')
    """
    if world_size <= len(RANK_COLOURS):
        return RANK_COLOURS[rank]
    place = rank * (len(MANY_RANKS) - 1) / (world_size - 1)
    below = min(int(place), len(MANY_RANKS) - 2)
    return _mixed(MANY_RANKS[below + 1], MANY_RANKS[below], place - below)


def text_colour_on(colour: str) -> str:
    """Black or white: the one that stands out more against `colour` (WCAG's contrast ratio).

    >>> text_colour_on("#F0E442"), text_colour_on("#0072B2")
    ('#000000', '#FFFFFF')
    """
    luminance = _luminance(colour)
    return "#FFFFFF" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else "#000000"


def tint(colour: str, strength: float) -> str:
    """`colour` thinned with paper: 1 is the colour itself, 0 bare paper.

    >>> tint("#0072B2", 1), tint("#0072B2", 0) == PAPER
    ('#0072B2', True)
    """
    return _mixed(colour, PAPER, strength)


def _luminance(colour: str) -> float:
    red, green, blue = (
        part / 255 / 12.92 if part <= 0.04045 * 255 else ((part / 255 + 0.055) / 1.055) ** 2.4
        for part in _parts(colour)
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _mixed(colour: str, with_colour: str, share: float) -> str:
    mixed = (round(share * a + (1 - share) * b) for a, b in zip(_parts(colour), _parts(with_colour)))
    return "#" + "".join(f"{part:02X}" for part in mixed)


def _parts(colour: str) -> tuple[int, int, int]:
    """Red, green and blue, 0 to 255."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


ITEM_COLOURS = {
    "parameters": PART_COLOURS["parameters"],
    "gradients": PART_COLOURS["gradients"],
    "master copies": tint(PART_COLOURS["optimizer state"], 0.6),
    "moments": PART_COLOURS["optimizer state"],
    "gradient buckets": tint(PART_COLOURS["gradients"], 0.5),
    "communication": tint(PART_COLOURS["parameters"], 0.45),
    "activations": "#8A94A6",
    "other": "#5C6470",
}
"""By what they hold, as `simulator.memory.Memory.items` names it; all else is "other"."""
