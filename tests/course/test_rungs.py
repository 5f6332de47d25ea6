"""The reader's own optimizer: each stair as its answer holds what it should, and mistakes are named."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from changes import changed
from wrong_my_zero import CHANGED, FLAT, GATHERED, GROUPS, IN_BACKWARD, TO_OWNERS

from zero_ref import cli
from zero_ref.lab import ranks
from zero_ref.stairs import BEFORE, STAIRS
from zero_ref_course import rungs as rungs_module
from zero_ref_course.rungs import RUNGS, RungResult, check_my_zero, check_rung, check_rungs
from zero_ref_course.stubs import answer, stub, with_stage_3


class Wrong(NamedTuple):
    """A mistake: changes of the answer of `stair`, or of one of `OTHERS`; what the check of `rung` says."""

    stair: str
    rung: str
    name: str
    changes: dict[str, str]
    message: str


WRONG = [Wrong(*where, *row) for where, rows in CHANGED.items() for row in rows]
FIRST = [Wrong(*where, *row) for where, rows in CHANGED.items() for row in rows[:2]]
"""Two mistakes of each rung; the others are made once a day."""
RUNGS_OF = {
    "owners": ["owners", "step"],
    "buckets": ["buckets"],
    "overlap": ["in_backward"],
    "shards": ["to_owners", "shards"],
    "parameters": ["stage_3"],
    "checkpoint": ["checkpoint", "masters", "options"],
}
"""The rungs that each stair adds."""
OTHERS = {"flat": FLAT, "gathered": GATHERED}
"""Answers that are built in another way than the stairs."""
RULE = answer("owners").partition("class MyZero")[0]
"""The first rung alone: the file as it is after chapter 3."""
LACKING = {"only_saves", "all_at_the_end", "meanwhile_but_wrong", "all_reduced"}
"""They have nothing of the rung that they are checked for."""
WAITS = {"hangs", "does_not_end", "waits_for_the_unused"}
"""Only a time-out ends them."""


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    yield
    ranks.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each stair's answer and stub as a file."""
    made = tmp_path_factory.mktemp("my_zero")
    for stair in STAIRS:
        (made / f"{stair}.py").write_text(answer(stair), encoding="utf-8")
        (made / f"stub_of_{stair}.py").write_text(stub(stair), encoding="utf-8")
    return made


def test_every_rung_is_of_one_stair() -> None:
    assert [rung for rungs in RUNGS_OF.values() for rung in rungs] == list(RUNGS)
    assert set(RUNGS_OF) == set(STAIRS)


@pytest.mark.ranks
@pytest.mark.parametrize("stair", [stair for stair in RUNGS_OF if stair != "checkpoint"])
def test_a_stair_holds_its_rungs_but_not_the_next(stair: str, folder: Path) -> None:
    file, rungs = folder / f"{stair}.py", list(RUNGS)
    results = [check_rung(rung, file) for rung in RUNGS_OF[stair]]
    following = rungs[rungs.index(RUNGS_OF[stair][-1]) + 1]
    assert check_rung(following, file).state == "not yet"
    assert [result.state for result in results] == ["holds"] * len(results), results


@pytest.mark.ranks
def test_the_last_stairs_in_one_file_hold_all(tmp_path: Path) -> None:
    file = tmp_path / "my_zero.py"
    file.write_text(with_stage_3(answer("checkpoint")), encoding="utf-8")
    results = list(check_rungs(file))
    assert [(result.rung, result.state) for result in results] == [(rung, "holds") for rung in RUNGS]


@pytest.mark.ranks
@pytest.mark.parametrize("stair", RUNGS_OF)
def test_a_stub_holds_nothing_yet(stair: str, folder: Path) -> None:
    for rung in RUNGS_OF[stair]:
        result = check_rung(rung, folder / f"stub_of_{stair}.py")
        assert result.state == "not yet", result


