"""The reader's `my_zero.py` on a rank: a check makes the file's optimizer, and runs backwards with it."""

from __future__ import annotations

import gc
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zero_ref.lab.own import CLASS, CLASS_3, load_own
from zero_ref_course import Answer


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
    """A model whose gradients are given: the gradient of each parameter is its coefficient."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.params = nn.ParameterList(params)

    def forward(self, coefficients: Sequence[torch.Tensor], without: Sequence[int] = ()) -> torch.Tensor:
        """Return a scalar, which does not depend on the parameters with the numbers `without`."""
        terms = [(param * of_param).sum() for param, of_param in zip(self.params, coefficients)]
        return torch.stack([term for number, term in enumerate(terms) if number not in without]).sum()


def memory_within_reach(of: Iterable[Any]) -> dict[int, int]:
    """The bytes of each storage of a tensor that these objects refer to, by the storage's address."""
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


class OwnFile:
    """The reader's file, run on this rank.

    Args:
        path: of the file.
    Raises:
        BaseException: a line of the file raised it.

    Attributes:
        names: what the file defines.
        mine: the reader's optimizer, once it is made.
        given_again: the optimizer went through the parameters twice.
        after_hook: is called after each hook in a backward that does not measure.
    """

    def __init__(self, path: str) -> None:
        self.names = vars(load_own(path))
        self._params: list[nn.Parameter] = []
        self._hooked = False
        self._called: Callable[[], object] | None = None
        self.mine: Any = None
        self.given_again = False
        self.after_hook: Callable[[], object] | None = None

    def function(self, name: str) -> Answer | None:
        """Return a function of the file, or None if there is none."""
        found = self.names.get(name)
        return None if found is None else Answer(found)

    def arguments(self, name: str = CLASS) -> list[str] | None:
        """Return the arguments of the class of this name, or None if there is no such class."""
        made = self.names.get(name)
        return list(inspect.signature(made).parameters) if isinstance(made, type) else None

    def make(self, params: list[nn.Parameter], optimizer_class: type[Optimizer], **options: Any) -> Any:
        """Make the reader's optimizer of these parameters."""
        self._params, given = params, Once(params)
        try:
            self.mine = self.names[CLASS](given, optimizer_class, **options)
        finally:
            self.given_again = given.again
        return self.mine

    def make_3(self, model: nn.Module, optimizer_class: type[Optimizer], **options: Any) -> Any:
        """Make the reader's optimizer of stage 3 of this model."""
        return self.names[CLASS_3](model, optimizer_class, **options)

    def backward(
        self, coefficients: Sequence[torch.Tensor], without: Sequence[int], measures: bool
    ) -> list[int]:
        """Run a backward in which the parameters have these gradients.

        Returns:
            If it measures: the bytes of memory within the optimizer's reach that were not there before
            backward, after each hook and in the end.
        """
        loss, held = Given(self._params)(coefficients, without), list[int]()
        within_reach = [self.mine, self.names, self._params]
        before = memory_within_reach(within_reach) if measures else {}

        def look() -> None:
            now = memory_within_reach(within_reach)
            held.append(sum(nbytes for place, nbytes in now.items() if place not in before))

        self._called = look if measures else self.after_hook
        if self._called and not self._hooked:
            self._hooked = True
            for param in self._params:  # called after its own hooks, which were registered before
                param.register_post_accumulate_grad_hook(self._after_hook)
        loss.backward()
        if measures:
            look()
        return held

    def _after_hook(self, _: torch.Tensor) -> None:
        if self._called:
            self._called()
