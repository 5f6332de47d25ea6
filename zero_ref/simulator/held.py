"""The memory of a rank while it goes through its operations: bytes by kind, each time they change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from zero_ref.simulator.operations import NETWORK, Operation, shared_out

KINDS = ("parameters", "optimizer state", "gradients", "communication", "activations", "temporaries")
"""Parameters and optimizer state are there all the time. Communication is buffers of messages, and at stage
3 the gathered parameters; temporaries are what the loss, a block or the update needs while it lasts."""

TAKEN = {"forward": "activations", "gather": "communication"}
"""The kind of what an operation allocates, by its label; of all others it is gradients."""

MEANWHILE = {"backward": "temporaries", "step": "temporaries"}
"""The kind of what is there while an operation lasts, by its label; of all others it is communication."""

PORTIONS = 32
"""A forward or backward of the whole model is one operation: what it allocates and frees comes and goes in so
many portions."""

Timed = tuple[Operation, float, float]
"""An operation, and when it begins and ends."""


def held_over_time(
    timed: Sequence[Timed],
    rank: int,
    held: Mapping[str, int],
    *,
    gradients_stay: bool = False,
    head_bytes: int = 0,
    loss_bytes: int = 0,
    meanwhile: Mapping[str, int] = MappingProxyType({}),
) -> list[tuple[float, dict[str, int]]]:
    """Bytes by kind, each time they change: (milliseconds, bytes of each kind from then on).

    >>> forward, backward = Operation("forward", "compute", 0, takes=6), Operation("backward", "compute", 0)
    >>> timed = [(forward, 0.0, 1.0), (backward._replace(takes=4, gives=6), 1.0, 3.0)]
    >>> for ms, held in held_over_time(timed, rank=0, held={"parameters": 4}):
    ...     print(ms, {kind: nbytes for kind, nbytes in held.items() if nbytes})
    0.0 {'parameters': 4, 'activations': 6}
    1.0 {'parameters': 4, 'gradients': 4, 'activations': 6}
    3.0 {'parameters': 4, 'gradients': 4}

    Args:
        timed: the operations of a rank, in the order of the program.
        rank: whose they are.
        held: what is there at the beginning, by kind: one of KINDS, or another that never changes.
        gradients_stay: gradients lie in DDP's buckets for good: `held` has them, backward allocates none and
            nothing frees them.
        head_bytes: activations of head and loss, which are there until the loss's backward ends.
        loss_bytes: more, while the loss's backward lasts. That is the first half of the backward of the first
            bucket or unit, whose gradients are allocated in the second half.
        meanwhile: by the label of an operation, bytes that are there while it lasts.
    """
    changes = _Changes(rank, gradients_stay)
    of_first_part = (stop - start for one, start, stop in timed if _is_part_of_backward(one))
    loss_ms = next(of_first_part, float("inf")) / 2
    after_forward = False
    for one, start, stop in timed:
        begin = start
        if one.label == "backward" and after_forward and head_bytes + loss_bytes:
            begin = min(start + loss_ms, (start + stop) / 2)
            changes.add_while("activations", head_bytes, start, begin)
            changes.add_while("temporaries", loss_bytes, start, begin)
        after_forward = one.label == "forward" or (after_forward and one.lane == NETWORK)
        kind = MEANWHILE.get(one.label, "communication")
        changes.add_while(kind, meanwhile.get(one.label, 0), begin, stop)
        changes.add_of(one, begin, stop)
    return changes.summed(dict.fromkeys(KINDS, 0) | dict(held))


def _is_part_of_backward(one: Operation) -> bool:
    return one.label == "backward" and one.part is not None


class _Changes:
    """Changes of the bytes that a rank holds of each kind, by the moment.

    Args:
        rank, gradients_stay: as in `held_over_time`.
    """

    def __init__(self, rank: int, gradients_stay: bool) -> None:
        self.rank, self.gradients_stay = rank, gradients_stay
        self.at_ms: dict[float, dict[str, int]] = {0.0: {}}
        self.gathered: dict[int | None, int] = {}  # by unit, bytes of whole parameters
        # (part, owner) of the calls by which an owner has its own gradients already, to which it adds.
        self.received: set[tuple[int | None, int | None]] = set()

    def add(self, kind: str, nbytes: int, ms: float) -> None:
        at = self.at_ms.setdefault(ms, {})
        at[kind] = at.get(kind, 0) + nbytes

    def add_while(self, kind: str, nbytes: int, start: float, stop: float) -> None:
        self.add(kind, nbytes, start)
        self.add(kind, -nbytes, stop)

    def add_of(self, one: Operation, start: float, stop: float) -> None:
        """Add what an operation allocates and frees: at its ends, or in portions if it is a whole pass."""
        taken = TAKEN.get(one.label, "gradients")
        takes = 0 if self.gradients_stay and one.label == "backward" else one.takes
        if one.label == "gather":
            self.gathered[one.part] = self.gathered.get(one.part, 0) + takes
        portions = PORTIONS if one.label in ("forward", "backward") and one.part is None else 1
        moments = [start + (stop - start) * place / portions for place in range(portions)] + [stop]
        for ms, nbytes in zip(moments, shared_out(takes, [1] * portions)):
            self.add(taken, nbytes, ms)
        for kind, gives in self._given(one).items():
            for ms, nbytes in zip(moments[1:], shared_out(gives, [1] * portions)):
                self.add(kind, -nbytes, ms)

    def _given(self, one: Operation) -> dict[str, int]:
        """The bytes that an operation frees, by kind. Of gradients with `shares`, an owner keeps its own."""
        if one.label in ("forward", "backward"):  # a gathered unit is freed first, all else is activations
            unit = min(one.gives, self.gathered.get(one.part, 0))
            if unit:
                self.gathered[one.part] -= unit
            return {"communication": unit, "activations": one.gives - unit}
        if self.gradients_stay and one.label in ("reduce", "step"):
            return {}
        own = 0
        if one.op in ("exchange", "reduce"):  # by reduce, a bucket has a call for each of its owners
            if (one.part, one.owner) not in self.received:
                at = self.rank if one.ranks is None else self.rank // one.stride % one.ranks
                own = sum(nbytes for owner, nbytes in one.shares or () if owner == at)
            self.received.add((one.part, one.owner))
        return {"gradients": one.gives - own}

    def summed(self, held: Mapping[str, int]) -> list[tuple[float, dict[str, int]]]:
        """The bytes that are there from each moment on, if so many are there at the beginning."""
        curve = []
        for ms in sorted(self.at_ms):
            held = dict(held)
            for kind, nbytes in self.at_ms[ms].items():
                held[kind] += nbytes
            curve.append((ms, held))
        return curve
