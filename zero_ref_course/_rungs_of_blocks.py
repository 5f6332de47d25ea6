"""Checks on each rank: the rung stage 3 of the reader's own file, whose blocks gather their parameters.

The model notes what forward and backward find in its parameters, and its gradients are given. They are whole
numbers, as in `_beside`, so all comparisons with the package are bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Adam, Optimizer

from zero_ref.lab.own import CLASS_3
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref_course import ExerciseFailed
from zero_ref_course._beside import LR, laid_out_by_columns
from zero_ref_course._company import Company, NotYet, OnAllRanks, alike, gathered
from zero_ref_course._own import OwnFile, memory_within_reach
from zero_ref_course.step import _age

MODEL: list[tuple[int, ...]] = [(3, 4), (5,)]
"""Shapes of the parameters that no block has."""
BLOCKS: list[list[tuple[int, ...]]] = [
    [(7, 9), (5,)],
    [(9, 8), (3,)],
    [(6, 10), (4,)],
    [(61,)],
    [(8, 7), (8,)],
    [(10, 6), (1,)],
]
"""Shapes of the parameters of each block. Few of the blocks divide evenly among two or three ranks."""
USES = [0, 1, 2, 1, 3, 4, 5]
"""The blocks in the order of forward."""
TWICE, PARTLY, LEFT_OUT = 1, 2, 3
"""The block that is used twice, and those that the last iteration uses in part and not at all."""
PARTLY_WITHOUT = 1
"""The parameter of block `PARTLY` that has no gradient in the last iteration."""
BACKWARDS_OF = (1, 2, 1)
"""The number of backwards in each iteration."""
SLACK = 256
"""Bytes that the reader's optimizer may hold beside its shares, for padding and a few numbers."""
ROOT = -1
"""The number of the block of parameters that no other block has."""

CALL = f"{CLASS_3}(model, Adam, blocks=blocks, lr={LR})"
FORWARD, BACKWARD = "forward", "backward"
FREE = "whole.untyped_storage().resize_(0) frees the memory under the parameters and all their views"
COPY = (
    "Keep a copy of this rank's share of each block, .clone(), which self.local steps, and nothing else. A "
    "slice keeps all of the memory that it is cut from."
)


