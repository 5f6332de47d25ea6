"""The explorers: each answer is the package's own, whatever shows it."""

from __future__ import annotations

import itertools
import json
import xml.etree.ElementTree as ElementTree

import pytest

from zero_ref import live
from zero_ref.live import EXPLORERS
from zero_ref.live.explorer import Answer, Control
from zero_ref.live.page import NARROW, WIDE, fitted, frames, html
from zero_ref.live.palette import MANY_RANKS, rank_colour
from zero_ref.live.svg import Drawing, text_width
from zero_ref.plan.choice import plan_partition
from zero_ref.simulator.cluster import CLUSTERS
from zero_ref.simulator.memory import MemorySettings, average_memory
from zero_ref.simulator.models import MODELS, shapes, specs
from zero_ref.simulator.peak import with_peak
from zero_ref.simulator.play import play
from zero_ref.simulator.recipe import recipe
from zero_ref.simulator.scenario import Scenario
from zero_ref.simulator.schedule import MIB, ddp_buckets, schedule
from zero_ref.simulator.search import search
from zero_ref.simulator.which import compared

SVG = "{http://www.w3.org/2000/svg}"


def rects(answer: Answer) -> list[dict[str, str]]:
    return [one.attrib for one in ElementTree.fromstring(answer.svg).iter(f"{SVG}rect")]


# ----------------------------------------------------------------------------------- numbers of the package


@pytest.mark.parametrize(
    ("model", "ranks", "convention"), [("gpt2", 4, "mixed-16"), ("zero-1t", 1024, "fp32-16")]
)
def test_memory_is_the_average_of_the_simulator(model: str, ranks: int, convention: str) -> None:
    answer = EXPLORERS["memory"].answer(
        model=model, ranks=ranks, convention=convention, optimizer="SGD", batch=2, sequence=512
    )
    scenario = Scenario(MODELS[model], CLUSTERS["v100-ib"], ranks, 2, 512, checkpointing="by-operation")
    kept, device = scenario.activations, CLUSTERS["h100-ib"].device
    params = specs(shapes(model))
    for stage in range(4):
        settings = MemorySettings(
            stage,
            convention,
            "SGD",
            activation_bytes=kept.kept,
            head_bytes=kept.head,
            loss_bytes=kept.loss,
            block_bytes=kept.again + kept.gradients,
            masters_apart=convention == "mixed-16" and stage < 3,
        )
        memory = with_peak(
            average_memory(params, ranks, settings),
            params,
            settings,
            allocator_share=device.allocator_share,
            library_bytes=device.library_gb * 1e9,
        )
        drawn = {key: value for key, value in answer.numbers.items() if key.startswith(f"stage {stage}, ")}
        assert sum(drawn.values()) == pytest.approx(memory.peak_bytes)  # another order of adding up
        for item in ("parameters", "moments", "communication", "activations"):
            assert drawn[f"stage {stage}, {item}, bytes"] == memory.peak_items[item]
    assert answer.numbers["device, bytes"] == pytest.approx(81_559 * 2**20)  # as the driver reports


@pytest.mark.parametrize(("model", "ranks"), [("gpt2", 64), ("mlp-tiny", 1024), ("llama3-8b", 1)])
def test_loads_are_those_of_the_partition(model: str, ranks: int) -> None:
    answer = EXPLORERS["partition"].answer(model=model, ranks=ranks)
    for rule in ("sorted_greedy", "registration_greedy", "even"):
        plan = plan_partition(rule, specs(shapes(model)), ranks)
        assert answer.numbers[f"{rule}, fullest, elements"] == max(plan.loads)
        assert answer.numbers[f"{rule}, idle ranks"] == plan.loads.count(0)
        over = max(plan.loads) * ranks / sum(plan.loads)
        assert answer.numbers[f"{rule}, fullest / mean"] == over
        assert answer.numbers[f"{rule}, {ranks} ranks, fullest / mean"] == over


