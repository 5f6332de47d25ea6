"""Kill ranks of the main job while it trains, and let it go on by itself with those left, and with all again.

    python tests/lost_ranks.py --kills 10                      # four torchrun agents, one rank each
    python tests/lost_ranks.py --kills 10 --way zero-ref       # zero-ref train --ranks 4

Each time four ranks train, one is killed (SIGKILL) at a random step: under torchrun with its agent, as when a
node is lost. The other three have to go on from the newest save, and four when the rank is back: under
torchrun once its agent is started again, in `zero-ref train` from the next save on. At the end the job is
stopped, and started again to its end.

Then the same steps are trained by hand, from the first on: one call of `train` for each number of ranks in
turn, from save to save. The losses of all steps and every byte of the last save must be equal, and each step
counts once.

Linux; `benchmarks/NOTES.md` has its tables. "s on" is the time from the kill to the first step of three
ranks, and from then, when the new agent is started, to the next one of all four.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from zero_ref.files.saves import saves_in
from zero_ref.files.shard_files import read_tables
from zero_ref.lab import ranks
from zero_ref.lab.checkpoints import STEPS, Stretch, counted, newest_step, repeated_steps, stretches
from zero_ref.lab.config import GPTConfig, TrainConfig
from zero_ref.lab.patience import patience
from zero_ref.lab.train import train

ROOT = Path(__file__).resolve().parent.parent
EVERY = 20
ENDLESS = 10**6
CONFIG = TrainConfig("zero-even", batch_size=2, model=GPTConfig(1, 2, 16, 16))
WORDS = f"--strategy zero-even --batch-size 2 --layers 1 --heads 2 --width 16 --context 16 --elastic \
--checkpoint-every {EVERY}".split()
TIMEOUT = 300.0
"""For whatever is waited for, in seconds. A guard: nothing comes near it."""


def until(happened: Callable[[], bool], what: str) -> None:
    """Return when it has happened."""
    deadline = time.monotonic() + TIMEOUT * patience()
    while not happened():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} has not happened")
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    """The processes that a process has started and that are there."""
    with contextlib.suppress(OSError):
        return [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    return []


def kill(pid: int) -> None:
    """End a process, if it is there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class Progress:
    """The newest line of `steps.jsonl`, which is read as it grows."""

    def __init__(self, directory: Path) -> None:
        self.path, self.offset = directory / STEPS, 0
        self.ranks = self.step = 0

    def read(self) -> None:
        """Read the whole lines that are new."""
        with contextlib.suppress(FileNotFoundError), open(self.path, "rb") as file:
            file.seek(self.offset)
            whole = file.read().rpartition(b"\n")[0]
            if whole:
                self.offset += len(whole) + 1
                last = json.loads(whole.splitlines()[-1])
                self.step, self.ranks = last["step"], last["ranks"]

    def on(self, number: int, beyond: int = 0) -> bool:
        """Whether so many ranks train, and have come beyond that step."""
        self.read()
        return self.ranks == number and self.step > beyond


# ------------------------------------------------------------------------------------------ the job, two ways


