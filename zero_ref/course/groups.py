"""Chapter 6's graders: where added parameters go, what a new partition would move, what freezing sends."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from zero_ref.course import Answer, call_text, exercise, shown
from zero_ref.course.predictions import prediction
from zero_ref.lab import ranks
from zero_ref.lab.config import GPTConfig
from zero_ref.lab.meter import recording
from zero_ref.lab.model import GPT
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.calls import Call
from zero_ref.plan.partition import ParamSpec, Partition, Slice
from zero_ref.plan.rules import even, from_lists, plan_partition, sorted_greedy
from zero_ref.simulator.ledger import state_bytes_of_rank
from zero_ref.simulator.models import from_module
from zero_ref.simulator.schedule import broadcasts_of_slices

_LIST = (list, tuple)

# ---------------------------------------------------------------------- 6.1 where do they go


@exercise(
    "groups.place",
    on_ranks=True,
    forbids=(
        "zero_ref.plan.rules.sorted_greedy",
        "zero_ref.plan.rules.registration_greedy",
        "zero_ref.minimal.assign_owners",
    ),
)
def place(answer: Answer) -> str:
    """Owners of added parameters: on paper, and as a real optimizer of two ranks places them."""
    cases: list[tuple[list[int], list[int]]] = [
        ([25, 20], [100, 30]),
        ([6, 5, 4, 1], [0, 0]),
        ([1, 4, 5, 6], [7, 0, 3]),
        ([5, 5, 5, 5], [2, 2, 0]),
        ([3, 1, 2], [9]),
        ([4, 7], [1, 1, 1, 1, 1]),
        ([], [3, 4]),
        *_random_cases(10),
        *answer.drawn(_random_case),
    ]
    owners = [_owners(answer, *case) for case in cases]
    for mistake, rule in _MISTAKES.items():
        if owners != [_place(*case) for case in cases] and owners == [rule(*case) for case in cases]:
            raise AssertionError(mistake)
    for (numels, loads), theirs in zip(cases, owners):
        right = _place(numels, loads)
        if theirs != right:
            raise AssertionError(_first_wrong_turn(answer.name, numels, loads, theirs, right))
    first, second = [100, 30, 30], [25, 20, 61]
    placed = ranks.run(_owners_of_added, 2, first, second)[0]
    theirs = _owners(answer, second, list(sorted_greedy(first, 2).loads))
    assert theirs == placed, (
        f"a real optimizer of parameters of {first} elements gives added ones of {second} to the ranks "
        f"{placed}; {answer.name} says {theirs}."
    )
    return f"{len(cases)} groups on paper and one on 2 real ranks, each parameter where the package puts it"


def _random_cases(count: int) -> Iterable[tuple[list[int], list[int]]]:
    generator = random.Random(0)
    return [_random_case(generator) for _ in range(count)]


def _random_case(generator: random.Random) -> tuple[list[int], list[int]]:
    numels = [generator.randint(1, 60) for _ in range(generator.randint(3, 12))]
    return numels, [generator.randint(0, 200) for _ in range(generator.randint(2, 6))]


def _owners(answer: Answer, numels: list[int], loads: list[int]) -> list[int]:
    """What the answer returns, once it is a rank for each new parameter."""
    call = call_text(answer.name, numels, loads)
    given = list(numels), list(loads)
    returned = answer(*given)
    assert given == (numels, loads), (
        f"{call} changed what it was given to {shown(given[0])} and {shown(given[1])}. Work on copies."
    )
    assert isinstance(returned, _LIST), f"{call} returned {shown(returned)}. It must return a list of owners."
    assert len(returned) == len(numels), (
        f"{call} returned {len(returned)} owners for {len(numels)} new parameters. It must return one for "
        "each; those that were there before keep theirs."
    )
    for owner in returned:
        is_rank = isinstance(owner, int) and not isinstance(owner, bool) and 0 <= owner < len(loads)
        assert is_rank, f"{call} returned {shown(returned)}. Ranks are numbered 0 to {len(loads) - 1}."
    return list(returned)


def _place(
    numels: Sequence[int],
    loads: Sequence[int],
    order: Callable[[Sequence[int]], Iterable[int]] = lambda numels: sorted(
        range(len(numels)), key=lambda i: -numels[i]
    ),
    weigh: Callable[[int], int] = lambda numel: numel,
    prefer: int = 1,
) -> list[int]:
    held, owners = list(loads), [0] * len(numels)
    for param in order(numels):
        owners[param] = min(range(len(held)), key=lambda rank: (held[rank], prefer * rank))
        held[owners[param]] += weigh(numels[param])
    return owners


_MISTAKES: dict[str, Callable[[Sequence[int], Sequence[int]], list[int]]] = {
    "This packs the new parameters as if the ranks owned nothing yet. Start from `loads`.": (
        lambda numels, loads: _place(numels, [0] * len(loads))
    ),
    "This gives each new parameter as it comes to the emptiest rank. Place the largest first.": (
        lambda numels, loads: _place(numels, loads, order=lambda numels: range(len(numels)))
    ),
    "This gives all new parameters to the rank that was emptiest at the start. What a rank was just given "
    "counts too.": lambda numels, loads: _place(numels, loads, weigh=lambda numel: 0),
    "This counts a parameter as 1, whatever its size. Count its elements.": (
        lambda numels, loads: _place(numels, loads, weigh=lambda numel: 1)
    ),
    "Among ranks that own equally much this takes the highest. Take the lowest.": (
        lambda numels, loads: _place(numels, loads, prefer=-1)
    ),
    "These are the right owners in the wrong places: entry i belongs to the i-th largest parameter. Put it "
    "where that parameter stands in `numels`.": lambda numels, loads: [
        _place(numels, loads)[i] for i in sorted(range(len(numels)), key=lambda i: -numels[i])
    ],
}
"""What a reader may have written, by what there is to say about it."""


def _first_wrong_turn(
    name: str, numels: Sequence[int], loads: Sequence[int], theirs: Sequence[int], right: Sequence[int]
) -> str:
    held = list(loads)
    for param in sorted(range(len(numels)), key=lambda i: -numels[i]):
        if theirs[param] != right[param]:
            return (
                f"{call_text(name, list(numels), list(loads))} gives parameter {param} ({numels[param]} "
                f"elements) to rank {theirs[param]}; it belongs to rank {right[param]}. When its turn comes, "
                f"the ranks own {shown(held)}."
            )
        held[right[param]] += numels[param]
    raise AssertionError("the owners are right")  # not reached: the caller saw a difference


def _owners_of_added(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """On a rank: where the package's optimizer puts a second group."""
    of_each = [[nn.Parameter(torch.zeros(numel)) for numel in numels] for numels in (first, second)]
    optimizer = ZeroRedundancyOptimizer(of_each[0], torch.optim.SGD, lr=0.1)
    optimizer.add_param_group({"params": of_each[1]})
    return list(optimizer.partition.owner_of_param[len(first) :])


