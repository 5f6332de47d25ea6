"""The calls of `Collectives` on a torch.distributed process group, each as one call of the group's backend.

`stairs/owners.py` calls `dist.broadcast`. Here observers see every call before it is made, and the error of a
call that fails says which rank was to do what. NCCL needs only this module. `pairwise.py` adds faster calls
for Gloo on CPUs, and `backend.py` chooses between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from zero_ref.comm.collectives import Alarm, AllOf, Collectives, Observable, PendingCall, Then, ToPeer
from zero_ref.comm.devices import CPU, current_device
from zero_ref.plan.calls import Call

TAG = 2**20
"""The tag of this package's messages between two ranks. A user's own have the tag 0, torch's default."""

BACKWARD_TAG = 360_360
"""A number added to the tag of messages in backward, so that none is taken for a message of a step."""


class ProcessGroupCollectives(Observable):
    """Collectives on a torch.distributed process group of any backend.

    A group may have a backend for each kind of device: Gloo for the CPU, NCCL for GPUs. For a group with
    Gloo, `as_collectives` makes a subclass that is faster.

    Args:
        group: the process group; None is the default group of `init_process_group`.
    Attributes:
        backends: by kind of device, the name of its backend.
        tag: the tag of messages between two ranks.
    Raises:
        RuntimeError: torch.distributed has not been initialised.
        ValueError: this process is not a member of `group`.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        if not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialised in this process. Start it with torchrun and call "
                "torch.distributed.init_process_group(), or use zero_ref.lab.ranks.run()."
            )
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError(
                f"global rank {dist.get_rank()} is not a member of the process group that it passed in. "
                "Build the optimizer only on the group's ranks."
            )
        self.backends = dict(pair.split(":") for pair in str(dist.get_backend_config(group)).split(","))
        # Prefer the CPU, where the host reads a message without waiting for a GPU.
        self.control_device = CPU if "cpu" in self.backends else current_device()
        self.tag = TAG

    def wire_of(self, device: torch.device) -> torch.device:
        return device if device.type in self.backends else self.control_device

    def goes_pairwise(self, device: torch.device) -> bool:
        return False

    def prefers_reduce(self, device: torch.device) -> bool:
        return True

    def open_channel(self, number: int, devices: Collection[torch.device]) -> Alarm | None:
        # With one tag for all, ranks that step two optimizers in different orders would receive parameters of
        # one into the other. With a tag for each optimizer they wait until the group's time-out.
        self.tag = TAG + number
        return None

    # ---------------------------------------------------------------------------------- collective calls

    def broadcast(self, tensor: torch.Tensor, src: int, expected: PendingCall | None = None) -> PendingCall:
        self.tell("broadcast", tensor, src)
        what = f"broadcast from rank {src}"
        return self.start(what, dist.broadcast, _raw(tensor), group_src=src, async_op=True)

    def all_reduce(self, tensor: torch.Tensor) -> PendingCall:
        self.tell("all_reduce", tensor)
        return self.start("all_reduce", dist.all_reduce, tensor, async_op=True)

    def reduce(self, tensor: torch.Tensor, dst: int) -> PendingCall:
        self.tell("reduce", tensor, dst)
        what = f"reduce to rank {dst}"
        wire = self.wire_of(tensor.device)
        if tensor.device.type == wire.type:
            return self.start(what, dist.reduce, tensor, group_dst=dst, async_op=True)
        # No backend takes tensors of this device: reduce a copy on a device that one takes, and copy back.
        staged = tensor.to(wire)
        call = self.start(what, dist.reduce, staged, group_dst=dst, async_op=True)
        return Then(call, lambda: tensor.copy_(staged)) if dst == self.rank else call

    def all_gather(self, tensor: torch.Tensor, op: str = "all_gather") -> list[torch.Tensor]:
        self.tell(op, tensor)
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        self.start("all_gather", dist.all_gather, gathered, tensor, async_op=True).wait()
        return gathered

    def gather_shares(self, flat: torch.Tensor, expected: Sequence[PendingCall | None] = ()) -> PendingCall:
        self.tell("all_gather", flat)
        wire = self.wire_of(flat.device)
        if flat.device.type == wire.type:
            return self.gather_on_wire(flat, expected)
        # No backend takes tensors of this device: gather a copy on a device that one takes, and copy back.
        staged = flat.to(wire)
        return Then(self.gather_on_wire(staged), lambda: flat.copy_(staged))

    def gather_on_wire(self, flat: torch.Tensor, expected: Sequence[PendingCall | None] = ()) -> PendingCall:
        """Start the all-gather of `gather_shares`; `flat` is on a device that the backend takes."""
        mine = flat.detach().chunk(self.world_size)[self.rank]
        return self.start("all_gather", _all_gather, _raw(flat), _raw(mine), async_op=True)

    def reduce_shares(self, flat: torch.Tensor, share: torch.Tensor) -> PendingCall:
        self.tell("reduce_shares", flat)
        wire = self.wire_of(flat.device)
        if flat.device.type == wire.type:
            return self.reduce_on_wire(flat, share)
        staged, sent = share.to(wire), flat.to(wire)
        return Then(self.reduce_on_wire(sent, staged), lambda: share.copy_(staged))

    def reduce_on_wire(self, flat: torch.Tensor, share: torch.Tensor) -> PendingCall:
        """Start the reduce-scatter of `reduce_shares`; the tensors are on a device that the backend takes."""
        return self.start("reduce_scatter", _reduce_scatter, share, flat, async_op=True)

    # ------------------------------------------------------------------------- messages between two ranks

    def send(self, tensor: torch.Tensor, dst: int) -> PendingCall:
        self.tell("send", tensor, dst)
        return self.message_to(dst, tensor)

    def recv(self, tensor: torch.Tensor, src: int) -> PendingCall:
        self.tell("recv", tensor, src)
        return self.message_from(src, tensor)

    def exchange(
        self, sends: Sequence[ToPeer], recvs: Sequence[ToPeer], told: Call | None = None
    ) -> PendingCall:
        if self.observers:
            self.tell_exchange(sends, recvs, told)
        return self.exchange_on_wire(sends, recvs)

    def exchange_on_wire(self, sends: Sequence[ToPeer], recvs: Sequence[ToPeer]) -> PendingCall:
        """Start the messages of an `exchange`; the tensors are on devices that the backend takes."""
        if not sends and not recvs:
            return AllOf([])
        peers = sorted({peer for peer, _ in (*sends, *recvs)})
        return self.start(f"exchange with ranks {peers}", _batch, sends, recvs, tag=self.tag)

    def message_to(self, dst: int, tensor: torch.Tensor, what: str = "send") -> PendingCall:
        """Start to send `tensor` to `dst`; `what` names the call in an error."""
        return self.start(f"{what} to rank {dst}", dist.isend, _raw(tensor), group_dst=dst, tag=self.tag)

    def message_from(self, src: int, tensor: torch.Tensor, what: str = "receive") -> PendingCall:
        """Start to receive the next message of `src` into `tensor`; `what` names the call in an error."""
        return self.start(f"{what} from rank {src}", dist.irecv, _raw(tensor), group_src=src, tag=self.tag)

    def start(self, what: str, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> PendingCall:
        """Start an operation of torch.distributed on the group; `what` names it in an error."""
        name = f"rank {self.rank} of {self.world_size}: {what}"
        try:
            return _NamedCall(name, operation(*args, group=self.group, **kwargs))
        except RuntimeError as error:
            raise _not_completed(name, error) from error


@dataclass(eq=False)
class _NamedCall:
    """A torch `Work` whose error says which rank was to do what."""

    name: str
    work: Any

    def wait(self) -> object:
        try:
            return self.work.wait()
        except RuntimeError as error:
            raise _not_completed(self.name, error) from error


def _not_completed(name: str, error: RuntimeError) -> RuntimeError:
    return RuntimeError(
        f"{name} did not complete: {error}\nAnother rank has stopped, or makes other calls. "
        "Look for the first error among the ranks; if there is none, for a call that only some of "
        "them make, such as one inside `if rank == 0:`."
    )


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as bytes: Gloo does not broadcast every dtype (not int16, bool or float8)."""
    return tensor.detach().view(-1).view(torch.uint8) if tensor.is_contiguous() else tensor


# Newer versions of torch warn if the older names are used.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _batch(sends: Sequence[ToPeer], recvs: Sequence[ToPeer], *, group: Any, tag: int) -> PendingCall:
    # Launch all together: on NCCL, a send by itself completes only when its peer receives, so two ranks that
    # send to each other would wait forever.
    ops = [
        *(dist.P2POp(dist.isend, _raw(tensor), None, group, tag, dst) for dst, tensor in sends),
        *(dist.P2POp(dist.irecv, _raw(tensor), None, group, tag, src) for src, tensor in recvs),
    ]
    return AllOf(dist.batch_isend_irecv(ops))


def global_ranks(comm: Collectives) -> list[int]:
    """List the global rank of each rank; without a process group, these are the ranks themselves."""
    if isinstance(comm, ProcessGroupCollectives):
        return dist.get_process_group_ranks(comm.group)
    return list(range(comm.world_size))
