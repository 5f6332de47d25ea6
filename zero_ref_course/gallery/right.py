"""A right program in a hundred lines: stage 1 on top of averaged gradients.

Each exhibit gets one method wrong.

- `Sharded`: the program, as the doctor drives it;
- `Owned`: its optimizer, in the manner of `zero_ref/stairs/owners.py`: each parameter has an owner, which
  keeps its state, updates it, and sends it to all;
- `MuonAndAdamW`: a plain optimizer that treats a parameter as a matrix, so parameters must be whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zero_ref.doctor.program import Program

__all__ = ["Sharded", "Owned", "MuonAndAdamW", "orthogonalized"]


class Sharded(Program):
    """A data-parallel program whose optimizer state is sharded, without a wrapper of the model.

    >>> def factory(model):
    ...     return Sharded(model, torch.optim.AdamW, lr=0.05)

    Args:
        model: has equal values on all ranks.
        optimizer_class, **options: of the local optimizers.
    """

    optimizer: Owned

    def __init__(
        self,
        model: nn.Module,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        **options: Any,
    ) -> None:
        super().__init__(self.sharded(model.parameters(), optimizer_class, {"lr": LR, **options}), model)

    def sharded(
        self,
        params: Iterable[nn.Parameter],
        optimizer_class: type[torch.optim.Optimizer],
        options: dict[str, Any],
    ) -> Owned:
        """Make the optimizer. An exhibit may make another one."""
        return Owned(params, optimizer_class, **options)

    def params(self) -> list[nn.Parameter]:
        """The parameters of the model and of layers that were added."""
        return [*self.model.parameters(), *self.added.parameters()]

    def end_of_backward(self) -> None:
        """Average the gradients over the ranks. Collective: all ranks."""
        self.sum_gradients(self.params())
        self.divide_gradients(dist.get_world_size())

    def sum_gradients(self, params: Iterable[nn.Parameter]) -> None:
        """Replace each gradient by the sum over the ranks; a rank that has none adds 0.

        Collective: all ranks.
        """
        for param in params:
            have_it = torch.tensor(float(param.grad is not None))
            dist.all_reduce(have_it)
            if have_it:
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                dist.all_reduce(param.grad)

    def divide_gradients(self, by: float) -> None:
        """Divide every gradient. No communication."""
        for param in self.params():
            if param.grad is not None:
                param.grad.div_(by)


LR = 0.05
"""The learning rate by default."""


class Owned(torch.optim.Optimizer):
    """An optimizer that keeps on each rank the state of the parameters that this rank owns.

    >>> optimizer = Owned(model.parameters(), torch.optim.AdamW, lr=0.05)               # doctest: +SKIP

    Args:
        params: as for torch.optim, with equal values on all ranks.
        optimizer_class: steps the parameters that this rank owns.
        **options: of `optimizer_class`.
    """

    def __init__(
        self, params: Iterable[Any], optimizer_class: type[torch.optim.Optimizer], **options: Any
    ) -> None:
        self.optimizer_class, self.options = optimizer_class, options
        self.owners: dict[nn.Parameter, int] = {}
        self.loads = [0] * dist.get_world_size()
        self.local: torch.optim.Optimizer | None = None
        self.whole: dict[str, Any] = {}
        # What the class has for options that are not given belongs into the groups that a program sees.
        super().__init__(params, optimizer_class([nn.Parameter(torch.zeros(1))], **options).defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Give each new parameter to the rank that has the fewest elements."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for param in sorted(group["params"], key=lambda param: -param.numel()):
            self.owners[param] = self.loads.index(min(self.loads))
            self.loads[self.owners[param]] += param.numel()
        mine = {**group, "params": [param for param in group["params"] if self.is_mine(param)]}
        if self.local is None:
            self.local = self.optimizer_class([mine], **self.options)
        else:
            self.local.add_param_group(mine)

    def is_mine(self, param: nn.Parameter) -> bool:
        """Whether this rank updates a parameter."""
        return self.owners[param] == dist.get_rank()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters that this rank owns, then send every parameter from its owner to all ranks.

        Collective: all ranks, after their gradients were averaged.
        Cost: each rank receives the parameters that it does not own.
        """
        assert self.local is not None
        # A scheduler writes into the groups that it sees; the local optimizer reads its own.
        for group, mine in zip(self.param_groups, self.local.param_groups):
            mine.update({name: value for name, value in group.items() if name != "params"})
        self.local.step()
        self.publish()

    def publish(self) -> None:
        """Send every parameter from its owner. Collective: all ranks."""
        for param, owner in self.owners.items():
            dist.broadcast(param.data, group_src=owner)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the state of all parameters, by number; `state_dict` then gives it.

        Collective: all ranks.
        """
        assert self.local is not None
        state = self.local.state
        mine = {n: state[p] for n, p in self.numbered() if self.is_mine(p) and p in state}
        of_ranks: list[dict[int, Any]] = [{}] * dist.get_world_size()
        dist.all_gather_object(of_ranks, mine)
        groups = [{name: v for name, v in group.items() if name != "params"} for group in self.param_groups]
        self.whole = {
            "state": {n: s for of_rank in of_ranks for n, s in of_rank.items()},
            "param_groups": groups,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state that `consolidate_state_dict` has gathered."""
        return self.whole

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load the state of this rank's parameters from a state of all parameters."""
        assert self.local is not None
        for group, before in zip(self.param_groups, saved["param_groups"]):
            group.update(before)
        for number, param in self.numbered():
            if self.is_mine(param) and number in saved["state"]:
                kept = saved["state"][number]
                self.local.state[param] = {
                    name: value.clone() if isinstance(value, torch.Tensor) else value
                    for name, value in kept.items()
                }

    def numbered(self) -> list[tuple[int, nn.Parameter]]:
        """All parameters with their numbers, group after group."""
        return list(enumerate(param for group in self.param_groups for param in group["params"]))


