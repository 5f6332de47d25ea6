"""Local SGD on real ranks: torch's PostLocalSGDOptimizer bit for bit, and the steps at which ranks agree.

A run is compared by its trace: a digest of all parameters after each step, on each rank. Equal digests are
equal bits. Each rank has its own data, so ranks differ unless something brings them together.
"""

from __future__ import annotations

import copy
import hashlib
import socket
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from library.training import (
    NEVER_S,
    Tangle,
    assert_moved,
    assert_state_dicts_equal,
    caught,
    in_a_hurry,
    loss_on_own_data,
    snapshot,
)
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as torch_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging import (
    averagers as torch_averagers,
    hierarchical_model_averager as torch_hierarchical,
)
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer, lr_scheduler

from zero_ref.backward.overlap import hook_with_zero_step, hook_with_zero_step_interleaved
from zero_ref.backward.reduction import reduce_to_owners
from zero_ref.comm.collectives import Collectives
from zero_ref.lab import virtual
from zero_ref.lab.ranks import run
from zero_ref.local_sgd.averagers import HierarchicalModelAverager, ModelAverager, PeriodicModelAverager
from zero_ref.local_sgd.averaging import AveragingSchedule
from zero_ref.local_sgd.optimizer import PostLocalSGDOptimizer, PostLocalSGDState, post_localSGD_hook
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer

pytestmark = pytest.mark.ranks

Trace = list[str]
SEVERAL_BUCKETS = {"bucket_cap_mb": 0.001}


@dataclass
class Case:
    """Which parts, by whom, and with what schedule. As it stands, everything is this package's.

    Args:
        periods: steps for a flat schedule, {period: ranks} for a hierarchical one.
        state: "following" is made from the averager; "ours" and "torch" are given the numbers.
    """

    periods: int | dict[int, int] = 3
    warmup: int = 2
    gradient_group: int = 1
    optimizer_class: Any = optim.SGD
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 0.1, "momentum": 0.9})
    optimizer: str = "ours"
    averager: str = "ours"
    hook: str = "ours"
    state: str = "following"

    @property
    def schedule(self) -> AveragingSchedule:
        made = AveragingSchedule.periodic if isinstance(self.periods, int) else AveragingSchedule.hierarchical
        return made(self.periods, warmup_steps=self.warmup, gradient_group=self.gradient_group)  # type: ignore[operator]

    def as_torch(self) -> Case:
        return replace(self, optimizer="torch", averager="torch", hook="torch", state="torch")


def quiet(make: Callable[[], Any]) -> Any:
    """A period of 1 warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def make_averager(case: Case) -> Any:
    if case.averager == "ours":
        ours = PeriodicModelAverager if isinstance(case.periods, int) else HierarchicalModelAverager
        return quiet(lambda: ours(case.periods, case.warmup, gradient_group=case.gradient_group))  # type: ignore[arg-type]
    if isinstance(case.periods, int):
        return quiet(lambda: torch_averagers.PeriodicModelAverager(case.periods, case.warmup))
    periods = OrderedDict(case.periods)
    return quiet(lambda: torch_hierarchical.HierarchicalModelAverager(periods, case.warmup))


def make_state(case: Case, averager: Any) -> Any:
    if case.state == "following":
        return PostLocalSGDState.following(averager)
    subgroup = dist.new_subgroups(case.gradient_group)[0] if case.gradient_group > 1 else None
    kind = PostLocalSGDState if case.state == "ours" else torch_hooks.PostLocalSGDState
    return kind(None, subgroup, case.warmup, case.gradient_group > 1)


def torchs_own() -> Any:
    with warnings.catch_warnings(action="ignore"):  # importing it warns
        from torch.distributed.optim import PostLocalSGDOptimizer as TorchPostLocalSGDOptimizer
    return TorchPostLocalSGDOptimizer


class Job:
    """A model under DDP and its local SGD, on this rank."""

    def __init__(self, case: Case, local: Callable[[Any], Optimizer] | None = None) -> None:
        # channels_last would change torch's result: its averager makes every parameter contiguous.
        self.model = Tangle(channels_last=False)
        self.ddp = DDP(self.model, **SEVERAL_BUCKETS)
        self.averager = make_averager(case)
        self.state = make_state(case, self.averager)
        hook = post_localSGD_hook if case.hook == "ours" else torch_hooks.post_localSGD_hook
        self.ddp.register_comm_hook(self.state, hook)
        self.local: Any = (
            local(self.model.parameters())
            if local
            else case.optimizer_class(self.model.parameters(), **case.options)
        )
        wrapper: Any = PostLocalSGDOptimizer if case.optimizer == "ours" else torchs_own()
        self.optimizer = wrapper(self.local, self.averager)

    def step(self, number: int) -> str:
        """One iteration on this rank's data. The digest of the parameters after it."""
        self.optimizer.zero_grad()
        loss_on_own_data(self.ddp, dist.get_rank(), number).backward()
        self.optimizer.step()
        return digest(self.model.parameters())

    def train(self, steps: range) -> Trace:
        return [self.step(number) for number in steps]


