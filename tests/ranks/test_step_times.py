"""Whole iterations on real ranks beside their prediction: calls and bytes are equal; times are only there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zero_ref.lab import ranks, step_times
from zero_ref.lab.config import COMPARED, GPTConfig, TrainConfig
from zero_ref.lab.pieces import Effort, TrainingSize
from zero_ref.lab.step_times import Trial, compare_steps, predict_step, take_turns
from zero_ref.simulator.calibrate import ADAMW_BYTES, NoRateError
from zero_ref.simulator.cluster import cluster

SMALL = GPTConfig(layers=1, heads=2, width=16, context=8)
CONFIGS = [TrainConfig(strategy, batch_size=size, model=SMALL) for strategy in COMPARED for size in (1, 2)]
LOOPBACK = cluster("loopback")


@pytest.fixture(scope="module")
def trials() -> list[Trial]:
    effort = Effort((1024, 4096, 16384), (TrainingSize(SMALL, 1),), rounds=2)
    return ranks.run(take_turns, 2, CONFIGS, effort)


@pytest.mark.ranks
def test_each_turn_adds_a_time_of_every_piece_and_of_every_iteration(trials: list[Trial]) -> None:
    times = trials[0].times
    assert len(times.collectives) == 2 * 2 * 3, "two turns of two operations at three sizes"
    assert [work.kind for work in times.works] == ["train", "update"] * 2
    assert [[len(one.spans) for one in trial.iterations] for trial in trials] == [[2] * len(CONFIGS)] * 2


@pytest.mark.ranks
def test_calls_and_bytes_are_as_planned_and_a_wrong_plan_is_noticed(trials: list[Trial]) -> None:
    compared = compare_steps(CONFIGS, LOOPBACK, trials)
    assert [one.config for one in compared] == CONFIGS
    assert all(one.as_planned for one in compared)
    assert all(len(one.repeats_ms) == 2 and one.measured_ms > 0 for one in compared)
    others = CONFIGS[2:] + CONFIGS[:2]  # each under the strategy of another
    assert not any(one.as_planned for one in compare_steps(others, LOOPBACK, trials))


@pytest.mark.ranks
def test_a_machine_that_shows_no_rate_is_measured_longer(
    trials: list[Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[int] = []

    def measured(_: Any, world_size: int, configs: Any, effort: Effort, timeout: float) -> list[Trial]:
        rounds.append(effort.rounds)
        assert (world_size, configs, timeout) == (2, CONFIGS, 10.0 * effort.rounds)
        return trials

    def calibrated(*times: Any) -> Any:
        if len(rounds) < enough:
            raise NoRateError("there is no rate")
        return times

    monkeypatch.setattr(step_times.ranks, "run", measured)
    monkeypatch.setattr(step_times, "calibrate", calibrated)
    effort = Effort((1024,), (), rounds=6)
    enough = 3
    found = step_times.calibrate_in_turns(CONFIGS, effort, 2, timeout=60.0)
    assert found == (trials, tuple(trials[0].times))
    assert rounds == [6, 12, 24]
    rounds.clear()
    enough = 4
    with pytest.raises(NoRateError, match="no rate"):
        step_times.calibrate_in_turns(CONFIGS, effort, 2, timeout=60.0)
    monkeypatch.undo()
    monkeypatch.setattr(step_times.ranks, "run", measured)
    rounds.clear()
    with pytest.raises(ValueError, match="it takes 3 or more"):  # too few sizes: no use to measure again
        step_times.calibrate_in_turns(CONFIGS, effort, 2, timeout=60.0)
    assert len(rounds) == 1


def test_an_iteration_is_the_sum_of_its_parts_where_nothing_overlaps() -> None:
    plain = predict_step(CONFIGS[0], LOOPBACK, 2)
    assert plain.ms == pytest.approx(plain.played.timeline().serial_ms)
    device = replace(LOOPBACK.device, overhead_us=100, update_overhead_us=10)
    slower = replace(LOOPBACK, device=device)
    ddp, zero = (
        predict_step(config, slower, 2).ms - predict_step(config, LOOPBACK, 2).ms
        for config in (CONFIGS[0], CONFIGS[2])
    )
    tensors = 2 + 12 + 2  # embeddings, a block, the last norm
    assert ddp == pytest.approx(tensors * 0.110)
    assert tensors * 0.105 <= zero < ddp, "the update of half of the tensors or more"


def test_an_update_moves_the_bytes_that_the_calibration_counted() -> None:
    ddp = predict_step(CONFIGS[0], LOOPBACK, 2)
    step_ms = ddp.played.critical_ms()["step"]
    numel = ddp.plan.parameter_bytes[0] // 4
    assert step_ms == pytest.approx(LOOPBACK.device.touch_ms(ADAMW_BYTES * numel))
