"""The main job: train a small GPT on real ranks under a chosen strategy, and measure what it cost.

    zero-ref train --ranks 4 --strategy zero-bucket            # on this machine, ranks started for you
    torchrun --nproc-per-node=8 -m zero_ref.lab.train          # one rank a GPU; --nnodes for more machines

`train` is an ordinary data-parallel training loop: a user's own looks the same. `outcome.predict` says
beforehand what an iteration will send and what each rank will hold.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from zero_ref.lab import meter, own
from zero_ref.lab._arguments import Parser, complain, json_text, unwritable
from zero_ref.lab.checkpoints import NothingLeftError, checkpoints_for
from zero_ref.lab.config import TrainConfig, add_run_arguments, check_memory, config_for, strategies_of
from zero_ref.lab.dry_run import print_prediction
from zero_ref.lab.model import GPT, batch, language_reference
from zero_ref.lab.outcome import Measured, Outcome, as_json, outcome, predict, problems
from zero_ref.lab.placement import Placement, own_device, place_ranks, settle
from zero_ref.lab.ranks import device
from zero_ref.lab.settings import as_toml, settings_of
from zero_ref.lab.simulated import cluster_named
from zero_ref.lab.strategies import trainable
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.calls import Call

EVERY = 20
"""Steps from one line to the next under torchrun: as many lines as a cluster's log file can take."""


class StepDone(NamedTuple):
    """A step of training.

    Args:
        step: the number of steps done, those before a resumed checkpoint included.
        loss: the loss on the passages of rank 0.
    """

    step: int
    loss: float


Progress = Callable[[StepDone], None]
"""Called after each step."""


def train(config: TrainConfig, progress: Progress | None = None) -> Measured:
    """Train on the ranks of the default process group.

    Collective: all ranks, with equal arguments (`progress` is called on rank 0).
    Raises:
        RuntimeError, ValueError: a checkpoint that cannot be read or is of another model, on all ranks alike.
        NothingLeftError: all steps were done before.
    """
    rank, text = dist.get_rank(), language_reference()
    model = GPT(config.model, config.seed).to(device())
    if config.is_own:
        made = own.trainable_own(str(config.own), model, config.learning_rate, config.master_dtype)
    else:
        made = trainable(config.recipe, model, config.learning_rate)
    optimizer = made.optimizer
    checkpoints = checkpoints_for(config, model, optimizer)
    first_step, losses = checkpoints.load()

    calls: list[Call] = []
    step_ms: list[float] = []
    for step in range(first_step, config.steps):
        with made.recording(), meter.timing(step_ms):
            tokens, targets = batch(
                text.training, config.model, config.batch_size, seed=config.seed, step=step, rank=rank
            )
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config, step)
            optimizer.zero_grad()
            loss = made.model(tokens.to(device()), targets.to(device()))
            loss.backward()
            optimizer.step()
        if step in config.recorded_steps:
            calls += made.calls
        made.calls.clear()
        losses.add(loss)
        if progress and rank == 0:
            progress(StepDone(step + 1, loss.item()))
        if config.saves_after(step + 1):
            checkpoints.save(step + 1, losses)
    if isinstance(optimizer, ZeroRedundancyOptimizer) and optimizer.arriving is not None:
        optimizer.arriving.wait()  # nothing more is trained that would
    held = made.held()
    checkpoints.save(config.steps, losses)

    # At stage 3 all ranks compute it together.
    loss_held_out = held_out_loss(model, config) if rank == 0 or config.recipe.stage == 3 else None
    return Measured(calls, held, losses.means(), loss_held_out, step_ms, made.cuts_by_itself)


def learning_rate(config: TrainConfig, step: int) -> float:
    """Rising over the first steps, while AdamW averages only a few gradients, then constant.

    >>> config = TrainConfig(learning_rate=0.5, warmup_steps=2)
    >>> [learning_rate(config, step) for step in range(3)]
    [0.25, 0.5, 0.5]
    """
    return config.learning_rate * min(1.0, (step + 1) / config.warmup_steps)


@torch.no_grad()
def held_out_loss(model: GPT, config: TrainConfig, batches: int = 8) -> float:
    """Mean loss on passages that were not trained on, the same for every strategy."""
    text = language_reference().held_out
    total = 0.0
    for step in range(batches):
        tokens, targets = batch(text, config.model, 16, seed=config.seed, step=step, rank=0)
        total += model(tokens.to(device()), targets.to(device())).item()
    return total / batches


# ------------------------------------------------------------------------------------------ under torchrun


