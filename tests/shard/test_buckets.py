"""Flat tensors: parameters become windows of them and keep everything but their place in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from library.halved import Halved
from library.training import PARTITIONS, Tangle, snapshot
from torch import nn

from zero_ref.comm.collectives import Collectives
from zero_ref.lab import virtual
from zero_ref.lab.meter import recording
from zero_ref.plan.calls import Call
from zero_ref.plan.choice import plan_partition
from zero_ref.plan.layout import lay_out
from zero_ref.plan.parcels import PACKED_NUMEL
from zero_ref.plan.partition import Partition, Slice
from zero_ref.plan.rules import even, from_lists, sorted_greedy
from zero_ref.shard.buckets import (
    Message,
    Parcel,
    broadcast_messages,
    flat_like,
    flat_view,
    flatten_parameters,
    joined,
    messages_by_parameter,
    messages_within,
    start_broadcasts,
)
from zero_ref.shard.groups import specs_of


def flatten(
    params: Sequence[torch.Tensor], partition: Partition | None = None, alignment: int = 16
) -> list[Message]:
    specs = specs_of([{"params": list(params)}])
    partition = partition or sorted_greedy([spec.numel for spec in specs], 2)
    return flatten_parameters(lay_out(partition, specs, alignment=alignment), params)


# ------------------------------------------------------------------------------------------------ flat views


def test_a_flat_view_reads_the_memory_in_order() -> None:
    matrix = torch.arange(6).view(2, 3)
    assert flat_view(matrix).tolist() == flat_view(matrix.t()).tolist() == [0, 1, 2, 3, 4, 5]
    image = torch.arange(8).view(1, 2, 2, 2).to(memory_format=torch.channels_last)
    assert flat_view(image).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert flat_view(torch.tensor(3)).tolist() == [3]
    assert flat_view(torch.empty(0, 3)).tolist() == []


def test_a_flat_view_of_part_of_a_tensor_starts_where_the_part_does() -> None:
    rows = torch.arange(12).view(4, 3)[2:]
    assert flat_view(rows).tolist() == flat_view(rows.t()).tolist() == [6, 7, 8, 9, 10, 11]


def test_a_flat_view_shares_memory() -> None:
    transposed = torch.zeros(2, 3).t()
    flat_view(transposed)[1] = 5
    assert transposed[1, 0] == 5


@pytest.mark.parametrize(
    "tensor", [torch.ones(1, 4).expand(3, 4), torch.ones(6)[::2], torch.ones(4, 4)[:, :2]]
)
def test_a_tensor_with_gaps_or_overlaps_has_no_flat_view(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"strides .* gaps or overlaps in memory; make it .contiguous\(\)"):
        flat_view(tensor)


def test_flat_like_orders_elements_as_the_reference_does() -> None:
    weight = torch.arange(6.0).view(2, 3).t()  # memory: 0 to 5
    assert flat_like(weight * 2, weight).tolist() == [0, 2, 4, 6, 8, 10]
    contiguous = weight.contiguous()
    ordered = flat_like(contiguous, weight)
    assert ordered.tolist() == [0, 1, 2, 3, 4, 5]
    assert ordered.data_ptr() != contiguous.data_ptr()
    expanded = torch.ones(1, 1).expand(3, 2)
    assert flat_like(expanded, weight).tolist() == [1] * 6


def test_flat_like_keeps_the_dtype_and_is_a_view_where_strides_agree() -> None:
    weight = torch.zeros(4, 4, dtype=torch.bfloat16)
    moment = torch.ones(4, 4)
    assert flat_like(moment, weight).dtype == torch.float32
    assert flat_like(moment, weight).data_ptr() == moment.data_ptr()


# ------------------------------------------------------------------------------------------------ flattening


@pytest.mark.parametrize("strategy", PARTITIONS)
def test_flattening_keeps_values_shapes_strides_gradients_and_objects(strategy: object) -> None:
    model = Tangle()
    params = list(model.parameters())
    for param in params:
        param.grad = torch.ones_like(param) if param.requires_grad else None
    before, strides, grads = snapshot(model), [p.stride() for p in params], [p.grad for p in params]
    flatten(params, plan_partition(strategy, specs_of([{"params": params}]), 3))  # type: ignore[arg-type]
    for param, old, stride, grad, same in zip(
        params, before, strides, grads, model.parameters(), strict=True
    ):
        assert same is param
        assert torch.equal(param, old)
        assert param.stride() == stride
        assert param.grad is grad


def test_messages_are_the_parameters_memory() -> None:
    params = [nn.Parameter(torch.full((n,), float(n))) for n in (6, 5, 4, 1)]
    messages = flatten(params)
    assert [message.owner for message in messages] == [0, 1]
    assert messages[0].tensor.tolist() == [6.0] * 6 + [1.0]
    assert messages[1].tensor.tolist() == [5.0] * 5 + [4.0] * 4
    messages[1].tensor.zero_()
    assert [float(param.sum().detach()) for param in params] == [36, 0, 0, 1]


def test_padding_is_zero_and_owners_begin_at_multiples_of_the_alignment() -> None:
    params = [nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))]
    messages = flatten(params, alignment=8)
    for param, message in zip(params, messages, strict=True):
        whole = torch.empty(0).set_(param.data.untyped_storage())  # type: ignore[call-overload]
        assert whole.tolist() == [1.0] * 5 + [0.0] * 3
        assert message.tensor.data_ptr() == whole.data_ptr()


def test_a_parameter_cut_between_ranks_is_in_both_messages() -> None:
    weight = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    messages = flatten([weight], even([6], 2, alignment=2))
    assert [message.tensor.tolist() for message in messages] == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0]]


def test_frozen_parameters_stay_where_they_are() -> None:
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    place = frozen.data_ptr()
    messages = flatten([frozen, nn.Parameter(torch.ones(3))])
    assert frozen.data_ptr() == place
    assert [message.tensor.numel() for message in messages] == [3]


def test_each_device_and_dtype_has_a_flat_tensor_of_its_own() -> None:
    params = [
        nn.Parameter(torch.ones(4, dtype=dtype, device=device))
        for device in ("cpu", "meta")
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.complex64)
    ]
    messages = flatten(params, sorted_greedy([4] * 8, 1))
    assert [(m.tensor.device.type, m.tensor.dtype) for m in messages] == [
        (p.device.type, p.dtype) for p in params
    ]
    assert all(param.device.type == message.tensor.device.type for param, message in zip(params, messages))


def test_flattening_again_moves_nothing_but_memory() -> None:
    params = [nn.Parameter(torch.arange(float(n))) for n in (3, 7)]
    first = flatten(params)
    params[0].requires_grad_(False)
    second = flatten(params)
    assert params[1].data_ptr() == second[0].tensor.data_ptr() != first[0].tensor.data_ptr()
    assert params[1].tolist() == list(range(7))


shapes = st.lists(
    st.tuples(
        st.lists(st.integers(0, 5), max_size=3), st.sampled_from(["float32", "float64"]), st.booleans()
    ),
    min_size=1,
    max_size=8,
)


@settings(deadline=None, max_examples=60)
@given(shapes, st.integers(1, 5), st.sampled_from(["sorted_greedy", "registration_greedy", "even"]))
def test_messages_cover_each_trainable_element_once(
    shapes: list[tuple[list[int], str, bool]], world_size: int, strategy: str
) -> None:
    params = [
        nn.Parameter(torch.zeros(shape, dtype=getattr(torch, dtype)), requires_grad=trainable)
        for shape, dtype, trainable in shapes
    ]
    partition = plan_partition(strategy, specs_of([{"params": params}]), world_size)
    for make_messages in (
        lambda: messages_by_parameter(partition, params),
        lambda: flatten(params, partition),
    ):
        for message in make_messages():
            assert message.tensor.numel(), "an empty message"
            message.tensor.add_(1 + message.owner)
        for index, param in enumerate(params):
            for piece, owner in partition.pieces_of_param[index]:
                values = flat_view(param.detach())[piece.start : piece.stop].tolist()
                assert values == [1.0 + owner if param.requires_grad else 0.0] * piece.numel
        for param in params:
            param.data.zero_()


# -------------------------------------------------------------------------------------------------- sending


def test_messages_by_parameter_go_owner_by_owner() -> None:
    params = [nn.Parameter(torch.full((n,), float(n))) for n in (6, 5, 4, 1)]
    params[2].requires_grad_(False)
    messages = messages_by_parameter(sorted_greedy([6, 5, 4, 1], 2), params)
    assert [(message.owner, message.tensor[0].item()) for message in messages] == [(0, 6), (0, 1), (1, 5)]
    assert not any(message.tensor.requires_grad for message in messages)


@pytest.mark.parametrize("bucketed", [False, True])
def test_broadcasting_brings_every_owners_values_to_all(bucketed: bool) -> None:
    def on_rank(comm: Collectives) -> list[list[float]]:
        params = [nn.Parameter(torch.full((n,), float(comm.rank))) for n in (6, 5, 4, 1)]
        partition = sorted_greedy([6, 5, 4, 1], comm.world_size)
        messages = flatten(params, partition) if bucketed else messages_by_parameter(partition, params)
        broadcast_messages(comm, messages)
        return [param.tolist() for param in params]

    expected = [[0.0] * 6, [1.0] * 5, [1.0] * 4, [0.0]]
    assert virtual.run(on_rank, 2) == [expected] * 2


@pytest.mark.parametrize("bucketed", [False, True])
def test_messages_within_bring_the_values_of_the_parameters_asked_for_and_no_others(bucketed: bool) -> None:
    def on_rank(comm: Collectives) -> tuple[list[list[float]], list[Call]]:
        params = [nn.Parameter(torch.full((n,), float(comm.rank))) for n in (6, 5, 4, 1)]
        partition = sorted_greedy([6, 5, 4, 1], comm.world_size)
        messages = flatten(params, partition) if bucketed else messages_by_parameter(partition, params)
        with recording(comm) as calls:
            broadcast_messages(comm, messages_within(messages, {0, 1, 3}))
        return [param.tolist() for param in params], calls

    for rank, (values, calls) in enumerate(virtual.run(on_rank, 2)):
        assert values == [[0.0] * 6, [1.0] * 5, [float(rank)] * 4, [0.0]]
        together = (
            [Call("broadcast", 28, 0)] if bucketed else [Call("broadcast", 24, 0), Call("broadcast", 4, 0)]
        )
        assert calls == [*together, Call("broadcast", 20, 1)]


def kinds_of_messages() -> tuple[list[nn.Parameter], list[Message]]:
    """Parameters of two owners and two dtypes; one is large."""
    dtypes = [torch.float32, torch.float32, torch.bfloat16, torch.float32, torch.bfloat16, torch.float32]
    numels = [6, 5, 4, PACKED_NUMEL + 1, 3, 2]
    params = [nn.Parameter(torch.zeros(numel, dtype=dtype)) for numel, dtype in zip(numels, dtypes)]
    return params, messages_by_parameter(from_lists(numels, [[0, 1, 2, 3, 4], [5]]), params)


@pytest.mark.parametrize(
    ("buffer_size", "together"),
    [
        (2**18, [[0, 1], [2, 4], [5], [3]]),
        (11, [[0, 1], [2, 4], [5], [3]]),
        (10, [[0], [1], [2, 4], [5], [3]]),
        (5, [[1], [2], [4], [5], [0], [3]]),
        (0, [[0], [1], [2], [3], [4], [5]]),
    ],
)
def test_small_messages_of_an_owner_and_a_dtype_are_joined(
    buffer_size: int, together: list[list[int]]
) -> None:
    _, messages = kinds_of_messages()
    found = joined(messages, buffer_size)
    assert [[piece.param for piece in one.slices] for one in found] == together
    assert [isinstance(one, Parcel) for one in found] == [len(numbers) > 1 for numbers in together]


def test_tensors_that_wrap_others_travel_alone() -> None:
    tensors = [torch.ones(2), Halved.of(torch.ones(2)), torch.ones(2), Halved.of(torch.ones(2))]
    messages = [Message(0, tensor, (Slice(number, 0, 2),)) for number, tensor in enumerate(tensors)]
    assert [[piece.param for piece in one.slices] for one in joined(messages, 100)] == [[0, 2], [1], [3]]


def test_a_parcel_brings_the_owners_values_to_all_in_one_broadcast() -> None:
    def on_rank(comm: Collectives) -> tuple[list[float], list[Call]]:
        params, messages = kinds_of_messages()
        for number, param in enumerate(params):
            param.data.fill_(10 * number + comm.rank)
        with recording(comm) as calls:
            broadcast_messages(comm, joined(messages, 2**18))
        return [param.unique().item() for param in params], calls

    for values, calls in virtual.run(on_rank, 2):
        assert values == [0, 10, 20, 30, 40, 51]
        assert calls == [
            Call("broadcast", 4 * 11, 0),
            Call("broadcast", 2 * 7, 0),
            Call("broadcast", 4 * 2, 1),
            Call("broadcast", 4 * (PACKED_NUMEL + 1), 0),
        ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, None])
def test_a_smaller_dtype_on_the_wire_rounds_the_copies_and_not_the_owners_values(dtype: Any) -> None:
    third, numbers = torch.tensor([1 / 3, 1 / 7]), torch.tensor([3, 2**40])

    def on_rank(comm: Collectives) -> tuple[torch.Tensor, torch.Tensor, list[Call]]:
        floats, integers = third * (comm.rank == 1), numbers * (comm.rank == 1)
        messages = [Message(1, floats, (Slice(0, 0, 2),)), Message(1, integers, (Slice(1, 0, 2),))]
        with recording(comm) as calls:
            works = start_broadcasts(comm, messages, dtype)
            for work in works:
                work.wait()
        return floats, integers, calls

    copied, owned = virtual.run(on_rank, 2)
    itemsize = 4 if dtype is None else min(4, dtype.itemsize)  # float64 would only cost more
    for floats, integers, calls in (copied, owned):
        assert torch.equal(integers, numbers)
        assert calls == [Call("broadcast", 2 * itemsize, 1), Call("broadcast", 16, 1)]
        assert floats.dtype == torch.float32
    assert torch.equal(owned[0], third)
    assert torch.equal(copied[0], third if itemsize == 4 else third.to(dtype).float())


def test_one_rank_sends_nothing() -> None:
    def on_rank(comm: Collectives) -> None:
        comm.observers.append(lambda call: pytest.fail(f"sent {call}"))
        broadcast_messages(comm, [Message(0, torch.ones(3), (Slice(0, 0, 3),))])

    virtual.run(on_rank, 1)
