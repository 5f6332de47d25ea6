"""Odd command lines and odd files: each call ends with a result or with one paragraph, before any work.

Options are read off the parser, so that a new command or option is tried without a line here. What a command
does behind its checks, training and timing, is replaced by the note that it would have begun.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from zero_ref import cli
from zero_ref.lab._arguments import Output, OutputFile
from zero_ref.simulator.cluster import cluster
from zero_ref_course.notebook import Verdict

CALLS = 30
"""The calls of each command: some seconds all together. By hand many more: ZERO_REF_FUZZ_CALLS=5000."""

NUMBERS = ["0", "-1", "-4", "1", "2", "3", "7", "1.5", "1e3", "1e308", "1e-320", "nan", "inf", "-inf", "-0.0"]
NUMBERS += [
    "1" + "0" * 18,
    "9" * 30,
    "9" * 5000,
    "0:2",
    "0:1e308",
    "0:nan",
    "99:1",
    "1e18:1",
    ":",
    "0x10",
    "1_0",
]
WORDS = ["", " ", "text", "ü٣", "\udcff", "[/]", "[bold", "--", "-", "\0", "a\nb", "True", "~", "x" * 300]
UNWRITABLE = [
    ".",
    "folder",
    "no/such/folder/x",
    "file/x",
    "loop",
    "pipe",
    "socket",
    "/proc/x",
    "/dev/null/x",
    "a\0b",
]
ODD_FILES = ["empty", "brace", "list", "null", "number", "nan", "deep", "deeper", "huge", "beyond", "bytes"]
TEXTS = {
    "empty": "",
    "brace": "{",
    "list": "[1]",
    "null": "null",
    "number": "3",
    "nan": '{"name": NaN}',
    "deep": "[" * 100_000 + "]" * 100_000,
    "deeper": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "huge": '{"a": ' + "9" * 5000 + "}",
    "beyond": '{"a": 1e999}',
    "bytes": "\udcff",
}
VALUES = [
    None,
    True,
    -1,
    0,
    1e308,
    1e-308,
    "x",
    "\ud800",
    [],
    {},
    10**400,
    "9" * 30,
    0.5,
    [1],
    {"a": 1},
    [[]],
]

NOTEBOOK = {
    "cells": [
        {"cell_type": "markdown", "source": ["# One\n", "{term}`shard`"], "metadata": {}},
        {"cell_type": "code", "source": "import math", "metadata": {}},
        {"cell_type": "code", "source": "raise NotImplementedError", "metadata": {"tags": ["exercise"]}},
        {"cell_type": "code", "source": 'check("ledger.floor", floor)', "metadata": {"tags": ["check"]}},
        {"cell_type": "code", "source": "def floor(): ...", "metadata": {"tags": ["solution"]}},
    ],
    "metadata": {},
    "nbformat": 4,
    "nbformat_minor": 5,
}
FACTORY = """import torch
def plain(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)
sharded = plain
"""
GPT2 = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 10, "n_positions": 4}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "head_dim": 16,
    "tie_word_embeddings": False,
}
COMMANDS = list(cli.make_parser()[1])


class WorkBegan(BaseException):
    """All checks have passed, and the command's work would have begun."""


@pytest.fixture(autouse=True)
def nothing_is_trained_or_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(*_: Any, **__: Any) -> Any:
        raise WorkBegan

    for place in (
        "zero_ref.lab.compare.compare",
        "zero_ref.lab.demo.run_demo",
        "zero_ref.lab.ranks.run",
        "zero_ref.lab.ranks.Pool",
    ):
        monkeypatch.setattr(place, begin)
    passed = Verdict("passed", "it passed.")
    for module in ("notebook", "grading"):
        monkeypatch.setattr(f"zero_ref_course.{module}.grade_alone", lambda *_: passed)


@pytest.fixture
def odd_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with one of everything that is no good file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "inside").touch()
    (tmp_path / "file").write_text("{}")
    os.mkfifo("pipe")
    os.symlink("loop", "loop")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
    (tmp_path / "notebooks").mkdir()
    for name in ("notebooks/01_one.ipynb", "good.ipynb"):
        Path(name).write_text(json.dumps(NOTEBOOK))
    for name, text in TEXTS.items():
        Path(name).write_text(text, errors="surrogateescape")
    (tmp_path / "factory.py").write_text(FACTORY)
    return tmp_path


