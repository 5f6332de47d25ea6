"""Chapter 4's graders: a step in slices on real ranks, and a broadcast that is lost."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zero_ref.comm.collectives import Collectives
from zero_ref.lab import virtual
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.calls import Call
from zero_ref.plan.partition import Partition, Slice
from zero_ref.plan.rules import even, from_lists, sorted_greedy
from zero_ref.simulator.traffic import traffic
from zero_ref_course import Answer, exercise, in_words, shown
from zero_ref_course._company import Company, on_ranks
from zero_ref_course.predictions import prediction

# ---------------------------------------------------------------------------------- a step on slices

STEPS = 2
"""Two steps, because after one a slice sent too early looks like one that was never sent."""

SHAPES = [(16, 24), (24,), (24, 8), (8,)]
NUMELS = [384, 24, 192, 8]

WORLDS: list[Partition] = [
    even(NUMELS, 2),
    from_lists(NUMELS, [[Slice(0, 192, 384), 3], [Slice(0, 0, 192), 1, 2]]),
    even(NUMELS, 3),
    from_lists(NUMELS, [[Slice(0, 0, 320)], [], [Slice(0, 320, 384), 1, 2, 3]]),
    even(NUMELS, 1),
]
"""Cut inside a parameter; the end of one before its beginning; on three ranks; an idle rank; one rank."""

Ages = list[int | None]
"""For each slice the number of steps that it is behind the plain optimizer; None if that never had it."""


BROADCAST_ALL = (
    "Every rank calls the broadcast of every slice, in the same order, also of those that it does not own: "
    "there it receives."
)


class AfterStep(NamedTuple):
    """The ages of a rank's slices after a step, its calls, and those that it has not waited for."""

    ages: Ages
    calls: list[Call]
    under_way: list[str]


@exercise("step.step_in_slices", seconds=20.0, may_return_none=True, on_ranks=True, function="step")
def step_in_slices(answer: Answer) -> str:
    """Check two steps of a sharded optimizer on 1, 2 and 3 ranks; slices must be equal bit for bit."""
    for partition in WORLDS + answer.drawn(_drawn_world, 2):
        of_ranks = on_ranks(_train_beside_plain, partition.world_size, answer, partition)
        steps = list(zip(*of_ranks, strict=True))
        for step in steps:
            _check_waited([after.under_way for after in step])
            _check_sizes([after.calls for after in step], partition)
        owners, slices = zip(*_sent_by(partition), strict=True)
        for number, step in enumerate(steps, start=1):
            _check_ages([after.ages for after in step], owners, number, slices)
        for step in steps:
            _check_only_broadcasts([[call.op for call in after.calls] for after in step])
    return f"{STEPS} steps on 1, 2 and 3 real ranks are the plain optimizer's, bit for bit"


def _drawn_world(rng: random.Random) -> Partition:
    return rng.choice((sorted_greedy, even))(NUMELS, rng.randint(2, 3))


def _sent_by(partition: Partition) -> list[tuple[int, Slice]]:
    """The slices with their owners, in the order in which a step sends them."""
    return [(owner, piece) for owner, slices in enumerate(partition.slices_of_rank) for piece in slices]


def _train_beside_plain(answer: Answer, partition: Partition) -> list[AfterStep]:
    """On a rank: step with the answer and with a plain optimizer, from the same start and gradients."""
    company = Company(advice=BROADCAST_ALL)
    generator = torch.Generator().manual_seed(answer.seed)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    twins = [torch.nn.Parameter(param.detach().clone()) for param in params]
    sent = _sent_by(partition)
    owned = partition.slices_of_rank[dist.get_rank()]
    pieces = [torch.nn.Parameter(_window(params, piece)) for piece in owned]
    local = torch.optim.Adam([{"params": pieces}], lr=0.1)
    plain = torch.optim.Adam(twins, lr=0.1)
    values_of_slices = [[_window(twins, piece).clone()] for _, piece in sent]  # the newest first
    steps = []
    for _ in range(STEPS):
        for param, twin in zip(params, twins):
            twin.grad = torch.randn(twin.shape, generator=generator)
            param.grad = twin.grad.clone()
        arguments = (local, pieces, params, partition)
        with company.watching(), in_words("local, pieces, params, partition", answer, *arguments):
            answer(*arguments)
        plain.step()
        for (_, piece), values in zip(sent, values_of_slices):
            values.insert(0, _window(twins, piece).clone())
        ages = [_age(_window(params, piece), values) for (_, piece), values in zip(sent, values_of_slices)]
        steps.append(AfterStep(ages, company.calls, list(company.under_way.values())))
    return steps


def _window(params: Sequence[torch.Tensor], piece: Slice) -> torch.Tensor:
    return params[piece.param].detach().view(-1)[piece.start : piece.stop]


def _age(param: torch.Tensor, newest_first: Sequence[torch.Tensor]) -> int | None:
    return next((age for age, value in enumerate(newest_first) if torch.equal(param, value)), None)


