"""Settings in a file and on the command line, which `zero-ref train` and torchrun read alike."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from torch.distributed.run import get_args_parser

from zero_ref import cli
from zero_ref.lab import train
from zero_ref.lab._arguments import Parser
from zero_ref.lab.config import EXIT_CODES
from zero_ref.lab.settings import as_toml, settings_of


def of_zero_ref() -> Parser:
    return cli.make_parser()[1]["train"]


def options_of(parser: Parser) -> dict[str, tuple[Any, ...]]:
    """Return argparse's values of each option; of a function that converts words, the name."""
    return {
        action.option_strings[-1]: (
            *(type(action), action.dest, action.nargs, action.default, action.required),
            *(action.choices and list(action.choices), action.metavar, action.help),
            getattr(action.type, "__qualname__", action.type),
        )
        for action in parser._actions
    }


def test_torchrun_s_options_are_those_of_zero_ref_but_for_the_ranks() -> None:
    ours, under_torchrun = options_of(of_zero_ref()), options_of(train.make_parser())
    assert ours.pop("--ranks")
    assert ours == under_torchrun
    assert len(ours) > 20


def test_torchrun_leaves_every_option_to_the_job() -> None:
    """It looks at all words for options of its own, and ends at one that is the beginning of several."""
    for option in options_of(train.make_parser()):
        if option != "--help":
            words = get_args_parser().parse_args(["-m", "zero_ref.lab.train", option, "value"])
            assert words.training_script_args == [option, "value"]


def test_both_say_what_the_exit_codes_mean() -> None:
    for parser in (of_zero_ref(), train.make_parser()):
        assert " ".join(EXIT_CODES.split()) in " ".join(parser.format_help().split())
        for code in ("0 ", "1 ", "2 ", "130 "):
            assert code in EXIT_CODES


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "run.toml"
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.parametrize("make", [of_zero_ref, train.make_parser])
def test_the_command_line_wins_over_the_file_which_wins_over_defaults(
    make: Callable[[], Parser], file: Callable[[str], str]
) -> None:
    text = 'steps = 30\nlearning-rate = 1\nstrategy = ["ddp", "zero"]\nresume = true\noverlap = "in_forward"'
    config = ["--config", file(text)]
    alone = make().parse_args(config)
    assert (alone.steps, alone.learning_rate, alone.strategy) == (30, 1.0, ["ddp", "zero"])
    assert isinstance(alone.learning_rate, float)
    assert (alone.resume, alone.overlap, alone.width) == (True, "in-forward", 128)
    for words in (["--steps", "200", *config], [*config, "--steps", "200"]):  # 200 is the default, too
        given_ = make().parse_args([*words, "--strategy", "zero-even"])
        assert (given_.steps, given_.strategy, given_.resume) == (200, ["zero-even"], True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stpes = 3", "no setting of this command is called 'stpes'; did you mean 'steps'?"),
        ("learning_rate = 3", "'learning_rate'; did you mean 'learning-rate'?"),
        ("config = 'other.toml'", "is called 'config'"),
        ("dry-run = true", "is called 'dry-run'"),
        ("[steps]\na = 1", "run.toml, steps: it must be a whole number, got {'a': 1}"),
        ("steps = 3.0", "run.toml, steps: it must be a whole number, got 3.0"),
        ("steps = true", "run.toml, steps: it must be a whole number, got True"),
        ("steps = '3'", "run.toml, steps: it must be a whole number, got '3'"),
        ("steps = 0", "run.toml, steps: it must be at least 1, got 0"),
        ("steps = [3]", "run.toml, steps: it must be a whole number, got [3]"),
        ("steps = 2020-01-01", "run.toml, steps: it must be a whole number, got datetime.date(2020, 1, 1)"),
        (f"steps = 0x1{'0' * 5000}", "run.toml, steps: "),
        ("learning-rate = nan", "run.toml, learning-rate: it must be finite, got nan"),
        ("resume = 1", "run.toml, resume: it must be true or false, got 1"),
        ("dtype = 'int3'", "run.toml, dtype: invalid choice: 'int3' (choose from float32, bfloat16)"),
        ("strategy = ['zero', 'none']", "run.toml, strategy: invalid choice: 'none'"),
        ("strategy = [1]", "run.toml, strategy: it must be text, got 1"),
        ("json = ''", "run.toml, json: '' cannot be the name of a file or folder"),
        ("steps = 3\nsteps = 4", "run.toml cannot be read: Cannot overwrite a value"),
        ("steps =", "run.toml cannot be read: Invalid value (at end of document)"),
        ("a = " + "[" * 5000, "run.toml cannot be read: "),
    ],
)
def test_a_mistake_in_the_file_is_told_with_file_and_key(
    text: str, message: str, file: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        of_zero_ref().parse_args(["--config", file(text)])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("zero-ref train: --config ")
    assert message in line


def test_what_is_no_file_is_told_and_waits_for_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "latin").write_bytes(b"json = '\xff'")
    for name in ("pipe", ".", "absent", "latin"):
        with pytest.raises(SystemExit):
            of_zero_ref().parse_args(["--config", str(tmp_path / name)])
        assert " cannot be read: " in capsys.readouterr().err


def test_the_shown_settings_are_read_back(
    file: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--ranks 3 --strategy zero-2 --strategy ddp --overlap in-forward --learning-rate 1e-5 --seed 7"
    assert cli.main(["train", *words.split(), "--show-config"]) == 0
    shown = capsys.readouterr().out
    assert cli.main(["train", "--config", file(shown), "--show-config"]) == 0
    assert capsys.readouterr().out == shown
    again, before = (of_zero_ref().parse_args(line) for line in (["--config", file(shown)], words.split()))
    assert settings_of(again) == settings_of(before)


@given(
    st.dictionaries(
        st.from_regex("[a-z-]+", fullmatch=True),
        st.one_of(
            st.text(st.characters(exclude_categories=["Cs"])),
            st.integers(),
            st.booleans(),
            st.floats(allow_nan=False, allow_infinity=False),
            st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=3),
        ),
    )
)
def test_every_value_is_written_as_toml(settings: dict[str, Any]) -> None:
    assert tomllib.loads(as_toml(settings)) == settings
