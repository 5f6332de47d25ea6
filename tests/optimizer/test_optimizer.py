"""ZeroRedundancyOptimizer on virtual ranks: it trains as the plain optimizer does, whatever is done to it."""

from __future__ import annotations

import copy
import io
import itertools
import logging
import math
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from library.halved import Halved
from library.training import (
    ELEMENTWISE,
    PARTITIONS,
    WHOLE,
    Backward,
    Script,
    Snapshot,
    Tangle,
    assert_same,
    assert_trains_as_plain,
    cut_anywhere,
    fill_gradients,
    filled,
    finished_partition,
    of_several_dtypes,
    run_script,
    snapshot,
)
from torch import nn, optim
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.optim import Optimizer, lr_scheduler

from zero_ref.comm.collectives import Collectives
from zero_ref.dropin.oss import OSS
from zero_ref.files.sharded import load_sharded, save_sharded
from zero_ref.lab import virtual
from zero_ref.lab.meter import recording, state_bytes
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.calls import Call
from zero_ref.plan.partition import Partition, Slice
from zero_ref.plan.rules import from_lists
from zero_ref.shard import checks
from zero_ref.shard.buckets import flat_view
from zero_ref.shard.digests import WORDS, digests

WHOLE_MODES = [(partition, view) for partition in WHOLE for view in (False, True)]
TWO_MODES: list[tuple[Any, bool]] = [("sorted_greedy", False), ("even", True)]


def updates(count: int, **before: Callable[[Any, Any], Any]) -> Script:
    """So many updates; `before_2(model, optimizer)` comes before that of number 2, from 0 on."""

    def script(model: nn.Module, optimizer: Optimizer, backward: Backward) -> Iterator[None]:
        for step in range(count):
            before.get(f"before_{step}", lambda *_: None)(model, optimizer)
            backward(step)
            optimizer.step()
            yield

    return script


steps = updates(3)


def zero(comm: Collectives, params: Any, optimizer_class: Any = optim.AdamW, **options: Any) -> Any:
    return ZeroRedundancyOptimizer(params, optimizer_class, comm, **options)


def each_rank_raises(
    function: Callable[..., Any], kind: type[Exception], text: str, world_size: int = 2
) -> None:
    """`function(comm)` raises `kind` with a message that matches `text` on every virtual rank."""

    def on_rank(comm: Collectives) -> None:
        with pytest.raises(kind, match=text):
            function(comm)

    virtual.run(on_rank, world_size, timeout=10)


# ---------------------------------------------------------------------------------------- any optimizer class


@pytest.mark.parametrize(
    ("optimizer_class", "options"), ELEMENTWISE, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_trains_as_the_plain_optimizer_in_every_mode(optimizer_class: Any, options: dict[str, Any]) -> None:
    modes = [(partition, bool(n % 2)) for n, partition in enumerate(PARTITIONS)]
    assert_trains_as_plain(steps, optimizer_class, world_sizes=[3], modes=modes, **options)


def test_adafactor_trains_as_plain_on_whole_parameters() -> None:
    def with_elements(model: nn.Module) -> list[torch.Tensor]:  # it divides by their number
        return [param for param in model.parameters() if param.numel()]

    assert_trains_as_plain(steps, optim.Adafactor, world_sizes=[3], modes=WHOLE_MODES, groups=with_elements)


def test_muon_trains_as_plain_on_whole_matrices() -> None:
    def matrices(model: nn.Module) -> list[torch.Tensor]:
        return [param for param in model.parameters() if param.ndim == 2 and param.numel()]

    assert_trains_as_plain(
        steps, optim.Muon, world_sizes=[3], modes=WHOLE_MODES, groups=matrices, check_moved=False
    )


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("as_view", [False, True])
def test_sparse_adam_trains_as_plain_on_sparse_gradients(as_view: bool) -> None:
    def train(params: list[nn.Parameter], optimizer: Optimizer) -> torch.Tensor:
        for step in range(3):
            optimizer.zero_grad()
            for index, param in enumerate(params):
                rows = torch.tensor([[step, 5, index]])
                param.grad = torch.sparse_coo_tensor(rows, torch.full((3, 4), 1.0 + step), (9, 4))
            optimizer.step()
        return torch.stack([param.detach() for param in params])

    def tables() -> list[nn.Parameter]:
        return [nn.Parameter(torch.ones(9, 4)), nn.Parameter(torch.ones(9, 4))]

    params = tables()
    plain = train(params, optim.SparseAdam(params, lr=0.1))
    assert (plain != 1).any()

    def on_rank(comm: Collectives) -> torch.Tensor:
        params = tables()
        return train(params, zero(comm, params, optim.SparseAdam, lr=0.1, parameters_as_bucket_view=as_view))

    assert all(torch.equal(ours, plain) for ours in virtual.run(on_rank, 2))


def test_more_ranks_than_parameters_and_one_rank() -> None:
    assert_trains_as_plain(steps, world_sizes=[1, 20], modes=[("sorted_greedy", True), ("even", False)])


@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [(optim.AdamW, {}), (optim.SGD, {"lr": 0.1, "momentum": 0.9})],
    ids=["AdamW", "SGD"],
)
def test_parameters_of_several_dtypes(optimizer_class: Any, options: dict[str, Any]) -> None:
    assert_trains_as_plain(steps, optimizer_class, world_sizes=[3], make_model=of_several_dtypes, **options)


def test_lists_and_finished_partitions_are_taken_as_given() -> None:
    params = Tangle().parameters()
    numels = [param.numel() for param in params]
    lists = [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9]]
    up = numels.index(560)  # its first 128 elements here, the rest there
    slices: list[list[int | Slice]] = [
        [Slice(up, 0, 128)],
        [Slice(up, 128, 560), *(i for i in range(11) if i != up)],
    ]
    for partition in (lists, slices, from_lists(numels, slices), finished_partition(numels, 2)):
        assert_trains_as_plain(steps, world_sizes=[2], modes=[(partition, False), (partition, True)])


# ---------------------------------------------------------------------------------------- parameter groups


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    decayed = [param for param in model.parameters() if param.ndim > 1]
    others = [param for param in model.parameters() if param.ndim <= 1]
    return [{"params": others, "lr": 0.05}, {"params": decayed, "weight_decay": 0.3, "betas": (0.8, 0.9)}]


def named_groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [{"params": named[1::2], "lr": 0.05}, {"params": iter(named[::2])}]


def lone_tensor(model: nn.Module) -> list[dict[str, Any]]:
    first, *rest = model.parameters()
    return [{"params": first, "lr": 0.1}, {"params": rest}]


@pytest.mark.parametrize(
    "groups", [two_groups, named_groups, lone_tensor, lambda model: model.named_parameters()]
)
def test_parameter_groups_as_tensors_dicts_and_names(groups: Any) -> None:
    assert_trains_as_plain(steps, groups=groups, world_sizes=[3], modes=TWO_MODES)


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        ([], ValueError),
        (torch.ones(3), TypeError),
        ([1.0, 2.0], TypeError),
        ({"params": "abc"}, TypeError),
        ([{"params": [torch.ones(2)]}, {"params": [3]}], TypeError),
        ([{"params": {torch.ones(2)}}], TypeError),
        ([torch.ones(2, requires_grad=True) * 2], ValueError),
        (None, TypeError),
    ],
    ids=["empty", "tensor", "numbers", "dict", "one bad group", "set", "not a leaf", "none"],
)
def test_wrong_parameters_raise_as_torch_does_on_all_ranks(params: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        optim.AdamW(params)
    each_rank_raises(lambda comm: zero(comm, params), kind, ".+")


def test_wrong_options_raise_as_torch_does_on_all_ranks() -> None:
    weight = [nn.Parameter(torch.ones(3))]
    each_rank_raises(lambda comm: zero(comm, weight, lr=-1.0), ValueError, "Invalid learning rate")
    each_rank_raises(lambda comm: zero(comm, weight, speed=1.0), TypeError, "speed")
    each_rank_raises(lambda comm: zero(comm, weight, optim.Adam, betas=(2.0, 0.9)), ValueError, "beta")
    each_rank_raises(lambda comm: zero(comm, weight, partition="odd"), ValueError, "sorted_greedy")
    each_rank_raises(lambda comm: zero(comm, weight, partition=7), TypeError, "partition=")
    each_rank_raises(lambda comm: zero(comm, weight, partition=[[0], [0]]), ValueError, "two owners")
    each_rank_raises(lambda comm: zero(comm, weight, "AdamW"), TypeError, "optimizer_class")


def test_an_option_that_only_the_local_optimizer_refuses_raises_on_all_ranks() -> None:
    # Muon takes matrices only: the rank that does not own the vector would go on alone.
    params = [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(3))]

    def on_rank(comm: Collectives) -> str:
        with pytest.raises((ValueError, RuntimeError)) as caught:
            zero(comm, params, optim.Muon)
        return str(caught.value)

    messages = virtual.run(on_rank, 2, timeout=10)
    assert "rank 1 could not construct the optimizer: ValueError" in messages[0]
    assert "2D" in messages[1]


