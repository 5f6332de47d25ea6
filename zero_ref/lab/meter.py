"""Measurements of a training: calls made, bytes on the wire, bytes held, seconds.

Each function measures one thing at its source, so that it can be compared with a prediction: `recording`
sees the calls as the optimizer and DDP make them, `recording_distributed` those of anyone, `sent_bytes` and
`wire_bytes` read the kernel's counters, `held_bytes` counts tensors.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zero_ref.comm import devices
from zero_ref.comm.collectives import Collectives
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.calls import CHECK, Call


class HeldBytes(NamedTuple):
    """Bytes of tensors that a rank keeps between steps."""

    parameters: int
    gradients: int
    optimizer_state: int


@contextlib.contextmanager
def recording(collectives: Collectives, *, checks: bool = False) -> Iterator[list[Call]]:
    """A list that fills with the calls made through `collectives` while the context lasts.

    The checks that steps 1, 2, 4, 8 and so on make are left out unless asked for: what is recorded is an
    ordinary step, as the simulator foresees it.

    >>> with recording(optimizer.collectives) as calls:     # doctest: +SKIP
    ...     optimizer.step()
    """
    calls: list[Call] = []

    def note(call: Call) -> None:
        if checks or call.op != CHECK:
            calls.append(call)

    collectives.observers.append(note)
    try:
        yield calls
    finally:
        collectives.observers.remove(note)


def recording_all_reduce(
    calls: list[Call], dtype: torch.dtype | None = None
) -> Callable[[Any, Any], torch.futures.Future[torch.Tensor]]:
    """A DDP communication hook that all-reduces as DDP does by itself, and notes each bucket in `calls`.

    With a dtype it sends each bucket in that, as torch's `fp16_compress_hook` and `bf16_compress_hook` do.

    DDP issues its all-reduces from C++, out of sight of Python; a hook is asked before each one. Its state is
    the process group, None for the default one.

    >>> ddp.register_comm_hook(None, recording_all_reduce(calls))        # doctest: +SKIP
    """

    # DDP refuses annotations other than its own classes, and typing knows no name for those.
    def all_reduce(group, bucket):  # type: ignore[no-untyped-def]
        flat: torch.Tensor = bucket.buffer()
        sent = flat if dtype is None else flat.to(dtype)
        calls.append(Call("all_reduce", sent.nbytes))
        sent.mul_(1 / dist.get_world_size(group))  # as DDP does; dividing by 3 rounds otherwise
        future: torch.futures.Future[list[torch.Tensor]] = dist.all_reduce(
            sent, group=group, async_op=True
        ).get_future()
        if sent is flat:
            return future.then(lambda reduced: reduced.value()[0])
        return future.then(lambda reduced: flat.copy_(reduced.value()[0]))

    return all_reduce


class DDPRecorder:
    """Records the gradient all-reduces of a DistributedDataParallel model, in `calls`."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.calls: list[Call] = []
        ddp.register_comm_hook(ddp.process_group, recording_all_reduce(self.calls))


# What is replaced while `recording_distributed` looks, and the op of each. torch 2.13 gave two ops new names.
_OP_OF_FUNCTION = {
    "all_gather": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
}


_ALSO = ("broadcast", "reduce", "gather", "scatter", "send", "isend")
"""Further calls that a reader's own optimizer may make."""


@contextlib.contextmanager
def recording_distributed(*, also: bool = False) -> Iterator[list[Call]]:
    """A list that fills with what this process asks of torch.distributed while the context lasts.

    It sees all-reduces, all-gathers and reduce-scatters, whoever makes them by their Python names:
    `fully_shard`, the averagers of local SGD, a hook of DDP, this package's own `Collectives`. It does not
    see what C++ issues by itself, such as DDP's all-reduces without a hook, nor DTensor's own collectives,
    such as the one of `clip_grad_norm_`. `also` adds broadcasts, reduces, gathers, scatters and sends.

    A call's bytes are those of its larger tensor, padding included: what `all_gather_into_tensor` gives, what
    a reduce-scatter takes. A plain `all_gather` gives a list; its bytes are those of the tensor passed in.

    >>> with recording_distributed() as calls:                              # doctest: +SKIP
    ...     model(x).sum().backward()       # sharded by fully_shard
    >>> calls[0]                                                            # doctest: +SKIP
    Call(op='all_gather', nbytes=432, peer=None)
    """
    calls: list[Call] = []

    def recorded(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            given = (*args, *kwargs.values())
            tensors = (value for value in given if isinstance(value, torch.Tensor))
            calls.append(Call(op, max((tensor.nbytes for tensor in tensors), default=0)))
            return function(*args, **kwargs)

        return call

    # All look the functions up in torch.distributed at each call, so that is where they are replaced.
    ops = _OP_OF_FUNCTION | ({name: name for name in _ALSO} if also else {})
    originals = {name: getattr(dist, name) for name in ops if hasattr(dist, name)}
    for name, function in originals.items():
        setattr(dist, name, recorded(ops[name], function))
    try:
        yield calls
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)


def held_bytes(params: Iterable[torch.Tensor], optimizer: Optimizer) -> HeldBytes:
    """Bytes that this rank holds in parameters, gradients and optimizer state.

    Parameters count by the memory they keep, so padding of flat tensors counts, and memory that several
    share counts once. For a ZeroRedundancyOptimizer the state is that of this rank's shard.
    """
    params = list(params)
    gradients = [p.grad for p in params if p.grad is not None]
    if isinstance(optimizer, ZeroRedundancyOptimizer):  # slices of parameters have their own
        gradients += [grad for own in optimizer.shard.owned if (grad := own.leaf.grad) is not None]
    return HeldBytes(memory_of(params), memory_of(gradients), state_bytes(optimizer))


