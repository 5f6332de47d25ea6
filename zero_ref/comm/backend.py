"""The choice of a `Collectives` for the `process_group` that a caller passes, by the group's backends."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zero_ref.comm.collectives import Collectives
from zero_ref.comm.pairwise import GlooCollectives, PairwiseCollectives
from zero_ref.comm.process_group import ProcessGroupCollectives
from zero_ref.plan.calls import PAIRWISE_RANKS


def as_collectives(process_group: dist.ProcessGroup | DeviceMesh | Collectives | None) -> Collectives:
    """Give the `Collectives` of a `process_group`.

    Args:
        process_group: a torch group, None for the default one, a DeviceMesh of one dimension, or Collectives.
    Raises:
        TypeError: it is something else, such as options that were passed by position.
    """
    if isinstance(process_group, DeviceMesh):
        process_group = process_group.get_group()  # torch raises if the mesh has several dimensions
    # new_group() returns an int to ranks outside the group; the constructor refuses it.
    if process_group is None or isinstance(process_group, (dist.ProcessGroup, int)):
        return of_group(process_group)
    if not hasattr(process_group, "broadcast"):
        raise TypeError(
            f"process_group takes a process group, Collectives or None, not {process_group!r}. "
            "Options of the optimizer are passed by name, such as lr=0.001."
        )
    return process_group


def of_group(group: dist.ProcessGroup | None) -> ProcessGroupCollectives:
    """Give the `Collectives` of a process group, in the subclass that is fastest with its backends."""
    comm = ProcessGroupCollectives(group)
    # The group may have a backend for each kind of device. Without Gloo, the group's own calls are fastest.
    if "gloo" not in comm.backends.values():
        return comm
    if comm.backends.get("cpu") == "gloo" and comm.world_size <= PAIRWISE_RANKS:
        return PairwiseCollectives(group)
    return GlooCollectives(group)
