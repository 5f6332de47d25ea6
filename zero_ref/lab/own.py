"""The reader's own optimizer: the file that the book builds, run on a rank.

The file is run anew in each call, so an edit counts at once. It is run with the rights of whoever asks.
"""

from __future__ import annotations

import linecache
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

CLASS = "MyZero"
"""What the class in the reader's file is called."""

FILE = "my_zero.py"
"""What the book calls the file."""


def load_own(path: str | os.PathLike[str]) -> ModuleType:
    """The reader's file as a module.

    Raises:
        OSError: it cannot be read.
        SyntaxError: it is not Python.
        BaseException: what its own lines raise.
    """
    file = os.path.realpath(path)
    source = Path(file).read_bytes()
    linecache.checkcache(file)  # error messages quote it as it is now
    module = ModuleType(Path(FILE).stem)
    module.__file__ = file
    sys.modules[module.__name__] = module  # dataclasses and pickle look there
    exec(compile(source, file, "exec", dont_inherit=True), module.__dict__)
    return module


def own_class(path: str | os.PathLike[str]) -> Any:
    """The class `MyZero` of the reader's file.

    Raises:
        ValueError: the file has no such class.
        BaseException: as `load_own`.
    """
    made = getattr(load_own(path), CLASS, None)
    if not isinstance(made, type):
        raise ValueError(f"{path} has no class {CLASS}: the book begins it in chapter 4.")
    return made
