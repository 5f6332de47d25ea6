"""The meter of RPC workers: every message and every byte, counted at the sender."""

from __future__ import annotations

import os
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc

from zero_ref.dropin.rpc_optimizer import DistributedOptimizer
from zero_ref.lab import ranks, rpc_meter
from zero_ref.lab.ranks import RankError
from zero_ref.lab.rpc_meter import Sent, counting

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not rpc.is_available(), reason="this torch has no RPC"),
]

Counts = dict[str, dict[str, Sent]]
_layers: list[torch.nn.Linear] = []  # on a worker: its own


def build(width: int) -> list[object]:
    _layers.append(torch.nn.Linear(width, width))
    return [rpc.RRef(param) for param in _layers[0].parameters()]


def forward(x: torch.Tensor) -> torch.Tensor:
    return _layers[0](x)


def at(worker: int, fn: object, *args: object) -> object:
    return rpc.rpc_sync(f"worker{worker}", fn, args=args)


def phases(batch: int, width: int) -> Counts:
    """Layers on workers 0 and 1, worker 0 is the client; an iteration in parts, then one as a whole."""
    sent: Counts = {}
    if dist.get_rank():
        return sent
    rrefs = [*build(width), *at(1, build, width)]
    alone = dist_autograd.context()
    with counting() as sent["nothing"]:
        alone.__enter__()
    with counting() as sent["nothing in a context"]:
        pass
    with counting() as sent["nothing to end"]:
        alone.__exit__(None, None, None)
    with counting() as sent["construction"]:
        optimizer = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.1)
    x = torch.ones(batch, width)
    context = dist_autograd.context()
    with counting() as sent["forward"]:
        context_id = context.__enter__()
        loss = at(1, forward, forward(x)).square().sum()
    with counting() as sent["backward"]:
        dist_autograd.backward(context_id, [loss])
    with counting() as sent["step"]:
        optimizer.step(context_id)
    with counting() as sent["end"]:
        context.__exit__(None, None, None)
    with counting() as sent["iteration"], dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [at(1, forward, forward(x)).square().sum()])
        optimizer.step(context_id)
    with counting() as sent["deletion"]:
        del optimizer
    return sent


@pytest.fixture(scope="module")
def counts() -> dict[tuple[int, int], Counts]:
    return {size: rpc_meter.run(phases, 2, *size)[0] for size in ((8, 4), (8, 64))}


def messages(sent: dict[str, Sent]) -> list[tuple[int, int, int]]:
    return [sent[f"worker{n}"][:3] for n in range(len(sent))]


def nbytes(sent: dict[str, Sent], worker: int) -> int:
    value = sent[f"worker{worker}"].nbytes
    if value is None:
        pytest.skip("this kernel shows no counters of bytes")
    return value


def test_the_counting_itself_is_not_counted(counts: dict[tuple[int, int], Counts]) -> None:
    for of_size in counts.values():
        for nothing in ("nothing", "nothing in a context", "nothing to end"):
            assert messages(of_size[nothing]) == [(0, 0, 0), (0, 0, 0)], nothing
            assert [nbytes(of_size[nothing], worker) for worker in range(2)] == [0, 0], nothing


def test_each_part_of_an_iteration_sends_what_the_book_says(counts: dict[tuple[int, int], Counts]) -> None:
    for of_size in counts.values():
        # requests, replies, tensors: of worker 0, of worker 1
        assert messages(of_size["forward"]) == [(1, 0, 1), (0, 1, 1)]
        assert messages(of_size["backward"]) == [(1, 1, 1), (1, 1, 1)]
        assert messages(of_size["step"]) == [(1, 0, 0), (0, 1, 0)]
        assert messages(of_size["end"]) == [(1, 1, 0), (1, 1, 0)]
        # One and its reply; and for each of the two RRefs sent to their owner, a notice back and its reply.
        assert messages(of_size["construction"]) == [(1, 2, 0), (2, 1, 0)]
        assert messages(of_size["deletion"]) == [(1, 0, 0), (0, 1, 0)]


def test_the_parts_are_the_whole_to_the_byte(counts: dict[tuple[int, int], Counts]) -> None:
    for of_size in counts.values():
        parts = [of_size[part] for part in ("forward", "backward", "step", "end")]
        for worker in ("worker0", "worker1"):
            whole = [sum(numbers) for numbers in zip(*(part[worker][:3] for part in parts))]
            assert tuple(whole) == of_size["iteration"][worker][:3]
        for worker in (0, 1):
            assert sum(nbytes(part, worker) for part in parts) == nbytes(of_size["iteration"], worker)


def test_a_step_sends_the_same_bytes_for_every_size_of_model(counts: dict[tuple[int, int], Counts]) -> None:
    small, large = counts.values()
    for worker in (0, 1):
        assert nbytes(small["step"], worker) == nbytes(large["step"], worker)


def test_forward_and_backward_send_activations_and_a_fixed_part(
    counts: dict[tuple[int, int], Counts],
) -> None:
    small, large = counts.values()
    for part in ("forward", "backward"):
        for worker in (0, 1):
            more = nbytes(large[part], worker) - nbytes(small[part], worker)
            # A few numbers in the descriptions are larger too, and take a byte or two more each.
            assert 0 <= more - 4 * 8 * (64 - 4) <= 8


def prints_and_returns() -> int:
    print("a word", file=sys.stderr)
    os.write(2, b"another\n")
    return dist.get_rank()


def test_what_a_function_writes_on_standard_error_still_gets_there(capfd: pytest.CaptureFixture[str]) -> None:
    assert rpc_meter.run(prints_and_returns, 2) == [0, 1]
    assert sorted(capfd.readouterr().err.split("\n")) == sorted(
        [f"[rank {rank}] {text}" for rank in range(2) for text in ("a word", "another")] + [""]
    )
    assert "TP_VERBOSE_LOGGING" not in os.environ


def raises_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("boom")


def test_an_error_is_the_ranks() -> None:
    with pytest.raises(RankError) as caught:
        rpc_meter.run(raises_on_one, 2)
    assert (caught.value.rank, caught.value.summary) == (1, "ValueError: boom")


def counts_unprepared() -> None:
    if dist.get_rank() == 0:
        with counting():
            pass


def test_workers_that_do_not_log_cannot_be_counted() -> None:
    with pytest.raises(RankError, match=r"start it with zero_ref\.lab\.rpc_meter\.run"):
        ranks.run(counts_unprepared, 2, backend="gloo", rpc=True, timeout=20.0)