def _check_waited(under_way_of_rank: Sequence[list[str]]) -> None:
    """Check that every call was waited for: on a slower network its values would not have arrived."""
    for rank, under_way in enumerate(under_way_of_rank):
        for started in under_way:
            raise AssertionError(
                f"on rank {rank}, {started} (counted from 0) was started with async_op=True and never waited "
                "for: when `step` returns, its value need not have arrived. Call .wait() on what "
                f"{started.split()[0]} returned, or leave async_op out."
            )


def _check_sizes(calls_of_rank: Sequence[list[Call]], partition: Partition) -> None:
    slices = {4 * piece.numel for _, piece in _sent_by(partition)}
    wholes = {4 * numel for numel in partition.numels} - slices
    for rank, calls in enumerate(calls_of_rank):
        for call in calls:
            assert call.op != "broadcast" or call.nbytes not in wholes, (
                f"rank {rank} broadcasts {call.nbytes} bytes, a whole parameter that has several owners. "
                "Each owner has stepped its own slice alone, and would overwrite the others' with old "
                "values: broadcast slices."
            )


def _check_only_broadcasts(names_of_rank: Sequence[list[str]]) -> None:
    names = set().union(*names_of_rank)
    assert names or len(names_of_rank) == 1, (
        "The values are right, and no rank has sent any: each has updated what it does not own, with an "
        "optimizer beside `local`. Then nothing is sharded. Step `local`, and broadcast."
    )
    others = " and ".join(sorted(names - {"broadcast"}))
    twice = ", which moves each value twice as often as needed (chapter 2)" if others == "all_reduce" else ""
    assert not others or "broadcast" in names, (
        f"The values are right, but they came by {others}{twice}. Use one broadcast for each slice."
    )
    assert not others, (
        f"The values are right, but besides broadcast the step calls {others}{twice}. The gradients are "
        "averaged already, and one broadcast for each slice is all that it needs."
    )


def _check_ages(
    ages_of_rank: Sequence[Ages], owners: Sequence[int], step: int, slices: Sequence[Slice] | None = None
) -> None:
    """Raise if the ages after a step are wrong; the message tells from them what went wrong in the step.

    Args:
        ages_of_rank: for each rank the ages of all parameters, or of slices.
        owners: the owner of each parameter or slice.
        slices: the slices; None for whole parameters.
    """
    stepped = any(age == 0 for ages in ages_of_rank for age in ages)
    each = "parameter" if slices is None else "slice"
    for place, owner in enumerate(owners):
        ages = [of_rank[place] for of_rank in ages_of_rank]
        others = ages[:owner] + ages[owner + 1 :]
        late = next((rank for rank, age in enumerate(ages) if age != 0), None)
        if late is None:
            continue
        if step < STEPS and ages[owner] == 0 and None not in ages and all(others):
            continue  # sent too early, or never: the next step tells
        where = f"after step {step} on {len(ages)} ranks, parameter {place}, which rank {owner} owns,"
        if slices is not None:
            piece = slices[place]
            where = (
                f"after step {step} on {len(ages)} ranks, the slice {piece.start}:{piece.stop} of parameter "
                f"{piece.param}, which rank {owner} owns,"
            )
        assert None not in ages, (
            f"{where} has on rank {ages.index(None)} a value that the plain optimizer never gave it. Either "
            "the owner's value was added to the others' or averaged with them, where it should replace them, "
            "or the update was another: gradients are averaged already, and the optimizer to step is `local`."
            + (
                ""
                if slices is None
                else " The gradient of a piece is the same range, start to stop, of its parameter's gradient."
            )
        )
        assert stepped, f"{where} is old everywhere, as are all others. Was local.step() called" + (
            "?" if slices is None else ", after each of `pieces` had got its gradient in .grad?"
        )
        assert ages[owner] == 0, (
            f"{where} is old even there: another rank's old value was written over the new one. Each "
            f"{each} is sent by its own owner."
        )
        assert step == 1 or set(others) != {1}, (
            f"{where} is one step behind on the other ranks: it was sent before it was updated. "
            "Step first, then send."
        )
        window = "param.detach()" if slices is None else "param.detach().view(-1)[start:stop]"
        raise AssertionError(
            f"{where} is old on rank {late}: the new value did not arrive there. Every rank calls the "
            f"broadcast of every {each}, its owner to send and all others to receive. If all of them were "
            "called: was it the parameter's own memory? A clone, or its gradient, leaves the parameter as it "
            f"was. Pass {window}."
        )


# ------------------------------------------------------------------------------------- a broadcast is lost

PARTITIONS: list[Partition] = [
    sorted_greedy([12, 3, 6, 2], 3),
    sorted_greedy([2, 6, 3, 12], 2),
    from_lists([3, 3, 3], [[2], [], [0, 1]]),
    sorted_greedy([5, 4], 4),
    even([192, 64, 128], 3),
]
"""Partitions in registration order and not; with ranks that own nothing; with a parameter of two owners."""


