"""Which backend and devices ranks get, on machines whose accelerators are only told of here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import zero_ref
from zero_ref.comm import devices
from zero_ref.lab.config import GPTConfig
from zero_ref.lab.model import GPT, batch, language_reference
from zero_ref.lab.placement import Placement, device_here, in_notebook, place_ranks

Machine = Callable[..., None]
CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Calling it makes this a machine with so many accelerators of a kind, and with these variables."""
    for name in ("ZERO_REF_DEVICE", "ZERO_REF_BACKEND"):
        monkeypatch.delenv(name, raising=False)

    def has(count: int, kind: str = "cuda", own: str | None = "nccl", **variables: str) -> None:
        found = torch.device(kind) if count else None
        monkeypatch.setattr(devices, "accelerator", lambda: found)
        monkeypatch.setattr(devices, "accelerator_count", lambda: count)
        monkeypatch.setattr(devices, "own_backend", lambda: own if count else None)
        monkeypatch.setattr(devices, "current_device", lambda: torch.device(kind, 0))
        monkeypatch.setattr(devices, "name_of", lambda device: "NVIDIA H100")
        for name, value in variables.items():
            monkeypatch.setenv(f"ZERO_REF_{name}", value)

    return has


def on(*names: str, backend: str = "gloo", is_default: bool = False) -> Placement:
    return Placement(backend, names, is_default)


@pytest.mark.parametrize(
    ("count", "world_size", "expected", "told"),
    [
        (0, 1, on("cpu"), "1 rank: Gloo, on this machine's CPU"),
        (0, 4, on(*["cpu"] * 4), "4 ranks: Gloo, on this machine's CPU"),
        (1, 1, on("cuda:0", backend="nccl"), "1 rank: NCCL, on NVIDIA H100 (cuda:0)"),
        (1, 4, on(*["cuda:0"] * 4), "4 ranks: Gloo, sharing 1 NVIDIA H100 (cuda:0)"),
        (
            2,
            2,
            on("cuda:0", "cuda:1", backend="nccl"),
            "2 ranks: NCCL, one NVIDIA H100 each (cuda:0, cuda:1)",
        ),
        (2, 3, on("cuda:0", "cuda:1", "cuda:0"), "3 ranks: Gloo, sharing 2 NVIDIA H100 (cuda:0, cuda:1)"),
        (
            8,
            2,
            on("cuda:0", "cuda:1", backend="nccl"),
            "2 ranks: NCCL, one NVIDIA H100 each (cuda:0, cuda:1)",
        ),
    ],
)
def test_the_choice_and_what_the_reader_is_told(
    count: int, world_size: int, expected: Placement, told: str, machine: Machine
) -> None:
    machine(count)
    placement = place_ranks(world_size)
    assert placement == expected
    assert placement.describe() == told
    assert placement.on_cpu == (count == 0)


def test_gloo_that_is_asked_for_by_name_and_the_ranks_of_rpc_are_on_the_cpu(machine: Machine) -> None:
    machine(8)
    assert place_ranks(2, "gloo") == place_ranks(2, rpc=True) == on("cpu", "cpu")
    assert place_ranks(2, "nccl").backend == "nccl"
    machine(8, DEVICE="cuda", BACKEND="nccl")
    assert place_ranks(2, "gloo", rpc=True) == place_ranks(2, rpc=True) == on("cpu", "cpu")


def test_without_its_own_backend_an_accelerator_is_shared_and_where_gloo_cannot_the_cpu_is_used(
    machine: Machine,
) -> None:
    machine(2, own=None)
    assert place_ranks(2) == on("cuda:0", "cuda:1")
    assert place_ranks(2).describe() == "2 ranks: Gloo, one NVIDIA H100 each (cuda:0, cuda:1)"
    machine(1, kind="mps", own=None)  # a Mac
    assert place_ranks(1) == on("cpu")
    assert place_ranks(4) == on(*["cpu"] * 4)
    machine(1, kind="xpu", own="xccl")
    assert place_ranks(1) == on("xpu:0", backend="xccl")
    assert place_ranks(2) == on("cpu", "cpu")


@pytest.mark.parametrize(
    ("variables", "backend", "expected"),
    [
        ({"DEVICE": "cpu"}, None, on("cpu", "cpu")),
        ({"DEVICE": "cpu", "BACKEND": "gloo"}, "gloo", on("cpu", "cpu")),
        ({"DEVICE": "cuda"}, None, on("cuda:0", "cuda:1", backend="nccl", is_default=True)),
        ({"DEVICE": "cuda"}, "gloo", on("cuda:0", "cuda:1", is_default=True)),
        ({"DEVICE": "cuda:1"}, None, on("cuda:1", "cuda:1", is_default=True)),
        (
            {"DEVICE": "cuda", "BACKEND": "nccl"},
            "gloo",
            on("cuda:0", "cuda:1", backend="nccl", is_default=True),
        ),
        ({"BACKEND": "nccl"}, "gloo", on("cuda:0", "cuda:1", backend="nccl")),
        ({"BACKEND": "gloo"}, None, on("cuda:0", "cuda:1")),
        ({"BACKEND": "gloo"}, "gloo", on("cpu", "cpu")),
        ({"BACKEND": "gloo"}, "nccl", on("cuda:0", "cuda:1")),
        ({"DEVICE": "", "BACKEND": ""}, None, on("cuda:0", "cuda:1", backend="nccl")),
    ],
)
def test_variables_decide_on_a_machine_with_two_accelerators(
    variables: dict[str, str], backend: str | None, expected: Placement, machine: Machine
) -> None:
    machine(2, **variables)
    assert place_ranks(2, backend) == expected


