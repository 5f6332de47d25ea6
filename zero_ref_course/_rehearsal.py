"""Chapter 6's hook, rehearsed on a rank with a clock and no network. An action too early is an error."""

from __future__ import annotations

from collections.abc import Sequence

from zero_ref.simulator.operations import COMPUTE, NETWORK
from zero_ref.simulator.timeline import BucketTimes, Event, Timeline, simulate
from zero_ref_course import Answer, ExerciseFailed

ACTIONS = {
    "start_reduction": "",
    "wait_for_reduction": "no reduction of it was started, so there is nothing to wait for",
    "step": "nobody waited for its reduction, so its gradients are this rank's own, or half a sum",
    "start_broadcast": "it was not stepped yet, so old values would be sent",
    "wait_for_broadcast": "no broadcast of it was started, so there is nothing to wait for",
}
"""The actions on a bucket, in order, and why each cannot come earlier."""

NEVER = {
    "start_reduction": "was never reduced. Its update is lost",
    "wait_for_reduction": "was reduced, but never stepped. Its update is lost",
    "step": "was reduced, but never stepped. Its update is lost",
    "start_broadcast": "was stepped, but never sent. The other ranks keep its old values",
    "wait_for_broadcast": "was sent, but nobody waited. Backward returns before its new values are there",
}
"""The consequence if an action is missing in the end."""


class HookBucket:
    """One of DDP's buckets, which the reader's hook receives."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"bucket {self.number}"

    def start_reduction(self) -> None:
        """Start to average the bucket's gradients over the ranks."""
        self._do("start_reduction")

    def wait_for_reduction(self) -> None:
        """Return when the gradients are averaged."""
        self._do("wait_for_reduction")

    def step(self) -> None:
        """Update the part of the bucket that this rank owns."""
        self._do("step")

    def start_broadcast(self) -> None:
        """Start to send the bucket's new parameters, each from its owner."""
        self._do("start_broadcast")

    def wait_for_broadcast(self) -> None:
        """Return when the new parameters have arrived."""
        self._do("wait_for_broadcast")

    def _do(self, action: str) -> None:
        raise NotImplementedError


class _Rehearsal:
    """A rank with a clock, which records the actions on each bucket, and the call of each."""

    def __init__(self, times: Sequence[BucketTimes]) -> None:
        self.times = times
        self.now_ms = self.network_free_ms = 0.0
        self.buckets: list[_RehearsedBucket] = []
        self.done: list[tuple[int, str, int]] = []
        self.events: list[Event] = []

    def call(self, answer: Answer) -> None:
        """Call the hook for the next bucket of the backward."""
        bucket = _RehearsedBucket(len(self.buckets), self)
        self.buckets.append(bucket)
        self.compute("backward", bucket.number, self.times[bucket.number].backward_ms)
        answer(list(self.buckets), len(self.buckets) == len(self.times))

    def compute(self, label: str, bucket: int, duration_ms: float) -> None:
        start_ms = self.now_ms
        self.now_ms += duration_ms
        self.events.append(Event(COMPUTE, label, bucket, start_ms, self.now_ms))

    def send(self, label: str, bucket: int, duration_ms: float) -> float:
        start_ms = max(self.now_ms, self.network_free_ms)
        self.network_free_ms = start_ms + duration_ms
        self.events.append(Event(NETWORK, label, bucket, start_ms, self.network_free_ms))
        return self.network_free_ms


class _RehearsedBucket(HookBucket):
    def __init__(self, number: int, rehearsal: _Rehearsal) -> None:
        super().__init__(number)
        self.rehearsal = rehearsal
        self.left = list(ACTIONS)
        self.done_ms = 0.0

    def _do(self, action: str) -> None:
        if action not in self.left:
            raise ExerciseFailed(f"{action}() of {self} is called a second time.")
        if action != self.left[0]:
            raise ExerciseFailed(f"{action}() of {self} comes too early: {ACTIONS[action]}.")
        self.left.pop(0)
        rank = self.rehearsal
        rank.done.append((len(rank.buckets) - 1, action, self.number))
        times = rank.times[self.number]
        if action == "step":
            rank.compute("step", self.number, times.step_ms)
        elif action == "start_reduction":
            self.done_ms = rank.send("reduce", self.number, times.reduce_ms)
        elif action == "start_broadcast":
            self.done_ms = rank.send("broadcast", self.number, times.broadcast_ms)
        else:
            rank.now_ms = max(rank.now_ms, self.done_ms)


def rehearse(answer: Answer, times: Sequence[BucketTimes]) -> None:
    """Call the reader's hook as one backward would.

    Raises:
        ExerciseFailed: the hook acts too early, twice or never, or takes longer than an interleaved hook.
    """
    rehearsal, right = _Rehearsal(times), simulate(times, "interleaved")
    try:
        for _ in times:
            rehearsal.call(answer)
    finally:  # a hook that goes wrong is drawn as far as it came
        answer.shows(Timeline(tuple(rehearsal.events)), right)
    for bucket in rehearsal.buckets:
        assert not bucket.left, (
            f"{answer.name} was called for each of {len(times)} buckets, and {bucket} "
            f"{NEVER[bucket.left[0]]}. After the call with is_last=True nothing may be left to do."
        )
    possible_ms = right.makespan_ms
    assert rehearsal.now_ms <= possible_ms, (
        f"{answer.name} does all that is needed, but backward with {len(times)} buckets takes "
        f"{rehearsal.now_ms:g} ms, and {possible_ms:g} ms are possible. "
        + _what_is_slow(rehearsal.done, len(times))
    )


def _what_is_slow(done: list[tuple[int, str, int]], count: int) -> str:
    """The reason why a complete hook takes longer than it must."""
    in_backward = [(call, action, bucket) for call, action, bucket in done if call < count - 1]
    if any(action == "wait_for_reduction" and bucket == call for call, action, bucket in in_backward):
        return (
            "It waits for a reduction that it has just started, and backward stands still meanwhile. Finish "
            "the bucket before it instead, whose reduction has had time."
        )
    if any(action == "wait_for_broadcast" for _, action, _ in in_backward):
        return "It waits for broadcasts while backward could go on. Nobody needs them before the end."
    if not any(action == "step" for _, action, _ in in_backward):
        return "No bucket is updated before the last one is ready, so no broadcast hides behind backward."
    return (
        "When a bucket is ready, start its reduction first, then finish the one before: so the network has "
        "something to do while this rank steps."
    )
