"""Graders of the chapter on matrices: may every parameter be cut?"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import normalize
from torch.optim import SGD, Adafactor, Adagrad, Adamax, AdamW, Muon, NAdam, Optimizer, RAdam, RMSprop

from zero_ref.comm.backend import as_collectives
from zero_ref.comm.collectives import Collectives
from zero_ref.lab.meter import recording
from zero_ref.plan.calls import Call
from zero_ref.plan.partition import ParamSpec
from zero_ref.plan.rules import newton_schulz_operations
from zero_ref_course import Answer, ExerciseFailed, exercise, in_words, shown
from zero_ref_course._cases import Form
from zero_ref_course._company import on_ranks, on_virtual_ranks
from zero_ref_course.predictions import prediction

# ----------------------------------------------------------------------------------------- may it be cut?


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
    """Descends by the gradient in the first step, and by a gradient of length 1 from the second step on."""

    def scaled(self, param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return grad if self.steps == 1 else grad / grad.norm()


class ClipsTogether(_Scaled):
    """Divides by the norm of all gradients of the optimizer together."""

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
    """The message if the answer is the opposite."""


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
"""Optimizers to judge. The likeliest mistakes each give a wrong verdict about one of the last five."""


ELEMENTWISE = [
    _Trial(each, {"lr": 0.1}, True, "It updates each element from that element alone.")
    for each in (Adagrad, Adamax, NAdam, RAdam, RMSprop)
]
"""Optimizers of the hidden cases."""

VERDICT = Form(lambda value: isinstance(value, bool), "It must return True or False.")


@exercise("matrices.may_be_cut", seconds=20.0)
def may_be_cut(answer: Answer) -> str:
    """Check the verdict about four optimizers of torch and five that are easily mistaken for elementwise."""
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


# ------------------------------------------------------------------------ whole for a moment

SHAPES: list[list[tuple[int, int]]] = [
    [(2, 3), (1, 4)],
    [(1, 2), (3, 2), (2, 5)],
    [(4, 4)],
    [(2, 2)] * 4,
]
"""The rows of each matrix on each rank, and its columns; as many matrices as ranks."""


class _Updated(NamedTuple):
    """The value that a rank returned, the matrices that it updated, and its calls."""

    value: Any
    updated: list[torch.Tensor]
    calls: list[Call]


@exercise("matrices.update_whole", seconds=20.0, on_ranks=True)
def update_whole(answer: Answer) -> str:
    """Check matrices that are cut by rows and updated as a whole by one rank, on virtual and real ranks."""
    for shapes_of in SHAPES + answer.drawn(_drawn_shapes, 4):
        of_ranks = on_virtual_ranks(
            _update_here,
            len(shapes_of),
            answer,
            shapes_of,
            waiting=lambda why: (
                f"a rank waits for a message that does not come, or has another shape: {why} "
                "In the first exchange rank r receives every rank's rows of matrix r; in the second it gets "
                "its own rows of each matrix back."
            ),
        )
        _check_updated(answer, shapes_of, of_ranks)
    _check_updated(answer, SHAPES[1], on_ranks(_update_on_a_real_rank, len(SHAPES[1]), answer, SHAPES[1]))
    return f"on 1 to {max(map(len, SHAPES))} ranks each matrix is whole on one of them, for a moment"


def _drawn_shapes(rng: random.Random) -> list[tuple[int, int]]:
    return [(rng.randint(1, 4), rng.randint(1, 5)) for _ in range(rng.randint(2, 4))]


def _parts(shapes_of: Sequence[tuple[int, int]], seed: int) -> list[list[torch.Tensor]]:
    """The rows of every matrix, for each rank."""
    n = len(shapes_of)
    generator = torch.Generator().manual_seed(seed)
    wholes = [torch.randn(n * rows, columns, generator=generator) for rows, columns in shapes_of]
    return [[whole.chunk(n)[rank].clone() for whole in wholes] for rank in range(n)]


def _update(matrix: torch.Tensor) -> torch.Tensor:
    """An update in place of Muon's: no row of it can be computed from that row alone."""
    return matrix / matrix.norm() + matrix.mean()


