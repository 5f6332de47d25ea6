"""Sharded checkpoints on virtual ranks: whatever wrote them, training goes on like the unsharded run."""

from __future__ import annotations

import copy
import errno
import gc
import itertools
import json
import os
import re
import resource
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from library.saved import CountingFile, newest_complete
from library.training import (
    MODES,
    Run,
    Snapshot,
    Tangle,
    Wider,
    assert_same,
    assert_state_dicts_equal,
    caught,
    describe,
    of_several_dtypes,
    snapshot,
    train,
)
from torch import nn, optim

from zero_ref.comm.collectives import Collectives
from zero_ref.dropin.oss import OSS
from zero_ref.files import save_owner, shard_files, sharded
from zero_ref.files.saves import sealed
from zero_ref.files.shard_files import ShardWriter
from zero_ref.files.sharded import load_sharded, save_sharded, save_sharded_async
from zero_ref.lab import virtual
from zero_ref.optimizer.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zero_ref.plan.calls import Call
from zero_ref.plan.partition import Partition, Slice
from zero_ref.plan.rules import from_lists

TWO, FOUR = range(2), range(2, 4)
"""The steps before the checkpoint, and those after it."""


class Trainee:
    """A model and its optimizer on one rank."""

    def __init__(
        self,
        comm: Collectives,
        make_model: Any = Tangle,
        groups: Any = None,
        cls: Any = optim.AdamW,
        make: Any = ZeroRedundancyOptimizer,
        **options: Any,
    ) -> None:
        self.model: nn.Module = make_model()
        params = groups(self.model) if groups else self.model.parameters()
        self.optimizer = make(params, cls, comm, **options)

    def steps(self, steps: range) -> list[Snapshot]:
        return [snapshot(self.model) for _ in train(self.model, self.optimizer, steps)]

    def whole_state(self) -> dict[str, Any]:
        self.optimizer.consolidate_state_dict(to="all")
        return self.optimizer.state_dict()


def other_values(make_model: Any = Tangle) -> Callable[[], nn.Module]:
    """The model with values of its own, so that what is not loaded shows."""

    def make() -> nn.Module:
        model: nn.Module = make_model()
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(0.25)
        return model

    return make


def save_at(world_size: int, directory: Path, **options: Any) -> None:
    """Two steps, then a checkpoint."""

    def on_rank(comm: Collectives) -> None:
        trainee = Trainee(comm, **options)
        trainee.steps(TWO)
        save_sharded(trainee.optimizer, directory, notes={"iteration": 2})

    virtual.run(on_rank, world_size, timeout=120)


def resume_at(world_size: int, directory: Path, make_model: Any = Tangle, **options: Any) -> list[Any]:
    """From other values the checkpoint, its whole state, then two steps more; on each rank."""

    def on_rank(comm: Collectives) -> tuple[dict[str, Any], list[Snapshot]]:
        trainee = Trainee(comm, other_values(make_model), **options)
        assert load_sharded(trainee.optimizer, directory) == {"iteration": 2}
        return trainee.whole_state(), trainee.steps(FOUR)

    return virtual.run(on_rank, world_size, timeout=120)


def unsharded(*args: Any, **options: Any) -> tuple[dict[str, Any], list[Snapshot]]:
    """Return the plain optimizer's state after two steps, and the parameters after each of two more."""
    plain = Run(*args, **options)
    first, middle = plain.plain(TWO)
    return middle, plain.plain(FOUR, first[-1], middle)[0]


def assert_go_on(resumed: list[Any], expected: tuple[dict[str, Any], list[Snapshot]], label: str) -> None:
    """Each rank, with the whole state that it had at first and the parameters after each step."""
    for state, trained in resumed:
        assert_state_dicts_equal(state, expected[0])
        assert_same(trained, expected[1], label)


def saves_of(directory: Path) -> list[str]:
    """The names of the saves in a directory, beside which its owner has a mark."""
    return sorted(path.name for path in directory.glob("save-*"))


# ----------------------------------------------------------------------------- goes on like the unsharded run


def mixed_model() -> nn.Module:
    model = of_several_dtypes()
    model.norm.requires_grad_(False)
    return model


