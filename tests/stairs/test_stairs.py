"""Each of the stairs is a whole optimizer, and equal to the complete one, bit for bit."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from library.training import assert_state_dicts_equal, filled
from torch import nn, optim

from zero_ref.backward.sharded_data_parallel import ShardedDataParallel
from zero_ref.lab.meter import recording_distributed
from zero_ref.lab.ranks import run
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.shard.buckets import flat_like
from zero_ref.stairs import STAIRS, in_step

CUT = {"shards", "checkpoint", "parameters"}
"""Their ranks own pieces of parameters."""
REDUCES = {"overlap", *CUT}
"""Their hooks reduce gradients. The others need gradients that are averaged."""
SAVES = {"owners", "buckets", "overlap", "checkpoint"}
FOLDER = Path(__file__).parents[2] / "zero_ref" / "stairs"

SGD = (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01})
ADAMW = (optim.AdamW, {"lr": 1e-2})
STEPS = 3


# ------------------------------------------------------------------------------------------------ models


class Layers(nn.Module):
    """Two layers and a norm. The largest parameter has more than half of all elements."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(7, 23), nn.LayerNorm(23), nn.Linear(23, 3, bias=False)

    def forward(self, step: int) -> torch.Tensor:
        x = torch.ones(2, 7, dtype=self.up.weight.dtype)
        return self.down(self.norm(torch.tanh(self.up(x)))).sum()


class Tied(nn.Module):
    """An embedding that is also the output, a scalar, a frozen layer, and one that step 1 leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.out.weight = self.embed.weight
        self.scale = nn.Parameter(torch.empty(()))
        self.frozen, self.sometimes = nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen.requires_grad_(False)

    def forward(self, step: int) -> torch.Tensor:
        x = self.frozen(self.embed(torch.arange(5))) * self.scale
        return self.out(x if step == 1 else self.sometimes(x)).sum()


class Small(nn.Module):
    """Fewer parameters, and in one of two cases fewer elements, than ranks."""

    def __init__(self, numel: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(numel))

    def forward(self, step: int) -> torch.Tensor:
        return (self.weight * (step + 1)).sum()


class Image(nn.Module):
    """A convolution: parameters of four dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(2, 3, 3), nn.Linear(12, 5)

    def forward(self, step: int) -> torch.Tensor:
        return self.out(self.conv(torch.ones(1, 2, 4, 4)).flatten(1)).square().sum()


class Transposed(nn.Module):
    """A matrix that lies in memory column by column, beside one that lies row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.by_columns, self.by_rows = nn.Parameter(torch.empty(3, 7).t()), nn.Parameter(torch.empty(3, 4))

    def forward(self, step: int) -> torch.Tensor:
        return (torch.ones(2, 7) @ self.by_columns @ self.by_rows).square().sum()


MODELS: list[Callable[[], nn.Module]] = [Layers, Tied, Small, lambda: Small(5), Image, Transposed]


class Data:
    """Gives the gradients of a model's parameters, in place of those that backward computes.

    They are multiples of 12/64, so that sums over up to four ranks are exact in every order, and so are their
    averages, in 16 bits too. The complete optimizer may add in another order than a stair.
    """

    def __init__(self, model: nn.Module, rank: int) -> None:
        self.model, self.rank, self.step = model, rank, 0
        for number, param in enumerate(model.parameters()):
            if param.requires_grad:
                param.register_hook(lambda grad, number=number: self.gradient(number, grad))

    def gradient(self, number: int, like: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self.step + 10 * number + self.rank)
        whole_numbers = torch.randint(-10, 11, like.shape, generator=generator)
        return (12 / 64 * whole_numbers).to(like.dtype)

    def backward(self, step: int, model: nn.Module | None = None) -> None:
        self.step = step
        (model or self.model)(step).backward()


def average(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """As DDP does."""
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad, group=group)
            param.grad /= dist.get_world_size(group)


# ------------------------------------------------------------------------------- both, on the same gradients


def one_group(model: nn.Module) -> Any:
    return model.parameters()


def two_groups(model: nn.Module) -> Any:
    """Vectors and scalars in one, which lie between the others in the model."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "lr": 0.05},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]


def stair_on(stair: str, *args: Any, **options: Any) -> Any:
    return importlib.import_module(f"zero_ref.stairs.{stair}").MinimalZero(*args, **options)


def stair_of(stair: str, model: nn.Module, params: Any, *args: Any, **options: Any) -> Any:
    """The stair on these parameters; the last one gathers them with the model's parts."""
    if stair == "parameters":
        return stair_on(stair, model, *args, blocks=list(model.children()), **options)
    return stair_on(stair, params, *args, **options)


