"""JSON files that may be written by hand or cut off, read with limits and checked field by field.

`read_json` reads a file, `record` makes a dataclass or a NamedTuple from its values. Their errors say in one
sentence what is wrong, and where.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import stat
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from zero_ref.simulator._checks import nearest

T = TypeVar("T")

LARGEST_FILE = 2**28
"""The most bytes that are read. The files of this package have some MB; a notebook with pictures has more."""

LARGEST_WHOLE = 2**63 - 1
"""The largest count in a record. Larger numbers overflow in computations."""


def read_json(path: str | Path) -> Any:
    """The values in a JSON file.

    Raises:
        OSError, ValueError: as `read_text` and `parse_json`.
    """
    return parse_json(read_text(path))


def read_text(path: str | Path) -> str:
    """The text in a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no regular file, too large, or not UTF-8.
    """
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:  # a pipe would hang
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is a folder, a pipe or a device, and no file")
        if status.st_size > LARGEST_FILE:
            raise ValueError(f"it has {status.st_size:,} bytes, and at most {LARGEST_FILE:,} are read")
        content = file.read(LARGEST_FILE)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not text in UTF-8: {error.reason} at byte {error.start:,}") from None


def parse_json(text: str) -> Any:
    """The values in a JSON text.

    >>> parse_json('{"ms": [1, 2.5]}')
    {'ms': [1, 2.5]}

    Raises:
        ValueError: it is not JSON, has NaN, Infinity or a number beyond a float, or is nested too deeply.
    """
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is not JSON that can be read: it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    except ValueError as error:  # a whole number of thousands of digits
        raise ValueError(f"it is not JSON that can be read: {error}") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number in JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:40]} is beyond every number that a computer counts with")
    return number


def record(cls: type[T], value: Any, what: str) -> T:
    """A dataclass or a NamedTuple from the values of JSON, with the types of all its fields checked.

    >>> from zero_ref.simulator.cluster import Link
    >>> record(Link, {"latency_us": 3, "gb_per_s": 450.0}, "within")
    Link(latency_us=3.0, gb_per_s=450.0, reached=1.0)

    Args:
        cls: its fields are str, int, float, bool, None, or records, or lists, tuples and mappings from str
            of these. A field of type Any takes every value, unchecked.
        what: the name of the value in errors.
    Raises:
        ValueError: a field is missing, unknown or of another type, a number is not finite or above
            LARGEST_WHOLE, or as the class itself.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be an object with {', '.join(_fields(cls))}, not {_shown(value)}")
    unknown = [name for name in value if name not in _fields(cls)]
    if unknown:
        close = nearest(unknown[0], _fields(cls))
        meant = f" (did you mean {_shown(close)}?)" if close else ""
        raise ValueError(f"{what} has no {_shown(unknown[0])}{meant}; it has {', '.join(_fields(cls))}")
    missing = [name for name in _fields(cls) if name not in value and name not in _with_default(cls)]
    if missing:
        raise ValueError(f"{what} has no {', '.join(missing)}")
    hints = get_type_hints(cls)
    return cls(**{name: checked(hints[name], each, f"{what}.{name}") for name, each in value.items()})


def _fields(cls: Any) -> tuple[str, ...]:
    return cls._fields if hasattr(cls, "_fields") else tuple(each.name for each in dataclasses.fields(cls))


def _with_default(cls: Any) -> set[str]:
    if hasattr(cls, "_field_defaults"):
        return set(cls._field_defaults)
    missing = dataclasses.MISSING
    return {
        each.name
        for each in dataclasses.fields(cls)
        if (each.default, each.default_factory) != (missing, missing)
    }


def checked(hint: Any, value: Any, what: str) -> Any:
    """The value, converted for a field of this type.

    >>> checked(float, 3, "ms")
    3.0

    Args:
        hint: as a field of `record` may have.
        what: the name of the value in errors.
    Raises:
        ValueError: the value is of another type.
    """
    origin, of = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in of:
            return None
        (hint,) = (each for each in of if each is not type(None))
        return checked(hint, value, what)
    if origin in (list, tuple):
        return _checked_items(origin, of, value, what)
    if origin in (dict, Mapping):
        if not isinstance(value, dict):
            raise ValueError(f"{what} must be an object, not {_shown(value)}")
        return {
            _text(name, what): checked(of[1], each, f"{what}[{_shown(name)}]") for name, each in value.items()
        }
    if hint is float:
        return _number(value, what)
    if hint is int:
        if not isinstance(value, int) or isinstance(value, bool) or abs(value) > LARGEST_WHOLE:
            raise ValueError(f"{what} must be a whole number below 2**63, not {_shown(value)}")
        return value
    if hint in (str, bool):
        if not isinstance(value, hint):
            kind = "text" if hint is str else "true or false"
            raise ValueError(f"{what} must be {kind}, not {_shown(value)}")
        return _text(value, what) if isinstance(value, str) else value
    return record(hint, value, what)


def _text(value: str, what: str) -> str:
    """The text, which a terminal may be shown."""
    if re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", value):
        raise ValueError(f"{what} has a control character: {_shown(value)}")
    return value


def _checked_items(kind: Any, of: tuple[Any, ...], value: Any, what: str) -> Any:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{what} must be a list, not {_shown(value)}")
    if kind is list or of[1:] == (...,):
        of = of[:1] * len(value)
    if len(of) != len(value):
        raise ValueError(f"{what} must have {len(of)} items, not {len(value)}")
    return kind(checked(hint, each, f"{what}[{place}]") for place, (hint, each) in enumerate(zip(of, value)))


def _number(value: Any, what: str) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise ValueError(f"{what} must be a number, not {_shown(value)}")


def _shown(value: Any) -> str:
    """A value as errors show it, shortened."""
    if isinstance(value, (dict, list, tuple)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if isinstance(value, int) and abs(value) > LARGEST_WHOLE:
        return f"one of {value.bit_length():,} bits"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:50]}... ({len(text):,} characters)"
