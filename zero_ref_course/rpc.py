"""Chapter 18's graders: the messages of an iteration, a local step, a table on several workers."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from itertools import groupby, product
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn

from zero_ref.lab import ranks
from zero_ref_course import Answer, ExerciseFailed, call_text, exercise, shown
from zero_ref_course._cases import Form, check_cases, is_number
from zero_ref_course.predictions import prediction

# --------------------------------------------------------------------------------------- count the messages

WORKERS = 3
PLACEMENTS = [list(owners) for count in (1, 2, 3, 4) for owners in product(range(WORKERS), repeat=count)]


@exercise("rpc.messages")
def messages(answer: Answer) -> str:
    """Check the messages of an iteration for all placements of one to four layers on three workers."""
    placements = PLACEMENTS + answer.drawn(lambda rng: rng.choices(range(6), k=rng.randint(5, 12)))
    check_cases(
        answer,
        [(owners,) for owners in placements],
        list(map(_messages, placements)),
        Form(is_number, "It must return a number of messages.").returned_by,
        otherwise=_mistake_in_count,
        said=lambda theirs, right, owners: (
            f"{call_text(answer.name, owners)} returned {theirs}, and {right} messages are sent."
        ),
    )
    return f"{len(PLACEMENTS)} placements"


def _messages(owners: Sequence[int]) -> int:
    remote = [worker for worker in owners if worker]
    first_is_remote = owners[0] != 0  # its input is data, and gets no gradient
    return 6 * len(remote) - 2 * first_is_remote + 6 * len(set(remote))


def _mistake_in_count(theirs: int, right: int, owners: Sequence[int]) -> str:
    remote = [worker for worker in owners if worker]
    layers, workers = len(remote), len(set(remote))
    first = 2 * (owners[0] != 0)
    if not remote:
        return "All layers are the client's own, so there is nobody to ask or to tell."
    if theirs == _messages([worker for worker, _ in groupby(owners)]) != right:
        return "Two neighbours on one worker are still two calls, each with its way back."
    return {
        2 * right: "Is a message counted both where it is sent and where it is received?",
        right // 2: "Is each request counted, but not its reply?",
        right + first: "The first layer's input is data. No gradient of it is computed, so none comes back.",
        right
        - 4 * workers: "Is the end of the context counted? Either side tells the other, and is answered.",
        right - 2 * workers: (
            "Two for each worker are missing. Is the step counted, an order and its answer? And when the "
            "context ends, each of the two tells the other, and is answered."
        ),
        right - 6 * workers: "What comes after backward? The step, and the end of the context.",
        right - 2 * layers + first: (
            "In backward the gradient of the inputs is not the reply to that of the outputs: it comes as a "
            "request in the other direction. Each of the two has a reply without a tensor."
        ),
        6 * layers - first + 6 * layers: (
            "A worker with several layers has one local optimizer and one context: an order to step and the "
            "end of the context are for each worker, not for each layer."
        ),
        12 * (len(owners) - 1): "Only layers on other workers than the client's, worker 0, are asked for.",
    }.get(theirs, "Add up forward, backward, step and the end of the context, each request with its reply.")


# ----------------------------------------------------------------------------------------- the local step

WIDTH = 4
OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.Adam, {"lr": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.1}),
]
IN_CONTEXT = [{0, 1, 2}, {0, 2}, {1}, set(), {0, 1}]
"""The parameters, of three, that have a gradient in each context."""
STEPS = 3


@exercise("rpc.local_step", seconds=5.0, may_return_none=True, on_ranks=True)
def local_step(answer: Answer) -> str:
    """Check five contexts with gradients for some parameters only, then three iterations on real workers."""
    for optimizer_class, options in OPTIMIZERS:
        _rehearse(answer, optimizer_class, options)
    equal = ranks.run(_train_on_workers, 2, answer, backend="gloo", rpc=True, timeout=30.0)[0]
    for step, same in enumerate(equal):
        assert same, (
            f"with {answer.name} on two real workers the parameters are not plain Adam's after step "
            f"{step + 1}."
        )
    return (
        f"{len(IN_CONTEXT)} contexts with SGD, Adam and Adagrad; {STEPS} steps on real workers as plain Adam"
    )


def _rehearse(answer: Answer, optimizer_class: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(answer.seed)
    params, twins = ([nn.Parameter(torch.full((WIDTH,), 1.0)) for _ in range(3)] for _ in range(2))
    neighbour = nn.Parameter(torch.full((WIDTH,), 1.0))  # of another optimizer on the same worker
    optimizer = optimizer_class(params, **options)
    plain = optimizer_class(twins, **options)
    params[0].grad, neighbour.grad = torch.full((WIDTH,), 7.0), torch.full((WIDTH,), 7.0)
    grads = [param.grad for param in (*params, neighbour)]
    for number, having in enumerate(IN_CONTEXT):
        gradients = {params[i]: torch.rand(WIDTH, generator=generator) + 0.5 for i in sorted(having)}
        gradients[neighbour] = torch.ones(WIDTH)
        for i, twin in enumerate(twins):
            twin.grad = gradients[params[i]].clone() if i in having else None
        before, start = [param.detach().clone() for param in params], copy.deepcopy((plain, twins))
        plain.step()
        answer(optimizer, list(params), dict(gradients))
        where = (
            f"{optimizer_class.__name__}, context {number} with gradients for parameters {sorted(having)}: "
        )
        for i, (param, twin) in enumerate(zip(params, twins)):
            if not torch.equal(param, twin):
                gradient = gradients[params[i]] if i in having else None
                raise AssertionError(where + _mistake_in_step(i, param, before[i], gradient, grads[i], start))
        assert bool((neighbour == 1).all()), (
            f"{where}a parameter that is not in `params` has changed. Its gradient is in the context, but "
            "its optimizer is another one."
        )
        for i, (param, grad) in enumerate(zip((*params, neighbour), grads)):
            assert param.grad is grad, (
                f"{where}.grad of {'the neighbour' if i == len(params) else f'parameter {i}'} is not what it "
                "was before. Other code on this worker may use it: put back the same tensor, or None."
            )
        assert grads[0] is not None
        assert bool((grads[0] == 7).all()), f"{where}the tensor in .grad was overwritten. Assign another one."


def _mistake_in_step(
    i: int,
    param: torch.Tensor,
    before: torch.Tensor,
    gradient: torch.Tensor | None,
    in_grad: torch.Tensor | None,
    start: tuple[torch.optim.Optimizer, list[nn.Parameter]],
) -> str:
    """Describe which wrong gradient moved the parameter; `in_grad` is what `.grad` held before the step."""

    def moved_by(other: torch.Tensor | None) -> bool:
        optimizer, params = copy.deepcopy(start)
        params[i].grad = other
        optimizer.step()
        return other is not None and torch.equal(params[i], param)

    if gradient is None:
        why = "For an optimizer None is not the same as zeros, nor as what an earlier step left in .grad"
        if moved_by(torch.zeros(WIDTH)):
            why = "It was stepped with zeros. For an optimizer None is not the same as zeros"
        elif moved_by(in_grad):
            why = "It was stepped with what was in .grad before. An optimizer steps what an earlier step left"
        return (
            f"parameter {i} has no gradient in this context, and moved. {why}: only None leaves the "
            "parameter and its state alone."
        )
    if torch.equal(param, before):
        return f"parameter {i} has not moved. Is optimizer.step() called, after .grad is set?"
    said = f"parameter {i} is not where the plain optimizer moves it with this gradient."
    if moved_by(in_grad):
        return f"{said} It was stepped with what was in .grad before: set .grad first, then step."
    if moved_by(None if in_grad is None else in_grad + gradient):
        return f"{said} The gradient was added to what was in .grad before: put it in its place."
    if torch.allclose(param, before - start[0].defaults["lr"] * gradient):
        return f"{said} This is plain descent: the step is the optimizer's, which keeps a state."
    return f"{said} Call optimizer.step() once, with this context's gradients in .grad."


_layers: dict[int, nn.Linear] = {}  # on a worker: its own
_local: list[Any] = []  # on a worker: the reader's function, and an optimizer with its parameters


def _train_on_workers(answer: Answer) -> list[bool]:
    """On worker 0: whether all parameters equal plain Adam's after each step of two layers on two workers."""
    layer = _new_layer(dist.get_rank())
    _layers[dist.get_rank()] = layer
    params = list(layer.parameters())
    _local[:] = [answer, torch.optim.Adam(params, lr=0.1), params]
    dist.barrier()
    equal: list[bool] = []
    if dist.get_rank():
        return equal
    twin = nn.Sequential(_new_layer(0), nn.Tanh(), _new_layer(1), nn.Tanh())
    plain = torch.optim.Adam(twin.parameters(), lr=0.1)
    for step in range(STEPS):
        x = torch.rand(3, WIDTH, generator=torch.Generator().manual_seed(step))
        plain.zero_grad()
        twin(x).square().sum().backward()
        plain.step()
        with dist_autograd.context() as context_id:
            loss = _at(1, _forward, 1, _forward(0, x)).square().sum()
            dist_autograd.backward(context_id, [loss])  # type: ignore[attr-defined]
            for worker in (0, 1):
                _at(worker, _call_local_step, context_id)
        ours = [value for worker in (0, 1) for value in _at(worker, _values)]
        equal.append(all(map(torch.equal, ours, twin.parameters())))
    return equal


