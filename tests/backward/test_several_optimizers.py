"""Several sharded optimizers over the parameters of one model: gradients to owners, and one norm over all.

Each run is held against the plain optimizers under DDP, bit for bit at every step.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from library.training import (
    Snapshot,
    Tangle,
    assert_same,
    caught,
    loss_on_own_data,
    snapshot,
    sum_in_rank_order,
)
from test_overlap import (
    SMALL_BUCKETS,
    Branches,
    Matrices,
    assert_ranks_hold_the_same,
    loss_of_branches,
    loss_of_stack,
)
from torch import nn, optim
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

from zero_ref.backward.overlap import hook_with_zero_step, hook_with_zero_step_interleaved
from zero_ref.backward.reduction import reduce_to_owners
from zero_ref.clip.grad_norm import clip_grad_norm_, get_total_norm
from zero_ref.lab.ranks import run
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer

pytestmark = pytest.mark.ranks

STEPS, LIMIT = 4, 0.1
EVERY_OTHER = [slice(0, None, 2), slice(1, None, 2)]  # so that each of DDP's buckets has parameters of both
CLASSES: list[tuple[Any, dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (optim.Adam, {"lr": 0.01}),
]


@dataclass
class Pair:
    """A training by two optimizers. `loop` is the user's program, which yields after each update.

    Args:
        way: makes the hook that steps in backward; None where the program calls `step`.
    """

    loop: Callable[[Pair, Any, list[Any]], Iterator[None]]
    partitions: Sequence[Any] = ("sorted_greedy", "even")
    make_model: Callable[[], nn.Module] = Tangle
    loss: Callable[[Any, int, int], torch.Tensor] = loss_on_own_data
    ddp: dict[str, Any] = field(default_factory=dict)
    hook: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    parts: list[slice] = field(default_factory=lambda: EVERY_OTHER)
    classes: list[tuple[Any, dict[str, Any]]] = field(default_factory=lambda: CLASSES)
    way: Any = None
    to_owners: bool = True
    joins: bool = True  # divide_by_initial_world_size
    is_sharded: bool = True

    def optimizers(self, model: nn.Module) -> list[Any]:
        params = list(model.parameters())
        made = []
        for part, (of_class, options), partition in zip(
            self.parts, self.classes, self.partitions, strict=True
        ):
            if self.is_sharded:
                sharding = {"partition": partition, "overlap_with_ddp": self.way is not None, **self.zero}
                made.append(ZeroRedundancyOptimizer(params[part], of_class, **sharding, **options))
            else:
                made.append(of_class(params[part], **options))
        return made

    def run(self) -> list[Snapshot]:
        """The parameters after each update."""
        model = self.make_model()
        optimizers = self.optimizers(model)
        ddp = DDP(model, **SMALL_BUCKETS, **self.ddp)
        if self.is_sharded and self.way is not None:
            hook = reduce_to_owners(optimizers, **self.hook) if self.to_owners else sum_in_rank_order
            ddp.register_comm_hook(None, self.way(hook, ddp, optimizers))
        elif self.is_sharded and self.to_owners:
            ddp.register_comm_hook(None, reduce_to_owners(optimizers, **self.hook))
        elif self.joins:  # else DDP itself divides by the number of ranks that have data
            ddp.register_comm_hook(None, sum_in_rank_order)
        before = snapshot(model)
        snapshots = [snapshot(model) for _ in self.loop(self, ddp, optimizers)]
        for (name, param), old, new in zip(model.named_parameters(), before, snapshots[-1], strict=True):
            assert torch.equal(old, new) != bool(param.requires_grad and param.numel()), name
        return snapshots


def zero_grad(optimizers: list[Any]) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()


def step(optimizers: list[Any]) -> None:
    for optimizer in optimizers:
        optimizer.step()


def as_usual(pair: Pair, ddp: Any, optimizers: list[Any]) -> Iterator[None]:
    for number in range(STEPS + 1):
        zero_grad(optimizers)
        pair.loss(ddp, dist.get_rank(), number).backward()
        if pair.is_sharded and pair.way is None:
            for optimizer in optimizers:
                owned = {own.param for own in optimizer.shard.owned}
                others = [param for param in optimizer.built.params if param not in owned]
                assert not any(param.grad is not None and param.grad.any() for param in others)
        step(optimizers)
        yield


def accumulating(pair: Pair, ddp: Any, optimizers: list[Any]) -> Iterator[None]:
    for number in range(STEPS):
        zero_grad(optimizers)
        with ddp.no_sync():
            (0.25 * pair.loss(ddp, dist.get_rank(), 2 * number)).backward()
        pair.loss(ddp, dist.get_rank(), 2 * number + 1).backward()
        step(optimizers)
        yield


def clipping(pair: Pair, ddp: Any, optimizers: list[Any]) -> Iterator[None]:
    for number in range(STEPS):
        zero_grad(optimizers)
        pair.loss(ddp, dist.get_rank(), number).backward()
        params = list(ddp.parameters())
        if not pair.is_sharded:
            nn.utils.clip_grad_norm_([param for part in pair.parts for param in params[part]], LIMIT)
        elif number % 2:
            assert clip_grad_norm_(optimizers, LIMIT) > LIMIT
        else:
            nn.utils.clip_grads_with_norm_(params, LIMIT, get_total_norm(optimizers))
        step(optimizers)
        yield


def clipping_apart(pair: Pair, ddp: Any, optimizers: list[Any]) -> Iterator[None]:
    """Each by its own norm; the first has stepped and zeroed its gradients before the second is clipped."""
    for number in range(STEPS):
        pair.loss(ddp, dist.get_rank(), number).backward()
        for optimizer in optimizers:
            if pair.is_sharded:
                clip_grad_norm_(optimizer, LIMIT)
            else:
                nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], LIMIT)
            optimizer.step()
            optimizer.zero_grad(set_to_none=number % 2 == 0)
        yield


def clipping_by_value(pair: Pair, ddp: Any, optimizers: list[Any]) -> Iterator[None]:
    for number in range(STEPS):
        zero_grad(optimizers)
        pair.loss(ddp, dist.get_rank(), number).backward()
        nn.utils.clip_grad_value_(ddp.parameters(), 0.01)
        step(optimizers)
        yield


def with_a_scaler(pair: Pair, ddp: Any, optimizers: list[Any]) -> Iterator[None]:
    """Only the optimizer that has an infinite gradient leaves out its update.

    In the second step the first has one on rank 0, in the third step the second on the last rank.
    """
    params = list(ddp.parameters())
    infinite = {1: (0, params[0]), 2: (dist.get_world_size() - 1, params[3])}
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    for number in range(5):
        zero_grad(optimizers)
        loss = pair.loss(ddp, dist.get_rank(), number)
        if number in infinite and infinite[number][0] == dist.get_rank():
            loss = loss + infinite[number][1].sum() * torch.inf
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        yield
    assert scaler.get_scale() == 128.0  # doubled three times, halved twice


def in_a_join(pair: Pair, ddp: Any, optimizers: list[Any]) -> Iterator[None]:
    with Join([ddp, *(optimizers if pair.is_sharded else [])], divide_by_initial_world_size=pair.joins):
        for number in range(2 + dist.get_rank()):
            zero_grad(optimizers)
            pair.loss(ddp, dist.get_rank(), number).backward()
            step(optimizers)
    yield


def assert_equals_plain(*pairs: Pair) -> int:
    for pair in pairs:
        plain = Pair(**{**vars(pair), "is_sharded": False}).run()
        ours = pair.run()
        label = f"{pair.loop.__name__}, {pair.partitions}, {pair.ddp}, {pair.hook}"
        assert_same(ours, plain, label)
        assert_ranks_hold_the_same(ours)
    return len(pairs)


def every_mode() -> int:
    modes: list[dict[str, Any]] = [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}]
    views = {"parameters_as_bucket_view": True}
    return assert_equals_plain(
        *(Pair(as_usual, ddp=mode) for mode in modes),
        Pair(as_usual, ("even", "even"), zero=views),
        Pair(as_usual, parts=[slice(0, 5), slice(5, None)]),
        *(
            Pair(as_usual, p, Branches, loss_of_branches, ddp={"find_unused_parameters": True} | mode)
            for mode, p in itertools.product(modes[:2], [("sorted_greedy", "even")])
        ),
        Pair(accumulating),
        Pair(accumulating, ddp=modes[1]),
        Pair(clipping, ("sorted_greedy", "registration_greedy")),
        *(Pair(clipping_apart, ("sorted_greedy", "registration_greedy"), ddp=mode) for mode in modes[:2]),
        Pair(clipping_by_value, hook={"may_change": True}),
        Pair(with_a_scaler, hook={"scaled": True}),
    )


def test_gradients_to_the_owners_of_two_optimizers_train_as_plain() -> None:
    assert run(every_mode, 3, timeout=120) == [14] * 3


def in_backward() -> int:
    """Every way to step in backward, with DDP's modes, in a Join, and for Muon beside AdamW."""
    muon_beside_adamw: dict[str, Any] = {
        "make_model": lambda: Matrices(*[torch.float32] * 4),
        "loss": loss_of_stack,
        "parts": [slice(0, 2), slice(2, None)],
        "classes": [(optim.Muon, {"lr": 0.02}), (optim.AdamW, {"lr": 0.01})],
        "partitions": ("balanced", "even"),
    }
    kinds: list[dict[str, Any]] = [
        {"loop": as_usual},
        {"loop": accumulating, "ddp": {"gradient_as_bucket_view": True}},
        {"loop": in_a_join},
        {"loop": as_usual, **muon_beside_adamw},
    ]
    ways = [hook_with_zero_step, hook_with_zero_step_interleaved]
    return assert_equals_plain(
        *(
            Pair(way=way, to_owners=to_owners, **kind)
            for kind, way, to_owners in itertools.product(kinds, ways, (False, True))
        )
    )


