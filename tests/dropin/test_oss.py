"""FairScale's interface: its partition rule and buckets, then each method against the unsharded optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis.strategies import booleans, integers, lists, tuples
from library.training import (
    Run,
    Snapshot,
    Tangle,
    assert_moved,
    assert_same,
    assert_state_dicts_equal,
    fill_gradients,
    run_script,
    snapshot,
    train,
)
from torch import nn, optim

from zero_ref.backward.sharded_data_parallel import ShardedDataParallel
from zero_ref.comm.collectives import Collectives
from zero_ref.dropin.oss import OSS
from zero_ref.lab import virtual
from zero_ref.lab.meter import recording

Sizes = list[tuple[int, bool]]
"""For each parameter its elements, and whether it is trained."""


def parameters(sizes: Sizes) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(numel), requires_grad=trained) for numel, trained in sizes]


def owned_by(optimizer: OSS, params: Sequence[torch.Tensor]) -> list[list[int]]:
    """For each rank the numbers of the parameters that `partition_parameters` gives it."""
    number = {param: index for index, param in enumerate(params)}
    return [
        [number[param] for group in groups for param in group["params"]]
        for groups in optimizer.partition_parameters()
    ]


def raised_by_each_rank(
    function: Callable[[Collectives], Any], kind: type[Exception] | tuple[type[Exception], ...]
) -> list[str]:
    def on_rank(comm: Collectives) -> str:
        with pytest.raises(kind) as error:
            function(comm)
        return str(error.value)

    return virtual.run(on_rank, 2, timeout=20)


# -------------------------------------------------------------------------------------------- the constructor


def test_the_arguments_are_those_of_fairscale_in_its_order() -> None:
    arguments = inspect.signature(OSS).parameters
    names = ["params", "optim", "group", "broadcast_buffer_size", "broadcast_fp16", "force_broadcast_object"]
    assert list(arguments)[:6] == names
    assert all(arguments[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for name in names)
    defaults = [arguments[name].default for name in names[1:]]
    assert defaults == [optim.SGD, None, -1, False, False]


def test_attributes_are_named_as_in_fairscale() -> None:
    def on_rank(comm: Collectives) -> None:
        optimizer = OSS(parameters([(3, True), (2, True)]), optim.Adam, comm, 2**18, True, True, lr=0.5)
        assert type(optimizer.optim) is optim.Adam
        assert optimizer.group is comm
        assert (optimizer.rank, optimizer.world_size) == (comm.rank, 2)
        assert optimizer.broadcast_fp16
        assert optimizer.param_groups[0]["lr"] == optimizer.optim.param_groups[0]["lr"] == 0.5
        optimizer.broadcast_fp16 = False
        assert optimizer.broadcast_dtype is None

    virtual.run(on_rank, 2, timeout=20)


def test_the_default_is_sgd() -> None:
    assert virtual.run(lambda comm: type(OSS(parameters([(1, True)]), group=comm).optim), 1) == [optim.SGD]


class Supportive(OSS):
    """As FairSeq's subclass: attributes that it lacks are looked up elsewhere."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("supports"):
            return getattr(self.optim, name)
        raise AttributeError(name)


def test_a_subclass_may_look_attributes_up() -> None:
    def on_rank(comm: Collectives) -> bool:
        optimizer = Supportive([{"params": parameters([(1, True)])}], optim.Adam, comm)
        with pytest.raises(AttributeError, match="other"):
            _ = optimizer.other
        return hasattr(optimizer, "supports_flat_params")

    assert virtual.run(on_rank, 1) == [False]


# ---------------------------------------------------------------------------------------------- who owns what


def test_parameters_go_in_their_order_to_the_least_loaded_rank() -> None:
    # 6 to rank 0; the frozen 9, which counts as 1, and 4 to rank 1. 5 against 6: the 2 too. Then 1 to rank 0.
    sizes = [(6, True), (9, False), (4, True), (2, True), (1, True)]

    def on_rank(comm: Collectives) -> Any:
        params = parameters(sizes)
        groups = [{"params": params[:3], "lr": 0.5}, {"params": params[3:], "momentum": 0.9}]
        optimizer = OSS(groups, optim.SGD, comm, lr=0.1)
        assert [group["params"] for group in optimizer.partition_parameters()[comm.rank]] == [
            group["params"] for group in optimizer.optim.param_groups
        ]
        first, second = optimizer.partition_parameters()
        assert [group["lr"] for group in first] == [group["lr"] for group in second] == [0.5, 0.1]
        assert [group["momentum"] for group in first] == [0, 0.9]
        return owned_by(optimizer, params)

    assert virtual.run(on_rank, 2, timeout=20) == [[[0, 4], [1, 2, 3]]] * 2


