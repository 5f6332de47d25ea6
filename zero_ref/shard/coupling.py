"""Trials that find out whether an optimizer updates each parameter by itself, and each element by itself.

`stairs/owners.py` assumes that the optimizer updates each parameter by itself; this module adds the check. A
rank's local optimizer sees only the parameters that the rank owns. So an optimizer that scales by a norm of
all gradients, or estimates a learning rate from all parameters, would make different updates, without an
error. If an optimizer updates each element by itself too, parameters may be cut.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.optim import Optimizer

STEPS, WITH_CLOSURE = 2, 12
"""The number of updates without and with a closure. Two, since state may affect only the second update.

With a closure, twelve: a schedule-free optimizer moves tensors before the closure by the distance between
their average and their last values, which is zero in its first updates.
"""


Then = Callable[[Optimizer], object]
"""A function that a trial calls after its updates."""


def switch(optimizer: Optimizer, mode: str) -> None:
    """Call `train()` or `eval()` of an optimizer that has it: a schedule-free one steps after `train()`."""
    with contextlib.suppress(TypeError):  # the attribute is no method, or takes arguments
        getattr(optimizer, mode, int)()


def evaluate(optimizer: Optimizer) -> None:
    """Call an optimizer's `eval()` if it has one."""
    switch(optimizer, "eval")


def couples_parameters(
    optimizer_class: type[Optimizer],
    options: Mapping[str, Any],
    defaults: Mapping[str, Any],
    then: Then = evaluate,
) -> bool:
    """Return whether the update of a tensor changes when a second tensor is beside it, under these options.

    >>> couples_parameters(torch.optim.AdamW, {}, {"lr": 0.1})
    False

    An optimizer that cannot step without a closure is tried with one, which computes gradients from both
    tensors. An optimizer that moves tensors before it calls the closure, as sharpness-aware minimization
    does, thereby couples them: on shards, each rank would move only its own tensors and compute gradients at
    another point.

    Args:
        options: the options of a parameter group.
        defaults: the options of the optimizer's constructor.
        then: called after the updates; the values that it changes are compared too.
    Returns:
        Also False if the trial says nothing: the optimizer needs other tensors, or its updates are random.
    Cost: a few updates of 64 elements on the CPU.
    """

    options, defaults = _moving(options), _moving(defaults)
    with trial():
        for with_closure in (False, True):

            def tried(
                tensors: int, nan: bool = False, with_closure: bool = with_closure
            ) -> list[torch.Tensor]:
                optimizer = _stepped(optimizer_class, options, defaults, tensors, with_closure, nan)
                trained = _moves(optimizer)
                then(optimizer)
                return [*trained, *_moves(optimizer)]

            # An optimizer that raises without a closure is tried with one.
            with contextlib.suppress(Exception):
                alone = tried(1)
                for nan in (False, True):
                    beside = tried(2, nan)
                    if not _alike(beside, alone):
                        # If the same trial then gives other values, the updates are random: no answer.
                        return _alike(beside, tried(2, nan))
                return False
    return False


def stepped_in_trial(
    optimizer_class: type[Optimizer], options: Mapping[str, Any], defaults: Mapping[str, Any]
) -> Optimizer | None:
    """Make an optimizer and step a matrix of 64 elements with it; return None if it needs other tensors.

    Args, Cost: as `couples_parameters`.
    """
    with trial():
        for with_closure in (False, True):
            with contextlib.suppress(Exception):
                return _stepped(optimizer_class, _moving(options), _moving(defaults), 1, with_closure)
    return None


SMALL: dict[tuple[int, ...], list[int]] = {(24, 16): [192, 192]}
CUT: dict[tuple[int, ...], list[int]] = {(160, 128): [4160, 8320, 8000], (64, 16, 3, 3): [4160, 5056]}
"""The shapes of the tensors in the second trial, each with the numbers of elements of its pieces.

A small tensor is tried first: Shampoo factors a matrix of n rows for a piece of n elements, which takes
minutes for the large pieces, and a small tensor shows as well that Shampoo uses shapes.

Pieces begin at multiples of 64, as `even` cuts, and not of 128: optimizers with low-bit state scale blocks of
128 elements or more together, so each cut divides a block. Such optimizers keep tensors below 4,096 elements
in 32 bits, so no piece is smaller. Adafactor factors the state of matrices with 128 or more rows and columns.
"""

UPDATES = 30
"""The number of updates in the second trial.

Some optimizers do something else in every 5th or 10th update, or from the 26th update on.
"""


