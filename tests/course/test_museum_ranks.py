"""The doctor on the museum's exhibits, on programs that are right, and on mistakes that nobody told it of."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import torch
from library import museum_strangers
from library.right_programs import RIGHT

from zero_ref.doctor import Report, diagnose
from zero_ref_course.gallery import Exhibit, all_exhibits
from zero_ref_course.gallery.right import LR

pytestmark = pytest.mark.ranks

EXHIBITS = all_exhibits()
FEW = ("LastMicroBatch", "MomentsReset", "MuonIsAdamW", "GroupsDiscarded")
FEW_RIGHT = ("FSDP2", "ShardedDataParallel")
RUNS = ((2, 0), (3, 1), (4, 2))
"""Numbers of ranks and seeds, dealt out in turn."""
ADAMW: dict[str, Any] = {"from_plain": torch.optim.AdamW, "options": {"lr": LR}}

# Where a mistake that the museum has not departs first: the trial, step, phase and parameters.
STRANGERS: dict[str, tuple[str, int, str, str]] = {
    "swapped": ("plain", 0, "step", "first.weight"),
    # 45 elements leave a remainder on 2 ranks, and 10 elements on 3 and 4.
    "truncated": ("plain", 0, "step", "second.weight first.bias"),
    "fixed_rate": ("scheduler", 1, "step", "first.weight"),
    "rounded_on_the_way": ("plain", 0, "backward", "first.weight"),
    "local_squares": ("plain", 0, "step", "first.weight"),
    "norm_of_before": ("clipping", 1, "clip", "first.weight"),
}

# A lost bit shows in a value or in the next loss, whichever is first off by more than rounding explains.
OTHER_PHASE = {"NoMasters": "step"}


def held(exhibit: Exhibit, report: Report) -> None:
    assert report.departures, str(report)
    departure = report.departures[0]
    assert departure.trial == exhibit.trial
    assert departure.phase in (exhibit.phase, OTHER_PHASE.get(exhibit.name))
    assert not exhibit.says or any(exhibit.says in hint for hint in departure.hints), str(report)


@pytest.mark.parametrize("name", FEW)
def test_the_doctor_finds_an_exhibit_and_reads_off_what_is_there(name: str) -> None:
    exhibit = EXHIBITS[name]
    held(exhibit, exhibit.diagnose(ranks=(2,), only=(exhibit.trial,)))


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "run"), list(zip(EXHIBITS, cycle(RUNS))))
def test_every_exhibit_is_found_on_some_number_of_ranks(name: str, run: tuple[int, int]) -> None:
    exhibit, (ranks, seed) = EXHIBITS[name], run
    held(exhibit, exhibit.diagnose(ranks=(ranks,), seed=seed, only=(exhibit.trial,)))


@pytest.mark.parametrize("name", EXHIBITS)
def test_a_mended_exhibit_is_among_the_right_programs_and_plays_its_trial_there(name: str) -> None:
    exhibit = EXHIBITS[name]
    played = [plain.get("without", ()) for program, plain in RIGHT.values() if program is exhibit.mended]
    assert played
    assert not any(exhibit.trial in without for without in played)


def assert_silent(report: Report) -> None:
    assert report.healthy, str(report)
    tried = {trial for trial, _ in report.tried}
    assert {"plain", "accumulation", "clipping"} <= tried, str(report)
    assert len(tried) >= 6, str(report)


@pytest.mark.parametrize("name", FEW_RIGHT)
def test_the_doctor_is_silent_about_a_right_program(name: str) -> None:
    factory, plain = RIGHT[name]
    assert_silent(diagnose(factory, name=name, ranks=(2,), **plain))


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "ranks", "seed"), list(zip(RIGHT, cycle((2, 3, 4)), cycle(range(4)))))
def test_no_right_program_alarms_the_doctor(name: str, ranks: int, seed: int) -> None:
    factory, plain = RIGHT[name]
    assert_silent(diagnose(factory, name=name, seed=seed, timeout=120, **{"ranks": (ranks,)} | plain))


def strange(name: str, ranks: int) -> None:
    trial, step, phase, parameter = STRANGERS[name]
    report = diagnose(getattr(museum_strangers, name), ranks=(ranks,), only=("plain", trial), **ADAMW)
    departure = report.departures[0]
    assert (departure.trial, departure.step, departure.phase) == (trial, step, phase), str(report)
    assert departure.parameter in parameter.split()


def test_a_mistake_in_no_list_is_found_at_its_place() -> None:
    strange("norm_of_before", 2)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "ranks"), list(zip(STRANGERS, cycle((4, 3, 2)))))
def test_mistakes_in_no_list_are_found_at_their_places(name: str, ranks: int) -> None:
    strange(name, ranks)