def greedily(sizes: Sizes, world_size: int) -> list[list[int]]:
    loads = [0] * world_size
    owned: list[list[int]] = [[] for _ in range(world_size)]
    for number, (numel, trained) in enumerate(sizes):
        rank = loads.index(min(loads))
        owned[rank].append(number)
        loads[rank] += numel if trained else 1
    return owned


@settings(max_examples=30, deadline=None)
@example([(1, True), (10, False), (2, True), (1, True)], 2, 1)  # 10 frozen elements count as one
@given(lists(tuples(integers(0, 50), booleans()), min_size=2, max_size=20), integers(1, 4), integers(1, 19))
def test_groups_that_are_added_go_on_with_the_same_rule(sizes: Sizes, world_size: int, cut: int) -> None:
    cut = min(cut, len(sizes) - 1)

    def on_rank(comm: Collectives) -> list[list[int]]:
        params = parameters(sizes)
        optimizer = OSS(params[:cut], group=comm)
        for first in range(cut, len(params), 3):
            optimizer.add_param_group({"params": params[first : first + 3]})
        return owned_by(optimizer, params)

    assert virtual.run(on_rank, world_size, timeout=20) == [greedily(sizes, world_size)] * world_size


def test_buckets_hold_each_ranks_trained_parameters() -> None:
    def on_rank(comm: Collectives) -> None:
        params = parameters([(6, True), (9, False), (4, True), (2, True)])
        optimizer = OSS(params, group=comm)
        (device,) = optimizer.buckets
        assert device == torch.device("cpu")
        first, second = (optimizer.buckets[device][rank] for rank in range(2))
        assert (first.buffer.numel(), second.buffer.numel()) == (6, 6)
        assert first.params == (params[0],)
        assert second.params == (params[2], params[3])
        second.buffer.copy_(torch.arange(6.0))
        assert [params[2].tolist(), params[3].tolist()] == [[0, 1, 2, 3], [4, 5]]
        assert params[1].tolist() == [0] * 9

    virtual.run(on_rank, 2, timeout=20)


def test_several_dtypes_have_a_buffer_each() -> None:
    def on_rank(comm: Collectives) -> None:
        params = [
            nn.Parameter(torch.zeros(n, dtype=d))
            for n, d in zip((2, 2, 3, 3), (torch.float32, torch.float64) * 2)
        ]
        optimizer = OSS([params[0], params[2], params[1]], group=comm)
        bucket = optimizer.buckets[torch.device("cpu")][0]
        assert [(buffer.dtype, buffer.numel()) for buffer in bucket.buffers] == [
            (torch.float32, 2),
            (torch.float64, 2),
        ]
        assert bucket.params == (params[0], params[1])
        with pytest.raises(RuntimeError, match="2 dtypes"):
            _ = bucket.buffer

    virtual.run(on_rank, 2, timeout=20)


def test_refresh_trainable_takes_parameters_in_and_out_of_the_buckets() -> None:
    def on_rank(comm: Collectives) -> None:
        params = parameters([(6, True), (9, False)])
        optimizer = OSS(params, group=comm)
        cpu = torch.device("cpu")
        owners = owned_by(optimizer, params)
        assert list(optimizer.buckets[cpu]) == [0]
        params[0].requires_grad_(False)
        params[1].requires_grad_(True)
        optimizer.refresh_trainable()
        assert list(optimizer.buckets[cpu]) == [1]
        assert optimizer.buckets[cpu][1].params == (params[1],)
        assert owned_by(optimizer, params) == owners
        with recording(comm) as calls:
            optimizer.refresh_trainable()
        assert calls == []

    virtual.run(on_rank, 2, timeout=20)


