"""Methods of the wrapped class as methods of the sharded optimizer, such as `train` and `eval`.

`stairs/owners.py` has `step` alone. But a schedule-free optimizer also has `eval()`, which writes averaged
weights into the parameters, and `train()`, which restores the others. `optimizer.eval()` calls the `eval()`
of each rank's local optimizer and then, as a step does, sends the parameters that were written to all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from zero_ref.comm.agreement import agree, agreement
from zero_ref.comm.objects import gather_bytes
from zero_ref.optimizer.whole import Zero
from zero_ref.plan.partition import Slice
from zero_ref.shard.buckets import broadcast_messages, messages_by_parameter, messages_within
from zero_ref.shard.built import Built
from zero_ref.shard.checks import is_elementwise
from zero_ref.shard.coupling import couples_parameters, updates_elementwise
from zero_ref.shard.digests import digests
from zero_ref.shard.groups import describe_options, replace_options
from zero_ref.shard.methods import has_method
from zero_ref.shard.shard import Shard


def method_of(zero: Zero, name: str) -> Callable[..., Any] | None:
    """Find a public method that the wrapped class has and torch's `Optimizer` lacks, for all ranks to call.

    Returns:
        The method; None if the class has none of this name.
    """
    of_class = type(zero.shard.optim)
    if not has_method(of_class, name):
        return None
    return functools.update_wrapper(functools.partial(call_on_all, zero, name), getattr(of_class, name))


def call_on_all(zero: Zero, name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call a method on the local optimizer of each rank, and send the parameters that it has written.

    During the call the local tensors have their gradients, as in a step.

    Args:
        *args, **kwargs: for the method, equal on all ranks, without parameters or parameter groups.
    Returns:
        The result of the method of this rank's local optimizer.
    Raises:
        TypeError: a parameter is among the arguments.
        ValueError: arguments or options differ between ranks; a trial showed that the method computes
            something from all parameters together, or uses the shape of parameters that are split.
        RuntimeError: another rank makes another call, or raised; or the call is inside a `Join`. If the
            method raises on some ranks only, all raise, and refuse to go on until a sharded checkpoint is
            loaded.
    Collective: all ranks of the group.
    Cost: an all-gather of 32 bytes, one of a bit for each parameter, and two passes over this rank's slices.
        The parameters that the method has changed on any rank, frozen ones too, are sent as in a step.
    """
    if zero.joined is not None:
        raise RuntimeError(
            f"rank {zero.collectives.rank}: {name}() was called inside a Join, where a rank that has run out "
            "of data would not take part. Call it before the Join or after."
        )

    # 1. All ranks are about to call the same method with the same arguments, and it works on shards.
    built, comm, shard = zero.current(), zero.collectives, zero.shard
    action = f"call {name}() of {zero.accord.what}"
    with agreement(comm, action) as facts:
        facts += _facts_of_arguments(built, args, kwargs)
        _check_works_apart(zero, name, args, kwargs)
        facts += zero.standing_facts()

    # 2. Each rank calls the method on its own slices. An error is kept until all ranks know of it.
    replace_options(zero.param_groups, shard.optim.param_groups)
    result, failure, changed = _call_on_shard(shard, name, args, kwargs, zero.backward.gradients.parts)
    has_state = any(not isinstance(of_key, dict) or of_key for of_key in shard.optim.state.values())

    # 3. Each rank tells all others whether the method raised and made state, and one bit for each parameter.
    # Owners then send the parameters that were written on any rank.
    bits = sum(1 << number for number in changed).to_bytes(len(built.params) // 8 + 1, "big")
    reports = gather_bytes(comm, bytes([failure is not None, has_state]) + bits)
    written = _send_written(zero, [report[2:] for report in reports])
    replace_options(shard.optim.param_groups, zero.param_groups)
    if written or any(report[1] for report in reports):
        zero.whole.note_change()

    # 4. If the method raised anywhere, all ranks raise.
    failed = [rank for rank, report in enumerate(reports) if report[0]]
    if failed:
        _note_failures(zero, name, failed)
        agree(comm, action, failure or [])
    return result


def _call_on_shard(
    shard: Shard,
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    parts: Mapping[Slice, torch.Tensor] | None,
) -> tuple[Any, Exception | None, set[int]]:
    """Call a method on this rank's slices: (its result, its exception, the parameters that it wrote)."""
    result, failure = None, None
    before = digests(own.local for own in shard.owned)
    try:
        result = shard.call(name, args, kwargs, parts)
    except Exception as error:
        failure = error
    # Digests of values are compared, since a write through `.data` does not change a tensor's version. The
    # digest of a tensor that cannot be read is empty; it counts as written.
    after = digests(own.local for own in shard.owned)
    changed = {own.piece.param for own, was, now in zip(shard.owned, before, after) if was != now or not now}
    shard.publish_written(changed)
    return result, failure, changed


def _note_failures(zero: Zero, name: str, failed: Sequence[int]) -> None:
    """Make all ranks refuse to go on if the method raised on some ranks only.

    If it raised on all ranks, the unsharded optimizer would have raised, too.
    """
    if len(failed) < zero.collectives.world_size:
        zero.accord.uncertain = (
            f"rank {zero.collectives.rank}: {name}() of {type(zero.shard.optim).__name__} raised on ranks "
            f"{failed} and not on the others, so no unsharded optimizer could have these parameters and this "
            "state. Load a sharded checkpoint with its parameters, or start again."
        )


def _send_written(zero: Zero, bits_of_ranks: Iterable[bytes | bytearray]) -> set[int]:
    """Send the parameters that were written on any rank from their owners to all; return their numbers.

    Args:
        bits_of_ranks: from each rank one bit for each parameter, set if that rank has written it.
    """
    built = zero.built
    anywhere = functools.reduce(int.__or__, (int.from_bytes(bits, "big") for bits in bits_of_ranks))
    written = {number for number in range(len(built.params)) if anywhere >> number & 1}
    # The messages of a step leave out frozen parameters, but a method may write them.
    frozen = messages_by_parameter(built.partition, built.params, frozen=True)
    messages = messages_within([*built.messages, *frozen], written)
    broadcast_messages(zero.collectives, messages, zero.registered.broadcast_dtype, name=built.name)
    torch.autograd.graph.increment_version([built.params[number] for number in written])
    zero.shard.copies.note_versions()
    return written


def _check_works_apart(zero: Zero, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a method whose result would differ on shards, as the constructor refuses such a `step`.

    Raises:
        ValueError: a trial showed that it does. The constructor has tried `train` and `eval`. A method with
            a function among its arguments is not tried, since the function may have side effects.
    """
    registered = zero.registered
    tried, of_class, defaults = registered.tried, registered.optimizer_class, registered.defaults
    if name in tried or is_elementwise(of_class) or any(map(callable, tree_leaves((args, kwargs)))):
        return

    def call(optimizer: Optimizer) -> None:
        getattr(optimizer, name)(*args, **kwargs)

    # For each group with a parameter that is cut, the number of one such parameter.
    split = {zero.built.specs[number].group: number for number, *_ in zero.built.cut}
    for index, options in enumerate(registered.given):
        if couples_parameters(of_class, options, defaults, call):
            raise ValueError(
                f"{name}() of {of_class.__name__} changed a tensor otherwise beside another one than by "
                "itself: it computes something from all parameters together, such as a norm, and each rank "
                "has only some of them. Compute the new values from the model's parameters instead, and "
                "write them into these on all ranks alike: the optimizer goes on from there."
            )
        if index in split and not updates_elementwise(of_class, options, defaults, call):
            raise ValueError(
                f"{name}() of {of_class.__name__} may use the shape of a parameter, and parameter "
                f"{zero.built.name(split[index])} is split between ranks. Use a partition of whole "
                'parameters, such as "sorted_greedy", or, if the method treats each element by itself in '
                f"spite of the trial, set {of_class.__name__}.elementwise = True."
            )
    tried.add(name)


def _facts_of_arguments(built: Built, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """The arguments of a method as facts that must be equal on all ranks.

    Raises:
        TypeError: a parameter is among the arguments.
    """
    params = set(built.params)
    if any(isinstance(leaf, torch.Tensor) and leaf in params for leaf in tree_leaves((args, kwargs))):
        raise TypeError(
            "a parameter, or a group of them, is among the arguments, and the local optimizer does not know "
            "it: the groups of the local optimizer have other tensors, only for the slices of this rank."
        )

    def plain(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return f"{value.dtype} of shape {tuple(value.shape)} with the digest {digests([value])}"

    return describe_options(tree_map(plain, {"arguments": list(args), **kwargs}))