def digest(params: Any) -> str:
    flat = torch.cat([param.detach().reshape(-1).double() for param in params])
    assert flat.isfinite().all()
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


def blocks(trace_of_rank: Sequence[Trace]) -> list[int]:
    """At each step, the largest size of groups of consecutive ranks that hold the same."""
    sizes_at = []
    for held in zip(*trace_of_rank, strict=True):
        ranks = range(len(held))
        sizes = (size for size in range(len(held), 0, -1) if len(held) % size == 0)
        sizes_at.append(
            next(size for size in sizes if all(held[rank] == held[rank - rank % size] for rank in ranks))
        )
    return sizes_at


# --------------------------------------------------------------------------------------------- as torch


STEPS = range(11)
ADAMW: dict[str, Any] = {"optimizer_class": optim.AdamW, "options": {"lr": 0.01}}


def both(cases: list[Case]) -> list[tuple[Trace, Trace]]:
    traces = []
    for case in cases:
        job = Job(case)
        before = snapshot(job.model)
        ours = job.train(STEPS)
        assert_moved(job.model, before, snapshot(job.model))
        assert len(set(ours)) == len(STEPS), "each step moves something"
        traces.append((ours, Job(case.as_torch()).train(STEPS)))
    return traces


SCHEDULES: list[dict[str, Any]] = [
    *({"periods": periods, "warmup": warmup} for periods, warmup in ((1, 0), (3, 0), (3, 3), (4, 1))),
    {"periods": {2: 1, 4: 2}, "warmup": 0},
    {"periods": {2: 2, 6: 2}, "warmup": 3},
    {"periods": {3: 1, 2: 2}, "warmup": 3},
]


def test_each_step_equals_torch_and_ranks_agree_where_the_schedule_says() -> None:
    cases = [Case(**one, **(ADAMW if number % 2 else {})) for number, one in enumerate(SCHEDULES)]
    of_rank = run(both, 2, cases, timeout=90)
    for number, case in enumerate(cases):
        ours, theirs = zip(*(traces[number] for traces in of_rank), strict=True)
        assert ours == theirs, case
        assert blocks(ours) == [case.schedule.agreeing(step, 2) for step in STEPS], case


MIXES: list[dict[str, str]] = [
    {},
    {"averager": "torch", "hook": "torch", "state": "torch"},
    {"averager": "torch", "state": "ours"},
    {"optimizer": "torch"},
    {"optimizer": "torch", "state": "ours"},
    {"hook": "torch"},
    {"hook": "torch", "state": "ours"},
    {"state": "torch"},
    {"optimizer": "torch", "averager": "torch", "hook": "ours", "state": "torch"},
    {"optimizer": "torch", "averager": "torch", "hook": "torch", "state": "ours"},
]


def mixes(case: Case) -> list[Trace]:
    made = [case.as_torch(), *(replace(case, **parts) for parts in MIXES)]
    return [Job(mixed).train(STEPS) for mixed in made]


def test_each_part_works_with_those_of_torch() -> None:
    # In the second step of the warm-up a state that counts by itself meets several buckets.
    case = Case({2: 2, 4: 4}, 3, gradient_group=2, **ADAMW)
    for theirs, *mixed in run(mixes, 4, case, timeout=60):
        for parts, trace in zip(MIXES, mixed, strict=True):
            assert trace == theirs, parts


def test_a_period_of_1_warns() -> None:
    def make(comm: Collectives) -> None:
        with pytest.warns(UserWarning, match="with a period of 1 all parameters are averaged") as found:
            PeriodicModelAverager(1, process_group=comm)
        assert found[0].filename == __file__
        with pytest.warns(UserWarning, match="with a period of 1"):
            HierarchicalModelAverager({1: 1}, process_group=comm)  # type: ignore[arg-type]

    virtual.run(make, 1)


def test_a_level_that_is_never_taken_is_told() -> None:
    def make(comm: Collectives) -> None:
        text = r"Level\(period=4, group_size=1\) is never taken: at each of its steps"
        with pytest.warns(UserWarning, match=text) as found:
            HierarchicalModelAverager({3: 1, 4: 1, 2: 1}, process_group=comm)  # type: ignore[arg-type]
        assert [one.filename for one in found] == [__file__]

    virtual.run(make, 1)


def without_a_subgroup(members: list[int]) -> tuple[list[float], list[int] | None]:
    """Gradients of four steps, two of them warm-up; ranks 0 and 2 share a machine, as do ranks 1 and 3."""
    rank = dist.get_rank()
    group = dist.new_group(members)
    if rank not in members:
        return [], None
    with mock.patch.object(socket, "gethostname", return_value=f"machine {rank % 2}"):
        ddp = DDP(nn.Linear(1, 1, bias=False), process_group=group)
        state = PostLocalSGDState(group if len(members) < dist.get_world_size() else None, None, 2)
        ddp.register_comm_hook(state, post_localSGD_hook)
        gradients = []
        for _ in range(4):
            ddp.zero_grad()
            ddp(torch.tensor([[float(rank)]])).sum().backward()
            gradients.append(ddp.module.weight.grad.item())
    return gradients, dist.get_process_group_ranks(state.subgroup)


