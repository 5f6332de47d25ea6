"""An optimizer's parameters, their partition, and the messages that a step sends.

Beyond `stairs/owners.py`, the partition may cut parameters, one message may hold many, and both are made anew
when parameters are frozen, moved or added.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

import torch

from zero_ref.plan.layout import lay_out
from zero_ref.plan.partition import ParamSpec, Partition
from zero_ref.shard.buckets import (
    Message,
    Parcel,
    flatten_parameters,
    joined,
    messages_by_parameter,
    messages_within,
)
from zero_ref.shard.checks import fact_of
from zero_ref.shard.groups import ParamGroup, name_of, params_of

Places = list[list[tuple[int, int, tuple[torch.dtype, bool]]]]
"""By group and parameter (id, address, (dtype, requires_grad))."""

_kind = attrgetter("dtype", "requires_grad")


@dataclass(frozen=True)
class Built:
    """The parameters of an optimizer and the plan for them. A change makes a new `Built`.

    Args:
        params: in registration order: the order of the groups, then that within a group.
        specs: what the plan knows about each parameter.
        partition: the owner of each slice.
        messages: what a step sends, in order. They share memory with the parameters.
        buffer_size: elements of a buffer in which small messages travel together; 0 joins none.
        cut: (number, parameter, strides) of each parameter that is cut into several slices.
        places: the parameters as they were, from `places_of`, to notice that one has changed.
    """

    params: tuple[torch.Tensor, ...]
    specs: tuple[ParamSpec, ...]
    partition: Partition
    messages: tuple[Message, ...]
    buffer_size: int
    cut: tuple[tuple[int, torch.Tensor, tuple[int, ...]], ...]
    places: Places

    @classmethod
    def of(
        cls,
        param_groups: Sequence[ParamGroup],
        specs: Sequence[ParamSpec],
        partition: Partition,
        buffer_size: int | None,
        before: Built | None = None,
    ) -> Built:
        """Make the messages for the current parameters.

        Args:
            param_groups: the groups that list the parameters.
            buffer_size: as the attribute. None moves the trained parameters into flat tensors instead, in
                which each rank's slices are contiguous.
            before: the `Built` that the new one replaces.
        """
        params = params_of(param_groups)
        if buffer_size is None:
            # A frozen parameter is in no new flat tensor. As a view, it would keep the whole old one.
            if before is not None:
                _free_frozen_windows(params, before.messages)
            messages = flatten_parameters(lay_out(partition, specs), params)
        else:
            messages = messages_by_parameter(partition, params)
        cut = [
            (number, param, param.stride())
            for number, param in enumerate(params)
            if len(partition.pieces_of_param[number]) > 1
        ]
        places = places_of(param_groups)
        return cls(
            tuple(params), tuple(specs), partition, tuple(messages), buffer_size or 0, tuple(cut), places
        )

    @cached_property
    def to_send(self) -> list[Message | Parcel]:
        """The broadcasts of a step: small messages travel together, in buffers that the plan keeps."""
        return joined(self.messages, self.buffer_size)

    def buffers_of(self, rank: int) -> dict[torch.Tensor, torch.Tensor]:
        """Return, by parameter, the part of a buffer in which `rank` sends the whole parameter."""
        return {
            self.params[piece.param]: window
            for parcel in self.to_send
            if isinstance(parcel, Parcel) and parcel.owner == rank
            for piece, window in zip(parcel.slices, parcel.windows)
            if piece.numel == self.params[piece.param].numel()
        }

    def to_send_of(self, numbers: Container[int]) -> list[Message | Parcel]:
        """List the broadcasts of an update of these parameters only."""
        return joined(messages_within(self.messages, numbers), self.buffer_size)

    @cached_property
    def facts(self) -> list[str]:
        """The facts that must be equal on all ranks, or ranks would send messages of different sizes."""
        lines = [
            f"parameter {self.name(number)}: {spec.dtype}, requires_grad={spec.trainable}"
            for number, spec in enumerate(self.specs)
        ]
        return [*lines, fact_of(self.partition)]

    @cached_property
    def trained(self) -> tuple[torch.Tensor, ...]:
        """The parameters that a step changes."""
        return tuple(param for param, spec in zip(self.params, self.specs) if spec.trainable)

    @cached_property
    def owners(self) -> frozenset[int]:
        """The ranks that update something in a step."""
        return frozenset(message.owner for message in self.messages if message.slices)

    def name(self, number: int) -> str:
        """A parameter's name in errors."""
        return name_of(self.specs, number)


def places_of(param_groups: Sequence[ParamGroup]) -> Places:
    """List what a plan depends on: each group's parameters, where they lie, and of which kind they are."""
    places = []
    for group in param_groups:
        params = group["params"]
        # `map`: every step looks at all parameters, and a loop in Python takes longer.
        places.append([*zip(map(id, params), map(torch.Tensor.data_ptr, params), map(_kind, params))])
    return places


def _free_frozen_windows(params: Sequence[torch.Tensor], messages: Sequence[Message]) -> None:
    """Copy newly frozen parameters out of the old flat tensors, whose memory they would keep alive."""
    flats = {message.tensor.untyped_storage().data_ptr() for message in messages}
    for param in params:
        if not param.requires_grad and param.untyped_storage().data_ptr() in flats:
            param.data = param.data.clone()