def updates_elementwise(
    optimizer_class: type[Optimizer],
    options: Mapping[str, Any],
    defaults: Mapping[str, Any],
    then: Then = evaluate,
) -> bool:
    """Return whether elements get the same updates and state if their tensors are cut, under these options.

    The trial steps two whole tensors, and each 1-D piece of them by an optimizer of its own, and compares all
    bits. There is no rounding to allow for: pieces begin and end at multiples of 64 elements, where kernels
    compute each element with the same instructions as in the whole tensor.

    >>> updates_elementwise(torch.optim.AdamW, {}, {"lr": 0.1})
    True
    >>> updates_elementwise(torch.optim.Adafactor, {}, {})  # its state has a number for each row and column
    False

    Args:
        options, defaults, then: as for `couples_parameters`.
    Returns:
        Also False if the trial says nothing: the optimizer needs other tensors, or its updates are random.
    Cost: up to 30 updates of 30,000 elements on the CPU, twice; far less where a small tensor shows enough.
        Answers are kept by class and options.
    """
    if couples_parameters(optimizer_class, options, defaults, then):
        return False
    options, defaults = _moving(options), _moving(defaults)
    case = optimizer_class, tuple(options.items()), tuple(defaults.items()), then
    with trial():
        # Answers are cached by the arguments, but not for other functions `then`, which may be closures.
        try:
            if then is evaluate:
                return _cuts_change_nothing(*case)  # type: ignore[arg-type]
        except TypeError:  # an option, such as a list, has no hash
            pass
        return _cuts_change_nothing.__wrapped__(*case)


@functools.lru_cache(maxsize=64)
def _cuts_change_nothing(
    optimizer_class: type[Optimizer],
    options: tuple[tuple[str, Any], ...],
    defaults: tuple[tuple[str, Any], ...],
    then: Then,
) -> bool:
    def optimizer_of(tensors: list[torch.Tensor]) -> Optimizer:
        params = [tensor.requires_grad_() for tensor in tensors]
        return optimizer_class([{**dict(options), "params": params}], **dict(defaults))

    try:
        return all(_pieces_equal_wholes(optimizer_of, cut, then) for cut in (SMALL, CUT))
    except Exception:  # the class cannot step such pieces, so it cannot step slices
        return False


def _pieces_equal_wholes(
    optimizer_of: Callable[[list[torch.Tensor]], Optimizer],
    cut: Mapping[tuple[int, ...], list[int]],
    then: Then,
) -> bool:
    """Return whether tensors of these shapes, stepped together, equal their pieces, each stepped alone."""
    # 1. Make the tensors and their pieces. Values and gradients are windows of one row of random numbers.
    row = torch.randn(2**15, generator=torch.Generator().manual_seed(0))
    wholes = [_Whole((0.1 * row[: sum(numels)]).view(shape), numels) for shape, numels in cut.items()]
    optimizers = [
        optimizer_of([whole.tensor for whole in wholes]),
        *(optimizer_of([piece]) for whole in wholes for piece in whole.pieces),
    ]
    # 2. Compare values and state.
    return _stay_equal(wholes, optimizers, row, then) and _have_equal_state(wholes, optimizers)


def _stay_equal(
    wholes: Sequence[_Whole], optimizers: Sequence[Optimizer], row: torch.Tensor, then: Then
) -> bool:
    """Step tensors and pieces with the same gradients, then call `then`; return whether values stay equal.

    Args:
        row: random numbers, of which each gradient is a window.
    """
    for optimizer in optimizers:
        switch(optimizer, "train")
    for update in range(UPDATES):
        for whole in wholes:
            whole.set_gradient(row[64 * update :])
        for optimizer in optimizers:
            optimizer.step()
        if not all(whole.equals_pieces() for whole in wholes):
            return False
    for optimizer in optimizers:
        then(optimizer)
    return all(whole.equals_pieces() for whole in wholes)


def _have_equal_state(wholes: Sequence[_Whole], optimizers: Sequence[Optimizer]) -> bool:
    """Return whether the state of each tensor that has any is that of its pieces."""
    state = {param: of_param for optimizer in optimizers for param, of_param in optimizer.state.items()}
    return all(
        _states_are_equal(state[whole.tensor], [state[piece] for piece in whole.pieces], whole.tensor.shape)
        for whole in wholes
        if whole.tensor in state
    )


class _Whole:
    """A tensor in the second trial, and copies of its parts.

    Args:
        tensor: the tensor, contiguous.
        numels: the number of elements of each part.
    """

    def __init__(self, tensor: torch.Tensor, numels: Sequence[int]) -> None:
        self.tensor, self.numels = tensor, list(numels)
        flat = tensor.clone().view(-1)
        self.pieces = [flat.narrow(0, end - numel, numel) for end, numel in zip(accumulate(numels), numels)]

    def set_gradient(self, row: torch.Tensor) -> None:
        """Give the tensor the first elements of a row as gradient, and each piece its part of them."""
        grad = row[: self.tensor.numel()]
        self.tensor.grad = grad.clone().view(self.tensor.shape)
        for piece, part in zip(self.pieces, grad.split(self.numels)):
            piece.grad = part.clone()

    def equals_pieces(self) -> bool:
        """Return whether the pieces have the same bits as the tensor."""
        return torch.equal(torch.cat(self.pieces), self.tensor.flatten())


