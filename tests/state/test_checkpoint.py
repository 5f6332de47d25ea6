"""Checkpoints on virtual ranks: one form, the plain torch optimizer's, for every world size and partition."""

from __future__ import annotations

import copy
import io
import itertools
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from library.training import (
    MODES,
    PARTITIONS,
    WHOLE,
    Groups,
    Run,
    Snapshot,
    Tangle,
    Wider,
    all_parameters,
    assert_same,
    assert_state_dicts_equal,
    caught,
    describe,
    fill_gradients,
    filled,
    of_several_dtypes,
    snapshot,
    train,
)
from torch import nn, optim
from torch.optim import Optimizer, lr_scheduler

from zero_ref.comm.collectives import Collectives
from zero_ref.files.sharded import load_sharded, save_sharded
from zero_ref.lab import virtual
from zero_ref.lab.meter import recording
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.calls import Call
from zero_ref.state import checkpoint, gather


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[1::2], "lr": 0.05}, {"params": params[::2], "weight_decay": 0.3}]


def named(model: nn.Module) -> Any:
    return model.named_parameters()


def named_groups(model: nn.Module) -> list[dict[str, Any]]:
    pairs = list(model.named_parameters())
    return [{"params": pairs[::2]}, {"params": pairs[1::2], "lr": 0.05}]


# --------------------------------------------------------------------------- interchangeable with plain torch

OPTIMIZERS = [
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (optim.Adam, {"amsgrad": True, "fused": True}),
    (optim.AdamW, {"lr": torch.tensor(0.01), "foreach": False}),
    (optim.Adagrad, {"lr": 0.1}),
    (optim.RMSprop, {"centered": True, "momentum": 0.5}),
    (optim.NAdam, {}),
    (optim.ASGD, {"t0": 1.0}),
]


@pytest.mark.parametrize(
    ("optimizer_class", "options"), OPTIMIZERS, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_checkpoint_is_key_for_key_the_plain_optimizers_and_training_goes_on_in_either(
    optimizer_class: Any, options: dict[str, Any]
) -> None:
    run = Run(optimizer_class, **options)
    first, middle = run.plain(range(2))
    rest, end = run.plain(range(2, 4), first[-1], middle)
    for partition in ("sorted_greedy", "even"):
        for trained, state in run.sharded(3, range(2), partition=partition):
            assert_same(trained, first, str(partition))
            assert_state_dicts_equal(state, middle)
        assert_same(run.plain(range(2, 4), first[-1], state)[0], rest, "in the plain optimizer")
        for trained, state in run.sharded(2, range(2, 4), first[-1], middle, partition=partition):
            assert_same(trained, rest, f"{partition}, from the plain optimizer's checkpoint")
            assert_state_dicts_equal(state, end)


@pytest.mark.parametrize(
    ("groups", "make_model"),
    [(all_parameters, Tangle), (two_groups, of_several_dtypes), (named_groups, Tangle)],
)
def test_checkpoints_load_at_any_other_world_size_and_partition(groups: Groups, make_model: Any) -> None:
    run = Run(optim.AdamW, groups, make_model)
    first, middle = run.plain(range(2))
    rest, _ = run.plain(range(2, 4), first[-1], middle)
    modes = itertools.cycle(MODES)
    for partition in PARTITIONS:
        state = run.sharded(4, range(2), partition=partition)[0][1]
        assert_state_dicts_equal(state, middle)
        for world_size in (1, 2, 5):
            other, as_view = next(modes)
            mode = {"partition": other, "parameters_as_bucket_view": as_view}
            for trained, _ in run.sharded(world_size, range(2, 4), first[-1], state, **mode):
                assert_same(trained, rest, f"{describe(partition)} at 4 to {mode} at {world_size}")


def test_optimizers_that_look_at_shapes_keep_their_factors_whole() -> None:
    def with_elements(model: nn.Module) -> list[torch.Tensor]:
        return [param for param in model.parameters() if param.numel()]

    run = Run(optim.Adafactor, with_elements)
    first, middle = run.plain(range(2))
    assert "row_var" in middle["state"][3]
    rest, _ = run.plain(range(2, 4), first[-1], middle)
    for partition in WHOLE:
        state = run.sharded(4, range(2), partition=partition)[2][1]
        assert_state_dicts_equal(state, middle)
        for trained, _ in run.sharded(2, range(2, 4), first[-1], state, partition=partition):
            assert_same(trained, rest, describe(partition))


def test_a_fused_optimizer_loads_what_an_unfused_one_saved_and_the_other_way() -> None:
    # pytorch#124133: torch's class brought the step counter of fused AdamW in the wrong form.
    for saving, loading in itertools.permutations(
        [{"fused": True}, {"foreach": True}, {"capturable": False}], 2
    ):
        first, middle = Run(optim.AdamW, **saving).plain(range(2))
        run = Run(optim.AdamW, **loading)
        rest, end = run.plain(range(2, 4), first[-1], middle)
        for partition in ("sorted_greedy", "even"):
            for trained, state in run.sharded(2, range(2, 4), first[-1], middle, partition=partition):
                assert_same(trained, rest, f"{saving} into {loading}")
                assert_state_dicts_equal(state, end)
                assert float(state["state"][0]["step"]) == 4


def test_the_state_of_parameters_that_were_never_used_is_absent() -> None:
    class Unused(Tangle):
        def __init__(self) -> None:
            super().__init__()
            self.up.requires_grad_(False)

    run = Run(optim.AdamW, make_model=Unused)
    first, middle = run.plain(range(2))
    unused = [name for name, _ in Unused().named_parameters()].index("up.weight")
    assert unused not in middle["state"]
    rest, _ = run.plain(range(2, 4), first[-1], middle)
    for partition in PARTITIONS:
        state = run.sharded(3, range(2), partition=partition)[0][1]
        assert_state_dicts_equal(state, middle)
        for trained, _ in run.sharded(2, range(2, 4), first[-1], state, partition=partition):
            assert_same(trained, rest, describe(partition))


def test_before_the_first_step_there_is_no_state_and_it_loads() -> None:
    run = Run(optim.AdamW)
    _, empty = run.plain(range(0))
    state = run.sharded(3, range(0))[1][1]
    assert_state_dicts_equal(state, empty)
    for trained, _ in run.sharded(2, range(2), None, state):
        assert_same(trained, run.plain(range(2))[0], "from an empty state")


def test_python_numbers_texts_and_none_keep_their_types() -> None:
    text = {"s": "ü"}

    class Talkative(optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)
            for param in self.param_groups[0]["params"]:
                self.state[param] |= {"n": 7, "x": 0.1, "b": True, "none": None, "inf": float("inf"), **text}

    run = Run(Talkative, lr=0.1)
    _, plain = run.plain(range(1))
    for partition in ("sorted_greedy", "even"):
        trained = run.sharded(3, range(1), partition=partition, elementwise=True)
        assert_state_dicts_equal(trained[0][1], plain)
    for of_param in plain["state"].values():
        del of_param["s"]  # torch's own load_state_dict turns a text into the repr of a generator
    for partition in ("sorted_greedy", "even"):
        loaded = run.sharded(3, range(0), None, plain, partition=partition, elementwise=True)
        assert_state_dicts_equal(loaded[0][1], plain)


def test_a_checkpoint_passes_through_a_file_without_pickled_code() -> None:
    run = Run(optim.AdamW, named_groups)
    state = run.sharded(3, range(2))[0][1]
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert_state_dicts_equal(torch.load(file, weights_only=True), state)
    saved = sum(t.numel() * t.itemsize for of_param in state["state"].values() for t in of_param.values())
    assert file.getbuffer().nbytes < 2 * saved, "tensors are saved with their own memory only"


# ------------------------------------------------------------------------------------- who gets it, and when


def trained_optimizer(comm: Collectives, **options: Any) -> tuple[Any, ZeroRedundancyOptimizer]:
    model = Tangle()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, comm, **options)
    for _ in train(model, optimizer, range(2)):
        pass
    return model, optimizer