def orthogonalized(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Return about the orthogonal matrix that is nearest to `matrix`, by Newton and Schulz's iteration.

    >>> nearly = orthogonalized(torch.tensor([[3.0, 0.0], [0.0, 0.5]]))
    >>> bool((nearly - torch.eye(2)).abs().max() < 0.35)
    True

    Args:
        matrix: (rows, columns).
        steps: of the iteration.
    Returns:
        The same shape; singular values are between 0.65 and 1.25.
    Source:
        The coefficients are those of Jordan, Jin, Boza, You, Cesista, Newhouse and Bernstein, "Muon", 2024,
        https://kellerjordan.github.io/posts/muon/.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


class MuonAndAdamW(torch.optim.AdamW):
    """Muon for matrices, AdamW for the rest: a plain optimizer, which needs whole parameters.

    >>> weight = nn.Parameter(torch.tensor([[3.0, 0.0], [0.0, 0.5]]))
    >>> weight.grad = torch.tensor([[30.0, 0.0], [0.0, 10.0]])
    >>> MuonAndAdamW([weight], lr=0.1).step()
    >>> weight.detach().round(decimals=1)                  # a small and a large gradient move alike
    tensor([[2.9000, 0.0000],
            [0.0000, 0.4000]])

    Args:
        params, lr, **options: as for torch.optim.AdamW; the matrices have the same lr.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step the matrices by Muon with momentum 0.9, then the rest by AdamW."""
        hidden: list[tuple[nn.Parameter, torch.Tensor]] = []
        for group in self.param_groups:
            for param in group["params"]:
                if param.ndim == 2 and param.grad is not None:
                    self.step_matrix(param, param.grad, group)
                    hidden.append((param, param.grad))
                    param.grad = None  # AdamW leaves alone what has no gradient
        super().step()
        for param, grad in hidden:
            param.grad = grad

    def step_matrix(self, param: nn.Parameter, grad: torch.Tensor, group: dict[str, Any]) -> None:
        """Move a matrix by the orthogonal matrix nearest to its momentum."""
        state = self.state[param]
        state.setdefault("step", torch.zeros(()))  # AdamW looks for one in every state that it loads
        momentum = state.setdefault("momentum", torch.zeros_like(param))
        momentum.mul_(0.9).add_(grad)
        param.sub_(group["lr"] * orthogonalized(momentum))
