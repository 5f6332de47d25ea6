"""State that is a tensor subclass or a list: gathered, loaded, handed over and stored in shards as it is."""

from __future__ import annotations

import collections
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from library.halved import Around, Halved
from torch import nn
from torch.optim import Optimizer

from zero_ref.comm.collectives import Collectives
from zero_ref.files.dcp import StatefulOptimizer
from zero_ref.files.sharded import load_sharded, save_sharded
from zero_ref.lab import virtual
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.shard import subclasses


class HalvedMomentum(Optimizer):
    """SGD with a momentum that is `Halved` for weights, and plain for what is small."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            before = state.get("momentum", torch.zeros_like(param))
            momentum = param.grad + 0.9 * (before.values() if isinstance(before, Halved) else before)
            param -= self.param_groups[0]["lr"] * momentum
            state["step"] = state.get("step", 0) + 1
            state["momentum"] = Around.around(Halved.of(momentum)) if param.numel() > 4 else momentum


class InLists(Optimizer):
    """Turns gradients, as SOAP does, by matrices that it keeps in lists; keeps other things in lists too."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            state, grad = self.state[param], param.grad.reshape(param.shape[0], -1)
            if not state:
                state["GG"] = [torch.zeros(len(grad), len(grad)), []]
                state["old"] = ({"low": Halved.of(grad), 2: (0, "text", torch.tensor(0.5))}, None, True)
            state["GG"][0].lerp_(grad @ grad.T, 0.1)
            state["Q"] = [torch.linalg.qr(state["GG"][0])[0], None]
            assert state["Q"][0].stride()[0] == 1, "by columns: a product rounds otherwise by rows"
            low, count = state["old"][0]["low"], state["old"][0][2][0]
            step = state["Q"][0] @ (grad + low.values()) * (1 + count)
            param -= self.param_groups[0]["lr"] * step.reshape(param.shape)
            state["old"] = ({"low": Halved.of(grad), 2: (count + 1, "text", torch.tensor(0.5))}, None, True)