@pytest.mark.parametrize("to", [0, 2, "all"])
def test_only_the_ranks_asked_for_get_the_state(to: Any) -> None:
    def on_rank(comm: Collectives) -> bool:
        _, optimizer = trained_optimizer(comm)
        optimizer.consolidate_state_dict(to=to)
        if to in ("all", comm.rank):
            return len(optimizer.state_dict()["state"]) == 10
        with pytest.raises(RuntimeError, match=rf"rank {comm.rank}: .*consolidate_state_dict\({comm.rank}\)"):
            optimizer.state_dict()
        return False

    assert virtual.run(on_rank, 3) == [to in ("all", rank) for rank in range(3)]


def test_it_goes_to_rank_0_unless_told_otherwise() -> None:
    def on_rank(comm: Collectives) -> bool:
        _, optimizer = trained_optimizer(comm)
        optimizer.consolidate_state_dict()
        return optimizer.whole.gathered is not None

    assert virtual.run(on_rank, 2) == [True, False]


def constructed(comm: Collectives, optimizer_class: Any, **options: Any) -> ZeroRedundancyOptimizer:
    torch.manual_seed(0)
    return ZeroRedundancyOptimizer(Tangle().parameters(), optimizer_class, comm, **options)


@pytest.mark.parametrize(
    ("optimizer_class", "options"), OPTIMIZERS, ids=lambda value: getattr(value, "__name__", "")
)
def test_before_the_first_update_every_rank_has_the_state_that_the_plain_optimizer_has(
    optimizer_class: Any, options: dict[str, Any]
) -> None:
    plain = optimizer_class(Tangle().parameters(), **options).state_dict()

    def on_rank(comm: Collectives) -> None:
        optimizer = constructed(comm, optimizer_class, partition="even", **options)
        with recording(optimizer.collectives, checks=True) as calls:
            state = optimizer.state_dict()
        assert not calls
        assert_state_dicts_equal(state, plain)
        optimizer.consolidate_state_dict("all")
        assert_state_dicts_equal(optimizer.state_dict(), state)
        optimizer.load_state_dict(copy.deepcopy(state))  # as accelerate's prepare does
        optimizer.consolidate_state_dict("all")
        assert_state_dicts_equal(optimizer.state_dict(), state)

    virtual.run(on_rank, 3, timeout=60)


def test_it_is_also_that_of_masters_and_of_ranks_that_own_nothing() -> None:
    def on_rank(comm: Collectives) -> None:
        first = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        optimizer = ZeroRedundancyOptimizer([first], optim.Adagrad, comm, master_dtype=torch.float32)
        assert optimizer.state_dict()["state"][0]["sum"].dtype == torch.float32  # that of the copy
        before = optimizer.state_dict()
        optimizer.consolidate_state_dict("all")
        assert_state_dicts_equal(optimizer.state_dict(), before)

    virtual.run(on_rank, 3, timeout=60)


