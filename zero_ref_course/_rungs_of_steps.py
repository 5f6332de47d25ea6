"""Checks on each rank: the rungs owners, step, buckets and options of the reader's own file."""

from __future__ import annotations

import torch
import torch.distributed as dist

from zero_ref.lab.own import CLASS
from zero_ref_course import ExerciseFailed, StillTheStub, grade
from zero_ref_course._beside import LR, STEPS, Beside, Shapes
from zero_ref_course._company import Company, NotYet, OnAllRanks, alike, gathered
from zero_ref_course._own import OwnFile


def owners(path: str) -> str:
    """Check the rule of chapter 3 with the grader of that chapter's exercise."""
    company = Company(path)
    with company.running("loading the file"):
        rule = OwnFile(path).function("assign_owners")
    if rule is None:
        raise NotYet("the file has no function assign_owners(numels, world_size).")
    sizes, world_size = [6, 5, 4, 4, 1], dist.get_world_size()
    try:
        of_ranks = gathered(rule(sizes, world_size))
        with alike():
            assert all(each == of_ranks[0] for each in of_ranks), (
                f"assign_owners({sizes}, {world_size}) is not the same on all ranks: {of_ranks}. They do not "
                "talk about it, so each must find the same owners from the sizes alone."
            )
        return grade("partition.largest_first", rule)
    except StillTheStub:
        raise NotYet("assign_owners raises NotImplementedError: it is still to be written.") from None
    except ExerciseFailed as error:
        raise OnAllRanks(str(error)) from None


def step(path: str, shapes: Shapes) -> None:
    """Check that values are equal bit for bit, and that only the owner has state."""
    beside = Beside(path, shapes)
    beside.needs("step")
    for number in range(STEPS):
        beside.both(number)
    if beside.reduces:
        beside.check_owned()
        return
    state = beside.state()
    owned = [i for i, owner in enumerate(beside.owners) if owner == beside.rank]
    kept = gathered((sorted(state), owned))
    with alike():
        for rank, (has, should) in enumerate(kept):
            assert len(has) == len(should), (
                f"the values are right, but rank {rank} keeps state for {len(has)} parameters, and it owns "
                f"{len(should)} of {len(shapes)}. Give the local optimizer only what this rank owns: there "
                "the memory is saved."
            )
            assert has == should or min(has, default=0) < 0, (
                f"rank {rank} owns the parameters {should} by assign_owners, and updates {has}."
            )


def buckets(path: str, shapes: Shapes) -> tuple[int, int]:
    """Check for one message from each owner, and no copies; return the numbers of messages and parameters."""
    beside = Beside(path, shapes)
    beside.needs("step")
    of_owner: dict[int, set[int]] = {}
    for param, owner in zip(beside.params, beside.owners):
        of_owner.setdefault(owner, set()).add(param.untyped_storage().data_ptr())
    share = any(len(places) < beside.owners.count(owner) for owner, places in of_owner.items())
    beside.both(0)
    sent = sum(call.op == "broadcast" for call in beside.company.calls)
    if not share and sent >= len(shapes) > len(of_owner):
        raise NotYet(f"a step makes {sent} broadcasts, one for each parameter.")
    for number in range(1, STEPS):
        beside.both(number)
    if beside.reduces:  # what is sent, and when, is the business of later rungs
        places = {place for of_one in of_owner.values() for place in of_one}
        with alike():
            assert len(places) == 1 or all(len(of_one) == 1 for of_one in of_owner.values()), (
                f"the values are right, but parameters lie in {len(places)} places: make them views of one "
                "flat tensor for each owner, or of a single one, which is cut into equal parts."
            )
        return sent, len(shapes)
    with alike():
        names = sorted(set(beside.company.names) - {"broadcast"})
        assert not names, f"the values are right, but a step calls {' and '.join(names)} besides broadcast."
        assert sent <= len(of_owner), (
            f"the values are right, but a step makes {sent} broadcasts, and {len(of_owner)} ranks own "
            "something. Each of them can send one message: its flat tensor."
        )
        nbytes = sum(call.nbytes for call in beside.company.calls)
        needed = 4 * sum(param.numel() for param in beside.params)
        assert nbytes <= needed + 64 * len(of_owner), (
            f"a step sends {nbytes} bytes, and the parameters have {needed}. Send what each rank owns, once."
        )
        scattered = next((owner for owner, places in of_owner.items() if len(places) > 1), None)
        assert scattered is None, (
            f"the values are right, but what rank {scattered} owns lies in {len(of_owner[scattered or 0])} "
            "places, so each message is copied together and out again. Make the parameters views of the flat "
            "tensor: param.data = flat[start:stop].view(param.shape)."
        )
    return sent, len(shapes)


def options(path: str, shapes: Shapes) -> None:
    """Check that a schedule reaches the update, frozen parameters stay, and all gradients are set to None."""
    beside = Beside(path, shapes)
    beside.needs("step", "param_groups", "zero_grad")
    beside.both(0)
    for number in range(1, STEPS):
        rate = LR * 0.5**number
        with beside.company.running(f"{CLASS}.param_groups"):
            groups = list(beside.mine.param_groups)
            for group in groups:
                group["lr"] = rate
        for group in beside.package.param_groups:
            group["lr"] = rate
        with alike():
            counts = gathered(len(groups))
            assert all(counts), (
                f"param_groups is empty on rank {counts.index(0)}: an empty group has options too."
            )
        frozen = [number - 1]
        beside.step_mine(number, without=frozen)
        beside.step_package(number, without=frozen)
        ages = beside.ages()
        with alike():
            strange = any(None in of_rank for of_rank in ages)
            assert all(age == 0 for of_rank in ages for age in of_rank), (
                f"with lr {rate:g} in all of param_groups, step {number + 1} does not give the package's "
                "values. "
                + (
                    "The local optimizer has options of its own: give out its param_groups, not a copy."
                    if strange
                    else f"Parameter {frozen[0]} had no gradient (it was frozen), and must stay as it was."
                )
            )
    if not beside.reduces:
        for param in beside.params:
            param.grad = torch.ones_like(param)
    with beside.company.running(f"{CLASS}.zero_grad()"):
        beside.mine.zero_grad()
    having = beside.pieces() if beside.reduces else beside.params
    kept = gathered([i for i, p in enumerate(having) if p.grad is not None and bool(p.grad.any())])
    with alike():
        for rank, numbers in enumerate(kept):
            assert not numbers, (
                f"after zero_grad() rank {rank} still has the gradients of the parameters {numbers}. Those "
                "that others own too must go, or backward adds the next ones to them."
            )
