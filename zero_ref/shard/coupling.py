"""Find out by trials whether an optimizer updates each parameter by itself, and each element by itself.

`minimal.py` assumes that it updates each parameter by itself; this module adds the check. A rank's local
optimizer sees only the parameters that the rank owns, so one that scales by a norm of all gradients, or
estimates a learning rate from all parameters, would make different updates, without an error. If it updates
each element by itself too, parameters may be cut.
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
"""The number of updates. Two, since state from the first update may affect only the second.

With a closure, twelve: a schedule-free optimizer moves tensors before the closure by the distance between
their average and their last values, which is zero in its first updates.
"""


Then = Callable[[Optimizer], object]
"""What a trial calls after its updates."""


def switch(optimizer: Optimizer, mode: str) -> None:
    """Call `train()` or `eval()` of an optimizer that has it: a schedule-free one steps after `train()`."""
    with contextlib.suppress(TypeError):  # it is something else, or takes arguments
        getattr(optimizer, mode, int)()


def evaluate(optimizer: Optimizer) -> None:
    """Call `eval()` of an optimizer that has it."""
    switch(optimizer, "eval")


def couples_parameters(
    optimizer_class: type[Optimizer],
    options: Mapping[str, Any],
    defaults: Mapping[str, Any],
    then: Then = evaluate,
) -> bool:
    """Whether the update of a tensor changes when a second tensor is beside it, under these options.

    >>> couples_parameters(torch.optim.AdamW, {}, {"lr": 0.1})
    False

    An optimizer that cannot step without a closure is tried with one, which computes gradients from both
    tensors. One that moves tensors before it calls the closure, as sharpness-aware minimization does, thereby
    couples them: on shards, each rank would move only its own and compute gradients at another point.

    Args:
        options: those of a parameter group.
        defaults: those of the optimizer's constructor.
        then: is called after the updates, and what it changes is compared too.
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

            with contextlib.suppress(Exception):
                alone = tried(1)
                for nan in (False, True):
                    beside = tried(2, nan)
                    if not _alike(beside, alone):
                        return _alike(beside, tried(2, nan))
                return False
    return False


def stepped_in_trial(
    optimizer_class: type[Optimizer], options: Mapping[str, Any], defaults: Mapping[str, Any]
) -> Optimizer | None:
    """An optimizer of the class that has stepped a matrix of 64 elements; None if it needs other tensors.

    Args, Cost: as `couples_parameters`.
    """
    with trial():
        for with_closure in (False, True):
            with contextlib.suppress(Exception):
                return _stepped(optimizer_class, _moving(options), _moving(defaults), 1, with_closure)
    return None


SMALL: dict[tuple[int, ...], list[int]] = {(24, 16): [192, 192]}
CUT: dict[tuple[int, ...], list[int]] = {(160, 128): [4160, 8320, 8000], (64, 16, 3, 3): [4160, 5056]}
"""The shapes of the tensors in the second trial, and the numbers of elements of their pieces.

A small tensor comes first: Shampoo factors a matrix of n rows for a piece of n elements, which takes minutes
for the large pieces, and a small one shows as well that it uses shapes.

Pieces begin at multiples of 64, as `even` cuts, and not of 128: optimizers with low-bit state scale blocks of
128 elements or more together, so each cut divides a block. They keep tensors below 4,096 elements in 32 bits,
so no piece is smaller. Adafactor factors the state of matrices with 128 or more rows and columns.
"""

UPDATES = 30
"""Some optimizers do something else in every 5th or 10th update, or start to do it in the 26th."""


