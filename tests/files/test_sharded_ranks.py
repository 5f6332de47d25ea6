"""Sharded checkpoints between real ranks: saved at 4, loaded at 3, in subgroups, while ranks fail and die."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from library.training import (
    NEVER_S,
    Run,
    Snapshot,
    Tangle,
    assert_same,
    assert_state_dicts_equal,
    caught,
    snapshot,
    train,
)
from torch import optim

from zero_ref.files.shard_files import ShardWriter
from zero_ref.files.sharded import load_sharded, save_sharded, save_sharded_async
from zero_ref.lab.ranks import RankError, run
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer

pytestmark = pytest.mark.ranks
ROOT = Path(__file__).parents[2]


def trainee(group: Any = None, **options: Any) -> tuple[Tangle, ZeroRedundancyOptimizer]:
    model = Tangle()
    return model, ZeroRedundancyOptimizer(model.named_parameters(), optim.AdamW, group, **options)


def steps(model: Tangle, optimizer: ZeroRedundancyOptimizer, which: range) -> list[Snapshot]:
    return [snapshot(model) for _ in train(model, optimizer, which)]


def save(directory: Path, group: Any = None, **options: Any) -> None:
    model, optimizer = trainee(group, **options)
    steps(model, optimizer, range(2))
    save_sharded(optimizer, directory, notes={"iteration": 2})


def resume(directory: Path, group: Any = None, **options: Any) -> tuple[Any, list[Snapshot]]:
    model, optimizer = trainee(group, **options)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert load_sharded(optimizer, directory) == {"iteration": 2}
    optimizer.consolidate_state_dict(to="all")
    return optimizer.state_dict(), steps(model, optimizer, range(2, 4))


def unsharded() -> tuple[Any, list[Snapshot]]:
    case = Run(optim.AdamW, lambda model: model.named_parameters())
    first, middle = case.plain(range(2))
    return middle, case.plain(range(2, 4), first[-1], middle)[0]


def test_saved_at_4_under_even_it_goes_on_at_3_under_sorted_greedy(tmp_path: Path) -> None:
    middle, rest = unsharded()
    run(save, 4, tmp_path, partition="even", parameters_as_bucket_view=True)
    for state, trained in run(resume, 3, tmp_path, partition="sorted_greedy"):
        assert_state_dicts_equal(state, middle)
        assert_same(trained, rest, "at 3 ranks")


def in_subgroups(directory: Path) -> Any:
    """Ranks 1 and 3 save, and so do 0 and 2, elsewhere; each pair loads what the other has saved."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = dist.get_rank() % 2
    model, optimizer = trainee(groups[mine], partition="even")
    steps(model, optimizer, range(2))
    pending = save_sharded_async(optimizer, directory / str(mine), notes={"iteration": 2})
    dist.barrier()
    _, intruder = trainee(groups[mine], partition="even")
    intruding = caught(lambda: save_sharded(intruder, directory / str(1 - mine)))
    dist.barrier()  # until now both saves are under way
    pending.wait()
    dist.barrier()
    return os.getpid(), intruding, *resume(directory / str(1 - mine), groups[mine])


def test_in_subgroups_ranks_count_within_them_and_a_directory_belongs_to_one_of_them(tmp_path: Path) -> None:
    middle, rest = unsharded()
    results = run(in_subgroups, 4, tmp_path)
    for rank, (_, intruding, state, trained) in enumerate(results):
        assert_state_dicts_equal(state, middle)
        assert_same(trained, rest, "in a subgroup")
        owner = results[1 - rank % 2][0]
        said = rf"RuntimeError: .*/{1 - rank % 2} belongs to another save, .*: process {owner} on "
        assert re.search(said, intruding), intruding
        assert intruding.startswith("RuntimeError: rank 1: rank 0 could not save") == (rank > 1)
    for pair in "01":
        assert len(os.listdir(tmp_path / pair / "save-00000001")) == 5
        assert os.listdir(tmp_path / pair) == ["save-00000001"]


# ----------------------------------------------------------------------------------- while training goes on