# ---------------------------------------------------------------------------- 6.2 state to move

BYTES_PER_ELEMENT = 8
"""Adam's two running means in float32."""


@exercise(
    "groups.state_to_move",
    forbids=(
        "zero_ref.plan.moves.moves",
        "zero_ref.plan.moves.numels_between",
    ),
)
def state_to_move(answer: Answer) -> str:
    """Bytes of Adam's state that would change owner, against counting element by element."""
    cases = _pairs_of_partitions() + answer.drawn(_pair_of_partitions)
    for before, after in cases:
        returned = answer(before, after)
        is_number = isinstance(returned, int) and not isinstance(returned, bool)
        assert is_number, f"{answer.name} returned {shown(returned)}. It must return a whole number of bytes."
        moved = _elements_moved(before, after)
        if returned != BYTES_PER_ELEMENT * moved:
            raise AssertionError(_mistake_in_bytes(answer.name, before, after, returned))
    return f"{len(cases)} pairs of partitions, whole and cut, with parameters added and without"


def _pairs_of_partitions() -> list[tuple[Partition, Partition]]:
    first, second = [40, 30, 20, 10], [90, 25]
    before = sorted_greedy(first, 2)
    flat = even([192, 320], 2)
    generator = random.Random(1)
    pairs = [
        (before, before.joined(sorted_greedy(second, 2, loads=before.loads))),
        (before, sorted_greedy(first + second, 2)),
        (before, from_lists(first, [[1, 2, 3], [0]])),
        (flat, flat),
        (flat, even([192, 320, 512], 2)),
        (even([256], 2), from_lists([256], [[], [0]])),
        (even([300, 500, 100], 3, alignment=1), even([300, 500, 100, 450], 3, alignment=1)),
        (even([8, 9], 4, alignment=1), sorted_greedy([8, 9], 4)),
    ]
    return pairs + [_pair_of_partitions(generator) for _ in range(6)]


def _pair_of_partitions(generator: random.Random) -> tuple[Partition, Partition]:
    numels = [generator.randint(1, 50) for _ in range(6)]
    return even(numels[:4], 3, alignment=1), sorted_greedy(numels, 3)