class Scaled(optim.SGD):
    """Computes one of its options from another, and refuses the raw one."""

    def __init__(self, params: Any, lr: float = 1.0, damping: float = 0.0) -> None:
        super().__init__(params, lr / 10)
        self.defaults["damping"] = damping + 0.5
        for group in self.param_groups:
            group.setdefault("damping", damping + 0.5)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(group["damping"])
        return super().step(closure)


@pytest.mark.parametrize("options", [{}, {"lr": 3.0}, {"lr": 3.0, "damping": 0.1}])
def test_options_that_the_local_constructor_computes_are_those_of_the_plain_one(options: Any) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        first, second, *rest = model.parameters()
        return [{"params": [first], "lr": 0.2}, {"params": [second], "damping": 0.25}, {"params": rest}]

    def script(model: nn.Module, optimizer: Optimizer, backward: Backward) -> Iterator[None]:
        yield from steps(model, optimizer, backward)
        extra = nn.Parameter(torch.ones(5))
        optimizer.add_param_group({"params": [extra]})
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "lr": 0.7})
        lr = options.get("lr", 1.0) / 10
        assert [group["lr"] for group in optimizer.param_groups] == [0.2, lr, lr, lr, 0.7]
        backward(3)
        optimizer.step()
        yield

    assert_trains_as_plain(script, Scaled, world_sizes=[2], modes=WHOLE_MODES, groups=groups, **options)


# ------------------------------------------------------------------------------------------- start values


def start_values_differ(change: Callable[[nn.Module], None]) -> str:
    """Return the warning of each rank, once in two steps, if `change` is made to the model of rank 1."""

    def on_rank(comm: Collectives) -> Snapshot:
        model = Tangle()
        if comm.rank == 1:
            with torch.no_grad():
                change(model)
        optimizer = zero(comm, model.named_parameters(), parameters_as_bucket_view=True)
        for step in range(2):
            fill_gradients(list(model.parameters()), step, comm.world_size, comm)
            optimizer.step()
        return snapshot(model)

    with pytest.warns(UserWarning, match="before its first update") as caught:
        first, *others = virtual.run(on_rank, 3, timeout=20)
    for values in others:
        assert all(map(same_bits, values, first))
    assert {warning.filename for warning in caught} == {__file__}, "the line of the user's step"
    of_ranks = sorted(str(warning.message).partition(": before its first update ") for warning in caught)
    assert [rank for rank, _, _ in of_ranks] == ["rank 0", "rank 1", "rank 2"]
    (message,) = {text for _, _, text in of_ranks}
    return message


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(flat_view(one).view(torch.uint8), flat_view(other).view(torch.uint8))


def in_the_last_place(model: nn.Module) -> None:
    value = model.down.weight.view(-1)[-1:]
    value.copy_(torch.nextafter(value, torch.tensor(9.0)))


def rows_exchanged(model: nn.Module) -> None:
    model.up.weight.copy_(model.up.weight.flip(0))


def frozen_otherwise(model: nn.Module) -> None:
    model.shift.add_(1)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (in_the_last_place, "down.weight"),
        (rows_exchanged, "up.weight"),
        (frozen_otherwise, "shift"),
        (lambda model: model.scale.fill_(torch.nan), "scale"),
        (lambda model: filled(model, seed=1), "scale"),
    ],
)
def test_start_values_that_differ_are_named_once_and_those_of_owners_win(change: Any, name: str) -> None:
    message = start_values_differ(change)
    assert f"parameter {name} has other values on rank 1 than on rank 0" in message
    assert "torch.manual_seed" in message


@pytest.mark.parametrize("options", [{}, {"master_dtype": torch.float32}])
def test_an_optimizer_may_be_constructed_before_ranks_get_their_values(options: Any, tmp_path: Path) -> None:
    """DistributedDataParallel sends rank 0's; a model may be initialized by `.data`."""

    def on_rank(comm: Collectives, seed: int | None, state_device: Path | None) -> Snapshot:
        model = filled(Tangle(), seed=comm.rank if seed is None else seed).bfloat16()
        optimizer = zero(comm, model.parameters(), state_device=state_device, **options)
        for param, value in zip(model.parameters(), filled(Tangle(), seed=9).bfloat16().parameters()):
            param.data.copy_(value.data)
        fill_gradients(list(model.parameters()), 0, comm.world_size, comm)
        optimizer.step()
        return snapshot(model)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        right = virtual.run(on_rank, 3, 9, None, timeout=20)[0]
        for state_device in (None, tmp_path):
            for values in virtual.run(on_rank, 3, None, state_device, timeout=20):
                assert all(map(same_bits, values, right))


def test_equal_start_values_pass_whatever_they_are() -> None:
    def on_rank(comm: Collectives) -> None:
        model = Tangle()
        with torch.no_grad():
            model.scale.fill_(torch.nan)
            model.shift.fill_(torch.inf)
        optimizer = zero(comm, model.parameters())
        fill_gradients(list(model.parameters()), 0, comm.world_size, comm)
        optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        virtual.run(on_rank, 2, timeout=20)


def test_parameters_of_equal_shapes_in_another_order_are_found_without_names() -> None:
    def on_rank(comm: Collectives) -> None:
        layers = [filled(nn.Linear(4, 4, bias=False), seed) for seed in range(3)]
        in_order = layers if comm.rank == 0 else [layers[0], layers[2], layers[1]]
        zero(comm, [layer.weight for layer in in_order]).step()

    with pytest.warns(UserWarning, match=r"parameter 1 has other values on rank 1 .* that of a set is not"):
        virtual.run(on_rank, 2, timeout=20)


@pytest.mark.parametrize("differ", [False, True])
def test_start_values_of_an_added_group_are_compared_and_only_those(differ: bool) -> None:
    def on_rank(comm: Collectives) -> None:
        model = Tangle()
        optimizer = OSS(model.parameters(), optim.AdamW, comm, broadcast_dtype=torch.bfloat16)
        for extra in (None, torch.full((3,), float(comm.rank * differ))):
            if extra is not None:  # by now ranks hold rounded values of what others own
                optimizer.add_param_group({"params": [nn.Parameter(extra)]})
            fill_gradients(list(model.parameters()), 0, comm.world_size, comm)
            optimizer.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        virtual.run(on_rank, 2, timeout=20)
    said = "parameter 11 has other values on rank 1 than on rank 0 (1 of 1 parameters differ)"
    assert [said in str(warning.message) for warning in caught] == [True] * (2 * differ)


def test_a_model_without_values_can_be_planned() -> None:
    def on_rank(comm: Collectives) -> Any:
        return zero(comm, nn.Linear(400, 300, device="meta").parameters()).partition.loads

    assert virtual.run(on_rank, 2, timeout=20) == [(120000, 300)] * 2


REALS = [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool]


