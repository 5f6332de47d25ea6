"""The training job goes on from its saves: with real ranks, and after a rank was killed."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from zero_ref.files.save_owner import OWNER, Owner
from zero_ref.files.saves import sealed
from zero_ref.lab import ranks
from zero_ref.lab.config import GPTConfig, TrainConfig
from zero_ref.lab.train import Measured, StepDone, train

pytestmark = pytest.mark.ranks

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
        ranks.run(train, 1, replace(saving, resume=True))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run7")
    assert len(ranks.run(train, 1, replace(saving, resume=True))[0].losses) == 12


# --------------------------------------------------------------------------------------------- a rank is lost


def killed_at(config: TrainConfig, step: int) -> Measured:
    """Train; rank 0 kills itself after that step."""

    def report(done: StepDone) -> None:
        if done.step == step:
            os.kill(os.getpid(), signal.SIGKILL)

    return train(config, report)


def test_after_a_rank_was_killed_the_same_settings_go_on_with_fewer_ranks(
    tmp_path: Path, saving: TrainConfig
) -> None:
    config = replace(saving, resume=True)
    with pytest.raises(ranks.RankError, match="killed"):
        ranks.run(killed_at, 3, config, 7)
    measured = ranks.run(train, 2, config)[0]
    assert len(measured.step_ms) == 8, "from the save of step 4"

    by_hand = replace(config, checkpoint_dir=str(tmp_path / "by-hand"))
    ranks.run(train, 3, replace(by_hand, steps=4))
    expected = ranks.run(train, 2, by_hand)[0]
    assert measured.losses == expected.losses
    assert measured.held_out_loss == expected.held_out_loss


@pytest.mark.filterwarnings("default:loading .* since newer ones are damaged:UserWarning")
def test_a_damaged_save_is_passed_over(saving: TrainConfig, capfd: pytest.CaptureFixture[str]) -> None:
    whole = ranks.run(train, 2, saving)[0]
    newest = max(Path(str(saving.checkpoint_dir)).glob("save-*"))
    data = newest / "shard-1-of-2.bin"
    data.write_bytes(bytes(data.stat().st_size))
    again = ranks.run(train, 2, replace(saving, resume=True))[0]
    assert f"{data} is damaged" in capfd.readouterr().err
    assert again.losses == whole.losses
    assert len(again.step_ms) == 4