@pytest.mark.parametrize(
    ("strategy", "way"),
    [
        *(("ddp", "plain"), ("zero-even", "interleaved"), ("local-sgd", "plain")),
        *(("zero-2", "plain"), ("zero-2", "in_forward")),
    ],
)
def test_an_iteration_takes_as_long_as_the_simulator_says(strategy: str, way: str) -> None:
    setting = {"model": "gpt2", "cluster": "rtx4090-10gbe", "ranks": 32, "tokens": 1024, "bucket_mb": 8}
    answer = EXPLORERS["overlap"].answer(strategy=strategy, way=way, latency=2.0, bandwidth=0.5, **setting)
    links = CLUSTERS["rtx4090-10gbe"].with_links(latency=2.0, bandwidth=0.5)
    params = specs(shapes("gpt2"), "bfloat16")
    plan = schedule(
        recipe(strategy, way=way),
        params,
        32,
        ddp_buckets=ddp_buckets(params, cap_bytes=8 * MIB),
        side_stream=strategy == "zero-even",
    )
    played = play(plan, links, Scenario(MODELS["gpt2"], links, 32).workload_of(strategy))
    assert answer.numbers[f"{strategy}, iteration, ms"] == played.iteration_ms
    assert answer.numbers[f"{strategy}, exposed, ms"] == played.timeline().exposed_ms / plan.iterations
    path = [ms for name, ms in answer.numbers.items() if "critical path" in name]
    assert sum(path) == pytest.approx(played.makespan_ms)  # the sum of what the path is made of


def test_which_stage_is_what_the_simulator_compares() -> None:
    answer = EXPLORERS["which"].answer(
        model="gpt2-xl", cluster="a100-ethernet", ranks=64, batch=2, sequence=1024, checkpointing="full",
        accumulation=4,
    )  # fmt: skip
    scenario = Scenario(
        MODELS["gpt2-xl"], CLUSTERS["a100-ethernet"], 64, 2, 1024, accumulation=4, checkpointing="full"
    )
    found = compared(scenario)
    for name, run in found.runs.items():
        assert answer.numbers[f"{name}, memory, bytes"] == run.peak_bytes
        assert answer.numbers[f"{name}, sent, bytes"] == run.sent_bytes
        assert answer.numbers[f"{name}, exposed, ms"] == run.exposed_ms
        assert answer.numbers[f"{name}, update, ms"] == run.iteration_ms
    assert answer.numbers["tokens to hide what all ranks gather"] == found.tokens_needed
    assert f"choose {found.advice.name}. " in answer.words
    assert [row[0] for row in answer.table[1:]] == list(found.runs)


def test_which_stage_says_that_simulated_times_decided_close_to_the_rule() -> None:
    answer = EXPLORERS["which"].answer(model="llama3-8b", ranks=512, sequence=2048)
    assert "choose stage 3. Nearly: 2,048 tokens, " in answer.words
    assert "These tokens are close" in answer.svg


# ----------------------------------------------------------------------------------------------- pictures


@pytest.mark.parametrize("name", EXPLORERS)
def test_each_control_changes_the_picture_at_some_setting(name: str) -> None:
    explorer = EXPLORERS[name]
    usual = explorer.answer().svg
    for control in explorer.controls:
        others = [one for one in control.options if one != control.value]
        drawn = (explorer.answer(**{control.name: one}).svg for one in (others[0], others[-1]))
        assert any(svg != usual for svg in drawn), control.name


@pytest.mark.parametrize(("name", "width"), list(itertools.product(EXPLORERS, (280, 340, 760))))
def test_what_is_drawn_lies_inside_the_picture(name: str, width: int) -> None:
    explorer = EXPLORERS[name]
    for ends in (0, -1):
        setting = {one.name: one.options[ends] for one in explorer.controls if one.name != "model"}
        answer = explorer.answer(width, **setting)
        root = ElementTree.fromstring(answer.svg)
        height = float(root.attrib["height"])
        for rect in rects(answer):
            assert float(rect.get("x", 0)) >= 0
            assert float(rect.get("x", 0)) + float(rect["width"]) <= width + 0.1  # hundredths of a pixel
            assert 0 <= float(rect.get("y", 0)) <= height
        for one in root.iter(f"{SVG}text"):
            words, x = "".join(one.itertext()), float(one.attrib["x"])
            wide = 0.85 * text_width(words)  # the estimate is of a wide font
            left = x - {"start": 0, "middle": wide / 2, "end": wide}[one.get("text-anchor", "start")]
            assert left >= -1, words
            assert left + wide <= width + 1, words