@pytest.mark.parametrize(
    ("dtype", "numel"),
    [(torch.float32, 0), *((dtype, 7) for dtype in REALS), (torch.bfloat16, 1000),
     *((dtype, 3 * WORDS * 2 + 5) for dtype in (torch.float32, torch.float8_e4m3fn, torch.complex128))],
)  # fmt: skip
def test_a_digest_depends_on_each_bit_and_its_place_and_on_no_address(dtype: torch.dtype, numel: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    raw = torch.randint(0, 2, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    values = raw.view(dtype)
    elsewhere = torch.cat([values[:1], values])[min(numel, 1) :]
    assert elsewhere.storage_offset() == min(numel, 1)
    (digest,), (again,) = digests([values]), digests([elsewhere])
    assert digest == again
    for place in {0, numel // 2, numel - 1} if numel else ():
        changed = raw.clone()
        changed[place * dtype.itemsize] ^= 1
        assert digests([changed.view(dtype)]) != [digest]
    if numel > 2 and raw.view(numel, -1)[0].ne(raw.view(numel, -1)[-1]).any():
        turned = raw.view(numel, -1).flip(0).reshape(-1)
        assert digests([turned.view(dtype)]) != [digest]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_digest_sees_that_all_values_change_in_the_same_bits(dtype: torch.dtype) -> None:
    for numel, factor in itertools.product((2, 128, 2**14), (-1, 0.5)):
        for values in (torch.ones(numel).to(dtype), torch.linspace(1, 2, numel).to(dtype)):
            assert digests([values]) != digests([values * factor]), numel


@pytest.mark.parametrize("with_files", [False, True])
def test_a_partition_in_another_order_loads_each_state_where_it_belongs(
    with_files: bool, tmp_path: Path
) -> None:
    partition = Partition((8, 8, 8), ((Slice(2, 0, 8), Slice(0, 0, 8)), (Slice(1, 0, 8),)))

    def on_rank(comm: Collectives) -> bool:
        params = [nn.Parameter(torch.full((8,), float(number))) for number in range(3)]
        groups = [{"params": params[:1]}, {"params": params[1:]}]
        zero = ZeroRedundancyOptimizer(groups, optim.Adam, comm, partition=partition, lr=0.1)
        for number, param in enumerate(params):
            param.grad = torch.full((8,), number + 1.0)
        zero.step()
        zero.consolidate_state_dict("all")
        before = copy.deepcopy(zero.state_dict())
        if with_files:
            save_sharded(zero, tmp_path)
            load_sharded(zero, tmp_path)
        else:
            zero.load_state_dict(before)
        zero.consolidate_state_dict("all")
        after = zero.state_dict()["state"]
        return all(torch.equal(after[n]["exp_avg"], before["state"][n]["exp_avg"]) for n in range(3))

    assert virtual.run(on_rank, 2, timeout=20) == [True, True]


def test_what_a_rebuild_could_not_do_the_next_step_tries_again() -> None:
    def on_rank(comm: Collectives) -> bool:
        params = [nn.Parameter(torch.ones(8)) for _ in range(2)]
        zero = ZeroRedundancyOptimizer(params, optim.SGD, comm, lr=0.1)
        place = zero.shard.place

        def no_memory(built: Any) -> None:
            raise MemoryError("no room today")

        params[0].data = params[0].data.clone()
        zero.shard.place = no_memory  # type: ignore[method-assign]
        with pytest.raises(MemoryError):
            zero.step()
        zero.shard.place = place  # type: ignore[method-assign]
        zero.step()
        return zero.shard.built is zero.built

    assert virtual.run(on_rank, 1, timeout=20) == [True]


# ---------------------------------------------------------------------------------------- what is refused


@pytest.mark.usefixtures("group_of_one")
def test_a_dtensor_is_refused_in_the_constructor() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(
        ValueError, match=r"parameter weight is a DTensor, as `fully_shard` .*plain optimizer"
    ):
        ZeroRedundancyOptimizer(model.named_parameters(), optim.SGD, lr=0.1)


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_parameter_of_fsdp_is_refused_in_the_constructor(use_orig_params: bool) -> None:
    model = FullyShardedDataParallel(
        nn.Linear(4, 4),
        device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy.NO_SHARD,  # as it warns that it will with one rank
        use_orig_params=use_orig_params,
    )
    with pytest.raises(ValueError, match=r"is one of FullyShardedDataParallel's, which cuts and moves it"):
        ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1)


class BesideScale(nn.Parameter):
    """Values, and a scale in an attribute."""


def test_a_parameter_whose_values_are_in_several_tensors_is_refused_in_the_constructor() -> None:
    coded = nn.Parameter(Halved.of(torch.ones(4)))
    scaled = BesideScale(torch.ones(4))
    scaled.scale = torch.ones(1)  # type: ignore[attr-defined]
    for param, names in ((coded, "codes, scale"), (scaled, "scale")):
        each_rank_raises(
            lambda comm, param=param: zero(comm, [("w", param)], optim.SGD, lr=0.1),
            ValueError,
            rf"parameter w is a .*, which keeps its values in other tensors \({names}\)",
        )


def test_a_tensor_beside_a_plain_parameter_may_be_there() -> None:
    def on_rank(comm: Collectives) -> None:
        param = nn.Parameter(torch.ones(4))
        param.main_grad = torch.zeros(4)  # type: ignore[attr-defined]
        zero(comm, [param], optim.SGD, lr=0.1)
        tensor = torch.ones(4, requires_grad=True)
        tensor.main_grad = torch.zeros(4)  # type: ignore[attr-defined]
        zero(comm, [tensor], optim.SGD, lr=0.1)

    virtual.run(on_rank, 2)


def test_lbfgs_is_refused() -> None:
    each_rank_raises(lambda comm: zero(comm, Tangle().parameters(), optim.LBFGS), ValueError, "LBFGS")


@pytest.mark.parametrize("optimizer_class", [optim.Adafactor, optim.Muon, optim.SparseAdam])
def test_splitting_is_refused_for_optimizers_that_look_at_shapes(optimizer_class: Any) -> None:
    params = [nn.Parameter(torch.ones(100, 4)), nn.Parameter(torch.ones(50, 4))]
    each_rank_raises(
        lambda comm: zero(comm, params, optimizer_class, partition=cut_anywhere), ValueError, "keeps such"
    )

    def whole_under_even(comm: Collectives) -> tuple[int, ...]:
        return zero(comm, params, optimizer_class, partition="even").partition.owner_of_param

    assert virtual.run(whole_under_even, 2, timeout=20) == [(0, 1), (0, 1)]


class Signed(Optimizer):
    """A user's optimizer, which takes an extra argument of step and keeps a Python number."""

    def __init__(self, params: Any, lr: float = 0.1, rule: Any = torch.sign) -> None:
        super().__init__(params, {"lr": lr, "rule": rule})

    @torch.no_grad()
    def step(self, closure: Any = None, scale: float = 1.0) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["count"] = self.state[param].get("count", 0) + 1
                    param.sub_(group["rule"](param.grad), alpha=group["lr"] * scale)
        return loss


def test_a_class_that_is_not_torchs_is_cut_only_if_the_user_says_that_it_may_be() -> None:
    def is_whole(comm: Collectives, elementwise: bool) -> bool:
        params = Tangle().parameters()
        return zero(comm, params, Signed, partition="even", elementwise=elementwise).partition.is_whole

    for elementwise in (True, False):
        assert_trains_as_plain(steps, Signed, modes=[("even", True)], elementwise=elementwise)
        assert virtual.run(is_whole, 2, elementwise) == 2 * [not elementwise]
    for partition in ("even", "equal_shares", "balanced", cut_anywhere):
        each_rank_raises(
            lambda comm, partition=partition: zero(comm, Tangle().parameters(), Signed, partition=partition),
            ValueError,
            "elementwise=True",
        )


def test_the_table_has_every_optimizer_of_torch_and_a_subclass_is_not_in_it() -> None:
    found = {one for one in vars(optim).values() if isinstance(one, type) and issubclass(one, Optimizer)}
    assert checks.ELEMENTWISE.keys() == found - {Optimizer}

    class Own(optim.AdamW): ...

    assert checks.is_elementwise(optim.AdamW)
    assert not checks.is_elementwise(Own)


@pytest.mark.parametrize("optimizer_class", [one for one in checks.ELEMENTWISE if one is not optim.LBFGS])
def test_the_table_says_which_updates_change_if_a_tensor_is_cut(optimizer_class: Any) -> None:
    """Step a matrix and a piece of it that begins inside a row."""
    torch.manual_seed(0)
    values, grads = torch.randn(160, 160), torch.randn(6, 160, 160)
    whole, piece = nn.Parameter(values.clone()), nn.Parameter(values.flatten()[64:12_864].clone())
    try:
        optimizers = [optimizer_class([param]) for param in (whole, piece)]
        for grad in grads:
            whole.grad, piece.grad = grad.clone(), grad.flatten()[64:12_864].clone()
            for one in optimizers:
                one.step()
        is_equal = torch.equal(whole.flatten()[64:12_864], piece)
    except (ValueError, RuntimeError):  # it takes matrices, or sparse gradients
        is_equal = False
    assert is_equal == checks.is_elementwise(optimizer_class)


def test_an_option_that_is_an_object_does_not_make_ranks_disagree() -> None:
    # Its repr shows an address, which differs between processes; here between ranks.
    assert_trains_as_plain(steps, Signed, world_sizes=[2], modes=WHOLE_MODES)

    class Rule:
        def __call__(self, grad: torch.Tensor) -> torch.Tensor:
            return grad.sign()

    def on_rank(comm: Collectives) -> None:
        zero(comm, Tangle().parameters(), Signed, rule=Rule())

    virtual.run(on_rank, 2)


def test_overlap_with_ddp_without_a_hook_steps_as_ever() -> None:
    def script(model: nn.Module, optimizer: Optimizer, backward: Backward) -> Iterator[None]:
        for step in range(3):
            backward(step)
            optimizer.step()
            yield
        assert optimizer.step(lambda: (backward(3), 5.0)[1]) == 5.0
        yield

    def on_rank(comm: Collectives) -> list[Snapshot]:
        model = Tangle()
        optimizer = zero(comm, model.parameters(), overlap_with_ddp=True)
        return run_script(script, model, optimizer, comm.world_size, comm)

    model = Tangle()
    plain = run_script(script, model, optim.AdamW(model.parameters()), 2)
    for ours in virtual.run(on_rank, 2, timeout=20):
        assert_same(ours, plain, "overlap_with_ddp=True, no hook")


def test_a_step_leaves_the_version_of_frozen_parameters_alone() -> None:
    def on_rank(comm: Collectives) -> None:
        model = Tangle()
        optimizer = zero(comm, model.parameters())
        before = [param._version for param in model.parameters()]
        fill_gradients(list(model.parameters()), 0, comm.world_size, comm)
        optimizer.step()
        for param, version in zip(model.parameters(), before, strict=True):
            assert (param._version > version) == param.requires_grad

    virtual.run(on_rank, 2, timeout=10)


def test_overlap_with_ddp_on_one_rank_only_is_refused() -> None:
    def one_rank_asks(comm: Collectives) -> None:
        zero(comm, Tangle().parameters(), overlap_with_ddp=comm.rank == 0)

    each_rank_raises(one_rank_asks, ValueError, "overlap_with_ddp=True")


def test_ranks_with_buffers_of_other_sizes_are_refused() -> None:
    def one_rank_has_none(comm: Collectives) -> None:
        zero(comm, Tangle().parameters(), broadcast_buffer_size=8 * comm.rank)

    each_rank_raises(one_rank_has_none, ValueError, "broadcast_buffer_size")


@pytest.mark.parametrize(
    ("size", "error", "text"),
    [(-1, ValueError, "is negative: use 0"), (0.5, TypeError, "is no number"), (True, TypeError, "is no")],
)
def test_a_size_that_no_buffer_can_have_is_refused(size: Any, error: type[Exception], text: str) -> None:
    each_rank_raises(lambda comm: zero(comm, Tangle().parameters(), broadcast_buffer_size=size), error, text)


def small_buffers(model: nn.Module, optimizer: Optimizer, backward: Backward) -> Iterator[None]:
    """Steps between which parameters are frozen, lose a gradient, and come later."""
    extra = nn.Parameter(torch.ones(128))
    first = next(param for param in model.parameters() if param.requires_grad)
    for step in range(6):
        backward(step)
        if step == 1:
            first.requires_grad_(False).grad = None
        if step == 2:
            optimizer.add_param_group({"params": [extra], "lr": 0.5})
        if step == 4:
            first.requires_grad_(True)
        extra.grad = torch.full_like(extra, 0.5)
        optimizer.step()
        yield


@pytest.mark.parametrize("size", [0, 10, 40])
def test_buffers_of_any_size_bring_the_plain_optimizers_values(size: int) -> None:
    model = Tangle()
    plain = run_script(small_buffers, model, optim.AdamW(model.parameters()), 3)

    def on_rank(comm: Collectives) -> list[Snapshot]:
        model = Tangle()
        optimizer = zero(comm, model.parameters(), broadcast_buffer_size=size)
        return run_script(small_buffers, model, optimizer, comm.world_size, comm)

    for ours in virtual.run(on_rank, 3, timeout=30):
        assert_same(ours, plain, f"buffers of {size}")


def step_beyond(comm: Collectives, values: dict[str, float], dtype: torch.dtype) -> tuple[str, Snapshot]:
    """Return the error of a step that gives one element of each of these parameters this value."""
    model = Tangle()
    optimizer = OSS(model.named_parameters(), optim.SGD, comm, broadcast_dtype=dtype, lr=1.0)
    for name, param in model.named_parameters():
        if param.requires_grad:
            param.grad = torch.zeros_like(param)
            if name in values:
                flat_view(param.grad)[-1] = flat_view(param.detach())[-1] - values[name]
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error), snapshot(model)
    return "", snapshot(model)


def test_values_that_the_dtype_they_are_sent_in_cannot_hold_are_an_error_on_all_ranks() -> None:
    def raised(dtype: torch.dtype, **values: float) -> list[str]:
        by_name = {name.replace("_", "."): value for name, value in values.items()}
        return [text for text, _ in virtual.run(step_beyond, 3, by_name, dtype, timeout=20)]

    for value in (70_000.0, -70_000.0):
        for rank, text in enumerate(raised(torch.float16, up_weight=value)):
            assert text.startswith(f"rank {rank}: parameter up.weight, "), text
            assert "beyond 65504, the largest number of torch.float16" in text
    one_of_two = raised(torch.float16, up_weight=70_000.0, conv_bias=math.nan)
    assert all("parameter up.weight" in text for text in one_of_two), "a NaN elsewhere does not hide it"
    assert raised(torch.float16, up_weight=65_504.0) == [""] * 3
    assert raised(torch.float16, up_weight=math.nan) == [""] * 3, "which is NaN on its owner too"
    assert raised(torch.bfloat16, up_weight=1e30) == [""] * 3


def test_memory_that_cannot_be_sharded_is_refused() -> None:
    expanded = nn.Parameter(torch.ones(1, 4).expand(3, 4))
    strided = nn.Parameter(torch.ones(6)[::2])
    each_rank_raises(lambda comm: zero(comm, [expanded]), ValueError, "parameter 0: .*gaps or overlaps")
    each_rank_raises(
        lambda comm: zero(comm, [("a", nn.Parameter(torch.ones(1))), ("b", strided)]),
        ValueError,
        "parameter b",
    )


@pytest.mark.parametrize(
    "convert", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, torch.Tensor.to_mkldnn]
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_a_parameter_that_is_not_dense_is_refused_by_its_layout(convert: Any) -> None:
    param = nn.Parameter(convert(torch.eye(4)))
    each_rank_raises(
        lambda comm: zero(comm, [nn.Parameter(torch.ones(1)), param]),
        ValueError,
        f"parameter 1 has the layout {param.layout}",
    )


def test_two_parameters_on_the_same_memory_are_refused() -> None:
    whole = nn.Parameter(torch.ones(10))
    same = nn.Parameter(whole.data.view(2, 5))
    tail = nn.Parameter(whole.data[4:])
    each_rank_raises(lambda comm: zero(comm, [whole, same]), ValueError, "0 and 1 .*same memory")
    each_rank_raises(
        lambda comm: zero(comm, [("w", whole), ("t", tail)]), ValueError, "w and t .*same memory"
    )
    halves = torch.ones(10)  # side by side in one tensor is not the same memory
    virtual.run(lambda comm: zero(comm, [nn.Parameter(halves[:5]), nn.Parameter(halves[5:])]), 2)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate:UserWarning")
def test_a_parameter_listed_twice_is_refused() -> None:
    weight = nn.Parameter(torch.ones(4))
    each_rank_raises(lambda comm: zero(comm, [weight, weight]), ValueError, "twice")
    each_rank_raises(
        lambda comm: zero(comm, [{"params": [weight]}, {"params": [weight]}]), ValueError, "more than one"
    )


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_a_sparse_gradient_under_even_is_refused_on_all_ranks() -> None:
    def on_rank(comm: Collectives) -> None:
        table, vector = nn.Parameter(torch.ones(100, 4)), nn.Parameter(torch.ones(1000))
        optimizer = zero(comm, [table, vector], optim.SGD, lr=0.1, partition="even")
        rows = torch.tensor([[1, 2]])
        table.grad = torch.sparse_coo_tensor(rows, torch.ones(2, 4), (100, 4))
        vector.grad = torch.ones(1000)
        with pytest.raises(RuntimeError, match=r"parameter 0 has a sparse gradient.*sorted_greedy"):
            optimizer.step()
        assert torch.equal(table, torch.ones(100, 4)), "nothing was updated"
        assert torch.equal(vector, torch.ones(1000)), "nothing was updated"

    # The table is cut between ranks 0 and 1; ranks 2 and 3 must not wait for them.
    virtual.run(on_rank, 4, timeout=5)


# ---------------------------------------------------------------------- schedulers, options, closures, kwargs

SCHEDULERS: list[Callable[[Optimizer], Any]] = [
    lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10),
    lambda optimizer: lr_scheduler.LambdaLR(
        optimizer, [lambda epoch: 0.9**epoch, lambda epoch: 1 / (1 + epoch)]
    ),
    lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.5)],
        [2],
    ),
]


