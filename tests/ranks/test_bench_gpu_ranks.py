"""The overlap trace of `python -m benchmarks gpu`, on two ranks of a CPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks import contenders, tables
from benchmarks.gpu import overlap
from benchmarks.gpu.budget import Budget
from zero_ref.lab.config import GPTConfig

pytestmark = pytest.mark.ranks


def test_a_trace_has_what_was_sent_and_what_was_computed() -> None:
    found = overlap.overlap(torch.device("cpu"), Budget(600), world_size=2, config=GPTConfig(2, 2, 32, 16))
    assert [one["way"] for one in found["traces"]] == list(overlap.OVERLAPPED)
    for one in found["traces"]:
        assert one["computing_ms"] > 0
    of_ddp = found["traces"][0]
    assert of_ddp["way"] == contenders.REFERENCE
    assert of_ddp["communication_ms"] > 0, "the all-reduces of DDP"
    assert 0 <= of_ddp["hidden_share"] <= 1
    assert contenders.REFERENCE in "".join(tables.SECTIONS["overlap"](found))


def test_what_has_no_time_left_is_not_traced() -> None:
    found = overlap.overlap(torch.device("cpu"), Budget(0), world_size=2)
    assert {one["left_out"] for one in found["traces"]} == {"no time was left"}
