"""A class of anybody's, checked by its interface alone: `zero-ref doctor --class FILE.py:NAME`.

Courses ask for three things, and what NAME takes says which it is:

- a sharded optimizer, `NAME(params, optimizer_class, **options)`;
- a DDP, `NAME(module)`: a wrapper whose backward, with `ddp_on_after_backward(wrapper, optimizer)` if the
  file has it, averages the gradients over the ranks;
- an FSDP, `NAME(module, compute_dtype=None)`, with `fsdp_on_after_backward(wrapper, optimizer)` and
  `fsdp_gather_full_params(wrapper)`, which returns whole parameters by name.

Each is held against plain training in one process with the data of all ranks. These are the names of Stanford
CS336's tests/adapters.py, in the assignment "systems" of 2026. Methods of the wrapper serve as well:
`finish_gradient_synchronization()` and `gather_full_params()`. Messages say what is wrong, and never how the
class should be written.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from zero_ref.doctor.files import InFile
from zero_ref.doctor.nccl_on_gloo import nccl_on_gloo
from zero_ref.doctor.shadow import departure
from zero_ref.lab import ranks

STEPS = 3
OPTIONS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
TOLERANCE = 1e-3
"""The share of a step that sums in another order may change: in float32 they round by about 1e-6 of it."""
SHORT_TOLERANCE = 0.05
"""The same where 16 bits are sent and summed: bfloat16 rounds by 1/256."""


class Checked(NamedTuple):
    """The outcome of one check: `text` says what holds, or what is wrong."""

    check: str
    holds: bool
    text: str


class Gain(nn.Module):
    """Multiplies by a vector, and keeps the dtype, as norms do. It also has a parameter that is frozen."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(width) + 0.5)
        self.fixed = nn.Parameter(torch.full((2,), 2.0), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Outputs of the same shape and dtype."""
        return (inputs.float() * self.gain * self.fixed[0]).to(inputs.dtype)


class Tokens(nn.Module):
    """Predicts tokens: an embedding, two matrices and a vector. Sizes that 2 and 3 do not divide.

    Args:
        tied: the embedding is also the last matrix.
    """

    def __init__(self, seed: int, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        linear, embedding = _layers()
        self.embed, self.gain, self.mix, self.head = embedding(11, 6), Gain(6), linear(6, 7), linear(7, 11)
        if tied:
            self.mix, self.head = linear(6, 6), linear(6, 11)
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of predicting each token from the one before."""
        logits = self.head(self.mix(self.gain(self.embed(tokens[:, :-1]))).relu())
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def _layers() -> tuple[Any, Any]:
    """The course's own layers where they are installed, because its students' FSDP looks for these."""
    try:
        from cs336_basics.model import Embedding, Linear
    except ImportError:
        return lambda ins, outs: nn.Linear(ins, outs, bias=False), nn.Embedding
    return Linear, Embedding


def _batch(step: int, rank: int) -> torch.Tensor:
    return torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(100 * step + rank))