@pytest.mark.parametrize(
    ("variables", "backend", "expected"),
    [
        ({"DEVICE": "cuda"}, "gloo", on("cpu", "cpu")),
        ({"DEVICE": "cuda"}, None, on("cuda:0", "cuda:1", backend="nccl")),
        ({"DEVICE": "cuda:1"}, None, on("cuda:1", "cuda:1")),
        ({"DEVICE": "cpu"}, None, on("cpu", "cpu")),
        ({"BACKEND": "nccl"}, "gloo", on("cuda:0", "cuda:1", backend="nccl")),
    ],
)
def test_a_notebook_has_no_default_device_and_its_gloo_stays_on_the_cpu(
    variables: dict[str, str],
    backend: str | None,
    expected: Placement,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shell = SimpleNamespace(kernel=None)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    machine(2, **variables)
    assert place_ranks(2, backend) == expected


@pytest.mark.parametrize("shell", [None, SimpleNamespace()], ids=["no shell", "a terminal's"])
def test_a_process_that_imported_ipython_is_no_notebook(
    shell: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert not in_notebook()


@pytest.mark.parametrize(
    ("count", "variables", "backend", "told"),
    [
        (0, {"DEVICE": "abacus"}, None, "'abacus', which torch does not know"),
        (0, {"DEVICE": "cuda"}, None, "'cuda', and torch .* finds no accelerator"),
        (2, {"DEVICE": "xpu"}, None, "finds 2 of the kind 'cuda'"),
        (2, {"DEVICE": "cuda:2"}, None, "'cuda:2', and torch .* finds 2"),
        (2, {"DEVICE": "meta"}, None, "'meta', and torch"),
        (2, {"BACKEND": "mpi"}, None, 'ZERO_REF_BACKEND must be "nccl", "gloo" or left out, not \'mpi\''),
        (2, {}, "mpi", "backend must be"),
        (1, {}, "nccl", "own for each of 2 ranks.* has 1"),
        (0, {"BACKEND": "nccl"}, None, "own for each of 2 ranks.* has 0"),
        (2, {"DEVICE": "cpu"}, "nccl", "ZERO_REF_DEVICE is 'cpu'"),
        (2, {"DEVICE": "cuda:0", "BACKEND": "nccl"}, None, "ZERO_REF_DEVICE is 'cuda:0'"),
    ],
)
def test_what_cannot_be_is_told(
    count: int, variables: dict[str, str], backend: str | None, told: str, machine: Machine
) -> None:
    machine(count, **variables)
    with pytest.raises(ValueError, match=told):
        place_ranks(2, backend)


def test_an_accelerator_that_gloo_cannot_carry_is_refused_where_it_is_named(machine: Machine) -> None:
    machine(1, kind="xpu", own="xccl", DEVICE="xpu")
    assert place_ranks(1) == on("xpu:0", backend="xccl", is_default=True)
    with pytest.raises(ValueError, match="Gloo takes no tensors there"):
        place_ranks(2)


@pytest.mark.usefixtures("group_of_one")
def test_a_rank_that_others_started_has_the_device_of_its_variable_or_backend(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(2)
    assert device_here() == CPU, "it talks by Gloo"
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    assert device_here() == torch.device("cuda:0")
    for named, expected in (("cuda:1", "cuda:1"), ("cuda", "cuda:0"), ("cpu", "cpu")):
        machine(2, DEVICE=named)
        assert device_here() == torch.device(expected)


def test_a_machine_without_accelerators_has_no_backend_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "accelerator", lambda: None)
    assert devices.own_backend() is None
    monkeypatch.setattr(devices, "accelerator", lambda: torch.device("mps"))
    assert devices.own_backend() is None, "torch names Gloo, which is everybody's"
    monkeypatch.setattr(devices, "accelerator", lambda: torch.device("cuda"))
    for is_there, expected in ((True, "nccl"), (False, None)):
        monkeypatch.setattr(dist, "is_nccl_available", lambda is_there=is_there: is_there)
        assert devices.own_backend() == expected


def test_weights_and_passages_are_drawn_alike_whatever_the_default_device() -> None:
    config = GPTConfig(layers=1, heads=2, width=16, context=8)
    drawn: list[torch.device] = []
    randint = torch.randint

    def noting(*args: object, **kwargs: object) -> torch.Tensor:
        drawn.append(torch.device(str(kwargs.get("device"))))
        return randint(*args, **kwargs)  # type: ignore[call-overload, no-any-return]

    with pytest.MonkeyPatch.context() as patched, torch.device("meta"):  # it stands for an accelerator
        patched.setattr(torch, "randint", noting)
        tokens, _ = batch(language_reference().training, config, 2, seed=0, step=0, rank=0)
        weights = list(GPT(config).parameters())
    assert drawn == [CPU]
    assert {tensor.device.type for tensor in (tokens, *weights)} == {"meta"}


def test_one_module_knows_kinds_of_accelerators() -> None:
    package = Path(zero_ref.__file__).parent
    known = [path for path in package.rglob("*.py") if "cuda" in path.read_text().lower()]
    assert {path.relative_to(package).as_posix() for path in known} <= {
        "comm/devices.py",
        "simulator/devices.py",
        "simulator/device.py",  # the file of torch that a default is read from
        "simulator/peak.py",  # the variable by which torch's allocator is set
        "lab/commands.py",  # a program to copy
    }
