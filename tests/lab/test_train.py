"""The main job on real ranks: predictions hold, strategies agree, checkpoints carry over, torchrun works."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch.nn.parallel import DistributedDataParallel

from zero_ref.cli import main
from zero_ref.lab import meter, ranks
from zero_ref.lab.compare import compare
from zero_ref.lab.config import COMPARED, GPTConfig, TrainConfig
from zero_ref.lab.model import GPT, batch, language_reference
from zero_ref.lab.outcome import outcome, predict
from zero_ref.lab.strategies import make_optimizer, trainable
from zero_ref.lab.train import held_out_loss, train
from zero_ref.simulator.cluster import cluster
from zero_ref.simulator.models import ParamShape
from zero_ref.simulator.operations import WAYS
from zero_ref.simulator.recipe import TRAINED, recipe
from zero_ref.simulator.scenario import Scenario
from zero_ref_course.stubs import answer

pytestmark = pytest.mark.ranks

SMALL = TrainConfig(steps=6, batch_size=2, model=GPTConfig(layers=2, heads=2, width=32, context=16))


def final_loss(config: TrainConfig, world_size: int) -> float:
    loss = ranks.run(train, world_size, config)[0].held_out_loss
    assert loss is not None
    return loss


def as_predicted(config: TrainConfig, world_size: int) -> float:
    """The final loss of a run in which every call and byte was as predicted."""
    result = outcome(config, predict(config, world_size), ranks.run(train, world_size, config))
    assert result.as_predicted, result
    return result.final_loss


@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 4))])
def test_every_call_and_byte_is_as_predicted(world_size: int) -> None:
    losses = {name: as_predicted(replace(SMALL, strategy=name), world_size) for name in TRAINED}
    local = losses.pop("local-sgd")
    assert (local == losses["ddp"]) == (world_size == 1), "between averages each rank trains its own model"
    # Few terms are added alike in any order; of four ranks' sums the last bits differ, and that grows.
    same = COMPARED if world_size == 4 else losses
    assert len({losses[name] for name in same}) == 1, "the same arithmetic: equal to the last bit"
    assert list(losses.values()) == pytest.approx([losses["ddp"]] * len(losses), rel=1e-5)


@pytest.mark.parametrize("way", list(WAYS)[1:])
def test_updates_in_backward_and_parameters_in_forward_are_as_predicted(way: str) -> None:
    able = [name for name, one in TRAINED.items() if way in one.ways]
    assert able == (["zero-2"] if way == "in_forward" else ["zero", "zero-bucket", "zero-even"])
    plain = as_predicted(SMALL, 2)
    assert {as_predicted(replace(SMALL, strategy=name, way=way), 2) for name in able} == {plain}


WITHOUT_DDP = replace(SMALL, strategy="zero-2")
IN_GROUPS = [(4, None, "in_forward"), (4, 2, "plain"), (4, 2, "in_forward"), (3, 1, "plain"), (3, 3, "plain")]
"""Ranks, how many of them share the state, and when new parameters arrive."""


@pytest.mark.parametrize(
    ("world_size", "shard_group", "way"),
    [
        IN_GROUPS[2],
        *(pytest.param(*one, marks=pytest.mark.thorough) for one in (*IN_GROUPS[:2], *IN_GROUPS[3:])),
    ],
)
def test_groups_that_share_the_state_are_as_predicted(
    world_size: int, shard_group: int | None, way: str
) -> None:
    config = replace(WITHOUT_DDP, shard_group=shard_group, way=way, steps=12)
    loss = as_predicted(config, world_size)
    assert loss == pytest.approx(as_predicted(config.under("ddp"), world_size), rel=1e-5)
    if shard_group in (None, world_size):
        assert loss == as_predicted(replace(WITHOUT_DDP, steps=12), world_size), "one group is all ranks"


def test_a_group_divides_the_state_and_the_groups_are_replicas() -> None:
    held = {
        size: [rank.held for rank in ranks.run(train, 4, replace(WITHOUT_DDP, shard_group=size))]
        for size in (1, 2, 4)
    }
    assert held[2][:2] == held[2][2:]
    for size in (2, 4):  # but for counters and padding
        assert held[size][0].optimizer_state == pytest.approx(held[1][0].optimizer_state / size, rel=0.02)
        assert held[size][0].gradients == pytest.approx(held[1][0].gradients / size, rel=0.02)


# ------------------------------------------------------------------------------------------------- in 16 bits


IN_16 = replace(SMALL, model=replace(SMALL.model, dtype="bfloat16"))
WITH_MASTERS = replace(IN_16, master_dtype="float32")
CAN_KEEP_MASTERS = [name for name, one in TRAINED.items() if one.stage < 3 and one.averaging is None]


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_with_masters_every_call_and_byte_is_as_predicted(world_size: int) -> None:
    losses = {
        name: as_predicted(replace(WITH_MASTERS, strategy=name), world_size) for name in CAN_KEEP_MASTERS
    }
    if world_size == 4:  # sums of four in another order are rounded to other 16 bits
        assert losses.pop("zero-2") == pytest.approx(losses["ddp"], rel=0.1)
    assert len(set(losses.values())) == 1, "masters kept whole, or in shards: equal to the last bit"


@pytest.mark.thorough
@pytest.mark.parametrize("way", list(WAYS)[1:])
def test_masters_updated_in_backward_or_sent_in_forward_are_as_predicted(way: str) -> None:
    plain = as_predicted(WITH_MASTERS, 2)
    able = [name for name in CAN_KEEP_MASTERS if way in TRAINED[name].ways]
    assert able
    assert {as_predicted(replace(WITH_MASTERS, strategy=name, way=way), 2) for name in able} == {plain}


@pytest.mark.thorough
@pytest.mark.parametrize(("world_size", "shard_group", "way"), [IN_GROUPS[1], IN_GROUPS[2], IN_GROUPS[4]])
def test_masters_of_groups_that_share_them_are_as_predicted(
    world_size: int, shard_group: int | None, way: str
) -> None:
    config = replace(WITH_MASTERS, strategy="zero-2", shard_group=shard_group, way=way)
    loss = as_predicted(config, world_size)
    # Sums of three and more in another order are rounded to other 16 bits.
    assert loss == pytest.approx(as_predicted(config.under("ddp"), world_size), rel=0.1)
    if shard_group in (None, world_size):
        assert loss == as_predicted(replace(WITH_MASTERS, strategy="zero-2"), world_size)


def test_without_masters_a_16_bit_model_is_as_predicted_and_another() -> None:
    losses = {name: as_predicted(replace(IN_16, strategy=name), 2) for name in TRAINED}
    local = losses.pop("local-sgd")
    assert len({local, *losses.values(), as_predicted(WITH_MASTERS, 2)}) == 3


class Shapes(NamedTuple):
    """A model that only has parameters, for a Scenario."""

    of_params: tuple[ParamShape, ...]

    def shapes(self) -> tuple[ParamShape, ...]:
        return self.of_params


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.thorough), "zero-even"])
def test_a_scenario_foresees_the_bytes_of_a_16_bit_model(strategy: str) -> None:
    named = GPT(SMALL.model).named_parameters()
    scenario = Scenario(
        Shapes(tuple(ParamShape(name, tuple(param.shape)) for name, param in named)),
        cluster("h100-ib"),
        4,
        bucket_view=True,
    )
    come_and_go = {"communication", "activations", "temporaries", "allocator", "libraries"}
    foreseen = [
        sum(nbytes for item, nbytes in memory.items.items() if item not in come_and_go)
        for memory in scenario.run(strategy).memories
    ]
    measured = ranks.run(train, 4, replace(WITH_MASTERS, strategy=strategy))
    assert foreseen == [sum(rank.held) for rank in measured]


@pytest.mark.thorough
def test_the_front_page_s_command_measures_the_bytes_of_its_picture(tmp_path: Path) -> None:
    book = Path(__file__).parents[2] / "book"
    svg = (book / "pictures" / "stages.svg").read_text(encoding="utf-8")
    drawn = dict.fromkeys(re.findall(r"at most (\d+) bytes", svg))  # twice: of all stages, and of each
    page = (book / "index.md").read_text(encoding="utf-8")
    (words,) = re.findall(r"^zero-ref (train .*)$", page, flags=re.M)
    fewer = ["--steps", "2"]  # of the page's steps; what is held is the same after each
    command = [sys.executable, "-m", "zero_ref.cli", *words.split(), *fewer, "--json"]
    environ = {**os.environ, "ZERO_REF_DEVICE": "cpu"}

    def printed(file: Path, *more: str) -> tuple[dict[str, Any], list[list[str]]]:
        done = subprocess.run(
            [*command, str(file), *more],
            capture_output=True,
            text=True,
            timeout=600,
            env=environ,
            cwd=book.parent,
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(file.read_text())["strategies"]
        table = done.stdout.rpartition("emptiest rank")[2].strip().splitlines()
        return found, [row.split() for row in table]

    on_four, rows = printed(tmp_path / "four.json")
    assert rows == [["ddp", "16", "16.000", "16.000"], ["zero-even", "7", "7.000", "7.000"]]
    # At stages 2 and 3 a rank holds more during backward than it keeps, and the picture has fractions.
    for strategy, total in zip(["ddp", "zero-even"], map(int, drawn), strict=True):
        result = on_four[strategy]
        assert (result["dtype"], result["master_dtype"]) == ("bfloat16", "float32")
        assert result["ledger_bytes"] == total * result["numel"]
        for held in result["held_bytes"]:
            assert held["predicted"] == held["measured"] == pytest.approx(result["ledger_bytes"], rel=0.005)
    assert [len(result["held_bytes"]) for result in on_four.values()] == [4, 4]
    _, rows = printed(tmp_path / "one.json", "--ranks", "1")
    assert rows == [["ddp", "16", "16.000", "16.000"], ["zero-even", "16", "16.000", "16.000"]]


def resumed_losses(tmp_path: Path, saving: TrainConfig, strategies: Iterable[str]) -> set[float]:
    """The final losses of a run that is saved after three steps and goes on under each strategy."""
    file, kept = tmp_path / "deeper" / "run.pt", tmp_path / "kept.pt"
    saving = replace(saving, checkpoint=str(file))
    ranks.run(train, 2, replace(saving, steps=3))
    file.rename(kept)
    losses = set()
    for strategy in strategies:
        shutil.copy(kept, file)  # a run writes over what it was resumed from
        losses.add(final_loss(replace(saving, strategy=strategy, resume=True), 2))
    assert [path.name for path in file.parent.iterdir()] == ["run.pt"]
    return losses


def test_masters_are_saved_and_go_on_under_another_strategy(tmp_path: Path) -> None:
    saving = replace(WITH_MASTERS, strategy="zero-even")
    assert resumed_losses(tmp_path, saving, CAN_KEEP_MASTERS) == {final_loss(WITH_MASTERS, 2)}


def test_a_checkpoint_with_masters_is_refused_by_a_run_without(tmp_path: Path) -> None:
    saving = replace(WITH_MASTERS, steps=3, checkpoint=str(tmp_path / "run.pt"))
    ranks.run(train, 2, saving)
    for then, message in (
        (IN_16, "written with masters: go on with master_dtype float32"),
        (SMALL, "not of .*'dtype': 'float32'"),
    ):
        with pytest.raises(ranks.RankError, match=message):
            ranks.run(train, 2, replace(then, checkpoint=saving.checkpoint, resume=True))


# ---------------------------------------------------------------------------------- recipes, and what is seen


def in_groups_of_two() -> None:
    trainable(recipe("zero-2", shard_group=2), GPT(SMALL.model))


def test_ranks_that_fill_no_whole_group_are_refused() -> None:
    with pytest.raises(
        ranks.RankError, match="3 ranks cannot be divided into groups of 2 that share the state"
    ):
        ranks.run(in_groups_of_two, 3)


def test_training_learns() -> None:
    measured = ranks.run(train, 2, replace(SMALL, steps=60, batch_size=8))[0]
    assert measured.losses[-1] < measured.losses[0] - 1.5


def test_the_last_loss_is_that_of_passages_that_were_not_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    text = language_reference()
    without = text._replace(training=text.training[:0])
    monkeypatch.setattr("zero_ref.lab.train.language_reference", lambda: without)
    assert held_out_loss(GPT(SMALL.model), SMALL, batches=1) > 0


def profiled_step(strategy: str) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """A step's calls as our recorders and as torch's profiler see them: (operation, bytes).

    A broadcast on so few ranks of Gloo is a message from its owner to each: here to the one other rank.
    """
    config = replace(SMALL, strategy=strategy)
    model = GPT(config.model)
    ddp = DistributedDataParallel(model)
    optimizer = make_optimizer(config.recipe, model)
    reductions = meter.DDPRecorder(ddp)
    text, rank = language_reference().training, dist.get_rank()
    tokens, targets = batch(text, config.model, 2, seed=0, step=0, rank=rank)
    for _ in range(3):
        optimizer.zero_grad()
        reductions.calls.clear()
        with (
            torch.profiler.profile(record_shapes=True) as profile,
            meter.recording(optimizer.collectives) as calls,  # type: ignore[attr-defined]
        ):
            ddp(tokens, targets).backward()
            optimizer.step()
    itemsize = torch.float32.itemsize
    seen = [
        (event.name.removeprefix("gloo:"), torch.Size(event.input_shapes[0]).numel() * itemsize)
        for event in profile.events()
        if event.name.startswith("gloo:")
    ]
    ours = [(call.op, call.nbytes) for call in reductions.calls]
    ours += [({True: "send", False: "recv"}[call.peer == rank], call.nbytes) for call in calls]
    assert {call.op for call in calls} == {"broadcast"}
    return ours, seen


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")  # torch 2.11, for any profile
def test_the_recorder_sees_what_torch_s_profiler_sees() -> None:
    for recorded, seen in ranks.run(profiled_step, 2, "zero-even"):
        assert recorded
        # DDP reduces in the background: there, its reductions and our broadcasts may be in another order.
        assert sorted(seen) == sorted(recorded)


def test_a_run_resumed_under_another_strategy_ends_as_if_never_stopped(tmp_path: Path) -> None:
    saving = replace(SMALL, strategy="zero-bucket")
    strategies = TRAINED.keys() - {"local-sgd", "zero-3-stair"}
    assert resumed_losses(tmp_path, saving, strategies) == {final_loss(replace(SMALL, strategy="ddp"), 2)}


def test_a_run_resumed_on_fewer_ranks_goes_on(tmp_path: Path) -> None:
    saving = replace(SMALL, strategy="zero-even", steps=3, checkpoint=str(tmp_path / "run.pt"))
    ranks.run(train, 4, saving)
    # Other ranks read other passages, so the loss is another, but not by much.
    unbroken = final_loss(replace(SMALL, strategy="ddp"), 2)
    assert abs(final_loss(replace(saving, strategy="zero", steps=6, resume=True), 2) - unbroken) < 0.1


def test_saving_on_the_way_changes_neither_the_run_nor_what_is_measured(tmp_path: Path) -> None:
    config = replace(SMALL, strategy="zero", checkpoint=str(tmp_path / "run.pt"), checkpoint_every=2)
    plain = ranks.run(train, 2, replace(SMALL, strategy="zero"))
    saving = ranks.run(train, 2, config)
    assert saving[0].held_out_loss == plain[0].held_out_loss
    assert saving[0].calls == plain[0].calls


def test_a_truncated_checkpoint_is_refused_on_every_rank(tmp_path: Path) -> None:
    file = tmp_path / "run.pt"
    config = replace(SMALL, checkpoint=str(file))
    ranks.run(train, 2, config)
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(
        ranks.RankError, match=r"run\.pt is no checkpoint of this program, or damaged"
    ) as error:
        ranks.run(train, 2, replace(config, resume=True))
    assert str(error.value).count("damaged") >= 2, "each rank says so"


def damaged_on_rank_1(config: TrainConfig, folder: str) -> None:
    path = Path(folder, f"{dist.get_rank()}.pt")
    path.write_bytes(Path(str(config.checkpoint)).read_bytes()[: 5000 if dist.get_rank() == 1 else None])
    train(replace(config, steps=config.steps + 2, checkpoint=str(path), resume=True))


def test_a_checkpoint_damaged_for_one_rank_is_refused_by_all(tmp_path: Path) -> None:
    config = replace(SMALL, checkpoint=str(tmp_path / "run.pt"))
    ranks.run(train, 2, config)
    with pytest.raises(ranks.RankError, match="rank 1 could not read the checkpoint"):
        ranks.run(damaged_on_rank_1, 2, config, str(tmp_path))


def test_a_checkpoint_of_another_size_is_refused(tmp_path: Path) -> None:
    config = replace(SMALL, checkpoint=str(tmp_path / "run.pt"))
    ranks.run(train, 2, config)
    larger = replace(config, model=GPTConfig(layers=3, heads=2, width=32, context=16), resume=True)
    with pytest.raises(ranks.RankError, match="holds a model of"):
        ranks.run(train, 2, larger)


def test_a_run_that_has_too_little_left_to_do_says_how_many_steps_to_ask_for(tmp_path: Path) -> None:
    config = replace(SMALL, checkpoint=str(tmp_path / "run.pt"))
    ranks.run(train, 2, config)
    for steps in (4, 7):
        with pytest.raises(ranks.RankError, match=f"6 steps; {steps} were asked for.* ask for 8 or more"):
            ranks.run(train, 2, replace(config, steps=steps, resume=True))
    assert len(ranks.run(train, 2, replace(config, steps=8, resume=True))[0].losses) == 2


def test_an_interrupted_write_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    file = tmp_path / "run.pt"
    config = replace(SMALL, checkpoint=str(file))
    ranks.run(train, 2, config)
    before = file.read_bytes()
    (tmp_path / "run.pt.part").mkdir()  # where the next one would be written: it cannot be
    with pytest.raises(ranks.RankError, match=r"could not write the checkpoint|Is a directory"):
        ranks.run(train, 2, config)
    assert file.read_bytes() == before


# ------------------------------------------------------------------------------------------- command lines


def small_arguments() -> list[str]:
    size = SMALL.model
    return [
        *f"--steps {SMALL.steps} --batch-size {SMALL.batch_size} --layers {size.layers}".split(),
        *f"--heads {size.heads} --width {size.width} --context {size.context}".split(),
    ]


def test_the_command_compares_strategies_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    names = [word for strategy in TRAINED for word in ("--strategy", strategy)]
    # Of no other strategy than zero-2 are these options.
    of_zero_2 = ["--overlap", "in-forward", "--shard-group", "1"]
    assert main(["train", "--ranks", "2", *names, *of_zero_2, *small_arguments(), "--json", str(file)]) == 0
    assert "predicted | measured" in capsys.readouterr().out
    strategies = json.loads(file.read_text())["strategies"]
    titles = {"zero-2": "zero-2, in forward, groups of 1"}
    assert list(strategies) == [titles.get(name, name) for name in TRAINED]
    for result in strategies.values():
        for quantity in ("state_bytes_max", "collectives", "payload_bytes"):
            assert result[quantity]["predicted"] == result[quantity]["measured"]
            assert result[quantity]["measured"] > 0 or result["strategy"] == "local-sgd"
        off = abs(result["final_loss"] / strategies["ddp"]["final_loss"] - 1)
        assert off <= (result["loss_tolerance"] or 1)


def test_the_demo_writes_its_pictures_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--ranks", "2", "--out", str(tmp_path), *small_arguments()]) == 0
    assert "All 40 predictions equal their measurement" in capsys.readouterr().out
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {
        *("index.html", "outcome.json", "memory.png", "losses.png", "predicted-measured.png"),
        *("shards-sorted-greedy.png", "shards-even.png"),
    }


def test_a_wrong_prediction_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = predict

    def wrong(config: TrainConfig, world_size: int) -> object:
        plan = right(config, world_size)
        return replace(plan, operations=plan.operations[:-1])

    monkeypatch.setattr("zero_ref.lab.compare.predict", wrong)
    assert main(["train", "--ranks", "2", *small_arguments()]) == 1
    assert "zero-bucket: collectives predicted 2, measured 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "1"], "--steps must be at least 2"),
        (["--steps", "4", "--resume"], "need the name of a checkpoint file"),
        (["--steps", "4", "--width", "30"], "width 30 is not a multiple of heads 4"),
        (["--strategy", "ddp", "--strategy", "zero", "--checkpoint", "x"], "give one --strategy"),
        (["--strategy", "zero-3-stair", "--checkpoint", "x"], "writes no checkpoint"),
        (["--steps", "4", "--checkpoint", "absent.pt", "--resume"], "there is no file absent.pt yet"),
        (["--width", "65536", "--layers", "1000"], "and this machine has"),
        (
            ["--strategy", "zero-2", "--shard-group", "3", "--ranks", "4"],
            "4 ranks cannot be divided into groups",
        ),
        (["--strategy", "zero", "--shard-group", "2"], "shard_group= is for strategies without DDP"),
        (["--strategy", "zero", "--overlap", "in-forward"], "not 'in_forward': it has DDP"),
        (["--strategy", "zero-2", "--overlap", "interleaved"], "not 'interleaved': it has no DDP"),
        (["--optimizer", "nowhere.py"], "--optimizer: there is no file nowhere.py"),
        (["--optimizer", "my_zero.py", "--dry-run"], "my_zero.py is none: leave --optimizer out"),
        (["--optimizer", __file__, "--checkpoint", "x"], "give one --strategy"),
        (["--master-dtype", "float32"], "and this one is in float32: choose the dtype bfloat16"),
        (
            [
                *("--dtype", "bfloat16", "--master-dtype", "float32"),
                "--strategy",
                "zero",
                "--strategy",
                "zero-3",
            ],
            "strategy 'zero-3' keeps no masters here",
        ),
    ],
)
def test_mistakes_are_told_without_a_traceback_of_this_program(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *arguments]) != 0
    assert message in capsys.readouterr().err


MASTERS = ["--dtype", "bfloat16", "--master-dtype", "float32"]


@pytest.mark.parametrize(
    ("stair", "options", "sent"),
    [
        ("owners", [], {"all_reduce", "broadcast"}),
        ("checkpoint", MASTERS, {"reduce", "broadcast"}),
        pytest.param("overlap", [], {"all_reduce", "broadcast"}, marks=pytest.mark.thorough),
        pytest.param("shards", [], {"reduce", "broadcast"}, marks=pytest.mark.thorough),
    ],
)
def test_the_reader_s_own_optimizer_trains_as_ddp_does(
    stair: str, options: list[str], sent: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, own = tmp_path / "out.json", tmp_path / "my_zero.py"
    own.write_text(answer(stair))
    words = ["--optimizer", str(own), "--json", str(file), *options, *small_arguments()]
    assert main(["train", "--ranks", "2", *words]) == 0
    assert f"{own.name}: its state" in capsys.readouterr().out
    strategies = json.loads(file.read_text())["strategies"]
    assert list(strategies) == ["ddp", own.name]
    mine = strategies[own.name]
    assert mine["final_loss"] == strategies["ddp"]["final_loss"], "two terms: the same sum in any order"
    if stair in ("owners", "overlap"):
        assert mine["state_bytes_max"]["predicted"] == mine["state_bytes_max"]["measured"]
    else:  # equal shares
        assert mine["state_bytes_max"]["predicted"] is None
    assert mine["state_bytes_max"]["measured"] < 0.6 * strategies["ddp"]["state_bytes_max"]["measured"]
    assert mine["payload_bytes"]["predicted"] is None
    config = replace(SMALL, strategy=own.name, own=str(own))
    if not options:
        assert {call.op for call in ranks.run(train, 2, config)[0].calls} == sent


def test_an_own_optimizer_that_saves_nothing_fails_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = "[self.params[number] for number in self.mine]"
    (tmp_path / "my_zero.py").write_text(answer("owners").replace(given, "self.params"))
    assert main(["train", "--optimizer", str(tmp_path / "my_zero.py"), *small_arguments()]) == 1
    assert "my_zero.py: state_bytes_max predicted" in capsys.readouterr().err


def test_an_own_optimizer_whose_shares_are_unequal_fails_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_zero.py").write_text(answer("shards").replace("-(-", "2 + ("))
    assert main(["train", "--optimizer", str(tmp_path / "my_zero.py"), *small_arguments()]) == 1
    assert "an equal share of" in capsys.readouterr().err


def test_what_an_own_optimizer_raises_is_shown_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_zero.py").write_text(
        "class MyZero:\n    def __init__(self, *args, **options):\n        oops\n"
    )
    assert main(["train", "--optimizer", str(tmp_path / "my_zero.py"), *small_arguments()]) == 1
    assert re.search(r'my_zero.py", line 3, in __init__\n +oops', capsys.readouterr().err)


def test_without_torchrun_the_module_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from zero_ref.lab.train import main as torchrun_main

    monkeypatch.delenv("RANK", raising=False)
    assert torchrun_main([]) == 2
    assert "torchrun" in capsys.readouterr().err


def test_torchrun_s_words_are_checked_before_the_ranks_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from zero_ref.lab.train import main as torchrun_main

    monkeypatch.setenv("RANK", "0")  # and nothing else: to meet would fail
    for words, message in (
        (["--heads", "3"], "width 128 is not a multiple of heads 3"),
        (["--context", "0"], "--context: it must be at least 1, got 0"),
        (["--resume", "--checkpoint", str(tmp_path / "none")], "--resume: there is no file"),
        (["--checkpoint", str(tmp_path)], "cannot be written: it is a folder"),
    ):
        try:
            code = torchrun_main(words)
        except SystemExit as ended:
            code = int(str(ended.code))
        assert code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("torchrun -m zero_ref.lab.train: ")
        assert message in line


@pytest.mark.parametrize("local_rank", [0, 1])
def test_torchrun_s_ranks_are_placed_as_those_of_lab_ranks(
    local_rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a machine with two accelerators that are only told of, up to where the ranks would meet."""
    from zero_ref.comm import devices
    from zero_ref.lab.train import main as torchrun_main

    used: list[torch.device] = []
    met: list[tuple[str, torch.device | None]] = []

    def meet(backend: str, device_id: torch.device | None) -> None:
        met.append((backend, device_id))
        raise InterruptedError

    monkeypatch.setattr(devices, "accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(devices, "accelerator_count", lambda: 2)
    monkeypatch.setattr(devices, "own_backend", lambda: "nccl")
    monkeypatch.setattr(devices, "name_of", lambda device: "NVIDIA H100")
    monkeypatch.setattr(devices, "use", used.append)
    monkeypatch.setattr(dist, "init_process_group", meet)
    mine = torch.device("cuda", local_rank)
    for ranks_here, expected in ((2, ("nccl", mine)), (3, ("gloo", None))):
        for name, value in (
            ("LOCAL_RANK", local_rank),
            ("RANK", local_rank),
            ("LOCAL_WORLD_SIZE", ranks_here),
        ):
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("ZERO_REF_DEVICE", "")
        with pytest.raises(InterruptedError):
            torchrun_main([])
        assert (used.pop(), met.pop()) == (mine, expected)
        assert os.environ["ZERO_REF_DEVICE"] == str(mine)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == (2 if local_rank == 0 else 0)
    assert not said or said[1].endswith("3 ranks: Gloo, sharing 2 NVIDIA H100 (cuda:0, cuda:1)")


def test_torchrun_s_ranks_refuse_a_device_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the second of two machines, whose first rank alone says so."""
    from zero_ref.lab.train import main as torchrun_main

    monkeypatch.setenv("ZERO_REF_DEVICE", "abacus")
    said = []
    for rank, local_rank in ((2, 0), (3, 1)):
        for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank), ("LOCAL_WORLD_SIZE", 2)):
            monkeypatch.setenv(name, str(value))
        assert torchrun_main([]) == 2
        said.append(capsys.readouterr().err)
    assert "ZERO_REF_DEVICE is 'abacus'" in said[0]
    assert said[1] == ""


@pytest.mark.parametrize("words", [["--heads", "3"], ["--steps", "none"], ["--config", "absent"], ["--help"]])
def test_what_all_of_torchrun_s_ranks_would_say_is_said_once(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from zero_ref.lab.train import main as torchrun_main

    said = []
    for rank in range(3):
        for name in ("RANK", "LOCAL_RANK"):
            monkeypatch.setenv(name, str(rank))
        try:
            code = torchrun_main(words)
        except SystemExit as ended:
            code = int(str(ended.code))
        assert code == (0 if words == ["--help"] else 2)
        said.append("".join(capsys.readouterr()))
    assert said[0]
    assert said[1:] == ["", ""]


def test_ctrl_c_ends_a_rank_of_torchrun_with_one_line_and_code_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from zero_ref.lab.train import main as torchrun_main

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("ZERO_REF_DEVICE", "cpu")
    monkeypatch.setattr(dist, "init_process_group", interrupted)
    for rank, line in (("0", "torchrun -m zero_ref.lab.train: interrupted"), ("1", "")):
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", "2")):
            monkeypatch.setenv(name, value)
        assert torchrun_main([]) == 130
        assert capsys.readouterr().err.rpartition("CPU\n")[2].strip() == line


def test_a_wrong_prediction_fails_a_rank_of_torchrun_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from zero_ref.lab import train as module

    right = predict

    def wrong(config: TrainConfig, world_size: int) -> object:
        return replace(right(config, world_size), operations=())

    monkeypatch.setattr(module, "predict", wrong)
    of_one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**of_one, "ZERO_REF_DEVICE": "cpu"}.items():
        monkeypatch.setenv(name, value)
    meet = dist.init_process_group

    def meet_in_a_file(backend: str, **_: object) -> None:
        meet(backend, init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)

    monkeypatch.setattr(dist, "init_process_group", meet_in_a_file)
    assert module.main([*small_arguments(), "--strategy", "ddp"]) == 1
    assert "ddp: collectives predicted 0, measured 1" in capsys.readouterr().err


def test_a_quiet_console_shows_nothing_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[object] = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    compare(("zero",), SMALL, 1, Console(file=StringIO(), force_jupyter=True))
    assert shown, "elsewhere a notebook has a bar"
    shown.clear()
    compare(("zero",), SMALL, 1, Console(quiet=True, force_jupyter=True))
    assert shown == []


@pytest.mark.thorough
def test_ctrl_c_ends_a_command_with_one_line_and_its_ranks(tmp_path: Path) -> None:
    """In a session of its own, as a terminal would have it: the signal reaches all processes of the group."""
    file = tmp_path / "run.pt"
    command = [sys.executable, "-m", "zero_ref.cli", "train", "--ranks", "2", *small_arguments()]
    command += ["--steps", "10000000", "--checkpoint", str(file), "--checkpoint-every", "2"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        while not file.exists():  # the ranks have met and trained
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=300)
        assert process.returncode == 130
        assert said == "zero-ref train: interrupted\n"
        deadline = time.monotonic() + 300  # the server that forked the ranks ends when it notices
        while time.monotonic() < deadline:
            try:
                os.killpg(process.pid, 0)
            except ProcessLookupError:
                break
            time.sleep(0.1)
        else:
            pytest.fail("a process of the command is left")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