def _update_here(comm: Collectives, answer: Answer, shapes_of: Sequence[tuple[int, int]]) -> _Updated:
    updated: list[torch.Tensor] = []

    def update(matrix: torch.Tensor) -> torch.Tensor:
        """The update of a whole matrix."""
        updated.append(matrix.detach().clone())
        return _update(matrix)

    rows = _parts(shapes_of, answer.seed)[comm.rank]
    with recording(comm) as calls, in_words("rows, update, comm", answer, rows, update, comm):
        value = answer(rows, update, comm)
    return _Updated(value, updated, calls)


def _update_on_a_real_rank(answer: Answer, shapes_of: Sequence[tuple[int, int]]) -> _Updated:
    return _update_here(as_collectives(None), answer, shapes_of)


def _check_updated(
    answer: Answer, shapes_of: Sequence[tuple[int, int]], of_ranks: Sequence[_Updated]
) -> None:
    n, parts = len(of_ranks), _parts(shapes_of, answer.seed)
    wholes = [torch.cat([of_rank[number] for of_rank in parts]) for number in range(n)]
    for rank, (value, updated, _) in enumerate(of_ranks):
        where = f"on rank {rank} of {n}, "
        are_parts = isinstance(value, (list, tuple)) and [
            tuple(one.shape) if isinstance(one, torch.Tensor) else None for one in value
        ] == [tuple(one.shape) for one in parts[rank]]
        assert are_parts, (
            f"{where}{answer.name} returned {shown(value)}. It must return a list: for each matrix this "
            "rank's rows of its update, in the shape of the rows that it was given."
        )
        assert len(updated) == 1, (
            f"{where}update is called {len(updated)} times. Rank r updates matrix r, and no other: so the "
            "work is divided like the state."
        )
        whole = wholes[rank]
        if not torch.equal(updated[0], whole):
            raise AssertionError(
                f"{where}what is updated is not matrix {rank}. {_mistake_in_matrix(updated[0], whole)}"
            )
    for rank, (value, _, calls) in enumerate(of_ranks):
        where = f"on rank {rank} of {n}, "
        for number, (theirs, matrix) in enumerate(zip(value, wholes)):
            should = _update(matrix).chunk(n)[rank]
            assert torch.allclose(theirs, should, rtol=1e-5, atol=1e-6), (
                f"{where}its rows of the update of matrix {number} are not right. "
                + _mistake_in_update(theirs, parts[rank][number], _update(matrix).chunk(n), number, rank)
            )
        sent = sum(call.nbytes for call in calls if call.op != "recv")
        own = sum(one.nbytes for one in parts[rank])
        once = own - parts[rank][rank].nbytes + (n - 1) * parts[rank][rank].nbytes
        assert sent <= once, (
            f"{where}{sent} bytes are sent; {once} are enough: to each rank this rank's rows of its matrix, "
            "and later the rows that it gets back. An all-gather would bring every matrix to every rank."
        )


def _mistake_in_matrix(theirs: torch.Tensor, whole: torch.Tensor) -> str:
    if theirs.shape != whole.shape:
        return (
            f"It has the shape {tuple(theirs.shape)}, and the matrix {tuple(whole.shape)}: put all ranks' "
            "rows of it together."
        )
    if torch.equal(theirs.flatten().sort().values, whole.flatten().sort().values):
        return (
            "Its rows are in another order: those of rank 0 first, then those of rank 1, and so on, this "
            "rank's own in between."
        )
    return "It has other rows. Do all ranks' rows of it arrive before it is updated, and no others?"


def _mistake_in_update(
    theirs: torch.Tensor, before: torch.Tensor, updated: Sequence[torch.Tensor], number: int, rank: int
) -> str:
    if torch.equal(theirs, before):
        return "They are as before: the owner has to send them back."
    for other, part in enumerate(updated):
        if other != rank and part.shape == theirs.shape and torch.allclose(theirs, part, rtol=1e-5):
            return f"They are those of rank {other}. To rank r go the rows with number r of its share."
    if number == rank:
        return "This rank updates that matrix itself: it keeps its own rows of the result."
    return f"They come from rank {number}, in the second exchange."


# --------------------------------------------------------------------------------------- predictions


def _cost(shape: tuple[int, int]) -> int:
    return int(newton_schulz_operations(ParamSpec(shape[0] * shape[1], shape=shape)))


@prediction(
    "matrices.cost",
    "1,024 × 1,024 against 64 × 16,384: how many times as much does the square cost?",
    unit="times",
)
def _cost_of_the_square() -> float:
    return _cost((1024, 1024)) / _cost((64, 16_384))
