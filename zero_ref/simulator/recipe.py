"""A strategy as one value: `schedule` prices it, and `lab.train` trains under it.

It says what is sharded and how, who gets gradients, when updates are made, and what travels. It knows no
model: that comes to it in `schedule` and `train`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from zero_ref.local_sgd.averaging import AveragingSchedule
from zero_ref.plan.calls import REDUCED_BY
from zero_ref.plan.choice import Choice
from zero_ref.plan.parcels import BROADCAST_NUMEL
from zero_ref.simulator._checks import check_name
from zero_ref.simulator.ledger import StateRule, check_stage, state_rule
from zero_ref.simulator.offload import OFFLOADS, gradients_leave
from zero_ref.simulator.operations import WAYS, WAYS_OF_DDP, WAYS_WITHOUT_DDP

LOCAL_SGD = "local-sgd"

REDUCED_IN = ("bfloat16", "float16", "float32")
"""The dtypes in which gradients can travel, beside the parameters' own."""

OFFLOADED = {
    "state": "state",
    "gradients": "gradients and state",
    "in_backward": "gradients and state in backward",
}
"""What is on the CPU, in the title of a recipe, by the names of `offload.OFFLOADS`."""


@dataclass(frozen=True)
class Recipe:
    """A strategy.

    >>> recipe("zero", to_owners=True, way="interleaved").title
    'zero, to owners, interleaved'

    Args:
        name: what errors and tables call it.
        summary: in words.
        stage: of ZeRO: what is sharded. 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too.
        partition: at stages 1 and 2 who owns what, as the optimizer's `partition=`.
        flat: owned parameters lie in flat tensors (`parameters_as_bucket_view`), so that one message goes for
            each of these and not for each owned slice. At stage 3 each unit lies in one, which is cut: the
            last of the stairs.
        broadcast_buffer_size: otherwise small slices of an owner travel together, in buffers of at most so
            many elements, as with the optimizer's argument; 0 sends each by itself.
        to_owners: gradients are reduced to their owners only, and the rest is released.
        reduced_by: how DDP's buckets get to their owners, one of `calls.REDUCED_BY`: "pairs", which is the
            default of `reduce_to_owners` on Gloo, or "reduce", its default on NCCL.
        without_ddp: `ShardedDataParallel` stands in DDP's place, so gradients never lie in DDP's buckets.
        way: when updates are made and sent: with DDP one of `operations.WAYS_OF_DDP`, without it one of
            `operations.WAYS_WITHOUT_DDP`.
        shard_group: without DDP, how many consecutive ranks share the state, and at stage 3 the parameters,
            such as those of a node; the groups are replicas of each other. None for all ranks.
        averaging: of local SGD: when gradients and parameters are averaged, and over whom.
        averaged_itemsize: bytes of an element as it is averaged: 4 where the optimizer keeps 32-bit copies of
            16-bit parameters; None for the parameters' own.
        prefetch: at stage 3, how many units ahead parameters are gathered.
        prefetch_numel: at stage 3, units are gathered ahead until they have so many elements, where these are
            more units.
        reduce_numel: at stage 3, elements of the gradients that are reduced together, if units are smaller.
        optimizer: what each rank runs: a name in `ledger.STATE_RULES`, or a rule.
        accumulation: forwards and backwards before an update.
        no_sync: of several, only the last backward reduces, and until then gradients are whole on every rank.
            With DDP that is always so. Without it, and at stage 3, each backward otherwise reduces its own,
            and they add up in the shards.
        all_reduce_last: at stage 3 in groups, shards of several backwards add up, and the last alone is
            all-reduced between the groups.
        reduce_dtype: what gradients travel in; None for the parameters' own dtype.
        offload: one of `offload.OFFLOADS`: what is on the CPU; None for nothing.
        offload_fraction: the part of the elements that the CPU updates.
    Raises:
        ValueError: a partition, owners, a way, an averaging or one of the last seven is asked of a strategy
            that has none; a name is unknown; a fraction is not above 0, or above 1.
    """

    name: str
    summary: str
    stage: int
    partition: Choice | None = None
    flat: bool = False
    to_owners: bool = False
    way: str = "plain"
    without_ddp: bool = False
    shard_group: int | None = None
    averaging: AveragingSchedule | None = None
    averaged_itemsize: int | None = None
    prefetch: int = 1
    optimizer: str | StateRule = field(default="AdamW", kw_only=True)
    accumulation: int = field(default=1, kw_only=True)
    no_sync: bool = field(default=False, kw_only=True)
    all_reduce_last: bool = field(default=False, kw_only=True)
    reduce_dtype: str | None = field(default=None, kw_only=True)
    reduced_by: str = field(default="pairs", kw_only=True)
    offload: str | None = field(default=None, kw_only=True)
    offload_fraction: float = field(default=1.0, kw_only=True)
    prefetch_numel: int = field(default=0, kw_only=True)
    reduce_numel: int = field(default=0, kw_only=True)
    broadcast_buffer_size: int = field(default=BROADCAST_NUMEL, kw_only=True)

    def __post_init__(self) -> None:
        check_stage(self.stage)
        state_rule(self.optimizer)
        self._check_axes()
        if self.averaging is not None and self.stage > 0:
            raise ValueError(f"averaging= is for {LOCAL_SGD!r}; strategy {self.name!r} meets in every step.")
        if self.averaging is None and self.name == LOCAL_SGD:
            raise ValueError(f"{LOCAL_SGD!r} needs an averaging=: without one it is 'ddp'.")
        if self.shards_by_parameter:
            if self.partition is None:
                raise ValueError(
                    f"strategy {self.name!r} is of stage {self.stage}, which takes a partition=."
                )
            check_name("way", self.way, WAYS)
            if self.way not in self.ways:
                raise ValueError(
                    f"strategy {self.name!r} takes a way of {' or '.join(self.ways)}, not {self.way!r}: it "
                    f"{'has no DDP' if self.without_ddp else 'has DDP'}."
                )
            if self.without_ddp and not self.to_owners:
                raise ValueError(f"strategy {self.name!r} is without DDP, which reduces gradients to owners.")
            return
        if self.partition is not None:
            raise ValueError(
                f"strategy {self.name!r} shards nothing by parameter, so it takes no partition=."
            )
        if self.to_owners or self.without_ddp:
            raise ValueError(f"strategy {self.name!r} has no owners to reduce gradients to.")
        if self.way != "plain":
            raise ValueError(
                f"strategy {self.name!r} updates after backward: it takes way='plain', not {self.way!r}."
            )

    def _check_axes(self) -> None:
        """Raise a ValueError for an axis that the strategy has not."""
        if self.shard_group is not None and not self.in_groups:
            raise ValueError(
                f"shard_group= is for strategies without DDP and for zero-3; {self.name!r} has no owners in "
                "groups."
            )
        if self.shard_group is not None and self.shard_group < 1:
            raise ValueError(f"a group has at least 1 rank, got shard_group={self.shard_group}.")
        if self.accumulation < 1:
            raise ValueError(f"an update takes at least 1 backward, got accumulation={self.accumulation}.")
        if self.no_sync and not self.in_groups:
            raise ValueError(
                f"no_sync= is for zero-2 and zero-3: DDP, and so {self.name!r}, does nothing else."
            )
        if self.all_reduce_last and not (self.in_groups and self.stage == 3):
            raise ValueError(f"all_reduce_last= is for zero-3 in groups; {self.name!r} has none.")
        if self.reduce_dtype is not None:
            check_name("reduce_dtype", self.reduce_dtype, REDUCED_IN)
            if not self.reduces_in_any_dtype:
                raise ValueError(
                    f"reduce_dtype= is for strategies that reduce gradients by an all-reduce or a "
                    f"reduce-scatter; {self.name!r} {'averages' if self.averaging else 'sends'} its own."
                )
        check_name("reduced_by", self.reduced_by, REDUCED_BY)
        if self.reduced_by != "pairs" and (self.without_ddp or not self.to_owners):
            raise ValueError(
                f"reduced_by= is for gradients that go from DDP's buckets to owners; those of {self.name!r} "
                "do not. Give it to zero, zero-bucket or zero-even, with to_owners=True."
            )
        if self.offload is not None:
            self._check_offload(self.offload)

    def _check_offload(self, offload: str) -> None:
        check_name("offload", offload, OFFLOADS)
        if not self.offloads:
            raise ValueError(
                f"offload= is for strategies that update once an iteration; {self.name!r} "
                f"{'updates in each step of a period' if self.averaging else 'has an optimizer of its own'}."
            )
        if not 0 < self.offload_fraction <= 1:
            raise ValueError(
                f"offload_fraction is a share above 0 and up to 1, got {self.offload_fraction:g}."
            )
        if gradients_leave(offload) and self.way != "plain":
            raise ValueError(
                f"offload={offload!r} sends gradients to the CPU during backward and updates there: the "
                f"way is 'plain', not {self.way!r}."
            )

    @property
    def offloads(self) -> bool:
        """Its optimizer's state can be on the CPU."""
        return self.averaging is None and not self.is_stair

    @property
    def buffer_size(self) -> int:
        """Elements of a buffer in which small parameters travel; 0 for none."""
        return 0 if self.flat else self.broadcast_buffer_size

    @property
    def in_groups(self) -> bool:
        """Groups of ranks may share what is sharded, each with a replica: without DDP, and under zero-3."""
        return self.without_ddp or (self.stage == 3 and not self.is_stair)

    @property
    def is_stair(self) -> bool:
        """It is the last of the stairs, `zero_ref/stairs/parameters.py`, and not torch's `fully_shard`."""
        return self.stage == 3 and self.flat

    @property
    def reduces_in_any_dtype(self) -> bool:
        """Gradients may travel in another dtype than the parameters'."""
        return self.averaging is None and not self.is_stair and (self.without_ddp or not self.to_owners)

    @property
    def shards_by_parameter(self) -> bool:
        """Each element has an owner, by a partition: stages 1 and 2."""
        return self.stage in (1, 2)

    @property
    def ways(self) -> tuple[str, ...]:
        """When updates can be made and sent."""
        if not self.shards_by_parameter:
            return ("plain",)
        return WAYS_WITHOUT_DDP if self.without_ddp else WAYS_OF_DDP

    def takes_way(self, way: str) -> bool:
        """Whether updates can be made and sent in this way."""
        return way in self.ways

    def group_of(self, world_size: int) -> int:
        """The number of ranks that share the state, of so many.

        Raises:
            ValueError: they cannot be divided into groups of `shard_group`.
        """
        group = self.shard_group or world_size
        if world_size % group:
            raise ValueError(
                f"{world_size} ranks cannot be divided into groups of {group} that share the state."
            )
        return group

    @property
    def title(self) -> str:
        """The name, and what is unusual in where gradients go and when updates are made."""
        usual = TRAINED.get(self.name, self)
        words = [self.name]
        if self.to_owners and not usual.to_owners:
            words.append("to owners" if self.reduced_by == "pairs" else "to owners by reduce")
        if self.way != usual.way:
            words.append(self.way.replace("_", " "))
        if self.shard_group is not None:
            words.append(f"groups of {self.shard_group}")
        if self.accumulation > 1:
            words.append(
                f"{self.accumulation} backwards{' without reductions but for the last' * self.no_sync}"
                f"{', one all-reduce' * self.all_reduce_last}"
            )
        if self.reduce_dtype is not None:
            words.append(f"reduced in {self.reduce_dtype}")
        if self.offload:
            part = "" if self.offload_fraction == 1 else f"{self.offload_fraction:.0%} of "
            words.append(f"{part}{OFFLOADED[self.offload]} offloaded")
        return ", ".join(words)


