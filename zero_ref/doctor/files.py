"""Factories that a user names on a command line: FILE.py:NAME, or a class such as torch.optim.AdamW."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_ref.lab.own import load_own


@dataclass(frozen=True)
class InFile:
    """A name in a Python file, to be called on a rank: the file is run there, with the rights of who asks.

    >>> InFile.of("program.py:sharded")
    InFile(path='program.py', name='sharded')
    """

    path: str
    name: str

    @classmethod
    def of(cls, text: str) -> InFile:
        """From FILE.py:NAME.

        Raises:
            ValueError: there is no colon, or nothing on one side of it.
        """
        path, _, name = text.rpartition(":")
        if not path or not name.isidentifier():
            raise ValueError(f"{text!r} is not FILE.py:NAME, such as program.py:sharded.")
        return cls(path, name)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.loaded())

    @property
    def __name__(self) -> str:
        return f"{self.path}:{self.name}"

    def loaded(self) -> Any:
        """Return the object that has this name in the file.

        Raises:
            ValueError: the file has no such name, or what it has cannot be called.
            OSError, SyntaxError, BaseException: as `zero_ref.lab.own.load_own`.
        """
        with as_script(self.path):
            module = load_own(self.path)
        found = getattr(module, self.name, None)
        if not callable(found):
            there = ", ".join(name for name, one in vars(module).items() if _is_own(one, module.__name__))
            raise ValueError(f"{self.path} has no function {self.name}. It has: {there or 'none'}.")
        return found

    def __call__(self, *args: Any) -> Any:
        factory = self.loaded()
        with as_script(self.path):
            return factory(*args)


@contextlib.contextmanager
def as_script(path: str) -> Iterator[None]:
    """A context in which a file finds the modules beside it, and no arguments: those are the doctor's."""
    folder, arguments = str(Path(path).resolve().parent), sys.argv
    if folder not in sys.path:
        sys.path.insert(
            0, folder
        )  # for as long as the process lives: a function may import when it is called
    sys.argv = [path]
    try:
        yield
    finally:
        sys.argv = arguments


def _is_own(value: Any, module: str) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module


def imported(dotted: str) -> Any:
    """A class by its dotted name.

    >>> imported("collections.OrderedDict").__name__
    'OrderedDict'

    Raises:
        ValueError: there is none.
    """
    module, _, name = dotted.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{dotted!r} cannot be imported ({error}): write such as torch.optim.AdamW."
        ) from None
    if not callable(found):
        raise ValueError(f"{dotted} is a {type(found).__name__}, and no optimizer class.")
    return found


def options_from(words: list[str]) -> dict[str, Any]:
    """Options as NAME=VALUE; a value is Python's literal, or else text.

    >>> options_from(["lr=0.05", "betas=(0.9, 0.95)", "amsgrad=True"])
    {'lr': 0.05, 'betas': (0.9, 0.95), 'amsgrad': True}

    Raises:
        ValueError: a word is not NAME=VALUE.
    """
    options: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"{word!r} is not NAME=VALUE, such as lr=0.05.")
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[name] = value
    return options
