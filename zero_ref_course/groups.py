"""Graders of the chapter on groups: a step that asks all ranks first, the calls after freezing."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from zero_ref.comm.backend import as_collectives
from zero_ref.comm.collectives import Collectives
from zero_ref.lab.config import GPTConfig
from zero_ref.lab.meter import recording
from zero_ref.lab.model import GPT
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.calls import Call
from zero_ref.plan.choice import plan_partition
from zero_ref.plan.partition import ParamSpec, Partition
from zero_ref.plan.rules import sorted_greedy
from zero_ref.simulator.ledger import state_bytes_of_rank
from zero_ref.simulator.messages import broadcasts_of_slices
from zero_ref.simulator.models import from_module
from zero_ref_course import Answer, ExerciseFailed, exercise, in_words, shown
from zero_ref_course._cases import Form, is_whole, list_of
from zero_ref_course._company import on_ranks, on_virtual_ranks
from zero_ref_course.predictions import prediction

# ---------------------------------------------------------------------- a step that asks what is trained

FlagsOfRanks = list[list[bool]]
"""Whether each parameter is trained, for each rank."""

SHAPES = [(4, 3), (3,), (3, 2), (2,)]
OWNERS = [0, 1, 1, 0]

FLAGS: list[FlagsOfRanks] = [
    [[True, True, False, True]] * 2,
    [[True, True, True, True], [True, True, False, True]],
    [[False, True, True, False]] * 3,
    [[True, False, True, True], [True, False, True, True], [False, False, True, False]],
    [[True, True, True, True], [False, True, True, True], [True, True, True, True]],
    [[False, False, False, False]] * 2,
    [[True, False, True, False]],
]
"""Flags that are alike on all ranks, or not; that differ on rank 2 or rank 1 alone; nothing is trained."""


class AfterStep(NamedTuple):
    """The value that a rank returned, its parameters before and after the step, and its calls."""

    returned: Any
    before: list[torch.Tensor]
    after: list[torch.Tensor]
    calls: list[Call]


@exercise("groups.agreed_step", seconds=20.0, on_ranks=True)
def agreed_step(answer: Answer) -> str:
    """Check a step of the trained parameters on virtual ranks that agree, or do not, then on real ones."""
    for flags in FLAGS + answer.drawn(_drawn_flags):
        of_ranks = on_virtual_ranks(
            _step_with_flags,
            len(flags),
            answer,
            flags,
            waiting=lambda why, flags=flags: (  # type: ignore[misc]
                f"with {_flags_in_words(flags)}, ranks wait for each other: {why} Compare the flags of all "
                "ranks before anything is sent, on every rank, and send only what all of them train."
            ),
        )
        _check_agreed(answer, flags, of_ranks)
    for flags in FLAGS[:2]:
        _check_agreed(answer, flags, on_ranks(_step_on_real_ranks, len(flags), answer, flags))
    return f"{len(FLAGS)} cases on virtual ranks, 2 on real ones: all step, or all say what differs"


def _drawn_flags(rng: random.Random) -> FlagsOfRanks:
    first = [rng.random() < 0.7 for _ in SHAPES]
    flags = [list(first) for _ in range(rng.randint(2, 4))]
    if rng.random() < 0.5:
        rank, param = rng.randrange(len(flags)), rng.randrange(len(SHAPES))
        flags[rank][param] = not flags[rank][param]
    return flags


def _step_on_real_ranks(answer: Answer, flags: FlagsOfRanks) -> AfterStep:
    return _step_with_flags(as_collectives(None), answer, flags)


def _step_with_flags(comm: Collectives, answer: Answer, flags: FlagsOfRanks) -> AfterStep:
    generator = torch.Generator().manual_seed(answer.seed)
    owners = [owner % comm.world_size for owner in OWNERS]
    params = []
    for shape, trained in zip(SHAPES, flags[comm.rank]):
        params.append(nn.Parameter(torch.randn(shape, generator=generator), trained))
        if trained:
            params[-1].grad = torch.ones(shape)
    owned = [param for param, owner in zip(params, owners) if owner == comm.rank]
    local = torch.optim.SGD([{"params": owned}], lr=0.5)
    before = [param.detach().clone() for param in params]
    arguments = (local, params, owners, comm)
    with recording(comm) as calls, in_words(f"local, params, {owners}, comm", answer, *arguments):
        returned = answer(*arguments)
    return AfterStep(returned, before, [param.detach().clone() for param in params], calls)


def _flags_in_words(flags: FlagsOfRanks) -> str:
    frozen = [[number for number, trained in enumerate(of_rank) if not trained] for of_rank in flags]
    if all(of_rank == frozen[0] for of_rank in frozen):
        return f"the parameters {frozen[0]} frozen on all {len(flags)} ranks"
    return ", ".join(f"{of_rank} frozen on rank {rank}" for rank, of_rank in enumerate(frozen))


def _check_agreed(answer: Answer, flags: FlagsOfRanks, of_ranks: Sequence[AfterStep]) -> None:
    where = f"with {_flags_in_words(flags)}, "
    differ = [number for number, of_param in enumerate(zip(*flags)) if len(set(of_param)) > 1]
    for rank, found in enumerate(of_ranks):
        assert list_of(is_whole)(found.returned), (
            f"{where}{answer.name} returned {shown(found.returned)} on rank {rank}. It must return a list of "
            "numbers of parameters, empty after a step."
        )
    said = [sorted(found.returned) for found in of_ranks]
    if said != [differ] * len(said):
        why = (
            "A rank that looks only at rank 0 and itself does not see what others do."
            if any(said) and len(set(map(tuple, said))) > 1
            else "All ranks must name the parameters that are frozen on some ranks and trained on others."
        )
        raise AssertionError(
            f"{where}{answer.name} returns {said}, rank by rank; it should be {differ}. {why}"
        )
    for rank, found in enumerate(of_ranks):
        _check_values(where, rank, found, flags[rank], bool(differ))
        sent = [call.nbytes for call in found.calls if call.op == "broadcast"]
        numels = [math.prod(shape) for shape in SHAPES]
        trained = [4 * numel for numel, flag in zip(numels, flags[rank]) if flag and not differ]
        assert sorted(sent) == sorted(trained), (
            f"{where}rank {rank} takes part in broadcasts of {sent} bytes; {trained} are enough. A frozen "
            "parameter does not change, so nobody sends it."
        )
        others = [call.op for call in found.calls if call.op != "broadcast"]
        assert len(others) <= 1, (
            f"{where}rank {rank} makes {len(others)} calls to compare the flags. A call waits for all ranks: "
            "put the flags of all parameters into one tensor, and make one."
        )


def _check_values(where: str, rank: int, found: AfterStep, flags: Sequence[bool], differ: bool) -> None:
    for number, (before, after, trained) in enumerate(zip(found.before, found.after, flags)):
        right = before - 0.5 if trained and not differ else before
        if torch.equal(after, right):
            continue
        changed = not torch.equal(after, before)
        assert not (differ and changed), (
            f"{where}parameter {number} of rank {rank} has changed, although the ranks disagree. Compare "
            "first, then step: whoever catches the mistake goes on from where all ranks were equal."
        )
        assert changed, (
            f"{where}parameter {number} of rank {rank} is not what the plain step makes of it: it has its "
            "old values. Step `local`, and broadcast what is trained from its owner."
        )
        raise ExerciseFailed(
            f"{where}parameter {number} of rank {rank} is neither as before nor as after the plain step."
        )


# ---------------------------------------------------------------------------- the calls of a frozen model

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
"""The trained parameters in each step: one frozen for a while, some from the start, all, in turn."""

CALLS = Form(
    list_of(list_of(list_of(lambda _: True, 2))),
    'It must return a list for each step, of pairs such as ("broadcast", 48).',
)


@exercise("groups.calls_of_steps", on_ranks=True)
def calls_of_steps(answer: Answer) -> str:
    """Check the calls of steps between which parameters are frozen, against those that real ranks record."""
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
    """On a rank: record the calls of the package's steps while parameters are frozen and thawed."""
    recorded = []
    for flags in timelines:
        params = [nn.Parameter(torch.ones(n), requires_grad=f) for n, f in zip(partition.numels, flags[0])]
        optimizer = ZeroRedundancyOptimizer(
            params, torch.optim.SGD, partition=partition, broadcast_buffer_size=0, lr=0.1
        )
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
    """Return the answer's value, once it is a list of (operation, bytes) for each step."""
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
    """The parameters of the chapter's model whose names begin with one of these."""
    model = GPT(GPTConfig(layers=2, heads=2, width=32, context=32))
    return [spec for spec in from_module(model) if spec.name.startswith(names)]
