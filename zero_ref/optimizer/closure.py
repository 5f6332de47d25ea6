"""A closure that the local optimizer calls inside its step, to compute loss and gradients anew.

`step` of `stairs/owners.py` takes no closure. Here the local optimizer calls it in the middle of a step. The
gradients that a closure computes are checked like those of any backward. If the closure raises, this is no
error of the local optimizer, so no update counts as lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class UserClosure:
    """A user's closure, as the local optimizer calls it.

    Args:
        closure: re-evaluates the model, and returns the loss.
        check: raises if a step cannot use the gradients that the closure has computed.

    Attributes:
        error: the exception that closure or check has raised; None if neither has.
    """

    def __init__(self, closure: Callable[[], Any], check: Callable[[], None]) -> None:
        self._closure, self._check = closure, check
        self.error: Exception | None = None

    def __call__(self) -> Any:
        try:
            loss = self._closure()
            self._check()
        except Exception as error:
            self.error = error  # so that `step` can tell it from an error of the local optimizer
            raise
        return loss

    def evaluate_now(self) -> None:
        """Call the closure; later calls return the same loss, and leave the gradients as they are."""
        with torch.enable_grad():
            loss = self()
        # The local optimizer will call the closure once more. A second backward would double the gradients.
        self._closure, self._check = lambda: loss, lambda: None
