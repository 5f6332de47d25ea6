"""Attributes and methods of the wrapped class as those of the sharded optimizer.

`stairs/owners.py` has `step` alone. But a schedule-free optimizer also has `eval()`, which writes averaged
weights into the parameters, and `train()`, which restores the others. `optimizer.eval()` calls the `eval()`
of each rank's local optimizer and then, as a step does, sends the parameters that were written to all ranks.

A class may also be given values by attributes, such as the loss of this iteration. An attribute that the
sharded optimizer does not have itself is the local optimizer's: `optimizer.latest_loss = loss` on all ranks
sets it on all local optimizers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from types import FunctionType
from typing import Any

import torch

from zero_ref.comm.objects import gather_bytes
from zero_ref.optimizer.zero import Zero
from zero_ref.shard.buckets import broadcast_messages, messages_by_parameter, messages_within
from zero_ref.shard.digests import digests
from zero_ref.shard.groups import replace_options
from zero_ref.shard.shard import Shard

NAMES = ("train", "eval")
"""The methods that are called on all ranks, if the wrapped class has them."""


def attribute_of(zero: Zero, name: str) -> Any:
    """Read an attribute that only the wrapped class has.

    Returns:
        This rank's value. For `train` and `eval` a function that calls the method on all ranks.
    Raises:
        AttributeError: the class has no such attribute, or it is another method. A method may change
            parameters and sees only this rank's, so the error names the way to call it on purpose.
    """
    optim = zero.shard.optim
    method = inspect.getattr_static(type(optim), name, None)
    if name in NAMES and isinstance(method, FunctionType):
        return functools.update_wrapper(functools.partial(call_on_all, zero, name), method)
    advice = ""
    if not name.startswith("__") and hasattr(optim, name):
        value = getattr(optim, name)
        if not inspect.ismethod(value):
            return value
        advice = (
            f". {type(optim).__name__} has such a method, which would see only what this rank owns, and what "
            f"it writes into parameters would stay on this rank: call optimizer.optim.{name}() if that is "
            "what you want"
        )
    raise AttributeError(
        f"{type(zero).__name__!r} object has no attribute {name!r}{advice}", name=name, obj=zero
    )


def call_on_all(zero: Zero, name: str) -> Any:
    """Call a method on the local optimizer of each rank, and send the parameters that it has written.

    Returns:
        The result of the method of this rank's local optimizer.
    Raises:
        ValueError: options differ between ranks.
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

    # 1. All ranks are about to call the same method with the same options.
    built, comm, shard = zero.current(), zero.collectives, zero.shard
    action = f"call {name}() of {zero.accord.what}"
    with zero.accord.preparing(action) as facts:
        facts += zero.standing_facts()

    # 2. Each rank calls the method on its own slices. An error is kept until all ranks know of it.
    replace_options(zero.param_groups, shard.optim.param_groups)
    result, failure, changed = _call_on_shard(shard, name)
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
        # If it raised on all ranks, the unsharded optimizer would have raised, too.
        if len(failed) < comm.world_size:
            zero.accord.note_partial_call(f"{name}()", failed)
        zero.accord.agree(action, failure or [])
    return result


def _call_on_shard(shard: Shard, name: str) -> tuple[Any, Exception | None, set[int]]:
    """Call a method on this rank's slices: (its result, its exception, the parameters that it wrote)."""
    result, failure = None, None
    before = digests(own.local for own in shard.owned)
    try:
        result = shard.call(name)
    except Exception as error:
        failure = error
    # Digests of values are compared, since a write through `.data` does not change a tensor's version. The
    # digest of a tensor that cannot be read is empty; it counts as written.
    after = digests(own.local for own in shard.owned)
    changed = {own.piece.param for own, was, now in zip(shard.owned, before, after) if was != now or not now}
    shard.publish_written(changed)
    return result, failure, changed


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
    broadcast_messages(zero.collectives, messages, zero.registered.options.broadcast_dtype, name=built.name)
    torch.autograd.graph.increment_version([built.params[number] for number in written])
    zero.shard.copies.note_versions()
    return written