NAME = "torchrun -m zero_ref.lab.train"


def make_parser() -> Parser:
    """The parser of what follows `-m zero_ref.lab.train`."""
    parser = Parser(prog=NAME, description=__doc__.split("\n")[0])
    add_run_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Train on the ranks that torchrun started; rank 0 prints each strategy's outcome as JSON.

    Returns:
        The exit code, as `config.EXIT_CODES` has it.
    Raises:
        SystemExit: the parser printed help, or an error in the arguments (code 2).
    """
    try:
        with _said_once():
            prepared = _prepare(make_parser().parse_args(argv))
        return prepared if isinstance(prepared, int) else _train_as_rank(prepared)
    except KeyboardInterrupt:
        with _said_once():
            print(f"{NAME}: interrupted", file=sys.stderr)
        return 130


@contextlib.contextmanager
def _said_once() -> Iterator[None]:
    """Print what all ranks of a machine would say on its first one alone; on others drop it."""
    with contextlib.ExitStack() as stack:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        yield


class Prepared(NamedTuple):
    """The arguments, configurations and placement that `_prepare` has checked."""

    arguments: argparse.Namespace
    configs: list[TrainConfig]
    placement: Placement


def _prepare(arguments: argparse.Namespace) -> Prepared | int:
    """Check all that can be checked before ranks meet; return an exit code if nothing is to be trained."""
    if "RANK" not in os.environ:
        complain(NAME, "start this with torchrun, or use `zero-ref train --ranks N`, which starts ranks.")
        return 2
    is_first, world_size = os.environ["RANK"] == "0", int(os.environ.get("WORLD_SIZE", "1"))
    try:
        strategies = strategies_of(arguments)
        config = config_for(arguments, strategies, world_size)
        cluster = cluster_named(arguments.cluster)
        # Rank 0 writes. If it cannot, it ends with an error, and torchrun ends the others.
        if is_first and (problem := unwritable(arguments)):
            raise ValueError(problem)
        if arguments.show_config or arguments.dry_run:
            if is_first and arguments.show_config:
                print(as_toml(settings_of(arguments)))
            elif is_first:
                print_prediction(config, strategies, world_size, cluster)
            return 0
        placement = place_ranks(int(os.environ["LOCAL_WORLD_SIZE"]))
        if placement.on_cpu:
            check_memory(config, len(placement.devices))
    except ValueError as error:
        complain(NAME, str(error))
        return 2
    except ModuleNotFoundError as error:
        complain(NAME, f"{error}: pip install 'zero_ref[lab]'")
        return 1
    return Prepared(arguments, [config.under(strategy) for strategy in strategies], placement)


def _train_as_rank(prepared: Prepared) -> int:
    """Meet the other ranks, train under each strategy, print the outcome on rank 0; return the exit code."""
    arguments, configs, placement = prepared
    of_this_rank = placement.devices[int(os.environ["LOCAL_RANK"])]
    settle(of_this_rank, placement.is_default)
    if os.environ["RANK"] == "0":
        print(f"{placement.describe()}", file=sys.stderr, flush=True)
    try:
        dist.init_process_group(placement.backend, device_id=own_device(placement.backend, of_this_rank))
        outcomes = [found for config in configs if (found := _train_under(config))]
    except NothingLeftError as nothing:
        if os.environ["RANK"] == "0":
            print(nothing, file=sys.stderr)
        return 0
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if not outcomes:
        return 0  # rank 0 knows how it went
    if arguments.json:
        text = json_text(as_json(outcomes, configs[0], placement)) + "\n"
        try:
            Path(arguments.json).write_text(text, encoding="utf-8")
        except OSError as error:
            complain(NAME, f"--json {arguments.json} could not be written: {error.strerror or error}.")
            return 1
    wrong = problems(outcomes)
    for problem in wrong:
        print(problem, file=sys.stderr)
    return 1 if wrong else 0


def _train_under(config: TrainConfig) -> Outcome | None:
    """Train, and print the outcome on rank 0, which returns it.

    Collective: all ranks of the default group.
    """
    measured = meter.gather_from_ranks(train(config, print_now_and_then))
    if dist.get_rank() != 0:
        return None
    result = outcome(config, predict(config, dist.get_world_size()), measured)
    print(json_text(result.in_short()), flush=True)
    return result


def print_now_and_then(done: StepDone) -> None:
    """Print a line on standard error for the first step and each twentieth."""
    if done.step == 1 or done.step % EVERY == 0:
        print(f"step {done.step}: training loss {done.loss:.3f}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
