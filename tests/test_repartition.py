"""New owners in the middle of training: it goes on as if nothing had happened, and little travels."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn, optim
from torch.optim import Optimizer
from training import (
    PARTITIONS,
    WHOLE,
    Backward,
    Script,
    Snapshot,
    Tangle,
    assert_same,
    assert_state_dicts_equal,
    assert_trains_as_plain,
    cut_anywhere,
    dealt,
    fill_gradients,
    of_several_dtypes,
    run_script,
    snapshot,
    train,
)

from zero_ref.comm.collectives import Collectives
from zero_ref.lab import virtual
from zero_ref.lab.meter import recording, state_bytes
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.calls import Call
from zero_ref.plan.moves import moves, numels_between
from zero_ref.plan.partition import Partition, Slice
from zero_ref.plan.rules import from_lists


def repartition(optimizer: Any, partition: Any) -> None:
    """The plain optimizer has nothing to repartition."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.repartition(partition)


def in_turn(*partitions: Any, steps: int = 5) -> Script:
    """Another partition before every step but the first, and before one of them two."""

    def script(model: nn.Module, optimizer: Optimizer, backward: Backward) -> Iterator[None]:
        for step in range(steps):
            if step:
                repartition(optimizer, partitions[step % len(partitions)])
            if step == 3:
                repartition(optimizer, partitions[0])
                repartition(optimizer, partitions[step % len(partitions)])
            backward(step)
            optimizer.step()
            yield

    return script


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.named_parameters())
    return [{"params": params[1::2], "lr": 0.05}, {"params": params[::2], "weight_decay": 0.3}]


def zero(comm: Collectives, params: Any, optimizer_class: Any = optim.Adam, **options: Any) -> Any:
    return ZeroRedundancyOptimizer(params, optimizer_class, comm, **options)


def trained(
    comm: Collectives,
    optimizer_class: Any = optim.Adam,
    steps: int = 2,
    make_model: Any = Tangle,
    **options: Any,
) -> tuple[Any, Any]:
    model = make_model()
    optimizer = zero(comm, model.named_parameters(), optimizer_class, **options)
    for _ in train(model, optimizer, range(steps)):
        pass
    return model, optimizer


def consolidated(optimizer: Any) -> dict[str, Any]:
    optimizer.consolidate_state_dict(to="all")
    return optimizer.state_dict()


# ------------------------------------------------------------------------- training goes on as if nothing was

OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (optim.Adam, {"amsgrad": True, "fused": True}),
    (optim.AdamW, {"lr": torch.tensor(0.01), "foreach": False}),
    (optim.Adagrad, {"lr": 0.1}),
    (optim.RMSprop, {"centered": True, "momentum": 0.5}),
    (optim.ASGD, {"t0": 1.0}),
    (optim.NAdam, {}),
    (optim.Rprop, {}),
]
TURNS = ["even", "sorted_greedy", cut_anywhere, dealt, "even"]


@pytest.mark.parametrize(
    ("optimizer_class", "options"), OPTIMIZERS, ids=lambda value: getattr(value, "__name__", "")
)
def test_training_goes_on_bit_for_bit(optimizer_class: Any, options: dict[str, Any]) -> None:
    modes = [("sorted_greedy", False), ("even", True)]
    assert_trains_as_plain(in_turn(*TURNS), optimizer_class, modes=modes, **options)


def test_from_each_partition_to_each_other_with_bucket_views_and_without() -> None:
    for partitions in ([*PARTITIONS], [*reversed(PARTITIONS)]):
        assert_trains_as_plain(in_turn(*partitions, steps=6), optim.AdamW, world_sizes=[3])


@pytest.mark.parametrize("make_model", [Tangle, of_several_dtypes])
def test_groups_dtypes_and_more_ranks_than_parameters(make_model: Any) -> None:
    assert_trains_as_plain(
        in_turn(*TURNS), optim.AdamW, world_sizes=[4, 12], modes=[("even", True), (dealt, False)],
        make_model=make_model, groups=two_groups,
    )  # fmt: skip


def test_parameters_frozen_and_freed_between_repartitions() -> None:
    def script(model: Any, optimizer: Optimizer, backward: Backward) -> Iterator[None]:
        for step in range(7):
            model.up.requires_grad_(step not in (2, 3))  # its state moves while it is frozen
            model.shift.requires_grad_(step > 3)  # moves before it has any
            repartition(optimizer, TURNS[step % len(TURNS)])
            optimizer.zero_grad()
            backward(step)
            optimizer.step()
            yield

    assert_trains_as_plain(script, optim.AdamW, world_sizes=[3])


