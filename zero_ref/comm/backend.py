"""The `Collectives` of what a caller passes as `process_group`, chosen once by the group's backends."""

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
    """
    if isinstance(process_group, DeviceMesh):
        process_group = process_group.get_group()  # of several dimensions torch asks for one of them
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
    """Give the calls of a process group; where it has Gloo, by what is fastest there."""
    comm = ProcessGroupCollectives(group)
    if "gloo" not in comm.backends.values():
        return comm
    if comm.backends.get("cpu") == "gloo" and comm.world_size <= PAIRWISE_RANKS:
        return PairwiseCollectives(group)
    return GlooCollectives(group)
