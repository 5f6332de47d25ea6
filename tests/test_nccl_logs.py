"""Logs of others' programs: read in the formats that they have, and made into clusters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from zero_ref.simulator.calibrate import MeasuredProduct, Measurement, NcclLog, calibrate_from_logs
from zero_ref.simulator.cluster import Link, cluster
from zero_ref.simulator.logs import OP_OF_PROGRAM, nccl_tests, products, read_nccl_tests, read_products
from zero_ref.simulator.traffic import OPERATIONS, traffic

H100 = cluster("h100-ib")

# Versions of nccl-tests differ in their columns: with a root and #wrong, with an error and no root, and of a
# gather without the operator of reductions. The figures are made up.
NEW = """\
# nccl-tests version 2.17.6 nccl-headers=22809 nccl-library=22809
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 1 minBytes 8 maxBytes 1048576 step: 2(factor) warmup iters: 1 iters: 20 agg iters: 1 validation: 1 graph: 0
#
# Using devices
#  Rank  0 Group  0 Pid  34361 on     node-a device  0 [0000:0f:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid  34362 on     node-a device  1 [0000:2d:00] NVIDIA H100 80GB HBM3
#  Rank  2 Group  0 Pid  71561 on     node-b device  0 [0000:0f:00] NVIDIA H100 80GB HBM3
#  Rank  3 Group  0 Pid  71562 on     node-b device  1 [0000:2d:00] NVIDIA H100 80GB HBM3
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
           0             0     float     sum      -1     0.11    0.00    0.00      0     0.10    0.00    0.00      0
           8             2     float     sum      -1    31.45    0.00    0.00      0    30.02    0.00    0.00      0
     1048576        262144     float     sum      -1    96.20   10.90   16.35    N/A    95.10   11.03   16.54    N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 8.2
#
# Collective test concluded: all_reduce_perf
"""  # noqa: E501
OLD = """\
$ ./build/all_gather_perf -b 1M -e 2M -f 2 -g 2
# nThread 1 nGpus 2 minBytes 1048576 maxBytes 2097152 step: 2(factor) warmup iters: 5 iters: 20 validation: 1
# Using devices
#   Rank  0 Pid 1821213 on node-a device  0 [0x07] NVIDIA A100-SXM4-40GB
#   Rank  1 Pid 1821213 on node-a device  1 [0x0f] NVIDIA A100-SXM4-40GB
#
#       size         count    type     time   algbw   busbw  error     time   algbw   busbw  error
     1048576        131072   float    30.10   34.84   17.42  0e+00    29.50   35.54   17.77  0e+00
     2097152        262144   float    38.52   54.44   27.22  0e+00    38.01   55.17   27.59  0e+00
