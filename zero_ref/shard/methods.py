"""Methods that a wrapped class has beyond those of torch's `Optimizer`, such as `train` and `eval`.

`stairs/owners.py` knows `step` alone. If a user calls another method on a rank's local optimizer, it changes
only what that rank owns, and the ranks have different models. `forwarded.py` calls a method on all ranks;
this module notices a call on one.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch.optim import Optimizer

from zero_ref.shard.digests import digests
from zero_ref.shard.groups import params_of


def has_method(optimizer_class: type[Optimizer], name: str) -> bool:
    """Return whether a class has a public method of this name beyond those of torch's `Optimizer`.

    >>> import torch
    >>> has_method(torch.optim.Adagrad, "share_memory"), has_method(torch.optim.Adagrad, "step")
    (True, False)
    """
    is_own = not name.startswith("_") and not hasattr(Optimizer, name)
    return is_own and isinstance(inspect.getattr_static(optimizer_class, name, None), FunctionType)


class DirectCalls:
    """Refuses methods that a user calls on the local optimizer itself, if they write into parameters.

    Args:
        rank: this rank.

    Attributes:
        expected: the shard itself is calling a method, which may call others: nothing is compared.
    """

    def __init__(self, rank: int) -> None:
        self.rank, self.expected = rank, False

    def watch(self, optim: Optimizer) -> None:
        """Watch the methods of this local optimizer that are not watched yet."""
        for name in dir(type(optim)):
            # An attribute of the object hides the method of its class.
            if has_method(type(optim), name) and name not in vars(optim):
                setattr(optim, name, self._watched(weakref.ref(optim), getattr(type(optim), name)))

    def _watched(self, optim_ref: weakref.ref[Optimizer], method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method of a local optimizer: raise if it writes into parameters.

        Args:
            optim_ref: the optimizer; weak, since the optimizer itself will refer to the wrapper.
        """

        @functools.wraps(method)
        def watched(*args: Any, **kwargs: Any) -> Any:
            optim = optim_ref()
            assert optim is not None
            if self.expected:
                return method(optim, *args, **kwargs)
            # Compare the bits before and after. The method itself may call others, which then do not.
            before = digests(params_of(optim.param_groups))
            self.expected = True
            try:
                result = method(optim, *args, **kwargs)
            finally:
                self.expected = False
            if digests(params_of(optim.param_groups)) != before:
                raise RuntimeError(
                    f"rank {self.rank}: {method.__name__}() of {type(optim).__name__}, called on the local "
                    "optimizer (`optimizer.optim`), has changed what this rank owns of the parameters. Other "
                    "ranks do not get the new values before the next step, so the ranks have different "
                    f"models now. Call optimizer.{method.__name__}() on all ranks: it sends what the method "
                    "writes."
                )
            return result

        return watched