@pytest.mark.parametrize(("make_scheduler", "tensor_lr"), [(one, n == 1) for n, one in enumerate(SCHEDULERS)])
def test_schedulers_reach_the_local_optimizer(make_scheduler: Any, tensor_lr: bool) -> None:
    rates: set[tuple[float, ...]] = set()

    def script(model: nn.Module, optimizer: Optimizer, backward: Backward) -> Iterator[None]:
        scheduler = make_scheduler(optimizer)
        for step in range(4):
            backward(step)
            optimizer.step()
            scheduler.step()
            rates.add(tuple(float(group["lr"]) for group in optimizer.param_groups))
            yield

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        def lr(value: float) -> Any:
            return torch.tensor(value) if tensor_lr else value

        *first, last = model.parameters()
        return [{"params": first, "lr": lr(0.01)}, {"params": [last], "lr": lr(0.02)}]

    assert_trains_as_plain(script, modes=TWO_MODES, world_sizes=[2], groups=groups, foreach=False)
    assert len(rates) == 4, f"the learning rates never changed, or differ between optimizers: {rates}"


def test_an_option_that_was_deleted_stays_deleted() -> None:
    """As `initial_lr`, which a program removes to begin a schedule anew."""

    def on_rank(comm: Collectives) -> bool:
        params = [nn.Parameter(torch.ones(4))]
        optimizer = zero(comm, params, optim.SGD, lr=0.1)
        lr_scheduler.StepLR(optimizer, 1)
        for step in range(2):
            fill_gradients(params, step, 1)
            optimizer.step()
            if step == 0:
                del optimizer.param_groups[0]["initial_lr"]
        return "initial_lr" in optimizer.param_groups[0]

    assert virtual.run(on_rank, 2, timeout=20) == [False, False]


