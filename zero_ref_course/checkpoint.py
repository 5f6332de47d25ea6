"""Graders of the chapter on checkpoints: what a new rank reads, shards put together."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import starmap
from typing import Any

import torch

from zero_ref.comm.collectives import Collectives
from zero_ref.lab import virtual
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.moves import moves
from zero_ref.plan.partition import Partition, Slice
from zero_ref.plan.rules import even, from_lists, sorted_greedy
from zero_ref_course import Answer, ExerciseFailed, exercise, shown
from zero_ref_course._cases import Form, check_cases, is_whole, list_of
from zero_ref_course.predictions import prediction

# ---------------------------------------------------------------------------------- what to read

NUMELS = [384, 24, 192, 8]
LAST_FIRST: list[list[int | Slice]] = [[Slice(0, 200, 384), 3], [2], [1, Slice(0, 0, 200)]]
"""Rank 0 owns the end of the first parameter, rank 2 its beginning."""

RESHARDINGS: list[tuple[Partition, Partition]] = [
    (even([384], 2), even([384], 3)),
    (even(NUMELS, 4), even(NUMELS, 3)),
    (even(NUMELS, 1), even(NUMELS, 2)),
    (sorted_greedy(NUMELS, 4), even(NUMELS, 4)),
    (sorted_greedy(NUMELS, 2), sorted_greedy(NUMELS, 6)),
    (from_lists([9, 5], [[1], [0]]), from_lists([9, 5], [[Slice(0, 0, 4)], [1], [Slice(0, 4, 9)]])),
    (even([5000] * 3, 16), even([5000] * 3, 9)),
    (from_lists(NUMELS, LAST_FIRST), even(NUMELS, 2)),
    (even([256], 4), even([256], 2)),
    (even([3], 3, alignment=1), even([3], 2, alignment=1)),
    (even(NUMELS, 2), from_lists(NUMELS, LAST_FIRST)),
]
"""Old and new owners: cut and whole, fewer ranks and more, in order and out of it."""


Read = tuple[int, int, int]
"""A read: the old rank whose file is read, the first element in that file, the number of elements."""

READS = Form(
    list_of(list_of(is_whole, 3)), "It must return a list of (old rank, first element, number of elements)."
)


@exercise("checkpoint.reads")
def reads(answer: Answer) -> str:
    """Check the answer's reads on files that have a number for each element."""
    pairs = RESHARDINGS + answer.drawn(_drawn_resharding)
    cases = [(*pair, rank) for pair in pairs for rank in range(pair[1].world_size)]
    check_cases(
        answer,
        cases,
        starmap(_reads, cases),
        lambda answer, *case: [tuple(read) for read in READS.returned_by(answer, *case)],
        same=lambda theirs, reads: theirs in (reads, _joined(reads)),
        mistakes=_MISTAKES,
        otherwise=_mistake_in_reads,
        said=lambda theirs, right, old, new, rank: (
            f"parameters of {shown(list(old.numels))} elements, {_owned(old)} before, {_owned(new)} after: "
            f"rank {rank} reads {shown(theirs)}."
        ),
    )
    return f"{len(cases)} ranks of {len(pairs)} reshardings read what they own"


def _drawn_resharding(rng: random.Random) -> tuple[Partition, Partition]:
    numels = [rng.randint(1, 600) for _ in range(rng.randint(1, 6))]
    old, new = (rng.choice((sorted_greedy, even))(numels, rng.randint(1, 6)) for _ in range(2))
    return old, new


def _reads(old: Partition, new: Partition, rank: int) -> list[Read]:
    return _joined(_unjoined(old, new, rank))


def _unjoined(
    old: Partition,
    new: Partition,
    rank: int,
    place: Callable[[Slice, int, int], int] = lambda piece, start, before: before + start - piece.start,
) -> list[Read]:
    """The reads by a rule for places; `before` is the number of elements before the slice in its file."""
    found = []
    for wanted in new.slices_of_rank[rank]:
        for piece, src in old.pieces_of_param[wanted.param]:
            start, stop = max(piece.start, wanted.start), min(piece.stop, wanted.stop)
            if start < stop:
                in_file = old.slices_of_rank[src]
                before = sum(each.numel for each in in_file[: in_file.index(piece)])
                found.append((src, place(piece, start, before), stop - start))
    return found


def _joined(found: Iterable[Read]) -> list[Read]:
    joined: list[Read] = []
    for src, first, numel in found:
        if joined and joined[-1][0] == src and sum(joined[-1][1:]) == first:
            joined[-1] = (src, joined[-1][1], joined[-1][2] + numel)
        else:
            joined.append((src, first, numel))
    return joined


