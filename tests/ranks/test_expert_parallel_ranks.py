"""Experts spread over real ranks: the same training as with all on one, and every call as predicted."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from zero_ref.clip.grad_norm import clip_grad_norm_
from zero_ref.lab import ranks
from zero_ref.lab.config import COMPARED, SPREAD_UNDER, GPTConfig, TrainConfig
from zero_ref.lab.expert_parallel import spread
from zero_ref.lab.model import GPT, batch, language_reference
from zero_ref.lab.train import train
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.simulator.layers import is_of_experts

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


@pytest.mark.parametrize(("world_size", "expert_parallel"), WHERE)
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


@pytest.mark.parametrize(("world_size", "expert_parallel"), WHERE)
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
    rows = [rank.expert_rows for rank in spread_out["ddp"]]
    assert sum(rows) == world_size * 2 * MODEL.context * MODEL.active_experts * MODEL.layers
    assert len(set(rows)) > 1, "the router sends some ranks more rows than others, and drops none"