def updates_elementwise(
    optimizer_class: type[Optimizer],
    options: Mapping[str, Any],
    defaults: Mapping[str, Any],
    then: Then = evaluate,
) -> bool:
    """Whether elements are updated, and have the same state, if their tensors are cut, under these options.

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
        try:
            if then is evaluate:
                return _cuts_change_nothing(*case)  # type: ignore[arg-type]
        except TypeError:  # an option cannot be part of a key, as lists cannot
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
        return all(_are_made_of_pieces(optimizer_of, cut, then) for cut in (SMALL, CUT))
    except Exception:
        return False


def _are_made_of_pieces(
    optimizer_of: Callable[[list[torch.Tensor]], Optimizer],
    cut: Mapping[tuple[int, ...], list[int]],
    then: Then,
) -> bool:
    """Whether tensors of these shapes, stepped together, stay equal to their pieces, each stepped alone."""
    # The values and all gradients are windows of one row of random numbers.
    row = torch.randn(2**15, generator=torch.Generator().manual_seed(0))
    wholes = [(0.1 * row[: sum(numels)]).view(shape) for shape, numels in cut.items()]
    pieces = [
        [flat.narrow(0, end - numel, numel) for end, numel in zip(accumulate(numels), numels)]
        for flat, numels in zip([whole.clone().view(-1) for whole in wholes], cut.values())
    ]
    optimizers = [optimizer_of(wholes), *(optimizer_of([piece]) for of in pieces for piece in of)]
    for optimizer in optimizers:
        switch(optimizer, "train")

    def are_alike() -> bool:
        return all(torch.equal(torch.cat(of), whole.flatten()) for whole, of in zip(wholes, pieces))

    for update in range(UPDATES):
        for whole, of in zip(wholes, pieces):
            grad = row[64 * update :][: whole.numel()]
            whole.grad = grad.clone().view(whole.shape)
            for piece, part in zip(of, grad.split([piece.numel() for piece in of])):
                piece.grad = part.clone()
        for optimizer in optimizers:
            optimizer.step()
        if not are_alike():
            return False
    for optimizer in optimizers:
        then(optimizer)
    if not are_alike():
        return False
    state = {param: of for optimizer in optimizers for param, of in optimizer.state.items()}
    return all(
        _is_made_of(state[whole], [state[piece] for piece in of], whole.shape)
        for whole, of in zip(wholes, pieces)
        if whole in state
    )


def _is_made_of(whole: Mapping[str, Any], pieces: Sequence[Mapping[str, Any]], shape: torch.Size) -> bool:
    """Whether the state of a tensor of that shape is that of its pieces: end to end, and equal numbers."""
    for key, value in whole.items():
        of_pieces = [piece[key] for piece in pieces]
        if isinstance(value, (list, tuple, dict)):  # state of slices cannot be gathered from these
            return False
        if isinstance(value, torch.Tensor) and value.shape == shape:
            alike = torch.equal(torch.cat(of_pieces), value.flatten())
        else:
            alike = all(bool(torch.as_tensor(other == value).all()) for other in of_pieces)
        if not alike:
            return False
    return all(piece.keys() == whole.keys() for piece in pieces)


_ONE_AT_A_TIME = threading.Lock()  # set_stance is global, and virtual ranks are threads


@contextlib.contextmanager
def trial() -> Iterator[None]:
    """One trial at a time, on the CPU whatever the default device, without effect on random numbers."""
    cpu = torch.device("cpu")
    with _ONE_AT_A_TIME, _without_compiling(), cpu, torch.random.fork_rng(devices=[]):
        yield


def _moving(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options with a learning rate that moves tensors visibly: a schedule may begin with 0."""
    rate: Any = options.get("lr")
    is_number = isinstance(rate, (int, float)) or (isinstance(rate, torch.Tensor) and rate.numel() == 1)
    return {**options, "lr": 1e-2} if is_number and abs(float(rate)) < 1e-4 else options


def _without_compiling() -> contextlib.AbstractContextManager[object]:
    """Run functions under torch.compile eagerly: compiling them for a trial would be slow."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled yet, and importing it is slow
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
    """An optimizer of that many tensors, after some steps.

    With `nan` the last gradient of the second tensor is not finite, for which a class may skip an update.
    """
    # float64: rounding would hide the first updates of an optimizer that begins with tiny ones.
    params = [torch.nn.Parameter(torch.cos(PLACES + number)) for number in range(tensors)]
    steps = WITH_CLOSURE if with_closure else STEPS
    optimizer = optimizer_class([{**options, "params": params}], **defaults)
    switch(optimizer, "train")

    def gradients(step: int, at_start: list[torch.Tensor]) -> torch.Tensor:
        for number, param in enumerate(params):
            # The second gradient is larger, so that a norm or mean of both differs from that of the first.
            param.grad = torch.sin(PLACES * (1 + step + number)) * 0.1 * 300**number
            for other, before in zip(params, at_start):
                param.grad += other.detach() - before  # zero, unless the step has moved tensors already
            if nan and number and step == steps - 1:
                param.grad.fill_(torch.nan)
        return torch.ones(())

    for step in range(steps):
        closure = functools.partial(gradients, step, [param.detach().clone() for param in params])
        closure()
        optimizer.step(*[closure] * with_closure)  # type: ignore[arg-type]
    return optimizer


def _moves(optimizer: Optimizer) -> list[torch.Tensor]:
    """How far it has moved its first tensor, and the numbers in its group."""
    (group,) = optimizer.param_groups
    kept = [torch.as_tensor(value).double() for value in group.values() if _is_number(value)]
    return [group["params"][0].detach() - torch.cos(PLACES), *kept]


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _alike(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    # Allow for rounding: an optimizer may concatenate its tensors and sum in another order.
    return all(torch.allclose(a, b, rtol=1e-5, atol=0, equal_nan=True) for a, b in zip(some, others))