def memory_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the memory that tensors keep, once where several share it."""
    dense = [part for t in tensors for part in ((t._indices(), t._values()) if t.is_sparse else (t,))]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in dense}.values())


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of all tensors in an optimizer's state on this rank, step counters and master copies included."""
    owned = optimizer.shard.owned if isinstance(optimizer, ZeroRedundancyOptimizer) else []
    return sum(own.local.nbytes for own in owned if own.is_copy) + sum(
        value.nbytes
        for of_param in optimizer.state.values()
        for value in of_param.values()
        if isinstance(value, torch.Tensor)
    )


@contextlib.contextmanager
def timing(into_ms: list[float]) -> Iterator[None]:
    """Append the milliseconds that the context lasts, work queued on the GPU included.

    >>> step_ms = []
    >>> with timing(step_ms):
    ...     _ = sum(range(1000))
    >>> len(step_ms), step_ms[0] > 0
    (1, True)
    """
    devices.synchronize()
    started = time.perf_counter()
    yield
    devices.synchronize()
    into_ms.append(1e3 * (time.perf_counter() - started))


def sent_bytes() -> int | None:
    """Bytes that this process has sent on the TCP connections that it has open, from the kernel's counters.

    What programs write, without the headers of packets and without what was sent a second time. Other
    processes do not count, so ranks can be told apart, and the machine may do other things meanwhile. Closed
    connections do not count either: take it before and after, on connections that are there and stay. Bytes
    that travel otherwise, as NCCL's do through NVLink or shared memory, are in no such counter.

    >>> before = sent_bytes()                                               # doctest: +SKIP
    >>> dist.all_reduce(tensor)                                             # doctest: +SKIP
    >>> sent_bytes() - before                                               # doctest: +SKIP
    4194428

    Returns:
        None where the kernel shows no such counters: macOS, Windows, Linux before 4.19.
    Source: tcpi_bytes_sent and tcpi_bytes_retrans of getsockopt(TCP_INFO), see linux/tcp.h.
    """
    if sys.platform != "linux":
        return None
    total, seen = 0, set[str]()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed since it was listed, or no TCP connection
            name = os.readlink(f"/proc/self/fd/{fd}")
            if not name.startswith("socket:") or name in seen:  # several descriptors may be one connection
                continue
            seen.add(name)
            # On a copy of the descriptor; whatever is not TCP has no such option, and raises.
            with socket.fromfd(int(fd), socket.AF_INET, socket.SOCK_STREAM) as connection:
                counters = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            if len(counters) < _TCP_INFO_BYTES:
                return None  # an older kernel tells less
            sent, again = struct.unpack_from("=QQ", counters, _TCP_INFO_BYTES - 16)
            total += sent - again
    return total


_TCP_INFO_BYTES = 216
"""struct tcp_info up to tcpi_bytes_retrans, which follows tcpi_bytes_sent."""


def bytes_sent_by(collective: Callable[[], object], group: dist.ProcessGroup | None = None) -> int | None:
    """Bytes that this rank sends while all ranks make a call, once it has been made before.

    The first call opens connections; the second is the one that counts. Barriers around it make sure that
    nothing else is under way, and are in the count: some hundred bytes.

    >>> ranks.run(lambda: bytes_sent_by(lambda: dist.all_reduce(torch.ones(10**6))), 2)     # doctest: +SKIP
    [4000124, 4000124]

    Args:
        collective: makes the call and waits for it. It is called twice.
    Returns:
        None where `sent_bytes` is.
    Collective: all ranks of the group, in the same order as their other calls.
    """
    collective()
    dist.barrier(group)
    before = sent_bytes()
    collective()
    dist.barrier(group)  # what is on its way has then arrived everywhere
    after = sent_bytes()
    dist.barrier(group)  # nobody goes on while another still counts
    return None if before is None or after is None else after - before


def wire_bytes(interface: str = "lo") -> int | None:
    """Bytes that this machine has sent on a network interface, from the kernel's counters.

    Counts every process's traffic: take it before and after, with nothing else running, or in a private
    network namespace (`unshare -n`). Includes headers: within 1% of the payload for large messages.
    `sent_bytes` needs neither, and sees TCP only.

    Returns:
        None where the kernel shows no such counters (macOS, Windows).
    """
    return _sent_by_interface().get(interface)


def _sent_by_interface() -> dict[str, int]:
    # Not /sys/class/net: it goes on showing the machine's interfaces inside a private network namespace.
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
        parted = [line.partition(":") for line in lines]
        # After eight columns on what was received.
        return {name.strip(): int(counters.split()[8]) for name, _, counters in parted}
    return {}


def raise_loopback() -> bool:
    """Switch loopback on if it is off, as it is in a new network namespace (`unshare -n`). Linux, as root.

    Returns:
        Whether it was off.
    Raises:
        PermissionError: it is off, and this process may not switch it on.
    """
    if sys.platform != "linux":
        return False
    import fcntl  # there is none on Windows

    with socket.socket() as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        (flags,) = struct.unpack_from("16xh", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request))
        if flags & _IFF_UP:
            return False
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP | _IFF_RUNNING))
    return True


_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914
_IFF_UP, _IFF_RUNNING = 0x1, 0x40


def loopback_is_private() -> bool:
    """Whether there is no other network interface: the sign of a network namespace of one's own.

    Loopback then carries only what was started in there, so `wire_bytes` tells what ranks send, headers
    included. False where the system does not say.
    """
    return list(_sent_by_interface()) == ["lo"]


def gather_from_ranks(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """A small Python value of every rank, in rank order. Collective: all ranks. Not for use within a step."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered
