"""The table of other people's optimizers says what happens, and has a reason for each difference."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import optimizer_table
import pytest
import torch
from optimizer_table import PACKAGES, Case, Row, cases_of, made_with, row_of, undisturbed
from torch import optim

ROOT = Path(__file__).resolve().parents[2]
CONTENT = json.loads(optimizer_table.FILE.read_text(encoding="utf-8"))
ROWS = {(row["package"], row["name"]): Row(**row) for row in CONTENT["rows"]}


def kinds(row: Row) -> Any:
    """Verdicts without the sizes of differences, which depend on the machine."""

    def kind(verdict: str) -> str:
        return verdict if verdict.startswith("refused") else verdict.partition(":")[0]

    return (
        {partition: [*map(kind, verdicts)] for partition, verdicts in row.partitions.items()},
        {way: kind(verdict) for way, verdict in row.checkpoint.items()},
        row.cut,
        row.why,
    )


@pytest.mark.thorough
@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(3600)  # torchao's are compiled; pytorch_optimizer has more than 100, every fourth is run
def test_the_table_says_what_happens(package: str) -> None:
    pytest.importorskip(package)
    here, there = made_with(), CONTENT["made_with"]
    if package != "torch" and {here["torch"], here[package]} != {there["torch"], there[package]}:
        pytest.skip(f"the table is of torch {there['torch']} and {package} {there[package]}")
    cases = [*cases_of(package)]
    for case in cases[::4] if package == "pytorch_optimizer" else cases:
        if case.name in CONTENT["left_out"].get(package, {}):
            continue
        with undisturbed():
            row = row_of(case)
        assert kinds(row) == kinds(ROWS[package, case.name]), f"{package}.{case.name}"


def test_there_are_many_classes_and_every_difference_has_a_reason() -> None:
    assert len(ROWS) > 100
    assert {package for package, _ in ROWS} == set(PACKAGES)
    for key, row in ROWS.items():
        verdicts = [*row.on_whole_parameters, *row.partitions["even"]]
        is_different = any(verdict.startswith("different") for verdict in row.on_whole_parameters)
        assert bool(row.why) == is_different, key
        assert all(verdict.startswith(("equal", "refused: ", "different: ")) for verdict in verdicts), key
        assert not any("could not" in verdict for verdict in verdicts), f"{key}: why not?"


def test_the_page_says_what_was_run_and_how_it_is_run_again() -> None:
    page = " ".join((ROOT / "book" / "optimizers.md").read_text(encoding="utf-8").split())
    assert optimizer_table.STEPS == 10
    assert f"makes {optimizer_table.STEPS} updates" in page
    assert f"over {optimizer_table.RANKS} virtual ranks" in page
    assert f"at {optimizer_table.FEWER_RANKS} ranks" in page
    assert str(optimizer_table.FILE.relative_to(ROOT)) in page
    assert re.findall(r"\{measured\} optimizers (\w+)", page) == PACKAGES


@pytest.mark.parametrize(("kind", "block"), [("AdamW8bit", 256), ("AdamW4bit", 128)])
@pytest.mark.filterwarnings("ignore")
def test_the_page_says_what_torchao_keeps_in_few_bits(kind: str, block: int) -> None:
    optimizer_class = getattr(pytest.importorskip("torchao.optim"), kind)
    params = [torch.ones(numel, requires_grad=True) for numel in (4096, 4096 - block)]
    optimizer = optimizer_class(params)
    for param in params:
        param.grad = torch.ones_like(param)
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    large, small = (optimizer.state[param]["exp_avg"] for param in params)
    assert large.block_size == block
    assert type(small) is torch.Tensor


# ------------------------------------------------------------------------------- a verdict can be another one


class Scaling(optim.SGD):
    """Scales all gradients by a number that the third update computes from all of them."""

    def step(self, closure: Any = None) -> Any:
        params = [param for group in self.param_groups for param in group["params"]]
        self.made = getattr(self, "made", 0) + 1
        if self.made >= 3:
            factor = 1 / torch.stack([param.grad.norm() for param in params]).norm()
            for param in params:
                param.grad *= factor
        return super().step(closure)


class Failing(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise ValueError("it does not step. Never.")


def test_what_couples_parameters_late_is_different() -> None:
    with undisturbed():
        row = row_of(Case("here", "Scaling", Scaling, {"lr": 0.01}))
    assert row.partitions["sorted_greedy"][0].startswith("different: by up to ")
    assert row.partitions["sorted_greedy"][0].endswith(", from update 3 on")
    assert (row.why, row.checkpoint) == (optimizer_table.TOGETHER, {})


class Lamb(optim.SGD):
    """Scales each update by the norm of its tensor."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad, alpha=group["lr"] * float(param.norm()))


def test_torchs_classes_are_cut_as_they_may_be_and_others_show_whether_they_may() -> None:
    with undisturbed():
        assert row_of(Case("here", "SGD", optim.SGD, {"lr": 0.01})).cut
        assert not row_of(Case("here", "Adafactor", optim.Adafactor)).cut
        lamb = row_of(Case("here", "Lamb", Lamb, {"lr": 0.01}))
    assert lamb.partitions["sorted_greedy"] == ["equal", "equal"]
    assert all(verdict.startswith("different") for verdict in lamb.partitions["even"])
    assert (lamb.cut, lamb.why) == (True, "")


def test_what_a_class_raises_by_itself_is_raised() -> None:
    with pytest.raises(ValueError, match="does not step"), undisturbed():
        row_of(Case("here", "Failing", Failing, {"lr": 0.01}))
    with pytest.raises(ValueError, match="moves nothing"), undisturbed():
        row_of(Case("here", "SGD", optim.SGD, {"lr": 0.0}))
    with pytest.raises(ValueError, match="diverges"), undisturbed():
        row_of(Case("here", "SGD", optim.SGD, {"lr": 1e38}))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("rank 1: the lr is 0.1. Use another."), "the lr is 0.1"),
        (RuntimeError("they disagree: 1 and 2"), "they disagree"),
        (
            RuntimeError("rank 1: rank 0 could not save it: TypeError: it holds a dtype. Or so"),
            "it holds a dtype",
        ),
        (KeyError("slow"), "it lacks 'slow'"),
    ],
)
def test_a_reason_is_the_first_statement_of_the_first_ranks_error(error: Exception, told: str) -> None:
    outer = RuntimeError("virtual rank 1 failed first")
    outer.__cause__ = error
    assert optimizer_table.reason(outer) == optimizer_table.reason(error) == told
