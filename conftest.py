"""For all that pytest runs: tests, the examples in docstrings, notebooks."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Tests import `library` and the commands of tests/: see tests/library/README.md.
sys.path.insert(0, str(Path(__file__).parent / "tests"))

from surroundings import settle

pytest_plugins = ["library.executed"]

settle()  # now, not in a fixture: torch and matplotlib look at variables when they are imported

# No test is timed: on a busy machine Hypothesis would call an example slow that is not. "default" and not the
# profile that Hypothesis chooses on CI systems, so that the same examples are tried everywhere.
settings.register_profile(
    "untimed",
    settings.get_profile("default"),
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("untimed")

# pytest loads these by itself. To look into them for doctests it would import all under one name.
collect_ignore = ["conftest.py", "tests/browser/conftest.py", "demo-out"]


def pytest_collection_finish() -> None:
    """Spare the garbage collector the half a million objects of all that is imported by now, and stays."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _no_rank_outlives_its_file() -> Iterator[None]:
    """The tests on real ranks of a file share their processes, which end with it."""
    yield
    if "zero_ref.lab.ranks" in sys.modules:
        sys.modules["zero_ref.lab.ranks"].shutdown()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what never comes: a time-out is as long as it says."""
    monkeypatch.setenv("ZERO_REF_PATIENCE", "1")


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """This process as the only rank of a Gloo group: nothing is started, nothing listens."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def all_may_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what several ranks raise: none is cut short because another was first."""
    from zero_ref.lab import ranks

    monkeypatch.setattr(ranks, "GRACE_SECONDS", 600.0)