TRAINED: dict[str, Recipe] = {
    one.name: one
    for one in (
        Recipe("ddp", "every rank keeps the whole optimizer and sends no parameters", 0),
        Recipe("zero", "whole parameters to owners, small ones sent together", 1, "sorted_greedy"),
        Recipe("zero-bucket", "whole parameters to owners, one broadcast an owner", 1, "sorted_greedy", True),
        Recipe(
            "zero-even", "1/N of the elements each, to within 64, one broadcast an owner", 1, "even", True
        ),
        Recipe(
            "zero-2",
            "1/N of each range of parameters, its gradients reduced to shares, its parameters gathered",
            2,
            "equal_shares",
            True,
            True,
            without_ddp=True,
        ),
        Recipe("zero-3", "1/N of each parameter, gathered block by block before use", 3),
        Recipe("zero-3-stair", "1/N of each block: the last of the stairs", 3, flat=True, prefetch=0),
        Recipe(
            LOCAL_SGD,
            "every rank for itself, parameters averaged once a period",
            0,
            averaging=AveragingSchedule.periodic(8),
        ),
    )
}
"""The strategies that `zero-ref train` runs, and whose calls and bytes `schedule` knows."""

RECIPES: dict[str, Recipe] = {name: one for name, one in TRAINED.items() if not one.is_stair}
"""Those whose memory and time are predicted too, on any machine. The stair is made to be read."""


def recipe(strategy: str | Recipe, **changes: Any) -> Recipe:
    """The recipe of a name in TRAINED, or a given one, with some fields changed.

    >>> recipe("zero-2", shard_group=8).title
    'zero-2, groups of 8'

    Raises:
        ValueError: there is no such name, or as `Recipe`.
        TypeError: there is no such field.
    """
    if isinstance(strategy, str):
        check_name("strategy", strategy, TRAINED)
        strategy = TRAINED[strategy]
    return replace(strategy, **changes) if changes else strategy
