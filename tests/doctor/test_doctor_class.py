"""`zero-ref doctor --class`: right classes hold in every check, and each mistake hears its own message."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from zero_ref import cli
from zero_ref.doctor.interface import KINDS

pytestmark = pytest.mark.ranks

RIGHT = Path(__file__).with_name("course_classes.py").read_text(encoding="utf-8")


class Wrong(NamedTuple):
    """A mistake in the class of this name: `new` in place of `old`, the check that fails, and its message."""

    name: str
    old: str
    new: str
    check: str
    message: str


BROADCAST = "            dist.broadcast(param.data, owner)\n"
OWN = 'own = [param for param in group["params"] if self.owner[param] == dist.get_rank()]'
REDUCE = "                dist.all_reduce(param.grad)\n                param.grad /= dist.get_world_size()\n"

WRONG = [
    Wrong("ShardedOptimizer", BROADCAST, "            pass\n", "values", r"moved 0.000 times as far"),
    Wrong(
        "ShardedOptimizer", OWN, 'own = list(group["params"])', "state",
        r"the ranks keep \[\d+, \d+\] elements",
    ),
    Wrong(
        "ShardedOptimizer", "            self.inner.add_param_group(local)", "            pass", "groups",
        r"gain.fixed moved 0.000 times as far",
    ),
    Wrong(
        "ShardedOptimizer", 'if key != "params"', "if False", "values",
        r"step 2: .* moved 2.500 times as far",
    ),
    Wrong(
        "ShardedOptimizer", "        return loss\n", "", "closure",
        r"returned None; a plain one returns the loss",
    ),
    Wrong(
        "ShardedOptimizer", BROADCAST,
        "            if owner == dist.get_rank():\n                dist.broadcast(param.data, owner)\n",
        "values", r"on 2 ranks",
    ),
    Wrong(
        "get_ddp", "            dist.broadcast(param.data, 0)\n            if", "            if", "start",
        r"is not rank 0's",
    ),
    Wrong(
        "get_ddp", "            param.grad /= dist.get_world_size()\n        self.works.c",
        "        self.works.c", "gradients", r"of embed.weight is 2.000 times as large as the mean",
    ),
    Wrong(
        "get_ddp", "            if param.requires_grad:\n", "            if param.ndim > 1:\n", "gradients",
        r"the gradient of gain.gain is",
    ),
    Wrong("get_fsdp", "return mine.float() / count, None", "return mine.float(), None", "values", r"moved"),
    Wrong("get_fsdp", REDUCE, "                pass\n", "gradients", r"gain.gain, which is not sharded"),
    Wrong(
        "get_fsdp", "(layer.shard, self.shapes[layer], self.dtype)",
        "(layer.shard, self.shapes[layer], torch.float32)", "compute_dtype", r"computes in torch.float32",
    ),
    Wrong("get_fsdp", "isinstance(layer, nn.Linear | nn.Embedding)", "False", "shards", r"is sharded"),
]  # fmt: skip


def checked(folder: Path, source: str, name: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, list]:
    file = folder / "classes.py"
    file.write_text(source, encoding="utf-8")
    code = cli.main(["doctor", "--class", f"{file}:{name}", "--json", "--timeout", "20", "--ranks", "2"])
    return code, json.loads(capsys.readouterr().out)["checks"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ShardedOptimizer", "a sharded optimizer"),
        ("get_ddp", "a DDP"),
        ("DDP", "a DDP"),
        ("get_fsdp", "an FSDP"),
    ],
)
def test_a_right_class_holds_in_every_check(
    name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = checked(tmp_path, RIGHT, name, capsys)
    assert [(each["check"], each["holds"]) for each in found] == [(check, True) for check in KINDS[kind]], (
        found
    )
    assert code == 0


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: f"{wrong.name}-{wrong.check}")
def test_a_wrong_class_hears_what_is_wrong(
    wrong: Wrong, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert RIGHT.count(wrong.old) == 1
    code, found = checked(tmp_path, RIGHT.replace(wrong.old, wrong.new), wrong.name, capsys)
    assert code == 1
    text = {each["check"]: each["text"] for each in found if not each["holds"]}
    assert re.search(wrong.message, text[wrong.check], re.DOTALL), found


def test_a_name_that_takes_something_else_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "classes.py"
    file.write_text("def three(a, b, c): ...\n", encoding="utf-8")
    assert cli.main(["doctor", "--class", f"{file}:three"]) == 2
    assert "three takes a, b, c. A sharded optimizer takes" in capsys.readouterr().err
    assert cli.main(["doctor", "--class", f"{file}:four"]) == 2
    assert "has no function four" in capsys.readouterr().err
