"""`python -m benchmarks gpu` on the pretend device: its sections run, and it sees the host waiting."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pretend_device as device
import pretend_group
import pytest
import torch.distributed as dist
from pretend_ranks import Ranks

from benchmarks import tables
from benchmarks.gpu import report
from benchmarks.gpu.budget import Budget
from benchmarks.gpu.report import SECTIONS, GpuReport
from benchmarks.gpu.waits import synchronisations
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer

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
    here = [one for one in SECTIONS if one.name in ("synchronisations", "gemm", "step", "memory", "overlap")]
    report.measure(device.DEVICE, made, sections=here)
    return made, tables.gpu_text(made)


def waits_with_a_mistake() -> object:
    pretend_group.register()
    dist.destroy_process_group()  # the command makes its own
    end = ZeroRedundancyOptimizer.end_update

    def waits(self: ZeroRedundancyOptimizer) -> None:
        self.built.params[0].sum().item()
        end(self)

    with mock.patch.object(ZeroRedundancyOptimizer, "end_update", waits):
        return synchronisations(device.DEVICE, Budget(600), only=["zero_ref, sent in 16 bits"])


def test_its_sections_run_on_the_device(pool: Ranks) -> None:
    made, text = pool.run(measured, world_size=1)[0]
    assert made.failed == [], made.sections
    assert made.accelerator.name == "pretend accelerator"
    assert "pretend accelerator" in text


def test_a_wait_in_a_step_is_in_the_report(pool: Ranks) -> None:
    found = pool.run(waits_with_a_mistake, world_size=1)[0]
    assert found["checked"]
    assert any("_local_scalar_dense" in (said or "") for said in found["ways"][0]["parts"].values()), found