def _call_local_step(context_id: int) -> None:
    answer, optimizer, params = _local
    answer(optimizer, list(params), dist_autograd.get_gradients(context_id))  # type: ignore[attr-defined]


# ----------------------------------------------------------------------------- a table on several workers

LOOK_UPS: list[tuple[int, list[int]]] = [
    (2, [2, 3]),
    (2, [0, 1, 2, 3]),
    (1, [2, 0, 1]),
    (2, [5, 0, 3, 4]),
    (3, [7, 7, 2, 7]),
    (3, [9, 3, 0]),
    (3, [4, 8, 1, 0, 8, 5]),
    (5, [23]),
]
"""The number of workers, and the rows of a batch: in another order, repeated, all on one of three workers."""


@exercise("rpc.look_up", on_ranks=True, function="rows_of")
def look_up(answer: Answer) -> str:
    """Check the rows of a table that is divided among workers, first on paper, then on three real ones."""
    for workers, ids in LOOK_UPS + answer.drawn(_drawn_ids):
        _check_on_paper(answer, workers, ids)
    ids = LOOK_UPS[6][1]
    returned = ranks.run(_look_up_on_workers, WORKERS, answer, ids, backend="gloo", rpc=True)[0]
    _check_looked_up(answer.name, WORKERS, ids, [], returned)
    return f"{len(LOOK_UPS)} look-ups on paper; {len(ids)} rows from {WORKERS} real workers"


