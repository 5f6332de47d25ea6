"""New parameters that are still on their way when `step` has returned.

The step of `minimal.py` waits for every broadcast. But the next forward needs the parameters one module after
the other, so it can begin when the first are here: a hook on each module waits for its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

import torch
from torch import nn

from zero_ref.comm.collectives import PendingCall
from zero_ref.shard.buckets import Message


class Arriving:
    """What a step has sent, until somebody waits for it.

    Attributes:
        later: `step` returns before new parameters are here. Who sets it must see that everybody waits.
    """

    def __init__(self) -> None:
        self.later = False
        self._works: list[tuple[frozenset[torch.Tensor], PendingCall]] = []
        self._done: Callable[[], object] = int

    def begin(
        self,
        messages: Iterable[Message],
        works: Sequence[PendingCall],
        params: Sequence[torch.Tensor],
        done: Callable[[], object],
    ) -> None:
        """Note what was started.

        Args:
            works: one for each message, or for all shares of a flat tensor.
            params: by number, those in the messages.
            done: is called when all are here.
        """
        together = groupby(
            messages, key=lambda message: id(message.tensor if message.whole is None else message.whole)
        )
        held = [
            frozenset(params[piece.param] for message in of_work for piece in message.slices)
            for _, of_work in together
        ]
        self._works = list(zip(held, works))
        self._done = done

    def wait(self, params: Iterable[torch.Tensor | None] | None = None) -> None:
        """Wait until these parameters are here.

        Args:
            params: None for all.
        Raises:
            RuntimeError: another rank stopped, or its local optimizer raised in the last step.
        """
        if not self._works:
            return
        wanted = None if params is None else set(params)
        works, self._works = self._works, []  # none is left if one raises
        left = []
        for held, work in works:
            if wanted is None or not held.isdisjoint(wanted):
                work.wait()
            else:
                left.append((held, work))
        self._works = left
        if not left:
            self._done()

    def watch(self, module: nn.Module) -> None:
        """Let each module wait for its parameters before its forward, and before it saves or loads."""
        self.later = True
        for one in module.modules():
            if any(True for _ in one.parameters(recurse=False)):
                one.register_forward_pre_hook(lambda module, _: self.wait(module._parameters.values()))
                one.register_state_dict_pre_hook(lambda *_: self.wait())
                one.register_load_state_dict_pre_hook(lambda *_: self.wait())
