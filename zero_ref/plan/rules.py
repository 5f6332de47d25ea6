"""The rules that give each element an owner: from parameter sizes and a world size they make a `Partition`.

`stairs/owners.py` has one rule, `assign_owners`; here are several. All are pure functions. `choice.py` finds
the rule that a user names.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from zero_ref.plan.partition import (
    ALIGNMENT,
    ParamSpec,
    Partition,
    SharedRange,
    Slice,
    check_world_size,
)

# --------------------------------------------------------------------------------------------------- rules

Function = TypeVar("Function", bound=Callable[..., object])


def elements(param: ParamSpec) -> float:
    """Weigh a parameter by its number of elements, the weight that most rules balance."""
    return param.numel


def elements_if_trainable(param: ParamSpec) -> float:
    """Weigh a parameter by its elements; a frozen one, which has no optimizer state, as one element."""
    return param.numel if param.trainable else 1


def newton_schulz_operations(param: ParamSpec, iterations: int = 5) -> int:
    """Weigh a matrix as Muon does: by the multiplications and additions of its orthogonalization.

    One iteration on an m x n matrix X, m <= n, computes A = X X', B = b A + c A A and a X + B X. Other
    parameters weigh one operation an element.

    >>> newton_schulz_operations(ParamSpec(6, shape=(2, 3)), iterations=1)         # 4 * 2**2 * 3 + 2 * 2**3
    64

    Source: the iteration of torch.optim.Muon; Keller Jordan, "Muon" (2024).
    """
    if len(param.shape) < 2 or param.numel == 0:
        return param.numel
    rows, columns = sorted((param.shape[0], param.numel // param.shape[0]))
    return iterations * (4 * rows**2 * columns + 2 * rows**3)


def partition_rule(
    weight: Callable[[ParamSpec], float] = elements, *, cuts: bool = False
) -> Callable[[Function], Function]:
    """Mark a function `(params, world_size, *, loads)` as a rule that takes ParamSpecs.

    A function without this mark is called with `(numels, world_size)`.

    >>> from zero_ref.plan.choice import plan_partition
    >>> @partition_rule(weight=lambda param: param.numel * len(param.shape))
    ... def all_to_the_least_loaded(params, world_size, *, loads=None):
    ...     owner = min(range(world_size), key=(loads or [0] * world_size).__getitem__)
    ...     return [list(range(len(params))) if rank == owner else [] for rank in range(world_size)]
    >>> plan_partition(all_to_the_least_loaded, [ParamSpec(6, shape=(2, 3))], 2, loads=[9, 4]).loads
    (0, 6)

    Args:
        weight: gives what a parameter adds to its owner's load.
        cuts: the rule cuts parameters that are not `whole`.
    """

    def marked(rule: Function) -> Function:
        rule.partition_weight = weight  # type: ignore[attr-defined]
        rule.partition_cuts = cuts  # type: ignore[attr-defined]
        return rule

    return marked


@partition_rule()
def sorted_greedy(
    params: Sequence[int | ParamSpec], world_size: int, *, loads: Sequence[float] | None = None
) -> Partition:
    """Assign the largest parameter first, each to the least loaded rank (ties: the lowest). The default.

    No two loads differ by more than the largest parameter. The rule is deterministic, so all ranks agree
    without communicating. With a heap, P parameters on W ranks take time P log W.

    >>> sorted_greedy([6, 5, 4, 1], world_size=2).owner_of_param
    (0, 1, 1, 0)

    Args:
        params: in registration order; a plain number is the size of a parameter with default labels.
            Parameter groups are packed one after the other, each largest first, so a group added later
            does not change the owners of earlier ones.
        world_size: the number of ranks.
        loads: each rank's load so far, in the rule's own weights; here, elements.
    Raises:
        ValueError: `world_size` is below 1, a size is negative, or `loads` has another length.
    Source:
        The packing rule of torch.distributed.optim.ZeroRedundancyOptimizer, equal to it parameter for
        parameter (tests/plan/test_partition.py). Largest-first packing: Graham, SIAM J. Appl. Math. 17
        (1969).
    """
    specs = _specs(params)
    order = sorted(range(len(specs)), key=lambda i: (specs[i].group, -specs[i].numel))
    return _pack(specs, order, elements, world_size, loads)


@partition_rule(weight=elements_if_trainable)
def registration_greedy(
    params: Sequence[int | ParamSpec], world_size: int, *, loads: Sequence[float] | None = None
) -> Partition:
    """Assign parameters in registration order to the least loaded rank; a frozen one weighs one element.

    >>> registration_greedy([6, 5, 4, 1], world_size=2).owner_of_param
    (0, 1, 1, 0)
    >>> registration_greedy([1, 2, 6], world_size=2).loads      # the largest comes last: 7 against 2
    (7, 2)

    Args and Raises: as `sorted_greedy`; `loads` too counts one element for each frozen parameter.
    Source:
        The rule of fairscale.optim.OSS: frozen parameters have no optimizer state to balance.
    """
    specs = _specs(params)
    return _pack(specs, range(len(specs)), elements_if_trainable, world_size, loads)


@partition_rule(cuts=True)
def even(
    params: Sequence[int | ParamSpec],
    world_size: int,
    *,
    loads: Sequence[float] | None = None,
    alignment: int = 64,
) -> Partition:
    """Lay all parameters end to end and cut the range into `world_size` equal parts.

    Each rank owns 1/N of the elements, to within `alignment`, even if one parameter is larger than 1/N.
    Cuts fall inside parameters, so this rule is for optimizers that treat each element by itself (Adam, SGD).
    A parameter that is `whole`, since its optimizer uses its shape (Adafactor, Muon), gets one owner, and the
    cuts of the others level the ranks' loads as far as they can.

    Parameters of each device and dtype are cut separately, so bytes are even too. Frozen parameters, which
    have no state, are cut separately from trainable ones, so that the state is even.

    >>> even([6, 5, 4, 1], world_size=2, alignment=1).slices_of_rank     # doctest: +NORMALIZE_WHITESPACE
    ((Slice(param=0, start=0, stop=6), Slice(param=1, start=0, stop=2)),
     (Slice(param=1, start=2, stop=5), Slice(param=2, start=0, stop=4), Slice(param=3, start=0, stop=1)))

    Args:
        params, world_size: as `sorted_greedy`.
        loads: ignored: parameters that are added later are cut evenly by themselves.
        alignment: a cut moves up to the next multiple of this many elements from its parameter's start (or
            to the parameter's end), so a load differs from 1/N by less than that. Some CPU kernels
            (those of `fused=True`) compute a tensor's last few elements one by one and round some of them
            differently. With cuts at multiples of the vector length, every element is computed as in the
            whole tensor, bit for bit.
    Raises:
        ValueError: `world_size` or `alignment` is below 1, or a size is negative.
    Source:
        The flat split of DeepSpeed's ZeRO-1 and of Megatron-LM's distributed optimizer.
    """
    return _levelled(_specs(params), world_size, elements, None, alignment)


def balanced(cost: Callable[[ParamSpec], float], alignment: int = 64) -> Callable[..., Partition]:
    """Make a rule that balances `whole` parameters by a cost, and cuts the others to level the elements.

    Muon's step takes much longer for a matrix of 1,024 x 1,024 than for one of 64 x 16,384. A rule that
    balances elements gives both the same weight.

    >>> shapes = [(2**10, 2**10)] + 4 * [(2**6, 2**14)]
    >>> matrices = [ParamSpec(2**20, shape=shape, whole=True) for shape in shapes]
    >>> [len(owned) for owned in balanced(newton_schulz_operations)(matrices, 2).slices_of_rank]
    [1, 4]

    Args:
        cost: gives the weight of a parameter that is `whole`, such as `newton_schulz_operations`.
        alignment: as in `even`.
    Returns:
        A rule for `partition=`. "balanced" is `balanced(newton_schulz_operations)`.
    """

    @partition_rule(weight=lambda param: cost(param) if param.whole else 0, cuts=True)
    def rule(
        params: Sequence[int | ParamSpec], world_size: int, *, loads: Sequence[float] | None = None
    ) -> Partition:
        return _levelled(_specs(params), world_size, cost, loads, alignment)

    return rule


@partition_rule(cuts=True)
def equal_shares(
    params: Sequence[int | ParamSpec],
    world_size: int,
    *,
    loads: Sequence[float] | None = None,
    range_numel: int = 2**22,
) -> Partition:
    """Lay parameters in ranges, the last ones first, and cut each range into `world_size` equal shares.

    Each rank owns 1/N of every range, so the gradients of a range can be reduced, and its new parameters
    gathered, by one collective call of equal shares. `even` cuts the whole model into N parts instead, so the
    gradients that a part of the backward computes all belong to a few ranks.

    >>> partition = equal_shares([640, 640, 128], world_size=2, range_numel=640)
    >>> [one.params for one in partition.ranges]
    [(1, 2), (0,)]
    >>> for piece in partition.slices_of_rank[1]: print(piece)
    Slice(param=0, start=320, stop=640)
    Slice(param=1, start=384, stop=640)
    Slice(param=2, start=0, stop=128)

    Args:
        params, world_size: as `sorted_greedy`.
        loads: each rank's elements so far, to level parameters that must stay whole; ranges ignore it.
        range_numel: a range ends with the parameter that brings it to so many elements.
    Raises:
        ValueError: `world_size` or `range_numel` is below 1, or a size is negative.
    Source:
        The buckets of Megatron-LM's distributed optimizer. Parameters that are frozen or `whole` are given
        to ranks as by `even`.
    """
    specs = _specs(params)
    numels = tuple(param.numel for param in specs)
    if range_numel < 1:
        raise ValueError(f"range_numel must be at least 1 element, got {range_numel}.")
    # 1. Give owners to the parameters that are in no range.
    shared = [n for n, param in enumerate(specs) if param.trainable and param.numel > 0 and not param.whole]
    rest = sorted(set(range(len(specs))).difference(shared))
    others = _levelled([specs[n] for n in rest], world_size, elements, loads, ALIGNMENT)
    owned = [
        [piece._replace(param=rest[piece.param]) for piece in of_rank] for of_rank in others.slices_of_rank
    ]
    # 2. Fill ranges with the others, the last ones first, as backward computes their gradients.
    ranges = []
    for members in _filled(specs, reversed(shared), range_numel):
        # Within a range, parameters of one group are neighbours, so that they are stepped as one tensor.
        members.sort(key=lambda number: (specs[number].group, number))
        ranges.append(SharedRange.of(members, [numels[number] for number in members], world_size))
    return Partition(numels, tuple(map(tuple, owned)), tuple(ranges))


def _filled(params: Sequence[ParamSpec], order: Iterable[int], numel: int) -> list[list[int]]:
    """Collect parameters of one kind, in `order`, in lists of so many elements or a little more."""
    lists: list[list[int]] = []
    # For each kind the list that is not full yet, which is in `lists` already, and its elements.
    filling: dict[object, tuple[list[int], int]] = {}
    for number in order:
        kind = _kind(params[number])
        if kind not in filling:
            lists.append([])
            filling[kind] = lists[-1], 0
        members, before = filling.pop(kind)
        members.append(number)
        if before + params[number].numel < numel:
            filling[kind] = members, before + params[number].numel
    return lists


def bucket_round_robin(
    numels: Sequence[int], world_size: int, *, buckets: Sequence[Sequence[int]]
) -> Partition:
    """Assign DDP's gradient buckets in turn: rank b mod N owns all of bucket b.

    >>> bucket_round_robin([6, 5, 4, 1], 2, buckets=[[3, 2], [1], [0]]).owner_of_param
    (0, 1, 0, 0)

    Args: as `sorted_greedy`, and
        buckets: the parameters of each DDP bucket, in the order in which DDP reduces them.
    Raises:
        ValueError: a parameter is in no bucket or in two.
    Source:
        torch's overlapped ZeroRedundancyOptimizer with `shard_buckets=False`.
    """
    _check_sizes(numels, world_size)
    params_of_rank: list[list[int]] = [[] for _ in range(world_size)]
    for index, bucket in enumerate(buckets):
        params_of_rank[index % world_size].extend(bucket)
    return from_lists(numels, params_of_rank)


def bucket_threshold(
    numels: Sequence[int], world_size: int, *, buckets: Sequence[Sequence[int]]
) -> Partition:
    """Cut DDP's gradient buckets into runs below 1/N of the model, and give each to a lightly loaded rank.

    The smallest bucket goes first. A run ends before the parameter that would bring it to 1/N of all
    elements. The run goes to the least loaded rank (ties: the lowest) that has no run of this bucket yet.

    >>> bucket_threshold([6, 5, 4, 1], 2, buckets=[[3, 2], [1, 0]]).owner_of_param
    (0, 1, 0, 0)

    Args and Raises: as `bucket_round_robin`.
    Source:
        torch's overlapped ZeroRedundancyOptimizer with `shard_buckets=True`.
    """
    _check_sizes(numels, world_size)
    threshold = sum(numels) / world_size
    heap = [(0, rank) for rank in range(world_size)]  # (load, rank); the least loaded rank comes first
    params_of_rank: list[list[int]] = [[] for _ in range(world_size)]
    for bucket in sorted(buckets, key=lambda bucket: sum(numels[i] for i in bucket)):
        # Ranks that have a run of this bucket leave the heap until the bucket is done.
        used: list[tuple[int, int]] = []
        for run in _runs_below(threshold, bucket, numels):
            # A bucket may have more runs than there are ranks: then all ranks get a second one.
            if not heap:
                heap, used = used, []
                heapq.heapify(heap)
            load, rank = heapq.heappop(heap)
            params_of_rank[rank].extend(run)
            used.append((load + sum(numels[i] for i in run), rank))
        for entry in used:
            heapq.heappush(heap, entry)
    return from_lists(numels, params_of_rank)


def from_lists(numels: Sequence[int], owned: Iterable[Iterable[int | Slice]]) -> Partition:
    """Make the Partition of an explicit assignment: for each rank the parameters (or slices) that it owns.

    >>> from_lists([6, 5, 4, 1], [[0, 3], [1, 2]]).loads
    (7, 9)

    Raises:
        ValueError: not every element has exactly one owner.
        TypeError: a rank is given something other than numbers and slices.
    """

    def as_slice(item: int | Slice) -> Slice:
        if isinstance(item, Slice):
            return item
        param = operator.index(item)
        if not 0 <= param < len(numels):
            raise ValueError(f"parameter {param} does not exist: there are {len(numels)}, numbered from 0.")
        return Slice(param, 0, numels[param])

    slices_of_rank = []
    for rank, of_rank in enumerate(owned):
        try:
            slices_of_rank.append(tuple(sorted(as_slice(item) for item in of_rank)))
        except TypeError:
            raise TypeError(
                f"rank {rank} is given {of_rank!r}; it takes a list of parameter numbers or slices."
            ) from None
    return Partition(tuple(numels), tuple(slices_of_rank))


# ------------------------------------------------------------------------------------------- small parts


def _specs(params: Sequence[int | ParamSpec]) -> list[ParamSpec]:
    return [param if isinstance(param, ParamSpec) else ParamSpec(param) for param in params]


def _pack(
    params: Sequence[ParamSpec],
    order: Iterable[int],
    weight: Callable[[ParamSpec], float],
    world_size: int,
    loads: Sequence[float] | None,
) -> Partition:
    """Give each parameter, in `order`, to the rank with the least weight so far."""
    numels = tuple(param.numel for param in params)
    _check_sizes(numels, world_size)
    slices_of_rank: list[list[Slice]] = [[] for _ in range(world_size)]
    for number, rank in _to_least_loaded(params, order, weight, world_size, loads):
        slices_of_rank[rank].append(Slice(number, 0, numels[number]))
    return Partition(numels, tuple(tuple(sorted(slices)) for slices in slices_of_rank))


def _to_least_loaded(
    params: Sequence[ParamSpec],
    order: Iterable[int],
    weight: Callable[[ParamSpec], float],
    world_size: int,
    loads: Sequence[float] | None,
) -> Iterator[tuple[int, int]]:
    """Yield each parameter, in `order`, with the rank that has the least weight before it is added.

    Raises:
        ValueError: `loads` has no entry for each rank.
    """
    if loads is not None and len(loads) != world_size:
        raise ValueError(f"loads has {len(loads)} entries; it takes one for each rank, {world_size}.")
    # The first entry is the least load; among equal loads, the lowest rank.
    heap = [(load, rank) for rank, load in enumerate(loads or [0] * world_size)]
    heapq.heapify(heap)
    for number in order:
        load, rank = heap[0]
        yield number, rank
        heapq.heapreplace(heap, (load + weight(params[number]), rank))


def _levelled(
    params: Sequence[ParamSpec],
    world_size: int,
    cost: Callable[[ParamSpec], float],
    loads: Sequence[float] | None,
    alignment: int,
) -> Partition:
    """Pack `whole` parameters by their cost, and cut the others so that each rank's elements are level."""
    numels = [param.numel for param in params]
    _check_sizes(numels, world_size)
    if alignment < 1:
        raise ValueError(f"alignment must be at least 1 element, got {alignment}.")
    # 1. Give each `whole` parameter an owner.
    slices_of_rank: list[list[Slice]] = [[] for _ in range(world_size)]
    taken: dict[object, list[int]] = {}  # for each kind, the elements that each rank owns whole
    for number, rank in _owners_of_whole(params, cost, loads or [0] * world_size):
        slices_of_rank[rank].append(Slice(number, 0, numels[number]))
        taken.setdefault(_kind(params[number]), [0] * world_size)[rank] += numels[number]
    # 2. Cut the others, each kind by itself, to fill up the ranks that own less.
    for kind, members in _by_kind(params).items():
        ends = _level_ends(taken.get(kind, [0] * world_size), sum(numels[i] for i in members))
        for piece, rank in _cut_at(ends, members, numels, alignment):
            slices_of_rank[rank].append(piece)
    return Partition(tuple(numels), tuple(tuple(sorted(slices)) for slices in slices_of_rank))