CASES: dict[str, dict[str, Any]] = {
    "amsgrad, several dtypes": {"make_model": mixed_model, "amsgrad": True},
    "ASGD": {"cls": optim.ASGD},
    "Adagrad, whose state is there from the start": {"cls": optim.Adagrad},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_saved_at_4_under_even_it_goes_on_at_3_under_sorted_greedy(
    tmp_path: Path, case: dict[str, Any]
) -> None:
    options = {key: value for key, value in case.items() if key not in ("cls", "make_model")}
    make_model = case.get("make_model", Tangle)
    expected = unsharded(case.get("cls", optim.AdamW), make_model=make_model, **options)
    save_at(4, tmp_path, partition="even", **case)
    assert_go_on(resume_at(3, tmp_path, partition="sorted_greedy", **case), expected, "resumed")


@pytest.mark.parametrize("saved_under", [1, 6, 9, 10], ids=lambda i: f"{describe(MODES[i][0])}-{MODES[i][1]}")
def test_between_all_partitions_with_and_without_bucket_views(tmp_path: Path, saved_under: int) -> None:
    expected = unsharded(optim.AdamW)
    partition, as_view = MODES[saved_under]
    save_at(3, tmp_path, partition=partition, parameters_as_bucket_view=as_view)
    for shift, world_size in ((3, 2), (6, 1), (9, 5)):
        partition, as_view = MODES[(saved_under + shift) % len(MODES)]
        options = {"partition": partition, "parameters_as_bucket_view": as_view}
        assert_go_on(
            resume_at(world_size, tmp_path, **options), expected, f"at {world_size} ranks, {options}"
        )


def test_a_rank_may_own_nothing_or_several_slices_of_one_parameter(tmp_path: Path) -> None:
    expected = unsharded(optim.AdamW)
    numels = [param.numel() for param in Tangle().parameters()]
    large = max(range(len(numels)), key=numels.__getitem__)
    others = tuple(Slice(i, 0, n) for i, n in enumerate(numels) if i != large)
    thirds = [Slice(large, start, min(start + 192, numels[large])) for start in range(0, numels[large], 192)]
    striped = Partition(tuple(numels), (tuple(thirds[::2]), tuple(sorted([*others, *thirds[1::2]]))))
    lone = from_lists(numels, [list(range(len(numels))), [], []])
    save_at(2, tmp_path / "striped", partition=striped)
    save_at(3, tmp_path / "lone", partition=lone)
    for directory, world_size, partition in (("striped", 3, lone), ("lone", 2, striped)):
        assert_go_on(resume_at(world_size, tmp_path / directory, partition=partition), expected, directory)


def by_kind(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups with names; in the order of the dicts that the model's own order gives."""
    named = dict(model.named_parameters())
    matrices = {name: param for name, param in named.items() if param.ndim > 1}
    rest = {name: param for name, param in named.items() if param.ndim < 2}
    return [
        {"params": list(matrices.items()), "lr": torch.tensor(0.02), "betas": (0.8, 0.9)},
        {"params": list(rest.items()), "weight_decay": 0.0},
    ]


def by_kind_reversed(model: nn.Module) -> list[dict[str, Any]]:
    return [{**group, "params": group["params"][::-1]} for group in by_kind(model)]


def by_kind_unnamed(model: nn.Module) -> list[dict[str, Any]]:
    return [{**group, "params": [param for _, param in group["params"]]} for group in by_kind(model)]


@pytest.mark.parametrize("groups", [by_kind, by_kind_reversed, by_kind_unnamed])
def test_parameters_are_found_by_name_and_else_by_number_and_groups_keep_their_options(
    tmp_path: Path, groups: Any
) -> None:
    options: dict[str, Any] = {"foreach": False}
    middle, rest = unsharded(optim.AdamW, by_kind, **options)

    def save(comm: Collectives) -> None:
        trainee = Trainee(comm, groups=by_kind, partition="even", **options)
        trainee.steps(TWO)
        save_sharded(trainee.optimizer, tmp_path)

    def resume(comm: Collectives) -> tuple[list[Any], list[Snapshot]]:
        trainee = Trainee(comm, other_values(), groups, partition="even", **options)
        for group in trainee.optimizer.param_groups:
            group.update(lr=7.0, betas=(0.1, 0.2), weight_decay=3.0)
        trainee.steps(range(1))
        load_sharded(trainee.optimizer, tmp_path)
        return trainee.whole_state()["param_groups"], trainee.steps(FOUR)

    virtual.run(save, 3, timeout=120)
    for saved_groups, trained in virtual.run(resume, 2, timeout=120):
        assert_same(trained, rest, groups.__name__)
        for saved, wanted in zip(saved_groups, middle["param_groups"], strict=True):
            for key in set(wanted) - {"params", "param_names"}:
                assert type(saved[key]) is type(wanted[key])
                assert saved[key] == wanted[key], key


def test_another_memory_format_is_no_obstacle(tmp_path: Path) -> None:
    expected = unsharded(optim.AdamW, make_model=lambda: Tangle(channels_last=False))
    save_at(3, tmp_path, partition="even")  # channels_last
    for partition in ("even", "sorted_greedy"):
        assert_go_on(
            resume_at(2, tmp_path, lambda: Tangle(channels_last=False), partition=partition),
            expected,
            partition,
        )


@pytest.mark.parametrize(("cls", "options"), [(optim.Adafactor, {}), (optim.Muon, {"lr": 0.01})])
def test_state_of_other_shapes_than_the_parameters_is_kept_whole(
    tmp_path: Path, cls: Any, options: dict[str, Any]
) -> None:
    def matrices() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in ((8, 6), (6, 4), (4, 9))))
        generator = torch.Generator().manual_seed(0)
        for param in model.parameters():
            nn.init.normal_(param, generator=generator)
        return model

    expected = unsharded(cls, make_model=matrices, **options)
    save_at(3, tmp_path, make_model=matrices, cls=cls, **options)
    assert_go_on(resume_at(2, tmp_path, matrices, cls=cls, **options), expected, cls.__name__)


