"""The rules that give each element an owner: from parameter sizes and a world size they make a `Partition`.

This module adds to `assign_owners` of `minimal.py` that there are several rules. They are pure functions;
`choice.py` says which of them a user gets.
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
    """The weight that most rules balance: a parameter weighs its number of elements."""
    return param.numel


def elements_if_trainable(param: ParamSpec) -> float:
    """As `elements`, but a frozen parameter, which has no optimizer state, weighs one element."""
    return param.numel if param.trainable else 1


def newton_schulz_operations(param: ParamSpec, iterations: int = 5) -> int:
    """The weight of a matrix under Muon: the multiplications and additions of its orthogonalization.

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
    """Largest parameter first, each to the least loaded rank (ties: the lowest). The default.

    No two loads differ by more than the largest parameter. The rule is deterministic, so all ranks agree
    without communicating. With a heap, P parameters on W ranks take time P log W.

    >>> sorted_greedy([6, 5, 4, 1], world_size=2).owner_of_param
    (0, 1, 1, 0)

    Args:
        params: in registration order; a plain number is the size of a parameter with default labels.
            Parameter groups are packed one after the other, each largest first, so a group added later
            does not change the owners of earlier ones.
        world_size: the number of ranks.
        loads: what each rank already owns, in the rule's own weights; here, elements.
    Raises:
        ValueError: `world_size` is below 1, a size is negative, or `loads` has another length.
    Source:
        The packing rule of torch.distributed.optim.ZeroRedundancyOptimizer, equal to it parameter for
        parameter (tests/test_partition.py). Largest-first packing: Graham, SIAM J. Appl. Math. 17 (1969).
    """
    specs = _specs(params)
    order = sorted(range(len(specs)), key=lambda i: (specs[i].group, -specs[i].numel))
    return _pack(specs, order, elements, world_size, loads)


@partition_rule(weight=elements_if_trainable)
def registration_greedy(
    params: Sequence[int | ParamSpec], world_size: int, *, loads: Sequence[float] | None = None
) -> Partition:
    """In registration order, each parameter to the least loaded rank; a frozen one weighs one element.

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
    """A rule: parameters that must stay whole are balanced by a cost, the others are cut to level elements.

    Muon's step takes much longer for a matrix of 1,024 x 1,024 than for one of 64 x 16,384. A rule that
    balances elements gives both the same weight.

    >>> shapes = [(2**10, 2**10)] + 4 * [(2**6, 2**14)]
    >>> matrices = [ParamSpec(2**20, shape=shape, whole=True) for shape in shapes]
    >>> [len(owned) for owned in balanced(newton_schulz_operations)(matrices, 2).slices_of_rank]
    [1, 4]

    Args:
        cost: gives the weight of a parameter that is `whole`, such as `newton_schulz_operations`.
        alignment: as that of `even`.
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
    gathered, by one collective call of equal shares. `even` cuts the whole model into N parts instead: then a
    few ranks own all that a part of the backward computes.

    >>> partition = equal_shares([640, 640, 128], world_size=2, range_numel=640)
    >>> [one.params for one in partition.ranges]
    [(1, 2), (0,)]
    >>> for piece in partition.slices_of_rank[1]: print(piece)
    Slice(param=0, start=320, stop=640)
    Slice(param=1, start=384, stop=640)
    Slice(param=2, start=0, stop=128)

    Args:
        params, world_size: as `sorted_greedy`.
        loads: of what must stay whole, as `even`; a range is cut evenly by itself.
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
    shared = [n for n, param in enumerate(specs) if param.trainable and param.numel > 0 and not param.whole]
    rest = sorted(set(range(len(specs))).difference(shared))
    others = _levelled([specs[n] for n in rest], world_size, elements, loads, ALIGNMENT)
    owned = [
        [piece._replace(param=rest[piece.param]) for piece in of_rank] for of_rank in others.slices_of_rank
    ]
    ranges = []
    for members in _filled(specs, reversed(shared), range_numel):
        # Those of a group are then neighbours, and stepped as one tensor.
        members.sort(key=lambda number: (specs[number].group, number))
        ranges.append(SharedRange.of(members, [numels[number] for number in members], world_size))
    return Partition(numels, tuple(map(tuple, owned)), tuple(ranges))


def _filled(params: Sequence[ParamSpec], order: Iterable[int], numel: int) -> list[list[int]]:
    """Parameters of one kind, in `order`, in lists of so many elements or a little more."""
    lists: list[list[int]] = []
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
    """DDP's gradient buckets assigned in turn: rank b mod N owns all of bucket b.

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
    """DDP's gradient buckets cut into runs of less than 1/N of the model, each run to a lightly loaded rank.

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
    heap = [(0, rank) for rank in range(world_size)]
    params_of_rank: list[list[int]] = [[] for _ in range(world_size)]
    for bucket in sorted(buckets, key=lambda bucket: sum(numels[i] for i in bucket)):
        used: list[tuple[int, int]] = []  # ranks that have a run of this bucket; not in the heap
        for run in _runs_below(threshold, bucket, numels):
            if not heap:  # more runs than ranks: a second round
                heap, used = used, []
                heapq.heapify(heap)
            load, rank = heapq.heappop(heap)
            params_of_rank[rank].extend(run)
            used.append((load + sum(numels[i] for i in run), rank))
        for entry in used:
            heapq.heappush(heap, entry)
    return from_lists(numels, params_of_rank)


