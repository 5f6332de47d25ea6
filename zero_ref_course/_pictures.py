"""The pictures of checks: what an answer gives, and below it what is right, on one scale.

An exercise names one of these as its `draws=`, and its grader hands the arguments to `Answer.shows`.
"""

from __future__ import annotations

from collections.abc import Sequence

from zero_ref.live.lanes import timeline
from zero_ref.live.loads import loads_compared
from zero_ref.live.svg import Drawing
from zero_ref.simulator.operations import COMPUTE, NETWORK
from zero_ref.simulator.timeline import Event, Timeline

YOURS, RIGHT = "yours", "right"


def timelines(theirs: Timeline, right: Timeline) -> Drawing:
    """An iteration as the answer lets it run, and as it could run."""
    return timeline({YOURS: theirs, RIGHT: right})


def loads_beside_right(theirs: Sequence[float], right: Sequence[float]) -> Drawing:
    """The load of each rank by the answer, and by the right one."""
    return loads_compared({YOURS: theirs, RIGHT: right})


def loads_of_owners(
    theirs: Sequence[int], right: Sequence[int], numels: Sequence[int], world_size: int
) -> Drawing:
    """The load of each rank if these are the owners of whole parameters."""
    return loads_beside_right(*(_loads(owners, numels, world_size) for owners in (theirs, right)))


def loads_packed_and_best(packed: Sequence[int], best: Sequence[int]) -> Drawing:
    """The loads of two ranks for the answer's model: packed by the rule, and in the best possible way."""
    return loads_compared({"your model, largest first": packed, "your model, at best": best})


def reductions(
    theirs: Sequence[Sequence[int]], right: Sequence[Sequence[int]], ready: Sequence[int], count: int
) -> Drawing:
    """Draw when buckets become full on a rank, and when their reductions, of 1 ms each, take place."""
    return timelines(*(_reduced(started, ready) for started in (theirs, right)))


def _loads(owners: Sequence[int], numels: Sequence[int], world_size: int) -> list[int]:
    loads = [0] * world_size
    for owner, numel in zip(owners, numels):
        loads[owner] += numel
    return loads


def _reduced(started: Sequence[Sequence[int]], ready: Sequence[int]) -> Timeline:
    events = [Event(COMPUTE, "backward", bucket, place, place + 1.0) for place, bucket in enumerate(ready)]
    free_ms = 0.0
    for moment, buckets in enumerate(started):
        # The last moment is the end of backward, and comes at once after the last bucket became full.
        free_ms = max(free_ms, min(moment + 1.0, len(ready)))
        for bucket in buckets:
            events.append(Event(NETWORK, "reduce", bucket, free_ms, free_ms + 1.0))
            free_ms += 1.0
    return Timeline(tuple(events))