def _mistake_in_reads(
    theirs: list[Read], right: list[Read], old: Partition, new: Partition, rank: int
) -> str:
    if _joined(theirs) == right:
        return (
            f"These are the right elements, in {len(theirs)} reads where {len(right)} are enough: one "
            "read can take two slices that lie end to end in one file and are wanted in that order."
        )
    if any(numel == 0 for _, _, numel in theirs):
        return "A read of 0 elements is no read: slices that only touch have nothing in common."
    for src, first, numel in theirs:
        known = 0 <= src < old.world_size
        if not known or first < 0 or numel < 1 or first + numel > old.loads[src]:
            has = f"{old.loads[src]} elements" if known else f"no file; there are {old.world_size}"
            return f"The file of rank {src} has {has}: ({src}, {first}, {numel}) is not in it."
    wanted = _elements(new.slices_of_rank[rank])
    got = [element for read in theirs for element in _in_file(old, *read)]
    if sorted(got) == sorted(wanted):
        return "These are the right elements in another order than that of the rank's slices."
    if len(got) != len(wanted):
        return f"That is {len(got)} elements in all, and the rank is to own {len(wanted)}."
    at = next(at for at, pair in enumerate(zip(got, wanted)) if pair[0] != pair[1])
    return (
        f"Element {at} of what it reads is number {got[at][1]} of parameter {got[at][0]}; the rank's is "
        f"number {wanted[at][1]} of parameter {wanted[at][0]}. Count a place in a file from its beginning."
    )


def _in_file(old: Partition, src: int, first: int, numel: int) -> list[tuple[int, int]]:
    return _elements(old.slices_of_rank[src])[first : first + numel]


def _elements(slices: Sequence[Slice]) -> list[tuple[int, int]]:
    return [(piece.param, at) for piece in slices for at in range(piece.start, piece.stop)]


_MISTAKES: dict[str, Callable[[Partition, Partition, int], list[Read]]] = {
    "That counts from the beginning of the parameter. A file has slices, so count from its own beginning.": (
        lambda old, new, rank: _unjoined(old, new, rank, lambda piece, start, before: start)
    ),
    "That counts from the beginning of the slice. Other slices may lie before it in the same file.": (
        lambda old, new, rank: _unjoined(old, new, rank, lambda piece, start, before: start - piece.start)
    ),
    "That is where the slice begins in its file. The rank may want it from its middle on.": (
        lambda old, new, rank: _unjoined(old, new, rank, lambda piece, start, before: before)
    ),
    "That adds where an element is in its parameter to the slices before. Where its slice begins is to be "
    "subtracted.": lambda old, new, rank: _unjoined(
        old, new, rank, lambda piece, start, before: before + start
    ),
    "That leaves out what the rank's own old file has. The processes are new: nothing is in memory.": (
        lambda old, new, rank: [read for read in _unjoined(old, new, rank) if read[0] != rank]
    ),
    "That goes from old rank to old rank. The reads come in the order of the new rank's slices.": (
        lambda old, new, rank: sorted(_unjoined(old, new, rank), key=lambda read: read[0])
    ),
    "That is in bytes, 4 for each element. Count elements.": lambda old, new, rank: [
        (src, 4 * first, 4 * numel) for src, first, numel in _unjoined(old, new, rank)
    ],
    "The last number is where the read ends. It must be how many elements it takes.": lambda old, new, rank: [
        (src, first, first + numel) for src, first, numel in _reads(old, new, rank)
    ],
}
"""Wrong rules that a reader may have written, by the message about each."""


def _owned(partition: Partition) -> str:
    if partition.world_size > 6:
        return f"owned by {partition.world_size} ranks"
    owned = [
        [f"{piece.param}[{piece.start}:{piece.stop}]" for piece in of_rank]
        for of_rank in partition.slices_of_rank
    ]
    return f"owned as {owned!s}".replace("'", "")


# ---------------------------------------------------------------------------------- shards put together

SHAPES = [(16, 24), (24,), (24, 8), (8,)]
SHARDINGS: list[tuple[Partition, list[int]]] = [
    (sorted_greedy(NUMELS, 3), []),
    (even(NUMELS, 2), []),
    (even(NUMELS, 4), []),
    (from_lists(NUMELS, LAST_FIRST), []),
    (even(NUMELS, 3), [1]),
    (sorted_greedy(NUMELS, 6), [0, 3]),
    (sorted_greedy(NUMELS, 1), []),
]
"""Partitions, and the parameters that never had a gradient."""

Shard = dict[Slice, dict[str, torch.Tensor]]