def test_options_that_the_local_optimizer_changes_are_seen_outside() -> None:
    class Decaying(optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            loss = super().step(closure)
            self.param_groups[0]["lr"] *= 0.5
            return loss

    def on_rank(comm: Collectives) -> float:
        model = Tangle()
        optimizer = zero(comm, model.parameters(), Decaying, lr=1.0)
        fill_gradients(list(model.parameters()), 0, comm.world_size, comm)
        optimizer.step()
        optimizer.step()
        return optimizer.param_groups[0]["lr"]

    assert virtual.run(on_rank, 2) == [0.25, 0.25]


def test_a_closure_is_called_as_the_plain_optimizer_calls_it() -> None:
    calls: dict[int, int] = {}

    def script(model: nn.Module, optimizer: Optimizer, backward: Backward) -> Iterator[None]:
        calls[id(optimizer)] = 0
        for step in range(3):

            def closure(step: int = step) -> torch.Tensor:
                assert torch.is_grad_enabled()
                calls[id(optimizer)] += 1
                optimizer.zero_grad()
                backward(step)
                return torch.tensor(float(step))

            assert optimizer.step(closure) == step
            yield

    assert_trains_as_plain(script, optim.SGD, world_sizes=[2], lr=0.1, momentum=0.9)
    assert set(calls.values()) == {3}


def test_a_closure_that_raises_leaves_gradients_in_place() -> None:
    def on_rank(comm: Collectives) -> None:
        model = Tangle()
        optimizer = zero(comm, model.parameters(), partition="even")
        fill_gradients(list(model.parameters()), 0, comm.world_size, comm)
        model.shift.grad = torch.ones(8)  # left over from before it was frozen
        before = snapshot(model)

        def closure() -> float:
            assert model.shift.grad is not None
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            optimizer.step(closure)
        assert model.shift.grad is not None
        assert_same([snapshot(model)], [before], "after a closure that raised")

    virtual.run(on_rank, 2)


def test_extra_arguments_of_step_pass_through() -> None:
    def script(model: nn.Module, optimizer: Any, backward: Backward) -> Iterator[None]:
        for step in range(3):
            backward(step)
            assert optimizer.step(scale=step + 0.5) is None
            assert optimizer.step(closure=lambda: 1.25, scale=2.0) == 1.25
            yield

    assert_trains_as_plain(script, Signed, modes=WHOLE_MODES, world_sizes=[2])


def test_step_hooks_run_once_a_step() -> None:
    def on_rank(comm: Collectives) -> list[str]:
        model = Tangle()
        optimizer = zero(comm, model.parameters())
        seen: list[str] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        fill_gradients(list(model.parameters()), 0, comm.world_size, comm)
        optimizer.step()
        return seen

    assert virtual.run(on_rank, 2) == [["before", "after"]] * 2


# --------------------------------------------------------------------- changes between steps: live parameters


def test_freezing_and_unfreezing_at_run_time() -> None:
    def script(model: Any, optimizer: Optimizer, backward: Backward) -> Iterator[None]:
        for step in range(6):
            model.up.requires_grad_(step not in (2, 3))
            model.embed.weight.requires_grad_(step != 3)
            model.shift.requires_grad_(step > 1)  # frozen at construction
            optimizer.zero_grad()
            backward(step)
            optimizer.step()
            yield

    assert_trains_as_plain(script)


def test_a_step_after_a_change_of_what_is_trained_asks_the_other_ranks_once() -> None:
    def on_rank(comm: Collectives) -> list[list[str]]:
        model = Tangle()
        optimizer = zero(comm, model.parameters(), parameters_as_bucket_view=True)
        model.up.requires_grad_(False)
        operations = []
        for _ in range(2):
            with recording(comm) as calls:
                optimizer.step()
            operations.append([call.op for call in calls])
        return operations

    assert (
        virtual.run(on_rank, 2)
        == [[["all_gather", "broadcast", "broadcast"], ["broadcast", "broadcast"]]] * 2
    )


def test_ranks_that_freeze_different_parameters_all_raise() -> None:
    def freeze_and_step(comm: Collectives) -> None:
        model = Tangle()
        optimizer = zero(comm, model.named_parameters())
        (model.up if comm.rank else model.down).requires_grad_(False)
        optimizer.step()

    each_rank_raises(freeze_and_step, ValueError, r"rank 1 has \[parameter up.weight: requires_grad=False\]")


@pytest.mark.parametrize(("partition", "as_view"), TWO_MODES)
def test_a_frozen_parameter_with_a_leftover_gradient_stays_and_keeps_the_gradient(
    partition: Any, as_view: bool
) -> None:
    def on_rank(comm: Collectives) -> list[torch.Tensor]:
        model = Tangle()
        params = list(model.parameters())
        optimizer = zero(
            comm,
            params,
            optim.SGD,
            lr=0.1,
            momentum=0.9,
            partition=partition,
            parameters_as_bucket_view=as_view,
        )
        fill_gradients(params, 0, comm.world_size, comm)
        optimizer.step()
        model.requires_grad_(False)
        model.norm.requires_grad_(True)
        before, gradients = snapshot(model), [param.grad for param in params]
        optimizer.step()
        assert all(param.grad is grad for param, grad in zip(params, gradients))
        for param, old in zip(params, before):
            assert torch.equal(param, old) == (not param.requires_grad or not param.numel())
        return snapshot(model)

    ranks = virtual.run(on_rank, 3)
    assert_same(ranks[1:], [ranks[0]] * 2, "ranks agree")


def test_a_bucket_view_lets_go_of_frozen_parameters() -> None:
    def on_rank(comm: Collectives) -> int:
        model = Tangle()
        optimizer = zero(comm, model.parameters(), parameters_as_bucket_view=True)
        model.requires_grad_(False)
        model.norm.requires_grad_(True)
        optimizer.step()
        storage = model.up.weight.untyped_storage()
        return storage.nbytes()

    assert virtual.run(on_rank, 2) == [70 * 8 * 4] * 2


def test_a_part_of_a_flat_model_is_saved_alone_by_copies_of_its_tensors() -> None:
    def size_of_file(state: dict[str, torch.Tensor]) -> int:
        file = io.BytesIO()
        torch.save(state, file)
        return file.tell()

    def on_rank(comm: Collectives) -> None:
        model = nn.ModuleDict({"body": nn.Linear(300, 300), "head": nn.Linear(4, 2)})
        zero(comm, model.parameters(), partition="even", parameters_as_bucket_view=True)
        part = model["head"]
        copied = {name: value.clone() for name, value in part.state_dict().items()}
        assert size_of_file(copied) < 4000
        assert size_of_file(dict(part.state_dict())) > 300 * 300 * 4
        other = nn.Linear(4, 2)
        other.load_state_dict(copied)
        assert torch.equal(other.weight, part.weight)
        assert torch.equal(other.bias, part.bias)

    virtual.run(on_rank, 2)


def test_parameters_whose_data_were_reassigned() -> None:
    def all_of_them(model: Any, _: Optimizer) -> None:
        for param in model.parameters():
            param.data = param.data.clone() * 1.5

    def one(model: Any, _: Optimizer) -> None:
        model.up.weight.data = torch.full((70, 8), 0.25)

    script = updates(5, before_2=all_of_them, before_3=one)
    assert_trains_as_plain(script)
    assert_trains_as_plain(script, optim.Adagrad, lr=0.1, world_sizes=[3])  # its state exists from the start


def test_a_whole_parameter_may_change_its_memory_format() -> None:
    def change(model: Any, _: Optimizer) -> None:
        model.conv.weight.data = model.conv.weight.data.contiguous()

    assert_trains_as_plain(updates(4, before_2=change), world_sizes=[3], modes=WHOLE_MODES)


def test_a_split_parameter_may_not_change_its_memory_format() -> None:
    # It is split along its memory, so a rank's state would belong to other elements.
    def on_rank(comm: Collectives) -> None:
        weight = nn.Parameter(torch.ones(8, 4, 3, 3))
        optimizer = zero(comm, [("conv", weight)], partition="even")
        weight.data = weight.data.to(memory_format=torch.channels_last)
        for call in (optimizer.step, lambda: optimizer.consolidate_state_dict(to=0)):
            with pytest.raises(
                RuntimeError, match=r"parameter conv is split .*strides changed .*sorted_greedy"
            ):
                call()
        weight.data = weight.data.contiguous()
        optimizer.step()

    virtual.run(on_rank, 2, timeout=5)


def test_frozen_parameters_of_integers_are_left_alone() -> None:
    def quantised() -> nn.Module:
        model = Tangle()
        codes = torch.arange(-100, 100, dtype=torch.int8).view(20, 10)
        model.codes = nn.Parameter(codes, requires_grad=False)
        return model

    assert_trains_as_plain(steps, make_model=quantised)


def test_a_model_that_changes_its_dtype() -> None:
    script = updates(4, before_2=lambda model, _: model.double().zero_grad())
    assert_trains_as_plain(script, optim.SGD, lr=0.1, world_sizes=[3])


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none: bool) -> None:
    def script(model: nn.Module, optimizer: Optimizer, backward: Backward) -> Iterator[None]:
        for step in range(4):
            optimizer.zero_grad(set_to_none=set_to_none)
            for param in model.parameters():
                assert param.grad is None or (not set_to_none and not param.grad.any())
            if step != 2:  # a step without new gradients: momentum goes on only where gradients are zeros
                backward(step)
            optimizer.step()
            yield

    assert_trains_as_plain(script, optim.SGD, world_sizes=[3], lr=0.1, momentum=0.9)


