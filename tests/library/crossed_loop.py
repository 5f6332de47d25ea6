"""The model, the data and the unsharded loop of a program that `crossed.py` has drawn."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from library.crossed_options import DDP_WITH, Values
from library.halved import Halved
from library.training import OnMasters
from torch import nn, optim

BOUND = 2  # of the absolute value of an integer in the data, before it is made divisible
SHAPES = [(), (0,), (7,), (64,), (128,), (1000,), (4, 3, 3, 3), (8, 16), (300, 3), (5, 13)]
MATRICES = [(8, 16), (5, 13), (3, 64)]


class Coded(Halved):
    """`Halved` that can be copied and pickled."""

    def __reduce_ex__(self, _: Any) -> Any:
        return Coded, (self.codes, self.scale, self.context)

    def __deepcopy__(self, memo: Any) -> Coded:
        return Coded(self.codes.clone(), self.scale.clone(), self.context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:  # when torch loads it for a parameter of 16 bits
            return copy.deepcopy(args[0])
        return super().__torch_dispatch__(func, types, args, kwargs)


class LowBit(optim.Optimizer):
    """SGD with a momentum of 16-bit integers and one scale, as low-bit classes keep it."""

    def __init__(self, params: Any, lr: float = 2**-6) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = torch.enable_grad()(closure)() if closure else None
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                before = self.state[param].get("momentum", torch.zeros_like(param))
                before = before.values() if isinstance(before, Halved) else before
                momentum = param.grad.float() + 0.5 * before
                param.sub_(group["lr"] * momentum)
                self.state[param]["momentum"] = Coded.of(momentum) if param.numel() > 4 else momentum
        return loss


# By the option "classes": the class and its options.
CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (optim.SGD, {"lr": 2**-6, "weight_decay": 0.1}),
    "momentum": (optim.SGD, {"lr": 2**-6, "momentum": 0.5}),
    "adamw": (optim.AdamW, {"lr": 2**-6, "eps": 2**-10, "amsgrad": True}),
    "muon": (optim.Muon, {"lr": 2**-6}),
    "low_bit": (LowBit, {"lr": 2**-6}),
}

Data = dict[int, torch.Tensor]
"""By parameter number its gradient in one batch; parameters that are missing are not used."""


class Block(nn.Module):
    """The parameters of one group, by their numbers."""

    def __init__(self, first: int, values: Sequence[torch.Tensor]) -> None:
        super().__init__()
        for number, value in enumerate(values, start=first):
            self.register_parameter(f"p{number}", nn.Parameter(value))

    def forward(self, data: Data) -> torch.Tensor:
        # The parameter is used twice.
        of_each = [
            (param.double() * (grad - 1)).sum() + param.double().sum()
            for name, param in self.named_parameters()
            if (grad := data.get(int(name[1:]))) is not None
        ]
        return torch.stack([torch.zeros((), dtype=torch.float64), *of_each]).sum()


class Model(nn.Module):
    """The gradient of a parameter is what the data have for it. Buffers count and add up the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("batches", torch.tensor(0))

    def forward(self, data: Data) -> torch.Tensor:
        self.see(data)
        return torch.stack([block(data) for block in self.blocks]).sum() + self.seen.double().sum()

    @torch.no_grad()
    def see(self, data: Data) -> None:
        self.seen.add_(data[0].flatten()[:2])
        self.batches.add_(1)


@dataclass
class Passed:
    """The values that pass from one number of ranks to the next.

    Attributes:
        blocks: the values of each block's parameters, whether each is trained, and the group's options.
        buffers: of the model on rank 0.
        state: of the whole optimizer; None before the first update.
    """

    blocks: list[tuple[list[torch.Tensor], list[bool], dict[str, Any]]]
    buffers: list[torch.Tensor]
    state: Any = None


