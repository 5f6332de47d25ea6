"""The optimizer that runs where the parameter lives, on real RPC workers."""

from __future__ import annotations

import gc
import os
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.optim import Optimizer

from zero_ref.dropin import rpc_optimizer
from zero_ref.dropin.rpc_optimizer import DistributedOptimizer
from zero_ref.lab import ranks
from zero_ref.lab.ranks import RankError

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not rpc.is_available(), reason="this torch has no RPC"),
]


def on_workers(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    return ranks.run(anew, world_size, fn, *args, backend="gloo", rpc=True, timeout=20.0)


def anew(fn: Callable[..., Any], *args: Any) -> Any:
    """On each rank: `fn`, with new layers in place of those that an earlier test has moved."""
    _layers.clear()
    for number in range(4):
        layer(number)  # now, or two requests at once could each make one
    dist.barrier()
    return fn(*args)


OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
}

# ---------------------------------------------------------------------------- a model in parts

WIDTH = 4
_layers: dict[int, torch.nn.Linear] = {}  # on a worker: its own layers


def layer(number: int) -> torch.nn.Linear:
    """Every process makes the same one."""
    if number not in _layers:
        generator = torch.Generator().manual_seed(number)
        _layers[number] = torch.nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            for param in _layers[number].parameters():
                param.copy_(torch.rand(param.shape, generator=generator) - 0.5)
    return _layers[number]


def rrefs_of(number: int) -> list[Any]:
    return [rpc.RRef(param) for param in layer(number).parameters()]


def forward(number: int, x: torch.Tensor) -> torch.Tensor:
    return layer(number)(x).tanh()


def values_of(number: int) -> list[torch.Tensor]:
    return [param.detach().clone() for param in layer(number).parameters()]


def grads_of(number: int) -> list[torch.Tensor | None]:
    return [param.grad for param in layer(number).parameters()]


def all_rrefs(world_size: int) -> list[Any]:
    return [rref for number in range(world_size) for rref in at(number, rrefs_of, number)]


def all_values(world_size: int) -> list[torch.Tensor]:
    return [value for number in range(world_size) for value in at(number, values_of, number)]


def at(worker: int, fn: Callable[..., Any], *args: Any) -> Any:
    return rpc.rpc_sync(f"worker{worker}", fn, args=args)


def batch(step: int) -> torch.Tensor:
    return torch.rand(3, WIDTH, generator=torch.Generator().manual_seed(100 + step))


def distributed_loss(world_size: int, x: torch.Tensor) -> torch.Tensor:
    for number in range(world_size):
        x = forward(number, x) if number == 0 else at(number, forward, number, x)
    return x.square().sum()


def steps_on_workers(
    make: Callable[..., Any], world_size: int, name: str, steps: int
) -> list[list[torch.Tensor]]:
    """After each step, every layer's parameters; layer n is on worker n, and worker 0 is the client."""
    if dist.get_rank():
        return []
    optimizer_class, options = OPTIMIZERS[name]
    optimizer = make(optimizer_class, all_rrefs(world_size), **options)
    after = []
    for step in range(steps):
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [distributed_loss(world_size, batch(step))])
            optimizer.step(context_id)
        after.append(all_values(world_size))
    return after


def steps_on_one(world_size: int, name: str, steps: int) -> list[list[torch.Tensor]]:
    _layers.clear()
    params = [param for n in range(world_size) for param in layer(n).parameters()]
    optimizer_class, options = OPTIMIZERS[name]
    optimizer = optimizer_class(params, **options)
    after = []
    for step in range(steps):
        x = batch(step)
        for number in range(world_size):
            x = forward(number, x)
        optimizer.zero_grad()
        x.square().sum().backward()
        optimizer.step()
        after.append([param.detach().clone() for param in params])
    return after


def assert_same_steps(ours: list[list[torch.Tensor]], others: list[list[torch.Tensor]]) -> None:
    assert len(ours) == len(others) > 0
    for step, (mine, other) in enumerate(zip(ours, others)):
        assert len(mine) == len(other)
        assert all(map(torch.equal, mine, other)), f"parameters differ after step {step}"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_one_local_optimizer_on_the_whole_model_bit_for_bit(name: str) -> None:
    # The same operations on the same numbers, only elsewhere, so there is nothing to round differently.
    ours = on_workers(steps_on_workers, 3, DistributedOptimizer, 3, name, 4)[0]
    assert_same_steps(ours, steps_on_one(3, name, 4))
    assert not torch.equal(ours[0][0], ours[1][0]), "parameters move"