@contextlib.contextmanager
def whole(zero: Any) -> Iterator[None]:
    """The parameters have their values while this lasts."""
    blocks = getattr(zero, "blocks", [])
    for block in blocks:
        block.gather()
    yield
    for block in blocks:
        block.free()


def complete_on(stair: str, model: nn.Module, params: Any, *args: Any, **options: Any) -> Any:
    """The complete optimizer in the form of the stair, and what to call for a loss."""
    if stair in CUT:
        zero = ZeroRedundancyOptimizer(params, *args, partition="even", **options)
        return zero, ShardedDataParallel(model, zero)
    return ZeroRedundancyOptimizer(
        params, *args, parameters_as_bucket_view=stair in ("buckets", "overlap"), **options
    ), model


def train_both(
    stair: str,
    make_model: Callable[[], nn.Module],
    optimizer: tuple[type[optim.Optimizer], dict[str, float]],
    groups: Callable[[nn.Module], Any] = one_group,
    scheduled: bool = False,
    dtype: torch.dtype = torch.float32,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> None:
    """Three steps of both: equal parameters after each, and in the end equal state."""
    optimizer_class, given = optimizer
    ours, theirs = (filled(make_model()).to(dtype) for _ in range(2))
    start = [param.detach().clone() for param in ours.parameters()]
    our_data, their_data = (Data(model, dist.get_rank(group)) for model in (ours, theirs))
    # Hooks are called in the order of their registration, so the data come first.
    zero = stair_of(stair, ours, groups(ours), optimizer_class, group=group, **options, **given)
    complete, wrapped = complete_on(stair, theirs, groups(theirs), optimizer_class, group, **options, **given)
    for step in range(STEPS):
        if scheduled:
            for each in (*zero.param_groups, *complete.param_groups):
                each["lr"] *= 0.5
        our_data.backward(step)
        if stair not in REDUCES:
            average(ours, group)
        else:
            assert all(param.grad is None for param in ours.parameters()), "gradients are released"
        zero.step()
        their_data.backward(step, wrapped)
        if stair not in CUT:
            average(theirs, group)
        complete.step()
        for model, optimizer_of in ((ours, zero), (theirs, complete)):
            model.zero_grad() if stair not in CUT else optimizer_of.zero_grad()
            assert all(param.grad is None for param in model.parameters())
        label = f"{stair}, {make_model}, {optimizer_class.__name__}, step {step}"
        with whole(zero):
            for number, (a, b) in enumerate(zip(ours.parameters(), theirs.parameters(), strict=True)):
                assert a.isfinite().all()
                assert torch.equal(a, b), f"{label}, parameter {number}"
    with whole(zero):
        for before, param in zip(start, ours.parameters()):
            assert param.stride() == before.stride()
            assert torch.equal(before, param) is not param.requires_grad, (
                "what is trained moves, and nothing else"
            )
    complete.consolidate_state_dict(to="all")
    check_state(stair, zero, complete.state_dict())


def check_state(stair: str, zero: Any, plain: dict[str, Any]) -> None:
    """The local state is that of what this rank owns, and no more; and the gathered state is all of it."""
    kept = {param: state for param, state in zero.local.state.items() if state}
    if stair == "parameters":
        check_shares(zero, kept)
    elif stair not in CUT:
        assert set(kept) <= {zero.params[number] for number in zero.mine}
    else:
        assert {id(param) for param in kept} <= {id(shard) for shard in zero.shards.values()}
        for number, param in enumerate(zero.params):
            if param in zero.shards:
                own = zero.pieces[param][zero.rank]
                for key, value in kept.get(zero.shards[param], {}).items():
                    theirs = plain["state"][number][key]
                    right = flat_like(theirs, param)[own] if value.dim() else theirs
                    assert torch.equal(value, right), key
        share = -(-sum(param.numel() for param in zero.pieces) // zero.world_size)
        assert sum(shard.numel() for shard in zero.shards.values()) <= share
    if stair in SAVES:
        assert_state_dicts_equal(zero.state_dict(), plain)


def check_shares(zero: Any, kept: dict[torch.Tensor, Any]) -> None:
    """Each block's share is 1/N of it, and the local state is that of the shares."""
    for block in zero.blocks:
        assert block.world_size * len(block.share) == len(block.whole)
        assert len(block.whole) - sum(block.numels[:-1]) < block.world_size
    for shard, state in kept.items():
        assert shard in {shard for block in zero.blocks for shard in block.shards}
        assert all(value.shape == shard.shape for value in state.values() if value.dim())


def all_cases(stair: str) -> None:
    for make_model, optimizer in zip(MODELS, itertools.cycle([SGD, ADAMW])):
        train_both(stair, make_model, optimizer)
    train_both(stair, Layers, ADAMW)
    if stair not in CUT:  # whole parameters: an optimizer may use their shape
        train_both(stair, Layers, (optim.Adafactor, {"lr": 1e-2}))
    if stair == "checkpoint":
        for make_model in (Layers, Tied):
            train_both(stair, make_model, ADAMW, groups=two_groups, scheduled=True)
    if stair in ("checkpoint", "parameters"):
        for optimizer, dtype in itertools.product([SGD, ADAMW], [torch.bfloat16, torch.float32]):
            train_both(stair, Tied, optimizer, dtype=dtype, master_dtype=torch.float32)
        train_both(stair, Layers, (optim.SGD, {"lr": 1e-3}), dtype=torch.bfloat16, master_dtype=torch.float32)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("stair", "ranks"), [*((stair, 3) for stair in STAIRS), ("parameters", 2), ("parameters", 4)]
)
def test_a_stair_equals_the_complete_optimizer(stair: str, ranks: int) -> None:
    run(all_cases, ranks, stair, timeout=300)


def in_a_subgroup(stair: str) -> None:
    """Train in a subgroup, whose ranks are not 0..N-1."""
    group = dist.new_group([1, 2])
    if dist.get_rank() > 0:
        train_both(stair, Layers, ADAMW, group=group)


@pytest.mark.ranks
@pytest.mark.parametrize("stair", STAIRS)
def test_a_stair_takes_a_group_of_other_ranks(stair: str) -> None:
    run(in_a_subgroup, 3, stair, timeout=100)


def shortest() -> None:
    """Three steps of stage 2 in its shortest form, the second after two backwards, and of the plain loop."""
    makers = [Layers, Small, lambda: Small(5), Image, Transposed]
    for make_model, (optimizer_class, given) in zip(makers, itertools.cycle([SGD, ADAMW])):
        ours, theirs = filled(make_model()), filled(make_model())
        data = [Data(model, dist.get_rank()) for model in (ours, theirs)]
        zero = in_step.MinimalZero(ours.parameters(), optimizer_class, **given)
        plain = optimizer_class(theirs.parameters(), **given)
        for step in range(STEPS):
            for _ in range(1 + step % 2):
                for of_model in data:
                    of_model.backward(step)
            with recording_distributed() as calls:
                zero.step()
            assert [call.op for call in calls] == ["reduce_scatter", "all_gather"]
            average(theirs)
            plain.step()
            plain.zero_grad()
            for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert torch.equal(a, b)
                assert a.grad is None
        share = -(-sum(param.numel() for param in ours.parameters()) // dist.get_world_size())
        assert zero.local.param_groups[0]["params"][0].numel() == share


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_shortest_stage_2_equals_the_plain_loop(ranks: int) -> None:
    run(shortest, ranks, timeout=100)


# ----------------------------------------------------------------------------- what single stairs add


def real_gradients(during: bool) -> list[torch.Tensor]:
    """Parameters after steps on what backward computes; the hook is called during backward, or after it."""
    model = filled(Layers())
    zero = stair_on("overlap", model.parameters(), optim.AdamW, lr=1e-2)
    complete: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def note(param: torch.Tensor) -> None:
        complete.append((param, param.grad))
        param.grad = None

    if not during:
        for param in zero.params:
            param._post_accumulate_grad_hooks.clear()
            param.register_post_accumulate_grad_hook(note)
    for step in range(STEPS):
        torch.manual_seed(10 * step + zero.rank)
        x = torch.randn(4, 7)
        model.down(model.norm(torch.tanh(model.up(x)))).square().sum().backward()
        for param, param.grad in complete:
            zero.reduce(param)
        complete.clear()
        zero.step()
    return [param.detach() for param in model.parameters()]


@pytest.mark.ranks
def test_an_update_in_backward_leaves_backward_right() -> None:
    """A parameter that is updated before backward has read it would give other gradients.

    Both runs make the same reductions, and their parameters lie in the same buckets. So the sums and
    products, too, are rounded alike.
    """
    after, during = (run(real_gradients, 2, when) for when in (False, True))
    for one, other in zip(after, during, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def gradients_add_up(stair: str) -> None:
    model, other = filled(Layers()), filled(Layers())
    data, other_data = Data(model, dist.get_rank()), Data(other, dist.get_rank())
    zero = stair_of(stair, model, model.parameters(), optim.AdamW, lr=1e-2)
    complete, wrapped = complete_on(stair, other, other.parameters(), optim.AdamW, lr=1e-2)
    for step in range(2):
        data.backward(step)
        other_data.backward(step, wrapped)
    zero.step()
    complete.step()
    with whole(zero):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.ranks
@pytest.mark.parametrize("stair", sorted(CUT))
def test_gradients_of_several_backwards_add_up_in_the_shards(stair: str) -> None:
    run(gradients_add_up, 3, stair)


def part_of_the_update_in_backward() -> list[bool]:
    """For each parameter whether it has moved before `step`."""
    model = filled(Layers())
    zero = stair_on("overlap", model.parameters(), optim.AdamW, lr=1e-2)
    before = [param.detach().clone() for param in zero.params]
    Data(model, zero.rank).backward(0)
    for call in zero.sending:
        call.wait()
    return [not torch.equal(a, b) for a, b in zip(before, zero.params)]


@pytest.mark.ranks
def test_backward_updates_all_but_the_last_parameter() -> None:
    for moved in run(part_of_the_update_in_backward, 3):
        assert sum(moved) == len(moved) - 1


def saved(by: str, dtype: torch.dtype) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Two steps by the stair or by the complete optimizer; its state, and the parameters."""
    zero, model, data, wrapped = of(by, dtype)
    slow_down(zero)
    for step in range(2):
        data.backward(step, wrapped)
        zero.step()
        zero.zero_grad()
    if by == "complete":
        zero.consolidate_state_dict(to="all")
    return zero.state_dict(), [param.detach() for param in model.parameters()]


def of(by: str, dtype: torch.dtype) -> Any:
    """An optimizer with masters if parameters have 16 bits, its model and data that are alike on all ranks.

    So their average is the same at every world size.
    """
    model = filled(Tied()).to(dtype)
    data = Data(model, rank=0)
    options = {"lr": 1e-3, "master_dtype": torch.float32}
    if by == "complete":
        zero, wrapped = complete_on("checkpoint", model, two_groups(model), optim.AdamW, **options)
        return zero, model, data, wrapped
    return stair_on("checkpoint", two_groups(model), optim.AdamW, **options), model, data, model


def slow_down(zero: Any) -> None:
    """Options that only the state dict has."""
    for group in zero.param_groups:
        group["lr"] *= 0.5


def resumed(by: str, state: dict[str, Any], params: list[torch.Tensor]) -> list[torch.Tensor]:
    """Load, and make two steps more; twice, since the first time must leave the state dict as it is."""
    for _ in range(2):
        zero, model, data, wrapped = of(by, params[0].dtype)
        with torch.no_grad():
            for param, value in zip(model.parameters(), params, strict=True):
                param.copy_(value)
        zero.load_state_dict(state)
        for step in (2, 3):
            data.backward(step, wrapped)
            zero.step()
            zero.zero_grad()
    return [param.detach() for param in model.parameters()]


def uninterrupted(dtype: torch.dtype) -> list[torch.Tensor]:
    zero, model, data, wrapped = of("complete", dtype)
    slow_down(zero)
    for step in range(4):
        data.backward(step, wrapped)
        zero.step()
        zero.zero_grad()
    return [param.detach() for param in model.parameters()]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("before", "after", "dtype"),
    [(3, 2, torch.float32), (1, 3, torch.bfloat16)],
    ids=str,
)
def test_a_checkpoint_goes_on_in_either_at_another_world_size(
    before: int, after: int, dtype: torch.dtype
) -> None:
    whole = run(uninterrupted, 2, dtype)[0]
    for saver, loader in (("stair", "complete"), ("complete", "stair"), ("stair", "stair")):
        state, params = run(saved, before, saver, dtype)[-1]
        for of_rank in run(resumed, after, loader, state, params):
            for number, (a, b) in enumerate(zip(of_rank, whole, strict=True)):
                assert torch.equal(a, b), f"{saver} to {loader}: parameter {number}"


# ----------------------------------------------------------------------------------------- how they read


def test_the_stairs_are_short_and_commented() -> None:
    sources = [(FOLDER / f"{stair}.py").read_text(encoding="utf-8") for stair in STAIRS]
    lengths = [source.count("\n") for source in sources]
    assert max(lengths) <= 150, lengths
    assert sum(lengths) <= 750, lengths
    for stair, source in zip(STAIRS, sources):
        code = [
            line for line in re.sub(r'""".*?"""', "", source, flags=re.DOTALL).splitlines() if line.strip()
        ]
        comments = [line for line in code if "#" in line]
        assert len(comments) >= 0.13 * len(code), f"{stair}: {len(comments)} comments, {len(code)} lines"


def test_a_stair_needs_torch_and_the_functions_of_those_before() -> None:
    for number, stair in enumerate(STAIRS):
        source = (FOLDER / f"{stair}.py").read_text(encoding="utf-8")
        taken = re.findall(r"^(?:from|import) (\S+)(?: import (.*))?", source, flags=re.MULTILINE)
        for module, names in taken:
            if module.startswith("zero_ref"):
                assert module.removeprefix("zero_ref.stairs.") in STAIRS[:number]
                assert "MinimalZero" not in names
            else:
                assert module in {
                    "__future__",
                    "collections.abc",
                    "itertools",
                    "typing",
                    "torch",
                    "torch.distributed",
                }
