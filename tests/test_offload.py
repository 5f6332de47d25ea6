"""The shard in files: the same numbers, and no memory beside the parameters."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from zero_ref.comm.collectives import Collectives
from zero_ref.lab import ranks, virtual
from zero_ref.optimizer import offload
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.state.sharded import load_sharded, save_sharded

SHAPES = [(300, 128), (64, 32), (), (512, 64), (33,), (128, 256)]
ADAMW: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}
Values = list[torch.Tensor]


def start(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    params[3].data = params[3].data.t().contiguous().t()
    return params


def fill(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step + 1)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def train(params: list[nn.Parameter], optimizer: Any, steps: range) -> Values:
    for step in steps:
        fill(params, step)
        optimizer.step()
    return [param.detach().clone() for param in params]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that these small shards are stepped in several pieces, and most tensors have a file."""
    monkeypatch.setattr(offload, "PIECE_NBYTES", 2**16)
    monkeypatch.setattr(offload, "SMALL_NBYTES", 2**12)


def files_of(optimizer: ZeroRedundancyOptimizer) -> list[bool]:
    """For each large tensor of the shard whether it lies in a file."""
    tensors = [own.local for own in optimizer.shard.owned]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    return [one.untyped_storage().filename is not None for one in tensors if one.nbytes >= 2**12]


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("partition", ["sorted_greedy", "even"])
@pytest.mark.parametrize("optimizer_class", [optim.AdamW, optim.Adagrad, optim.RMSprop])
def test_a_shard_in_files_gives_the_same_numbers(
    optimizer_class: Any, partition: str, flat: bool, masters: bool, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"master_dtype": torch.float32} if masters else {}
    dtype = torch.bfloat16 if masters else torch.float32

    def on_rank(comm: Collectives, place: Path | None) -> Values:
        params = start(dtype)
        optimizer = ZeroRedundancyOptimizer(
            params, optimizer_class, comm, flat, partition=partition, state_device=place, lr=1e-3, **options
        )
        fill(params, 0)
        seen: list[int] = []
        optimizer.step(lambda: seen.append(0) or 0.5)  # type: ignore[func-returns-value]
        assert seen == [0]
        values = train(params, optimizer, range(1, 4))
        if place is not None:
            assert all(files_of(optimizer))
            assert len(files_of(optimizer)) >= 2
        save_sharded(optimizer, tmp_path / f"{place is None}")
        optimizer.repartition("even" if partition == "sorted_greedy" else "sorted_greedy")
        params[0].requires_grad_(False)
        fill(params, 4)
        params[0].grad = None
        optimizer.step()
        params[0].requires_grad_(True)
        values += train(params, optimizer, range(5, 7))
        load_sharded(optimizer, tmp_path / f"{place is None}")
        values += train(params, optimizer, range(4, 6))
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(64, 100, dtype=dtype))]})
        params += optimizer.param_groups[1]["params"]
        values += train(params, optimizer, range(2))
        assert place is None or all(files_of(optimizer))
        return values

    expected, in_files = [virtual.run(on_rank, 3, place, timeout=60) for place in (None, tmp_path)]
    for theirs, ours in zip(expected, in_files, strict=True):
        assert all(map(torch.equal, theirs, ours))
    assert not list(tmp_path.glob("zero_ref_state_*"))  # the files have no names


def test_a_step_has_several_pieces_and_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(optim.SGD):
        """Counts in its groups, as some optimizers do."""

        elementwise = True

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1
            return super().step(closure)

    def on_rank(comm: Collectives) -> tuple[int, int]:
        params, pieces = start(torch.float32), []
        optimizer = ZeroRedundancyOptimizer(params, Counting, comm, state_device=tmp_path, lr=0.1)
        inner = optimizer.optim.step
        monkeypatch.setattr(optimizer.optim, "step", lambda: (pieces.append(0), inner())[1])
        train(params, optimizer, range(2))
        return len(pieces), optimizer.param_groups[0]["count"]

    ((pieces, count),) = virtual.run(on_rank, 1, timeout=20)
    assert pieces == 2 * 3
    assert count == 2


def test_a_place_that_cannot_hold_state_is_refused_on_all_ranks(tmp_path: Path) -> None:
    def on_rank(comm: Collectives) -> None:
        for place, error in ((tmp_path / "nowhere", OSError), ("meta", ValueError), ("oops", RuntimeError)):
            mine = place if comm.rank == 0 else None
            with pytest.raises((error, RuntimeError)):
                ZeroRedundancyOptimizer(start(torch.float32), optim.AdamW, comm, state_device=mine)
        with pytest.raises(ValueError, match="state beside parameters"):
            ZeroRedundancyOptimizer(
                start(torch.float32), optim.AdamW, comm, state_device=tmp_path if comm.rank else None
            )

    virtual.run(on_rank, 2, timeout=20)


def anonymous_bytes() -> int:
    """Memory of this process that is neither a file nor shared, without what malloc keeps of freed memory."""
    ctypes.CDLL(None).malloc_trim(0)
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line]
    return int(line.split()[1]) * 1024


def growth(folder: Path | None) -> int:
    """Bytes that the optimizer of a rank adds to its memory in two steps, beside parameters and gradients."""
    offload.PIECE_NBYTES = 2**22  # the memory of a piece is in use while it is stepped
    params = [nn.Parameter(torch.ones(1000, 1000, dtype=torch.bfloat16)) for _ in range(16)]
    for param in params:
        param.grad = torch.ones_like(param)
    before = anonymous_bytes()
    optimizer = ZeroRedundancyOptimizer(
        params, optim.AdamW, partition="even", master_dtype=torch.float32, state_device=folder
    )
    for _ in range(2):
        optimizer.step()
    return anonymous_bytes() - before


@pytest.mark.ranks
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_state_in_files_takes_no_memory(tmp_path: Path) -> None:
    """16M parameters on 2 ranks: 96 MB of masters and moments each, in memory or in files."""
    state_bytes = 16_000_000 // 2 * 12
    in_memory = ranks.run(growth, 2, None, timeout=120)
    in_files = ranks.run(growth, 2, tmp_path, timeout=120)
    assert min(in_memory) > 0.95 * state_bytes
    assert max(in_files) < 0.05 * state_bytes
