"""Settings in a file of TOML or JSON: checked as the words of a command line are, and written as TOML.

The keys are the names of the options: `learning-rate = 1e-3` is `--learning-rate 1e-3`. No torch.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any, get_type_hints

from zero_ref.simulator._checks import nearest
from zero_ref.simulator._records import parse_json, read_text

KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}

NO_SETTINGS = {"help", "config", "show_config", "dry_run", "command", "run"}
"""The names in a parser's namespace that are no settings: requests of one call, and the function to call."""


def read_settings(actions: Iterable[argparse.Action], path: str) -> dict[str, Any]:
    """The values that a file gives to options, by the names under which argparse keeps them.

    Args:
        actions: the options, as `add_argument` returned them. One that can be given several times takes a
            list, or one value.
        path: of TOML; of JSON if its name ends in `.json`.
    Raises:
        ValueError: the file cannot be read, or is neither; an option is unknown; a value is of another type
            than the option's, or such as the option refuses. The message names the file and the key.
    """
    try:
        text = read_text(path)
        values = parse_json(text) if path.endswith(".json") else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"--config {path} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None
    if not isinstance(values, dict):
        raise ValueError(f"--config {path} must hold an object of settings.")
    options = {
        next(word for word in action.option_strings if word.startswith("--"))[2:]: action
        for action in actions
        if action.option_strings and action.dest not in NO_SETTINGS
    }
    made = {}
    for key, value in values.items():
        if key not in options:
            close = nearest(key, options)
            remedy = f"did you mean {close!r}?" if close else "take it out of the file."
            raise ValueError(f"--config {path}: no setting of this command is called {key!r}; {remedy}")
        action = options[key]
        try:
            if isinstance(action, argparse._AppendAction):
                made[action.dest] = [
                    _value(action, each) for each in (value if isinstance(value, list) else [value])
                ]
            else:
                made[action.dest] = _value(action, value)
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise ValueError(f"--config {path}, {key}: {error}") from None
    return made


def _value(action: argparse.Action, value: Any) -> Any:
    """The value of an option, of its type and within its range."""
    kind = bool if action.nargs == 0 else _kind(action.type)
    given = type(value)
    if given is not kind and (given, kind) != (int, float):
        raise ValueError(f"it must be {KINDS[kind]}, got {_shown(value)}")
    made = action.type(str(value)) if callable(action.type) else value
    if action.choices is not None and made not in action.choices:
        raise ValueError(
            f"invalid choice: {_shown(value)} (choose from {', '.join(map(str, action.choices))})"
        )
    return made


def _kind(convert: Any) -> type:
    """The type of a value in the file, for an option whose words this function converts."""
    kind = get_type_hints(convert).get("return", str) if callable(convert) else str
    return kind if kind in KINDS else str


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text):,} characters)"


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings of a call by the names of the options, without those that have no value."""
    return {
        dest.replace("_", "-"): value
        for dest, value in vars(arguments).items()
        if dest not in NO_SETTINGS and value is not None
    }


def as_toml(settings: Mapping[str, Any]) -> str:
    """Settings as lines of TOML.

    >>> print(as_toml({"steps": 200, "learning-rate": 2e-3, "strategy": ["ddp", "zero"], "resume": False}))
    steps = 200
    learning-rate = 0.002
    strategy = ["ddp", "zero"]
    resume = false
    """
    # A value of JSON is one of TOML, where text keeps its characters but for one that TOML wants escaped.
    written = {key: json.dumps(value, ensure_ascii=False) for key, value in settings.items()}
    return "\n".join(f"{key} = {value}" for key, value in written.items()).replace("\x7f", "\\u007f")
