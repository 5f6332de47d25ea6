"""The published runs beside their predictions, and the page that shows them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import judged
from benchmarks.judged import FIGURES, Compared, Validation, compare, validate, verdicts
from benchmarks.offload import offloaded
from benchmarks.published import published
from zero_ref.simulator.cluster import CLUSTERS
from zero_ref.simulator.spread import KINDS, SHARE, Spread, interval_of_memory, interval_of_time

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "book" / "validation.md").read_text(encoding="utf-8")

DO_NOT_FIT_AND_RAN = {"bigscience", "bionemo-og2", "llmq", "narayanan", "prime-rl"}
"""Sources of runs of which the simulator says that they do not fit: DeepSpeed gathers single matrices, LLMQ
computes logits in parts, how many sequences BioNeMo takes at a time is supposed, and in the longest run of
prime-rl the allocator gave back what no tensor used."""


def figures(*parts: tuple[str, float, float]) -> Validation:
    """Times of runs by their ids, published and predicted."""
    runs = {name: published().run(name) for name, _, _ in parts}
    return Validation([Compared(runs[name], "time", reported, said) for name, reported, said in parts])


# ------------------------------------------------------------------------------------------- a single figure


def test_too_long_a_time_is_a_positive_error_whatever_the_unit() -> None:
    run = published().run("titan-8b-8")
    slow = Compared(run, "time", published=3000.0, predicted=2000.0)
    assert slow.error == pytest.approx(0.5)  # a token takes half as long again
    assert slow.ratio == pytest.approx(2 / 3)
    full = Compared(run, "memory", published=80.0, predicted=60.0)
    assert full.error == -0.25
    assert full.ratio == pytest.approx(4 / 3)


def test_only_what_was_fitted_is_not_tested() -> None:
    fitted, titan = published().run("mpt-7b-a100-8"), published().run("titan-8b-8")
    assert not Compared(fitted, "time", 1.0, 1.0).tested
    assert Compared(titan, "time", 1.0, 1.0).tested
    assert not Compared(titan, "memory", 1.0, 1.0).tested


# ------------------------------------------------------------------------------------------------- intervals


def test_an_interval_does_not_know_the_source_that_it_is_judged_on() -> None:
    result = figures(("nanogpt-8", 100.0, 300.0), ("tinyllama-16", 100.0, 110.0), ("llmc-124m", 100.0, 90.0))
    nanogpt, tinyllama, llmc = result.compared
    assert result.interval(nanogpt) == pytest.approx((300 / 1.1, 300 / 0.9))  # of 1/1.1 and 1/0.9 of the time
    assert not result.inside(nanogpt)
    assert result.interval(tinyllama) == pytest.approx((110 / 3, 110 / 0.9))
    assert result.inside(tinyllama)
    assert result.summary(result.compared).inside == pytest.approx(1 / 3)
    assert result.interval(llmc)[1] == pytest.approx(90 / 1.1)  # reported 100 is above it
    assert not result.inside(llmc)


# ------------------------------------------------------------------------------------------------ all of them


def test_the_simulators_intervals_are_what_the_published_runs_give() -> None:
    """If this fails after a change of the simulator, write the computed values into spread.py."""
    written = {
        (kind, figure): interval(kind)
        for kind in KINDS
        for figure, interval in (("time", interval_of_time), ("memory", interval_of_memory))
    }
    computed = {(kind, figure): validate().spread(figure, kind) for kind, figure in written}
    assert {key: Spread(round(one.low, 3), round(one.high, 3)) for key, one in computed.items()} == written


@pytest.mark.parametrize(("figure", "median_error"), [("time", 0.11), ("memory", 0.06)])
def test_half_of_the_figures_that_were_not_fitted_are_this_near(figure: str, median_error: float) -> None:
    """Single figures are further off: the page has them, each with its cause. Intervals aim at 0.8."""
    summary = validate().summary(validate().of(figure))
    assert summary.median_error <= median_error
    assert summary.inside >= 0.65


def test_the_simulator_is_not_sure_of_what_did_not_happen() -> None:
    said = {run.id: (run.ran, verdict) for run, verdict in verdicts()}
    wrong = {published().run(name).source for name, (ran, verdict) in said.items() if verdict is (not ran)}
    assert wrong == DO_NOT_FIT_AND_RAN
    assert said["titan-a100-llama2-70b-op-2"] == (False, False)
    decided = [name for name, (_, verdict) in said.items() if verdict is not None]
    assert len(decided) > 0.75 * len(said)
    assert sum(verdict is (not ran) for ran, verdict in said.values()) < 0.07 * len(said)


# --------------------------------------------------------------------------------------------------- the page


def test_the_page_has_every_table_once() -> None:
    used = re.findall(r"^```\{measured\} (\w+ ?\w*)", PAGE, flags=re.M)
    assert len(used) == len(set(used))
    assert {one.split()[0] for one in used} == judged.VIEWS.keys()
    assert {one.split()[1] for one in used if " " in one} == set(FIGURES)


def test_the_tables_have_every_run_and_source(tmp_path: Path) -> None:
    for figure in FIGURES:
        (table,) = judged.figures(tmp_path, figure)
        rows = table.splitlines()[2:]
        assert len(rows) == len(validate().of(figure, tested=None))
        outside = [one for one in validate().of(figure, tested=None) if not validate().inside(one)]
        assert table.count("outside") == len(outside)
        (summary,) = judged.summary(tmp_path, figure)
        kinds = {(one.new, one.run.kind) for one in validate().of(figure)}
        assert summary.count("\n") == 1 + len(kinds) + 4  # new and others, all tested, and fitted
    table, *read = judged.sources(tmp_path)
    assert sum(line.startswith("- `") for line in read) == len(published().sources) == table.count("https://")
    (fitting,) = judged.fitting(tmp_path)
    assert sum(map(int, re.findall(r"\d+", fitting))) == len(verdicts())


def test_every_miss_has_a_cause() -> None:
    result, listed = validate(), judged.missed()
    assert "" not in listed
    missed = {
        one.run.id
        for figure in FIGURES
        for one in result.of(figure)
        if abs(one.error) > judged.WORST[figure] or not result.inside(one)
    }
    assert {run for runs in listed.values() for run in runs} == missed
    table = "\n".join(judged.causes(Path()))
    assert all(f"`{run}`" in table for run in missed)


def test_validation_page_says_which_new_sources_meet_the_targets() -> None:
    """A median of 8%, memory off by 25% at the most, and 80% inside: each met by one of the figures alone."""
    of_time, of_memory = (dict(judged.summaries(validate().of(figure))) for figure in FIGURES)
    assert of_time["new, vendor"].median_error < 8 / 100 < of_time["new, all"].median_error
    assert "new, vendor" not in of_memory
    assert of_memory["new, all"].median_error < 8 / 100
    assert of_memory["new, all"].worst_error > 25 / 100
    assert of_memory["new, all"].inside < 4 / 5 < of_time["new, all"].inside


def test_validation_page_says_which_figures_are_fitted_and_which_are_misses() -> None:
    fitted = [run for run in published().runs if run.use == "fit time"]
    assert {run.sequence for run in fitted} == {2048}
    assert {run.source for run in fitted} == {"llm-foundry"}
    of_memory = {run.source for run in published().runs if run.use == "fit memory"}
    assert [published().sources[source].title for source in of_memory] == [
        "torchtitan, Llama 3.1 on H100, December 2024"
    ]
    assert judged.WORST == {"time": 30 / 100, "memory": 15 / 100}
    assert SHARE == 4 / 5
    run = published().run("titan-8b-8")
    assert Compared(run, "time", 110.0, 100.0).error == pytest.approx(10 / 100)


def test_validation_page_says_how_near_torch_is() -> None:
    near = 2 / 100
    assert f"rel={near}" in (ROOT / "tests" / "simulator" / "test_peak.py").read_text(encoding="utf-8")


def test_validation_page_says_what_older_attention_costs() -> None:
    for name in ("mpt-7b-a100-8-32768", "mpt-7b-h100-8-32768"):
        run = published().run(name)
        assert run.sequence == 32_768
        assert abs(compare(run)[0].error) < 0.1
        scenario = published().scenario(run)
        usual = CLUSTERS[published().clusters[run.cluster].preset]
        quick = replace(scenario, cluster=usual).run("zero-3").tokens_per_second / run.ranks
        assert 0.2 < 1 - (run.tokens_per_s_gpu(published().models[run.model]) or 0) / quick < 0.35


def test_validation_page_says_how_long_updates_on_the_cpu_took() -> None:
    seen = [one.added_ms for one in offloaded() if one.offload == "state" or one.sequence == 8192]
    times = [published_ms / predicted_ms for published_ms, predicted_ms in seen]
    assert (round(min(times), 1), round(max(times), 1)) == (2.2, 4.1)