class StartsAtItsValues(optim.SGD):
    """Keeps the values that parameters had when it was constructed."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        for param in all_parameters_of(self):
            self.state[param]["start"] = param.detach().clone()


def all_parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


class NeedsParameters(optim.SGD):
    """Its constructor refuses the stand-ins."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        if not all(isinstance(param, nn.Parameter) for param in all_parameters_of(self)):
            raise TypeError("these are no parameters")


@pytest.mark.parametrize("optimizer_class", [StartsAtItsValues, NeedsParameters])
def test_state_that_a_strange_constructor_may_make_of_values_has_to_be_gathered(optimizer_class: Any) -> None:
    def on_rank(comm: Collectives) -> None:
        optimizer = constructed(comm, optimizer_class, lr=0.1)
        with pytest.raises(RuntimeError, match=rf"Call consolidate_state_dict\({comm.rank}\) on all ranks"):
            optimizer.state_dict()
        optimizer.consolidate_state_dict("all")
        assert bool(optimizer.state_dict()["state"]) == (optimizer_class is StartsAtItsValues)

    virtual.run(on_rank, 2, timeout=60)


@pytest.mark.parametrize("world_size", [1, 2])
def test_state_dict_before_consolidating_and_after_a_change_says_what_to_call(world_size: int) -> None:
    def refused(optimizer: ZeroRedundancyOptimizer) -> None:
        with pytest.raises(RuntimeError, match=r"Call consolidate_state_dict\(\d\) on all ranks"):
            optimizer.state_dict()

    def on_rank(comm: Collectives) -> None:
        _, optimizer = trained_optimizer(comm)
        refused(optimizer)
        optimizer.consolidate_state_dict(to="all")
        state = optimizer.state_dict()
        changes = [
            optimizer.step,
            lambda: optimizer.load_state_dict(state),
            lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]}),
        ]
        for change in changes:
            optimizer.consolidate_state_dict(to="all")
            optimizer.state_dict()
            change()
            refused(optimizer)
        optimizer.consolidate_state_dict(to="all")
        optimizer.consolidate_state_dict(to=0)
        if comm.rank != 0:
            refused(optimizer)

    virtual.run(on_rank, world_size)


def test_each_rank_sends_its_share_once_and_only_to_the_receiver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "PARCEL_NBYTES", 150)

    def on_rank(comm: Collectives) -> list[Call]:
        params = [nn.Parameter(torch.ones(n)) for n in (60, 45, 15)]
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer = ZeroRedundancyOptimizer(params, optim.Adam, comm)
        optimizer.step()
        with recording(comm) as calls:
            optimizer.consolidate_state_dict(to=0)
        return calls

    receiver, sender = virtual.run(on_rank, 2)
    # agree; the length of the entries and the entries; agree; moments of 15 elements, joined; others;
    # agree
    ops = ["all_gather", "send", "send", "all_gather", "send", "send", "send", "all_gather"]
    assert [call.op for call in sender] == ops
    assert [call.nbytes for call in sender[4:7]] == [120, 180, 180]
    assert receiver == [Call("recv", c.nbytes, 1) if c.op == "send" else c for c in sender]


def on_one_rank(rank: int, function: Callable[..., Any], after: int) -> Callable[..., Any]:
    """As the function, but its call number `after` from now raises on the thread of that virtual rank."""
    calls: list[None] = []

    def or_raise(*args: Any, **kwargs: Any) -> Any:
        if getattr(FAULTY, "rank", None) == rank:
            calls.append(None)
            if len(calls) == after:
                raise MemoryError("no room")
        return function(*args, **kwargs)

    return or_raise


FAULTY = threading.local()


@pytest.mark.parametrize(
    ("to", "elsewhere", "module", "name"),
    [
        (0, False, gather, "allocate"),
        (1, True, torch, "_foreach_copy_"),
        ("all", True, gather, "allocate"),
        ("all", False, torch, "_foreach_copy_"),
    ],
)
def test_an_error_while_state_is_gathered_reaches_all_ranks_and_the_next_attempt_works(
    monkeypatch: pytest.MonkeyPatch, to: Any, elsewhere: bool, module: Any, name: str
) -> None:
    failed: list[str] = []

    def on_rank(comm: Collectives, rank: int, after: int) -> None:
        if elsewhere:  # to torch another device than "cpu": nothing goes as it is
            vars(comm)["wire_of"] = lambda _: torch.device("cpu", 0)
        _, optimizer = trained_optimizer(comm)
        FAULTY.rank = comm.rank
        try:
            optimizer.consolidate_state_dict(to)
        except (MemoryError, RuntimeError) as error:
            failed.append(f"{type(error).__name__}: {error}")
            with pytest.raises(RuntimeError, match="has not been gathered"):
                optimizer.state_dict()
        FAULTY.rank = None
        optimizer.consolidate_state_dict(to)
        assert to not in (comm.rank, "all") or optimizer.state_dict()["state"]

    for rank, after in itertools.product(range(3), (1, 2)):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, on_one_rank(rank, getattr(module, name), after))
            virtual.run(on_rank, 3, rank, after, timeout=20)
    raised = [text for text in failed if text == "MemoryError: no room"]
    told = [text for text in failed if text.endswith("the optimizer state: MemoryError: no room")]
    assert len(raised) > 0
    assert len(told) == 2 * len(raised) == len(failed) - len(raised), "on one rank, then on all three"


