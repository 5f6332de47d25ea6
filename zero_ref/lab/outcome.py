"""The costs of a run: `predict` gives them beforehand, and `Outcome` compares them with measurements."""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from zero_ref.lab import meter
from zero_ref.lab.config import COMPARED, TrainConfig
from zero_ref.lab.model import GPT, batch, language_reference
from zero_ref.lab.placement import Placement
from zero_ref.plan.calls import Call
from zero_ref.simulator import models
from zero_ref.simulator.ledger import MIXED_16, Convention, itemsize_of, ledger
from zero_ref.simulator.options import values_of
from zero_ref.simulator.schedule import Schedule, ddp_buckets, schedule


def predict(config: TrainConfig, world_size: int, *, side_stream: bool = False) -> Schedule:
    """Predict the bytes that an iteration sends and that each rank holds, before anything is started.

    Only the order in which gradients become ready is tried out, by one backward pass in this process: it
    decides which of them share one of DDP's buckets. `side_stream` is that of `schedule`.
    """
    model = GPT(config.model, config.seed)
    tokens, targets = batch(language_reference().training, config.model, 1, seed=0, step=0, rank=0)
    order = models.ready_order(model, lambda: model(tokens, targets).backward())
    params = models.from_module(model)
    return schedule(
        config.recipe,
        params,
        world_size,
        ddp_buckets=ddp_buckets(params, order),
        blocks=models.blocks(params),
        steps=config.recorded_steps if config.recipe.averaging else None,
        side_stream=side_stream,
    )


class Measured(NamedTuple):
    """The measurements of one rank.

    Args:
        calls: of `TrainConfig.recorded_steps`.
        held: bytes kept after the last step.
        losses: training loss of each step done, the mean over ranks; those of earlier runs included where a
            sharded save held them.
        held_out_loss: after the last step, on text that was not trained on; on rank 0 at least.
        step_ms: of each step done in this run.
        cuts_by_itself: the reader's own optimizer has cut the parameters, by a rule of its own.
    """

    calls: list[Call]
    held: meter.HeldBytes
    losses: list[float]
    held_out_loss: float | None
    step_ms: list[float]
    cuts_by_itself: bool = False


class Pair(NamedTuple):
    """A quantity as predicted and as measured; `predicted` is None if there is no prediction."""

    predicted: int | None
    measured: int

    @property
    def agrees(self) -> bool:
        """Whether both are equal, or there is no prediction."""
        return self.predicted in (None, self.measured)

    @property
    def both(self) -> tuple[int, int]:
        """The prediction and the measurement, of a quantity that has a prediction."""
        assert self.predicted is not None
        return self.predicted, self.measured


@dataclass(frozen=True)
class Outcome:
    """One strategy's run, prediction beside measurement. Bytes and calls are those of the rank that has most.

    Args:
        collectives, payload_bytes: of the last step; under local SGD of the steps of its last cycle.
        calls_equal: on every rank these calls have the predicted operations, order and bytes. True also for
            the reader's own optimizer, whose calls are not predicted.
        step_ms: median over steps of the slowest rank's time; the first steps, which build DDP's buckets,
            are left out.
        dtype, master_dtype: of the parameters, and of the masters if there are any.
        numel: elements of all parameters.
        held_bytes: parameters, gradients and optimizer state together, on each rank.
        ledger_bytes: the same by `simulator.ledger.ledger`, on average over the ranks.
        loss_tolerance: relative, between this loss and that of DDP; None where another model is trained.
    """

    strategy: str
    ranks: int
    steps: int
    state_bytes_max: Pair
    parameter_bytes_max: Pair
    gradient_bytes_max: Pair
    collectives: Pair
    payload_bytes: Pair
    calls_equal: bool
    step_ms: float
    final_loss: float
    losses: list[float]
    dtype: str
    master_dtype: str | None
    numel: int
    held_bytes: list[Pair]
    ledger_bytes: float
    loss_tolerance: float | None = 1e-6

    QUANTITIES = (
        "state_bytes_max",
        "parameter_bytes_max",
        "gradient_bytes_max",
        "collectives",
        "payload_bytes",
    )

    def pairs(self) -> dict[str, Pair]:
        """Return the quantities that were both predicted and measured, by name."""
        return {name: getattr(self, name) for name in self.QUANTITIES}

    @property
    def as_predicted(self) -> bool:
        """Every quantity and every call is as predicted."""
        pairs = [*self.pairs().values(), *self.held_bytes]
        return self.calls_equal and all(pair.agrees for pair in pairs)

    def in_short(self) -> dict[str, Any]:
        """Return `as_json` without the loss of each step."""
        return {name: value for name, value in self.as_json().items() if name != "losses"}

    def as_json(self) -> dict[str, Any]:
        """Plain values, the pairs as {"predicted": ..., "measured": ...}."""
        pairs = {name: pair._asdict() for name, pair in self.pairs().items()}
        return {**asdict(self), **pairs, "held_bytes": [held._asdict() for held in self.held_bytes]}


