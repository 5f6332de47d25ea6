"""What the shim gives to Gloo: the calls of NCCL that Gloo lacks, with NCCL's results; nothing afterwards."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from zero_ref.doctor import nccl_on_gloo as shim
from zero_ref.lab import ranks

pytestmark = pytest.mark.ranks


def uneven(rank: int) -> tuple[list, torch.Tensor]:
    return [torch.zeros(2, 3), torch.zeros(1, 3), torch.zeros(4)], torch.full(
        [(2, 3), (1, 3), (4,)][rank], rank + 1.0
    )


def gathers_unevenly() -> list[float]:
    outputs, mine = uneven(dist.get_rank())
    with shim.nccl_on_gloo() as given:
        dist.all_gather(outputs, mine)
        assert given == {shim.UNEVEN}
        work = dist.all_gather(uneven(0)[0], mine, async_op=True)
        assert work is not None
        assert work.wait()
        assert work.is_completed()
    return [tensor.sum().item() for tensor in outputs]


def test_tensors_of_different_sizes_are_gathered() -> None:
    assert ranks.run(gathers_unevenly, 3, timeout=60) == [[6.0, 6.0, 12.0]] * 3


def has_futures() -> tuple[list, set[str]]:
    rank, count = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(2.0 * count) + rank
    scattered, listed, received = torch.empty(2), torch.empty(2), torch.empty(1)
    with shim.nccl_on_gloo() as given:
        futures = [
            dist.reduce_scatter_tensor(scattered, whole, op=dist.ReduceOp.AVG, async_op=True).get_future(),
            dist.reduce_scatter(listed, list(whole.clone().split(2)), async_op=True).get_future(),
            dist.isend(torch.tensor([float(rank)]), (rank + 1) % count).get_future(),
            dist.irecv(received, (rank - 1) % count).get_future(),
        ]
        torch.futures.collect_all(futures).wait()
    return [*scattered.tolist(), *listed.tolist(), received.item()], given


@pytest.mark.filterwarnings("ignore:.*reduce_scatter_tensor. is deprecated:FutureWarning")
def test_works_that_have_no_future_get_one_that_completes_with_the_values() -> None:
    for rank, (values, given) in enumerate(ranks.run(has_futures, 2, timeout=60)):
        average = [2 * rank + 0.5, 2 * rank + 1.5]
        assert values == [*average, *(2 * one for one in average), 1 - rank]
        assert given == {shim.FUTURE}


def by_older_names() -> tuple[list, set[str]]:
    rank, count = dist.get_rank(), dist.get_world_size()
    scattered, gathered = torch.empty(2), torch.empty(count)
    received = torch.empty(1)
    with shim.nccl_on_gloo() as given:
        group = dist.group.WORLD
        work = group._reduce_scatter_base(scattered, torch.arange(2.0 * count) + rank)
        work.get_future().wait()
        group._allgather_base(gathered, torch.tensor([float(rank)])).wait()
        sent = dist.isend(torch.tensor([float(rank)]), (rank + 1) % count)
        dist.irecv(received).get_future().wait()  # from any rank
        sent.wait()
    return [*scattered.tolist(), *gathered.tolist(), received.item()], given


def test_the_names_of_torch_2_12_and_receives_from_any_rank_have_futures() -> None:
    for rank, (values, given) in enumerate(ranks.run(by_older_names, 2, timeout=60)):
        assert values == [4.0 * rank + 1, 4.0 * rank + 3, 0.0, 1.0, 1.0 - rank]
        assert given == {shim.FUTURE}


def coalesces() -> tuple[list, set[str]]:
    rank = dist.get_rank()
    summed, gathered, scattered = torch.ones(3), [torch.zeros(1), torch.zeros(2)], torch.zeros(1)
    with shim.nccl_on_gloo() as given:
        with _coalescing_manager(device=torch.device("cpu"), async_ops=True) as coalesced:
            dist.all_gather(gathered, torch.full((1 + rank,), rank + 1.0), async_op=True)
            dist.reduce_scatter(scattered, [torch.ones(1), torch.ones(1) * 2], async_op=True)
        coalesced.wait()
        with _coalescing_manager(device=torch.device("cpu")):
            dist.all_reduce(summed)
    return [summed.tolist(), *(one.tolist() for one in gathered), scattered.item()], given


def test_calls_are_coalesced_on_a_device() -> None:
    for rank, (values, given) in enumerate(ranks.run(coalesces, 2, timeout=60)):
        assert values == [[2.0] * 3, [1.0], [2.0, 2.0], 2.0 * (rank + 1)]
        assert given == {shim.COALESCING, shim.UNEVEN}


def is_restored() -> tuple[str, bool]:
    before = dict(vars(dist.ProcessGroup))
    with pytest.raises(KeyError), shim.nccl_on_gloo():
        raise KeyError
    try:
        dist.all_gather(*uneven(dist.get_rank()))
    except RuntimeError as error:
        return str(error), dict(vars(dist.ProcessGroup)) == before
    return "nothing", False


def test_afterwards_gloo_is_as_it_was_also_after_an_error() -> None:
    for said, same in ranks.run(is_restored, 3, timeout=60):
        assert "invalid tensor size" in said
        assert same


def wrong_shape() -> str:
    outputs, mine = uneven(dist.get_rank())
    with shim.nccl_on_gloo(), pytest.raises(ValueError, match="the shape of its input") as caught:
        dist.all_gather(outputs, torch.cat([mine, mine]))
    return str(caught.value)


def test_an_input_that_does_not_fit_is_refused_on_the_rank_that_has_it() -> None:
    assert "rank 1 gathers (2, 3) into (1, 3)" in ranks.run(wrong_shape, 3, timeout=60)[1]
