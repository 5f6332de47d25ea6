"""Chapter 4: answers that a reader may give, each with a part of the message that must meet them."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist

from zero_ref.plan.partition import Partition


def sends_nothing(local: Any, params: Any, owner_of_param: list[int]) -> None:
    local.step()


def never_steps(local: Any, params: Any, owner_of_param: list[int]) -> None:
    for param, owner in zip(params, owner_of_param):
        dist.broadcast(param.detach(), group_src=owner)


def sends_before_it_steps(local: Any, params: Any, owner_of_param: list[int]) -> None:
    for param, owner in zip(params, owner_of_param):
        dist.broadcast(param.detach(), group_src=owner)
    local.step()


def rank_0_sends_all(local: Any, params: Any, owner_of_param: list[int]) -> None:
    local.step()
    for param in params:
        dist.broadcast(param.detach(), group_src=0)


def averages(local: Any, params: Any, owner_of_param: list[int]) -> None:
    local.step()
    for param in params:
        dist.all_reduce(param.detach())
        param.detach().div_(dist.get_world_size())


def only_owners_call(local: Any, params: Any, owner_of_param: list[int]) -> None:
    local.step()
    for param, owner in zip(params, owner_of_param):
        if owner == dist.get_rank():
            dist.broadcast(param.detach(), group_src=owner)


def sends_gradients(local: Any, params: Any, owner_of_param: list[int]) -> None:
    local.step()
    for param, owner in zip(params, owner_of_param):
        dist.broadcast(param.grad, group_src=owner)


def others_wait_for_a_second_message(local: Any, params: Any, owner_of_param: list[int]) -> None:
    local.step()
    for param, owner in zip(params, owner_of_param):
        dist.broadcast(param.detach(), group_src=owner)
        if owner != dist.get_rank():
            dist.broadcast(param.detach(), group_src=owner)


def idle_ranks_return_early(local: Any, params: Any, owner_of_param: list[int]) -> None:
    if dist.get_rank() not in owner_of_param:
        return
    local.step()
    for param, owner in zip(params, owner_of_param):
        dist.broadcast(param.detach(), group_src=owner)


def adds_up_what_is_zero_but_on_the_owner(local: Any, params: Any, owner_of_param: list[int]) -> None:
    local.step()
    for param, owner in zip(params, owner_of_param):
        if owner != dist.get_rank():
            param.detach().zero_()
        dist.all_reduce(param.detach())


def averages_gradients_again(local: Any, params: Any, owner_of_param: list[int]) -> None:
    for param in params:
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()
    local.step()
    for param, owner in zip(params, owner_of_param):
        dist.broadcast(param.detach(), group_src=owner)


def sends_one_by_one(local: Any, params: Any, owner_of_param: list[int]) -> None:
    local.step()
    for param, owner in zip(params, owner_of_param):
        if owner != dist.get_rank():
            dist.recv(param.detach(), group_src=owner)
            continue
        for rank in range(dist.get_world_size()):
            if rank != owner:
                dist.send(param.detach(), group_dst=rank)


def never_waits(local: Any, params: Any, owner_of_param: list[int]) -> None:
    local.step()
    for param, owner in zip(params, owner_of_param):
        dist.broadcast(param.detach(), group_src=owner, async_op=True)


def waits_for_the_last_only(local: Any, params: Any, owner_of_param: list[int]) -> None:
    local.step()
    for param, owner in zip(params, owner_of_param):
        work = dist.broadcast(param.detach(), group_src=owner, async_op=True)
    work.wait()


def sends_clones(local: Any, params: Any, owner_of_param: list[int]) -> None:
    local.step()
    for param, owner in zip(params, owner_of_param):
        dist.broadcast(param.detach().clone(), group_src=owner)


def steps_an_optimizer_of_its_own(local: Any, params: Any, owner_of_param: list[int]) -> None:
    torch.optim.Adam(params, lr=0.1).step()
    for param, owner in zip(params, owner_of_param):
        dist.broadcast(param.detach(), group_src=owner)


def takes_the_wrong_argument(local: Any, params: Any, owner_of_param: list[int]) -> None:
    local.step()
    for param, owner in params:
        dist.broadcast(param, group_src=owner)


def _sent(partition: Partition) -> list[tuple[int, int]]:
    return [(rank, piece.param) for rank, slices in enumerate(partition.slices_of_rank) for piece in slices]


def the_owner_is_stale(partition: Partition, lost: int) -> list[list[int]]:
    owner, param = _sent(partition)[lost]
    return [[param] if rank == owner else [] for rank in range(partition.world_size)]


def everybody_is_stale(partition: Partition, lost: int) -> list[list[int]]:
    return [[_sent(partition)[lost][1]] for _ in range(partition.world_size)]


def in_registration_order(partition: Partition, lost: int) -> list[list[int]]:
    owner = partition.pieces_of_param[lost % len(partition.numels)][0][1]
    return [[] if rank == owner else [lost] for rank in range(partition.world_size)]


def only_ranks_that_own_something(partition: Partition, lost: int) -> list[list[int]]:
    owner, param = _sent(partition)[lost]
    return [
        [] if rank == owner else [param]
        for rank in range(partition.world_size)
        if partition.slices_of_rank[rank]
    ]


def all_that_this_owner_sends(partition: Partition, lost: int) -> list[list[int]]:
    owner, _ = _sent(partition)[lost]
    owned = sorted({piece.param for piece in partition.slices_of_rank[owner]})
    return [[] if rank == owner else owned for rank in range(partition.world_size)]


def _gathered(own: torch.Tensor) -> torch.Tensor:
    of_ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, own)
    return torch.stack(of_ranks)


def _unlike_rank_0(table: torch.Tensor) -> list[int]:
    return [int(number) for number in (table != table[0]).any(dim=0).nonzero().flatten()]


def compares_sums(params: Any) -> list[int]:
    sums = torch.stack([param.detach().nan_to_num().double().sum() for param in params])
    return _unlike_rank_0(_gathered(sums))


def compares_roughly(params: Any) -> list[int]:
    weights = [torch.arange(1.0, param.numel() + 1) for param in params]
    sums = [(param.detach().nan_to_num().view(-1) * weight).sum() for param, weight in zip(params, weights)]
    table = _gathered(torch.stack(sums))
    return [p for p in range(len(params)) if not torch.allclose(table[:, p], table[0, p], rtol=1e-4)]


def adds_up_over_ranks(params: Any) -> list[int]:
    weights = [torch.arange(1.0, param.numel() + 1).double() for param in params]
    own = [(param.detach().nan_to_num().view(-1) * weight).sum() for param, weight in zip(params, weights)]
    mean = torch.stack(own)
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    return [p for p in range(len(params)) if own[p] != mean[p]]


def hashes_the_numbers(params: Any) -> list[int]:
    own = torch.tensor([hash(tuple(param.detach().nan_to_num().view(-1).tolist())) for param in params])
    return _unlike_rank_0(_gathered(own))


def trips_over_nan(params: Any) -> list[int]:
    sums = torch.stack([param.detach().double().sum() for param in params])
    return _unlike_rank_0(_gathered(sums))


def sends_all_values(params: Any) -> list[int]:
    own = torch.cat([param.detach().view(-1) for param in params] * 4)
    _gathered(own)
    return []


def each_looks_at_rank_0(params: Any) -> list[int]:
    own = torch.tensor([zlib.crc32(param.detach().numpy().tobytes()) for param in params])
    first = own.clone()
    dist.broadcast(first, 0)
    return [p for p in range(len(params)) if own[p] != first[p]]


def only_rank_0_looks(params: Any) -> list[int]:
    return [] if dist.get_rank() else compares_sums(params)


def whether_they_differ(params: Any) -> list[bool]:
    own = torch.tensor([zlib.crc32(param.detach().numpy().tobytes()) for param in params])
    return [bool(differ) for differ in (_gathered(own) != own).any(dim=0)]


def mends_them(params: Any) -> list[int]:
    for param in params:
        param.detach().nan_to_num_()
    return compares_sums(params)


def everybody_is_stale_in_registration_order(partition: Partition, lost: int) -> list[list[int]]:
    return [[lost] for _ in range(partition.world_size)]


def the_owner_is_stale_in_registration_order(partition: Partition, lost: int) -> list[list[int]]:
    owner = partition.pieces_of_param[lost % len(partition.numels)][0][1]
    return [[lost] if rank == owner else [] for rank in range(partition.world_size)]


WRONG = [
    ("step.write_step", sends_nothing, r"after step 2 .* did not arrive"),
    ("step.write_step", never_steps, r"Was local\.step\(\) called"),
    ("step.write_step", sends_before_it_steps, r"sent before it was updated"),
    ("step.write_step", rank_0_sends_all, r"sent by its own owner"),
    ("step.write_step", averages, r"was added to the others' or averaged with them"),
    (
        "step.write_step",
        adds_up_what_is_zero_but_on_the_owner,
        r"values are right, but they came by all_reduce, which moves each value twice as often",
    ),
    ("step.write_step", averages_gradients_again, r"besides broadcast .* all_reduce.* averaged already"),
    ("step.write_step", sends_one_by_one, r"came by recv and send\. Use one broadcast"),
    ("step.write_step", never_waits, r"broadcast 0 \(counted from 0\) .* never waited for"),
    ("step.write_step", waits_for_the_last_only, r"Call \.wait\(\) on what broadcast returned"),
    ("step.write_step", sends_clones, r"A clone, or its gradient"),
    ("step.write_step", steps_an_optimizer_of_its_own, r"the optimizer to step is `local`"),
    (
        "step.write_step",
        only_owners_call,
        r"rank 0 calls broadcast from rank 0, rank 1 calls broadcast from rank 1\. Every",
    ),
    ("step.write_step", sends_gradients, r"did not arrive.* Pass param\.detach\(\)"),
    (
        "step.write_step",
        others_wait_for_a_second_message,
        r"rank 0 calls broadcast from rank 1, rank 1 calls broadcast from rank 0",
    ),
    ("step.write_step", idle_ranks_return_early, r"rank 1 calls broadcast from rank 1, rank 2 returns\."),
    ("step.write_step", takes_the_wrong_argument, r"\(local, params, .* raised \w+Error: .* \(line "),
    ("step.stale", the_owner_is_stale, r"Old are those that waited"),
    ("step.stale", everybody_is_stale, r"it needs no broadcast"),
    ("step.stale", in_registration_order, r"owner by owner"),
    ("step.stale", only_ranks_that_own_something, r"owns nothing receives too"),
    ("step.stale", all_that_this_owner_sends, r"one slice"),
    ("step.differing", compares_sums, r"two of its elements have changed places"),
    ("step.differing", compares_roughly, r"the last bit of one element"),
    ("step.differing", adds_up_over_ranks, r"returns \[\[\], \[\]\]|rank by rank"),
    ("step.differing", hashes_the_numbers, r"-0\.0 instead of 0\.0"),
    ("step.differing", trips_over_nan, r"Parameter 4 has the same NaN on all ranks"),
    ("step.differing", sends_all_values, r"send a digest of each"),
    ("step.differing", each_looks_at_rank_0, r"rank by rank\. A rank that looks only at rank 0"),
    ("step.differing", only_rank_0_looks, r"rank 0 calls all_gather, rank 1 returns\. Every rank makes"),
    ("step.differing", whether_they_differ, r"returned \[False, .*must return a list of numbers"),
    ("step.differing", mends_them, r"only to look"),
    ("step.stale", everybody_is_stale_in_registration_order, r"owner by owner.*it needs no broadcast"),
    ("step.stale", the_owner_is_stale_in_registration_order, r"owner by owner.*Old are those that waited"),
]
