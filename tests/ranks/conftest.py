"""For the tests on real ranks: those of a file share their processes, and none outlives it."""

from collections.abc import Iterator

import pytest

from zero_ref.lab.ranks import shutdown


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    yield
    shutdown()
