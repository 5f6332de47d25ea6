"""Chapter 8's graders: the bytes of each stage, and the tokens that hide gathers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import pairwise, starmap
from statistics import mean
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zero_ref.backward.sharded_data_parallel import ShardedDataParallel
from zero_ref.lab import ranks
from zero_ref.lab.meter import bytes_sent_by
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.partition import ParamSpec
from zero_ref.simulator.cluster import Cluster, Link
from zero_ref.simulator.device import Device
from zero_ref.simulator.play import Played, play
from zero_ref.simulator.price import Workload
from zero_ref.simulator.schedule import Schedule, schedule
from zero_ref.simulator.traffic import BACKENDS, traffic
from zero_ref_course import Answer, call_text, exercise, shown
from zero_ref_course._cases import Form, check_cases, is_number
from zero_ref_course._pictures import timelines
from zero_ref_course.predictions import prediction

# ------------------------------------------------------------------------------- the bytes that a rank sends

STRATEGY_OF_STAGE = {0: "ddp", 1: "zero-even", 2: "zero-2", 3: "zero-3"}
WIDTH, LAYERS = 512, 4
CLOSE_BYTES = 1e-3

BYTES = Form(lambda value: is_number(value) and value >= 0, "It must return a number of bytes, 0 or more.")


@exercise("stages.volume", on_ranks=True)
def volume(answer: Answer) -> str:
    """Check the bytes that a rank sends in an iteration: by the simulator, then on real connections."""
    models = [(numel, itemsize, n) for numel, itemsize in ((2**16, 4), (2**20, 2)) for n in (8, 2, 64, 1)]
    models += answer.drawn(lambda rng: (2 ** rng.randint(14, 26), 4, 2 ** rng.randint(1, 8)))
    cases = [
        (stage, *model, backend) for model in models for backend in BACKENDS for stage in STRATEGY_OF_STAGE
    ]
    check_cases(
        answer,
        cases,
        starmap(_simulated_volume, cases),
        BYTES.returned_by,
        same=_is_close,
        otherwise=_mistake_in_volume,
    )
    counted = ranks.run(_sent_in_each_stage, 2, timeout=60.0, backend="gloo")
    for stage in STRATEGY_OF_STAGE:
        sent = [of_rank[stage] for of_rank in counted]
        if None in sent:
            return f"{len(cases)} cases as simulated; this system has no counters to check it on real ranks"
        of_rank = mean(nbytes or 0 for nbytes in sent)
        arguments = (stage, LAYERS * WIDTH**2, 4, 2, "gloo")
        theirs = answer(*arguments)
        # Headers of messages, and the barriers around an iteration: some hundred bytes of 4 MB.
        assert abs(theirs - of_rank) <= 0.01 * of_rank, (
            f"{call_text(answer.name, *arguments)} returned {shown(theirs)}, and two real ranks sent "
            f"{of_rank:,.0f} bytes each."
        )
    return f"{len(cases)} cases as simulated, and 4 stages within 1% of what two real ranks sent"


def _simulated_volume(stage: int, numel: int, itemsize: int, world_size: int, backend: str) -> float:
    dtype = {2: "bfloat16", 4: "float32"}[itemsize]
    plan = _of_equal_blocks(STRATEGY_OF_STAGE[stage], numel // 4, dtype, world_size)
    # Stage 2 also counts on how many ranks each parameter had a gradient, which is not asked for.
    counts = sum(one.nbytes for one in plan.operations if one.label == "agree")
    of_counts = traffic("all_reduce", counts, world_size, backend=backend).total_bytes
    return (plan.wire_bytes(backend) - of_counts) / world_size


def _of_equal_blocks(strategy: str, numel: int, dtype: str, world_size: int, count: int = 4) -> Schedule:
    """The schedule of a model of equal blocks and nothing else."""
    params = [ParamSpec(numel, dtype)] * count
    blocks = [[], *([number] for number in range(count))]  # the first is the root's
    return schedule(strategy, params, world_size, blocks=blocks if strategy == "zero-3" else None)


def _is_close(theirs: float, expected: float) -> bool:
    return math.isclose(theirs, expected, rel_tol=CLOSE_BYTES, abs_tol=1e-6)


def _mistake_in_volume(
    theirs: float, expected: float, stage: int, numel: int, itemsize: int, world_size: int, backend: str
) -> str:
    """Describe what the reader may have forgotten; `once` is what a rank sends to move the model one time."""
    whole = float(numel * itemsize)
    once = whole * (world_size - 1) / world_size
    if world_size == 1:
        return "One rank has nobody to send to."
    if _is_close(theirs * itemsize, expected):
        return f"These are elements. Each has {itemsize} bytes."
    if _is_close(theirs, expected * world_size):
        return "These are the bytes of all ranks together. The question is what one rank sends."
    if _is_close(theirs * (world_size - 1) / world_size, expected):
        return f"Of what is reduced or gathered a rank has 1/{world_size} itself, and does not send it."
    if backend == "gloo" and stage == 3 and _is_close(theirs, expected - once):
        return "On Gloo a reduce-scatter is an all-reduce inside: it moves everything twice."
    if stage == 3 and theirs < expected and _is_close(theirs, expected - once):
        return "A block is let go after its forward. What does its backward need?"
    if stage == 3 and theirs > expected and _is_close(theirs, expected + once):
        return "Only Gloo makes an all-reduce of a reduce-scatter. This is NCCL."
    if stage == 1 and _is_close(theirs, expected - once):
        return (
            "At this stage 1, on top of DDP, every rank still gets all averaged gradients: an all-reduce "
            "moves them twice."
        )
    if stage == 2 and _is_close(theirs, expected + once):
        on_gloo = " On Gloo too: there the package has a reduce-scatter of its own." * (backend == "gloo")
        return f"At stage 2 gradients are reduced to shares, which is half of an all-reduce.{on_gloo}"
    times = theirs / once
    return f"Yours is {times:.3g} times Ψ (N-1)/N. What is reduced, what is gathered, how often?"


def _sent_in_each_stage() -> dict[int, int | None]:
    """On a rank: the bytes that it sends in an iteration of each stage."""
    return {stage: _sent(stage) for stage in STRATEGY_OF_STAGE}


def _sent(stage: int) -> int | None:
    model = _tower([WIDTH] * (LAYERS + 1))
    wrapped: nn.Module = model
    optimizer: torch.optim.Optimizer
    if stage == 3:
        _shard(model, model)
        optimizer = torch.optim.AdamW(model.parameters())
    elif stage == 0:
        wrapped, optimizer = DistributedDataParallel(model), torch.optim.AdamW(model.parameters())
    else:
        optimizer = zero = ZeroRedundancyOptimizer(
            model.parameters(),
            torch.optim.AdamW,
            partition="even" if stage == 1 else "equal_shares",
            parameters_as_bucket_view=True,
        )
        wrapped = DistributedDataParallel(model) if stage == 1 else ShardedDataParallel(model, zero)
    iteration = _iteration(wrapped, optimizer)
    iteration()  # after the first one DDP makes its buckets anew
    return bytes_sent_by(iteration)


def _shard(model: nn.Module, blocks: nn.Sequential) -> None:
    # These take seconds to import, which who asks for the names of exercises need not wait for.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # Gloo's ranks compute on the CPU. Left to itself, fully_shard takes a GPU where there is one.
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in (*blocks, model):
        fully_shard(unit, mesh=mesh)


def _tower(widths: Sequence[int]) -> nn.Sequential:
    """A chain of linear layers, each a unit of its own."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(widths)))


