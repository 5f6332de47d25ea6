"""On each rank: the rungs to_owners and in_backward of the reader's own file, as hooks of autograd."""

from __future__ import annotations

import torch

from zero_ref.lab.own import CLASS
from zero_ref.shard.buckets import flat_like
from zero_ref_course._beside import BACKWARD_AND_STEP, STEPS, Beside, Own, Shapes
from zero_ref_course._company import NotYet, alike, gathered


def to_owners(path: Own, shapes: Shapes) -> None:
    """Averages on owners, equal shares, no all-reduce, and no gradient kept of what others own."""
    beside = Beside(path, shapes)
    beside.needs("step", "reduce")
    for number in range(STEPS):
        beside.forget()
        with beside.company.running(BACKWARD_AND_STEP):
            beside.backward(number)
            names = set(beside.company.names)
            if "broadcast" not in names:  # an update in backward has used the gradients by now
                _check_reduced(beside, number, names)
            beside.mine.step()
        beside.step_package(number)
        beside.compare(number)
    beside.check_equal_shares()


def _check_reduced(beside: Beside, step: int, names: set[str]) -> None:
    """After a backward: the averages are with their owners, and nothing else is anywhere."""
    kept = gathered([number for number, param in enumerate(beside.params) if param.grad is not None])
    found = gathered([said for piece in beside.pieces() if (said := _gradient_of(piece, beside, step))])
    with alike():
        assert names or not any(kept), (
            f"backward calls nothing of torch.distributed. Let {CLASS}.__init__ register self.reduce as a "
            "hook of each parameter: param.register_post_accumulate_grad_hook(self.reduce)."
        )
        for rank, sentences in enumerate(found):
            assert not sentences, f"after backward {step + 1}, on rank {rank}, {sentences[0]}"
        assert not {"all_reduce", "all_gather"} & names, (
            f"the averages are right, but they came by {' and '.join(sorted(names))}, which takes every "
            "gradient to every rank. dist.reduce(piece, group_dst=owner) takes a piece to its owner alone."
        )
        for rank, numbers in enumerate(kept):
            assert not numbers, (
                f"the averages are right, but after backward rank {rank} still holds gradients of the "
                f"parameters {numbers}, whole. Set param.grad to None in the hook, when it is reduced."
            )


def _gradient_of(piece: torch.Tensor, beside: Beside, step: int) -> str:
    """What is wrong with the gradient of what this rank owns of a parameter; nothing if it is the average."""
    starts = [(piece.data_ptr() - param.data_ptr()) // param.itemsize for param in beside.params]
    found = [number for number, start in enumerate(starts) if 0 <= start < beside.params[number].numel()]
    if not found:
        return ""  # a copy, of which the values tell
    number, start = found[0], starts[found[0]]
    of_ranks = [
        flat_like(beside.gradients(step, rank)[number], beside.params[number])[start : start + piece.numel()]
        for rank in range(beside.world_size)
    ]
    total = torch.stack(of_ranks).sum(0)
    gradient = None if piece.grad is None else piece.grad.flatten()
    if gradient is not None and torch.equal(gradient, total / beside.world_size):
        return ""
    what = f"the gradient of what it owns of parameter {number} is"
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


def in_backward(path: Own, shapes: Shapes) -> int:
    """Updates made while backward runs, from the first iteration on; gives the number of parameters."""
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
                raise NotYet("backward makes no broadcast: the update is left to step().")
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
    beside.check_equal_shares()
    return len(marks)
