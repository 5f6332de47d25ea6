"""Saves that an earlier version wrote, at 1, 2 and 4 ranks and with masters, load as if written today.

`earlier_saves/` holds two steps of SGD on 16-bit parameters with masters. All numbers are short sums of
powers of two, so the values below are exact on every machine.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from zero_ref.cli.checkpoints import listed
from zero_ref.comm.collectives import Collectives
from zero_ref.files.saves import saves_in
from zero_ref.files.shard_files import verify
from zero_ref.files.sharded import load_sharded, save_sharded
from zero_ref.lab import virtual
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.shard.owned import MASTER

SAVES = Path(__file__).parent / "earlier_saves"


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)).to(torch.bfloat16)


def expected() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the master and the momentum of each parameter after the two steps."""
    values, first = [], 0
    for number, param in enumerate(make_model().parameters()):
        of_elements = torch.arange(param.numel())
        master = nn.Parameter(((first + of_elements) % 32).float().view(param.shape))
        plain = optim.SGD([master], lr=0.5, momentum=0.5)
        for step in range(2):
            master.grad = ((of_elements + number + step) % 8 / 64).view(param.shape)
            plain.step()
        values.append((master.detach(), plain.state[master]["momentum_buffer"]))
        first += param.numel()
    return values


@pytest.mark.parametrize("saved_at", [1, 2, 4])
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_a_save_of_an_earlier_version_is_loaded_and_the_directory_is_saved_to(
    tmp_path: Path, saved_at: int, world_size: int
) -> None:
    directory = shutil.copytree(SAVES / f"{saved_at}-ranks", tmp_path / "saves")

    def on_rank(comm: Collectives) -> tuple[dict[str, Any], list[torch.Tensor]]:
        model = make_model()
        options = {"lr": 0.5, "momentum": 0.5, "partition": "even", "master_dtype": torch.float32}
        zero = ZeroRedundancyOptimizer(model.named_parameters(), optim.SGD, comm, **options)
        assert load_sharded(zero, directory) == {"steps": 2}
        zero.consolidate_state_dict(to="all")
        save_sharded(zero, directory, keep=1)
        return zero.state_dict()["state"], list(model.parameters())

    for state, params in virtual.run(on_rank, world_size):
        for number, (master, momentum) in enumerate(expected()):
            assert state[number][MASTER].equal(master)
            assert state[number]["momentum_buffer"].equal(momentum)
            assert params[number].equal(master.bfloat16())
    assert [path.name for path in directory.iterdir()] == ["save-00000002"], "the earlier one is removed"


@pytest.mark.parametrize("saved_at", [1, 2, 4])
def test_the_command_lists_and_verifies_saves_of_an_earlier_version(saved_at: int) -> None:
    [entry] = listed(SAVES / f"{saved_at}-ranks", verify=True)
    assert (entry["state"], entry["ranks"], entry["notes"]) == ("verified", saved_at, {"steps": 2})
    [save] = saves_in(SAVES / f"{saved_at}-ranks")
    assert verify(save) == []
