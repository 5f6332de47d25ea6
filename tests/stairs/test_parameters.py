"""The stair of stage 3 trains as the unsharded loop does, holds one block at a time, and gathers it twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from library.training import filled
from torch import nn, optim
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from zero_ref.lab.config import GPTConfig
from zero_ref.lab.meter import recording_distributed
from zero_ref.lab.model import GPT, passages
from zero_ref.lab.ranks import run
from zero_ref.lab.tensor_peak import TensorPeak
from zero_ref.plan.calls import Call
from zero_ref.stairs import parameters, shards

pytestmark = pytest.mark.ranks

SMALL = GPTConfig(layers=3, heads=2, width=32, context=16)
STEPS = 3


def values(zero: Any, model: nn.Module) -> list[torch.Tensor]:
    """Copies of the whole parameters."""
    blocks = getattr(zero, "blocks", [])
    for block in blocks:
        block.gather()
    copies = [param.detach().clone() for param in model.parameters()]
    for block in blocks:
        block.free()
    return copies


# ------------------------------------------------------------------------------------ as the unsharded loop


class Unsharded:
    """The loop with whole state. It averages each backward's gradients, or their sum at the end."""

    def __init__(self, model: nn.Module, each_backward: bool) -> None:
        self.params, self.each_backward = list(model.parameters()), each_backward
        self.local = optim.AdamW(self.params, lr=1e-2)
        self.sums: list[torch.Tensor] = []

    def after_backward(self) -> None:
        if self.each_backward:
            averages = self.averages()
            self.sums = [a + b for a, b in zip(self.sums, averages)] if self.sums else averages

    def averages(self) -> list[torch.Tensor]:
        found = []
        for param in self.params:
            assert param.grad is not None
            found.append(param.grad / dist.get_world_size())
            dist.all_reduce(found[-1])
            param.grad = None
        return found

    def step(self) -> None:
        for param, average in zip(self.params, self.sums or self.averages()):
            param.grad = average
        self.local.step()
        self.sums = []

    def zero_grad(self) -> None:
        self.local.zero_grad()


def train(by: str, backwards: int) -> list[list[torch.Tensor]]:
    """The parameters of a GPT after each step, on gradients that differ by rank and need rounding."""
    model = GPT(SMALL)
    if by == "parameters":
        zero: Any = parameters.MinimalZero(model, optim.AdamW, blocks=list(model.blocks), lr=1e-2)
    elif by == "shards":
        zero = shards.MinimalZero(model.parameters(), optim.AdamW, lr=1e-2)
    else:
        zero = Unsharded(model, each_backward=by == "each")
    after = []
    for step in range(STEPS):
        for number in range(backwards):
            given = passages(SMALL, 2, seed=number, step=step, rank=dist.get_rank())
            model(*given).backward()
            if isinstance(zero, Unsharded):
                zero.after_backward()
        zero.step()
        zero.zero_grad()
        after.append(values(zero, model))
    return after


def equal(some: list[list[torch.Tensor]], others: list[list[torch.Tensor]]) -> bool:
    pairs = [pair for one, other in zip(some, others) for pair in zip(one, other, strict=True)]
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("backwards", [1, 2])
def test_two_ranks_train_as_the_unsharded_loop_and_stage_2_bit_for_bit(backwards: int) -> None:
    """A sum of two is the same in both orders, if each backward's gradients are averaged by themselves."""
    ours, stage_2, unsharded = (
        run(train, 2, by, backwards, backend="gloo") for by in ("parameters", "shards", "each")
    )
    for rank in range(2):
        assert equal(ours[rank], unsharded[rank])
        assert equal(ours[rank], stage_2[rank])