def test_every_rank_asked_for_has_a_copy_of_its_own() -> None:
    def on_rank(comm: Collectives) -> Any:
        _, optimizer = trained_optimizer(comm)
        optimizer.consolidate_state_dict(to="all")
        return optimizer.state_dict()

    one, two = virtual.run(on_rank, 2)
    one["state"][0]["exp_avg"].zero_()
    assert two["state"][0]["exp_avg"].any()


# -------------------------------------------------------------------------- nothing changes behind one's back


@pytest.mark.parametrize(("partition", "lr"), [("sorted_greedy", 0.01), ("even", torch.tensor(0.01))])
def test_a_consolidated_dict_is_not_changed_by_later_steps(partition: Any, lr: Any) -> None:
    def on_rank(comm: Collectives) -> None:
        options = {
            "lr": copy.deepcopy(lr),
            "foreach": False,
        }  # a scheduler writes into a learning rate that is a tensor
        model, optimizer = trained_optimizer(comm, partition=partition, **options)
        scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
        optimizer.consolidate_state_dict(to="all")
        state = optimizer.state_dict()
        before = copy.deepcopy(state)
        for _ in train(model, optimizer, range(2, 4)):
            scheduler.step()
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.0025)
        assert_state_dicts_equal(state, before)

    virtual.run(on_rank, 2)


@pytest.mark.parametrize(("partition", "as_view"), [("sorted_greedy", False), ("even", True)])
@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)], ids=["number", "tensor"])
def test_loading_leaves_the_dict_as_it_was_and_it_loads_again(partition: Any, as_view: bool, lr: Any) -> None:
    run = Run(optim.AdamW, two_groups, lr=lr, foreach=False)
    first, state = run.plain(range(2))
    rest, _ = run.plain(range(2, 4), first[-1], state)
    before = copy.deepcopy(state)
    mode = {"partition": partition, "parameters_as_bucket_view": as_view}
    for _ in range(2):
        for trained, _ in run.sharded(2, range(2, 4), first[-1], state, **mode):
            assert_same(trained, rest, "loaded")
        assert_state_dicts_equal(state, before)
    again, _ = run.sharded(1, range(2, 4), first[-1], state, **mode)[0]
    assert_same(again, rest, "loaded into one rank")
    assert_state_dicts_equal(state, before)


def test_a_scheduler_does_not_write_into_a_dict_that_was_loaded() -> None:
    # It does write into a learning rate that is a tensor, in place.
    _, state = Run(optim.AdamW, lr=torch.tensor(0.5), foreach=False).plain(range(1))

    def on_rank(comm: Collectives) -> float:
        model, optimizer = trained_optimizer(comm, lr=torch.tensor(0.1), foreach=False)
        scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
        optimizer.load_state_dict(state)
        for _ in train(model, optimizer, range(2)):
            scheduler.step()
        return float(optimizer.param_groups[0]["lr"])

    assert virtual.run(on_rank, 2) == [0.125, 0.125]
    assert float(state["param_groups"][0]["lr"]) == 0.5


def test_options_that_the_checkpoint_does_not_have_are_forgotten_as_by_torch(tmp_path: Path) -> None:
    """Such as the `initial_lr` of a scheduler, which the next scheduler would take for its base."""

    def script(optimizer: Optimizer, model: nn.Module, load: Callable[[Any], Any]) -> list[Snapshot]:
        lr_scheduler.LambdaLR(optimizer, lambda count: 0.5**count)
        load(optimizer)
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda count: 0.5**count)
        return [snapshot(model) for _ in train(model, optimizer, range(2, 5)) if not scheduler.step()]

    run = Run(optim.AdamW, lr=0.3)
    first, state = run.plain(range(2))
    model = run.model(first[-1])
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    plain = script(optimizer, model, lambda plain: plain.load_state_dict(copy.deepcopy(state)))

    def on_rank(comm: Collectives, load: Callable[[Any], Any]) -> list[Snapshot]:
        model = run.model(first[-1])
        zero = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, comm, lr=0.1)
        return script(zero, model, load)

    def save(comm: Collectives) -> None:
        model = run.model(first[-1])
        zero = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, comm, lr=0.3)
        zero.load_state_dict(state)
        save_sharded(zero, tmp_path)

    virtual.run(save, 2)
    for load in (lambda zero: zero.load_state_dict(state), lambda zero: load_sharded(zero, tmp_path)):
        for trained in virtual.run(on_rank, 2, load):
            assert_same(trained, plain, "with a second scheduler")


def test_a_checkpoint_without_this_versions_options_keeps_ours() -> None:
    run = Run(optim.AdamW, lr=0.1)
    first, state = run.plain(range(2))
    for option in ("fused", "decoupled_weight_decay", "maximize"):
        del state["param_groups"][0][option]
    rest, _ = run.plain(range(2, 4), first[-1], state)
    for trained, _ in run.sharded(2, range(2, 4), first[-1], state):
        assert_same(trained, rest, "older checkpoint")


def test_the_state_follows_groups_added_after_a_checkpoint_was_loaded() -> None:
    def script(optimizer: Optimizer, model: Any, state: Any) -> list[Snapshot]:
        optimizer.load_state_dict(state)
        optimizer.add_param_group({"params": [model.scale], "lr": 0.5})
        return [snapshot(model) for _ in train(model, optimizer, range(2, 4))]

    def without_scale(model: Any) -> list[torch.Tensor]:
        return [param for param in model.parameters() if param is not model.scale]

    run = Run(optim.AdamW, without_scale)
    first, state = run.plain(range(2))
    model = run.model(first[-1])
    plain = script(optim.AdamW(without_scale(model)), model, copy.deepcopy(state))

    def on_rank(comm: Collectives, partition: Any, as_view: bool) -> list[Snapshot]:
        model = run.model(first[-1])
        optimizer = ZeroRedundancyOptimizer(
            without_scale(model), optim.AdamW, comm, as_view, partition=partition
        )
        return script(optimizer, model, state)

    for mode in MODES[::3]:
        for trained in virtual.run(on_rank, 3, *mode):
            assert_same(trained, plain, str(mode))


