"""How long a whole iteration takes: predicted from a calibrated cluster, and measured on real ranks.

`calibrate` fits collectives and computing one by one and never sees an iteration. Here all of it comes
together, for the main job's GPT at sizes that no fit was made with: what `predict_step` says before, and what
`take_turns` finds on the ranks, calls and bytes beside the times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch.distributed as dist

from zero_ref.lab import meter, ranks
from zero_ref.lab.config import TrainConfig
from zero_ref.lab.model import GPT
from zero_ref.lab.outcome import predict
from zero_ref.lab.pieces import (
    Effort,
    Times,
    TrainingSize,
    now,
    passages,
    time_collectives,
    time_training,
    together_ms,
    workload_of,
)
from zero_ref.lab.strategies import Trainable, trainable
from zero_ref.plan.calls import Call
from zero_ref.simulator.calibrate import Calibration, NoRateError, calibrate, undisturbed_ms
from zero_ref.simulator.cluster import Cluster
from zero_ref.simulator.play import Played, play
from zero_ref.simulator.schedule import Schedule

FIRST_ITERATIONS = 3
"""Not timed: DDP builds its buckets anew after the first, the optimizer makes its state, memory is fresh."""


# -------------------------------------------------------------------------------------------- predicted


class Predicted(NamedTuple):
    """An iteration before it is made: its schedule, and that schedule played on a cluster."""

    plan: Schedule
    played: Played

    @property
    def ms(self) -> float:
        """Of the whole iteration."""
        return self.played.iteration_ms


def predict_step(config: TrainConfig, cluster: Cluster, world_size: int) -> Predicted:
    """What an iteration of the main job will send, hold and take.

    >>> from zero_ref.simulator.cluster import cluster
    >>> small = predict_step(TrainConfig("zero-even", batch_size=2), cluster("loopback"), world_size=2)
    >>> large = predict_step(TrainConfig("zero-even", batch_size=8), cluster("loopback"), world_size=2)
    >>> small.plan.payload_bytes == large.plan.payload_bytes, small.ms < large.ms
    (True, True)

    Args:
        config: strategy, model and batch size count.
        cluster: such as `simulator.calibrate.calibrate` returns.
    """
    plan = _plan(replace(config, batch_size=1), world_size)
    return Predicted(plan, play(plan, cluster, workload_of(config.model, config.batch_size)))


@lru_cache(maxsize=64)
def _plan(config: TrainConfig, world_size: int) -> Schedule:
    """A plan takes a backward pass to find the order of gradients, and is asked for more than once."""
    return predict(config, world_size)


# --------------------------------------------------------------------------------------------- measured


class Iterations(NamedTuple):
    """What one rank saw of one configuration.

    Args:
        calls: of the last iteration.
        held: bytes kept after it.
        spans: seconds at which each timed iteration began and ended, from clearing gradients to new
            parameters; making the batch is left out.
    """

    calls: list[Call]
    held: meter.HeldBytes
    spans: list[tuple[float, float]]


OPS = ("all_reduce", "broadcast")
"""What the strategies of `config.COMPARED` send."""


class Trial(NamedTuple):
    """Pieces and whole iterations, timed in turns.

    Args:
        times: of collectives and computing, to calibrate with: the same on all ranks.
        iterations: of each configuration.
    """

    times: Times
    iterations: list[Iterations]


def take_turns(configs: Sequence[TrainConfig], effort: Effort) -> Trial:
    """Time each piece that a calibration needs once, then an iteration of each configuration, and again.

    In turns, because a machine does other things too: what slows it down then meets both alike.

    Collective: all ranks of the default group, with equal arguments.
    Args:
        configs: to train, under strategies of one iteration: not local-sgd. The pieces' models had better be
            others.
        effort: the pieces; `rounds` is the number of turns.
    """
    runs = [
        Loop(
            trainable(config.recipe, GPT(config.model, config.seed).to(ranks.device())),
            TrainingSize(config.model, config.batch_size),
            config.seed,
        )
        for config in configs
    ]
    times = Times([], [])
    for number in range(FIRST_ITERATIONS + effort.rounds):
        timed = number >= FIRST_ITERATIONS
        if timed:
            times.collectives.extend(time_collectives(effort.nbytes, 1, OPS))
            times.works.extend(time_training(effort.training, 1))
        for run in runs:
            if timed:  # a training loop's own memory is warm, and here another model was just trained
                run.iterate(number, timed=False)
            run.iterate(number, timed=timed)
    return Trial(times, [Iterations(run.made.calls, run.made.held(), run.spans) for run in runs])


def calibrate_in_turns(
    configs: Sequence[TrainConfig],
    effort: Effort,
    world_size: int,
    *,
    attempts: int = 3,
    timeout: float = 600.0,
) -> tuple[list[Trial], Calibration]:
    """What `take_turns` finds on `world_size` ranks of this machine, and the machine by it.

    Args:
        attempts: where larger sizes took no longer than small ones, because other programs ran, so often is
            everything measured, each time with twice the rounds.
        timeout: seconds, for the first attempt; the next have twice as long.
    Raises:
        RankError: a rank failed.
        ValueError: as `calibrate`, of the last attempt.
    """
    trials: list[Trial] = ranks.run(take_turns, world_size, configs, effort, timeout=timeout)
    try:
        return trials, calibrate(*trials[0].times)
    except NoRateError:
        if attempts <= 1:
            raise
    more = replace(effort, rounds=2 * effort.rounds)
    return calibrate_in_turns(configs, more, world_size, attempts=attempts - 1, timeout=2 * timeout)


class Loop:
    """A training loop that can be left after any iteration, and taken up again.

    Args:
        made: what is trained.
        size: of the model, and of what it is given.
        seed: of the passages.

    Attributes:
        spans: as in `Iterations`.
    """

    def __init__(self, made: Trainable, size: TrainingSize, seed: int = 0) -> None:
        self.made, self.size, self.seed = made, size, seed
        self.spans: list[tuple[float, float]] = []

    def iterate(self, number: int, *, timed: bool) -> None:
        """One iteration, with the passages of this step."""
        made, given = self.made, passages(*self.size, seed=self.seed, step=number, rank=dist.get_rank())
        made.calls.clear()
        dist.barrier()
        begun = now()
        with made.recording():
            made.optimizer.zero_grad()
            made.model(*given).backward()
            made.optimizer.step()
        if timed:
            self.spans.append((begun, now()))


# ------------------------------------------------------------------------------------- one beside the other


@dataclass(frozen=True)
class StepTime:
    """An iteration as predicted and as measured.

    Args:
        predicted_ms, measured_ms: measured is `undisturbed_ms` of the repeats, as in the calibration.
        repeats_ms: of each iteration, as `pieces.together_ms` counts it.
        as_planned: on every rank the calls, in their order and with their bytes, and the bytes that it holds
            are those of the schedule.
    """

    config: TrainConfig
    predicted_ms: float
    measured_ms: float
    repeats_ms: tuple[float, ...]
    as_planned: bool

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_ms / self.measured_ms - 1


def compare_steps(
    configs: Sequence[TrainConfig], cluster: Cluster, trials: Sequence[Trial]
) -> list[StepTime]:
    """Set what `predict_step` says beside what was measured.

    Args:
        trials: what `take_turns(configs, ...)` returned on each rank.
    """
    world_size = len(trials)
    compared = []
    for config, iterations in zip(configs, zip(*(trial.iterations for trial in trials)), strict=True):
        predicted = predict_step(config, cluster, world_size)
        repeats_ms = together_ms(rank.spans for rank in iterations)
        as_planned = all(_as_planned(predicted.plan, rank, seen) for rank, seen in enumerate(iterations))
        times = predicted.ms, undisturbed_ms(repeats_ms), tuple(repeats_ms)
        compared.append(StepTime(config, *times, as_planned))
    return compared


def _as_planned(plan: Schedule, rank: int, seen: Iterations) -> bool:
    held = plan.parameter_bytes[rank], plan.left_gradient_bytes[rank], plan.state_bytes[rank]
    return tuple(seen.calls) == plan.calls_of(rank) and seen.held == meter.HeldBytes(*held)
