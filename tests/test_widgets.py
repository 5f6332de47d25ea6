"""Explorers draw the book's pictures anew when a control changes; checked without a browser."""

from __future__ import annotations

from collections.abc import Callable

import ipywidgets
import pytest

from zero_ref.lab import widgets
from zero_ref.lab.plots import Picture
from zero_ref.lab.widgets import Explorer, memory_explorer, overlap_explorer, partition_explorer

EXPLORERS: dict[str, Callable[[], Explorer]] = {
    "partition": lambda: partition_explorer("mlp-tiny", ranks=4),
    "memory": lambda: memory_explorer("gpt2"),
    "overlap": lambda: overlap_explorer("mlp-tiny", ranks=4),
}
CHANGES = {
    "partition": {"model": "gpt2", "rule": "even", "ranks": 1024, "fullest_first": True},
    "memory": {
        "model": "gpt2-xl",
        "cluster": "v100-ib",
        "ranks": 2,
        "stage": 3,
        "convention": "fp32-16",
        "optimizer": "SGD",
        "batch": 8,
        "sequence": 1024,
        "checkpointing": "none",
    },
    "overlap": {
        "model": "gpt2",
        "cluster": "h100-ib",
        "strategy": "zero-even",
        "way": "after_backward",
        "bucket_mb": 1,
        "ranks": 1024,
        "tokens": 1024,
        "native": False,
    },
}


def words(picture: Picture) -> set[str]:
    """What is written; numbers in bars only when drawn."""
    texts = [text for ax in picture.axes for text in (ax.xaxis.label, *ax.texts)]
    return {text.get_text() for text in texts} | {ax.get_title(loc="left") for ax in picture.axes}


def shown(picture: Picture) -> list[object]:
    """What is written and where things lie: equal for equal pictures, and much faster than drawing them."""
    found: list[object] = [sorted(words(picture))]
    for ax in picture.axes:
        found += [(line.get_label(), line.get_xydata().tolist()) for line in ax.lines]
        found += [
            (patch.get_label(), patch.get_path().vertices.tolist(), patch.get_extents().bounds)
            for patch in ax.patches
        ]
        found += [[path.vertices.tolist() for path in one.get_paths()] for one in ax.collections]
    return found


@pytest.mark.parametrize("kind", EXPLORERS)
def test_a_control_for_each_thing_that_can_change(kind: str) -> None:
    explorer = EXPLORERS[kind]()
    assert list(explorer.controls) == list(explorer.values)
    assert set(explorer.controls) == set(CHANGES[kind])
    assert list(explorer.widget.children) == list(explorer.controls.values())


@pytest.mark.parametrize(
    ("kind", "control"), [(kind, control) for kind, changes in CHANGES.items() for control in changes]
)
def test_each_control_changes_the_picture(kind: str, control: str) -> None:
    explorer = EXPLORERS[kind]()
    if control in ("native", "way", "bucket_mb"):
        explorer.controls["model"].value = "gpt2"  # which has more than one bucket
    before = shown(explorer.picture)
    assert explorer.controls[control].value != CHANGES[kind][control]
    explorer.controls[control].value = CHANGES[kind][control]
    assert shown(explorer.picture) != before
    assert not explorer.controls[control].disabled


def test_the_partition_explorer_shows_where_the_largest_tensor_binds() -> None:
    explorer = partition_explorer("gpt2", ranks=64)
    assert {"Fullest rank: 19.9 × the mean", "largest tensor\n38.6M"} <= words(explorer.picture)
    assert {"sorted greedy\n318 ×", "even\n1 ×"} <= words(explorer.picture)
    explorer.controls["rule"].value = "even"
    assert "Fullest rank: 1 × the mean" in words(explorer.picture)


def test_the_memory_explorer_marks_its_stage_and_what_does_not_fit() -> None:
    explorer = memory_explorer("zero-7.5b", ranks=64, stage=0)
    (marked,) = [word for word in words(explorer.picture) if word.endswith("◂")]
    explorer.controls["stage"].value = 3
    (other,) = [word for word in words(explorer.picture) if word.endswith("◂")]
    assert marked != other
    assert "the device's 80 GB: the dashed line" in words(explorer.picture)


