"""Pictures of simulations show their numbers: curves, bars, what is too much, what changes a conclusion."""

from __future__ import annotations

import pytest
from library.pictures import Plot, drawn, written
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from zero_ref.lab import plots
from zero_ref.lab.plots._simulated import STEP_COLOURS
from zero_ref.live.palette import ALARM, ITEM_COLOURS
from zero_ref.plan.partition import ParamSpec
from zero_ref.simulator.cluster import cluster
from zero_ref.simulator.play import Played, play
from zero_ref.simulator.price import Workload
from zero_ref.simulator.schedule import schedule
from zero_ref.simulator.sensitivity import Setting, Variation

H100 = cluster("h100-ib")
PARAMS = [ParamSpec(10**7, "bfloat16", name=f"h.{i}.w") for i in range(8)]


def played(strategy: str, world_size: int = 16, **options: object) -> Played:
    blocks = {"blocks": [[i] for i in range(8)]} if strategy == "zero-3" else {}
    return play(schedule(strategy, PARAMS, world_size, **blocks), H100, Workload(4096), **options)  # type: ignore[arg-type]


def lines_of(ax: Axes, label: str) -> list[Line2D]:
    return [line for line in ax.lines if line.get_label() == label]


def boxes(ax: Axes, label: str) -> list[Rectangle]:
    bars = [bar for container in ax.containers if container.get_label() == label for bar in container]
    return [bar for bar in bars if isinstance(bar, Rectangle)]


# --------------------------------------------------------------------------------------------- memory curve


def test_a_memory_curve_is_the_plays_own_and_its_peak_is_marked_and_written() -> None:
    curve = played("ddp").memory()
    ax = drawn(lambda ax: plots.memory_curve({"ddp": curve}, ax))
    (line,) = lines_of(ax, "ddp")
    assert list(zip(line.get_xdata(), line.get_ydata())) == curve
    assert line.get_drawstyle() == "steps-post"
    (peak,) = lines_of(ax, "peak")
    assert peak.get_ydata()[0] == max(nbytes for _, nbytes in curve) == 640_000_032
    assert "peak 640 MB" in written(ax)


# ------------------------------------------------------------------------------------------------ step time


@pytest.mark.parametrize("strategy", ["ddp", "zero-even", "zero-3", "local-sgd"])
def test_the_parts_of_a_step_add_up_to_the_iteration(strategy: str) -> None:
    one = played(strategy, slow={3: 1.5})
    for rank in (0, 3):
        parts = plots.step_parts(one, rank)
        assert sum(parts) == pytest.approx(one.iteration_ms)
        assert min(parts) >= 0
    assert plots.step_parts(one).waiting_ms > plots.step_parts(one, rank=3).waiting_ms


def test_a_step_is_a_bar_of_its_parts() -> None:
    parts = {
        "ddp": {8: (40.0, 2.0, 0.0), 64: (40.0, 9.0, 3.0)},
        "zero": {8: (33.0, 3.0, 0.0), 64: (32.0, 12.0, 1.0)},
    }
    ax = drawn(lambda ax: plots.step_time_against_ranks(parts, ax), height=4)
    computing, exposed = boxes(ax, "computing"), boxes(ax, "exposed communication")
    assert [bar.get_width() for bar in computing] == [40, 33, 40, 32]
    assert [(bar.get_x(), bar.get_width()) for bar in exposed] == [(40, 2), (33, 3), (40, 9), (32, 12)]
    assert to_hex(exposed[0].get_facecolor()).upper() == STEP_COLOURS["exposed communication"] == ALARM
    assert {"8 ranks", "64 ranks", "42 ms", "52 ms", "ddp", "zero"} <= set(written(ax))


# ---------------------------------------------------------------------------------------- volume and memory


def test_volume_is_drawn_in_models_and_curves_that_end_alike_share_a_number() -> None:
    volumes = {
        "ddp": {n: 2 * (n - 1) / n for n in (1, 8, 1024)},
        "stage 2": {n: 2 * (n - 1) / n for n in (1, 8, 1024)},
        "stage 3": {n: 3 * (n - 1) / n for n in (1, 8, 1024)},
    }
    ax = drawn(lambda ax: plots.volume_against_ranks(volumes, ax))
    for name, curve in volumes.items():
        (line,) = lines_of(ax, name)
        assert list(zip(line.get_xdata(), line.get_ydata())) == list(curve.items())
    texts = [text.get_text() for text in ax.texts]
    assert texts == ["2 Ψ", "ddp", "stage 2", "3 Ψ", "stage 3"]
    widths = [lines_of(ax, name)[0].get_linewidth() for name in volumes]
    assert widths == sorted(widths, reverse=True)  # the one below is wider, so both are seen


# ------------------------------------------------------------------------------------------------- judgement


def variation(factor: str, scale: float, first_ms: float, second_ms: float, usual: str = "A") -> Variation:
    winner = "A" if first_ms < second_ms else "B"
    return Variation(factor, scale, Setting(H100, 8), first_ms, second_ms, winner, winner != usual)


