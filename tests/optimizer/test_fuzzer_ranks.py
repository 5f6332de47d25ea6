"""Random sequences of operations on real ranks, with DDP; `python tests/fuzzer.py --real` plays more."""

from __future__ import annotations

import pytest
from fuzzer import Trial, search

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    ("world_size", "sequences"), [pytest.param(2, 16, marks=pytest.mark.thorough), (4, 8)]
)
def test_random_sequences_train_as_ddp_and_the_unsharded_optimizer(world_size: int, sequences: int) -> None:
    assert not [*search([Trial(seed, world_size, real=True) for seed in range(sequences)])]
