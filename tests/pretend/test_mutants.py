"""Mistakes that no run on a CPU shows, put in on purpose: the pretend device has to find each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import paths
import pretend_device as device
import pretend_group
import pytest
import torch
import torch.distributed as dist
from pretend_ranks import Ranks, on_device

from zero_ref import ZeroRedundancyOptimizer
from zero_ref.backward import reduction
from zero_ref.clip import grad_norm
from zero_ref.comm import devices, process_group
from zero_ref.comm.collectives import AllOf
from zero_ref.comm.process_group import ProcessGroupCollectives
from zero_ref.optimizer import zero_redundancy_optimizer
from zero_ref.shard import arriving

pytestmark = pytest.mark.ranks

VIEWS: dict[str, Any] = {"parameters_as_bucket_view": True}
SHARES: dict[str, Any] = {**VIEWS, "partition": "equal_shares"}
INTERLEAVED: dict[str, Any] = {**VIEWS, "interleaved": True, "owners": False}
Patch = contextlib.AbstractContextManager[Any]


def does(owner: Any, name: str, what: Callable[..., Any]) -> Patch:
    return mock.patch.object(owner, name, what)


def nothing(*_: Any, **__: Any) -> None:
    return None


# ------------------------------------------------------------------------------------------- the mistakes


def a_number_is_read_in_a_step() -> Patch:
    real = ZeroRedundancyOptimizer.end_update

    def end(self: Any) -> None:
        self.built.params[0].sum().item()
        real(self)

    return does(ZeroRedundancyOptimizer, "end_update", end)


def gradients_are_checked_one_by_one() -> Patch:
    def share_infinities(comm: Any, own: Any) -> None:
        any(bool(grad.isfinite().all()) for grad in own)
        comm.all_reduce(torch.zeros(1, device=comm.control_device)).wait()

    return does(reduction, "share_infinities", share_infinities)


def norms_are_read_one_by_one() -> Patch:
    real = grad_norm.norms_of_slices

    def norms(zero: Any, *args: Any) -> Any:
        return torch.stack([norm.cpu() for norm in real(zero, *args)]).to(zero.collectives.control_device)

    norms.__code__ = norms.__code__.replace(co_filename=grad_norm.__file__)  # as if it stood there
    return does(grad_norm, "norms_of_slices", norms)


def the_side_stream_is_not_waited_for() -> Patch:
    def wait(self: device.Stream, other: device.Stream) -> None:
        if self is not device.gpu.default:
            self.join(other.clock)

    return does(device.Stream, "wait_stream", wait)


def a_call_is_not_waited_for() -> Patch:
    return does(process_group._NamedCall, "wait", nothing)


def a_reduction_is_used_before_its_end() -> Patch:
    real = ProcessGroupCollectives.reduce_shares

    def reduce_shares(self: Any, flat: torch.Tensor, share: torch.Tensor) -> Any:
        work = real(self, flat, share)
        share.mul_(1)
        return work

    return does(ProcessGroupCollectives, "reduce_shares", reduce_shares)


def a_sum_is_used_before_its_end() -> Patch:
    def reduce(self: Any, tensor: torch.Tensor, dst: int) -> Any:
        process_group.dist.reduce(tensor, group_dst=dst, group=self.group, async_op=True)
        return AllOf([])

    return does(ProcessGroupCollectives, "reduce", reduce)


def packed_parts_are_not_recorded() -> Patch:
    return does(reduction, "_used_on_this_stream", nothing)


def a_module_does_not_wait_for_its_parameters() -> Patch:
    return does(arriving.Arriving, "wait", nothing)


def streams_that_use_memory_are_not_recorded() -> Patch:
    return does(device.PretendTensor, "record_stream", nothing)


def a_piece_is_stepped_before_it_has_come() -> Patch:
    return does(device.Event, "synchronize", nothing)


def a_future_without_devices() -> Patch:
    return does(devices, "future", lambda _: torch.futures.Future())


def unbatched_messages() -> Patch:
    def one_by_one(sends: Any, recvs: Any, *, group: Any, tag: int) -> Any:
        works = [dist.isend(tensor, group=group, group_dst=peer) for peer, tensor in sends]
        return AllOf([*works, *(dist.irecv(tensor, group=group, group_src=peer) for peer, tensor in recvs)])

    stack = contextlib.ExitStack()
    stack.enter_context(does(process_group, "_batch", one_by_one))
    stack.enter_context(does(pretend_group, "LIMIT_S", 5.0))
    return stack


def one_rank_sends_in_another_order() -> Patch:
    real = zero_redundancy_optimizer.start_broadcasts

    def start(comm: Any, messages: Any, *args: Any) -> Any:
        return real(comm, messages if comm.rank == 0 else messages[::-1], *args)

    return does(zero_redundancy_optimizer, "start_broadcasts", start)


def one_rank_makes_a_call_more() -> Patch:
    real = ZeroRedundancyOptimizer.begin_update

    def begin(self: Any, *args: Any) -> None:
        if self.rank == 0:
            self.collectives.all_reduce(torch.zeros(1, device=device.DEVICE))
        real(self, *args)

    return does(ZeroRedundancyOptimizer, "begin_update", begin)


def a_tensor_with_gaps() -> Patch:
    return does(process_group, "_raw", lambda tensor: tensor.detach().view(-1)[::2])


def a_dtype_that_nccl_has_not() -> Patch:
    return does(process_group, "_raw", lambda tensor: tensor.detach().view(-1).view(torch.int16))


def facts_on_the_cpu() -> Patch:
    real = ProcessGroupCollectives.__init__

    def init(self: Any, group: Any = None) -> None:
        real(self, group)
        self.control_device = torch.device("cpu")

    return does(ProcessGroupCollectives, "__init__", init)


def gradients_go_by_the_host() -> Patch:
    return does(ProcessGroupCollectives, "wire_of", lambda self, device: torch.device("cpu"))


MISTAKES: dict[Callable[[], Patch], tuple[str, dict[str, Any], bool, str]] = {
    a_number_is_read_in_a_step: ("step", VIEWS, False, "waits"),
    gradients_are_checked_one_by_one: ("after_ddp", {**VIEWS, "hook": "scaled"}, False, "too many waits"),
    norms_are_read_one_by_one: ("after_ddp", {**VIEWS, "clip": True}, False, "too many waits"),
    the_side_stream_is_not_waited_for: ("in_backward", INTERLEAVED, False, "races"),
    a_call_is_not_waited_for: ("step", VIEWS, False, "races"),
    a_reduction_is_used_before_its_end: ("sharded", SHARES, False, "races"),
    a_module_does_not_wait_for_its_parameters: ("sharded", {**SHARES, "in_forward": True}, False, "races"),
    streams_that_use_memory_are_not_recorded: (
        "in_backward",
        {**INTERLEAVED, "owners": True, "by": "pairs"},
        False,
        "frees",
    ),
    a_piece_is_stepped_before_it_has_come: ("offload", VIEWS, False, "races"),
    a_future_without_devices: ("after_ddp", {**VIEWS, "hook": "owners"}, False, "the future has no devices"),
    unbatched_messages: ("after_ddp", {**VIEWS, "hook": "pairs"}, False, "imed out"),
    one_rank_sends_in_another_order: ("step", VIEWS, False, "other ranks are not at call"),
    one_rank_makes_a_call_more: ("step", VIEWS, False, "other ranks are not at call"),
    a_tensor_with_gaps: ("step", VIEWS, False, "tensors must be contiguous"),
    a_dtype_that_nccl_has_not: ("step", VIEWS, False, "NCCL has no torch.int16"),
    facts_on_the_cpu: ("step", VIEWS, False, "no backend for tensors on cpu"),
    gradients_go_by_the_host: ("after_ddp", {**VIEWS, "hook": "pairs"}, True, "waits"),
    a_sum_is_used_before_its_end: ("after_ddp", {**VIEWS, "hook": "owners"}, False, "races"),
    packed_parts_are_not_recorded: (
        "in_backward",
        {"partition": paths.alternating, "interleaved": True, "owners": True},
        False,
        "frees",
    ),
}
"""By mistake: the path, its options, whether the group also has Gloo, and what has to be found."""


ALWAYS = {
    a_number_is_read_in_a_step,
    norms_are_read_one_by_one,
    the_side_stream_is_not_waited_for,
    a_reduction_is_used_before_its_end,
    a_module_does_not_wait_for_its_parameters,
    packed_parts_are_not_recorded,
    one_rank_sends_in_another_order,
}
"""One or two of each kind of finding. The others are made once a day."""


def with_mistake(mistake: Callable[[], Patch], name: str, options: dict[str, Any], mixed: bool) -> Any:
    """Return the findings on this rank: places by kind, or the text of an error."""
    pretend_group.register()
    try:
        with mistake():
            found, _ = on_device(name, options, mixed)
    except Exception as error:
        return str(error)
    return found


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.close()


@pytest.mark.parametrize(
    "mistake",
    [pytest.param(one, marks=() if one in ALWAYS else pytest.mark.thorough) for one in MISTAKES],
    ids=lambda mistake: mistake.__name__,
)
def test_the_mistake_is_found(pool: Ranks, mistake: Callable[[], Patch]) -> None:
    *how, wanted = MISTAKES[mistake]
    found = pool.run(partial(with_mistake, mistake, *how))
    assert any(wanted in one for one in found), found
    if any(isinstance(one, str) for one in found):  # after an error a rank may be anywhere
        pool.close()