def _check_on_paper(answer: Answer, workers: int, ids: list[int]) -> None:
    table, asked = _table(workers, max(ids)), list[tuple[int, list[int]]]()

    def ask(worker: int, rows: list[int]) -> torch.Tensor:
        try:
            _check_asked(answer.name, workers, ids, asked, worker, rows)
        except AssertionError as failure:
            raise ExerciseFailed(str(failure)) from None  # which passes through the answer
        return table[worker][list(rows)]

    returned = answer(list(ids), workers, ask)
    _check_looked_up(answer.name, workers, ids, asked, returned)


def _drawn_ids(rng: random.Random) -> tuple[int, list[int]]:
    return rng.randint(1, 6), rng.choices(range(40), k=rng.randint(1, 12))


def _row(number: int) -> list[float]:
    return [float(number), number + 0.5]


def _table(workers: int, last: int) -> list[torch.Tensor]:
    """The rows of each worker: row r is on worker r % workers, at place r // workers."""
    rows = -(-(last + 1) // workers)
    return [
        torch.tensor([_row(place * workers + worker) for place in range(rows)]) for worker in range(workers)
    ]


def _check_asked(
    name: str, workers: int, ids: list[int], asked: list[tuple[int, list[int]]], worker: Any, rows: Any
) -> None:
    call = f"{name}({ids}, {workers}, ask) calls ask({shown(worker)}, {shown(rows)})"
    known = isinstance(worker, int) and not isinstance(worker, bool) and 0 <= worker < workers
    assert known, f"{call}. There are the workers 0 to {workers - 1}."
    are_rows = isinstance(rows, (list, tuple)) and all(type(row) is int for row in rows)
    assert are_rows, f"{call}. The second argument is a list of whole numbers."
    assert rows, f"{call}. A worker that has none of the rows need not be asked: leave the call out."
    places = sorted({number // workers for number in ids if number % workers == worker})
    strange = [row for row in rows if row not in places]
    if strange:
        numbers = [number for number in ids if number % workers == worker]
        if set(rows) <= set(numbers):
            why = f"A worker counts its own rows: row {rows[0]} of the table is its row {rows[0] // workers}."
        elif not numbers:
            why = f"None of the rows is on worker {worker}: row r is on worker r % {workers}."
        else:
            why = (
                f"Of what is looked up, worker {worker} has row {', '.join(map(str, numbers))} of the table, "
                f"its own {', '.join(map(str, places))}."
            )
        raise AssertionError(f"{call}. {why}")
    assert len(set(rows)) == len(rows), (
        f"{call}. A row that is looked up twice is sent twice. Ask for it once, and use it twice."
    )
    assert worker not in [before for before, _ in asked], (
        f"{call}, and has asked worker {worker} before. Ask each worker once, for all its rows: a message "
        "costs more than a row."
    )
    asked.append((worker, list(rows)))


def _check_looked_up(
    name: str, workers: int, ids: list[int], asked: Sequence[tuple[int, list[int]]], returned: Any
) -> None:
    call = f"{name}({ids}, {workers}, ask)"
    assert isinstance(returned, torch.Tensor), f"{call} returned {shown(returned)}. It must return a tensor."
    right = torch.tensor([_row(number) for number in ids])
    assert returned.ndim == 2, (
        f"{call} returned a tensor of shape {tuple(returned.shape)}; it must be {tuple(right.shape)}."
    )
    if returned.shape == right.shape and torch.equal(returned, right):
        return
    numbers = [int(number) for number in returned[:, 0].tolist()]
    in_turn = [place * workers + worker for worker, places in asked for place in places]
    if len(set(ids)) < len(ids) and len(numbers) < len(ids):
        why = "A row that is looked up twice has two places in the result."
    elif numbers == in_turn or sorted(numbers) == sorted(ids):
        why = "Those are the right rows in another order: they must stand in the order of `ids`."
    else:
        why = "They must be the rows of `ids`, in that order."
    raise AssertionError(f"{call} returned the rows {numbers}. {why}")


def _look_up_on_workers(answer: Answer, ids: list[int]) -> Any:
    """On worker 0: return the answer's value."""
    _tables[:] = [_table(WORKERS, max(ids))[dist.get_rank()]]
    dist.barrier()
    return None if dist.get_rank() else answer(list(ids), WORKERS, _ask_worker)


def _ask_worker(worker: int, rows: list[int]) -> torch.Tensor:
    found: torch.Tensor = _at(worker, _rows_here, list(rows))
    return found


_tables: list[torch.Tensor] = []  # on a worker: its rows


def _rows_here(rows: list[int]) -> torch.Tensor:
    return _tables[0][rows]


# --------------------------------------------------------------------------------------------- small parts


def _new_layer(number: int) -> nn.Linear:
    generator = torch.Generator().manual_seed(number)
    layer = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        for param in layer.parameters():
            param.copy_(torch.rand(param.shape, generator=generator) - 0.5)
    return layer


def _forward(number: int, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(_layers[number](x))


def _values() -> list[torch.Tensor]:
    return [param.detach().clone() for param in _local[2]]


def _at(worker: int, function: Any, *args: Any) -> Any:
    if worker == dist.get_rank():
        return function(*args)
    return rpc.rpc_sync(f"worker{worker}", function, args=args)


# --------------------------------------------------------------------------------------- predictions


@prediction(
    "rpc.messages",
    "Two workers, a layer on each: how many messages has an iteration, to the end of its context?",
    choices=("6 messages", "8 messages", "10 messages", "12 messages", "16 messages"),
)
def _messages_of_two() -> str:
    return f"{_messages([0, 1])} messages"


@prediction("rpc.clients", "Where is w after three rounds of two steps made at the same time?")
def _after_three_rounds() -> float:
    w = 8.0
    for _ in range(3):
        w -= 2 * 1.25 * w  # both gradients are computed before the first step
    return w


@prediction(
    "rpc.break_even",
    "One layer of width 4,096 on each of two workers: from how many rows on does ZeRO send less?",
    unit="rows",
)
def _rows_of_break_even() -> float:
    width = 4096
    psi = 2 * 4 * (width * width + width)
    return 3 * psi / (4 * 4 * width)
