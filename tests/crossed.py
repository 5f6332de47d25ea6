"""Random training programs that cross all options of the optimizer and of the wrapper with each other.

A program is drawn from its seed: a value for each option in `OPTIONS`, the operations among them, and from
these a model, data and a few updates. Beside every rank runs an unsharded loop, which adds up the gradients
of all ranks' data by itself. Data are small integers that all ranks together can divide, so sums are exact in
any order and in 16 bits: gradients must be equal, and so must parameters, losses, buffers and state. A sum
that is wrong, or a batch that counts twice, cannot hide in rounding.

Each pair of values of two options that is not in `IMPOSSIBLE` is drawn at least 20 times in 2,000 programs.
Where the package refuses a pair, all ranks must raise the documented error, and the program goes on without.

    python tests/crossed.py --sequences 2000                 # virtual ranks, from seed 0 on
    python tests/crossed.py --sequences 200 --real           # processes over Gloo, with DDP and its hooks too
    python tests/crossed.py --sequences 2000 --pairs FILE    # writes how often each pair of values was drawn

Of each failure it prints the command that repeats it, with as many options as possible at their defaults.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from library.crossed_loop import Passed, draw_block
from library.crossed_options import OPERATIONS, OPTIONS, Trial, pairs_of
from library.crossed_rank import KINDS, UnderDDP

from zero_ref.lab import ranks, virtual

UPDATES = 5
PROCESSES = 4
TIMEOUT = 120.0  # seconds, against hanging; the machine may be busy


@dataclass(frozen=True)
class Part:
    """The part of a trial on one number of ranks: its first update, and the operations before each update."""

    number: int
    size: int
    updates: tuple[tuple[int, tuple[str, ...]], ...]


def parts_of(trial: Trial) -> list[Part]:
    """A move ends one part and begins the next, perhaps on another number of ranks."""
    values, rng = trial.values, trial.random("parts")
    before: dict[int, tuple[str, ...]] = dict.fromkeys(range(UPDATES), ())
    for name in OPERATIONS:
        places = trial.random(f"places {name}").sample(range(UPDATES), k=2)
        for place in places if values[name] else ():
            before[place] += (name,)
    moves = rng.randint(1, UPDATES - 1)
    updates = tuple((number, tuple(rng.sample(names, len(names)))) for number, names in before.items())
    most = PROCESSES // values["replicas"] if trial.real else 4
    first, second = min(values["ranks"], most), rng.randint(1, most)
    if not values["move"]:
        return [Part(0, first, updates)]
    return [Part(0, first, updates[:moves]), Part(1, second, updates[moves:])]


def on_rank(
    group: Any, replicas: Any, rank: int, trial: Trial, part: Part, passed: Passed, folder: Path
) -> Passed:
    """One part of a program, on one rank."""
    doing = "construction"
    try:
        rng = trial.random(f"construction {part.number}")
        me = KINDS.get(trial.values["wrapper"], UnderDDP)(
            trial.values, passed, group, replicas, rank, rng, folder
        )
        for number, operations in part.updates:
            for name in operations:
                doing = f"{name} before update {number}"
                me.zero_grad("none")
                if me.gathers:
                    me.wrapped.wait_for_parameters()
                getattr(me, name)(trial.random(f"{name} {number}"))
                me.check()
            doing = f"update {number}"
            me.update(trial.random(f"update {number}"))
        doing = "the end"
        return me.leave()
    except Exception as error:
        text = f"seed {trial.seed}, {part.size} ranks, {doing}: {type(error).__name__}: {error}"
        raise AssertionError(text) from error


def on_virtual_rank(comm: Any, worlds: Any, first: list[Exception], *args: Any) -> Passed:
    """With `replicas`: ranks of two groups, and of one group for each of their ranks."""
    within, between = worlds
    group, place = divmod(comm.rank, len(between))
    try:
        return on_rank(
            virtual.VirtualCollectives(within[group], place),
            virtual.VirtualCollectives(between[place], group),
            comm.rank,
            *args,
        )
    except Exception as error:
        first.append(error)
        for world in (*within, *between):
            world.barrier.abort()  # the others wait for a rank that will not come
        raise first[0] from None


def on_virtual_ranks(size: int, replicas: int, *args: Any) -> Passed:
    """A part on threads; what rank 0 passes on."""
    if replicas == 1:
        alone = lambda comm: on_rank(comm, None, comm.rank, *args)  # noqa: E731
        return virtual.run(alone, size, timeout=TIMEOUT)[0]
    worlds = [
        [virtual.World(one, TIMEOUT) for _ in range(many)]
        for one, many in ((size, replicas), (replicas, size))
    ]
    return virtual.run(on_virtual_rank, size * replicas, worlds, [], *args, timeout=TIMEOUT)[0]


def on_processes(size: int, replicas: int, members: Sequence[int], *args: Any) -> Passed:
    """A part on these of the processes; each of them calls it, and gets what the first passes on."""
    within = [dist.new_group(list(members[one * size :][:size])) for one in range(replicas)]
    between = [dist.new_group(list(members[place::size])) for place in range(size)]
    given: list[Any] = [None]
    if dist.get_rank() in members:
        rank = members.index(dist.get_rank())
        group, place = divmod(rank, size)
        given = [on_rank(within[group], between[place] if replicas > 1 else None, rank, *args)]
    gc.collect()  # an optimizer that lives holds the directory that it saved to
    dist.broadcast_object_list(given, src=members[0])
    return given[0]  # type: ignore[no-any-return]


def play(trial: Trial, folder: str) -> None:
    """A whole program. Where ranks are processes, each of them calls it."""
    values, rng = trial.values, trial.random("loop")
    blocks = [draw_block(rng, values) for _ in range(2)]
    started = [(params, [True] * len(params), options) for params, options in blocks]
    passed = Passed(started, [torch.zeros(2), torch.tensor(0)])
    replicas, here = values["replicas"], Path(folder, f"{trial.seed}")
    for part in parts_of(trial):
        if trial.real:
            members = sorted(rng.sample(range(PROCESSES), k=part.size * replicas))
            passed = on_processes(part.size, replicas, members, trial, part, passed, here)
        else:
            passed = on_virtual_ranks(part.size, replicas, trial, part, passed, here)


# ------------------------------------------------------------------------------------------ the search


def failure(trial: Trial) -> str | None:
    """Play a trial, and return its error; None if it has none."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            if trial.real:
                ranks.run(play, PROCESSES, trial, folder, timeout=TIMEOUT)
            else:
                play(trial, folder)
        except (RuntimeError, ranks.RankError) as error:
            return str(error)
    return None


