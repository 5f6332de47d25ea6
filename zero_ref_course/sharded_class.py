"""A strict check of anybody's sharded optimizer: `zero-ref check FILE.py --class ShardedOptimizer`.

It checks a class that courses ask for: made as `ShardedOptimizer(params, optimizer_cls, **kwargs)`, with the
interface of a `torch.optim.Optimizer`. The class may shard in any way. It is compared with the plain
optimizer on 2, 3 and 4 real ranks, bit for bit, and the state of the optimizers that it makes is counted.
Messages say what is wrong, and never how the class should be written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_ref.lab.own import load_own
from zero_ref_course._company import Company, NotYet, OnAllRanks, alike, gathered
from zero_ref_course._own import Once
from zero_ref_course.rungs import RungResult, outcome, run

__all__ = ["check_class", "CHECKS"]

Shapes = Sequence[tuple[int, ...]]

MODEL: Shapes = [(7, 5), (5,), (64, 3), (1,), (4, 4), (33,), (2, 3)]
FEW: Shapes = [(6, 5), (5,)]
"""Shapes of parameters. With FEW, one of three ranks has nothing to update."""

OPTIONS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
STEPS = 3
ABOUT_MY_ZERO = " The arguments are those of the text: MyZero(params, optimizer_class, **defaults)."
"""Advice that only applies to the book's own class."""


ROUNDED = -1
"""The age of a value that differs from the newest by rounding alone, where a step averages gradients."""
AGAIN = "averages the gradients again"
REDUCTIONS = {"all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single"}


class Counted(torch.optim.AdamW):
    """AdamW that lists, in `made`, the instances that the class under test has made on this rank."""

    made: list[Counted]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        type(self).made.append(self)


