"""The doctor on programs that are right, and on programs with a mistake in them."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from zero_ref import ZeroRedundancyOptimizer, doctor

pytestmark = pytest.mark.ranks
LR = 0.05


def examined(factory, **settings):
    return doctor.diagnose(factory, **{"from_plain": torch.optim.AdamW, "options": {"lr": LR}} | settings)


def zero(model):
    ddp = DDP(model, find_unused_parameters=True)
    return ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=LR), ddp


def test_a_sharded_optimizer_under_ddp_is_healthy():
    report = examined(zero, ranks=(2,))
    assert not report.departures, str(report)
    assert not report.raised
    assert not report.not_tried
    assert {name for name, _ in report.tried} == {*doctor.TRIALS}


def unaveraged(model):
    return torch.optim.AdamW(model.parameters(), lr=LR), model


def test_gradients_that_nobody_averages_depart():
    report = examined(unaveraged, ranks=(2,), only=["plain"])
    (departure,) = report.departures
    assert (departure.step, departure.phase) == (0, "backward")
    assert not report.healthy
    with pytest.raises(AssertionError, match="departs from the plain loop"):
        report.check()
