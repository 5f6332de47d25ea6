"""Chapter 12: answers that a reader may give, each with a part of the message that must meet them."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch


def _counts(owners: list[int]) -> tuple[int, int, int]:
    remote = [worker for worker in owners if worker]
    return len(remote), len(set(remote)), 2 * (owners[0] != 0)


def requests_only(owners: list[int]) -> int:
    layers, workers, first = _counts(owners)
    return (6 * layers - first + 6 * workers) // 2


def both_ends(owners: list[int]) -> int:
    layers, workers, first = _counts(owners)
    return 2 * (6 * layers - first + 6 * workers)


def data_get_gradients(owners: list[int]) -> int:
    layers, workers, _ = _counts(owners)
    return 6 * layers + 6 * workers


def contexts_end_by_themselves(owners: list[int]) -> int:
    layers, workers, first = _counts(owners)
    return 6 * layers - first + 2 * workers


def forgets_the_step(owners: list[int]) -> int:
    layers, workers, first = _counts(owners)
    return 6 * layers - first + 4 * workers


def stops_after_backward(owners: list[int]) -> int:
    layers, _, first = _counts(owners)
    return 6 * layers - first


def backward_like_forward(owners: list[int]) -> int:
    layers, workers, _ = _counts(owners)
    return 4 * layers + 6 * workers


def all_for_each_layer(owners: list[int]) -> int:
    layers, _, first = _counts(owners)
    return 12 * layers - first


def neighbours_are_one_call(owners: list[int]) -> int:
    layers, workers, first = _counts([worker for worker, _ in groupby(owners)])
    return 6 * layers - first + 6 * workers


def all_layers_but_one(owners: list[int]) -> int:
    return 12 * (len(owners) - 1)


def some_number(owners: list[int]) -> Any:
    return 12.5


def keeps_stale_gradients(optimizer: Any, params: list[Any], gradients: dict[Any, Any]) -> None:
    before = [param.grad for param in params]
    for param in params:
        if param in gradients:
            param.grad = gradients[param]
    optimizer.step()
    for param, grad in zip(params, before):
        param.grad = grad


def zeros_for_none(optimizer: Any, params: list[Any], gradients: dict[Any, Any]) -> None:
    before = [param.grad for param in params]
    for param in params:
        param.grad = gradients.get(param, torch.zeros_like(param))
    optimizer.step()
    for param, grad in zip(params, before):
        param.grad = grad


def leaves_its_gradients(optimizer: Any, params: list[Any], gradients: dict[Any, Any]) -> None:
    for param in params:
        param.grad = gradients.get(param)
    optimizer.step()


def clears_gradients(optimizer: Any, params: list[Any], gradients: dict[Any, Any]) -> None:
    for param in params:
        param.grad = gradients.get(param)
    optimizer.step()
    optimizer.zero_grad()


def overwrites_the_tensor(optimizer: Any, params: list[Any], gradients: dict[Any, Any]) -> None:
    before = [param.grad for param in params]
    for param in params:
        if param in gradients and param.grad is not None:
            param.grad.copy_(gradients[param])
        else:
            param.grad = gradients.get(param)
    optimizer.step()
    for param, grad in zip(params, before):
        param.grad = grad


def never_steps(optimizer: Any, params: list[Any], gradients: dict[Any, Any]) -> None:
    for param in params:
        param.grad = gradients.get(param)


def plain_descent(optimizer: Any, params: list[Any], gradients: dict[Any, Any]) -> None:
    for param in params:
        if param in gradients:
            param.detach().sub_(0.1 * gradients[param])


def steps_whatever_has_one(optimizer: Any, params: list[Any], gradients: dict[Any, Any]) -> None:
    before = [param.grad for param in params]
    for param in params:
        param.grad = gradients.get(param)
    optimizer.step()
    for param in gradients:
        if not any(param is own for own in params):
            param.detach().sub_(0.1 * gradients[param])
    for param, grad in zip(params, before):
        param.grad = grad


def _found(ids: list[int], workers: int, ask: Any) -> dict[int, torch.Tensor]:
    found = {}
    for worker in range(workers):
        if wanted := sorted({row for row in ids if row % workers == worker}):
            found.update(zip(wanted, ask(worker, [row // workers for row in wanted])))
    return found


def one_message_for_each_row(ids: list[int], workers: int, ask: Any) -> torch.Tensor:
    return torch.cat([ask(row % workers, [row // workers]) for row in ids])


def asks_everybody(ids: list[int], workers: int, ask: Any) -> torch.Tensor:
    parts = [ask(w, sorted({row // workers for row in ids if row % workers == w})) for w in range(workers)]
    return torch.cat(parts)


def asks_twice_for_a_row(ids: list[int], workers: int, ask: Any) -> torch.Tensor:
    found = {}
    for worker in sorted({row % workers for row in ids}):
        wanted = [row for row in ids if row % workers == worker]
        found.update(zip(wanted, ask(worker, [row // workers for row in wanted])))
    return torch.stack([found[row] for row in ids])


def by_the_tables_numbers(ids: list[int], workers: int, ask: Any) -> torch.Tensor:
    workers_asked = sorted({row % workers for row in ids})
    return torch.cat([ask(w, sorted({row for row in ids if row % workers == w})) for w in workers_asked])


def in_blocks(ids: list[int], workers: int, ask: Any) -> torch.Tensor:
    size = -(-(max(ids) + 1) // workers)
    asked = sorted({row // size for row in ids})
    return torch.cat([ask(w, sorted({row % size for row in ids if row // size == w})) for w in asked])


def worker_by_worker(ids: list[int], workers: int, ask: Any) -> torch.Tensor:
    return torch.stack(list(_found(ids, workers, ask).values()))


def sorted_by_row(ids: list[int], workers: int, ask: Any) -> torch.Tensor:
    found = _found(ids, workers, ask)
    return torch.stack([found[row] for row in sorted(ids)])


def each_row_once(ids: list[int], workers: int, ask: Any) -> torch.Tensor:
    found = _found(ids, workers, ask)
    return torch.stack([found[row] for row in dict.fromkeys(ids)])


def a_list_of_rows(ids: list[int], workers: int, ask: Any) -> Any:
    found = _found(ids, workers, ask)
    return [found[row] for row in ids]


def workers_from_1(ids: list[int], workers: int, ask: Any) -> torch.Tensor:
    return torch.cat([ask(row % workers + 1, [row // workers]) for row in ids])


def adds_to_what_is_there(optimizer: Any, params: list[Any], gradients: dict[Any, Any]) -> None:
    before = [param.grad for param in params]
    for param in params:
        had = torch.zeros_like(param) if param.grad is None else param.grad
        param.grad = had + gradients[param] if param in gradients else None
    optimizer.step()
    for param, grad in zip(params, before):
        param.grad = grad


WRONG = [
    ("rpc.messages", requests_only, r"counted, but not its reply"),
    ("rpc.messages", both_ends, r"both where it is sent and where it is received"),
    ("rpc.messages", data_get_gradients, r"\[1\].*first layer's input is data"),
    ("rpc.messages", contexts_end_by_themselves, r"the end of the context counted"),
    ("rpc.messages", neighbours_are_one_call, r"neighbours on one worker are still two calls"),
    ("rpc.messages", forgets_the_step, r"Is the step counted"),
    ("rpc.messages", stops_after_backward, r"What comes after backward"),
    ("rpc.messages", backward_like_forward, r"in the other direction"),
    ("rpc.messages", all_for_each_layer, r"for each worker, not for each layer"),
    ("rpc.messages", all_layers_but_one, r"other workers than the client's"),
    ("rpc.messages", some_number, r"nobody to ask"),
    ("rpc.local_step", keeps_stale_gradients, r"parameter 0 has no gradient.*an earlier step left"),
    ("rpc.local_step", zeros_for_none, r"parameter 1 has no gradient in this context, and moved"),
    ("rpc.local_step", leaves_its_gradients, r"\.grad of parameter 0 is not what it was"),
    ("rpc.local_step", clears_gradients, r"put back the same tensor"),
    ("rpc.local_step", overwrites_the_tensor, r"the tensor in \.grad was overwritten"),
    ("rpc.local_step", never_steps, r"parameter 0 has not moved"),
    ("rpc.local_step", plain_descent, r"not where the plain optimizer moves it"),
    ("rpc.local_step", steps_whatever_has_one, r"is not in `params` has changed"),
    ("rpc.look_up", one_message_for_each_row, r"has asked worker 0 before"),
    ("rpc.look_up", asks_everybody, r"none of the rows need not be asked|in the order of `ids`"),
    ("rpc.look_up", asks_twice_for_a_row, r"looked up twice is sent twice"),
    ("rpc.look_up", by_the_tables_numbers, r"A worker counts its own rows: row \d of the table is its row"),
    ("rpc.look_up", in_blocks, r"worker 1 has row 3 of the table, its own 1"),
    ("rpc.look_up", worker_by_worker, r"in the order of `ids`"),
    (
        "rpc.look_up",
        sorted_by_row,
        r"returned the rows \[0, 1, 2\]\. Those are the right rows in another order",
    ),
    ("rpc.look_up", each_row_once, r"looked up twice has two places"),
    ("rpc.look_up", a_list_of_rows, r"must return a tensor"),
    ("rpc.look_up", workers_from_1, r"There are the workers 0 to 1"),
    ("rpc.local_step", keeps_stale_gradients, r"parameter 0 .* stepped with what was in \.grad before"),
    ("rpc.local_step", zeros_for_none, r"It was stepped with zeros"),
    ("rpc.local_step", plain_descent, r"This is plain descent"),
    ("rpc.local_step", adds_to_what_is_there, r"added to what was in \.grad before"),
]
