"""Clusters: what collectives make the network do, how long links take for it, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from zero_ref.simulator.cluster import ALGORITHMS, CLUSTERS, Cluster, Link, Protocol, cluster
from zero_ref.simulator.device import Device
from zero_ref.simulator.traffic import BACKENDS, OPERATIONS, Traffic, traffic

ops, backends, presets = (
    st.sampled_from(OPERATIONS),
    st.sampled_from(BACKENDS),
    st.sampled_from(list(CLUSTERS)),
)
algorithms = st.sampled_from(ALGORITHMS)
payloads = st.integers(0, 10**12).map(float)
world_sizes = st.integers(1, 2048)
slower = st.floats(1, 100)

# Sums of floats in another order may round otherwise; time must not fall by more than that.
ROUNDING = 1 - 1e-12

CPU = Device("a core", tflops=0.1, reached=0.5, memory_gb=None, memory_gb_per_s=8)
TOY = Cluster("toy", CPU, ranks_per_node=4, within=Link(10, 1), between=Link(100, 0.125))
"""Round numbers: 1 MB takes 1 ms within a node; a node's four links to the outside take 2 ms for it."""


def ms(op: str, nbytes: float, world_size: int, on: Cluster = TOY, **how: Any) -> float:
    return on.ms(op, nbytes, world_size, **how)


# ------------------------------------------------------------------------------------- traffic, by hand


@pytest.mark.parametrize(
    ("op", "nccl", "gloo"),
    [
        ("all_reduce", (6, 180, 720), (6, 180, 720)),
        ("reduce_scatter", (3, 90, 360), (6, 180, 720)),  # on Gloo an all-reduce inside
        ("reduce_shares", (3, 90, 360), (1, 90, 360)),  # on Gloo a message between each pair
        ("all_gather", (3, 90, 360), (3, 90, 360)),
        ("broadcast", (3, 120, 360), (2, 240, 360)),  # on Gloo the source sends it whole, twice
        ("reduce", (3, 120, 360), (4, 180, 450)),  # on Gloo a reduce-scatter, then its parts to one rank
        ("exchange", (1, 90, 360), (1, 90, 360)),
        ("send", (1, 120, 120), (1, 120, 120)),
    ],
)
def test_the_traffic_of_120_bytes_on_four_ranks(op: str, nccl: Traffic, gloo: Traffic) -> None:
    assert traffic(op, 120, 4, backend="nccl") == nccl
    assert traffic(op, 120, 4, backend="gloo") == gloo


@pytest.mark.parametrize("backend", BACKENDS)
def test_shares_are_reduced_around_a_ring_where_pairs_would_be_too_many(backend: str) -> None:
    rounds = {n: traffic("reduce_shares", 120, n, backend=backend).rounds for n in (2, 8, 9, 1000)}
    assert rounds == {2: 1, 8: 1 if backend == "gloo" else 7, 9: 8, 1000: 999}
    for n in rounds:
        assert traffic("reduce_shares", 120, n, backend=backend)[1:] == traffic("all_gather", 120, n)[1:]


def test_a_tree_takes_fewer_rounds_and_its_inner_ranks_carry_more() -> None:
    assert traffic("all_reduce", 120, 8, algorithm="ring") == (14, 210, 1680)
    assert traffic("all_reduce", 120, 8, algorithm="tree") == (6, 240, 1680)
    assert traffic("all_reduce", 120, 5, algorithm="tree").rounds == 6  # a third level for the fifth rank


@pytest.mark.parametrize(
    ("shares", "busiest"),
    [
        (None, 90),
        ([30, 30, 30, 30], 90),
        ([120], 360),  # the only owner receives it from three others
        ([60, 30, 30, 0], 180),
        ([48, 36, 36, 0], 144),
        ([0, 0, 0, 120], 360),
        ([30, 30, 60], 180),
    ],
)
def test_an_exchange_is_as_slow_as_its_fullest_owner(shares: list[float] | None, busiest: float) -> None:
    assert traffic("exchange", 120, 4, shares=shares) == (1, busiest, 360)


# ------------------------------------------------------------------------------------- traffic, for all


# nccl-tests, doc/PERFORMANCE.md: what an operation's time is multiplied by to find the bus bandwidth.
BUS_FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "reduce_shares": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "exchange": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1,
    "reduce": lambda n: 1,
    "send": lambda n: 1,
}