def test_a_parameter_that_changed_its_memory_format_is_cut_along_its_new_memory() -> None:
    def script(model: Any, optimizer: Optimizer, backward: Backward) -> Iterator[None]:
        for step in range(4):
            if step == 2:
                model.conv.weight.data = model.conv.weight.data.contiguous()
                repartition(
                    optimizer, from_lists(numels, [[Slice(4, 0, 50)], [*whole, Slice(4, 50, 144)], []])
                )
            if step == 3:
                repartition(optimizer, dealt)
            backward(step)
            optimizer.step()
            yield

    numels = [param.numel() for param in Tangle().parameters()]
    whole = [Slice(param, 0, numel) for param, numel in enumerate(numels) if param != 4]
    assert_trains_as_plain(script, optim.Adam, world_sizes=[3], modes=[(dealt, False), (dealt, True)])


def with_elements(model: nn.Module) -> list[torch.Tensor]:
    return [param for param in model.parameters() if param.numel()]


def test_optimizers_that_look_at_shapes_hand_over_their_factors_whole() -> None:
    assert_trains_as_plain(
        in_turn(*WHOLE),
        optim.Adafactor,
        world_sizes=[3],
        modes=[("sorted_greedy", True)],
        groups=with_elements,
    )


def test_schedulers_go_on() -> None:
    def script(model: Any, optimizer: Optimizer, backward: Backward) -> Iterator[None]:
        scheduler = optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
        for step in range(6):
            repartition(optimizer, TURNS[step % len(TURNS)])
            backward(step)
            optimizer.step()
            scheduler.step()
            yield

    assert_trains_as_plain(script, optim.AdamW, world_sizes=[3], groups=two_groups)


def test_a_group_added_later_follows_the_new_rule() -> None:
    def script(model: Any, optimizer: Any, backward: Backward) -> Iterator[None]:
        yield from in_turn("even", steps=2)(model, optimizer, backward)
        repartition(optimizer, "even")
        optimizer.add_param_group({"params": list(model.up.parameters()), "lr": 0.02})
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            owners = [rank for _, rank in optimizer.partition.pieces_of_param[-2]]
            assert owners == list(range(optimizer.world_size)), "even, for the weights of up too"
        yield from in_turn(dealt, "even", steps=3)(model, optimizer, backward)

    def all_but_up(model: Any) -> list[torch.Tensor]:
        added = set(model.up.parameters())
        return [param for param in model.parameters() if param not in added]

    assert_trains_as_plain(
        script, optim.AdamW, world_sizes=[1, 3], modes=[("sorted_greedy", False)], groups=all_but_up
    )


def test_slices_that_border_on_each_other_and_slices_in_any_order() -> None:
    numels = [param.numel() for param in Tangle().parameters()]
    largest = max(range(len(numels)), key=numels.__getitem__)
    others = [Slice(param, 0, numel) for param, numel in enumerate(numels) if param != largest]
    parts = [
        Slice(largest, start, stop) for start, stop in itertools.pairwise([0, 7, 100, 300, numels[largest]])
    ]
    unsorted = Partition(tuple(numels), ((parts[1], *reversed(others), parts[0]), (parts[3], parts[2])))
    joined = from_lists(numels, [[*others, Slice(largest, 0, 150)], [Slice(largest, 150, numels[largest])]])
    assert_trains_as_plain(
        in_turn(unsorted, joined, "even", unsorted, joined),
        optim.Adam,
        world_sizes=[2],
        modes=[(joined, False)],
    )


def test_values_that_only_their_owner_has_in_full_go_with_them() -> None:
    def on_rank(comm: Collectives) -> tuple[Partition, Snapshot]:
        model = Tangle()
        optimizer = zero(comm, model.parameters(), broadcast_dtype=torch.bfloat16)
        run_script(in_turn(*TURNS), model, optimizer, 1)
        return optimizer.partition, snapshot(model)

    model = Tangle()
    run_script(in_turn(*TURNS), model, optim.Adam(model.parameters()), 1)
    for rank, (partition, ours) in enumerate(virtual.run(on_rank, 3, timeout=20)):
        for piece in partition.slices_of_rank[rank]:
            exact = list(model.parameters())[piece.param]
            memory = torch.empty_like(exact).copy_(ours[piece.param]).as_strided((exact.numel(),), (1,))
            expected = exact.detach().as_strided((exact.numel(),), (1,))
            assert torch.equal(memory[piece.start : piece.stop], expected[piece.start : piece.stop])