class _Use(torch.autograd.Function):
    """The use of a parameter, whose backward needs its values and gives a gradient that is given here."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, view: torch.Tensor, coefficient: torch.Tensor, look: Any) -> Any:
        ctx.save_for_backward(view)
        ctx.coefficient, ctx.look = coefficient, look
        look(FORWARD, view)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.look(BACKWARD, *ctx.saved_tensors)
        return gradients[0], ctx.coefficient, None, None


class Block(nn.Module):
    """A block. Each use of one of its parameters calls `use(x, block, place, param)`, which returns x."""

    def __init__(self, number: int, params: Sequence[nn.Parameter], use: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.number, self.params, self.use = number, nn.ParameterList(params), use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, param in enumerate(self.params):
            x = self.use(x, self.number, place, param)
        return x


class Blocks(nn.Module):
    """The model: it uses parameters of its own, and then the blocks in the order of `USES`."""

    def __init__(self, params: Sequence[Sequence[nn.Parameter]], use: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.number, self.params, self.use = ROOT, nn.ParameterList(params[ROOT]), use
        self.blocks = nn.ModuleList(Block(number, of_one, use) for number, of_one in enumerate(params[:ROOT]))

    def forward(self, without: Sequence[int] = ()) -> torch.Tensor:
        x = torch.zeros(())
        for place, param in enumerate(self.params):
            x = self.use(x, ROOT, place, param)
        for number in USES:
            if number not in without:
                x = self.blocks[number](x)
        return x


class Observed:
    """The reader's `MyZero3` on a model of blocks, which notes what it finds, and the package beside it.

    Collective: all ranks.
    """

    def __init__(self, path: str, dtype: torch.dtype, **options: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes: list[list[tuple[int, ...]]] = [*BLOCKS, MODEL]
        self.start = [
            [laid_out_by_columns(torch.randn(shape, generator=generator).to(dtype)) for shape in of_block]
            for of_block in shapes
        ]
        self.dtype, self.options = dtype, options
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.params = [[nn.Parameter(value.clone()) for value in of_block] for of_block in self.start]
        self.twins = [[nn.Parameter(value.clone()) for value in of_block] for of_block in self.start]
        self.values = [[[value] for value in of_block] for of_block in self.start]  # the newest first
        flat = [twin for of_block in self.twins for twin in of_block]
        self.package = ZeroRedundancyOptimizer(flat, Adam, lr=LR, **options)
        self.iteration = self.number = 0
        self.in_part = self.over = False
        self.seen: list[torch.UntypedStorage] = []
        self.uses_of: dict[tuple[int, int], int] = {}
        self.company = Company(path)
        call = CALL[:-1] + "".join(f", {name}={value}" for name, value in options.items()) + ")"
        with self.company.running(f"loading {CLASS_3}"):
            self.own = OwnFile(path)
        self.model = Blocks(self.params, self.use)
        with self.company.running(call):
            self.mine = self.own.make_3(self.model, Adam, blocks=list(self.model.blocks), lr=LR, **options)
        if not hasattr(self.mine, "step"):
            raise NotYet(f"{CLASS_3} has no `step`.")
        if not isinstance(getattr(self.mine, "local", None), Optimizer):
            raise OnAllRanks(
                f"{CLASS_3} has no `local`: call the torch optimizer of this rank's shares self.local. The "
                "check looks there for the shares."
            )
        self.check_shares(call)
        self.at_rest = self.reached()

    # ------------------------------------------------------------------------------- what is held

    def pieces(self) -> list[torch.Tensor]:
        """The tensors that the local optimizer steps on this rank."""
        return [piece for group in self.mine.local.param_groups for piece in group["params"]]

    def reached(self) -> dict[int, int]:
        """The bytes of each storage within the reach of the reader's file and of the model's parameters."""
        hooks = [
            hook
            for module in self.model.modules()
            for hook in [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        ]
        return memory_within_reach([self.mine, self.own.names, self.params, hooks])

    def whole_nbytes(self) -> int:
        """The bytes of memory that the parameters have, and the views of them that autograd keeps."""
        storages = [param.untyped_storage() for of_block in self.params for param in of_block] + self.seen
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def nbytes_of(self, *numbers: int) -> int:
        """The bytes of these blocks, whole."""
        return sum(value.nbytes for number in set(numbers) for value in self.start[number])

    def check_shares(self, call: str) -> None:
        """Check that a rank has shares of the blocks, and nothing that is whole."""
        total = sum(value.numel() for of_block in self.start for value in of_block)
        parts = [value.numel() for of_block in self.start for value in of_block]
        most = sum(-(-numel // self.world_size) for numel in parts)
        steps = gathered(sum(piece.numel() for piece in self.pieces()))
        dtypes = gathered(sorted({str(piece.dtype) for piece in self.pieces()}))
        freed = gathered(any(p.numel() and not p.untyped_storage().nbytes() for p in self.pieces()))
        whole = gathered(self.whole_nbytes())
        held = gathered(sum(self.reached().values()))
        shares = most * self.options.get("master_dtype", self.dtype).itemsize
        with alike():
            for rank in range(self.world_size):
                assert steps[rank] <= most, (
                    f"the local optimizer of rank {rank} steps {steps[rank]} elements of {total}, and an "
                    f"equal share of each block on {self.world_size} ranks makes {most} at most: give it "
                    "this rank's shares alone."
                )
                assert not freed[rank], (
                    f"what self.local steps on rank {rank} has no memory after {call}: a slice of what is "
                    "freed goes with it. Keep a copy of this rank's share of each block, .clone()."
                )
            assert sum(steps) >= total, (
                f"the local optimizers of all ranks step {sum(steps)} elements, and the parameters have "
                f"{total}. What no block has belongs to the model, which gathers it too; and where the ranks "
                "do not divide a block, pad it with zeros, so that no element is left to nobody."
            )
            for rank in range(self.world_size):
                assert not whole[rank], (
                    f"after {call} rank {rank} holds {whole[rank]:,} bytes of whole parameters. Free them "
                    f"when the shares are copied: {FREE}."
                )
                # A second copy of the shares is told of when it is known whether they become stale.
                assert held[rank] <= 2 * shares + SLACK, (
                    f"after {call} rank {rank} holds {held[rank]:,} bytes, and its shares have {shares:,}. "
                    f"{COPY}"
                )
            if "master_dtype" in self.options:
                assert all(of_rank == ["torch.float32"] for of_rank in dtypes), (
                    f"with master_dtype=torch.float32 the local optimizer steps {dtypes[0][0]}. The shares "
                    "are in master_dtype; the parameters, which are gathered from them, keep their own."
                )

    def check_held(self) -> None:
        """Check that a rank holds, between iterations, its shares and their state."""
        state = [each for of_one in self.mine.local.state.values() for each in of_one.values()]
        stays = [*self.pieces(), *(each for each in state if isinstance(each, torch.Tensor))]
        held = gathered((sum(self.at_rest.values()), sum(each.nbytes for each in stays)))
        with alike():
            for rank, (found, most) in enumerate(held):
                assert found <= most + SLACK, (
                    f"the values are right, but rank {rank} holds {found:,} bytes between iterations, and "
                    f"its shares with their state have {most:,}. {COPY}"
                )

    # ------------------------------------------------------------------------- forward and backward

    def use(self, x: torch.Tensor, block: int, place: int, param: nn.Parameter) -> torch.Tensor:
        """Use a parameter, whose values are looked at in forward and in backward."""
        if self.in_part and (block, place) == (PARTLY, PARTLY_WITHOUT):
            return x
        value = self.start[block][place]
        count = self.uses_of[block, place] = self.uses_of.get((block, place), 0) + 1
        if param.shape != value.shape or not param.untyped_storage().nbytes():
            raise ExerciseFailed(self.finds_freed(FORWARD, block))
        view = param.t() if param.dim() == 2 else param.view(-1)  # autograd keeps a view, as of a Linear
        coefficient = self.coefficient(self.rank, block, place, self.number, count)

        def look(when: str, found: torch.Tensor) -> None:
            if not found.untyped_storage().nbytes():
                raise ExerciseFailed(self.finds_freed(when, block))
            self.look(when, block, place, found.t() if value.dim() == 2 else found)

        apply: Callable[..., torch.Tensor] = _Use.apply
        return apply(x, view, coefficient.t() if value.dim() == 2 else coefficient, look)

    def look(self, when: str, block: int, place: int, found: torch.Tensor) -> None:
        """Look at the values that a use of a parameter finds, and at what is held meanwhile."""
        self.seen.append(found.untyped_storage())
        what = f"the {when} of {_name(block)} finds"
        if found.dtype != self.dtype:
            raise ExerciseFailed(
                f"{what} {found.dtype} in its parameters, which are {self.dtype}: only shares may be in "
                "another dtype. Gather this rank's share as share.to(whole.dtype)."
            )
        values = self.values[block][place]
        age = _age(found, values)
        loose = self.over and (block, place) == (PARTLY, PARTLY_WITHOUT)  # a share may be stepped as a whole
        if age != 0 and not loose:
            raise ExerciseFailed(f"in iteration {self.iteration + 1} {what} {self._wrong(when, block, age)}")
        whole = self.whole_nbytes()
        most = self.nbytes_of(ROOT, block) + max(self.nbytes_of(number) for number in range(len(BLOCKS)))
        if whole > most + SLACK:
            free = (
                "Free a block after its forward, in a hook: module.register_forward_hook"
                if when == FORWARD
                else "Free a block when the gradients of all its parameters are complete"
            )
            raise ExerciseFailed(
                f"in the {when} of {_name(block)} rank {self.rank} holds {whole:,} bytes of whole "
                f"parameters, of {self.nbytes_of(*range(ROOT, len(BLOCKS))):,}; this block, one other and "
                f"what the model has itself are {most:,} at most. {free}. {FREE}, also those that autograd "
                "has kept."
            )

    def finds_freed(self, when: str, block: int) -> str:
        """The message if a use finds its parameters freed."""
        again = (
            " It is used twice in this forward: gather it for each use, and free it in backward when the "
            "gradients of both uses are complete."
            if block == TWICE
            else ""
        )
        if when == FORWARD:
            return (
                f"the forward of {_name(block)} finds its parameters freed. Gather them in a hook that is "
                f"called before it: module.register_forward_pre_hook.{again}"
            )
        return (
            f"the backward of {_name(block)} finds its parameters freed, and needs their values. It begins "
            "when an output of the block gets its gradient: gather again in a hook of the output, "
            "output.register_hook, and free when the gradients of all parameters of the block are "
            f"complete.{again}"
        )

    def _wrong(self, when: str, block: int, age: int | None) -> str:
        if age is not None:
            step = f"step {self.iteration}" + (f" (and {age - 1} more)" if age > 1 else "")
            return (
                f"the values from before {step}. Gather the share that self.local steps, not a copy of it, "
                "and gather it anew in each iteration."
            )
        if self.over and block == LEFT_OUT:
            return (
                "values that moved in an iteration that did not use the block. Its share has no gradient "
                "then: leave .grad at None, and no optimizer moves it."
            )
        if when == BACKWARD:
            return (
                "other values than the forward did. Memory that comes back by resize_ has nothing in it: "
                "gather all shares again before backward."
            )
        if self.iteration == 0:
            return (
                "values that it never had. The shares of all ranks, in the order of the ranks, are the "
                "block's parameters end to end, each as it lies in memory."
            )
        return (
            "values that the package never had there. The gradients of the shares were right, so either "
            "they lie in another order than the shares do, or the update or the gathering is wrong."
        )

    def coefficient(self, rank: int, block: int, place: int, number: int, use: int = 1) -> torch.Tensor:
        """The gradient of one use of a parameter in a backward on a rank."""
        value = self.start[block][place]
        seed = (((number * 10 + rank) * 10 + use) * 10 + block + 1) * 10 + place
        generator = torch.Generator().manual_seed(seed)
        return 6.0 * torch.randint(-10, 11, value.shape, generator=generator).to(value.dtype)

    def average(self, block: int, place: int, number: int, uses: Sequence[int] = (1, 2)) -> torch.Tensor:
        """The average over the ranks of a parameter's gradient in a backward; in another dtype: exact."""
        of_ranks = [
            self.coefficient(rank, block, place, number, use)
            for rank in range(self.world_size)
            for use in (uses if block == TWICE else (1,))
        ]
        return torch.stack(of_ranks).float().sum(0) / self.world_size

    def used(self) -> Iterator[tuple[int, int]]:
        """The parameters that this iteration uses, as (block, place)."""
        for block, of_block in enumerate(self.start):
            for place in range(len(of_block)):
                number = ROOT if block == len(BLOCKS) else block
                left_out = number == LEFT_OUT or (number, place) == (PARTLY, PARTLY_WITHOUT)
                if not (self.in_part and left_out):
                    yield number, place

    # ----------------------------------------------------------------------------- an iteration

    def iterate(self, iteration: int, in_part: bool) -> None:
        """Run forward, backward and a step, and compare with the package."""
        self.iteration, self.in_part = iteration, in_part
        backwards = range(self.number, self.number + BACKWARDS_OF[iteration])
        with self.company.running(f"forward, backward and {CLASS_3}.step()"):
            for number in backwards:
                self.number = number
                self.forward_and_backward(range(backwards.start, number + 1))
            self.mine.step()
        self.number += 1
        self.seen.clear()
        left = gathered(self.whole_nbytes())
        with alike():
            for rank, whole in enumerate(left):
                assert not whole, (
                    f"after step() of iteration {iteration + 1} rank {rank} holds {whole:,} bytes of whole "
                    f"parameters. {self.left_by_part()}"
                )
        if self.in_part and not self.company.under_way:
            self.check_gradients(backwards)
        self.forget()
        self.step_package(backwards)
        self.at_rest = self.reached()

    def forward_and_backward(self, backwards: range) -> None:
        """Run a forward and a backward, and look at what they leave."""
        self.uses_of.clear()
        self.seen.clear()
        before = len(self.company.calls)
        self.model([LEFT_OUT] if self.in_part else []).backward()
        self.seen.clear()
        if self.in_part:
            return  # what is incomplete is left to step()
        self.check_reductions(self.company.calls[before:])
        if not self.company.under_way:
            self.check_gradients(backwards)
        left = gathered(self.whole_nbytes())
        held = gathered(sum(n for place, n in self.reached().items() if place not in self.at_rest))
        share = sum(piece.nbytes for piece in self.pieces())
        with alike():
            for rank, whole in enumerate(left):
                assert not whole, (
                    f"after backward rank {rank} holds {whole:,} bytes of whole parameters. Free a block "
                    f"when the gradients of all its parameters are complete: {FREE}."
                )
                assert held[rank] <= share + SLACK, (
                    f"after backward rank {rank} holds {held[rank]:,} bytes more than before forward, and "
                    f"the gradients of its shares have {share:,}. Set param.grad to None when it is "
                    "reduced, and keep nothing of a whole gradient: a slice would keep all of its memory."
                )

    def left_by_part(self) -> str:
        """Advice on what is left over after a step."""
        if not self.in_part:
            return f"Free a block when its gradients are reduced: {FREE}."
        return (
            f"In this iteration a parameter of block {PARTLY} is not used, so not all gradients of the block "
            "come: step() has to reduce what is left, and free it."
        )

    def check_reductions(self, calls: Sequence[Any]) -> None:
        """Check that each gradient is reduced once, and to shares."""
        names = {call.op for call in calls}
        reduced = gathered(
            sum(call.nbytes * self.world_size for call in calls if call.op.startswith("reduce_scatter"))
        )
        parts = [value.numel() + self.world_size for of_block in self.start for value in of_block]
        with alike():
            assert names & {"reduce", "all_reduce"} or any(reduced), (
                "backward reduces no gradient. Register a hook on each parameter, which autograd calls when "
                "its gradient is complete, param.register_post_accumulate_grad_hook(hook), and reduce a "
                "block's gradients, by dist.reduce_scatter_single, when all of them have come."
            )
            assert "all_reduce" not in names, (
                "backward calls all_reduce, which takes whole gradients to every rank. "
                "dist.reduce_scatter_single(share, whole) adds up each share on its rank alone."
            )
            most = 4 * sum(parts)
            assert max(reduced) <= most, (
                f"in a backward rank {reduced.index(max(reduced))} reduces {max(reduced):,} bytes, and all "
                f"gradients, with padding, have {most:,} at most: something is reduced twice. Block {TWICE} "
                "is used twice in a forward, and its gradients are complete after both uses. Autograd calls "
                "a hook of a parameter, register_post_accumulate_grad_hook, once in a backward, with the "
                "sum: reduce then, once."
            )

    def check_gradients(self, backwards: range) -> None:
        """Check that the shares of all ranks have the averages of these backwards, in whatever order."""

        def in_order(numbers: Sequence[int], uses: Sequence[int] = (1, 2), scale: float = 1) -> torch.Tensor:
            found = [
                sum((self.average(*param, number, uses) for number in numbers), torch.zeros(())).flatten()
                * (scale if param[0] == TWICE else 1)
                for param in self.used()
            ]
            return _sorted(torch.cat(found))

        gradients = [piece.grad.flatten().float() for piece in self.pieces() if piece.grad is not None]
        found = _sorted(torch.cat(gathered(torch.cat(gradients) if gradients else torch.zeros(0))))
        right = in_order(backwards)
        if torch.equal(found, right):
            return
        what = f"after backward {backwards[-1] + 1} the gradients of the shares"
        times = float(found.abs().max() / right.abs().max()) if len(found) else 0.0
        with alike():
            assert len(found), f"{what} are all None: add the averages to the .grad of what self.local steps."
            assert not (len(found) == len(right) and torch.allclose(found, right * times)), (
                f"{what} are {times:.4g} times the averages over the ranks: divide by the number of ranks, "
                f"which is {self.world_size}, once, and by nothing else."
            )
            assert len(backwards) == 1 or not torch.equal(found, in_order(backwards[-1:])), (
                f"{what} are those of the last backward alone. Add the average to the gradient that is there."
            )
            for count, uses in (("the first use", (1,)), ("the second use", (2,))):
                assert not torch.equal(found, in_order(backwards, uses)), (
                    f"{what} have {count} alone of block {TWICE}, which is used twice. Its gradients are "
                    "complete after both uses."
                )
            if self.in_part:
                raise AssertionError(
                    f"{what} are not the averages over the ranks. {self.left_by_part()} What has no gradient "
                    "counts as zeros, beside parameters of the block that have one."
                )
            raise AssertionError(
                f"{what} are not the averages over the ranks. Each share's gradient is the sum of the ranks' "
                "gradients of the same elements, divided by the number of ranks."
            )

    def forget(self) -> None:
        """Set all gradients to None."""
        if hasattr(self.mine, "zero_grad"):
            with self.company.running(f"{CLASS_3}.zero_grad()"):
                self.mine.zero_grad()
        for of_block in self.params:
            for param in of_block:
                param.grad = None
        left = gathered(sum(p.grad is not None and bool(p.grad.any()) for p in self.pieces()))
        with alike():
            assert not any(left), (
                f"after zero_grad() rank {left.index(max(left))} still has {max(left)} gradients of shares. "
                "Give zero_grad() out, as self.local.zero_grad, or forget the gradients in step()."
            )

    def step_package(self, backwards: range) -> None:
        """Make the package's step on the averages."""
        used = set(self.used())
        for block, of_block in enumerate(self.twins):
            number = ROOT if block == len(BLOCKS) else block
            for place, twin in enumerate(of_block):
                averages = [self.average(number, place, backward) for backward in backwards]
                total = torch.stack(averages).sum(0).to(twin.dtype)
                twin.grad = total if (number, place) in used else None
        self.package.step()
        for twins, values in zip(self.twins, self.values):
            for twin, newest_first in zip(twins, values):
                newest_first.insert(0, twin.detach().clone())

    def last_forward(self) -> None:
        """Run a forward that finds the values after the last step."""
        self.iteration, self.in_part, self.over = len(BACKWARDS_OF), False, True
        self.uses_of.clear()
        with self.company.running(f"a forward after {CLASS_3}.step()"):
            self.model()
        self.seen.clear()


def _name(block: int) -> str:
    return "the model's own parameters" if block == ROOT else f"block {block}"


def _sorted(gradient: torch.Tensor) -> torch.Tensor:
    """The values that are not 0, as padding is, nor a rounding beside it, in order."""
    return gradient[gradient.abs() > 1e-3].sort().values


def stage_3(path: str, dtype: torch.dtype = torch.float32, **options: Any) -> int:
    """Check that blocks gather their parameters when they need them, free them, and reduce to shares.

    Returns:
        The bytes of the parameters' shares on rank 0.
    Raises:
        NotYet: the file has no such class, or the class has no such option.
    """
    company = Company(path)
    with company.running("loading the file"):
        arguments = OwnFile(path).arguments(CLASS_3)
    if arguments is None:
        raise NotYet(f"the file has no class {CLASS_3}.")
    for name in options:
        if name not in arguments:
            raise NotYet(f"{CLASS_3}.__init__ has no argument `{name}`.")
    observed = Observed(path, dtype, **options)
    for iteration in range(len(BACKWARDS_OF)):
        observed.iterate(iteration, in_part=iteration == len(BACKWARDS_OF) - 1)
    observed.last_forward()
    observed.check_held()
    return sum(piece.nbytes for piece in observed.pieces())
