"""Experts spread over real ranks: the same training as with all on one, and every call as predicted."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from zero_ref.cli import main
from zero_ref.clip.grad_norm import clip_grad_norm_
from zero_ref.comm.backend import as_collectives
from zero_ref.lab import meter, ranks
from zero_ref.lab.config import COMPARED, SPREAD_UNDER, GPTConfig, TrainConfig
from zero_ref.lab.expert_parallel import spread
from zero_ref.lab.experts import all_to_all
from zero_ref.lab.model import GPT, batch, language_reference
from zero_ref.lab.outcome import outcome, predict, problems
from zero_ref.lab.train import train
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.simulator.layers import is_of_experts
from zero_ref.simulator.recipe import RECIPES

pytestmark = pytest.mark.ranks

MODEL = GPTConfig(layers=2, heads=2, width=32, context=16, experts=4)
SMALL = TrainConfig(steps=6, batch_size=2, model=MODEL)
LIMIT, STEPS = 0.5, 4
WHERE = [(2, 2), (4, 2), (4, 4)]
"""Ranks, and how many of them share the experts."""


class Trained(NamedTuple):
    """What one rank saw: gradients of the first backward, the losses, and norms of sharded gradients."""

    gradients: dict[str, torch.Tensor]
    losses: list[float]
    norms: list[float]


def passages(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return batch(language_reference().training, MODEL, 2, seed=0, step=step, rank=rank)


def on_rank(strategy: str, expert_parallel: int) -> Trained:
    """A training loop as a reader would write it."""
    model = GPT(MODEL)
    made = spread(replace(SMALL, strategy=strategy).recipe, model, expert_parallel)
    gradients, losses, norms = {}, [], []
    for step in range(STEPS):
        for optimizer in made.optimizers:
            optimizer.zero_grad()
        loss = made.model(*passages(dist.get_rank(), step))
        loss.backward()
        if not step:
            gradients = {
                name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None
            }
        if all(isinstance(optimizer, ZeroRedundancyOptimizer) for optimizer in made.optimizers):
            norms.append(clip_grad_norm_(made.optimizers, LIMIT).item())  # type: ignore[arg-type]
        for optimizer in made.optimizers:
            optimizer.step()
        losses.append(loss.item())
    return Trained(gradients, losses, norms)


def on_one(world_size: int, limit: float) -> tuple[dict[str, torch.Tensor], list[list[float]], list[float]]:
    """The same with all experts, the data of all ranks and torch's AdamW, in this process."""
    model = GPT(MODEL)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    gradients, losses, norms = {}, [], []
    for step in range(STEPS):
        adam.zero_grad()
        of_rank = [model(*passages(rank, step)) for rank in range(world_size)]
        (sum(of_rank) / world_size).backward()
        if not step:
            gradients = {
                name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None
            }
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        adam.step()
        losses.append([loss.item() for loss in of_rank])
    return gradients, losses, norms


