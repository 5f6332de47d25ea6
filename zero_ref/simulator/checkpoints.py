"""The cost of saving and loading a checkpoint: the most memory, of the device and of the host, and time.

A checkpoint holds the parameters and the optimizer's state. How many bytes a rank needs at once depends on
the way: `SAVES` and `LOADS` name them. The figures of the ways that this package has are those that ranks
need: tests/state/test_checkpoint_memory.py counts their tensors. Not counted are a few bytes with which ranks
agree, and what a new optimizer takes before it loads to compare its masters with the parameters: 9 bytes for
each element of the largest part that it owns, one part after another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zero_ref.simulator._checks import check_name
from zero_ref.simulator.cluster import Cluster
from zero_ref.simulator.ledger import nbytes_of
from zero_ref.simulator.saved import Saved

SAVES = {
    "consolidated": "rank 0 gathers all state in its host's memory, and writes one file",
    "sharded": "each rank writes what it owns, tensor by tensor",
    "sharded, in the background": "each rank copies what it owns into its host's memory; training goes on",
}
"""Ways to save: `consolidate_state_dict`, `save_sharded` and `save_sharded_async`."""

LOADS = {
    "whole": "each rank reads the one file into its host's memory, and copies its part",
    "whole, without a copy": "the same, but what a rank owns whole stays where it was read",
    "whole, mapped": "the same, but the file is mapped, as by torch.load(mmap=True)",
    "broadcast": "rank 0 reads the one file, and sends every tensor to all ranks",
    "sharded": "each rank reads what it will own, and owners send the parameters to the others",
    "in place": "each rank makes its state on the device first, and reads into it",
    "rebuilt": "as in place, but the optimizer makes its state again beside what was read",
}
"""Ways to load: `load_state_dict`, with `copy=False`, of a mapped file; torch's `broadcast_from_rank0`;
`load_sharded`; torch.distributed.checkpoint; and that with an optimizer that does not keep what it is given.
"""


@dataclass(frozen=True)
class Passage:
    """The cost of one way to save or to load. Lists have an entry for each rank.

    Args:
        way: a name in SAVES or LOADS.
        device_bytes: at the peak, beside parameters and gradients: after a load the state that stays is in
            it, while saving the state that is there is not. 0 where the device is the host's processor.
        host_bytes: at the peak, in the host's memory. What the system keeps of files is not counted.
        disk_bytes: written to the storage or read from it. Of a file that all ranks of a node read whole,
            the first reads it, and the others find it in the node's memory.
        received_bytes: from other ranks.
        ms: milliseconds, by what they are spent on: "storage", "network" and "host link", one after the
            other. None where the cluster's rate is not known.
    """

    way: str
    device_bytes: tuple[int, ...]
    host_bytes: tuple[int, ...]
    disk_bytes: tuple[int, ...]
    received_bytes: tuple[int, ...]
    ms: Mapping[str, float | None]

    @property
    def total_ms(self) -> float | None:
        """All parts of the time; None if one is not known."""
        known = [ms for ms in self.ms.values() if ms is not None]
        return sum(known) if len(known) == len(self.ms) else None

    def host_bytes_of_node(self, ranks_per_node: int) -> int:
        """The most that the ranks of one node hold together."""
        return max(_by_node(self.host_bytes, ranks_per_node))


def save(way: str, saved: Saved, cluster: Cluster) -> Passage:
    """Return the cost of a way to save.

    >>> from zero_ref.plan.rules import even
    >>> from zero_ref.simulator.cluster import cluster
    >>> from zero_ref.simulator.ledger import state_rule
    >>> from zero_ref.simulator.models import MODELS, specs
    >>> params = tuple(specs(MODELS["llama3-8b"].shapes(), "bfloat16"))
    >>> owned = even([param.numel for param in params], 64)
    >>> saved = Saved(params, owned, state_rule("AdamW").with_master())
    >>> for way in SAVES:
    ...     passage = save(way, saved, cluster("h100-ib"))
    ...     print(f"{way:27} {max(passage.host_bytes) / 1e9:5.1f} GB {passage.total_ms / 1e3:5.1f} s")
    consolidated                 97.4 GB  15.3 s
    sharded                       0.5 GB   1.4 s
    sharded, in the background    1.8 GB   1.4 s

    Args:
        way: a name in SAVES.
        saved: what is saved, and by whom.
    Raises:
        ValueError: the way is unknown.
    """
    check_name("way to save", way, SAVES)
    one_memory, ranks, owned = _has_one_memory(cluster), range(saved.ranks), _owned(saved)
    if way == "consolidated":
        staging = _staging(saved, one_memory)
        # torch.save brings one tensor of the model after another to the host.
        of_model = 0 if one_memory or not saved.parameters else max(map(nbytes_of, saved.params), default=0)
        needs = _Needs(
            device=[0 if one_memory else here for here in staging],
            host=[
                (staging[r] if one_memory else 0) + (0 if r else saved.state_bytes + of_model) for r in ranks
            ],
            disk=[0 if r else saved.file_bytes for r in ranks],
            received=[0 if r else saved.state_bytes - saved.own_state_bytes[0] for r in ranks],
            network_ms=_gathering_ms(saved, cluster),
            crossing=saved.file_bytes,
        )
    else:
        largest = [0 if one_memory else one.largest for one in saved.of_rank]
        at_once = owned if "background" in way else largest
        needs = _Needs([0] * saved.ranks, at_once, owned, [0] * saved.ranks, 0.0, max(owned))
    return needs.passage(way, cluster)


def load(way: str, saved: Saved, cluster: Cluster) -> Passage:
    """Return the cost of a way to load on ranks that have no state yet.

    How many ranks have saved does not matter.

    >>> from zero_ref.plan.partition import ParamSpec
    >>> from zero_ref.plan.rules import even
    >>> from zero_ref.simulator.cluster import cluster
    >>> from zero_ref.simulator.ledger import state_rule
    >>> saved = Saved((ParamSpec(2**30, "bfloat16"),), even([2**30], 8), state_rule("AdamW").with_master())
    >>> for way in ("whole", "sharded", "rebuilt"):
    ...     passage = load(way, saved, cluster("h100-ib"))
    ...     node = passage.host_bytes_of_node(8)
    ...     print(f"{way:8} {max(passage.device_bytes) / 2**30:.2f} GiB, a host {node / 2**30:.2f} GiB")
    whole    1.50 GiB, a host 124.00 GiB
    sharded  3.50 GiB, a host 14.00 GiB
    rebuilt  3.00 GiB, a host 4.00 GiB

    Args:
        way: a name in LOADS.
        saved: what is loaded, with the partition of the ranks that load it.
    Raises:
        ValueError: the way is unknown.
    """
    check_name("way to load", way, LOADS)
    ranks, state = range(saved.ranks), saved.own_state_bytes
    parts = [_parts_of_load(way, saved, rank) for rank in ranks]
    host = [part.read + part.copied for part in parts]
    device = [own + part.beside for own, part in zip(state, parts)]
    if _has_one_memory(cluster):
        # In some ways the state is among what was read or copied. In the others it comes to that.
        counted = way.startswith("whole") or way == "sharded"
        host = [here + there - (own if counted else 0) for here, there, own in zip(host, device, state)]
        device = [0] * saved.ranks
    all_parameters = saved.parameter_bytes
    if way == "broadcast":
        disk = [0 if rank else saved.file_bytes for rank in ranks]
        received = [saved.file_bytes if rank else 0 for rank in ranks]
        network_ms, crossing = cluster.ms("broadcast", saved.file_bytes, saved.ranks), saved.file_bytes
    elif way.startswith("whole"):
        disk = [0 if rank % cluster.ranks_per_node else saved.file_bytes for rank in ranks]
        received, network_ms, crossing = [0] * saved.ranks, 0.0, max(state) + all_parameters
    else:
        disk = _owned(saved)
        received = [all_parameters - own for own in saved.own_parameter_bytes]
        network_ms, crossing = cluster.ms("all_gather", all_parameters, saved.ranks), max(disk)
    return _Needs(device, host, disk, received, network_ms, crossing).passage(way, cluster)


class _Parts(NamedTuple):
    """Bytes of a rank: read into the host, copied there, and on the device beside the state."""

    read: int
    copied: int = 0
    beside: int = 0


def _parts_of_load(way: str, saved: Saved, rank: int) -> _Parts:
    own = saved.own_state_bytes[rank]
    match way:
        case "whole":
            return _Parts(saved.file_bytes, copied=own)
        case "whole, without a copy":
            return _Parts(saved.file_bytes, copied=saved.of_rank[rank].copied)
        case "whole, mapped":
            return _Parts(0, copied=own)
        case "broadcast":
            return _Parts(0 if rank else saved.file_bytes, beside=saved.largest_whole_bytes)
        case "sharded":
            # New parameters are kept apart until all ranks have theirs. So are the old ones that a rank owns.
            return _Parts(own + saved.own_parameter_bytes[rank], beside=saved.parameter_bytes)
        case "in place":
            return _Parts(saved.of_rank[rank].largest)
        case _:
            return _Parts(saved.of_rank[rank].largest, beside=own)


class _Needs(NamedTuple):
    """Bytes by rank as in a Passage; the time of the network; what crosses one rank's link to its host."""

    device: Sequence[int]
    host: Sequence[int]
    disk: Sequence[int]
    received: Sequence[int]
    network_ms: float
    crossing: int

    def passage(self, way: str, cluster: Cluster) -> Passage:
        of_node = max(_by_node(self.disk, cluster.ranks_per_node))
        host_link = None if _has_one_memory(cluster) else cluster.device.host_link_gb_per_s
        ms = {
            "storage": None if cluster.disk_gb_per_s is None else of_node / cluster.disk_gb_per_s / 1e6,
            "network": self.network_ms,
            "host link": 0.0 if _has_one_memory(cluster) else host_link and self.crossing / host_link / 1e6,
        }
        return Passage(
            way,
            device_bytes=tuple(self.device),
            host_bytes=tuple(self.host),
            disk_bytes=tuple(self.disk),
            received_bytes=tuple(self.received),
            ms=ms,
        )


