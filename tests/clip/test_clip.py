"""The global norm over shards: worked by hand, then held against torch's function on the unsharded model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import booleans, composite, integers, lists
from library.training import PARTITIONS, WHOLE, CountingReads, Tangle, caught, describe, fill_gradients
from torch import nn, optim

from zero_ref.clip.grad_norm import clip_grad_norm_, get_total_norm
from zero_ref.comm.collectives import Collectives
from zero_ref.lab import virtual
from zero_ref.lab.meter import recording
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.partition import Slice
from zero_ref.plan.rules import even, from_lists, sorted_greedy
from zero_ref.shard.buckets import flat_view

INF = float("inf")
NORMS: list[Any] = [1, 2, 3, 0.5, INF, "inf", 0, -1, -INF]
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16

Params = list[nn.Parameter]
Outcome = tuple[torch.Tensor, list[torch.Tensor | None]]
"""The total, and every gradient after clipping."""


def sharded(params: Iterable[Any], comm: Collectives, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(params, optim.SGD, comm, lr=0.1, **options)


def weights(*gradients: Any) -> Params:
    """1-D parameters with these gradients; None for none."""
    params = []
    for gradient in gradients:
        param = nn.Parameter(torch.zeros(1 if gradient is None else len(gradient)))
        param.grad = None if gradient is None else torch.tensor(gradient)
        params.append(param)
    return params


def many(dtypes: Sequence[torch.dtype] = (FLOAT32,), count: int = 41, seed: int = 0) -> Params:
    """So many that the order of the sum shows, of sizes 1 to 300, every fifth without a gradient."""
    generator = torch.Generator().manual_seed(seed)
    params = []
    for index in range(count):
        numel = int(torch.randint(1, 300, (), generator=generator))
        values = torch.randn(numel, generator=generator, dtype=torch.float64) * 10 ** (index % 3)
        param = nn.Parameter(torch.zeros(numel, dtype=dtypes[index % len(dtypes)]))
        param.grad = None if index % 5 == 3 else values.to(param.dtype)
        params.append(param)
    return params


def tangle() -> Params:
    """Every kind of parameter, with gradients, but for one that torch has no inf-norm of."""
    model = Tangle()
    fill_gradients(list(model.parameters()), 0, world_size=1)
    model.nothing.grad = None
    return list(model.parameters())


def plain(params: Params, max_norm: float, norm_type: Any, **options: Any) -> Outcome:
    total = nn.utils.clip_grad_norm_(params, max_norm, norm_type, **options)
    return total, [param.grad for param in params]


def keep_own(zero: ZeroRedundancyOptimizer) -> None:
    """Leave the gradients as `reduce_to_owners` does: none, or zero, in what others own."""
    for param, pieces in zip(zero.built.params, zero.partition.pieces_of_param, strict=True):
        if param.grad is None:
            continue
        kept = torch.zeros_like(param.grad)
        own = [piece for piece, owner in pieces if owner == zero.rank]
        for piece in own:
            flat_view(kept)[piece.start : piece.stop] = flat_view(param.grad)[piece.start : piece.stop]
        param.grad = kept if own else None


def clipped(
    comm: Collectives,
    make: Callable[[], Params],
    partition: Any,
    cases: Sequence[tuple[float, Any]],
    owner_only: bool,
    **options: Any,
) -> list[Outcome]:
    """On one rank: clip anew for each (max_norm, norm_type)."""
    outcomes = []
    for max_norm, norm_type in cases:
        params = make()
        zero = sharded(params, comm, partition=partition)
        if owner_only:
            keep_own(zero)
        total = clip_grad_norm_(zero, max_norm, norm_type, **options)
        outcomes.append((total, [param.grad for param in params]))
    return outcomes


def assert_equal(ours: Outcome, theirs: Outcome, owner_only: bool, exact: bool, label: str) -> None:
    (total, gradients), (their_total, their_gradients) = ours, theirs
    assert (total.dtype, total.device, total.shape) == (
        their_total.dtype,
        their_total.device,
        their_total.shape,
    ), label
    assert not total.requires_grad, label
    tolerance = 0.0 if exact else 2**-7 if total.dtype in (BFLOAT16, FLOAT16) else 1e-6
    torch.testing.assert_close(total, their_total, rtol=tolerance, atol=0, equal_nan=True, msg=label)
    for number, (ours_now, theirs_now) in enumerate(zip(gradients, their_gradients, strict=True)):
        if ours_now is None:
            assert theirs_now is None or owner_only, f"{label}: gradient {number} is gone"
            continue
        assert theirs_now is not None, f"{label}: parameter {number} has got a gradient"
        there = ours_now != 0 if owner_only else torch.ones_like(ours_now, dtype=torch.bool)
        tolerance = 0.0 if exact else 2**-6 if ours_now.dtype in (BFLOAT16, FLOAT16) else 2e-6
        torch.testing.assert_close(
            ours_now[there],
            theirs_now[there],
            rtol=tolerance,
            atol=0,
            equal_nan=True,
            msg=f"{label}, {number}",
        )


def assert_clips_as_torch(
    make: Callable[[], Params],
    cases: Sequence[tuple[float, Any]],
    partitions: Sequence[Any] = PARTITIONS,
    world_sizes: Sequence[int] = (1, 3),
    **options: Any,
) -> None:
    """With replicated and with owner-only gradients, on every rank."""
    expected = [plain(make(), max_norm, norm_type, **options) for max_norm, norm_type in cases]
    for world_size in world_sizes:
        for partition in partitions:
            for owner_only in (False, True):
                arguments = (make, partition, cases, owner_only)
                of_rank = virtual.run(clipped, world_size, *arguments, timeout=20, **options)
                for rank, outcomes in enumerate(of_rank):
                    for case, ours, theirs in zip(cases, outcomes, expected, strict=True):
                        label = (
                            f"{describe(partition)}, {case}, owner_only={owner_only}, {rank} of {world_size}"
                        )
                        exact = partition in WHOLE or world_size == 1
                        assert_equal(ours, theirs, owner_only, exact, label)
                        assert torch.equal(
                            ours[0].nan_to_num(), of_rank[0][cases.index(case)][0].nan_to_num()
                        )


# --------------------------------------------------------------------------------------------------- by hand


@pytest.mark.parametrize(
    ("norm_type", "total", "first"),
    [(2, 13.0, 3 / 13), (1, 19.0, 3 / 19), ("inf", 12.0, 3 / 12), (0, 2.0, 3 / 2)],
)
def test_norms_of_3_4_and_12_on_two_ranks(norm_type: Any, total: float, first: float) -> None:
    def on_rank(comm: Collectives) -> tuple[float, list[float]]:
        params = weights([3.0, 0.0], [-4.0, 12.0])
        norm = clip_grad_norm_(sharded(params, comm), 1.0, norm_type)
        return norm.item(), [value for param in params for value in param.grad.tolist()]  # type: ignore

    for norm, gradients in virtual.run(on_rank, 2):
        assert norm == total
        assert gradients == pytest.approx([first, 0, -first * 4 / 3, first * 4])


@pytest.mark.parametrize(
    ("norm_type", "total"),
    [(2, 13.0), (1, 19.0), (INF, 12.0), (-INF, 3.0), (-1, 1 / (1 / 3 + 1 / 4 + 1 / 12))],
)
def test_norms_of_one_parameter_cut_between_two_ranks(norm_type: Any, total: float) -> None:
    def on_rank(comm: Collectives) -> float:
        params = weights([3.0, 4.0, 12.0])
        zero = sharded(params, comm, partition=even([3], 2, alignment=1))
        assert [len(slices) for slices in zero.partition.slices_of_rank] == [1, 1]
        return clip_grad_norm_(zero, 100.0, norm_type).item()

    assert virtual.run(on_rank, 2) == pytest.approx([total, total])


def test_gradients_below_the_limit_stay_as_they_are() -> None:
    def on_rank(comm: Collectives) -> list[Any]:
        params = weights([3.0], [4.0])
        assert clip_grad_norm_(sharded(params, comm), 5.1).item() == 5
        return [param.grad for param in params]

    assert virtual.run(on_rank, 2) == [[torch.tensor([3.0]), torch.tensor([4.0])]] * 2


def test_only_what_the_owner_has_counts() -> None:
    """The others may have none, or something else; what is there is scaled all the same."""

    def on_rank(comm: Collectives) -> tuple[float, list[Any]]:
        params = weights([3.0], [4.0], None)
        zero = sharded(params, comm, partition=[[0, 2], [1]])
        params[1 - comm.rank].grad = [None, torch.tensor([1000.0])][comm.rank]
        if comm.rank == 1:
            params[2].grad = torch.tensor([7.0])
        total = clip_grad_norm_(zero, 0.5)
        return total.item(), [None if p.grad is None else round(p.grad.item(), 4) for p in params]

    assert virtual.run(on_rank, 2) == [(5.0, [0.3, None, None]), (5.0, [100.0, 0.4, 0.7])]


# --------------------------------------------------------------------------------------------- against torch


@pytest.mark.parametrize("make", [tangle, many])
def test_every_norm_equals_torchs_under_every_partition(make: Callable[[], Params]) -> None:
    assert_clips_as_torch(make, [*((0.1, norm_type) for norm_type in NORMS), (1e9, 2)])


@pytest.mark.parametrize("foreach", [None, True, False])
def test_foreach_chooses_the_kernels_as_in_torch(
    foreach: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [(0.5, 2.0), (0.5, 1.0)]
    assert_clips_as_torch(tangle, cases, ["sorted_greedy", "even"], (2,), foreach=foreach)

    called = set()

    def note_calls_of(name: str) -> None:
        torchs = getattr(torch, name)

        def noting(*arguments: Any) -> Any:
            called.add(name)
            return torchs(*arguments)

        monkeypatch.setattr(torch, name, noting)

    note_calls_of("_foreach_norm")
    note_calls_of("_foreach_mul_")
    virtual.run(lambda comm: clip_grad_norm_(sharded(tangle(), comm), 0.1, foreach=foreach), 2)
    assert called == (set() if foreach is False else {"_foreach_norm", "_foreach_mul_"})


def test_foreach_where_there_are_no_such_kernels_is_refused_as_in_torch() -> None:
    with pytest.raises(RuntimeError, match="foreach=True was passed, but can't use the foreach API on meta"):
        virtual.run(lambda comm: get_total_norm(sharded([on_meta()], comm), foreach=True), 1)


def on_meta() -> nn.Parameter:
    param = nn.Parameter(torch.zeros(2, device="meta"))
    param.grad = torch.zeros(2, device="meta")
    return param


@pytest.mark.parametrize(
    "dtypes",
    [
        [BFLOAT16],
        [BFLOAT16, FLOAT32],
        [BFLOAT16, FLOAT16],
        [torch.float64, BFLOAT16, FLOAT32, FLOAT16, torch.complex64],
    ],
    ids=str,
)
def test_several_dtypes_give_torchs_total_in_torchs_dtype(dtypes: list[torch.dtype]) -> None:
    cases = [(0.1, 2), (50.0, 1), (1.0, INF), (1.0, 3)]
    assert_clips_as_torch(lambda: many(dtypes), cases, ["sorted_greedy", "even"], (3,))


@composite
def cuts(draw: Any) -> tuple[list[int], int, int]:
    numels = draw(lists(integers(1, 40), min_size=1, max_size=10))
    return numels, draw(integers(1, 5)), draw(integers(1, 9))


@settings(max_examples=30, deadline=None)
@given(cuts(), booleans())
def test_parameters_cut_anywhere_give_torchs_total(cut: tuple[list[int], int, int], owner_only: bool) -> None:
    numels, world_size, alignment = cut
    partition = even(numels, world_size, alignment=alignment)

    def make() -> Params:
        return weights(
            *[[0.1 * (index + 1) + element for element in range(n)] for index, n in enumerate(numels)]
        )

    expected = plain(make(), 1.0, 2.0)
    for (ours,) in virtual.run(clipped, world_size, make, partition, [(1.0, 2.0)], owner_only):
        assert_equal(ours, expected, owner_only, exact=False, label=f"{cut}")


def test_a_cut_follows_the_parameters_memory_where_the_gradients_is_another() -> None:
    """The first owner of a channels_last weight has every second element of a contiguous gradient."""

    def on_rank(comm: Collectives) -> float:
        weight = nn.Parameter(torch.zeros(1, 2, 1, 2).to(memory_format=torch.channels_last))
        zero = sharded([weight], comm, partition=even([4], 2, alignment=1))
        in_memory = torch.zeros_like(weight, requires_grad=False)
        flat_view(in_memory)[2 * comm.rank : 2 * comm.rank + 2] = torch.tensor([[1.0, 2.0], [4.0, 10.0]])[
            comm.rank
        ]
        weight.grad = in_memory.contiguous()
        return clip_grad_norm_(zero, 100.0).item()

    assert virtual.run(on_rank, 2) == [11.0, 11.0]  # 1 + 4 + 16 + 100


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
def test_the_parts_of_a_half_precision_parameter_are_rounded_once_and_together(dtype: torch.dtype) -> None:
    """Eight parts of norm 1.0025 each: rounded by itself, each would be 1."""

    def on_rank(comm: Collectives) -> float:
        param = nn.Parameter(torch.zeros(8 * 64, dtype=dtype))
        param.grad = torch.full_like(param, 1.0025 / 8)
        zero = sharded([param], comm, partition="even")
        assert not zero.partition.is_whole
        total = get_total_norm(zero)
        assert total.dtype == dtype
        assert total == torch.linalg.vector_norm(param.grad)
        return total.item()

    assert len(set(virtual.run(on_rank, 8))) == 1


def test_no_gradients_at_all_give_torchs_zero() -> None:
    assert_clips_as_torch(lambda: weights(None, None), [(1.0, 2.0)])
    assert_clips_as_torch(lambda: [nn.Parameter(torch.zeros(3, dtype=torch.float64))], [(1.0, INF)])


def test_a_gradient_from_before_freezing_counts_as_in_torch() -> None:
    def make() -> Params:
        params = weights([3.0], [4.0], [12.0])
        params[1].requires_grad_(False)
        return params

    def on_rank(comm: Collectives) -> list[Any]:
        params = make()
        return [clip_grad_norm_(sharded(params, comm), 1.0), *[param.grad for param in params]]

    total, gradients = plain(make(), 1.0, 2.0)
    assert total == 13
    assert virtual.run(on_rank, 2) == [[total, *gradients]] * 2


def test_a_gradient_that_has_a_graph_gives_a_total_without() -> None:
    def on_rank(comm: Collectives) -> torch.Tensor:
        weight = nn.Parameter(torch.full((130,), 2.0))
        weight.grad = torch.autograd.grad((weight**3).sum(), weight, create_graph=True)[0]
        assert weight.grad.requires_grad
        return get_total_norm(sharded([weight], comm, partition="even"))

    for total in virtual.run(on_rank, 2):
        assert not total.requires_grad
        assert total.item() == pytest.approx(12 * 130**0.5)


def test_a_parameter_without_elements_has_no_inf_norm_on_any_rank_as_in_torch() -> None:
    def on_rank(comm: Collectives) -> str:
        zero = sharded(weights([1.0], [], [2.0]), comm)
        assert clip_grad_norm_(zero, 10.0, 1.0) == 3.0
        with pytest.raises(RuntimeError, match="cannot compute the inf") as error:
            clip_grad_norm_(zero, 1.0, INF)
        return str(error.value)

    with pytest.raises(RuntimeError, match="on an empty tensor"):
        plain(weights([1.0], []), 1.0, INF)
    messages = virtual.run(on_rank, 3)
    assert len(set(messages)) == 3
    assert sum("could not clip the gradients" in message for message in messages) == 2


# ----------------------------------------------------------------------------------------- a part of them all


@pytest.mark.parametrize("partition", ["sorted_greedy", "even"])
def test_some_of_the_parameters_are_counted_and_scaled_and_no_others(partition: str) -> None:
    chosen = [7, 1, 4, 5, 7]

    def on_rank(comm: Collectives) -> list[Outcome]:
        outcomes = []
        for form in (list, iter):
            params = tangle()
            zero = sharded(params, comm, partition=partition)
            total = clip_grad_norm_(zero, 0.1, params=form([params[number] for number in chosen]))
            outcomes.append((total, [param.grad for param in params]))
        return outcomes

    theirs = tangle()
    total = nn.utils.clip_grad_norm_([theirs[number] for number in sorted(set(chosen))], 0.1)
    expected = (total, [param.grad for param in theirs])
    untouched = [param.grad for param in tangle()]
    for outcomes in virtual.run(on_rank, 2):
        for ours in outcomes:
            assert_equal(ours, expected, False, exact=partition != "even", label=f"{partition}, {chosen}")
            for number, gradient in enumerate(untouched):
                same = gradient is None or torch.equal(gradient, ours[1][number])  # type: ignore[arg-type]
                assert same == (number not in chosen or gradient is None)


def test_one_parameter_and_none() -> None:
    def on_rank(comm: Collectives) -> list[float]:
        params = weights([3.0], [4.0])
        zero = sharded(params, comm)
        return [get_total_norm(zero, params=chosen).item() for chosen in (params[1], [], None)]

    assert virtual.run(on_rank, 2) == [[4.0, 0.0, 5.0]] * 2


def test_get_total_norm_leaves_gradients_as_they_are_and_serves_to_scale_others() -> None:
    """FairScale's filter: count some, scale all."""

    def on_rank(comm: Collectives) -> list[float]:
        params = weights([3.0], [4.0])
        zero = sharded(params, comm)
        total = get_total_norm(zero, params=params[:1])
        assert [param.grad.item() for param in params] == [3.0, 4.0]  # type: ignore[union-attr]
        nn.utils.clip_grads_with_norm_(params, 1.5, total)
        return [total.item(), *[round(param.grad.item(), 4) for param in params]]  # type: ignore[union-attr]

    assert virtual.run(on_rank, 2) == [[3.0, 1.5, 2.0]] * 2