@pytest.mark.thorough
@pytest.mark.ranks
def test_numpy_is_not_needed() -> None:
    # torch does not install it; `sys.modules[name] = None` makes importing it fail.
    code = """
        import sys
        sys.modules["numpy"] = None
        sys.path.insert(0, "tests")
        from library.training import Run
        states = [state for to in (0, "all") for _, state in Run().sharded(2, range(2), to=to)]
        assert [state is None for state in states] == [False, True, False, False]
        assert states[0]["state"][0]["step"] == 2
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------------------- bad input


def loading_raises(
    state_of_rank: Callable[[int], Any], make_model: Any = Tangle, **options: Any
) -> list[Exception]:
    """Return each rank's error from load_state_dict, after which the optimizer trains on undisturbed."""
    run = Run(optim.AdamW, named, make_model)
    undisturbed, _ = run.plain(range(3))

    def on_rank(comm: Collectives) -> Exception:
        model = run.model(None)
        optimizer = ZeroRedundancyOptimizer(model.named_parameters(), optim.AdamW, comm, **options)
        trained = [snapshot(model) for _ in train(model, optimizer, range(2))]
        with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
            optimizer.load_state_dict(state_of_rank(comm.rank))
        trained += [snapshot(model) for _ in train(model, optimizer, range(2, 3))]
        assert_same(trained, undisturbed, "after a refused checkpoint")
        return caught.value

    return virtual.run(on_rank, 2, timeout=5)


def state_of(make_model: Any, optimizer_class: Any = optim.AdamW) -> Any:
    return Run(optimizer_class, make_model=make_model).plain(range(1))[1]


class Scalar(Tangle):
    def __init__(self) -> None:
        super().__init__()
        self.norm.bias = nn.Parameter(torch.zeros(()))


class OfOne(Tangle):
    def __init__(self) -> None:
        super().__init__()
        self.norm.bias = nn.Parameter(torch.zeros(1))


class Longer(Tangle):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.zeros(3))


@pytest.mark.parametrize(
    ("other", "partition"), [(Wider, "even"), (Scalar, "sorted_greedy"), (OfOne, "even")]
)
def test_a_checkpoint_of_another_model_names_the_parameter_on_all_ranks(other: Any, partition: Any) -> None:
    state = state_of(other)
    for error in loading_raises(lambda rank: state, partition=partition):
        assert isinstance(error, ValueError)
        shape = tuple(other().norm.bias.shape)
        assert f"'exp_avg' for parameter norm.bias has shape {shape}; the parameter has (8,)" in str(error)


def test_a_checkpoint_of_another_model_on_one_rank_raises_on_all() -> None:
    ours, other = state_of(Tangle), state_of(Wider)
    right, wrong = loading_raises(lambda rank: other if rank == 1 else ours)
    assert isinstance(wrong, ValueError)
    assert isinstance(right, RuntimeError)
    assert "rank 0: rank 1 could not load the state dict: ValueError: the checkpoint's 'exp_avg'" in str(
        right
    )


def test_a_checkpoint_with_other_groups_says_how_many_parameters_each_has() -> None:
    longer = state_of(Longer)
    for error in loading_raises(lambda rank: longer):
        assert isinstance(error, ValueError)
        assert "parameter groups of [12] parameters and this optimizer has [11]" in str(error)
    two = Run(optim.AdamW, two_groups).plain(range(1))[1]
    assert "[5, 6] parameters and this optimizer has [11]" in str(loading_raises(lambda rank: two)[0])


def test_ranks_that_load_different_options_or_states_all_raise() -> None:
    one, other = state_of(Tangle), state_of(Tangle)
    other["param_groups"][0]["lr"] = 0.75
    for error in loading_raises(lambda rank: other if rank else one):
        assert isinstance(error, ValueError)
        assert "rank 1 has [group 0: lr=0.75]" in str(error)
        assert "0.75" in str(error)
    del other["state"][0]
    other["param_groups"] = one["param_groups"]
    assert all(
        "ranks disagree" in str(error) for error in loading_raises(lambda rank: other if rank else one)
    )


@pytest.mark.parametrize(
    ("optimizer_class", "options", "named"),
    [
        (optim.AdamW, {}, "[state 'step' of parameter 0: () float32, 2.0]"),
        (optim.SGD, {"momentum": 0.9, "lr": 0.1}, "[state 'momentum_buffer' of parameter 0: "),
    ],
)
def test_ranks_that_load_states_of_different_steps_all_raise(
    optimizer_class: Any, options: dict[str, Any], named: str
) -> None:
    model = Tangle()
    plain = optimizer_class(model.parameters(), **options)
    saved = []
    for step in range(2):
        fill_gradients(model.parameters(), step, world_size=1)
        plain.step()
        saved.append(copy.deepcopy(plain.state_dict()))

    def on_rank(comm: Collectives) -> str:
        optimizer = ZeroRedundancyOptimizer(Tangle().parameters(), optimizer_class, comm, **options)
        return caught(lambda: optimizer.load_state_dict(saved[comm.rank]))

    for message in virtual.run(on_rank, 2):
        assert "ranks disagree, so none can load the state dict: rank 1 has " + named in message
        assert "Load the same state dict, of one step, on every rank" in message


