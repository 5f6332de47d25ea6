"""Graders of chapter 17, local SGD: what if we sync less often?"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

from zero_ref.comm.backend import as_collectives
from zero_ref.comm.collectives import Collectives
from zero_ref.lab.config import GPTConfig
from zero_ref.lab.drift import who_agrees
from zero_ref.lab.meter import bytes_sent_by
from zero_ref.lab.model import GPT
from zero_ref.local_sgd.averagers import ModelAverager
from zero_ref.local_sgd.averaging import AveragingSchedule
from zero_ref.local_sgd.optimizer import PostLocalSGDState, post_localSGD_hook
from zero_ref.plan.calls import Call
from zero_ref.plan.partition import ParamSpec
from zero_ref.simulator.cluster import cluster
from zero_ref.simulator.models import MODELS, from_module
from zero_ref.simulator.recipe import recipe
from zero_ref.simulator.scenario import Scenario
from zero_ref.simulator.schedule import schedule
from zero_ref_course import Answer, call_text, exercise, shown
from zero_ref_course._cases import Form, is_number
from zero_ref_course._company import on_ranks, on_virtual_ranks
from zero_ref_course.predictions import prediction

# ------------------------------------------------------------------------------ after which steps ranks agree

RUNS = [(11, 2, 3, True), (11, 2, 3, False), (9, 0, 4, True), (7, 5, 4, False), (4, 6, 2, True)]


@exercise("local_sgd.equal_after", on_ranks=True)
def equal_after(answer: Answer) -> str:
    """Check the steps after which all ranks are equal: many runs by the schedule, some on real ranks."""
    cases = _cases() + answer.drawn(_drawn_schedule)
    for case in cases:
        _check_steps(answer, case, _planned(case), "the schedule says")
    for case, measured in zip(RUNS, on_ranks(_measured, 2, RUNS)[0]):
        _check_steps(answer, case, measured, "two real ranks show")
    return f"right for {len(cases)} schedules, and on real ranks for {len(RUNS)} runs"


def _cases() -> list[tuple[int, int, int, bool]]:
    first = [(8, 0, 3, True), (8, 2, 3, True), (8, 2, 3, False)]  # what goes wrong is plainest here
    return first + [
        (steps, warmup_steps, period, from_warmup)
        for steps in (0, 1, 6, 13)
        for warmup_steps in (0, 1, 3, 5, 8)
        for period in (1, 2, 3, 4, 7)
        for from_warmup in (True, False)
    ]


def _drawn_schedule(rng: random.Random) -> tuple[int, int, int, bool]:
    return rng.randint(10, 60), rng.randint(0, 20), rng.randint(1, 9), rng.random() < 0.5


def _schedule_of(case: tuple[int, int, int, bool], world_size: int) -> AveragingSchedule:
    _, warmup_steps, period, from_warmup = case
    if from_warmup:
        return AveragingSchedule.periodic(period, warmup_steps=warmup_steps)
    return AveragingSchedule.hierarchical({period: world_size}, warmup_steps=warmup_steps)


def _planned(case: tuple[int, int, int, bool]) -> list[int]:
    when = _schedule_of(case, 2)
    return [step for step in range(case[0]) if when.agreeing(step, world_size=2) == 2]


def _measured(cases: Sequence[tuple[int, int, int, bool]]) -> list[list[int]]:
    """On a rank: find the steps of each case after which all ranks hold the same values, bit for bit."""
    rank, found = dist.get_rank(), []
    for case in cases:
        averager = ModelAverager(_schedule_of(case, dist.get_world_size()))
        torch.manual_seed(0)
        ddp = DistributedDataParallel(nn.Linear(3, 1))
        ddp.register_comm_hook(PostLocalSGDState.following(averager), post_localSGD_hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        equal = []
        for step in range(case[0]):
            inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(1000 * rank + step))
            optimizer.zero_grad()
            ddp(inputs).square().mean().backward()
            optimizer.step()
            averager.average_parameters(ddp.parameters())
            if not any(who_agrees(as_collectives(None).all_gather(_end_to_end(ddp)))):
                equal.append(step)
        found.append(equal)
    return found


def _end_to_end(model: nn.Module) -> torch.Tensor:
    return parameters_to_vector(model.parameters()).detach()


def _check_steps(answer: Answer, case: tuple[int, int, int, bool], expected: list[int], source: str) -> None:
    steps, warmup_steps, period, from_warmup = case
    call = call_text(answer.name, *case)
    given = answer(*case)
    try:
        ours = [int(step) for step in given]
    except (TypeError, ValueError):
        raise AssertionError(
            f"{call} returned {shown(given)}. It must return a list of steps, such as [0, 1, 4]."
        ) from None
    if ours == expected:
        return
    wrong = sorted(set(ours) ^ set(expected))
    assert wrong, f"{call} has the right steps, but as {ours}: each once, and in order."
    step = wrong[0]
    assert 0 <= step < steps, f"{call} names step {step}; the run has the steps 0 to {steps - 1}."
    counted = f"step {warmup_steps}, the first after the warm-up" if from_warmup else "step 0"
    since = step - warmup_steps if from_warmup else step
    if step < warmup_steps:
        why = "it belongs to the warm-up, in which every step averages the gradients of all ranks"
    elif step in expected:
        why = f"counted from {counted}, it is number {since}, a multiple of {period}: it ends with an average"
    else:
        why = f"counted from {counted}, it is number {since}, no multiple of {period}: each rank went its way"
    verb = "leaves out" if step in expected else "has"
    raise AssertionError(
        f"{call} {verb} step {step}. After it the ranks are {'equal' if step in expected else 'not equal'}, "
        f"as {source}: {why}."
    )


# -------------------------------------------------------------------------------------------- what is sent

MEASURED = (500_000, 2, 11, 3, 4)
"""A run on real ranks: payload in bytes, ranks, steps, warm-up, period. The headers are less than 1%."""


@exercise("local_sgd.bytes_sent", on_ranks=True)
def bytes_sent(answer: Answer) -> str:
    """Check the bytes that a rank sends against the schedule's calls, and against those of real ranks."""
    cases = [
        (nbytes, world_size, steps, warmup_steps, period)
        for nbytes in (4_000, 1_000_000)
        for world_size in (2, 4, 8, 1)
        for steps, warmup_steps, period in [
            (8, 0, 4), (9, 0, 4), (6, 2, 4), (7, 2, 4), (10, 10, 4), (3, 5, 4), (12, 3, 1), (100, 10, 16)
        ]
    ]  # fmt: skip
    cases += answer.drawn(
        lambda rng: (4 * rng.randint(10, 10**5), rng.randint(2, 64), rng.randint(1, 99), rng.randint(0, 9), 5)
    )
    for case in cases:
        _check_bytes(answer, case)
    world_size = MEASURED[1]
    measured = on_ranks(_sent_in_a_run, world_size, MEASURED)
    counted = [nbytes for nbytes in measured if nbytes is not None]
    if len(counted) < world_size:
        return f"right for {len(cases)} runs (this machine counts no bytes)"
    mean, ours = sum(counted) / world_size, float(answer(*MEASURED))
    assert abs(ours - mean) <= 0.01 * mean, (
        f"{answer.name}{MEASURED} is {ours:,.0f} bytes, and each of {world_size} real ranks has sent "
        f"{mean:,.0f}."
    )
    return f"right for {len(cases)} runs, and within 1% of what {world_size} real ranks have sent"