def _owner_of_elements(partition: Partition, params: int) -> list[int]:
    pieces = [piece for of_param in partition.pieces_of_param[:params] for piece in of_param]
    return [owner for piece, owner in pieces for _ in range(piece.numel)]


def _elements_moved(before: Partition, after: Partition) -> int:
    params = len(before.numels)
    pairs = zip(_owner_of_elements(before, params), _owner_of_elements(after, params), strict=True)
    return sum(old != new for old, new in pairs)


def _mistake_in_bytes(name: str, before: Partition, after: Partition, returned: int) -> str:
    moved = _elements_moved(before, after)
    added = sum(after.numels) - sum(before.numels)
    loads_differ = sum(abs(old - new) for old, new in zip(before.loads, after.loads))
    owners = [[[rank for _, rank in pieces] for pieces in each.pieces_of_param] for each in (before, after)]
    of_params = sum(numel for numel, old, new in zip(before.numels, *owners) if old != new)
    of_slices = sum(
        piece.numel
        for old, new in zip(before.slices_of_rank, after.slices_of_rank)
        for piece in set(new) - set(old)
        if piece.param < len(before.numels)
    )
    overlap = (
        "Of a parameter that is cut, a part may keep its owner: look where an old and a new slice overlap."
    )
    reasons = [
        (moved, "That is elements. Adam keeps 8 bytes for each."),
        (4 * moved, "Adam keeps two means of 4 bytes for each element, not one."),
        (16 * moved, "What one rank hands over another receives: count it once."),
        (8 * (moved + added), "An added parameter has no state yet: nothing of it can move."),
        (8 * of_params, overlap),
        (8 * of_slices, overlap),
        (
            8 * loads_differ // 2,
            "That is by how much the loads differ. Compare who owns which elements, not how many.",
        ),
    ]
    why = [reason for nbytes, reason in reasons if nbytes == returned]
    why.append("Count the elements that were there before and have another owner after.")
    return (
        f"from {_in_words(before)} to {_in_words(after)}: {moved} elements change owner, "
        f"{BYTES_PER_ELEMENT * moved} bytes of state; {name} says {returned}. {why[0]}"
    )


def _in_words(partition: Partition) -> str:
    def slice_in_words(piece: Slice) -> str:
        whole = piece.numel == partition.numels[piece.param]
        return f"{piece.param}" if whole else f"{piece.param}[{piece.start}:{piece.stop}]"

    of_ranks = [", ".join(map(slice_in_words, slices)) or "nothing" for slices in partition.slices_of_rank]
    return " | ".join(of_ranks)


# ------------------------------------------------------------------------ 6.3 the calls of a frozen model

Calls = list[tuple[str, int]]
Flags = list[list[bool]]

NUMELS = [12, 4, 8, 2]
T, F = True, False
TIMELINES: list[Flags] = [
    [[T, T, T, T], [T, F, T, T], [T, F, T, T], [T, T, T, T]],
    [[F, F, T, T], [F, F, T, T], [T, T, T, T], [T, T, T, T]],
    [[T, T, T, T], [F, F, F, F], [F, F, F, F], [F, F, F, T]],
    [[T, F, T, F], [F, T, F, T], [T, F, T, F], [T, F, T, F]],
]
"""Which parameters are trained in each step: one frozen for a while, some from the start, all, in turn."""


@exercise(
    "groups.calls_of_steps", on_ranks=True, forbids=("zero_ref.simulator.schedule.broadcasts_of_slices",)
)
def calls_of_steps(answer: Answer) -> str:
    """The calls of steps between which parameters are frozen, as two real ranks record them."""
    partition = sorted_greedy(NUMELS, 2)
    timelines = TIMELINES + answer.drawn(
        lambda rng: [rng.choice(([T, T, T, T], [T, F, T, T], [F, F, T, F])) for _ in range(5)]
    )
    recorded = ranks.run(_record, 2, partition, timelines, timeout=30.0, backend="gloo")[0]
    for flags, truth in zip(timelines, recorded):
        theirs = _calls(answer, partition, flags)
        for step, (mine, true) in enumerate(zip(theirs, truth)):
            if mine != true:
                raise AssertionError(
                    f"step {step}, trained are {flags[step]}"
                    + (f", before it {flags[step - 1]}" if step else "")
                    + f": it makes the calls {true}, {answer.name} says {mine}. "
                    + _mistake_in_calls(partition, flags, step, mine, true)
                )
    return f"{sum(map(len, TIMELINES))} steps on 2 real ranks make these calls, in this order"