def test_the_overlap_explorer_says_what_is_exposed_and_what_is_critical() -> None:
    explorer = overlap_explorer("gpt2", "rtx4090-10gbe", "zero-2", ranks=64)
    said = words(explorer.picture)
    assert len([word for word in said if word.endswith("ms exposed")]) == 2
    assert any("critical path of zero-2: " in word and "reduce" in word for word in said)
    explorer.controls["ranks"].value = 1
    assert "0 ms exposed" in words(explorer.picture)


@pytest.mark.parametrize(
    ("strategy", "useless"),
    [
        ("zero-2", []),
        ("ddp", ["way", "native"]),
        ("zero-3", ["way", "bucket_mb", "native"]),
        ("local-sgd", ["way", "native"]),
    ],
)
def test_what_a_strategy_has_no_use_for_is_greyed_out(strategy: str, useless: list[str]) -> None:
    explorer = overlap_explorer("mlp-tiny", ranks=4)
    explorer.controls["strategy"].value = strategy
    assert [name for name, control in explorer.controls.items() if control.disabled] == useless


@pytest.mark.parametrize("kind", EXPLORERS)
def test_the_same_values_draw_the_same_picture(kind: str) -> None:
    assert shown(EXPLORERS[kind]().picture) == shown(EXPLORERS[kind]().picture)


def test_a_slider_draws_when_it_is_let_go() -> None:
    for make in EXPLORERS.values():
        for control in make().controls.values():
            if isinstance(control, ipywidgets.IntSlider | ipywidgets.SelectionSlider):
                assert not control.continuous_update


class Handle:
    def __init__(self) -> None:
        self.updates: list[object] = []

    def update(self, shown: object) -> None:
        self.updates.append(shown)


def test_the_picture_is_an_output_of_its_own_that_each_change_replaces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handles: list[Handle] = []
    displayed: list[object] = []

    def display(what: object, display_id: bool = False) -> Handle | None:
        displayed.append(what)
        if display_id:
            handles.append(Handle())
        return handles[-1] if display_id else None

    monkeypatch.setattr(widgets, "display", display)
    explorer = partition_explorer("mlp-tiny", ranks=4)
    for _ in range(2):  # in two cells
        explorer._ipython_display_()
    assert displayed == [explorer.widget, explorer.picture] * 2
    explorer.controls["ranks"].value = 8
    assert [handle.updates for handle in handles] == [[explorer.picture]] * 2
    assert explorer.picture not in displayed
    assert explorer.picture._repr_svg_().lstrip().startswith("<?xml")


def test_outside_of_a_notebook_an_explorer_is_shown_as_words(capsys: pytest.CaptureFixture[str]) -> None:
    explorer = partition_explorer("mlp-tiny", ranks=4)
    explorer._ipython_display_()
    assert "VBox" in capsys.readouterr().out
    explorer.controls["ranks"].value = 8


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: partition_explorer("gpt5"), "unknown model 'gpt5'; choose one of gpt2, "),
        (lambda: partition_explorer(rule="random"), "unknown rule 'random'; choose one of sorted_greedy, "),
        (lambda: partition_explorer(ranks=0), "ranks must be 1 to 1,024, got 0"),
        (lambda: partition_explorer(ranks=1025), "ranks must be 1 to 1,024, got 1,025"),
        (lambda: memory_explorer("mlp-tiny"), "unknown model 'mlp-tiny'"),  # has no activations to count
        (lambda: memory_explorer(cluster="loopback"), "unknown cluster 'loopback'"),  # memory not known
        (lambda: memory_explorer(stage=4), "stage must be 0 to 3, got 4"),
        (lambda: memory_explorer(sequence=1000), "sequence must be one of 128, "),
        (lambda: memory_explorer(optimizer="Lion"), "unknown optimizer 'Lion'"),
        (lambda: overlap_explorer(strategy="zero-9"), "unknown strategy 'zero-9'"),
        (lambda: overlap_explorer(way="sideways"), "unknown way 'sideways'"),
        (lambda: overlap_explorer(bucket_mb=3), "bucket MiB must be one of 1, 2, 4, 8, 16, 25"),
    ],
)
def test_what_cannot_be_explored_is_refused(make: Callable[[], Explorer], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
