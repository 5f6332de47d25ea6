"""The suites about state on a model of two tensors: who takes part, what must hold, what is noticed."""

from __future__ import annotations

import contextlib
import importlib.util
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.optim import AdamW, Optimizer

from benchmarks import contenders, rounds, state
from benchmarks.contenders import SETS, Set, chain, give_gradients
from benchmarks.results import SuiteResult, Taken
from benchmarks.suites import SUITES
from zero_ref.lab import ranks
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer

pytestmark = pytest.mark.ranks

SMALL = Set(lambda: chain([128, 63]), lambda rank, count: [], torch.sum)
"""8,064 weights and 63 biases."""

FAIRSCALE = {"fairscale"} if importlib.util.find_spec("fairscale") else set()


@contextlib.contextmanager
def small() -> Iterator[None]:
    """A set of that name, and none of what makes times fair: gigabytes touched, garbage collected."""
    with (
        mock.patch.dict(SETS, small=SMALL),
        mock.patch.object(rounds, "TOUCHED_NBYTES", 4096),
        mock.patch("gc.collect"),
    ):
        yield


def suite(name: str, count: int) -> SuiteResult:
    with small(), mock.patch.multiple(state, MOST_CONSOLIDATIONS=1, PEAKS=1):
        return SUITES[name]("small", count)


# --------------------------------------------------------------------------------------------- checkpoint


def test_peers_gather_and_load_beside_ours_and_all_ranks_know_the_same() -> None:
    of_rank_0, of_rank_1 = ranks.run(suite, 2, "checkpoint", 2)
    assert of_rank_0 == of_rank_1
    gathering = {f"{name}: consolidate" for name in {"zero_ref", "torch"} | FAIRSCALE}
    loading = {f"{name}: load" for name in {"zero_ref", "zero_ref, best", "torch", "torch, best"} | FAIRSCALE}
    loading |= {"zero_ref, best: load without copies"}
    assert of_rank_0.taken.keys() == gathering | loading
    # Rounds of gathering are limited, because one of torch's takes seconds on a large model.
    assert {len(of_rank_0.taken[label].wall_ms) for label in gathering} == {1}
    assert {len(of_rank_0.taken[label].wall_ms) for label in loading} == {2}


def gathered_by(spoil_on_rank: int | None) -> str | None:
    """Return the difference that the check finds between two optimizers, one with a wrong value on a rank."""
    optimizers = {}
    for name in ("zero_ref", "torch"):
        params = list(SMALL.make().parameters())
        give_gradients(params)
        optimizers[name] = contenders.sharded()[name](params)
        optimizers[name].step()
    expected_of: Any = optimizers["zero_ref"]
    expected_of.consolidate_state_dict(to="all")
    expected = expected_of.state_dict()["state"]
    spoiled: Any = optimizers["torch"]
    if dist.get_rank() == spoil_on_rank:
        for of_param in spoiled.optim.state.values():
            of_param["exp_avg"][0] += 1e-3
    try:
        state.check_gathers(optimizers, expected)
    except RuntimeError as error:
        return str(error)
    return None


def test_equal_states_pass() -> None:
    assert ranks.run(gathered_by, 2, None) == [None, None]


def test_one_wrong_value_on_any_rank_is_an_error_on_all() -> None:
    for rank, owned in enumerate((0, 1)):  # the weight is on rank 0, the bias on rank 1
        said = f"torch gathers another state than zero_ref did after the step: exp_avg of parameter {owned}."
        assert ranks.run(gathered_by, 2, rank) == [said, said]


def with_a_load_that_forgets() -> str:
    """The error of a suite in which our optimizer loads nothing."""
    with (
        mock.patch.object(ZeroRedundancyOptimizer, "load_state_dict", return_value=None),
        mock.patch.object(state, "take_turns", return_value=defaultdict(Taken)),
        pytest.raises(RuntimeError) as raised,
    ):
        suite("checkpoint", 1)
    return str(raised.value)


def test_a_load_that_loads_nothing_is_noticed() -> None:
    for said in ranks.run(with_a_load_that_forgets, 2):
        assert "zero_ref gathers another state" in said
        assert "0 parameters have a state, where 2 should" in said


def test_what_differs_is_named() -> None:
    one, other = {"exp_avg": torch.tensor([1.0])}, {"exp_avg": torch.tensor([2.0])}
    assert state.first_difference({0: one, 1: one}, {0: one, 1: one}) is None
    assert state.first_difference({0: one, 1: other}, {0: one, 1: one}) == "exp_avg of parameter 1"
    assert state.first_difference({0: one}, {0: one, 1: one}) == "1 parameters have a state, where 2 should"
    assert state.first_difference({0: {**one, "step": one["exp_avg"]}}, {0: one}) == (
        "parameter 0 has ['exp_avg', 'step'], where it should have ['exp_avg']"
    )


# ------------------------------------------------------------------------------------------------- memory


def test_the_state_on_the_fullest_rank_is_what_its_slices_need() -> None:
    # Two float32 an element, and a float32 that counts the steps of each tensor.
    plain = 8 * (8064 + 63) + 2 * 4
    largest = 8 * 8064 + 4  # whole parameters: one rank has the weight
    # 127 units of 64 elements: one rank has 64 of them, all of the weight. Its state has no padding.
    even = 8 * 4096 + 4
    taken = ranks.run(suite, 2, "memory", 1)[0].taken
    cut = {"zero_ref, best, even", "zero_ref, best, equal shares"}
    assert {"ddp", "ddp, fused", "torch, best", "zero_ref, best", *cut} <= taken.keys()
    for name, of_one in taken.items():
        expected = plain if name.startswith("ddp") else even if name in cut else largest
        assert of_one.figures["state_bytes"] == expected, name
        assert of_one.figures["state_share"] == expected / (plain / 2), name
        assert of_one.figures.keys() <= {"state_bytes", "state_share", "peak_bytes"}


# ------------------------------------------------------------------------------------------- construction


def test_our_forms_and_the_peers_are_constructed_as_often_as_asked() -> None:
    taken = ranks.run(suite, 2, "construction", 2)[0].taken
    ours = {"zero_ref", "zero_ref, best", "zero_ref, best, even"}
    assert taken.keys() == ours | {"torch", "torch, best"} | FAIRSCALE
    assert {len(of_one.wall_ms) for of_one in taken.values()} == {2}


def parameters_constructed_on() -> tuple[int, int, int]:
    """Count the optimizers made, the different first parameters that they got, and those still alive."""
    seen: list[weakref.ref[torch.Tensor]] = []

    def make(params: Sequence[torch.Tensor]) -> Optimizer:
        seen.append(weakref.ref(params[0]))
        return AdamW(params)

    def only_this() -> dict[str, Callable[[Sequence[torch.Tensor]], Optimizer]]:
        return {"zero_ref": make}

    with mock.patch.object(contenders, "sharded", only_this):
        suite("construction", 2)
    return len(seen), len({id(one) for one in seen}), sum(one() is not None for one in seen)


def test_each_construction_gets_new_parameters_and_none_is_left() -> None:
    made = rounds.WARM_UP + 2 + rounds.COUNTS  # whose bytes are counted
    assert ranks.run(parameters_constructed_on, 2) == [(made, made, 0)] * 2