def with_torchs_own(fn: Callable[..., Any], *args: Any) -> Any:
    """On each rank: `fn` with torch's class as its first argument."""
    warnings.simplefilter("ignore")  # it uses TorchScript
    from torch.distributed.optim import DistributedOptimizer as TorchsOptimizer

    dist.barrier()  # all have imported it
    return fn(TorchsOptimizer, *args)


def test_equals_torchs_own_bit_for_bit() -> None:
    ours = on_workers(steps_on_workers, 2, DistributedOptimizer, 2, "Adam", 3)[0]
    torchs = on_workers(with_torchs_own, 2, steps_on_workers, 2, "Adam", 3)[0]
    assert_same_steps(ours, torchs)


# ---------------------------------------------------------------------------- several clients


class SlowCount(Optimizer):
    """Adds 1 to each parameter, pausing between reading and writing: unlocked steps overwrite each other."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        read = [param.detach().clone() for param in params]
        time.sleep(0.005)
        for param, value in zip(params, read):
            if param.grad is not None:
                param.detach().copy_(value + 1)


def five_steps(context_id: int, optimizer: DistributedOptimizer) -> None:
    for _ in range(5):
        optimizer.step(context_id)


def two_clients() -> list[torch.Tensor]:
    """Workers 0 and 1 each make five steps of all layers, workers 0 to 2 have one layer each."""
    if dist.get_rank() < 2:
        optimizer = DistributedOptimizer(SlowCount, all_rrefs(3))
        with dist_autograd.context() as context_id:
            loss = sum(at(n, forward, n, batch(0)).sum() for n in range(3))
            dist_autograd.backward(context_id, [loss])
            dist.barrier()
            five_steps(context_id, optimizer)
            dist.barrier()
    else:
        dist.barrier()
        dist.barrier()
    return values_of(dist.get_rank())


def test_ten_concurrent_steps_of_two_clients_lose_no_update() -> None:
    after = on_workers(two_clients, 3)
    for rank in range(3):
        _layers.clear()
        for value, start in zip(after[rank], values_of(rank)):
            torch.testing.assert_close(value, start + 10, rtol=0, atol=1e-5)  # ten additions round


# ---------------------------------------------------------------------------- whose gradients


class AddGradient(Optimizer):
    """Like SGD with lr=-1. torch has no TorchScript form of it, so takes its other way."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.detach().add_(param.grad)


def one_layer_after_the_other(make: Callable[..., Any]) -> list[bool]:
    """Whether layers 1 and 2 each moved, in a step with only layer 1's loss, then one with only layer 2's."""
    if dist.get_rank():
        return []
    optimizer = make(AddGradient, at(1, rrefs_of, 1) + at(1, rrefs_of, 2))
    moved = []
    for number in (1, 2):
        before = [at(1, values_of, n) for n in (1, 2)]
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [at(1, forward, number, batch(0)).sum()])
            optimizer.step(context_id)
        after = [at(1, values_of, n) for n in (1, 2)]
        moved += [not all(map(torch.equal, b, a)) for b, a in zip(before, after)]
    return moved


def test_a_parameter_without_a_gradient_in_the_context_stays() -> None:
    assert on_workers(one_layer_after_the_other, 2, DistributedOptimizer)[0] == [True, False, False, True]


def set_grads(number: int) -> None:
    for param in layer(number).parameters():
        param.grad = torch.full_like(param, 7.0)


def grads_and_neighbours() -> tuple[Any, ...]:
    if dist.get_rank():
        return ()
    at(1, set_grads, 1)
    at(1, set_grads, 3)
    optimizer = DistributedOptimizer(torch.optim.SGD, at(1, rrefs_of, 1) + at(1, rrefs_of, 3), lr=0.1)
    before = at(1, values_of, 2) + at(1, values_of, 3)
    with dist_autograd.context() as context_id:
        # Layer 2 has gradients, but is not ours; layer 3 is, and has none but its .grad.
        loss = at(1, forward, 2, at(1, forward, 1, batch(0))).sum()
        dist_autograd.backward(context_id, [loss])
        optimizer.step(context_id)
    after = at(1, values_of, 2) + at(1, values_of, 3)
    return at(1, grads_of, 1), before, after, at(1, grads_of, 2)


def test_grad_and_parameters_of_others_are_left_as_they_were() -> None:
    grads, before, after, neighbours_grads = on_workers(grads_and_neighbours, 2)[0]
    assert all(bool((grad == 7).all()) for grad in grads)
    assert all(map(torch.equal, before, after))
    assert neighbours_grads == [None, None]