@pytest.mark.parametrize("first", ["optimizer", "model", None])
def test_masters_loaded_into_a_model_without_its_weights_are_told_in_the_next_step(first: str | None) -> None:
    def trained(comm: Collectives) -> tuple[nn.Module, Any]:
        model = nn.Linear(8, 8).bfloat16()
        with torch.no_grad():
            model.weight.fill_(1.0)
            model.bias.fill_(1.0)
        optimizer = ZeroRedundancyOptimizer(
            model.named_parameters(), optim.SGD, comm, lr=0.1, master_dtype=torch.float32
        )
        return model, optimizer

    def step(model: nn.Module, optimizer: Any) -> None:
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()

    def on_rank(comm: Collectives) -> None:
        model, optimizer = trained(comm)
        step(model, optimizer)
        optimizer.consolidate_state_dict("all")
        other, resumed = trained(comm)
        if first == "model":
            other.load_state_dict(model.state_dict())
        resumed.load_state_dict(optimizer.state_dict())
        if first == "optimizer":
            other.load_state_dict(model.state_dict())
        for both in ((model, optimizer), (other, resumed)):
            step(*both)
            step(*both)
        assert all(map(torch.equal, other.parameters(), model.parameters()))

    if first is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            virtual.run(on_rank, 2)
        return
    with pytest.warns(
        UserWarning, match="the loaded masters have other values than 1 parameters here"
    ) as told:
        virtual.run(on_rank, 2)
    assert sorted(str(warning.message).partition(":")[0] for warning in told) == ["rank 0", "rank 1"]
    assert {warning.filename for warning in told} == {__file__}


def test_parameters_that_differ_after_a_load_are_told_before_the_next_update() -> None:
    def on_rank(comm: Collectives) -> None:
        model = Tangle()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, comm)
        for step in range(2):
            fill_gradients(model.parameters(), step, world_size=1)
            optimizer.step()
            optimizer.consolidate_state_dict("all")
            optimizer.load_state_dict(optimizer.state_dict())
            with torch.no_grad():
                next(model.parameters()).add_(comm.rank)

    with pytest.warns(UserWarning, match="has other values on rank 1 than on rank 0"):
        virtual.run(on_rank, 2)


@pytest.mark.parametrize("junk", [None, {"state": {}}, {"model": {}, "optimizer": {}}, {1: 2}])
def test_what_is_no_state_dict_is_refused_on_all_ranks(junk: Any) -> None:
    for error in loading_raises(lambda rank: junk):
        assert isinstance(error, ValueError)
        assert "keys 'state' and 'param_groups'" in str(error)


def test_consolidating_to_no_rank_is_refused_on_all_ranks() -> None:
    wrong: list[Any] = [2, -1, 1.5, "every", None, (0,)]

    def on_rank(comm: Collectives) -> None:
        _, optimizer = trained_optimizer(comm)
        for to in wrong:
            with pytest.raises(ValueError, match="is no rank of a group of 2, nor 'all'"):
                optimizer.consolidate_state_dict(to=to)
        optimizer.consolidate_state_dict(to=1)

    virtual.run(on_rank, 2, timeout=5)


def test_ranks_that_consolidate_to_different_ranks_all_raise() -> None:
    def on_rank(comm: Collectives) -> None:
        _, optimizer = trained_optimizer(comm)
        with pytest.raises(ValueError, match=r"rank 1 has \[to=1\] where rank 0 has \[to=0\]"):
            optimizer.consolidate_state_dict(to=comm.rank)
        optimizer.consolidate_state_dict(to="all")

    virtual.run(on_rank, 2, timeout=5)


def test_small_tensors_travel_together_in_parcels_of_a_limited_size() -> None:
    def on_rank(comm: Collectives) -> list[int]:
        params = [nn.Parameter(torch.ones(2**14)) for _ in range(10)]
        everything = [[], list(range(10))]
        optimizer = ZeroRedundancyOptimizer(params, optim.SGD, comm, partition=everything, lr=1, momentum=1)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        with recording(comm) as calls:
            optimizer.consolidate_state_dict(to=0)
        return [call.nbytes for call in calls if call.op == "send"]

    _, sent = virtual.run(on_rank, 2, timeout=10)
    assert sent[2:] == [2**18, 2**18, 2**17], "after the length and the text of the table"


def test_parts_of_a_parameter_that_were_not_stepped_together_are_refused_on_all_ranks() -> None:
    def on_rank(comm: Collectives) -> str:
        weight = nn.Parameter(torch.ones(256))
        optimizer = ZeroRedundancyOptimizer([weight], optim.AdamW, comm, partition="even")
        weight.grad = torch.ones(256) if comm.rank == 0 else None
        optimizer.step()
        with pytest.raises((ValueError, RuntimeError)) as caught:
            optimizer.consolidate_state_dict(to=0)
        return f"{caught.value}"

    first, second = virtual.run(on_rank, 2, timeout=10)
    assert "128 of 256 elements of parameter 0 have the state 'exp_avg'" in first
    assert "rank 0 could not make room for the optimizer state: ValueError: rank 0: 128 of 256" in second


