"""Random sequences of operations on real ranks, with DDP; `python tests/fuzzer.py --real` plays more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fuzzer import Trial, search

from zero_ref.lab.ranks import shutdown

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    yield
    shutdown()


@pytest.mark.parametrize(
    ("world_size", "sequences"), [pytest.param(2, 16, marks=pytest.mark.thorough), (4, 8)]
)
def test_random_sequences_train_as_ddp_and_the_unsharded_optimizer(world_size: int, sequences: int) -> None:
    assert not [*search([Trial(seed, world_size, real=True) for seed in range(sequences)])]
