"""The suites that train: who takes part, what travels, that all end with equal parameters. Never how long."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.optim import AdamW

from benchmarks import contenders, training
from benchmarks.contenders import OWN_HOOKS, OWN_HOOKS_BEST, SETS, SHARES, Set, chain
from benchmarks.results import SuiteResult
from benchmarks.training import TO_OWNERS, Way, WithGiven
from zero_ref.lab import ranks
from zero_ref.lab.config import GPTConfig
from zero_ref.lab.model import GPT

pytestmark = pytest.mark.ranks

SIZE = GPTConfig(layers=1, heads=2, width=16, context=8)
SUITES = {"sync": training.sync, "iteration": training.iteration}
HEADERS = 0.01
"""The share of headers in Gloo's messages: some fifty bytes for each of a layer's two tensors of 66 kB."""


def noise(width: int) -> Callable[[int, int], list[tuple[torch.Tensor, ...]]]:
    def batches(rank: int, count: int) -> list[tuple[torch.Tensor, ...]]:
        generator = torch.Generator().manual_seed(rank)
        return [(torch.randn(4, width, generator=generator),) for _ in range(count)]

    return batches


def passages(rank: int, count: int) -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(rank)
    return [tuple(torch.randint(256, (2, 1, 8), generator=generator)) for _ in range(count)]


def miniature(suite: str, set_name: str = "chain", broken: Way | None = None) -> SuiteResult:
    SETS["chain"] = Set(lambda: chain([128] * 9), noise(128), lambda out: out.square().mean())
    SETS["blocks"] = Set(lambda: GPT(SIZE), passages, lambda loss: loss)
    ways = training.ways
    if broken is not None:
        training.ways = lambda: {training.REFERENCE: ways()[training.REFERENCE], "broken": broken}
    try:
        return SUITES[suite](set_name, 1)
    finally:
        training.ways = ways


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.thorough)])
def of_suite(request: pytest.FixtureRequest) -> dict[str, SuiteResult]:
    def both() -> dict[str, SuiteResult]:
        return {suite: miniature(suite) for suite in SUITES}

    first, *others = ranks.run(both, request.param, backend="gloo")
    assert all(other == first for other in others), "a result is the same on all ranks"
    return first


@pytest.mark.parametrize("suite", SUITES)
def test_everybody_takes_part(suite: str, of_suite: dict[str, SuiteResult]) -> None:
    fairscale = {"fairscale", "fairscale, fused"} if contenders.fairscale_optimizer() else set()
    peers = {"torch", "torch, best", "ddp", "ddp, fused"} | fairscale
    ours = {"zero_ref", "zero_ref, best", TO_OWNERS, *(f"{TO_OWNERS}, {how}" for how in HOWS)}
    ours |= {OWN_HOOKS, f"{OWN_HOOKS}, even", SHARES, OWN_HOOKS_BEST}
    taking_part = {name for name in of_suite[suite].taken if not name.startswith("limit: ")}
    assert taking_part == peers | ours | ({"fsdp2"} if suite == "iteration" else set())
    assert all(len(taken.wall_ms) == 1 for taken in of_suite[suite].taken.values())


HOWS = ("even", "overlapped", "interleaved")


@pytest.mark.parametrize("suite", SUITES)
def test_what_travels_is_what_theory_says(suite: str, of_suite: dict[str, SuiteResult]) -> None:
    result = of_suite[suite]
    unit = (result.ranks - 1) * result.parameters * 4
    for name, taken in result.taken.items():
        if taken.wire_bytes is None:
            pytest.skip("this system does not count")
        if name == "limit: fused AdamW of a share":
            assert taken.wire_bytes == 0
            continue
        gradients = 1 if name.startswith((TO_OWNERS, OWN_HOOKS)) else 2
        parameters = 0 if name.startswith("ddp") else 1
        units = {"fsdp2": 4}.get(name, 2 if name.startswith("limit: ") else gradients + parameters)
        assert taken.wire_bytes == pytest.approx(units * unit, rel=HEADERS), name


@pytest.mark.parametrize("suite", SUITES)
def test_all_come_to_the_same_parameters(suite: str, of_suite: dict[str, SuiteResult]) -> None:
    apart = {name: one.figures["apart"] for name, one in of_suite[suite].taken.items() if one.figures}
    assert set(apart) == {name for name in of_suite[suite].taken if not name.startswith("limit: ")}
    if of_suite[suite].ranks == 2:  # the sum of two gradients is the same in either order
        not_fused = {"torch", "fairscale", "ddp", "zero_ref"}
        assert {name for name, distance in apart.items() if distance} <= not_fused


@pytest.mark.parametrize("suite", SUITES)
def test_a_rank_keeps_its_share_of_the_state(suite: str, of_suite: dict[str, SuiteResult]) -> None:
    whole, share = (
        of_suite[suite].taken[name].figures["state_bytes"] for name in ("ddp", f"{TO_OWNERS}, even")
    )
    assert share == pytest.approx(whole / of_suite[suite].ranks, rel=0.01), "64 elements of padding"


def test_a_model_of_blocks_is_trained_by_all_too() -> None:
    result = ranks.run(miniature, 2, "iteration", "blocks", backend="gloo")[0]
    assert {"fsdp2", TO_OWNERS} <= set(result.taken)


def unreduced(_, bucket):  # type: ignore[no-untyped-def]
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize(
    "broken",
    [
        Way(lambda params: AdamW(params, lr=1.1e-3, fused=True)),
        Way(lambda params: AdamW(params[:-1], fused=True)),
        Way(lambda params: AdamW(params, fused=True), hook=lambda ddp, optimizer: unreduced),
    ],
    ids=["a step too long", "a tensor left out", "gradients not averaged"],
)
def test_a_contender_that_does_something_else_is_found_out(suite: str, broken: Way) -> None:
    with pytest.raises(ranks.RankError, match=r"apart from 'ddp, fused' .* \{'broken': (inf|0\.\d+)\}"):
        ranks.run(miniature, 2, suite, broken=broken, backend="gloo")


def test_given_gradients_become_the_parameters_own_without_a_copy() -> None:
    model = chain([3, 4])
    given = [torch.randn_like(param) for param in model.parameters()]
    WithGiven(model, given)().backward()
    for param, gradient in zip(model.parameters(), given, strict=True):
        assert param.grad is not None
        assert param.grad.data_ptr() == gradient.data_ptr()
