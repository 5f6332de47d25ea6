"""The time of each operation of a schedule on a cluster, if nothing holds it up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

from zero_ref.simulator._checks import check_number
from zero_ref.simulator.cluster import Cluster
from zero_ref.simulator.device import Device
from zero_ref.simulator.kernels import Kernels, Pass
from zero_ref.simulator.offload import Offload
from zero_ref.simulator.operations import HOST, NETWORK, Operation
from zero_ref.simulator.schedule import Schedule


@dataclass(frozen=True)
class Workload:
    """The work of a rank in an iteration, for its own part of the batch.

    Args:
        tokens: in the rank's own part.
        recompute: activations are computed again in backward (checkpointing), which costs another forward.
        step_bytes: bytes that an optimizer step reads and writes for each element that it updates. AdamW
            reads value, gradient and two moments, and writes value and moments, 4 bytes each. A
            mixed-precision step that reads 16-bit gradients and also writes 16-bit parameters comes to 28
            bytes too.
        attention_share: what attention adds to the operations of forward and backward, as a share of them.
        kernels: of forward and backward, in place of the three figures above, on devices whose memory-bound
            kernels are known (`Device.memory_reached`). None for matrix products of the parameters alone.
        moved_bytes: for each element, what forward and backward read and write beside the kernels, to bring
            parameters and gradients to the network and back; on such devices too.
        active_share: of the parameters, those that a token goes through.
        offload: of an update on the CPU, the bytes of each element; None for an update on the device.
    Raises:
        ValueError: a negative number of tokens or bytes.
    """

    tokens: int
    recompute: bool = False
    step_bytes: float = 28.0
    attention_share: float = 0.0
    kernels: Kernels | None = None
    moved_bytes: tuple[float, float] = (0.0, 0.0)
    offload: Offload | None = None
    active_share: float = 1.0

    def __post_init__(self) -> None:
        for name in ("tokens", "step_bytes", "attention_share"):
            check_number(name, getattr(self, name))

    def compute_ms(self, operation: Operation, numel: int, device: Device) -> float:
        """The milliseconds that a device computes on so many elements.

        With kernels it is the part of the whole model's time that so many elements are of all. Else a forward
        takes 2 floating-point operations for each parameter and token, a backward twice that, and another
        forward if activations were not kept. Attention's products over the sequence are added.
        """
        if operation.label in ("step", "offload"):
            return self._step_ms(operation, numel, device)
        if self.kernels is not None and device.memory_reached is not None:
            is_backward = operation.label != "forward"
            whole = _ms_of(self.kernels.backward if is_backward else self.kernels.forward, device)
            of_all = (is_backward and self.kernels.backward_numel) or self.kernels.numel
            return numel / of_all * whole + device.touch_ms(self.moved_bytes[is_backward] * numel)
        passes = 1 if operation.label == "forward" else 3 if self.recompute else 2
        flops = 2.0 * passes * numel * self.active_share * self.tokens * (1 + self.attention_share)
        return device.compute_ms(flops, operation.tensors * passes / 3)

    def _step_ms(self, operation: Operation, numel: int, device: Device) -> float:
        """The milliseconds of an update, of which the CPU may make a part while the device makes the rest."""
        on_host, own = None, numel
        if self.offload is not None:
            on_host = self.offload.ms(operation, numel, device)
            if on_host is not None:
                own = 0 if operation.lane == HOST else round((1 - self.offload.fraction) * numel)
        touched = device.touch_ms(self.step_bytes * own, operation.tensors) if own else 0.0
        flops_ms = device.compute_ms(operation.flops, 0) if operation.flops and on_host is None else 0.0
        return max(touched + flops_ms, on_host or 0.0)


@lru_cache(maxsize=64)
def _ms_of(whole: Pass, device: Device) -> float:
    """Every operation of a schedule asks for the same."""
    return whole.ms(device)


class Price(NamedTuple):
    """Milliseconds of an operation.

    Args:
        ms: on every rank without a share.
        shares: the ranks that have shares of the operation: {rank: elements}.
        ms_of_share: milliseconds by the size of a share, computed once for all ranks with that size.
    """

    ms: float
    shares: Mapping[int, int] = {}
    ms_of_share: Mapping[int, float] = {}

    def on(self, rank: int) -> float:
        """Milliseconds on one rank."""
        return self.ms_of_share[self.shares[rank]] if rank in self.shares else self.ms


def price(
    schedule: Schedule, cluster: Cluster, workload: Workload, known: Sequence[Price] = ()
) -> list[Price]:
    """Return the time of each operation of a schedule, if nothing holds it up.

    >>> from zero_ref.plan.partition import ParamSpec
    >>> from zero_ref.simulator.cluster import cluster
    >>> from zero_ref.simulator.schedule import schedule
    >>> ddp = schedule("ddp", [ParamSpec(10**9, "bfloat16")], world_size=64)
    >>> prices = price(ddp, cluster("h100-ib"), Workload(tokens=4096))
    >>> [(one.label, round(cost.ms, 1)) for one, cost in zip(ddp.operations, prices)]
    [('forward', 12.2), ('backward', 24.4), ('reduce', 11.3), ('step', 9.8)]

    Args:
        known: prices of the same schedule on the same cluster under another workload; calls cost the same.
    """
    prices: list[Price] = []
    previous: Operation | None = None  # on the network
    for one, nbytes_of_calls in schedule.stretches:
        if one.lane == NETWORK and known:
            prices += known[len(prices) : len(prices) + len(nbytes_of_calls)]
        elif one.lane == NETWORK:
            owned = Counter[int]()
            for owner, nbytes in one.shares or () if one.op == "exchange" else ():
                owned[owner] += nbytes
            ms_of = partial(
                cluster.ms, one.op, world_size=schedule.world_size, ranks=one.ranks, stride=one.stride
            )
            follows = previous is not None and (previous.op, previous.after) == (one.op, one.after)
            first, *others = nbytes_of_calls
            prices.append(Price(ms_of(first, shares=[*owned.values()] or None, follows=follows)))
            # Of a million owners' calls most have as many bytes as others: each size is computed once.
            price_of = {nbytes: Price(ms_of(nbytes, follows=True)) for nbytes in set(others)}
            prices += map(price_of.__getitem__, others)
            previous = one
        elif one.shares is None:
            prices.append(Price(workload.compute_ms(one, one.numel, cluster.device)))
        else:
            shares = schedule.computing_shares[len(prices)]
            ms_of_share = {
                numel: workload.compute_ms(one, numel, cluster.device) for numel in set(shares.values())
            }
            prices.append(Price(0.0, shares, ms_of_share))
    return prices
