"""Several optimizer classes as one optimizer, such as Muon for matrices and AdamW for the rest.

`stairs/owners.py` has one class for all parameters. Here a parameter group may name its own:

    {"params": matrices, "optimizer_class": torch.optim.Muon, "lr": 0.02}

The groups stay one list, so learning-rate schedulers, checkpoints and messages see one optimizer.
"""

from __future__ import annotations

import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from zero_ref.shard.groups import OPTIMIZER_CLASS, ParamGroup, options_of

StateDict = dict[str, Any]


def class_of(group: ParamGroup, optim: Optimizer) -> type[Optimizer]:
    """Return the class that steps a group of this local optimizer."""
    main = optim.main if isinstance(optim, SeveralOptimizers) else type(optim)
    return group.get(OPTIMIZER_CLASS, main)


def defaults_of(group: ParamGroup, optim: Optimizer) -> Mapping[str, Any]:
    """Return the defaults of the class that steps a group of this local optimizer."""
    if isinstance(optim, SeveralOptimizers):
        optim = optim.optimizers[class_of(group, optim)]
    return optim.defaults


def optimizers_in(optim: Optimizer) -> list[Optimizer]:
    """List the optimizers of which a local optimizer consists, one for each class."""
    return list(optim.optimizers.values()) if isinstance(optim, SeveralOptimizers) else [optim]


def is_known(optim: Optimizer) -> bool:
    """Return whether all classes are torch's: these update tensors one by one and draw no random numbers."""
    return all(type(one).__module__.startswith("torch.optim.") for one in optimizers_in(optim))


def check_belongs_to_parameters(optim: Optimizer) -> None:
    """Refuse a class that keeps more than options and the state of parameters: nobody would own the rest.

    Raises:
        TypeError: the class keeps more in its `state_dict`, or its state has a key that is no parameter.
    """
    if more := keys_beside_state(optim):
        raise TypeError(
            f"{title(optim)} keeps {more} in its state_dict, beside the state of parameters and the "
            "options of groups. It belongs to no parameter, so it cannot be gathered, saved or moved to "
            "other owners. Use an optimizer whose state_dict has only 'state' and 'param_groups'."
        )
    for stranger in (key for key in optim.state if not isinstance(key, torch.Tensor)):
        raise TypeError(
            f"the optimizer keeps the state {stranger!r} for no parameter in particular, so no rank owns it; "
            "it can be neither checkpointed nor moved."
        )


def keys_beside_state(optim: Optimizer) -> list[str]:
    """List the keys of a class's `state_dict` beside "state" and "param_groups"."""
    keys = set[str]()
    for one in optimizers_in(optim):
        if type(one).state_dict is not Optimizer.state_dict:
            # Several classes share one state. A class's state_dict fails on state of other classes: hide it.
            state = one.state
            if one is not optim:
                one.state = defaultdict(dict)
            keys |= one.state_dict().keys() - {"state", "param_groups"}
            if one is not optim:
                one.state = state
    return sorted(keys)


def title(optim: Optimizer) -> str:
    """Write the names of the classes, for errors and logs."""
    return " and ".join(type(one).__name__ for one in optimizers_in(optim))


def name_classes(param_groups: Sequence[ParamGroup], optim: Optimizer) -> None:
    """Write its class into each of the user's groups, if the local optimizer has several classes."""
    for ours, local in zip(param_groups, optim.param_groups, strict=True):
        ours.pop(OPTIMIZER_CLASS, None)
        if isinstance(optim, SeveralOptimizers):
            ours[OPTIMIZER_CLASS] = local[OPTIMIZER_CLASS]


def local_optimizer(
    groups: Sequence[ParamGroup], optimizer_class: type[Optimizer], defaults: Mapping[str, Any]
) -> Optimizer:
    """Make a local optimizer over these groups: of `optimizer_class`, if no group names another class.

    Args:
        groups: each with "params", the options that the user gave, and perhaps "optimizer_class".
        optimizer_class, defaults: the class of the other groups, and the options of its constructor.
    """
    classes = {group.get(OPTIMIZER_CLASS, optimizer_class) for group in groups}
    if classes <= {optimizer_class}:
        return optimizer_class([_unnamed(group) for group in groups], **defaults)
    return SeveralOptimizers(groups, optimizer_class, **defaults)


