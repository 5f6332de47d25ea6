"""The all-to-alls by which rows of tokens reach their experts and come back, among the operations of a pass.

The builders of `data_parallel`, `sharded` and `stage_3` list what is computed and what a strategy sends. Here
forward and backward are cut where rows travel, and the calls are put in between. Nothing hides them: a block
cannot go on before its rows are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

from zero_ref.plan.partition import ParamSpec
from zero_ref.simulator.layers import is_of_experts
from zero_ref.simulator.operations import NETWORK, Operation, shared_out

COUNT_ITEMSIZE = 8
"""Bytes of the number of rows for one expert, as ranks tell it each other before the rows."""


class SharedExperts(NamedTuple):
    """Experts that several ranks share, and what travels between these.

    >>> SharedExperts(ranks=2, row_bytes=1000, experts=8, load=1.5).arriving
    ((0, 750), (1, 250))

    Args:
        ranks: so many consecutive ranks share the experts of each block, whole ones each.
        row_bytes: of the rows that the tokens of one rank are in a pass of one block: a row of the model's
            width for each token and each expert that it goes to.
        experts: in a block, on all of these ranks together.
        load: rows that the busiest of the ranks gets, over the average.
        again: the share of the blocks that backward computes again, and whose rows so travel again.
    """

    ranks: int
    row_bytes: int
    experts: int
    load: float = 1.0
    again: float = 0.0

    @property
    def arriving(self) -> tuple[tuple[int, int], ...] | None:
        """(rank, bytes of a rank's rows that are for it), the busiest first; None if all get as many."""
        if self.load == 1:
            return None
        busiest = round(self.row_bytes * self.load / self.ranks)
        others = shared_out(self.row_bytes - busiest, [1] * (self.ranks - 1))
        return tuple(enumerate([busiest, *others]))

    def is_again(self, block: int) -> bool:
        """Whether backward computes a block again: with a share of 1/2 every other one, from the second on.

        >>> [SharedExperts(2, 1000, 8, again=0.5).is_again(block) for block in range(4)]
        [False, True, False, True]
        """
        return int((block + 1) * self.again) > int(block * self.again)


class Members(Protocol):
    """Says which parameters a computation is about."""

    def __call__(self, label: str, part: int | None, /) -> Sequence[int]:
        """The numbers of the parameters in the order of the computation."""


def with_dispatch(
    operations: Iterable[Operation],
    params: Sequence[ParamSpec],
    shared: SharedExperts,
    members: Members,
    world_size: int,
) -> tuple[Operation, ...]:
    """The operations with the all-to-alls of all blocks with experts.

    >>> params = [ParamSpec(6, name="0.attn"), ParamSpec(8, name="0.experts.up"), ParamSpec(2, name="head")]
    >>> passes = [Operation("forward", "compute", numel=16), Operation("backward", "compute", numel=16)]
    >>> in_order = lambda label, part: [0, 1, 2] if label == "forward" else [2, 1, 0]
    >>> for one in with_dispatch(passes, params, SharedExperts(2, 1000, 4), in_order, world_size=4):
    ...     print(one.label, one.numel or one.nbytes, one.after)
    forward 6 ()
    count 32 (0,)
    dispatch 1000 (1,)
    forward 8 (2,)
    combine 1000 (3,)
    forward 2 (4,)
    backward 2 ()
    dispatch 1000 (6,)
    backward 8 (7,)
    combine 1000 (8,)
    backward 6 (9,)

    Args:
        operations: of one rank, in order.
        params: that one rank holds.
        members: by the label and part of a forward or backward.
    Raises:
        ValueError: experts are frozen.
    Cost: for each block 3 calls in forward and 2 in backward; 3 more where backward computes it again.
    """
    if any(is_of_experts(param.name) and not param.trainable for param in params):
        raise ValueError(
            "frozen experts that several ranks share are not simulated: share only trained ones."
        )
    splicing = _Splicing(params, shared, world_size)
    for one in operations:
        if one.lane != NETWORK and one.label in ("forward", "backward"):
            splicing.compute(one, members(one.label, one.part))
        else:
            splicing.other(one)
    return tuple(splicing.listed)


def members_by_bucket(params: Sequence[ParamSpec], buckets: Sequence[Sequence[int]]) -> Members:
    """The parameters of a forward of the whole model, and of a backward: of a bucket, or of all of them.

    >>> members = members_by_bucket([ParamSpec(6), ParamSpec(8)], [[1], [0]])
    >>> members("forward", None), members("backward", None), members("backward", 0)
    (range(0, 2), [1, 0], [1])

    Args:
        buckets: the parameters of each in the order of backward.
    """
    trained = [number for number in reversed(range(len(params))) if params[number].trainable]

    def members(label: str, part: int | None, /) -> Sequence[int]:
        if label == "forward":
            return range(len(params))
        return trained if part is None else buckets[part]

    return members


class _Splicing:
    """The operations so far, and where those have gone that others wait for.

    Attributes:
        moved: for each operation of the builder its new place, the last one if it was cut.
        waits: the all-to-all that the next computation waits for.
        computed: the last computation.
        left: in this pass, by block the experts' parameters that were not computed on yet.
    """

    def __init__(self, params: Sequence[ParamSpec], shared: SharedExperts, world_size: int) -> None:
        self.params, self.shared = params, shared
        self.ranks = None if shared.ranks == world_size else shared.ranks
        self.block_of: dict[int, str] = {
            number: f".{param.name}".partition(".experts.")[0]
            for number, param in enumerate(params)
            if is_of_experts(param.name)
        }
        self.place_of_block = {block: n for n, block in enumerate(dict.fromkeys(self.block_of.values()))}
        self.listed: list[Operation] = []
        self.moved: list[int] = []
        self.waits: tuple[int, ...] = ()
        self.computed: tuple[int, ...] = ()
        self.label = ""
        self.left: dict[str, set[int]] = {}
        self.opened: set[str] = set()

    def other(self, one: Operation) -> None:
        """What is neither forward nor backward."""
        waits = () if one.lane == NETWORK else self.waits
        self.moved.append(self._append(one._replace(after=(*self._moved(one.after), *waits))))

    def compute(self, one: Operation, members: Sequence[int]) -> None:
        """Forward or backward of some parameters, cut where rows travel."""
        if one.label != self.label:
            self._begin(one.label)
        runs = [(block, list(run)) for block, run in groupby(members, key=self.block_of.get)]
        numels = [sum(self.params[number].numel for number in run) for _, run in runs]
        pieces = zip(
            *(
                shared_out(amount, numels) if sum(numels) else [amount]
                for amount in (one.numel, one.tensors, one.takes, one.gives)
            )
        )
        after = self._moved(one.after)
        for (block, run), (numel, tensors, takes, gives) in zip(runs or [(None, [])], pieces):
            if block is not None and block not in self.opened:
                self._open(block, one.label == "backward")
            piece = one._replace(numel=numel, tensors=tensors, takes=takes, gives=gives)
            self.computed = (self._append(piece._replace(after=(*after, *self.waits))),)
            after, self.waits = (), ()
            if block is not None:
                self.left[block] -= set(run)
                if not self.left[block]:
                    self._call("combine")
        self.moved.append(self.computed[0])

    def _begin(self, label: str) -> None:
        """A pass begins: each block will be computed on once."""
        self.label, self.opened, self.left = label, set(), {}
        for number, block in self.block_of.items():
            self.left.setdefault(block, set()).add(number)

    def _open(self, block: str, is_backward: bool) -> None:
        """Rows, or their gradients, reach the experts of a block."""
        self.opened.add(block)
        if not is_backward or self.shared.is_again(self.place_of_block[block]):
            self._call("count")
            self._call("dispatch")
        if is_backward:
            if self.shared.is_again(self.place_of_block[block]):
                self._call("combine")
            self._call("dispatch")

    def _call(self, label: str) -> None:
        counting = label == "count"
        call = Operation(label, NETWORK, after=self.waits or self.computed, op="all_to_all", ranks=self.ranks)
        nbytes = COUNT_ITEMSIZE * self.shared.experts if counting else self.shared.row_bytes
        shares = None if counting else self.shared.arriving
        self.waits = (self._append(call._replace(nbytes=nbytes, shares=shares)),)

    def _append(self, operation: Operation) -> int:
        self.listed.append(operation)
        return len(self.listed) - 1

    def _moved(self, after: Iterable[int]) -> tuple[int, ...]:
        return tuple(self.moved[place] for place in after)
