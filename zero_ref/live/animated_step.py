"""One ZeRO step, moving: gradients averaged, own parameters updated, new values sent, all ranks equal."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from zero_ref.calls import Call
from zero_ref.live.animation import Animation, Motion
from zero_ref.live.palette import FAINT, INK, MUTED, PAPER, rank_colour, text_colour_on, tint
from zero_ref.live.svg import LINE, bar, element, line, text, text_width
from zero_ref.partition import ParamSpec, Partition, Slice
from zero_ref.simulator.operations import data_parallel, messages_of

PHASES = {
    "reduce": "Gradients are averaged over all ranks",
    "step": "Each rank updates only what it owns",
    "broadcast": "Each owner sends its new values",
    "equal": "All ranks hold the same again",
}
SECONDS = {"reduce": (0.5, 2.3), "step": (2.9, 4.5), "broadcast": (5.1, 9.1), "equal": (9.1, 12.0)}
MOST_RANKS, MOST_PIECES = 4, 24

SIDE, TOP = 14.0, 12.0
GRADIENTS, PARAMETERS, RANK = 22.0, 32.0, 90.0
"""Pixels: two strips of a rank, and all of a rank with its name and the space below."""


class Frame(NamedTuple):
    """What happens next, on all ranks at once.

    Args:
        phase: one of PHASES.
        start_s, stop_s: of the loop.
        call: what each rank asks of the network, if anything.
        piece: what a broadcast carries.
        receivers: the ranks to which it is new.
    """

    phase: str
    start_s: float
    stop_s: float
    call: Call | None = None
    piece: Slice | None = None
    receivers: tuple[int, ...] = ()


def step_frames(partition: Partition) -> list[Frame]:
    """A step's frames, in the order of the package's calls: an all-reduce, the local step, the broadcasts.

    >>> from zero_ref.partition import sorted_greedy
    >>> for frame in step_frames(sorted_greedy([6, 5], 2)):
    ...     print(frame.phase, frame.start_s, *(frame.call or ()))
    reduce 0.5 all_reduce 44 None
    step 2.9
    broadcast 5.1 broadcast 24 0
    broadcast 7.1 broadcast 20 1
    equal 9.1

    Args:
        partition: of float32 parameters, on 2 to 4 ranks. The time of a call says nothing: all broadcasts
            take equally long, however much they carry.
    Raises:
        ValueError: other numbers of ranks, or more slices than can be told apart.
    Source: `simulator.operations.data_parallel`, whose calls are compared with real ones in chapter 4.
    """
    ranks = partition.world_size
    params = [ParamSpec(numel) for numel in partition.numels]
    pieces = [piece for _, (piece,) in messages_of(partition, params, flat=False) if piece.numel]
    if not 2 <= ranks <= MOST_RANKS or not 1 <= len(pieces) <= MOST_PIECES:
        raise ValueError(
            f"{len(pieces)} slices on {ranks} ranks: a step moves with 1 to {MOST_PIECES} slices on 2 to "
            f"{MOST_RANKS} ranks. `lab.plots.step_diagram` draws up to 8 ranks."
        )
    one_bucket = [list(reversed(range(len(params))))]
    sent = iter(pieces)
    frames = []
    for one in data_parallel(params, ranks, partition, one_bucket):
        if one.label == "broadcast":
            start_s, stop_s = SECONDS["broadcast"]
            each_s = (stop_s - start_s) / len(pieces)
            start_s += each_s * sum(frame.phase == "broadcast" for frame in frames)
            (call,) = one.calls_of(0, ranks)
            receivers = tuple(rank for rank in range(ranks) if rank != call.peer)
            frames.append(Frame("broadcast", start_s, start_s + each_s, call, next(sent), receivers))
        elif one.label in PHASES:
            calls = one.calls_of(0, ranks)
            frames.append(Frame(one.label, *SECONDS[one.label], call=calls[0] if calls else None))
    return [*frames, Frame("equal", *SECONDS["equal"])]


def animate_step(partition: Partition, names: Sequence[str] | None = None) -> Animation:
    """One step on 2 to 4 ranks, as the last line of a cell.

    >>> from zero_ref.partition import sorted_greedy
    >>> animate_step(sorted_greedy([6, 5, 4], 2), ["W1", "W2", "b"]).words.split(". ")[2]
    'Rank 0 updates W1; rank 1 updates W2, b'

    Args:
        partition: of at most 24 slices.
        names: of the parameters; their numbers if None.
    Raises:
        ValueError: the partition has too many ranks or slices, or there is not one name for each parameter.
    """
    frames = step_frames(partition)
    names = [str(number) for number in range(len(partition.numels))] if names is None else names
    if len(names) != len(partition.numels):
        raise ValueError(f"{len(names)} names for {len(partition.numels)} parameters: give one for each.")
    own = [
        ", ".join(names[piece.param] for piece in slices if piece.numel) or "nothing"
        for slices in partition.slices_of_rank
    ]
    sends = ", ".join(
        f"{names[frame.piece.param]} from rank {frame.call.peer}"
        for frame in frames
        if frame.piece and frame.call
    )
    words = (
        f"One step of ZeRO on {partition.world_size} ranks, in four phases. {PHASES['reduce']}. "
        f"{'; '.join(f'rank {rank} updates {what}' for rank, what in enumerate(own)).capitalize()}. "
        f"{PHASES['broadcast']} to all others, one call after another: {sends}. {PHASES['equal']}."
    )
    words = words.replace("Rank 0 updates", "Rank 0 updates")
    return Animation("one step", words, partial(_draw, partition, tuple(names), frames, words))
