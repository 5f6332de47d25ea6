"""Chapter 4: answers that a reader may give, each with a part of the message that must meet them."""

from __future__ import annotations

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
]
