"""Random programs over all options, on virtual ranks; `python tests/crossed.py` plays as many as you like."""

from __future__ import annotations

import pytest
from crossed import search
from library.crossed_options import OPTIONS, Trial, pairs_of


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "seeds", [range(12), range(12, 24), pytest.param(range(24, 200), marks=pytest.mark.thorough)], ids=repr
)
def test_random_programs_train_as_the_unsharded_loop(seeds: range) -> None:
    assert not [*search([Trial(seed) for seed in seeds])]


def test_every_pair_of_values_is_drawn_at_least_20_times_in_2000_programs() -> None:
    counts = pairs_of([Trial(seed) for seed in range(2000)])
    assert {name for pair in counts for name, _ in pair} == {*OPTIONS}
    assert min(counts.values()) >= 20