@exercise("step.stale")
def stale(answer: Answer) -> str:
    """Check which parameters are old on each rank after a step that lost one broadcast."""
    tried, wrong = 0, list[tuple[str, list[str]]]()
    for partition in PARTITIONS + answer.drawn(_drawn_partition, 4):
        owned = [[piece.param for piece in slices] for slices in partition.slices_of_rank]
        sent = [(rank, param) for rank, params in enumerate(owned) for param in params]
        for lost in range(len(sent)):
            theirs = _lists(answer, partition, lost)
            truth = virtual.run(_stale_on_this_rank, partition.world_size, partition, lost)
            if theirs != truth:
                said = (
                    f"{len(owned)} ranks own the parameters {owned}, and broadcast {lost} is lost. The "
                    f"optimizer leaves {truth} old; {answer.name} says {theirs}."
                )
                wrong.append((said, _mistakes_in_stale(theirs, sent, lost)))
            tried += 1
    if wrong:
        # A broadcast that has its parameter's number may show half of a mistake: of all, say the most.
        said, mistakes = max(wrong, key=lambda one: len(one[1]))
        raise AssertionError(" ".join([said, *mistakes]))
    return f"{tried} lost broadcasts, each tried on the package's optimizer"


def _drawn_partition(rng: random.Random) -> Partition:
    numels = [64 * rng.randint(1, 9) for _ in range(rng.randint(2, 6))]
    return rng.choice((sorted_greedy, even))(numels, rng.randint(2, 4))


def _stale_on_this_rank(comm: Collectives, partition: Partition, lost: int) -> list[int]:
    """On a virtual rank: the parameters that differ from those of a step without loss."""
    params = [torch.nn.Parameter(torch.zeros(numel)) for numel in partition.numels]
    optimizer = ZeroRedundancyOptimizer(
        params, torch.optim.SGD, comm, partition=partition, broadcast_buffer_size=0, lr=1.0
    )
    for param in params:
        param.grad = -torch.ones_like(param)
    broadcast, number = comm.broadcast, itertools.count()

    def losing_one(tensor: torch.Tensor, src: int, expected: Any = None) -> Any:
        # The lost one still takes place, for the others' sake: what arrives is thrown away.
        return broadcast(tensor.clone() if next(number) == lost else tensor, src)

    comm.broadcast = losing_one  # type: ignore[method-assign]
    optimizer.step()
    return [index for index, param in enumerate(params) if not torch.equal(param, torch.ones_like(param))]


def _lists(answer: Answer, partition: Partition, lost: int) -> list[list[int]]:
    """Return the answer's value, once it is a list of parameters for each rank."""
    returned = answer(partition, lost)
    are_lists = isinstance(returned, (list, tuple)) and all(
        isinstance(of_rank, (list, tuple, set)) for of_rank in returned
    )
    assert are_lists, (
        f"{answer.name} returned {shown(returned)}. It must return one list of parameters for each rank, "
        "empty where nothing is old."
    )
    assert len(returned) == partition.world_size, (
        f"{answer.name} returned {len(returned)} lists for {partition.world_size} ranks. A rank that owns "
        "nothing receives too, so it has a list as well."
    )
    return [sorted(of_rank) for of_rank in returned]


def _mistakes_in_stale(theirs: list[list[int]], sent: Sequence[tuple[int, int]], lost: int) -> list[str]:
    """Describe the mistakes in which parameter is old, and in which ranks have it."""
    owner, param = sent[lost]
    if any(len(of_rank) > 1 for of_rank in theirs):
        return ["Each broadcast carries one slice; the others arrived."]
    found, holders = set().union(*theirs), [rank for rank, of_rank in enumerate(theirs) if of_rank]
    mistakes = []
    if found == {lost} != {param}:
        mistakes.append(
            f"Broadcast {lost} is not that of parameter {lost}: the ranks' parameters go out owner by owner, "
            f"rank 0's first. This one is parameter {param}, from rank {owner}."
        )
    if len(holders) == len(theirs):
        mistakes.append(f"Rank {owner} owns parameter {param} and has stepped it: it needs no broadcast.")
    elif holders in ([rank] for rank, each in sent if each in found):
        mistakes.append(f"Rank {holders[0]} has the new value: it made it. Old are those that waited for it.")
    return mistakes or [f"It was parameter {param}, sent by rank {owner}, that did not arrive at the others."]


# ------------------------------------------------------------------------------------------ predictions


@prediction(
    "step.wire",
    "How many bytes do all three ranks together send in an iteration of this model?",
    unit="bytes",
)
def _on_the_wire() -> float:
    return sum(traffic(op, 4 * 23, 3).total_bytes for op in ("all_reduce", "broadcast"))


@prediction(
    "step.missing",
    "One broadcast of the first of four steps is missing: how do the ranks end?",
    choices=("they disagree", "they agree, and are wrong", "they agree, and are right"),
)
def _after_a_missing_broadcast() -> str:
    """Train a parameter on its owner, and on another rank that misses the first broadcast; compare them."""
    held, sound = [0.0, 0.0], 0.0
    for step in range(4):
        held[0] -= 0.1 * (sum(held) / 2 - 1)  # the owner's update, by the averaged gradient
        sound -= 0.1 * (sound - 1)
        held[1] = held[1] if step == 0 else held[0]
    if held[0] != held[1]:
        return "they disagree"
    return "they agree, and are right" if held[0] == sound else "they agree, and are wrong"