def _iteration(model: nn.Module, optimizer: torch.optim.Optimizer, width: int = WIDTH) -> Callable[[], None]:
    inputs = torch.ones(2, width)

    def iteration() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return iteration


# ----------------------------------------------------------------------------------------------- break-even


class Setting(NamedTuple):
    """The arguments of the reader's function: a device, a link, the parameters of a block, ranks."""

    tflops: float
    gb_per_s: float
    latency_us: float
    numel: int
    world_size: int


SETTINGS = [
    Setting(400.0, 50.0, 0.0, 10**9, 64),
    Setting(400.0, 50.0, 0.0, 10**9, 2),
    Setting(140.0, 25.0, 10.0, 30 * 10**6, 256),
    Setting(400.0, 450.0, 3.0, 2 * 10**8, 8),
    Setting(74.0, 1.25, 30.0, 7 * 10**6, 16),
    Setting(400.0, 450.0, 60.0, 2 * 10**7, 2),
]
"""No latency, on many ranks and on two; latency that counts as much as bytes; fast; slow; mostly latency."""

CLOSE = 0.02
BLOCKS = 6
TOKENS = Form(lambda value: is_number(value) and value > 0, "It must return a number of tokens above 0.")


@exercise(
    "stages.break_even",
    draws=timelines,
)
def break_even(answer: Answer) -> str:
    """Check the fewest tokens a rank with which stage 3 exposes nothing that could be hidden."""
    for setting in SETTINGS + answer.drawn(_drawn_setting, 4):
        tokens = TOKENS.returned_by(answer, *setting)
        call = f"{call_text(answer.name, *setting)} returned {shown(tokens)}"
        least_ms = _played(setting, 10**9).timeline().exposed_ms
        enough, fewer = (_played(setting, n) for n in (math.ceil(tokens * (1 + CLOSE)), _just_below(tokens)))
        chosen = _played(setting, max(1, round(tokens)))
        answer.shows(chosen.timeline(), _played(setting, _fewest_tokens(setting)).timeline())
        forward_ms, gather_ms = _of_a_block(chosen)
        per_block = f"a block's forward then takes {forward_ms:.3g} ms, and its gather {gather_ms:.3g} ms"
        assert _is_least(enough, least_ms), (
            f"{call}: too few, {per_block}. In the simulator {enough.timeline().exposed_ms:.3g} ms of an "
            f"iteration of {BLOCKS} blocks are exposed, where more tokens leave {least_ms:.3g}. "
            f"{_what_is_missing(tokens, setting)}"
        )
        assert not _is_least(fewer, least_ms), (
            f"{call}: more than needed, {per_block}. With {_just_below(tokens)} tokens no more is exposed. "
            f"{_what_is_missing(tokens, setting)}"
        )
    return f"{len(SETTINGS)} clusters: the fewest tokens, to within {CLOSE:.0%}, that hide every gather"