# --------------------------------------------------------------------------------------------------- training


def frozen_then_not(model: Any, optimizer: Any, backward: Any) -> Iterator[None]:
    """Two groups, a schedule, a layer frozen for a while."""
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for step in range(6):
        model.up.requires_grad_(step not in (1, 2))
        optimizer.zero_grad()
        backward(step)
        optimizer.step()
        scheduler.step()
        yield


def two_groups(model: Any) -> list[dict[str, Any]]:
    first, *others = model.parameters()
    return [{"params": others}, {"params": [first], "lr": 0.003}]


def test_trains_as_the_unsharded_optimizer() -> None:
    def on_rank(comm: Collectives) -> list[Snapshot]:
        model = Tangle()
        optimizer = OSS(two_groups(model), optim.AdamW, comm, lr=0.01, weight_decay=0.1)
        return run_script(frozen_then_not, model, optimizer, comm.world_size, comm)

    model = Tangle()
    before = snapshot(model)
    plain = optim.AdamW(two_groups(model), lr=0.01, weight_decay=0.1)
    expected = run_script(frozen_then_not, model, plain, 3)
    assert_moved(model, before, expected[-1])
    for ours in virtual.run(on_rank, 3, timeout=20):
        assert_same(ours, expected, "OSS")


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"broadcast_fp16": True}, torch.float16),
        ({"broadcast_dtype": torch.bfloat16}, torch.bfloat16),
    ],
    ids=str,
)
def test_rounded_on_the_wire_the_owner_keeps_full_precision(options: Any, dtype: torch.dtype) -> None:
    def steps(params: Sequence[torch.Tensor], optimizer: optim.Optimizer) -> None:
        for step in range(20):
            for param in params:
                param.grad = torch.full_like(param, 1e-4 * (step + 1))
            optimizer.step()

    def on_rank(comm: Collectives) -> tuple[list[torch.Tensor], int]:
        params = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(3))]
        optimizer = OSS(params, optim.SGD, comm, lr=0.1, **options)
        with recording(comm) as calls:
            steps(params, optimizer)
        return [param.detach() for param in params], sum(call.nbytes for call in calls)

    exact = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(3))]
    steps(exact, optim.SGD(exact, lr=0.1))
    assert (exact[0] != exact[0].to(dtype).float()).all(), "else rounding would not show"
    for rank, (ours, nbytes) in enumerate(virtual.run(on_rank, 2, timeout=20)):
        assert torch.equal(ours[rank], exact[rank]), "its own: small updates added up"
        assert torch.equal(ours[1 - rank], exact[1 - rank].to(dtype).float())
        assert nbytes == 20 * 2 * 7


def test_ranks_that_would_send_in_other_dtypes_are_refused() -> None:
    def on_rank(comm: Collectives) -> None:
        param = nn.Parameter(torch.ones(4))
        param.grad = torch.ones(4)
        OSS([param], group=comm, broadcast_fp16=comm.rank == 1, lr=0.1).step()

    assert all("broadcast_dtype=" in message for message in raised_by_each_rank(on_rank, ValueError))


def test_a_step_waits_for_rounded_values_though_a_forward_could() -> None:
    def on_rank(comm: Collectives) -> None:
        model = nn.Linear(3, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = OSS(model.parameters(), group=comm, broadcast_fp16=True, lr=1.0)
        sharded = ShardedDataParallel(model, optimizer, gather_in_forward=True)
        sharded(torch.full((1, 3), -0.3)).backward()
        optimizer.step()
        exact = torch.ones(1, 3) + 0.3
        owned = optimizer.partition.owner_of_param[0] == comm.rank
        assert torch.equal(model.weight, exact if owned else exact.half().float())
        sharded(torch.full((1, 3), -70_000.0)).backward()
        optimizer.step()

    assert all("beyond 65504" in message for message in raised_by_each_rank(on_rank, RuntimeError))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"broadcast_dtype": torch.bfloat16}, "pass one of them"),
        ({"overlap_with_ddp": True}, "has no effect with overlap_with_ddp=True"),
    ],
)
def test_options_that_exclude_each_other_are_refused_on_all_ranks(options: Any, text: str) -> None:
    def one_rank_asks(comm: Collectives) -> None:
        mine = {"broadcast_fp16": True, **options} if comm.rank == 1 else {}
        OSS(parameters([(1, True)]), group=comm, **mine)

    messages = raised_by_each_rank(one_rank_asks, (ValueError, RuntimeError))
    assert all(text in message for message in messages)
    assert "rank 1 could not construct the optimizer" in messages[0]


