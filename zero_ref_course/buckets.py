"""Chapter 5's graders: a flat tensor that parameters are views of, and the calls of a step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn

from zero_ref.lab.config import GPTConfig
from zero_ref.lab.meter import recording
from zero_ref.lab.model import GPT
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.choice import plan_partition
from zero_ref.plan.layout import lay_out
from zero_ref.plan.partition import ParamSpec, Partition, Slice
from zero_ref.plan.rules import even, from_lists, sorted_greedy
from zero_ref.simulator.messages import broadcasts_of_buckets
from zero_ref.simulator.models import from_module
from zero_ref.simulator.schedule import ddp_buckets
from zero_ref_course import Answer, exercise, in_words, shown
from zero_ref_course._cases import Form, check_cases, list_of, named
from zero_ref_course._company import on_ranks
from zero_ref_course.predictions import prediction

# -------------------------------------------------------------------------------------------- flatten


class Before(NamedTuple):
    """A parameter before it was flattened; it must be the same afterwards."""

    param: nn.Parameter
    values: torch.Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool


@exercise("buckets.flatten")
def flatten(answer: Answer) -> str:
    """Check that parameters become views of one tensor and otherwise stay the same."""
    tried = 0
    for params in [*_models(), *answer.drawn(_drawn_model)]:
        before = [Before(p, p.detach().clone(), tuple(p.shape), p.stride(), p.requires_grad) for p in params]
        given = list(params)
        with in_words(_named(before), answer, given):
            flat = answer(given)
        _check_flat(f"{answer.name}({_named(before)})", flat, given, before)
        tried += len(params)
    return f"{tried} parameters, among them a transposed, a frozen and an empty one, alias their flat tensor"


def _models() -> Iterator[list[nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)

    def params(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
        return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]

    yield params((4, 3), (4,), (2, 4), (2,))
    transposed = nn.Parameter(torch.randn(5, 2, generator=generator).t())
    frozen = nn.Parameter(torch.randn(4, 1, generator=generator), requires_grad=False)
    yield [*params((3,)), transposed, frozen, *params((2, 2))]
    yield params((), (0, 3), (2, 3), dtype=torch.float64)
    yield params((6,))


def _drawn_model(rng: random.Random) -> list[nn.Parameter]:
    shapes = [(rng.randint(1, 5), rng.randint(1, 5)) for _ in range(rng.randint(1, 5))]
    generator = torch.Generator().manual_seed(rng.randrange(10**6))
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    return [nn.Parameter(one.t() if rng.random() < 0.5 else one, rng.random() < 0.7) for one in tensors]


def _named(before: Sequence[Before]) -> str:
    return f"parameters of shapes {', '.join(str(one.shape) for one in before)}"


def _check_flat(call: str, flat: Any, params: list[Any], before: Sequence[Before]) -> None:
    total = sum(one.values.numel() for one in before)
    is_flat = isinstance(flat, torch.Tensor) and flat.dim() == 1
    assert is_flat, f"{call} returned {_kind(flat)}. It must return one tensor of one dimension."
    assert flat.numel() == total, (
        f"{call} returned {flat.numel()} elements; the parameters have {total}. The flat tensor holds each "
        "element once, and nothing else."
    )
    assert flat.dtype == before[0].values.dtype, (
        f"{call} returned a tensor of {flat.dtype}; the parameters are of {before[0].values.dtype}. Give "
        "torch.empty the dtype of the parameters: its own choice is float32."
    )
    for number, one in enumerate(before):
        _check_still_itself(f"after {call}, parameter {number}", number, params, one)
    assert not flat.requires_grad, (
        f"{call} returned a tensor that autograd follows. A flat tensor is only memory: make it from "
        "param.detach(), or under torch.no_grad()."
    )
    _check_aliases(call, flat, before)


def _check_still_itself(which: str, number: int, params: list[Any], one: Before) -> None:
    is_same = len(params) > number and params[number] is one.param
    assert is_same, (
        f"{which} was replaced in the list by another object. The model, autograd and the optimizer hold the "
        "old one and would never see it: keep the Parameter and assign to its .data."
    )
    assert tuple(one.param.shape) == one.shape, (
        f"{which} has shape {tuple(one.param.shape)} and had {one.shape}. Its place alone may change."
    )
    assert one.param.requires_grad == one.requires_grad, (
        f"{which} has requires_grad={one.param.requires_grad} and had {one.requires_grad}."
    )
    assert torch.equal(one.param.detach(), one.values), (
        f"{which} has other values than before. Copy them into the flat tensor before you move it there, "
        "each to its own place."
    )
    assert one.param.stride() == one.strides, (
        f"{which} has strides {one.param.stride()} and had {one.strides}: a transposed matrix was laid out "
        "anew. flat.as_strided(param.size(), param.stride(), offset) is a window of the same strides."
    )


def _check_aliases(call: str, flat: torch.Tensor, before: Sequence[Before]) -> None:
    begins = list(accumulate((one.values.numel() for one in before), initial=0))
    for number, (one, begin) in enumerate(zip(before, begins)):
        if not one.values.numel():
            continue
        which = f"after {call}, parameter {number}"
        assert one.param.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr(), (
            f"{which} has memory of its own: what is written into the flat tensor does not reach it. "
            "Assign a window of the flat tensor to its .data; torch.cat only copies."
        )
        place = (one.param.data_ptr() - flat.data_ptr()) // flat.element_size()
        assert place == begin, (
            f"{which} begins at element {place} of the flat tensor; it belongs at {begin}, behind those that "
            "come before it in the list."
        )
    with torch.no_grad():
        flat.copy_(torch.arange(flat.numel()))
        for number, (one, begin) in enumerate(zip(before, begins)):
            expected = set(range(begin, begin + one.values.numel()))
            assert set(one.param.flatten().tolist()) == expected, (
                f"after {call}, elements {begin} to {begin + len(expected)} of the flat tensor are not "
                f"parameter {number}'s: it holds {shown(sorted(one.param.flatten().tolist()))} of them."
            )


def _kind(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


# ----------------------------------------------------------------------------------- predict the calls


class Case(NamedTuple):
    """A model's partition, and which of its parameters are trained."""

    partition: Partition
    trainable: list[bool]