def _drawn_setting(rng: random.Random) -> Setting:
    sizes = 10**6 * rng.randint(20, 500), 2 ** rng.randint(1, 7)
    return Setting(rng.uniform(50, 900), rng.uniform(2, 400), rng.uniform(0, 30), *sizes)


def _just_below(tokens: float) -> int:
    return max(0, math.floor(tokens * (1 - CLOSE)) - 1)


def _played(setting: Setting, tokens: int) -> Played:
    link = Link(setting.latency_us, setting.gb_per_s)
    # All memory traffic in no time: the optimizer's step is no part of the question.
    device = Device("a device", setting.tflops, reached=1.0, memory_gb=None, memory_gb_per_s=1e12)
    cluster = Cluster("one link", device, setting.world_size, within=link, between=link)
    # A number of elements that every rank has as many of.
    numel = -(-setting.numel // setting.world_size) * setting.world_size
    plan = _of_equal_blocks("zero-3", numel, "bfloat16", setting.world_size, BLOCKS)
    return play(plan, cluster, Workload(tokens))


def _of_a_block(played: Played) -> tuple[float, float]:
    """The milliseconds of a block's forward, and of its gather."""
    of_label = {event.label: event.stop_ms - event.start_ms for event in played.timeline().events}
    return of_label["forward"], of_label["gather"]


def _is_least(played: Played, least_ms: float) -> bool:
    return played.timeline().exposed_ms <= least_ms * (1 + 1e-6)


def _balance(setting: Setting) -> tuple[float, float, float]:
    """The microseconds of a block's forward for each token, of its gather's bytes, and of its latencies."""
    tflops, gb_per_s, latency_us, numel, n = setting
    token_us = 2 * numel / (tflops * 1e6)
    return token_us, 2 * numel * (n - 1) / n / (gb_per_s * 1e3), (n - 1) * latency_us


def _fewest_tokens(setting: Setting) -> int:
    token_us, sent_us, waits_us = _balance(setting)
    return math.ceil((sent_us + waits_us) / token_us)


def _what_is_missing(tokens: float, setting: Setting) -> str:
    gb_per_s, latency_us, numel = setting.gb_per_s, setting.latency_us, setting.numel
    token_us, sent_us, waits_us = _balance(setting)
    guesses = [
        (sent_us + latency_us, "A ring has N - 1 rounds, and each of them waits for a latency."),
        (sent_us, "A ring has N - 1 rounds, and each of them waits for a latency."),
        (2 * numel / (gb_per_s * 1e3) + waits_us, "Of a block a rank has 1/N itself: (N-1)/N of it arrive."),
        (
            (sent_us + waits_us) / 2,
            "Forward takes 2 operations a parameter and token: compare it with 1 gather.",
        ),
        (
            2 * sent_us + waits_us,
            "An element of bfloat16 has 2 bytes, and forward takes 2 operations for it.",
        ),
        (3 * sent_us + waits_us, "In forward there is one gather of each block, and nothing else."),
    ]
    for network_us, hint in guesses:
        if math.isclose(tokens, network_us / token_us, rel_tol=CLOSE) and (waits_us or "wait" not in hint):
            return hint
    return "A gather hides if the block before it computes for as long."


# --------------------------------------------------------------------------------------- predictions


@prediction(
    "stages.peak",
    "Three equal blocks, four ranks, 16 bytes a parameter under DDP: how many does the stair hold at most?",
    unit="bytes",
)
def _peak_of_the_stair() -> float:
    shares, gradients, block = (4 + 8) / 4, 4 / 4, 4 / 3
    return (
        shares + gradients + 2 * block
    )  # a block's gradients twice: as backward leaves them, and end to end


@prediction(
    "stages.gathers",
    "A GPT with three blocks and its root: how many all-gathers does `fully_shard` make in an iteration?",
    unit="all-gathers",
)
def _gathers() -> float:
    each = [[number] for number in range(4)]
    plan = schedule("zero-3", [ParamSpec(2**20)] * 4, 2, blocks=each)
    return float(sum(one.op == "all_gather" for one in plan.operations))


@prediction(
    "stages.ahead",
    "How much more does a rank hold at most with one unit ahead than without prefetch?",
    unit="MB",
)
def _one_unit_ahead() -> float:
    return 400 * 63 / 64  # a block, less the part that is there already
