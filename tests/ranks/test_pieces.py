"""Real times of real ranks: all are there, all positive, the same on every rank. How long is not asked."""

from __future__ import annotations

import pytest

from zero_ref.lab import pieces, ranks
from zero_ref.lab.config import GPTConfig
from zero_ref.lab.pieces import Effort, TrainingSize
from zero_ref.simulator.calibrate import Computation, Measurement

pytestmark = pytest.mark.ranks

SMALL = TrainingSize(GPTConfig(layers=1, heads=2, width=16, context=8), batch_size=1)
DEEP = TrainingSize(GPTConfig(layers=2, heads=2, width=16, context=8), batch_size=2)


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.thorough), 3])
def test_everything_is_timed_as_often_as_asked(world_size: int) -> None:
    effort = Effort(nbytes=(1024, 5000), training=(SMALL, DEEP), rounds=2)
    times = pieces.measure(world_size, effort)
    assert sorted((each.op, each.nbytes) for each in times.collectives) == sorted(
        [(op, nbytes) for op in pieces.OPS for nbytes in effort.nbytes] * 2
    )
    assert {each.world_size for each in times.collectives} == {world_size}
    assert sorted((each.kind, each.tensors) for each in times.works) == sorted(
        [("train", 16), ("train", 28), ("update", 16), ("update", 28)] * 2
    )
    assert all(each.ms > 0 for each in (*times.collectives, *times.works))


def both(sizes: list[TrainingSize]) -> tuple[list[Measurement], list[Computation]]:
    return pieces.time_collectives([1024], rounds=1), pieces.time_training(sizes, rounds=1)


def test_all_ranks_know_the_same_times() -> None:
    of_rank_0, of_rank_1 = ranks.run(both, 2, [SMALL])
    assert of_rank_0 == of_rank_1
