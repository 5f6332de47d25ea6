"""Results of benchmarks: how they are kept, held against what was wanted, and printed. Nothing is timed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from bench_results import ADAMW, EXCHANGE, report, step_result
from hypothesis import given, settings
from hypothesis.strategies import integers, lists

from benchmarks import machine, tables, targets
from benchmarks.contenders import OURS, OURS_IN, TORCH, TORCH_BEST
from benchmarks.results import (
    AXES,
    Figure,
    GrowthPoint,
    Report,
    Spread,
    SuiteResult,
    Taken,
    merge,
    spread,
)
from benchmarks.targets import Bounds, Judged, judge


def rows_of(judged: list[Judged], what: str, set_name: str | None = "gpt") -> list[Judged]:
    return [row for row in judged if row.what == what and row.set == set_name]


# ------------------------------------------------------------------------------------------- what is kept


def test_a_ratio_divides_times_of_the_same_round() -> None:
    # 1, 10 and 100 ms beside 10, 100 and 1: round by round that is 0.1, 0.1 and 100, not 10 by 10.
    result = step_result(**{OURS: [1.0, 10.0, 100.0], TORCH: [10.0, 100.0, 1.0]})
    assert result.ratio(OURS, TORCH).median == pytest.approx(0.1)
    assert result.ratio(TORCH, OURS).median == pytest.approx(10.0)


def test_a_limit_of_several_is_their_sum_in_each_round() -> None:
    result = step_result(**{OURS: [11.0, 20.0, 30.0], ADAMW: [1.0, 9.0, 10.0], EXCHANGE: [10.0, 1.0, 10.0]})
    assert result.ratio(OURS, ADAMW, EXCHANGE) == spread([1.0, 1.5, 2.0])


def test_bytes_on_the_wire_are_told_in_parameters_for_all_ranks_but_one() -> None:
    result = step_result()
    assert result.wire_units(OURS) == 400 / (1 * 100 * 4)
    assert replace(result, ranks=3).wire_units(OURS) == 0.5
    result.taken[OURS].wire_bytes = None
    assert result.wire_units(OURS) is None
    assert replace(result, ranks=1).wire_units(TORCH) is None


@given(lists(integers(1, 10**6), min_size=1, max_size=9))  # floats round when they are averaged
@settings(max_examples=30)
def test_the_median_lies_between_the_quartiles(values: list[int]) -> None:
    found = spread(values)
    assert found.low <= found.median <= found.high
    assert min(values) <= found.median <= max(values)


def test_a_report_comes_back_from_json_as_it_was() -> None:
    figures = (Figure("plan", "partition", "even", 4096, 9.5, "ms"),)
    before = report(step_result(), figures=figures)
    before.results[0].taken[OURS].figures["state_bytes"] = 5.0
    after = Report.from_json(json.loads(json.dumps(before.as_json())))
    assert after == before
    assert Report.from_json(json.loads(json.dumps(replace(before, commit=None).as_json()))).commit is None


def test_reports_of_single_suites_become_one() -> None:
    one, other = report(step_result()), report(replace(step_result(), suite="sync"))
    both = merge([one, other])
    assert [result.suite for result in both.results] == ["step", "sync"]
    assert both.sessions == one.sessions + other.sessions


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


# ------------------------------------------------------------------------------------------ what is wanted


def test_targets_are_judged_by_the_median_of_the_rounds() -> None:
    of_torch, of_best, of_limits = rows_of(judge([step_result()]), "the step")
    assert (of_torch.measured, of_torch.reached) == (Spread(3.0, 3.0, 3.0), True)
    assert (of_best.measured, of_best.reached) == (pytest.approx((0.9, 0.9, 0.9)), False)
    assert of_limits.measured is not None
    assert (of_limits.measured.median, of_limits.reached) == (1.0, True)
    assert of_torch.ranks == 2
    # One round that is far off decides neither for nor against.
    mixed = step_result(**{OURS: [10.0] * 3, TORCH: [20.0, 26.0, 90.0], TORCH_BEST: [5.0, 12.0, 10.0]})
    of_torch, of_best, _ = rows_of(judge([mixed]), "the step")
    assert of_torch.measured is not None
    assert (of_torch.measured.median, of_torch.reached) == (2.6, True)
    assert of_best.measured is not None
    assert (of_best.measured.median, of_best.reached) == (1.0, False)


def test_the_contender_that_counts_was_named_before() -> None:
    # Another form of ours would have reached it; it is not the one that the row names.
    result = step_result(**{"zero_ref, fused": [1.0, 2.0, 3.0], TORCH_BEST: [9.0, 18.0, 36.0]})
    assert [row.reached for row in rows_of(judge([result]), "the step")] == [True, False, True]


@pytest.mark.parametrize(
    ("wire_bytes", "reached"), [(799, False), (800, True), (803, True), (804, True), (805, False)]
)
def test_bytes_sent_are_those_predicted_up_to_headers(wire_bytes: int, reached: bool) -> None:
    result = replace(step_result(), suite="sync")
    taken = Taken([1.0], [1.0], wire_bytes)
    result.taken = {OURS_IN["sync"]: taken, TORCH: taken, TORCH_BEST: taken}
    (row,) = [row for row in rows_of(judge([result]), "gradients and step") if "bytes" in row.says]
    assert row.reached is reached


def test_state_is_held_against_an_even_share_of_all_of_it() -> None:
    taken = {name: Taken(figures={"state_bytes": nbytes}) for name, nbytes in (("ddp", 8000.0), (OURS, 1.0))}
    even = OURS_IN["state"]
    for nbytes, reached in ((2000.0, True), (2001.0, True), (2010.0, False)):
        taken[even] = Taken(figures={"state_bytes": nbytes, "peak_bytes": 0.0})
        (row,) = rows_of(judge([SuiteResult("memory", "gpt", 4, 3, 1000, taken)]), "optimizer state")
        assert row.reached is reached
        assert row.measured == spread([nbytes / 2000])


def test_extra_memory_is_missed_above_what_is_touched_anyway() -> None:
    for nbytes, reached in ((0.0, True), (1e6, True), (2e6, False)):
        taken = {OURS: Taken(figures={"peak_bytes": nbytes})}
        (row,) = rows_of(judge([SuiteResult("memory", "gpt", 2, 3, 1000, taken)]), "memory of a step")
        assert row.reached is reached


def test_the_worst_case_of_a_figure_decides() -> None:
    figures = [
        Figure("simulate", "processor time", "zero", 1024, 0.1, "s"),
        Figure("simulate", "processor time", "ddp", 1024, 1.5, "s"),
        Figure("simulate", "processor time", "ddp", 4096, 3.0, "s"),
    ]
    slow, large = [row for row in judge([], figures) if row.says == "processor time, s"]
    assert (slow.ours, slow.ranks, slow.reached) == ("ddp", 1024, False)
    assert (large.ranks, large.reached) == (4096, True)


@pytest.mark.parametrize(("power", "reached"), [(0.5, True), (1.0, True), (1.3, False)])
def test_times_that_grow_faster_than_the_work_miss(power: float, reached: bool) -> None:
    def points(contender: str, power: float) -> list[GrowthPoint]:
        return [
            GrowthPoint("tensors", "step", contender, 2, size, 10**6, (size**power,) * 3, (1.0,) * 3)
            for size in (10, 100, 1000, 10000)
        ]

    rows = judge([], growth=points("zero_ref, best", power) + points("torch", 2.0))
    (row,) = [row for row in rows if row.what == "growth with tensors"]
    assert row.reached is reached
    assert row.measured is not None
    assert row.measured.median == pytest.approx(power - 1)
    assert row.ours == "zero_ref, best: step"


def test_without_measurements_every_row_is_there_and_none_is_reached() -> None:
    judged = judge([])
    assert {row.reached for row in judged} == {None}
    assert len(judged) == len(targets.TARGETS) + len(targets.FIGURE_TARGETS) + len(AXES) + 1
    assert all(row.why_not for row in judged)
    assert judged[-1].why_not == "not measured here: time make test"


def test_a_peer_that_is_not_installed_is_said_to_be_missing() -> None:
    taken = {name: Taken([1.0], [1.0]) for name in ("zero_ref: consolidate", "torch: consolidate")}
    rows = rows_of(judge([SuiteResult("checkpoint", "gpt", 2, 3, 100, taken)]), "consolidate_state_dict")
    assert [row.reached for row in rows] == [False, None, None]
    assert rows[1].why_not == "fairscale: consolidate did not take part"
    assert rows[2].why_not == "this system does not count it"


def test_bounds_hold_at_their_ends() -> None:
    assert Bounds(low=2.5).hold(2.5)
    assert not Bounds(low=2.5).hold(2.4999)
    assert Bounds(high=1.1).hold(1.1)
    assert not Bounds(high=1.1).hold(float("nan"))


# --------------------------------------------------------------------------------------------- what is said


def test_tables_have_a_line_for_each_contender_and_target() -> None:
    result = step_result()
    result.taken[OURS].figures["state_bytes"] = 2e6
    text = tables.suite_table(result)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]
    by_name = {line[0]: line for line in lines}
    assert by_name[OURS][3:] == ["1", "1", "1.0000", "state 2.00 MB"]
    assert by_name[TORCH][1:4] == ["60 (30-120)", "120 (60-240)", "3"]
    wanted = tables.targets_table(judge([result])).splitlines()
    assert len({len(line) for line in wanted}) == 1
    assert sum("MISSED" in line for line in wanted) == 1
    assert sum(line.rstrip(" |").endswith(" reached") for line in wanted) == 2


def test_a_suite_without_times_has_a_table() -> None:
    result = SuiteResult("memory", "tiny", 2, 3, 100, {OURS: Taken(figures={"state_share": 1.0})})
    cells = [cell.strip() for cell in tables.suite_table(result).splitlines()[-1].split("|")]
    assert cells == ["", OURS, "state share 1", ""]  # no empty columns


def test_a_table_of_figures_has_a_column_for_each_name() -> None:
    figures = [
        Figure("plan", "partition", "even", 4096, 9.5, "ms"),
        Figure("plan", "cuts", "greedy", 8, 3, ""),
    ]
    assert tables.figures_table(figures).splitlines() == [
        "| plan   | ranks | partition, ms | cuts |",
        "|--------|------:|--------------:|-----:|",
        "| even   | 4,096 |         9.500 |    - |",
        "| greedy |     8 |             - |    3 |",
    ]
