"""What overlap gains where the network is slow: a loopback that is slowed on purpose. Linux, as root:

    .venv/bin/python -m benchmarks.slow_link --json benchmarks/results/slow_link.json

Two ranks run in a network namespace of their own, so that no other traffic of the machine is slowed. `tc`
limits how much its loopback carries (`--mbit`, all ranks together), and where the kernel has netem it also
delays each packet (`--delay`). In each round both ranks train the book's GPT in three ways: one that
sends nothing, one with `zero.step()` after backward, one with the interleaved hook. What an iteration takes
beyond the one that sends nothing is its exposed communication.

The pieces of a calibration are timed in the same rounds, on the same slow loopback: collectives, and training
of other sizes. From these alone the simulator predicts what is exposed, with and without the hook.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks import machine
from zero_ref import sorted_greedy
from zero_ref.lab import meter, pieces, ranks, step_times
from zero_ref.lab._arguments import json_text
from zero_ref.lab.config import GPTConfig
from zero_ref.lab.model import GPT
from zero_ref.lab.strategies import Trainable, trainable
from zero_ref.simulator.calibrate import Calibration, calibrate
from zero_ref.simulator.cluster import Cluster
from zero_ref.simulator.models import from_module, ready_order
from zero_ref.simulator.play import play
from zero_ref.simulator.recipe import recipe
from zero_ref.simulator.schedule import ddp_buckets, schedule

WORLD_SIZE = 2
MODEL, BATCH, BUCKET_MIB = GPTConfig(), 48, 0.4
PLAIN, OVERLAPPED, ALONE = "plain", "interleaved", "alone"
WAYS = (PLAIN, OVERLAPPED)
ITERATIONS = 12
"""Of each way in a round, of which the median counts. One untimed comes first: other models were trained."""

KIBS = (4, 16, 64, 256, 512, 1024, 2048)
TRAINING = ((4, 96, 16), (4, 96, 48), (2, 160, 16), (2, 160, 48), (4, 160, 32))  # layers, width, batch
PIECES = pieces.Effort(
    tuple(pieces.KIB * size for size in KIBS),
    tuple(pieces.TrainingSize(GPTConfig(layers=layers, width=wide), size) for layers, wide, size in TRAINING),
    rounds=1,
)
"""What the machine is calibrated with: no model among them is the one whose iterations are predicted."""


# --------------------------------------------------------------------------------------------- the slow link


def refusal() -> str:
    """Why no loopback can be slowed on this machine; empty where one can."""
    if sys.platform != "linux":
        return "only Linux has network namespaces and `tc`"
    if os.geteuid() != 0:
        return "only root may make a network namespace and slow its loopback: run it with sudo"
    missing = [name for name in ("tc", "unshare") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install the packages iproute2 and util-linux"
    return ""


def discipline(mbit: float, delay_ms: float) -> str:
    """The queueing discipline, as `tc` takes it.

    The token bucket holds little more than one packet of loopback (64 KiB), so that a small message pays as
    well. Neither queue drops anything.

    >>> discipline(800, 0)
    'tbf rate 800mbit burst 66000 limit 67108864'
    """
    if delay_ms:
        return f"netem delay {delay_ms:g}ms rate {mbit:g}mbit limit 100000"
    return f"tbf rate {mbit:g}mbit burst 66000 limit {64 * pieces.MIB}"


def slow_down(mbit: float, delay_ms: float) -> str:
    """Slow the loopback of this process's own network namespace; returns the discipline.

    Raises:
        SystemExit: this loopback is everyone's, or `tc` refuses.
    """
    meter.raise_loopback()
    if not meter.loopback_is_private():
        raise SystemExit("slow_link: this loopback is the machine's own, and is left alone.")
    how = discipline(mbit, delay_ms)
    command = ["tc", "qdisc", "add", "dev", "lo", "root", *how.split()]
    added = subprocess.run(command, capture_output=True, text=True)
    if added.returncode:
        advice = " A delay needs netem, which this kernel lacks: leave --delay out." if delay_ms else ""
        raise SystemExit(f"slow_link: {' '.join(command)}: {added.stderr.strip()}{advice}")
    return how


# -------------------------------------------------------------------------------------------------- measured


def made(way: str) -> Trainable:
    """The model under a way to train; ALONE sends nothing, and updates what this rank owns."""
    model = GPT(MODEL)
    if way != ALONE:
        return trainable(recipe("zero", way=way), model, bucket_cap_mb=BUCKET_MIB)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=BUCKET_MIB)
    ddp.register_comm_hook(dist.get_world_size(), pieces.send_nothing)
    params = list(model.parameters())
    owners = sorted_greedy([param.numel() for param in params], WORLD_SIZE).owner_of_param
    owned = [param for param, owner in zip(params, owners) if owner == dist.get_rank()]
    return Trainable(ddp, torch.optim.AdamW(owned, lr=1e-3))


Spans = dict[str, list[list[tuple[float, float]]]]
"""Of each way, in each round."""


def take_turns(rounds: int) -> tuple[pieces.Times, Spans]:
    """On a rank: in each round every piece of the calibration, then an iteration of each way."""
    size = pieces.TrainingSize(MODEL, BATCH)
    loops = {way: step_times.Loop(made(way), size) for way in (ALONE, *WAYS)}
    times = pieces.Times([], [])
    for number in range(step_times.FIRST_ITERATIONS + rounds):
        timed = number >= step_times.FIRST_ITERATIONS
        if timed:
            times.collectives.extend(pieces.time_collectives(PIECES.nbytes, 1, step_times.OPS))
            times.works.extend(pieces.time_training(PIECES.training, 1))
        for turn, loop in itertools.product(range(1 + ITERATIONS), loops.values()):
            loop.iterate(number, timed=timed and turn > 0)
    starts = range(0, rounds * ITERATIONS, ITERATIONS)
    return times, {way: [loop.spans[at : at + ITERATIONS] for at in starts] for way, loop in loops.items()}


def together_ms(of_ranks: Sequence[Spans]) -> dict[str, list[list[float]]]:
    """Milliseconds from when the last rank began until the last one was done, for each way and round.

    >>> together_ms([{"plain": [[(1.0, 1.5)]]}, {"plain": [[(1.25, 1.75)]]}])
    {'plain': [[500.0]]}
    """
    return {
        way: [pieces.together_ms(of_round) for of_round in zip(*(of[way] for of in of_ranks))]
        for way in of_ranks[0]
    }


class Exposed(NamedTuple):
    """Exposed communication, in milliseconds, and its ratio without the hook to with it.

    Args:
        plain, interleaved: the medians over rounds; as predicted.
        ratio: of these two; of a measurement the median of the ratios of single rounds, with their quartiles.
    """

    plain: float
    interleaved: float
    ratio: float
    quartiles: tuple[float, float] | None = None


def exposed(ms: Mapping[str, Sequence[Sequence[float]]]) -> Exposed:
    """From what the iterations of each way took in each round, of which the median counts.

    A round in which nothing is left exposed with the hook counts as an infinite ratio; as 0 if the hook was
    the slower way in it.

    >>> exposed({"alone": [[10], [12]], "plain": [[18, 90, 16], [20]], "interleaved": [[14], [16]]})
    Exposed(plain=8.0, interleaved=4.0, ratio=2.0, quartiles=(2.0, 2.0))
    """
    of_round = {way: [statistics.median(some) for some in ms[way]] for way in (ALONE, *WAYS)}
    left = {way: [took - alone for took, alone in zip(of_round[way], of_round[ALONE])] for way in WAYS}
    ratios = sorted(
        a / b if b > 0 else math.inf if a > b else 0.0 for a, b in zip(left[PLAIN], left[OVERLAPPED])
    )
    plain, interleaved = (statistics.median(left[way]) for way in WAYS)
    quarter = len(ratios) // 4
    quartiles = ratios[quarter], ratios[-1 - quarter]
    return Exposed(plain, interleaved, statistics.median(ratios), quartiles)


# ------------------------------------------------------------------------------------------------- predicted


def with_cores_free(calibration: Calibration) -> Cluster:
    """The calibrated machine. On a link this slow a message waits for tokens, and cores compute meanwhile."""
    return replace(calibration.cluster, overlaps=True)


def predicted(cluster: Cluster) -> Exposed:
    """What the simulator says before any iteration is made."""
    model = GPT(MODEL)
    params = from_module(model)
    given = pieces.passages(MODEL, 1, seed=0, step=0, rank=0)
    order = ready_order(model, lambda: model(*given).backward())
    buckets = ddp_buckets(params, order, cap_bytes=int(BUCKET_MIB * pieces.MIB))
    left = []
    for way in WAYS:
        plan = schedule(recipe("zero", way=way), params, WORLD_SIZE, ddp_buckets=buckets)
        played = play(plan, cluster, pieces.workload_of(MODEL, BATCH))
        # Alone, the rank with most to compute decides.
        left.append(min(played.timeline(rank).idle_ms for rank in range(WORLD_SIZE)))
    plain, interleaved = left
    return Exposed(plain, interleaved, plain / interleaved)


# ---------------------------------------------------------------------------------------------- the command


def fits_of(calibration: Calibration) -> list[dict[str, Any]]:
    """What was fitted, and how far its predictions of other sizes are off."""
    return [
        {
            "what": one.what,
            "us_a_call": one.overhead_us,
            "giga_per_s": one.giga_per_s,
            "median_error": calibration.error_bound(one.what, 0.5),
            "worst_error": calibration.error_bound(one.what),
        }
        for one in calibration.fits
    ]


def main() -> None:
    """Measure, predict, print both, and write them if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--mbit", type=float, default=400, help="that all ranks together send in a second, in megabits")
    add("--delay", type=float, default=0, metavar="MS", help="of each packet; needs the kernel's netem")
    add("--rounds", type=int, default=8)
    add("--json", metavar="FILE", help="write everything here, every round")
    options = parser.parse_args()
    if options.mbit <= 0 or options.delay < 0 or options.rounds < 1:
        parser.error("--mbit and --rounds are above 0, --delay is 0 or more")
    if reason := refusal():
        raise SystemExit(f"slow_link: {reason}.")
    if not meter.loopback_is_private():
        words = ["-m", "benchmarks.slow_link", *sys.argv[1:]]
        os.execvp("unshare", ["unshare", "--net", sys.executable, *words])
    how, load = slow_down(options.mbit, options.delay), pieces.load_average()
    print(f"{how}; load average {load}", flush=True)
    try:
        turns = ranks.run(take_turns, WORLD_SIZE, options.rounds, timeout=3000, backend="gloo")
    finally:
        ranks.shutdown()
    ms = together_ms([spans for _, spans in turns])
    calibration = calibrate(*turns[0][0], backend="gloo", source=f"benchmarks/slow_link.py on {how}")
    both = {"predicted": predicted(with_cores_free(calibration)), "measured": exposed(ms)}
    for fit in fits_of(calibration):
        print(", ".join(f"{name} {value:.3g}" if name != "what" else value for name, value in fit.items()))
    print("alone:", ", ".join(f"{statistics.median(some):.0f}" for some in ms[ALONE]), "ms")
    for name, found in both.items():
        quartiles = "" if found.quartiles is None else " ({:.2f}-{:.2f})".format(*found.quartiles)
        print(
            f"{name}: exposed {found.plain:.1f} ms with zero.step(), {found.interleaved:.1f} ms interleaved, "
            f"ratio {found.ratio:.2f}{quartiles}"
        )
    if options.json:
        report = {
            "command": f"benchmarks/slow_link.py --mbit {options.mbit:g} --delay {options.delay:g} "
            f"--rounds {options.rounds}",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": asdict(machine.read_machine()),
            "versions": machine.read_versions(),
            "load_average": [load, pieces.load_average()],
            "discipline": how,
            "ranks": WORLD_SIZE,
            "model": {**asdict(MODEL), "batch": BATCH, "bucket_mib": BUCKET_MIB},
            "fits": fits_of(calibration),
            "exposed_ms": {name: found._asdict() for name, found in both.items()},
            "iteration_ms": {
                way: [[round(each, 3) for each in of] for of in some] for way, some in ms.items()
            },
        }
        Path(options.json).write_text(json_text(report, indent=1) + "\n", encoding="utf-8")
        print(f"written: {options.json}")


if __name__ == "__main__":
    main()