def with_group(optim: Optimizer, group: ParamGroup) -> Optimizer:
    """Add a group to a local optimizer and return it; another object, if the group is of a second class."""
    if not isinstance(optim, SeveralOptimizers):
        if group.get(OPTIMIZER_CLASS, type(optim)) is type(optim):
            group = _unnamed(group)  # a plain optimizer would take the name for an option
        else:
            optim = SeveralOptimizers.around(optim)
    optim.add_param_group(group)
    return optim


class SeveralOptimizers(Optimizer):
    """One optimizer for groups of several classes. Each class steps its own groups.

    Args:
        groups: each with "params" and options; with "optimizer_class", if it is not of the main class.
        main, defaults: the main class, and the options of its constructor. Schedulers read the defaults of
            the main class.

    Attributes:
        optimizers: the optimizer of each class. Each has its groups of `param_groups`, as the same dicts, and
            all have one `state`.
    """

    def __init__(self, groups: Sequence[ParamGroup], main: type[Optimizer], /, **defaults: Any) -> None:
        self.main, self.optimizers = main, dict[type[Optimizer], Optimizer]()
        self._given = defaults
        self._checked_keys = 0  # the number of keys in `state` at the last check
        # torch's constructor refuses an empty list of groups; `_collect` replaces this one.
        super().__init__([{"params": []}], defaults)
        classes = [group.get(OPTIMIZER_CLASS, main) for group in groups]
        for of_class in dict.fromkeys(classes):
            of_this = [_unnamed(group) for group, its_class in zip(groups, classes) if its_class is of_class]
            self.optimizers[of_class] = self._make(of_class, of_this)
        if main in self.optimizers:
            self.defaults = self.optimizers[main].defaults
        self._collect(classes)

    def _make(self, of_class: type[Optimizer], groups: Sequence[ParamGroup]) -> Optimizer:
        """Make an optimizer of the class over these groups.

        An option that all groups give alike goes to the constructor if the constructor requires it, or keeps
        it elsewhere than in its defaults. Other options stay in their groups, or they would become the
        defaults of later groups.
        """
        if of_class is self.main:
            return of_class(groups, **self._given)
        # 1. The options that all groups give alike and the constructor accepts.
        first, *others = map(options_of, groups)
        accepted = inspect.signature(of_class).parameters
        alike = {
            key: value
            for key, value in first.items()
            if key in accepted and all(key in other and repr(other[key]) == repr(value) for other in others)
        }
        # 2. Pass those that it requires.
        required = {key: alike[key] for key in alike if accepted[key].default is inspect.Parameter.empty}
        made = of_class([dict(group) for group in groups], **required)
        # 3. Pass those also that it keeps as attributes: a step would not look for them in the groups.
        kept = {key: value for key, value in alike.items() if key not in made.defaults}
        return of_class(groups, **required, **kept) if kept else made

    def forget_unused(self) -> None:
        """Drop the optimizers of classes that no group is of, after groups were removed."""
        used = {group[OPTIMIZER_CLASS] for group in self.param_groups}
        self.optimizers = {of_class: one for of_class, one in self.optimizers.items() if of_class in used}

    @classmethod
    def around(cls, optim: Optimizer) -> SeveralOptimizers:
        """Wrap a plain optimizer, with its groups and state, so that groups of other classes can be added."""
        several = cls([], type(optim), **optim.defaults)
        several.optimizers[type(optim)] = optim
        several._collect([type(optim)] * len(optim.param_groups))
        return several

    def _collect(self, classes: Sequence[type[Optimizer]]) -> None:
        """List the groups and state of all optimizers as this one's.

        Args:
            classes: the class of each group, in the order of `param_groups`.
        """
        groups = {of_class: iter(optim.param_groups) for of_class, optim in self.optimizers.items()}
        self.param_groups = [next(groups[of_class]) for of_class in classes]
        for group, of_class in zip(self.param_groups, classes):
            group[OPTIMIZER_CLASS] = of_class
        self.state = defaultdict(dict)
        for optim in self.optimizers.values():
            self.state.update(optim.state)
        self.hand_out()

    def hand_out(self) -> None:
        """Give each optimizer its groups, and all of them the common state.

        A program may have replaced `param_groups` or `state` here, or in one of the optimizers.
        """
        for of_class, optim in self.optimizers.items():
            optim.param_groups = [group for group in self.param_groups if group[OPTIMIZER_CLASS] is of_class]
            optim.state = self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.hand_out()

    def add_param_group(self, group: ParamGroup) -> None:
        """Add a group, which may name a class that is new here."""
        if not self.optimizers:  # called by Optimizer.__init__
            super().add_param_group(group)
            return
        of_class = group.get(OPTIMIZER_CLASS, self.main)
        self.hand_out()
        if of_class in self.optimizers:
            self.optimizers[of_class].add_param_group(_unnamed(group))
        else:
            self.optimizers[of_class] = self._make(of_class, [_unnamed(group)])
        self._collect([*(known[OPTIMIZER_CLASS] for known in self.param_groups), of_class])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step the optimizer of each class, after the closure, which is called once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.hand_out()
        for optim in self.optimizers.values():
            optim.step(**kwargs)
        self._check_keys()
        return loss

    def _check_keys(self) -> None:
        """Refuse state that belongs to no parameter: two classes may keep such state under the same key.

        Raises:
            RuntimeError: names the classes and the key.
        """
        # If a step has added no key, there is nothing new to look at.
        if len(self.state) == self._checked_keys:
            return
        self._checked_keys = len(self.state)
        odd = [key for key in self.state if not isinstance(key, torch.Tensor)]
        if odd:
            raise RuntimeError(
                f"{title(self)} share one state, and one of them keeps {odd[0]!r} in it, which belongs to no "
                "parameter. Give that class an optimizer of its own."
            )

    def state_dict(self) -> StateDict:
        """Return the state dict as torch's optimizers do, with the name of its class in each group."""
        state_dict = super().state_dict()
        for group in state_dict["param_groups"]:
            group[OPTIMIZER_CLASS] = group[OPTIMIZER_CLASS].__name__
        return state_dict

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state dict into the optimizers, each of which converts its own part."""
        classes = [group[OPTIMIZER_CLASS] for group in self.param_groups]
        self.hand_out()
        of_groups = list(zip(state_dict["param_groups"], classes, strict=True))
        for of_class, optim in self.optimizers.items():
            # A class may convert state in its own way, so each loads the state of its groups.
            groups = [group for group, its_class in of_groups if its_class is of_class]
            optim.load_state_dict({"state": _state_of(groups, state_dict), "param_groups": groups})
        self._collect(classes)


def split_state_dict(state_dict: StateDict) -> dict[str, StateDict]:
    """Split the state dict of an optimizer whose groups name several classes into those of plain optimizers.

    >>> plain = split_state_dict(optimizer.state_dict())                                    # doctest: +SKIP
    >>> muon.load_state_dict(plain["Muon"]); adamw.load_state_dict(plain["AdamW"])          # doctest: +SKIP

    Args:
        state_dict: as from `ZeroRedundancyOptimizer.state_dict()`.
    Returns:
        By the name of each class, the state dict that an optimizer of that class over its groups, in the same
        order, would return. Tensors are shared with `state_dict`.
    Raises:
        ValueError: the groups do not name their classes.
    """
    split: dict[str, list[ParamGroup]] = {}
    for index, group in enumerate(state_dict["param_groups"]):
        if OPTIMIZER_CLASS not in group:
            raise ValueError(
                f"group {index} of the state dict does not name its optimizer_class: the state dict is that "
                "of a single optimizer, which loads it as it is."
            )
        split.setdefault(group[OPTIMIZER_CLASS], []).append(group)
    plain: dict[str, StateDict] = {}
    for name, groups in split.items():
        # A plain optimizer numbers the parameters of its own groups, from 0.
        running = itertools.count()
        number = {param: next(running) for group in groups for param in group["params"]}
        state = _state_of(groups, state_dict)
        numbered = [[number[param] for param in group["params"]] for group in groups]
        plain[name] = {
            "state": {number[param]: of_param for param, of_param in state.items()},
            "param_groups": [
                {**_unnamed(group), "params": params} for group, params in zip(groups, numbered)
            ],
        }
    return plain


def _state_of(groups: Sequence[ParamGroup], state_dict: StateDict) -> dict[Any, Any]:
    numbers = {number for group in groups for number in group["params"]}
    return {number: of_param for number, of_param in state_dict["state"].items() if number in numbers}


def _unnamed(group: ParamGroup) -> ParamGroup:
    return {key: value for key, value in group.items() if key != OPTIMIZER_CLASS}