def test_parameters_without_gradients_stay() -> None:
    def script(model: Any, optimizer: Optimizer, backward: Backward) -> Iterator[None]:
        for step in range(3):
            backward(step)
            if step != 1:
                model.up.weight.grad = model.scale.grad = None
            optimizer.step()
            yield

    assert_trains_as_plain(script, world_sizes=[3])


# ---------------------------------------------------------------------------------------- groups added later


def grow(model: Any, optimizer: Optimizer, backward: Backward) -> Iterator[None]:
    """Train the norm and the embedding, then unfreeze and add the rest in two groups."""
    for step in range(6):
        if step == 2:
            model.up.requires_grad_(True)
            optimizer.add_param_group({"params": model.up.parameters(), "lr": 0.02})
        if step == 4:
            model.conv.requires_grad_(True)
            optimizer.add_param_group({"params": [model.conv.weight], "weight_decay": 0.2})
            optimizer.add_param_group({"params": model.conv.bias})
        optimizer.zero_grad()
        backward(step)
        optimizer.step()
        yield


def half_frozen() -> nn.Module:
    model = Tangle()
    model.up.requires_grad_(False)
    model.conv.requires_grad_(False)
    return model


def all_but_the_frozen(model: nn.Module) -> list[torch.Tensor]:
    return [param for param in model.parameters() if param.requires_grad]


def test_groups_added_to_a_live_optimizer() -> None:
    # Parameters outside the optimizer have gradients too in this script; they must not move.
    assert_trains_as_plain(
        grow, make_model=half_frozen, groups=all_but_the_frozen, check_moved=False, world_sizes=[1, 3]
    )


def test_a_group_added_later_goes_to_the_ranks_that_own_least_and_moves_nothing() -> None:
    def on_rank(comm: Collectives) -> list[tuple[int, ...]]:
        first, second = ([nn.Parameter(torch.ones(n)) for n in sizes] for sizes in ((100, 30), (20, 25)))
        optimizer = zero(comm, first)
        owners = [optimizer.partition.owner_of_param]
        optimizer.add_param_group({"params": second})
        return [*owners, optimizer.partition.owner_of_param]

    # 100 and 30 elements: the 25 and the 20 both go to rank 1 (55, 75), alone they would be dealt out.
    assert virtual.run(on_rank, 2) == [[(0, 1), (0, 1, 1, 1)]] * 2