class Annotated(optim.SGD):
    """Keeps numbers, a text, None and a small tensor beside its buffers, as some optimizers do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    count = state.get("count", 0) + 1
                    state.update(count=count, scheme="plain", scale=None, ratio=float("inf"))
                    state["window"] = torch.full((2, 2), float(count))


def test_numbers_texts_none_and_small_tensors_are_kept(tmp_path: Path) -> None:
    expected = unsharded(Annotated, lr=0.1, momentum=0.5)
    assert expected[0]["state"][0]["count"] == 2
    save_at(3, tmp_path, cls=Annotated, lr=0.1, momentum=0.5, partition="even", elementwise=True)
    assert_go_on(
        resume_at(2, tmp_path, cls=Annotated, lr=0.1, momentum=0.5, partition="even", elementwise=True),
        expected,
        "annotated",
    )


def test_saved_before_the_first_step_it_starts_like_the_unsharded_run(tmp_path: Path) -> None:
    trained, _ = Run(optim.AdamW).plain(TWO)
    virtual.run(lambda comm: save_sharded(Trainee(comm).optimizer, tmp_path), 3, timeout=120)

    def resume(comm: Collectives) -> list[Snapshot]:
        trainee = Trainee(comm, other_values(), partition="even")
        trainee.steps(FOUR)  # state that the checkpoint does not have has to go
        assert load_sharded(trainee.optimizer, tmp_path) == {}
        return trainee.steps(TWO)

    for ours in virtual.run(resume, 2, timeout=120):
        assert_same(ours, trained, "from the start")


def test_a_checkpoint_may_be_loaded_twice_and_later_steps_do_not_change_it(tmp_path: Path) -> None:
    save_at(2, tmp_path)

    def twice(comm: Collectives) -> tuple[list[Snapshot], list[Snapshot]]:
        trainee = Trainee(comm, other_values(), partition="even")
        load_sharded(trainee.optimizer, tmp_path)
        once = trainee.steps(FOUR)
        load_sharded(trainee.optimizer, tmp_path)
        return once, trainee.steps(FOUR)

    for once, again in virtual.run(twice, 3, timeout=120):
        assert_same(again, once, "the second time")


def test_what_was_gathered_before_loading_is_forgotten(tmp_path: Path) -> None:
    save_at(2, tmp_path)

    def on_rank(comm: Collectives) -> None:
        trainee = Trainee(comm)
        trainee.whole_state()
        load_sharded(trainee.optimizer, tmp_path)
        with pytest.raises(RuntimeError, match="has not been gathered"):
            trainee.optimizer.state_dict()
        assert trainee.optimizer.state == trainee.optimizer.optim.state

    virtual.run(on_rank, 2, timeout=120)


def test_parameters_that_have_moved_in_memory_are_saved_and_loaded_where_they_are(tmp_path: Path) -> None:
    trained, _ = Run(optim.AdamW).plain(range(4))

    def move(trainee: Trainee) -> None:
        for param in trainee.model.parameters():
            old = param.data
            param.data = old.clone(memory_format=torch.preserve_format)
            old.fill_(7)

    def on_rank(comm: Collectives) -> list[Snapshot]:
        trainee = Trainee(comm, partition="even")
        trainee.steps(TWO)
        move(trainee)
        save_sharded(trainee.optimizer, tmp_path)
        with torch.no_grad():
            for param in trainee.model.parameters():
                param.zero_()
        move(trainee)
        load_sharded(trainee.optimizer, tmp_path)
        return trainee.steps(FOUR)

    for ours in virtual.run(on_rank, 3, timeout=120):
        assert_same(ours, trained[2:], "moved")


def test_with_rounded_broadcasts_every_rank_gets_what_it_had(tmp_path: Path) -> None:
    options: dict[str, Any] = {"broadcast_dtype": torch.bfloat16, "make": OSS}

    def uninterrupted(comm: Collectives) -> list[Snapshot]:
        trainee = Trainee(comm, **options)
        trainee.steps(TWO)
        save_sharded(trainee.optimizer, tmp_path, notes={"iteration": 2})
        return [snapshot(trainee.model), *trainee.steps(FOUR)]

    def resumed(comm: Collectives) -> list[Snapshot]:
        trainee = Trainee(comm, other_values(), **options)
        load_sharded(trainee.optimizer, tmp_path)
        return [snapshot(trainee.model), *trainee.steps(FOUR)]

    expected = virtual.run(uninterrupted, 3, timeout=120)
    assert any(not a.equal(b) for a, b in zip(expected[0][0], expected[1][0], strict=True)), "rounding shows"
    for rank, ours in enumerate(virtual.run(resumed, 3, timeout=120)):
        assert_same(ours, expected[rank], f"rank {rank}")


# ---------------------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize("as_view", [False, True])
def test_parameters_are_whole_on_every_rank_the_frozen_ones_too_and_stay_where_they_are(
    tmp_path: Path, as_view: bool
) -> None:
    save_at(3, tmp_path, partition="even")
    expected = Run(optim.AdamW).plain(TWO)[0][-1]

    def load(comm: Collectives) -> Snapshot:
        trainee = Trainee(comm, other_values(), partition="even", parameters_as_bucket_view=as_view)
        params = list(trainee.model.parameters())
        before = [(id(p), p.data_ptr(), p.stride(), p._version) for p in params]
        load_sharded(trainee.optimizer, tmp_path)
        after = [(id(p), p.data_ptr(), p.stride(), p._version) for p in params]
        for (*where, version), (*where_now, version_now) in zip(before, after, strict=True):
            assert where == where_now
            assert version_now > version, "autograd is told"
        return snapshot(trainee.model)

    for ours in virtual.run(load, 2, timeout=120):
        assert_same([ours], [expected], "loaded")


def test_parameters_are_left_alone_if_asked_for(tmp_path: Path) -> None:
    def on_rank(comm: Collectives) -> None:
        trainee = Trainee(comm, partition="even")
        trainee.steps(TWO)
        save_sharded(trainee.optimizer, tmp_path / "all")
        save_sharded(trainee.optimizer, tmp_path / "state", parameters=False)
        sizes = [
            sum(path.stat().st_size for path in (tmp_path / kind).glob(f"*/shard-{comm.rank}-*.bin"))
            for kind in ("all", "state")
        ]
        assert sizes[0] - sizes[1] == 4 * trainee.optimizer.partition.loads[comm.rank]
        state = copy.deepcopy(trainee.whole_state())
        for kind in ("all", "state"):
            other = Trainee(comm, other_values())
            load_sharded(other.optimizer, tmp_path / kind, parameters=False)
            assert_same([snapshot(other.model)], [snapshot(other_values()())], "parameters")
            assert_state_dicts_equal(other.whole_state(), state)
        text = caught(lambda: load_sharded(other.optimizer, tmp_path / "state"))
        assert text.startswith("ValueError: the checkpoint has no values of parameter 0: it was saved with")

    virtual.run(on_rank, 2, timeout=120)


def test_each_rank_reads_the_bytes_that_it_owns_and_only_rank_0_all_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As the alignment of `even`: with blocks of the usual size each piece would be one.
    monkeypatch.setattr(shard_files, "BLOCK_NBYTES", 4 * 64)
    save_at(4, tmp_path, partition="even")
    opened: dict[int, dict[str, int]] = {}

    def counting(path: Path) -> CountingFile:
        return CountingFile(path, opened.setdefault(threading.get_ident(), {}))

    monkeypatch.setattr(shard_files, "open_regular", counting)
    tables_read: list[int] = []
    read = shard_files.read_sealed
    monkeypatch.setattr(
        shard_files, "read_sealed", lambda *args: (tables_read.append(threading.get_ident()), read(*args))[1]
    )

    def load(comm: Collectives) -> tuple[int, int, dict[str, int]]:
        trainee = Trainee(comm, other_values(), partition="even")
        load_sharded(trainee.optimizer, tmp_path)
        owned = trainee.optimizer.shard.owned
        elements = sum(own.piece.numel for own in owned)
        frozen = sum(own.piece.numel for own in owned if not own.param.requires_grad)
        numbers = sum(own.param.ndim == 0 for own in owned)  # the state of a scalar stands in the table
        nbytes = 4 * (3 * elements - 2 * frozen - 2 * numbers)
        return threading.get_ident(), nbytes, opened[threading.get_ident()]

    results = virtual.run(load, 5, timeout=120)
    assert set(tables_read) == {results[0][0]}
    assert len(tables_read) == 4
    for _, nbytes, read in results:
        assert sum(read.values()) == nbytes
        assert len(read) <= 2, "a fifth of the elements lies in at most two quarters"


# -------------------------------------------------------------------------------------------- what is refused


class WiderFrozen(Tangle):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(9), requires_grad=False)


def one_more(model: nn.Module) -> list[nn.Parameter]:
    return [*model.parameters(), nn.Parameter(torch.ones(2))]


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[:3]}, {"params": params[3:]}]


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "a shape with state": (
        {"make_model": Wider},
        r"for parameter 7 has shape \(8,\); the parameter has \(9,\)",
    ),
    "a shape without state": (
        {"make_model": WiderFrozen},
        r"the checkpoint's parameter 2 has shape \(8,\); this optimizer's parameter 2 has \(9,\)",
    ),
    "a parameter more": ({"groups": one_more}, r"groups of \[11\] parameters and this optimizer has \[12\]"),
    "other groups": ({"groups": two_groups}, r"groups of \[11\] parameters and this optimizer has \[3, 8\]"),
}


def state_of(optimizer: ZeroRedundancyOptimizer, model: nn.Module) -> Any:
    optimizer.consolidate_state_dict(to="all")
    return copy.deepcopy([optimizer.state_dict(), snapshot(model)])


def assert_refused(
    directory: Path, pattern: str, world_size: int = 3, kind: str | tuple[str, ...] = "", **options: Any
) -> None:
    """On all ranks, and nothing is changed: the state is that of before, and training goes on with it."""

    def on_rank(comm: Collectives) -> str:
        trainee = Trainee(comm, partition="even", **options)
        trainee.steps(TWO)
        before = state_of(trainee.optimizer, trainee.model)
        message = caught(lambda: load_sharded(trainee.optimizer, directory))
        after = state_of(trainee.optimizer, trainee.model)
        assert_state_dicts_equal(after[0], before[0])
        assert_same([after[1]], [before[1]], "parameters")
        trainee.steps(FOUR)
        return message

    for message in virtual.run(on_rank, world_size, timeout=120):
        assert re.search(pattern, message), message
        assert message.startswith(kind), message


@pytest.mark.parametrize(("other", "text"), OTHERS.values(), ids=OTHERS.keys())
def test_a_checkpoint_of_another_model_is_refused_on_all_ranks(
    tmp_path: Path, other: dict[str, Any], text: str
) -> None:
    save_at(2, tmp_path)
    assert_refused(tmp_path, text, kind="ValueError", **other)


def test_other_names_are_refused(tmp_path: Path) -> None:
    def renamed(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        return [(name.replace("up", "wide"), param) for name, param in model.named_parameters()]

    save_at(2, tmp_path, groups=lambda model: model.named_parameters())
    assert_refused(tmp_path, "'up.bias' is in one of them only", kind="ValueError", groups=renamed)


def edit(folder: Path, change: Callable[[dict[str, Any]], Any], rank: int = 0) -> None:
    """Change the contents of a table as somebody would who can compute checksums."""
    path = folder / f"shard-{rank}-of-2.json"
    table = json.loads(path.read_text())
    del table["sha256"]
    change(table["contents"])
    path.write_bytes(sealed(table))


def put(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda contents: contents.__setitem__(key, value)


def first_tensor(contents: dict[str, Any]) -> dict[str, Any]:
    line: dict[str, Any] = next(line for line in contents["state"] if "numel" in line)
    return line


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "table cut short": (
        lambda folder: os.truncate(folder / "shard-1-of-2.json", 99),
        r"shard-1-of-2\.json is",
    ),
    "data cut short": (
        lambda folder: os.truncate(folder / "shard-1-of-2.bin", 99),
        r"shard-1-of-2\.bin has 99 b",
    ),
    "data missing": (lambda folder: (folder / "shard-1-of-2.bin").unlink(), r"shard-1-of-2\.bin is missing"),
    "contents of rank 1": (lambda folder: edit(folder, dict.clear, 1), r"shard-1-of-2\.json is damaged"),
    "numbers of parameters": (
        lambda folder: edit(folder, lambda c: c["param_groups"][0]["params"].reverse()),
        r"shard-0-of-2\.json is damaged.* there are 11 parameters, but groups of \[10, 9",
    ),
    "strides": (
        lambda folder: edit(folder, lambda c: c["parameters"][3].update(strides=[1, 1])),
        r"shard-0-of-2\.json is damaged.*gaps or overlaps",
    ),
    "shape of a parameter": (
        lambda folder: edit(folder, lambda c: c["parameters"][3].update(shape=[13, 9], strides=[9, 1])),
        r"shard-0-of-2\.json is damaged.* parameters\.3 is stored as 104 elements",
    ),
    "dtype of state": (
        lambda folder: edit(folder, lambda c: first_tensor(c).update(dtype="float64")),
        r"is stored as \d+ elements of torch\.float32, and described as \d+ of torch\.float64",
    ),
    "state that is nowhere": (
        lambda folder: edit(folder, lambda c: first_tensor(c).update(key="elsewhere")),
        r"is damaged.*KeyError: 'state\.\d+\.elsewhere'",
    ),
    "state of a huge shape": (
        lambda folder: edit(folder, lambda c: first_tensor(c).update(shape=[10**6, 10**6])),
        r"and described as 1000000000000 of",
    ),
    "an option": (
        lambda folder: edit(folder, lambda c: c["param_groups"][0].update(lr={"run": "me"})),
        r"shard-0-of-2\.json is damaged",
    ),
    "notes": (lambda folder: edit(folder, put("notes", 7)), r"shard-0-of-2\.json is damaged"),
}


@pytest.mark.parametrize(("damage", "text"), DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_checkpoint_is_refused_on_all_ranks_with_the_name_of_the_file(
    tmp_path: Path, damage: Callable[[Path], Any], text: str
) -> None:
    save_at(2, tmp_path)
    damage(tmp_path / "save-00000001")
    assert_refused(tmp_path, text, kind="DamagedError")


def test_a_file_that_one_rank_cannot_read_makes_all_raise_and_leaves_all_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_at(2, tmp_path)
    read = shard_files.read_checked

    def refused(file: Any, *args: Any) -> None:
        if threading.current_thread() is second[0]:
            raise PermissionError(errno.EACCES, "Permission denied", str(file.name))
        read(file, *args)

    second: list[threading.Thread] = []
    monkeypatch.setattr(shard_files, "read_checked", refused)

    def on_rank(comm: Collectives) -> str:
        trainee = Trainee(comm, partition="even")
        trainee.steps(range(1))
        before = state_of(trainee.optimizer, trainee.model)
        if comm.rank == 1:
            second.append(threading.current_thread())
        comm.all_gather(torch.zeros(1))
        message = caught(lambda: load_sharded(trainee.optimizer, tmp_path))
        after = state_of(trainee.optimizer, trainee.model)
        assert_state_dicts_equal(after[0], before[0])
        assert_same([after[1]], [before[1]], "parameters")
        return message

    first, own, third = virtual.run(on_rank, 3, timeout=120)
    assert re.match(r"PermissionError: .*Permission denied: '.*save-00000001/shard-\d-of-2\.bin'", own)
    for rank, message in ((0, first), (2, third)):
        assert message.startswith(f"RuntimeError: rank {rank}: rank 1 could not read the checkpoint")
        assert own in message


def test_where_there_is_nothing_to_load_all_ranks_raise_alike(tmp_path: Path) -> None:
    assert_refused(tmp_path / "nowhere", "nowhere holds no complete", kind="FileNotFoundError")
    (tmp_path / "file").write_text("")
    assert_refused(tmp_path / "file", "file holds no complete sharded checkpoint", kind="FileNotFoundError")


def test_ranks_that_pass_other_arguments_are_told(tmp_path: Path) -> None:
    def on_rank(comm: Collectives) -> list[str]:
        optimizer = Trainee(comm).optimizer
        odd = comm.rank == 1
        return [
            caught(lambda: save_sharded(optimizer, tmp_path / ("b" if odd else "a"))),
            caught(lambda: save_sharded(optimizer, tmp_path, notes={"iteration": comm.rank})),
            caught(lambda: save_sharded(optimizer, tmp_path, parameters=odd)),
            caught(lambda: load_sharded(optimizer, tmp_path, parameters=odd)),
            caught(lambda: save_sharded(optimizer, tmp_path) if odd else load_sharded(optimizer, tmp_path)),
            caught(lambda: save_sharded(optimizer, tmp_path, notes={"when": {1, 2}} if odd else {})),
        ]

    for rank, messages in enumerate(virtual.run(on_rank, 2, timeout=120)):
        assert re.match(r"ValueError: ranks disagree.*rank 1 has \[directory .*/b\]", messages[0])
        assert 'rank 1 has [notes {"iteration": 1}]' in messages[1]
        assert "rank 1 has [parameters=True]" in messages[2]
        assert "rank 1 has [parameters=True]" in messages[3]
        assert "is to save a sharded checkpoint" in messages[4]
        assert "is to find a sharded checkpoint" in messages[4]
        assert "TypeError: notes must be what JSON can express: Object of type set" in messages[5]
        assert messages[5].startswith(
            "RuntimeError: rank 0: rank 1 could not save" if rank == 0 else "TypeError"
        )


def test_state_and_options_that_cannot_be_saved_are_named(tmp_path: Path) -> None:
    def on_rank(comm: Collectives) -> list[str]:
        trainee = Trainee(comm)
        trainee.steps(TWO)
        trainee.optimizer.param_groups[0]["schedule"] = print
        trainee.optimizer.current()
        option = caught(lambda: save_sharded(trainee.optimizer, tmp_path))
        del trainee.optimizer.param_groups[0]["schedule"]
        state = next(iter(trainee.optimizer.optim.state.values()))
        state["history"] = {1, 2}
        return [option, caught(lambda: save_sharded(trainee.optimizer, tmp_path))]

    for option, state in virtual.run(on_rank, 2, timeout=120):
        assert "the option 'schedule' of a parameter group holds a builtin_function_or_method" in option
        assert "is a set; only tensors, numbers, texts and None, and lists" in state


# ------------------------------------------------------------------------------- saves that come to no end


def save_again(directory: Path) -> tuple[list[str], str]:
    """A third save, of other values: what ranks say, and what a load then finds."""

    def on_rank(comm: Collectives) -> str:
        trainee = Trainee(comm)
        trainee.steps(range(4))
        return caught(lambda: save_sharded(trainee.optimizer, directory, notes={"iteration": 4}))

    def load(comm: Collectives) -> Any:
        trainee = Trainee(comm, other_values(), partition="even")
        notes = load_sharded(trainee.optimizer, directory)
        expected = Run(optim.AdamW).plain(range(notes["iteration"]))
        assert_state_dicts_equal(trainee.whole_state(), expected[1])
        assert_same([snapshot(trainee.model)], [expected[0][-1]], "loaded")
        return notes["iteration"]

    messages = virtual.run(on_rank, 3, timeout=120)
    return messages, virtual.run(load, 2, timeout=120)[0]


@pytest.mark.parametrize(("stage", "rank"), [("write_data", 2), ("finish", 0)])
def test_what_stops_one_rank_stops_all_and_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, rank: int
) -> None:
    save_at(3, tmp_path)
    original = getattr(ShardWriter, stage)

    def full(writer: ShardWriter, *args: Any) -> Any:
        if f"shard-{rank}-" in writer.table_path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(writer.table_path))
        return original(writer, *args)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, stage, full)
        messages, found = save_again(tmp_path)
    assert found == 2
    for other, message in enumerate(messages):
        cause = (
            f"OSError: [Errno 28] No space left on device: '{tmp_path}/save-00000002/shard-{rank}-of-3.json'"
        )
        if other == rank:
            assert message == cause
        else:
            start = f"RuntimeError: rank {other}: rank {rank} could not complete the checkpoint"
            assert message.startswith(start)
            assert cause in message
    assert saves_of(tmp_path) == ["save-00000001", "save-00000002"]
    assert save_again(tmp_path) == (["nothing"] * 3, 4)
    assert saves_of(tmp_path) == ["save-00000001", "save-00000003"], "what the failed save has left is gone"


def test_a_directory_that_cannot_be_made_makes_all_raise(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def on_rank(comm: Collectives) -> str:
        return caught(lambda: save_sharded(Trainee(comm).optimizer, tmp_path / "file" / "checkpoint"))

    first, second = virtual.run(on_rank, 2, timeout=120)
    assert first.startswith("NotADirectoryError")
    assert second.startswith(
        "RuntimeError: rank 1: rank 0 could not save a sharded checkpoint: NotADirectory"
    )


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_as_many_complete_saves_stay_as_are_to_be_kept(tmp_path: Path, keep: int) -> None:
    def on_rank(comm: Collectives) -> None:
        trainee = Trainee(comm)
        for number in range(1, 5):
            options = {} if keep == 2 else {"keep": keep}  # 2 is the default
            save = save_sharded if number % 2 else save_sharded_async
            save(trainee.optimizer, tmp_path, notes={"number": number}, **options)
        found = [
            load_sharded(trainee.optimizer, tmp_path, save=save)["number"]
            for save in (None, 4, "save-00000004", 5 - keep, f"save-{5 - keep:08d}")
        ]
        assert found == [4, 4, 4, 5 - keep, 5 - keep]
        message = caught(lambda: load_sharded(trainee.optimizer, tmp_path, save=4 - keep))
        assert re.match(rf"FileNotFoundError: .* has no save 'save-0000000{4 - keep}'", message)

    virtual.run(on_rank, 2, timeout=120)
    assert saves_of(tmp_path) == [f"save-{number:08d}" for number in range(5 - keep, 5)]
    assert len(os.listdir(tmp_path / "save-00000004")) == 5
    assert sorted(os.listdir(tmp_path))[:-keep] in ([], ["owner.json"])


# ------------------------------------------------------------------------------------------ in the background


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writing waits for it."""
    event = threading.Event()
    write = ShardWriter.write_data

    def held_back(writer: ShardWriter, *args: Any) -> Any:
        assert event.wait(120)
        return write(writer, *args)

    monkeypatch.setattr(ShardWriter, "write_data", held_back)
    yield event
    event.set()