class ListsByElement(Optimizer):
    """Two averages of the gradient in a list, of each element by itself."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                state = self.state[param]
                fast, slow = state.setdefault("averages", [torch.zeros_like(param) for _ in range(2)])
                count = state.setdefault("more", {"count": torch.zeros(())})["count"]
                state["averages"][0] = fast + param.grad
                slow.add_(param.grad, alpha=0.1)
                count += 1
                param -= self.param_groups[0]["lr"] * (state["averages"][0] + slow) / count


MODEL = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(16, 64))
MODEL.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def train(optimizer: Optimizer, steps: range) -> list[torch.Tensor]:
    """The parameters after these steps, on gradients that depend on the step alone."""
    params: list[torch.Tensor] = optimizer.param_groups[0]["params"]
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for param in params:
            param.grad = torch.empty_like(param).copy_(torch.randn(param.shape, generator=generator))
        optimizer.step()
    return [param.detach().clone() for param in params]


def plain(kind: Any = HalvedMomentum, **options: Any) -> Optimizer:
    return kind(copy.deepcopy(MODEL).parameters(), **options)  # type: ignore[no-any-return]


def zero(comm: Collectives, kind: Any = HalvedMomentum, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(copy.deepcopy(MODEL).parameters(), kind, comm, **options)


def assert_equal(ours: Any, theirs: Any) -> None:
    """Assert the same types at all levels, and equal tensors with the same order in memory."""
    assert type(ours) is type(theirs)
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        ours, theirs = list(ours.values()), list(theirs.values())
    if isinstance(theirs, (list, tuple)):
        for one, other in zip(ours, theirs, strict=True):
            assert_equal(one, other)
    elif subclasses.is_traceable_wrapper_subclass(theirs):
        (names, context), (other_names, other_context) = (
            ours.__tensor_flatten__(),
            theirs.__tensor_flatten__(),
        )
        assert_equal([names, context], [other_names, other_context])
        assert_equal([getattr(ours, name) for name in names], [getattr(theirs, name) for name in names])
    elif isinstance(theirs, torch.Tensor):
        assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())
        assert torch.equal(ours, theirs)
    else:
        assert ours == theirs


# --------------------------------------------------------------------------------- kept for what they are


BOTH = pytest.mark.parametrize("kind", [HalvedMomentum, InLists])


@pytest.mark.parametrize(("kind", "to"), [(HalvedMomentum, "all"), (InLists, 0)])
def test_the_state_dict_is_that_of_the_plain_optimizer_and_each_loads_that_of_the_other(
    to: Any, kind: Any
) -> None:
    def on_rank(comm: Collectives) -> Any:
        optimizer = zero(comm, kind)
        train(optimizer, range(2))
        optimizer.consolidate_state_dict(to)
        return optimizer.state_dict() if to in ("all", comm.rank) else None

    def resume(comm: Collectives, state: Any, values: list[torch.Tensor]) -> list[torch.Tensor]:
        optimizer = zero(comm, kind)
        start(optimizer, values)
        optimizer.load_state_dict(state)
        return train(optimizer, range(2, 4))

    reference = plain(kind)
    values = train(reference, range(2))
    expected = {number: cloned(of_param) for number, of_param in reference.state_dict()["state"].items()}
    for gathered in virtual.run(on_rank, 3, timeout=30)[: 1 if to == 0 else 3]:
        assert_equal(gathered["state"], expected)
    ends = train(reference, range(2, 4))
    for world_size in (1, 2, 4):
        for resumed in virtual.run(resume, world_size, gathered, values, timeout=30):
            assert_equal(resumed, ends)
    other = plain(kind)
    start(other, values)
    other.load_state_dict(gathered)
    assert_equal(train(other, range(2, 4)), ends)


def cloned(of_param: dict[Any, Any]) -> dict[Any, Any]:
    """A copy of state that later steps may change in place."""
    return {key: subclasses.cloned(value) for key, value in of_param.items()}


def start(optimizer: Optimizer, values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for param, value in zip(optimizer.param_groups[0]["params"], values, strict=True):
            param.copy_(value)


@BOTH
def test_a_sharded_checkpoint_stores_them(kind: Any, tmp_path: Path) -> None:
    def save(comm: Collectives) -> None:
        optimizer = zero(comm, kind)
        train(optimizer, range(2))
        save_sharded(optimizer, tmp_path)

    def load(comm: Collectives) -> list[torch.Tensor]:
        optimizer = zero(comm, kind)
        load_sharded(optimizer, tmp_path)
        optimizer.consolidate_state_dict("all")
        assert_equal(optimizer.state_dict()["state"], saved)
        return train(optimizer, range(2, 4))

    virtual.run(save, 3, timeout=30)
    reference = plain(kind)
    train(reference, range(2))
    saved = {number: cloned(of_param) for number, of_param in reference.state_dict()["state"].items()}
    expected = train(reference, range(2, 4))
    for world_size in (1, 2, 4):
        for trained in virtual.run(load, world_size, timeout=30):
            assert_equal(trained, expected)


@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_those_of_torchao_are_kept(kind: str, tmp_path: Path) -> None:
    low_bit = getattr(pytest.importorskip("torchao.optim"), kind)
    params = [
        torch.randn(64, 64),
        torch.randn(128, 64),
        torch.randn(10),
    ]  # the last is too small for few bits

    def made(comm: Collectives | None = None) -> Any:
        ours = [nn.Parameter(param.clone()) for param in params]
        return ZeroRedundancyOptimizer(ours, low_bit, comm, lr=0.01) if comm else low_bit(ours, lr=0.01)

    def on_rank(comm: Collectives) -> Any:
        optimizer = made(comm)
        values = train(optimizer, range(2))
        save_sharded(optimizer, tmp_path)
        optimizer.consolidate_state_dict("all")
        state = optimizer.state_dict()
        moved = train(optimizer, range(2, 4))
        loaded = made(comm)
        start(loaded, values)
        loaded.load_state_dict(state)
        sharded = made(comm)
        load_sharded(sharded, tmp_path)
        return state, moved, train(loaded, range(2, 4)), train(sharded, range(2, 4))

    halfway, reference = made(), made()  # theirs cannot be copied
    train(halfway, range(2))
    expected = halfway.state_dict()["state"]
    assert subclasses.is_traceable_wrapper_subclass(expected[0]["exp_avg"])
    train(reference, range(2))
    ends = train(reference, range(2, 4))
    for state, *trained in virtual.run(on_rank, 2, timeout=600):
        assert_equal({number: dict(of_param) for number, of_param in state["state"].items()}, expected)
        assert_equal(trained, [ends] * 3)


# ------------------------------------------------------------------------------------------------- refused


def each_rank_raises(function: Callable[[Collectives], Any], text: str) -> None:
    def on_rank(comm: Collectives) -> None:
        with pytest.raises((TypeError, RuntimeError), match=text):
            function(comm)

    virtual.run(on_rank, 2, timeout=30)


@pytest.mark.parametrize("kind", [HalvedMomentum, ListsByElement])
def test_they_are_not_cut(kind: Any, tmp_path: Path) -> None:
    whole = plain(kind)
    train(whole, range(1))

    def trained(comm: Collectives, partition: Any) -> ZeroRedundancyOptimizer:
        optimizer = zero(comm, kind, partition=partition, elementwise=True)
        train(optimizer, range(1))
        return optimizer

    virtual.run(lambda comm: save_sharded(trained(comm, "sorted_greedy"), tmp_path), 2, timeout=30)
    refused: list[Callable[[Collectives], Any]] = [
        lambda comm: trained(comm, "even").consolidate_state_dict(),
        lambda comm: save_sharded(trained(comm, "even"), tmp_path / "even"),
        lambda comm: zero(comm, kind, partition="even", elementwise=True).load_state_dict(whole.state_dict()),
        lambda comm: load_sharded(zero(comm, kind, partition="even", elementwise=True), tmp_path),
    ]
    for function in refused:
        each_rank_raises(function, "cannot be cut. Use a partition of whole parameters")


@BOTH
def test_dcp_which_would_pickle_them_does_not_get_them(kind: Any) -> None:
    def give(comm: Collectives) -> None:
        model = copy.deepcopy(MODEL)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), kind, comm)
        train(optimizer, range(1))
        StatefulOptimizer(model, optimizer).state_dict()

    each_rank_raises(give, "has a tensor subclass, which DCP would pickle, or a list. Use save_sharded.")


def test_a_key_that_reads_as_a_part_of_one_is_refused() -> None:
    def gather(comm: Collectives) -> None:
        optimizer = zero(comm)
        train(optimizer, range(1))
        for of_param in optimizer.optim.state.values():
            of_param["momentum::codes"] = 1
        optimizer.consolidate_state_dict()

    each_rank_raises(gather, "has '::' in its name, which stands for a part of a tensor subclass")


class Secretive(Halved):
    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], object()


def test_what_others_could_not_make_again_is_refused_before_anything_is_sent() -> None:
    class Hidden(Halved): ...

    for kind, text in ((Secretive, "needs a object, which JSON"), (Hidden, "nobody else finds its class")):

        def gather(comm: Collectives, kind: Any = kind) -> None:
            optimizer = zero(comm)
            train(optimizer, range(1))
            for of_param in optimizer.optim.state.values():
                if comm.rank == 1:
                    of_param["momentum"] = kind.of(torch.ones(5))
            optimizer.consolidate_state_dict()

        each_rank_raises(gather, text)


@pytest.mark.parametrize("name", ["os:system", "torch:Tensor", "not_imported:Halved", "builtins:print", ":"])
def test_a_recipe_names_a_tensor_class_that_the_program_has_imported_or_nothing_is_made(name: str) -> None:
    recipe = {"class": name, "inner": {}, "size": [2], "stride": [1], "context": None}
    with pytest.raises(TypeError, match=f"{name}, and this program has no such tensor class"):
        subclasses.put_together({"momentum::": json.dumps(recipe)})


class Holding(HalvedMomentum):
    """Keeps `held` in the state of each parameter."""

    held: Any = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for param in self.param_groups[0]["params"]:
            self.state[param]["held"] = self.held


class HoldsSet(Holding):
    held = frozenset({1, 2})


class HoldsQueueInTuple(Holding):
    held = (torch.ones(2), collections.deque([1]))


class HoldsForAll(HalvedMomentum):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.state["held"] = torch.ones(2)


class HoldsBeside(HalvedMomentum):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "held": 1}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (HoldsSet, "the state 'held' of parameter 0 is a frozenset; only tensors"),
        (
            HoldsQueueInTuple,
            "the state 'held' of parameter 0 is a tuple and can be neither checkpointed nor moved",
        ),
        (HoldsForAll, "the optimizer keeps the state 'held' for no parameter in particular"),
        (HoldsBeside, r"HoldsBeside keeps \['held'\] in its state_dict"),
    ],
)
def test_state_that_no_save_takes_is_refused_when_it_is_saved(kind: Any, text: str) -> None:
    def gather(comm: Collectives) -> None:
        optimizer = zero(comm, kind)
        train(optimizer, range(1))
        optimizer.consolidate_state_dict()

    each_rank_raises(gather, text.replace("parameter 0", r"parameter \d"))
