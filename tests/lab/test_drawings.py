"""The drawings of a timeline, a step, a ring, of memory and loads show what the data says."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from itertools import combinations, pairwise
from typing import Any

import pytest
from all_pictures import FOUR, MEASURED, NUMELS, TREE, many, runs_of
from hypothesis import given, settings, strategies as st
from test_plots_simulated import played

from zero_ref.lab import plots
from zero_ref.live import pieces
from zero_ref.live.lanes import COLOURS, LANE, alone
from zero_ref.live.loads import LARGEST, MEAN, log_ticks
from zero_ref.live.memory_over_time import COLOURS as KIND_COLOURS, HIGH
from zero_ref.live.numbers import short_bytes, short_time
from zero_ref.live.palette import (
    ALARM,
    FAINT,
    ITEM_COLOURS,
    MUTED,
    RANK_COLOURS,
    SERIES_COLOURS,
    rank_colour,
    tint,
)
from zero_ref.live.ring import ring_states
from zero_ref.live.step import AVERAGED
from zero_ref.live.svg import MARGIN, Drawing
from zero_ref.plan.choice import RULES
from zero_ref.plan.partition import ParamSpec, Partition
from zero_ref.plan.rules import even, from_lists, sorted_greedy
from zero_ref.simulator.cluster import cluster
from zero_ref.simulator.play import play
from zero_ref.simulator.price import Workload
from zero_ref.simulator.schedule import schedule
from zero_ref.simulator.stages import plays_of_equal_blocks
from zero_ref.simulator.timeline import WAYS_OF_DDP, BucketTimes, simulate
from zero_ref.simulator.traffic import traffic
from zero_ref.simulator.tree import Advice, Question

WIDTH = 1000 + 2 * MARGIN
SVG = "{http://www.w3.org/2000/svg}"

Element = ElementTree.Element


def found(drawing: Drawing, tag: str, **attributes: str) -> list[Element]:
    """The elements of a drawing with these attributes, all but its ground."""
    root = ElementTree.fromstring(drawing.svg(WIDTH))
    ground = root.find(f"{SVG}rect")
    return [
        one
        for one in root.iter(f"{SVG}{tag}")
        if one is not ground and all(one.get(name) == value for name, value in attributes.items())
    ]


def hint(one: Element) -> str:
    return one.findtext(f"{SVG}title") or ""


def number(one: Element, name: str) -> float:
    return float(one.attrib[name])


def written(drawing: Drawing) -> list[str]:
    return ["".join(one.itertext()) for one in found(drawing, "text")]


def bars(drawing: Drawing) -> dict[str, Element]:
    """The bars that have a hint, by what stands before its colon."""
    return {hint(one).split(":")[0]: one for one in found(drawing, "rect") if hint(one)}


# ------------------------------------------------------------------------------ which rank holds what, when

PLAYS = plays_of_equal_blocks(3, world_size=4)
BLOCK_BYTES = 2 * 2**20
HELD_BYTES = {
    pieces.WHOLE: BLOCK_BYTES,
    pieces.OWN: BLOCK_BYTES,
    pieces.CUT: BLOCK_BYTES // 4,
    pieces.GATHERED: BLOCK_BYTES + BLOCK_BYTES // 4,  # beside what the rank keeps
    pieces.NOTHING: 0,
}


@pytest.mark.parametrize("title", PLAYS)
def test_the_pieces_that_are_drawn_are_the_bytes_that_the_play_has_while_it_computes(title: str) -> None:
    played, rank = PLAYS[title], 3
    moments = pieces.moments_of(played.schedule)
    assert [one.label for one in moments] == 3 * ["forward"] + 3 * ["backward"] + ["step"]
    computed = [one for one in played.timeline(rank).events if one.lane == "compute"]
    if len(computed) < len(moments):  # one forward of all blocks
        computed = computed[:1] * 3 + computed[1:]
    curve = played.memory_by_kind(rank)
    for event, moment in zip((e for e in computed if e.label in {"forward", "backward", "step"}), moments):
        held = [of_kind for ms, of_kind in curve if ms <= event.start_ms][-1]
        drawn = sum(HELD_BYTES[how] for how in moment.parameters)
        assert held["parameters"] + held["communication"] == drawn, moment
        assert held["gradients"] == sum(HELD_BYTES[how] for how in moment.gradients), moment


def test_there_is_an_arrow_for_each_block_that_moves() -> None:
    moved_once = 3 * BLOCK_BYTES  # by the N - 1 = 3 ranks that lack a piece
    for title, arrows in {"DDP": 6, "stage 1": 9, "stage 2": 6, "stage 3": 9}.items():
        plan = PLAYS[title].schedule
        assert sum(len(one.sent) for one in pieces.moments_of(plan)) == arrows
        assert round(plan.wire_bytes() / moved_once, 3) == arrows
        polygons = found(plots.pieces_over_time({title: PLAYS[title]}), "polygon")
        assert len(polygons) == arrows
        assert f"sent: {arrows}" in written(plots.pieces_over_time({title: PLAYS[title]}))


def test_pieces_are_drawn_of_equal_blocks_on_few_ranks_that_do_not_overlap() -> None:
    unequal = schedule("ddp", [ParamSpec(8), ParamSpec(9)], 2, ddp_buckets=[[1], [0]])
    with pytest.raises(ValueError, match=r"equal blocks, got 1 steps and backwards of \[8, 9\] elements"):
        pieces.moments_of(unequal)
    with pytest.raises(ValueError, match="9 ranks do not fit: draw at most 8"):
        plots.pieces_over_time(plays_of_equal_blocks(1, 9))
    overlapping = play(PLAYS["DDP"].schedule, cluster("h100-ib"), Workload(8))
    with pytest.raises(ValueError, match="mine: play it on a cluster that does not overlap"):
        plots.pieces_over_time({"mine": overlapping})


# ---------------------------------------------------------------------------------------------- timelines

whole_ms = st.integers(0, 20).map(float)


@pytest.mark.parametrize("way", WAYS_OF_DDP)
def test_a_bar_lies_where_its_event_does_and_is_as_long(way: str) -> None:
    timeline = simulate(FOUR, way)
    drawn, px = bars(plots.timeline({"one": timeline})), 1000 / timeline.makespan_ms
    assert len(drawn) == len(timeline.events)
    lows = {lane: set[float]() for lane in timeline.lanes}
    for event in timeline.events:
        bar = drawn[f"{event.label} {'all' if event.bucket is None else event.bucket}"]
        assert number(bar, "x") == pytest.approx(MARGIN + px * event.start_ms, abs=0.1)
        assert number(bar, "width") == pytest.approx(px * (event.stop_ms - event.start_ms), abs=0.7)
        assert bar.get("fill") == COLOURS[event.label]
        lows[event.lane].add(number(bar, "y"))
    (compute,), (network,) = lows["compute"], lows["network"]
    assert compute + LANE <= network


def test_a_title_says_how_long_it_takes_and_how_much_is_exposed() -> None:
    drawing = plots.timeline({way: simulate(FOUR, way) for way in WAYS_OF_DDP})
    assert {"plain: 29 ms, 9 ms exposed", "interleaved: 24 ms, 4 ms exposed"} <= set(written(drawing))
    ends = [number(one, "x1") for one in found(drawing, "line", **{"stroke-width": "1.4"})]
    assert ends == pytest.approx([MARGIN + 1000 * ms / 29 for ms in (29, 26, 24)], abs=0.1)


def test_exposed_communication_is_underlined() -> None:
    drawing = plots.timeline({"one": simulate(FOUR, "interleaved")})
    lines = [(number(one, "x1"), number(one, "x2")) for one in found(drawing, "line", stroke=ALARM)]
    assert [round((x - MARGIN) * 24 / 1000, 1) for ends in lines for x in ends] == [19, 21, 22, 24]


def test_calls_under_way_together_share_their_lane() -> None:
    drawn = bars(plots.timeline({"measured": MEASURED}))
    network = [drawn[name] for name in ("reduce 0", "broadcast 0", "reduce 1")]
    (height,) = {number(bar, "height") for bar in network}  # three rows, in one lane and a half
    assert height == 1.5 * LANE / 3 - 1
    for one, other in combinations(network, 2):
        (left, right), (other_left, other_right) = (
            (number(bar, "x"), number(bar, "x") + number(bar, "width")) for bar in (one, other)
        )
        apart_in_time = right <= other_left or other_right <= left
        assert apart_in_time or abs(number(one, "y") - number(other, "y")) >= height
    assert number(drawn["step 0"], "height") == LANE - 1


@settings(max_examples=50)
@given(
    st.lists(st.builds(BucketTimes, whole_ms, whole_ms, whole_ms, whole_ms), min_size=1, max_size=6),
    st.sampled_from(WAYS_OF_DDP),
    st.booleans(),
)
def test_the_exposed_pieces_add_up_to_what_is_exposed(
    buckets: list[BucketTimes], way: str, side_stream: bool
) -> None:
    timeline = simulate(buckets, way, side_stream=side_stream)
    pieces = alone(timeline)
    assert sum(stop - start for start, stop in pieces) == timeline.exposed_ms
    assert all(start < stop for start, stop in pieces)
    assert all(earlier[1] < later[0] for earlier, later in pairwise(pieces))


def test_the_key_names_what_is_there_and_words_of_one_colour_together() -> None:
    drawing = plots.timeline({"ddp": played("ddp").timeline(), "3": played("zero-3").timeline()})
    words = [word for word in written(drawing) if word in ("forward", "backward", "step", "reduce", "gather")]
    assert words == ["forward", "backward", "step", "reduce", "gather"]
    assert "ms since the iteration began" in written(drawing)
    assert "ms since backward began" in written(plots.timeline({"one": simulate(FOUR, "plain")}))


def test_short_events_are_a_few_pieces_that_take_as_long() -> None:
    timeline = many(5000)
    px = 1000 / timeline.makespan_ms
    drawing = plots.timeline({"many": timeline})
    for label in ("reduce", "broadcast"):
        pieces = [
            one for one in found(drawing, "rect", fill=COLOURS[label]) if number(one, "height") == LANE - 1
        ]
        assert len(pieces) <= 1000
        assert not any(map(hint, pieces))
        # Each edge is written in hundredths of a pixel.
        assert sum(number(one, "width") for one in pieces) == pytest.approx(px * 2500, rel=0.01)
    alike = plots.timeline({"many": many(5000, ("reduce",))})
    assert (
        len([one for one in found(alike, "rect", fill=COLOURS["reduce"]) if number(one, "height") > 12]) == 1
    )


def test_all_stages_stand_on_one_scale_of_time_with_what_is_exposed_and_the_peak() -> None:
    runs = runs_of(16)
    drawing = plots.stages_timeline(runs)
    assert list(runs) == ["DDP", "stage 1", "stage 2", "stage 3", "hybrid"]
    longest = max(run.timeline.makespan_ms for run in runs.values())
    ends = [number(one, "x1") for one in found(drawing, "line", **{"stroke-width": "1.4"})]
    wanted = [MARGIN + 1000 * run.timeline.makespan_ms / longest for run in runs.values()]
    assert ends == pytest.approx(wanted, abs=0.1)
    red = sum(number(one, "x2") - number(one, "x1") for one in found(drawing, "line", stroke=ALARM))
    exposed = sum(run.timeline.exposed_ms for run in runs.values())
    assert red == pytest.approx(1000 * exposed / longest, rel=0.01)
    for name, run in runs.items():
        times = f"{short_time(run.timeline.makespan_ms)}, {short_time(run.timeline.exposed_ms)} exposed"
        assert f"{name}: {times}" in written(drawing)
        assert f"peak {short_bytes(run.peak_bytes)}" in written(drawing)
        assert f"{name}: {times}, peak {short_bytes(run.peak_bytes)}" in drawing.words


# ------------------------------------------------------------------------------------------------ a step


def held(drawing: Drawing) -> Counter[str]:
    """Count the boxes in the colour of each owner, and the hatched boxes by their hints."""
    solid = (one.attrib["fill"] for one in found(drawing, "rect") if one.get("fill") in RANK_COLOURS)
    hatched = (hint(one) for one in found(drawing, "rect") if one.attrib["fill"].startswith("url"))
    return Counter([*solid, *hatched])


@pytest.mark.parametrize("strategy", ["sorted_greedy", "even"])
def test_before_the_broadcast_each_rank_has_new_values_of_its_own_shard_only(strategy: str) -> None:
    partition = RULES[strategy](NUMELS, 3)
    drawing = plots.step_diagram(partition, phases=["step"])
    width = WIDTH - 2 * 14 - 50
    for rank, load in enumerate(partition.loads):
        new = found(drawing, "rect", fill=RANK_COLOURS[rank])
        pieces = [piece for piece in partition.slices_of_rank[rank] if piece.numel]
        assert sum(number(one, "width") + 1 for one in new) == pytest.approx(
            width * load / sum(NUMELS), abs=0.1
        )
        assert len({one.get("y") for one in new}) == 1  # on its own row
        assert len(new) == len(pieces)
    rows = [{one.get("y") for one in found(drawing, "rect", fill=RANK_COLOURS[rank])} for rank in range(3)]
    assert sorted(map(float, [row.pop() or "" for row in rows])) == sorted(
        {14.0 + 18 + 36 * n for n in range(3)}
    )
    hatched = [one for one in found(drawing, "rect") if one.attrib["fill"].startswith("url")]
    assert len(hatched) == 2 * sum(
        piece.numel > 0 for of_rank in partition.slices_of_rank for piece in of_rank
    )


def test_a_lost_broadcast_leaves_all_but_the_owner_stale() -> None:
    partition = sorted_greedy([60, 50, 40], 3)
    after = plots.step_diagram(partition, lost=[1], phases=["equal"])
    assert held(after)["1, stale"] == 2
    assert held(after)[RANK_COLOURS[1]] == 1
    assert held(after)[RANK_COLOURS[0]] == 3
    assert [one.get("stroke") for one in found(after, "rect") if hint(one) == "1, stale"] == [ALARM] * 2
    assert "Never sent, so stale on all but the owner: 1" in written(after)
    sending = plots.step_diagram(partition, lost=[1], phases=["broadcast"])
    assert held(sending)["1, not sent"] == written(sending).count("not sent") == 2
    assert {one.get("fill") for one in found(sending, "polygon")} == {RANK_COLOURS[0], RANK_COLOURS[2]}


WHO = RANK_COLOURS[:3]


def fills(drawing: Drawing) -> list[Counter[str]]:
    """The colours of the boxes in each strip, from the top down; "" for what is not held."""
    strips: dict[float, Counter[str]] = {}
    for one in found(drawing, "rect"):
        if one.get("width") != "7":  # the hatching
            empty = one.get("stroke-dasharray") is not None  # with a border, half a pixel further down
            y = round(number(one, "y") - 0.5 * empty, 1)
            strips.setdefault(y, Counter())["" if empty else one.attrib["fill"]] += 1
    return list(strips.values())


def test_in_stage_2_a_rank_has_all_parameters_and_its_own_pieces_of_averaged_gradients() -> None:
    drawing = plots.step_diagram(plots.cut_each([60, 30, 60], 3), stage=2, phases=["backward"])
    strips = fills(drawing)
    assert strips[::2] == [dict.fromkeys(WHO, 3)] * 3
    for rank, strip in enumerate(strips[1::2]):
        # The last block's gradients are averaged, the middle one's are whole, the first one's are not there.
        assert strip == {tint(WHO[rank], AVERAGED): 1, FAINT: 3, "": 2 + 3}
        (averaged,) = found(drawing, "rect", fill=tint(WHO[rank], AVERAGED))
        assert all(number(one, "x") < number(averaged, "x") for one in found(drawing, "rect", fill=FAINT))
    assert not [one for one in found(drawing, "rect") if one.attrib["fill"].startswith("url")]


@pytest.mark.parametrize(("phase", "to_owner"), [("broadcast", False), ("backward", True)])
def test_arrows_lead_from_owners_after_the_step_and_to_owners_in_backward(phase: str, to_owner: bool) -> None:
    drawing = plots.step_diagram(plots.cut_each([60, 60], 3), stage=2, phases=[phase])
    solid = [one for one in found(drawing, "rect") if one.get("stroke") is None and one.get("width") != "7"]
    tops = sorted({number(one, "y") for one in solid})
    strips = tops[1::2] if phase == "backward" else tops
    ends: Counter[tuple[str, int]] = Counter()
    for one in found(drawing, "polygon"):
        y = float(one.attrib["points"].split()[-1].split(",")[1])
        ends[one.attrib["fill"], max(rank for rank, top in enumerate(strips) if top <= y)] += 1
    wanted = {
        (WHO[owner], rank): 2
        for owner in range(3) for rank in range(3) if (owner == rank) == to_owner
    }  # fmt: skip
    assert ends == wanted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 3}, "stage 3 is not drawn"),
        ({"stage": 2, "phases": ["reduce"]}, "choose of forward, backward, step"),
        ({"stage": 2, "blocks": [[0], [0]]}, "each of the 2 parameters once"),
    ],
)
def test_a_step_that_a_stage_does_not_have_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plots.step_diagram(plots.cut_each([6, 6], 2), **options)
    with pytest.raises(ValueError, match="rank 0 is given none of them"):
        plots.cut_each([1], 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"phases": ["update"]}, "unknown phase in .'update'.; choose of reduce, step, broadcast, equal"),
        ({"names": ["only", "two"]}, "2 names for 1 parameters"),
    ],
)
def test_a_step_that_cannot_be_drawn_is_refused(options: dict[str, list[str]], message: str) -> None:
    with pytest.raises(ValueError, match="9 ranks do not fit"):
        plots.step_diagram(sorted_greedy([1], 9))
    with pytest.raises(ValueError, match=message):
        plots.step_diagram(sorted_greedy([1], 2), **options)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ a ring


@given(st.integers(2, 24))
def test_a_ring_takes_as_many_rounds_as_traffic_says_and_ends_with_every_sum(world_size: int) -> None:
    states = ring_states(world_size)
    assert len(states) - 1 == traffic("all_reduce", 1, world_size).rounds
    halfway = states[world_size - 1]
    assert all(of_rank.count(world_size) == 1 for of_rank in halfway)
    assert sorted(of_rank.index(world_size) for of_rank in halfway) == list(range(world_size))
    assert states[-1] == [[world_size] * world_size] * world_size
    for before, after in pairwise(states):  # one chunk a rank and round
        for was, is_now in zip(before, after):
            assert sum(a != b for a, b in zip(was, is_now)) == 1


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_drawn_numbers_are_the_rings_and_each_round_frames_a_chunk_of_each_rank(world_size: int) -> None:
    drawing, states = plots.ring_rounds(world_size), ring_states(world_size)
    # A chunk and its number follow each other, rank after rank in each round.
    root = ElementTree.fromstring(drawing.svg(WIDTH))
    pairs = [
        (box, text.text)
        for box, text in pairwise(root)
        if box.tag == f"{SVG}rect" and text.tag == f"{SVG}text"
    ]
    numbers = [
        text
        for box, text in pairs
        if box.get("rx") is None and box.get("fill") != "none" and (text or "").isdigit()
    ]
    assert numbers == [str(n) for state in states for of_rank in state for n in of_rank]
    frames = found(drawing, "rect", stroke=ALARM)
    assert len(frames) == (len(states) - 1) * world_size
    places = {(one.get("x"), one.get("y")) for one in found(drawing, "rect") if one.get("fill") != "none"}
    assert {(one.get("x"), one.get("y")) for one in frames} <= places
    assert {"reduce-scatter", "all-gather", "before", "rank 0"} <= set(written(drawing))


@pytest.mark.parametrize("world_size", [1, 5])
def test_a_ring_that_is_too_small_or_too_large_is_refused(world_size: int) -> None:
    with pytest.raises(ValueError, match=f"{world_size} ranks: a ring is drawn for 2 to 4"):
        plots.ring_rounds(world_size)


# ----------------------------------------------------------------------------------------------- memory

ITEMS = {
    "stage 0": {"parameters": 10.0, "moments": 50.0, "scalars": 3.0, "padding": 2.0},
    "stage 1": {"parameters": 10.0, "moments": 5.0},
}


def test_items_are_stacked_and_what_has_no_colour_is_other() -> None:
    drawing = plots.memory_items(ITEMS, device_bytes=40, chosen="stage 1")
    px = 1000 / (1.02 * 65)
    long = {
        item: [
            (number(one, "x"), number(one, "width"))
            for one in found(drawing, "rect", fill=colour)
            if hint(one)
        ]
        for item, colour in ITEM_COLOURS.items()
    }
    assert [width for _, width in long["parameters"]] == pytest.approx([10 * px, 10 * px], abs=0.01)
    assert [x for x, _ in long["moments"]] == pytest.approx([MARGIN + 10 * px] * 2, abs=0.01)
    assert long["other"][0] == pytest.approx((MARGIN + 60 * px, 5 * px), abs=0.01)
    titles = {"".join(one.itertext()): one for one in found(drawing, "text")}
    assert titles["stage 0: 65 B"].get("fill") == ALARM  # more than the device has
    assert titles["▸ stage 1: 15 B"].get("fill") != ALARM
    assert titles["▸ stage 1: 15 B"].get("font-weight") == "600"
    (device,) = found(drawing, "line", stroke=ALARM)
    assert number(device, "x1") == pytest.approx(MARGIN + 40 * px, abs=0.01)
    far = plots.memory_items(ITEMS, device_bytes=1e6)
    assert not found(far, "line", stroke=ALARM)
    assert "the device's 1 MB: far to the right" in written(far)
    with pytest.raises(ValueError, match="none named 'stage 2'"):
        plots.memory_items(ITEMS, chosen="stage 2")


def test_memory_over_time_is_the_runs_own_with_its_peak_at_the_predicted_one() -> None:
    runs = runs_of(16)
    drawing = plots.memory_over_time(runs)
    dots = [(number(one, "cx"), number(one, "cy")) for one in found(drawing, "circle")]
    piles: list[list[Element]] = [[]]
    for one in found(drawing, "path"):
        if piles[-1] and piles[-1][-1].get("fill") == FAINT:  # the last of a run is at the bottom of its pile
            piles.append([])
        piles[-1].append(one)
    assert len(piles) == len(dots) == len(runs)
    most = max(run.peak_bytes for run in runs.values())
    for pile, (_, top), run in zip(piles, dots, runs.values()):
        curve = run.memory_by_kind()
        heights = {}
        for one in pile:
            bottom, *levels = (float(y) for y in re.findall(r"(?:M[\d.]+ |V)([\d.]+)", one.attrib["d"]))
            assert levels[-1] == bottom
            heights[one.get("fill")] = [bottom - level for level in levels[:-1]]
        assert bottom - top == pytest.approx(HIGH * run.peak_bytes / most, abs=0.1)
        assert max(max(of_kind) for of_kind in heights.values()) == pytest.approx(bottom - top, abs=0.1)
        below = 0.0
        for kind in ("allocator, libraries", "parameters", "optimizer state"):  # these never change
            below += curve[0][1][kind]
            (level,) = set(heights[KIND_COLOURS[kind]])
            assert level == pytest.approx(HIGH * below / most, abs=0.1)
    titles = set(written(drawing))
    assert {f"{name}: peak {short_bytes(run.peak_bytes)}" for name, run in runs.items()} <= titles
    with pytest.raises(ValueError, match="got 0 devices"):
        plots.memory_over_time({})


# ------------------------------------------------------------------------------------------------ a tree


@pytest.mark.parametrize("width", [300, WIDTH])
def test_a_tree_has_a_box_for_each_node_and_an_arrow_for_each_answer(width: float) -> None:
    drawing = plots.decision_tree(TREE)
    root = ElementTree.fromstring(drawing.svg(width))
    assert len(root.findall(f"{SVG}rect")) == 1 + 4 + 5  # the ground, questions, pieces of advice
    assert len(root.findall(f"{SVG}polygon")) == 2 * 4
    words = Counter("".join(one.itertext()) for one in root.iter(f"{SVG}text"))
    assert words["yes"] == words["no"] == 4
    assert words["stage 1"] == words["stage 3"] == words["beyond"] == 1
    # Each arrow ends at the left edge or at the top of a box.
    _, *rects = root.findall(f"{SVG}rect")
    boxes = [[number(one, name) for name in ("x", "y", "width", "height")] for one in rects]
    for head in root.findall(f"{SVG}polygon"):
        x, y = map(float, head.attrib["points"].split()[-1].split(","))
        assert any(
            (abs(x - left) < 0.1 and top < y < top + high) or (abs(y - top) < 0.1 and left < x < left + wide)
            for left, top, wide, high in boxes
        )
    for one, other in combinations(boxes, 2):
        beside = one[0] + one[2] <= other[0] or other[0] + other[2] <= one[0]
        assert beside or one[1] + one[3] <= other[1] or other[1] + other[3] <= one[1]


def test_the_way_of_a_model_is_marked_and_its_numbers_are_written() -> None:
    drawing = plots.decision_tree(TREE, path=[False, True, False])
    on_way = [one for one in found(drawing, "rect") if one.get("stroke") == SERIES_COLOURS[0]]
    (advice,) = [one for one in on_way if one.get("fill") == SERIES_COLOURS[0]]
    assert len(on_way) == 4
    root = ElementTree.fromstring(drawing.svg(WIDTH))
    (name,) = [one for box, one in pairwise(root) if box.attrib == advice.attrib]
    assert name.text == "stage 2"
    bold = [one.text for one in found(drawing, "text", **{"font-weight": "600"}) if one.text in ("yes", "no")]
    assert sorted(filter(None, bold)) == ["no", "no", "yes"]
    assert {"161 GB of 85.5 GB", "46.2 GB of 85.5 GB"} <= set(written(drawing))
    assert "161 GB of 85.5 GB" not in written(plots.decision_tree(TREE))
    assert drawing.words.endswith("So: stage 2 (2 bytes <&> Ψ).")


def test_an_advice_that_two_answers_share_is_marked_where_the_way_ends() -> None:
    same = Advice("stage 1")
    tree = Question("Is it large?", yes=same, no=Question("Is it slow?", yes=same, no=Advice("DDP")))
    drawing = plots.decision_tree(tree, path=[False, True])
    assert len([one for one in found(drawing, "rect") if one.get("fill") == SERIES_COLOURS[0]]) == 1


# ------------------------------------------------------------------------------------------------ loads


@pytest.mark.parametrize("world_size", [1, 4, 64])
def test_bars_are_as_high_as_the_loads_and_in_the_ranks_colours(world_size: int) -> None:
    partition = sorted_greedy(range(1, 200), world_size)
    drawn = bars(plots.loads(partition, bytes_per_element=8))
    tall = [number(drawn[f"rank {rank}"], "height") for rank in range(world_size)]
    top = max(*partition.loads, 199) * 1.06
    assert tall == pytest.approx([190 * load / top for load in partition.loads], abs=0.01)
    colours = [drawn[f"rank {rank}"].get("fill") for rank in range(world_size)]
    assert colours == [rank_colour(rank, world_size) for rank in range(world_size)]


def test_1024_ranks_are_one_outline_with_the_same_heights() -> None:
    falling = sorted_greedy(range(1, 3000), 1024)
    partition = Partition(falling.numels, falling.slices_of_rank[::-1])
    (outline,) = found(plots.loads(partition, fullest_first=True), "polygon")
    points = [tuple(map(float, point.split(","))) for point in outline.attrib["points"].split()]
    base, top = points[0][1], 1.06 * max(*partition.loads, 2999)
    tall = [base - y for _, y in points[1:-1:2]]
    assert tall == pytest.approx(
        [190 * load / top for load in sorted(partition.loads, reverse=True)], abs=0.01
    )


def test_a_largest_tensor_far_above_all_bars_does_not_flatten_them() -> None:
    drawing = plots.loads(even([1000], 10, alignment=1))
    assert number(bars(drawing)["rank 0"], "height") > 190 / 2
    assert not found(drawing, "line", **{"stroke-dasharray": LARGEST})
    assert "dashed: the mean, 100; far above: the largest tensor, 1k" in written(drawing)


def test_few_ranks_are_named_and_of_many_their_places() -> None:
    def names(partition: Partition) -> list[str]:
        drawing = plots.loads(partition, fullest_first=True)
        below = found(drawing, "text", fill=MUTED, **{"text-anchor": "middle"})
        return ["".join(one.itertext()) for one in below]

    assert names(from_lists([1, 2, 4], [[0], [1], [2]])) == ["2", "1", "0"]
    assert names(sorted_greedy(range(64), 64)) == ["1", "16", "32", "48", "64"]


def test_loads_beside_each_other_are_on_one_scale_with_their_means() -> None:
    drawing = plots.loads_compared({"yours": [6, 10], "right": [8, 8], "three ranks": [0, 5, 10]})
    highs = [number(one, "height") for one in found(drawing, "rect") if hint(one)]
    assert highs == pytest.approx([76 * load / 10 for load in (6, 10, 8, 8, 0, 5, 10)], abs=0.01)
    means = [number(one, "y1") for one in found(drawing, "line", **{"stroke-dasharray": MEAN})]
    bases = [number(one, "y1") for one in found(drawing, "line", stroke=MUTED)]
    levels = [base - mean for base, mean in zip(bases, means, strict=True)]
    assert levels == pytest.approx([76 * 0.8, 76 * 0.8, 76 * 0.5], abs=0.01)


def heights(drawing: Drawing, low: float, high: float) -> list[list[float]]:
    """The values of each curve, whose picture goes from `low` to `high` in 150 pixels."""
    curves = [
        [tuple(map(float, point.split(","))) for point in one.attrib["points"].split()]
        for one in found(drawing, "polyline")
    ]
    (label,) = (one for one in found(drawing, "text") if one.text == "ranks")
    base = number(label, "y") - 34
    return [[low * (high / low) ** ((base - y) / 150) for _, y in of_one] for of_one in curves]


def test_curves_are_the_fullest_rank_at_each_world_size() -> None:
    world_sizes = [1, 2, 4, 8]
    drawing = plots.balance_against_ranks(NUMELS, world_sizes, bytes_per_element=8)
    fullest = [[8 * max(rule(NUMELS, n).loads) for n in world_sizes] for rule in (sorted_greedy, even)]
    low, high = min(map(min, fullest)) / 1.25, max(map(max, fullest)) * 1.25
    assert heights(drawing, low, high) == [pytest.approx(of_one, rel=0.001) for of_one in fullest]
    assert "below the largest tensor (4.8 kB): only by cutting it" in written(drawing)
    assert {"at 8 ranks:", "sorted greedy: 4.8 kB"} <= set(written(drawing))


def test_what_cannot_be_balanced_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown partition 'greedy'.*sorted_greedy"):
        plots.balance_against_ranks([1], [1], strategies=["greedy"])
    with pytest.raises(ValueError, match="nothing to balance"):
        plots.balance_against_ranks([0], [1])


@given(st.floats(1e-3, 1e12), st.floats(2.5, 1e6))
def test_a_logarithmic_scale_has_a_few_round_values_inside(low: float, ratio: float) -> None:
    values = log_ticks(low, low * ratio)
    assert 1 <= len(values) <= 8
    assert all(low <= value <= low * ratio for value in values)
    assert all(re.match(r"^[125](\.0*)?e", f"{value:e}") for value in values)


# ----------------------------------------------------------------------------------------------- widths


@pytest.mark.parametrize("width", [239.0, 4001.0])
def test_a_width_that_no_page_has_is_refused(width: float) -> None:
    with pytest.raises(ValueError, match="240 to 4,000 pixels wide"):
        plots.ring_rounds(2).svg(width)