def _case(rule: Any, numels: Sequence[int], world_size: int, frozen: Sequence[int] = ()) -> Case:
    trainable = [number not in frozen for number in range(len(numels))]
    specs = [ParamSpec(numel, trainable=trained) for numel, trained in zip(numels, trainable)]
    return Case(plan_partition(rule, specs, world_size), trainable)


CASES: dict[int, list[Case]] = {
    2: [
        _case("sorted_greedy", [12, 4, 8, 2], 2),
        _case("sorted_greedy", [12, 4, 8, 2], 2, frozen=[1]),
        _case("sorted_greedy", [12, 4, 8, 2], 2, frozen=[0, 3]),
        _case("even", [192, 64, 128, 5], 2),
    ],
    3: [
        _case(from_lists([3, 20, 3], [[2], [], [0, 1]]), [3, 20, 3], 3),
        _case("sorted_greedy", [5, 0, 4], 3),
        _case("even", [640, 320, 64], 3, frozen=[1]),
    ],
    1: [_case("sorted_greedy", [12, 4], 1)],
}
"""Cases by number of ranks: frozen parameters, ranks that own nothing, an empty parameter, cut ones."""

Pairs = list[tuple[Any, int]]
"""For each broadcast the rank that sends it, and its bytes."""

PAIRS = Form(
    list_of(list_of(lambda _: True, 2)),
    "It must return a list of pairs, (rank, bytes), one for each broadcast; an empty list where nothing is "
    "sent.",
)


@exercise("buckets.calls", on_ranks=True)
def calls(answer: Answer) -> str:
    """Check the broadcasts of a step, with and without flat tensors, against those that real ranks record."""
    steps = 0
    drawn = answer.drawn(_drawn_case, 4)
    for world_size, known in CASES.items():
        cases = known + [case for case in drawn if case.partition.world_size == world_size]
        recorded = on_ranks(_record, world_size, cases)[0] if world_size > 1 else [[], []]
        check_cases(
            answer,
            [(*case, flat) for case in cases for flat in (False, True)],
            recorded,
            lambda answer, *case: [tuple(pair) for pair in PAIRS.returned_by(answer, *case)],
            otherwise=_mistake_in_calls,
            said=_sent_and_said,
        )
        steps += len(recorded)
    return f"{steps} steps on 1, 2 and 3 real ranks make these calls, in this order"


def _drawn_case(rng: random.Random) -> Case:
    count = rng.randint(2, 6)
    numels, frozen = [rng.randint(1, 400) for _ in range(count)], rng.sample(range(count), rng.randint(0, 2))
    return _case(rng.choice(("sorted_greedy", "even")), numels, rng.randint(2, 3), frozen)