def a_worker_without_a_part() -> bool:
    if dist.get_rank():
        return True
    optimizer = DistributedOptimizer(torch.optim.SGD, at(1, rrefs_of, 1) + at(2, rrefs_of, 2), lr=0.1)
    before = at(1, values_of, 1)
    with dist_autograd.context() as context_id, ThreadPoolExecutor(1) as other_thread:
        dist_autograd.backward(context_id, [at(1, forward, 1, batch(0)).sum()])
        # This thread's calls take the context along; with the other's, worker 2 has never heard of it.
        other_thread.submit(optimizer.step, context_id).result()
    return not any(map(torch.equal, before, at(1, values_of, 1)))


def test_a_worker_that_took_no_part_in_the_context_has_nothing_to_step() -> None:
    assert on_workers(a_worker_without_a_part, 3) == [True] * 3


def kept() -> int:
    gc.collect()
    return len(rpc_optimizer._locals)


def made_and_deleted() -> tuple[int, int]:
    if dist.get_rank():
        return (0, 0)
    optimizer = DistributedOptimizer(torch.optim.Adam, at(1, rrefs_of, 1))
    there = at(1, kept)
    del optimizer
    gc.collect()
    while at(1, kept):
        time.sleep(0.001)  # the pool's time-out ends it
    return there, at(1, kept)


def test_local_optimizers_end_with_the_object_that_made_them() -> None:
    assert on_workers(made_and_deleted, 2)[0] == (1, 0)


# ---------------------------------------------------------------------------- errors


class Fails(AddGradient):
    """On worker 1, as `how` says."""

    def __init__(self, params: Any, how: str) -> None:
        super().__init__(params)
        self.how = how

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if rpc.get_worker_info().name == "worker1":
            if self.how == "ends":
                os._exit(3)
            raise ValueError("too steep")
        super().step()


def failing_step(how: str) -> tuple[str, str, str, bool]:
    if dist.get_rank():
        if how == "ends":
            threading.Event().wait(15)
        return ("", "", "", False)
    optimizer = DistributedOptimizer(Fails, all_rrefs(3), how)
    before = at(2, values_of, 2)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [distributed_loss(3, batch(0))])
        try:
            optimizer.step(context_id)
        except Exception as error:
            notes = "".join(getattr(error, "__notes__", []))
            moved = not any(map(torch.equal, before, at(2, values_of, 2)))
            return type(error).__name__, str(error), notes, moved
    return ("", "no error", "", False)


def test_a_worker_that_raises_is_named_and_so_are_those_that_stepped() -> None:
    raised, message, notes, moved = on_workers(failing_step, 3, "ValueError")[0]
    assert raised == "ValueError"
    assert "workers that made theirs: worker0, worker2" in message
    assert "worker1 raised ValueError: " in message
    assert "too steep" in message
    assert moved, "worker 2 made its step, as the message says"
    assert notes.startswith("On worker1:\nTraceback")
    assert "in step" in notes


def reports_to_a_file(how: str, path: str) -> None:
    with open(path, "w") as file:  # the pool tells of the rank that ended, not of what the others saw
        file.write(str(failing_step(how)))


def test_a_worker_that_ended_is_named_and_nothing_hangs(tmp_path: Any) -> None:
    report = tmp_path / "report"

    with pytest.raises(RankError) as caught:
        on_workers(on_rank_0, 3, str(report))
    assert (caught.value.rank, caught.value.summary) == (1, "ended with exit code 3")
    assert "worker1 gave no answer: RuntimeError: " in report.read_text()
    assert "workers that made theirs: worker0, worker2; not known of: worker1" in report.read_text()


def on_rank_0(path: str) -> None:
    if dist.get_rank() == 0:
        reports_to_a_file("ends", path)
    else:
        failing_step("ends")


def error_of(fn: Callable[[], object]) -> str:
    try:
        fn()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def not_a_tensor() -> Any:
    return rpc.RRef("text")


def not_a_leaf() -> Any:
    return rpc.RRef(layer(1).weight * 2)