def from_lists(numels: Sequence[int], owned: Iterable[Iterable[int | Slice]]) -> Partition:
    """An explicit assignment: for each rank the parameters (or slices) that it owns.

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
    """Each parameter, in `order`, with the rank that had the least weight before it."""
    if loads is not None and len(loads) != world_size:
        raise ValueError(f"loads has {len(loads)} entries; it takes one for each rank, {world_size}.")
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
    """Pack what is `whole` by its cost, and cut the rest so that elements are level."""
    numels = [param.numel for param in params]
    _check_sizes(numels, world_size)
    if alignment < 1:
        raise ValueError(f"alignment must be at least 1 element, got {alignment}.")
    slices_of_rank: list[list[Slice]] = [[] for _ in range(world_size)]
    taken: dict[object, list[int]] = {}  # for each kind, the elements that each rank owns whole
    for trainable in (True, False):
        whole = [i for i, param in enumerate(params) if param.whole and param.trainable == trainable]
        for number, rank in _packed_tightly(params, whole, cost, loads or [0] * world_size):
            slices_of_rank[rank].append(Slice(number, 0, numels[number]))
            taken.setdefault(_kind(params[number]), [0] * world_size)[rank] += numels[number]
    members: dict[object, list[int]] = {}
    for number, param in enumerate(params):
        if not param.whole:
            members.setdefault(_kind(param), []).append(number)
    for kind, of_kind in members.items():
        ends = _level_ends(taken.get(kind, [0] * world_size), sum(numels[i] for i in of_kind))
        for piece, rank in _cut_at(ends, of_kind, numels, alignment):
            slices_of_rank[rank].append(piece)
    return Partition(tuple(numels), tuple(tuple(sorted(slices)) for slices in slices_of_rank))


def _packed_tightly(
    params: Sequence[ParamSpec],
    numbers: Iterable[int],
    cost: Callable[[ParamSpec], float],
    loads: Sequence[float],
    rounds: int = 10,
) -> list[tuple[int, int]]:
    """Each parameter with its owner; the fullest rank is close to the least full that is possible.

    A bisection for the smallest load under which each parameter, largest first, fits on some rank, given to
    the first on which it fits. It begins with the result of the greedy rule.

    Source: MULTIFIT: Coffman, Garey and Johnson, SIAM J. Computing 7 (1978).
    """
    weights = sorted(((number, cost(params[number])) for number in numbers), key=lambda one: -one[1])
    largest_first = [number for number, _ in weights]
    best = list(_to_least_loaded(params, largest_first, cost, len(loads), loads))
    total = list(loads)
    for (_, rank), (_, weight) in zip(best, weights):
        total[rank] += weight
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
    """Each parameter, largest first, with the first rank on which it fits; None if one fits on none."""
    filled, owners = list(loads), []
    rank, before = 0, None
    for number, weight in weights:
        if weight != before:  # a rank that is too full for one of this weight is too full for the next
            rank, before = 0, weight
        while rank < len(filled) and filled[rank] + weight > limit:
            rank += 1
        if rank == len(filled):
            return None
        filled[rank] += weight
        owners.append((number, rank))
    return owners


def _kind(param: ParamSpec) -> object:
    return param.device, param.dtype, param.trainable


def _level_ends(loads: Sequence[int], total: int) -> list[int]:
    """Where each rank's part of a range ends, if the range is poured over the loads like water.

    >>> _level_ends([0, 0, 0], 10), _level_ends([6, 0, 2], 7)       # the level is 4.5 in the second
    ([4, 7, 10], [0, 5, 7])
    """
    below, filled = 0, 0  # the ranks under the level, and their loads together
    for load in sorted(loads):
        if below and load * below - filled >= total:
            break
        below, filled = below + 1, filled + load
    ends, poured = [], 0  # poured: times `below`, so that it stays an integer
    for load in loads:
        poured += max(0, total + filled - load * below)
        ends.append(-(-poured // below))
    return ends


def _cut_at(
    ends: Sequence[int], members: Sequence[int], numels: Sequence[int], alignment: int
) -> Iterator[tuple[Slice, int]]:
    """Cut the flat range of `members` near each rank's end."""
    rank, start = 0, 0  # start: offset of the current parameter in the flat range
    for param in members:
        done = 0
        while True:
            stop = min(numels[param], -(-(ends[rank] - start) // alignment) * alignment)
            if stop > done or numels[param] == 0:  # a parameter without elements also gets an owner
                yield Slice(param, done, stop), rank
                done = stop
            if done == numels[param]:
                break
            rank += 1
        start += numels[param]


def _runs_below(threshold: float, bucket: Sequence[int], numels: Sequence[int]) -> Iterable[list[int]]:
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
