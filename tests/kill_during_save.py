"""Kill a rank somewhere in a sharded save, again and again: is there still a checkpoint, and is it right?

    python tests/kill_during_save.py [--kills 20] [--ranks 4] [--seed 0]

In each round the ranks, under the partition `even`, load the newest checkpoint, make one update and save;
every second time in the background, with an update meanwhile. One of them, drawn at random, gets SIGKILL,
between the start of the save and a quarter more than the time that a rank needs for its own part. Then one
rank fewer, under `sorted_greedy`, load. What they find must equal the unsharded run bit for bit, state and
parameters, after as many updates as the checkpoint says: as many as before the round, or one more if the save
was complete. No rank may be left waiting; how long after the kill the last one has its error is measured.

Linux; some 4 s for each kill. Its last lines on 2 busy cores, with torch 2.13 and Gloo, and 76 MB to save:

    the killed saves left: {'2 of 4 tables': 2, '3 of 4 tables': 8, 'complete': 2, 'nothing': 8}
    the others had their errors within 0.26 s
    20 kills, 0 checkpoints lost
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from zero_ref import ZeroRedundancyOptimizer
from zero_ref.files.saves import TABLE
from zero_ref.files.sharded import load_sharded, save_sharded, save_sharded_async
from zero_ref.lab import ranks

TIMEOUT = 240.0
"""The seconds of a call; a collective gives up after 80% of them. A guard: no call comes near it."""
# A pool ends the others soon after the first has failed; here they are to end by themselves.
ranks.GRACE_SECONDS = TIMEOUT


def make_model() -> nn.Module:
    """6.3 million parameters: with their state 76 MB, in matrices that `even` cuts."""
    model = nn.Sequential(*(nn.Linear(1449, 1449) for _ in range(3)))
    generator = torch.Generator().manual_seed(0)
    for param in model.parameters():
        param.data.normal_(generator=generator)
    return model


def update(model: nn.Module, optimizer: torch.optim.Optimizer, iteration: int) -> None:
    """One step on gradients that depend on nothing but the iteration."""
    generator = torch.Generator().manual_seed(iteration)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator)
    optimizer.step()


def digest(model: nn.Module, state: Mapping[int, Mapping[str, torch.Tensor]]) -> str:
    """Return a digest of every bit of parameters and state."""
    hashed = hashlib.sha256()
    of_params = [value for _, of_param in sorted(state.items()) for _, value in sorted(of_param.items())]
    for tensor in [*model.parameters(), *of_params]:
        hashed.update(tensor.detach().numpy())
    return hashed.hexdigest()


def unsharded_digests() -> Iterator[str]:
    """The digest after each number of updates of the plain optimizer, from none on."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    for updates in itertools.count():
        yield digest(model, optimizer.state_dict()["state"])
        update(model, optimizer, updates)


# ------------------------------------------------------------------------------------------- on the ranks


def train_and_save(directory: Path, in_background: bool, victim: int = -1, delay: float = 0.0) -> float:
    """Make one update more than the checkpoint has, and save. How many seconds this rank's own part took."""
    torch.set_num_threads(1)
    model = make_model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, partition="even")
    iteration = load_sharded(optimizer, directory)["iteration"] if any(directory.glob("save-*")) else 0
    update(model, optimizer, iteration)

    notes = {"iteration": iteration + 1}
    began = time.time()
    if optimizer.rank == victim:
        (directory / "killed").write_text(f"{began + delay}")
        killer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL))
        killer.start()
    try:
        if in_background:
            pending = save_sharded_async(optimizer, directory, notes=notes)
            update(model, optimizer, iteration + 1)
            pending.wait()
        else:
            save_sharded(optimizer, directory, notes=notes)
    except RuntimeError:
        (directory / f"error-{optimizer.rank}").write_text(f"{time.time()}")
        os._exit(1)  # as a program does that nothing is left for: whoever waits for this rank learns of it
    if optimizer.rank == victim:
        killer.join()  # too late for this save, but it has to come
    table = max(directory.glob(f"save-*/shard-{optimizer.rank}-of-{optimizer.world_size}.json"))
    return table.stat().st_ctime - began  # when it got its name


