"""Chapter 14's graders: a checkpoint of other groups, what a new partition moves, what freezing sends."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from zero_ref.lab.config import GPTConfig
from zero_ref.lab.meter import recording
from zero_ref.lab.model import GPT
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.calls import Call
from zero_ref.plan.choice import plan_partition
from zero_ref.plan.partition import ParamSpec, Partition, Slice
from zero_ref.plan.rules import even, from_lists, sorted_greedy
from zero_ref.simulator.ledger import state_bytes_of_rank
from zero_ref.simulator.models import from_module
from zero_ref.simulator.schedule import broadcasts_of_slices
from zero_ref_course import Answer, ExerciseFailed, exercise, shown
from zero_ref_course._cases import Form, check_cases, is_whole, list_of, named
from zero_ref_course._company import on_ranks
from zero_ref_course.predictions import prediction

# -------------------------------------------------------- 14.1 a checkpoint from before the groups changed

State = dict[str, Any]
"""What `Adam.state_dict()` gives."""

Names = list[list[str]]
"""The parameters of each group, by name."""


class Change(NamedTuple):
    """Groups as they were and as they are; the parameters without a gradient; learning rates of both."""

    then: Names
    now: Names
    frozen: frozenset[str] = frozenset()
    rates_then: tuple[float, ...] = (0.05, 0.04, 0.03)
    rates_now: tuple[float, ...] = (0.5, 0.4, 0.3)


CHANGES = [
    Change([["top", "head"]], [["top", "head"]]),
    Change([["top", "head"]], [["low"], ["top", "head"]]),
    Change([["top", "head"], ["low"]], [["low", "top"], ["new", "head"]]),
    Change([["low", "top", "head"]], [["top"], ["head"]]),
    Change([["a", "b"], ["c", "d"]], [["d", "a"], ["c", "b"]]),
    Change([["a", "b"], ["c"]], [["c", "b"], ["a"]], frozenset("b")),
    Change([["a"]], [["b", "c"]]),
]
"""As before; a group before it; mixed; one dropped; the same ones in another order; frozen; all others."""


@exercise("groups.carry_over", on_ranks=True)
def carry_over(answer: Answer) -> str:
    """State and options by name, then two steps of a plain and of a sharded Adam on real ranks."""
    loaded = []
    for number, change in enumerate(CHANGES + answer.drawn(_drawn_change)):
        saved, fresh = _states(change, answer.seed + number)
        given = copy.deepcopy((saved, fresh))
        returned = answer(saved, _flat(change.then), fresh, _flat(change.now))
        assert repr((saved, fresh)) == repr(given), (
            f"{answer.name} changed what it was given. The caller still needs both: build a new dict, and "
            "new groups in it."
        )
        _check_form(answer.name, returned, change)
        _check_state_by_name(returned["state"], saved["state"], change)
        loaded.append((returned, fresh, change))
    for returned, fresh, change in loaded:
        _check_options(returned["param_groups"], fresh["param_groups"], change)
    returned, _, change = loaded[2]
    equal = on_ranks(_go_on, 2, returned, change)
    assert all(equal), "the sharded optimizer of two real ranks goes on otherwise than plain Adam."
    return f"{len(CHANGES)} changes of groups, and one more step on 2 real ranks as plain Adam's"


def _drawn_change(rng: random.Random) -> Change:
    names = rng.sample("abcdefgh", 8)
    then, now = names[: rng.randint(3, 6)], rng.sample(names, rng.randint(3, 6))
    cuts = rng.randint(1, len(then) - 1), rng.randint(1, len(now) - 1)
    return Change(
        [then[: cuts[0]], then[cuts[0] :]],
        [now[: cuts[1]], now[cuts[1] :]],
        frozenset(then[: rng.randint(0, 1)]),
    )


def _flat(groups: Names) -> list[str]:
    return [name for group in groups for name in group]


def _adam(
    groups: Names, rates: Sequence[float], seed: int = 0
) -> tuple[list[nn.Parameter], torch.optim.Adam]:
    generator = torch.Generator().manual_seed(seed)
    params = [nn.Parameter(torch.randn(4, generator=generator)) for _ in _flat(groups)]
    of_group = iter(params)
    split = [{"params": [next(of_group) for _ in group], "lr": lr} for group, lr in zip(groups, rates)]
    return params, torch.optim.Adam(split)


def _states(change: Change, seed: int) -> tuple[State, State]:
    """Of the run that was saved after two steps, and of the optimizer that is to go on."""
    generator = torch.Generator().manual_seed(seed)
    params, before = _adam(change.then, change.rates_then)
    for _ in range(2):
        for name, param in zip(_flat(change.then), params):
            gradient = torch.randn(param.shape, generator=generator)
            param.grad = None if name in change.frozen else gradient
        before.step()
    return before.state_dict(), _adam(change.now, change.rates_now)[1].state_dict()


def _check_form(name: str, returned: Any, change: Change) -> None:
    where = f"from the groups {change.then} to {change.now}: "
    is_state_dict = isinstance(returned, Mapping) and returned.keys() == {"state", "param_groups"}
    assert is_state_dict, (
        f'{where}{name} returned {shown(returned)}. A state_dict has two entries, "state" and "param_groups".'
    )
    state, groups = returned["state"], returned["param_groups"]
    is_state = isinstance(state, Mapping) and all(
        isinstance(of_param, Mapping) for of_param in state.values()
    )
    assert is_state, f'{where}"state" is {shown(state)}. It has a dict for each number of a parameter.'
    are_groups = list_of(lambda group: isinstance(group, Mapping))(groups)
    assert are_groups, f'{where}"param_groups" is {shown(groups)}. It is a list of dicts.'
    by_name = [key for key in state if isinstance(key, str)]
    assert not by_name, (
        f'{where}"state" has the key {by_name[0]!r}. An optimizer knows numbers: use the one that this '
        "name has today."
    )


def _check_state_by_name(state: Mapping[Any, Any], saved: Mapping[int, Any], change: Change) -> None:
    then, now = _flat(change.then), _flat(change.now)
    where = f"saved with the groups {change.then}, to go on with {change.now}: "
    for number in state:
        assert number in range(len(now)), (
            f"{where}there is a state for number {number!r}, and today's numbers end at {len(now) - 1}. "
            "The state of a parameter that is gone goes, too."
        )
    for number, name in enumerate(now):
        had = then.index(name) if name in then else None
        if had is None or had not in saved:
            why = "is new" if had is None else "was frozen"
            assert number not in state, (
                f"{where}number {number} is {name!r}, which {why}, and {_whose(state[number], saved, then)}. "
                "A parameter without a step has no state, in plain Adam either: leave it out."
            )
            continue
        assert number in state, (
            f"{where}number {number} is {name!r}, which was trained as number {had}, and has no state here: "
            "Adam would begin again from zero."
        )
        assert _same_state(state[number], saved[had]), (
            f"{where}number {number} is {name!r}, and {_whose(state[number], saved, then)}. A number is "
            "only a place in the groups: go by name."
        )


def _whose(of_param: Mapping[str, Any], saved: Mapping[int, Any], then: Sequence[str]) -> str:
    names = [then[number] for number, other in saved.items() if _same_state(of_param, other)]
    return f"gets the state that {names[0]!r} had" if names else "gets a state that no parameter had"


def _same_state(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(torch.as_tensor(one[key]), torch.as_tensor(other[key])) for key in other
    )


def _check_options(
    groups: Sequence[Mapping[str, Any]], fresh: Sequence[Mapping[str, Any]], change: Change
) -> None:
    where = f"saved with the groups {change.then}, to go on with {change.now}: "
    assert len(groups) == len(fresh), (
        f"{where}there are {len(groups)} groups in what is returned, and today's optimizer has {len(fresh)}: "
        "it would refuse to load them."
    )
    for number, (group, today) in enumerate(zip(groups, fresh)):
        assert list(group.get("params", ())) == list(today["params"]), (
            f"{where}group {number} has the params {shown(group.get('params'))}; "
            f"today's has {today['params']}."
        )
        missing = sorted(today.keys() - group.keys())
        assert not missing, f"{where}group {number} lacks the option {missing[0]!r}."
        first = change.now[number][0]
        of_then = next((i for i, names in enumerate(change.then) if first in names), None)
        rate = change.rates_now[number] if of_then is None else change.rates_then[of_then]
        if group["lr"] == rate:
            continue
        why = (
            f"Its first parameter, {first!r}, is new, so the group keeps the options that it has today."
            if of_then is None
            else f"Its first parameter, {first!r}, was in group {of_then}, so its options are that group's."
        )
        whose = "today's" if group["lr"] == change.rates_now[number] else "another group's"
        raise ExerciseFailed(
            f"{where}group {number} has lr = {group['lr']}, {whose}; it should be {rate}. {why}"
        )


def _go_on(returned: State, change: Change) -> bool:
    """On a rank: whether a sharded optimizer that loads it makes the next step of a plain one."""
    params, plain = _adam(change.now, change.rates_now)
    twins, split = _adam(change.now, change.rates_now)
    zero = ZeroRedundancyOptimizer(split.param_groups, torch.optim.Adam)
    for optimizer in (plain, zero):
        optimizer.load_state_dict(copy.deepcopy(returned))
    for param, twin in zip(params, twins):
        param.grad, twin.grad = torch.ones_like(param), torch.ones_like(twin)
    plain.step()
    zero.step()
    return all(map(torch.equal, params, twins))


# --------------------------------------------------------------------------- 14.2 state to move

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
    check_cases(
        answer,
        cases,
        [BYTES_PER_ELEMENT * _elements_moved(*pair) for pair in cases],
        Form(is_whole, "It must return a whole number of bytes.").returned_by,
        otherwise=_mistake_in_bytes,
        said=lambda theirs, right, before, after: (
            f"from {_in_words(before)} to {_in_words(after)}: {right // BYTES_PER_ELEMENT} elements change "
            f"owner, {right} bytes of state; {answer.name} says {theirs}."
        ),
    )
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


def _mistake_in_bytes(theirs: int, right: int, before: Partition, after: Partition) -> str:
    moved = right // BYTES_PER_ELEMENT
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
    overlaps = _overlaps(before, after)
    moving = [numel for numel, old, new in overlaps if old != new]
    last_that_moves = ([numel for numel in moving if numel > 0] or [0])[-1]
    return named(
        {
            "That is elements. Adam keeps 8 bytes for each.": theirs == moved,
            "Adam keeps two means of 4 bytes for each element, not one.": theirs == 4 * moved,
            "What one rank hands over another receives: count it once.": theirs == 16 * moved,
            "An added parameter has no state yet: nothing of it can move.": theirs == 8 * (moved + added),
            "Of a parameter that is cut, a part may keep its owner: look where an old and a new slice "
            "overlap.": theirs in (8 * of_params, 8 * of_slices),
            "That is by how much the loads differ. Compare who owns which elements, not how many.": (
                theirs == 8 * loads_differ // 2
            ),
            "That is what keeps its owner. Count the elements whose owner is another one.": (
                theirs == 8 * (sum(before.numels) - moved)
            ),
            "Slices that do not overlap have a negative overlap: count it as 0.": theirs == 8 * sum(moving),
            "Count only what has another owner afterwards.": (
                theirs == 8 * sum(max(0, numel) for numel, _, _ in overlaps)
            ),
            "That is the last overlap that moves. Add them all up.": theirs == 8 * last_that_moves,
            "Some elements do change their owner: start from where old and new slices overlap.": theirs == 0,
        },
        "Count the elements that were there before and have another owner after.",
    )


def _overlaps(before: Partition, after: Partition) -> list[tuple[int, int, int]]:
    """(elements, old owner, new owner) of each old slice with each new one of its parameter."""
    return [
        (min(old.stop, new.stop) - max(old.start, new.start), old_owner, new_owner)
        for olds, news in zip(before.pieces_of_param, after.pieces_of_param)
        for old, old_owner in olds
        for new, new_owner in news
    ]


def _in_words(partition: Partition) -> str:
    def slice_in_words(piece: Slice) -> str:
        whole = piece.numel == partition.numels[piece.param]
        return f"{piece.param}" if whole else f"{piece.param}[{piece.start}:{piece.stop}]"

    of_ranks = [", ".join(map(slice_in_words, slices)) or "nothing" for slices in partition.slices_of_rank]
    return " | ".join(of_ranks)


# ----------------------------------------------------------------------- 14.3 the calls of a frozen model

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

CALLS = Form(
    list_of(list_of(list_of(lambda _: True, 2))),
    'It must return a list for each step, of pairs such as ("broadcast", 48).',
)


@exercise(
    "groups.calls_of_steps", on_ranks=True, forbids=("zero_ref.simulator.schedule.broadcasts_of_slices",)
)
def calls_of_steps(answer: Answer) -> str:
    """The calls of steps between which parameters are frozen, as two real ranks record them."""
    partition = sorted_greedy(NUMELS, 2)
    timelines = TIMELINES + answer.drawn(
        lambda rng: [rng.choice(([T, T, T, T], [T, F, T, T], [F, F, T, F])) for _ in range(5)]
    )
    recorded = on_ranks(_record, 2, partition, timelines)[0]
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
    returned = CALLS.returned_by(answer, partition, flags, call=answer.name)
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