def construction_errors() -> dict[str, str]:
    if dist.get_rank():
        return {}
    sgd, good = torch.optim.SGD, at(1, rrefs_of, 1)

    class Local(torch.optim.SGD):
        pass

    cases: dict[str, Callable[[], object]] = {
        "lr": lambda: DistributedOptimizer(sgd, good, lr=-1.0),
        "two lr": lambda: DistributedOptimizer(sgd, [*rrefs_of(0), *good], lr=-1.0),
        "option": lambda: DistributedOptimizer(sgd, good, speed=3),
        "text": lambda: DistributedOptimizer(sgd, [*good, at(1, not_a_tensor)], lr=0.1),
        "leaf": lambda: DistributedOptimizer(sgd, [at(1, not_a_leaf)], lr=0.1),
        "empty": lambda: DistributedOptimizer(sgd, [], lr=0.1),
        "tensor": lambda: DistributedOptimizer(sgd, [good[0], torch.zeros(1)], lr=0.1),
        "one": lambda: DistributedOptimizer(sgd, good[0], lr=0.1),
        "twice": lambda: DistributedOptimizer(sgd, [*good, at(1, rrefs_of, 1)[0]], lr=0.1),
        "class": lambda: DistributedOptimizer(torch.nn.Linear, good),  # type: ignore[arg-type]
        "closure": lambda: DistributedOptimizer(torch.optim.LBFGS, good),
        "local": lambda: DistributedOptimizer(Local, good, lr=0.1),
    }
    return {case: error_of(fn) for case, fn in cases.items()}


def test_what_is_wrong_with_a_construction_is_said() -> None:
    errors = on_workers(construction_errors, 2)[0]
    for case, start, part in [
        ("lr", "ValueError: no optimizer was made", "worker1 raised ValueError: Invalid learning rate: -1.0"),
        ("two lr", "ValueError: no optimizer was made", "worker0 raised ValueError"),
        ("option", "TypeError: no optimizer was made", "worker1 raised TypeError"),
        ("text", "TypeError: ", "params_rref[2] refers to a str"),
        ("leaf", "ValueError: ", "params_rref[0] refers to a tensor computed from others"),
        ("empty", "ValueError: ", "params_rref is empty"),
        ("tensor", "TypeError: ", "params_rref[1] is a Tensor, not an RRef"),
        ("one", "TypeError: ", "params_rref must be a list of RRefs, not one"),
        ("twice", "ValueError: ", "params_rref[0] and [2] refer to the same tensor"),
        ("class", "TypeError: ", "optimizer_class must be"),
        ("closure", "TypeError: ", "LBFGS needs a closure"),
        ("local", "RuntimeError: no optimizer was made", "Can't pickle local object"),
    ]:
        assert errors[case].startswith(start), errors[case]
        assert part in errors[case], errors[case]


def test_without_rpc_it_says_so() -> None:
    with pytest.raises(RuntimeError, match="RPC is not initialized"):
        DistributedOptimizer(torch.optim.SGD, [], lr=0.1)


def step_errors() -> dict[str, str]:
    if dist.get_rank():
        return {}
    optimizer = DistributedOptimizer(torch.optim.SGD, rrefs_of(0) + at(1, rrefs_of, 1), lr=0.1)
    before = at(1, values_of, 1)
    errors = {}
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [at(1, forward, 2, batch(0)).sum()])
        errors["another model"] = error_of(lambda: optimizer.step(context_id))
    with dist_autograd.context() as context_id:
        loss = distributed_loss(2, batch(0))
        errors["too early"] = error_of(lambda: optimizer.step(context_id))
        dist_autograd.backward(context_id, [loss])
        errors["good"] = "unmoved" if all(map(torch.equal, before, at(1, values_of, 1))) else "moved"
        errors["good"] += ", " + error_of(lambda: optimizer.step(context_id))
    errors["closed"] = error_of(lambda: optimizer.step(context_id))
    errors["unknown"] = error_of(lambda: optimizer.step(12345))
    errors["no int"] = error_of(lambda: optimizer.step(None))  # type: ignore[arg-type]
    return errors


def test_what_is_wrong_with_a_step_is_said() -> None:
    errors = on_workers(step_errors, 2)[0]
    for case in ("too early", "another model"):
        assert errors[case].startswith("RuntimeError: no parameter has a gradient in context"), errors[case]
    assert errors["good"] == "unmoved, no error"
    for case in ("closed", "unknown"):
        assert errors[case].startswith("RuntimeError: this worker knows no autograd context"), errors[case]
    assert errors["no int"].startswith("TypeError: context_id must be"), errors["no int"]


def cannot_be_sent() -> str:
    if dist.get_rank():
        return ""
    try:
        DistributedOptimizer(torch.optim.SGD, all_rrefs(2), lr=lambda: 0.1)
    except Exception as error:
        return str(error)
    return "no error"


def test_an_argument_that_cannot_be_sent_is_no_answer_that_did_not_come() -> None:
    message = on_workers(cannot_be_sent, 2)[0]
    assert "worker1 could not be asked: " in message
    assert "no answer" not in message
