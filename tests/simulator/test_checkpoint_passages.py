"""The time and memory of saving and loading: by way, by machine, and beside published memory."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from zero_ref import cli
from zero_ref.lab.simulated_checkpoints import print_checkpoints, saved_by
from zero_ref.plan.partition import ParamSpec
from zero_ref.plan.rules import even, sorted_greedy
from zero_ref.simulator.checkpoints import LOADS, SAVES, Passage, load, save
from zero_ref.simulator.cluster import cluster
from zero_ref.simulator.ledger import StateRule, state_rule
from zero_ref.simulator.models import MODELS
from zero_ref.simulator.saved import Saved
from zero_ref.simulator.scenario import Scenario

ROOT = Path(__file__).resolve().parents[2]
ADAM = state_rule("AdamW")
MASTERS = ADAM.with_master()
GIB = 2**30
H100, LAPTOP = cluster("h100-ib"), cluster("loopback")


def saved_of(numels: list[int], ranks: int, rule: StateRule = MASTERS, dtype: str = "bfloat16") -> Saved:
    return Saved(tuple(ParamSpec(numel, dtype) for numel in numels), even(numels, ranks), rule)


def all_of(saved: Saved, machine: str = "h100-ib") -> dict[str, Passage]:
    here = cluster(machine)
    saves = {way: save(way, saved, here) for way in SAVES}
    return saves | {f"load {way}": load(way, saved, here) for way in LOADS}


# ------------------------------------------------------------------------------------------ what is saved


def test_the_parts_of_all_ranks_are_the_file() -> None:
    saved = saved_of([4096, 100, 64, 7], 3)
    assert sum(saved.own_parameter_bytes) == saved.parameter_bytes == 2 * 4267
    # A parameter that is cut has a step count in each part.
    cut = sum(len(pieces) for pieces in saved.partition.slices_of_rank) - len(saved.params)
    assert (saved.state_bytes, cut) == (12 * 4267 + 4 * 4, 2)
    assert sum(saved.own_state_bytes) == saved.state_bytes + 4 * cut
    assert saved.file_bytes == 14 * 4267 + 16


def test_frozen_parameters_are_in_the_file_without_state() -> None:
    params = (ParamSpec(1000), ParamSpec(500, trainable=False))
    saved = Saved(params, sorted_greedy(params, 2), ADAM)
    assert (saved.parameter_bytes, saved.state_bytes) == (6000, 8004)
    assert saved.of_rank == ((4000, 4, 8000, 8000), (2000, 0, 0, 0))


# ------------------------------------------------------------------------------------------------- ways


def test_an_unknown_way_is_answered_with_the_known_ones() -> None:
    saved = saved_of([64], 1)
    with pytest.raises(ValueError, match=r"way to save.*'gathered'.*consolidated"):
        save("gathered", saved, H100)
    with pytest.raises(ValueError, match=r"way to load.*'gathered'.*in place"):
        load("gathered", saved, H100)


def test_rank_0_alone_holds_the_gathered_whole_and_no_rank_does_in_a_sharded_save() -> None:
    saved = saved_of([2**24, 2**20], 8)
    whole, parts = save("consolidated", saved, H100), save("sharded", saved, H100)
    assert whole.host_bytes[0] == saved.state_bytes + 2 * 2**24
    assert max(whole.host_bytes[1:]) == 0
    # The largest part of a tensor: a master of 4 bytes for each of 1/8 of all elements.
    assert max(parts.host_bytes) == 4 * (2**21 + 2**17)
    assert sum(parts.disk_bytes) == saved.file_bytes + 4 * 7  # 7 cuts


def test_loading_the_one_file_takes_a_whole_of_it_for_each_rank_of_a_node_but_one_reads_it() -> None:
    saved = saved_of([2**24], 16)
    passage = load("whole", saved, H100)
    assert passage.host_bytes_of_node(8) == 8 * (saved.file_bytes + saved.own_state_bytes[0])
    assert [rank for rank, read in enumerate(passage.disk_bytes) if read] == [0, 8]
    assert load("whole, mapped", saved, H100).host_bytes_of_node(8) == 8 * saved.own_state_bytes[0]


def test_a_load_without_a_copy_copies_only_what_is_cut() -> None:
    numels = [256, 256, 256]
    copied = {}
    for ranks in (2, 3):
        saved = saved_of(numels, ranks)
        copied[ranks] = [nbytes - saved.file_bytes for nbytes in _host("whole, without a copy", saved)]
    assert copied == {2: [12 * 128 + 8, 12 * 128 + 8], 3: [4, 4, 4]}


def _host(way: str, saved: Saved) -> tuple[int, ...]:
    return load(way, saved, H100).host_bytes


@pytest.mark.parametrize("way", list(SAVES))
def test_where_the_device_is_the_processor_nothing_is_on_a_device_or_crosses_to_it(way: str) -> None:
    passage = save(way, saved_of([2**20, 64], 4, ADAM, "float32"), LAPTOP)
    assert (max(passage.device_bytes), passage.ms["host link"]) == (0, 0)


# --------------------------------------------------------------------------------------------- machines


def test_a_time_that_is_not_known_is_none_and_so_is_the_sum() -> None:
    saved = saved_of([2**20], 4)
    passage = save("sharded", saved, replace(H100, disk_gb_per_s=None))
    assert (passage.ms["storage"], passage.total_ms) == (None, None)
    known = save("sharded", saved, H100)
    assert known.total_ms == sum(ms for ms in known.ms.values() if ms is not None)


def test_twice_the_rate_of_the_storage_halves_its_time_and_no_other() -> None:
    saved = saved_of([2**24], 16)
    assert H100.disk_gb_per_s is not None
    for way, slow in all_of(saved).items():
        twice = replace(H100, disk_gb_per_s=2 * H100.disk_gb_per_s)
        name = way.removeprefix("load ")
        fast = (save if name == way else load)(name, saved, twice)
        assert slow.ms["storage"] == pytest.approx(2 * (fast.ms["storage"] or 0)), way
        assert {**slow.ms, "storage": None} == {**fast.ms, "storage": None}, way


# -------------------------------------------------------------------------------- what others published

# Megatron-LM's pull request 7288, https://github.com/NVIDIA/Megatron-LM/pull/7288, lets its optimizer load a
# sharded checkpoint in place. Before, the state was made again beside what was read. Its review (2026-09-22)
# and a comment (2026-09-14) say what ranks allocated at the peak, on an A6000 of 48 GB and on GB200.

REMAINDERS = StateRule(5, 0, itemsize=2)
"""Two moments of 4 bytes, and 2 bytes that make a 16-bit parameter a 32-bit one: 10 for each element."""


def on_one_rank(numel: int, rule: StateRule) -> Saved:
    """A rank that shares nothing that is saved, as one with experts of its own."""
    return Saved((ParamSpec(numel, "bfloat16"),), even([numel], 1), rule)


def test_on_an_a6000_2_4_billion_parameters_load_in_place_and_not_rebuilt() -> None:
    numel, memory = 2_400_000_000, 48 * GIB
    peaks = {}
    for rule in (REMAINDERS, MASTERS):
        saved = on_one_rank(numel, rule)
        for way in ("in place", "rebuilt"):
            peaks[way, rule] = 2 * numel + load(way, saved, H100).device_bytes[0]
    # Published: 27 to 32 GiB, of several kinds of state. These two have the least and the most.
    in_place = [round(peaks["in place", rule] / GIB, 1) for rule in (REMAINDERS, MASTERS)]
    assert in_place == [26.8, 31.3]
    least = min(peaks["rebuilt", rule] for rule in (REMAINDERS, MASTERS))
    assert (round(least / GIB, 1), least > memory) == (49.2, True)  # published: it does not fit


def test_on_gb200_loading_in_place_saves_one_state_of_the_rank_as_published() -> None:
    experts = round(22.5 * GIB / 10)  # 22.5 GiB of a rank's state are of experts
    published = {"rebuilt": 68.6, "in place": 44.3}
    # What is saved is one state. So what is not of experts follows, and is no prediction.
    dense = round((published["rebuilt"] - published["in place"]) * GIB / 10) - experts
    saved = on_one_rank(experts + dense, REMAINDERS)
    # Parameters of 2 bytes and gradients of 4 are supposed. Four ranks share the state of the dense part.
    held = 6 * (experts + 4 * dense)
    foreseen = {way: (held + load(way, saved, H100).device_bytes[0]) / GIB for way in published}
    assert {way: round(gib, 1) for way, gib in foreseen.items()} == {"rebuilt": 66.4, "in place": 42.1}
    assert max(abs(foreseen[way] / gib - 1) for way, gib in published.items()) < 0.051


# --------------------------------------------------------------------------------------------- command

SIMULATE = ["simulate", "--model", "gpt2", "--ranks", "16", "--checkpoint"]


def test_the_command_prints_what_the_functions_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SIMULATE, "--compare", "zero-2", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)["checkpoints"]
    assert list(printed) == ["zero-even", "zero-2"]
    scenario = Scenario(MODELS["gpt2"], H100, 16)  # two nodes
    for strategy, values in printed.items():
        saved = saved_by(scenario, strategy)
        assert saved.rule == MASTERS
        assert list(values["save"]) == list(SAVES)
        assert list(values["load"]) == list(LOADS)
        for name, function in (("save", save), ("load", load)):
            for way, shown in values[name].items():
                passage = function(way, saved, H100)
                assert shown["device_bytes"] == max(passage.device_bytes)
                assert shown["host_bytes_of_node"] == passage.host_bytes_of_node(8)
                assert shown["total_ms"] == passage.total_ms


def test_the_table_fits_into_80_columns_and_says_what_is_supposed(capsys: pytest.CaptureFixture[str]) -> None:
    scenario = Scenario(MODELS["gpt2"], H100, 8)
    print_checkpoints(scenario, ["zero-even"], 80)
    table = capsys.readouterr().out
    shown = {line.strip().split("  ")[0] for line in table.splitlines() if line.startswith("  ")}
    assert shown >= {*SAVES, *LOADS}
    assert max(map(len, table.splitlines())) <= 80
    assert "10 GB/s for each node, which is supposed" in " ".join(table.split())
    own = replace(H100, name="ours", disk_gb_per_s=None)
    print_checkpoints(replace(scenario, cluster=own), ["zero-even"], 80)
    assert "storage with no known rate, then" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--compare", "ddp"], "Under ddp, with these options, elements have no owner."),
        (["--offload", "state"], "Leave out --offload"),
    ],
)
def test_what_cannot_be_said_of_a_checkpoint_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*SIMULATE, *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_too_many_pieces_to_count_are_refused_with_a_number_of_ranks_that_works() -> None:
    with pytest.raises(ValueError, match=r"zero-2 these are .* or more.* at most ([\d,]+) ranks") as error:
        saved_by(Scenario(MODELS["gpt2-xl"], H100, 2**14), "zero-2")
    most = int(re.search(r"at most ([\d,]+)", str(error.value))[1].replace(",", ""))  # type: ignore[index]
    assert saved_by(Scenario(MODELS["gpt2-xl"], H100, most), "zero-2").ranks == most


# ------------------------------------------------------------------------------------------------ page


def test_the_page_has_every_way() -> None:
    page = (ROOT / "book" / "api" / "checkpoints.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(.+)` \| (.+) \|$", page, flags=re.M))
    assert rows == SAVES | LOADS | {"sharded": LOADS["sharded"]}
    assert all(f"| {text} |" in page for text in (*SAVES.values(), *LOADS.values()))
