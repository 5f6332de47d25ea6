"""Gather the state before a save of accelerate's or of transformers' Trainer.

In `minimal.py` all ranks call `state_dict`, which gathers. These programs call an optimizer's `state_dict()`
as if it were local: accelerate on all ranks, the Trainer on one. Lightning calls `consolidate_state_dict()`
by itself and needs nothing from here.

No client is imported before it is used, so the package needs none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer

if TYPE_CHECKING:
    from transformers import TrainerCallback


def consolidation_hook(*optimizers: Any) -> Callable[..., None]:
    """A hook for accelerate, which gathers the state of these optimizers before `save_state` writes it.

    >>> accelerator.register_save_state_pre_hook(consolidation_hook(optimizer))              # doctest: +SKIP

    Args:
        *optimizers: each a `ZeroRedundancyOptimizer`, or what `Accelerator.prepare` made of one.
    Raises:
        TypeError: an optimizer is not sharded.
    Collective: the hook, on all ranks: so all ranks call `save_state`, as accelerate asks.
    Cost: the hook, that of `consolidate_state_dict("all")` for each optimizer, since accelerate asks every
        rank for the state and writes that of one. Until the next step each rank has all of it in CPU memory.
    """
    sharded = [_sharded(optimizer) for optimizer in optimizers]

    def consolidate(*models_weights_and_folder: Any) -> None:
        for optimizer in sharded:
            optimizer.consolidate_state_dict("all")

    return consolidate


def consolidation_callback() -> TrainerCallback:
    """A callback for transformers' Trainer, which gathers the optimizer's state before each save.

    >>> Trainer(model, arguments, callbacks=[consolidation_callback()])                      # doctest: +SKIP

    It acts where the Trainer has decided to save. With `save_strategy="best"` the Trainer decides after its
    callbacks, so every evaluation gathers. An evaluation before a save also gathers if the optimizer has
    `eval()`, which the Trainer has called in between. A callback of yours that sets `should_save` comes
    before it in the list.

    Raises:
        TypeError: when training begins, if the Trainer's optimizer is not sharded.
    Collective: the Trainer calls it on all ranks.
    Cost: that of `consolidate_state_dict(0)` for a save; with `save_on_each_node`, of "all".
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
            if kwargs["optimizer"] is None:  # before training
                return
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