@exercise("checkpoint.consolidate")
def consolidate(answer: Answer) -> str:
    """Check the answer on shards of the package's optimizer against the package's own consolidation."""
    drawn = answer.drawn(
        lambda rng: (even(NUMELS, rng.randint(1, 6)), rng.sample(range(4), rng.randint(0, 2)))
    )
    for partition, unused in SHARDINGS + drawn:
        of_ranks = virtual.run(_shard_and_whole, partition.world_size, partition, unused, answer.seed)
        shards = [shard for shard, _ in of_ranks]
        truth = of_ranks[0][1]
        whole = answer(partition, list(SHAPES), shards)
        where = f"parameters of shapes {SHAPES}, {_owned(partition)}: "
        _check_keys(answer.name, whole, truth, where)
        for param, expected in truth.items():
            _check_state(
                whole[param], expected, f"{where}in the state of parameter {param}, ", partition, param
            )
        for shard in shards:
            for of_slice in shard.values():
                for tensor in of_slice.values():
                    tensor.add_(1)
        for param, expected in truth.items():
            for key, value in expected.items():
                assert torch.equal(torch.as_tensor(whole[param][key]), value), (
                    f"{where}the {key!r} of parameter {param} lies in the memory of a shard, so that "
                    "rank's next step changes what you return. Copy it, as with clone()."
                )
    return f"{len(SHARDINGS)} sharded states, equal to what the package consolidates"


def _shard_and_whole(
    comm: Collectives, partition: Partition, unused: Sequence[int], seed: int
) -> tuple[Shard, dict[int, dict[str, torch.Tensor]]]:
    """On a virtual rank: make two steps of Adam; return the state of the rank's slices, and all state."""
    generator = torch.Generator().manual_seed(8 + seed)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    optimizer = ZeroRedundancyOptimizer(params, torch.optim.Adam, comm, partition=partition, lr=0.1)
    for _ in range(2):
        for number, param in enumerate(params):
            gradient = torch.randn(param.shape, generator=generator)
            param.grad = None if number in unused else gradient
        optimizer.step()
    optimizer.consolidate_state_dict(to="all")
    shard = {
        own.piece: {
            key: value.detach().flatten().clone() if value.ndim else value.clone()
            for key, value in optimizer.state[own.local].items()
        }
        for own in optimizer.shard.owned
        if own.local in optimizer.state
    }
    return shard, optimizer.state_dict()["state"]


def _check_keys(name: str, whole: Any, truth: Mapping[int, Any], where: str) -> None:
    is_state = isinstance(whole, Mapping) and all(isinstance(state, Mapping) for state in whole.values())
    assert is_state, (
        f"{name} returned {shown(whole)}. It must return a dict: each parameter's state by its number."
    )
    missing = sorted(truth.keys() - whole.keys())
    assert not missing, f"{where}parameter {missing[0]} is missing from what {name} returned."
    strange = sorted(whole.keys() - truth.keys(), key=str)
    assert not strange, (
        f"{where}{name} returned a state for {strange[0]!r}. No rank has one: a parameter that never had a "
        "gradient has no state, in plain Adam either."
    )


def _check_state(
    state: Any, expected: Mapping[str, Any], where: str, partition: Partition, param: int
) -> None:
    assert state.keys() == expected.keys(), f"{where}the keys are {list(state)}, not {list(expected)}."
    count = float(state["step"])
    assert count == float(expected["step"]), (
        f"{where}'step' is {count:g}, after {float(expected['step']):g} steps. The slices of a parameter "
        "step together, so each one's count is that of the whole."
    )
    for key in ("exp_avg", "exp_avg_sq"):
        value, right = state[key], expected[key]
        assert isinstance(value, torch.Tensor), f"{where}{key!r} is {shown(value)}, not a tensor."
        assert value.shape == right.shape, (
            f"{where}{key!r} has the shape {tuple(value.shape)}; its parameter has {tuple(right.shape)}, "
            "and so has its state in plain Adam."
        )
        if torch.equal(value, right):
            continue
        owners = [rank for _, rank in partition.pieces_of_param[param]]
        same_elements = torch.equal(value.flatten().sort().values, right.flatten().sort().values)
        raise ExerciseFailed(
            f"{where}{key!r} has the right elements in the wrong order. Its slices belong to the ranks "
            f"{owners}, from the first element to the last: a slice's place is its `start`, not its rank."
            if same_elements
            else f"{where}{key!r} has {int((value != right).sum())} wrong elements of {right.numel()}. A "
            "slice fills the elements `start` to `stop` of the flat tensor, and the slices together fill all."
        )


# --------------------------------------------------------------------------------------- predictions


@prediction(
    "checkpoint.moving",
    "From 4 ranks to 2: how many of the 608 elements change their owner?",
    unit="elements",
)
def _moving() -> float:
    return sum(move.piece.numel for move in moves(even(NUMELS, 4), even(NUMELS, 2)))


@prediction(
    "checkpoint.received",
    "Rank 0 gathers Adam's two means from 4 ranks: how many bytes of them does it receive?",
    unit="bytes",
)
def _received_by_rank_0() -> float:
    return 2 * 4 * (sum(NUMELS) - even(NUMELS, 4).loads[0])


@prediction(
    "checkpoint.found",
    "Where do the three ranks go on?",
    choices=("after step 2", "after step 4", "after step 6", "from the beginning"),
)
def _found() -> str:
    whole = {2: True, 4: False, 6: False}  # by the step after which it was saved
    return f"after step {max(step for step, is_whole in whole.items() if is_whole)}"
