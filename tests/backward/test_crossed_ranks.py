"""Random programs over all options on real ranks, with DDP; `python tests/crossed.py --real` plays more."""

from __future__ import annotations

import pytest
from crossed import search
from library.crossed_options import Trial

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    "seeds", [range(4), pytest.param(range(4, 30), marks=pytest.mark.thorough)], ids=repr
)
def test_random_programs_train_as_the_unsharded_loop(seeds: range) -> None:
    assert not [*search([Trial(seed, real=True) for seed in seeds])]
