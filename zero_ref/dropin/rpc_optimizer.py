"""An optimizer that steps parameters on the workers that have them, by torch.distributed.rpc.

In `stairs/owners.py` every rank has all parameters. Here a model's layers are in several processes, called
workers. Distributed autograd leaves each gradient on the worker that has its parameter, so only a request to
step has to be sent. `DistributedOptimizer` sends it; an ordinary torch.optim optimizer on each worker makes
the step.
"""

from __future__ import annotations

import inspect
import itertools
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.optim import Optimizer

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer:
    """Steps parameters on the workers that own them, with one local optimizer on each.

    The result is that of one `optimizer_class` over all parameters, if the class updates each parameter by
    itself, as SGD, Adam and Adagrad do. A parameter without a gradient in the context does not change. The
    `.grad` of parameters does not change either, if no other code writes it during the step. On one worker,
    steps of different clients run one after the other. But each DistributedOptimizer has its own local
    optimizers: two of them with Adam keep two states of the same parameter.

    Like torch's class, this one has no `state_dict` and cannot change an option such as the learning rate.

    >>> with dist_autograd.context() as context_id:                             # doctest: +SKIP
    ...     loss = rpc.rpc_sync("worker1", second_half, args=(first(x),)).sum()
    ...     dist_autograd.backward(context_id, [loss])
    ...     optimizer = DistributedOptimizer(torch.optim.SGD, [on_worker0, on_worker1], lr=0.1)
    ...     optimizer.step(context_id)

    Args:
        optimizer_class: a subclass of torch.optim.Optimizer in a module that every worker can import.
        params_rref: an rpc.RRef of each parameter, a leaf tensor; each worker steps its own in this order.
        args, kwargs: for `optimizer_class`, on every worker.
    Raises:
        TypeError, ValueError: an argument is not as said above, or `optimizer_class` refuses it on a worker.
        RuntimeError: RPC is not initialized, or a worker raised another exception or gave no answer.
    Cost:
        One request and its reply for each worker other than this one, all at the same time. For each RRef
        that is sent to its owner, rpc adds a notice and its reply; it adds the same for each local optimizer
        when this object is deleted.
    Source: the interface is that of torch.distributed.optim.DistributedOptimizer.
    """

    def __init__(
        self, optimizer_class: type[Optimizer], params_rref: Iterable[Any], *args: Any, **kwargs: Any
    ) -> None:
        _check_class(optimizer_class)
        shares: dict[str, dict[int, Any]] = {}  # worker to its RRefs, by position in params_rref
        for position, rref in enumerate(_checked_rrefs(params_rref)):
            shares.setdefault(rref.owner_name(), {})[position] = rref
        outcomes = _on_workers(
            _create, {worker: (optimizer_class, share, args, kwargs) for worker, share in shares.items()}
        )
        if failures := _failures_in(outcomes):
            raise _error("no optimizer was made", failures)
        self._ids: dict[str, int] = {worker: outcome[0] for worker, outcome in outcomes.items()}
        # An RRef keeps its local optimizer alive on the worker.
        self._rrefs = [outcome[1] for outcome in outcomes.values()]

    def step(self, context_id: int) -> None:
        """Step every parameter that has a gradient in the context; return when all workers have stepped.

        Args:
            context_id: the number of an open dist_autograd.context() in which backward has run.
        Raises:
            RuntimeError, ValueError, TypeError: a worker raised that. RuntimeError also if a worker raised
                another exception or did not answer within RPC's time-out, if this worker does not know the
                context, or if no parameter has a gradient in it. The message says which workers made their
                step, and which gave no answer: a slow worker may still make its step.
        Cost:
            One request and its reply for each worker other than this one, all at the same time. They hold no
            tensor, so their size does not depend on the model.
        """
        # 1. Request the step on all workers at the same time.
        _check_context(context_id)
        outcomes = _on_workers(_step, {worker: (number, context_id) for worker, number in self._ids.items()})
        # 2. Raise one error for all workers that failed.
        if failures := _failures_in(outcomes):
            stepped = ", ".join(worker for worker in outcomes if worker not in failures) or "none"
            unknown = ", ".join(worker for worker, failure in failures.items() if failure.how == NO_ANSWER)
            headline = f"the step is not complete; workers that made theirs: {stepped}"
            raise _error(f"{headline}; not known of: {unknown}" if unknown else headline, failures)
        if not any(outcomes.values()):
            raise RuntimeError(
                f"no parameter has a gradient in context {context_id}, and none has changed. Call "
                "dist_autograd.backward(context_id, [loss]) first, with a loss that depends on these "
                "parameters, in the same `with dist_autograd.context() as context_id:`."
            )