class Pair:
    """The class under test and plain training beside it, on each rank.

    Args:
        build: makes the optimizer and the wrapper of the tested model.
        plain: makes the plain optimizer.
        dtype: of the matrices while they compute.
    """

    def __init__(
        self,
        build: Callable[[Tokens], tuple[Any, Any]],
        plain: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        tied: bool,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.twin = Tokens(0, tied), Tokens(0, tied)
        self.optimizer, self.wrapper = build(self.model)
        self.plain = plain([param for param in self.twin.parameters() if param.requires_grad])
        self.dtype = dtype

    def plain_backward(self, step: int) -> None:
        """Gradients of the mean loss of all ranks' batches."""
        self.plain.zero_grad()
        short = {"embed.weight", "mix.weight", "head.weight"} if self.dtype else set()
        values = {
            name: param.to(self.dtype) if name in short else param
            for name, param in self.twin.named_parameters()
        }
        batches = [_batch(step, rank) for rank in range(dist.get_world_size())]
        losses = [torch.func.functional_call(self.twin, values, batch) for batch in batches]
        torch.stack(losses).mean().backward()

    def plain_step(self, values: Callable[[], dict[str, torch.Tensor]], step: int) -> str | None:
        """Make the plain step; say how these values differ from its result."""
        old = {name: param.detach().clone() for name, param in self.twin.named_parameters()}
        self.plain.step()
        seen = values()
        tolerance = SHORT_TOLERANCE if self.dtype else TOLERANCE
        for name, param in self.twin.named_parameters():
            if name not in seen or seen[name].shape != param.shape:
                shape = tuple(seen[name].shape) if name in seen else None
                return f"{name} has the shape {shape}, and is whole {tuple(param.shape)}."
            how = departure(seen[name].detach().float(), old[name], param.detach(), tolerance)
            if how is not None:
                return f"step {step + 1}: {name} {how}."
            with torch.no_grad():
                param.copy_(seen[name])  # so that rounding does not grow from step to step
        return None

    def values(self) -> dict[str, torch.Tensor]:
        """The tested model's parameters."""
        return dict(self.model.named_parameters())


# ---------------------------------------------------------------------------------- a sharded optimizer


class Counted(torch.optim.AdamW):
    """AdamW that lists, in `made`, the instances that the class under test has made on this rank."""

    made: list[Counted]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        type(self).made.append(self)


def _sharded(given: Any, tied: bool = False) -> Pair:
    Counted.made = []

    def build(model: Tokens) -> tuple[Any, Any]:
        return given((p for p in model.parameters() if p.requires_grad), Counted, **OPTIONS), model

    return Pair(build, lambda params: torch.optim.AdamW(params, **OPTIONS), tied)


def _sharded_step(pair: Pair, step: int, closure: bool = False) -> Any:
    """A step of both, with gradients that are averages already."""
    pair.plain_backward(step)
    for name, param in pair.model.named_parameters():
        twin = pair.twin.get_parameter(name)
        param.grad = None if twin.grad is None else twin.grad.clone()
    return pair.optimizer.step((lambda: torch.tensor(7.0)) if closure else None)


def _sharded_values(given: Any, tied: bool = False) -> str | None:
    pair, wrong = _sharded(given, tied), None
    for step in range(STEPS):
        for group in (pair.optimizer.param_groups + pair.plain.param_groups) if step == 1 else ():
            group["lr"] = 0.02  # as a scheduler does
        _sharded_step(pair, step)
        wrong = wrong or pair.plain_step(pair.values, step)
    if tied and pair.model.head.weight is not pair.model.embed.weight:
        wrong = wrong or "after a step embedding and head are no longer one parameter."
    return wrong


def _sharded_tied(given: Any) -> str | None:
    return _sharded_values(given, tied=True)


def _sharded_group(given: Any) -> str | None:
    pair, wrong = _sharded(given), None
    for model, optimizer in ((pair.model, pair.optimizer), (pair.twin, pair.plain)):
        model.gain.fixed.requires_grad_()
        optimizer.add_param_group({"params": [model.gain.fixed], "lr": 0.2})
    for step in range(STEPS):
        _sharded_step(pair, step)
        wrong = wrong or pair.plain_step(pair.values, step)
    groups = [len(group["params"]) for group in pair.optimizer.param_groups]
    return wrong or (
        None if groups == [4, 1] else f"param_groups has groups of {groups} parameters, not [4, 1]."
    )


def _sharded_state(given: Any) -> str | None:
    pair = _sharded(given)
    for step in range(2):
        _sharded_step(pair, step)
    kept = sum(
        value.numel()
        for made in Counted.made
        for state in made.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.ndim
    )
    of_ranks = _of_ranks(kept)
    whole = 2 * sum(param.numel() for param in pair.plain.param_groups[0]["params"])
    if sum(of_ranks) != whole:
        return (
            f"the ranks keep {of_ranks} elements of state, and AdamW has {whole}: each belongs to one rank."
        )
    return None if max(of_ranks) < whole else "one rank keeps all of the state."


def _sharded_closure(given: Any) -> str | None:
    pair = _sharded(given)
    calls: list[int] = []

    def closure() -> torch.Tensor:
        calls.append(1)
        return torch.tensor(7.0)

    pair.plain_backward(0)
    loss = pair.optimizer.step(closure)
    if len(calls) != 1:
        return f"step(closure) calls the closure {len(calls)} times, and a plain AdamW calls it once."
    pair.optimizer.zero_grad()
    if loss is None or float(loss) != 7.0:
        return f"step(closure) returned {loss}; a plain one returns the loss, 7.0."
    return None


# ------------------------------------------------------------------------------------------------- wrappers


def _after_backward(given: Any, wrapper: Any, optimizer: Any, prefix: str) -> None:
    module = inspect.getmodule(given)
    hook = getattr(module, f"{prefix}_on_after_backward", None)
    if hook is not None:
        hook(wrapper, optimizer)
    elif hasattr(wrapper, "finish_gradient_synchronization"):
        wrapper.finish_gradient_synchronization()


def _of_ranks(value: Any) -> list[Any]:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _wrapped(given: Any, tied: bool = False, **options: Any) -> Pair:
    def build(model: Tokens) -> tuple[Any, Any]:
        wrapper = given(model, **options)
        return _sgd([param for param in wrapper.parameters() if param.requires_grad]), wrapper

    return Pair(build, _sgd, tied, options.get("compute_dtype"))


def _sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer under a wrapper: Adam would hide that all gradients are N times too large."""
    return torch.optim.SGD(params, lr=0.5)


def _backward(pair: Pair, given: Any, step: int, prefix: str) -> None:
    pair.optimizer.zero_grad()
    pair.wrapper(_batch(step, dist.get_rank())).backward()
    _after_backward(given, pair.wrapper, pair.optimizer, prefix)


def _trained(
    pair: Pair, given: Any, prefix: str, values: Callable[[], dict[str, torch.Tensor]]
) -> str | None:
    wrong = None
    for step in range(STEPS):
        _backward(pair, given, step, prefix)
        pair.plain_backward(step)
        pair.optimizer.step()
        wrong = wrong or pair.plain_step(values, step)
    return wrong


def _ddp_start(given: Any) -> str | None:
    model, rank = Tokens(dist.get_rank()), dist.get_rank()
    given(model)
    right = dict(Tokens(0).named_parameters())
    wrong = [name for name, param in model.named_parameters() if not torch.equal(param, right[name])]
    return f"{wrong[0]} is not rank 0's after the wrapper was made on rank {rank}." if wrong else None


def _ddp_values(given: Any, tied: bool = False) -> str | None:
    pair = _wrapped(given, tied)
    return _trained(pair, given, "ddp", pair.values)


def _ddp_tied(given: Any) -> str | None:
    return _ddp_values(given, tied=True)


def _ddp_gradients(given: Any) -> str | None:
    pair = _wrapped(given)
    _backward(pair, given, 0, "ddp")
    pair.plain_backward(0)
    for name, twin in pair.twin.named_parameters():
        grad = pair.model.get_parameter(name).grad
        if (grad is None) != (twin.grad is None):
            return f"{name} has {'no gradient' if grad is None else 'a gradient'} after backward."
        if grad is not None and twin.grad is not None:
            how = departure(grad, torch.zeros_like(grad), twin.grad, TOLERANCE)
            if how is not None:
                how = how.replace("moved", "is").replace(
                    "far as the plain step", "large as the mean over the ranks"
                )
                return f"the gradient of {name} {how}."
    return None


def _whole(given: Any, pair: Pair) -> Callable[[], dict[str, torch.Tensor]]:
    gather = getattr(inspect.getmodule(given), "fsdp_gather_full_params", None)
    return pair.wrapper.gather_full_params if gather is None else lambda: gather(pair.wrapper)


def _fsdp_values(given: Any) -> str | None:
    pair = _wrapped(given)
    return _trained(pair, given, "fsdp", _whole(given, pair))


def _fsdp_dtype(given: Any) -> str | None:
    pair = _wrapped(given, compute_dtype=torch.bfloat16)
    seen: list[torch.dtype] = []
    pair.model.mix.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    wrong = _trained(pair, given, "fsdp", _whole(given, pair))
    if seen[0] != torch.bfloat16:
        return f"with compute_dtype=torch.bfloat16 a matrix computes in {seen[0]}."
    kept = {param.dtype for param in pair.wrapper.parameters()}
    return f"with compute_dtype, parameters are kept in {kept}." if kept != {torch.float32} else wrong


def _fsdp_shards(given: Any) -> str | None:
    pair = _wrapped(given)
    held = []
    for step in range(2):
        held.append(sum(param.numel() for param in pair.wrapper.parameters()))
        _backward(pair, given, step, "fsdp")
        pair.optimizer.step()
    whole = sum(param.numel() for param in pair.twin.parameters())
    most = max(map(max, _of_ranks(held)))
    if most >= whole:
        return f"a rank holds {most} elements between steps, and the model has {whole}: nothing is sharded."
    return None


def _fsdp_gradients(given: Any) -> str | None:
    pair = _wrapped(given, compute_dtype=torch.bfloat16)
    _backward(pair, given, 0, "fsdp")
    for name, param in pair.wrapper.named_parameters():
        if param.requires_grad and param.grad is None:
            return f"{name} has no gradient after backward."
        if param.grad is not None and (param.grad.shape, param.grad.dtype) != (param.shape, param.dtype):
            return (
                f"the gradient of {name} is {param.grad.dtype} of {tuple(param.grad.shape)}, and the "
                f"parameter {param.dtype} of {tuple(param.shape)}."
            )
    gain = _of_ranks(pair.model.gain.gain.grad)
    same = all(torch.equal(one, gain[0]) for one in gain)
    return None if same else "the gradient of gain.gain, which is not sharded, differs between ranks."


Check = Callable[[Any], str | None]
KINDS: dict[str, dict[str, tuple[Check, str]]] = {
    "a sharded optimizer": {
        "values": (_sharded_values, "its steps are plain AdamW's, also after its learning rate has changed"),
        "state": (_sharded_state, "each parameter's state is kept by one rank, and no rank keeps all"),
        "tied weights": (_sharded_tied, "an embedding that is the head too stays one parameter"),
        "groups": (_sharded_group, "a group that is added, with a rate of its own, is stepped"),
        "closure": (_sharded_closure, "step(closure) calls it once on each rank, and returns the loss"),
    },
    "a DDP": {
        "start": (_ddp_start, "all ranks start from rank 0's values"),
        "gradients": (
            _ddp_gradients,
            "gradients are the mean over the ranks, and a frozen parameter has none",
        ),
        "values": (_ddp_values, "training is that of one process with all data"),
        "tied weights": (_ddp_tied, "so is that of a model whose embedding is the head too"),
    },
    "an FSDP": {
        "values": (_fsdp_values, "whole parameters are those of one process with all data"),
        "shards": (_fsdp_shards, "no rank holds all parameters between steps"),
        "gradients": (_fsdp_gradients, "gradients have the shapes and dtypes of what they update"),
        "compute_dtype": (
            _fsdp_dtype,
            "with bfloat16 the matrices compute in it, and parameters stay float32",
        ),
    },
}


def kind_of(given: Callable[..., Any]) -> str:
    """Which of `KINDS` this is, by what it takes.

    >>> kind_of(lambda module, compute_dtype=None: None)
    'an FSDP'

    Raises:
        ValueError: it takes something else.
    """
    parameters = inspect.signature(given).parameters.values()
    needed = [one for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    if len(needed) == 2:
        return "a sharded optimizer"
    if len(needed) == 1:
        return "an FSDP" if any(one.name == "compute_dtype" for one in parameters) else "a DDP"
    takes = ", ".join(one.name for one in needed) or "nothing"
    raise ValueError(
        f"{getattr(given, '__name__', given)} takes {takes}. A sharded optimizer takes (params, "
        "optimizer_class, **options), a DDP (module), and an FSDP (module, compute_dtype=None)."
    )


def check_class(target: InFile, numbers: Sequence[int] = (2, 3), timeout: float = 60.0) -> Iterator[Checked]:
    """Check what a name in a file makes, one check after the other.

    Args:
        target: the name, and its file, which is run on each rank.
        numbers: of ranks; each check is made on each.
        timeout: seconds for a check, times `zero_ref.lab.patience.patience()`.
    Returns:
        The outcomes, as the checks end: that of the first number of ranks where a check fails, if it does.
        After a check in which a rank raises or hangs the others are left out.
    Raises:
        ValueError: the file has no such name, or it takes other arguments.
    """
    for name, (check, holds) in KINDS[kind_of(target.loaded())].items():
        for number in numbers:
            try:
                of_ranks = ranks.run(_on_rank, number, check, target, timeout=timeout, backend="gloo")
            except ranks.RankError as error:
                yield Checked(name, False, f"on {number} ranks: rank {error.rank}: {error.summary}\n{error}")
                return
            wrong = next((text for text in of_ranks if text is not None), None)
            if wrong is not None:
                break
        yield Checked(name, wrong is None, holds if wrong is None else f"on {number} ranks: {wrong}")


def _on_rank(check: Check, target: InFile) -> str | None:
    with nccl_on_gloo():
        return check(target.loaded())