# --------------------------------------------------------------------------------------------------- clipping


@pytest.mark.parametrize(("max_norm", "norm_type"), [(0.5, 2.0), (0.5, "inf"), (1000, 1)])
def test_clips_as_torch_does_without_ranks(max_norm: float, norm_type: float) -> None:
    def on_rank(comm: Collectives) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        model = trained_tangle()
        fill_gradients(list(model.parameters()), 0, comm.world_size, comm)
        total = OSS(model.parameters(), group=comm).clip_grad_norm(max_norm, norm_type)
        return total, [param.grad for param in model.parameters()]

    model = trained_tangle()
    fill_gradients(list(model.parameters()), 0, 3)
    total = nn.utils.clip_grad_norm_(model.parameters(), max_norm, float(norm_type))
    assert 0.5 < total < 1000
    for our_total, grads in virtual.run(on_rank, 3, timeout=20):
        assert torch.equal(our_total, total)
        for ours, param in zip(grads, model.parameters(), strict=True):
            assert (ours is None) == (param.grad is None)
            assert ours is None or torch.equal(ours, param.grad)


def trained_tangle() -> nn.Module:
    model = Tangle()
    model.nothing.requires_grad_(False)  # torch has no inf-norm of an empty gradient
    return model


def test_a_filter_says_what_counts_and_all_are_scaled() -> None:
    def on_rank(comm: Collectives) -> None:
        params = parameters([(1, True), (1, True), (1, True), (2, True)])
        optimizer = OSS(params, group=comm)
        owners = optimizer._param_to_rank
        params[3].requires_grad_(False)
        for param, value in zip(params, (3.0, 4.0, 12.0)):
            if owners[param] == comm.rank:  # as after a reduction to the owners
                param.grad = torch.full_like(param, value)
        shown: list[int] = []

        def not_the_third(shown_params: list[torch.Tensor]) -> Iterator[torch.Tensor]:
            shown.extend(len(p) for p in shown_params)
            return filter(lambda p: p is not params[2], shown_params)

        total = optimizer.clip_grad_norm(2.5, filter_params_fn=not_the_third)
        assert shown == [1, 1, 1], "the fourth is frozen"
        assert total == 5.0
        for param, value in zip(params, (1.5, 2.0, 6.0)):
            if owners[param] == comm.rank:
                torch.testing.assert_close(param.grad, torch.tensor([value]))

    virtual.run(on_rank, 2, timeout=20)


def test_a_filter_that_fails_or_differs_on_one_rank_raises_on_all() -> None:
    def clip(comm: Collectives, filter_params_fn: Any) -> None:
        params = parameters([(1, True), (1, True)])
        optimizer = OSS(params, group=comm)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.clip_grad_norm(1.0, 2.0, filter_params_fn)

    def fails_on_rank_1(comm: Collectives) -> None:
        def fail(params: list[torch.Tensor]) -> list[torch.Tensor]:
            if comm.rank:
                raise RuntimeError("no such layer")
            return params

        clip(comm, fail)

    messages = raised_by_each_rank(fails_on_rank_1, RuntimeError)
    assert messages[1] == "no such layer"
    assert "rank 1 could not" in messages[0]

    def differs(comm: Collectives) -> None:
        clip(comm, lambda params: params[comm.rank :])

    assert all("ranks disagree" in message for message in raised_by_each_rank(differs, ValueError))


# ------------------------------------------------------------------------------------------------ checkpoints