def test_a_factor_that_changes_the_winner_is_red_and_others_are_not() -> None:
    found = [variation("latency", s, 10, 11 + s / 100) for s in (0.5, 1, 2)]
    found += [variation("ranks", s, 10, 11.01 * s) for s in (0.5, 1, 2)]
    ax = drawn(lambda ax: plots.sensitivity(found, ax))
    assert ax.get_title(loc="left") == "1 of 2 factors would change which is faster"
    labels = {label.get_text(): label.get_color() for label in ax.get_yticklabels()}
    assert list(labels) == ["ranks", "latency"]  # the one that matters more first
    assert labels["ranks"] == ALARM != labels["latency"]
    (point,) = lines_of(ax, "ranks 0.5")
    assert (point.get_xdata()[0], point.get_color()) == (pytest.approx(0.5505), ALARM)
    assert ALARM not in {lines_of(ax, f"latency {scale}")[0].get_color() for scale in (0.5, 1, 2)}
    (as_it_is,) = lines_of(ax, "ranks 1")
    assert (as_it_is.get_marker(), as_it_is.get_color() == ALARM) == ("D", False)


# ---------------------------------------------------------------------------------------------- every picture


@pytest.mark.parametrize(
    ("plot", "message"),
    [
        (lambda ax: plots.memory_curve({}, ax), "give 1 to 8 curves"),
        (lambda ax: plots.memory_curve({"one": []}, ax), "a point or more"),
        (lambda ax: plots.volume_against_ranks({}, ax), "give 1 to 8 curves"),
        (lambda ax: plots.volume_against_ranks({str(i): {1: 1} for i in range(9)}, ax), "give 1 to 8 curves"),
        (lambda ax: plots.memory_against_ranks({"one": {1: 0}}, ax), "above 0"),
        (lambda ax: plots.step_time_against_ranks({}, ax), "same numbers of ranks"),
        (
            lambda ax: plots.step_time_against_ranks({"a": {1: (1, 0, 0)}, "b": {2: (1, 0, 0)}}, ax),
            "same numbers",
        ),
        (lambda ax: plots.memory_items({"a": {}}, chosen="b"), "none named 'b'"),
        (lambda ax: plots.sensitivity([], ax), "one or more"),
        (lambda ax: plots.sensitivity([variation("latency", 1, 0, 1)], ax), "above 0"),
        (lambda ax: plots.panels([]), "at least one panel"),
    ],
)
def test_what_cannot_be_drawn_is_refused(plot: Plot, message: str) -> None:
    _, ax = plots.figure()
    with pytest.raises(ValueError, match=message):
        plot(ax)


CURVES = {name: played(name).memory() for name in ("ddp", "zero-even", "zero-2", "zero-3")}
VOLUMES = {f"stage {stage}": {2**i: 2.0 + (stage > 2) for i in range(11)} for stage in range(4)}
HELD = {
    f"stage {stage}": dict.fromkeys((*list(ITEM_COLOURS)[:-1], "scalars"), 1e9 * (4 - stage))
    for stage in range(4)
}
FACTORS = ("latency", "bandwidth between nodes", "ranks", "memory bandwidth")
PICTURES: dict[str, Plot] = {
    "memory_curve": lambda ax: plots.memory_curve(CURVES, ax, device_bytes=1e9),
    "memory_curve, flat": lambda ax: plots.memory_curve({"none": [(0.0, 0)]}, ax),
    "step_time_against_ranks": lambda ax: plots.step_time_against_ranks(
        {name: {n: plots.step_parts(played(name, n)) for n in (1, 8)} for name in ("ddp", "zero-2")}, ax
    ),
    "volume_against_ranks": lambda ax: plots.volume_against_ranks(VOLUMES, ax),
    "memory_against_ranks": lambda ax: plots.memory_against_ranks(
        {f"stage {stage}": {2**i: 1e11 / 2 ** (i * stage / 3) for i in range(11)} for stage in range(4)},
        ax,
        device_bytes=80e9,
    ),
    "memory_against_ranks, odd ranks": lambda ax: plots.memory_against_ranks(
        {"one": dict.fromkeys((1, 2, 3, 5, 6, 7, 900, 950, 1000), 1e9)}, ax
    ),
    "volume_against_ranks, one number of ranks": lambda ax: plots.volume_against_ranks(
        {"ddp": {8: 1.75}}, ax
    ),
    "sensitivity": lambda ax: plots.sensitivity(
        [variation(name, s, 10, 10.5 + i * s) for i, name in enumerate(FACTORS) for s in (0.5, 1, 2)], ax
    ),
    "sensitivity, changed": lambda ax: plots.sensitivity(
        [variation(name, s, 10, (10.5 + i) * s, "B") for i, name in enumerate(FACTORS) for s in (0.5, 1, 2)],
        ax,
    ),
}