LAST_WORDS = """
import sys, torch
from zero_ref.lab import virtual
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.files.sharded import save_sharded_async
from zero_ref.files.shard_files import ShardWriter
import time
write = ShardWriter.write_data
ShardWriter.write_data = lambda *args: (time.sleep(0.5), write(*args))[1]

def on_rank(comm):
    optimizer = ZeroRedundancyOptimizer([torch.nn.Parameter(torch.ones(4))], torch.optim.SGD, comm, lr=0.1)
    save_sharded_async(optimizer, sys.argv[1], notes={"iteration": 7})

virtual.run(on_rank, 2)
"""


def test_a_program_that_ends_without_waiting_has_saved(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-c", LAST_WORDS, str(tmp_path)], check=True, timeout=600, env=environ, cwd=tmp_path
    )
    assert os.listdir(tmp_path) == ["save-00000001"], "the owner's mark goes with the process"
    tables = [path.name for path in tmp_path.glob("*/shard-*.json")]
    assert sorted(tables) == ["shard-0-of-2.json", "shard-1-of-2.json"]


# ---------------------------------------------------------------------------------------- what goes wrong


def save_on_a_full_disk(directory: Path) -> str:
    """Rank 1 may write no file of more than 1,000 bytes: what a full disk, or a quota, does."""
    model, optimizer = trainee(partition="even")
    steps(model, optimizer, range(3))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        return caught(lambda: save_sharded_async(optimizer, directory).wait())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_full_for_one_rank_makes_all_raise_and_the_checkpoint_before_loads(
    tmp_path: Path,
) -> None:
    middle, rest = unsharded()
    run(save, 3, tmp_path, partition="even")
    first, second, third = run(save_on_a_full_disk, 3, tmp_path)
    cause = re.escape(f"File too large: '{tmp_path}/save-00000002/shard-1-of-3.bin'")
    assert re.search(rf"^OSError: \[Errno \d+\] {cause}$", second)
    for rank, message in ((0, first), (2, third)):
        start = f"RuntimeError: rank {rank}: rank 1 could not complete the checkpoint"
        assert re.search(f"{start}.*{cause}", message)
    for state, trained in run(resume, 2, tmp_path):
        assert_state_dicts_equal(state, middle)
        assert_same(trained, rest, "the one before")
    run(save, 2, tmp_path)
    assert sorted(path.name for path in tmp_path.glob("save-*")) == ["save-00000001", "save-00000003"]


def die_in_the_middle_of_a_save(directory: Path) -> None:
    """Rank 1 dies when it has written its data and not yet its table."""
    group = dist.new_group(timeout=timedelta(seconds=NEVER_S))
    model, optimizer = trainee(group, partition="even")
    steps(model, optimizer, range(3))
    finish = ShardWriter.finish

    def die(writer: ShardWriter, *args: Any) -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        finish(writer, *args)

    ShardWriter.finish = die  # type: ignore[method-assign]
    message = caught(lambda: save_sharded(optimizer, directory))
    (directory / f"rank-{dist.get_rank()}.txt").write_text(message)
    os._exit(1)  # as a program does after an error: those that wait for this rank learn of it


@pytest.mark.usefixtures("all_may_report")  # the others are to end by themselves
def test_when_a_rank_is_killed_in_a_save_the_others_end_with_an_error_and_the_checkpoint_before_loads(
    tmp_path: Path,
) -> None:
    middle, rest = unsharded()
    run(save, 3, tmp_path, partition="even")
    with pytest.raises(RankError, match="SIGKILL"):
        run(die_in_the_middle_of_a_save, 3, tmp_path, timeout=NEVER_S)
    for rank in (0, 2):
        message = (tmp_path / f"rank-{rank}.txt").read_text()
        assert re.search(f"rank {rank} was to complete the checkpoint {tmp_path}/save-00000002", message)
        assert f"rank {rank} of 3: all_gather did not complete" in message
    for state, trained in run(resume, 2, tmp_path):
        assert_state_dicts_equal(state, middle)
        assert_same(trained, rest, "the one before")


@pytest.mark.skipif(sys.platform != "linux", reason="the script reads times as Linux keeps them")
def test_killing_a_rank_at_random_points_of_a_save_loses_no_checkpoint(tmp_path: Path) -> None:
    """The short form of the script, which takes 20."""
    ended = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "kill_during_save.py"), "--kills", "1", "--ranks", "2"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        timeout=800,
        text=True,
        capture_output=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "1 kills, 0 checkpoints lost" in ended.stdout