def test_state_that_cannot_be_saved_raises_on_all_ranks_and_names_it() -> None:
    class Hoarding(optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)
            for param in self.param_groups[0]["params"]:
                if param.ndim == 4:  # one parameter, so one rank
                    self.state[param]["history"] = {1, 2}

    def on_rank(comm: Collectives) -> str:
        model = Tangle()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), Hoarding, comm, lr=0.1)
        for _ in train(model, optimizer, range(1)):
            pass
        with pytest.raises((TypeError, RuntimeError)) as caught:
            optimizer.consolidate_state_dict(to=0)
        return f"{type(caught.value).__name__}: {caught.value}"

    messages = virtual.run(on_rank, 3, timeout=5)
    own = [message for message in messages if message.startswith("TypeError")]
    assert len(own) == 1
    assert "the state 'history' of parameter 4 is a set" in own[0]
    assert all("could not consolidate the optimizer state: TypeError" in m for m in messages if m not in own)


# ---------------------------------------------------------------------- hooks, names, and what does not fit


def stepped(
    comm: Collectives, params: Any, cls: Any = optim.AdamW, **options: Any
) -> ZeroRedundancyOptimizer:
    """An optimizer after one step on gradients of ones."""
    optimizer = ZeroRedundancyOptimizer(params, cls, comm, **options)
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def test_a_state_dict_has_the_options_of_the_moment_and_is_the_caller_s_own() -> None:
    def on_rank(comm: Collectives) -> None:
        optimizer = stepped(comm, filled(nn.Linear(4, 2)).parameters(), lr=0.01)
        optimizer.consolidate_state_dict(to="all")
        for group in optimizer.param_groups:
            group["lr"] = 0.001  # as a scheduler does between consolidate_state_dict and state_dict
        assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.001
        optimizer.state_dict()["state"].clear()
        assert set(optimizer.state_dict()["state"]) == {0, 1}

    virtual.run(on_rank, 2)


def test_hooks_on_the_state_dict_and_its_loading_are_called() -> None:
    def on_rank(comm: Collectives) -> list[str]:
        seen: list[str] = []
        optimizer = stepped(comm, filled(nn.Linear(4, 2)).parameters())
        optimizer.consolidate_state_dict(to="all")
        optimizer.register_state_dict_pre_hook(lambda _: seen.append("before"))
        optimizer.register_state_dict_post_hook(lambda _, state: {**state, "note": "mine"})
        optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(state.pop("note")))
        optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
        optimizer.load_state_dict(optimizer.state_dict())
        return seen

    assert virtual.run(on_rank, 2) == [["before", "mine", "loaded"]] * 2


