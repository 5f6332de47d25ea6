"""The state of a local optimizer, found by parameter.

torch's optimizers keep state by the tensors that they step, which in `stairs/owners.py` are the parameters.
Here a rank may step a slice of a parameter, or a copy of it. A program that asks for the state of a
parameter, to reset, prune or replace it, then gets the state of the tensor that is stepped in the parameter's
place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from zero_ref.shard.buckets import flat_like
from zero_ref.shard.built import Built
from zero_ref.shard.owned import OwnedSlice


class SliceState(MutableMapping[Any, Any]):
    """This rank's part of the state of a parameter that is cut.

    State with a number for each element, such as `exp_avg`, is a (stop - start,) tensor for the elements
    [start, stop) of the parameter in the order of its memory: of `param.view(-1)`, if it is contiguous. The
    tensor may be changed in place. A tensor in the parameter's shape may be assigned; a rank keeps its part.

    Attributes:
        param: the parameter.
        start, stop: the range of the parameter's elements that this rank has.
    """

    def __init__(self, states: LocalStates, own: OwnedSlice) -> None:
        self._states, self._own = states, own
        self.param, self.start, self.stop = own.param, own.piece.start, own.piece.stop

    @property
    def _entries(self) -> dict[Any, Any]:
        return dict.get(self._states, self._own.local) or {}

    def __getitem__(self, key: Any) -> Any:
        return self._entries[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        value = _part(value, self._own, self._entries.get(key))
        self._states[self._own.local][key] = value

    def __delitem__(self, key: Any) -> None:
        del self._entries[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"<elements [{self.start}, {self.stop}) of {tuple(self.param.shape)}: {self._entries}>"


def _part(value: Any, own: OwnedSlice, before: Any) -> Any:
    """Cut a value of a parameter's state down to a rank's slice, if it is a tensor in the parameter's shape.

    Args:
        before: the slice's value that is being replaced.
    Raises:
        ValueError: `before` has a number for each element of the slice, and `value` has neither the shape of
            the slice nor that of the parameter.
    """
    if not isinstance(value, torch.Tensor) or value.shape == own.local.shape:
        return value
    if value.ndim and value.shape == own.param.shape:
        return flat_like(value, own.param)[own.piece.start : own.piece.stop].clone()
    if isinstance(before, torch.Tensor) and before.shape == own.local.shape:
        raise ValueError(
            f"this rank has elements [{own.piece.start}, {own.piece.stop}) of a parameter of shape "
            f"{tuple(own.param.shape)}, so its state takes a tensor of shape {tuple(own.local.shape)}, or "
            f"one in the shape of the parameter; not {tuple(value.shape)}."
        )
    return value


class LocalStates(dict[Any, Any]):
    """A local optimizer's state, by the tensors that it steps, and by the parameters that these belong to.

    A parameter that is stepped itself is a key, as in torch. A parameter that is not leads to a `SliceState`,
    or to the state of its copy. A parameter of another rank leads to an empty dict, as in torch's
    ZeroRedundancyOptimizer; assigning or deleting its state changes nothing here, only on its owner.

    Args:
        built: the parameters and their owners.
        owned: this rank's slices.
        entries: the state so far, by either kind of key.

    Attributes:
        owned: for each parameter this rank's slices of it.
        param_of: the parameter of each tensor that this rank steps.
    """

    def __init__(self, built: Built, owned: Iterable[OwnedSlice], entries: Mapping[Any, Any]) -> None:
        super().__init__()
        self.built = built
        self.owned: dict[Any, list[OwnedSlice]] = {param: [] for param in built.params}
        for own in owned:
            self.owned[own.param].append(own)
        self.param_of = {own.local: own.param for of_param in self.owned.values() for own in of_param}
        # Only stepped tensors are keys of the dict itself; __setitem__ translates the other parameters.
        if isinstance(entries, LocalStates):
            self.update(entries)
            return
        for key, value in entries.items():
            self[key] = value

    def _is_not_stepped(self, key: Any) -> bool:
        """Return whether the key is a parameter in whose place this rank steps other tensors, or none."""
        return key in self.owned and key not in self.param_of

    def parts(self, param: torch.Tensor) -> list[SliceState]:
        """List the parts that this rank has of a parameter's state, in the order of their elements."""
        if param not in self.owned:
            raise KeyError(f"a tensor of shape {tuple(param.shape)} is no parameter of this optimizer")
        return [SliceState(self, own) for own in self.owned[param]]

    def __missing__(self, key: Any) -> Any:
        if not self._is_not_stepped(key):
            return self.setdefault(key, {})  # as the defaultdict of torch's optimizers
        if not self.owned[key]:
            return {}  # another rank's parameter; what is written into this dict is lost
        self._check_is_in_one_part(key)
        (own,) = self.owned[key]
        return self[own.local] if own.is_whole else SliceState(self, own)

    def _check_is_in_one_part(self, param: torch.Tensor) -> None:
        """Refuse, on all ranks, a parameter of which a rank owns several slices.

        Raises:
            RuntimeError: the state of such a parameter is no single tensor on that rank.
        """
        number = next(n for n, other in enumerate(self.built.params) if other is param)
        owners = [owner for _, owner in self.built.partition.pieces_of_param[number]]
        if len(owners) > len({*owners}):
            raise RuntimeError(
                f"parameter {self.built.name(number)} is cut into {len(owners)} parts, of which a rank has "
                "several, so their state is no single tensor. Use optimizer.parts_of_state(param), which "
                "gives them with their ranges."
            )

    def __contains__(self, key: object) -> bool:
        if self._is_not_stepped(key):
            return any(super(LocalStates, self).__contains__(own.local) for own in self.owned[key])
        return super().__contains__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401 - dict's own ignores `__missing__`

    def __setitem__(self, key: Any, value: Any) -> None:
        if not self._is_not_stepped(key):
            super().__setitem__(key, value)
            return
        for own in self.owned[key]:
            before = dict.get(self, own.local) or {}
            parts = {name: _part(of_param, own, before.get(name)) for name, of_param in value.items()}
            super().__setitem__(own.local, parts)

    def __delitem__(self, key: Any) -> None:
        if not self._is_not_stepped(key):
            super().__delitem__(key)
            return
        if self.owned[key] and key not in self:
            raise KeyError(key)
        for own in self.owned[key]:
            super().pop(own.local, None)

    def pop(self, key: Any, *default: Any) -> Any:
        if not self._is_not_stepped(key):
            return super().pop(key, *default)
        if key not in self and default:
            return default[0]
        value = dict(self[key])
        del self[key]
        return value

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())  # a copy is a plain one