@given(ops, st.integers(2, 2048))
def test_the_busiest_rank_of_nccl_carries_the_bus_factor_of_nccl_tests(op: str, world_size: int) -> None:
    found = traffic(op, 1e9, world_size, backend="nccl")
    assert math.isclose(found.busiest_bytes, 1e9 * BUS_FACTORS[op](world_size))


# --------------------------------------------------------------------------------------- times, by hand


@pytest.mark.parametrize(
    ("op", "world_size", "expected"),
    [
        ("all_reduce", 2, 2 * 0.01 + 1),
        ("all_reduce", 4, 6 * 0.01 + 1.5),
        ("reduce_scatter", 4, 3 * 0.01 + 0.75),
        ("broadcast", 4, 3 * 0.01 + 1),
        ("exchange", 4, 0.01 + 0.75),
        ("send", 4, 0.01 + 1),
        # Two nodes: 2 of the 8 hops of a ring leave a node, and a node's links carry 0.5 GB/s.
        ("all_gather", 8, 7 * (0.25 * 0.1 + 0.75 * 0.01) + 0.875 / 0.5),
        # 4 of 7 messages go to the other node: 0.5 MB through one rank's 0.125 GB/s.
        ("exchange", 8, 0.1 + 0.5 / 0.125),
        ("send", 8, 0.1 + 1 / 0.125),
    ],
)
def test_the_time_of_a_megabyte(op: str, world_size: int, expected: float) -> None:
    assert ms(op, 1e6, world_size, algorithm="ring") == pytest.approx(expected)


def test_a_tree_over_nodes_is_a_chain_within_them() -> None:
    # 4 nodes of 4: down a chain of 3 messages and across 2 levels, there and back, at 0.92 of the bandwidth.
    tree = 2 * (3 * 0.01 + 2 * 0.1) + 2 / (0.92 * 0.5)
    assert ms("all_reduce", 1e6, 16, algorithm="tree") == pytest.approx(tree)


def test_a_tree_of_single_ranks_has_all_traffic_of_a_node_on_one_of_them() -> None:
    alone = replace(TOY, ranks_per_node=1)
    tree = 2 * 2 * 0.1 + 2 / (0.92 * 0.85 * 0.125)
    assert ms("all_reduce", 1e6, 4, alone, algorithm="tree") == pytest.approx(tree)


def test_the_switch_adds_so_that_each_byte_passes_once() -> None:
    # Each of 4 ranks sends its megabyte, and receives the sum of a quarter, at 0.85 of 1 GB/s.
    inside = 0.025 + 1.25 / 0.85
    assert ms("all_reduce", 1e6, 4, algorithm="nvls") == pytest.approx(inside)
    # Among 4 nodes a tree of two levels: a megabyte up and a megabyte down on four links of 0.125 GB/s.
    outside = 0.025 + 4 * 0.1 + 2 / (0.92 * 0.5)
    assert ms("all_reduce", 1e6, 16, algorithm="nvls") == pytest.approx(outside)
    assert traffic("all_reduce", 120, 4, algorithm="nvls") == (2, 150, 600)


def test_auto_uses_the_switch_where_a_cluster_has_it() -> None:
    switched = replace(TOY, nvls=True)
    for nbytes in (1e3, 1e6, 1e9):
        ways = [ms("all_reduce", nbytes, 4, algorithm=one) for one in ALGORITHMS[1:]]
        assert ms("all_reduce", nbytes, 4, switched) == min(ways)
        assert ms("all_reduce", nbytes, 4) == min(ways[:2])
    assert ms("all_reduce", 1e9, 4, switched) < ms("all_reduce", 1e9, 4)
    assert ms("all_gather", 1e9, 4, switched) == ms("all_gather", 1e9, 4)


def test_every_call_takes_a_time_beside_its_messages_also_one_that_follows() -> None:
    slow = replace(TOY, call_us=50)
    for op in OPERATIONS:
        assert ms(op, 1e6, 8, slow) == pytest.approx(0.05 + ms(op, 1e6, 8))
    follows = ms("broadcast", 1e6, 8, slow, follows=True)
    assert follows == pytest.approx(0.05 + ms("broadcast", 1e6, 8, follows=True))
    assert ms("all_reduce", 1e6, 1, slow) == ms("all_reduce", 0, 8, slow) == 0


