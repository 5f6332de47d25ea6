"""The part of a `ZeroRedundancyOptimizer` that the modules of this folder use, which it imports itself."""

from __future__ import annotations

from typing import Protocol

from zero_ref.comm.collectives import Collectives
from zero_ref.optimizer.accord import Accord
from zero_ref.optimizer.registered import Registered
from zero_ref.shard.built import Built
from zero_ref.shard.gradients import Backward
from zero_ref.shard.groups import ParamGroup
from zero_ref.shard.shard import Shard
from zero_ref.state.whole import WholeState


class Zero(Protocol):
    """The attributes and methods that `plans.py` and `forwarded.py` use."""

    accord: Accord
    backward: Backward
    built: Built
    collectives: Collectives
    param_groups: list[ParamGroup]
    registered: Registered
    shard: Shard
    whole: WholeState

    @property
    def joined(self) -> object | None: ...
    def current(self) -> Built: ...
    def register(self, param_group: ParamGroup) -> None: ...
    def standing_facts(self) -> list[str]: ...
