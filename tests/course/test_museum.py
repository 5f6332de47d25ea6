"""The museum: every exhibit has a report of these years, tells what happened, and is found once."""

from __future__ import annotations

import re

import pytest

from zero_ref.doctor import TRIALS
from zero_ref_course.gallery import all_exhibits

EXHIBITS = all_exhibits()
NAMED_IN_THE_CHAPTER = (
    "deepspeedai/DeepSpeed/issues/8441",
    "deepspeedai/DeepSpeed/issues/7807",
    "deepspeedai/DeepSpeed/pull/8090",
    "deepspeedai/DeepSpeed/pull/8141",
    "deepspeedai/DeepSpeed/pull/8091",
    "NVIDIA/Megatron-LM/pull/7186",
    "ServiceNow/Fast-LLM/issues/550",
    "KempnerInstitute/KempnerForge/pull/115",
)


def test_there_are_thirty_exhibits_and_the_numbers_of_most_say_what_is_there() -> None:
    assert len(EXHIBITS) >= 30
    assert sum(bool(exhibit.says) for exhibit in EXHIBITS.values()) >= 18


@pytest.mark.parametrize("name", EXHIBITS)
def test_an_exhibit_says_what_happened_where_it_was_reported_and_when(name: str) -> None:
    exhibit = EXHIBITS[name]
    assert all(
        re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", one) for one in exhibit.reports
    )
    assert exhibit.reports
    assert 2024 <= exhibit.year <= 2026
    assert exhibit.trial in TRIALS
    assert 40 < len(exhibit.story) < 250
    assert exhibit.story.endswith(".")


def test_no_report_is_shown_twice_and_the_known_ones_are_there() -> None:
    reports = [report for exhibit in EXHIBITS.values() for report in exhibit.reports]
    assert len(set(reports)) == len(reports)
    for report in NAMED_IN_THE_CHAPTER:
        assert f"https://github.com/{report}" in reports


def test_an_exhibit_differs_from_its_mended_program() -> None:
    for exhibit in EXHIBITS.values():
        assert exhibit.program is not exhibit.mended
