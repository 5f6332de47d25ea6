"""A mixture of experts, on one rank and on several virtual ones."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch.nn import functional

from zero_ref.comm.collectives import Collectives
from zero_ref.lab import virtual
from zero_ref.lab.config import GPTConfig, TrainConfig
from zero_ref.lab.expert_plan import calls_by_group
from zero_ref.lab.experts import Experts, Mixture, all_to_all
from zero_ref.lab.meter import HeldBytes
from zero_ref.lab.model import GPT
from zero_ref.lab.outcome import Measured, outcome, predict
from zero_ref.plan.calls import Call
from zero_ref.simulator.layers import is_of_experts

EXPERTS, ACTIVE, WIDTH, TOKENS = 4, 2, 6, 9
CONFIG = GPTConfig(heads=1, width=WIDTH, experts=EXPERTS, active_experts=ACTIVE)


def mixture(favoured: int | None = None) -> Mixture:
    """The same on every rank, in float64; with a favoured expert, which all tokens go to first."""
    made, generator = Mixture(CONFIG).double(), torch.Generator().manual_seed(0)
    for param in made.parameters():
        param.detach().copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64))
    if favoured is not None:
        made.router.weight.detach()[favoured] = 8.0
        made.router.weight.detach()[(favoured + 1) % EXPERTS] = 4.0
    return made


def tokens_of(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    positive = torch.rand(TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    return positive.requires_grad_()


def one_by_one(made: Mixture, rows: torch.Tensor) -> torch.Tensor:
    """Each token through its experts, without sorting."""
    results = []
    for row in rows:
        scores, chosen = made.router(row).softmax(-1).topk(ACTIVE)
        through = [
            made.experts.contract[expert] @ functional.gelu(made.experts.expand[expert] @ row)
            for expert in chosen
        ]
        results.append(sum(score / scores.sum() * one for score, one in zip(scores, through)))
    return torch.stack(results)


def test_each_token_goes_through_the_experts_of_the_highest_scores() -> None:
    made, rows = mixture(), tokens_of(0)
    torch.testing.assert_close(made(rows.view(3, 3, WIDTH)).view_as(rows), one_by_one(made, rows))


def test_the_simulator_tells_experts_from_other_parameters_by_their_names() -> None:
    names = [name for name, _ in GPT(CONFIG).named_parameters()]
    of_experts = [name for name in names if is_of_experts(name)]
    assert [name.rpartition(".")[2] for name in of_experts] == ["expand", "contract"] * CONFIG.layers
    assert len(set(names) - set(of_experts)) == 4 + 9 * CONFIG.layers, "norms, attention, router, embeddings"


class Seen(NamedTuple):
    """What one rank computed with a loss that is the mean over its own tokens, and what it sent."""

    out: torch.Tensor
    of_rows: torch.Tensor
    of_router: torch.Tensor
    of_experts: list[torch.Tensor]
    calls: list[Call]
    rows: int


def on_rank(comm: Collectives, favoured: int | None) -> Seen:
    made, rows = mixture(favoured), tokens_of(comm.rank)
    calls: list[Call] = []
    comm.observers.append(calls.append)
    made.experts.keep_own(comm)
    out = made(rows)
    out.square().mean().backward()
    grads = [param.grad for param in made.parameters()]
    assert rows.grad is not None
    return Seen(out.detach(), rows.grad, grads[0], grads[1:], calls, made.experts.rows)  # type: ignore[arg-type]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("favoured", [None, 2])
def test_experts_on_several_ranks_compute_what_all_experts_on_one_do(
    world_size: int, favoured: int | None
) -> None:
    seen = virtual.run(on_rank, world_size, favoured)
    made = mixture(favoured)
    inputs = [tokens_of(rank) for rank in range(world_size)]
    outs = [made(rows) for rows in inputs]
    torch.stack([out.square().mean() for out in outs]).mean().backward()
    # Sums of the tokens of several ranks are made in another order: some units in the last place of float64.
    for one, out, rows in zip(seen, outs, inputs):
        assert rows.grad is not None
        torch.testing.assert_close(one.out, out)
        torch.testing.assert_close(one.of_rows, rows.grad * world_size)
    _, expand, contract = (param.grad for param in made.parameters())
    for number, whole in enumerate((expand, contract)):
        assert whole is not None
        torch.testing.assert_close(torch.cat([one.of_experts[number] for one in seen]), whole)
    routers = torch.stack([one.of_router for one in seen]).mean(0)
    assert made.router.weight.grad is not None
    torch.testing.assert_close(routers, made.router.weight.grad)
    assert sum(one.rows for one in seen) == world_size * TOKENS * ACTIVE, "no token is dropped"
    if favoured is not None and world_size == 4:
        assert [one.rows for one in seen] == [0, 0, 4 * TOKENS, 4 * TOKENS], (
            "two ranks have nothing to compute"
        )
        assert not any(grad.any() for one in seen[:2] for grad in one.of_experts)


@pytest.mark.parametrize("favoured", [None, 2])
def test_what_a_rank_sends_does_not_depend_on_where_its_tokens_go(favoured: int | None) -> None:
    of_rows = Call("all_to_all", TOKENS * ACTIVE * WIDTH * 8)
    for one in virtual.run(on_rank, 2, favoured):
        assert one.calls == [Call("all_to_all", EXPERTS * 8), *[of_rows] * 4]


def test_rows_that_go_out_and_back_are_the_same_bits() -> None:
    def there_and_back(comm: Collectives) -> bool:
        sends = [(comm.rank + peer) % 3 for peer in range(comm.world_size)]  # as many from there as to there
        rows = torch.rand(sum(sends), 2, generator=torch.Generator().manual_seed(comm.rank))
        arrived = all_to_all(rows, sends, sends, comm)
        assert torch.equal(arrived, rows) == (comm.world_size == 1)
        return torch.equal(all_to_all(arrived, sends, sends, comm), rows)

    assert all(virtual.run(there_and_back, 4))


def test_experts_that_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(RuntimeError, match="4 experts cannot be divided among 3 ranks"):
        virtual.run(lambda comm: Experts(4, 2).keep_own(comm), 3)


@pytest.mark.parametrize("active", [1, 3])
def test_the_number_of_parameters_is_known_beforehand(active: int) -> None:
    config = GPTConfig(heads=2, width=16, experts=3, active_experts=active)
    model = GPT(config)
    numel = {name: param.numel() for name, param in model.named_parameters()}
    of_experts = sum(each for name, each in numel.items() if is_of_experts(name))
    assert config.numel == sum(numel.values())
    assert config.active_numel == config.numel - of_experts * (3 - active) // 3


def test_more_active_experts_than_there_are_are_refused() -> None:
    with pytest.raises(ValueError, match="a token cannot go to 2 of 1 experts: choose active_experts from 1"):
        GPTConfig(experts=1)
    assert GPTConfig(experts=1, active_experts=1).numel == GPTConfig(experts=1, active_experts=1).active_numel


def test_the_load_is_that_of_the_busiest_rank_of_each_block() -> None:
    config = TrainConfig("ddp", model=replace(CONFIG, layers=2), expert_parallel=2)
    plan = predict(config, 2)
    held = HeldBytes(plan.parameter_bytes[0], plan.gradient_bytes[0], plan.state_bytes[0])
    measured = [
        Measured(calls_by_group(plan, rank), held, [1.0], 1.0, [1.0], expert_rows=rows)
        for rank, rows in enumerate([(30, 10), (10, 30)])
    ]
    result = outcome(config, plan, measured)
    assert result.as_predicted
    assert result.expert_load == 60 / 40, "each rank has as many rows, and each block waits for one of them"