@pytest.mark.parametrize(
    ("world_size", "expert_parallel"), [*WHERE[:2], pytest.param(*WHERE[2], marks=pytest.mark.thorough)]
)
def test_experts_on_several_ranks_get_the_gradients_of_all_experts_on_one(
    world_size: int, expert_parallel: int
) -> None:
    whole, losses, _ = on_one(world_size, float("inf"))
    found = ranks.run(on_rank, world_size, "ddp", expert_parallel)
    for rank, one in enumerate(found):
        assert one.losses == pytest.approx([of_rank[rank] for of_rank in losses], rel=1e-5)
        for name, param in whole.items():
            own = param.chunk(expert_parallel)[rank % expert_parallel] if is_of_experts(name) else param
            # float32 sums of some hundred tokens in another order; gradients are up to 0.3.
            torch.testing.assert_close(one.gradients[name], own, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("strategy", ["zero-even", "zero-2"])
def test_one_norm_of_the_dense_parameters_and_of_all_experts_clips_both(strategy: str) -> None:
    _, losses, norms = on_one(4, LIMIT)
    assert min(norms) > LIMIT
    for rank, one in enumerate(ranks.run(on_rank, 4, strategy, 2)):
        assert one.norms == pytest.approx(norms, rel=1e-5)
        assert one.losses == pytest.approx([of_rank[rank] for of_rank in losses], rel=1e-5)


@pytest.mark.parametrize(
    ("world_size", "expert_parallel"), [*WHERE[:2], pytest.param(*WHERE[2], marks=pytest.mark.thorough)]
)
def test_spread_under_any_strategy_the_model_ends_the_same(world_size: int, expert_parallel: int) -> None:
    spread_out = {
        strategy: ranks.run(
            train, world_size, replace(SMALL, strategy=strategy, expert_parallel=expert_parallel)
        )
        for strategy in SPREAD_UNDER
    }
    losses = {name: [rank.held_out_loss for rank in found] for name, found in spread_out.items()}
    assert all(len(set(of_ranks)) == 1 for of_ranks in losses.values()), "all ranks computed it together"
    all_here = ranks.run(train, world_size, replace(SMALL, strategy="ddp"))[0].held_out_loss
    assert all_here is not None
    assert len({losses[name][0] for name in COMPARED}) == 1, "equal to the last bit"
    # zero-2 and zero-3 add gradients of four ranks in another order. Where every rank has all experts, it
    # adds its own tokens first.
    others = [losses["zero-2"][0], losses["zero-3"][0], all_here]
    assert others == pytest.approx([losses["ddp"][0]] * 3, rel=1e-5)
    rows = [sum(rank.expert_rows) for rank in spread_out["ddp"]]
    assert sum(rows) == world_size * 2 * MODEL.context * MODEL.active_experts * MODEL.layers
    assert len(set(rows)) > 1, "the router sends some ranks more rows than others, and drops none"


# ------------------------------------------------------------------------------- predicted, and measured


IN_16 = replace(SMALL, model=replace(MODEL, dtype="bfloat16"), master_dtype="float32")
PREDICTED = [
    *((SMALL, name, *where) for name in ("ddp", "zero-even", "zero-2", "zero-3") for where in WHERE[:2]),
    *((IN_16, name, 4, 2) for name in ("zero-even", "zero-2")),
]
FURTHER = [
    *((SMALL, name, 4, 4) for name in SPREAD_UNDER),
    *((SMALL, name, *where) for name in ("zero", "zero-bucket") for where in WHERE[:2]),
    *((IN_16, name, 2, 2) for name in ("ddp", "zero", "zero-bucket", "zero-even", "zero-2")),
    *(
        (replace(SMALL, model=replace(MODEL, experts=6, active_experts=1)), name, 6, 3)
        for name in SPREAD_UNDER
    ),
]


@pytest.mark.parametrize(
    ("config", "strategy", "world_size", "expert_parallel"),
    [*PREDICTED, *(pytest.param(*one, marks=pytest.mark.thorough) for one in FURTHER)],
)
def test_every_call_and_byte_is_as_predicted(
    config: TrainConfig, strategy: str, world_size: int, expert_parallel: int
) -> None:
    config = replace(config, strategy=strategy, expert_parallel=expert_parallel)
    plan = predict(config, world_size)
    result = outcome(config, plan, ranks.run(train, world_size, config))
    assert result.as_predicted, problems([result])
    model = config.model
    rows = 2 * model.context * model.active_experts * model.width * (2 if model.dtype == "bfloat16" else 4)
    assert result.all_to_alls == (5 * model.layers, 5 * model.layers)
    assert result.all_to_all_bytes is not None
    assert result.all_to_all_bytes.measured == model.layers * (8 * model.experts + 4 * rows)
    assert result.expert_load is not None
    assert 1 <= result.expert_load <= expert_parallel


@pytest.mark.parametrize(
    "strategy",
    [
        *("zero-2", "zero-3"),
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in RECIPES
            if name not in ("zero-2", "zero-3")
        ),
    ],
)
def test_with_all_experts_on_every_rank_any_strategy_is_as_predicted(strategy: str) -> None:
    config = replace(SMALL, strategy=strategy, steps=12, model=replace(MODEL, experts=5, active_experts=3))
    result = outcome(config, predict(config, 2), ranks.run(train, 2, config))
    assert result.as_predicted, problems([result])
    assert (result.all_to_alls, result.expert_load) == (None, None)


def test_a_prediction_for_other_experts_is_told_from_the_run() -> None:
    config = replace(SMALL, strategy="zero-even", expert_parallel=2)
    measured = ranks.run(train, 4, config)
    other = replace(config, model=replace(MODEL, active_experts=1))
    found = outcome(config, predict(other, 4), measured)
    assert not found.as_predicted
    assert any("all_to_all_bytes predicted" in problem for problem in problems([found]))


def rows_of_the_other(rows: int) -> int | None:
    """Bytes that this rank sends in an all-to-all, half of which is its own."""
    comm = as_collectives(None)
    sent = torch.ones(2 * rows, 8)
    return meter.bytes_sent_by(lambda: all_to_all(sent, [rows, rows], [rows, rows], comm))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's counters of TCP")
def test_a_rank_s_own_rows_do_not_travel() -> None:
    for sent in ranks.run(rows_of_the_other, 2, 4096):
        assert sent == pytest.approx(4096 * 8 * 4, rel=0.01)  # headers of messages, and two barriers


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--experts 4 --expert-parallel 3", "3 ranks cannot share 4 experts"),
        ("--expert-parallel 2", "the model has no experts"),
        (
            "--experts 4 --expert-parallel 4",
            "2 ranks cannot be divided into groups of 4 that share the experts",
        ),
        ("--experts 4 --expert-parallel 2 --strategy local-sgd", "choose ddp, zero, zero-bucket, zero-even"),
        ("--experts 4 --expert-parallel 2 --strategy zero --overlap interleaved", "update after backward"),
        ("--experts 4 --expert-parallel 2 --strategy zero-2 --shard-group 1", "among all ranks"),
        ("--experts 4 --expert-parallel 2 --checkpoint run.pt", "no checkpoint is written or read"),
        ("--experts 1", "a token cannot go to 2 of 1 experts"),
    ],
)
def test_what_is_not_combined_is_refused_before_anything_starts(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *words.split()]) == 2
    assert message in capsys.readouterr().err
