"""The words of a command line: what each kind of value may be, and where what comes out is written.

`zero-ref` and `python -m zero_ref.lab.train` share it. A number outside its range and a place that cannot be
written are refused before any work, in one paragraph, with exit code 2. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import stat
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from zero_ref.lab.settings import read_settings
from zero_ref.simulator._checks import nearest
from zero_ref.simulator.options import NONE, OptionField

MOST_RANKS = 256
"""Real ranks: each is a process of this machine with torch in it."""

MOST_SIMULATED_RANKS = 2**20
"""Ten times the largest cluster there is. Each of them costs some microseconds and a kilobyte of plan."""

LARGEST_SEED = 2**32 - 1
"""Steps and ranks draw from generators whose seeds, made of this one, have 64 bits."""


# --------------------------------------------------------------------------------------------------- numbers


def whole(least: int, most: int, why: str = "") -> Callable[[str], int]:
    """The type of an argument that is a whole number from `least` to `most`; `why` ends the refusal of more.

    >>> whole(1, 256)("12")
    12
    """

    def convert(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{short(text)!r} is not a whole number") from None
        if number < least:
            raise argparse.ArgumentTypeError(f"it must be at least {least:,}, got {short(text)}")
        if number > most:
            reason = f": {why}" if why else ""
            raise argparse.ArgumentTypeError(f"it must be at most {most:,}, got {short(text)}{reason}")
        return number

    return convert


def number(
    *, above: float | None = None, least: float | None = None, most: float, why: str = ""
) -> Callable[[str], float]:
    """The type of an argument that is a finite number, above one bound or at least another, up to `most`."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{short(text)!r} is not a number") from None
        if not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"it must be finite, got {short(text)}")
        if above is not None and value <= above:
            raise argparse.ArgumentTypeError(f"it must be above {above:g}, got {short(text)}")
        if least is not None and value < least:
            raise argparse.ArgumentTypeError(f"it must be {least:g} or more, got {short(text)}")
        if value > most:
            reason = f": {why}" if why else ""
            raise argparse.ArgumentTypeError(f"it must be at most {most:,.12g}, got {short(text)}{reason}")
        return value

    return convert


rank_processes = whole(1, MOST_RANKS, "each rank is a process of this machine")
simulated_ranks = whole(1, MOST_SIMULATED_RANKS, "every rank is listed, and no cluster has so many")
seed = whole(0, LARGEST_SEED)
positive = whole(1, 10**9)


def short(text: str) -> str:
    """A user's word in a message: the beginning of what is long."""
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text):,} characters)"


def printable(text: str) -> str:
    r"""Return text of unknown origin with escapes for characters that a terminal obeys or cannot show.

    >>> printable("a title\x1b[2J\n") == r"a title\x1b[2J\n"
    True
    """
    return "".join(
        each if each.isprintable() or (each.isspace() and each > "\x9f") else ascii(each)[1:-1]
        for each in text
    )


# --------------------------------------------------------------------------------------------------- options


def add_options(parser: argparse.ArgumentParser, options: Iterable[OptionField]) -> None:
    """Add options that are defined with the fields of a dataclass."""
    for one in options:
        option, default = one.option, one.asked(one.default)
        said: dict[str, Any] = {"dest": one.word, "help": option.help.replace("%(default)s", str(default))}
        if one.type is bool:
            parser.add_argument(one.flag, one.opposite, action=_Switch, default=False, **said)
        else:
            several: dict[str, Any] = {"action": "append"} if option.several else {"default": default}
            parser.add_argument(
                one.flag,
                type=_type_of(one),
                choices=[*map(one.asked, option.choices), *[NONE] * one.may_be_none] or None,
                metavar=option.metavar,
                **several,
                **said,
            )


class _Switch(argparse.Action):
    """A bool with two words: the first one says yes, and the second one says no to what a preset has set."""

    def __init__(self, option_strings: Sequence[str], dest: str, **said: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **said)

    def __call__(self, _: Any, namespace: argparse.Namespace, values: Any, word: str | None = None) -> None:
        setattr(namespace, self.dest, word == self.option_strings[0])


def _type_of(one: OptionField) -> Callable[[str], Any]:
    """Return the function that converts a word to a value of the option, or refuses it."""
    option = one.option
    if option.choices:
        return one.asked
    if one.type is int and option.unit == 1:
        return whole(int(option.least or 0), int(option.most), option.why)
    if one.type in (int, float):
        return number(above=option.above, least=option.least, most=option.most, why=option.why)
    return option.kind or str


# ----------------------------------------------------------------------------------------------------- files


class Output(str):
    """A file or folder to write to. `check` tries beforehand whether that is possible, and leaves no trace.

    Raises:
        argparse.ArgumentTypeError: (in the constructor) the text is empty or cannot be the name of a file.
    """

    __slots__ = ()

    def __new__(cls, text: str) -> Output:
        if not text or "\0" in text:
            raise argparse.ArgumentTypeError(f"{text!r} cannot be the name of a file or folder")
        return super().__new__(cls, text)

    def check(self) -> None:
        """Raise an OSError if this cannot be written."""
        raise NotImplementedError


