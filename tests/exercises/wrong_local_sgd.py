"""Chapter 11: answers that a reader may give, each with a part of the message that must meet them."""

from __future__ import annotations

from typing import Any

import torch


def always_from_the_warm_up(steps: int, warmup_steps: int, period: int, from_warmup: bool) -> list[int]:
    return [s for s in range(steps) if s < warmup_steps or (s - warmup_steps) % period == 0]


def always_from_0(steps: int, warmup_steps: int, period: int, from_warmup: bool) -> list[int]:
    return [s for s in range(steps) if s < warmup_steps or s % period == 0]


def forgets_the_warm_up(steps: int, warmup_steps: int, period: int, from_warmup: bool) -> list[int]:
    origin = warmup_steps if from_warmup else 0
    return [s for s in range(warmup_steps, steps) if (s - origin) % period == 0]


def after_a_whole_period(steps: int, warmup_steps: int, period: int, from_warmup: bool) -> list[int]:
    origin = warmup_steps if from_warmup else 0
    return [s for s in range(steps) if s < warmup_steps or (s + 1 - origin) % period == 0]


def one_step_too_far(steps: int, warmup_steps: int, period: int, from_warmup: bool) -> list[int]:
    origin = warmup_steps if from_warmup else 0
    return [s for s in range(steps + 1) if s < warmup_steps or (s - origin) % period == 0]


def how_many(steps: int, warmup_steps: int, period: int, from_warmup: bool) -> Any:
    return warmup_steps + (steps - warmup_steps) // period


def _sent(nbytes: int, world_size: int, calls: float) -> float:
    return 2 * (world_size - 1) / world_size * nbytes * calls


def without_the_warm_up(nbytes: int, world_size: int, steps: int, warmup_steps: int, period: int) -> float:
    return _sent(nbytes, world_size, len(range(warmup_steps, steps, period)))


def rounds_down(nbytes: int, world_size: int, steps: int, warmup_steps: int, period: int) -> float:
    warm = min(steps, warmup_steps)
    return _sent(nbytes, world_size, warm + (steps - warm) // period)


def the_payload(nbytes: int, world_size: int, steps: int, warmup_steps: int, period: int) -> float:
    return nbytes * (min(steps, warmup_steps) + len(range(warmup_steps, steps, period)))


def over_all_ranks(nbytes: int, world_size: int, steps: int, warmup_steps: int, period: int) -> float:
    calls = min(steps, warmup_steps) + len(range(warmup_steps, steps, period))
    return 2 * (world_size - 1) * nbytes * calls


def _flat(params: list[Any]) -> torch.Tensor:
    return torch.cat([param.detach().reshape(-1) for param in params])


def _back(flat: torch.Tensor, params: list[Any]) -> None:
    parts = flat.split([param.numel() for param in params])
    for param, part in zip(params, parts):
        param.detach().copy_(part.view_as(param))


def forgets_to_divide(comm: Any, params: list[Any]) -> None:
    flat = _flat(params)
    comm.all_reduce(flat).wait()
    _back(flat, params)


def forgets_to_copy_back(comm: Any, params: list[Any]) -> None:
    flat = _flat(params) / comm.world_size
    comm.all_reduce(flat).wait()


def one_call_each(comm: Any, params: list[Any]) -> None:
    for param in params:
        mean = param.detach() / comm.world_size
        comm.all_reduce(mean).wait()
        param.detach().copy_(mean)


def gives_them_new_memory(comm: Any, params: list[Any]) -> None:
    flat = _flat(params) / comm.world_size
    comm.all_reduce(flat).wait()
    for param, part in zip(params, flat.split([param.numel() for param in params])):
        param.data = part.view_as(param)


def averages_the_gradients(comm: Any, params: list[Any]) -> None:
    flat = torch.cat([param.grad.reshape(-1) for param in params]) / comm.world_size
    comm.all_reduce(flat).wait()
    _back(flat, params)


def in_the_gradients_memory(comm: Any, params: list[Any]) -> None:
    for param in params:
        param.grad.copy_(param.detach() / comm.world_size)
    flat = torch.cat([param.grad.reshape(-1) for param in params])
    comm.all_reduce(flat).wait()
    _back(flat, params)


def under_autograd(comm: Any, params: list[Any]) -> None:
    for param in params:
        param /= comm.world_size


WRONG: list[tuple[str, Any, str]] = [
    (
        "local_sgd.equal_after",
        always_from_the_warm_up,
        r"has step 2. After it the ranks are not equal.*from step 0",
    ),
    ("local_sgd.equal_after", always_from_0, r"counted from step 2, the first after the warm-up"),
    ("local_sgd.equal_after", forgets_the_warm_up, r"leaves out step 0.*belongs to the warm-up"),
    ("local_sgd.equal_after", after_a_whole_period, r"leaves out step 0.*it ends with an average"),
    ("local_sgd.equal_after", one_step_too_far, r"the run has the steps 0 to"),
    ("local_sgd.equal_after", how_many, r"must return a list of steps"),
    ("local_sgd.bytes_sent", without_the_warm_up, r"2 of gradients in the warm-up"),
    (
        "local_sgd.bytes_sent",
        rounds_down,
        r"That is 3 all-reduces, not 2: 0 of gradients.*the last step is 8",
    ),
    ("local_sgd.bytes_sent", the_payload, r"2/2 of them|6/4 of them"),
    ("local_sgd.bytes_sent", over_all_ranks, r"All ranks together send"),
    ("local_sgd.average", forgets_to_divide, r"the sum of all ranks', not their mean"),
    ("local_sgd.average", forgets_to_copy_back, r"is what it was before"),
    ("local_sgd.average", one_call_each, r"makes 4 calls, 4 of them all-reduces"),
    ("local_sgd.average", gives_them_new_memory, r"other memory than before"),
    ("local_sgd.average", averages_the_gradients, r"is not the mean of all ranks'"),
    ("local_sgd.average", in_the_gradients_memory, r"has other gradients than before"),
    ("local_sgd.average", under_autograd, r"raised RuntimeError.*leaf"),
]
