"""The class, the groups and the options that the user has given an optimizer, and the rule for owners.

The constructor of `stairs/owners.py` only passes them on. Here they are kept for later: groups may be added,
and owners may change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from zero_ref.plan.choice import Choice, may_cut
from zero_ref.plan.partition import ParamSpec
from zero_ref.shard.checks import stays_whole
from zero_ref.shard.groups import (
    ParamGroup,
    difference,
    ids_in,
    specs_of,
)


@dataclass
class Registered:
    """The arguments of the constructor and of `add_param_group`, as the user gave them.

    `Optimizer.__init__` writes every default into each group. There it would look like the user's choice, and
    replace what the local optimizer's constructor computes. So the user's own options are kept apart.

    Args:
        optimizer_class, defaults: the class of the local optimizer, and the options of its constructor.
        choice: the rule for owners, or the owners.
        parameters_as_bucket_view, overlap_with_ddp, elementwise: as the constructor's.

    Attributes:
        given: for each group the options that the user gave, without its parameters.
        listed: for each group the `id` of each parameter.
    """

    optimizer_class: type[Optimizer]
    defaults: Mapping[str, Any]
    choice: Choice
    parameters_as_bucket_view: bool
    overlap_with_ddp: bool
    elementwise: bool | None
    given: list[ParamGroup] = field(default_factory=list)
    listed: list[list[int]] = field(default_factory=list)

    @property
    def rule_for_later(self) -> Choice:
        """The rule for new parameters: the user's rule, or the default after an explicit assignment."""
        return self.choice if isinstance(self.choice, str) or callable(self.choice) else "sorted_greedy"

    def specs_for(self, choice: Choice, param_groups: Sequence[ParamGroup]) -> list[ParamSpec]:
        """The specs of the current parameters, for a partition by the rule `choice`."""
        return specs_of(param_groups, stays_whole(self.optimizer_class, self.elementwise, may_cut(choice)))

    def unsharded(self, params_of_groups: Sequence[list[torch.Tensor]]) -> Optimizer:
        """Make the optimizer that the user would have without shards, on these parameters of each group."""
        groups = [
            {**given, "params": params} for given, params in zip(self.given, params_of_groups, strict=True)
        ]
        return self.optimizer_class(groups, **self.defaults)

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