class OutputFile(Output):
    """A file to write in a folder that is there; a device such as /dev/null will do too."""

    __slots__ = ()

    def check(self) -> None:
        """Open the file for appending; where there is none, make it and take it away again."""
        if not os.path.isdir(os.path.dirname(os.path.realpath(self))):
            raise FileNotFoundError(f"there is no such folder: {short(os.path.dirname(self) or '.')}")
        # A pipe that nobody reads is an error so, not a wait; and no file is emptied.
        with _new_file(os.path.realpath(self)) as made:
            if not made:
                os.close(os.open(self, os.O_WRONLY | os.O_APPEND | getattr(os, "O_NONBLOCK", 0)))


class ReplacedFile(Output):
    """A file that is written beside its place and then moved there, its folder made if need be."""

    __slots__ = ()

    def check(self) -> None:
        """Make a file beside it, or in the folder where its own folder will be, and take it away again."""
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(os.stat(self).st_mode):
                raise FileExistsError("it is a folder, a pipe or a device, and must be a file or nothing yet")
        folder, name = os.path.split(os.path.realpath(self))
        _check_folder(folder, f"{name}.part")


class OutputFolder(Output):
    """A folder, made if need be, for files to be written to."""

    __slots__ = ()

    def check(self) -> None:
        """Make a file in it, or in the folder where it will be, and take it away again."""
        _check_folder(os.path.realpath(self), f".zero_ref-{os.getpid()}")


def _check_folder(folder: str, name: str) -> None:
    """Raise an OSError if a file of this name cannot be made in the folder, or the folder cannot be made."""
    if os.path.isdir(folder):
        with _new_file(os.path.join(folder, name)):
            return
    if os.path.lexists(folder):
        raise NotADirectoryError(f"{short(folder)} is no folder")
    # Who can make a file there can make a folder, and in it what follows.
    _check_folder(os.path.dirname(folder), os.path.basename(folder))


@contextlib.contextmanager
def _new_file(path: str) -> Iterator[bool]:
    """Make a file and take it away again; False, and nothing done, if something of this name is there."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        yield False
    else:
        os.unlink(path)
        yield True


def unwritable(arguments: argparse.Namespace) -> str | None:
    """Describe the error of the first argument that cannot be written to; None if all can."""
    for name, value in vars(arguments).items():
        if isinstance(value, Output):
            try:
                value.check()
            except OSError as error:
                option = f"--{name.replace('_', '-')} {short(value)}"
                return f"{option} cannot be written: {error.strerror or error}."
    return None


# ---------------------------------------------------------------------------------------------------- in, out


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are one paragraph, without the list of all options.

    Attributes:
        reads_settings: `--config FILE` is one of its options, and gives values to those that are not among
            the words.
    """

    reads_settings = False

    def error(self, message: str) -> NoReturn:
        """End with code 2."""
        complain(self.prog, f"{message} ({self.prog} --help lists what there is)")
        raise SystemExit(2)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, but also read settings, and refuse unknown words and a value `--`, which
        argparse would drop.
        """
        args = sys.argv[1:] if args is None else list(args)
        for word in args:
            if word.startswith("--") and word.endswith("=--"):
                self.error(f"argument {short(word[:-3])}: '--' is no value")
        given, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}{self._meant(rest)}")
        if not self.reads_settings or given.config is None:
            return given, rest
        try:
            settings = read_settings(self._actions, given.config)
        except ValueError as error:
            self.error(str(error))
        # argparse leaves a value that is there, so None stays where no word gives one. Words win.
        given, _ = super().parse_known_args(args, argparse.Namespace(**dict.fromkeys(settings)))
        for name, value in settings.items():
            if getattr(given, name) is None:
                setattr(given, name, value)
        return given, []

    def _meant(self, unknown: Iterable[str]) -> str:
        """The option that was meant by the first of these words that is like one."""
        for word in unknown:
            if word.startswith("--") and (
                close := nearest(word.partition("=")[0], self._option_string_actions)
            ):
                return f"; did you mean {close}?"
        return ""


def complain(who: str, message: str) -> None:
    """One paragraph on standard error, at most some lines long, whatever words the user gave."""
    message = re.sub(r"\S{120,}", lambda word: short(word[0]), message)
    message = printable(" ".join(message.split()))
    print(f"{who}: {textwrap.shorten(message, 1500, placeholder=' ...')}", file=sys.stderr)


def json_text(value: Any, indent: int | None = 2) -> str:
    """JSON that every reader takes: null for a number that is not finite, which JSON does not have."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [finite(each) for each in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(finite(value), indent=indent, allow_nan=False)