class Eager(optim.Adagrad):
    """Makes its state when a group is added, as Adagrad does only at construction."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            self.state[param] = {"step": torch.tensor(0.0), "sum": torch.ones_like(param)}


def test_state_made_when_a_group_is_added_is_kept() -> None:
    assert_trains_as_plain(
        grow, Eager, make_model=half_frozen, groups=all_but_the_frozen, check_moved=False, lr=0.1
    )


@pytest.mark.parametrize(("partition", "view"), TWO_MODES)
def test_a_group_added_through_a_copy_of_the_attributes_is_named_on_all_ranks(
    partition: Any, view: bool
) -> None:
    def on_rank(comm: Collectives) -> str:
        params = [nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(4))]
        optimizer = ZeroRedundancyOptimizer(params[:1], optim.SGD, comm, view, partition=partition, lr=1.0)
        copied = object.__new__(ZeroRedundancyOptimizer)  # as Lightning's Fabric makes its wrapper
        copied.__dict__ = dict(vars(optimizer))
        copied.add_param_group({"params": params[1:]})
        for param in params:
            param.grad = torch.ones_like(param)
        with pytest.raises(RuntimeError, match="2 parameters and 1 are planned") as raised:
            optimizer.step()
        return str(raised.value)

    assert all("optimizer.add_param_group" in message for message in virtual.run(on_rank, 2))


def test_a_group_that_cannot_be_added_leaves_the_optimizer_as_it_was() -> None:
    def add(model: Any, optimizer: Optimizer) -> None:
        with pytest.raises(ValueError, match="more than one"):
            optimizer.add_param_group({"params": [model.scale]})
        with pytest.raises(TypeError):
            optimizer.add_param_group([model.scale])  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            optimizer.add_param_group({"params": [3.5]})
        assert len(optimizer.param_groups) == 1

    assert_trains_as_plain(updates(5, before_2=add), world_sizes=[2])


def test_ranks_that_add_different_groups_all_raise_and_train_on_as_before() -> None:
    def add(model: Any, optimizer: Any) -> None:
        if not isinstance(optimizer, ZeroRedundancyOptimizer):
            return
        own_size = nn.Parameter(torch.ones(3 + optimizer.rank))
        with pytest.raises(ValueError, match=r"rank 1 has \[parameter 6: shape \(4,\)"):
            optimizer.add_param_group({"params": [own_size]})
        own_rate = {"params": [nn.Parameter(torch.ones(4))], "lr": 0.1 * optimizer.rank}
        with pytest.raises(ValueError, match=r"group 1: lr=0\.1"):
            optimizer.add_param_group(own_rate)
        bad = {"params": [nn.Parameter(torch.ones(4)) if optimizer.rank else "no tensor"]}
        with pytest.raises((TypeError, RuntimeError), match="can only optimize Tensors"):
            optimizer.add_param_group(bad)
        assert len(optimizer.param_groups) == len(optimizer.optim.param_groups) == 1

    assert_trains_as_plain(
        updates(4, before_2=add),
        make_model=half_frozen,
        groups=all_but_the_frozen,
        check_moved=False,
        world_sizes=[2],
    )


# ---------------------------------------------------------------------- optimizers that keep views of memory


class KeepsViews(Optimizer):
    """Makes views of its parameters when it is constructed and updates those, as block-wise optimizers do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.blocks = [Block(param) for group in self.param_groups for param in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for block in self.blocks:
            if block.param.grad is not None:
                block.flat.sub_(flat_view(block.param.grad), alpha=self.param_groups[0]["lr"])
        return loss


class Block:
    def __init__(self, param: torch.Tensor) -> None:
        self.param, self.flat = param, flat_view(param.detach())


def test_a_local_optimizer_that_keeps_views_of_its_parameters_trains_as_plain() -> None:
    assert_trains_as_plain(steps, KeepsViews)


def test_parameters_train_on_after_a_constructor_that_raised() -> None:
    def on_rank(comm: Collectives, as_view: bool) -> Snapshot:
        model = Tangle()
        with pytest.raises((ValueError, RuntimeError), match="Invalid learning rate"):
            zero(comm, model.parameters(), lr=-1.0 * comm.rank, parameters_as_bucket_view=True)
        assert_same([snapshot(model)], [snapshot(Tangle())], "after the error")
        optimizer = zero(comm, model.parameters(), lr=0.1, parameters_as_bucket_view=as_view)
        fill_gradients(list(model.parameters()), 0, 2)
        optimizer.step()
        return snapshot(model)

    plain = Tangle()
    fill_gradients(list(plain.parameters()), 0, 2)
    optim.AdamW(plain.parameters(), lr=0.1).step()
    for as_view in (False, True):
        for ours in virtual.run(on_rank, 2, as_view, timeout=10):
            assert_same([ours], [snapshot(plain)], f"bucket view {as_view}")


# -------------------------------------------------------------------------------------- what is sent and held


def calls_of_steps(world_size: int, **options: Any) -> list[list[Call]]:
    """Return the calls of rank 0's second step, for a model of four trainable parameters and a frozen one."""

    def on_rank(comm: Collectives) -> list[Call]:
        params = [nn.Parameter(torch.ones(shape)) for shape in ((100, 4), (200,), (0, 5))]
        params += [
            nn.Parameter(torch.ones(90, dtype=torch.bfloat16)),
            nn.Parameter(torch.ones(7), requires_grad=False),
        ]
        optimizer = zero(comm, params, **options)
        for param in params[:4]:
            param.grad = torch.ones_like(param)
        optimizer.step()
        with recording(optimizer.collectives) as calls:
            optimizer.step()
            optimizer.zero_grad()
        return calls

    return virtual.run(on_rank, world_size)


def test_without_bucket_view_a_step_sends_one_broadcast_for_each_trainable_slice() -> None:
    # 100x4 to rank 0; 200, then 90 bfloat16 to rank 1; nothing is sent for the empty and the frozen one
    expected = [Call("broadcast", 1600, 0), Call("broadcast", 800, 1), Call("broadcast", 180, 1)]
    assert calls_of_steps(2) == [expected, expected]


def test_with_bucket_view_a_step_sends_one_broadcast_for_each_owner_and_dtype() -> None:
    expected = [Call("broadcast", 1600, 0), Call("broadcast", 800, 1), Call("broadcast", 180, 1)]
    assert calls_of_steps(2, parameters_as_bucket_view=True) == [expected, expected]
    lists = [[1, 3, 4], [0, 2]]
    expected = [Call("broadcast", 800, 0), Call("broadcast", 1600, 1), Call("broadcast", 180, 0)]
    assert calls_of_steps(2, parameters_as_bucket_view=True, partition=lists) == [expected, expected]


def test_an_even_step_sends_one_message_for_each_rank_and_dtype() -> None:
    # float32: 600 elements, cut at 320 of the first (a multiple of 64); bfloat16: 90, cut at 64.
    expected = [Call("broadcast", 1280, 0), Call("broadcast", 1120, 1)]
    expected += [Call("broadcast", 128, 0), Call("broadcast", 52, 1)]
    assert calls_of_steps(2, parameters_as_bucket_view=True, partition="even") == [expected, expected]


def test_one_rank_sends_nothing() -> None:
    for partition in PARTITIONS:
        for as_view in (False, True):
            assert calls_of_steps(1, partition=partition, parameters_as_bucket_view=as_view) == [[]]


@pytest.mark.parametrize(("partition", "tensors"), [("sorted_greedy", 3), ("even", 1)])
def test_parameters_are_views_of_a_flat_tensor_an_owner_or_of_one_where_owners_share_them(
    partition: str, tensors: int
) -> None:
    def on_rank(comm: Collectives) -> int:
        model = Tangle()
        zero(comm, model.parameters(), parameters_as_bucket_view=True, partition=partition)
        return len(
            {param.untyped_storage().data_ptr() for param in model.parameters() if param.requires_grad}
        )

    assert virtual.run(on_rank, 3) == [tensors] * 3


@pytest.mark.parametrize(("partition", "as_view"), [*TWO_MODES, ("even", False)])
def test_autograd_notices_on_every_rank_that_a_step_overwrote_what_it_saved(
    partition: str, as_view: bool
) -> None:
    """Also of a parameter that is cut, which is updated through another tensor on its memory."""

    def on_rank(comm: Collectives) -> None:
        model = filled(nn.Linear(16, 16))
        optimizer = zero(
            comm, model.parameters(), optim.SGD, partition=partition, parameters_as_bucket_view=as_view
        )
        inputs = torch.ones(2, 16, requires_grad=True)
        model(inputs).sum().backward()
        later = model(inputs).sum()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            later.backward()

    virtual.run(on_rank, 2)


def test_a_parameter_that_changed_its_size_is_refused() -> None:
    def resized(comm: Collectives) -> None:
        model = filled(nn.Linear(4, 2))
        optimizer = zero(comm, model.parameters(), optim.SGD, lr=0.1)
        model.weight.data = torch.zeros(3, 4)
        optimizer.step()

    each_rank_raises(resized, RuntimeError, r"parameter 0 had 8 elements and now has 12")


def test_it_is_not_copied_or_pickled() -> None:
    def on_rank(comm: Collectives) -> None:
        optimizer = zero(comm, filled(nn.Linear(4, 2)).parameters(), optim.SGD, lr=0.1)
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copy.deepcopy(optimizer)
        with pytest.raises(TypeError, match=r"load_state_dict\(\), or assign optimizer\.state"):
            optimizer.__setstate__({"state": {}, "param_groups": []})

    virtual.run(on_rank, 2)


def test_a_process_group_that_is_none_is_told_apart_from_options() -> None:
    with pytest.raises(TypeError, match=r"not 0\.001\. Options of the optimizer are passed by name"):
        ZeroRedundancyOptimizer(filled(nn.Linear(4, 2)).parameters(), optim.SGD, 0.001)  # type: ignore[arg-type]


@pytest.mark.parametrize("partition", PARTITIONS)
def test_each_rank_keeps_the_state_of_its_share_only(partition: Any) -> None:
    def on_rank(comm: Collectives) -> tuple[int, int]:
        model = Tangle()
        params = list(model.parameters())
        optimizer = zero(comm, params, optim.AdamW, partition=partition)
        fill_gradients(params, 0, comm.world_size, comm)
        optimizer.step()
        mine = [
            piece
            for piece in optimizer.partition.slices_of_rank[comm.rank]
            if params[piece.param].requires_grad
        ]
        return state_bytes(optimizer), sum(8 * piece.numel + 4 for piece in mine)

    for measured, predicted in virtual.run(on_rank, 3):
        assert measured == predicted > 0


def test_no_memory_of_gradients_is_held_after_zero_grad() -> None:
    def on_rank(comm: Collectives) -> bool:
        weight = nn.Parameter(torch.ones(256))
        optimizer = zero(comm, [weight], partition="even")
        weight.grad = torch.ones(256)
        held = weakref.ref(weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        return held() is None and all(own.local.grad is None for own in optimizer.shard.owned)

    assert virtual.run(on_rank, 2) == [True, True]


def test_tensors_on_another_device_get_flat_tensors_of_their_own() -> None:
    # There is one device here; "meta" tensors have shapes and a device, which is what the layout looks at.
    def on_rank(comm: Collectives) -> list[tuple[str, int, int]]:
        params = [nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(6, device="meta"))]
        params += [nn.Parameter(torch.ones(5, device="meta")), nn.Parameter(torch.ones(4))]
        optimizer = zero(comm, params, optim.SGD, lr=0.1, parameters_as_bucket_view=True)
        return [(str(m.tensor.device), m.owner, m.tensor.numel()) for m in optimizer.built.messages]

    # 8 to rank 0, 6 to rank 1, 5 to rank 1 (11), 4 to rank 0 (12)
    assert virtual.run(on_rank, 2)[0] == [("cpu", 0, 12), ("meta", 1, 11)]


# ---------------------------------------------------------------------------------------- the object itself


def test_attributes_are_those_of_torchs_class() -> None:
    def on_rank(comm: Collectives) -> None:
        optimizer = zero(comm, Tangle().parameters(), optim.AdamW, lr=0.5)
        assert isinstance(optimizer, Optimizer)
        assert isinstance(optimizer.optim, optim.AdamW)
        assert (optimizer.rank, optimizer.world_size, optimizer.global_rank) == (comm.rank, 2, comm.rank)
        assert optimizer.process_group is comm
        assert optimizer.param_groups[0]["lr"] == optimizer.defaults["lr"] == 0.5
        assert optimizer.param_groups[0].keys() == optim.AdamW(Tangle().parameters()).param_groups[0].keys()
        assert "lr: 0.5" in repr(optimizer)
        assert weakref.ref(optimizer)() is optimizer
        optimizer.note = "mine"
        assert optimizer.note == "mine"

    virtual.run(on_rank, 2)


def test_without_a_process_group_it_says_how_to_start_one() -> None:
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="torchrun"):
        ZeroRedundancyOptimizer(Tangle().parameters(), optim.AdamW)


