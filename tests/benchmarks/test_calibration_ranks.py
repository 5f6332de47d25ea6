"""Pieces and whole iterations on real ranks: calls and bytes are as predicted; times are only there."""

from __future__ import annotations

from typing import Any

import pytest

from zero_ref.lab import ranks
from zero_ref.lab.config import COMPARED, GPTConfig, TrainConfig
from zero_ref.simulator.cluster import cluster
from zero_ref_course import calibration
from zero_ref_course.calibration import Effort, NoRateError, TrainingSize, Trial, compare_steps, take_turns

pytestmark = pytest.mark.ranks

SMALL = GPTConfig(layers=1, heads=2, width=16, context=8)
CONFIGS = [TrainConfig(strategy, batch_size=size, model=SMALL) for strategy in COMPARED for size in (1, 2)]


@pytest.fixture(scope="module")
def trials() -> list[Trial]:
    effort = Effort((1024, 4096, 16384), (TrainingSize(SMALL, 1),), rounds=2)
    return ranks.run(take_turns, 2, CONFIGS, effort)


def test_each_turn_adds_a_time_of_every_piece_and_of_every_iteration(trials: list[Trial]) -> None:
    pieces = trials[0].pieces
    assert pieces == trials[1].pieces, "all ranks know the same times"
    sizes = [(op, size) for size in (1024, 4096, 16384) for op in ("all_reduce", "broadcast")]
    a_turn = [*(op for op, _ in sizes), "train", "update"]
    assert [piece.what for piece in pieces] == a_turn * 2
    assert all(piece.ms > 0 for piece in pieces)
    assert [[len(one.spans) for one in trial.iterations] for trial in trials] == [[2] * len(CONFIGS)] * 2


def test_calls_and_bytes_are_as_planned_and_a_wrong_plan_is_noticed(trials: list[Trial]) -> None:
    compared = compare_steps(CONFIGS, cluster("loopback"), trials)
    assert [one.config for one in compared] == CONFIGS
    assert all(one.as_planned and one.measured_ms > 0 for one in compared)
    others = CONFIGS[2:] + CONFIGS[:2]  # each under the strategy of another
    assert not any(one.as_planned for one in compare_steps(others, cluster("loopback"), trials))


def test_a_machine_that_shows_no_rate_is_measured_longer(
    trials: list[Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[int] = []

    def measured(_: Any, world_size: int, configs: Any, effort: Effort, **__: Any) -> list[Trial]:
        rounds.append(effort.rounds)
        assert (world_size, configs) == (2, CONFIGS)
        return trials

    def calibrated(pieces: Any) -> Any:
        if len(rounds) < enough:
            raise NoRateError("there is no rate")
        return pieces

    monkeypatch.setattr(calibration.ranks, "run", measured)
    monkeypatch.setattr(calibration, "calibrate", calibrated)
    effort = Effort((1024,), (), rounds=6)
    enough = 3
    assert calibration.calibrate_in_turns(CONFIGS, effort, 2) == (trials, trials[0].pieces)
    assert rounds == [6, 12, 24]
    rounds.clear()
    enough = 4
    with pytest.raises(NoRateError, match="no rate"):
        calibration.calibrate_in_turns(CONFIGS, effort, 2)
