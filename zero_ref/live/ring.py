"""An all-reduce on a ring: all of its rounds in one picture, and an explorer that shows one at a time."""

from __future__ import annotations

from functools import partial

from zero_ref.live.explorer import Answer, Control, Explorer
from zero_ref.live.palette import ALARM, INK, MUTED, SERIES_COLOURS, text_colour_on, tint
from zero_ref.live.svg import LINE, MARGIN, Drawing, Stacked, centred, element, line, picture, text

NAMES, LEAST_CHUNK = 52.0, 14.0
"""Pixels of the ranks' names, and of the narrowest chunk that has room for its number."""

RANKS = 4
ROUNDS = 2 * (RANKS - 1)


def ring_states(world_size: int) -> list[list[list[int]]]:
    """Count the ranks whose parts are in each chunk: after each round, on each rank, for each chunk.

    >>> ring_states(2)
    [[[1, 1], [1, 1]], [[1, 2], [2, 1]], [[2, 2], [2, 2]]]
    """
    n = world_size
    states = [[[1] * n for _ in range(n)]]
    for number in range(2 * (n - 1)):
        before, after = states[-1], [list(of_rank) for of_rank in states[-1]]
        for rank in range(n):
            chunk = received(number, rank, n)
            sent = before[(rank - 1) % n][chunk]
            after[rank][chunk] = before[rank][chunk] + sent if number < n - 1 else sent
        states.append(after)
    return states


def received(number: int, rank: int, world_size: int) -> int:
    """The chunk that a rank receives in a round, counted from 0: in both halves one lower each time."""
    return (rank - 1 - number) % world_size


def ring_rounds(world_size: int) -> Drawing:
    """An all-reduce on a ring, round by round: what each rank has of each chunk.

    A number says of how many ranks a chunk holds the sum. Framed is what has just come from the rank above,
    on the first rank from the last one.

    >>> ring_rounds(3).words
    'An all-reduce on a ring of 3 ranks: 2 rounds of reduce-scatter, then 2 of all-gather.'

    Args:
        world_size: 2 to 4 ranks; more would be too small to read.
    Raises:
        ValueError: another number of ranks.
    """
    if not 2 <= world_size <= 4:
        raise ValueError(f"{world_size} ranks: a ring is drawn for 2 to 4.")
    half = f"{world_size - 1} round{'s' if world_size > 2 else ''}"
    words = (
        f"An all-reduce on a ring of {world_size} ranks: {half} of reduce-scatter, then {world_size - 1} of "
        "all-gather."
    )
    return Drawing(words, lambda width: _all_rounds(world_size, width))


def _all_rounds(n: int, width: float) -> Stacked:
    """The rounds side by side, in several lines where they have no room in one."""
    left, high, between = MARGIN + NAMES, 32.0, 12.0
    inner = width - MARGIN - left
    in_line = min(2 * n - 1, int((inner + between) // (n * LEAST_CHUNK + between)))
    wide = (inner + between) / in_line - between
    parts, y = [], 12.0
    for first in range(0, 2 * n - 1, in_line):
        shown = range(first, min(first + in_line, 2 * n - 1))
        for half, rounds in {"reduce-scatter": range(1, n), "all-gather": range(n, 2 * n - 1)}.items():
            of_half = [number for number in rounds if number in shown]
            if of_half:
                start = left + (wide + between) * (of_half[0] - first)
                stop = left + (wide + between) * (of_half[-1] - first) + wide
                parts.append(centred((start + stop) / 2, y + 11, half, INK, left, width - MARGIN))
                parts.append(line(start, y + 18, stop, y + 18, MUTED, 1.5))
        y += 26
        parts += _names(n, y, high)
        for number in shown:
            x = left + (wide + between) * (number - first)
            parts += _round(n, number, x, y, wide, high)
            below = str(number) if number else "before"
            parts.append(text(x + wide / 2, y + n * high + 15, below, fill=MUTED, anchor="middle"))
        y += n * high + 28
    said = "after each round; framed: just received"
    parts.append(text(width / 2, y + 4, said, fill=MUTED, anchor="middle"))
    return parts, y + 16


def _names(world_size: int, y: float, high: float) -> list[str]:
    """The ranks' names, at the left edge."""
    return [text(MARGIN, y + high * (rank + 0.5) + 2, f"rank {rank}") for rank in range(world_size)]


def _round(world_size: int, rounds: int, x: float, y: float, width: float, high: float) -> list[str]:
    """Each rank's chunks after so many rounds, those that have just come framed."""
    parts, frames, wide = [], [], width / world_size
    for rank, counts in enumerate(ring_states(world_size)[rounds]):
        for chunk, count in enumerate(counts):
            fill = tint(SERIES_COLOURS[0], (count / world_size) ** 1.5)
            box = partial(element, "rect", x=x + chunk * wide + 1, y=y, width=wide - 2, height=high - 8)
            parts.append(box(fill=fill))
            parts.append(
                text(
                    x + (chunk + 0.5) * wide, y + high / 2 + 1, str(count), fill=text_colour_on(fill),
                    anchor="middle",
                )
            )  # fmt: skip
            if rounds and chunk == received(rounds - 1, rank, world_size):
                frames.append(box(fill="none", stroke=ALARM, stroke_width=2.5))
        y += high
    return parts + frames


def _draw(width: float, rounds: int) -> Answer:
    state = ring_states(RANKS)[rounds]
    left, high, y = MARGIN + NAMES, 40.0, 30.0
    parts = [text(MARGIN, 20, "a number: of how many ranks the sum", fill=MUTED), *_names(RANKS, y, high)]
    parts += _round(RANKS, rounds, left, y, width - MARGIN - left, high)
    y += RANKS * high
    parts.append(text(MARGIN, y + 12, "framed: just received", fill=MUTED))
    whole = [counts.count(RANKS) for counts in state]
    half = "adds up" if rounds < RANKS - 1 else "sends sums around" if rounds < ROUNDS else "is done"
    words = (
        f"After {rounds} of {ROUNDS} rounds each rank has sent {rounds} chunks, {rounds}/{RANKS} of the "
        f"tensor, and has the whole sum of {whole[0]} of its {RANKS} chunks. The ring {half}."
    )
    table = [["", *(f"chunk {chunk}" for chunk in range(RANKS))]]
    table += [[f"rank {rank}", *map(str, counts)] for rank, counts in enumerate(state)]
    numbers = {"sent, tensors": rounds / RANKS, "whole chunks on a rank": float(whole[0])}
    return Answer(picture(width, y + LINE + 6, words, parts), words, table, numbers)


RING = Explorer(
    "ring",
    "A ring all-reduce, round by round",
    (Control("rounds", "rounds", 0, range(ROUNDS + 1)),),
    _draw,
    along="rounds",
)