def _has_one_memory(cluster: Cluster) -> bool:
    """The device is the host's processor."""
    return cluster.device.memory_gb is None


def _owned(saved: Saved) -> list[int]:
    """Bytes that each rank writes of a sharded checkpoint, and reads."""
    return [own + state for own, state in zip(saved.own_parameter_bytes, saved.own_state_bytes)]


def _by_node(of_rank: Sequence[int], ranks_per_node: int) -> list[int]:
    return [sum(of_rank[rank : rank + ranks_per_node]) for rank in range(0, len(of_rank), ranks_per_node)]


def _staging(saved: Saved, one_memory: bool) -> list[int]:
    """Bytes of the buffer for messages that are copied, on each rank, where rank 0 gathers the state.

    Small tensors are joined. From an accelerator rank 0 receives large ones through the buffer too.
    """
    joined = [one.joined for one in saved.of_rank[1:]]
    received = joined if one_memory else [one.parcel for one in saved.of_rank[1:]]
    return [max(received, default=0), *joined]


def _gathering_ms(saved: Saved, cluster: Cluster) -> float:
    """The milliseconds in which rank 0 receives from one owner after another."""
    return sum(
        (cluster.within if owner < cluster.ranks_per_node else cluster.between).ms(1, nbytes)
        for owner, nbytes in enumerate(saved.own_state_bytes)
        if owner
    )
