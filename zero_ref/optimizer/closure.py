"""A closure that the local optimizer calls inside its step, to compute loss and gradients anew.

`minimal.py` takes none. Here a closure stands between two of the step's phases. The gradients that it
computes are checked like those of any backward, and an error that it raises is no lost update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class UserClosure:
    """A user's closure, as the local optimizer calls it.

    Args:
        closure: re-evaluates the model, and returns the loss.
        check: checks the gradients that the closure has computed.

    Attributes:
        error: the exception that closure or check has raised, if one has.
    """

    def __init__(self, closure: Callable[[], Any], check: Callable[[], None]) -> None:
        self._closure, self._check = closure, check
        self.error: Exception | None = None

    def __call__(self) -> Any:
        try:
            loss = self._closure()
            self._check()
        except Exception as error:
            self.error = error
            raise
        return loss

    def evaluate_now(self) -> None:
        """Call the closure; later calls return the same loss, and leave the gradients as they are."""
        with torch.enable_grad():
            loss = self()
        self._closure, self._check = lambda: loss, lambda: None
