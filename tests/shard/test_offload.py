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
from zero_ref.files.sharded import load_sharded, save_sharded
from zero_ref.lab import ranks, virtual
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.shard import offload

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


class CountsAnywhere(optim.SGD):
    """Counts its steps where no copy of the groups' options restores it."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.steps
        return super().step(closure)


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


@pytest.mark.parametrize(
    ("optimizer_class", "partition", "flat", "masters"),
    [
        (optim.AdamW, "sorted_greedy", False, True),
        (optim.AdamW, "even", True, False),
        (optim.Adagrad, "even", False, True),
        (optim.Adagrad, "sorted_greedy", True, False),
        (optim.RMSprop, "even", True, True),
    ],
)
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

    expected, in_files = [virtual.run(on_rank, 3, place, timeout=180) for place in (None, tmp_path)]
    for theirs, ours in zip(expected, in_files, strict=True):
        assert all(map(torch.equal, theirs, ours))
    assert not list(tmp_path.glob("zero_ref_state_*"))  # the files have no names


def test_state_that_lies_in_a_file_stays_there(tmp_path: Path) -> None:
    """Each step would else write all of the state into new files."""

    def on_rank(comm: Collectives) -> None:
        params = start(torch.float32)
        optimizer = ZeroRedundancyOptimizer(params, optim.AdamW, comm, state_device=tmp_path, **ADAMW)

        def places() -> list[int]:
            moments = [value for state in optimizer.state.values() for value in state.values()]
            return [value.data_ptr() for value in moments if value.nbytes >= 2**12]

        train(params, optimizer, range(1))
        before = places()
        train(params, optimizer, range(1, 3))
        assert places() == before
        assert len(before) >= 2

    virtual.run(on_rank, 2, timeout=180)


def test_torchs_classes_are_stepped_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others make one step for all: where they count their steps is not known."""

    def on_rank(comm: Collectives, optimizer_class: Any) -> int:
        params, steps = start(torch.float32), []
        optimizer = ZeroRedundancyOptimizer(params, optimizer_class, comm, state_device=tmp_path, lr=0.1)
        inner = optimizer.optim.step
        monkeypatch.setattr(optimizer.optim, "step", lambda: (steps.append(0), inner())[1])
        train(params, optimizer, range(2))
        return len(steps)

    assert virtual.run(on_rank, 1, optim.SGD, timeout=180) == [2 * 3]
    assert virtual.run(on_rank, 1, CountsAnywhere, timeout=180) == [2]


def test_a_place_that_cannot_hold_state_is_refused_on_all_ranks(tmp_path: Path) -> None:
    def on_rank(comm: Collectives) -> None:
        for place, error in ((tmp_path / "nowhere", OSError), ("meta", ValueError), ("oops", RuntimeError)):
            mine = place if comm.rank == 0 else None
            with pytest.raises((error, RuntimeError)):
                ZeroRedundancyOptimizer(start(torch.float32), optim.AdamW, comm, state_device=mine)
        with pytest.raises(ValueError, match=r"rank 1 has \[state_device=files\]"):
            ZeroRedundancyOptimizer(
                start(torch.float32), optim.AdamW, comm, state_device=tmp_path if comm.rank else None
            )

    virtual.run(on_rank, 2, timeout=180)


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


def clamping(params: list[nn.Parameter], step: int) -> Any:
    def closure() -> float:
        fill(params, step)
        with torch.no_grad():
            for param in params:
                param.clamp_(-0.5, 0.5)
        return 0.0

    return closure


@pytest.mark.parametrize("kind", ["files", "masters"])
@pytest.mark.parametrize("optimizer_class", [CountsAnywhere, optim.AdamW])
def test_own_counters_closures_and_other_dtypes(optimizer_class: Any, kind: str, tmp_path: Path) -> None:
    """As without copies: a class that counts steps one, a closure that writes, a model that is converted."""

    def on_rank(comm: Collectives, options: dict[str, Any]) -> Values:
        params = start(torch.float32)
        optimizer = ZeroRedundancyOptimizer(
            params, optimizer_class, comm, partition="even", elementwise=True, lr=0.1, **options
        )
        values = train(params, optimizer, range(3))
        optimizer.step(clamping(params, 3))
        values += [param.detach().clone() for param in params]
        for param in params if optimizer_class is CountsAnywhere else ():  # AdamW keeps float32 moments
            param.data, param.grad = param.data.double(), None
        return values + train(params, optimizer, range(4, 6))

    options = {"state_device": tmp_path} if kind == "files" else {"master_dtype": torch.float64}
    expected = virtual.run(on_rank, 2, {}, timeout=180)
    for ours, theirs in zip(virtual.run(on_rank, 2, options, timeout=180), expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            if kind == "files":
                assert torch.equal(one, other)
            else:  # stepped in float64, rounded to float32
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_full_disk_leaves_state_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a warning, since other ranks go on: in a step and a load."""

    def on_rank(comm: Collectives, place: Path | None) -> Values:
        params = start(torch.float32)
        optimizer = ZeroRedundancyOptimizer(params, optim.AdamW, comm, state_device=place, **ADAMW)
        if place is not None and comm.rank == 1:
            assert optimizer.shard.place_of_state is not None
            monkeypatch.setattr(optimizer.shard.place_of_state, "_mapped", full)
        values = train(params, optimizer, range(2))
        optimizer.consolidate_state_dict("all")
        optimizer.load_state_dict(optimizer.state_dict())
        return values + train(params, optimizer, range(2, 4))

    def full(numel: int, dtype: torch.dtype) -> torch.Tensor:
        raise OSError(28, "No space left on device")

    expected = virtual.run(on_rank, 2, None, timeout=180)
    with pytest.warns(UserWarning, match="takes no more state, which stays in memory"):
        ours = virtual.run(on_rank, 2, tmp_path, timeout=180)
    for mine, theirs in zip(ours, expected, strict=True):
        assert all(map(torch.equal, mine, theirs))