def test_hooks_step_two_optimizers_in_backward() -> None:
    assert run(in_backward, 2, timeout=120) == [16] * 2


def clipping_in_a_join(pair: Pair, ddp: Any, optimizers: list[Any]) -> Iterator[None]:
    joinables = [ddp, *optimizers] if pair.is_sharded else [ddp]
    with Join(joinables, divide_by_initial_world_size=pair.joins):
        for number in range(2 + dist.get_rank()):
            zero_grad(optimizers)
            pair.loss(ddp, dist.get_rank(), number).backward()
            if pair.is_sharded:
                clip_grad_norm_(optimizers, LIMIT)
            else:
                params = list(ddp.parameters())
                nn.utils.clip_grad_norm_([param for part in pair.parts for param in params[part]], LIMIT)
            step(optimizers)
    yield


def clipped_in_a_join() -> int:
    return assert_equals_plain(Pair(clipping_in_a_join, to_owners=False, joins=False))


def test_in_a_join_two_optimizers_are_clipped_by_those_that_have_data() -> None:
    assert run(clipped_in_a_join, 2, timeout=60) == [1] * 2


def second_backwards() -> list[str]:
    """Return the errors of a backward if one of the optimizers still has gradients, and if none has."""
    raised = []
    for left, before in itertools.product(([0], [1], []), (0, 2)):
        pair = Pair(as_usual, ddp={"gradient_as_bucket_view": True})
        model = Tangle()
        optimizers = pair.optimizers(model)
        ddp = DDP(model, **SMALL_BUCKETS, **pair.ddp)
        ddp.register_comm_hook(None, reduce_to_owners(optimizers))
        for number in range(before):
            loss_on_own_data(ddp, dist.get_rank(), number).backward()
            zero_grad(optimizers)
        loss_on_own_data(ddp, dist.get_rank(), 3).backward()
        step(optimizers)
        zero_grad([optimizer for place, optimizer in enumerate(optimizers) if place not in left])
        raised.append(caught(lambda ddp=ddp: loss_on_own_data(ddp, dist.get_rank(), 4).backward()))
    return raised


