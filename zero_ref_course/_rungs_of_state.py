"""Checks on each rank: the rungs checkpoint and masters of the reader's own file."""

from __future__ import annotations

from typing import Any

import torch

from zero_ref.lab.own import CLASS
from zero_ref_course._beside import Beside, Shapes
from zero_ref_course._company import alike, gathered

MANY_STEPS = 24  # of updates far smaller than the gap between two 16-bit values

NOT_THE_VALUE = "is not what the unsharded optimizer has there"


def saved(path: str, shapes: Shapes, **options: Any) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Make two steps, compare the state dict with the package's, and return it and the parameters."""
    dtype = torch.bfloat16 if options else torch.float32
    beside = Beside(path, shapes, dtype, **options)
    beside.needs("step", "state_dict", "load_state_dict")
    for number in range(2):
        beside.step_mine(number)
        beside.step_package(number)
    with beside.company.running(f"{CLASS}.state_dict()"):
        mine = beside.mine.state_dict()
    beside.package.consolidate_state_dict(to="all")
    wrong = gathered(_wrong_state(mine, beside.package.state_dict()))
    with alike():
        for rank, sentence in enumerate(wrong):
            assert not sentence or wrong[0] or NOT_THE_VALUE in sentence, (
                f"state_dict() gives the whole state on rank 0, and on rank {rank} of {beside.world_size} it "
                "does not. Any rank may save it: gather it on all of them, as dist.all_gather_object does."
            )
            assert not sentence, f"on rank {rank} of {beside.world_size}, state_dict(){sentence}"
    return mine, [param.detach() for param in beside.params]


def _wrong_state(mine: Any, plain: dict[str, Any]) -> str:
    """The difference from a plain optimizer's state dict; empty if there is none."""
    if not isinstance(mine, dict) or set(mine) != {"state", "param_groups"}:
        has = sorted(mine) if isinstance(mine, dict) else type(mine).__name__
        return f" is {has}. It needs the keys state and param_groups, on every rank."
    if sorted(mine["state"]) != sorted(plain["state"]):
        return (
            f"['state'] has the keys {list(mine['state'])}. The unsharded optimizer has "
            f"{list(plain['state'])}: the numbers of all parameters in the model, not in a rank's own list."
        )
    for number, state in plain["state"].items():
        if set(mine["state"][number]) != set(state):
            has = sorted(mine["state"][number])
            return f"['state'][{number}] has the keys {has}; {sorted(state)} belong there."
        for key, value in state.items():
            theirs = mine["state"][number][key]
            if not (isinstance(theirs, torch.Tensor) and torch.equal(theirs.cpu(), value)):
                return f"['state'][{number}]['{key}'] {NOT_THE_VALUE}."
    numbers = [group.get("params") for group in mine["param_groups"]]
    if numbers != [group["params"] for group in plain["param_groups"]]:
        return (
            f"['param_groups'] lists the parameters {numbers}. The unsharded optimizer has "
            f"{[group['params'] for group in plain['param_groups']]}."
        )
    return ""


def resumed(
    path: str, shapes: Shapes, state: dict[str, Any], params: list[torch.Tensor], **options: Any
) -> None:
    """Load the state, make two more steps, and compare with the package, which loads it too."""
    beside = Beside(path, shapes, params[0].dtype, **options)
    for optimizer_params in (beside.params, beside.twins):
        for param, value in zip(optimizer_params, params):
            param.data.copy_(value)
    beside.values_of_twins = [[value.clone()] for value in params]
    with beside.company.running(f"{CLASS}.load_state_dict(state_dict)"):
        beside.mine.load_state_dict(state)
    beside.package.load_state_dict(state)
    for number in (2, 3):
        beside.step_mine(number)
        beside.step_package(number)
        ages = beside.ages()
        with alike():
            wrong = sorted({i for of_rank in ages for i, age in enumerate(of_rank) if age != 0})
            lost = " The masters are part of the state too: master_weight." if options else ""
            assert not wrong, (
                f"saved by 3 ranks and loaded by {beside.world_size}, step {number + 1} gives other values "
                f"for the parameters {wrong}. load_state_dict has to give the local optimizer the state of "
                f"what this rank owns now, by the number in the rank's own list.{lost}"
            )


def masters(path: str, shapes: Shapes) -> None:
    """Check 16-bit parameters with 32-bit masters on their owners."""
    beside = Beside(path, shapes, torch.bfloat16, master_dtype=torch.float32)
    beside.needs("step")
    local = beside.local
    for optimizer in (local, beside.package):
        for group in optimizer.param_groups:
            group["lr"] = 1e-4  # far below half of a gap: only a master keeps such steps
    for number in range(MANY_STEPS):
        beside.step_mine(number)
        beside.step_package(number)
        if number == 0:
            dtypes = gathered(sorted({str(piece.dtype) for piece in beside.pieces()}))
            elements = gathered(sum(piece.numel() for piece in beside.pieces()))
            with alike():
                assert any("torch.float32" in of_rank for of_rank in dtypes), (
                    "the local optimizer steps the 16-bit parameters. Give it copies in master_dtype."
                )
            if beside.reduces:
                beside.check_owned()
                continue
            with alike():
                loads = [
                    sum(v.numel() for v, owner in zip(beside.start, beside.owners) if owner == rank)
                    for rank in range(beside.world_size)
                ]
                for rank, (has, load) in enumerate(zip(elements, loads)):
                    assert has == load, (
                        f"rank {rank} owns {load} elements and its local optimizer steps {has}: a master "
                        "belongs to the owner alone."
                    )
    mine = gathered([param.detach() for param in beside.params])
    with alike():
        for rank, of_rank in enumerate(mine):
            differ = [i for i, (a, b) in enumerate(zip(of_rank, beside.twins)) if not torch.equal(a, b)]
            stood = all(torch.equal(a, b) for a, b in zip(of_rank, beside.start))
            assert not (differ and stood), (
                f"on rank {rank} no parameter moved in {MANY_STEPS} steps of 1e-4: either the masters are "
                "made anew from the 16-bit parameters in each step, and lose what they collected, or they "
                "are never copied into the parameters."
            )
            assert not differ, (
                f"on rank {rank} the parameters {differ} are not the package's after {MANY_STEPS} steps. "
                "After the local step each parameter is its master, rounded to the nearest: "
                "param.copy_(master)."
            )