def consolidated(comm: Collectives, to: Any) -> Any:
    """Return the state dict of each rank, or the error in its place."""
    model = Tangle()
    optimizer = OSS(model.parameters(), optim.AdamW, comm)
    for _ in train(model, optimizer, range(2)):
        pass
    optimizer.consolidate_state_dict(*to)
    try:
        return optimizer.state_dict()
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize(
    ("to", "receivers"), [((), {0}), ((2,), {2}), ((-1,), {0, 1, 2}), (("all",), {0, 1, 2})], ids=str
)
def test_consolidates_onto_one_rank_or_all(to: Any, receivers: set[int]) -> None:
    _, plain = Run(optim.AdamW).plain(range(2))
    for rank, state in enumerate(virtual.run(consolidated, 3, to, timeout=20)):
        if rank in receivers:
            assert_state_dicts_equal(state, plain)
        else:
            assert "consolidate_state_dict" in state


def test_state_dict_of_all_ranks_needs_no_consolidating() -> None:
    def on_rank(comm: Collectives) -> Any:
        model = Tangle()
        optimizer = OSS(model.parameters(), optim.AdamW, comm)
        for _ in train(model, optimizer, range(2)):
            pass
        return optimizer.state_dict(all_ranks=True)

    _, plain = Run(optim.AdamW).plain(range(2))
    for state in virtual.run(on_rank, 2, timeout=20):
        assert_state_dicts_equal(state, plain)


def test_a_recipient_that_is_no_rank_is_refused() -> None:
    def to_nobody(comm: Collectives) -> None:
        OSS(parameters([(1, True)]), group=comm).consolidate_state_dict(recipient_rank=2)

    assert all("no rank of a group of 2" in text for text in raised_by_each_rank(to_nobody, ValueError))


def test_goes_on_from_a_checkpoint() -> None:
    case = Run(optim.AdamW)
    first, state = case.plain(range(2))
    rest, _ = case.plain(range(2, 4), first[-1], state)
    saved = virtual.run(consolidated, 3, (), timeout=20)[0]

    def on_rank(comm: Collectives) -> list[Snapshot]:
        model = case.model(first[-1])
        optimizer = OSS(model.parameters(), optim.AdamW, comm)
        optimizer.load_state_dict(saved)
        return [snapshot(model) for _ in train(model, optimizer, range(2, 4))]

    for ours in virtual.run(on_rank, 2, timeout=20):
        assert_same(ours, rest, "resumed")


# ---------------------------------------------------------------------------------------------- other devices


def on_device(comm: Collectives, optim_class: Any, device: str, options: dict[str, Any]) -> Any:
    """Train, move the parameters, train on: the parameters at the end, where the state lies."""
    params = [nn.Parameter(torch.arange(1.0, 5)), nn.Parameter(torch.ones(2, 3))]
    optimizer = OSS(params, optim_class, comm, **options)
    for step in range(4):
        if step == 2:
            move(params, device)
        for param in params:
            param.grad = param.detach() * 0.1 + step
        optimizer.step()
    state = [
        (key, value.ndim, value.device.type)
        for of_param in optimizer.state.values()
        for key, value in of_param.items()
    ]
    assert {bucket_device.type for bucket_device in optimizer.buckets} == {device}
    assert optimizer.state == optimizer.optim.state
    return [param.detach() for param in params], state


def move(params: Sequence[nn.Parameter], device: str) -> None:
    """As `module.to(device)`: the Parameter objects stay."""
    for param in params:
        moved = nn.Parameter(param.detach().to(device))
        if device == "meta":  # no values, but all else: a second device on every machine
            param.grad = None
            torch.utils.swap_tensors(param, moved)
        else:
            param.data = moved.data
            param.grad = None


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"foreach": True}], ids=str)
def test_state_follows_parameters_to_another_device_and_step_counters_stay(options: dict[str, Any]) -> None:
    ((_, state),) = virtual.run(on_device, 1, optim.Adam, "meta", options, timeout=20)
    assert {(key, device) for key, _, device in state if key == "step"} == {("step", "cpu")}
    others = {device for key, _, device in state if key != "step"}
    assert others == {"meta"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=str)
def test_moved_to_a_gpu_it_trains_on(options: dict[str, Any]) -> None:
    stayed, _ = virtual.run(on_device, 2, optim.Adam, "cpu", options, timeout=60)[0]
    for moved, _ in virtual.run(on_device, 2, optim.Adam, "cuda", options, timeout=60):
        for ours, expected in zip(moved, stayed, strict=True):
            torch.testing.assert_close(ours.cpu(), expected)
