"""Broadcasts of new parameters that are still running when `step` has returned.

The step of `stairs/owners.py` waits for every broadcast. But the next forward needs the parameters one module
after the other, so it can begin when the first parameters have arrived: a hook on each module waits for the
module's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

import torch
from torch import nn

from zero_ref.comm.collectives import PendingCall
from zero_ref.shard.buckets import Message, Parcel


class Arriving:
    """The broadcasts that the last step has started and nobody has waited for yet.

    An optimizer that has such an object returns from `step` before the new parameters have arrived. So every
    reader of a parameter must wait first; `watch` sees to the modules of a model.
    """

    def __init__(self) -> None:
        # (the parameters in a broadcast, the broadcast)
        self._works: list[tuple[frozenset[torch.Tensor], PendingCall]] = []
        self._done: Callable[[], object] = lambda: None

    def begin(
        self,
        messages: Iterable[Message | Parcel],
        works: Sequence[PendingCall],
        params: Sequence[torch.Tensor],
        done: Callable[[], object],
    ) -> None:
        """Keep the works of broadcasts that were started, until `wait`.

        Args:
            messages: the messages that are being sent.
            works: one for each message; one for all shares of a flat tensor.
            params: the optimizer's parameters, by number.
            done: called when all messages have arrived.
        """
        # The shares of a flat tensor follow each other and have one work together.
        of_works = groupby(messages, key=_id_of_work)
        params_of_work = [
            frozenset(params[piece.param] for message in of_work for piece in message.slices)
            for _, of_work in of_works
        ]
        self._works = list(zip(params_of_work, works))
        self._done = done

    def wait(self, params: Iterable[torch.Tensor | None] | None = None) -> None:
        """Wait until these parameters have arrived.

        Args:
            params: the parameters to wait for; None to wait for all.
        Raises:
            RuntimeError: another rank stopped, or its local optimizer raised in the last step.
        """
        if not self._works:
            return
        wanted = None if params is None else set(params)
        works, self._works = self._works, []  # if a wait raises, the others are given up
        left = []
        for params_of_work, work in works:
            if wanted is None or not params_of_work.isdisjoint(wanted):
                work.wait()
            else:
                left.append((params_of_work, work))
        self._works = left
        if not left:
            self._done()

    def watch(self, module: nn.Module) -> None:
        """Make each submodule wait for its parameters before its forward, and before it saves or loads."""
        for submodule in module.modules():
            if any(True for _ in submodule.parameters(recurse=False)):
                submodule.register_forward_pre_hook(lambda owner, _: self.wait(owner._parameters.values()))
                # A state dict reads or writes the parameters at once, so wait for all.
                submodule.register_state_dict_pre_hook(lambda *_: self.wait())
                submodule.register_load_state_dict_pre_hook(lambda *_: self.wait())


def _id_of_work(message: Message | Parcel) -> int:
    """Return a number that only the messages of one work have in common."""
    whole = message.whole if isinstance(message, Message) else None
    return id(message.tensor if whole is None else whole)