def outcome(config: TrainConfig, plan: Schedule, measured: Sequence[Measured]) -> Outcome:
    """Set a prediction beside what each rank measured.

    Of the reader's own optimizer the parameters are predicted, and until it cuts them the state. What it
    sends, and which gradients it keeps, depends on how far the file is.
    """
    times = [max(at_step) for at_step in zip(*(rank.step_ms for rank in measured), strict=True)]
    first = measured[0]
    planned = [plan.calls_of(rank) for rank in range(len(measured))]
    planned_bytes = map(sum, zip(plan.parameter_bytes, plan.left_gradient_bytes, plan.state_bytes))
    numel, own = config.model.numel, config.is_own
    assert first.held_out_loss is not None
    return Outcome(
        strategy=config.title,
        ranks=len(measured),
        steps=config.steps,
        state_bytes_max=Pair(
            None if first.cuts_by_itself else plan.state_bytes_max,
            max(rank.held.optimizer_state for rank in measured),
        ),
        parameter_bytes_max=Pair(plan.parameter_bytes_max, max(rank.held.parameters for rank in measured)),
        gradient_bytes_max=Pair(
            None if own else plan.gradient_bytes_max, max(rank.held.gradients for rank in measured)
        ),
        collectives=Pair(None if own else max(map(len, planned)), max(len(rank.calls) for rank in measured)),
        payload_bytes=Pair(
            None if own else max(map(_payload, planned)), max(_payload(rank.calls) for rank in measured)
        ),
        calls_equal=own or all(tuple(rank.calls) == of_rank for rank, of_rank in zip(measured, planned)),
        step_ms=statistics.median(times[min(3, len(times) // 2) :] or [float("nan")]),
        final_loss=first.held_out_loss,
        losses=first.losses,
        dtype=config.model.dtype,
        master_dtype=config.master_dtype,
        numel=numel,
        held_bytes=[
            Pair(None if own else held, sum(rank.held))
            for held, rank in zip(planned_bytes, measured, strict=True)
        ],
        ledger_bytes=_ledger_bytes(config, len(measured)),
        loss_tolerance=_loss_tolerance(config),
    )


def _ledger_bytes(config: TrainConfig, world_size: int) -> float:
    """The ledger's bytes of a rank."""
    group = config.recipe.group_of(world_size)
    return ledger(config.model.numel, group, config.recipe.stage, _convention(config)).total_bytes


def _convention(config: TrainConfig) -> Convention:
    """Bytes of an element of parameters, gradients and state."""
    if config.master_dtype is not None:
        return MIXED_16
    itemsize = itemsize_of(config.model.dtype)
    return Convention(itemsize, itemsize, 2 * itemsize, moment=itemsize)


def _payload(calls: Sequence[Call]) -> int:
    return sum(call.nbytes for call in calls)


def _loss_tolerance(config: TrainConfig) -> float | None:
    if config.recipe.averaging is not None:
        return None  # trains another model
    # The same arithmetic on the same numbers, bit for bit on Gloo; NCCL may add gradients in another order
    # from run to run. Owners and `fully_shard` add those of three ranks and more in another order than an
    # all-reduce, and each step makes more of the difference: 5e-7 after the demo's 120. In 16 bits a sum in
    # another order is another gradient: up to 0.03 after 200 steps.
    # Own code is compared as owners are: it may reduce to them.
    if config.strategy in COMPARED:
        return 1e-6
    return 1e-3 if config.model.dtype == "float32" else 0.1


def _tolerance(result: Outcome) -> float:
    return math.inf if result.loss_tolerance is None else result.loss_tolerance


def problems(outcomes: Sequence[Outcome]) -> list[str]:
    """Describe each wrong prediction and each loss that differs; empty if all is right."""
    found = []
    for result in outcomes:
        if not all(map(math.isfinite, (*result.losses, result.final_loss))):
            found.append(
                f"{result.strategy}: the loss became infinite or no number: a smaller learning rate may help"
            )
        for quantity, pair in result.pairs().items():
            if not pair.agrees:
                found.append(
                    f"{result.strategy}: {quantity} predicted {pair.predicted}, measured {pair.measured}"
                )
        for rank, pair in enumerate(result.held_bytes):
            if not pair.agrees:
                found.append(
                    f"{result.strategy}: bytes held on rank {rank} predicted {pair.predicted}, measured "
                    f"{pair.measured}"
                )
        if not result.calls_equal:
            found.append(
                f"{result.strategy}: the calls of a step are not those predicted, or not in their order"
            )
    reference = min(outcomes, key=_tolerance)
    for result in outcomes:
        off = abs(result.final_loss - reference.final_loss)
        tolerance = max(_tolerance(result), _tolerance(reference))
        if off > tolerance * abs(reference.final_loss):  # false for what is no number: told above
            found.append(
                f"{result.strategy}: final loss {result.final_loss!r}, "
                f"{reference.strategy}: {reference.final_loss!r}"
            )
    return found


def as_json(outcomes: Sequence[Outcome], config: TrainConfig, placement: Placement) -> dict[str, Any]:
    """Everything that was predicted and measured, as plain values; `placement` is of one machine's ranks."""
    return {
        "ranks": outcomes[0].ranks,
        "steps": config.steps,
        "options": values_of(config),
        "environment": environment(outcomes[0].ranks, placement),
        "strategies": {result.strategy: result.as_json() for result in outcomes},
    }


def environment(world_size: int, placement: Placement) -> dict[str, str]:
    """Return the ranks, the machine and the versions, on which numbers such as step times depend."""
    device = f"{os.cpu_count()} CPU cores" if placement.on_cpu else placement.names()
    return {
        "ranks": f"{world_size}, {placement.backend}",
        "machine": f"{device}, {platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
