"""Results of benchmarks: how they are kept and printed. Nothing is timed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from library.bench_results import report, step_result

from benchmarks import machine, tables
from benchmarks.contenders import OURS, TORCH
from benchmarks.results import Report, merge

# ------------------------------------------------------------------------------------------- what is kept


def test_a_ratio_divides_times_of_the_same_round() -> None:
    # 1, 10 and 100 ms beside 10, 100 and 1: round by round that is 0.1, 0.1 and 100, not 10 by 10.
    result = step_result(**{OURS: [1.0, 10.0, 100.0], TORCH: [10.0, 100.0, 1.0]})
    assert result.ratio(OURS, TORCH).median == pytest.approx(0.1)
    assert result.ratio(TORCH, OURS).median == pytest.approx(10.0)


def test_bytes_on_the_wire_are_told_in_parameters_for_all_ranks_but_one() -> None:
    result = step_result()
    assert result.wire_units(OURS) == 400 / (1 * 100 * 4)
    assert replace(result, ranks=3).wire_units(OURS) == 0.5
    result.taken[OURS].wire_bytes = None
    assert result.wire_units(OURS) is None
    assert replace(result, ranks=1).wire_units(TORCH) is None


def test_a_report_comes_back_from_json_as_it_was() -> None:
    before = report(step_result())
    before.results[0].taken[OURS].figures["state_bytes"] = 5.0
    after = Report.from_json(json.loads(json.dumps(before.as_json())))
    assert after == before
    assert Report.from_json(json.loads(json.dumps(replace(before, commit=None).as_json()))).commit is None


@pytest.mark.parametrize(
    ("others", "complaint"),
    [
        ([], "got none"),
        ([report(step_result()), report(step_result())], r"'step', 'gpt', 2.* more than one"),
        ([report(), replace(report(), versions={"python": "3.13.0"})], "different versions"),
        ([report(), replace(report(), commit=None)], "different commit"),
        ([report(), replace(report(), machine=machine.read_machine())], "different machine"),
    ],
)
def test_reports_that_do_not_belong_together_stay_apart(others: list[Report], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        merge(others)


# --------------------------------------------------------------------------------------------- what is said


def test_a_table_has_a_line_for_each_contender() -> None:
    result = step_result()
    result.taken[OURS].figures["state_bytes"] = 2e6
    text = tables.suite_table(result)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]
    by_name = {line[0]: line for line in lines}
    assert by_name[OURS][3:] == ["1", "1", "1.0000", "state 2.00 MB"]
    assert by_name[TORCH][1:4] == ["60 (30-120)", "120 (60-240)", "3"]
