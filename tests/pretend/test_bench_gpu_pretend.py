"""`python -m benchmarks gpu` on the pretend device: its sections run, and a report comes of them."""

from __future__ import annotations

from collections.abc import Iterator

import pretend_device as device
import pretend_group
import pytest
import torch.distributed as dist
from pretend_ranks import Ranks

from benchmarks import tables
from benchmarks.gpu import report
from benchmarks.gpu.report import SECTIONS, GpuReport

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.close()


def measured() -> tuple[GpuReport, str]:
    pretend_group.register()
    dist.destroy_process_group()  # the command makes its own
    made = report.new_report(device.DEVICE, quick=True)
    here = [one for one in SECTIONS if one.name in ("step", "memory", "speed")]
    report.measure(device.DEVICE, made, sections=here)
    return made, tables.gpu_text(made)


def test_its_sections_run_on_the_device(pool: Ranks) -> None:
    made, text = pool.run(measured, world_size=1)[0]
    assert made.failed == [], made.sections
    assert made.accelerator.name == "pretend accelerator"
    assert "pretend accelerator" in text
