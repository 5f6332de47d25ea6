"""The reader's `MyZero`, driven: what a check asks of it, beside the check or in a process apart.

Every call is given the parameters and the local optimizer, so that what it does to them is seen by whoever
asks, in another process too.
"""

from __future__ import annotations

import gc
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

CLASS = "MyZero"


class Once:
    """Parameters as `model.parameters()` gives them: to be gone through once."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params, self._over, self.again = iter(params), False, False

    def __iter__(self) -> Iterator[nn.Parameter]:
        self.again = self.again or self._over
        return self

    def __next__(self) -> nn.Parameter:
        try:
            return next(self._params)
        except StopIteration:
            self._over = True
            raise


class Given(nn.Module):
    """A model whose gradients are given: those of its parameters are the coefficients."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.params = nn.ParameterList(params)

    def forward(self, coefficients: Sequence[torch.Tensor], without: Sequence[int] = ()) -> torch.Tensor:
        """Scalar; it does not use the parameters with the numbers `without`."""
        terms = [(param * of_param).sum() for param, of_param in zip(self.params, coefficients)]
        return torch.stack([term for number, term in enumerate(terms) if number not in without]).sum()


def memory_within_reach(of: Iterable[Any]) -> dict[int, int]:
    """The bytes of each memory that a tensor within reach of these objects lies in, by its address."""
    nbytes_at: dict[int, int] = {}
    seen: set[int] = set()
    left = list(of)
    while left:
        one = left.pop()
        ours = str(type(one).__module__).startswith("zero_ref_course")
        if ours or id(one) in seen or isinstance(one, (types.ModuleType, type, types.CodeType)):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            memory = one.untyped_storage()
            nbytes_at[memory.data_ptr()] = memory.nbytes()
            if one.is_leaf:
                left.append(one.grad)
        elif isinstance(one, types.FunctionType):  # not its globals, which may lead everywhere
            left += [cell.cell_contents for cell in one.__closure__ or ()]
        else:
            left += gc.get_referents(one)
    return nbytes_at


class Driver:
    """Does what it is asked for with the class in the names of a file.

    Args:
        names: what the file defines.
    """

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names
        self.mine: Any = None
        self.hooked = False
        self.after_hook: Callable[[], object] | None = None

    def __call__(self, what: str, *args: Any) -> Any:
        """Call the method of that name."""
        return getattr(self, what)(*args)

    def arguments(self) -> list[str] | None:
        """Of the class; None if there is none."""
        made = self.names.get(CLASS)
        return list(inspect.signature(made).parameters) if isinstance(made, type) else None

    def make(
        self, params: list[nn.Parameter], optimizer_class: type[Optimizer], options: dict[str, Any]
    ) -> tuple[bool, list[str], Any]:
        """Make one: whether it went through the parameters twice, what it has, and its local optimizer."""
        given = Once(params)
        self.mine = self.names[CLASS](given, optimizer_class, **options)
        has = [name for name in dir(self.mine) if not name.startswith("_")]
        return given.again, has, getattr(self.mine, "local", None)

    def call(self, method: str, args: list[Any], *_: Any) -> Any:
        """Call a method of it."""
        return getattr(self.mine, method)(*args)

    def param_groups(self, *_: Any) -> list[dict[str, Any]]:
        """Its groups, without the parameters."""
        groups = self.mine.param_groups
        return [{key: value for key, value in group.items() if key != "params"} for group in groups]

    def set_option(self, number: int, key: str, value: Any, *_: Any) -> None:
        """Set an option of one of its groups."""
        self.mine.param_groups[number][key] = value

    def backward(
        self,
        coefficients: list[torch.Tensor],
        without: list[int],
        after_hook: Callable[[], object] | None,
        measures: bool,
        params: list[nn.Parameter],
        *_: Any,
    ) -> list[int]:
        """Run a backward in which the parameters have these gradients; call `after_hook` after each hook.

        Returns:
            If it measures: the bytes of memory within the optimizer's reach that were not there before
            backward, after each hook and in the end.
        """
        loss, held = Given(params)(coefficients, without), list[int]()
        within_reach = [self.mine, self.names, params]
        before = memory_within_reach(within_reach) if measures else {}

        def look() -> None:
            now = memory_within_reach(within_reach)
            held.append(sum(nbytes for place, nbytes in now.items() if place not in before))

        self.after_hook = look if measures else after_hook
        if self.after_hook and not self.hooked:
            self.hooked = True
            for param in params:  # called after its own hooks, which were registered before
                param.register_post_accumulate_grad_hook(self._after_hook)
        loss.backward()
        if measures:
            look()
        return held

    def _after_hook(self, _: torch.Tensor) -> None:
        if self.after_hook:
            self.after_hook()