def _record(cases: Sequence[Case]) -> list[Pairs]:
    """On a rank: record the broadcasts of the package's step in each case, first one by one, then flat."""
    recorded = []
    for case in cases:
        for flat in (False, True):
            params = [
                nn.Parameter(torch.ones(numel), requires_grad=trained)
                for numel, trained in zip(case.partition.numels, case.trainable)
            ]
            optimizer = ZeroRedundancyOptimizer(
                params,
                torch.optim.SGD,
                None,
                flat,
                partition=case.partition,
                broadcast_buffer_size=0,
                lr=0.1,
            )
            for param in params:
                param.grad = torch.ones_like(param)
            with recording(optimizer.collectives) as sent:
                optimizer.step()
            recorded.append([(call.peer, call.nbytes) for call in sent if call.op == "broadcast"])
    return recorded


def _sent_and_said(
    theirs: Pairs, recorded: Pairs, partition: Partition, trainable: list[bool], flat: bool
) -> str:
    def in_words(piece: Slice) -> str:
        return f"{piece.numel}" if trainable[piece.param] else f"{piece.numel} (frozen)"

    owned = [f"[{', '.join(map(in_words, slices))}]" for slices in partition.slices_of_rank]
    return (
        f"the ranks own {', '.join(owned)} elements and flat={flat}: the step sends {recorded}, and not "
        f"{theirs}."
    )


def _mistake_in_calls(
    theirs: Pairs, recorded: Pairs, partition: Partition, trainable: list[bool], flat: bool
) -> str:
    case = Case(partition, trainable)
    return named(
        {
            "One rank has nobody to send to.": partition.world_size == 1,
            **{mistake: theirs == rule(case, flat) for mistake, rule in _WRONG_RULES.items()},
            "A message without bytes is not sent.": [pair for pair in theirs if pair[1]] == recorded,
            "These are the right messages in another order: rank 0 sends first, then rank 1, and so on.": (
                sorted(theirs) == sorted(recorded)
            ),
            f"That is {len(theirs)} messages instead of {len(recorded)}.": len(theirs) != len(recorded),
        },
        "Each is (rank that sends, bytes).",
    )


def _sent(case: Case, flat: bool, itemsize: int = 4, frozen_too: bool = False, round_to: int = 1) -> Pairs:
    """The broadcasts by a rule that may be wrong."""
    sent = []
    for rank, slices in enumerate(case.partition.slices_of_rank):
        numels = [piece.numel for piece in slices if frozen_too or case.trainable[piece.param]]
        for numel in [sum(numels)] if flat else numels:
            if numel:
                sent.append((rank, -(-numel // round_to) * round_to * itemsize))
    return sent


_WRONG_RULES: dict[str, Callable[[Case, bool], Pairs]] = {
    "Those are elements. A message has bytes: a float32 takes 4.": lambda case, flat: _sent(case, flat, 1),
    "A frozen parameter does not change, so nobody sends it.": lambda case, flat: _sent(
        case, flat, frozen_too=True
    ),
    "Padding is not sent: a message ends where the owner's last parameter does.": lambda case, flat: _sent(
        case, flat, round_to=16
    ),
    "With flat=True what a rank owns lies together, and goes out as one message.": lambda case, flat: _sent(
        case, False
    ),
    "With flat=False each slice is a message of its own.": lambda case, flat: _sent(case, True),
    "The broadcasts go owner by owner: all of rank 0's, then all of rank 1's. These are in the order of the "
    "model.": lambda case, flat: [
        (rank, 4 * piece.numel)
        for pieces in case.partition.pieces_of_param
        for piece, rank in pieces
        if piece.numel and case.trainable[piece.param]
    ],
}
"""Wrong rules that a reader may have written, by the message about each."""


# --------------------------------------------------------------------------------------- predictions


@prediction(
    "buckets.written",
    "Rank 0's message is overwritten with sevens: which parameters of the model are sevens then?",
    choices=("none", "W1 alone", "W1 and b2", "all four"),
)
def _written() -> str:
    owned = sorted_greedy([12, 4, 8, 2], world_size=2).slices_of_rank[0]
    return " and ".join(("W1", "b1", "W2", "b2")[piece.param] for piece in owned)


@prediction(
    "buckets.flat",
    "The deep model, even split, flat, four ranks: how many broadcasts does a step make?",
    unit="broadcasts",
)
def _broadcasts_of_even() -> float:
    specs = _deep()
    return len(broadcasts_of_buckets(lay_out(even([spec.numel for spec in specs], 4), specs)))


@prediction(
    "buckets.reductions",
    "The deep model under DDP: how many all-reduces does an iteration make?",
    unit="all-reduces",
)
def _all_reduces() -> float:
    return len(ddp_buckets(_deep()))


def _deep() -> list[ParamSpec]:
    """The chapter's model: 24 layers, 64 wide."""
    return from_module(GPT(GPTConfig(layers=24, heads=2, width=64)))
