"""An option is defined once: one that is added to a dataclass is in every form of it."""

from __future__ import annotations

import json
from dataclasses import KW_ONLY, asdict, dataclass, fields
from pathlib import Path
from typing import Annotated

import pytest

from zero_ref import cli
from zero_ref.cli import simulate
from zero_ref.lab import commands, config, dry_run
from zero_ref.lab.config import GPTConfig, TrainConfig
from zero_ref.lab.settings import as_toml, settings_of
from zero_ref.simulator.cluster import CLUSTERS
from zero_ref.simulator.models import MODELS
from zero_ref.simulator.options import (
    Option,
    check_options,
    from_options,
    options_of,
    used_values,
    values_of,
    words_of,
)
from zero_ref.simulator.recipe import RECIPES, Recipe
from zero_ref.simulator.scenario import Scenario


def of_stage_3(how: Recipe, _: object) -> bool:
    return how.stage == 3


@dataclass(frozen=True)
class Deeper:
    """A dataclass inside another."""

    layers: Annotated[int, Option(least=1, most=10, after="batch")] = 4


@dataclass(frozen=True)
class Example:
    """An option of each kind."""

    batch: Annotated[int, Option("sequences", least=1, label="sequences", steps=(1, 2))] = 1
    way: Annotated[str, Option(name="overlap", choices=("plain", "in_forward"))] = "plain"
    size: Annotated[int | None, Option(name="size_mib", unit=2**20, above=0, most=64)] = None
    masters: Annotated[bool, Option("no masters")] = True
    fused: Annotated[bool, Option("fused", used_by=of_stage_3)] = False
    of_no_command: int = 3
    inside: Annotated[Deeper, Option()] = Deeper()


GIVEN = {"batch": 2, "overlap": "in-forward", "size_mib": 0.5, "no_masters": True, "fused": True, "layers": 7}
MADE = Example(2, "in_forward", 2**19, masters=False, fused=True, inside=Deeper(7))


def test_a_dataclass_is_made_of_what_people_give_and_says_it_again() -> None:
    assert [one.flag for one in options_of(Example)] == [
        *("--batch", "--layers", "--overlap", "--size-mib", "--no-masters", "--fused")
    ]
    assert from_options(Example, GIVEN) == MADE
    assert from_options(Example, dict.fromkeys(GIVEN)) == Example()
    assert from_options(Example, GIVEN, batch=1, inside=Deeper()) == Example(
        1, "in_forward", 2**19, masters=False, fused=True
    )
    words = ["--batch", "2", "--layers", "7", "--overlap", "in-forward", "--size-mib", "0.5", "--no-masters"]
    assert words_of(MADE, RECIPES["zero-3"]) == [*words, "--fused"]
    assert words_of(MADE, RECIPES["ddp"], but=("batch",)) == words[2:]
    assert words_of(Example(), RECIPES["ddp"]) == []
    assert used_values(MADE, RECIPES["ddp"]) == {"fused": False}
    assert values_of(MADE) == {
        "batch": 2, "layers": 7, "overlap": "in_forward", "size_mib": 0.5, "masters": False, "fused": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (Example(0), "batch must be at least 1, got 0."),
        (Example(way="none"), "unknown way 'none'; choose one of plain, in_forward."),
        (Example(size=0), "size must be above 0, got 0."),
    ],
)
def test_what_is_no_value_of_an_option_is_refused(made: Example, said: str) -> None:
    with pytest.raises(ValueError) as error:
        check_options(made)
    assert str(error.value) == said
    check_options(made, but=[one.name for one in fields(made)])


# ------------------------------------------------------------------------------- one more in every form


@dataclass(frozen=True)
class TrainConfigWithAnother(TrainConfig):
    """A run with one option more."""

    _: KW_ONLY
    clip_norm: Annotated[float | None, Option("the largest norm", above=0, most=100)] = None


@dataclass(frozen=True)
class ScenarioWithAnother(Scenario):
    """A scenario with one option more."""

    _: KW_ONLY
    micro_batch: Annotated[int, Option("computed at a time", least=1, most=99)] = 1


