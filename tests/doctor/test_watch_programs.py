"""`watch` on the doctor's right programs, while they do all that training does: it finds nothing."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from library.right_programs import RIGHT

from zero_ref.doctor.diagnose import plain_maker, shape_for
from zero_ref.doctor.on_rank import Case, Player, added_options, takes_model
from zero_ref.doctor.trials import MAX_NORM, make_trials, together
from zero_ref.doctor.watch import watch
from zero_ref.lab import ranks

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]

QUICK = ("masters", "a mesh of two dimensions")
NAMES = [n for n, (factory, _) in RIGHT.items() if takes_model(factory) and "stair" not in n]

OF_FSDP2 = (
    "group added",
    "frozen layer",
    "unused on a rank",
    "unused parameters",
    "mixed dtypes",
    "tied weights",
)
REFUSED = {
    **dict.fromkeys(("FSDP2", "a mesh of two dimensions", "bfloat16 by a policy"), OF_FSDP2),
    **dict.fromkeys(("torch's ZeRO", "torch's ZeRO, buckets"), ("mixed dtypes",)),
    **dict.fromkeys(("ShardedDataParallel", "new parameters in forward", "may change"), ("group added",)),
    "gradients to owners": ("exception", "group added"),
    "bfloat16 on the way": ("frozen layer", "unused on a rank", "unused parameters"),
}
"""What a program refuses by its own error; nothing else is left out."""


class Watched(Player):
    def __init__(self, case: Case, **settings: Any) -> None:
        super().__init__(case)
        self.settings, self.watches = settings, list[watch]()

    def make(self) -> Any:
        program = super().make()
        for old in self.watches:
            old.stop()
        self.watches.append(watch(program.optimizer, model=program.model, **self.settings))
        return program


def play(case: Case, plain: Any, masters: bool) -> tuple[int, list[str]]:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, 0)
    case = replace(case, folder=folder[0])
    player = Watched(case, plain=plain, masters=masters, record=Path(folder[0], "notes"), wait=100)
    player.play_all()
    return player.watches[-1]._step, [str(one) for each in player.watches for one in each.findings]


def is_silent(name: str) -> None:
    factory, plain = RIGHT[name]
    make = plain_maker(plain.get("from_plain"), plain.get("options"), plain.get("reference"))
    shape, optimizer = shape_for(make, 0)
    left = {"different starts", *REFUSED.get(name, ())}
    names = [trial.name for trial in make_trials() if not trial.needs and trial.name not in left]
    trial = together(names, shape, MAX_NORM, own=False)
    case = Case(trial, factory, seed=0, added_options=added_options(optimizer))
    settings = plain.get("from_plain", torch.optim.AdamW), plain.get("masters", False)
    nan = sum(step.nan for step in trial.steps)
    assert ranks.run(play, 2, case, *settings, timeout=300) == [(len(trial.steps) - nan, [])] * 2


@pytest.mark.parametrize("name", QUICK)
def test_nothing_is_said_of_a_right_program(name: str) -> None:
    is_silent(name)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in NAMES if name not in QUICK])
def test_nothing_is_said_of_any_other_right_program(name: str) -> None:
    is_silent(name)