# ----------------------------------------------------------------------------------------- several optimizers


def split_in_two(params: Params) -> list[Params]:
    return [params[: len(params) // 3], params[len(params) // 3 :]]


@pytest.mark.parametrize("norm_type", [2, INF, -1], ids=str)
@pytest.mark.parametrize(("partition", "owner_only"), [("sorted_greedy", False), ("even", True)])
def test_two_optimizers_have_torchs_norm_of_all(partition: Any, owner_only: bool, norm_type: Any) -> None:
    def on_rank(comm: Collectives) -> Outcome:
        params = many([FLOAT32, BFLOAT16])
        zeros = [sharded(part, comm, partition=partition) for part in split_in_two(params)]
        for zero in zeros if owner_only else ():
            keep_own(zero)
        total = clip_grad_norm_(zeros, 0.1, norm_type)
        return total, [param.grad for param in params]

    expected = plain(many([FLOAT32, BFLOAT16]), 0.1, norm_type)
    of_rank = virtual.run(on_rank, 3)
    for ours in of_rank:
        assert_equal(ours, expected, owner_only, partition in WHOLE, describe(partition))
        assert torch.equal(ours[0].nan_to_num(), of_rank[0][0].nan_to_num())


def test_get_total_norm_of_two_optimizers_counts_some_parameters_of_both() -> None:
    def on_rank(comm: Collectives) -> list[float]:
        params = weights([3.0], [4.0], [12.0], [84.0])
        zeros = [sharded(params[:2], comm), sharded(params[2:], comm)]
        some = get_total_norm(zeros, params=iter([params[2], params[0], params[1]]))
        assert [param.grad.item() for param in params] == [3.0, 4.0, 12.0, 84.0]  # type: ignore[union-attr]
        return [some.item(), get_total_norm(zeros).item(), get_total_norm(zeros[:1]).item()]

    assert virtual.run(on_rank, 2) == [[13.0, 85.0, 5.0]] * 2


# Of optimizers over gradients of the norms 3, 4 and 12, 84, and a third one over those of 3, 4 again.
TOGETHER: dict[str, tuple[Callable[[list[ZeroRedundancyOptimizer], int], Any], str]] = {
    "none": (lambda zeros, rank: clip_grad_norm_([], 1.0), "ValueError: clip over shards takes each optim"),
    "twice": (
        lambda zeros, rank: clip_grad_norm_([zeros[0], zeros[0]], 1.0),
        "ValueError: clip over shards takes each optimizer once, and was given 2.",
    ),
    "a parameter twice": (
        lambda zeros, rank: clip_grad_norm_([*zeros[:2], zeros[2]], 1.0),
        "ValueError: rank {rank}: a parameter is in two of the optimizers and would count twice.",
    ),
    "a stranger": (
        lambda zeros, rank: clip_grad_norm_(zeros[:2], 1.0, params=[torch.ones(3)]),
        "ValueError: rank {rank}: `params` holds a Tensor of shape (3,) that is no parameter of this optim",
    ),
    "not finite": (
        lambda zeros, rank: clip_grad_norm_(zeros[:2], 1.0, 300.0, error_if_nonfinite=True),
        "RuntimeError: rank {rank}: The total norm of order 300.0 for gradients from `parameters` is non-fin",
    ),
}
DISAGREE = "ValueError: ranks disagree, so none can clip the gradients: "
BY_RANK_1: dict[str, tuple[Callable[[list[ZeroRedundancyOptimizer], int], Any], str]] = {
    "order": (
        lambda zeros, rank: clip_grad_norm_(zeros[1::-1] if rank else zeros[:2], 1.0),
        DISAGREE + "rank 0 has [optimizer 0 (SGD), all parameters]",
    ),
    "number": (
        lambda zeros, rank: clip_grad_norm_(zeros if rank else zeros[:2], 1.0),
        "RuntimeError: rank 0: rank 1 could not clip the gradients: ValueError: rank 1: a parameter is",
    ),
    "another": (
        lambda zeros, rank: clip_grad_norm_(zeros[1:] if rank else zeros[:2], 1.0),
        DISAGREE + "rank 0 has [optimizer 0 (SGD), all parameters]",
    ),
    "alone": (
        lambda zeros, rank: clip_grad_norm_(zeros[2] if rank else zeros[0], 1.0),
        DISAGREE + "rank 1 has [optimizer 2 (SGD), all parameters] where rank 0 has [optimizer 0 (SGD), all",
    ),
    "options": (
        lambda zeros, rank: clip_grad_norm_(zeros[:2], 1.0 + rank),
        DISAGREE + "rank 1 has [max_norm=2.0, norm_type=2.0",
    ),
    "params": (
        lambda zeros, rank: clip_grad_norm_(zeros[:2], 1.0, params=zeros[rank].built.params),
        DISAGREE + "rank 0 has [optimizer 0 (SGD), all parameters]",
    ),
}


def make_mistakes_together(comm: Collectives, mistakes: list[Any]) -> list[str]:
    params = weights([3.0], [4.0], [12.0], [84.0])
    zeros = [sharded(some, comm) for some in (params[:2], params[2:], params[:2])]
    messages = []
    for mistake in mistakes:
        messages.append(caught(lambda mistake=mistake: mistake(zeros, comm.rank)))  # type: ignore[misc]
        assert clip_grad_norm_(zeros[:2], 100.0).item() == 85.0, messages[-1]
    return messages


def test_mistakes_with_several_optimizers_raise_on_all_ranks() -> None:
    cases = [*TOGETHER.values(), *BY_RANK_1.values()]
    of_rank = virtual.run(make_mistakes_together, 2, [mistake for mistake, _ in cases])
    for rank, messages in enumerate(of_rank):
        for (_, text), message in zip(cases, messages, strict=True):
            if rank == 1 and "rank 1 could not" in text:
                text = "ValueError: rank 1: a parameter is in two"
            assert message.startswith(text.format(rank=rank)), message


# --------------------------------------------------------------------------------------------- what travels


@pytest.mark.parametrize("partition", ["sorted_greedy", "even"])
def test_one_all_reduce_of_a_number_for_each_slice_and_each_rank(partition: str) -> None:
    def on_rank(comm: Collectives) -> tuple[list[Any], int]:
        zero = sharded(tangle(), comm, partition=partition)
        with recording(comm) as calls:
            clip_grad_norm_(zero, 1.0)
        return [(call.op, call.nbytes) for call in calls], sum(map(len, zero.partition.slices_of_rank))

    for calls, slices in virtual.run(on_rank, 3):
        assert slices == (11 if partition == "sorted_greedy" else 13)
        assert calls == [("all_reduce", 8 * (slices + 3))]


def test_the_norms_of_slices_are_read_together_and_not_one_by_one() -> None:
    def on_rank(comm: Collectives) -> tuple[float, int]:
        zero = sharded(weights([3.0, 4.0, 12.0], [84.0]), comm, partition=cut_into_elements)
        with CountingReads() as counting:
            total = get_total_norm(zero)
        return total.item(), counting.reads

    cut_into_elements = from_lists([3, 1], [[Slice(0, 0, 1), Slice(0, 1, 2), Slice(0, 2, 3), 1]])
    # Once: the norm of the parameter that is cut, which the host has put together.
    assert virtual.run(on_rank, 1) == [(85.0, 1)]


def test_each_rank_computes_only_the_norms_of_what_it_owns(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[Any, int] = {}
    torchs = torch._foreach_norm

    def counting(tensors: Any, *arguments: Any) -> Any:
        for tensor in tensors:
            seen[tensor] = seen.get(tensor, 0) + 1
        return torchs(tensors, *arguments)

    monkeypatch.setattr(torch, "_foreach_norm", counting)
    params = weights([3.0], [4.0], [12.0])  # the same tensors on all ranks
    assert virtual.run(lambda comm: get_total_norm(sharded(params, comm)).item(), 3) == [13.0] * 3
    assert [seen[param.grad] for param in params] == [1, 1, 1]


# ------------------------------------------------------------------------------------------ NaN and infinity


@pytest.mark.parametrize("value", [torch.nan, INF, -INF])
def test_non_finite_gradients_are_scaled_as_in_torch(value: float) -> None:
    def make() -> Params:
        params = many(count=7)
        assert params[4].grad is not None
        params[4].grad[0] = value
        return params

    assert_clips_as_torch(make, [(1.0, 1), (1.0, 2), (1.0, INF)], ["sorted_greedy", "even"])


@pytest.mark.parametrize("owner_only", [False, True])
@pytest.mark.parametrize("partition", ["sorted_greedy", "even"])
def test_error_if_nonfinite_raises_on_all_ranks_and_names_the_parameter(
    partition: str, owner_only: bool
) -> None:
    def on_rank(comm: Collectives) -> str:
        model = Tangle()
        params = list(model.named_parameters())
        fill_gradients([param for _, param in params], 0, world_size=1)
        zero = sharded(params, comm, partition=partition)
        for param in (model.up.weight, model.norm.bias):
            assert param.grad is not None
            param.grad.view(-1)[-1] = torch.nan
        if owner_only:
            keep_own(zero)
        before = [None if param.grad is None else param.grad.clone() for _, param in params]
        with pytest.raises(RuntimeError) as error:
            clip_grad_norm_(zero, 1.0, error_if_nonfinite=True)
        for gradient, (_, param) in zip(before, params, strict=True):
            assert (gradient is None) == (param.grad is None)
            if gradient is not None:
                torch.testing.assert_close(gradient, param.grad, rtol=0, atol=0, equal_nan=True)
        zero.zero_grad()
        assert clip_grad_norm_(zero, 1.0, error_if_nonfinite=True) == 0
        owners = [str(rank) for _, rank in zero.partition.pieces_of_param[5]]
        assert f"norm.bias, owned by rank {' and '.join(owners)}, is nan" in str(error.value)
        return str(error.value)

    for rank, message in enumerate(virtual.run(on_rank, 3)):
        assert message.startswith(
            f"rank {rank}: The total norm of order 2.0 for gradients from `parameters` is non-finite, as "
            "that of parameter norm.bias, owned by rank"
        )
        assert "is nan (one of 2 such parameters), so it cannot be clipped" in message
        assert "set `error_if_nonfinite=False`" in message


def test_error_if_nonfinite_when_every_norm_is_finite() -> None:
    def on_rank(comm: Collectives) -> None:
        clip_grad_norm_(sharded(weights([3e38], [3e38]), comm), 1.0, 1, error_if_nonfinite=True)

    with pytest.raises(RuntimeError, match="non-finite, though that of each parameter is finite"):
        virtual.run(on_rank, 2)


# ------------------------------------------------------------------------------------------------- refusals


Mistake = Callable[[ZeroRedundancyOptimizer, int], Any]
"""A wrong call, given the optimizer and the rank."""


def a_sparse_gradient(zero: ZeroRedundancyOptimizer, rank: int) -> Any:
    weight = zero.built.params[1]
    indices, values = torch.tensor([[0]]), torch.ones(1)
    weight.grad = torch.sparse_coo_tensor(indices, values, weight.shape, check_invariants=True)
    try:
        return clip_grad_norm_(zero, 1.0)
    finally:
        weight.grad = torch.tensor([4.0])


def after_the_update(zero: ZeroRedundancyOptimizer, rank: int) -> Any:
    zero.backward.begin()
    zero.backward.end_updated(zero.built.params, zero.param_groups)
    try:
        return get_total_norm(zero)
    finally:
        assert zero.backward.take_update({})


def after_half_a_backward(zero: ZeroRedundancyOptimizer, rank: int) -> Any:
    zero.backward.begin()
    try:
        return clip_grad_norm_(zero, 1.0)
    finally:
        zero.backward.end_updated([], [])
        assert zero.backward.take_update({})


# What ranks 0 and 1 are told; rank 1 is the one that differs.
SAME_ON_ALL: dict[str, tuple[Mistake, str]] = {
    "norm_type": (
        lambda zero, rank: clip_grad_norm_(zero, 1.0, "two"),  # type: ignore[arg-type]
        "ValueError: could not convert string to float: 'two'",
    ),
    "max_norm": (
        lambda zero, rank: clip_grad_norm_(zero, None),  # type: ignore[arg-type]
        "TypeError: float() argument must be",
    ),
    "params": (
        lambda zero, rank: clip_grad_norm_(zero, 1.0, params=[torch.ones(3, 2)]),
        "ValueError: rank {rank}: `params` holds a Tensor of shape (3, 2) that is no parameter of this",
    ),
    "names": (
        lambda zero, rank: clip_grad_norm_(zero, 1.0, params=[("w", zero.built.params[0])]),  # type: ignore
        "ValueError: rank {rank}: `params` holds a tuple that is no parameter of this optimizer. Pass some",
    ),
    "sparse": (
        a_sparse_gradient,
        "RuntimeError: rank {rank}: parameter second has a sparse gradient, of which",
    ),
    "updated": (
        after_the_update,
        "RuntimeError: rank {rank}: clipping by global norm needs all gradients before the first parameter "
        "is updated, and with overlap_with_ddp=True backward has already updated them. Construct the "
        "optimizer without",
    ),
    "begun": (
        after_half_a_backward,
        "RuntimeError: rank {rank}: the last backward did not come to its end, so gradients are reduced",
    ),
    "optimizer": (
        lambda zero, rank: clip_grad_norm_(list(zero.built.params), 1.0),  # type: ignore[arg-type]
        "TypeError: clip over shards takes the ZeroRedundancyOptimizer, or a list of them, not Parameter: it "
        "knows which rank owns what. For an unsharded model use torch.nn.utils.clip_grad_norm_.",
    ),
}
DIFFERENT: dict[str, tuple[Mistake, str]] = {
    "max_norm": (
        lambda zero, rank: clip_grad_norm_(zero, 1.0 + rank),
        "rank 1 has [max_norm=2.0, norm_type=2.0",
    ),
    "norm_type": (
        lambda zero, rank: get_total_norm(zero, 1 + rank),
        "rank 1 has [max_norm=inf, norm_type=2.0",
    ),
    "error": (
        lambda zero, rank: get_total_norm(zero, error_if_nonfinite=bool(rank)),
        "error_if_nonfinite=True] where rank 0",
    ),
    "params": (
        lambda zero, rank: get_total_norm(zero, params=zero.built.params[rank:]),
        "rank 1 has [optimizer 0 (SGD), parameters [1]] where rank 0 has [optimizer 0 (SGD), all parameters]",
    ),
    "function": (
        lambda zero, rank: get_total_norm(zero) if rank else clip_grad_norm_(zero, 1.0),
        "rank 1 has [max_norm=inf, norm_type=2.0, error_if_nonfinite=False] where rank 0 has [max_norm=1.0",
    ),
}


def make_mistakes(comm: Collectives, mistakes: list[Mistake], on_rank_1_only: bool) -> list[str]:
    """Each mistake, and after each a call that works: ranks are still in step, gradients as they were."""
    names = ["first", "second"]
    zero = sharded(zip(names, weights([3.0], [4.0]), strict=True), comm, overlap_with_ddp=True)
    messages = []
    for mistake in mistakes:
        wrong = (
            mistake if comm.rank == 1 or not on_rank_1_only else lambda zero, rank: clip_grad_norm_(zero, 1.0)
        )
        messages.append(caught(lambda wrong=wrong: wrong(zero, comm.rank)))  # type: ignore[misc]
        assert clip_grad_norm_(zero, 10.0).item() == 5.0, messages[-1]
    return messages


def test_a_mistake_of_all_ranks_raises_on_all() -> None:
    mistakes = [mistake for mistake, _ in SAME_ON_ALL.values()]
    for rank, messages in enumerate(virtual.run(make_mistakes, 3, mistakes, False)):
        for (_, text), message in zip(SAME_ON_ALL.values(), messages, strict=True):
            assert message.startswith(text.format(rank=rank))


def test_a_mistake_of_one_rank_raises_on_all_and_names_it() -> None:
    mistakes = {name: case for name, case in SAME_ON_ALL.items() if name != "optimizer"}
    of_rank = virtual.run(make_mistakes, 3, [mistake for mistake, _ in mistakes.values()], True)
    for rank, messages in enumerate(of_rank):
        for (_, text), message in zip(mistakes.values(), messages, strict=True):
            expected = text.format(rank=1)
            if rank != 1:
                expected = f"RuntimeError: rank {rank}: rank 1 could not clip the gradients: {expected}"
            assert message.startswith(expected)


def test_ranks_that_pass_different_things_are_told() -> None:
    mistakes = [mistake for mistake, _ in DIFFERENT.values()]
    for messages in virtual.run(make_mistakes, 2, mistakes, False):
        for (_, text), message in zip(DIFFERENT.values(), messages, strict=True):
            assert message.startswith("ValueError: ranks disagree, so none can clip the gradients: ")
            assert text in message


# ---------------------------------------------------------------------------------------- in a training run


def test_a_partition_of_ones_own() -> None:
    """Slices of one parameter dealt out in turn: more than one of them on a rank."""
    gradient = [1.0, 2.0, 4.0, 10.0, 0.0, 0.0]
    plan = sorted_greedy([6], 2)
    pieces = [plan.pieces_of_param[0][0][0]._replace(start=i, stop=i + 1) for i in range(6)]

    def on_rank(comm: Collectives) -> float:
        zero = sharded(weights(gradient), comm, partition=from_lists([6], [pieces[::2], pieces[1::2]]))
        return clip_grad_norm_(zero, 100.0).item()

    assert virtual.run(on_rank, 2) == [11.0, 11.0]
