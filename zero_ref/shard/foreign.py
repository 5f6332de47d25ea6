"""The step of an optimizer class that is not torch's own, and may do more than change its tensors' values.

torch's classes update each tensor by itself, in its memory, and draw no random numbers. Another class may
draw random numbers, which differ from rank to rank. It may give a tensor other memory (`p.data = ...`), while
messages and parameters share the old memory. And a user may call one of its methods on one rank only.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from zero_ref.shard.methods import DirectCalls


class ForeignStep:
    """Steps a local optimizer whose class is not torch's, and watches what the class does.

    Args:
        rank: this rank.
    """

    def __init__(self, rank: int) -> None:
        self.calls = DirectCalls(rank)
        self.optim: Optimizer | None = None
        # (a tensor, a view of the memory in which it has to stay)
        self._memory: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._steps = 0
        # The random generator's state before the call; None while the generator is not watched.
        self._generator_was: torch.Tensor | None = None

    def watch(self, optim: Optimizer, tensors: Iterable[torch.Tensor]) -> None:
        """Watch this local optimizer, which steps these tensors in their memory."""
        self.optim = optim
        self._memory = [(tensor, tensor.detach()) for tensor in tensors]
        self.calls.watch(optim)

    def step(self, **options: Any) -> Any:
        """Step the local optimizer, and return what it returns."""
        assert self.optim is not None
        self._steps += 1
        with self.watched("its step"):
            return self.optim.step(**options)

    @contextmanager
    def watched(self, where: str, *, always: bool = False) -> Iterator[None]:
        """Watch the class during a call of one of its methods.

        Args:
            where: the call, for the warning.
            always: look for random numbers in every call, not only in steps 1, 2, 4 and so on.
        Warns:
            UserWarning: the class drew random numbers.
        """
        self.calls.expected = True
        self._watch_generator(always)
        try:
            yield
        finally:
            self.calls.expected = False
            self._restore_memory()
            self._warn_if_drawn(where)

    @contextmanager
    def user_code(self) -> Iterator[None]:
        """Watch nothing during a closure inside a step: the user's code may draw random numbers (dropout)."""
        # The closure must see the class's last values, in the parameters' memory.
        self._restore_memory()
        self._warn_if_drawn("its step")
        yield
        if self.calls.expected:
            self._watch_generator(False)

    def _watch_generator(self, always: bool) -> None:
        # Reading the generator's state takes longer than the step of a small model: read it ever more rarely.
        watch = always or self._steps & (self._steps - 1) == 0
        self._generator_was = torch.get_rng_state() if watch else None

    def _warn_if_drawn(self, where: str) -> None:
        before, self._generator_was = self._generator_was, None
        if before is not None and not torch.equal(before, torch.get_rng_state()):
            assert self.optim is not None
            warnings.warn(
                f"{type(self.optim).__name__} drew random numbers in {where}. Each rank draws other ones, so "
                "the result is not that of one process with all parameters, and depends on the partition.",
                stacklevel=4,
            )

    @torch.no_grad()
    def _restore_memory(self) -> None:
        """Copy the values of each tensor that the class has moved back to the tensor's own memory."""
        for tensor, memory in self._memory:
            if tensor.data_ptr() != memory.data_ptr():
                tensor.data = memory.copy_(tensor)
