"""What was planned for an optimizer's parameters, and made of the plan: who owns what, and what is sent.

It adds to `minimal.py` that the plan may cut parameters, that one message may hold many, and that both follow
when parameters are frozen, moved or added: then a new value takes the place of the old one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zero_ref.optimizer.buckets import Message, flatten_parameters, messages_by_parameter
from zero_ref.optimizer.groups import name_of
from zero_ref.plan.layout import lay_out
from zero_ref.plan.partition import ParamSpec, Partition


@dataclass(frozen=True)
class Built:
    """The parameters of an optimizer and the plan for them. Replaced when something changes, never edited.

    Args:
        params: in registration order: the order of the groups, then that within a group.
        specs: what the plan knows of each.
        partition: who owns what.
        messages: what a step sends, in its order. They share memory with the parameters.
        places: where each parameter lies, and whether it is trained.
    """

    params: tuple[torch.Tensor, ...]
    specs: tuple[ParamSpec, ...]
    partition: Partition
    messages: tuple[Message, ...]
    places: tuple[tuple[int, bool], ...]

    @classmethod
    def of(
        cls,
        params: Sequence[torch.Tensor],
        specs: Sequence[ParamSpec],
        partition: Partition,
        flat: bool,
        before: Built | None = None,
    ) -> Built:
        """Lay out the messages of the parameters as they are now.

        Args:
            flat: move the trained parameters into flat tensors, where what one rank sends lies together.
            before: what this one replaces.
        """
        if flat:
            if before is not None:
                _free_frozen_windows(params, before.messages)
            messages = flatten_parameters(lay_out(partition, specs), params)
        else:
            messages = messages_by_parameter(partition, params)
        return cls(tuple(params), tuple(specs), partition, tuple(messages), places_of(params))

    def name(self, number: int) -> str:
        """What errors call a parameter."""
        return name_of(self.specs, number)

    def is_cut(self, number: int) -> bool:
        """More than one rank owns a part of it."""
        return len(self.partition.pieces_of_param[number]) > 1


def places_of(params: Sequence[torch.Tensor]) -> tuple[tuple[int, bool], ...]:
    """What messages depend on and a user may change: where the parameters lie, and which are trained."""
    return tuple([(param.data_ptr(), param.requires_grad) for param in params])


def _free_frozen_windows(params: Sequence[torch.Tensor], messages: Sequence[Message]) -> None:
    """Take newly frozen parameters out of the flat tensors, which they would keep alive."""
    flats = {message.tensor.untyped_storage().data_ptr() for message in messages}
    for param in params:
        if not param.requires_grad and param.untyped_storage().data_ptr() in flats:
            param.data = param.data.clone()