def test_autograd_notices_that_values_were_replaced() -> None:
    def on_rank(comm: Collectives) -> None:
        model, optimizer = trained(comm, broadcast_dtype=torch.bfloat16)
        output = (model.up.weight**2).sum()
        optimizer.repartition("even")
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.backward()

    virtual.run(on_rank, 2)


# -------------------------------------------------------------------------------- the state, before and after


@pytest.mark.parametrize(
    ("make_model", "optimizer_class", "options"),
    [
        *((Tangle, *case) for case in OPTIMIZERS),
        (of_several_dtypes, optim.AdamW, {"amsgrad": True}),
        (of_several_dtypes, optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (of_several_dtypes, optim.Adagrad, {"lr": 0.1}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_consolidated_state_is_the_same_before_and_after(
    make_model: Any, optimizer_class: Any, options: dict[str, Any]
) -> None:
    def on_rank(comm: Collectives) -> None:
        _, optimizer = trained(comm, optimizer_class, make_model=make_model, **options)
        before = consolidated(optimizer)
        for partition in TURNS:
            optimizer.repartition(partition)
            assert_state_dicts_equal(consolidated(optimizer), before)

    virtual.run(on_rank, 3, timeout=20)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(1, 4), st.data())
def test_whatever_the_partitions_the_state_stays_with_its_elements(
    numels: list[int], world_size: int, data: st.DataObject
) -> None:
    def at_random() -> Partition:
        owned: list[list[Slice]] = [[] for _ in range(world_size)]
        for param, numel in enumerate(numels):
            inner = data.draw(st.sets(st.integers(1, numel - 1), max_size=3)) if numel > 1 else set()
            for start, stop in itertools.pairwise(sorted({0, *inner, numel}) if numel else [0, 0]):
                owned[data.draw(st.integers(0, world_size - 1))].append(Slice(param, start, stop))
        return from_lists(numels, owned)

    partitions = [at_random() for _ in range(3)]

    def on_rank(comm: Collectives) -> None:
        params = [nn.Parameter(torch.ones(numel)) for numel in numels]
        optimizer = zero(comm, params, optim.SGD, lr=0.1, momentum=0.9, partition=partitions[0])
        for number, param in enumerate(params):
            param.grad = torch.arange(param.numel()) + 100.0 * number
        optimizer.step()
        for partition in partitions:
            optimizer.repartition(partition)
            assert tuple(own.piece for own in optimizer.shard.owned) == partition.slices_of_rank[comm.rank]
            for own in optimizer.shard.owned:
                first = own.piece.start + 100.0 * own.piece.param
                expected = torch.arange(own.piece.numel) + first
                assert torch.equal(optimizer.state[own.local]["momentum_buffer"], expected)

    virtual.run(on_rank, world_size, timeout=10)


def test_a_state_that_was_consolidated_still_holds() -> None:
    def on_rank(comm: Collectives) -> None:
        _, optimizer = trained(comm)
        before = consolidated(optimizer)
        optimizer.repartition("even")
        assert_state_dicts_equal(optimizer.state_dict(), before)

    virtual.run(on_rank, 2)


def test_state_has_the_same_dtype_device_and_strides_and_no_memory_beside() -> None:
    def kinds(optimizer: Any) -> dict[tuple[Slice, str], tuple[Any, ...]]:
        return {
            (own.piece, key): (value.dtype, value.device, value.shape, value.stride())
            for own in optimizer.shard.owned
            for key, value in optimizer.optim.state[own.local].items()
        }

    def on_rank(comm: Collectives) -> dict[tuple[Slice, str], tuple[Any, ...]]:
        _, optimizer = trained(comm, make_model=of_several_dtypes)
        before = kinds(optimizer)
        optimizer.repartition("even")
        optimizer.repartition(dealt)
        tensors = [value for of_slice in optimizer.state.values() for value in of_slice.values()]
        assert sum(value.untyped_storage().nbytes() for value in tensors) == state_bytes(optimizer)
        assert set(optimizer.state) <= {own.local for own in optimizer.shard.owned}, "what left is forgotten"
        assert not any(value.requires_grad for value in tensors)
        optimizer.repartition("sorted_greedy")
        assert kinds(optimizer) == before
        return before

    before = virtual.run(on_rank, 3, timeout=20)
    assert {dtype for of_rank in before for dtype, *_ in of_rank.values()} == {
        torch.float32,
        torch.bfloat16,
        torch.float64,
        torch.complex64,
    }


def test_a_slice_that_stays_keeps_its_very_tensors() -> None:
    def on_rank(comm: Collectives) -> None:
        params = [nn.Parameter(torch.ones(n)) for n in (100, 80, 60)]
        optimizer = zero(comm, params, partition=from_lists([100, 80, 60], thirds))
        for _ in train(nn.ParameterList(params), optimizer, range(2)):
            pass
        before = {own.piece: dict(optimizer.state[own.local]) for own in optimizer.shard.owned}
        optimizer.repartition(from_lists([100, 80, 60], changed))
        staying = 0
        for own in optimizer.shard.owned:
            for key, value in before.get(own.piece, {}).items():
                assert optimizer.state[own.local][key] is value
                staying += 1
        assert staying == 3 * len(set(thirds[comm.rank]) & set(changed[comm.rank]))

    half, rest = Slice(0, 0, 50), Slice(0, 50, 100)
    thirds: list[list[Any]] = [[half, Slice(1, 0, 80)], [rest], [Slice(2, 0, 60)]]
    changed: list[list[Any]] = [[half], [Slice(1, 0, 80), Slice(2, 0, 60)], [rest]]
    virtual.run(on_rank, 3)


def test_before_the_first_step_there_is_nothing_to_move() -> None:
    def on_rank(comm: Collectives) -> None:
        _, optimizer = trained(comm, steps=0)
        with recording(comm) as calls:
            optimizer.repartition("even")
        assert bytes_of_tensors(calls) == 0
        assert len(optimizer.state) == 0, "as optimizers expect it: not even an empty dict"
        assert consolidated(optimizer)["state"] == {}

    virtual.run(on_rank, 3)
    assert_trains_as_plain(
        lambda model, optimizer, backward: (
            repartition(optimizer, "even"),
            in_turn("even")(model, optimizer, backward),
        )[1],
        world_sizes=[3],
        modes=[("sorted_greedy", True)],
    )


def test_numbers_texts_none_and_tensors_of_any_shape_keep_their_types() -> None:
    class Talkative(optim.SGD):
        elementwise = True

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)
            for param in self.param_groups[0]["params"]:
                self.state[param] |= {
                    "n": 7, "x": 0.1, "b": True, "none": None, "inf": float("inf"), "nan": float("nan"),
                    "text": "ü", "counter": torch.tensor([3], dtype=torch.int16),
                    "scale": torch.tensor(2.5 + 1j), "empty": torch.empty(0, 2, dtype=torch.bool),
                    "mask": torch.ones_like(param, dtype=torch.bool),
                }  # fmt: skip

    def on_rank(comm: Collectives) -> None:
        params = [nn.Parameter(torch.linspace(-1, 1, 3 * n).view(n, 3)) for n in (100, 40, 2)]
        optimizer = zero(comm, params, Talkative, lr=0.1)
        for _ in train(nn.ParameterList(params), optimizer, range(1)):
            pass
        for partition in ("even", [[], [0, 1, 2], []], "even", "sorted_greedy"):
            optimizer.repartition(partition)
            for own in optimizer.shard.owned:
                state = optimizer.state[own.local]
                assert state.pop("nan") != state["x"]
                assert state["mask"].shape == own.local.shape
                assert state["mask"].all()
                assert (state["counter"].dtype, state["counter"].tolist()) == (torch.int16, [3])
                assert (state["scale"].shape, state["scale"].item()) == ((), 2.5 + 1j)
                assert (state["empty"].dtype, state["empty"].shape) == (torch.bool, (0, 2))
                plain = {key: state[key] for key in ("n", "x", "b", "none", "inf", "text")}
                assert repr(plain) == "{'n': 7, 'x': 0.1, 'b': True, 'none': None, 'inf': inf, 'text': 'ü'}"
                state["nan"] = float("nan")

    virtual.run(on_rank, 3)


# ----------------------------------------------------------------------------------------------- what travels


def bytes_of_tensors(calls: Sequence[Call], op: str = "send") -> int:
    """What is sent after the ranks have told each other what will come."""
    _, room_is_made, _ = (index for index, call in enumerate(calls) if call.op == "all_gather")
    return sum(call.nbytes for call in calls[room_is_made:] if call.op == op)


@pytest.mark.parametrize("old", PARTITIONS)
@pytest.mark.parametrize("new", ["even", dealt])
def test_what_is_sent_is_what_the_plan_says(old: Any, new: Any) -> None:
    def on_rank(comm: Collectives) -> None:
        model, optimizer = trained(comm, partition=old)
        model.scale.requires_grad_(True)
        before = optimizer.partition
        with recording(comm) as calls:
            optimizer.repartition(new)
        # A zero-dimensional state rides in the table; the frozen parameter has none.
        silent = {
            index for index, (name, _) in enumerate(model.named_parameters()) if name in ("scale", "shift")
        }
        planned = [move for move in moves(before, optimizer.partition) if move.piece.param not in silent]
        between = numels_between(planned)
        assert bytes_of_tensors(calls) == sum(8 * n for (src, _), n in between.items() if src == comm.rank)
        assert bytes_of_tensors(calls, "recv") == sum(
            8 * n for (_, dst), n in between.items() if dst == comm.rank
        )

    virtual.run(on_rank, 3)


def test_ranks_that_hand_nothing_over_are_left_alone() -> None:
    def on_rank(comm: Collectives) -> list[tuple[str, int | None]]:
        params = [nn.Parameter(torch.ones(n)) for n in (50, 40, 30)]
        optimizer = zero(comm, params, partition=[[0], [1], [2]])
        for _ in train(nn.ParameterList(params), optimizer, range(1)):
            pass
        with recording(comm) as calls:
            optimizer.repartition([[0], [], [1, 2]])
        return [(call.op, call.peer) for call in calls]

    agreed = ("all_gather", None)
    first, giver, taker = virtual.run(on_rank, 3)
    assert first == [agreed] * 3
    assert giver == [agreed, ("send", 2), ("send", 2), agreed, ("send", 2), ("send", 2), agreed]
    assert taker == [agreed, ("recv", 1), ("recv", 1), agreed, ("recv", 1), ("recv", 1), agreed]


# ------------------------------------------------------------------------------------------- what is refused


def history_of(optimizer: Any) -> Any:
    return {
        own.piece: dict(optimizer.state[own.local])
        for own in optimizer.shard.owned
        if own.local in optimizer.state
    }


def keep_a_set(optimizer: Any) -> None:
    for own in optimizer.shard.owned:
        if optimizer.rank == 1:
            optimizer.state[own.local]["history"] = {1, 2}


def keep_something_for_all(optimizer: Any) -> None:
    if optimizer.rank == 1:
        optimizer.state["global"] = {"count": torch.tensor(1)}


def forget_a_counter(optimizer: Any) -> None:
    if optimizer.rank == 1:
        for own in optimizer.shard.owned:
            if own.piece.numel < own.param.numel():
                optimizer.state[own.local]["step"] += 1


REFUSED: list[tuple[str, Any, Any, Callable[[Any], None] | None, str]] = [
    ("unknown name", optim.Adam, "by luck", None, "unknown partition 'by luck'"),
    ("too few ranks", optim.Adam, lambda rank: [[*range(10)]], None, "on 1 ranks; these are 10 parameters"),
    (
        "cut shapes",
        optim.Adafactor,
        lambda rank: cut_anywhere,
        None,
        "Adafactor may look at a parameter's shape",
    ),
    ("others", optim.Adam, lambda rank: "even" if rank == 1 else dealt, None, "partition "),
    ("fails on one", optim.Adam, lambda rank: 7 if rank == 1 else "even", None, "partition= takes a name"),
    ("odd state", optim.Adam, dealt, keep_a_set, "the state 'history' of parameter . is a set"),
    ("global state", optim.Adam, "even", keep_something_for_all, "'global' for no parameter in particular"),
    ("not together", optim.Adam, "sorted_greedy", forget_a_counter, "must be stepped together"),
]


@pytest.mark.parametrize(
    ("optimizer_class", "partition", "prepare", "text"),
    [case[1:] for case in REFUSED],
    ids=[case[0] for case in REFUSED],
)
@pytest.mark.parametrize("as_view", [False, True])
def test_a_refused_repartition_raises_on_all_ranks_and_changes_nothing(
    optimizer_class: Any, partition: Any, prepare: Any, text: str, as_view: bool
) -> None:
    cut_first = prepare is forget_a_counter

    def on_rank(comm: Collectives) -> None:
        model = nn.ParameterList(nn.Parameter(torch.ones(n, 10)) for n in (2, 3, 5, 7, 9, 11, 13, 15, 17, 19))
        mode = {"partition": "even" if cut_first else "sorted_greedy", "parameters_as_bucket_view": as_view}
        optimizer = zero(comm, model.parameters(), optimizer_class, **mode)
        for _ in train(model, optimizer, range(2)):
            pass
        if prepare is not None:
            prepare(optimizer)
        before = (
            optimizer.partition,
            optimizer.registered.choice,
            optimizer.built.messages,
            optimizer.optim.param_groups,
        )
        state, params = history_of(optimizer), [param.data_ptr() for param in model.parameters()]
        asked = partition(comm.rank) if callable(partition) and partition is not dealt else partition
        with pytest.raises((ValueError, TypeError, RuntimeError), match=text):
            optimizer.repartition(asked)
        after = (
            optimizer.partition,
            optimizer.registered.choice,
            optimizer.built.messages,
            optimizer.optim.param_groups,
        )
        assert all(one is other for one, other in zip(before, after, strict=True))
        assert [param.data_ptr() for param in model.parameters()] == params
        for piece, of_slice in history_of(optimizer).items():
            assert of_slice.keys() == state[piece].keys()
            assert all(of_slice[key] is state[piece][key] for key in of_slice)
        for _ in train(model, optimizer, range(2, 4)):
            pass

    virtual.run(on_rank, 3, timeout=10)


def test_between_a_backward_to_owners_and_its_step_it_is_refused() -> None:
    def on_rank(comm: Collectives) -> None:
        model, optimizer = trained(comm)
        fill_gradients(list(model.parameters()), 2, 1)
        params = optimizer.built.params  # as reduce_to_owners leaves them
        optimizer.backward.end_on_owners(
            params, frozenset(range(len(params))), scaled=False, may_change=False
        )
        with pytest.raises(RuntimeError, match=r"Call step\(\) or zero_grad\(\) before repartition"):
            optimizer.repartition("even")
        optimizer.step()
        optimizer.repartition("even")

    virtual.run(on_rank, 2)


# -------------------------------------------------------------------------------------------- several devices


def test_state_that_lies_elsewhere_than_the_network_is_staged() -> None:
    # To torch this is another device than "cpu", so moving there copies, as it does to a GPU.
    elsewhere = torch.device("cpu", 0)
    assert torch.ones(1).device != elsewhere

    def on_rank(comm: Collectives) -> Snapshot:
        vars(comm)["wire_of"] = lambda _: elsewhere
        model = Tangle()
        return run_script(in_turn(*TURNS), model, zero(comm, model.parameters()), 1)[-1]

    model = Tangle()
    plain = run_script(in_turn(*TURNS), model, optim.Adam(model.parameters()), 1)[-1]
    assert_same(virtual.run(on_rank, 3), [plain] * 3, "staged")


@pytest.mark.parametrize(("of_param", "of_state"), [("meta", "meta"), ("meta", "cpu"), ("cpu", "meta")])
def test_state_stays_on_its_device(of_param: str, of_state: str) -> None:
    halves = from_lists([10], [[Slice(0, 0, 4), Slice(0, 4, 10)]])

    def on_rank(comm: Collectives) -> None:
        param = nn.Parameter(torch.empty(5, 2, device=of_param))
        optimizer = zero(comm, [param], partition=halves)
        for own in optimizer.shard.owned:
            optimizer.state[own.local] = {
                "exp_avg": torch.zeros(own.piece.numel, device=of_state),
                "step": torch.tensor(3.0),
            }
        optimizer.repartition("sorted_greedy")
        state = optimizer.state[param]
        assert (state["exp_avg"].device.type, state["exp_avg"].shape) == (of_state, (5, 2))
        assert (state["step"].device.type, state["step"].item()) == ("cpu", 3.0)

    virtual.run(on_rank, 1)
