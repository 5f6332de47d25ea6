"""The main job goes on when a rank is lost, with the ranks that are left, and later with all of them again.

Both ways of starting ranks do it by what `save_sharded` promises: a killed rank leaves the newest complete
save intact, and a save loads at any number of ranks.

- Under torchrun, torch's elastic agents start the ranks again; `as_elastic_rank` ends a rank whose peer is
  gone, so that its agent need not wait for a time-out. Each round begins with `train`, which finds the newest
  save.
- On one machine `run` does the same on `lab.ranks`, which sees a killed rank at once and knows its number.
  Those left go on from the newest save. At the next one a new rank takes the lost one's place, so nothing is
  repeated for it.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from zero_ref.comm.agreement import RanksLostError
from zero_ref.lab import ranks
from zero_ref.lab._failure import Failure
from zero_ref.lab._rank_error import RankError
from zero_ref.lab.checkpoints import newest_step, stretches
from zero_ref.lab.config import TrainConfig
from zero_ref.lab.patience import patience

T = TypeVar("T")

LOST_SECONDS = 300.0
"""In an elastic run, a collective that takes longer has lost a rank: no step or save of this job does."""

RUNS_FROM_ONE_SAVE = 3
"""So often ranks may be lost between the same two saves of one machine. More have a cause that would stay."""


# ------------------------------------------------------------------------------------------- on one machine


def run(
    fn: Callable[..., T],
    world_size: int,
    config: TrainConfig,
    *args: object,
    say: Callable[[str], object],
    timeout: float = 3600.0,
) -> list[T]:
    """Call `fn(config, *args)`, which is `train`, on ranks of this machine; go on when some are killed.

    Args:
        world_size: the number of ranks, as long as none is lost.
        say: shows a line for each change of their number.
        timeout: seconds between two changes of their number.
    Returns:
        What the last ranks returned, in rank order; of `config.steps` steps, whoever trained them.
    Raises:
        RankError: a rank raised, or all were lost, or `RUNS_FROM_ONE_SAVE` times some from the same save.
    """
    world = world_size
    config = replace(config, checkpoint_every=config.save_every)  # whatever number of steps is the next goal
    began_at: list[int] = []
    say(what_begins(config, world))
    while True:
        step = newest_step(str(config.checkpoint_dir))
        goal = config.steps if world == world_size else _next_save(config, step)
        try:
            values = ranks.run(fn, world, replace(config, steps=goal), *args, timeout=timeout)
        except RankError as error:
            lost = killed(error)
            began_at.append(step)
            if not lost or len(lost) == world or began_at.count(step) == RUNS_FROM_ONE_SAVE:
                raise
            world -= len(lost)
            who = "rank" if len(lost) == 1 else "ranks"
            say(f"{who} {' and '.join(map(str, lost))} lost: {what_begins(config, world)}")
            continue
        if goal == config.steps:
            return values
        ranks.shutdown()  # those of the smaller number: nobody would use them
        world = world_size
        say(what_begins(config, world))


def killed(error: RankError) -> list[int]:
    """The ranks whose processes were ended by a signal, in order."""
    ends = {error.rank: error.summary, **error.others}
    return sorted(rank for rank, end in ends.items() if end.startswith("was killed by signal"))


def _next_save(config: TrainConfig, step: int) -> int:
    """The next number of steps with a save, at least two steps away; that of all steps if there is none."""
    return next((after for after in range(step + 2, config.steps) if config.saves_after(after)), config.steps)


def what_begins(config: TrainConfig, world_size: int) -> str:
    """One line on what ranks that start now will do."""
    directory = str(config.checkpoint_dir)
    step, ran = newest_step(directory), stretches(directory)
    who = "1 rank" if world_size == 1 else f"{world_size} ranks"
    if not ran and not step:
        return f"{who}, a save after every {config.save_every} steps in {directory}"
    before, reached = (ran[-1].ranks, ran[-1].until) if ran else (world_size, step)
    repeated = f"; {reached - step} steps, to step {reached}, are repeated" if reached > step else ""
    return f"{who} go on from step {step}, {before} before{repeated}".replace("1 rank go", "1 rank goes")


# ------------------------------------------------------------------------------------------- under torchrun


def complaint(config: TrainConfig) -> str | None:
    """Why torchrun's ranks cannot begin; None if they can."""
    if config.elastic and os.environ.get("TORCHELASTIC_RUN_ID", "none") == "none":
        return (
            "--elastic needs torchrun's --rdzv-id, any name for this job: by it a rank that is started again "
            "knows what its predecessor left in --checkpoint-dir."
        )
    return None


def time_out(config: TrainConfig) -> timedelta | None:
    """Of a collective, for `init_process_group`; None for torch's own."""
    return timedelta(seconds=LOST_SECONDS * patience()) if config.elastic else None


@contextlib.contextmanager
def as_elastic_rank(config: TrainConfig) -> Iterator[None]:
    """End this process where a peer is gone, with one line: its agent starts it again, with those left.

    Any other error is raised, as is every error of a run that is not elastic.
    """
    try:
        yield
    except RuntimeError as error:
        failure = Failure.of_exception(error, skip_file=__file__)
        gone = isinstance(error, (RanksLostError, dist.DistBackendError)) or failure.is_consequence
        if not (config.elastic and (gone or "Timed out" in failure.summary)):
            raise
        # Gloo begins with its own source file and line, and ends with an explanation.
        reason = re.sub(r"\[/[^\]]*\] | This is typically.*", "", failure.summary.split("\n")[0])
        print(
            f"rank {os.environ['RANK']} stops, as another is gone: {reason[:160]}",
            file=sys.stderr,
            flush=True,
        )
        # At once: to leave the process group in order would mean to wait for the rank that is gone.
        os._exit(1)