def test_training_goes_on_while_the_state_of_before_is_written(tmp_path: Path, gate: threading.Event) -> None:
    middle, rest = unsharded(optim.AdamW)

    def on_rank(comm: Collectives) -> list[Snapshot]:
        trainee = Trainee(comm, partition="even")
        trainee.steps(TWO)
        calls: list[tuple[Call, int]] = []
        trainee.optimizer.collectives.observers.append(
            lambda call: calls.append((call, threading.get_ident()))
        )
        pending = save_sharded_async(trainee.optimizer, tmp_path, notes={"iteration": 2})
        after = trainee.steps(FOUR)
        for group in trainee.optimizer.param_groups:
            group["lr"] = 99.0
        assert not pending.done()
        with pytest.raises(FileNotFoundError):
            newest_complete(tmp_path)
        comm.all_gather(torch.zeros(1))
        gate.set()
        pending.wait()
        assert pending.done()
        pending.wait()
        assert {thread for _, thread in calls} == {threading.get_ident()}, "the background sends nothing"
        return after

    for ours in virtual.run(on_rank, 3, timeout=120):
        assert_same(ours, rest, "while saving")
    for state, ours in resume_at(2, tmp_path):
        assert_state_dicts_equal(state, middle)
        assert_same(ours, rest, "resumed")