def _check_bytes(answer: Answer, case: tuple[int, int, int, int, int]) -> None:
    nbytes, world_size, steps, warmup_steps, period = case
    expected = _planned_bytes(case)
    ours = Form(is_number, "It must return a number of bytes.").returned_by(answer, *case)
    call = call_text(answer.name, *case)
    if abs(ours - expected) <= 1e-6 * max(expected, 1):
        return
    said = f"{call} is {ours:,.0f} bytes, and a rank sends {expected:,.0f}."
    assert world_size > 1, f"{said} A rank by itself sends nothing."
    of_each = 2 * (world_size - 1) / world_size * nbytes
    right, given = round(expected / of_each), ours / of_each
    warm = min(steps, warmup_steps)
    if abs(given - round(given)) > 1e-6:
        raise AssertionError(
            f"{said} An all-reduce of {nbytes:,} bytes on a ring of {world_size} makes each rank send "
            f"2(N-1)/N = {2 * (world_size - 1)}/{world_size} of them: {of_each:,.0f}."
        )
    assert round(given) != right * world_size, f"{said} All ranks together send {ours:,.0f}; count one rank."
    averages = list(range(warmup_steps, steps, period))
    raise AssertionError(
        f"{said} That is {right} all-reduces, not {round(given)}: {warm} of gradients in the warm-up, and "
        f"{len(averages)} of parameters, at the steps {shown(averages)}; the last step is {steps - 1}."
    )