"""


# ---------------------------------------------------------------------------------------------- example


def test_a_log_of_a_new_version() -> None:
    log = nccl_tests(NEW)
    assert (log.ranks, log.nodes, log.cards) == (4, 2, 2)
    assert [(one.op, one.nbytes, one.world_size) for one in log.measurements] == [
        ("all_reduce", 8, 4),
        ("all_reduce", 1048576, 4),
    ]
    assert [one.ms for one in log.measurements] == pytest.approx([0.03145, 0.0962])


def test_a_log_of_an_old_version_says_its_program_in_the_command() -> None:
    log = nccl_tests(OLD)
    assert (log.ranks, log.nodes, log.cards) == (2, 1, 1)
    assert [(one.op, one.nbytes) for one in log.measurements] == [
        ("all_gather", 1048576),
        ("all_gather", 2097152),
    ]
    assert [one.ms for one in log.measurements] == pytest.approx([0.0301, 0.03852])


@pytest.mark.parametrize("prefix", ["[1,0]<stdout>:", "[1,0]<stdout> ", "0: ", "[0] "])
def test_what_mpirun_and_srun_put_before_lines_is_left_out(prefix: str) -> None:
    tagged = "\n".join(prefix + line for line in NEW.splitlines())
    assert nccl_tests(tagged) == nccl_tests(NEW)


def test_the_caller_may_say_the_operation() -> None:
    unnamed = NEW.replace("all_reduce_perf", "a program")
    assert nccl_tests(unnamed, op="reduce_scatter").measurements[0].op == "reduce_scatter"


def test_every_program_measures_an_operation_of_the_simulator() -> None:
    assert set(OP_OF_PROGRAM.values()) <= set(OPERATIONS)
    for program, op in OP_OF_PROGRAM.items():
        assert nccl_tests(NEW.replace("all_reduce_perf", f"{program}_perf")).measurements[0].op == op


def test_a_table_of_products_may_have_its_times_in_several_units() -> None:
    expected = MeasuredProduct(16, 32, 64, ms=0.5, dtype="float16")
    for column, value in (("ms", 0.5), ("us", 500), ("S", 0.0005), ("TFLOPS", 2 * 16 * 32 * 64 / 0.5e9)):
        (found,) = products([f"name, M, k ,n,dtype,{column}", f"a,16,32,64,float16,{value:.9f}"])
        assert replace(found, ms=0.5) == expected
        assert found.ms == pytest.approx(0.5, rel=1e-4)
    assert expected.flops == 2 * 16 * 32 * 64
    assert expected.nbytes == 2 * (16 * 32 + 32 * 64 + 16 * 64)


# ------------------------------------------------------------------------------- a cluster made of them


def log_of(op: str, ranks: int, nodes: int, link: Link, power: range = range(16, 34, 2)) -> NcclLog:
    """What a ring on one node, or on several whose cards have this rate, would take."""
    cards = 1 if nodes == 1 else ranks // nodes
    loads = [(2**each, traffic(op, 2**each, ranks)) for each in power]
    return NcclLog(
        tuple(
            Measurement(op, size, ranks, link.ms(load.rounds, load.busiest_bytes / cards))
            for size, load in loads
        ),
        ranks,
        nodes,
    )


def made_products(tflops: float, knee: float) -> list[MeasuredProduct]:
    made = [MeasuredProduct(8192, n, n, ms=1.0) for n in (256, 512, 1024, 2048, 4096, 8192)]
    return [replace(one, ms=(one.flops + knee * one.nbytes) / (tflops * 1e9)) for one in made]


def test_products_tell_the_share_and_the_knee() -> None:
    found = calibrate_from_logs(H100, made_products(tflops=600, knee=250))
    device = found.cluster.device
    assert device.reached == pytest.approx(600 / 989)
    assert device.knee == pytest.approx(250)
    assert found.error_bound("product") < 1e-6
    usual = replace(device, reached=H100.device.reached, product_passes=H100.device.product_passes)
    assert usual == H100.device, "all else is the preset's"


def test_a_run_on_one_node_tells_the_inner_link_and_one_on_several_the_outer() -> None:
    inner, outer = Link(4, 350), Link(9, 40)
    one_node = log_of("all_gather", 8, 1, inner)
    a_ring = Link(
        (outer.latency_us + 7 * inner.latency_us) / 8, outer.gb_per_s
    )  # of 8 hops one leaves the node
    several = log_of("all_gather", 32, 4, a_ring)
    found = calibrate_from_logs(H100, collectives=[several, one_node])
    made = found.cluster
    assert (made.within.latency_us, made.within.gb_per_s) == pytest.approx((4, 350))
    assert (made.between.latency_us, made.between.gb_per_s) == pytest.approx((9, 40))
    assert (made.protocols, made.call_us, made.ranks_per_node) == ((), 0, 8)
    assert found.error_bound("all_gather") < 1e-6
    assert found.error_bound("all_gather on 4 nodes") < 1e-6
    assert made.device == H100.device


@given(st.floats(0.1, 50), st.floats(1, 1000))
def test_a_link_comes_back_from_its_own_log(latency_us: float, gb_per_s: float) -> None:
    found = calibrate_from_logs(
        H100, collectives=[log_of("reduce_scatter", 8, 1, Link(latency_us, gb_per_s))], resamples=1
    )
    within = found.cluster.within
    assert (within.latency_us, within.gb_per_s) == pytest.approx((latency_us, gb_per_s), rel=0.02)


# --------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "of one operation, this one names none"),
        (NEW + OLD, "this one names all_gather, all_reduce"),
        (NEW.replace("#  Rank", "#  Rang"), "the log names 0 ranks"),
        ("\n".join(NEW.splitlines()[:14]), "no line with a size and times: it was cut off"),
        (NEW.replace("node-b device  1", "node-c device  1"), "4 ranks cannot lie evenly on 3 nodes"),
    ],
)
def test_a_log_that_is_none_hears_why(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        nccl_tests(text)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "the table has the columns none; it takes m, k, n, and one of ms, us, s or tflops"),
        (["m,k,n", "1,2,3"], "the table has the columns m, k, n; it takes"),
        (["m,k,n,ms"], "the table has no line beside the names"),
        (["m,k,n,ms", "1,2,x,1"], "line 2: n is 'x', and no number above 0"),
        (["m,k,n,ms", "1,2,3"], "line 2: ms is '', and no number above 0"),
        (["m,k,n,tflops", "1,2,3,0"], "line 2: product: a measured time is above 0 ms, got 0"),
        (["m,k,n,ms", "0,2,3,1"], "line 2: a product has lengths of at least 1, got 0, 2 and 3"),
        (["m,k,n,ms,dtype", "1,2,3,1,int3"], "line 2: unknown dtype 'int3'"),
    ],
)
def test_a_table_that_is_none_hears_why(lines: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        products(lines)


def test_logs_that_tell_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="no measured products and no measured collectives"):
        calibrate_from_logs(H100)
    with pytest.raises(ValueError, match="reach 2000 TFLOPS, more than the 989 that H100 80 GB has"):
        calibrate_from_logs(H100, made_products(tflops=2000, knee=250))
    with pytest.raises(ValueError, match="all_reduce: 2 sizes; it takes 3 or more"):
        calibrate_from_logs(H100, collectives=[nccl_tests(NEW)])


def test_files_are_read_with_the_same_results(tmp_path: Path) -> None:
    log, table = tmp_path / "log", tmp_path / "table"
    log.write_text(NEW)
    table.write_text("m,k,n,ms\n1,2,3,4\n")
    assert read_nccl_tests(log) == nccl_tests(NEW)
    assert read_products(table) == [MeasuredProduct(1, 2, 3, 4.0)]