@pytest.mark.parametrize("partition", ["sorted_greedy", "even"])
def test_named_parameters_are_found_by_name_in_whatever_order_they_were_saved(partition: str) -> None:
    def on_rank(comm: Collectives) -> None:
        model = filled(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
        backwards = list(model.named_parameters())[::-1]
        plain = optim.AdamW(backwards)
        for value, (_, param) in enumerate(backwards):
            param.grad = torch.full_like(param, float(value))
        plain.step()
        optimizer = ZeroRedundancyOptimizer(model.named_parameters(), optim.AdamW, comm, partition=partition)
        optimizer.load_state_dict(plain.state_dict())
        optimizer.consolidate_state_dict(to="all")
        state = optimizer.state_dict()["state"]
        for number, param in enumerate(model.parameters()):
            assert torch.equal(state[number]["exp_avg"], plain.state[param]["exp_avg"])

    virtual.run(on_rank, 2)


def bad_step(saved: dict[str, Any]) -> None:
    saved["state"][0]["step"] = "abc"


def no_average(saved: dict[str, Any]) -> None:
    saved["state"][0]["exp_avg"] = 3


def no_dict(saved: dict[str, Any]) -> None:
    saved["state"][0] = 5


def same_id_twice(saved: dict[str, Any]) -> None:
    saved["param_groups"][0]["params"] = [0, 0]


def no_groups(saved: dict[str, Any]) -> None:
    saved["param_groups"] = None


@pytest.mark.parametrize("damage", [bad_step, no_average, no_dict, same_id_twice, no_groups])
def test_a_damaged_state_is_refused_by_all_and_changes_nothing(
    damage: Callable[[dict[str, Any]], None],
) -> None:
    def on_rank(comm: Collectives) -> None:
        optimizer = stepped(comm, filled(nn.Linear(4, 2)).parameters(), lr=0.01)
        optimizer.consolidate_state_dict(to="all")
        before = copy.deepcopy(optimizer.state_dict())
        saved = copy.deepcopy(before)
        saved["param_groups"][0]["lr"] = 123.0
        damage(saved)
        with pytest.raises(ValueError, match=r"checkpoint|state dict"):
            optimizer.load_state_dict(saved)
        optimizer.consolidate_state_dict(to="all")
        assert_state_dicts_equal(optimizer.state_dict(), before)

    virtual.run(on_rank, 2, timeout=10)


def test_what_one_rank_refuses_no_rank_keeps() -> None:
    def on_rank(comm: Collectives) -> None:
        optimizer = stepped(comm, filled(nn.Linear(4, 2)).parameters(), lr=0.01)
        optimizer.consolidate_state_dict(to="all")
        before = copy.deepcopy(optimizer.state_dict())
        saved = copy.deepcopy(before)
        saved["param_groups"][0]["lr"] = 123.0
        saved["state"][comm.rank]["exp_avg"].fill_(7.0)
        if comm.rank == 1:
            bad_step(saved)
        with pytest.raises((ValueError, RuntimeError), match="'step' for parameter 0"):
            optimizer.load_state_dict(saved)
        optimizer.consolidate_state_dict(to="all")
        assert_state_dicts_equal(optimizer.state_dict(), before)
        assert optimizer.optim.param_groups[0]["lr"] == 0.01

    virtual.run(on_rank, 2, timeout=10)


class Factored(optim.AdamW):
    """Keeps one second moment a row: a shape that the class it comes from does not have."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["step"] = torch.tensor(1.0)
                self.state[param]["exp_avg_sq"] = param.grad.square().reshape(param.shape[0], -1).mean(1)


def test_a_subclass_may_keep_state_of_another_shape() -> None:
    def on_rank(comm: Collectives) -> None:
        optimizer = stepped(comm, filled(nn.Linear(4, 2)).parameters(), Factored)
        optimizer.consolidate_state_dict(to="all")
        optimizer.load_state_dict(optimizer.state_dict())
        assert all(state["exp_avg_sq"].shape == (2,) for state in optimizer.state.values())

    virtual.run(on_rank, 2)


class Counting(optim.SGD):
    """Keeps something for no parameter in particular."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["steps"] = {"done": 1}  # type: ignore[index]


def test_state_that_belongs_to_no_parameter_is_refused_not_lost() -> None:
    def on_rank(comm: Collectives) -> None:
        optimizer = stepped(comm, filled(nn.Linear(4, 2)).parameters(), Counting)
        with pytest.raises(TypeError, match="the state 'steps' for no parameter in particular"):
            optimizer.consolidate_state_dict()

    virtual.run(on_rank, 2, timeout=10)


# ------------------------------------------------------------------------------ groups and names in any order


def group_of(params: list[Any], names: list[str] | None = None, **options: Any) -> dict[str, Any]:
    return {"params": params, **({} if names is None else {"param_names": names}), **options}


OURS = [group_of([0, 0], ["module.a", "module.b"]), group_of([0], ["module.c"])]


@pytest.mark.parametrize(
    ("saved", "ids"),
    [
        ([group_of([0], ["c"], lr=1), group_of([1, 2], ["b", "a"], lr=2)], [[2, 1], [0]]),
        ([group_of(["c"], lr=1), group_of(["b", "a"], lr=2)], [["a", "b"], ["c"]]),
        # torch's set_optimizer_state_dict sorts the ids as ours, and leaves the names as they were saved.
        ([group_of(["a", "b"], ["b", "a"], lr=2), group_of(["c"], ["c"], lr=1)], [["a", "b"], ["c"]]),
    ],
    ids=["numbers with names", "names", "names that disagree with the ids"],
)
def test_saved_groups_are_found_by_the_names_in_them(saved: list[Any], ids: list[Any]) -> None:
    found = checkpoint.arranged({"state": {}, "param_groups": saved}, OURS)["param_groups"]
    assert [group["params"] for group in found] == ids
    assert [group["lr"] for group in found] == [2, 1]


def test_where_one_side_has_no_names_the_order_counts() -> None:
    saved = [group_of([0], lr=1), group_of([1, 2], lr=2)]
    assert checkpoint.arranged({"state": {}, "param_groups": saved}, OURS)["param_groups"] == saved
    named = [group_of(["x"]), group_of(["y", "z"])]
    unnamed = [group_of([0]), group_of([0, 0])]
    assert checkpoint.arranged({"state": {}, "param_groups": named}, unnamed)["param_groups"] == named


def test_a_group_without_parameters_takes_the_saved_one_without() -> None:
    saved = [group_of([], [], lr=1), group_of([0], ["a"], lr=2)]
    ours = [group_of([0], ["a"]), group_of([])]
    found = checkpoint.arranged({"state": {}, "param_groups": saved}, ours)["param_groups"]
    assert [group["lr"] for group in found] == [2, 1]


def test_groups_that_hold_others_are_refused() -> None:
    saved = [group_of(["a", "c"]), group_of(["b"])]
    with pytest.raises(ValueError, match=r"group 0 has other parameters .*: 'b' is in one of them only \(2 "):
        checkpoint.arranged({"state": {}, "param_groups": saved}, OURS)


# ----------------------------------------------------------------------- the checkpoint's tensors, not copies


@pytest.mark.parametrize("partition", ["sorted_greedy", "even"])
@pytest.mark.parametrize("copies", [False, True])
def test_the_tensors_of_a_checkpoint_are_taken_over_only_by_choice(partition: str, copies: bool) -> None:
    run = Run(optim.AdamW)
    first, middle = run.plain(range(2))
    rest, _ = run.plain(range(2, 4), first[-1], middle)

    def on_rank(comm: Collectives) -> tuple[list[Snapshot], dict[str, Any]]:
        state, model = copy.deepcopy(middle), run.model(first[-1])
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, comm, partition=partition)
        optimizer.load_state_dict(state, copy=copies)
        given = {value.data_ptr() for of in state["state"].values() for value in of.values() if value.ndim}
        for own in optimizer.shard.owned:
            for key, value in optimizer.shard.optim.state[own.local].items():
                if value.ndim and value.numel():
                    expected = not copies and own.is_whole
                    assert (value.data_ptr() in given) == expected, (own.piece, key)
        return [snapshot(model) for _ in train(model, optimizer, range(2, 4))], state

    for trained, state in virtual.run(on_rank, 3):
        assert_same(trained, rest, "after loading")
        if copies:
            assert_state_dicts_equal(state, middle)