def test_without_a_subgroup_the_ranks_of_a_machine_average_their_gradients() -> None:
    for rank, (gradients, subgroup) in enumerate(run(without_a_subgroup, 4, [0, 1, 2, 3], timeout=60)):
        assert subgroup == [rank % 2, rank % 2 + 2]
        assert gradients == [1.5, 1.5, rank % 2 + 1, rank % 2 + 1]
    of_three = run(without_a_subgroup, 4, [0, 1, 2], timeout=60)
    assert of_three == [([1, 1, 1, 1], [0, 2]), ([1, 1, 1, 1], [1]), ([1, 1, 1, 1], [0, 2]), ([], None)]


# --------------------------------------------------------------------------------------- stop and go on


def stop_and_go_on(case: Case, cuts: Sequence[int]) -> list[tuple[str, Trace, Trace]]:
    """For each cut: the rest of a run that was never interrupted, and of one that was."""
    compared = []
    whole = Job(case).train(STEPS)
    for cut in cuts:
        first = Job(case)
        first.train(STEPS[:cut])
        state, values = copy.deepcopy(first.optimizer.state_dict()), snapshot(first.model)
        assert state["step"] == first.averager.step == cut
        for way in (case, case.as_torch(), replace(case, state="ours")):
            before = copy.deepcopy(state)
            second = Job(way)
            second.optimizer.load_state_dict(state)
            assert_state_dicts_equal(state, before)
            if way.state != "following":
                second.state.iter = cut  # such a state counts by itself
            fill(second.model, values)
            compared.append((f"{way.state}, {cut}", whole[cut:], second.train(STEPS[cut:])))
            state = before  # torch's optimizers go on in the tensors that they are given
    return compared


def fill(model: nn.Module, values: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for param, value in zip(model.parameters(), values, strict=True):
            param.copy_(value)


# Inside the warm-up, before and after an average, between two.
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not() -> None:
    for compared in run(stop_and_go_on, 2, Case(4, 3, **ADAMW), (2, 4, 6, 7), timeout=60):
        for label, uninterrupted, resumed in compared:
            assert resumed == uninterrupted, label


# ------------------------------------------------------------------------------ as an optimizer, one rank


def alone(function: Callable[[Collectives], Any]) -> Any:
    return virtual.run(function, 1)[0]


def parts_of_one(comm: Collectives, **options: Any) -> tuple[nn.Linear, PostLocalSGDOptimizer]:
    model = nn.Linear(3, 2)
    local = optim.SGD(model.parameters(), lr=0.1, **options)
    return model, PostLocalSGDOptimizer(local, PeriodicModelAverager(3, 2, comm))


def test_a_state_without_a_count_warns_in_the_words_of_torch_and_starts_at_the_warm_up() -> None:
    def on_rank(comm: Collectives) -> None:
        _, optimizer = parts_of_one(comm)
        texts = []
        for wrapper in (optimizer, torchs_own()(optimizer.optim, optimizer.averager)):
            optimizer.averager.step = 7
            with pytest.warns(UserWarning, match="does not contain a step counter") as found:
                wrapper.load_state_dict(optimizer.optim.state_dict())
            assert found[0].filename == __file__
            texts.append(str(found[0].message))
        assert texts[0] == texts[1]
        assert optimizer.averager.step == 0
        optimizer.optim.load_state_dict(optimizer.state_dict())  # and the plain optimizer does not mind one

    alone(on_rank)


def test_a_scheduler_still_sets_the_rate_after_a_state_was_loaded() -> None:
    def on_rank(comm: Collectives) -> None:
        model, optimizer = parts_of_one(comm)
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
        rates = []
        for _ in range(2):
            model(torch.ones(3)).sum().backward()
            optimizer.step()
            scheduler.step()
            rates.append(optimizer.optim.param_groups[0]["lr"])
            optimizer.load_state_dict(optimizer.state_dict())
        assert rates == [0.05, 0.025], "torch's class keeps the groups that the local optimizer has let go of"

    alone(on_rank)


def test_the_count_is_one_a_step_whatever_the_groups() -> None:
    # pytorch#74737: once for each group
    def on_rank(comm: Collectives) -> None:
        _, optimizer = parts_of_one(comm)
        extra = nn.Parameter(torch.ones(2))
        optimizer.add_param_group({"params": [extra], "lr": 0.5})
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
        for step in range(5):
            assert optimizer.averager.step == step
            optimizer.step()

    alone(on_rank)


def test_closures_hooks_and_gradients_are_those_of_any_optimizer() -> None:
    def on_rank(comm: Collectives) -> None:
        model, optimizer = parts_of_one(comm, momentum=0.9)
        seen: list[str] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        optimizer.register_state_dict_pre_hook(lambda _: seen.append("saving"))
        optimizer.register_state_dict_post_hook(lambda _, state: {**state, "more": 1})
        optimizer.register_load_state_dict_pre_hook(
            lambda _, state: {key: value for key, value in state.items() if key != "more"}
        )
        optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(3)).sum()
            loss.backward()
            return loss

        before = optimizer.step(closure).item()
        # Their difference is 0.8 whatever they are: the tolerance is a few roundings of numbers near 1.
        assert before - model(torch.ones(3)).sum().item() == pytest.approx(0.8, abs=1e-6)
        assert optimizer.state == optimizer.optim.state
        assert len(optimizer.state) == 2
        optimizer.zero_grad()
        assert model.weight.grad is None
        state = optimizer.state_dict()
        assert state["more"] == 1
        optimizer.averager.step = 5
        optimizer.load_state_dict(state)
        assert optimizer.averager.step == 1
        assert seen == ["before", "after", "saving", "loaded"]
        assert "SGD" in repr(optimizer)
        assert "step 1" in repr(optimizer)
        assert "differentiable" in optimizer.defaults
        with pytest.raises(TypeError, match=r"cannot be copied or pickled.*state_dict\(\)"):
            copy.deepcopy(optimizer)

    alone(on_rank)


