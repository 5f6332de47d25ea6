"""Animations: what moves is what the package's partition, calls and timelines say, and it can be stopped."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

from zero_ref.live.animated_step import animate_step, step_frames
from zero_ref.live.animation import Animation, Motion
from zero_ref.live.palette import RANK_COLOURS
from zero_ref.live.svg import text_width
from zero_ref.plan.partition import ParamSpec, Partition, Slice
from zero_ref.plan.rules import even, from_lists, sorted_greedy
from zero_ref.simulator.schedule import calls_of_rank

SVG = "{http://www.w3.org/2000/svg}"

TINY = sorted_greedy([12, 3, 6, 2], 3)
NAMES = ["W1", "b1", "W2", "b2"]
ANIMATIONS = {
    "step": animate_step(TINY, NAMES),
    "step of 4 ranks": animate_step(even([40, 3, 30, 5, 60, 1, 9], 4, alignment=1)),
    "step of 2 ranks": animate_step(from_lists([1, 999], [[], [0, 1]]), ["a long name", "<&>"]),
}

numels = st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(any)


def tree(animation: Animation, width: float = 720) -> ElementTree.Element:
    return ElementTree.fromstring(animation.svg(width))


def marked(root: ElementTree.Element, **data: str) -> list[ElementTree.Element]:
    return [one for one in root.iter() if all(one.get(f"data-{key}") == value for key, value in data.items())]


def keyframes(root: ElementTree.Element, of_class: str) -> dict[float, str]:
    """The moments of a class in percent of the loop, with what is declared there."""
    (sheet,) = [one.text or "" for one in root.iter(f"{SVG}style")]
    ((_, body),) = re.findall(
        rf"@keyframes ({re.escape(of_class)})\{{((?:[^{{}}]*\{{[^{{}}]*\}})*)\}}", sheet
    )
    return {
        float(when.rstrip("%")): css
        for all_of_them, css in re.findall(r"([^{}]*)\{([^{}]*)\}", body)
        for when in all_of_them.split(",")
    }


# ------------------------------------------------------------------------------------------------- one step


@given(numels, st.integers(2, 4), st.booleans())
@settings(max_examples=40)
def test_its_calls_are_the_packages_in_the_same_order(numels: list[int], ranks: int, cut: bool) -> None:
    partition = even(numels, ranks, alignment=1) if cut else sorted_greedy(numels, ranks)
    params = [ParamSpec(numel) for numel in numels]
    shown = [frame.call for frame in step_frames(partition) if frame.call]
    one_bucket = [list(range(len(numels)))]
    for rank in range(ranks):
        planned = calls_of_rank(partition, params, rank, buckets=one_bucket, broadcast_buffer_size=0)
        assert shown == planned


@given(numels, st.integers(2, 4), st.booleans())
@settings(max_examples=40)
def test_every_owner_sends_its_elements_once_and_all_others_receive(
    numels: list[int], ranks: int, cut: bool
) -> None:
    partition = even(numels, ranks, alignment=1) if cut else sorted_greedy(numels, ranks)
    new = {(rank, rank, piece) for rank, slices in enumerate(partition.slices_of_rank) for piece in slices}
    clock = 0.0
    for frame in step_frames(partition):
        assert clock <= frame.start_s + 1e-9
        clock = frame.stop_s
        if frame.piece and frame.call:
            owner = frame.call.peer
            assert frame.piece in partition.slices_of_rank[owner]
            for rank in frame.receivers:
                assert (rank, owner, frame.piece) not in new
                new.add((rank, owner, frame.piece))
    held = [{piece for holder, _, piece in new if holder == rank and piece.numel} for rank in range(ranks)]
    everything = {piece for slices in partition.slices_of_rank for piece in slices if piece.numel}
    assert held == [everything] * ranks


def test_the_picture_of_a_step_moves_each_piece_from_its_owner_to_all_others() -> None:
    root = tree(ANIMATIONS["step"])
    sent = Counter(
        (int(one.attrib["data-param"]), int(one.attrib["data-from"]), int(one.attrib["data-to"]))
        for one in marked(root, phase="broadcast")
    )
    assert sent == Counter(
        (param, owner, rank)
        for param, owner in enumerate(TINY.owner_of_param)
        for rank in range(3)
        if rank != owner
    )
    for one in marked(root, phase="broadcast"):
        owner, rank = int(one.attrib["data-from"]), int(one.attrib["data-to"])
        assert one[0].get("fill") == RANK_COLOURS[owner]
        moments = sorted(keyframes(root, one.attrib["class"]).items())
        (_, first), *_, (_, last) = moments
        assert first.startswith(f"transform:translateY({90 * (owner - rank)}px)"), "in the owner's row"
        seen = next(css for _, css in moments if css.endswith("opacity:1"))
        assert (first, seen) == (seen.replace("opacity:1", "opacity:0"), first.replace("y:0", "y:1"))
        assert last == "transform:translateY(0px);opacity:1", "to its own, where it stays"
    updated = {(one.get("data-rank"), one.get("data-param")) for one in marked(root, phase="step")}
    assert updated == {(str(owner), str(param)) for param, owner in enumerate(TINY.owner_of_param)}
    averaged = {(one.get("data-from"), one.get("data-to")) for one in marked(root, phase="reduce")}
    assert averaged == {(a, b) for a in "012" for b in "012" if a != b}


@pytest.mark.parametrize(
    ("partition", "names", "wrong"),
    [
        (sorted_greedy([4, 2], 1), None, "2 slices on 1 ranks"),
        (sorted_greedy([1] * 5, 5), None, "5 slices on 5 ranks"),
        (sorted_greedy([1] * 25, 2), None, "25 slices on 2 ranks: a step moves with 1 to 24 slices"),
        (Partition((0,), ((Slice(0, 0, 0),), ())), None, "0 slices on 2 ranks"),
        (TINY, ["W1"], "1 names for 4 parameters"),
    ],
)
def test_a_step_too_large_to_be_seen_is_refused(
    partition: Partition, names: list[str] | None, wrong: str
) -> None:
    with pytest.raises(ValueError, match=wrong):
        animate_step(partition, names)


# ------------------------------------------------------------------------------------ on a page, for everyone


@pytest.mark.parametrize("name", ANIMATIONS)
def test_nothing_moves_for_who_wants_less_motion_nor_on_paper(name: str) -> None:
    (sheet,) = [one.text or "" for one in tree(ANIMATIONS[name]).iter(f"{SVG}style")]
    before, query, rest = sheet.partition("@media screen and (prefers-reduced-motion:no-preference){")
    assert query
    assert re.fullmatch(r"\.[-\w.]+ \.moving\{display:none\}", before)
    moving, _, frames = rest.partition("}}@keyframes")
    assert "animation:" in moving
    assert "animation:" not in frames
    assert "animation-name" not in frames


@pytest.mark.parametrize("name", ANIMATIONS)
def test_it_loops_within_12_seconds_and_begins_with_a_whole_picture(name: str) -> None:
    (sheet,) = [one.text or "" for one in tree(ANIMATIONS[name]).iter(f"{SVG}style")]
    ((loop_s, delay_s),) = re.findall(r"animation:([\d.]+)s linear (-[\d.]+)s infinite", sheet)
    assert 8 <= float(loop_s) <= 12
    still_from = max(
        min(float(when.rstrip("%")) for when in moments.split(","))
        for moments in re.findall(r"((?:[\d.]+%,)*100%)\{", sheet)
    )
    assert still_from / 100 * float(loop_s) <= -float(delay_s), "it begins in the pause at the end"


@pytest.mark.parametrize("name", ANIMATIONS)
def test_a_page_has_a_labelled_tick_that_pauses_before_the_picture(name: str) -> None:
    piece = ElementTree.fromstring(ANIMATIONS[name]._repr_html_())
    style, tick, label, shown = piece
    assert (tick.tag, tick.get("type"), tick.get("checked")) == ("input", "checkbox", None)
    assert label.get("for") == tick.get("id")
    assert (label.text or "").startswith("Pause the animation: ")
    pauses = f".{tick.get('class')}:checked~.{shown.get('class')} *{{animation-play-state:paused!important}}"
    assert pauses in (style.text or "")
    assert "(prefers-reduced-motion:reduce){.zero-animation :is(input,label){display:none}}" in (
        style.text or ""
    )
    wide, narrow = shown.iter(f"{SVG}svg")
    assert (wide.get("width"), narrow.get("width")) == ("720", "340")
    assert "<script" not in ANIMATIONS[name]._repr_html_()


@pytest.mark.parametrize("name", ANIMATIONS)
def test_it_says_what_it_shows_and_the_same_input_gives_the_same_picture(name: str) -> None:
    root = tree(ANIMATIONS[name])
    assert root.get("role") == "img"
    assert root[0].tag == f"{SVG}title"
    assert root[0].text == ANIMATIONS[name].words
    assert root.get("font-size") == "13"
    assert not [one for one in root.iter() if one is not root and "font-size" in one.attrib]
    assert ANIMATIONS[name].svg(340) == ANIMATIONS[name].svg(340)
    again = animate_step(sorted_greedy([12, 3, 6, 2], 3), NAMES)
    assert again.svg() == ANIMATIONS["step"].svg()
    names = [one.get("id") for width in (340, 720) for one in tree(ANIMATIONS[name], width).iter()]
    used = [one for one in names if one]
    assert len(used) == len(set(used)), "two widths stand in one page"


@pytest.mark.parametrize("name", ANIMATIONS)
@pytest.mark.parametrize("width", [340, 720])
def test_what_is_drawn_lies_inside_the_picture(name: str, width: int) -> None:
    root = tree(ANIMATIONS[name], width)
    height = float(root.attrib["height"])
    for rect in root.iter(f"{SVG}rect"):
        x, y = float(rect.get("x", 0)), float(rect.get("y", 0))
        assert x >= 0
        assert x + float(rect.attrib["width"]) <= width + 0.1  # hundredths of a pixel
        assert 0 <= y <= y + float(rect.attrib["height"]) <= height
    for one in root.iter(f"{SVG}text"):
        words, x = "".join(one.itertext()), float(one.attrib["x"])
        wide = text_width(words)
        left = x - {"start": 0, "middle": wide / 2, "end": wide}[one.get("text-anchor", "start")]
        assert left >= -1, words
        assert left + wide <= width + 1, words
        assert 10 <= float(one.attrib["y"]) <= height - 3


def test_a_width_or_moments_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="an animation is 300 to 4,000 pixels wide, got 200"):
        ANIMATIONS["step"].svg(200)
    with pytest.raises(ValueError, match="moments must follow each other within 3 s"):
        Motion("m", 3, 1).of((0, "opacity:0"), (2, "opacity:1"), (1, "opacity:0"), (3, "opacity:1"))
    with pytest.raises(ValueError, match="moments must follow each other within 3 s"):
        Motion("m", 3, 1).grows(2, 4)
