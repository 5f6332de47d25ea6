"""One ZeRO step, moving: gradients averaged, own parameters updated, new values sent, all ranks equal."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from zero_ref.live.animation import Animation, Motion
from zero_ref.live.names import names_of
from zero_ref.live.palette import FAINT, INK, MUTED, rank_colour
from zero_ref.live.step import NAMES, PHASES, SIDE, Board
from zero_ref.live.svg import LINE, element, text
from zero_ref.plan.calls import Call
from zero_ref.plan.partition import ParamSpec, Partition, Slice
from zero_ref.simulator.messages import messages_of
from zero_ref.simulator.recipe import recipe
from zero_ref.simulator.schedule import schedule

SECONDS = {"reduce": (0.5, 2.3), "step": (2.9, 4.5), "broadcast": (5.1, 9.1), "equal": (9.1, 12.0)}
MOST_RANKS, MOST_PIECES = 4, 24

TOP = 12.0
GRADIENTS, PARAMETERS, RANK = 22.0, 32.0, 90.0
"""Pixels: two strips of a rank, and all of a rank with its name and the space below."""


class Frame(NamedTuple):
    """One event of the step, on all ranks at once.

    Args:
        phase: one of PHASES.
        start_s, stop_s: seconds of the animation's loop.
        call: the call of each rank, if there is one.
        piece: the slice that a broadcast carries.
        receivers: the ranks to which the slice is new.
    """

    phase: str
    start_s: float
    stop_s: float
    call: Call | None = None
    piece: Slice | None = None
    receivers: tuple[int, ...] = ()


def step_frames(partition: Partition) -> list[Frame]:
    """A step's frames, in the order of the package's calls: an all-reduce, the local step, the broadcasts.

    >>> from zero_ref.plan.rules import sorted_greedy
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
    Source: `simulator.schedule.schedule`, whose calls are compared with real ones in chapter 4.
    """
    ranks = partition.world_size
    params = [ParamSpec(numel) for numel in partition.numels]
    pieces = [one.slices[0] for one in messages_of(partition, params, flat=False) if one.slices[0].numel]
    if not 2 <= ranks <= MOST_RANKS or not 1 <= len(pieces) <= MOST_PIECES:
        raise ValueError(
            f"{len(pieces)} slices on {ranks} ranks: a step moves with 1 to {MOST_PIECES} slices on 2 to "
            f"{MOST_RANKS} ranks. `step_diagram` draws up to 8 ranks."
        )
    one_bucket = [list(reversed(range(len(params))))]
    sent = iter(pieces)
    frames: list[Frame] = []
    how = recipe("zero", partition=partition, broadcast_buffer_size=0)
    plan = schedule(how, params, ranks, ddp_buckets=one_bucket)
    for one in plan.operations:
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

    >>> from zero_ref.plan.rules import sorted_greedy
    >>> animate_step(sorted_greedy([6, 5, 4], 2), ["W1", "W2", "b"]).words.split(". ")[2]
    'Rank 0 updates W1; Rank 1 updates W2, b'

    Args:
        partition: of at most 24 slices.
        names: of the parameters; their numbers if None.
    Raises:
        ValueError: the partition has too many ranks or slices, or there is not one name for each parameter.
    """
    frames = step_frames(partition)
    names = names_of(partition, names)
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
        f"{'; '.join(f'Rank {rank} updates {what}' for rank, what in enumerate(own))}. "
        f"{PHASES['broadcast']} to all others, one call after another: {sends}. {PHASES['equal']}."
    )
    return Animation("one step", words, partial(_draw, partition, tuple(names), frames, words))


# ------------------------------------------------------------------------------------------------ the picture


def _draw(
    partition: Partition, names: Sequence[str], frames: Sequence[Frame], words: str, width: float, name: str
) -> str:
    columns = 2 if width >= 600 else 1
    board = Board(partition, names, f"{name}-old", SIDE, width - 2 * SIDE)
    motion = Motion(name, SECONDS["equal"][1], SECONDS["equal"][0] + 0.9)
    top = TOP + 27 * len(PHASES) / columns
    height = top + RANK * partition.world_size + LINE
    still = element("g", *_four(board, height, columns), class_="still")
    moving = [*_progress(motion, board.width, columns), *_ranks(board, frames, motion, top)]
    for frame in frames:
        if frame.call:
            sender = "" if frame.call.peer is None else f" from rank {frame.call.peer}"
            said = f"network: {frame.call.op}{sender}, {frame.call.nbytes} bytes"
            seen = motion.appears(frame.start_s, frame.stop_s)
            moving.append(element("g", text(SIDE, height - 9, said, fill=MUTED), class_=seen))
    parts = [board.hatching(), still, element("g", *moving, class_="moving")]
    return motion.picture(width, height, words, parts)


