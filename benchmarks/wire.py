"""Bytes that a training iteration puts on the wire in each way, from the kernel's counters. Linux, as root:

    unshare --net .venv/bin/python -m benchmarks.wire

In a network namespace of its own, loopback carries nothing but the ranks' traffic. What is counted is a
whole iteration, backward and step, of all ranks together: payload, TCP/IP headers, acknowledgements and the
barriers around it. The model is large, so that these last are nothing beside it, and nothing is subtracted.
"""

from __future__ import annotations

import statistics

import torch
import torch.distributed as dist
from torch import nn

from zero_ref.lab import meter, ranks
from zero_ref.lab.strategies import trainable
from zero_ref.local_sgd.averaging import AveragingSchedule
from zero_ref.simulator.recipe import Recipe, recipe

WIDTH, DEPTH, BUCKET_MIB = 1024, 8, 4  # Ψ is 8.4 million parameters, 33.6 MB, in buckets of a layer each
PERIOD = 4

# The bytes predicted are those of all ranks, in (N-1)Ψ: 2 for an all-reduce, 1 for a reduction to owners, 1
# for broadcasts, 1 for an all-gather, 2 for a reduce-scatter, which Gloo makes by an all-reduce.
WAYS: dict[str, tuple[int, Recipe]] = {
    "ddp, plain optimizer": (2, recipe("ddp")),
    "all-reduce, broadcast of parameters": (3, recipe("zero")),
    "all-reduce, broadcast of buckets": (3, recipe("zero-bucket")),
    "all-reduce, broadcast of even shards": (3, recipe("zero-even")),
    "all-reduce, overlapped": (3, recipe("zero", way="after_backward")),
    "all-reduce, interleaved": (3, recipe("zero", way="interleaved")),
    "to owners, broadcast of parameters": (2, recipe("zero", to_owners=True)),
    "to owners, broadcast of even shards": (2, recipe("zero-even", to_owners=True)),
    "to owners, overlapped": (2, recipe("zero", to_owners=True, way="after_backward")),
    "to owners, interleaved": (2, recipe("zero", to_owners=True, way="interleaved")),
    "to owners, interleaved, even": (2, recipe("zero-even", to_owners=True, way="interleaved")),
    "shares reduced, shares gathered": (2, recipe("zero-2")),
    "shares gathered in forward": (2, recipe("zero-2", way="in_forward")),
    "stage 3, fully_shard": (4, recipe("zero-3")),
    # Of a whole period of iterations.
    "local SGD, a period of 4": (2, recipe("local-sgd", averaging=AveragingSchedule.periodic(PERIOD))),
}


class Layers(nn.Module):
    """Layers that stage 3 shards one by one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """What the layers make of the inputs."""
        made: torch.Tensor = self.blocks(inputs)
        return made


def bytes_of_an_iteration(way: Recipe, iterations: int = 8) -> tuple[float, int]:
    """Median over iterations, or periods, of what all ranks sent together, and bytes of the parameters."""
    model = Layers()
    nbytes = sum(param.nbytes for param in model.parameters())
    made = trainable(way, model, bucket_cap_mb=BUCKET_MIB)
    sent = []
    for _ in range(iterations):
        inputs = torch.randn(2, WIDTH)
        dist.barrier()
        before = meter.wire_bytes() or 0
        dist.barrier()
        for _ in range(1 if way.averaging is None else PERIOD):
            made.optimizer.zero_grad()
            made.model(inputs).square().mean().backward()
            made.optimizer.step()
        dist.barrier()
        sent.append((meter.wire_bytes() or 0) - before)
        dist.barrier()
    return statistics.median(sent[2:]), nbytes  # DDP has rebuilt its buckets


def main() -> None:
    """One line for each number of ranks and way: bytes, in (N-1)Ψ, and how far from the prediction."""
    meter.raise_loopback()
    print(f"{'ranks':>5}  {'way':<36} {'bytes':>13} {'(N-1)Ψ':>8} {'predicted':>9} {'deviation':>9}")
    for world_size in (2, 4):
        for name, (predicted, way) in WAYS.items():
            sent, nbytes = ranks.run(bytes_of_an_iteration, world_size, way)[0]
            share = sent / ((world_size - 1) * nbytes)
            off = 100 * (share / predicted - 1)
            print(f"{world_size:>5}  {name:<36} {sent:>13,.0f} {share:>8.4f} {predicted:>9} {off:>8.2f}%")


if __name__ == "__main__":
    main()
