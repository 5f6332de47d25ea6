"""A process group with NCCL's rules for tensors of the pretend device, carried by Gloo.

    - it takes tensors of the device only, contiguous, of a dtype that NCCL has
    - all ranks make the same calls, in the same order, with the same sizes
    - calls run one after the other on a stream of the group; `wait` holds up a stream, and not the host
    - a send outside of a batch completes when its receive is reached, and until then holds up all later calls
      of that pair of ranks; a batch runs as one

A call that breaks a rule raises on the rank that made it, or on all; NCCL would hang, or give wrong numbers.
Source: NCCL's user guide, and what torch's ProcessGroupNCCL checks.
"""

from __future__ import annotations

import hashlib
import types
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pretend_device as device
import torch
import torch.distributed as dist
from pretend_device import PretendTensor
from torch.utils._pytree import tree_leaves

BACKEND = "pretend_nccl"

DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool}
DTYPES |= {torch.int8, torch.uint8, torch.int32, torch.int64, torch.uint32, torch.uint64}
DTYPES |= {torch.float8_e4m3fn, torch.float8_e5m2}


class Work(dist.Work):
    """A call under way: it keeps its tensors until somebody waits, as ProcessGroupNCCL does."""

    def __init__(self, clock: dict[int, int], result: Any) -> None:
        super().__init__()
        self.clock, self.tensors = clock, result
        self.future = device.Future(devices=[device.DEVICE])
        stream = device.Stream()
        stream.join(clock)
        with device.on_stream(stream):
            self.future.set_result(result)

    def wait(self, timeout: object = None) -> bool:
        device.gpu.current.join(self.clock)
        self.tensors = None
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def get_future(self) -> Any:
        return self.future