def test_virtual_ranks_hold_the_mean_of_what_each_has_trained() -> None:
    def on_rank(comm: Collectives) -> list[float]:
        weight = nn.Parameter(torch.zeros(3))
        averager = PeriodicModelAverager(2, process_group=comm)
        optimizer = PostLocalSGDOptimizer(optim.SGD([weight], lr=1.0), averager)
        held = []
        for _ in range(3):
            weight.grad = torch.full((3,), -float(comm.rank))
            optimizer.step()
            held.append(weight[0].item())
        with pytest.raises(TypeError, match="DDP reduces over a process group"):
            PostLocalSGDState.following(averager)
        with pytest.raises(TypeError, match="groups of 2 ranks are made of a process group"):
            PeriodicModelAverager(2, process_group=comm, gradient_group=2)
        return held

    # Rank r adds r in each step: ranks 0 to 3 hold 1.5 after step 0, then 1.5 + r, then 1.5 + 2 * 1.5.
    assert virtual.run(on_rank, 4) == [[1.5, 1.5 + rank, 4.5] for rank in range(4)]


def test_wrong_parts_are_refused() -> None:
    def on_rank(comm: Collectives) -> None:
        model, optimizer = parts_of_one(comm)
        wrong: Any = model
        with pytest.raises(TypeError, match="optim must be an optimizer, not Linear"):
            PostLocalSGDOptimizer(wrong, optimizer.averager)
        with pytest.raises(TypeError, match="averager must be one of zero_ref or torch, not Linear"):
            PostLocalSGDOptimizer(optimizer.optim, wrong)
        with pytest.raises(TypeError, match="a Linear has no schedule to follow"):
            PostLocalSGDState.following(wrong)
        with pytest.raises(ValueError, match="start_localSGD_iter must be at least 0, got -1"):
            PostLocalSGDState(None, None, -1, False)

    alone(on_rank)


# --------------------------------------------------------------------------- sharded within a group of ranks


def pairs() -> Any:
    """The group of ranks 0 and 1, or of 2 and 3."""
    return dist.new_subgroups(2)[0]


SHARDED: list[dict[str, Any]] = [{}, {"partition": "even", "parameters_as_bucket_view": True}]


def train_sharded(case: Case, **mode: Any) -> Trace:
    def sharded(params: Any) -> Optimizer:
        return ZeroRedundancyOptimizer(params, case.optimizer_class, pairs(), **mode, **case.options)

    def memory() -> list[int]:
        messages = [message.tensor.data_ptr() for message in job.local.built.messages]
        return [*messages, *(param.data_ptr() for param in job.model.parameters())]

    job = Job(case, sharded)
    before = memory()
    trace = job.train(STEPS)
    if case.averager == "ours":
        assert memory() == before, "views of flat tensors are so for ever"
    job.local.consolidate_state_dict(to="all")
    state = job.optimizer.state_dict()
    assert state["step"] == len(STEPS)
    job.optimizer.load_state_dict(state)
    optim.AdamW(Tangle().parameters()).load_state_dict(state)
    return trace


def sharded_and_not(cases: list[Case]) -> list[tuple[Trace, list[Trace]]]:
    return [(Job(case).train(STEPS), [train_sharded(case, **mode) for mode in SHARDED]) for case in cases]


def test_a_sharded_optimizer_trains_as_the_whole_one_where_its_ranks_see_the_same_gradients() -> None:
    cases = [
        Case({2: 2, 4: 4}, 0, gradient_group=2, **ADAMW),
        Case(3, 1, gradient_group=2, averager="torch", state="ours", **ADAMW),
    ]
    of_rank = run(sharded_and_not, 4, cases, timeout=60)
    for number, case in enumerate(cases):
        for compared in of_rank:
            unsharded, traces = compared[number]
            for mode, trace in zip(SHARDED, traces, strict=True):
                assert trace == unsharded, (case, mode)
        wanted = [case.schedule.agreeing(step, 4) for step in STEPS]
        assert blocks([compared[number][0] for compared in of_rank]) == wanted


def in_backward(case: Case, way: str) -> tuple[Trace, Trace]:
    """The update made by a hook in backward, or gradients reduced to their owners."""
    unsharded = Job(case).train(STEPS)
    model = Tangle(channels_last=False)
    ddp = DDP(model, **SEVERAL_BUCKETS)
    averager = make_averager(case)
    overlaps = way != "to owners"
    zero = ZeroRedundancyOptimizer(
        model.parameters(), case.optimizer_class, pairs(), True, overlaps, **case.options
    )
    if way == "to owners":
        ddp.register_comm_hook(None, reduce_to_owners(zero))
    else:
        hook = hook_with_zero_step_interleaved(post_localSGD_hook, ddp, zero)
        ddp.register_comm_hook(PostLocalSGDState.following(averager), hook)
    optimizer = PostLocalSGDOptimizer(zero, averager)
    trace = []
    for step in STEPS:
        optimizer.zero_grad()
        loss_on_own_data(ddp, dist.get_rank(), step).backward()
        optimizer.step()
        trace.append(digest(model.parameters()))
    return unsharded, trace


@pytest.mark.parametrize(("way", "warmup"), [("interleaved", 2), ("to owners", 0)])
def test_a_sharded_update_made_by_a_hook_trains_the_same(way: str, warmup: int) -> None:
    case = Case(3, warmup, gradient_group=2, **ADAMW)
    for unsharded, trace in run(in_backward, 4, case, way, timeout=30):
        assert trace == unsharded