@pytest.fixture
def another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dataclasses with one option more stand where the others do."""
    for module in (config, commands, dry_run):
        monkeypatch.setattr(module, "TrainConfig", TrainConfigWithAnother)
    monkeypatch.setattr(simulate, "Scenario", ScenarioWithAnother)


@pytest.mark.usefixtures("another")
def test_one_option_more_of_a_run_is_in_every_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = cli.make_parser()[1]["train"]
    assert "--clip-norm CLIP_NORM" in parser.format_help()

    def run_of(*words: str) -> TrainConfig:
        arguments = parser.parse_args(["--strategy", "zero-2", *words])
        return config.config_for(arguments, config.strategies_of(arguments), 2)

    # The command line, TOML and JSON say the same, and the command that is printed says it again.
    toml, in_json = tmp_path / "run.toml", tmp_path / "run.json"
    toml.write_text("clip-norm = 0.5")
    in_json.write_text('{"clip-norm": 0.5}')
    ways = [["--clip-norm", "0.5"], ["--config", str(toml)], ["--config", str(in_json)]]
    for words in ways:
        made = run_of(*words)
        assert made == TrainConfigWithAnother("zero-2", clip_norm=0.5)
        assert words_of(made, made.recipe, but=("strategy",)) == ["--clip-norm", "0.5"]
        assert values_of(made)["clip_norm"] == 0.5
        assert cli.main(["train", *words, "--dry-run"]) == 0
        assert "--clip-norm 0.5" in capsys.readouterr().out
    assert cli.main(["train", *ways[0], "--show-config"]) == 0
    assert "clip-norm = 0.5" in capsys.readouterr().out

    for file, text in ((toml, "clip-nrom = 1"), (in_json, '{"clip-nrom": 1}')):
        file.write_text(text)
        with pytest.raises(SystemExit):
            run_of("--config", str(file))
        assert "is called 'clip-nrom'; did you mean 'clip-norm'?" in capsys.readouterr().err
    for words, said in (
        (["--clip-nrom", "1"], "did you mean --clip-norm?"),
        (["--clip-norm", "0"], "above 0"),
    ):
        with pytest.raises(SystemExit):
            run_of(*words)
        assert said in capsys.readouterr().err


@pytest.mark.usefixtures("another")
def test_one_option_more_of_a_scenario_is_in_every_form(capsys: pytest.CaptureFixture[str]) -> None:
    parser = cli.make_parser()[1]["simulate"]
    assert "--micro-batch MICRO_BATCH" in parser.format_help()
    words = ["simulate", "--model", "gpt2", "--ranks", "2", "--micro-batch", "4"]
    assert cli.main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["micro_batch"] == 4
    made = ScenarioWithAnother(MODELS["gpt2"], CLUSTERS["h100-ib"], 2, micro_batch=4)
    printed = commands.simulate_command(made, "zero-even", ["--model", "gpt2"], "h100-ib")
    assert printed is not None
    assert printed[-2:] == ["--micro-batch", "4"]
    with pytest.raises(SystemExit):
        cli.main([*words[:-1], "0"])
    assert "--micro-batch: it must be at least 1, got 0" in capsys.readouterr().err


# -------------------------------------------------------------------------------------- the package's own


def test_the_settings_of_a_run_and_its_command_make_the_same_run() -> None:
    made = TrainConfig(
        "zero-2", 30, 2, 1e-5, seed=7, model=GPTConfig(2, 2, 32, 16, dtype="bfloat16"), way="in_forward",
        shard_group=2, master_dtype="float32",
    )  # fmt: skip
    parser = cli.make_parser()[1]["train"]
    words = ["--strategy", "zero-2", *words_of(made, made.recipe, but=("strategy",))]
    arguments = parser.parse_args(words)
    assert from_options(TrainConfig, vars(arguments), strategy="zero-2") == made
    assert 'overlap = "in-forward"' in as_toml(settings_of(arguments))


def test_every_field_of_a_scenario_but_what_it_is_of_is_an_option() -> None:
    options = {one.path[-1] for one in options_of(Scenario)}
    assert {one.name for one in fields(Scenario)} - options == {"architecture", "cluster", "world_size"}
    assert set(asdict(GPTConfig())) < {one.path[-1] for one in options_of(TrainConfig)}
