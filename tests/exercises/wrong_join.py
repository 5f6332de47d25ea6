"""Chapter 10: answers that a reader may give, each with a part of the message that must meet them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def steps_with_old_gradients(comm: Any, local: Any, params: Any, owners: list[int], source: int) -> None:
    local.step()
    for param, owner in zip(params, owners):
        comm.broadcast(param.detach(), owner).wait()


def receives_after_the_step(comm: Any, local: Any, params: Any, owners: list[int], source: int) -> None:
    local.step()
    for param, owner in zip(params, owners):
        if owner == comm.rank:
            comm.recv(param.grad, source).wait()
    for param, owner in zip(params, owners):
        comm.broadcast(param.detach(), owner).wait()


def never_steps(comm: Any, local: Any, params: Any, owners: list[int], source: int) -> None:
    for param, owner in zip(params, owners):
        if owner == comm.rank:
            comm.recv(param.grad, source).wait()
    for param, owner in zip(params, owners):
        comm.broadcast(param.detach(), owner).wait()


def keeps_its_values(comm: Any, local: Any, params: Any, owners: list[int], source: int) -> None:
    for param, owner in zip(params, owners):
        if owner == comm.rank:
            comm.recv(param.grad, source).wait()
    local.step()


def receives_once_more(comm: Any, local: Any, params: Any, owners: list[int], source: int) -> None:
    for param, owner in zip(params, owners):
        if owner == comm.rank:
            comm.recv(param.grad, source).wait()
    comm.recv(params[0].grad, source).wait()
    local.step()
    for param, owner in zip(params, owners):
        comm.broadcast(param.detach(), owner).wait()


def divides_by_who_is_left(batches: Sequence[int], divide_by_initial_world_size: bool) -> list[float]:
    return [1.0] * max(batches)


def stops_with_the_first(batches: Sequence[int], divide_by_initial_world_size: bool) -> list[float]:
    return [1.0] * min(batches)


def mixes_up_the_two_ways(batches: Sequence[int], divide_by_initial_world_size: bool) -> list[float]:
    active = [sum(count > iteration for count in batches) for iteration in range(max(batches))]
    return [1.0 if divide_by_initial_world_size else n / len(batches) for n in active]


def lends_to_those_who_stay(loads: Sequence[int], batches: Sequence[int]) -> list[int]:
    return [
        4 * sum(load for load, count in zip(loads, batches) if count > iteration)
        for iteration in range(max(batches))
    ]


def lends_everything(loads: Sequence[int], batches: Sequence[int]) -> list[int]:
    return [4 * sum(loads) * any(count <= i for count in batches) for i in range(max(batches))]


def counts_elements(loads: Sequence[int], batches: Sequence[int]) -> list[int]:
    return [
        sum(load for load, count in zip(loads, batches) if count <= iteration)
        for iteration in range(max(batches))
    ]


def counts_elements_of_those_who_stay(loads: list[int], batches: list[int]) -> list[int]:
    return [sum(load for load, count in zip(loads, batches) if count > step) for step in range(max(batches))]


WRONG: list[tuple[str, Any, str]] = [
    ("join.shadow_step", steps_with_old_gradients, "receive the gradients of what it owns"),
    ("join.shadow_step", receives_after_the_step, "before the local step"),
    ("join.shadow_step", never_steps, "local.step"),
    ("join.shadow_step", keeps_its_values, "take part .*in every broadcast"),
    ("join.shadow_step", receives_once_more, "that this rank owns, no more"),
    ("join.averages", divides_by_who_is_left, "the others add zero"),
    ("join.averages", stops_with_the_first, "as long as any rank has data"),
    ("join.averages", mixes_up_the_two_ways, "DDP's averaged gradient is"),
    ("join.lent_bytes", lends_to_those_who_stay, "each rank that has left"),
    ("join.lent_bytes", lends_everything, "what it owns"),
    ("join.lent_bytes", counts_elements, "4 bytes an element"),
    ("join.averages", mixes_up_the_two_ways, "with True of all 3"),
    ("join.lent_bytes", counts_elements_of_those_who_stay, "gradients of its own.*That is in elements"),
]
