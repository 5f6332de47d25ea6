"""Checkpoints between real ranks: saved at 4, loaded at 2, at 1 and in the plain torch optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from library.training import (
    MODES,
    Run,
    Snapshot,
    Tangle,
    assert_same,
    assert_state_dicts_equal,
    train,
)
from torch import nn, optim

from zero_ref.comm.backend import as_collectives
from zero_ref.lab.ranks import run
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer

pytestmark = pytest.mark.ranks


def mixed_model() -> nn.Module:
    model = Tangle()
    model.up.to(torch.bfloat16)
    model.conv.to(torch.float64)
    model.down.weight.data = model.down.weight.data.to(torch.complex64)
    model.shift.requires_grad_(True)
    model.norm.requires_grad_(False)  # trainable elsewhere: here it has no state
    return model


# --------------------------------------------------------------------------- save at 4, load at 2, 1, nowhere


def save(case: Run, modes: list[Any]) -> list[Any]:
    comm = as_collectives(None)
    return [case.on_rank(comm, range(2), to=0, partition=p, parameters_as_bucket_view=v)[1] for p, v in modes]


def resume(case: Run, values: Snapshot, states: list[Any], modes: list[Any]) -> list[list[Snapshot]]:
    comm = as_collectives(None)
    return [
        case.on_rank(comm, range(2, 4), values, state, partition=p, parameters_as_bucket_view=v)[0]
        for state, (p, v) in zip(states, modes, strict=True)
    ]


def test_saved_at_4_it_goes_on_at_2_at_1_and_in_plain_torch() -> None:
    modes = MODES[::3]
    case = Run(optim.AdamW, make_model=mixed_model)
    first, middle = case.plain(range(2))
    rest, _ = case.plain(range(2, 4), first[-1], middle)

    states, *others = run(save, 4, case, modes)
    assert others == [[None] * len(modes)] * 3
    for state, mode in zip(states, modes, strict=True):
        assert_state_dicts_equal(state, middle)
        assert_same(case.plain(range(2, 4), first[-1], state)[0], rest, f"{mode} into plain torch")
    other_modes = modes[1:] + modes[:1]
    for world_size in (2, 1):
        for resumed in run(resume, world_size, case, first[-1], states, other_modes):
            for trained, mode in zip(resumed, other_modes, strict=True):
                assert_same(trained, rest, f"at {world_size} ranks, {mode}")


# ----------------------------------------------------------------------------------------------- what travels


DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]
DTYPES += [
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]


class Quantised(optim.SGD):
    """Keeps state of every dtype, as 8-bit optimizers do of some, in several shapes."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for param in self.param_groups[0]["params"]:
            for dtype in DTYPES:
                self.state[param][str(dtype)] = torch.tensor([1.0, 0.0, 2.0]).to(dtype)
                self.state[param][f"empty {dtype}"] = torch.empty(0, 2, dtype=dtype)
                self.state[param][f"one {dtype}"] = torch.tensor(1.0).to(dtype)


def state_of_every_dtype(to: Any) -> int:
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    optimizer = ZeroRedundancyOptimizer(params, Quantised, lr=0.1)
    for param in params:
        param.grad = torch.ones(3)
    optimizer.step()
    optimizer.consolidate_state_dict(to=to)
    if to not in (dist.get_rank(), "all"):
        return 0
    checked = 0
    for state in optimizer.state_dict()["state"].values():
        for dtype in DTYPES:
            value = state[str(dtype)]
            assert value.dtype == dtype
            assert (
                value.to(torch.complex128).tolist()
                == torch.tensor([1.0, 0.0, 2.0]).to(dtype).to(torch.complex128).tolist()
            )
            assert state[f"empty {dtype}"].shape == (0, 2)
            one = state[f"one {dtype}"]
            assert (one.dtype, one.shape, one.to(torch.complex128).item()) == (dtype, (), 1.0)
            checked += 1
    return checked


@pytest.mark.parametrize("to", [1, "all"])
def test_state_of_every_dtype_arrives(to: Any) -> None:
    assert run(state_of_every_dtype, 2, to) == [2 * len(DTYPES) * (to in (rank, "all")) for rank in range(2)]


# -------------------------------------------------------------------------------------------------- subgroups


def in_a_subgroup(case: Run, middle: Any, values: Snapshot) -> list[Any]:
    odd = dist.new_group([1, 3])
    if dist.get_rank() % 2 == 0:
        return []
    comm = as_collectives(odd)
    states = [case.on_rank(comm, range(2), to=to)[1] for to in (0, 1, "all")]
    trained, _ = case.on_rank(comm, range(2, 4), values, middle, partition="even")
    return [*states, trained]


def test_in_a_subgroup_ranks_count_within_it() -> None:
    case = Run(optim.AdamW)
    first, middle = case.plain(range(2))
    rest, _ = case.plain(range(2, 4), first[-1], middle)
    values = run(in_a_subgroup, 4, case, middle, first[-1])
    assert values[0] == values[2] == []
    for rank, (to_first, to_second, to_all, trained) in enumerate((values[1], values[3])):
        assert (to_first is None, to_second is None) == (rank == 1, rank == 0)
        assert_state_dicts_equal(to_all, middle)
        assert_state_dicts_equal(to_second if rank else to_first, middle)
        assert_same(trained, rest, f"rank {rank} of the subgroup")


def several_in_a_row() -> None:
    """Saving to every rank while training: nothing of one save is left on the wire for the next."""
    model = Tangle()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, partition="even")
    for step, _ in enumerate(train(model, optimizer, range(6))):
        optimizer.consolidate_state_dict(to=step % 2)
        if step % 2 == optimizer.rank:
            assert optimizer.state_dict()["state"][0]["step"] == step + 1


def test_saving_between_steps() -> None:
    run(several_in_a_row, 2)
