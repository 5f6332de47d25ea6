"""Anybody's sharded optimizer: a right one holds in all checks, and each mistake hears its own message."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from zero_ref import cli
from zero_ref.lab import ranks
from zero_ref_course.rungs import outcome
from zero_ref_course.sharded_class import CHECKS, check_class

RIGHT = Path(__file__).with_name("sharded_class.py").read_text(encoding="utf-8")


class Wrong(NamedTuple):
    """A mistake: `new` in place of `old`, the check that it fails, and a part of the check's message."""

    name: str
    old: str
    new: str
    check: str
    message: str


BROADCAST = "            dist.broadcast(param.data, owner)\n"
OWN = 'own = [param for param in group["params"] if self.owner[param] == dist.get_rank()]'

WRONG = [
    Wrong(
        "never_sends", BROADCAST, "            pass\n", "values",
        r"on 2 ranks: after step 1, parameter \d has .* value on the ranks \[\d\], and an older one on",
    ),
    Wrong("sends_from_rank_0", "param.data, owner)", "param.data, 0)", "values", r"is old on all ranks"),
    Wrong(
        "only_owners_call", BROADCAST,
        "            if owner == dist.get_rank():\n                dist.broadcast(param.data, owner)\n",
        "values", r"make different calls",
    ),
    Wrong(
        "goes_through_a_generator_twice", "super().__init__(params, kwargs)",
        "self.count = sum(1 for _ in params)\n        super().__init__(params, kwargs)", "values",
        r"empty parameter list",
    ),
    Wrong("keeps_all_state", OWN, 'own = list(group["params"])', "state", r"the ranks \[0, 1\] all keep"),
    Wrong(
        "one_rank_has_all", "self.elements.index(min(self.elements))", "0", "state",
        r"one rank keeps all of the state",
    ),
    Wrong(
        "forgets_added_groups", "            self.inner.add_param_group(local)", "            pass", "groups",
        r"parameter 7 is old on all ranks; no optimizer on any rank has it",
    ),
    Wrong(
        "added_groups_on_every_rank", "            self.inner.add_param_group(local)",
        '            self.inner.add_param_group({**group, "params": list(group["params"])})', "groups",
        r"the added parameter 7 is kept by the ranks \[0, 1\]",
    ),
    Wrong(
        "does_not_hear_schedulers", 'if key != "params"', "if False", "options",
        r"with lr changed in param_groups, as a scheduler does, after step 2, parameter 0 has",
    ),
    Wrong("loses_the_loss", "        return loss\n", "", "closure", r"returned None on rank 0"),
    Wrong(
        "computes_the_loss_on_owners", "loss = self.inner.step(closure, **kwargs)",
        "loss = self.inner.step(closure if any(g['params'] for g in self.inner.param_groups) else None)",
        "closure", r"on 3 ranks: step\(closure\) calls the closure 0 times on rank 2",
    ),
    Wrong(
        "sharded_by_names_of_storage", "            self.owner[param] = emptiest\n",
        "            self.owner[param.detach().clone()] = emptiest\n", "values", r"raised KeyError",
    ),
]  # fmt: skip

STEP = "        loss = self.inner.step(closure, **kwargs)\n"
AVERAGES_AGAIN = """        for param in self.owner:
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
"""


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    yield
    ranks.shutdown()


def written(folder: Path, source: str) -> Path:
    file = folder / "optimizer.py"
    file.write_text(source, encoding="utf-8")
    return file


@pytest.mark.ranks
def test_a_right_class_holds_in_every_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, RIGHT)
    assert cli.main(["check", str(file), "--class", "ShardedOptimizer", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert [(each["rung"], each["state"]) for each in results] == [(check, "holds") for check in CHECKS]
    assert results[1]["message"] == "the fullest of 4 ranks keeps 67% of the state"


@pytest.mark.ranks
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.name)
def test_a_wrong_class_hears_what_is_wrong(wrong: Wrong, tmp_path: Path) -> None:
    assert RIGHT.count(wrong.old) == 1
    file = written(tmp_path, RIGHT.replace(wrong.old, wrong.new))
    result = outcome(wrong.check, lambda path: CHECKS[wrong.check](path, "ShardedOptimizer"), file)
    assert result.state == "FAILED", result
    assert re.search(wrong.message, result.message, re.DOTALL), result


@pytest.mark.ranks
def test_gradients_that_are_averaged_again_are_named_and_the_other_checks_go_on(tmp_path: Path) -> None:
    file = written(tmp_path, RIGHT.replace(STEP, AVERAGES_AGAIN + STEP))
    first, *others = check_class(file, "ShardedOptimizer")
    assert first.state == "FAILED"
    assert re.search(r"on 3 ranks: .*but for rounding: .* averages the gradients again", first.message)
    assert [(each.rung, each.state) for each in others] == [(check, "holds") for check in list(CHECKS)[1:]]


@pytest.mark.ranks
def test_a_file_without_the_class_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", str(written(tmp_path, "x = 1\n")), "--class", "ShardedOptimizer"]) == 1
    assert "not yet" in (said := capsys.readouterr().out)
    assert "the file has no class ShardedOptimizer" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x.ipynb", "--class", "A"], "--class is for a Python file"),
        (["x.py", "--class", "A", "--rung", "step"], "give one of them"),
    ],
)
def test_a_mistake_in_the_command_is_said(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", *arguments]) == 2
    assert message in capsys.readouterr().err