class Pair:
    """An optimizer of the class under test and plain AdamW, with equal parameters. Collective: all ranks.

    Attributes:
        bit_for_bit: values must be equal also where `step` averages the gradients again.
    """

    bit_for_bit = False

    def __init__(
        self, path: str, name: str, params: Sequence[nn.Parameter], twins: Sequence[nn.Parameter]
    ) -> None:
        self.name, self.params, self.twins = name, list(params), list(twins)
        self.company = Company(path)
        Counted.made = []
        with self.company.running(f"loading {name}"):
            made = getattr(load_own(path), name, None)
        if not isinstance(made, type):
            raise NotYet(f"the file has no class {name}.")
        with self.company.running(f"{name}(params, AdamW, lr=0.05, weight_decay=0.1)"):
            self.mine: Any = made(Once(self.params), Counted, **OPTIONS)
        self.plain = torch.optim.AdamW(self.twins, **OPTIONS)
        self.history = [[twin.detach().clone()] for twin in self.twins]  # the newest first

    @classmethod
    def of(cls, path: str, name: str, shapes: Shapes) -> Pair:
        """Make a pair with parameters of these shapes."""
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(shape, generator=generator) for shape in shapes]
        return cls(path, name, *([nn.Parameter(value.clone()) for value in values] for _ in range(2)))

    def add(self, shapes: Shapes, **options: Any) -> None:
        """Add a group to both optimizers."""
        generator = torch.Generator().manual_seed(len(self.params))
        values = [torch.randn(shape, generator=generator) for shape in shapes]
        new, twins = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
        with self.company.running(f"{self.name}.add_param_group(...)"):
            self.mine.add_param_group({"params": new, **options})
        self.plain.add_param_group({"params": twins, **options})
        self.params += new
        self.twins += twins
        self.history += [[twin.detach().clone()] for twin in twins]

    def both(self, step: int, without: Sequence[int] = ()) -> None:
        """Make a step of both with the same gradients on all ranks, and compare all parameters."""
        generator = torch.Generator().manual_seed(100 + step)
        for number, (param, twin) in enumerate(zip(self.params, self.twins)):
            gradient = torch.randn(param.shape, generator=generator)
            param.grad, twin.grad = (None, None) if number in without else (gradient.clone(), gradient)
        with self.company.running(f"{self.name}.step()"):
            self.mine.step()
        self.plain.step()
        self.compare(f"after step {step + 1}")

    def compare(self, when: str) -> None:
        """Raise, on all ranks alike, if a parameter is wrong on any rank."""
        for twin, values in zip(self.twins, self.history):
            values.insert(0, twin.detach().clone())
        ages = gathered([self._age(param, values) for param, values in zip(self.params, self.history)])
        owners = self.ranks_with(state=False)
        with alike():
            for number, of_ranks in enumerate(zip(*ages)):
                if self.bit_for_bit and ROUNDED in of_ranks:
                    raise AssertionError(
                        f"{when}, parameter {number} is the plain optimizer's but for rounding: {self.name}."
                        f"step() {AGAIN}, which are averages already. Of two equal gradients the average is "
                        "the same, bit for bit; of three it is rounded. Step with the gradients as they are."
                    )
                counted = tuple(0 if age == ROUNDED else age for age in of_ranks)
                if set(counted) != {0}:
                    raise AssertionError(f"{when}, {_what_is_wrong(number, counted, owners[number])}")

    def _age(self, param: torch.Tensor, newest_first: Sequence[torch.Tensor]) -> int | None:
        """The number of steps that a value is behind the plain optimizer's; None if that never had it."""
        age = next((age for age, value in enumerate(newest_first) if torch.equal(param, value)), None)
        if (
            age is None
            and REDUCTIONS & {*self.company.names}
            and torch.allclose(param, newest_first[0], atol=1e-7)
        ):
            return ROUNDED
        return age

    def ranks_with(self, state: bool) -> list[list[int]]:
        """The ranks whose optimizers have each parameter: in their state, or in a group."""
        places = {(param.data_ptr(), param.numel()): number for number, param in enumerate(self.params)}
        here: set[int | None] = set()
        for optimizer in Counted.made:
            grouped = [each for group in optimizer.param_groups for each in group["params"]]
            had = list(optimizer.state) if state else grouped
            here |= {places.get((each.data_ptr(), each.numel())) for each in had}
        of_ranks = gathered(here)
        return [
            [rank for rank, numbers in enumerate(of_ranks) if number in numbers]
            for number in range(len(self.params))
        ]

    def kept(self) -> list[list[int]]:
        """The elements of each state tensor of the optimizers that were made on each rank."""
        return gathered(
            [
                value.numel()
                for optimizer in Counted.made
                for state in optimizer.state.values()
                for value in state.values()
                if isinstance(value, torch.Tensor) and value.ndim
            ]
        )


def _what_is_wrong(number: int, of_ranks: tuple[int | None, ...], owners: list[int]) -> str:
    param = f"parameter {number}"
    right = [rank for rank, age in enumerate(of_ranks) if age == 0]
    old = [rank for rank, age in enumerate(of_ranks) if age]
    if right and old:
        return (
            f"{param} has the plain optimizer's value on the ranks {right}, and an older one on the ranks "
            f"{old}. After a step all ranks must have the new value."
        )
    if not right and None not in of_ranks:
        who = f"the ranks {owners} update it" if owners else "no optimizer on any rank has it"
        return f"{param} is old on all ranks; {who}."
    return (
        f"{param} has on rank {of_ranks.index(None)} a value that the plain optimizer never had: with "
        "the same gradients and options it moves otherwise."
    )


# ------------------------------------------------------------------------------------------- the checks


def _values(path: str, name: str, shapes: Shapes) -> None:
    pair = Pair.of(path, name, shapes)
    pair.bit_for_bit = True
    for step in range(STEPS):
        pair.both(step, without=[1] if step == 1 else ())


