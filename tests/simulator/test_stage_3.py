"""Stage 3: what torch's FSDP2 sends and holds on real ranks, call by call and byte by byte as scheduled."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from zero_ref.lab import ranks
from zero_ref.lab.config import GPTConfig
from zero_ref.lab.meter import HeldBytes, bytes_sent_by, recording_distributed
from zero_ref.lab.model import GPT
from zero_ref.lab.stage_3 import held_bytes, local_part
from zero_ref.lab.strategies import Stair
from zero_ref.plan.calls import Call
from zero_ref.simulator.models import blocks, from_module
from zero_ref.simulator.recipe import recipe
from zero_ref.simulator.schedule import Schedule, schedule
from zero_ref.stairs.parameters import MinimalZero

pytestmark = pytest.mark.ranks


# ------------------------------------------------------------------------------------------------ the models


class Odd(nn.Module):
    """Parameters of any shape, of which some may have fewer rows than there are ranks."""

    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
        super().__init__()
        self.own = nn.ParameterList(nn.Parameter(torch.full(shape, 0.1, dtype=dtype)) for shape in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.stack([param.square().sum() for param in self.own]).sum()
        return x * scale.to(x.dtype)


class Stack(nn.Module):
    """An embedding, blocks of odd shapes and maybe a head. Its first block gets an input with a gradient."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.tokens = nn.Embedding(rng.randint(1, 13), rng.randint(1, 7))
        self.blocks = nn.ModuleList(
            # All that a block trains is of one dtype, which FSDP2 insists on; blocks may differ.
            Odd(
                [
                    tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 3)))
                    for _ in range(rng.randint(1, 5))
                ],
                rng.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16]),
            )
            for _ in range(seed % 5)
        )
        self.head = nn.Linear(self.tokens.embedding_dim, rng.randint(1, 5)) if rng.random() < 0.5 else None
        for block in self.blocks:
            frozen = rng.sample(list(block.parameters()), rng.choice([0, 0, 1]))
            for param in frozen[: len(list(block.parameters())) - 1]:
                param.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens % self.tokens.num_embeddings)
        for block in self.blocks:
            x = block(x)
        return (x if self.head is None else self.head(x)).square().mean()


def gpt() -> GPT:
    return GPT(GPTConfig(layers=2, heads=2, width=128, context=16))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": gpt,
    **{f"stack-{seed}": partial(Stack, seed) for seed in range(8)},
}


def foreseen(make: Callable[[], nn.Module], world_size: int) -> Schedule:
    """Made in one process, from names, shapes and dtypes."""
    model = make()
    params = from_module(model)
    return schedule(recipe("zero-3", optimizer="AdamW"), params, world_size, blocks=blocks(params))


# -------------------------------------------------------------------------------------------- what is seen


class Seen(NamedTuple):
    calls: list[list[Call]]
    held: HeldBytes
    sent_bytes: int | None


def sharded(make: Callable[[], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.fsdp import fully_shard  # loads for a second: only where it is used

    torch.manual_seed(0)
    model = make()
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block)  # type: ignore[arg-type]
    fully_shard(model)
    trained = [param for param in model.parameters() if param.requires_grad]
    return model, torch.optim.AdamW(trained)


def iterate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tokens = torch.arange(16).view(1, 16)
    optimizer.zero_grad()
    model(*[tokens, tokens] if isinstance(model, GPT) else [tokens]).backward()
    optimizer.step()


def recorded(names: list[str]) -> dict[str, Seen]:
    """Two iterations of each model, on one rank."""
    seen = {}
    for name in names:
        model, optimizer = sharded(MODELS[name])
        calls = []
        for _ in range(2):
            with recording_distributed() as of_iteration:
                iterate(model, optimizer)
            calls.append(of_iteration)
        held = held_bytes(model.parameters(), optimizer)
        sent = bytes_sent_by(lambda m=model, o=optimizer: iterate(m, o)) if name == "gpt" else None  # type: ignore[misc]
        seen[name] = Seen(calls, held, sent)
    return seen


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.thorough)])
def of_ranks(request: pytest.FixtureRequest) -> list[dict[str, Seen]]:
    return ranks.run(recorded, request.param, list(MODELS), timeout=60, backend="gloo")