@pytest.mark.parametrize("name", EXPLORERS)
def test_a_picture_says_what_it_shows_and_the_same_setting_draws_the_same(name: str) -> None:
    answer = EXPLORERS[name].answer()
    root = ElementTree.fromstring(answer.svg)
    assert root.get("role") == "img"
    assert root[0].text == answer.words
    assert EXPLORERS[name].answer() == answer
    assert all(len(row) == len(answer.table[0]) for row in answer.table)


def test_a_strategy_greys_out_what_it_has_no_use_for_and_says_why() -> None:
    for strategy, way, idle in [
        ("zero-2", "in_forward", {"bucket_mb": "zero-2 runs without DDP, whose buckets these are"}),
        ("zero-2", "interleaved", {"bucket_mb": "zero-2 runs without DDP, whose buckets these are"}),
        ("zero-even", "interleaved", {}),
        ("zero-even", "in_forward", {}),
        ("ddp", "plain", {"way": "ddp has one way to update"}),
        (
            "zero-3",
            "plain",
            {"way": "zero-3 has one way to update", "bucket_mb": "zero-3 reduces block by block"},
        ),
    ]:
        assert EXPLORERS["overlap"].answer(strategy=strategy, way=way).idle == idle


# ------------------------------------------------------------------------------------------------ the parts