class StateOfParameters(MutableMapping[Any, Any]):
    """This rank's part of an optimizer's state, by parameter: a view of `LocalStates`.

    It has the parameters of which this rank has state. On a rank that owns nothing it is empty, and false,
    while other ranks have a state.
    """

    def __init__(self, states: LocalStates) -> None:
        self.states = states

    def __getitem__(self, key: Any) -> Any:
        if key in self.states:
            return self.states[key]
        raise KeyError(
            "this rank has no state of that tensor: another rank owns the parameter, or there is no state "
            "yet. Ask `param in optimizer.state` first; for the state of all parameters on one rank call "
            "consolidate_state_dict() and state_dict(). torch's set_optimizer_state_dict asks for it where a "
            "state dict is flat: get it with flatten_optimizer_state_dict=False, or load it by "
            "zero_ref.StatefulOptimizer."
        )

    def __setitem__(self, key: Any, value: Any) -> None:
        self.states[key] = value

    def __delitem__(self, key: Any) -> None:
        del self.states[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(dict.fromkeys(self.states.param_of.get(key, key) for key in dict.keys(self.states)))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def pop(self, key: Any, *default: Any) -> Any:
        # The mixin's would return a SliceState, whose entries are gone once they are deleted.
        return self.states.pop(key, *default) if key in self else super().pop(key, *default)

    def __reduce__(self) -> Any:
        # A copy is a plain one.
        return defaultdict, (dict,), None, None, ((key, dict(of_param)) for key, of_param in self.items())
