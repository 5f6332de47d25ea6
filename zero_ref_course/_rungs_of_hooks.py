"""Checks on each rank: the rungs of the reader's own file that are hooks of autograd."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero_ref.lab.own import CLASS
from zero_ref.shard.buckets import flat_like
from zero_ref_course._beside import BACKWARD_AND_STEP, STEPS, Beside, Shapes
from zero_ref_course._company import NotYet, alike, gathered

NO_HOOK = (
    f"Let {CLASS}.__init__ register self.reduce as a hook of each parameter: "
    "param.register_post_accumulate_grad_hook(self.reduce)."
)


BACKWARDS = 3
"""The number of backwards before each step of the rung shards."""
SLACK = 32
"""Bytes that the reader's optimizer may hold beside its share, for a few numbers."""


class ReducesMeanwhile(NotYet):
    """Gradients are reduced while backward goes on, but the update is left to step."""


def to_owners(path: str, shapes: Shapes) -> None:
    """Check that averages reach their owners, without all-reduce, and that no rank keeps other gradients."""
    beside = Beside(path, shapes)
    beside.needs("step", "reduce")
    for number in range(STEPS):
        beside.forget()
        with beside.company.running(BACKWARD_AND_STEP):
            beside.backward(number)
            names = set(beside.company.names)
            if "broadcast" not in names:
                _check_reduced(beside, [number], names)
            else:  # an update in backward has used the gradients by now
                if "all_reduce" in names and not beside.cuts():
                    raise NotYet("backward takes every average to every rank, by all_reduce.")
                _check_calls(names)
            beside.mine.step()
        beside.step_package(number)
        beside.compare(number)
    beside.check_owned()


def _check_reduced(beside: Beside, backwards: Sequence[int], names: set[str]) -> None:
    """Check that after these backwards the owners have the averages, and no rank has another gradient."""
    stepped = {id(piece) for piece in beside.pieces()}
    kept = gathered([i for i, p in enumerate(beside.params) if p.grad is not None and id(p) not in stepped])
    pieces = reversed(beside.pieces())  # in the order of backward
    found = gathered([said for piece in pieces if (said := _gradient_of(piece, beside, backwards))])
    with alike():
        assert names or not any(kept), f"backward calls nothing of torch.distributed. {NO_HOOK}"
        for rank, sentences in enumerate(found):
            assert not sentences, f"after backward {backwards[-1] + 1}, on rank {rank}, {sentences[0]}"
    _check_calls(names)
    with alike():
        for rank, numbers in enumerate(kept):
            assert not numbers, (
                f"the averages are right, but after backward rank {rank} still holds gradients of the "
                f"parameters {numbers}, whole. Set param.grad to None in the hook, when it is reduced."
            )


def _check_calls(names: set[str]) -> None:
    with alike():
        assert not {"all_reduce", "all_gather"} & names, (
            f"the averages are right, but they came by {' and '.join(sorted(names - {'broadcast'}))}, which "
            "takes every gradient to every rank. dist.reduce(piece, group_dst=owner) takes a piece to its "
            "owner alone."
        )


def _elements_of(piece: torch.Tensor, beside: Beside) -> torch.Tensor:
    """The position of each element of a piece among all elements; -1 for padding and for all of a copy."""
    numbers, first = torch.full((piece.numel(),), -1), 0
    for param in beside.params:
        offset, numel = (param.data_ptr() - piece.data_ptr()) // param.itemsize, param.numel()
        start, stop = max(offset, 0), min(offset + numel, piece.numel())
        if start < stop:
            numbers[start:stop] = torch.arange(first + start - offset, first + stop - offset)
        first += numel
    return numbers


def _gradient_of(piece: torch.Tensor, beside: Beside, backwards: Sequence[int]) -> str:
    """The error in a piece's gradient after these backwards; empty if it is the sum of averages."""
    numbers = _elements_of(piece, beside)
    # The gradient of parameter 0 comes last in backward, and may still be on its way.
    on_its_way = beside.company.under_way or piece.grad is None
    there = numbers >= (beside.params[0].numel() if on_its_way else 0)
    numbers = numbers[there]
    if not numbers.numel():
        return ""  # a copy, of which the values tell

    def flat(step: int, of_rank: int | None = None) -> torch.Tensor:
        gradients = zip(beside.gradients(step, of_rank), beside.params)
        return torch.cat([flat_like(gradient, param) for gradient, param in gradients])

    size, last = beside.world_size, flat(backwards[-1])
    right = torch.stack([flat(step) for step in backwards]).sum(0)
    own = torch.stack([flat(step, beside.rank) for step in backwards]).sum(0)
    ends = torch.tensor([param.numel() for param in beside.params]).cumsum(0)
    param = int((ends <= numbers[0]).sum())
    what = f"the gradient of what it owns of parameter {param} is"
    if piece.grad is None:
        return (
            f"{what} None. Each average has to be in .grad of what its owner steps when backward is over; "
            "only the last gradient may still be on its way, until step()."
        )
    gradient = flat_like(piece.grad, piece)[there]

    def equals(values: torch.Tensor, shift: int = 0) -> bool:
        moved = numbers + shift
        inside = (moved >= 0) & (moved < values.numel())
        return bool(inside.any()) and torch.equal(gradient[inside], values[moved[inside]])

    if equals(right):
        return ""
    if len(backwards) > 1 and equals(last):
        return f"{what} that of the last backward alone. Add each average to the gradient that is there."
    if equals(right * size):
        return f"{what} the sum over the ranks, not the average: divide by the number of ranks."
    if equals(right / size):
        return f"{what} divided by the number of ranks twice."
    if equals(right / BACKWARDS):
        return (
            f"{what} divided by the number of backwards, which should add up: a mean is the loop's business."
        )
    if equals(own) or equals(own / size):
        return f"{what} made of this rank's own alone. The ranks' gradients have to be added up on the owner."
    for other in range(size):
        if equals(right, (other - beside.rank) * beside.share):
            return f"{what} the average of elements that rank {other} owns. Take this rank's own share."
    return f"{what} not the average over the ranks."


