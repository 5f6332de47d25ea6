"""The ring explorer: an all-reduce on four ranks, one round at a time."""

from __future__ import annotations

from zero_ref.live.explorer import Answer, Control, Explorer
from zero_ref.live.palette import ALARM, MUTED, SERIES_COLOURS, text_colour_on, tint
from zero_ref.live.svg import LINE, MARGIN, element, picture, text

RANKS = 4
ROUNDS = 2 * (RANKS - 1)


def ring_states(world_size: int) -> list[list[list[int]]]:
    """How many ranks' parts are summed up in each chunk: after each round, on each rank, of each chunk.

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


def _draw(width: float, rounds: int) -> Answer:
    state = ring_states(RANKS)[rounds]
    left, right, high = MARGIN + 52, width - MARGIN, 34.0
    wide, y = (right - left) / RANKS, 30.0
    parts = [text(MARGIN, 20, "a number: of how many ranks the sum", fill=MUTED)]
    for rank, counts in enumerate(state):
        parts.append(text(MARGIN, y + high / 2 + 5, f"rank {rank}"))
        for chunk, count in enumerate(counts):
            fill = tint(SERIES_COLOURS[0], (count / RANKS) ** 1.5)
            x, new = left + chunk * wide, rounds > 0 and chunk == received(rounds - 1, rank, RANKS)
            frame = {"stroke": ALARM, "stroke_width": 2.5} if new else {}
            parts.append(
                element("rect", x=x + 2, y=y + 2, width=wide - 4, height=high - 4, fill=fill, **frame)
            )
            middle = x + wide / 2
            parts.append(
                text(middle, y + high / 2 + 5, str(count), fill=text_colour_on(fill), anchor="middle")
            )
        y += high + 6
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
