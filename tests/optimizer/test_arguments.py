"""The values that an argument may have, and the check of a place to write to: by hand."""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from zero_ref.lab._arguments import (
    LARGEST_SEED,
    Output,
    OutputFile,
    OutputFolder,
    ReplacedFile,
    complain,
    json_text,
    unwritable,
    whole,
)
from zero_ref.lab.config import GPTConfig, TrainConfig
from zero_ref.lab.model import GPT, batch, language_reference
from zero_ref.lab.strategies import trainable
from zero_ref.simulator.ledger import MIXED_ADAMW
from zero_ref.simulator.recipe import recipe


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "it must be at least 1, got 0"),
        ("9", "it must be at most 8, got 9: there are no more"),
        ("9" * 4000, r"at most 8, got 9{40}\.\.\. \(4,000 characters\)"),
        ("9" * 5000, "is not a whole number"),  # more digits than Python reads
        ("1.5", "'1.5' is not a whole number"),
        ("", "'' is not a whole number"),
        ("x" * 100, r"x{40}\.\.\. \(100 characters\)' is not a whole number"),
    ],
)
def test_a_number_out_of_its_range_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        whole(1, 8, "there are no more")(text)


@pytest.mark.parametrize("kind", [OutputFile, ReplacedFile, OutputFolder])
def test_what_can_be_written_is_tried_without_a_trace(kind: type[Output], tmp_path: Path) -> None:
    if kind is not OutputFolder:
        file = tmp_path / "there"
        file.write_text("kept")
        kind(str(file)).check()
        kind(str(tmp_path / "new")).check()
        assert file.read_text() == "kept"
        assert os.listdir(tmp_path) == ["there"]
    if kind is not OutputFile:
        kind(str(tmp_path / "new" / "newer" / "newest")).check()
        assert not (tmp_path / "new").exists()


def test_a_link_is_followed_to_where_the_file_will_be(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("target")
    OutputFile(str(tmp_path / "link")).check()
    assert os.listdir(tmp_path) == ["link"]
    (tmp_path / "astray").symlink_to("no/folder/target")
    with pytest.raises(FileNotFoundError):
        OutputFile(str(tmp_path / "astray")).check()


def test_a_device_may_be_written_to_but_not_replaced() -> None:
    OutputFile("/dev/null").check()
    with pytest.raises(FileExistsError, match="a device"):
        ReplacedFile("/dev/null").check()


def test_a_place_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    """/proc takes no new files, whoever asks: not the superuser either, whom no permission stops."""
    for kind in (OutputFile, ReplacedFile, OutputFolder):
        arguments = argparse.Namespace(ranks=2, some_file=kind("/proc/none/x"))
        said = unwritable(arguments)
        assert said is not None
        assert said.startswith("--some-file /proc/none/x cannot be written: ")
    assert unwritable(argparse.Namespace(some_file=OutputFile(str(tmp_path / "x")), other=None)) is None


def test_a_complaint_is_one_paragraph_whatever_it_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    complain("zero-ref", "no\n\nfile \x1b[31m\udcff " + "y" * 500 + " there" * 1000)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(r"zero-ref: no file \x1b[31m\udcff yyyy")
    assert len(line) < 1600


def test_json_has_null_for_what_is_no_number() -> None:
    text = json_text({"loss": math.nan, "times": (1.0, math.inf), "name": "nan"})
    assert json.loads(text) == {"loss": None, "times": [1.0, None], "name": "nan"}


# -------------------------------------------------------------------------------------- what is trained


@pytest.mark.parametrize(
    "sizes", [{"heads": 0}, {"width": -4}, {"layers": 0}, {"context": 0}, {"context": -3}, {"context": 10**6}]
)
def test_a_model_without_a_size_is_refused(sizes: dict[str, int]) -> None:
    (name,) = sizes
    with pytest.raises(ValueError, match=f"{name} must be at"):
        GPTConfig(**sizes)


@pytest.mark.parametrize(
    ("strategy", "dtype", "master_dtype", "why"),
    [
        ("zero", "float32", "float32", "is for a model in fewer bits, and this one is in float32"),
        ("zero", "bfloat16", "float64", "unknown master_dtype 'float64'; choose one of float32"),
        ("zero-3", "bfloat16", "float32", "fully_shard shards the parameters themselves"),
        ("local-sgd", "bfloat16", "float32", "averages the parameters and not their masters"),
    ],
)
def test_masters_that_cannot_be_kept_are_refused(
    strategy: str, dtype: str, master_dtype: str, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        TrainConfig(strategy, model=GPTConfig(dtype=dtype), master_dtype=master_dtype)
    if dtype == "bfloat16" and master_dtype == "float32":
        with pytest.raises(ValueError, match=why):
            trainable(recipe(strategy, optimizer=MIXED_ADAMW), torch.nn.Linear(1, 1))


def test_a_model_in_another_dtype_is_the_same_but_for_rounding() -> None:
    size = GPTConfig(layers=1, heads=1, width=8, context=4)
    model, rounded = GPT(size, seed=3), GPT(replace(size, dtype="bfloat16"), seed=3)
    for param, in_16 in zip(model.parameters(), rounded.parameters(), strict=True):
        assert in_16.dtype == torch.bfloat16
        assert torch.equal(param.bfloat16(), in_16)
    with pytest.raises(ValueError, match="unknown dtype 'float16'; choose one of float32, bfloat16"):
        GPTConfig(dtype="float16")


def test_the_largest_seed_and_context_can_be_trained_with() -> None:
    config = GPTConfig(context=32_768)
    held_out = language_reference().held_out
    tokens, _ = batch(held_out, config, 1, seed=LARGEST_SEED, step=10**7, rank=255)
    assert tokens.shape == (1, 32_768)