class Job:
    """The main job on four ranks, saving into `directory`."""

    command: list[str]

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder, self.directory, self.ranks = folder, folder / "run", ranks
        self.environ = {**os.environ, "PYTHONPATH": str(ROOT), "ZERO_REF_DEVICE": "cpu"}
        self.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self.processes: dict[int, subprocess.Popen[str]] = {}

    def open(self, number: int, steps: int) -> None:
        """Start one of the job's processes."""
        words = ["--steps", str(steps), "--checkpoint-dir", str(self.directory), *WORDS]
        with open(self.folder / f"said-{number}", "a") as said:
            self.processes[number] = subprocess.Popen(
                [*self.command, *words], stdout=said, stderr=said, env=self.environ, cwd=ROOT, text=True
            )

    def said(self) -> str:
        """Return the text that the processes printed."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("said-*")))

    def start(self, steps: int) -> None:
        """Start all ranks."""
        raise NotImplementedError

    def lose_one(self, draw: random.Random) -> str:
        """Kill a rank; which one."""
        raise NotImplementedError

    def bring_back(self) -> None:
        """Let the rank come back, if it does not by itself."""

    def finish(self) -> list[int]:
        """Wait until the job ends; the exit codes."""
        return [process.wait(TIMEOUT * patience()) for process in self.processes.values()]

    def close(self) -> None:
        """Interrupt what still runs, and wait for it."""
        for process in self.processes.values():
            process.send_signal(signal.SIGINT)
        try:
            self.finish()
        finally:
            for process in self.processes.values():
                process.kill()


class UnderTorchrun(Job):
    """Four agents of torchrun with a rank each, as four nodes would have them.

    The rendezvous is kept by this process, since any of the nodes may be lost.
    """

    def __init__(self, folder: Path, ranks: int) -> None:
        super().__init__(folder, ranks)
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self.lost = 0
        self.runs = 0

    def start(self, steps: int) -> None:
        self.runs += 1
        self.steps = steps
        self.command = [
            *(
                sys.executable,
                "-m",
                "torch.distributed.run",
                f"--nnodes=1:{self.ranks}",
                "--nproc-per-node=1",
            ),
            *("--max-restarts=100", f"--rdzv-id=lost-{self.runs}", "--rdzv-backend=c10d"),
            *(f"--rdzv-endpoint=127.0.0.1:{self.store.port}", "--local-addr=127.0.0.1"),
            "--rdzv-conf=last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=5",
            *("-m", "zero_ref.lab.train"),
        ]
        for number in range(self.ranks):
            self.open(number, steps)

    def lose_one(self, draw: random.Random) -> str:
        self.lost = draw.randrange(self.ranks)
        agent = self.processes[self.lost]
        for pid in [agent.pid, *children(agent.pid)]:
            kill(pid)
        agent.wait()
        return f"node {self.lost}"

    def bring_back(self) -> None:
        self.open(self.lost, self.steps)


class OnOneMachine(Job):
    """`zero-ref train`: its ranks are the grandchildren of the command, forked by a server."""

    def start(self, steps: int) -> None:
        self.command = [sys.executable, "-m", "zero_ref.cli", "train", "--ranks", str(self.ranks)]
        self.open(0, steps)

    def lose_one(self, draw: random.Random) -> str:
        forked = [rank for server in children(self.processes[0].pid) for rank in children(server)]
        victim = draw.choice(sorted(forked))
        kill(victim)
        return f"pid {victim}"


WAYS: dict[str, type[Job]] = {"torchrun": UnderTorchrun, "zero-ref": OnOneMachine}


@contextlib.contextmanager
def open_job(way: str, folder: Path, ranks: int) -> Iterator[Job]:
    """A job that is ended, whatever happens."""
    job = WAYS[way](folder, ranks)
    try:
        yield job
    except BaseException:
        print(job.said(), file=sys.stderr)
        raise
    finally:
        job.close()


# ------------------------------------------------------------------------------------------ kill, and compare


def kill_once(job: Job, progress: Progress, draw: random.Random) -> str:
    """Lose a rank at a random step; wait until the others go on, and all of them. A line on it."""
    all_, fewer = job.ranks, job.ranks - 1
    goal = progress.step + draw.randrange(5, 100)
    until(lambda: progress.on(all_, goal), f"step {goal} on {all_} ranks")
    time.sleep(draw.uniform(0, 0.02))
    victim, began = job.lose_one(draw), time.monotonic()
    progress.read()
    reached = progress.step
    until(lambda: progress.on(fewer), f"training on {fewer} ranks")
    went_on = time.monotonic() - began
    job.bring_back()
    back = time.monotonic()
    until(lambda: progress.on(all_), f"training on {all_} ranks again")
    again = time.monotonic() - back
    ran = stretches(job.directory)
    of_fewer, of_all = [[one for one in ran if one.ranks == number][-1] for number in (fewer, all_)]
    lost = max(one.until for one in ran[: ran.index(of_fewer)] if one.done <= of_fewer.done)
    return (
        f"{victim:<10} {max(reached, lost):>6} {of_fewer.done:>6} {max(reached, lost) - of_fewer.done:>9} "
        f"{went_on:>7.1f} {of_all.done:>8} {of_fewer.until - of_all.done:>9} {again:>7.1f}"
    )


def by_hand(folder: Path, ran: list[Stretch]) -> tuple[list[float], list[bytes]]:
    """The losses and the last save of a run that is started by hand for each number of ranks in turn."""
    config = replace(CONFIG, checkpoint_dir=str(folder / "by-hand"), checkpoint_every=EVERY)
    for stretch in ran:
        until_there = replace(config, steps=stretch.until, resume=stretch.done > 0)
        ranks.run(train, stretch.ranks, until_there, backend="gloo", timeout=3600)
    ranks.shutdown()
    return saved_in(folder / "by-hand")


def saved_in(directory: Path) -> tuple[list[float], list[bytes]]:
    """The losses of the newest save, and what its ranks wrote."""
    newest = saves_in(directory)[-1]
    losses = read_tables(newest)[0]["contents"]["notes"]["losses"]
    return losses, [path.read_bytes() for path in sorted(newest.path.glob("*.bin"))]


def run(way: str, kills: int, world_size: int, seed: int, folder: Path) -> bool:
    """Print a line for each kill, and what the comparison gave; whether all is equal."""
    draw = random.Random(seed)
    print(f"{way}, {world_size} ranks, a save every {EVERY} steps, seed {seed}")
    print("     killed     at step   save  repeated    s on  all from  repeated    s on")
    with open_job(way, folder, world_size) as job:
        progress = Progress(job.directory)
        job.start(ENDLESS)
        for number in range(1, kills + 1):
            print(f"{number:>3}: {kill_once(job, progress, draw)}", flush=True)
        job.close()
        steps = newest_step(job.directory) + 2 * EVERY
        job.start(steps)
        codes = job.finish()
        ran = stretches(job.directory)
        once = counted(ran)
        losses, written = saved_in(job.directory)
        print(f"stopped, and started again to step {steps}: exit codes {codes}")
    print(f"{repeated_steps(ran)} steps were repeated; {len(losses)} count, of {steps}")
    same_losses, same_bytes = (a == b for a, b in zip((losses, written), by_hand(folder, once), strict=True))
    print(f"as by hand: losses {'equal' if same_losses else 'WRONG'}", end=", ")
    print(f"last save {'equal' if same_bytes else 'WRONG'}")
    joined = all(a.until == b.done for a, b in itertools.pairwise(once))
    return same_losses and same_bytes and joined and len(losses) == steps and not any(codes)


def main() -> int:
    """Exit code 0 where the job went on each time, and all is as by hand."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name, default in (("--kills", 10), ("--ranks", 4), ("--seed", 0)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--way", choices=list(WAYS), default="torchrun")
    options = parser.parse_args()
    if options.ranks < 2:
        parser.error("--ranks takes 2 or more: one is killed")
    with tempfile.TemporaryDirectory() as folder:
        return int(not run(options.way, options.kills, options.ranks, options.seed, Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