def _owners_of_whole(
    params: Sequence[ParamSpec], cost: Callable[[ParamSpec], float], loads: Sequence[float]
) -> Iterator[tuple[int, int]]:
    """Yield each `whole` parameter with its owner. Frozen ones have no state, so pack them separately."""
    for trainable in (True, False):
        numbers = [i for i, param in enumerate(params) if param.whole and param.trainable == trainable]
        yield from _packed_tightly(params, numbers, cost, loads)


def _by_kind(params: Sequence[ParamSpec]) -> dict[object, list[int]]:
    """Sort the parameters that may be cut by their kind."""
    members: dict[object, list[int]] = {}
    for number, param in enumerate(params):
        if not param.whole:
            members.setdefault(_kind(param), []).append(number)
    return members


def _packed_tightly(
    params: Sequence[ParamSpec],
    numbers: Iterable[int],
    cost: Callable[[ParamSpec], float],
    loads: Sequence[float],
    rounds: int = 10,
) -> list[tuple[int, int]]:
    """Give each parameter an owner, so that the largest load is close to the smallest that is possible.

    A bisection finds the smallest limit under which all parameters fit: largest first, each goes to the first
    rank that stays within the limit. The bisection begins with the result of the greedy rule.

    Source: MULTIFIT: Coffman, Garey and Johnson, SIAM J. Computing 7 (1978).
    """
    # 1. The greedy rule gives an upper bound of the limit.
    weights = sorted(((number, cost(params[number])) for number in numbers), key=lambda one: -one[1])
    largest_first = [number for number, _ in weights]
    best = list(_to_least_loaded(params, largest_first, cost, len(loads), loads))
    total = list(loads)
    for (_, rank), (_, weight) in zip(best, weights):
        total[rank] += weight
    # 2. Bisect. No limit is below the mean load, a load so far, or the largest weight.
    low = max([sum(total) / len(total), *loads, *(weight for _, weight in weights[:1])])
    high = max(total)
    for _ in range(rounds):
        limit = (low + high) / 2
        if limit >= high:
            break
        fitted = _first_fit(weights, loads, limit)
        if fitted is None:
            low = limit
        else:
            best, high = fitted, limit
    return best