def shards(path: str, shapes: Shapes) -> tuple[int, int]:
    """Check that after several backwards a rank holds the averages of its equal share, no other gradients.

    Returns:
        The bytes of gradients that rank 0 holds, and those of all gradients.
    """
    beside = Beside(path, shapes)
    beside.needs("step", "reduce")
    if not beside.cuts():
        raise NotYet("self.local steps whole parameters: cut them, end to end, into equal parts.")
    beside.check_equal_shares()
    held: list[int] = []
    for number in range(STEPS):
        beside.forget()
        backwards = range(BACKWARDS * number, BACKWARDS * (number + 1))
        with beside.company.running(f"{BACKWARDS} backwards and {CLASS}.step()"):
            for count, backward in enumerate(backwards, start=1):
                measured = beside.backward(backward, measures=count == 1)
                names = set(beside.company.names)
                if "broadcast" in names:
                    raise NotYet(
                        "backward makes the update, so the gradients of a second backward come too late. "
                        "Leave the update to step(): from this rung on several backwards add up."
                    )
                with alike():
                    assert names, (
                        "backward calls nothing of torch.distributed, so when it ends each rank has held all "
                        f"gradients. Reduce each of them in the hook, while backward runs. {NO_HOOK}"
                    )
                _check_reduced(beside, backwards[:count], names)
                if measured:
                    held = measured
                    _check_held(beside, held)
            beside.mine.step()
        averages = (beside.gradients(backward) for backward in backwards)
        beside.update_package([torch.stack(each).sum(0) for each in zip(*averages)])
        beside.compare(number, last=0)
    return held[-1], 4 * sum(value.numel() for value in beside.start)


def _check_held(beside: Beside, held: Sequence[int]) -> None:
    """Check that gradients hold, after each hook and after backward, a share and what is under way."""
    of_ranks = gathered((max(held[:-1], default=0), held[-1], bool(beside.company.under_way)))
    nbytes = [4 * value.numel() for value in beside.start]
    share, largest, in_all = 4 * beside.share, max(nbytes), sum(nbytes)
    with alike():
        for rank, (most, left, under_way) in enumerate(of_ranks):
            assert left <= share + nbytes[0] * under_way + SLACK, (
                f"the averages are right, but after backward rank {rank} holds {left:,} bytes of gradients, "
                f"and its share has {share:,} of {in_all:,}. A slice keeps the memory of the whole gradient: "
                "keep gradient[start:stop].clone(), and nothing else."
            )
            assert most <= share + 2 * largest + SLACK, (
                f"the averages are right, but in the middle of backward rank {rank} holds {most:,} bytes of "
                f"gradients, and its share has {share:,} of {in_all:,}. Reduce each gradient when the hook "
                "is called with it, and release it: later is too late."
            )


def in_backward(path: str, shapes: Shapes) -> int:
    """Check that backward makes the updates, from the first iteration on; return the number of parameters.

    Raises:
        ReducesMeanwhile: backward does all but the update.
    """
    beside = Beside(path, shapes)
    beside.needs("step", "reduce")
    marks: list[bool] = []  # whether a reduction was under way as each hook returned

    def after_the_hook() -> None:
        marks.append(any(not each.startswith("broadcast") for each in beside.company.under_way.values()))

    beside.own.after_hook = after_the_hook
    for number in range(STEPS):
        marks.clear()
        beside.forget()
        with beside.company.running(BACKWARD_AND_STEP):
            beside.backward(number)
            if "broadcast" not in beside.company.names:
                said = "backward makes no broadcast: the update is left to step()."
                raise ReducesMeanwhile(said) if marks and all(marks[:-1]) else NotYet(said)
            beside.mine.step()
        beside.step_package(number)
        steps = gathered([int(state["step"]) for state in beside.local.state.values() if "step" in state])
        with alike():
            count = max((count for of_rank in steps for count in of_rank), default=0)
            assert count <= number + 1, (
                f"a piece was updated {count} times in {number + 1} iterations: local.step() updates all "
                "that has a gradient. Give it the gradient of one parameter, and set it to None when used."
            )
        beside.compare(number, last=0)
        with alike():
            assert all(marks[:-1]), (
                "the values are right, but the hook returns with no reduction under way, so backward stood "
                "still meanwhile. Start the reduction with async_op=True, and wait for it when the next "
                "gradient is complete."
            )
    beside.check_owned()
    return len(marks)
