"""The main job loses ranks and goes on: with real ranks, real kills, and the commands that users type."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from zero_ref.files.save_owner import OWNER, Owner
from zero_ref.files.saves import sealed
from zero_ref.lab import elastic, ranks
from zero_ref.lab.checkpoints import Stretch, counted, stretches
from zero_ref.lab.config import GPTConfig, TrainConfig
from zero_ref.lab.logs import StepDone
from zero_ref.lab.train import Measured, train

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]
SMALL = TrainConfig("zero-even", 12, batch_size=2, model=GPTConfig(2, 2, 32, 16))
IN_16 = replace(SMALL, model=replace(SMALL.model, dtype="bfloat16"), master_dtype="float32")


@pytest.fixture
def saving(tmp_path: Path) -> TrainConfig:
    return replace(SMALL, checkpoint_dir=str(tmp_path / "run"), checkpoint_every=4)


# --------------------------------------------------------------------------------------------- save and go on


@pytest.mark.parametrize(
    "config",
    [
        replace(SMALL, strategy="zero"),
        replace(SMALL, strategy="zero", way="after_backward"),
        replace(SMALL, strategy="zero-bucket", way="interleaved"),
        IN_16,
        replace(SMALL, strategy="zero-2"),
        replace(IN_16, strategy="zero-2", way="in_forward"),
    ],
    ids=lambda config: f"{config.recipe.title}, {config.precision}",
)
def test_a_run_that_goes_on_from_a_save_is_as_if_never_stopped(config: TrainConfig, tmp_path: Path) -> None:
    unbroken = ranks.run(train, 2, config)[0]
    saving = replace(config, checkpoint_dir=str(tmp_path), checkpoint_every=4)
    stopped = ranks.run(train, 2, replace(saving, steps=8))[0]
    resumed = ranks.run(train, 2, replace(saving, resume=True))[0]
    assert stopped.losses == unbroken.losses[:8]
    assert resumed.losses == unbroken.losses, "those before the save are in it"
    assert resumed.held_out_loss == unbroken.held_out_loss
    assert resumed.calls == unbroken.calls
    assert len(resumed.step_ms) == 4
    assert stretches(tmp_path) == [Stretch(2, 0, 12)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": GPTConfig(2, 4, 32, 16)}, "of a run with model"),
        ({"model": GPTConfig(2, 2, 16, 16)}, "checkpoint is of another model"),
        ({"model": IN_16.model, "master_dtype": "float32"}, "of a run with model"),
        ({"steps": 8}, "trained for 12 steps; 8 were asked for"),
        ({"steps": 12}, "NothingLeftError"),
    ],
)
def test_all_ranks_refuse_the_save_of_another_run(
    saving: TrainConfig, changes: dict[str, object], message: str
) -> None:
    ranks.run(train, 2, saving)
    with pytest.raises(ranks.RankError, match=message) as error:
        ranks.run(train, 2, replace(saving, resume=True, **changes))  # type: ignore[arg-type]
    assert "raised" in str(error.value.others), "so does the other rank"


def leave_mark(directory: str, job: str) -> None:
    """As a rank on a machine that is gone."""
    Path(directory).mkdir()
    owner = Owner.this_process()._replace(host="gone", job=job)
    Path(directory, OWNER).write_bytes(sealed(owner._asdict()))


def test_a_rank_on_another_machine_takes_over_what_its_predecessor_left(
    saving: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert saving.checkpoint_dir
    leave_mark(saving.checkpoint_dir, "TORCHELASTIC_RUN_ID=run7")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run8")
    with pytest.raises(ranks.RankError, match="belongs to another save"):
        ranks.run(train, 1, replace(saving, elastic=True))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run7")
    assert len(ranks.run(train, 1, replace(saving, elastic=True))[0].losses) == 12


# --------------------------------------------------------------------------------------------- ranks are lost


def die_at(config: TrainConfig, folder: Path, *deaths: tuple[int, int, int]) -> Measured:
    """Train; after that step of so many ranks, rank 0 kills that one: (number of ranks, rank, step), once."""
    import torch.distributed as dist

    def report(done: StepDone) -> None:
        for number, rank, at in deaths:
            once = folder / f"{number}-{rank}-{at}"
            if (done.world_size, done.step) == (number, at) and not once.exists():
                once.touch()
                os.kill(int((folder / f"pid-{rank}").read_text()), signal.SIGKILL)
                time.sleep(60)

    (folder / f"pid-{dist.get_rank()}").write_text(f"{os.getpid()}")
    return train(config, report)


def test_lost_ranks_come_back_at_the_next_save_and_every_loss_is_that_of_a_run_by_hand(
    tmp_path: Path, saving: TrainConfig
) -> None:
    config = replace(saving, elastic=True, steps=30)
    said: list[str] = []
    deaths = ((3, 2, 7), (2, 0, 6), (3, 0, 15))
    measured = elastic.run(die_at, 3, config, tmp_path, *deaths, say=said.append)
    directory = str(config.checkpoint_dir)
    assert counted(stretches(directory)) == [
        Stretch(3, 0, 4),
        Stretch(1, 4, 8),
        Stretch(3, 8, 12),
        Stretch(2, 12, 16),
        Stretch(3, 16, 30),
    ]
    assert [line.partition(";")[0] for line in said] == [
        f"3 ranks, a save after every 4 steps in {directory}",
        "rank 2 lost: 2 ranks go on from step 4, 3 before",
        "rank 0 lost: 1 rank goes on from step 4, 2 before",
        "3 ranks go on from step 8, 1 before",
        "rank 0 lost: 2 ranks go on from step 12, 3 before",
        "3 ranks go on from step 16, 2 before",
    ]
    assert len(measured) == 3
    assert len(measured[0].losses) == 30

    by_hand = replace(config, elastic=False, checkpoint_dir=str(tmp_path / "by-hand"))
    for stretch in counted(stretches(directory)):
        until = replace(by_hand, steps=stretch.until, resume=stretch.done > 0)
        last = ranks.run(train, stretch.ranks, until)
    assert measured[0].losses == last[0].losses
    assert measured[0].held_out_loss == last[0].held_out_loss
    assert [one.held for one in measured] == [one.held for one in last]
    assert [one.calls for one in measured] == [one.calls for one in last]


@pytest.mark.filterwarnings("default:loading .* since newer ones are damaged:UserWarning")
def test_a_damaged_save_is_passed_over(saving: TrainConfig, capfd: pytest.CaptureFixture[str]) -> None:
    whole = ranks.run(train, 2, saving)[0]
    directory = Path(str(saving.checkpoint_dir))
    newest = max(directory.glob("save-*"))
    data = newest / "shard-1-of-2.bin"
    data.write_bytes(bytes(data.stat().st_size))
    again = elastic.run(train, 2, replace(saving, elastic=True), say=lambda line: None)[0]
    assert f"{data} is damaged" in capfd.readouterr().err
    assert again.losses == whole.losses
    assert stretches(directory) == [Stretch(2, 0, 12), Stretch(2, 8, 12)]


# ------------------------------------------------------------------------------------------ as users start it


def environ() -> dict[str, str]:
    quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "ZERO_REF_DEVICE": "cpu"}
    return {**os.environ, **quiet, "PYTHONPATH": str(ROOT)}


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="the script finds the ranks in /proc")
@pytest.mark.timeout(1900)  # two minutes alone, fourteen beside fifteen other processes
@pytest.mark.parametrize("way", ["torchrun", "zero-ref"])
def test_a_rank_killed_at_a_random_step_is_done_without_and_comes_back(way: str) -> None:
    """The short form of the script, which kills ten times."""
    seed = random.SystemRandom().randrange(10**6)
    print("--seed", seed)
    ended = subprocess.run(
        [sys.executable, "tests/lost_ranks.py", "--kills", "1", "--way", way, "--seed", str(seed)],
        env=environ(),
        cwd=ROOT,
        timeout=1800,
        text=True,
        capture_output=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "as by hand: losses equal, last save equal" in ended.stdout
