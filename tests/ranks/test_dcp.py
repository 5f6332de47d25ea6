"""torch.distributed.checkpoint and FSDP beside this optimizer, both ways, at other world sizes.

A model is trained for some steps by one program, saved, and goes on in the other. Gradients are the same for
both, so the parameters must equal those of the plain optimizer on one process bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW
from training import Snapshot, assert_same, filled

from zero_ref.lab.ranks import run, shutdown
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.state.dcp import DCPReader, StatefulOptimizer
from zero_ref.state.sharded import load_sharded, save_sharded

pytestmark = pytest.mark.ranks
EVERYTHING = StateDictOptions(full_state_dict=True, cpu_offload=True)
PARTIAL = DefaultLoadPlanner(allow_partial_load=True)


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    yield
    shutdown()


class Parts(nn.Module):
    """Parameters of 1, 2 and 4 dimensions; those of `unused` never get a gradient, that of `shift` is frozen."""

    def __init__(self, channels_last: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(9, 70)
        self.conv = nn.Conv2d(5, 6, 3)
        self.norm = nn.LayerNorm(8)
        self.unused = nn.Linear(3, 5)
        self.shift = nn.Parameter(torch.zeros(7), requires_grad=False)
        filled(self)
        if channels_last:
            self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def groups(model: nn.Module, turned: bool = False, named: bool = False) -> list[dict[str, Any]]:
    """Vectors and tensors with other options; `turned`, the groups and what is in them in another order."""
    found: dict[bool, list[Any]] = {False: [], True: []}
    for name, param in model.named_parameters():
        found[param.ndim > 1].append((name, param) if named else param)
    made = [
        {"params": found[False], "weight_decay": 0.0, "lr": 0.03},
        {"params": found[True], "weight_decay": 0.1, "lr": 0.02, "betas": (0.8, 0.95)},
    ]
    return [{**group, "params": group["params"][::-1]} for group in reversed(made)] if turned else made


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, which: range) -> list[Snapshot]:
    """Parameters after each step, whole and by the order of the model; the same gradients on all ranks."""
    snapshots = []
    for step in which:
        for index, (name, param) in enumerate(model.named_parameters()):
            if not param.requires_grad or name.startswith("unused"):
                continue
            generator = torch.Generator().manual_seed(1000 * step + index)
            grad = torch.randn(param.shape, generator=generator).to(param.dtype)
            if isinstance(param, DTensor):
                grad = distribute_tensor(grad, param.device_mesh, param.placements)
            param.grad = torch.empty_like(param).copy_(grad)
        optimizer.step()
        snapshots.append([whole(param).detach().clone() for param in model.parameters()])
    return snapshots


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def plain() -> tuple[list[Snapshot], Any]:
    """On one process: parameters after steps 2 and 3, and the state after step 1 by names."""
    model = Parts()
    optimizer = AdamW(groups(model))
    steps(model, optimizer, range(2))
    state = get_optimizer_state_dict(model, optimizer)
    return steps(model, optimizer, range(2, 4)), state


def fsdp(**options: Any) -> tuple[nn.Module, AdamW]:
    model = Parts()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, AdamW(groups(model, **options))


def ours(
    channels_last: bool = False, turned: bool = False, named: bool = False, **options: Any
) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    model = Parts(channels_last)
    options = {"partition": "even", **options}
    return model, ZeroRedundancyOptimizer(groups(model, turned, named), AdamW, **options)


def whole_state(state: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, whole, state)


def assert_states_equal(found: Any, expected: Any) -> None:
    assert found["state"].keys() == expected["state"].keys()
    for name, of_param in expected["state"].items():
        assert found["state"][name].keys() == of_param.keys(), name
        for key, value in of_param.items():
            assert torch.equal(found["state"][name][key], value), (name, key)


# ----------------------------------------------------------------------------- DCP, sharded, in both directions


def ours_saves(path: Path, flatten: bool = False, **options: Any) -> None:
    model, optimizer = ours(**options)
    steps(model, optimizer, range(2))
    state = {"model": get_model_state_dict(model), "optim": StatefulOptimizer(model, optimizer, flatten=flatten)}
    dcp.save(state, checkpoint_id=path)


def ours_goes_on(path: Path, reader: Any = None, **options: Any) -> tuple[list[Snapshot], Any]:
    model, optimizer = ours(**options)
    zeroed(model)
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    dcp.load({**state, "optim": StatefulOptimizer(model, optimizer, path)}, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    return steps(model, optimizer, range(2, 4)), list_of_state(optimizer)


def list_of_state(optimizer: ZeroRedundancyOptimizer) -> list[int]:
    """How many elements of state this rank has."""
    return sum(value.numel() for of in optimizer.state.values() for value in of.values() if value.ndim)


def fsdp_saves(path: Path, flatten: bool = False, **options: Any) -> None:
    model, optimizer = fsdp(**options)
    steps(model, optimizer, range(2))
    as_said = StateDictOptions(flatten_optimizer_state_dict=flatten)
    state = get_optimizer_state_dict(model, optimizer, options=as_said)
    dcp.save({"model": get_model_state_dict(model), "optim": state}, checkpoint_id=path)


def fsdp_goes_on(path: Path | None, reader: Any = None, flatten: bool = False, **options: Any) -> list[Snapshot]:
    model, optimizer = fsdp(**options)
    zeroed(model)
    as_said = StateDictOptions(flatten_optimizer_state_dict=flatten, strict=False)
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer, options=as_said),
    }
    if reader is not None:
        dcp.load(state, storage_reader=reader(), planner=PARTIAL)
    else:
        dcp.load(state, checkpoint_id=path, planner=PARTIAL)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"], options=as_said)
    return steps(model, optimizer, range(2, 4))


@torch.no_grad()
def zeroed(model: nn.Module) -> None:
    for param in model.parameters():
        param.zero_()


@pytest.mark.parametrize("flatten", [False, True])
def test_what_fully_shard_saved_at_2_goes_on_here_at_3(tmp_path: Path, flatten: bool) -> None:
    rest, _ = plain()
    run(fsdp_saves, 2, tmp_path, flatten)
    results = run(ours_goes_on, 3, tmp_path, channels_last=True, turned=not flatten)
    numels = [numel for _, numel in results]
    for trained, _ in results:
        assert_same(trained, rest, "from fully_shard")
    assert max(numels) < 0.4 * sum(numels)


@pytest.mark.parametrize("flatten", [False, True])
def test_what_was_saved_here_at_3_goes_on_under_fully_shard_at_2(tmp_path: Path, flatten: bool) -> None:
    rest, _ = plain()
    run(ours_saves, 3, tmp_path, flatten, channels_last=True, turned=True)
    for trained in run(fsdp_goes_on, 2, tmp_path, flatten=flatten, turned=True):
        assert_same(trained, rest, "to fully_shard")


def test_the_keys_shapes_and_dtypes_are_those_of_a_plain_optimizer(tmp_path: Path) -> None:
    run(fsdp_saves, 2, tmp_path / "fsdp")
    run(ours_saves, 3, tmp_path / "ours")

    def described(path: Path) -> dict[str, Any]:
        found = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        return {
            name: (stored.size, stored.properties.dtype) if hasattr(stored, "size") else "bytes"
            for name, stored in found.items()
        }

    assert described(tmp_path / "ours") == described(tmp_path / "fsdp")


@pytest.mark.parametrize("partition", ["sorted_greedy", "equal_shares"])
def test_a_save_here_goes_on_here_at_another_world_size(tmp_path: Path, partition: str) -> None:
    rest, _ = plain()
    run(ours_saves, 2, tmp_path, partition=partition, channels_last=True)
    for trained, _ in run(ours_goes_on, 3, tmp_path, turned=True):
        assert_same(trained, rest, "here and here")


# ------------------------------------------------------------------------------- save_sharded, and DCP's loader


def saves_sharded(path: Path, **options: Any) -> None:
    model, optimizer = ours(**options)
    steps(model, optimizer, range(2))
    save_sharded(optimizer, path)


def test_a_sharded_save_goes_on_under_fully_shard(tmp_path: Path) -> None:
    rest, _ = plain()
    run(saves_sharded, 3, tmp_path, named=True, channels_last=True)
    for trained in run(fsdp_goes_on, 2, None, lambda: DCPReader(tmp_path)):
        assert_same(trained, rest, "a sharded save")
