"""An option, defined once: with the field of the dataclass that keeps its value.

A field is an option if its annotation has an `Option`:

    batch: Annotated[int, Option("sequences a rank", metavar="B", least=1)] = 1

The command line and settings in a file (`lab._arguments`), the values in JSON, the commands that are printed
and the controls of an explorer (`live.explorer.controls_of`) are made from these fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from zero_ref.simulator._checks import check_name

T = TypeVar("T")

NONE = "none"
"""The word that people give for a name that may be None, where a preset has chosen one."""


# Sphinx reads the annotations of fields and knows no f-strings there, so a help is put together by functions.


def listed(names: Iterable[str]) -> str:
    """The names, for a help.

    >>> listed(("float32", "bfloat16"))
    'float32, bfloat16'
    """
    return ", ".join(names)


def explained(names: Mapping[str, str]) -> str:
    """Each name, as it is typed, with what it means.

    >>> explained({"in_forward": "during the next forward"})
    'in-forward: during the next forward'
    """
    return "; ".join(f"{name.replace('_', '-')}: {what}" for name, what in names.items())


@dataclass(frozen=True)
class Option:
    """The values that a field may have, and the words by which people are asked for one.

    Without arguments it marks a field that is itself a dataclass, whose options are added.

    Args:
        help: what `--help` says; `%(default)s` stands for the default.
        name: for people, where that is not the field's name.
        metavar: what `--help` writes for the value; None for the name in capitals.
        choices: the names among which a text is chosen.
        offered: those of them that an explorer offers; all of them if there is none.
        least: the smallest number.
        above: a number that every value is above.
        most: the largest number that a command line takes. The dataclass takes more: what that costs is up
            to the caller.
        why: the end of the refusal of more than `most`.
        unit: how many of the field's units are one of those in which people are asked.
        kind: a subclass of str that refuses some texts, such as what cannot be the name of a file.
        several: a command line takes it several times.
        used_by: whether a strategy's `Recipe` uses a value; None for an option that every strategy uses.
        label: what an explorer writes beside its control; "" for no control.
        steps: the numbers that the control can be set to.
        after: the option that it follows in `--help`, where that is not the field's place.
    """

    help: str = ""
    _: KW_ONLY
    name: str = ""
    metavar: str | None = None
    choices: Collection[str] = ()
    offered: Collection[str] = ()
    least: float | None = None
    above: float | None = None
    most: float = math.inf
    why: str = ""
    unit: int = 1
    kind: type[str] | None = None
    several: bool = False
    used_by: Callable[[Any, Any], bool] | None = None
    label: str = ""
    steps: Sequence[int] = ()
    after: str = ""


@dataclass(frozen=True)
class OptionField:
    """A field that is an option.

    Args:
        path: the name of the field; before it those of the fields whose dataclasses it is in.
        type: bool, int, float or str. A field that may also be None has no value then.
        default: the field's.
    """

    path: tuple[str, ...]
    type: type
    default: Any
    option: Option

    @property
    def name(self) -> str:
        """The name of the field for people, in JSON and, with hyphens, in settings and on a command line."""
        return self.option.name or self.path[-1]

    @property
    def word(self) -> str:
        """The name on a command line: of what is on by default it is the one that turns it off."""
        return f"no_{self.name}" if self.default is True else self.name

    @property
    def flag(self) -> str:
        """The word of a command line that gives it."""
        return f"--{self.word.replace('_', '-')}"

    @property
    def opposite(self) -> str:
        """Of a bool, the word of a command line that says no to `flag`.

        >>> names = ("fp8", "no_sync", "without_ddp")
        >>> [OptionField((name,), bool, False, Option()).opposite for name in names]
        ['--no-fp8', '--sync', '--with-ddp']
        """
        for said, denied in {"--no-": "--", "--without-": "--with-"}.items():
            if self.flag.startswith(said):
                return self.flag.replace(said, denied, 1)
        return f"--no{self.flag[1:]}"

    @property
    def may_be_none(self) -> bool:
        """Whether "none" is one of the words: of a name that is not chosen by default."""
        return bool(self.option.choices) and self.default is None

    def asked(self, value: Any) -> Any:
        """A field's value as people give it: names have hyphens, and a number is of their unit.

        >>> OptionField(("size",), int, None, Option(unit=1024)).asked(512)
        0.5
        """
        if self.option.choices and isinstance(value, str):
            return value.replace("_", "-")
        if self.type is bool:
            return value is not self.default
        return value if value is None or self.option.unit == 1 else value / self.option.unit

    def kept(self, value: Any) -> Any:
        """The field's value for what people gave; the other way round than `asked`."""
        if self.may_be_none and value == NONE:
            return None
        if self.option.choices:
            return next((name for name in self.option.choices if self.asked(name) == value), value)
        if self.type is bool:
            return value is not self.default
        return self.type(value if self.option.unit == 1 else math.ceil(value * self.option.unit))

    def value_of(self, made: Any) -> Any:
        """The field's value in an instance of the dataclass."""
        for name in self.path:
            made = getattr(made, name)
        return made

    def is_used(self, how: Any, value: Any) -> bool:
        """Whether a strategy's recipe uses this value of the field."""
        return self.option.used_by is None or self.option.used_by(how, value)