def test_a_stub_keeps_what_the_stair_before_has() -> None:
    assert "loads[owners[number]] += numels[number]" in stub("buckets")
    assert "loads[owners[number]] += numels[number]" not in stub("owners")
    assert "dist.broadcast(bucket, group_src=owner, group=self.group)" in stub("parameters")
    for stair in STAIRS:
        assert 0 < stub(stair).count("raise NotImplementedError") <= 9
        assert "MinimalZero" not in stub(stair)
        assert "zero_ref" not in answer(stair)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(
            wrong,
            marks=() if wrong in FIRST else pytest.mark.thorough,
            id=f"{wrong.rung}-{wrong.name}",
        )
        for wrong in WRONG
    ],
)
def test_a_mistake_is_named(wrong: Wrong, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if wrong.name in WAITS:
        monkeypatch.setenv("ZERO_REF_PATIENCE", "0.3")
    file = tmp_path / "wrong.py"
    file.write_text(changed(OTHERS.get(wrong.stair) or answer(wrong.stair), wrong.changes))
    result = check_rung(wrong.rung, file)
    state = "not yet" if wrong.name in LACKING else "FAILED"
    assert result.state == state, result
    assert re.search(wrong.message, result.message, re.DOTALL), result.message


@pytest.mark.ranks
def test_a_file_that_updates_its_pieces_in_backward_holds_the_rungs_around_shards(tmp_path: Path) -> None:
    """So did the last rung of files that were begun before there was a rung shards."""
    file = tmp_path / "my_zero.py"
    file.write_text(changed(answer("checkpoint"), IN_BACKWARD))
    states = {
        rung: check_rung(rung, file).state for rung in ("in_backward", "to_owners", "shards", "masters")
    }
    assert states == {**dict.fromkeys(states, "holds"), "shards": "not yet"}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("stair", "changes", "rung"), [("buckets", GROUPS, "options"), ("overlap", TO_OWNERS, "to_owners")]
)
def test_a_rung_may_be_climbed_before_the_parameters_are_cut(
    stair: str, changes: dict[str, str], rung: str, tmp_path: Path
) -> None:
    file = tmp_path / "my_zero.py"
    file.write_text(changed(answer(stair), changes))
    result = check_rung(rung, file)
    assert result.state == "holds", result


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("source", "rungs"), [(FLAT, ("to_owners", "shards")), (GATHERED, ("stage_3",))], ids=list(OTHERS)
)
def test_an_answer_that_is_built_in_another_way_holds_its_rungs(
    source: str, rungs: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "my_zero.py"
    file.write_text(source)
    for rung in rungs:
        result = check_rung(rung, file)
        assert result.state == "holds", result


def test_every_rung_has_two_mistakes_that_hear_different_things() -> None:
    for rung in RUNGS:
        messages = {wrong.message for wrong in WRONG if wrong.rung == rung}
        assert len(messages) >= 2, rung


def test_each_rung_has_its_place_in_the_book() -> None:
    root = Path(__file__).parents[2]
    page = (root / "book" / "my_zero.md").read_text(encoding="utf-8")
    for name, rung in RUNGS.items():
        assert f"\n| {name.replace('_', ' ')} | {{doc}}`chapter {rung.chapter} <" in page
        (chapter,) = (root / "notebooks").glob(f"{rung.chapter:02}_*.ipynb")
        ids = [cell["id"] for cell in json.loads(chapter.read_text(encoding="utf-8"))["cells"]]
        id = name.replace("_", "-")
        # Where a chapter has no cell for it, the page itself says what to do.
        assert f"my-zero-{id}-check" in ids or f"({id})=\n### " in page, name


def test_each_rung_is_a_small_addition() -> None:
    for stair, before in BEFORE.items():
        differences = difflib.ndiff(answer(before).splitlines(), answer(stair).splitlines())
        added = [line for line in differences if line.startswith("+ ")]
        # Stage 3 is a class of its own.
        assert len(added) <= (135 if stair == "parameters" else 75)


@pytest.mark.ranks
def test_the_command_prints_the_rungs_and_ends_with_0_if_none_failed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "my_zero.py"
    file.write_text(RULE)
    assert cli.main(["check", str(file)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert re.match(r"holds    owners       chapter 3   18 models", first)
    assert re.match(r"not yet  step         chapter 4   the file has no class MyZero", second)


@pytest.mark.ranks
def test_the_command_ends_with_1_if_the_rung_asked_for_does_not_hold(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "my_zero.py"
    file.write_text("print('hello')\n" + RULE.partition("annotations\n")[2])
    assert cli.main(["check", str(file), "--rung", "step", "--json"]) == 1
    printed = capsys.readouterr()
    assert [result["state"] for result in json.loads(printed.out)] == ["holds", "not yet"]
    assert "hello" in printed.err


@pytest.mark.parametrize("name", ["to owners", "to_owners"])
def test_a_rung_is_also_named_as_it_is_printed(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graded: list[str] = []

    def holds(rung: str, path: object) -> RungResult:
        graded.append(rung)
        return RungResult(rung, "holds", "as it should")

    monkeypatch.setattr(rungs_module, "check_rung", holds)
    file = tmp_path / "my_zero.py"
    file.write_text(RULE)
    assert cli.main(["check", str(file), "--rung", name]) == 0
    assert graded[-1] == "to_owners"
    check_my_zero(name, file)
    assert capsys.readouterr().out.count("to owners") == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.py"], "No such file"),
        (["my_zero.py", "--rung", "leap"], "there is no rung 'leap'"),
        (["03_partition.ipynb", "--rung", "step"], "--rung is for a Python file"),
    ],
)
def test_what_cannot_be_checked_ends_with_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", *words]) == 2
    assert message in capsys.readouterr().err


def test_without_the_file_a_cell_says_how_to_begin(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    check_my_zero("owners", tmp_path / "my_zero.py")
    assert "Write it in any editor" in capsys.readouterr().out
    with pytest.raises(ValueError, match="there is no rung"):
        check_my_zero("leap")


def test_the_help_names_the_rungs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["check", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    names = list(RUNGS)
    assert f"{', '.join(names[:-1])} or {names[-1]}" in said