def _first_fit(
    weights: Sequence[tuple[int, float]], loads: Sequence[float], limit: float
) -> list[tuple[int, int]] | None:
    """Give each parameter, largest first, to the first rank on which it fits; None if one fits on none.

    Args:
        weights: (parameter, weight), the largest weight first.
        loads: each rank's load so far.
        limit: the largest load that a rank may have.
    """
    filled, owners = list(loads), []
    rank, before = 0, None
    for number, weight in weights:
        # A rank that is too full for a weight stays too full for it, so equal weights go on searching there.
        if weight != before:
            rank, before = 0, weight
        while rank < len(filled) and filled[rank] + weight > limit:
            rank += 1
        if rank == len(filled):
            return None
        filled[rank] += weight
        owners.append((number, rank))
    return owners


def _kind(param: ParamSpec) -> object:
    """Return what parameters must have in common to lie in one flat range."""
    return param.device, param.dtype, param.trainable


def _level_ends(loads: Sequence[int], total: int) -> list[int]:
    """Compute the end of each rank's part of a range that is divided to level the ranks' loads.

    Each rank whose load is below a common level gets the elements that it lacks; other ranks get none.

    >>> _level_ends([0, 0, 0], 10), _level_ends([6, 0, 2], 7)       # the level is 4.5 in the second
    ([4, 7, 10], [0, 5, 7])

    Args:
        loads: the elements that each rank owns already.
        total: elements of the range.
    """
    # 1. Find the ranks below the level: their loads and the range together are `below` times the level.
    below, filled = 0, 0  # the number of these ranks, and the sum of their loads
    for load in sorted(loads):
        if below and load * below - filled >= total:
            break
        below, filled = below + 1, filled + load
    # 2. Add up the parts. Each is counted `below` times, so that the sum stays an integer.
    ends, added = [], 0
    for load in loads:
        added += max(0, total + filled - load * below)
        ends.append(-(-added // below))
    return ends


def _cut_at(
    ends: Sequence[int], members: Sequence[int], numels: Sequence[int], alignment: int
) -> Iterator[tuple[Slice, int]]:
    """Cut parameters that lie end to end near each rank's end; yield (slice, owner).

    Args:
        ends: the end of each rank's part in the range of all members, before it is aligned.
        members: the numbers of the parameters.
    """
    rank, start = 0, 0  # start: the offset of the current parameter in the range
    for param in members:
        done = 0  # elements of the parameter that have an owner
        while True:
            # A cut moves up to a multiple of `alignment` in its parameter, or to the parameter's end.
            stop = min(numels[param], -(-(ends[rank] - start) // alignment) * alignment)
            # A parameter without elements also gets an owner.
            if stop > done or numels[param] == 0:
                yield Slice(param, done, stop), rank
                done = stop
            if done == numels[param]:
                break
            rank += 1
        start += numels[param]


def _runs_below(threshold: float, bucket: Sequence[int], numels: Sequence[int]) -> Iterable[list[int]]:
    """Divide a bucket into runs of fewer elements than the threshold, or of a single larger parameter."""
    run: list[int] = []
    size = 0
    for param in bucket:
        if run and size + numels[param] >= threshold:
            yield run
            run, size = [], 0
        run.append(param)
        size += numels[param]
    if run:
        yield run


def _check_sizes(numels: Sequence[int], world_size: int) -> None:
    check_world_size(world_size)
    for param, numel in enumerate(numels):
        if numel < 0:
            raise ValueError(f"parameter {param} has {numel} elements; a size cannot be negative.")
