"""The network as a lane: one call after another, and beside them all-to-alls, which take half of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

BESIDE = "all_to_all"
"""The operation that does not wait for the calls before it: it is on a process group of its own, and
computing waits for it."""


class NetworkLane:
    """When each call begins and ends.

    >>> lane = NetworkLane(begin_ms=[], end_ms=[])
    >>> lane.one_after_another(ready_ms=0, took_ms=[10])        # such as a gather for later
    >>> lane.beside(ready_ms=4, took_ms=3)                      # each at half of its rate until 10
    >>> lane.one_after_another(ready_ms=5, took_ms=[1])
    >>> lane.begin_ms, lane.end_ms
    ([0.0, 4, 13.0], [13.0, 10, 14.0])

    Args:
        begin_ms, end_ms: of all operations so far; calls are appended.
    """

    def __init__(self, begin_ms: list[float], end_ms: list[float]) -> None:
        self.begin_ms, self.end_ms = begin_ms, end_ms
        self.free_ms = 0.0
        self.queued: list[int] = []  # the places of the calls that follow one another

    def one_after_another(self, ready_ms: float, took_ms: Sequence[float]) -> None:
        """Append calls, each of which begins when the one before it ends, the first one when it is ready."""
        *begins, self.free_ms = accumulate(took_ms, initial=max(self.free_ms, ready_ms))
        self.queued += range(len(self.end_ms), len(self.end_ms) + len(begins))
        self.begin_ms += begins
        self.end_ms += [*begins[1:], self.free_ms]

    def beside(self, ready_ms: float, took_ms: float) -> None:
        """Append a call that begins at once.

        While other calls are under way, it and they have half of the network each, and take twice as long. So
        both end later by what the shorter of the two would take alone.
        """
        shared_ms = min(took_ms, max(self.free_ms - ready_ms, 0.0))
        for place in reversed(self.queued):
            if self.end_ms[place] <= ready_ms:
                break
            for moments in (self.begin_ms, self.end_ms):
                moments[place] += min(max(moments[place] - ready_ms, 0.0), shared_ms)
        self.begin_ms.append(ready_ms)
        self.end_ms.append(ready_ms + took_ms + shared_ms)
        self.free_ms = max(self.free_ms + shared_ms, self.end_ms[-1])
