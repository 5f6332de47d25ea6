"""On each rank: the rungs to_owners and in_backward of the reader's own file, as hooks of DDP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zero_ref.course._beside import STEPS, Beside, Shapes
from zero_ref.course._company import alike, gathered
from zero_ref.lab.own import CLASS


class Given(nn.Module):
    """A model whose gradients are given: those of its parameters are the coefficients."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.params = nn.ParameterList(params)

    def forward(self, coefficients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Scalar."""
        return torch.stack([(p * c).sum() for p, c in zip(self.params, coefficients)]).sum()


def under_ddp(beside: Beside, hook: Callable[[Any, Any], Any], **options: Any) -> DistributedDataParallel:
    """The reader's parameters in DDP, in buckets of about a hundred bytes, with the reader's hook."""
    ddp = DistributedDataParallel(Given(beside.params), bucket_cap_mb=100 / 2**20)
    ddp.register_comm_hook(None, beside.company.hook(hook))
    return ddp


def backward(beside: Beside, ddp: DistributedDataParallel, step: int, name: str) -> None:
    """Forward and backward on this rank's gradients."""
    for param in beside.params:
        param.grad = None
    loss = ddp(beside.gradients(step, beside.rank))
    with beside.company.running(f"backward, with {CLASS}.{name} as DDP's hook,"):
        loss.backward()


def to_owners(path: str, shapes: Shapes) -> None:
    """Averages on owners, no all-reduce, and nothing kept of what others own."""
    beside = Beside(path, shapes)
    beside.needs("step", "reduce_to_owners")
    ddp = under_ddp(beside, beside.mine.reduce_to_owners)
    for number in range(STEPS):
        backward(beside, ddp, number, "reduce_to_owners")
        names = sorted(set(beside.company.book.names))
        found = [
            _gradient_of(param.grad, beside, number, i)
            for i, param in enumerate(beside.params)
            if beside.owners[i] == beside.rank
        ]
        with alike():
            for rank, of_rank in enumerate(gathered([each for each in found if each])):
                assert not of_rank, f"after backward {number + 1}, on rank {rank}, {of_rank[0]}"
            assert not {"all_reduce", "all_gather"} & set(names), (
                f"the averages are right, but they came by {' and '.join(names)}, which takes every gradient "
                "to every rank. dist.reduce(gradient, group_dst=owner) takes it to its owner alone."
            )
            assert names, (
                "the hook calls nothing of torch.distributed, and the gradients are right all the same?"
            )
        with beside.company.running(f"{CLASS}.step()"):
            beside.mine.step()
        beside.step_package(number)
        beside.compare(number)
    _check_released(beside)


def _gradient_of(gradient: torch.Tensor | None, beside: Beside, step: int, number: int) -> str:
    """What is wrong with an owner's gradient; nothing if it is the average."""
    of_ranks = [beside.gradients(step, rank)[number] for rank in range(beside.world_size)]
    total = torch.stack(of_ranks).sum(0)
    if gradient is not None and torch.equal(gradient, total / beside.world_size):
        return ""
    what = f"the gradient of parameter {number}, which it owns, is"
    if gradient is None:
        return f"{what} None."
    if torch.equal(gradient, total):
        return f"{what} the sum over the ranks, not the average: divide by the number of ranks."
    if torch.equal(gradient, total / beside.world_size**2):
        return f"{what} divided by the number of ranks twice."
    own = of_ranks[beside.rank]
    if torch.equal(gradient, own) or torch.equal(gradient, own / beside.world_size):
        return f"{what} made of this rank's own alone. The ranks' gradients have to be added up on the owner."
    return f"{what} not the average over the ranks."


def _check_released(beside: Beside) -> None:
    kept = gathered([i for i, p in enumerate(beside.params) if p.grad is not None])
    with alike():
        for rank, numbers in enumerate(kept):
            others = [i for i in numbers if beside.owners[i] != rank]
            assert not others, (
                f"the values are right, but after step() rank {rank} still holds gradients of the parameters "
                f"{others}, which others own. Set their .grad to None in step: DDP puts them there after the "
                "hook."
            )


def in_backward(path: str, shapes: Shapes) -> int:
    """Updates made while backward runs, from the first iteration on; gives the number of buckets."""
    beside = Beside(path, shapes)
    beside.needs("step", "update_in_backward")
    marks: list[bool] = []  # whether a reduction was under way as each hook returned
    began: list[int] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]
        began.append(len(beside.company.calls))
        future = beside.mine.update_in_backward(state, bucket)
        marks.append(any(not each.startswith("broadcast") for each in beside.company.book.under_way.values()))
        return future

    ddp = under_ddp(beside, hook)
    for number in range(STEPS):
        marks.clear()
        began.clear()
        backward(beside, ddp, number, "update_in_backward")
        calls = list(beside.company.calls)
        beside.step_package(number)
        before_step = beside.ages()
        state = {i: int(of["step"]) for i, of in beside.state().items() if "step" in of}
        with beside.company.running(f"{CLASS}.step()"):
            beside.mine.step()
        counted = gathered((state, {i: int(of["step"]) for i, of in beside.state().items() if "step" in of}))
        with alike():
            for rank, (first, second) in enumerate(counted):
                assert first == second or not all(first.values()) or not first, (
                    f"on rank {rank} backward {number + 1} made the update, and step() made another. It has "
                    "nothing left to do then: remember in the hook that it is done, and forget it in step()."
                )
                for i, count in first.items():
                    assert count <= number + 1, (
                        f"on rank {rank} parameter {i} was updated {count} times in {number + 1} iterations: "
                        "local.step() updates whatever has a gradient, also of buckets that are not reduced "
                        "yet. Give it the gradients of one bucket and no others."
                    )
            old = {age for of_rank in before_step for age in of_rank}
            assert old != {1}, (
                f"when backward {number + 1} returned, nothing was updated yet: all was left to step()."
            )
        beside.compare(number, last=0)
        with alike():
            assert old == {0}, (
                f"when backward {number + 1} returned, some parameters were still old, and step() brought "
                "them. After the last bucket finish that one too, and wait for all that was sent."
            )
    beside.step_mine(STEPS)  # gradients that no hook has seen
    beside.step_package(STEPS)
    ages = beside.ages()
    with alike():
        assert all(age == 0 for of_rank in ages for age in of_rank), (
            "a step() whose gradients no hook has seen does not make their update. What the hook leaves word "
            "of is true for one iteration: forget it in step()."
        )
    ops = [call.op for call in calls]
    with alike():
        assert len(began) > 2, "DDP made too few buckets to see anything"  # ours
        hidden = any(op == "broadcast" for op in ops[: began[-1]])
        assert hidden, (
            "the values are right, but the first broadcast comes after the last bucket: nothing of it can "
            "hide behind backward. When a bucket comes, finish the one before it."
        )
        assert all(marks[:-1]), (
            "the values are right, but the hook returns with no reduction under way, so backward stood still "
            "meanwhile. Start the new bucket's reduction with async_op=True, and wait for it when the next "
            "bucket comes."
        )
    _check_released(beside)
    return len(began)