def _planned_bytes(case: tuple[int, int, int, int, int]) -> float:
    nbytes, world_size, steps, warmup_steps, period = case
    when = AveragingSchedule.periodic(period, warmup_steps=warmup_steps)
    plan = schedule(
        recipe("local-sgd", averaging=when), [ParamSpec(nbytes // 4)], world_size, steps=range(steps)
    )
    payload = sum(call.nbytes for call in plan.calls if call.op == "all_reduce")
    return 2 * (world_size - 1) / world_size * payload


def _sent_in_a_run(case: tuple[int, int, int, int, int]) -> int | None:
    """On a rank: make a run, and return the bytes that the rank sends, agreements included."""
    nbytes, _, steps, warmup_steps, period = case
    model = nn.Linear(nbytes // 4, 1, bias=False)
    averager = ModelAverager(AveragingSchedule.periodic(period, warmup_steps=warmup_steps))
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(PostLocalSGDState.following(averager), post_localSGD_hook)

    def run() -> None:
        averager.step = 0
        for _ in range(steps):
            model.zero_grad()
            ddp(torch.ones(1, nbytes // 4)).sum().backward()
            averager.average_parameters(model.parameters())

    return bytes_sent_by(run)


# -------------------------------------------------------------------------------------- write the average

SHAPES = [(3, 4), (4,), (), (2, 5)]


@exercise("local_sgd.average", may_return_none=True, on_ranks=True)
def average(answer: Answer) -> str:
    """Check the average on virtual ranks, where every call is seen; then on real ones, in a training."""
    for world_size in (2, 3, 1):
        outcomes = on_virtual_ranks(
            _Outcome,
            world_size,
            answer,
            waiting=lambda why, n=world_size: f"on {n} virtual ranks: {why}",  # type: ignore[misc]
        )
        _check_average(outcomes, answer.seed)
    of_ranks = on_ranks(_train_with, 2, answer)
    for rank, (ours, packages) in enumerate(of_ranks):
        assert torch.equal(ours, of_ranks[0][0]), f"on real ranks, rank {rank} ends with other parameters."
        assert torch.allclose(ours, packages, rtol=1e-5, atol=1e-7), (
            f"rank {rank} ends at other parameters than with the package's average, after 9 real steps."
        )
    return "the mean of all ranks, in place and in one all-reduce, also in a run on real ranks"


def _parameters(rank: int, seed: int) -> list[nn.Parameter]:
    """Views of one flat tensor, as with parameters_as_bucket_view."""
    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    flat = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(rank + 100 * seed))
    return [nn.Parameter(part.view(shape)) for part, shape in zip(flat.split(sizes), SHAPES)]


class _Outcome:
    """The result of an answer on one rank: its calls, and its parameters and gradients afterwards."""

    def __init__(self, comm: Collectives, answer: Answer) -> None:
        params = _parameters(comm.rank, answer.seed)
        for param in params:
            param.grad = torch.ones_like(param)
        places = [param.data_ptr() for param in params]
        self.calls: list[Call] = []
        comm.observers.append(self.calls.append)
        answer(comm, params)
        self.values = [param.detach().clone() for param in params]
        self.moved = [param.data_ptr() for param in params] != places
        self.gradients_kept = all(
            param.grad is not None and torch.equal(param.grad, torch.ones_like(param)) for param in params
        )


def _check_average(outcomes: Sequence[_Outcome], seed: int) -> None:
    world_size = len(outcomes)
    where = f"on {world_size} ranks"
    before = [[param.detach() for param in _parameters(rank, seed)] for rank in range(world_size)]
    for number, of_ranks in enumerate(zip(*before)):
        mean = torch.stack(of_ranks).mean(0)
        for rank, outcome in enumerate(outcomes):
            ours = outcome.values[number]
            if torch.allclose(ours, mean, rtol=1e-5, atol=1e-7):
                continue
            name = f"{where}, parameter {number} of rank {rank}"
            assert not torch.equal(ours, of_ranks[rank]), (
                f"{name} is what it was before. What the all-reduce gives has to be copied into it."
            )
            assert not torch.allclose(ours, mean * world_size, rtol=1e-5), (
                f"{name} is the sum of all ranks', not their mean: an all-reduce adds up. Divide by "
                "the world size."
            )
            raise AssertionError(f"{name} is not the mean of all ranks'. Are the pieces in order?")
    for rank, outcome in enumerate(outcomes):
        assert not outcome.moved, (
            f"{where}: a parameter of rank {rank} has other memory than before. It may be a view of a "
            "bucket, and what is sent from there would be the old values: copy into it, with copy_."
        )
        assert outcome.gradients_kept, f"{where}: rank {rank} has other gradients than before."
        reductions = [call for call in outcome.calls if call.op == "all_reduce"]
        assert world_size == 1 or len(outcome.calls) == len(reductions) == 1, (
            f"{where} there are {len(SHAPES)} parameters, and rank {rank} makes {len(outcome.calls)} calls, "
            f"{len(reductions)} of them all-reduces. Put all into one flat tensor, and make one all-reduce: "
            "each call pays the latency."
        )
        numel = sum(value.numel() for value in outcome.values)
        assert world_size == 1 or reductions[0].nbytes == 4 * numel, (
            f"{where} the all-reduce has {reductions[0].nbytes} bytes; the parameters have {4 * numel}."
        )


def _train_with(answer: Answer) -> Any:
    """Train nine local steps and three averages, with the answer's average and with the package's."""
    comm = as_collectives(None)
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    packages = copy.deepcopy(ours)
    averager = ModelAverager(AveragingSchedule.periodic(4))
    for step in range(9):
        generator = torch.Generator().manual_seed(1000 * comm.rank + step + answer.seed)
        inputs = torch.randn(8, 3, generator=generator)
        for model in (ours, packages):
            model.zero_grad()
            model(inputs).square().mean().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        if averager.schedule.level(step):
            answer(comm, list(ours.parameters()))
        averager.average_parameters(packages.parameters())
    return _end_to_end(ours), _end_to_end(packages)


# --------------------------------------------------------------------------------------- predictions


@prediction(
    "local_sgd.bytes",
    "Warm-up of 3, period of 4, 16 steps, 4 ranks: what does a rank send in percent of DDP's bytes?",
    unit="%",
)
def _bytes_of_ddp() -> float:
    specs = from_module(GPT(GPTConfig(layers=2, heads=2, width=64, context=32)))
    when = AveragingSchedule.periodic(4, warmup_steps=3)
    local = schedule(recipe("local-sgd", averaging=when), specs, 4, steps=range(16))
    return 100 * local.wire_bytes() / (16 * schedule("ddp", specs, 4).wire_bytes())


@prediction(
    "local_sgd.period_of_one",
    "SGD, SGD with momentum, AdamW: which of them goes the same way under DDP and with a period of one?",
    choices=("none of them", "SGD without momentum", "SGD with and without momentum", "all three"),
)
def _same_with_period_one() -> str:
    kinds = ("none of them", "SGD without momentum", "SGD with and without momentum", "all three")
    return kinds[sum(map(_goes_as_ddp, _OPTIMIZERS))]


_OPTIMIZERS: tuple[Callable[[list[torch.Tensor]], torch.optim.Optimizer], ...] = (
    lambda params: torch.optim.SGD(params, lr=0.5),
    lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.5),
    lambda params: torch.optim.AdamW(params, lr=0.5),
)


def _goes_as_ddp(optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer]) -> bool:
    """Whether two ranks that average a parameter after every step have DDP's parameter after three steps."""
    gradients = torch.tensor([[1.0, -3.0], [2.0, 0.5], [-1.0, 4.0]], dtype=torch.float64)
    alone, together = torch.zeros(2, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    of_ranks = [alone[0:1], alone[1:2]]
    steps = [optimizer([param]) for param in (*of_ranks, together)]
    for of_step in gradients:
        of_ranks[0].grad, of_ranks[1].grad, together.grad = of_step[:1], of_step[1:], of_step.mean(0, True)
        for one in steps:
            one.step()
        alone.fill_(alone.mean())
    return torch.allclose(alone, together)


@prediction(
    "local_sgd.fast",
    "On the machines with 400 Gbit, which step is the shortest?",
    choices=("ddp", "H = 1", "H = 4"),
)
def _shortest_on_the_fast_network() -> str:
    model, network = MODELS["gpt2-medium"], cluster("a100-ethernet")
    cases = {"ddp": ("ddp", 1), "H = 1": ("local-sgd", 1), "H = 4": ("local-sgd", 4)}
    ms = {
        case: Scenario(model, network, 16, batch=4, period=period).run(strategy).iteration_ms
        for case, (strategy, period) in cases.items()
    }
    return min(ms, key=ms.__getitem__)