def test_logs_figures_at_the_debug_level_that_torch_has(caplog: pytest.LogCaptureFixture) -> None:
    def messages(level: dist.DebugLevel) -> list[str]:
        caplog.clear()
        dist.set_debug_level(level)
        try:
            with caplog.at_level(logging.INFO, logger="zero_ref.optimizer"):
                virtual.run(
                    lambda comm: zero(comm, [("w", nn.Parameter(torch.ones(100)))], partition="even"), 2
                )
        finally:
            dist.set_debug_level(dist.DebugLevel.OFF)
        return sorted(record.getMessage() for record in caplog.records)

    assert messages(dist.DebugLevel.OFF) == []
    info = messages(dist.DebugLevel.INFO)
    assert len(info) == 2
    assert info[0] == (
        "rank 0 of 2 owns 64 of 100 elements (64.0%) in 1 slices; a step sends 2 messages, 400 bytes"
    )
    assert "rank 1 owns Slice(param=0, start=64, stop=100) of parameter w" in messages(dist.DebugLevel.DETAIL)


@pytest.mark.ranks
def test_importing_it_prints_no_warnings() -> None:
    modules = ("optimizer.zero_redundancy_optimizer", "state.checkpoint", "lab.meter", "lab.virtual")
    code = "import " + ", ".join(f"zero_ref.{module}" for module in modules)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=600
    )
    assert (done.returncode, done.stderr) == (0, "")


# ---------------------------------------------------------------------------------------- ranks that differ


@pytest.mark.parametrize(
    ("differing", "text"),
    [
        ({"lr": 0.5}, "rank 1 has .*lr=0.5"),
        ({"amsgrad": True}, "amsgrad=True"),
        ({"params": lambda model: model.named_parameters()}, "parameter scale"),
        ({"params": lambda model: [{"params": [p]} for p in model.parameters()]}, "group 1"),
        ({"partition": "registration_greedy"}, "rank 1 has .partition"),
        ({"parameters_as_bucket_view": True}, r"rank 1 has .parameters_as_bucket_view=True\] where rank 0 "),
        ({"elementwise": True}, r"rank 1 has .elementwise=True\] where rank 0 has .elementwise=None\]"),
        ({"master_dtype": torch.float32}, r"rank 1 has .master_dtype=torch.float32\] where rank 0 "),
        ({"state_device": "cpu"}, r"rank 1 has .state_device=cpu\] where rank 0 has .state_device=None\]"),
        ({"optimizer_class": optim.Adam}, r"rank 1 has .optimizer_class=Adam\] where rank 0 "),
        ({"params": lambda model: list(model.parameters())[1:]}, "rank 1 has .*10 parameters"),
        ({"params": lambda model: model.double().parameters()}, "rank 1 has .parameter 0: shape .*float64"),
        ({"params": lambda model: model.to(memory_format=torch.contiguous_format).parameters()}, "strides"),
        ({"params": lambda model: [*model.parameters()][::-1]}, "rank 1 has .parameter 0"),
        ({"params": lambda model: model.requires_grad_(False).parameters()}, "requires_grad=False"),
    ],
    ids=[
        "lr",
        "option",
        "names",
        "groups",
        "partition",
        "view",
        "elementwise",
        "masters",
        "place",
        "class",
        "count",
        "dtype",
        "strides",
        "order",
        "frozen",
    ],
)
def test_ranks_that_differ_at_construction_all_raise(differing: dict[str, Any], text: str) -> None:
    def build(comm: Collectives) -> None:
        options: dict[str, Any] = {"params": lambda model: model.parameters(), "optimizer_class": optim.AdamW}
        if comm.rank == 1:
            options |= differing
        params = options.pop("params")(Tangle())
        ZeroRedundancyOptimizer(params, process_group=comm, **options)

    each_rank_raises(build, ValueError, text, world_size=3)


def test_one_rank_with_wrong_parameters_makes_all_raise() -> None:
    def on_rank(comm: Collectives) -> str:
        params = "weights" if comm.rank == 2 else Tangle().parameters()
        with pytest.raises(TypeError if comm.rank == 2 else RuntimeError) as caught:
            zero(comm, params)
        return str(caught.value)

    messages = virtual.run(on_rank, 3, timeout=5)
    assert "rank 0: rank 2 could not construct the optimizer: TypeError" in messages[0]


def test_parameters_that_ddp_puts_back_are_refused_as_bucket_views() -> None:
    def on_rank(comm: Collectives) -> None:
        model = filled(nn.Linear(3, 3))
        for param in model.parameters():
            param._fp_param = param.data  # type: ignore[attr-defined]  # as DDP(mixed_precision=...) does
        with pytest.raises(ValueError, match="Construct the optimizer before it"):
            zero(comm, model.parameters(), parameters_as_bucket_view=True)
        zero(comm, model.parameters())

    virtual.run(on_rank, 2)
