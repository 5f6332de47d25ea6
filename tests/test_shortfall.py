"""Why a run does not shrink to 1/N: the reasons are the right ones, and their bytes add up."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from zero_ref.plan.choice import plan_partition
from zero_ref.plan.partition import ParamSpec
from zero_ref.plan.rules import even, sorted_greedy
from zero_ref.simulator.ledger import CONVENTIONS, STATE_RULES, StateRule
from zero_ref.simulator.memory import MemorySettings, memory_of_ranks, whole_bytes
from zero_ref.simulator.models import shapes, specs
from zero_ref.simulator.shortfall import Shortfall, why_not_smaller


def nbytes_by_name(why: Shortfall) -> dict[str, int]:
    return {reason.name: reason.nbytes for reason in why.reasons}


# ----------------------------------------------------------------------------------------------- example


def test_every_reason_by_hand() -> None:
    # 1000 + 24 elements of 2 + 2 + 12 bytes on two ranks; rank 0 owns the large one.
    params = [ParamSpec(1000), ParamSpec(24)]
    settings = MemorySettings(1, bucket_bytes=30, activation_bytes=5)
    why = why_not_smaller(sorted_greedy([1000, 24], 2), params, settings)
    assert (why.rank, why.ideal_bytes) == (0, 512 * 16)
    assert nbytes_by_name(why) == {
        "parameters": 512 * 2,
        "gradients": 512 * 2,
        "largest tensor": (1000 - 512) * 12,
        "scalars": 4,
        "gradient buckets": 1024 * 2,
        "communication": 30,
        "activations": 5,
    }
    assert "parameter 0 is not cut" in why.reasons[2].sentence


def test_the_other_rank_owns_less_than_its_share() -> None:
    why = why_not_smaller(
        sorted_greedy([1000, 24], 2), [ParamSpec(1000), ParamSpec(24)], MemorySettings(1), rank=1
    )
    assert nbytes_by_name(why)["uneven"] == (24 - 512) * 12
    assert "largest tensor" not in nbytes_by_name(why)


@pytest.mark.parametrize(
    ("stage", "undivided"),
    [
        (0, ["parameters", "gradients", "optimizer"]),
        (1, ["parameters", "gradients"]),
        (2, ["parameters"]),
        (3, []),
    ],
)
def test_each_stage_divides_one_part_more(stage: int, undivided: list[str]) -> None:
    settings = MemorySettings(stage, gradient_as_bucket_view=True, bucket_bytes=0, optimizer="SGD+momentum")
    why = why_not_smaller(even([640, 640], 2), [ParamSpec(640)] * 2, settings)
    assert [name for name in nbytes_by_name(why) if name != "communication"] == undivided
    assert all(f"stage {stage} keeps" in reason.sentence for reason in why.reasons[: len(undivided)])


def test_cutting_tensors_removes_the_largest_one() -> None:
    params = specs(shapes("llama3-8b"))
    whole, cut = (
        nbytes_by_name(why_not_smaller(plan_partition(rule, params, 1024), params, MemorySettings(1)))
        for rule in ("sorted_greedy", "even")
    )
    share = sum(param.numel for param in params) * 12 // 1024
    assert whole["largest tensor"] == 525_336_576 * 12 - share
    assert "largest tensor" not in cut
    assert 0 < cut["uneven"] < 64 * 12  # a cut is moved by less than 64 elements
    assert {name: nbytes for name, nbytes in whole.items() if name in ("parameters", "gradients")} == {
        name: nbytes for name, nbytes in cut.items() if name in ("parameters", "gradients")
    }


def test_a_piece_above_the_share_is_no_whole_tensor() -> None:
    # 640 elements on 20 ranks, cut at multiples of 64: ten ranks own 64, ten nothing; a share is 32.
    why = why_not_smaller(even([640], 20), [ParamSpec(640)], MemorySettings(1))
    assert nbytes_by_name(why)["uneven"] == 32 * 12
    assert "largest tensor" not in nbytes_by_name(why)


def test_padding_has_its_own_reason() -> None:
    params = [ParamSpec(10), ParamSpec(10)]
    why = why_not_smaller(sorted_greedy([10, 10], 2), params, MemorySettings(1, flat=True))
    assert nbytes_by_name(why)["padding"] == (6 + 6) * 2


def test_one_rank_has_only_what_lies_on_top() -> None:
    why = why_not_smaller(sorted_greedy([10, 20], 1), [ParamSpec(10), ParamSpec(20)], MemorySettings(1))
    assert nbytes_by_name(why) == {"scalars": 8, "gradient buckets": 60}


def test_a_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no rank 2; ranks are 0 to 1"):
        why_not_smaller(sorted_greedy([1], 2), [ParamSpec(1)], MemorySettings(1), rank=2)
    with pytest.raises(ValueError, match="there is no rank -1"):
        why_not_smaller(sorted_greedy([1], 2), [ParamSpec(1)], MemorySettings(1), rank=-1)


# ---------------------------------------------------------------------------------------------- property

RECIPES = st.integers(0, 3).flatmap(
    lambda stage: st.builds(
        MemorySettings,
        st.just(stage),
        st.sampled_from([None, *CONVENTIONS]),
        st.sampled_from(list(STATE_RULES)),
        gradient_as_bucket_view=st.booleans(),
        bucket_bytes=st.integers(0, 10**5),
        gathered_units=st.integers(1, 3),
        flat=st.booleans() if stage in (1, 2) else st.just(False),
        activation_bytes=st.integers(0, 10**6),
    )
)
PARAMS = st.lists(
    st.builds(
        ParamSpec,
        st.integers(0, 10**4),
        st.sampled_from(["float32", "bfloat16"]),
        trainable=st.booleans(),
        name=st.sampled_from(["embedding", "h.0.w", "h.1.w"]),
    ),
    max_size=12,
)


@given(PARAMS, st.integers(1, 9), RECIPES, st.sampled_from(["even", "sorted_greedy"]), st.data())
def test_an_equal_share_and_the_reasons_are_what_the_rank_holds(
    params: list[ParamSpec], world_size: int, settings: MemorySettings, rule: str, data: st.DataObject
) -> None:
    partition = plan_partition(rule, params, world_size)
    memories = memory_of_ranks(partition, params, settings)
    rank = data.draw(st.none() | st.integers(0, world_size - 1))
    why = why_not_smaller(partition, params, settings, rank=rank)
    assert why.total_bytes == memories[why.rank].total_bytes
    assert all(reason.nbytes > 0 or reason.name == "uneven" for reason in why.reasons)
    assert all(reason.sentence.endswith(".") for reason in why.reasons)
    whole = whole_bytes(params, settings)
    state = whole.params + whole.grads + whole.master + whole.moments
    assert 0 <= state - why.ideal_bytes * world_size < 3 * world_size  # three parts, each in whole bytes
    if rank is None:
        assert memories[why.rank].total_bytes == max(memory.total_bytes for memory in memories)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=12), st.integers(1, 64))
def test_no_partition_of_whole_tensors_gets_below_the_largest(numels: list[int], world_size: int) -> None:
    # Without scalars: by those a rank of many small tensors may be the fullest.
    settings = MemorySettings(1, optimizer=StateRule(2, 0))
    params = [ParamSpec(numel) for numel in numels]
    why = why_not_smaller(sorted_greedy(numels, world_size), params, settings)
    over_share = max(numels) * 12 - sum(numels) * 12 // world_size
    names = nbytes_by_name(why)
    assert names.get("largest tensor", 0) + names.get("uneven", 0) >= over_share