def draw_block(rng: Random, chosen: Values) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """The values of a group's parameters, and its options."""
    values = []
    for number in range(rng.randint(2, 4)):
        shape = rng.choice(MATRICES if chosen["classes"] == "muon" or not number else SHAPES)
        mixed = rng.choice(["float32", "bfloat16"])
        dtype = getattr(torch, mixed if chosen["dtype"] == "mixed" else chosen["dtype"])
        generator = torch.Generator().manual_seed(rng.getrandbits(40))
        value = torch.randint(-64, 65, shape, generator=generator).to(dtype) / 64
        layout = torch.channels_last if len(shape) == 4 else torch.contiguous_format
        values.append(value.contiguous(memory_format=layout))
    return values, {"lr": rng.choice([2**-4, 2**-6, 2**-8])}


class Loop:
    """The unsharded loop. It has what all ranks must have, and each rank runs one beside it.

    Attributes:
        total: the ranks whose data it adds up.
        factor: of all data.
        options: of each parameter group.
        buffers: those of each rank's model.
        source: the rank whose buffers are sent.
    """

    def __init__(self, chosen: Values, passed: Passed, total: int) -> None:
        self.chosen, self.total, self.buffers, self.source = chosen, total, [passed.buffers], 0
        # An average to which DDP adds before it averages again must be divisible, too.
        self.factor = total**2 if chosen["wrapper"] in DDP_WITH else total
        self.model, self.options = Model(), list[dict[str, Any]]()
        for values, trained, options in passed.blocks:
            self.grow(values, options)
            for param, is_trained in zip(self.model.blocks[-1].parameters(), trained, strict=True):
                param.requires_grad_(is_trained)
        self.send_buffers()
        plain, defaults = CLASSES[chosen["classes"]]
        if chosen["masters"]:
            self.optimizer: Any = OnMasters(self.groups(self.model), plain, **defaults)
        else:
            self.optimizer = plain(self.groups(self.model), **defaults)
        self.optimizer.defaults.setdefault("differentiable", False)  # as torch does when it loads
        if passed.state is not None:
            self.optimizer.load_state_dict(copy.deepcopy(passed.state))

    def grow(self, values: Sequence[torch.Tensor], options: dict[str, Any]) -> None:
        """One more block, a parameter group with options of its own."""
        first = len(list(self.model.parameters()))
        self.model.blocks.append(Block(first, [value.clone() for value in values]))
        self.options.append(options)

    def groups(self, model: Model) -> list[dict[str, Any]]:
        return [{"params": [*b.parameters()], **o} for b, o in zip(model.blocks, self.options, strict=True)]

    def data(self, seed: str, rank: int) -> Data:
        """The batch of one rank: integers that all ranks together can divide."""
        rng = Random(f"{seed}.{rank}")
        generator = torch.Generator().manual_seed(rng.getrandbits(40))
        unused = 0.4 if self.chosen["unused"] else 0.0
        return {
            number: torch.randint(-BOUND, BOUND + 1, param.shape, generator=generator).double() * self.factor
            for number, param in enumerate(self.model.parameters())
            if number == 0 or rng.random() >= unused
        }

    @torch.no_grad()
    def backward(self, batches: Sequence[Sequence[Data]], divisor: int | None = None) -> None:
        """Add the average of these batches' gradients: (batches, ranks)."""
        for number, param in enumerate(self.model.parameters()):
            used = [data[number] for batch in batches for data in batch if number in data]
            if param.requires_grad and used:
                average = sum(used[1:], used[0]) / (divisor or self.total)
                grad = torch.empty_like(param).copy_(average)
                param.grad = grad if param.grad is None else param.grad + grad

    def forward(self, batch: Sequence[Data], rank: int, buffers_are_sent: bool) -> torch.Tensor:
        """The loss of this rank on its data. Buffers of all ranks follow."""
        loss = torch.tensor(0.0)
        if buffers_are_sent:
            self.send_buffers()
        for of_rank, data in enumerate(batch):
            self.model.seen, self.model.batches = self.buffers[of_rank]
            if of_rank == rank:
                loss = self.model(data).detach()
            else:
                self.model.see(data)
        return loss

    def send_buffers(self) -> None:
        self.buffers = [[value.clone() for value in self.buffers[self.source]] for _ in range(self.total)]

    @property
    def gradients(self) -> list[torch.Tensor | None]:
        return [param.grad for param in self.model.parameters()]
