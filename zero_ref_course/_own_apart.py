"""The reader's `my_zero.py` in processes apart, one beside each rank of the check that asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zero_ref.lab.own import CLASS, FILE
from zero_ref_course import Answer, ExerciseFailed, StillTheStub
from zero_ref_course._company import NotYet
from zero_ref_course.isolated import Cells, IsolatedAnswer

DRIVES = "from zero_ref_course.apart.own import Driver\ndrive = Driver(globals())\n"


class OwnApart:
    """A file that is not run here. It is given to a check in place of a path, and travels to ranks.

    Args:
        path: of the room in which its processes are started.
        seed: of the parameters and gradients, which a file could know beforehand; 0 for those that anybody
            can read.
    """

    def __init__(self, path: str, source: str, seed: int = 0) -> None:
        self.path, self.source, self.seed = path, source, seed

    def __fspath__(self) -> str:
        return FILE

    def opened(self) -> ApartZero:
        """Run the file on this rank.

        Raises:
            ExerciseFailed: it raises.
        """
        return ApartZero(self)

    def answer(self, function: str) -> IsolatedAnswer:
        """A function of the file."""
        return IsolatedAnswer(self.path, Cells((DRIVES,), self.source, function))


class _Driven(IsolatedAnswer):
    """Messages say what is called of the reader's class, and not by whom."""

    said = ""

    def text_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        return self.said


class ApartZero:
    """The reader's `MyZero` as a check uses it, while it is in another process.

    Attributes:
        local: a copy of the reader's local optimizer, which each call brings up to date in both directions.
    """

    def __init__(self, own: OwnApart) -> None:
        self._own = own
        self._drive = _Driven(own.path, Cells((DRIVES,), own.source, "drive"), may_return_none=True)
        self._drive.start()
        self._has: list[str] = []
        self._shared: list[Any] = []
        self.after_hook: Callable[[], object] | None = None
        self.local: Any = None
        self.given_again = False

    def arguments(self) -> list[str] | None:
        """Of the class; None if the file has none."""
        found = self._ask(CLASS, "arguments")
        return None if found is None else [str(name) for name in found]

    def function(self, name: str) -> Answer | None:
        """A function of the file; None if there is none."""
        answer = self._own.answer(name)
        try:
            answer.start()
        except ExerciseFailed as error:
            if str(error).endswith(f"does not define {name}."):
                return None
            raise
        return answer

    def make(
        self, params: list[nn.Parameter], optimizer_class: type[Optimizer], call: str, **options: Any
    ) -> ApartZero:
        """Make one of these parameters."""
        again, has, self.local = self._ask(call, "make", params, optimizer_class, options)
        self.given_again, self._has = bool(again), [str(name) for name in has]
        self._shared = [params, *([self.local] if isinstance(self.local, Optimizer) else [])]
        return self

    def __getattr__(self, name: str) -> Any:
        if name not in self.__dict__.get("_has", ()):
            raise AttributeError(name)
        return lambda *args: self._ask(f"{CLASS}.{name}()", "call", name, list(args), *self._shared)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Its groups; an option that is set in one of them is set in the other process."""
        if "param_groups" not in self._has:
            raise AttributeError("param_groups")
        groups = self._ask(f"{CLASS}.param_groups", "param_groups", *self._shared)
        return [_Group(self, number, group) for number, group in enumerate(groups)]

    def set_option(self, number: int, key: str, value: Any) -> None:
        """Set an option of a group there."""
        self._ask(f"{CLASS}.param_groups", "set_option", number, key, value, *self._shared)

    def backward(
        self, coefficients: Sequence[torch.Tensor], without: Sequence[int], measures: bool
    ) -> list[int]:
        """A backward there, where the reader's hooks are."""
        given = [list(coefficients), list(without), self.after_hook, measures]
        return [int(nbytes) for nbytes in self._ask("a backward", "backward", *given, *self._shared)]

    def _ask(self, said: str, *args: Any) -> Any:
        self._drive.said = said
        try:
            return self._drive(*args)
        except StillTheStub:
            raise NotYet(f"{said} raises NotImplementedError: it is still to be written.") from None


class _Group(dict[str, Any]):
    def __init__(self, zero: ApartZero, number: int, options: dict[str, Any]) -> None:
        super().__init__(options)
        self._zero, self._number = zero, number

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self._zero.set_option(self._number, key, value)
