"""The doctor on the museum's exhibits, and on programs that are right."""

from __future__ import annotations

import os
from itertools import cycle

import pytest
from library.right_programs import RIGHT

from zero_ref.doctor import Report, diagnose
from zero_ref_course.gallery import Exhibit, all_exhibits

pytestmark = pytest.mark.ranks

EXHIBITS = all_exhibits()
FEW = ("LastMicroBatch", "MomentsReset", "MuonIsAdamW", "GroupsDiscarded")
FEW_RIGHT = ("FSDP2", "ShardedDataParallel")
RUNS = ((2, 0), (3, 1), (4, 2))
"""Numbers of ranks and seeds, dealt out in turn."""

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
def test_a_mended_exhibit_is_among_the_right_programs(name: str) -> None:
    assert any(program is EXHIBITS[name].mended for program, _ in RIGHT.values())


def assert_silent(report: Report) -> None:
    assert report.healthy, str(report)
    tried = {trial for trial, _ in report.tried}
    assert {"plain", "accumulation", "clipping"} <= tried, str(report)
    assert len(tried) >= 6, str(report)


@pytest.mark.parametrize("name", FEW_RIGHT)
def test_the_doctor_is_silent_about_a_right_program(name: str) -> None:
    factory, plain = RIGHT[name]
    assert_silent(diagnose(factory, name=name, ranks=(2,), **plain))


def numbers_of(name: str) -> tuple[int, ...]:
    return RIGHT[name][1].get("ranks", (2, 3, 4))


SEEDS = range(4)
EVERYWHERE = [(name, ranks, seed) for name in RIGHT for ranks in numbers_of(name) for seed in SEEDS]
IN_TURN = [
    (name, numbers_of(name)[n % len(numbers_of(name))], n % len(SEEDS)) for n, name in enumerate(RIGHT)
]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "ranks", "seed"), EVERYWHERE if os.environ.get("ZERO_REF_EVERYWHERE") else IN_TURN
)
def test_no_right_program_alarms_the_doctor(name: str, ranks: int, seed: int) -> None:
    factory, plain = RIGHT[name]
    assert_silent(diagnose(factory, name=name, seed=seed, timeout=120, **plain | {"ranks": (ranks,)}))
