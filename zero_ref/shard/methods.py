"""Methods that a wrapped class has beyond those of torch's `Optimizer`, such as `train` and `eval`.

`minimal.py` knows `step` alone. Called on a rank's local optimizer, another method works on what that rank
owns, so the ranks would have different models. `forwarded.py` calls it on all ranks; this module notices a
call on one.
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
from zero_ref.shard.several import optimizers_in


def has_method(optimizer_class: type[Optimizer], name: str) -> bool:
    """Whether a class has a public method of this name beyond those of torch's `Optimizer`.

    >>> import torch
    >>> has_method(torch.optim.Adagrad, "share_memory"), has_method(torch.optim.Adagrad, "step")
    (True, False)
    """
    is_own = not name.startswith("_") and not hasattr(Optimizer, name)
    return is_own and isinstance(inspect.getattr_static(optimizer_class, name, None), FunctionType)


class DirectCalls:
    """An error where a user calls a method on the local optimizer itself, and it writes into parameters.

    Args:
        rank: this rank.

    Attributes:
        expected: the shard is calling a method, which may call others.
    """

    def __init__(self, rank: int) -> None:
        self.rank, self.expected = rank, False

    def watch(self, optim: Optimizer) -> None:
        """Watch the methods of this local optimizer that are not watched yet."""
        for one in optimizers_in(optim):
            for name in dir(type(one)):
                if has_method(type(one), name) and name not in vars(one):
                    setattr(one, name, self._watched(weakref.ref(one), getattr(type(one), name)))

    def _watched(self, of: weakref.ref[Optimizer], method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def watched(*args: Any, **kwargs: Any) -> Any:
            optim = of()
            assert optim is not None
            if self.expected:
                return method(optim, *args, **kwargs)
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
                    f"models now. Call optimizer.{method.__name__}() on all ranks, which sends what it "
                    "writes."
                )
            return result

        return watched
