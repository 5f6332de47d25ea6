"""Graders of chapter 13, matrices: may every parameter be cut?"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import normalize
from torch.optim import SGD, Adafactor, Adagrad, Adamax, AdamW, Muon, NAdam, Optimizer, RAdam, RMSprop
from torch.utils.flop_counter import FlopCounterMode

from zero_ref.plan.choice import loads_under, plan_partition
from zero_ref.plan.partition import ParamSpec
from zero_ref.plan.rules import newton_schulz_operations
from zero_ref.simulator.ledger import state_bytes_of_rank
from zero_ref.simulator.models import matrices_whole, shapes, specs
from zero_ref_course import Answer, ExerciseFailed, call_text, exercise, shown
from zero_ref_course._cases import Form, check_cases, is_whole
from zero_ref_course.predictions import prediction

Shapes = Sequence[tuple[int, int]]

# ------------------------------------------------------------------------------------ 13.1 may it be cut?


class _Scaled(Optimizer):
    """Descends by the gradient, scaled by `scaled`."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(group["lr"] * self.scaled(param, param.grad))

    def scaled(self, param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class RowsAndColumns(_Scaled):
    """Divides by a mean for each row and one for each column; other tensors are updated elementwise."""

    def scaled(self, param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        if grad.ndim < 2:
            return grad
        squares = grad.square()
        return grad / (squares.mean(0, keepdim=True) * squares.mean(1, keepdim=True)).sqrt().sqrt()


class NormalizedRows(_Scaled):
    """Gives the gradient of each row the length 1."""

    def scaled(self, param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return normalize(grad, dim=-1)


class WarmsUp(_Scaled):
    """Plain in the first step, with a gradient of length 1 from the second step on."""

    def scaled(self, param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return grad if self.steps == 1 else grad / grad.norm()


class ClipsTogether(_Scaled):
    """Divides by the norm of all the gradients that it has."""

    def scaled(self, param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        grads = [each.grad.flatten() for group in self.param_groups for each in group["params"]]
        return grad / torch.cat(grads).norm()


class LAMB(_Scaled):
    """Scales the update of a tensor by the norm of its values over that of its gradient, as LAMB does."""

    def scaled(self, param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return param.norm() / grad.norm() * grad


class _Trial(NamedTuple):
    optimizer_class: type[Optimizer]
    options: dict[str, Any]
    may_be_cut: bool
    reason: str
    """What to say if the answer is the opposite."""


TRIALS: list[_Trial] = [
    _Trial(
        AdamW,
        {"lr": 0.1},
        True,
        "It updates each element from that element alone. Give the pieces the same values and gradients as "
        "the whole, in every step, and cut at a multiple of 64 elements.",
    ),
    _Trial(SGD, {"lr": 0.1, "momentum": 0.9}, True, "It updates each element from that element alone."),
    _Trial(Muon, {"lr": 0.1}, False, "It refuses pieces of one dimension."),
    _Trial(Adafactor, {"lr": 0.1}, False, "It keeps a mean for each row and for each column."),
    _Trial(
        RowsAndColumns,
        {"lr": 0.1},
        False,
        "It scales by the means of rows and columns. Step a matrix, and one whose gradient is not the same "
        "everywhere.",
    ),
    _Trial(
        NormalizedRows,
        {"lr": 0.1},
        False,
        "It gives each row the length 1. A cut may fall inside a row, so the trial has to make such a cut.",
    ),
    _Trial(WarmsUp, {"lr": 0.1}, False, "Its first step is plain, the others are not: make several steps."),
    _Trial(
        ClipsTogether,
        {"lr": 0.1},
        False,
        "It divides by the norm of all gradients that it has. Two owners have two optimizers: give each "
        "piece one of its own.",
    ),
    _Trial(
        LAMB,
        {"lr": 1e-4},
        False,
        "It scales by the norm of the whole tensor, and those of the pieces differ by a few percent. At this "
        "learning rate that is a small difference: allow for none, since there is no rounding to allow for.",
    ),
]
"""The likeliest mistakes each give a wrong verdict about one of the last five."""


ELEMENTWISE = [
    _Trial(each, {"lr": 0.1}, True, "It updates each element from that element alone.")
    for each in (Adagrad, Adamax, NAdam, RAdam, RMSprop)
]
"""Hidden ones."""

VERDICT = Form(lambda value: isinstance(value, bool), "It must return True or False.")


@exercise("matrices.may_be_cut", seconds=20.0, forbids=("zero_ref.shard.coupling.updates_elementwise",))
def may_be_cut(answer: Answer) -> str:
    """The verdict about four optimizers of torch and five that are made to be mistaken for elementwise."""
    for trial in TRIALS + answer.drawn(lambda rng: rng.choice(ELEMENTWISE), 3):
        name = trial.optimizer_class.__name__
        call = f"{answer.name}({name}, ...)"
        try:
            verdict = VERDICT.returned_by(answer, trial.optimizer_class, trial.options, call=call)
        except ExerciseFailed as failure:
            if trial.optimizer_class is not Muon or "Muon only supports" not in str(failure):
                raise
            raise ExerciseFailed(
                f"{call} raised ValueError: Muon only supports 2D parameters. {trial.reason} That is "
                "an answer, and no failure of the trial: catch the error, and return False."
            ) from None
        assert verdict == trial.may_be_cut, (
            f"{answer.name} says that {name} may {'' if verdict else 'not '}be cut. {trial.reason}"
        )
    names = ", ".join(trial.optimizer_class.__name__ for trial in TRIALS)
    return f"the right verdict about {names}"


# ------------------------------------------------------------------------------ 13.2 the cost of a matrix

SIZES: list[tuple[int, int, int]] = [(2, 3, 1), (8, 8, 1), (4, 32, 3), (32, 4, 3), (48, 64, 5), (96, 16, 2)]
"""Rows, columns and iterations; small, because the check counts what Muon does with them."""


@exercise("matrices.operations", forbids=("zero_ref.plan.rules.newton_schulz_operations",))
def operations(answer: Answer) -> str:
    """The operations that are counted in a step of torch.optim.Muon; for large matrices the formula."""
    drawn = answer.drawn(lambda rng: (rng.randint(2, 60), rng.randint(2, 60), rng.randint(1, 5)))
    counted = [_counted_in_muon(*case) for case in SIZES + drawn]
    _check_operations(answer, SIZES + drawn, counted, "torch.optim.Muon makes")
    large = [(1024, 1024, 5), (64, 16384, 5), (16384, 64, 5)]
    _check_operations(answer, large, [_cost(case[:2]) for case in large], "the formula gives")
    return f"as counted in {len(SIZES)} steps of torch.optim.Muon"


def _counted_in_muon(rows: int, columns: int, iterations: int) -> int:
    matrix = nn.Parameter(torch.ones(rows, columns))
    matrix.grad = torch.ones(rows, columns)
    muon = Muon([matrix], ns_steps=iterations)
    with FlopCounterMode(display=False) as counter:
        muon.step()
    return int(counter.get_total_flops())


def _check_operations(
    answer: Answer, cases: Sequence[tuple[int, int, int]], rights: Sequence[int], who: str
) -> None:
    check_cases(
        answer,
        cases,
        rights,
        Form(is_whole, "It must return a whole number: use //, not /.").returned_by,
        otherwise=_mistake_in_operations,
        said=lambda number, right, *case: (
            f"{call_text(answer.name, *case)} returned {number:,}, and {who} {right:,}."
        ),
    )


def _mistake_in_operations(number: int, right: int, rows: int, columns: int, iterations: int) -> str:
    m, n = sorted((rows, columns))
    return {
        right // iterations: "That is one iteration. Each one makes the three products again.",
        iterations * (4 * m * m * n): "The product of A with itself is missing, which is of m x m matrices.",
        iterations * (2 * m * m * n + 2 * m**3): (
            "One product is missing: X with its transpose and B with X cost the same."
        ),
        iterations * (2 * m * m * n + m**3): (
            "These are the multiplications alone. Each one is followed by an addition: count both."
        ),
        iterations * (4 * n * n * m + 2 * n**3): (
            "This multiplies n x n matrices. Muon transposes a matrix with more rows than columns, so that "
            "the smaller side is m."
        ),
    }.get(number, "Count the multiplications and additions of the three products.")


# ------------------------------------------------------------------------------------ 13.3 balance by cost


def _gpt(model: str) -> Shapes:
    matrices = (param.shape for param in matrices_whole(specs(shapes(model))) if param.whole)
    return [(rows, columns) for rows, columns in matrices]


def _cases() -> list[tuple[Shapes, int]]:
    rng = random.Random(3)
    drawn = [_drawn_case(rng) for _ in range(6)]
    return [
        ([(128, 128)] + 4 * [(16, 1024)], 2),
        (4 * [(1024, 16)] + [(128, 128)], 2),
        ([(64, 64)], 3),
        *drawn,
        *[_drawn_alike(rng) for _ in range(6)],
        (_gpt("gpt2"), 8),
        (_gpt("llama3-8b"), 64),
    ]


def _drawn_case(rng: random.Random) -> tuple[Shapes, int]:
    sides = (16, 64, 128, 1024)
    return [(rng.choice(sides), rng.choice(sides)) for _ in range(rng.randint(2, 12))], rng.randint(1, 5)


def _drawn_alike(rng: random.Random) -> tuple[Shapes, int]:
    """Sides so close to each other that both terms of the cost decide."""
    sides = (96, 112, 128, 144, 160)
    return [(rng.choice(sides), rng.choice(sides)) for _ in range(rng.randint(7, 12))], rng.randint(2, 4)


@exercise(
    "matrices.by_cost",
    forbids=(
        "zero_ref.plan.choice.plan_partition",
        "zero_ref.plan.rules.sorted_greedy",
    ),
)
def by_cost(answer: Answer) -> str:
    """Owners under which no rank has more operations than the fullest has when the costliest goes first."""
    cases = _cases() + answer.drawn(_drawn_case)
    owners = [_owners(answer, *case) for case in cases]
    fullest = [max(_loads(*case, ranks)) for case, ranks in zip(cases, owners)]
    aims = [max(_loads(*case, _packed(*case))) for case in cases]
    if all(mine <= aim for mine, aim in zip(fullest, aims)):
        return f"{len(cases)} lists of matrices on 1 to {max(n for _, n in cases)} ranks"
    for mistake, rule in _MISTAKES.items():
        if fullest == [max(_loads(*case, rule(*case))) for case in cases]:
            raise AssertionError(mistake)
    first = next(i for i in range(len(cases)) if fullest[i] > aims[i])
    raise AssertionError(
        f"{call_text(answer.name, *cases[first])} returned {shown(owners[first])}: the fullest rank has "
        f"{fullest[first]:,} operations, and {aims[first]:,} if the costliest matrix that is left always "
        "goes to the rank with the fewest operations."
    )


def _owners(answer: Answer, matrices: Shapes, world_size: int) -> list[int]:
    call = call_text(answer.name, matrices, world_size)
    returned = answer(list(matrices), world_size)
    are_ranks = isinstance(returned, list) and all(
        isinstance(owner, int) and 0 <= owner < world_size for owner in returned
    )
    is_complete = are_ranks and len(returned) == len(matrices)
    assert is_complete, (
        f"{call} returned {shown(returned)}. It must return a list: for each of the {len(matrices)} "
        f"matrices, in the order given, its owner, a number from 0 to {world_size - 1}."
    )
    return list(returned)


def _cost(shape: tuple[int, int]) -> int:
    return int(newton_schulz_operations(ParamSpec(shape[0] * shape[1], shape=shape)))


def _loads(matrices: Shapes, world_size: int, owners: Sequence[int]) -> list[int]:
    loads = [0] * world_size
    for shape, owner in zip(matrices, owners):
        loads[owner] += _cost(shape)
    return loads


def _packed(
    matrices: Shapes,
    world_size: int,
    weight: Callable[[tuple[int, int]], int] = _cost,
    *,
    largest_first: bool = True,
) -> list[int]:
    """Owners if each matrix goes to the rank with the least weight so far."""
    order = list(range(len(matrices)))
    if largest_first:
        order.sort(key=lambda i: -weight(matrices[i]))
    loads, owners = [0] * world_size, [0] * len(matrices)
    for i in order:
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += weight(matrices[i])
    return owners


def _in_sorted_order(matrices: Shapes, world_size: int) -> list[int]:
    order = sorted(range(len(matrices)), key=lambda i: -_cost(matrices[i]))
    owners = _packed(matrices, world_size)
    return [owners[i] for i in order]


_MISTAKES: dict[str, Callable[[Shapes, int], list[int]]] = {
    "This balances the elements. A matrix of 128 x 128 has as many as one of 16 x 1,024, and twelve times "
    "the operations: balance `operations(rows, columns, 5)`.": lambda matrices, n: _packed(
        matrices, n, lambda shape: shape[0] * shape[1]
    ),
    "This hands the matrices out in the order given. A costly one at the end finds no room: place the "
    "costliest first.": lambda matrices, n: _packed(matrices, n, largest_first=False),
    "This balances the number of matrices. Add up what each costs.": lambda matrices, n: _packed(
        matrices, n, lambda shape: 1, largest_first=False
    ),
    "These are the right owners in the wrong places: entry i belongs to the i-th costliest matrix. Put it "
    "where that matrix stands in the list.": _in_sorted_order,
}
"""What a reader may have written, by what there is to say about it."""


# --------------------------------------------------------------------------------------- predictions


@prediction(
    "matrices.cost",
    "1,024 × 1,024 against 64 × 16,384: how many times as much does the square cost?",
    unit="times",
)
def _cost_of_the_square() -> float:
    return _cost((1024, 1024)) / _cost((64, 16_384))


@prediction(
    "matrices.balanced",
    "Under `balanced`, how many times the operations of the other rank does the busier one make?",
    unit="times",
)
def _most_operations() -> float:
    _, operations, _ = _balanced()
    return max(operations) / min(operations)


@prediction(
    "matrices.state",
    "Under `balanced`, which rank has more bytes of state?",
    choices=("the square's owner", "the other rank", "both have the same"),
)
def _most_state() -> str:
    _, operations, state = _balanced()
    square = operations.index(max(operations))
    if state[square] == state[1 - square]:
        return "both have the same"
    return "the square's owner" if state[square] > state[1 - square] else "the other rank"


def _balanced() -> tuple[Sequence[int], Sequence[float], Sequence[int]]:
    """Elements, operations and state bytes of two ranks, for the chapter's list of parameters."""
    others: list[tuple[int, ...]] = [(1000, 128), (128,)]
    matrices: list[tuple[int, ...]] = [(128, 128), *4 * [(16, 1024)]]
    params = [
        ParamSpec(math.prod(shape), group=group, shape=shape, whole=group == 1)
        for group, listed in enumerate((others, matrices))
        for shape in listed
    ]
    partition = plan_partition("balanced", params, 2)
    state = state_bytes_of_rank(partition, params, "Muon+AdamW")
    return partition.loads, loads_under("balanced", partition, params), state
