"""Plans of a live optimizer: the first one, and a new one when parameters, groups or owners change.

`stairs/owners.py` plans once. Here parameters may be frozen, cast or moved, groups may be added, and owners
may change in the middle of training. Each function prepares the change, lets all ranks agree on it, and only
then applies it: if one rank cannot make the change, all raise and the optimizer is unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zero_ref.optimizer.zero import Zero
from zero_ref.plan.choice import loads_under, plan_partition
from zero_ref.plan.partition import ParamSpec, Partition
from zero_ref.shard.buckets import check_can_be_flattened
from zero_ref.shard.built import Built
from zero_ref.shard.checks import check_can_be_sharded, facts_of
from zero_ref.shard.groups import (
    ParamGroup,
    ids_in,
    options_of,
    params_of,
    replace_options,
    specs_of,
)
from zero_ref.shard.local_class import check_keeps_groups, is_known
from zero_ref.shard.shard import log_share


def first_plan(zero: Zero) -> Built:
    """Check the parameters and groups of a new optimizer, and plan its partition and messages."""
    options = zero.registered.options
    params = params_of(zero.param_groups)
    specs = zero.registered.specs_for(options.partition, zero.param_groups)
    partition = plan_partition(options.partition, specs, zero.collectives.world_size)
    check_can_be_sharded(options.optimizer_class, partition, params, specs)
    if not is_known(options.optimizer_class):
        check_keeps_groups(zero.registered.unsharded, zero.param_groups)
    if options.parameters_as_bucket_view:
        check_can_be_flattened(params)
    return Built.of(zero.param_groups, specs, partition, options.buffer_size)


def _rebuild(zero: Zero, partition: Partition) -> None:
    """Make messages and local tensors for this partition of the current parameters."""
    buffer_size = zero.registered.options.buffer_size
    built = Built.of(zero.param_groups, _specs(zero), partition, buffer_size, zero.built)
    zero.shard.place(built)
    zero.built = built  # last, so that the next step tries again if a line above raises
    log_share(zero.built, zero.shard, zero.collectives.world_size)


def _specs(zero: Zero) -> list[ParamSpec]:
    """The specs of the current parameters; if they were planned as whole ones, they stay whole."""
    return specs_of(zero.param_groups, any(spec.whole for spec in zero.built.specs))


def follow_parameters(zero: Zero) -> None:
    """Make messages and local tensors anew after parameters were moved, cast or frozen.

    Raises, Collective, Cost: as `ZeroRedundancyOptimizer.current`.
    """
    # 0. Lightning's Fabric wraps an optimizer in a copy of its attributes. Called there, `add_param_group`
    # makes a plan for the wrapper, and this optimizer keeps the old one.
    listed, planned = len(params_of(zero.param_groups)), len(zero.built.params)
    if listed != planned:
        raise RuntimeError(
            f"the parameter groups list {listed} parameters and {planned} are planned: a group was added "
            "through a wrapper that has a copy of this optimizer's attributes, such as that of Lightning's "
            "Fabric. Add it to the optimizer itself: fabric_optimizer.optimizer.add_param_group(...)."
        )

    # 1. New local tensors cannot replace views that the local optimizer keeps. Other ranks may have to learn
    # of this error, so it is raised in phase 2.
    keeps_views: RuntimeError | None = None
    if zero.registered.options.parameters_as_bucket_view or zero.built.cut:
        try:
            zero.shard.check_keeps_no_views("change which parameters are trained, or where they lie")
        except RuntimeError as error:
            keeps_views = error

    # 2. Agree. Addresses may differ between ranks, so they are not compared. Dtypes and `requires_grad` may
    # not: ranks that send different parameters would overwrite each other's memory, or abort in Gloo.
    specs, before = _specs(zero), zero.built.specs
    if [spec.trainable for spec in specs] != [spec.trainable for spec in before]:
        zero.accord.agree("change which parameters are trained", keeps_views or _kinds(zero, specs))
    elif [spec.dtype for spec in specs] != [spec.dtype for spec in before]:
        zero.accord.agree("cast parameters", keeps_views or _kinds(zero, specs))
    if keeps_views is not None:
        raise keeps_views

    # 3. Make the plan anew, for the same owners. Frozen parameters are left out of the messages: by `lay_out`
    # of buckets, else by `messages_by_parameter`.
    zero.shard.check_same_elements(params_of(zero.param_groups))
    _rebuild(zero, zero.built.partition)


def _kinds(zero: Zero, specs: Sequence[ParamSpec]) -> list[str]:
    """The facts `requires_grad` and dtype of each parameter, and the options, which all ranks must share."""
    facts = [
        f"parameter {spec.name or number}: {kind}"
        for number, spec in enumerate(specs)
        for kind in (f"requires_grad={spec.trainable}", spec.dtype)
    ]
    if not zero.joined:  # in a Join, a step sends the options to ranks without data
        facts += zero.shard.facts_of_options(zero.param_groups)
    return facts


def add_group(zero: Zero, param_group: ParamGroup) -> None:
    """Add a parameter group: `ZeroRedundancyOptimizer.add_param_group`."""
    built, shard, registered = zero.current(), zero.shard, zero.registered
    given = options_of(param_group) if isinstance(param_group, dict) else {}  # torch raises below
    count, known, optim = len(zero.param_groups), len(built.params), shard.optim
    try:
        with zero.accord.preparing("add a parameter group") as facts:
            # 1. Check the group, and list it with the others.
            if registered.options.parameters_as_bucket_view:
                shard.check_keeps_no_views("add a parameter group")
            zero.register(param_group)

            # 2. Earlier parameters keep their owners; new ones go to lightly loaded ranks.
            rule = registered.rule_for_later
            specs = [*built.specs, *registered.specs_for(rule, zero.param_groups)[known:]]
            loads = loads_under(rule, built.partition, specs)
            later = plan_partition(rule, specs[known:], zero.collectives.world_size, loads=loads)
            partition, params = built.partition.joined(later), params_of(zero.param_groups)
            check_can_be_sharded(registered.options.optimizer_class, partition, params, specs)

            # 3. Add this rank's slices of the new parameters to the local optimizer.
            owned = shard.slices_under(partition, params, first=len(shard.owned))
            optim.add_param_group({**given, "params": [own.local for own in owned]})
            replace_options(optim.param_groups[-1:], zero.param_groups[-1:])
            facts += facts_of(zero.param_groups, specs, partition, first=known)
    except Exception:
        # Take back all that the block above has added.
        del zero.param_groups[count:], optim.param_groups[count:], registered.given[count:]
        raise

    # 4. All ranks have agreed.
    shard.owned = [*shard.owned, *owned]
    zero.built = replace(built, params=tuple(params), specs=tuple(specs), partition=partition, places=[])
    registered.listed = ids_in(zero.param_groups)
    zero.whole.forget_gathered()
    _rebuild(zero, partition)


def change_owners(zero: Zero, partition: Partition) -> None:
    """Give elements other owners in the middle of training: load the whole state at another partition.

    Raises:
        ValueError: the partition does not suit the optimizer, or differs between ranks.
        TypeError: a part of the state cannot be gathered.
        RuntimeError: the local optimizer keeps views of its parameters.
        If one rank raises, all raise.
    Collective: all ranks of the group.
    Cost: every rank receives the whole state into its CPU memory.
    """
    action = "change the owners"
    # 1. Every rank gets the whole state.
    zero.whole.gather("all")
    state_dict = zero.whole.as_gathered()
    built, shard, registered = zero.built, zero.shard, zero.registered

    # 2. Check and compare the new owners. Nothing is changed yet.
    with zero.accord.preparing(action) as facts:
        shard.check_keeps_no_views(action)
        specs = registered.specs_for(partition, zero.param_groups)
        check_can_be_sharded(registered.options.optimizer_class, partition, built.params, specs)
        owned = shard.slices_under(partition, built.params)
        facts += facts_of(zero.param_groups, specs, partition)

    # 3. Each rank loads its part.
    shard.adopt(owned)
    zero.built = replace(built, specs=tuple(specs), partition=partition, places=[])
    registered.options = replace(registered.options, partition=partition)
    _rebuild(zero, partition)
    with zero.whole.loading(action) as facts:
        facts += zero.whole.load(state_dict, copy=False)