def _place(number: int, width: float, columns: int) -> tuple[float, float, int]:
    """Return the left edge, width and row of one of the four phases, which stand in columns."""
    wide = (width - 20 * (columns - 1)) / columns
    rows = len(PHASES) // columns
    return SIDE + number // rows * (wide + 20), wide, number % rows


def _progress(motion: Motion, width: float, columns: int) -> list[str]:
    """The names of the phases; below each a line that fills while it goes on."""
    parts = []
    for number, (phase, said) in enumerate(PHASES.items()):
        x, wide, row = _place(number, width, columns)
        y = TOP + 27 * row
        start_s, stop_s = SECONDS[phase]
        # After half a second what is left of the last phase is the pause at the end.
        fills = motion.grows(start_s, start_s + 0.5 if phase == "equal" else stop_s)
        parts += [
            text(x, y + 11, f"{number + 1}  {said}"),
            element("rect", x=x, y=y + 16, width=wide, height=3, fill=FAINT),
            element("rect", x=x, y=y + 16, width=wide, height=3, fill=INK, class_=fills),
        ]
    return parts


def _ranks(board: Board, frames: Sequence[Frame], motion: Motion, top: float) -> list[str]:
    """The ranks below each other; above them what travels from one to another."""
    everyone = range(board.partition.world_size)
    (begin_s, reduced_s), (step_s, stepped_s) = SECONDS["reduce"], SECONDS["step"]
    arrive_s = reduced_s - 0.4
    averaged, updated = motion.appears(arrive_s), motion.grows(step_s, stepped_s, "Y")
    named = motion.appears((step_s + stepped_s) / 2)
    parts, above = [], []
    for rank in everyone:
        y = top + RANK * rank
        parts += [
            text(board.left, y + 13, f"rank {rank}", bold=True),
            board.box(board.left, y + LINE, board.width + 1, GRADIENTS, FAINT, "gradients of its own batch"),
            element("g", *board.row(y + LINE, GRADIENTS, "reduce", rank), class_=averaged),
        ]
        for sender in everyone:
            if sender != rank:
                flies = motion.flies(RANK * (sender - rank), ".4", begin_s, arrive_s, reduced_s)
                above.append(
                    element(
                        "rect", x=board.left, y=y + LINE, width=board.width, height=GRADIENTS, fill=MUTED,
                        class_=flies, data_phase="reduce", data_from=sender, data_to=rank,
                    )
                )  # fmt: skip
        low = y + LINE + GRADIENTS + 4
        for piece, owner, x, wide in board.boxes():
            name, colour = board.names[piece.param], rank_colour(owner, MOST_RANKS)
            parts.append(board.old(x, low, wide, PARAMETERS, name))
            if owner == rank:
                new = board.box(x, low, wide, PARAMETERS, colour, name, grows=updated, appears=named)
                parts.append(element("g", new, data_phase="step", data_param=piece.param, data_rank=rank))
                continue
            frame = next(one for one in frames if one.piece == piece)
            landed_s = frame.start_s + 0.8 * (frame.stop_s - frame.start_s)
            flies = motion.flies(RANK * (owner - rank), "1", frame.start_s, landed_s)
            above.append(
                element(
                    "g", board.box(x, low, wide, PARAMETERS, colour, name),
                    class_=flies, data_phase="broadcast", data_param=piece.param, data_from=owner,
                    data_to=rank, data_start_s=frame.start_s, data_stop_s=frame.stop_s,
                )
            )  # fmt: skip
    return parts + above


def _four(board: Board, height: float, columns: int) -> list[str]:
    """Draw all four phases at once, for readers whose device shows no motion."""
    high = (height - TOP) * columns / len(PHASES)
    each = (high - LINE - 14) / board.partition.world_size
    parts = []
    for number, phase in enumerate(PHASES):
        x, wide, row = _place(number, board.width, columns)
        small = board._replace(left=x + NAMES, width=wide - NAMES)
        parts += small.phase(phase, TOP + high * row, each)[0]
    return parts
