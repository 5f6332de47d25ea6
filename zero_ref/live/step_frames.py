"""The frames of one ZeRO step: which calls follow each other, and when each is seen."""

from __future__ import annotations

from typing import NamedTuple

from zero_ref.plan.calls import Call
from zero_ref.plan.partition import ParamSpec, Partition, Slice
from zero_ref.simulator.data_parallel import data_parallel, messages_of

PHASES = {
    "reduce": "Gradients are averaged over all ranks",
    "step": "Each rank updates only what it owns",
    "broadcast": "Each owner sends its new values",
    "equal": "All ranks hold the same again",
}
SECONDS = {"reduce": (0.5, 2.3), "step": (2.9, 4.5), "broadcast": (5.1, 9.1), "equal": (9.1, 12.0)}
MOST_RANKS, MOST_PIECES = 4, 24


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

    >>> from zero_ref.plan.partition import sorted_greedy
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
    Source: `simulator.data_parallel.data_parallel`, whose calls are compared with real ones in chapter 4.
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
    frames: list[Frame] = []
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