def options_of(cls: Any) -> tuple[OptionField, ...]:
    """The options of a dataclass, or of an instance of one, in the order of `--help`."""
    of: Any = cls if isinstance(cls, type) else type(cls)
    return _options_of(of)


@cache
def _options_of(cls: Any) -> tuple[OptionField, ...]:
    found: list[OptionField] = []
    hints = get_type_hints(cls, include_extras=True)
    for one in fields(cls):
        hint = hints[one.name]
        for option in (each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Option)):
            kind = hint.__origin__
            if is_dataclass(kind):
                found += [replace(inner, path=(one.name, *inner.path)) for inner in options_of(kind)]
            else:
                (kind,) = (each for each in get_args(kind) or (kind,) if each is not NoneType)
                default = None if one.default is MISSING else one.default
                found.append(OptionField((one.name,), kind, default, option))
    for late in [one for one in found if one.option.after]:
        earlier = [one for one in found if one.path[-1] == late.option.after]
        if earlier:  # else it is in a dataclass around this one
            found.remove(late)
            found.insert(1 + found.index(earlier[0]), late)
    return tuple(found)


def from_options(cls: type[T], given: Mapping[str, Any], **others: Any) -> T:
    """A dataclass from what people gave, by the words of its options; a value of None is the field's default.

    Args:
        others: fields that are not taken from there.
    """
    hints = get_type_hints(cls)
    values: dict[str, Any] = {}
    for one in options_of(cls):
        field = one.path[0]
        if field in others or field in values:
            continue
        if len(one.path) > 1:
            values[field] = from_options(hints[field], given)
        elif (value := given.get(one.word)) is not None:
            values[field] = one.kept(value)
    return cls(**values, **others)


def check_options(made: Any, but: Collection[str] = ()) -> None:
    """Refuse a name that is none of the choices, and a number that is too small.

    Args:
        but: fields that are not checked.
    Raises:
        ValueError: with the field's name and the value.
    """
    for one in options_of(made):
        field, option, value = one.path[0], one.option, one.value_of(made)
        if value is None or field in but or len(one.path) > 1:  # a dataclass inside has checked its own
            continue
        if option.choices:
            check_name(field, value, option.choices)
        if option.least is not None and not value >= option.least:
            bound = f"at least {option.least:,}" if option.least else "0 or more"
            raise ValueError(f"{field} must be {bound}, got {value}.")
        if option.above is not None and not (math.isfinite(value) and value > option.above):
            raise ValueError(f"{field} must be above {option.above:g}, got {value:g}.")


def values_of(made: Any) -> dict[str, Any]:
    """The value of each option by its name, and in the unit that people give it in, for JSON."""
    found = {}
    for one in options_of(made):
        value = one.value_of(made)
        found[one.name] = value if one.option.unit == 1 else one.asked(value)
    return found


def used_values(made: Any, how: Any) -> dict[str, Any]:
    """The values that some strategies alone use, by their fields: the default where this recipe does not.

    Args:
        how: a `Recipe`.
    """
    found = {}
    for one in options_of(made):
        if one.option.used_by is not None:
            value = one.value_of(made)
            found[one.path[-1]] = value if one.is_used(how, value) else one.default
    return found


def words_of(made: Any, how: Any, but: Iterable[str] = ()) -> list[str]:
    """The words of a command line that give these values, without those that are as by default.

    Args:
        how: the strategy's `Recipe`: what it does not use is left out.
        but: options that are left out.
    """
    words = []
    for one in options_of(made):
        value = one.value_of(made)
        if value != one.default and one.name not in but and one.is_used(how, value):
            words += [one.flag] if one.type is bool else [one.flag, str(one.asked(value))]
    return words