def wrongly_sharded() -> dict[str, str]:
    model = Tangle(channels_last=False)
    everybody = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW)
    said = {
        "all": caught(lambda: PostLocalSGDOptimizer(everybody, PeriodicModelAverager(3))),
        "all, torch": caught(
            lambda: PostLocalSGDOptimizer(everybody, torch_averagers.PeriodicModelAverager(3))
        ),
    }

    def sharded(params: Any) -> Optimizer:
        return ZeroRedundancyOptimizer(params, optim.AdamW, pairs())

    for warmup in (0, 2):
        job = Job(Case(3, warmup), sharded)
        job.train(range(warmup))  # here all have the same
        said[f"gradients, {warmup}"] = caught(lambda job=job: job.step(0))
    said["gradients, again"] = caught(lambda: job.step(1))
    job = Job(Case(3, 0), sharded)
    job.optimizer.step(lambda: None)  # computes its gradients later, so it tells nothing of them
    said["gradients, after a closure"] = caught(lambda: job.step(0))
    job = Job(Case(3, 2, gradient_group=2), sharded)
    said["join"] = caught(lambda: Join([job.ddp, job.optimizer]))
    # An averager that is told nothing of the groups: here only the hook knows.
    ddp = DDP(Tangle(channels_last=False))
    zero = ZeroRedundancyOptimizer(ddp.parameters(), optim.AdamW, pairs())
    ddp.register_comm_hook(None, reduce_to_owners(zero))
    optimizer = PostLocalSGDOptimizer(zero, PeriodicModelAverager(3, 2))
    loss_on_own_data(ddp, dist.get_rank(), 0).backward()
    said["to owners"] = caught(optimizer.step)
    ddp = DDP(Tangle(channels_last=False))
    zero = ZeroRedundancyOptimizer(ddp.parameters(), optim.AdamW, pairs(), overlap_with_ddp=True)
    said["to owners, stepping"] = caught(lambda: hook_with_zero_step(reduce_to_owners(zero), ddp, zero))
    averager = PeriodicModelAverager(3, 0, gradient_group=2)
    ddp.register_comm_hook(
        PostLocalSGDState.following(averager), hook_with_zero_step(post_localSGD_hook, ddp, zero)
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = PostLocalSGDOptimizer(zero, averager)
    scaler.scale(loss_on_own_data(ddp, dist.get_rank(), 0)).backward()
    said["scaler"] = caught(lambda: scaler.step(optimizer))
    said["scaler, left"] = str([name for name in ("found_inf", "grad_scale") if name in vars(optimizer)])
    return said


def test_sharding_that_could_not_train_is_refused_on_all_ranks() -> None:
    for rank, said in enumerate(run(wrongly_sharded, 4, timeout=40)):
        for name in ("all", "all, torch"):
            assert said[name].startswith("ValueError: this ZeroRedundancyOptimizer sends the parameters of ")
            assert "Shard over a group of fewer ranks" in said[name]
        for name in ("gradients, 0", "gradients, 2", "gradients, again", "gradients, after a closure"):
            assert said[name].startswith(f"ValueError: rank {rank % 2}: after the warm-up the 2 ranks of ")
            assert "with a schedule of gradient_group=2" in said[name]
        assert said["join"].startswith("ValueError: PostLocalSGDOptimizer cannot join around a Zero")
        assert said["to owners"].startswith(
            f"RuntimeError: rank {rank % 2}: reduce_to_owners has averaged gradients over the 2 ranks"
        )
        assert "Use post_localSGD_hook, or an averager with warmup_steps=0" in said["to owners"]
        assert "the optimizer shards over the ranks" in said["to owners, stepping"]
        assert "torch.amp.GradScaler unscales gradients before the step" in said["scaler"]
        assert said["scaler, left"] == "[]"


# -------------------------------------------------------------------------------------- ranks that differ


def different() -> dict[str, str]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(timeout=timedelta(seconds=NEVER_S))
    last = rank == world_size - 1
    params = [nn.Parameter(torch.full((3,), float(rank))), nn.Parameter(torch.zeros(2))]
    averager = PeriodicModelAverager(3, 1, group)
    wrong: Any = 3.5 if last else 3

    def average(*of: Any, step: int = 1) -> None:
        averager.step = step
        averager.average_parameters(of)

    tell: dict[str, Callable[[], Any]] = {
        "schedule": lambda: PeriodicModelAverager(4 if last else 3, 1, group),
        "warm-up": lambda: PeriodicModelAverager(3, 1 + last, group),
        "gradient group": lambda: PeriodicModelAverager(3, gradient_group=1 + last),
        "number": lambda: average(*params[: 1 if last else 2]),
        "shape": lambda: average(nn.Parameter(torch.zeros(3 + last))),
        "dtype": lambda: average(params[0].double() if last else params[0]),
        "frozen": lambda: average(params[0].detach() if last else params[0]),
        "step": lambda: average(*params, step=4 if last else 1),
        "type": lambda: average(("weight", params[0]) if last else params[0]),
        "float period": lambda: PeriodicModelAverager(wrong, process_group=group),
        "no levels": lambda: HierarchicalModelAverager(None),
        "last level": lambda: HierarchicalModelAverager({2: 1, 4: 8}),
        "groups": lambda: ModelAverager(AveragingSchedule.periodic(3, gradient_group=4)),
        "not levels": lambda: HierarchicalModelAverager({0: world_size} if last else {4: world_size}),
    }
    said = {name: caught(mistake) for name, mistake in tell.items()}
    averager.step = 1
    averager.average_parameters(params)
    assert params[0].tolist() == [sum(range(world_size)) / world_size] * 3, "the averager goes on"
    assert averager.step == 2
    return said


def test_ranks_that_differ_are_told_on_all_of_them() -> None:
    starts = {
        "schedule": "ValueError: ranks disagree, so none can construct the averager: rank 2 has",
        "warm-up": "ValueError: ranks disagree, so none can construct the averager: rank 2 has",
        "number": "ValueError: ranks disagree, so none can average the parameters after its step 1: rank 2",
        "shape": "ValueError: ranks disagree, so none can average the parameters after its step 1: rank 2 "
        "has [parameter 0: (4,) torch.float32] where rank 0 has [parameter 0: (3,) torch.float32]",
        "dtype": "ValueError: ranks disagree, so none can average the parameters after its step 1: rank 2 "
        "has [parameter 0: (3,) torch.float64]",
        "frozen": "ValueError: ranks disagree, so none can average",
        "no levels": "ValueError: a schedule of local SGD needs at least one level",
        "last level": "ValueError: the last level averages over 8 ranks and there are 3",
        "groups": "ValueError: 3 ranks cannot be divided into groups of 4",
    }
    raised = {
        "gradient group": (
            "construct the averager",
            "ValueError: 3 ranks cannot be divided into groups of 2",
        ),
        "type": (
            "average the parameters after its step 1",
            "TypeError: an averager takes parameters, as of model.parameters(), or the param_groups of an "
            "optimizer, and was given a tuple",
        ),
        "float period": ("construct the averager", "TypeError: period must be a whole number, got 3.5"),
        "not levels": ("construct the averager", "ValueError: period must be at least 1, got 0"),
    }
    of_rank = run(different, 3, timeout=NEVER_S)
    for rank, said in enumerate(of_rank):
        for name, start in starts.items():
            assert said[name].startswith(start), name
        for name, (what, error) in raised.items():
            told = error if rank == 2 else f"RuntimeError: rank {rank}: rank 2 could not {what}: {error}"
            assert said[name].startswith(told), name
        other, here, there = (2, 1, 4) if rank < 2 else (0, 4, 1)
        assert said["step"].startswith(
            f"RuntimeError: rank {rank} is to average the parameters after its step {here} while rank "
            f"{other} is to average the parameters after its step {there}"
        )
        assert set(said) == {*starts, *raised, "step"}


def leave_out_a_step() -> str:
    averager = in_a_hurry(lambda group: PeriodicModelAverager(2, process_group=group))
    params = [nn.Parameter(torch.ones(2))]
    said = "nothing"
    for step in range(5):
        if step == 3 and dist.get_rank() == 1:
            continue
        said = caught(lambda: averager.average_parameters(params))
    dist.barrier()  # of the default group, which is patient
    return f"{averager.step}: {said}"


def test_a_rank_that_leaves_out_a_step_is_waited_for_until_the_groups_timeout() -> None:
    # Its fourth step is the others' third, and it ends the same way; they miss it where none of its comes.
    first, second, third = run(leave_out_a_step, 3)
    assert second == "4: nothing"
    for rank, said in ((0, first), (2, third)):
        assert said.startswith(
            f"4: RanksLostError: rank {rank} was to average the parameters after its step 4 with all others: "
        )
        assert "did not complete" in said


# -------------------------------------------------------------------------------------------- GradScaler


def scaled(case: Case, unscales: bool | None, scale: float, overflow: int | None) -> tuple[Trace, float]:
    """Train; rank 1 meets an infinite gradient at one step. Without a scaler it leaves out that update."""
    job = Job(case)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
    trace = []
    for step in STEPS:
        job.optimizer.zero_grad()
        loss = loss_on_own_data(job.ddp, dist.get_rank(), step)
        overflows = step == overflow and dist.get_rank() == 1
        if unscales is None:
            loss.backward()
            if overflows:
                job.averager.average_parameters(job.optimizer.param_groups)
            else:
                job.optimizer.step()
        else:
            scaler.scale(loss).backward()
            if overflows:
                next(job.model.parameters()).grad.view(-1)[0] = torch.inf
            if unscales:
                scaler.unscale_(job.optimizer)
            scaler.step(job.optimizer)
            scaler.update()
        trace.append(digest(job.model.parameters()))
    assert job.averager.step == len(STEPS)
    return trace, scaler.get_scale()


def all_scaled(case: Case) -> dict[str, tuple[Trace, float]]:
    ways = {"without": None, "with": False, "unscaled": True}
    made = {
        f"{name}, {overflow}": scaled(case, unscales, 1024.0, overflow)
        for name, unscales in ways.items()
        for overflow in (None, 3, 4)
    }
    odd = {
        f"{name}, odd": scaled(case, unscales, 1000.0, None)
        for name, unscales in ways.items()
        if name != "without"
    }
    return {**made, **odd}


def test_a_rank_whose_gradients_overflow_leaves_out_its_update_and_comes_to_the_average() -> None:
    case = Case(3, 1, **ADAMW)  # step 4 ends with an average, step 3 does not
    of_rank = run(all_scaled, 2, case, timeout=40)
    for rank, made in enumerate(of_rank):
        for overflow in (None, 3, 4):
            for name in ("with", "unscaled"):
                # A power of two scales without rounding.
                trace, scale = made[f"{name}, {overflow}"]
                assert trace == made[f"without, {overflow}"][0], (name, overflow)
                assert scale == (512.0 if rank == 1 and overflow else 1024.0)
        assert made["with, odd"] == made["unscaled, odd"]
    assert len({of_rank[1][f"without, {overflow}"][0][3] for overflow in (None, 3)}) == 2, (
        "it did leave it out"
    )
    wanted = [case.schedule.agreeing(step, 2) for step in STEPS]
    assert blocks([made["with, 4"][0] for made in of_rank]) == wanted


def test_a_scaler_steps_a_rank_without_gradients() -> None:
    def on_rank(comm: Collectives) -> None:
        _, optimizer = parts_of_one(comm)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        assert optimizer.averager.step == 1

    alone(on_rank)


# ------------------------------------------------------------------------------------------ uneven inputs


def joined(case: Case, batches: Sequence[int]) -> tuple[Trace, str, int]:
    """With Join: the trace of this rank's own steps, what it holds at the end, the averager's count."""
    job = Job(case)
    with Join([job.ddp, job.optimizer]):
        trace = job.train(range(batches[dist.get_rank()]))
    return trace, digest(job.model.parameters()), job.averager.step


def by_hand(case: Case, batches: Sequence[int]) -> tuple[Trace, str, int]:
    """The same without DDP: a rank without data has zeros for gradients, and leaves its parameters alone."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = Tangle(channels_last=False)
    optimizer = case.optimizer_class(model.parameters(), **case.options)
    averager = make_averager(case)
    trainable = [param for param in model.parameters() if param.requires_grad]
    trace = []
    for step in range(max(batches)):
        optimizer.zero_grad()
        has_data = step < batches[rank]
        if has_data:
            loss_on_own_data(model, rank, step).backward()
        size = case.gradient_group if averager.schedule.is_local(step) else world_size
        if size > 1:
            for param in trainable:
                total = torch.zeros_like(param) if param.grad is None else param.grad / size
                dist.all_reduce(total, group=averager.group_of[size].group)
                param.grad = total if has_data else None
        if has_data:
            optimizer.step()
        averager.average_parameters(model.parameters())
        trace.append(digest(model.parameters()))
    last = torch.cat([param.detach().reshape(-1) for param in model.parameters()])
    dist.broadcast(last, src=list(batches).index(max(batches)))
    return trace[: batches[rank]], digest([last]), averager.step


def joined_and_by_hand(*arguments: Any) -> Any:
    return joined(*arguments), by_hand(*arguments)


def test_a_rank_without_data_goes_on_taking_part_in_averages() -> None:
    case, batches = Case({2: 2, 4: 4}, 0, gradient_group=2), (3, 8, 5, 0)
    of_rank = run(joined_and_by_hand, len(batches), case, batches, timeout=40)
    for ours, wanted in of_rank:
        assert ours == wanted
        assert wanted[2] == max(batches)
    assert len({ours[1] for ours, _ in of_rank}) == 1, (
        "all hold the parameters of the rank that stayed longest"
    )


# ----------------------------------------------------------------------------------- kinds of parameters


def kinds() -> dict[str, nn.Parameter]:
    """Parameters that differ by rank, all but one with a gradient."""
    generator = torch.Generator().manual_seed(dist.get_rank())

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    made = {
        "float": nn.Parameter(random(3, 4)),
        "bfloat16": nn.Parameter(random(5).bfloat16()),
        "half": nn.Parameter(random(2, 2).half()),
        "frozen": nn.Parameter(random(3), requires_grad=False),
        "strided": nn.Parameter(random(2, 3, 4, 4).to(memory_format=torch.channels_last)),
        "nothing": nn.Parameter(torch.empty(0, 3)),
        "scalar": nn.Parameter(random().squeeze()),
    }
    for name, param in made.items():
        if name != "frozen":
            param.grad = torch.zeros_like(param)
    return made


def average_kinds(torchs: bool, only: Sequence[str], without_gradient: Sequence[int] = ()) -> Any:
    made = {name: param for name, param in kinds().items() if name in only}
    before = {name: (param.data_ptr(), param.stride()) for name, param in made.items()}
    if dist.get_rank() in without_gradient:
        for param in made.values():
            param.grad = None
    averager = torch_averagers.PeriodicModelAverager(3) if torchs else PeriodicModelAverager(3)
    averager.average_parameters(made.values())
    if not torchs:
        assert before == {name: (param.data_ptr(), param.stride()) for name, param in made.items()}
    return {name: param.detach().contiguous() for name, param in made.items()}


# All of a call are added up in the dtype that takes them all: 16 bits if they are all of that.
TOGETHER = [
    ("float", "bfloat16", "half", "frozen", "strided", "nothing", "scalar"),
    ("bfloat16", "nothing"),
    ("half",),
    ("frozen", "float"),
    ("nothing",),
]


def average_kinds_together() -> list[tuple[Any, Any]]:
    return [(average_kinds(False, only), average_kinds(True, only)) for only in TOGETHER]


def test_every_kind_of_parameter_is_averaged_as_by_torch_and_stays_where_it_is() -> None:
    of_rank = run(average_kinds_together, 4, timeout=20)
    for number, only in enumerate(TOGETHER):
        first = of_rank[0][number][0]
        for rank, (one, other) in enumerate(made[number] for made in of_rank):
            for name in only:
                assert one[name].dtype == other[name].dtype
                assert torch.equal(one[name], other[name]), name
                assert torch.equal(one[name], first[name]) == (name != "frozen" or rank == 0), name


def test_a_parameter_without_a_gradient_is_averaged_too() -> None:
    # torch's averager leaves it out, also where other ranks have one: it then adds up what does not belong.
    first, second = run(average_kinds, 2, False, ("float", "scalar"), (1,), timeout=20)
    parts = [{name: param.detach() for name, param in made.items()} for made in run(kinds, 2, timeout=20)]
    for name in ("float", "scalar"):
        assert torch.equal(first[name], second[name])
        assert torch.equal(first[name], parts[0][name] / 2 + parts[1][name] / 2)


# ------------------------------------------------------------------------------------------ other groups


def within_a_group() -> list[list[float]] | None:
    group = dist.new_group([4, 1, 2, 0])
    if dist.get_rank() == 3:
        return None  # no call of its own is needed
    averager = HierarchicalModelAverager({1: 2, 2: 4}, 0, group, timeout=timedelta(seconds=600))
    pair = averager.group_of[2]
    weight = nn.Parameter(torch.tensor([float(dist.get_rank())]))
    held = []
    for _ in range(3):
        averager.average_parameters([weight])
        held.append(weight.item())
        with torch.no_grad():
            weight += dist.get_rank()
    return [held, [pair.rank, pair.world_size, averager.collectives.rank]]


def test_an_averager_of_some_ranks_needs_no_call_of_the_others() -> None:
    # The group's ranks are, in order, 0, 1, 2 and 4; its pairs are (0, 1) and (2, 4).
    made = run(within_a_group, 5, timeout=20)
    assert made[3] is None
    means = {0: [1.75, 2.25, 5.25], 1: [1.75, 2.25, 5.25], 2: [1.75, 4.75, 5.25], 4: [1.75, 4.75, 5.25]}
    for position, rank in enumerate((0, 1, 2, 4)):
        assert made[rank] == [means[rank], [position % 2, 2, position]]


def gradients_of_all() -> tuple[Trace, int, str]:
    """Gradients are averaged over all ranks for ever: plain DDP, whose averages change nothing."""
    job = Job(Case(3, 1, gradient_group=dist.get_world_size()))
    trace, state = job.train(STEPS), PostLocalSGDState.following(job.averager)
    return trace, state.iter, caught(lambda: setattr(state, "iter", 0))


def test_a_gradient_group_of_all_ranks_keeps_them_equal() -> None:
    of_rank = run(gradients_of_all, 2, timeout=20)
    assert blocks([trace for trace, _, _ in of_rank]) == [2] * len(STEPS)
    for _, count, said in of_rank:
        assert count == len(STEPS)
        assert said == "AttributeError: this state follows an averager's count: set averager.step."
