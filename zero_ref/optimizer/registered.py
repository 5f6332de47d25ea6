"""What the user has registered with an optimizer: groups, classes, options, and the rule for owners.

`minimal.py` passes all this on in its constructor and forgets it. Here it is kept for what comes later:
groups that are added, owners that change, a trial of the wrapped class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer

from zero_ref.plan.choice import Choice, may_cut
from zero_ref.plan.partition import ParamSpec
from zero_ref.shard.checks import groups_kept_whole
from zero_ref.shard.groups import OPTIMIZER_CLASS, ParamGroup, options_of, specs_of


@dataclass
class Registered:
    """What the constructor and `add_param_group` were given.

    Optimizer.__init__ writes every default into each group, where it would override a value that the local
    optimizer's constructor computes. So what the user gave is kept apart from `param_groups`.

    Args:
        optimizer_class: the class of groups that name none.
        defaults: the options of its constructor.
        choice: the rule for owners, or the owners.

    Attributes:
        given: for each group what was given, apart from its parameters.
        listed: by group, the identity of each parameter.
        tried: methods of the class of which a trial has shown that they work on shards.
    """

    optimizer_class: type[Optimizer]
    defaults: Mapping[str, Any]
    choice: Choice
    given: list[ParamGroup] = field(default_factory=list)
    listed: list[list[int]] = field(default_factory=list)
    tried: set[str] = field(default_factory=lambda: {"train", "eval"})

    @property
    def constructed_with(self) -> list[tuple[type[Optimizer], dict[str, Any], Mapping[str, Any]]]:
        """For each parameter group its class, and the options that group and constructor were given."""
        main = self.optimizer_class
        classes = [given.get(OPTIMIZER_CLASS, main) for given in self.given]
        return [
            (its_class, options_of(given), self.defaults if its_class is main else {})
            for its_class, given in zip(classes, self.given)
        ]

    @property
    def rule_for_later(self) -> Choice:
        """The rule for new parameters: the user's rule, or the default after an explicit assignment."""
        return self.choice if isinstance(self.choice, str) or callable(self.choice) else "sorted_greedy"

    def specs_for(self, choice: Choice, param_groups: Sequence[ParamGroup]) -> list[ParamSpec]:
        """The specs of the current parameters, for a partition by this rule."""
        whole = groups_kept_whole(self.given, self.optimizer_class, self.defaults, tried=may_cut(choice))
        return specs_of(param_groups, whole)