def test_a_call_uses_the_protocol_that_is_fastest_for_its_size() -> None:
    protocols = (Protocol("whole", 1, 1), Protocol("with flags", 0.1, 0.5))
    both = replace(TOY, protocols=protocols)
    # A ring of 4: 0.06 ms and 1.5 times the payload, or 0.006 ms and twice that.
    assert ms("all_reduce", 1e3, 4, both, algorithm="ring") == pytest.approx(0.006 + 2 * 0.0015)
    assert ms("all_reduce", 1e6, 4, both, algorithm="ring") == pytest.approx(0.06 + 1.5)
    border = 0.054 / 1.5 * 1e6
    assert ms("all_reduce", border, 4, both, algorithm="ring") == pytest.approx(0.06 + 1.5 * border / 1e6)


def test_gloo_knows_no_tree_for_an_all_reduce() -> None:
    gloo = replace(TOY, backend="gloo")
    assert len({ms("all_reduce", 1e3, 16, gloo, algorithm=name) for name in ALGORITHMS}) == 1


def test_gloos_broadcast_over_nodes_is_a_tree() -> None:
    gloo = replace(TOY, backend="gloo")
    # 16 ranks on 4 nodes: of 4 levels 2 cross nodes; the source sends 4 MB.
    assert ms("broadcast", 1e6, 16, gloo) == pytest.approx(2 * 0.01 + 2 * 0.1 + 4 / 0.5)


def test_ranks_that_share_a_link_take_the_time_of_all_their_bytes() -> None:
    shared = replace(TOY, shared=True)
    assert ms("all_reduce", 1e6, 4, shared) == pytest.approx(6 * 0.01 + 6)
    assert ms("exchange", 1e6, 4, shared) == pytest.approx(0.01 + 3)
    # On two nodes each carries half of 7 MB inside, in 3.5 ms, and 0.875 MB at 0.5 GB/s to the outside.
    assert ms("all_gather", 1e6, 8, shared) == pytest.approx(7 * (0.25 * 0.1 + 0.75 * 0.01) + 3.5)


def test_a_group_on_parts_of_nodes_has_the_links_of_its_own_ranks() -> None:
    # Of 4 groups of 3 on 3 nodes of 4, the second lies on nodes 0 and 1, with 1 and 2 ranks.
    two_of_three_hops = 2 * (2 / 3 * 0.1 + 1 / 3 * 0.01)
    expected = two_of_three_hops + (2 / 3) / 0.125
    assert ms("all_gather", 1e6, 12, ranks=3) == pytest.approx(expected)
    # Groups of 6: the first has a whole node and 2 ranks of the next, the second the reverse.
    expected = 5 * (2 / 6 * 0.1 + 4 / 6 * 0.01) + (5 / 6) / (2 * 0.125)
    assert ms("all_gather", 1e6, 12, ranks=6) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("world_size", "ranks", "stride", "expected"),
    [
        # The first ranks of two nodes: all hops leave a node, on the link of one rank.
        (8, 2, 4, 2 * 0.1 + 1 / 0.125),
        (16, 4, 4, 6 * 0.1 + 1.5 / 0.125),
        (16, 2, 8, 2 * 0.1 + 1 / 0.125),
        # Ranks 0, 2, 4 ... of four nodes: two on each, and of 14 hops 4 of 8 leave a node.
        (16, 8, 2, 14 * (0.5 * 0.1 + 0.5 * 0.01) + 1.75 / (2 * 0.125)),
        (4, 2, 2, 2 * 0.01 + 1),  # within a node
        # Ranks 0, 2 and 4: the last alone on its node, whose one link carries all.
        (6, 3, 2, 4 * (2 / 3 * 0.1 + 1 / 3 * 0.01) + (4 / 3) / 0.125),
        # Of ranks 0 and 3, 1 and 4, 2 and 5 the first two share a node, and the slowest pair does not.
        (6, 2, 3, 2 * 0.1 + 1 / 0.125),
    ],
)
def test_a_group_with_a_stride_has_the_links_of_its_ranks(
    world_size: int, ranks: int, stride: int, expected: float
) -> None:
    found = ms("all_reduce", 1e6, world_size, ranks=ranks, stride=stride, algorithm="ring")
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("op", "world_size", "expected"),
    [
        ("all_reduce", 2, 2 * 0.01 + 1 / (1 / 3)),  # one of a rank's three links
        ("all_reduce", 3, 4 * 0.01 + (4 / 3) / (2 / 3)),
        ("all_reduce", 4, 6 * 0.01 + 1.5),
        ("send", 4, 0.01 + 1 / (1 / 3)),
    ],
)
def test_without_a_switch_a_group_uses_the_links_between_its_ranks(
    op: str, world_size: int, expected: float
) -> None:
    mesh = replace(TOY, mesh=True)
    assert ms(op, 1e6, world_size, mesh, algorithm="ring") == pytest.approx(expected)
    assert ms("all_reduce", 1e6, 8, mesh) == ms("all_reduce", 1e6, 8), "whole nodes use all links"
    measured = replace(mesh, link_of_op={op: TOY.within})
    assert ms(op, 1e6, world_size, measured, algorithm="ring") == ms(op, 1e6, world_size, algorithm="ring")


