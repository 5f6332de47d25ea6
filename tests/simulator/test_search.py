"""The search: nothing on its list is dominated, everything listed may fit, nothing is missing."""

from __future__ import annotations

import itertools
import shlex
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from zero_ref.simulator import spread
from zero_ref.simulator.activations import kinds_apart
from zero_ref.simulator.cluster import CLUSTERS
from zero_ref.simulator.models import MODELS
from zero_ref.simulator.options import from_options, words_of
from zero_ref.simulator.recipe import recipe
from zero_ref.simulator.scenario import Scenario
from zero_ref.simulator.search import (
    ENOUGH,
    NEAR,
    REMEDIES,
    SEARCHED,
    STEADY,
    Candidate,
    Found,
    groups,
    micro_batches,
    remedies,
    search,
)
from zero_ref.simulator.spread import Spread

SMALL = Scenario(MODELS["gpt2"], CLUSTERS["rtx4090-10gbe"], world_size=8, sequence=512)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals of a tenth, so that the tests do not depend on the published runs."""
    monkeypatch.setattr(spread, "MEMORY", Spread(0.9, 1.1))
    monkeypatch.setattr(spread, "TIME", Spread(0.8, 1.25))


def brute_force(scenario: Scenario, sequences: int) -> dict[tuple[object, ...], tuple[float, float]]:
    """Memory and time of every way that divides the sequences, each simulated by itself."""
    found: dict[tuple[object, ...], tuple[float, float]] = {}
    for strategy in SEARCHED:
        for group in (None, 4) if strategy in GROUPED else (None,):
            for batch in range(1, sequences + 1):
                accumulation = sequences // batch
                if batch * accumulation != sequences:
                    continue
                for checkpointing, no_sync in itertools.product(kinds_apart("fused"), (False, True)):
                    if no_sync and (accumulation == 1 or strategy not in GROUPED):
                        continue
                    one = replace(
                        scenario,
                        shard_group=group,
                        batch=batch,
                        accumulation=accumulation,
                        checkpointing=checkpointing,
                        no_sync=no_sync,
                        all_reduce_last=bool(
                            group and accumulation > 1 and strategy == "zero-3" and not no_sync
                        ),
                    )
                    run = one.run(strategy)
                    found[key_of(one, strategy)] = (run.peak_bytes, run.iteration_ms)
    return found


GROUPED = tuple(name for name in SEARCHED if len(groups(SMALL, name)) > 1)


def key_of(one: Scenario, strategy: str) -> tuple[object, ...]:
    return strategy, one.shard_group, one.batch, one.accumulation, one.checkpointing, one.no_sync


# ----------------------------------------------------------------------------------------------- example


def test_groups_are_all_ranks_or_a_nodes() -> None:
    assert groups(SMALL, "zero-2") == (None, 4)
    assert groups(SMALL, "zero-even") == (None,)
    assert groups(replace(SMALL, world_size=4), "zero-2") == (None,), "one node is all there is"
    assert groups(replace(SMALL, world_size=6), "zero-2") == (None,), "half a node is no group"


def test_a_prime_number_of_sequences_is_computed_in_batches_of_about_as_many() -> None:
    assert micro_batches(1) == [(1, 1)]
    assert micro_batches(3) == [(1, 3), (3, 1)]
    assert (4, 15) in micro_batches(61)
    assert (4, 1) not in micro_batches(5), "a fifth is not near"


def test_a_search_without_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match="an update has at least 1 token, got 0"):
        search(SMALL, 0)
    with pytest.raises(ValueError, match="unknown strategy 'zero-9'"):
        search(SMALL, 1, ["zero-9"])


def test_an_update_has_the_nearest_number_of_whole_sequences(narrow: None) -> None:
    found = search(SMALL, tokens=8 * 512 * 2 + 100)
    assert {one.tokens for one in found.candidates} == {8 * 512 * 2}
    found = search(SMALL, tokens=1)
    assert {one.tokens for one in found.candidates} == {8 * 512}, "each rank computes a sequence at least"


def test_what_does_not_fit_is_counted_and_its_smallest_is_shown(narrow: None) -> None:
    large = Scenario(MODELS["zero-7.5b"], CLUSTERS["rtx4090-10gbe"], world_size=8)
    found = search(large, 8 * 2048)
    left_out = found.left_out("ddp")
    assert left_out is not None
    assert left_out.count == len(kinds_apart("fused"))
    assert left_out.least.peak_bytes > 16 * 7.5e9
    assert left_out.most_of_it == "moments", "8 bytes of 16 for each element"
    assert left_out.least.update_ms is None
    with pytest.raises(ValueError, match="ddp does not fit, so it was not timed"):
        _ = left_out.least.tokens_per_second


# ---------------------------------------------------------------------------------------------- property


@given(st.integers(1, 3000))
def test_batches_times_accumulation_is_near_the_sequences(sequences: int) -> None:
    pairs = micro_batches(sequences)
    assert (1, sequences) in pairs
    assert (sequences, 1) in pairs
    assert [batch for batch, _ in pairs] == sorted({batch for batch, _ in pairs})
    for batch, accumulation in pairs:
        assert abs(batch * accumulation - sequences) <= NEAR * sequences
        assert accumulation >= 1


def speed(one: Candidate) -> float:
    """Tokens per second; the tenth digit is rounding, and differs from machine to machine."""
    return float(f"{one.tokens_per_second:.9g}")


def judged(found: Found) -> None:
    for one in found.best:
        assert one.fits is not False
        for other in found.listed:
            faster, leaner = speed(other) >= speed(one), other.peak_bytes <= one.peak_bytes
            same = (speed(other), other.peak_bytes) == (speed(one), one.peak_bytes)
            assert same or not (faster and leaner), f"{other} is faster and leaner than {one}"
    for other in found.listed:
        assert any(speed(one) >= speed(other) and one.peak_bytes <= other.peak_bytes for one in found.best), (
            "what is not on the list is dominated by something on it"
        )


@settings(max_examples=5, deadline=None)
@given(
    st.sampled_from(["gpt2", "gpt2-large", "gpt2-xl"]),
    st.sampled_from(["rtx4090-10gbe", "h100-ib", "loopback"]),
    st.integers(1, 9),
    st.integers(1, 12),
)
def test_nothing_on_the_list_is_dominated_and_all_of_it_may_fit(
    model: str, cluster: str, ranks: int, sequences: int
) -> None:
    scenario = Scenario(MODELS[model], CLUSTERS[cluster], ranks, sequence=256)
    found = search(scenario, ranks * 256 * sequences)
    judged(found)
    memory_gb = scenario.cluster.device.memory_gb
    for one in found.listed:
        low, high = one.memory_interval
        assert low <= one.peak_bytes <= high
        if memory_gb is None:
            assert one.fits is None
        else:
            assert low <= memory_gb * 1e9
            assert one.fits is (True if high <= memory_gb * 1e9 else None)


# ------------------------------------------------------------------------------------------------ parity


def test_all_is_found_that_runs_one_by_one_would_find(narrow: None) -> None:
    cluster = replace(SMALL.cluster, device=replace(SMALL.cluster.device, memory_gb=5))
    scenario = replace(SMALL, cluster=cluster)
    found = search(scenario, 8 * 512 * 12)
    held = brute_force(scenario, 12)
    fitting = {key: what for key, what in held.items() if spread.fits(what[0], 5e9) is not False}
    exact = [one for one in found.listed if one.tokens == 8 * 512 * 12]
    assert {key_of(one.scenario, one.strategy) for one in exact} == set(fitting)
    assert len(fitting) < len(held), "some are too large"
    for one in exact:
        peak_bytes, ms = fitting[key_of(one.scenario, one.strategy)]
        assert one.peak_bytes == peak_bytes
        assert one.update_ms == pytest.approx(ms, rel=1e-9)  # batches are not played one by one
    some = exact[:: max(1, len(exact) // 5)]
    assert [one.scenario.run(one.strategy).fits for one in some] == [one.fits for one in some]
    assert found.tried >= len(held)


@pytest.mark.parametrize(("cluster", "no_sync"), [("h100-ib", True), ("rtx4090-10gbe", False)])
@pytest.mark.parametrize("strategy", SEARCHED)
def test_each_further_batch_takes_as_long_as_the_one_before(
    strategy: str, cluster: str, no_sync: bool
) -> None:
    """So a long accumulation can be timed by its first STEADY batches."""
    scenario = Scenario(MODELS["gpt2"], CLUSTERS[cluster], 16, sequence=128, no_sync=no_sync)
    for group in (None, 4) if recipe(strategy).in_groups else (None,):
        fewer, steady, more = (
            replace(scenario, accumulation=count, shard_group=group).run(strategy).iteration_ms
            for count in (STEADY - 1, STEADY, STEADY + 7)
        )
        assert steady + 7 * (steady - fewer) == pytest.approx(more, rel=1e-9)
        assert steady > fewer


TOO_LARGE = {
    "one 4090": (Scenario(MODELS["gpt2-xl"], CLUSTERS["rtx4090-10gbe"], 1), 8192),
    "four 4090": (Scenario(MODELS["llama3-8b"], CLUSTERS["rtx4090-10gbe"], 4), 65_536),
    "a node": (Scenario(MODELS["llama3-70b"], CLUSTERS["h100-ib"], 8), 2**20),
}


def test_remedies_fit_and_the_cheapest_tokens_come_first() -> None:
    seen: set[str] = set()
    for scenario, tokens in TOO_LARGE.values():
        assert not any(one.fits for one in search(scenario, tokens).listed)
        found = remedies(scenario, tokens)
        words = {one.words for one in found}
        seen |= words
        assert all(one.best.fits for one in found)
        rates = [one.tokens_per_second_of_gpu for one in found]
        assert rates == sorted(rates, reverse=True)
        for one in words & ENOUGH.keys():
            assert not words & set(ENOUGH[one]), "what is enough by itself is not combined"
    assert seen >= {"--offload state", "--offload gradients", "--fused-loss --offload in-backward"}


def test_a_remedy_changes_what_it_says_and_no_more() -> None:
    for words, (changed, changes) in REMEDIES.items():
        said = from_options(
            Scenario, {}, architecture=SMALL.architecture, cluster=SMALL.cluster, world_size=1
        )
        assert shlex.join(words_of(replace(said, **changed), recipe("zero-3"))).split() == words.split()
        same = (
            not {"masters", "states_8", "lora"} & changed.keys() and changed.get("offload") != "in_backward"
        )
        assert (changes == "") == same


def test_moments_in_8_bits_are_a_remedy_where_32_bits_are_too_many() -> None:
    """Llama 3 8B on one H200: 128 GB of parameters, gradients and state become 81."""
    alone = Scenario(MODELS["llama3-8b"], CLUSTERS["h200-ib"], 1, sequence=2048)
    assert not any(one.fits for one in search(alone, 16_384).listed)
    (found,) = (one for one in remedies(alone, 16_384) if one.words == "--states-8")
    assert found.best.memory.moment_bytes == 2 * (1 + 4 / 256) * alone.numel
    assert found.changes == "moments in 8 bits"


def test_what_is_said_already_is_no_remedy() -> None:
    alone, tokens = TOO_LARGE["one 4090"]
    words = {one.words for one in remedies(replace(alone, fused_loss=True, masters=False), tokens)}
    assert not words & {"--no-masters", "--fused-loss"}