@pytest.mark.parametrize("name", MODELS)
def test_every_call_is_as_scheduled_from_the_first_iteration_on(
    name: str, of_ranks: list[dict[str, Seen]]
) -> None:
    plan = foreseen(MODELS[name], len(of_ranks))
    assert plan.calls
    for rank, seen in enumerate(of_ranks):
        assert seen[name].calls == [list(plan.calls_of(rank))] * 2


@pytest.mark.parametrize("name", MODELS)
def test_every_rank_holds_what_is_scheduled(name: str, of_ranks: list[dict[str, Seen]]) -> None:
    plan = foreseen(MODELS[name], len(of_ranks))
    for rank, seen in enumerate(of_ranks):
        assert seen[name].held == (
            plan.parameter_bytes[rank],
            plan.gradient_bytes[rank],
            plan.state_bytes[rank],
        )


def test_the_models_are_of_many_kinds() -> None:
    plans = [foreseen(make, 4) for make in MODELS.values()]
    assert any(len(set(plan.state_bytes)) > 1 for plan in plans), "the last ranks have fewer rows"
    assert any(plan.parameter_bytes != plan.gradient_bytes for plan in plans), "something is frozen"
    numbers = [len(blocks(from_module(make()))) for make in MODELS.values()]
    assert set(numbers) == {1, 2, 3, 4, 5}


def test_gloos_reduce_scatter_sends_as_much_as_an_all_reduce(of_ranks: list[dict[str, Seen]]) -> None:
    if sys.platform != "linux":
        pytest.skip("the kernel's counters are Linux's")
    plan = foreseen(MODELS["gpt"], len(of_ranks))
    sent = sum(seen["gpt"].sent_bytes or 0 for seen in of_ranks)
    # Two barriers and the headers of Gloo's messages: some kilobytes beside 6.9 MB on two ranks.
    assert sent == pytest.approx(plan.wire_bytes("gloo"), rel=0.01)
    assert plan.wire_bytes("gloo") > 1.3 * plan.wire_bytes("nccl"), "4 times the parameters, not 3"


def test_one_rank_sends_nothing() -> None:
    plan = foreseen(MODELS["stack-3"], 1)
    (seen,) = ranks.run(recorded, 1, ["stack-3"], backend="gloo")
    assert seen["stack-3"].calls == [[], []] == [list(plan.calls)] * 2
    held = (plan.parameter_bytes[0], plan.gradient_bytes[0], plan.state_bytes[0])
    assert seen["stack-3"].held == held


# ---------------------------------------------------------------------------------------------- the stair


def by_the_stair(names: list[str]) -> dict[str, Seen]:
    """Two iterations of each model, on one rank, by the last of the stairs."""
    seen = {}
    for name in names:
        torch.manual_seed(0)
        model = MODELS[name]()
        zero: Any = MinimalZero(model, torch.optim.AdamW, blocks=list(model.blocks))  # type: ignore[arg-type]
        made, calls = Stair(model, zero), []
        for _ in range(2):
            with recording_distributed() as of_iteration:
                iterate(model, zero)
            calls.append(of_iteration)
        seen[name] = Seen(calls, made.held(), None)
    return seen


@pytest.mark.parametrize("world_size", [1, 3, pytest.param(2, marks=pytest.mark.thorough)])
def test_the_stair_calls_and_holds_what_is_scheduled(world_size: int) -> None:
    of_ranks = ranks.run(by_the_stair, world_size, list(MODELS), timeout=60, backend="gloo")
    for name, make in MODELS.items():
        params = from_module(make())
        plan = schedule("zero-3-stair", params, world_size, blocks=blocks(params))
        for rank, seen in enumerate(of_ranks):
            assert seen[name].calls == [list(plan.calls_of(rank))] * 2, name
            held = (plan.parameter_bytes[rank], plan.gradient_bytes[rank], plan.state_bytes[rank])
            assert seen[name].held == held, name


# ------------------------------------------------------------------------------------ the measuring itself


def parts_of_a_parameter() -> Any:
    model, _ = sharded(gpt)
    weight = model.get_parameter("positions.weight")  # (16, 128)
    part = local_part(weight)
    return weight.nbytes, tuple(part.shape), part.data_ptr() == local_part(weight).data_ptr()


def test_a_dtensors_local_part_is_this_ranks_rows_and_no_copy() -> None:
    for whole_nbytes, shape, same_memory in ranks.run(parts_of_a_parameter, 2, backend="gloo"):
        assert whole_nbytes == 4 * 16 * 128
        assert shape == (8, 128)
        assert same_memory