def test_the_copies_are_freed_when_they_are_written(tmp_path: Path, gate: threading.Event) -> None:
    def on_rank(comm: Collectives) -> None:
        trainee = Trainee(comm)
        trainee.steps(TWO)
        staged: list[Any] = []
        slices = sharded.ranges_to_save

        def watched(*args: Any, **kwargs: Any) -> Any:
            tensors, lines = slices(*args, **kwargs)
            staged.extend(weakref.ref(piece) for of in tensors.values() for piece in of.pieces.values())
            return tensors, lines

        sharded.ranges_to_save = watched  # type: ignore[assignment]
        try:
            pending = save_sharded_async(trainee.optimizer, tmp_path)
        finally:
            sharded.ranges_to_save = slices  # type: ignore[assignment]
        assert staged
        assert all(ref() is not None for ref in staged)
        gate.set()
        deadline = time.monotonic() + 60  # nobody has to wait for the save
        while any(ref() is not None for ref in staged) and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.01)
        assert not [ref for ref in staged if ref() is not None]
        pending.wait()

    virtual.run(on_rank, 1, timeout=120)


def test_the_next_save_and_a_load_wait_for_the_one_in_the_background(
    tmp_path: Path, gate: threading.Event
) -> None:
    def on_rank(comm: Collectives) -> None:
        trainee = Trainee(comm)
        trainee.steps(range(1))
        save_sharded_async(trainee.optimizer, tmp_path, notes={"iteration": 1})
        trainee.steps(range(1, 2))
        threading.Timer(0.2, gate.set).start()
        second = save_sharded_async(trainee.optimizer, tmp_path, notes={"iteration": 2})
        assert newest_complete(tmp_path).number == 1
        assert load_sharded(trainee.optimizer, tmp_path) == {"iteration": 2}
        second.wait()

    virtual.run(on_rank, 2, timeout=120)
    assert saves_of(tmp_path) == ["save-00000001", "save-00000002"]