def test_without_a_switch_the_fewest_ranks_on_a_node_set_the_pace() -> None:
    # Two groups of 6: four ranks on one node and two on the other, which have one of three links.
    mesh = replace(TOY, mesh=True, within=Link(0, 1), between=Link(0, 1000))
    assert ms("all_gather", 1e6, 12, mesh, ranks=6) == pytest.approx(5 / 6 * 3)


def test_a_measured_link_takes_the_place_of_the_common_one_for_its_operation_only() -> None:
    measured = replace(TOY, link_of_op={"broadcast": Link(20, 0.5)})
    assert ms("broadcast", 1e6, 2, measured) == pytest.approx(0.02 + 2)
    assert ms("all_gather", 1e6, 2, measured) == ms("all_gather", 1e6, 2)


GPU = Device("by hand", 10, 0.5, None, 8000, product_passes=8, attention_reached=0.25, memory_reached=0.5)


def test_a_product_is_slowed_by_the_bytes_of_its_matrices_and_never_faster_than_they_are() -> None:
    assert GPU.product_ms(1e9, 0) == pytest.approx(0.2)
    # 8 times its bytes at 4 TB/s: with 10 GB as long as 10^11 operations at 5 TFLOPS.
    assert GPU.product_ms(1e11, 1e10) == pytest.approx(2 * 20)
    assert GPU.knee == pytest.approx(10)
    assert GPU.product_ms(1e11, 1e9) == pytest.approx(1.1 * 20)
    assert replace(GPU, product_passes=0).product_ms(1e6, 8e6) == pytest.approx(0.002), "its bytes at 4 TB/s"
    assert replace(GPU, product_passes=0).product_ms(1e9, 8) == pytest.approx(0.2)


def test_attention_and_memory_reach_shares_of_their_own() -> None:
    assert GPU.attention_ms(1e9) == pytest.approx(0.4)
    assert replace(GPU, attention_reached=None).attention_ms(1e9) == pytest.approx(0.2)
    assert GPU.touch_ms(8e6) == pytest.approx(0.002)


def test_each_tensor_of_a_small_model_costs_a_device_something_beside_its_elements() -> None:
    slow = replace(CPU, overhead_us=50, update_overhead_us=5)
    assert slow.compute_ms(1e9, tensors=100) == pytest.approx(20 + 5)
    assert slow.touch_ms(8e6, tensors=100) == pytest.approx(1 + 0.5)


# --------------------------------------------------------------------------------------- times, for all


@given(ops, payloads, st.integers(1, 12), presets, st.integers(1, 9), st.integers(1, 3))
def test_a_stride_of_whole_nodes_has_one_rank_on_each(
    op: str, nbytes: float, ranks: int, name: str, per_node: int, nodes: int
) -> None:
    chosen = replace(cluster(name), ranks_per_node=per_node, shared=False)
    alone = replace(chosen, ranks_per_node=1)
    stride = nodes * per_node
    if stride > 1:
        assert chosen.ms(op, nbytes, ranks * stride, ranks=ranks, stride=stride) == alone.ms(
            op, nbytes, ranks
        )