def _states_are_equal(
    whole: Mapping[str, Any], pieces: Sequence[Mapping[str, Any]], shape: torch.Size
) -> bool:
    """Return whether the state of a tensor is that of its pieces, joined.

    Args:
        whole: the state of the tensor.
        pieces: the state of each piece.
        shape: the tensor's shape. State of this shape is compared with that of all pieces, end to end; other
            state, such as a step counter, is compared with that of each piece.
    """
    for key, value in whole.items():
        of_pieces = [piece[key] for piece in pieces]
        if isinstance(value, (list, tuple, dict)):  # the state of slices is not gathered from containers
            return False
        if isinstance(value, torch.Tensor) and value.shape == shape:
            is_equal = torch.equal(torch.cat(of_pieces), value.flatten())
        else:
            is_equal = all(bool(torch.as_tensor(other == value).all()) for other in of_pieces)
        if not is_equal:
            return False
    return all(piece.keys() == whole.keys() for piece in pieces)


_ONE_AT_A_TIME = threading.Lock()  # set_stance is global, and virtual ranks are threads


@contextlib.contextmanager
def trial() -> Iterator[None]:
    """Run one trial at a time, on the CPU whatever the default device, without effect on random numbers."""
    cpu = torch.device("cpu")
    with _ONE_AT_A_TIME, _without_compiling(), cpu, torch.random.fork_rng(devices=[]):
        yield


def _moving(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace a learning rate that moves tensors too little to compare: a schedule may begin with 0."""
    rate: Any = options.get("lr")
    is_number = isinstance(rate, (int, float)) or (isinstance(rate, torch.Tensor) and rate.numel() == 1)
    return {**options, "lr": 1e-2} if is_number and abs(float(rate)) < 1e-4 else options


def _without_compiling() -> contextlib.AbstractContextManager[object]:
    """Run compiled functions eagerly: compiling them for a trial would be slow."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled yet, and importing torch._dynamo is slow
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


PLACES = torch.arange(64, dtype=torch.float64, device="cpu").view(8, 8)


def _stepped(
    optimizer_class: type[Optimizer],
    options: Mapping[str, Any],
    defaults: Mapping[str, Any],
    tensors: int,
    with_closure: bool,
    nan: bool = False,
) -> Optimizer:
    """Make an optimizer of so many tensors, and step it a few times.

    With `nan` the last gradient of the second tensor is not finite: a class may then skip the whole update.
    """
    # float64: in float32, rounding would hide the first updates of an optimizer that begins with tiny ones.
    params = [torch.nn.Parameter(torch.cos(PLACES + number)) for number in range(tensors)]
    steps = WITH_CLOSURE if with_closure else STEPS
    optimizer = optimizer_class([{**options, "params": params}], **defaults)
    switch(optimizer, "train")

    def gradients(step: int, at_start: list[torch.Tensor]) -> torch.Tensor:
        for number, param in enumerate(params):
            # The second gradient is larger, so that a norm or mean of both differs from that of the first.
            param.grad = torch.sin(PLACES * (1 + step + number)) * 0.1 * 300**number
            # Each gradient depends on all tensors: an optimizer that moves them before it calls the closure
            # gets another gradient when a second tensor moves too. Otherwise these differences are zero.
            for other, before in zip(params, at_start):
                param.grad += other.detach() - before
            if nan and number and step == steps - 1:
                param.grad.fill_(torch.nan)
        return torch.ones(())

    for step in range(steps):
        closure = functools.partial(gradients, step, [param.detach().clone() for param in params])
        closure()
        optimizer.step(*[closure] * with_closure)  # type: ignore[arg-type]
    return optimizer


def _moves(optimizer: Optimizer) -> list[torch.Tensor]:
    """List how far an optimizer has moved its first tensor, and the numbers in its group."""
    (group,) = optimizer.param_groups
    kept = [torch.as_tensor(value).double() for value in group.values() if _is_number(value)]
    return [group["params"][0].detach() - torch.cos(PLACES), *kept]


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _alike(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    # Allow for rounding: an optimizer may concatenate its tensors and sum in another order.
    return all(torch.allclose(a, b, rtol=1e-5, atol=0, equal_nan=True) for a, b in zip(some, others))