class Ended(NamedTuple):
    """The result of a call; the code is None if work began."""

    words: list[str]
    code: int | None
    out: str
    err: str


Call = Callable[..., Ended]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Call the command line and check what every call promises."""

    def ended(*words: str) -> Ended:
        code: int | None
        try:
            code = cli.main(words)
        except SystemExit as ended_early:
            code = int(str(ended_early.code))
        except WorkBegan:
            code = None
        except BaseException as error:
            error.add_note(f"zero-ref {' '.join(map(repr, words))}")
            raise
        printed = capsys.readouterr()
        found = Ended(list(words), code, printed.out, printed.err)
        assert code in (None, 0, 1, 2), found
        if code == 2:
            assert printed.out == "", found
            assert re.fullmatch(r"zero-ref[^\n]*: [^\n]{10,1600}\n", printed.err), found
        if code == 0:
            said = printed.out
            for word in words:  # a file may be called "0:nan"
                said = said.replace(word.partition("=")[2] or word, "")
            assert not re.search(r"\b(nan|inf|NaN|Infinity)\b", said), found
            if "--json" in words and printed.out:  # elsewhere it takes a file
                json.loads(printed.out)
        return found

    return ended


def calls() -> int:
    return int(os.environ.get("ZERO_REF_FUZZ_CALLS", CALLS))


# ---------------------------------------------------------------------------------------------- odd words


def usual(action: argparse.Action) -> str:
    """A word that this argument takes."""
    if action.choices:
        return str(next(iter(action.choices)))
    if isinstance(action.type, type) and issubclass(action.type, Output):
        return "out"
    for word in ("2", "0:2"):
        try:
            action.type(word)  # type: ignore[operator, misc]
        except (TypeError, argparse.ArgumentTypeError):
            continue
        return word
    known = {"file": "good.ipynb", "folder": "out", "factory": "factory.py:sharded", "reference": "plain"}
    return known.get(action.dest, "file")


def odd(action: argparse.Action, draw: random.Random) -> str:
    """A word that this argument may well not take."""
    return draw.choice(draw.choice([NUMBERS, NUMBERS, WORDS, UNWRITABLE, ODD_FILES, [usual(action)] * 2]))


def command_line(parser: argparse.ArgumentParser, draw: random.Random) -> list[str]:
    """Draw the required and some other options, most with a usual word, one or two with an odd one."""
    taken = [one for one in parser._actions if one.required and one.nargs != "*"]
    taken += [group_actions[0] for group_actions in required_groups(parser)]
    others = [one for one in parser._actions if one not in taken and one.dest != "help"]
    taken += draw.sample(others, min(len(others), draw.randrange(3)))
    at_fault = draw.sample(taken, min(len(taken), draw.randrange(1, 3)))
    words = []
    for one in taken:
        word = odd(one, draw) if one in at_fault else usual(one)
        if not one.option_strings:
            words.insert(0, word)
        elif one.nargs == 0:
            words.append(one.option_strings[-1])
        else:
            words.append(f"{one.option_strings[-1]}={word}")
    return words


def required_groups(parser: argparse.ArgumentParser) -> Iterator[list[argparse.Action]]:
    for group in parser._mutually_exclusive_groups:
        if group.required:
            yield group._group_actions


@pytest.mark.parametrize("command", COMMANDS)
def test_odd_words_end_in_one_paragraph_or_in_a_result(command: str, odd_folder: Path, call: Call) -> None:
    draw = random.Random(command)
    parser = cli.make_parser()[1][command]
    codes = []
    for _ in range(calls()):
        before = sorted(os.listdir(odd_folder))
        found = call(command, *command_line(parser, draw))
        if found.code in (None, 2):
            assert sorted(os.listdir(odd_folder)) == before, f"{found} left something"
        if found.code is None:
            outputs = [one for one in parser._actions if isinstance(one.type, type)]
            for one in outputs:
                for word in found.words:
                    path = word.removeprefix(f"{one.option_strings[-1]}=") if one.option_strings else ""
                    # Folders on the way to a file are made where it is a result of long work.
                    bad = UNWRITABLE[1:] if one.type is OutputFile else UNWRITABLE[3:]
                    assert path == word or path not in bad, f"{found}: work began"
        codes.append(found.code)
    assert 2 in codes, "nothing was odd"
    assert set(codes) - {2}, "all was refused, the usual words too"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_place_that_cannot_be_written_is_found_before_the_work(
    command: str, odd_folder: Path, call: Call
) -> None:
    """Every option that names an output, whatever it is called."""
    parser = cli.make_parser()[1][command]
    written = [one for one in parser._actions if isinstance(one.type, type) and issubclass(one.type, Output)]
    required = [one for one in parser._actions if one.required and one.nargs != "*"]
    required += [actions[0] for actions in required_groups(parser)]
    words = [
        f"{one.option_strings[-1]}={usual(one)}" if one.option_strings else usual(one) for one in required
    ]
    for one in written:
        makes_folders = one.type is not OutputFile
        for path in UNWRITABLE:
            if makes_folders and path in (".", "folder", "no/such/folder/x"):
                continue
            before = sorted(os.listdir(odd_folder))
            assert call(command, *words, f"{one.option_strings[-1]}={path}").code == 2, path
            assert sorted(os.listdir(odd_folder)) == before
        for path in ("new", "file"):
            was = Path("file").read_text()
            call(command, *words, f"{one.option_strings[-1]}={path}") if command != "simulate" else None
            assert Path("file").read_text() == was, (
                "a file that is there is as it was until there is a result"
            )


# ---------------------------------------------------------------------------------------------- odd files


def altered(document: Any, draw: random.Random) -> Any:
    """A copy with one thing changed or left out, however deep."""
    document = json.loads(json.dumps(document))
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        if isinstance(value, (dict, list)):
            for key, each in list(value.items() if isinstance(value, dict) else enumerate(value)):
                places.append((value, key))
                walk(each)

    walk(document)
    where, key = draw.choice(places)
    if draw.random() < 0.15:
        del where[key]
    else:
        where[key] = draw.choice(VALUES)
    return document


DOCUMENTS: dict[str, tuple[Any, list[str]]] = {
    "cluster": (
        json.loads(cluster("h100-ib").to_json()) | {"link_of_op": {"send": {"latency_us": 1, "gb_per_s": 1}}},
        ["simulate", "--model=mlp-tiny", "--ranks=20", "--cluster=FILE"],
    ),
    "gpt2": (GPT2, ["simulate", "--ranks=2", "--config=FILE"]),
    "llama": (LLAMA, ["simulate", "--ranks=2", "--config=FILE"]),
    "searched": (GPT2, ["search", "--ranks=2", "--tokens=64", "--config=FILE"]),
    "notebook": (NOTEBOOK, ["check", "FILE"]),
    "chapter": (NOTEBOOK, ["notebooks", "FOLDER", "--for=students", "--source=altered"]),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_an_altered_file_is_refused_or_read(name: str, odd_folder: Path, call: Call) -> None:
    draw = random.Random(name)
    document, command = DOCUMENTS[name]
    Path("altered").mkdir()
    codes = set()
    for number in range(calls()):
        odd_document = altered(altered(document, draw) if draw.random() < 0.2 else document, draw)
        text = json.dumps(odd_document) if number else json.dumps(document)
        if draw.random() < 0.05:
            text = text[: draw.randrange(len(text))]
        Path("altered/01_one.ipynb").write_text(text)
        words = [
            word.replace("FILE", "altered/01_one.ipynb").replace("FOLDER", f"made-{number}")
            for word in command
        ]
        in_json = ["--json"] if command[0] in ("simulate", "search", "check") and draw.random() < 0.5 else []
        codes.add(call(*words, *in_json).code)
    assert codes == {0, 2}, "of all that was altered some is refused, some is not"


@pytest.mark.parametrize("name", ODD_FILES)
def test_a_file_that_is_no_json_is_refused(name: str, odd_folder: Path, call: Call) -> None:
    for words in (
        ["simulate", "--ranks=2", f"--config={name}"],
        ["simulate", "--model=gpt2", "--ranks=2", f"--cluster={name}"],
        ["search", "--model=gpt2", "--ranks=2", "--tokens=64", f"--cluster={name}"],
        ["check", name],
    ):
        assert call(*words).code == 2