@given(
    presets,
    ops,
    algorithms,
    payloads,
    world_sizes,
    slower,
    st.sampled_from(["within", "between"]),
    st.booleans(),
)
def test_time_never_falls_when_one_link_gets_slower(
    name: str, op: str, algorithm: str, nbytes: float, world_size: int, by: float, which: str, shared: bool
) -> None:
    fast = replace(cluster(name), ranks_per_node=4, shared=shared)
    link: Link = getattr(fast, which)
    before = fast.ms(op, nbytes, world_size, algorithm=algorithm)
    for worse in (link.scaled(latency=by), link.scaled(bandwidth=1 / by)):
        slow = replace(fast, **{which: worse})  # type: ignore[arg-type]
        assert slow.ms(op, nbytes, world_size, algorithm=algorithm) >= before * ROUNDING


@given(presets, ops, algorithms, payloads, payloads, world_sizes)
def test_more_bytes_never_take_less_time(
    name: str, op: str, algorithm: str, one: float, other: float, world_size: int
) -> None:
    here = cluster(name)
    few, many = (here.ms(op, size, world_size, algorithm=algorithm) for size in sorted((one, other)))
    assert 0 <= few <= many


# ------------------------------------------------------------------------------------------ presets, JSON


def test_every_preset_says_where_its_figures_come_from_and_goes_by_its_name() -> None:
    for name, preset in CLUSTERS.items():
        assert cluster(name) is preset
        assert preset.name == name
        assert preset.source


@given(
    presets,
    st.dictionaries(ops, st.builds(Link, st.floats(0, 1e6), st.floats(1e-3, 1e6)), max_size=3),
    st.booleans(),
)
def test_a_cluster_comes_back_from_json(name: str, links: dict[str, Link], overlaps: bool) -> None:
    there = replace(cluster(name), link_of_op=links, overlaps=overlaps)
    back = Cluster.from_json(there.to_json())
    assert back == there
    assert hash(back) == hash(there)


# ---------------------------------------------------------------------------------------------- mistakes


def shared_out(shares: list[float]) -> Traffic:
    return traffic("exchange", 120, 4, shares=shares)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cluster("h200"), r"unknown cluster 'h200'; choose one of h100-ib, .*, loopback"),
        (lambda: traffic("gather", 1, 2), r"unknown operation 'gather'; choose one of all_reduce, .*, send"),
        (lambda: traffic("send", 1, 2, backend="mpi"), r"unknown backend 'mpi'; choose one of nccl, gloo"),
        (
            lambda: traffic("send", 1, 2, algorithm="auto"),
            r"unknown algorithm 'auto'; choose ring, tree or nvls",
        ),
        (
            lambda: ms("send", 1, 2, algorithm="star"),
            r"unknown algorithm 'star'; choose one of auto, ring, tree",
        ),
        (lambda: ms("gather", 1, 2), r"unknown operation 'gather'"),
        (lambda: replace(TOY, backend="mpi"), r"unknown backend 'mpi'"),
        (lambda: replace(TOY, link_of_op={"gather": TOY.within}), r"unknown operation 'gather'"),
        (lambda: traffic("send", -1, 2), r"a payload's bytes must be 0 or more, got -1"),
        (lambda: traffic("send", math.nan, 2), r"a payload's bytes must be 0 or more, got nan"),
        (lambda: traffic("send", math.inf, 2), r"a payload's bytes must be 0 or more, got inf"),
        (lambda: traffic("send", 1, 0), r"world_size must be at least 1 rank, got 0"),
        (lambda: ms("send", 1, -1), r"world_size must be at least 1 rank, got -1"),
        (lambda: shared_out([60, 90, -30]), r"a share's bytes must be 0 or more, got -30"),
        (lambda: shared_out([24] * 5), r"5 shares for 4 ranks: give one for each owner at most"),
        (lambda: shared_out([60, 30]), r"add up to 90 bytes, the payload has 120: each has one owner"),
        (lambda: shared_out([]), r"add up to 0 bytes"),
        (lambda: ms("broadcast", 1, 8, ranks=3), r"8 ranks cannot be divided into groups of 3"),
        (lambda: ms("broadcast", 1, 8, ranks=0), r"8 ranks cannot be divided into groups of 0"),
        (
            lambda: ms("broadcast", 1, 8, ranks=4, stride=3),
            r"8 ranks cannot be divided into groups of 4 at a stride of 3",
        ),
        (lambda: ms("broadcast", 1, 8, ranks=4, stride=0), r"8 ranks cannot be divided into groups of 4"),
        (lambda: Link(-1, 1), r"latency_us must be 0 or more, got -1"),
        (lambda: Link(math.nan, 1), r"latency_us must be 0 or more, got nan"),
        (lambda: Link(1, 0), r"gb_per_s must be above 0, got 0"),
        (lambda: Link(1, -5), r"gb_per_s must be above 0, got -5"),
        (lambda: TOY.with_links(bandwidth=-1), r"gb_per_s must be above 0"),
        (lambda: TOY.with_links(latency=-1), r"latency_us must be 0 or more"),
        (lambda: replace(TOY, ranks_per_node=0), r"a node has at least 1 rank, got ranks_per_node=0"),
        (lambda: replace(CPU, tflops=0), r"a core: tflops must be above 0, got 0"),
        (lambda: replace(CPU, memory_gb_per_s=-1), r"a core: memory_gb_per_s must be above 0"),
        (lambda: replace(CPU, overhead_us=-1), r"a core: overhead_us must be 0 or more"),
        (lambda: replace(CPU, update_overhead_us=-1), r"a core: update_overhead_us must be 0 or more"),
        (lambda: replace(CPU, memory_gb=0), r"a core: memory_gb must be above 0"),
        (
            lambda: replace(CPU, reached=1.5),
            r"a core: reached is a share of the peak, above 0 up to 1, got 1.5",
        ),
        (lambda: replace(CPU, reached=0), r"reached is a share"),
    ],
)
def test_a_mistake_hears_what_is_accepted(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks_per_node": 8.5}, r"ranks_per_node must be a whole number, got 8.5"),
        ({"shared": "no"}, r"shared must be True or False, got 'no'"),
        ({"overlaps": 1}, r"overlaps must be True or False, got 1"),
    ],
)
def test_a_field_of_the_wrong_kind_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        replace(TOY, **change)