@pytest.mark.parametrize("how", ["wait", "save", "load"])
def test_what_fails_in_the_background_is_raised_on_all_ranks_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    save_at(2, tmp_path)
    finish = ShardWriter.finish
    failing = threading.Event()

    def full(writer: ShardWriter, *args: Any) -> None:
        if failing.is_set() and "shard-1-" in writer.table_path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(writer.table_path))
        finish(writer, *args)

    monkeypatch.setattr(ShardWriter, "finish", full)

    def on_rank(comm: Collectives) -> list[str]:
        trainee = Trainee(comm)
        trainee.steps(TWO)
        failing.set()
        pending = save_sharded_async(trainee.optimizer, tmp_path, notes={"iteration": 2})
        pending._writing.exception()
        comm.all_gather(torch.zeros(1))
        failing.clear()
        comm.all_gather(torch.zeros(1))
        calls: dict[str, Callable[[], Any]] = {
            "wait": pending.wait,
            "save": lambda: save_sharded(trainee.optimizer, tmp_path),
            "load": lambda: load_sharded(trainee.optimizer, tmp_path),
        }
        first = caught(calls[how])
        assert load_sharded(trainee.optimizer, tmp_path) == {"iteration": 2}, "the one before"
        return [first, caught(calls["save"]), caught(pending.wait)]

    first, second = virtual.run(on_rank, 2, timeout=120)
    assert re.match(r"RuntimeError: rank 0: rank 1 could not complete.* No space left", first[0])
    assert re.match(r"OSError: \[Errno 28\] No space left on device: '.*shard-1-of-2\.json'", second[0])
    assert first[1:] == second[1:] == ["nothing", "nothing"]
    assert saves_of(tmp_path) == ["save-00000001", "save-00000003"]


# ------------------------------------------------------------------------------------------ damage is found


