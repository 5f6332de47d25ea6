"""OSS on real ranks: a script written for FairScale's, what travels, groups of ranks."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import runpy
import socket
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from library.training import assert_state_dicts_equal
from torch import nn
from torch.optim import Adam, Optimizer

from zero_ref.lab.ranks import run

pytestmark = pytest.mark.ranks

needs_fairscale = pytest.mark.skipif(
    importlib.util.find_spec("fairscale") is None, reason="pip install --no-deps fairscale==0.4.13"
)
SCRIPT = Path(__file__).parent.parent / "scripts" / "fairscale_oss.py"


# ----------------------------------------------------------------------- a script written for FairScale's OSS


def unsharded(
    params: Any, optim: type[Optimizer], broadcast_fp16: bool = False, **defaults: Any
) -> Optimizer:
    """Return the optimizer that FairScale's OSS shards, with OSS's methods."""

    class Unsharded(optim):  # type: ignore[misc, valid-type]
        def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
            every = [param for group in self.param_groups for param in group["params"]]
            return nn.utils.clip_grad_norm_(every, max_norm)

        def consolidate_state_dict(self, recipient_rank: int) -> None: ...

        def refresh_trainable(self) -> None: ...

    return Unsharded(params, **defaults)


def start(script: str, arguments: Sequence[str], port: int, plainly: bool) -> None:
    """Run the script on this rank as torchrun would: it makes a process group itself."""
    dist.barrier()  # Gloo fails to make a group on a rank if another has left it already
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.argv = [script, *arguments]
    if plainly:
        stand_in = types.ModuleType("fairscale.optim")
        stand_in.OSS = unsharded  # type: ignore[attr-defined]
        sys.modules |= {"fairscale": types.ModuleType("fairscale"), "fairscale.optim": stand_in}
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        if plainly:
            del sys.modules["fairscale"], sys.modules["fairscale.optim"]


def launch(script: Path, out: Path, *arguments: object, world_size: int, plainly: bool = False) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    words = ["--out", str(out), *map(str, arguments)]
    run(start, world_size, str(script), words, port, plainly, timeout=60)


def with_our_import(folder: Path) -> Path:
    """A copy of the script with OSS from zero_ref; all else is the same."""
    text, changes = re.subn(
        r"^from fairscale\.optim import OSS$", "from zero_ref import OSS", SCRIPT.read_text(), flags=re.M
    )
    assert changes == 1
    copy = folder / SCRIPT.name
    copy.write_text(text)
    return copy


def histories(out: Path) -> dict[str, list[list[float]]]:
    return {path.name: json.loads(path.read_text()) for path in sorted(out.glob("history*.json"))}


def assert_same_checkpoint(ours: Path, theirs: Path) -> None:
    one, other = torch.load(ours / "checkpoint.pt"), torch.load(theirs / "checkpoint.pt")
    assert one.keys() == other.keys()
    assert one["epoch"] == other["epoch"]
    assert one["scheduler"] == other["scheduler"]
    assert_state_dicts_equal(one["optimizer"], other["optimizer"])
    for name, value in other["model"].items():
        assert torch.equal(one["model"][name], value), name


def test_a_script_for_fairscale_trains_saves_and_resumes_as_the_unsharded_optimizer(tmp_path: Path) -> None:
    script = with_our_import(tmp_path)
    for name, path in {"ours": script, "plain": SCRIPT}.items():
        plainly = name == "plain"
        launch(path, tmp_path / name, "--epochs", 2, "--max-norm", 1.0, world_size=2, plainly=plainly)
    assert_same_checkpoint(tmp_path / "ours", tmp_path / "plain")
    first = histories(tmp_path / "ours")
    assert first == histories(tmp_path / "plain")
    assert len(first) == 2
    assert first["history0.json"] != first["history1.json"], "each rank has its own data"
    assert any(norm > 1 for _, norm, _ in first["history0.json"]), "something was clipped"
    assert first["history0.json"][-1][0] < first["history0.json"][0][0]

    # At another world size, from each other's checkpoints.
    for name, path, other in [("ours", script, "plain"), ("plain", SCRIPT, "ours")]:
        arguments = ["--epochs", 3, "--max-norm", 1.0, "--resume", tmp_path / other / "checkpoint.pt"]
        launch(path, tmp_path / f"{name}3", *arguments, world_size=3, plainly=name == "plain")
    assert_same_checkpoint(tmp_path / "ours3", tmp_path / "plain3")
    assert histories(tmp_path / "ours3") == histories(tmp_path / "plain3")


@needs_fairscale
def test_the_script_as_it_is_gives_the_same_with_fairscale(tmp_path: Path) -> None:
    scripts = {"ours": with_our_import(tmp_path), "fairscale": SCRIPT}
    for name, path in scripts.items():
        launch(path, tmp_path / name, "--epochs", 3, world_size=2)
    assert_same_checkpoint(tmp_path / "ours", tmp_path / "fairscale")
    assert histories(tmp_path / "ours") == histories(tmp_path / "fairscale")

    # One epoch: FairScale's norm never counts parameters that had no gradient when it clipped first.
    for name, path in scripts.items():
        launch(path, tmp_path / f"{name}-clip", "--epochs", 1, "--max-norm", 1.0, world_size=2)
    ours, theirs = (histories(tmp_path / f"{name}-clip") for name in scripts)
    for rank in ours:  # FairScale adds squares of norms, torch takes the norm of norms: the last bits differ
        torch.testing.assert_close(torch.tensor(ours[rank]), torch.tensor(theirs[rank]), rtol=1e-5, atol=0)


def under_sharded_data_parallel(module: str) -> tuple[list[float], list[torch.Tensor]]:
    """FairScale's own way to reduce gradients to their owners, which reads the optimizer's partition."""
    from fairscale.nn import ShardedDataParallel  # type: ignore[import-not-found]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = importlib.import_module(module).OSS(model.parameters(), Adam, lr=0.01)
    sharded = ShardedDataParallel(model, optimizer)
    losses = []
    for step in range(5):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        inputs = torch.randn(8, 8, generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(sharded(inputs), inputs.sum(1, keepdim=True))
        loss.backward()
        losses.append(loss.item())
        norm = optimizer.clip_grad_norm(
            1e6, filter_params_fn=lambda params: [p for p in params if p.ndim > 1]
        )
        assert norm > 0
        optimizer.step()
    return losses, [param.detach() for param in model.parameters()]


@needs_fairscale
def test_fairscales_sharded_data_parallel_takes_ours() -> None:
    ours, theirs = (
        run(under_sharded_data_parallel, 2, m) for m in ("zero_ref.dropin.oss", "fairscale.optim")
    )
    for (our_losses, our_params), (losses, params) in zip(ours, theirs, strict=True):
        assert our_losses == losses
        assert len(set(losses)) == 5
        assert all(torch.equal(a, b) for a, b in zip(our_params, params, strict=True))