def _state(path: str, name: str, shapes: Shapes) -> str:
    pair = Pair.of(path, name, shapes)
    for step in range(2):
        pair.both(step)
    kept, owners = pair.kept(), pair.ranks_with(state=True)
    whole = 2 * sum(param.numel() for param in pair.params)
    with alike():
        twice = next((number for number, ranks in enumerate(owners) if len(ranks) > 1), None)
        assert twice is None, (
            f"the values are right, but the ranks {owners[twice or 0]} all keep state of parameter {twice}. "
            "Each parameter's state belongs to one rank: that is where the memory is saved."
        )
        total = sum(map(sum, kept))
        assert total == whole, (
            f"the values are right, but all ranks together keep {total} elements of state, and AdamW has "
            f"{whole} for these parameters. Was the optimizer made with the class that was given?"
        )
        fullest = max(map(sum, kept))
        assert fullest < whole or len(shapes) < 2 or len(kept) == 1, (
            "the values are right, but one rank keeps all of the state, and the others none."
        )
    return f"the fullest of {len(kept)} ranks keeps {fullest / whole:.0%} of the state"


def _tied(path: str, name: str) -> None:
    """Check a head that is the embedding: one parameter with two uses, whose gradients add up."""

    def model() -> nn.ModuleDict:
        torch.manual_seed(0)
        made = nn.ModuleDict(
            {"embed": nn.Embedding(11, 6), "mix": nn.Linear(6, 6), "head": nn.Linear(6, 11, False)}
        )
        made["head"].weight = made["embed"].weight
        return made

    ours, theirs = model(), model()
    pair = Pair(path, name, list(ours.parameters()), list(theirs.parameters()))
    for step in range(STEPS):
        tokens = torch.randint(11, (4, 3), generator=torch.Generator().manual_seed(step))
        with pair.company.running(f"{name}.zero_grad()"):
            pair.mine.zero_grad()
        pair.plain.zero_grad()
        for each in (ours, theirs):
            each["head"](each["mix"](each["embed"](tokens)).tanh()).square().mean().backward()
        with pair.company.running(f"{name}.step()"):
            pair.mine.step()
        pair.plain.step()
        pair.compare(f"with one parameter as embedding and as head, after step {step + 1}")
        tied = gathered(ours["head"].weight is ours["embed"].weight)
        with alike():
            assert all(tied), "after a step embedding and head are no longer the same parameter."


def _groups(path: str, name: str) -> None:
    pair = Pair.of(path, name, MODEL)
    pair.both(0)
    pair.add([(9, 2), (3,), (8,)], lr=0.2)
    counts = gathered([len(group["params"]) for group in getattr(pair.mine, "param_groups", ())])
    with alike():
        for rank, of_rank in enumerate(counts):
            assert of_rank == [len(MODEL), 3], (
                f"after add_param_group, param_groups on rank {rank} has groups of {of_rank} parameters. "
                f"Seen from outside there are two, of {len(MODEL)} and 3, on every rank, as in a plain "
                "optimizer."
            )
    for step in range(1, STEPS + 1):
        pair.both(step)
    owners = pair.ranks_with(state=True)
    with alike():
        for number in range(len(MODEL), len(owners)):
            assert len(owners[number]) <= 1, (
                f"the values are right, but the added parameter {number} is kept by the ranks "
                f"{owners[number]}: its state, too, belongs to one rank."
            )


def _options(path: str, name: str) -> None:
    pair = Pair.of(path, name, MODEL)
    for step in range(STEPS):
        for optimizer in (pair.mine, pair.plain):
            for group in optimizer.param_groups:
                group["lr"] = 0.05 / (step + 1)
        try:
            pair.both(step)
        except OnAllRanks as error:
            raise OnAllRanks(
                f"with lr changed in param_groups, as a scheduler does, {error}" if step else str(error)
            ) from None
    with pair.company.running(f"{name}.zero_grad()"):
        pair.mine.zero_grad()
    left = gathered([n for n, p in enumerate(pair.params) if p.grad is not None and bool(p.grad.any())])
    with alike():
        for rank, numbers in enumerate(left):
            assert not numbers, (
                f"after zero_grad() rank {rank} still has gradients of the parameters {numbers}: backward "
                "would add to them."
            )


