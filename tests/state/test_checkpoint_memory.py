"""Saving and loading on real ranks: each rank holds at its peak what the simulator says, to the byte.

What is counted are tensors, by `TensorPeak`, beside the model, its state and the state dict that is loaded.
The few bytes with which ranks agree come on top.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zero_ref import ZeroRedundancyOptimizer, load_sharded, save_sharded
from zero_ref.lab import ranks
from zero_ref.lab.meter import state_bytes
from zero_ref.lab.tensor_peak import TensorPeak
from zero_ref.simulator.checkpoints import load, save
from zero_ref.simulator.cluster import cluster
from zero_ref.simulator.ledger import state_rule
from zero_ref.simulator.saved import Saved

pytestmark = pytest.mark.ranks

AGREEMENT = 32
"""Bytes that each rank receives of each other one, and of itself, where ranks agree."""

STEP = 4
"""Bytes of a step count. The state that is gathered has one of each parameter, made by torch.tensor."""


def made(dtype: torch.dtype, rule: str, *, stepped: bool) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    torch.manual_seed(0)
    # Matrices above and below the size up to which messages are joined.
    model = nn.Sequential(nn.Linear(300, 400), nn.Linear(400, 500), nn.Linear(500, 100)).to(dtype)
    masters: dict[str, Any] = {"master_dtype": torch.float32} if dtype == torch.bfloat16 else {}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, partition=rule, **masters)
    if stepped:
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def peak_of(run: Callable[[], object]) -> int:
    gc.collect()
    with TensorPeak() as tensors:
        run()
    return tensors.peak_bytes


def measured(dtype: torch.dtype, rule: str, directory: str) -> tuple[dict[str, int], Saved, int]:
    """The peak of each way, what the simulator counts with, and the bytes of the state after a load."""
    _, optimizer = made(dtype, rule, stepped=True)
    peaks = {"consolidated": peak_of(lambda: optimizer.consolidate_state_dict(0))}
    peaks["sharded save"] = peak_of(lambda: save_sharded(optimizer, directory))
    optimizer.consolidate_state_dict("all")
    state_dict = optimizer.state_dict()

    for way, how in (("whole", {}), ("whole, without a copy", {"copy": False})):
        _, fresh = made(dtype, rule, stepped=False)
        # New masters are compared with their parameters first, which may need more than such a load.
        fresh.shard.copies.note_versions()
        peaks[way] = peak_of(partial(fresh.load_state_dict, state_dict, **how))
        assert state_bytes(fresh) == state_bytes(optimizer)
    _, fresh = made(dtype, rule, stepped=False)
    peaks["sharded"] = peak_of(lambda: load_sharded(fresh, directory))

    mixed = dtype == torch.bfloat16
    state = state_rule("AdamW").with_master() if mixed else state_rule("AdamW")
    built = optimizer.built
    return peaks, Saved(tuple(built.specs), built.partition, state), state_bytes(fresh)


@pytest.mark.parametrize(
    ("rule", "dtype", "world_size"), [("even", torch.bfloat16, 3), ("sorted-greedy", torch.float32, 2)]
)
def test_each_way_holds_what_was_predicted(
    rule: str, dtype: torch.dtype, world_size: int, tmp_path: Path
) -> None:
    here = cluster("loopback")
    for rank, (peaks, saved, kept) in enumerate(ranks.run(measured, world_size, dtype, rule, str(tmp_path))):
        assert kept == saved.own_state_bytes[rank]
        agreed = AGREEMENT * world_size
        # `load_state_dict` is given a state dict, which is there before: an optimizer's, without parameters.
        of_state = replace(saved, parameters=False)
        given = of_state.file_bytes
        foreseen = {
            "consolidated": save("consolidated", saved, here).host_bytes[rank]
            - (0 if rank else STEP * len(saved.params)),
            "sharded save": save("sharded", saved, here).host_bytes[rank],
            "whole": load("whole", of_state, here).host_bytes[rank] - given,
            "whole, without a copy": load("whole, without a copy", of_state, here).host_bytes[rank] - given,
            "sharded": load("sharded", saved, here).host_bytes[rank],
        }
        # A thread of the backend may still hold what was received in one agreement when the next one begins.
        beside = {way: peaks[way] - nbytes for way, nbytes in foreseen.items()}
        assert all(nbytes in (agreed, 2 * agreed) for nbytes in beside.values()), f"rank {rank}: {beside}"
