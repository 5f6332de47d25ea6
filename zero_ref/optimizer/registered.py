"""The options and the groups that the user has given an optimizer, and the rule for owners.

The constructor of `stairs/owners.py` only passes them on. Here ranks compare the options, and all are kept
for later: groups may be added, and owners may change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.optim import Optimizer

from zero_ref.comm.agreement import MAY_DIFFER, facts_of_fields
from zero_ref.plan.choice import Choice, may_cut
from zero_ref.plan.partition import ParamSpec
from zero_ref.shard.checks import check_buffer_size, check_is_class, check_master_dtype, stays_whole
from zero_ref.shard.groups import (
    ParamGroup,
    difference,
    ids_in,
    specs_of,
)
from zero_ref.shard.offload import StatePlace


@dataclass(frozen=True)
class Options:
    """The options of an optimizer. Ranks compare every field but those marked by `MAY_DIFFER`.

    Args:
        optimizer_class, parameters_as_bucket_view, overlap_with_ddp, partition, elementwise, master_dtype,
            broadcast_buffer_size, defaults: as `ZeroRedundancyOptimizer`.
        state_device: the place that its argument names; None for the parameters' own devices.
        broadcast_dtype: the dtype in which `step` sends new parameters; None for their own. `OSS` alone sets
            it.
    Raises:
        TypeError: `optimizer_class` is no class of optimizers, `master_dtype` no dtype, or
            `broadcast_buffer_size` no whole number.
        ValueError: the class couples parameters (LBFGS); `master_dtype` has no fractions;
            `broadcast_buffer_size` is negative; or `broadcast_dtype` is given with `overlap_with_ddp`.
    """

    optimizer_class: type[Optimizer]
    parameters_as_bucket_view: bool
    overlap_with_ddp: bool
    partition: Choice = field(metadata={MAY_DIFFER: "ranks compare the owners that it makes"})
    elementwise: bool | None
    master_dtype: torch.dtype | None
    state_device: StatePlace | None
    broadcast_buffer_size: int
    defaults: Mapping[str, Any] = field(metadata={MAY_DIFFER: "ranks compare the groups, which have them"})
    broadcast_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_is_class(self.optimizer_class)
        check_master_dtype(self.master_dtype)
        check_buffer_size(self.broadcast_buffer_size)
        if self.overlap_with_ddp and self.broadcast_dtype is not None:
            raise ValueError(
                f"broadcast_fp16 or broadcast_dtype, here {self.broadcast_dtype}, has no effect with "
                "overlap_with_ddp=True, as backward then sends new parameters in their own dtype. Leave out "
                "one of the two."
            )

    @cached_property
    def facts(self) -> list[str]:
        """A line for each option that must be equal on all ranks."""
        return facts_of_fields(self)

    @property
    def buffer_size(self) -> int | None:
        """Elements of a buffer for small parameters; None if all parameters are views of flat tensors."""
        return None if self.parameters_as_bucket_view else self.broadcast_buffer_size


@dataclass
class Registered:
    """The arguments of the constructor and of `add_param_group`, as the user gave them.

    `Optimizer.__init__` writes every default into each group. There it would look like the user's choice, and
    replace what the local optimizer's constructor computes. So the user's own options are kept apart.

    Args:
        options: those of the constructor; a new value if one of them changes.

    Attributes:
        given: for each group the options that the user gave, without its parameters.
        listed: for each group the `id` of each parameter.
    """

    options: Options
    given: list[ParamGroup] = field(default_factory=list)
    listed: list[list[int]] = field(default_factory=list)

    @property
    def rule_for_later(self) -> Choice:
        """The rule for new parameters: the user's rule, or the default after an explicit assignment."""
        choice = self.options.partition
        return choice if isinstance(choice, str) or callable(choice) else "sorted_greedy"

    def specs_for(self, choice: Choice, param_groups: Sequence[ParamGroup]) -> list[ParamSpec]:
        """The specs of the current parameters, for a partition by the rule `choice`."""
        options = self.options
        whole = stays_whole(options.optimizer_class, options.elementwise, may_cut(choice))
        return specs_of(param_groups, whole)

    def unsharded(self, params_of_groups: Sequence[list[torch.Tensor]]) -> Optimizer:
        """Make the optimizer that the user would have without shards, on these parameters of each group."""
        groups = [
            {**given, "params": params} for given, params in zip(self.given, params_of_groups, strict=True)
        ]
        return self.options.optimizer_class(groups, **self.options.defaults)

    def check_listed(self, param_groups: Sequence[ParamGroup], rank: int) -> None:
        """Refuse parameter groups that list other parameters than these, or in another order.

        Raises:
            RuntimeError: names the first difference, and what to do instead.
        """
        listed = ids_in(param_groups)
        if listed != self.listed:
            raise RuntimeError(
                f"rank {rank}: param_groups {difference(listed, self.listed)}. Ranks own "
                "parameters by their places in these lists, so nothing was computed. To stop training a "
                "parameter, leave it there and call requires_grad_(False); for new ones call "
                "add_param_group(). To take out, replace or reorder parameters, put the lists back, call "
                'consolidate_state_dict("all"), make the same change to what state_dict() returns, and load '
                "that into a new optimizer."
            )