def flip(path: Path, place: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[place // 8] ^= 1 << place % 8
    path.write_bytes(data)


DAMAGED_NEWEST: dict[str, Callable[[Path], Any]] = {
    "a table": lambda folder: flip(folder / "shard-1-of-2.json", 999),
    "data of one rank": lambda folder: flip(folder / "shard-1-of-2.bin", 99),
    "the mark": lambda folder: flip(folder / "save.json", 999),
    "no mark": lambda folder: (folder / "save.json").unlink(),
    "no data": lambda folder: (folder / "shard-0-of-2.bin").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGED_NEWEST.values(), ids=DAMAGED_NEWEST.keys())
def test_the_newest_intact_save_is_loaded_and_a_warning_says_what_was_skipped(
    tmp_path: Path, damage: Callable[[Path], Any]
) -> None:
    for _ in range(3):
        save_at(2, tmp_path, partition="even")
    assert saves_of(tmp_path) == ["save-00000002", "save-00000003"]
    damage(tmp_path / "save-00000003")

    def load(comm: Collectives) -> list[Any]:
        trainee = Trainee(comm, other_values(), partition="even")
        load_sharded(trainee.optimizer, tmp_path)
        named = caught(lambda: load_sharded(trainee.optimizer, tmp_path, save=3))
        assert load_sharded(trainee.optimizer, tmp_path, save=2) == {"iteration": 2}
        state = trainee.whole_state()
        # The damaged one does not count among those that are kept.
        save_sharded(trainee.optimizer, tmp_path)
        return [named, state]

    with pytest.warns(
        UserWarning, match=r"loading .*save-00000002, since newer ones are damaged: .*save-00000003"
    ) as said:
        results = virtual.run(load, 3, timeout=120)
    assert len(said) == 3, "once on each rank"
    for named, state in results:
        assert re.match(r"DamagedError: .*save-00000003.* (is damaged|has no save\.json|is missing)", named)
        assert_state_dicts_equal(state, Run(optim.AdamW).plain(TWO)[1])
    assert saves_of(tmp_path) == ["save-00000002", "save-00000003", "save-00000004"]


def test_where_all_saves_are_damaged_each_is_named(tmp_path: Path) -> None:
    save_at(2, tmp_path)
    save_at(2, tmp_path)
    flip(tmp_path / "save-00000001" / "shard-0-of-2.json", 4000)
    for rank in (0, 1):
        flip(tmp_path / "save-00000002" / f"shard-{rank}-of-2.bin", 70)
    pattern = r"save-00000002/shard-\d-of-2\.bin is damaged.*; .*save-00000001/shard-0-of-2\.json is damaged"
    assert_refused(tmp_path, pattern, kind="DamagedError")


# ------------------------------------------------------------------- claims that no checksum speaks against


def group_option(option: str, value: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder, lambda c: c["param_groups"][0].__setitem__(option, value))


def a_step(value: Any, which: slice = slice(None), ranks: tuple[int, ...] = (1,)) -> Callable[[Path], Any]:
    """Put this for the steps that some slices of some ranks have made."""

    def change(contents: dict[str, Any]) -> None:
        for line in [line for line in contents["state"] if line["key"] == "step"][which]:
            line["value"] = value

    return lambda folder: [edit(folder, change, rank) for rank in ranks]


CLAIMS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "lr is a text": (
        group_option("lr", "text"),
        "checkpoint's 'lr' of group 0 is 'text', this optimizer's is 0.001",
    ),
    "lr is None": (group_option("lr", None), "AdamW refuses the checkpoint's options of group 0: TypeError"),
    "lr is negative": (
        group_option("lr", -1),
        "AdamW refuses .* group 0: ValueError: Invalid learning rate: -1",
    ),
    "a beta of 1": (group_option("betas", {"tuple": [0.9, 1.0]}), "Invalid beta parameter at index 1"),
    "a third beta": (group_option("betas", {"tuple": [0.9, 0.9, 0.9]}), "'betas' of group 0 is"),
    "steps of one slice": (
        a_step(7.0, slice(0, 1)),
        r"'step' of parameter \d+ is 7.0 here and 2.0 for another slice",
    ),
    "steps that are negative": (
        a_step(-2.0, ranks=(0, 1)),
        r"checkpoint's 'step' for parameter 0 is tensor\(-2.\)",
    ),
    "steps in part": (a_step(1.5, ranks=(0, 1)), r"checkpoint's 'step' for parameter 0 is tensor\(1.5"),
    "steps in a list": (a_step([2.0]), r"'step' of parameter \d+ is \[2.0\]"),
    "state of no parameter": (
        lambda folder: edit(folder, lambda c: first_tensor(c).update(param=-1)),
        "a state of parameter -1; there are 11",
    ),
}


@pytest.mark.parametrize(("claim", "text"), CLAIMS.values(), ids=CLAIMS.keys())
def test_what_the_optimizer_cannot_have_produced_is_refused(
    tmp_path: Path, claim: Callable[[Path], Any], text: str
) -> None:
    save_at(2, tmp_path, partition="even")
    claim(tmp_path / "save-00000001")
    assert_refused(tmp_path, text, kind=("ValueError", "DamagedError"))


def test_options_that_constructors_take_are_loaded_though_they_are_of_another_kind(tmp_path: Path) -> None:
    """A tensor for a number, a flag for None, an option that only the checkpoint has."""
    lr = {"lr": torch.tensor(0.02), "foreach": False, "initial_lr": 3.0}
    plain = [{"params": list(Tangle().parameters()), **lr}]

    def save(comm: Collectives) -> None:
        trainee = Trainee(comm, groups=lambda model: [{**plain[0], "params": list(model.parameters())}])
        save_sharded(trainee.optimizer, tmp_path)

    def load(comm: Collectives) -> dict[str, Any]:
        trainee = Trainee(comm)
        load_sharded(trainee.optimizer, tmp_path)
        return trainee.optimizer.param_groups[0]

    virtual.run(save, 2, timeout=120)
    for group in virtual.run(load, 2, timeout=120):
        assert {key: group[key] for key in lr} == lr


def test_a_small_table_cannot_make_ranks_allocate_much(tmp_path: Path) -> None:
    """A table of 55 kB claims a state of 4 GB by naming the same bytes again and again."""
    save_at(2, tmp_path)
    folder = tmp_path / "save-00000001"
    path = folder / "shard-1-of-2.json"
    table = json.loads(path.read_text())
    del table["sha256"]
    line = next(line for line in table["contents"]["state"] if "numel" in line)
    pieces, part = 400, 10**9 // 400
    table["tensors"][f"state.{line['param']}.extra"] = {
        "dtype": "float32",
        "numel": 10**9,
        "pieces": [[part * n, part, 0, "0" * 64] for n in range(pieces)],
    }
    table["contents"]["state"].append({**line, "key": "extra", "numel": 10**9, "shape": [10**9]})
    path.write_bytes(sealed(table))
    assert path.stat().st_size < 60_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert_refused(tmp_path, "or on another one", kind="DamagedError")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "kilobytes"


# --------------------------------------------------------------------------------------- all of it or nothing


class Killed(BaseException):
    """The end of a rank, which the others only notice."""


def test_a_rank_that_dies_at_any_call_of_a_load_leaves_the_others_as_they_were(tmp_path: Path) -> None:
    save_at(3, tmp_path, partition="even")
    calls: list[Call] = []

    def on_rank(comm: virtual.VirtualCollectives, dies_at: int, seen: dict[int, Any]) -> None:
        trainee = Trainee(comm, partition="even", parameters_as_bucket_view=True)
        trainee.steps(range(1))
        before = snapshot(trainee.model), copy.deepcopy(list(trainee.optimizer.optim.state.values()))
        count = itertools.count()

        def notice(call: Call) -> None:
            if next(count) == dies_at:
                while comm.world.barrier.n_waiting < 2:  # else the call before could fail for the others
                    time.sleep(0.001)
                raise Killed
            if dies_at < 0 and comm.rank == 1:
                calls.append(call)

        if comm.rank == 1:
            comm.observers.append(notice)
        message = caught(lambda: load_sharded(trainee.optimizer, tmp_path))
        if dies_at < 0:
            return
        assert_same([snapshot(trainee.model)], [before[0]], f"call {dies_at}")
        for ours, theirs in zip(trainee.optimizer.optim.state.values(), before[1], strict=True):
            assert ours.keys() == theirs.keys()
            assert all(value.equal(theirs[key]) for key, value in ours.items())
        seen[comm.rank] = (message, caught(trainee.optimizer.step))

    virtual.run(on_rank, 3, -1, {}, timeout=120)
    assert {call.op for call in calls} == {"all_gather", "broadcast"}
    assert len(calls) == 10
    for dies_at in range(len(calls)):
        seen: dict[int, Any] = {}
        with pytest.raises(RuntimeError, match="virtual rank 1 failed first: Killed"):
            virtual.run(on_rank, 3, dies_at, seen, timeout=120)
        assert set(seen) == {0, 2}
        for rank, (message, step) in seen.items():
            assert message.startswith(("RuntimeError", "RanksLostError")), (dies_at, calls[dies_at], message)
            # Only in the last call can a rank not know whether others went on.
            refuses = f"RuntimeError: rank {rank} was to load the checkpoint" in step
            assert refuses == (dies_at == len(calls) - 1), (dies_at, step)


def test_a_rank_that_is_cut_off_in_the_last_call_refuses_to_step_until_it_has_loaded_again(
    tmp_path: Path,
) -> None:
    """The others have heard of all ranks, and go on; this one has not."""
    trained, middle = Run(optim.AdamW).plain(TWO)
    rest, _ = Run(optim.AdamW).plain(FOUR, trained[-1], middle)
    save_at(2, tmp_path, partition="even")

    def on_rank(comm: Any) -> list[Any]:
        trainee = Trainee(comm, other_values(), partition="even")
        gather = comm.all_gather
        gathered = itertools.count(1)

        def cut_off(*args: Any) -> list[torch.Tensor]:
            others: list[torch.Tensor] = gather(*args)
            if next(gathered) == 4:
                raise RuntimeError("Connection reset by peer")
            return others

        if comm.rank == 2:
            comm.all_gather = cut_off
        said = [caught(lambda: load_sharded(trainee.optimizer, tmp_path))]
        comm.all_gather = gather
        if comm.rank == 2:
            assert_same([snapshot(trainee.model)], [snapshot(other_values()())], "as before")
            assert not trainee.optimizer.optim.state
            alone = [
                trainee.optimizer.step,
                trainee.optimizer.consolidate_state_dict,
                lambda: save_sharded(trainee.optimizer, tmp_path),
                lambda: load_sharded(trainee.optimizer, tmp_path, parameters=False),
                lambda: trainee.optimizer.load_state_dict({}),
            ]
            said += map(caught, alone)
        else:
            assert_same([snapshot(trainee.model)], [trained[-1]], "loaded")
        load_sharded(trainee.optimizer, tmp_path)
        return [said, trainee.steps(FOUR)]

    results = virtual.run(on_rank, 3, timeout=120)
    for _, steps in results:
        assert_same(steps, rest, "after the second load")
    assert [said for said, _ in results[:2]] == [["nothing"]] * 2
    first, *later = results[2][0]
    assert first.startswith("RanksLostError: rank 2 was to load the checkpoint")
    for message in later:
        assert message.startswith(
            f"RuntimeError: rank 2 was to load the checkpoint {tmp_path}/save-00000001, and was cut off"
        )
        assert "training on would mix the two" in message


# ------------------------------------------------------------------------------------------- whose directory


def test_another_job_in_the_directory_is_named_on_all_ranks_and_can_be_taken_over(tmp_path: Path) -> None:
    other = save_owner.Owner.this_process()._replace(host="node7", pid=4711, job="")
    (tmp_path / save_owner.OWNER).write_bytes(sealed(other._asdict()))

    def on_rank(comm: Collectives) -> list[str]:
        optimizer = Trainee(comm).optimizer
        said = [
            caught(lambda save=save: save(optimizer, tmp_path)) for save in (save_sharded, save_sharded_async)
        ]
        save_sharded(optimizer, tmp_path, take_over=True)
        save_sharded_async(optimizer, tmp_path).wait()
        return said

    for rank, messages in enumerate(virtual.run(on_rank, 2, timeout=120)):
        for message in messages:
            assert f"{tmp_path} belongs to another save" in message
            assert f"process 4711 on node7, since {other.since}" in message
            heard = f"RuntimeError: rank {rank}: rank 0 could not save a sharded checkpoint: "
            assert message.startswith(heard if rank else f"RuntimeError: {tmp_path} belongs")
    assert sorted(os.listdir(tmp_path)) == ["save-00000001", "save-00000002"], "and nobody owns it afterwards"


def test_an_owner_that_lost_the_directory_while_it_wrote_removes_nothing(
    tmp_path: Path, gate: threading.Event
) -> None:
    def on_rank(comm: Collectives) -> None:
        optimizer = Trainee(comm).optimizer
        gate.set()
        for _ in range(2):
            save_sharded(optimizer, tmp_path)
        gate.clear()
        comm.all_gather(torch.zeros(1))
        pending = save_sharded_async(optimizer, tmp_path, keep=1)
        comm.all_gather(torch.zeros(1))
        if comm.rank == 0:
            other = save_owner.Owner.this_process()
            (tmp_path / save_owner.OWNER).write_bytes(sealed(other._asdict()))
        gate.set()
        pending.wait()

    virtual.run(on_rank, 2, timeout=120)
    assert sorted(os.listdir(tmp_path))[:1] == [save_owner.OWNER], "the file of the next owner stays"
    assert saves_of(tmp_path) == ["save-00000002", "save-00000003"]


def test_a_save_that_fails_leaves_the_directory_free(tmp_path: Path) -> None:
    def on_rank(comm: Collectives) -> list[str]:
        optimizer = Trainee(comm).optimizer
        return [
            caught(lambda: save_sharded(optimizer, tmp_path, notes={"rank": comm.rank})),
            caught(lambda: save_sharded(optimizer, tmp_path)),
        ]

    for differs, then in virtual.run(on_rank, 2, timeout=120):
        assert "notes" in differs
        assert then == "nothing"


def test_a_number_of_saves_to_keep_that_is_none_is_refused(tmp_path: Path) -> None:
    wrong: list[Any] = [0, -1, 1.5, True, None]

    def on_rank(comm: Collectives) -> list[str]:
        optimizer = Trainee(comm).optimizer
        return [caught(lambda keep=keep: save_sharded(optimizer, tmp_path, keep=keep)) for keep in wrong]  # type: ignore[misc]

    for rank, messages in enumerate(virtual.run(on_rank, 2, timeout=120)):
        start = f"ValueError: rank {rank}: keep takes a number of saves from 1 on, not "
        assert messages == [f"{start}{keep!r}." for keep in wrong]
