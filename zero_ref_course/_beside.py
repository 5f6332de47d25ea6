"""The reader's `MyZero` and the package's optimizer, side by side on one rank.

The gradients are whole numbers that every number of ranks here divides, so that a sum and an average are
exact in whatever order they are made, and all comparisons are bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Adam

from zero_ref.lab.own import CLASS
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.rules import sorted_greedy
from zero_ref_course._company import Company, NotYet, OnAllRanks, alike, gathered
from zero_ref_course._own import OwnFile
from zero_ref_course.step import Ages, _age, _check_ages

Shapes = Sequence[tuple[int, ...]]
STEPS = 3
LR = 0.1
CALL = f"{CLASS}(params, Adam, lr={LR})"
GIVEN_TWICE = (
    " params was gone through twice. model.parameters() is a generator, and empty the second time: begin "
    "with self.params = list(params)."
)
BACKWARD_AND_STEP = f"a backward and {CLASS}.step()"


def laid_out_by_columns(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the same values; a matrix gets the strides of a transposed one."""
    return value.t().contiguous().t() if value.dim() == 2 else value


class Beside:
    """The reader's optimizer and the package's, on parameters that begin alike.

    Attributes:
        reduces: the reader's class has `reduce`, a hook that averages gradients during backward. Otherwise
            gradients are averaged already when `step` is called, as DDP does it.
    Collective: all ranks.
    """

    def __init__(self, path: str, shapes: Shapes, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        self.start = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        self.start = [laid_out_by_columns(value) for value in self.start]
        self.params = [nn.Parameter(value.clone()) for value in self.start]
        self.twins = [nn.Parameter(value.clone()) for value in self.start]
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.owners = list(
            sorted_greedy([value.numel() for value in self.start], self.world_size).owner_of_param
        )
        self.company = Company(path)
        extra = "".join(f", {name}={value}" for name, value in options.items())
        call = CALL[:-1] + extra + ")"
        with self.company.running(f"loading {CLASS}"):
            self.own = OwnFile(path)
        if (arguments := self.own.arguments()) is None:
            raise NotYet(f"the file has no class {CLASS}.")
        for name in options:
            if name not in arguments:
                raise NotYet(f"{CLASS}.__init__ has no argument `{name}`.")
        with self.company.running(call):
            try:
                self.mine = self.own.make(self.params, Adam, lr=LR, **options)
            except Exception as error:
                raise self.company.told(call, error, GIVEN_TWICE if self.own.given_again else "") from None
        self.reduces = hasattr(self.mine, "reduce")
        self.package = ZeroRedundancyOptimizer(self.twins, Adam, lr=LR, **options)
        self.values_of_twins = [[value.clone()] for value in self.start]  # the newest first
        dtypes = gathered([str(param.dtype) for param in self.params])
        with alike():
            assert all(each == str(dtype) for of_rank in dtypes for each in of_rank), (
                f"{call} made parameters {dtypes[0][0]}, and they were {dtype}. Only what the local "
                "optimizer steps may be a copy in another dtype."
            )
            strides = gathered([param.stride() for param in self.params])
            for number, value in enumerate(self.start):
                assert strides[0][number] == value.stride(), (
                    f"{call} made the strides of parameter {number} {strides[0][number]}, and they were "
                    f"{value.stride()}: a transposed matrix was laid out anew. flat.as_strided(param.size(), "
                    "param.stride(), offset) is a window of the same strides."
                )
            moved = [
                i for i, (now, then) in enumerate(zip(self.params, self.start)) if not torch.equal(now, then)
            ]
            assert not any(all_moved := gathered(moved)), (
                f"{call} changed the values of parameter {next(of[0] for of in all_moved if of)}: when a "
                "parameter moves to other memory, its values go with it."
            )

    def needs(self, *names: str) -> None:
        """Raise NotYet if the reader's class lacks one of these."""
        for name in names:
            if not hasattr(self.mine, name):
                raise NotYet(f"{CLASS} has no `{name}`.")

    def gradients(self, step: int, of_rank: int | None = None) -> list[torch.Tensor]:
        """The gradients of a step, of one rank or averaged over all: whole numbers, exact in 16 bits."""
        if of_rank is None:
            of_ranks = zip(*(self.gradients(step, rank) for rank in range(self.world_size)), strict=True)
            return [torch.stack(each).sum(0) / self.world_size for each in of_ranks]
        generator = torch.Generator().manual_seed(100 * step + of_rank)
        return [
            6.0 * torch.randint(-10, 11, value.shape, generator=generator).to(value.dtype)
            for value in self.start
        ]

    def step_package(self, step: int, without: Sequence[int] = ()) -> None:
        """Make the package's step on the averaged gradients of a step."""
        self.update_package(self.gradients(step), without)

    def update_package(self, gradients: Sequence[torch.Tensor], without: Sequence[int] = ()) -> None:
        """Make the package's step on these gradients."""
        for number, (twin, gradient) in enumerate(zip(self.twins, gradients)):
            twin.grad = None if number in without else gradient
        self.package.step()
        for twin, values in zip(self.twins, self.values_of_twins):
            values.insert(0, twin.detach().clone())

    def backward(self, step: int, without: Sequence[int] = (), measures: bool = False) -> list[int]:
        """Run a backward that gives this rank's own gradients; the reader's hooks average them.

        Returns:
            The numbers of bytes that `OwnFile.backward` returns if it measures.
        """
        return self.own.backward(self.gradients(step, self.rank), without, measures)

    def forget(self) -> None:
        """Set all gradients to None, as before each backward; raise if a piece still has one.

        Collective: all ranks.
        """
        for param in self.params:
            param.grad = None
        if hasattr(self.mine, "zero_grad"):
            with self.company.running(f"{CLASS}.zero_grad()"):
                self.mine.zero_grad()
        left = gathered(sum(p.grad is not None and bool(p.grad.any()) for p in self.pieces()))
        with alike():
            for rank, count in enumerate(left):
                assert not count, (
                    f"before a backward rank {rank} still has {count} gradients of the step before. "
                    "zero_grad() has to forget the gradients of what self.local steps."
                )

    def step_mine(self, step: int, without: Sequence[int] = ()) -> None:
        """Make the reader's step on the averaged gradients of a step."""
        if self.reduces:
            self.forget()
            with self.company.running(BACKWARD_AND_STEP):
                self.backward(step, without)
                self.mine.step()
            return
        for number, (param, gradient) in enumerate(zip(self.params, self.gradients(step))):
            param.grad = None if number in without else gradient.clone()
        with self.company.running(f"{CLASS}.step()"):
            self.mine.step()

    def both(self, step: int) -> None:
        """Make a step of both optimizers and compare all parameters."""
        self.step_mine(step)
        self.step_package(step)
        self.compare(step)

    def ages(self) -> list[Ages]:
        """The ages of the parameters on each rank."""
        return gathered([_age(param, values) for param, values in zip(self.params, self.values_of_twins)])

    def compare(self, step: int, last: int = STEPS) -> None:
        """Raise, on all ranks alike, what went wrong if the parameters are not the package's."""
        ages = self.ages()
        if step + 1 < last and all(age in (0, 1) for of_rank in ages for age in of_rank):
            # Sent too early, or never: with one step more the two look different.
            return
        with alike():
            try:
                _check_ages(ages, self.owners, step + 1)
            except AssertionError as error:
                text = (
                    str(error).replace("local.step()", "self.local.step()").replace("`local`", "`self.local`")
                )
                text = text.replace("the plain optimizer", "the package's optimizer")
                raise AssertionError(text + (GIVEN_TWICE if self.own.given_again else "")) from None

    @property
    def local(self) -> torch.optim.Optimizer:
        """The reader's local optimizer."""
        local = getattr(self.mine, "local", None)
        if not isinstance(local, torch.optim.Optimizer):
            raise OnAllRanks(
                f"{CLASS} has no `local`: call this rank's own torch optimizer self.local. The check looks "
                "there for the state."
            )
        return local

    def pieces(self) -> list[torch.Tensor]:
        """The tensors that the local optimizer steps on this rank."""
        return [piece for group in self.local.param_groups for piece in group["params"]]

    def check_owned(self) -> None:
        """Check that each rank steps what it owns: whole parameters by `assign_owners`, or an equal share.

        Collective: all ranks.
        """
        if self.cuts():
            self.check_equal_shares()
            return
        numels = gathered(sorted(piece.numel() for piece in self.pieces()))
        with alike():
            for rank, found in enumerate(numels):
                owned = [number for number, owner in enumerate(self.owners) if owner == rank]
                assert found == sorted(self.start[number].numel() for number in owned), (
                    f"rank {rank} owns the parameters {owned} by assign_owners, and its local optimizer "
                    "steps others."
                )

    def cuts(self) -> bool:
        """Whether the ranks step anything else than all parameters, each whole. Collective: all ranks."""
        found = gathered([piece.numel() for piece in self.pieces()])
        whole = [value.numel() for value in self.start]
        return sorted(numel for of_rank in found for numel in of_rank) != sorted(whole)

    @property
    def share(self) -> int:
        """The number of elements in an equal share; the last rank may own less."""
        return -(-sum(value.numel() for value in self.start) // self.world_size)

    def check_equal_shares(self) -> None:
        """Check that the ranks step all elements of the cut parameters, and no rank more than 1/N of them."""
        numels = gathered(sum(piece.numel() for piece in self.pieces()))
        total = sum(value.numel() for value in self.start)
        share = self.share
        with alike():
            for rank, numel in enumerate(numels):
                assert numel <= share, (
                    f"the local optimizer of rank {rank} steps {numel} elements, and an equal share of "
                    f"{total} is {share}: give it what this rank owns and nothing else, and cut the "
                    "parameters, end to end, into equal parts."
                )
            assert sum(numels) >= total, (
                f"the local optimizers of all ranks step {sum(numels)} elements, and the parameters have "
                f"{total}: each element has one owner. Where the ranks do not divide the elements, round the "
                "share up, or pad the flat tensor; rounded down, it leaves the last elements to nobody."
            )

    def state(self) -> dict[int, dict[str, Any]]:
        """The state of the reader's local optimizer, by number of parameter; below 0 if it is of none."""
        numbers = {id(param): number for number, param in enumerate(self.params)}
        places = {(param.data_ptr(), param.shape): number for number, param in enumerate(self.params)}
        return {
            numbers.get(id(param), places.get((param.data_ptr(), param.shape), -1 - order)): state
            for order, (param, state) in enumerate(self.local.state.items())
        }