def edited(**change: Any) -> str:
    values = {**json.loads(TOY.to_json()), **change}
    return json.dumps({key: value for key, value in values.items() if value != "left out"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"this is no cluster: it is not JSON: Expecting value"),
        ("{name: toy}", r"this is no cluster: it is not JSON"),
        ("[" * 100_000, r"it is nested too deeply"),
        (TOY.to_json().replace("0.125", "NaN"), r"NaN is no number in JSON"),
        (TOY.to_json().replace("0.125", "1e999"), r"1e999 is beyond every number"),
        ("[]", r"It takes JSON with name, device, ranks_per_node, within and between"),
        ("3", r"this is no cluster: cluster must be an object with name, device, .* not 3"),
        (edited(within="left out"), r"cluster has no within"),
        (edited(name="left out"), r"name"),
        (edited(nodes=3), r'cluster has no "nodes"; it has name, device'),
        (edited(within={"latency_us": 1}), r"gb_per_s"),
        (edited(within={"latency_us": "1", "gb_per_s": 1}), r'within.latency_us must be a number, not "1"'),
        (
            edited(within={"latency_us": 10**400, "gb_per_s": 1}),
            r"latency_us must be a number, not one of",
        ),
        (edited(within={"latency_us": 1, "gb_per_s": 1e-300}), r"gb_per_s 1e-300 is no figure of a machine"),
        (
            edited(within={"latency_us": 1e300, "gb_per_s": 1}),
            r"latency_us 1e\+300 is no figure of a machine",
        ),
        (
            edited(within=None),
            r"cluster.within must be an object with latency_us, gb_per_s, reached, not null",
        ),
        (edited(link_of_op=[1]), r"cluster.link_of_op must be an object, not a list of 1"),
        (edited(shared="false"), r'shared must be true or false, not "false"'),
        (edited(ranks_per_node="8"), r'ranks_per_node must be a whole number below 2\*\*63, not "8"'),
        (edited(name=[1]), r"cluster.name must be text, not a list of 1"),
        (edited(between={"latency_us": 1, "gb_per_s": -5}), r"gb_per_s must be above 0, got -5"),
        (edited(backend="mpi"), r"unknown backend 'mpi'; choose one of nccl, gloo"),
        (edited(link_of_op={"gather": {"latency_us": 1, "gb_per_s": 1}}), r"unknown operation 'gather'"),
    ],
)
def test_json_that_is_no_cluster_hears_why(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cluster.from_json(text)