# ---------------------------------------------------------------------------------- on each worker

_lock = threading.Lock()  # one for the process, because two optimizers may have a parameter in common
_numbers = itertools.count()
_locals: WeakValueDictionary[int, _LocalOptimizer] = WeakValueDictionary()


class _LocalOptimizer:
    """The optimizer of one DistributedOptimizer on one worker."""

    def __init__(self, optimizer: Optimizer, params: list[torch.Tensor]) -> None:
        self.optimizer = optimizer
        self.params = params

    def step(self, gradients: Mapping[torch.Tensor, torch.Tensor]) -> int:
        """Step with these gradients instead of `.grad`; return the number of parameters that have one."""
        own = [gradients.get(param) for param in self.params]
        # torch's optimizers read `.grad`, so put the gradients there during the step, and restore it
        # afterwards.
        with _lock:
            before = [param.grad for param in self.params]
            try:
                for param, gradient in zip(self.params, own):
                    param.grad = gradient
                self.optimizer.step()
            finally:
                for param, gradient in zip(self.params, before):
                    param.grad = gradient
        return sum(gradient is not None for gradient in own)


def _create(
    optimizer_class: type[Optimizer], share: dict[int, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, Any]:
    """Make the local optimizer; return a number that names it in a step, and an RRef that keeps it alive.

    Naming it by the RRef would double the messages of a step: rpc counts references, so a worker that
    receives one of its own RRefs sends a notice back.
    """
    # 1. Check the parameters, which only their own worker can see.
    position_of: dict[torch.Tensor, int] = {}
    for position, rref in share.items():
        param = rref.local_value()
        if not isinstance(param, torch.Tensor):
            raise TypeError(f"params_rref[{position}] refers to a {type(param).__name__}, not to a tensor")
        if not param.is_leaf:
            raise ValueError(
                f"params_rref[{position}] refers to a tensor computed from others; only leaf tensors, "
                "such as an nn.Parameter, get a gradient that is theirs"
            )
        if param in position_of:
            raise ValueError(f"params_rref[{position_of[param]}] and [{position}] refer to the same tensor")
        position_of[param] = position
    # 2. Make the optimizer, and find it by its number from now on.
    local = _LocalOptimizer(optimizer_class(list(position_of), *args, **kwargs), list(position_of))
    number = next(_numbers)
    _locals[number] = local
    return number, rpc.RRef(local)


def _step(number: int, context_id: int) -> int:
    """Step local optimizer `number` with the gradients of the context; return how many it has used."""
    try:
        gradients = dist_autograd.get_gradients(context_id)  # type: ignore[attr-defined]
    except RuntimeError as error:
        if "Could not find autograd context" not in str(error):
            raise
        gradients = {}  # this worker took no part in the backward
    return _locals[number].step(gradients)


# ---------------------------------------------------------------------------------- calling all workers


RAISED, NOT_ASKED, NO_ANSWER = "raised", "could not be asked:", "gave no answer:"


class _Failure(NamedTuple):
    """An exception of a worker, as texts that rpc can send."""

    how: str
    kind: str
    message: str
    traceback: str


def _on_workers(part: Callable[..., Any], args_of_worker: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Call `part` on all workers at the same time; return each result, or a `_Failure` if it raised."""
    # 1. Send the requests to the other workers. One that cannot be sent does not keep the rest from running.
    own = rpc.get_worker_info().name
    futures: dict[str, Any] = {}
    outcomes: dict[str, Any] = {}
    for worker, args in args_of_worker.items():
        if worker != own:
            try:
                futures[worker] = rpc.rpc_async(worker, _attempt, args=(part, *args))
            except Exception as error:  # such as an argument that cannot be pickled
                outcomes[worker] = _failure(error, NOT_ASKED)
    # 2. Do this worker's part while the others do theirs.
    if own in args_of_worker:
        outcomes[own] = _attempt(part, *args_of_worker[own])
    # 3. Wait for all answers, also after a failure, so that the error says which workers are done.
    for worker, future in futures.items():
        try:
            outcomes[worker] = future.wait()
        except Exception as error:  # the worker has ended, is too slow, or cannot unpickle the request
            outcomes[worker] = _failure(error, NO_ANSWER)
    return {worker: outcomes[worker] for worker in args_of_worker}


def _attempt(part: Callable[..., Any], *args: Any) -> Any:
    # Return the error as a value: rpc would print it on the worker, and raise another one made from its text.
    try:
        return part(*args)
    except Exception as error:
        return _failure(error)


def _failure(error: Exception, how: str = RAISED) -> _Failure:
    return _Failure(how, type(error).__name__, str(error), "".join(traceback.format_exception(error)))


def _failures_in(outcomes: dict[str, Any]) -> dict[str, _Failure]:
    return {worker: outcome for worker, outcome in outcomes.items() if isinstance(outcome, _Failure)}


def _error(headline: str, failures: dict[str, _Failure]) -> Exception:
    lines = [
        f"{worker} {failure.how} {failure.kind}: {failure.message}" for worker, failure in failures.items()
    ]
    # If all workers raised the same kind of error, raise that kind here.
    kinds = {failure.kind if failure.how != NO_ANSWER else "" for failure in failures.values()}
    kept = {"ValueError": ValueError, "TypeError": TypeError}.get(min(kinds)) if len(kinds) == 1 else None
    error: Exception = (kept or RuntimeError)("\n".join([headline, *lines]))
    for worker, failure in failures.items():
        error.add_note(f"On {worker}:\n{failure.traceback.rstrip()}")
    return error


# ---------------------------------------------------------------------------------- before any message


def _check_class(optimizer_class: object) -> None:
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(f"optimizer_class must be a torch.optim.Optimizer class, not {optimizer_class!r}")
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"{optimizer_class.__name__} needs a closure that computes the loss again, and couples all "
            "parameters; here each worker steps only its own. Use an optimizer such as SGD or Adam."
        )


def _checked_rrefs(params_rref: Iterable[Any]) -> list[Any]:
    if not (rpc.is_available() and rpc._is_current_rpc_agent_set()):  # type: ignore[attr-defined]
        raise RuntimeError(
            "RPC is not initialized: call torch.distributed.rpc.init_rpc on every worker first"
        )
    if isinstance(params_rref, torch.Tensor) or _is_rref(params_rref):
        raise TypeError(f"params_rref must be a list of RRefs, not one {type(params_rref).__name__}")
    rrefs = list(params_rref)
    if not rrefs:
        raise ValueError("params_rref is empty: give an RRef of each parameter")
    for position, rref in enumerate(rrefs):
        if not _is_rref(rref):
            raise TypeError(
                f"params_rref[{position}] is a {type(rref).__name__}, not an RRef. On the worker with the "
                "parameter, rpc.RRef(parameter) makes one."
            )
    return rrefs


def _is_rref(value: object) -> bool:
    # rpc.remote returns an instance of PyRRef, the base of rpc.RRef.
    return isinstance(value, rpc.PyRRef)  # type: ignore[attr-defined]


def _check_context(context_id: object) -> None:
    if not isinstance(context_id, int):
        raise TypeError(f"context_id must be the int of a dist_autograd.context(), not {context_id!r}")
    try:
        dist_autograd.get_gradients(context_id)  # type: ignore[attr-defined]
    except RuntimeError as error:
        raise RuntimeError(
            f"this worker knows no autograd context {context_id}. Call step inside the "
            "`with dist_autograd.context() as context_id:` of its backward pass."
        ) from error
