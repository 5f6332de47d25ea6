"""The process-group collectives in a group of one, and agreements: equal facts pass, else all ranks raise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

from zero_ref.comm import process_group
from zero_ref.comm.agreement import Agreement
from zero_ref.comm.backend import as_collectives, of_group
from zero_ref.comm.collectives import AllOf, Collectives
from zero_ref.comm.devices import CPU
from zero_ref.comm.objects import broadcast_json
from zero_ref.comm.process_group import ProcessGroupCollectives
from zero_ref.lab import virtual
from zero_ref.lab.meter import recording
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.calls import Call

# ------------------------------------------------------------------------------- which ranks, which group


@pytest.mark.usefixtures("group_of_one")
def test_none_is_the_default_group() -> None:
    comm = as_collectives(None)
    assert isinstance(comm, ProcessGroupCollectives)
    assert (comm.rank, comm.world_size, comm.control_device) == (0, 1, torch.device("cpu"))
    assert as_collectives(dist.group.WORLD).world_size == 1
    assert as_collectives(comm) is comm


def test_without_torch_distributed_it_says_how_to_start_it() -> None:
    with pytest.raises(RuntimeError, match=r"init_process_group\(\)"):
        ProcessGroupCollectives()


@pytest.mark.usefixtures("group_of_one")
def test_a_rank_outside_the_group_is_refused() -> None:
    with pytest.raises(ValueError, match="global rank 0 is not a member"):
        as_collectives(dist.GroupMember.NON_GROUP_MEMBER)  # what new_group gives to the others


@pytest.mark.usefixtures("group_of_one")
def test_calls_of_a_group_of_one_are_made_and_recorded() -> None:
    comm = ProcessGroupCollectives()
    tensor = torch.arange(3.0)
    with recording(comm) as calls:
        comm.broadcast(tensor, src=0).wait()
        comm.all_reduce(tensor).wait()
        (gathered,) = comm.all_gather(tensor)
    assert gathered.tolist() == tensor.tolist() == [0.0, 1.0, 2.0]
    assert calls == [Call("broadcast", 12, 0), Call("all_reduce", 12), Call("all_gather", 12)]


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("as_view", [False, True])
def test_one_real_rank_trains_as_the_plain_optimizer_and_sends_nothing(as_view: bool) -> None:
    def train(make: Any) -> torch.Tensor:
        weight = nn.Parameter(torch.linspace(-1, 1, 300))
        optimizer = make([weight])
        for step in range(3):
            weight.grad = torch.linspace(step, 1, 300)
            optimizer.step()
        return weight.detach()

    def zero(params: Any) -> ZeroRedundancyOptimizer:
        optimizer = ZeroRedundancyOptimizer(params, optim.AdamW, parameters_as_bucket_view=as_view, lr=0.1)
        assert optimizer.process_group is dist.group.WORLD
        optimizer.collectives.observers.append(lambda call: pytest.fail(f"sent {call}"))
        return optimizer

    plain = train(lambda params: optim.AdamW(params, lr=0.1))
    assert torch.equal(train(zero), plain)
    assert not torch.equal(plain, torch.linspace(-1, 1, 300))


@pytest.mark.usefixtures("group_of_one")
def test_a_call_that_fails_says_who_wanted_what() -> None:
    comm = ProcessGroupCollectives()
    with pytest.raises(
        RuntimeError, match=r"(?s)rank 0 of 1: broadcast from rank 0 did not complete: .*first error"
    ):
        comm.broadcast(torch.zeros(3).to_sparse(), src=0).wait()


# -------------------------------------------------------------------------- a backend for each kind of device

GPU = torch.device("meta", 0)
"""Stands for one: the calls of these tests are not made."""


def on_backends(monkeypatch: pytest.MonkeyPatch, config: str) -> ProcessGroupCollectives:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(process_group, "current_device", lambda: GPU)
    return of_group(None)


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize(
    ("config", "control", "of_cpu", "of_gpu", "pairwise"),
    [
        ("cpu:gloo", CPU, CPU, CPU, (True, True)),
        ("cpu:gloo,meta:gloo", CPU, CPU, CPU, (True, True)),
        ("cpu:gloo,meta:nccl", CPU, CPU, GPU, (True, False)),
        ("meta:nccl", GPU, GPU, GPU, (False, False)),
        ("cpu:mpi,meta:mpi", CPU, CPU, GPU, (False, False)),
    ],
)
def test_control_messages_and_each_kind_of_tensor_have_a_device_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
    config: str,
    control: torch.device,
    of_cpu: torch.device,
    of_gpu: torch.device,
    pairwise: tuple[bool, bool],
) -> None:
    comm = on_backends(monkeypatch, config)
    assert comm.control_device == control
    assert (comm.wire_of(CPU), comm.wire_of(GPU)) == (of_cpu, of_gpu)
    assert (comm.goes_pairwise(CPU), comm.goes_pairwise(GPU)) == pairwise
    assert (comm.open_channel(0, {CPU}) is not None) == (control == CPU and pairwise[0])
    assert comm.open_channel(0, {CPU, GPU}) is None
    gloo = [device for device, is_gloos in zip((CPU, GPU), pairwise, strict=True) if is_gloos]
    assert [device for device in (CPU, GPU) if not comm.prefers_reduce(device)] == gloo
    of_any_backend = ProcessGroupCollectives()
    assert not of_any_backend.goes_pairwise(CPU)
    assert not of_any_backend.goes_pairwise(GPU)


@pytest.mark.usefixtures("group_of_one")
def test_in_a_group_with_two_backends_each_tensor_goes_by_that_of_its_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    comm = on_backends(monkeypatch, "cpu:gloo,meta:nccl")
    started: list[Any] = []
    names = {
        process_group._batch: "batch",
        process_group._all_gather: "all_gather",
        dist.broadcast: "broadcast",
        dist.reduce: "reduce",
    }
    names |= {process_group._reduce_scatter: "reduce_scatter", dist.isend: "send", dist.irecv: "recv"}

    def note(what: str, operation: Any, *args: Any, **kwargs: Any) -> Any:
        started.append(names[operation])
        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        tensors += [tensor for each in args if isinstance(each, list) for _, tensor in each]
        started.extend(tensor.device.type for tensor in tensors)
        return AllOf([])

    monkeypatch.setattr(comm, "start", note)
    here, there = torch.zeros(4), torch.zeros(4, device="meta")
    comm.exchange([(0, there), (0, here)], [(0, here), (0, there)]).wait()
    assert started == ["recv", "cpu", "send", "cpu", "batch", "meta", "meta"]
    started.clear()
    comm.gather_shares(there).wait()
    comm.reduce_shares(there, torch.zeros(4, device="meta")).wait()
    comm.broadcast(there, 0).wait()
    comm.broadcast(here, 0).wait()  # to no other rank in a message between two
    assert started == ["all_gather", "meta", "meta", "reduce_scatter", "meta", "meta", "broadcast", "meta"]
    started.clear()
    comm.reduce(there, 0).wait()
    comm.reduce(here, 0).wait()
    assert started == ["reduce", "meta", "reduce", "cpu"]


# -------------------------------------------------------------------------------------------------- agree


def agreeing(*facts_of_rank: Any, action: str = "go") -> list[str]:
    """Return the error of an agreement on each rank, as 'Type: text'; empty where it returns."""

    def on_rank(comm: Collectives) -> str:
        try:
            Agreement(comm).agree(action, facts_of_rank[comm.rank])
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return virtual.run(on_rank, len(facts_of_rank), timeout=5)


def test_equal_facts_pass() -> None:
    assert agreeing(["a", "b"], ["a", "b"], ["a", "b"]) == [""] * 3
    assert agreeing([]) == [""]


def test_equal_facts_cost_one_message_of_32_bytes() -> None:
    def on_rank(comm: Collectives) -> list[Call]:
        with recording(comm) as calls:
            Agreement(comm).agree("go", [f"fact {number}" for number in range(1000)])
        return calls

    assert virtual.run(on_rank, 3) == [[Call("all_gather", 32)]] * 3


def test_the_rank_that_differs_from_most_is_named_with_its_first_difference() -> None:
    messages = agreeing(["a", "b", "c"], ["a", "b", "c"], ["a", "x", "y"])
    assert len(set(messages)) == 1
    assert messages[0].startswith(
        "ValueError: ranks disagree, so none can go: rank 2 has [x] where rank 0 has [b]."
    )
    assert "rank 0 has [x] where rank 1 has [a]" in agreeing(["x"], ["a"], ["a"])[1]


def test_facts_that_continue_differ_in_number() -> None:
    message = agreeing(["a", "b"], ["a", "b", "c"])[0]
    assert "rank 1 lists 3 facts and rank 0 lists 2" in message


def test_an_error_of_one_rank_is_raised_there_and_told_on_the_others() -> None:
    messages = agreeing(["a"], KeyError("betas"), ["a"])
    assert messages[1] == "KeyError: 'betas'"
    assert messages[0] == "RuntimeError: rank 0: rank 1 could not go: KeyError: 'betas'"
    assert messages[2] == "RuntimeError: rank 2: rank 1 could not go: KeyError: 'betas'"


def test_each_rank_raises_its_own_error_where_all_failed() -> None:
    assert agreeing(ValueError("one"), ValueError("two")) == ["ValueError: one", "ValueError: two"]
    assert agreeing(ValueError("same"), ValueError("same")) == ["ValueError: same"] * 2


def test_ranks_about_to_do_different_things_are_told_what() -> None:
    def on_rank(comm: Collectives) -> str:
        with pytest.raises(RuntimeError) as caught:
            Agreement(comm).agree("save" if comm.rank else "load", ["a"])
        return str(caught.value)

    messages = virtual.run(on_rank, 2, timeout=5)
    assert "rank 0 is to load while rank 1 is to save" in messages[0]
    assert "rank 1 is to save while rank 0 is to load" in messages[1]


def test_facts_may_hold_any_text() -> None:
    messages = agreeing(["größe: 4"], ["größe: 44 \n\x00"])
    assert "[größe: 44 \n\x00]" in messages[0]


# ------------------------------------------------------------------------------------------- exchange, text


def swap(comm: Collectives) -> tuple[list[Any], list[Call]]:
    """Each rank sends two tensors to each other one, of sizes and dtypes that differ by pair."""
    others = [rank for rank in range(comm.world_size) if rank != comm.rank]

    def parcel(src: int, dst: int) -> list[torch.Tensor]:
        return [
            torch.full((1 + src, 2), 10.0 * src + dst),
            torch.full((1 + dst,), src - dst, dtype=torch.int16),
        ]

    sends = [(dst, tensor) for dst in others for tensor in parcel(comm.rank, dst)]
    recvs = [(src, torch.empty_like(tensor)) for src in others for tensor in parcel(src, comm.rank)]
    with recording(comm) as calls:
        comm.exchange(sends, recvs).wait()
    expected = [tensor for src in others for tensor in parcel(src, comm.rank)]
    assert all(torch.equal(tensor, wanted) for (_, tensor), wanted in zip(recvs, expected, strict=True))
    return [tensor.tolist() for _, tensor in recvs], calls


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_an_exchange_brings_each_tensor_to_its_place_and_is_recorded_both_ways(world_size: int) -> None:
    for rank, (received, calls) in enumerate(virtual.run(swap, world_size, timeout=10)):
        assert len(received) == 2 * (world_size - 1)
        others = [peer for peer in range(world_size) if peer != rank]
        assert calls == [
            *(
                call
                for dst in others
                for call in (Call("send", 8 + 8 * rank, dst), Call("send", 2 + 2 * dst, dst))
            ),
            *(
                call
                for src in others
                for call in (Call("recv", 8 + 8 * src, src), Call("recv", 2 + 2 * rank, src))
            ),
        ]


def test_json_of_one_rank_reaches_all() -> None:
    def on_rank(comm: Collectives) -> Any:
        value = ["ü", {"lr": torch.tensor(0.5), "betas": (0.9, None)}] if comm.rank == 1 else "not sent"
        return broadcast_json(comm, value, src=1)

    assert virtual.run(on_rank, 3, timeout=10) == [["ü", {"lr": 0.5, "betas": [0.9, None]}]] * 3
