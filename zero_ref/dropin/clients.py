"""Hooks that gather the optimizer's state before accelerate or transformers' Trainer saves it.

In `stairs/owners.py` all ranks call `state_dict`, which gathers. These libraries call an optimizer's
`state_dict()` without gathering: accelerate on all ranks, the Trainer on one. Lightning calls
`consolidate_state_dict()` by itself and needs no hook.

A library is imported only when its hook is made, so this package needs none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer

if TYPE_CHECKING:
    from transformers import TrainerCallback


def consolidation_hook(*optimizers: Any) -> Callable[..., None]:
    """Make a hook for accelerate that gathers the state of optimizers before `save_state` writes it.

    >>> accelerator.register_save_state_pre_hook(consolidation_hook(optimizer))              # doctest: +SKIP

    Args:
        *optimizers: each a `ZeroRedundancyOptimizer`, or the wrapper that `Accelerator.prepare` puts around
            it.
    Raises:
        TypeError: an optimizer is not sharded.
    Collective: the hook, on all ranks: so all ranks call `save_state`, as accelerate requires.
    Cost: each call of the hook costs `consolidate_state_dict("all")` for each optimizer, since accelerate
        gets the state on every rank and writes that of one. Until the next step each rank has the whole state
        in CPU memory.
    """
    sharded = [_sharded(optimizer) for optimizer in optimizers]

    def consolidate(*models_weights_and_folder: Any) -> None:
        for optimizer in sharded:
            optimizer.consolidate_state_dict("all")

    return consolidate


def consolidation_callback() -> TrainerCallback:
    """Make a callback for transformers' Trainer that gathers the optimizer's state before each save.

    >>> Trainer(model, arguments, callbacks=[consolidation_callback()])                      # doctest: +SKIP

    The callback gathers when the Trainer has decided to save. With `save_strategy="best"` the Trainer decides
    after its callbacks, so every evaluation gathers. If the optimizer has `eval()`, an evaluation before a
    save gathers again, since the Trainer has called `eval()` after the first time. If a callback of yours
    sets `should_save`, put it before this one in the list.

    Raises:
        TypeError: when training begins, if the Trainer's optimizer is not sharded.
    Collective: all ranks, on which the Trainer calls it.
    Cost: `consolidate_state_dict(0)` for a save; with `save_on_each_node`, `consolidate_state_dict("all")`.
    """
    from transformers import TrainerCallback

    def consolidate(args: Any, optimizer: Any) -> None:
        if not args.save_only_model:
            _sharded(optimizer).consolidate_state_dict("all" if args.save_on_each_node else 0)

    class ConsolidationCallback(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            _sharded(kwargs["optimizer"])

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if control.should_save:
                consolidate(args, kwargs["optimizer"])

        on_epoch_end = on_step_end

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if kwargs["optimizer"] is None:  # an evaluation before training
                return
            # The state that `on_step_end` has gathered is out of date if the Trainer has called `eval()`
            # since.
            switched = control.should_save and hasattr(_sharded(kwargs["optimizer"]), "eval")
            if args.save_strategy == "best" or switched:
                consolidate(args, kwargs["optimizer"])

    return ConsolidationCallback()


def _sharded(optimizer: Any) -> ZeroRedundancyOptimizer:
    """The optimizer itself, without the wrapper that accelerate's `prepare` puts around it."""
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, ZeroRedundancyOptimizer):
        raise TypeError(
            f"{type(inner).__name__} is not a ZeroRedundancyOptimizer, so there is nothing to gather before "
            "a save. Use the hook or the callback only with a sharded optimizer."
        )
    return inner
