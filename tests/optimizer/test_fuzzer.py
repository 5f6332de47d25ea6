"""Random sequences of operations on virtual ranks; `python tests/fuzzer.py` plays as many as you like."""

from __future__ import annotations

import pytest
from fuzzer import OFTEN, SELDOM, Trial, search


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "seeds", [range(15), pytest.param(range(15, 60), marks=pytest.mark.thorough)], ids=repr
)
def test_random_sequences_train_as_the_unsharded_optimizer(seeds: range) -> None:
    assert not [*search([Trial(seed, ranks=4) for seed in seeds])]


def test_every_operation_is_among_them() -> None:
    trials = [Trial(seed, ranks=4) for seed in range(60)]
    assert {name for trial in trials for _, name in trial.operations} == {*OFTEN, *SELDOM}