def _record(partition: Partition, timelines: Sequence[Flags]) -> list[list[Calls]]:
    """On a rank: what the package's steps send while parameters are frozen and thawed."""
    recorded = []
    for flags in timelines:
        params = [nn.Parameter(torch.ones(n), requires_grad=f) for n, f in zip(partition.numels, flags[0])]
        optimizer = ZeroRedundancyOptimizer(params, torch.optim.SGD, partition=partition, lr=0.1)
        of_steps = []
        for of_step in flags:
            for param, trained in zip(params, of_step):
                param.requires_grad_(trained)
                param.grad = torch.ones_like(param) if trained else None
            with recording(optimizer.collectives) as calls:
                optimizer.step()
            of_steps.append([_short(call) for call in calls])
        recorded.append(of_steps)
    return recorded


def _short(call: Call) -> tuple[str, int]:
    return call.op, call.nbytes


def _calls(answer: Answer, partition: Partition, flags: Flags) -> list[Calls]:
    """What the answer returns, once it is a list of (operation, bytes) for each step."""
    returned = answer(partition, [list(of_step) for of_step in flags])
    is_right_kind = isinstance(returned, _LIST) and all(
        isinstance(of_step, _LIST) and all(isinstance(call, _LIST) and len(call) == 2 for call in of_step)
        for of_step in returned
    )
    assert is_right_kind, (
        f"{answer.name} returned {shown(returned)}. It must return a list for each step, of pairs such as "
        '("broadcast", 48).'
    )
    assert len(returned) == len(flags), (
        f"{answer.name} returned {len(returned)} lists for {len(flags)} steps."
    )
    return [[(op, nbytes) for op, nbytes in of_step] for of_step in returned]


def _mistake_in_calls(partition: Partition, flags: Flags, step: int, mine: Calls, true: Calls) -> str:
    ask = ("all_gather", 32)
    sent = [call for call in mine if call != ask]
    if mine and sorted(mine) == sorted(true):
        return (
            "The ranks agree before anything is sent." if ask in true else "Owner by owner, rank 0's first."
        )
    if sent != [call for call in true if call != ask]:
        if sent == _all_broadcasts(partition):
            return "A frozen parameter does not change, so nobody sends it."
        return "There is one broadcast for each parameter that is trained, with its bytes: 4 an element."
    if ask in true:
        return "What is trained has changed since the step before, so the ranks compare it first: 32 bytes."
    if step == 0:
        return "Nothing has changed since the optimizer was built."
    return "Nothing has changed since the step before; what came earlier is agreed already."


def _all_broadcasts(partition: Partition) -> Calls:
    return [("broadcast", 4 * piece.numel) for slices in partition.slices_of_rank for piece in slices]


# --------------------------------------------------------------------------------------- predictions

RANKS = 4
UPPER, LOWER, EMBEDDINGS = ("blocks.1.", "norm."), ("blocks.0.",), ("tokens.", "positions.")


@prediction(
    "groups.late",
    "The two embeddings come as a third group: how many elements does the fullest rank own then?",
    unit="elements",
)
def _fullest_with_embeddings() -> float:
    loads = (0,) * RANKS
    for names in (UPPER, LOWER, EMBEDDINGS):
        added = plan_partition("sorted_greedy", _specs(names), RANKS, loads=loads).loads
        loads = tuple(map(sum, zip(loads, added)))
    return max(loads)


@prediction(
    "groups.calls",
    "Step 4, in which the upper block is frozen: how many calls does the optimizer make?",
    unit="calls",
)
def _calls_of_frozen() -> float:
    trained = _specs(("norm.", *LOWER))
    broadcasts = broadcasts_of_slices(plan_partition("sorted_greedy", trained, RANKS), trained)
    return 1 + len(broadcasts)  # the ranks compare notes first


@prediction(
    "groups.frozen",
    "Largest first, most parameters frozen: how much state has the fullest rank?",
    unit="times the emptiest rank's",
)
def _uneven_when_frozen() -> float:
    specs = [spec._replace(trainable=spec.name.startswith(UPPER)) for spec in _specs(("",))]
    held = state_bytes_of_rank(plan_partition("sorted_greedy", specs, RANKS), specs, "AdamW")
    return max(held) / min(held)


@prediction(
    "groups.ddp",
    "The block is thawed and DDP not built anew: how many different gradients do four ranks have?",
    unit="different gradients",
)
def _gradients_nobody_averages() -> float:
    return RANKS  # DDP averages what was trained when it was built: to the thawed block it does nothing


def _specs(names: tuple[str, ...]) -> list[ParamSpec]:
    """The parameters of the chapter's model whose names begin so."""
    model = GPT(GPTConfig(layers=2, heads=2, width=32, context=32))
    return [spec for spec in from_module(model) if spec.name.startswith(names)]
