"""Scripts written for torch's ZeroRedundancyOptimizer run on zero_ref's, unchanged but for the import."""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from library.training import assert_state_dicts_equal
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from zero_ref.lab.ranks import run
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer

pytestmark = pytest.mark.ranks

SCRIPTS = Path(__file__).parent.parent / "scripts"
OVERLAP = SCRIPTS / "torch_overlap.py"
RESUME = SCRIPTS / "torch_resume.py"
TORCHS_MODULES = r"torch\.distributed\.(optim|algorithms\.ddp_comm_hooks\.ddp_zero_hook)"


def with_our_imports(script: Path, folder: Path) -> Path:
    """A copy of the script that imports from zero_ref; its other lines are the same."""
    theirs = script.read_text()
    ours = re.sub(rf"^from {TORCHS_MODULES} import", "from zero_ref import", theirs, flags=re.MULTILINE)
    pairs = zip(theirs.splitlines(), ours.splitlines(), strict=True)
    changed = [(before, after) for before, after in pairs if before != after]
    assert changed
    assert all(before.split()[2:] == after.split()[2:] for before, after in changed), "names stay"
    copy = folder / f"ours_{script.name}"
    copy.write_text(ours)
    return copy


def start(script: str, arguments: Sequence[str], store_port: int) -> None:
    """Run the script on this rank as torchrun would: it makes a process group itself."""
    dist.barrier()  # a rank that left its group while others still join it would break theirs
    dist.destroy_process_group()
    os.environ.update(
        TORCHELASTIC_USE_AGENT_STORE="True", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store_port)
    )
    sys.argv = [script, *arguments]
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # torch.distributed.optim
        runpy.run_path(script, run_name="__main__")


def new_store() -> dist.TCPStore:
    """Return a store for the ranks of one start; this process keeps its port, so no other can take it."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def launch(script: Path, *arguments: object, world_size: int = 2) -> None:
    store = new_store()
    texts = [str(argument) for argument in arguments]
    run(start, world_size, str(script), texts, store.port, timeout=30)


# -------------------------------------------------------------------------------- updates during backward


def overlap_plainly(script: str, epochs: int) -> tuple[list[float], dict[str, Any]]:
    """The same job with DDP and the plain optimizer, from the script's own model and data."""
    parts = runpy.run_path(script, run_name="parts")
    ddp = DDP(parts["make_model"](), bucket_cap_mb=0.01, gradient_as_bucket_view=True)  # type: ignore[arg-type]
    ddp.register_comm_hook(None, allreduce_hook)
    optimizer = optim.Adam(ddp.parameters(), lr=0.01)
    loader, sampler = parts["make_data"](dist.get_rank(), dist.get_world_size())
    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            ddp.zero_grad()
            loss = nn.functional.mse_loss(ddp(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}


def assert_overlapped_as_plain(script: Path, out: Path, epochs: int) -> None:
    plain = run(overlap_plainly, 2, str(script), epochs)
    for rank, (losses, _) in enumerate(plain):
        ours = json.loads((out / f"losses{rank}.json").read_text())
        assert len(ours) == 6 * epochs
        assert ours == losses
        assert ours[-1] < ours[0] / 2
    assert_same_training(torch.load(out / "checkpoint.pt"), plain[0][1])


def assert_same_training(ours: dict[str, Any], expected: dict[str, Any]) -> None:
    assert ours["model"].keys() == expected["model"].keys()
    for name, value in expected["model"].items():
        assert torch.equal(ours["model"][name], value), name
    assert_state_dicts_equal(ours["optimizer"], expected["optimizer"])
    assert ours.get("scheduler") == expected.get("scheduler")


@pytest.mark.parametrize("flags", [[], ["--shard-buckets"]], ids=str)
def test_a_script_with_overlap_trains_as_ddp_and_the_plain_optimizer(
    flags: list[str], tmp_path: Path
) -> None:
    script = with_our_imports(OVERLAP, tmp_path)
    launch(script, "--out", tmp_path / "run", "--epochs", 3, *flags)
    assert_overlapped_as_plain(script, tmp_path / "run", epochs=3)


# ------------------------------------------------------------------------- bucket views, Join and resuming


def test_a_script_without_overlap_gives_what_torchs_class_gives(tmp_path: Path) -> None:
    scripts = {"theirs": RESUME, "ours": with_our_imports(RESUME, tmp_path)}
    for name, script in scripts.items():
        first = tmp_path / f"{name}1.pt"
        launch(script, "--batches", 4, 4, "--out", first)
        for resumed_by, resuming in scripts.items():
            second = tmp_path / f"{name}-{resumed_by}.pt"
            launch(resuming, "--batches", 3, 3, "--resume", first, "--out", second)
    one, *others = [torch.load(path) for path in sorted(tmp_path.glob("*-*.pt"))]
    assert len(others) == 3
    for other in others:
        assert_same_training(other, one)
        assert other["step"] == one["step"] == 7


def compiled_steps() -> list[torch.Tensor]:
    """The parameter after two compiled steps, of the plain class and of the sharded one."""
    values = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for make in (optim.SGD, lambda params, lr: ZeroRedundancyOptimizer(params, optim.SGD, lr=lr)):
            param = nn.Parameter(torch.ones(8, 8))
            step = torch.compile(make([param], lr=0.1).step, backend="eager")
            for _ in range(2):
                param.grad = torch.ones_like(param)
                step()
            values.append(param.detach())
    return values


@pytest.mark.thorough
def test_a_step_may_be_compiled() -> None:
    for plain, ours in run(compiled_steps, 2, backend="gloo"):
        assert torch.equal(plain, ours)
        assert plain[0, 0] == pytest.approx(0.8)