def gradients(backwards: int) -> list[tuple[float, float]]:
    """For each parameter that this rank has a piece of: the largest difference, in roundings, to two loops.

    A rounding is half the distance from 1 to the next float32, times the mean of the gradients' amounts.
    """
    model, plain = GPT(SMALL), GPT(SMALL)
    zero = parameters.MinimalZero(model, optim.AdamW, blocks=list(model.blocks), lr=1e-2)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    names = {param: name for name, param in model.named_parameters()}
    averaged = {name: torch.zeros_like(param) for name, param in plain.named_parameters()}
    summed = {name: torch.zeros_like(param) for name, param in plain.named_parameters()}
    amounts = {name: torch.zeros_like(param) for name, param in plain.named_parameters()}
    for number in range(backwards):
        given = passages(SMALL, 2, seed=number, step=0, rank=rank)
        model(*given).backward()
        plain(*given).backward()
        for name, param in plain.named_parameters():
            assert param.grad is not None
            average, amount = param.grad / world_size, param.grad.abs() / world_size
            for one in (average, amount):
                dist.all_reduce(one)
            averaged[name] += average
            amounts[name] += amount
            summed[name] += param.grad
            param.grad = None
    for total in summed.values():
        dist.all_reduce(total.div_(world_size))
    found = []
    for block in zero.blocks:
        cuts = parameters.cut_evenly(block.numels, world_size)
        for param, shard, of_ranks in zip(block.params, block.shards, cuts):
            if rank in of_ranks:
                own, name = of_ranks[rank], names[param]
                rounding = 2**-24 * amounts[name].flatten()[own] + 1e-30
                assert shard.grad is not None
                off = [
                    (shard.grad - theirs[name].flatten()[own]).abs() / rounding
                    for theirs in (averaged, summed)
                ]
                found.append((off[0].max().item(), off[1].max().item()))
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("backwards", [1, 2])
def test_gradients_differ_from_the_unsharded_loop_by_the_roundings_of_their_sums(
    ranks: int, backwards: int
) -> None:
    """A sum of n numbers makes at most n - 1 roundings, each at most of the sum of their amounts.

    Both loops sum `ranks * backwards` gradients, which were divided by the ranks with a rounding.
    """
    found = [pair for of_rank in run(gradients, ranks, backwards, backend="gloo") for pair in of_rank]
    most = 2 * ranks * backwards
    averaged, summed = (max(each) for each in zip(*found))
    assert averaged <= most
    assert summed <= most
    assert (averaged == 0) == (ranks == 2)
    assert (summed == 0) == (ranks == 2 and backwards == 1)


# ------------------------------------------------------------------------------------- awkward parameters


class Part(nn.Module):
    """A layer behind an activation; a second one that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.other_is_used = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.linear(x))
        return x + self.other(x) if self.other_is_used else x


class Chain(nn.Module):
    """Parts in a chain. Input and output: (batch, 6)."""

    backwards = 1  # of an update

    def __init__(self, parts: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.parts = nn.ModuleList(Part() for _ in range(parts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for part in self.parts:
            x = part(x)
        return x.square().sum()


class Tied(Chain):
    """Two parts have the same matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.parts[2].linear.weight = self.parts[0].linear.weight


class Twice(Chain):
    """The middle part is used twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in (0, 1, 1, 2):
            x = self.parts[number](x)
        return self.first(x).square().sum()


class Frozen(Chain):
    """A whole part is frozen, and one matrix of another."""

    def __init__(self) -> None:
        super().__init__()
        self.parts[1].requires_grad_(False)
        self.parts[0].linear.weight.requires_grad_(False)


class Unused(Chain):
    """A part has a layer that only some iterations use, and another part is left out by them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.parts[0].other_is_used = self.some = not getattr(self, "some", False)
        for part in self.parts if self.some else self.parts[:2]:
            x = part(x)
        return self.first(x).square().sum()


class UnusedFirst(Chain):
    """A part has a layer that the first of two backwards does not use."""

    backwards = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.parts[0].other_is_used = self.some = getattr(self, "some", True) is False
        return super().forward(x)


class Checkpointed(Chain):
    """The parts' forward is repeated in backward."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return x.square().sum()


class CheckpointedReentrant(Checkpointed):
    """The older way, in which a backward runs within the backward."""

    reentrant = True


class CheckpointedToTheEnd(Checkpointed):
    """The repeated forward goes on when all that backward needs is there, and ends with its hooks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with set_checkpoint_early_stop(False):
            return super().forward(x)


class Dicts(Chain):
    """Parts give dicts."""

    def __init__(self) -> None:
        super().__init__()
        for part in self.parts:
            part.register_forward_hook(lambda module, args, output: {"x": [output, None]})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for part in self.parts:
            x = part(x)["x"][0]
        return x.square().sum()


AWKWARD = [
    Chain, Tied, Twice, Frozen, Unused, UnusedFirst, Checkpointed, CheckpointedReentrant,
    CheckpointedToTheEnd, Dicts,
]  # fmt: skip