class PretendGroup(dist.ProcessGroup):
    """The ranks of a group. Calls on tensors of the CPU go to Gloo if the group has that backend too."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, has_cpu: bool) -> None:
        super().__init__(rank, size)
        self.me, self.ranks, self.has_cpu = rank, size, has_cpu
        limit = min(timeout, timedelta(seconds=LIMIT_S))

        def gloo(name: str) -> Any:
            return dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, limit)

        self.carrier, self.headers = gloo("carrier"), gloo("headers")
        self.on_cpu = gloo("cpu") if has_cpu else None
        self.stream = device.Stream()
        self.number = 0
        self.name = ""

    def getBackendName(self) -> str:
        return BACKEND

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.me

    @property
    def pg_name(self) -> str:
        return self.name

    @property
    def group_name(self) -> str:
        return self.name

    def _set_group_name(self, name: str) -> None:
        self.name = name

    def _set_group_desc(self, name: str) -> None: ...

    def _set_default_backend(self, *args: object) -> None: ...

    def _get_backend(self, device: object) -> Any:
        return types.SimpleNamespace(supports_splitting=False, supports_coalescing=False)

    # --------------------------------------------------------------------------------------------- the rules

    def _check(self, op: str, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            if not isinstance(tensor, PretendTensor):
                raise RuntimeError(f"{op}: no backend for tensors on {tensor.device} in this group")
            if not tensor.is_contiguous():
                raise RuntimeError(f"{op}: tensors must be contiguous, not of strides {tensor.stride()}")
            if tensor.dtype not in DTYPES:
                raise RuntimeError(f"{op}: NCCL has no {tensor.dtype}")

    def _agree(self, op: str, detail: object) -> None:
        """Compare this call with that of the other ranks."""
        self.number += 1
        text = f"call {self.number}: {op} {detail}"
        mine = torch.tensor(list(hashlib.sha256(text.encode()).digest()[:8]), dtype=torch.uint8)
        theirs = [torch.empty_like(mine) for _ in range(self.ranks)]
        self.headers.allgather([theirs], [mine]).wait()
        if any(not torch.equal(other, mine) for other in theirs):
            raise RuntimeError(f"rank {self.me}: other ranks are not at {text}")

    def _launch(
        self,
        op: str,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        carry: Callable[[], object],
        result: Any,
    ) -> Work:
        tensors = [*reads, *writes]
        self._check(op, tensors)
        for tensor in tensors:
            if tensor.after is not None:  # type: ignore[attr-defined]
                device.gpu.current.join(tensor.after)  # type: ignore[attr-defined]
        self.stream.wait_stream(device.gpu.current)
        carry()
        inner = [[tensor.inner for tensor in some] for some in (reads, writes)]  # type: ignore[attr-defined]
        device.gpu.launch(self.stream, op, *inner)
        return Work(dict(self.stream.clock), result)

    # --------------------------------------------------------------------------------------------- the calls

    def _other(self, op: str, args: Any) -> Any:
        """Gloo's method, if the call is on tensors of the CPU and the group has a backend for them."""
        is_mine = any(isinstance(leaf, PretendTensor) for leaf in tree_leaves(args[0]))
        return None if is_mine or self.on_cpu is None else getattr(self.on_cpu, op)(*args)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        if other := self._other("broadcast", (tensors, opts)):
            return other
        (tensor,) = tensors
        reads, writes = ([tensor], []) if opts.rootRank == self.me else ([], [tensor])

        def carry() -> None:
            self._agree("broadcast", (tensor.numel(), tensor.dtype, opts.rootRank))
            options = dist.BroadcastOptions()
            options.rootRank = opts.rootRank
            self.carrier.broadcast([_bytes(tensor)], options).wait()

        return self._launch("broadcast", reads, writes, carry, tensors)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        if other := self._other("allreduce", (tensors,) if opts is None else (tensors, opts)):
            return other
        (tensor,) = tensors

        def carry() -> None:
            self._agree("allreduce", (tensor.numel(), tensor.dtype))
            self.carrier.allreduce([tensor.inner], opts or dist.AllreduceOptions()).wait()

        return self._launch("all_reduce", [], [tensor], carry, tensors)

    def reduce(self, tensors: Any, opts: Any) -> Any:
        if other := self._other("reduce", (tensors, opts)):
            return other
        (tensor,) = tensors
        reads, writes = ([], [tensor]) if opts.rootRank == self.me else ([tensor], [])

        def carry() -> None:
            self._agree("reduce", (tensor.numel(), tensor.dtype, opts.rootRank))
            total = tensor.inner.clone()  # NCCL leaves the tensors of other ranks as they are
            self.carrier.allreduce([total]).wait()
            if writes:
                tensor.inner.copy_(total)

        return self._launch("reduce", reads, writes, carry, tensors)

    def allgather(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        if other := self._other("allgather", (outs, ins)):
            return other
        (into,), (tensor,) = outs, ins

        def carry() -> None:
            self._agree("allgather", (tensor.numel(), tensor.dtype))
            self.carrier.allgather([[_bytes(one) for one in into]], [_bytes(tensor)]).wait()

        return self._launch("all_gather", [tensor], into, carry, outs)

    def all_gather_single(self, out: Any, tensor: Any, opts: Any = None) -> Any:
        def carry() -> None:
            self._agree("allgather_base", (tensor.numel(), tensor.dtype))
            parts = [_bytes(part) for part in out.detach().view(-1).chunk(self.ranks)]
            mine = _bytes(tensor).clone()  # it may lie in its own place
            self.carrier.allgather([parts], [mine]).wait()

        return self._launch("all_gather", [tensor], [out], carry, [out])

    def reduce_scatter_single(self, out: Any, tensor: Any, opts: Any = None) -> Any:
        def carry() -> None:
            self._agree("reduce_scatter", (tensor.numel(), tensor.dtype))
            total = tensor.inner.clone()
            self.carrier.allreduce([total]).wait()
            out.inner.copy_(total.view(-1).chunk(self.ranks)[self.me].view_as(out.inner))

        return self._launch("reduce_scatter", [tensor], [out], carry, [out])

    _allgather_base, _reduce_scatter_base = (
        all_gather_single,
        reduce_scatter_single,
    )  # as torch before 2.13 calls them

    def barrier(self, opts: Any = None) -> Any:
        self._agree("barrier", "")
        return Work(dict(device.gpu.current.clock), [])

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        if other := self._other("send", (tensors, dst, tag)):
            return other
        (tensor,) = tensors
        return self._launch("send", [tensor], [], lambda: self._meet([(tensor, dst)], []), tensors)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        if other := self._other("recv", (tensors, src, tag)):
            return other
        (tensor,) = tensors
        return self._launch("recv", [], [tensor], lambda: self._meet([], [(tensor, src)]), tensors)

    def batch(self, operations: Sequence[dist.P2POp]) -> list[Any]:
        """Start all operations together, as `batch_isend_irecv` does; none waits for another."""
        if not isinstance(operations[0].tensor, PretendTensor):
            return real_batch(operations)
        sends = [(one.tensor, one.group_peer) for one in operations if one.op is dist.isend]
        recvs = [(one.tensor, one.group_peer) for one in operations if one.op is dist.irecv]
        tensors = [tensor for tensor, _ in (*sends, *recvs)]
        sent, received = [tensor for tensor, _ in sends], [tensor for tensor, _ in recvs]
        return [self._launch("batch", sent, received, lambda: self._meet(sends, recvs), tensors)]

    def _meet(self, sends: Sequence[tuple[Any, int]], recvs: Sequence[tuple[Any, int]]) -> None:
        """Send and receive, each until its other end has it. NCCL has no tags: order pairs them."""
        works = [self.carrier.send([_bytes(tensor)], peer, 1) for tensor, peer in sends]
        works += [self.carrier.recv([_bytes(tensor)], peer, 1) for tensor, peer in recvs]
        for work in works:
            work.wait()
        works = [self.carrier.send([torch.ones(1)], peer, 2) for _, peer in recvs]
        works += [self.carrier.recv([torch.ones(1)], peer, 2) for _, peer in sends]
        for work in works:
            work.wait()


LIMIT_S = 120.0
"""Seconds after which a call whose other end does not come is taken for blocked."""


def _bytes(tensor: Any) -> torch.Tensor:
    return tensor.inner.detach().view(-1).view(torch.uint8)


real_batch = dist.batch_isend_irecv


def _batch(operations: list[Any]) -> list[Any]:
    group = operations[0].group or dist.group.WORLD
    return group.batch(operations) if isinstance(group, PretendGroup) else real_batch(operations)


def register() -> None:
    """Register device and backend with torch, once in a process."""
    device.register()
    if BACKEND.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(
        BACKEND,
        lambda store, rank, size, timeout: PretendGroup(store, rank, size, timeout, _mixed[0]),
        devices=[device.NAME],
    )
    dist.batch_isend_irecv = _batch


_mixed = [False]


def new_group(mixed: bool = False, ranks: Sequence[int] | None = None) -> Any:
    """A group of the device. If `mixed`, it has Gloo for tensors of the CPU, as torch's default group may."""
    register()
    _mixed[0] = mixed
    return dist.new_group(
        ranks, backend=f"cpu:gloo,{device.NAME}:{BACKEND}" if mixed else f"{device.NAME}:{BACKEND}"
    )