def _closure(path: str, name: str) -> None:
    pair = Pair.of(path, name, FEW)
    calls: list[int] = []

    def closure(params: Sequence[nn.Parameter]) -> torch.Tensor:
        for param in params:
            param.grad = None
        loss = torch.stack([param.square().sum() for param in params]).sum()
        loss.backward()
        return loss.detach()

    def counted() -> torch.Tensor:
        calls.append(1)
        return closure(pair.params)

    with pair.company.running(f"{name}.step(closure)"), torch.enable_grad():
        returned = pair.mine.step(counted)
    right = float(closure(pair.twins))
    pair.plain.step()
    said = gathered((len(calls), None if returned is None else float(returned)))
    with alike():
        for rank, (count, loss) in enumerate(said):
            assert count == 1, (
                f"step(closure) calls the closure {count} times on rank {rank}, and a plain AdamW calls it "
                "once: it computes the gradients, also on a rank that updates nothing."
            )
            assert loss == right, (
                f"step(closure) returned {loss} on rank {rank}; a plain one returns the loss, {right}."
            )
    pair.compare("after step(closure)")


def _on_ranks(check: Callable[..., Any], path: str, name: str, *cases: tuple[Any, ...]) -> Any:
    said = None
    for world_size, *args in cases:
        try:
            said = run(check, world_size, path, name, *args)
        except (AssertionError, NotYet) as error:
            text = str(error).replace(ABOUT_MY_ZERO, "")
            raise type(error)(f"on {world_size} ranks: {text}") from None
    return said


CHECKS: dict[str, Callable[[str, str], str]] = {
    "values": lambda path, name: (
        _on_ranks(_values, path, name, (2, MODEL), (3, FEW), (4, MODEL))
        or f"{STEPS} steps on 2, 3 and 4 ranks are plain AdamW's, bit for bit"
    ),
    "state": lambda path, name: _on_ranks(_state, path, name, (2, MODEL), (4, MODEL)),
    "tied weights": lambda path, name: (
        _on_ranks(_tied, path, name, (2,), (3,)) or "an embedding that is the head too stays one parameter"
    ),
    "groups": lambda path, name: (
        _on_ranks(_groups, path, name, (2,), (3,))
        or "a group added later, with its own lr, as in plain AdamW"
    ),
    "options": lambda path, name: (
        _on_ranks(_options, path, name, (2,))
        or "a changed lr reaches the update; zero_grad clears all gradients"
    ),
    "closure": lambda path, name: (
        _on_ranks(_closure, path, name, (2,), (3,))
        or "step(closure) calls it once on each rank, and returns the loss"
    ),
}
"""The checks by name, in order; each takes the file and the class's name."""


def check_class(path: str | os.PathLike[str], name: str) -> Iterator[RungResult]:
    """Check a sharded optimizer class of any file, one check after the other, and yield the results.

    >>> [result.rung for result in check_class("optimizer.py", "ShardedOptimizer")]          # doctest: +SKIP
    ['values', 'state', 'tied weights', 'groups', 'options', 'closure']

    Args:
        path: a Python file, which is run on each rank.
        name: of the class in it. `name(params, optimizer_cls, **kwargs)` must make one.
    Raises:
        OSError: the file cannot be read.
    Cost:
        Some seconds: the checks run on 2, 3 and 4 real ranks. If `values` fails, the others are left out,
        unless the difference is rounding alone.
    """
    file = os.path.realpath(path)
    Path(file).read_bytes()
    for check, grader in CHECKS.items():
        result = outcome(check, lambda path, grader=grader: grader(path, name), file)  # type: ignore[misc]
        yield result
        if check == "values" and result.state != "holds" and AGAIN not in result.message:
            return