def awkward_equal(make: type[Chain]) -> list[int]:
    """Compare with the unsharded loop; return the numbers of gathers and of reductions in an iteration."""
    ours, plain = filled(make()), filled(make())
    zero = parameters.MinimalZero(ours, optim.AdamW, blocks=list(ours.parts), lr=1e-2)
    local = optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(4):
        torch.manual_seed(10 * step + dist.get_rank())
        x = torch.randn(4, 6)
        with recording_distributed() as calls:
            for _ in range(ours.backwards):
                ours(x).backward()
            zero.step()
        zero.zero_grad()
        for _ in range(ours.backwards):  # each is averaged by itself
            before = [param.grad for param in plain.parameters()]
            local.zero_grad()
            plain(x).backward()
            for param, earlier in zip(plain.parameters(), before):
                if param.grad is not None:
                    param.grad /= dist.get_world_size()
                    dist.all_reduce(param.grad)
                if earlier is not None:
                    param.grad = earlier if param.grad is None else earlier + param.grad
        local.step()
        local.zero_grad()
        for a, b in zip(values(zero, ours), plain.parameters(), strict=True):
            assert torch.equal(a, b), (make.__name__, step)
        assert all(param.numel() == 0 for param in ours.parameters() if param.requires_grad)
    return [sum(call.op == op for call in calls) for op in ("all_gather", "reduce_scatter")]


@pytest.mark.parametrize("make", AWKWARD)
def test_awkward_parameters_train_as_in_the_unsharded_loop(make: type[Chain]) -> None:
    counts = run(awkward_equal, 2, make, backend="gloo")[0]
    # The root and the parts, each gathered twice and reduced once.
    right = {
        Twice: [9, 4],  # once more for the second use in forward
        Frozen: [6, 3],  # a frozen part has nothing to gather
        Unused: [6, 3],  # nor has one that was left out
        UnusedFirst: [16, 8],  # in two backwards
    }
    assert counts == right.get(make, [8, 4])


def used_outside() -> str:
    model = filled(Chain())
    parameters.MinimalZero(model, optim.AdamW, blocks=list(model.parts))
    with pytest.raises(RuntimeError) as error:
        model.parts[1].linear(torch.ones(2, 6))
    return str(error.value)


def test_a_parameter_that_is_used_outside_of_its_block_is_an_error_on_all_ranks() -> None:
    """A freed parameter is empty. It would otherwise be read from memory that is not there."""
    for message in run(used_outside, 2, backend="gloo"):
        assert "must be a matrix, got 1-D" in message


# --------------------------------------------------------------------------------------- calls and memory


class Wide(nn.Module):
    """Large matrices, and activations of a few bytes."""

    def __init__(self, width: int = 240) -> None:
        super().__init__()
        self.first = nn.Linear(1, width, bias=False)
        self.parts = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for part in self.parts:
            x = part(x)
        return x.sum()


def measured(width: int) -> tuple[list[Call], int, int]:
    """The calls of an iteration, and the bytes held at its peak and after its step."""
    with TensorPeak() as made:
        model = filled(Wide(width))
        zero = parameters.MinimalZero(model, optim.SGD, blocks=list(model.parts), lr=1e-2)
        for _ in range(2):
            made.peak_bytes = made.bytes
            with recording_distributed() as calls:
                model(torch.ones(1, 1)).backward()
            peak = made.peak_bytes
            zero.step()
            zero.zero_grad()
    return calls, peak, made.bytes


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_rank_holds_its_shares_and_one_block(ranks: int) -> None:
    width = 240
    block, root = 4 * width**2, 4 * width
    small = 40 * 4 * width  # the activations, and a few vectors
    model = 4 * block + root
    for calls, peak, held in run(measured, ranks, width, backend="gloo"):
        assert model / ranks <= held <= model / ranks + small
        # At the first block's reduction: shares of all parameters and gradients, and the block's gradients as
        # they come from backward, and end to end.
        at_peak = 2 * 4 * block / ranks + 2 * block
        assert at_peak <= peak <= at_peak + small
        gathers = [root, block, block, block, block, root, block, block, block, block]
        assert [call.nbytes for call in calls if call.op == "all_gather"] == gathers
        reductions = [block, block, block, block, root]
        assert [call.nbytes for call in calls if call.op == "reduce_scatter"] == reductions
