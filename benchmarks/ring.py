"""What an iteration without DDP costs a rank, as ranks grow: shares sent between pairs, and around a ring.

    .venv/bin/python -m benchmarks.ring --ranks 2 4 8 16

A small GPT under `ShardedDataParallel` on equal shares, on Gloo. In both ways a rank sends N-1 messages for
each bucket. Between pairs all of them are under way at once, around a ring one is. CPU time is that of a
rank's process: the median of the rounds, the mean over ranks.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from functools import partial

import torch
import torch.distributed as dist
from torch.optim import AdamW

from benchmarks.comparisons import exponent
from zero_ref import ShardedDataParallel, ZeroRedundancyOptimizer, equal_shares
from zero_ref.comm.pairwise import GlooCollectives, PairwiseCollectives
from zero_ref.lab import meter, ranks
from zero_ref.lab.config import GPTConfig
from zero_ref.lab.model import GPT, batch, language_reference

SIZE = GPTConfig(layers=2, heads=2, width=64, context=32)
WAYS = {"pairs": PairwiseCollectives, "ring": GlooCollectives}


def iteration_cpu_ms(way: str, rounds: int) -> tuple[float, float]:
    """CPU milliseconds of an iteration, the mean over ranks, and the bytes that this rank sends in one."""
    torch.set_num_threads(1)
    model = GPT(SIZE)
    zero = ZeroRedundancyOptimizer(
        model.parameters(),
        AdamW,
        process_group=WAYS[way](),
        parameters_as_bucket_view=True,
        partition=partial(equal_shares, range_numel=2**14),
    )
    sharded = ShardedDataParallel(model, zero)
    text, rank = language_reference().training, dist.get_rank()

    def iterate(step: int) -> None:
        tokens, targets = batch(text, SIZE, 1, seed=0, step=step, rank=rank)
        zero.zero_grad()
        sharded(tokens, targets).backward()
        zero.step()

    for step in range(4):  # those in which ranks compare their options
        iterate(step)
    sent = meter.bytes_sent_by(lambda: iterate(4))
    times = []
    for step in range(9, 9 + rounds):  # up to step 15 no comparison
        began = time.process_time()
        iterate(step)
        times.append(1e3 * (time.process_time() - began))
    mine = statistics.median(times)
    return statistics.mean(meter.gather_from_ranks(mine)), float(sent or math.nan)


def main() -> None:
    """Print a row for each number of ranks, and how CPU time grows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    print("| ranks |", " | ".join(f"{way}: CPU ms a rank, MB sent" for way in WAYS), "|")
    for world_size in arguments.ranks:
        row = []
        for way in WAYS:
            cpu_ms, sent = ranks.run(
                iteration_cpu_ms, world_size, way, arguments.rounds, backend="gloo", timeout=900
            )[0]
            found[way].append(cpu_ms)
            row.append(f"{cpu_ms:.1f}, {sent / 1e6:.2f}")
        ranks.shutdown()
        print(f"| {world_size} |", " | ".join(row), "|", flush=True)
    for way, times in found.items():
        print(f"{way}: exponent of CPU time against ranks {exponent(arguments.ranks, times):.2f}")


if __name__ == "__main__":
    main()