def search(trials: Sequence[Trial]) -> Iterator[str]:
    """Play them, and explain each that fails."""
    for trial in trials:
        if failure(trial):
            yield explained(trial)


def explained(trial: Trial) -> str:
    """Return the error of a failing trial, with as many options as possible at their defaults."""
    for name in reversed(OPTIONS):
        simpler = replace(trial, plain=(*trial.plain, name))
        if simpler.values != trial.values and failure(simpler):
            trial = simpler
    needed = {name: value for name, value in trial.values.items() if value != OPTIONS[name][0]}
    return f"{failure(trial)}\n\nIt needs {needed}:\n{trial.command}"


def table(trials: Sequence[Trial]) -> str:
    """Each pair of values, and how often it was drawn, rarest first."""
    counts = sorted(pairs_of(trials).items(), key=lambda one: one[1])
    return "\n".join(f"{count:5} {a}={x} {b}={y}" for ((a, x), (b, y)), count in counts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--real", action="store_true", help="processes over Gloo, with DDP")
    parser.add_argument("--sequences", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first; the next one has the next")
    parser.add_argument("--plain", default="", help="options at their defaults: a,b,c")
    parser.add_argument("--pairs", type=Path, help="a file for the table of pairs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    plain = tuple(filter(None, args.plain.split(",")))
    trials = [Trial(args.seed + i, args.real, plain) for i in range(args.sequences)]
    failed = 0
    for explanation in search(trials):
        failed += 1
        print(explanation, "\n", flush=True)
    counts = pairs_of(trials).values()
    if args.pairs:
        args.pairs.write_text(table(trials) + "\n")
    print(
        f"{len(trials)} programs, {failed} failed; {len(counts)} pairs of values, each drawn "
        f"{min(counts)} to {max(counts)} times, median {statistics.median(counts):.0f}"
    )
    sys.exit(failed > 0)


if __name__ == "__main__":
    from crossed import main as importable  # so that ranks find by name what they are to call

    importable()