def test_many_ranks_have_the_colours_of_viridis_in_order() -> None:
    assert [rank_colour(rank, 9) for rank in range(9)] == list(MANY_RANKS)
    assert rank_colour(0, 1024) == MANY_RANKS[0]
    assert rank_colour(1023, 1024) == MANY_RANKS[-1]
    matplotlib = pytest.importorskip("matplotlib")
    for rank, world_size in ((5, 17), (100, 1024), (30, 31)):
        viridis = matplotlib.colormaps["viridis"](0.04 + 0.92 * rank / (world_size - 1))
        ours = [int(rank_colour(rank, world_size)[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        assert ours == pytest.approx(viridis[:3], abs=9 / 255)  # nine points, straight lines between them


def test_a_control_refuses_what_is_no_option() -> None:
    with pytest.raises(ValueError, match="stage must be one of 0, 1, 2, 3; got 4"):
        Control("stage", "stage", 4, range(4))
    long = Control("n", "n", 1, tuple(range(1, 40)))
    with pytest.raises(ValueError, match=r"n must be one of 1, 2, .*, 8, \.\.\., 39; got 0"):
        long.check(0)
    with pytest.raises(ValueError, match="a picture is 240 to 4,000 pixels wide, got 100"):
        EXPLORERS["memory"].answer(100)
    with pytest.raises(
        ValueError, match="partition has no control 'stage'; it has model, ranks, fullest_first"
    ):
        EXPLORERS["partition"].answer(stage=1)


# -------------------------------------------------------------------------------------------- for a page


def test_a_page_gets_the_same_answer_as_json() -> None:
    kinds = set()
    for name in ("overlap", "partition"):
        controls = json.loads(live.controls(name))
        assert [one["name"] for one in controls] == list(EXPLORERS[name].values)
        kinds |= {one["kind"] for one in controls}
        for one in controls:
            assert len(one["words"]) == len(one["options"])
            assert one["value"] in one["options"]
    assert kinds == {"choice", "slider", "tick"}
    answer = json.loads(live.answer("overlap", '{"model": "gpt2", "latency": 5}', 340.0))  # 5, as JSON has it
    same = EXPLORERS["overlap"].answer(340.0, model="gpt2", latency=5.0)
    assert answer == json.loads(json.dumps(same.as_dict()))


@pytest.mark.parametrize("name", EXPLORERS)
def test_a_piece_of_page_stands_by_itself(name: str) -> None:
    piece = html(name)
    root = ElementTree.fromstring(piece)
    assert (root.get("data-explorer"), root.get("data-values")) == (name, "{}")
    wide, narrow = (one.attrib["width"] for one in root.iter(f"{SVG}svg"))
    assert (float(wide), float(narrow)) == (WIDE, NARROW)
    answer = EXPLORERS[name].answer(WIDE)
    assert answer.words in piece
    (table,) = root.iter("table")
    cells = [["".join(cell.itertext()).strip() for cell in row] for row in table.iter("tr")]
    assert cells == [[cell.strip() for cell in row] for row in answer.table]
    assert "stands still" in piece


def test_the_memory_explorer_starts_with_the_tours_figures() -> None:
    numbers = EXPLORERS["memory"].answer().numbers
    scenario = Scenario(MODELS["llama3-8b"], CLUSTERS["h100-ib"], 64, checkpointing="by-operation")
    for stage, strategy in ((0, "ddp"), (1, "zero-even"), (3, "zero-3")):
        held = sum(nbytes for name, nbytes in numbers.items() if name.startswith(f"stage {stage}, "))
        fullest = scenario.run(strategy).peak_bytes
        assert held == pytest.approx(fullest, rel=0.001)  # an average, and what cuts leave over


def test_the_search_explorer_draws_what_the_search_finds() -> None:
    answer = EXPLORERS["search"].answer(model="gpt2", cluster="rtx4090-10gbe", ranks=8, tokens=2**17)
    found = search(Scenario(MODELS["gpt2"], CLUSTERS["rtx4090-10gbe"], 8), 2**17)
    assert answer.numbers["ways tried"] == found.tried
    dots = [one.attrib for one in ElementTree.fromstring(answer.svg).iter(f"{SVG}circle")]
    assert len(dots) == len(found.listed)
    assert [float(one["r"]) for one in dots].count(5.5) == len(found.best) == len(answer.table) - 1
    filled = sum(one["fill"] == one["stroke"] for one in dots)
    assert filled == answer.numbers["ways that fit"] == sum(one.fits is True for one in found.listed)
    for place, one in enumerate(found.best, 1):
        assert answer.numbers[f"{place}, tokens a second"] == one.tokens_per_second
        assert answer.numbers[f"{place}, bytes"] == one.peak_bytes


# ------------------------------------------------------------------------------- pictures along one control


@pytest.mark.parametrize("name", [name for name, one in EXPLORERS.items() if one.along])
def test_the_pictures_along_a_control_are_the_explorers_own(name: str) -> None:
    made = frames(name)
    control = next(one for one in EXPLORERS[name].controls if one.name == EXPLORERS[name].along)
    assert made["control"] == control.as_dict()
    assert len(made["answers"]) == len(control.options)
    for value, frame in zip(control.options, made["answers"], strict=True):
        wide = EXPLORERS[name].answer(WIDE, **{control.name: value})
        assert (frame["wide"], frame["words"], frame["table"]) == (wide.svg, wide.words, wide.table)
        assert frame["narrow"] == EXPLORERS[name].answer(NARROW, **{control.name: value}).svg


@pytest.mark.parametrize("rounds", range(7))
def test_a_ring_has_sent_a_quarter_a_round_and_ends_with_whole_sums(rounds: int) -> None:
    answer = EXPLORERS["ring"].answer(rounds=rounds)
    assert answer.numbers["sent, tensors"] == rounds / 4
    assert answer.numbers["whole chunks on a rank"] == max(0, rounds - 2) == min(4, max(0, rounds - 2))
    assert sum("stroke" in rect for rect in rects(answer)) == (4 if rounds else 0)


def test_a_fitted_drawing_is_in_a_page_in_two_widths_and_its_style_shows_one() -> None:
    piece = ElementTree.fromstring(fitted(Drawing("words", lambda width: ([], 10.0)))._repr_html_())
    style, picture = piece
    widths = [one.get("width") for one in picture.iter(f"{SVG}svg")]
    assert widths == [f"{WIDE:g}", f"{NARROW:g}"]
    wide, narrow = (f".{one.get('class')}" for one in picture)
    hidden = f"{wide}{{display:none}}{narrow}{{display:block}}"
    assert f"{narrow}{{display:none}}" in (style.text or "")
    assert f"@container (max-width:660px){{{hidden}}}" in (style.text or "")
