"""Offload: the optimizer's state on the CPU, and gradients too; the update is made there, whole or in part.

Gradients go to the CPU by the host's link, the CPU updates its copies, and new parameters come back the same
way. How much of that is hidden depends on when it begins: after backward, or as soon as a gradient is ready.
The CPU's time is that of its memory, from which masters and moments are read and to which they are written.

Source: ZeRO-Offload (arXiv:2101.06840) for state and gradients; the `ratio` of DeepSpeed's offload_optimizer
    and Megatron-LM's `--optimizer-offload-fraction` for the part; SuperOffload (arXiv:2509.21271) and
    `CPUOffloadOptimizer` of torchao for updates during backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zero_ref.simulator.device import Device
from zero_ref.simulator.operations import HOST, Operation, shared_out

OFFLOADS: dict[str, str] = {
    "state": "masters, moments and the update are on the CPU, where the update begins after backward",
    "gradients": "gradients too, which go there during backward; the update begins after it",
    "in_backward": "gradients too, and each is used as soon as it is there, without clipping by their norm",
}
"""The values of `--offload`: what is on the CPU, and when the update begins."""


def gradients_leave(offload: str | None) -> bool:
    """Whether gradients go to the CPU as soon as backward has made them, and free their memory.

    >>> [gradients_leave(offload) for offload in (None, "state", "in_backward")]
    [False, False, True]
    """
    return offload in ("gradients", "in_backward")


class Offload(NamedTuple):
    """Bytes of each element of an update that the CPU makes, and the part that it makes.

    Args:
        offload: one of OFFLOADS.
        fraction: of the elements; the device updates the others meanwhile.
        gradient, parameter: bytes that go to the CPU, and that come back.
        touched: bytes that the CPU reads and writes in an update.
        added: bytes that it reads and writes to add gradients of several passes up.
    """

    offload: str
    fraction: float
    gradient: float
    parameter: float
    touched: float
    added: float = 0.0

    def ms(self, operation: Operation, numel: int, device: Device) -> float | None:
        """Milliseconds of a part of an update; None if the device alone makes it."""
        if operation.lane == HOST:
            if operation.label == "step":
                return device.offloaded_ms(
                    self.touched * numel, self.gradient * numel, self.parameter * numel
                )
            return device.offloaded_ms(self.added * numel, self.gradient * numel, 0)
        if operation.label != "step" or self.offload == "in_backward":
            return None
        there = 0.0 if gradients_leave(self.offload) else self.gradient
        numel_there = self.fraction * numel
        return device.offloaded_ms(
            self.touched * numel_there, there * numel_there, self.parameter * numel_there
        )


def with_offload(
    listed: Sequence[Operation], offload: str, fraction: float, gradient_bytes: int
) -> list[Operation]:
    """Add what the CPU does during backward to the operations of an iteration.

    For each part of the gradients, behind its backward or its reduction, the CPU gets them. Of the last pass
    it may update its part of them at once.

    >>> backward = Operation("backward", "compute", 0, numel=8, takes=16)
    >>> listed = [backward, backward._replace(part=1), Operation("step", "compute", numel=16, after=(1,))]
    >>> for one in with_offload(listed, "in_backward", 0.75, gradient_bytes=32):
    ...     print(one.label, one.lane, one.part, one.numel, one.after)
    backward compute 0 8 ()
    backward compute 1 8 ()
    step host 0 6 (0,)
    step host 1 6 (1,)
    step compute None 4 (1,)

    Args:
        listed: with one step, of all elements.
        gradient_bytes: of the gradients that a rank keeps for its update.
    """
    (place,) = (place for place, one in enumerate(listed) if one.label == "step")
    step, ready = listed[place], _ready(listed[:place])
    last_of_part = {listed[backward].part: backward for backward in ready}
    weights = [listed[end].nbytes or listed[backward].numel for backward, end in ready.items()]
    of_last = [
        weight if last_of_part[listed[backward].part] == backward else 0
        for backward, weight in zip(ready, weights)
    ]
    numel, shares = _shared(step, fraction, weights if sum(of_last) == 0 else of_last)
    gives = shared_out(round(fraction * gradient_bytes), of_last)
    hosted: list[Operation] = []
    for number, (backward, end) in enumerate(ready.items()):
        part = listed[backward].part
        is_last = last_of_part[part] == backward
        # Passes before the last bring as many elements of a part as the last one does.
        source = number if is_last else list(ready).index(last_of_part[part])
        hosted.append(
            Operation(
                "step" if is_last and offload == "in_backward" else "offload",
                HOST,
                part,
                (end,),
                numel=numel[source],
                shares=None if shares is None else tuple((rank, of[source]) for rank, of in shares),
                gives=gives[number],
            )
        )
    positions = tuple(range(place, place + len(hosted)))
    if offload == "in_backward":  # then the device's own part does not wait for the CPU's
        own = (
            None if step.shares is None else tuple((rank, n - round(fraction * n)) for rank, n in step.shares)
        )
        left = step._replace(numel=step.numel - round(fraction * step.numel), shares=own)
    else:
        left = step._replace(after=(*step.after, *positions))
    return [*listed[:place], *hosted, left, *(_behind(one, place, positions) for one in listed[place + 1 :])]


def _behind(one: Operation, place: int, hosted: tuple[int, ...]) -> Operation:
    """An operation behind the step that was at `place`. What waits for the step waits for the CPU too."""
    after = tuple(at + len(hosted) * (at >= place) for at in one.after)
    return one._replace(after=(*hosted, *after) if place in one.after else after)


def _ready(listed: Sequence[Operation]) -> dict[int, int]:
    """Where the gradients of a backward are complete, by its position: its last reduction's.

    Without any reduction, on a rank alone, it is the backward. With some, what is not reduced stays.
    """
    reduced = any(one.label == "reduce" for one in listed)
    latest: dict[int | None, int] = {}
    ready: dict[int, int] = {}
    for place, one in enumerate(listed):
        if one.label == "backward":
            latest[one.part] = place
            if not reduced:
                ready[place] = place
        elif one.label == "reduce" and one.part in latest:
            ready[latest[one.part]] = place
    return ready


def _shared(
    step: Operation, fraction: float, weights: Sequence[int]
) -> tuple[list[int], list[tuple[int, list[int]]] | None]:
    """The elements that the CPU updates of each part, on every rank or by rank."""
    pieces: dict[int, list[int]] = {}
    for numel in {step.numel, *(numel for _, numel in step.shares or ())}:
        pieces[numel] = shared_out(round(fraction * numel), weights)
    shares = None if step.shares is None else [(rank, pieces[numel]) for rank, numel in step.shares]
    return pieces[step.numel], shares