def load(directory: Path) -> tuple[int, str | None]:
    """Load the newest checkpoint; return its number of updates and, on rank 0, the digest of its values."""
    torch.set_num_threads(1)
    model = make_model()
    for param in model.parameters():
        param.data.zero_()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, partition="sorted_greedy")
    iteration: int = load_sharded(optimizer, directory)["iteration"]
    optimizer.consolidate_state_dict(to=0)
    return iteration, digest(model, optimizer.state_dict()["state"]) if optimizer.rank == 0 else None


# -------------------------------------------------------------------------------------------- around them


def progress_of(folder: Path, world_size: int) -> str:
    """Return the progress of a save, from the files in its folder."""
    names = os.listdir(folder) if folder.exists() else []
    tables = sum(TABLE.fullmatch(name) is not None for name in names)
    if tables == world_size:
        return "complete"
    return f"{tables} of {world_size} tables" if names else "nothing"


class Round(NamedTuple):
    """The result of one killed save."""

    progress: str
    seconds: float
    """From the kill to the last error on another rank; 0 where all others had their save."""
    hung: list[str]


def kill_once(directory: Path, world_size: int, in_background: bool, victim: int, delay: float) -> Round:
    """Start new ranks, let them save, kill one."""
    for old in [*directory.glob("error-*"), *directory.glob("killed")]:
        old.unlink()
    numbers = [int(path.name.removeprefix("save-")) for path in directory.glob("save-*")]  # complete or not
    folder = directory / f"save-{max(numbers, default=0) + 1:08d}"
    try:
        with ranks.Pool(world_size, backend="gloo") as pool:
            pool.run(train_and_save, directory, in_background, victim, delay, timeout=TIMEOUT)
        raise AssertionError("nobody was killed")
    except ranks.RankError as error:
        ends = [error.summary, *error.others.values()]
        if sum("SIGKILL" in end for end in ends) != 1:
            raise
    killed = float((directory / "killed").read_text())
    errors = [float(path.read_text()) - killed for path in directory.glob("error-*")]
    hung = [end for end in ends if "still running" in end]
    return Round(progress_of(folder, world_size), max(errors, default=0.0), hung)


def run(kills: int, world_size: int, seed: int) -> int:
    """Print a line for each kill; the number of checkpoints lost."""
    draw = random.Random(seed)
    unsharded = unsharded_digests()
    on_ranks = partial(ranks.run, backend="gloo", timeout=TIMEOUT)
    lost, waits, progress = 0, [0.0], Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        own_part = []
        for in_background in (False, True):
            took = [on_ranks(train_and_save, world_size, directory, in_background) for _ in range(3)]
            own_part.append(statistics.median(itertools.chain(*took)))
        print(f"{world_size} ranks; a rank writes its part in {1e3 * own_part[False]:.0f} ms", end=", ")
        print(f"in the background in {1e3 * own_part[True]:.0f} ms")
        done = 6
        digests = [*itertools.islice(unsharded, done + 1)]
        for kill in range(1, kills + 1):
            in_background = kill % 2 == 0
            victim, delay = draw.randrange(world_size), draw.uniform(0, 1.25 * own_part[in_background])
            round_ = kill_once(directory, world_size, in_background, victim, delay)
            found, loaded = on_ranks(load, world_size - 1, directory)[0]
            expected = done + (round_.progress == "complete")
            digests += itertools.islice(unsharded, expected + 1 - len(digests))
            right = found == expected and loaded == digests[found] and not round_.hung
            lost += not right
            waits.append(round_.seconds)
            progress[round_.progress] += 1
            when = f"at {1e3 * delay:.0f} ms{' (background)' if in_background else ''}"
            which = "the new one" if found > done else "the one before"
            verdict = "equal" if right else f"WRONG: {found} updates, hung: {round_.hung}"
            print(f"{kill:>3}: rank {victim} {when:<22} left {round_.progress:<14}", end=" ")
            print(f"loaded {which:<15} {verdict}", flush=True)
            done = found
        ranks.shutdown()
    print(f"the killed saves left: {dict(sorted(progress.items()))}")
    print(f"the others had their errors within {max(waits):.2f} s")
    print(f"{kills} kills, {lost} checkpoints lost")
    return lost


def main() -> int:
    """Exit code 0 where no checkpoint was lost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name, default in (("--kills", 20), ("--ranks", 4), ("--seed", 0)):
        parser.add_argument(name, type=int, default=default)
    options = parser.parse_args()
    if options.ranks < 2:
        parser.error("--ranks takes 2 or more: one is killed")
    return min(1, run(options.kills, options.ranks, options.seed))


if __name__ == "__main__":
    sys.exit(main())