def test_a_backward_that_adds_to_gradients_of_one_optimizer_is_refused() -> None:
    for raised in run(second_backwards, 2, timeout=60):
        refused = ["adds to gradients that the last one reduced" in message for message in raised]
        assert refused == [True] * 4 + [False] * 2
        assert raised[4:] == ["nothing"] * 2


def refusals() -> dict[str, str]:
    """Return the refusals' messages, each by a part that it must contain."""
    world, rank = dist.get_world_size(), dist.get_rank()
    few, alone = dist.new_group([0, 1]), [dist.new_group([member]) for member in range(world)][rank]
    model = Tangle()
    params = list(model.parameters())

    def zero(some: list[Any], group: Any = None, **options: Any) -> ZeroRedundancyOptimizer:
        return ZeroRedundancyOptimizer(some, optim.SGD, group, lr=0.1, **options)

    def backward_of(optimizers: list[Any]) -> str:
        ddp = DDP(model, **SMALL_BUCKETS)
        ddp.register_comm_hook(None, reduce_to_owners(optimizers))
        return caught(lambda: loss_on_own_data(ddp, rank, 0).backward())

    first, second, both = zero(params[:5]), zero(params[5:]), zero(params)
    overlapped = zero(params, overlap_with_ddp=True)
    joined = DDP(model)
    joined.register_comm_hook(None, reduce_to_owners([first, second]))

    def join_with_one() -> None:
        with Join([joined, first]):
            loss_on_own_data(joined, rank, 0).backward()

    messages = {
        "takes each optimizer once, and was given 0": caught(lambda: reduce_to_owners([])),
        "takes each optimizer once, and was given 2": caught(lambda: reduce_to_owners([first, first])),
        "takes the ZeroRedundancyOptimizer, or a list of them, not Adam": caught(
            lambda: reduce_to_owners([first, optim.Adam(params[5:])])  # type: ignore[list-item]
        ),
        "parameter 0 is in two of the optimizers": caught(lambda: reduce_to_owners([first, both])),
        f"over the ranks {list(range(world))} and one over the ranks [{rank}]": caught(
            lambda: reduce_to_owners([first, zero(params[5:], alone)])
        ),
        "DDP reduces a parameter of shape (4,) that the optimizer does not have": backward_of([first]),
        "reduce_to_owners was made for another optimizer": caught(
            lambda: hook_with_zero_step(
                reduce_to_owners([overlapped, zero([nn.Parameter(torch.ones(1))])]), DDP(model), overlapped
            )
        ),
        "some of this model's optimizers are in the Join and others are not": caught(join_with_one),
        "ranks disagree, so none can reduce gradients to owners: rank 1": caught(
            lambda: reduce_to_owners([second, first] if rank == 1 else [first, second])
        ),
        "scaled=True, may_change=False, by=None] where rank 0 has [scaled=False": caught(
            lambda: reduce_to_owners(both, scaled=rank == 1)
        ),
    }
    if rank < 2:
        of_few = zero(params[:5], few)
        messages["over the ranks [0, 1]"] = caught(
            lambda: reduce_to_owners([of_few, zero(params[5:], alone)])
        )
    return messages


