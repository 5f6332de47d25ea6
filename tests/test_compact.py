"""State dicts in memory of their own: what a file of them holds, and what stays as it was."""

from __future__ import annotations

import collections
import copy
import io
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn, optim

from zero_ref import OSS, ShardedDataParallel, ZeroRedundancyOptimizer, compact
from zero_ref.comm.collectives import Collectives
from zero_ref.lab import virtual


def size_of_file(saved: Any) -> int:
    file = io.BytesIO()
    torch.save(saved, file)
    return file.tell()


def model_with_small_head() -> nn.ModuleDict:
    model = nn.ModuleDict(
        {"body": nn.Linear(300, 300), "head": nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))}
    )
    for number, param in enumerate(model.parameters()):
        nn.init.constant_(param, number)
    return model


MAKERS: dict[str, Callable[[nn.Module, Collectives], Any]] = {
    "views": lambda model, comm: ZeroRedundancyOptimizer(
        model.parameters(), optim.AdamW, comm, parameters_as_bucket_view=True, partition="even"
    ),
    "shares": lambda model, comm: ShardedDataParallel(
        model,
        ZeroRedundancyOptimizer(
            model.parameters(), optim.AdamW, comm, parameters_as_bucket_view=True, partition="equal_shares"
        ),
    ),
    "OSS": lambda model, comm: OSS(model.parameters(), optim.AdamW, comm),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_a_part_of_a_model_whose_parameters_are_views_makes_a_small_file(maker: str) -> None:
    plain = model_with_small_head()["head"]

    def on_rank(comm: Collectives) -> list[Any]:
        model = model_with_small_head()
        MAKERS[maker](model, comm)
        head = model["head"]
        state = compact(head.state_dict())
        for name, expected in plain.state_dict().items():
            assert torch.equal(state[name], expected)
        loaded = model_with_small_head()["head"]
        loaded.load_state_dict(state)
        assert state._metadata == plain.state_dict()._metadata  # type: ignore[attr-defined]
        sizes = [size_of_file(each) for each in (head.state_dict(), state)]
        return [*sizes, size_of_file(copy.deepcopy(head))]

    for whole, small, module in virtual.run(on_rank, 2):
        assert whole > (small if maker == "OSS" else 300 * 300 * 4), (
            "OSS has given the head to the other rank"
        )
        assert small == size_of_file(plain.state_dict())
        assert module == size_of_file(plain)


def test_what_fills_its_memory_stays_and_what_does_not_is_copied() -> None:
    flat = torch.arange(12.0)
    alone, empty = torch.ones(3, 2).t(), torch.empty(0, 3)
    state = {
        "alone": alone,
        "part": flat[2:6].view(2, 2).t(),
        "column": torch.eye(3)[:, 1],
        "empty": empty,
        "n": 1,
    }
    made = compact(state)
    assert made["alone"] is alone
    assert made["n"] == 1
    for name, tensor in made.items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(tensor, state[name])  # type: ignore[arg-type]
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert made["part"].stride() == (1, 2)
    made["part"].zero_()
    assert torch.equal(flat, torch.arange(12.0)), "the caller's tensors are not written to"


def test_tensors_that_overlap_do_so_in_the_result_too() -> None:
    flat = torch.arange(20.0)
    state = {
        "weight": flat[4:8].view(2, 2),
        "tied": flat[4:8].view(2, 2),
        "turned": flat[10:14].view(2, 2).t(),
        "other": flat[10:14].view(2, 2),
        "tail": flat[12:16],
        "inside": flat[13:14],
        "last": flat[15:16],
        "beside": flat[16:18],
    }
    made = compact(state)
    for name, tensor in state.items():
        assert torch.equal(made[name], tensor)
        assert made[name].stride() == tensor.stride()
    made["weight"].fill_(-1.0)
    made["turned"][1, 1] = -2.0
    assert made["tied"].tolist() == [[-1, -1], [-1, -1]]
    assert made["other"].tolist() == [[10, 11], [12, -2]]
    assert made["tail"].tolist() == [12, -2, 14, 15]
    made["last"].fill_(-3.0)
    assert made["tail"].tolist() == [12, -2, 14, -3]
    assert made["inside"].tolist() == [-2]
    assert made["beside"].tolist() == [16, 17]
    nbytes = {made[name].untyped_storage().data_ptr(): made[name].untyped_storage().nbytes() for name in made}
    assert sum(nbytes.values()) == 4 * (4 + 6 + 2)


class Pair(NamedTuple):
    first: Any
    second: Any


def test_containers_parameters_and_tensors_of_other_kinds_stay_what_they_are() -> None:
    flat = torch.arange(8.0)
    param = nn.Parameter(flat[:2], requires_grad=False)
    sparse = torch.eye(2).to_sparse()
    state = collections.OrderedDict(
        param=param, again=[param, (flat[2:3], "text", None)], pair=Pair(flat[3:4], sparse),
        meta=torch.empty(2, device="meta"), double=flat.view(torch.float64)[3:],
    )  # fmt: skip
    made = compact(state)
    assert type(made) is collections.OrderedDict
    assert list(made) == list(state)
    assert type(made["param"]) is nn.Parameter
    assert not made["param"].requires_grad
    assert made["again"][0] is made["param"], "one object stays one"
    assert made["again"][1][1:] == ("text", None)
    assert isinstance(made["pair"], Pair)
    assert made["pair"].first.untyped_storage().nbytes() == 4
    assert made["pair"].second is sparse
    assert made["meta"] is state["meta"]
    assert torch.equal(made["double"], state["double"])
    assert made["double"].untyped_storage().nbytes() == 8
    assert compact(flat[5:6]).untyped_storage().nbytes() == 4
    with pytest.raises(TypeError, match="compact takes a state dict, not Linear: pass what state_dict"):
        compact(nn.Linear(1, 1))  # type: ignore[type-var]


def test_the_state_of_an_optimizer_needs_no_copy_once_it_is_gathered() -> None:
    def on_rank(comm: Collectives) -> None:
        params = [nn.Parameter(torch.ones(8, 8)) for _ in range(6)]
        optimizer = ZeroRedundancyOptimizer(params, optim.AdamW, comm, parameters_as_bucket_view=True)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        optimizer.consolidate_state_dict("all")
        state_dict = optimizer.state_dict()
        made = compact(state_dict)
        for number, of_param in state_dict["state"].items():
            assert all(made["state"][number][key] is value for key, value in of_param.items())
        own = next(iter(optimizer.optim.state.values()))  # small parameters are stepped as one tensor
        assert own["exp_avg"].untyped_storage().nbytes() > own["exp_avg"].nbytes
        assert compact(own)["exp_avg"].untyped_storage().nbytes() == own["exp_avg"].nbytes

    virtual.run(on_rank, 2)