def test_what_cannot_work_is_refused_on_all_ranks() -> None:
    for messages in run(refusals, 3, timeout=60):
        for text, message in messages.items():
            assert text in message, message


# ------------------------------------------------------------ experts: an optimizer over a part of the ranks


def sharded_over(ranks_of_each: list[list[int]], *gradients: float) -> ZeroRedundancyOptimizer:
    """An optimizer over that one of these groups which has this rank, with parameters of these gradients."""
    mine = [dist.new_group(ranks) for ranks in ranks_of_each]
    place = next(place for place, ranks in enumerate(ranks_of_each) if dist.get_rank() in ranks)
    params = [nn.Parameter(torch.zeros(1)) for _ in gradients]
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = torch.tensor([gradient])
    return ZeroRedundancyOptimizer(params, optim.SGD, mine[place], lr=0.1)


def norms_worked_by_hand() -> tuple[list[float], list[float], list[str]]:
    rank = dist.get_rank()
    dense = sharded_over([[0, 1, 2, 3]], 3.0, 4.0)
    expert = sharded_over([[0, 1], [2, 3]], [12.0, 84.0][rank // 2])
    one_each = sharded_over([[0], [1], [2], [3]], [1.0, 1.5, 3.5, 1.0 + rank][rank])
    column = sharded_over([[0, 2], [1, 3]], 1.0)
    both = [expert, dense]
    norms = [
        get_total_norm(both),
        get_total_norm(expert),
        get_total_norm(expert, across=dist.group.WORLD),
        get_total_norm(both, params=[dense.built.params[0], expert.built.params[0]]),
        get_total_norm([dense, one_each], 1.0),
    ]
    clip_grad_norm_(both, 8.5)
    clipped = [param.grad.item() for zero in both for param in zero.built.params]  # type: ignore[union-attr]
    wrong: list[Callable[[], Any]] = [
        lambda: clip_grad_norm_(both, 1.0, params=dense.built.params if rank == 3 else None),
        lambda: clip_grad_norm_([column, expert], 1.0),
        lambda: clip_grad_norm_(dense, 1.0, across=expert.process_group),
    ]
    messages = [caught(call) for call in wrong]
    expert.built.params[0].grad = torch.tensor([torch.inf if rank // 2 else 12.0])
    messages.append(caught(lambda: clip_grad_norm_(both, 1.0, error_if_nonfinite=True)))
    return [norm.item() for norm in norms], clipped, messages


def test_norms_of_3_and_4_with_experts_of_12_and_84() -> None:
    for rank, (norms, clipped, messages) in enumerate(run(norms_worked_by_hand, 4, timeout=60)):
        of_own = [12.0, 84.0][rank // 2]
        assert clipped == pytest.approx([of_own / 10, 0.3, 0.4])
        assert norms == pytest.approx([85.0, of_own, (12.0**2 + 84.0**2) ** 0.5, (85.0**2 - 16) ** 0.5, 17.0])
        disagree = "ValueError: ranks disagree, so none can clip the gradients: rank"
        theirs = [0, 1] if rank // 2 == 0 else [2, 3]
        starts = [
            f"{disagree} 2 has [optimizer 0 (SGD), all parameters] over the ranks [2, 3] where rank 3 has",
            f"ValueError: rank {rank % 2}: the ranks {[rank % 2, rank % 2 + 2]} are to have one norm, and an "
            f"optimizer is over {theirs}. Pass across=",
            f"ValueError: rank {rank}: the ranks {theirs} are to have one norm, and an optimizer is over [0",
            f"RuntimeError: rank {rank}: The total norm of order 2.0 for gradients from `parameters` is",
        ]
        for message, start in zip(messages, starts, strict=True):
            assert message.startswith(start), message
        name = "parameter 0, owned" if rank // 2 else "parameter 0 of ranks [2, 3], owned"
        assert f"as that of {name} by rank 2, is inf" in messages[-1]


def copies_beside_a_wider_group() -> list[str]:
    """In hybrid sharding each group has the same parameters."""
    copies = sharded_over([[0, 1], [2, 3]], 3.0)
    unused = sharded_over([[0, 1], [2, 3]], 0.0)
    dense = sharded_over([[0, 1, 2, 3]], 4.0)
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        assert get_total_norm([copies, unused]) == 3.0, "each group has the norm of all"
        get_total_norm([dense, unused])
        get_total_norm([dense, copies])
    assert [one.filename for one in caught_warnings] == [__file__]
    return [str(one.message) for one in caught_warnings]


def test_copies_that_would_count_twice_are_told() -> None:
    for told in run(copies_beside_a_wider_group, 4, timeout=60):
        assert len(told) == 1
        assert told[0].startswith("groups of ranks have the same norms of optimizer 0 (SGD), all parameters")
