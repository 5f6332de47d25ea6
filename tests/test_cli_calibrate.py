"""`zero-ref calibrate`, its measurements replaced by those of an imaginary machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from zero_ref import cli
from zero_ref.cli.calibrate import print_calibration
from zero_ref.lab import pieces, ranks
from zero_ref.lab._arguments import json_text
from zero_ref.simulator.calibrate import Computation, Measurement, calibrate
from zero_ref.simulator.cluster import Cluster, Link, cluster

MACHINE = replace(cluster("loopback"), within=Link(200, 2))
TENSORS_AND_AMOUNTS = [(28, 1e8), (52, 8e8), (28, 9e8), (52, 6e9), (100, 8e9)]


def imaginary(world_size: int, effort: pieces.Effort = pieces.FULL) -> pieces.Times:
    """What MACHINE would take: 80 us a tensor and 70 G/s."""
    collectives = [
        Measurement(op, nbytes, world_size, MACHINE.ms(op, nbytes, world_size))
        for op in pieces.OPS
        for nbytes in effort.nbytes
    ]
    works = [
        Computation(kind, tensors, amount, Link(80, 70).ms(tensors, amount))
        for kind in ("train", "update")
        for tensors, amount in TENSORS_AND_AMOUNTS
    ]
    return pieces.Times(collectives, works)


@pytest.fixture
def on_an_imaginary_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "measure", imaginary)
    monkeypatch.setattr(ranks, "choose_backend", lambda world_size: "gloo")


@pytest.mark.usefixtures("on_an_imaginary_machine")
def test_the_table_and_the_file_say_what_the_machine_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("rich")
    file = tmp_path / "cluster.json"
    assert cli.main(["calibrate", "--ranks", "4", "--out", str(file)]) == 0
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "this machine, 4 ranks, gloo" in rows
    assert "broadcast 200 (200-200) 2.00 (2.00-2.00) 0% 0%" in rows
    assert "train 80.0 (80.0-80.0) 70.0 (70.0-70.0) 0% 0%" in rows
    assert f"written: {file}" in rows
    written = Cluster.from_json(file.read_text())
    assert written.ms("all_gather", 1e6, 4) == pytest.approx(MACHINE.ms("all_gather", 1e6, 4))
    assert "--ranks 4" in written.source
    assert "load average" in written.source


@pytest.mark.usefixtures("on_an_imaginary_machine")
def test_calibration_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["calibrate", "--quick", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert Cluster.from_json(json.dumps(printed["cluster"])).device.tflops == pytest.approx(0.07)
    assert [each["what"] for each in printed["fits"]] == [*pieces.OPS, "train", "update"]
    held_out = {each["size"] for each in printed["held_out"] if each["what"] == "exchange"}
    assert held_out == set(pieces.QUICK.nbytes[1:-1:2])
    assert max(abs(each["error"]) for each in printed["held_out"]) < 2e-3


def test_what_nothing_bounds_is_null_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    times = imaginary(2)
    found = calibrate(times.collectives, times.works)
    unbounded = replace(found.fits[0], giga_per_s_interval=(1.0, float("inf")))
    printed = json.loads(json_text(cli.calibrate.as_json(replace(found, fits=(unbounded,)))))
    assert printed["fits"][0]["giga_per_s_interval"] == [1.0, None]


@pytest.mark.parametrize("width", [80, 200])
def test_the_table_stays_within_its_width(capsys: pytest.CaptureFixture[str], width: int) -> None:
    pytest.importorskip("rich")
    times = imaginary(2)
    slow = [replace(each, ms=each.ms * 20 + 50) for each in times.collectives]
    print_calibration(calibrate(slow, times.works), "2 ranks", width=width)
    printed = capsys.readouterr().out
    assert all(len(line.rstrip()) <= width for line in printed.splitlines())
    assert "…" not in printed


@pytest.mark.usefixtures("on_an_imaginary_machine")
@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--ranks", "1"], "--ranks must be at least 2: a single rank sends nothing."),
        (["--out", "no/such/folder/cluster.json"], "there is no such folder"),
    ],
)
def test_a_mistake_is_told_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], answer: str
) -> None:
    monkeypatch.setattr(pieces, "measure", lambda *_: pytest.fail("it measured"))
    assert cli.main(["calibrate", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert answer in printed.err


@pytest.mark.usefixtures("on_an_imaginary_machine")
def test_times_that_make_no_sense_are_not_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def shrinking(world_size: int, effort: pieces.Effort) -> pieces.Times:
        times = imaginary(world_size, effort)
        return times._replace(collectives=[replace(each, ms=1 / each.nbytes) for each in times.collectives])

    monkeypatch.setattr(pieces, "measure", shrinking)
    assert cli.main(["calibrate", "--out", str(tmp_path / "cluster.json")]) == 1
    assert "nothing is written: all_reduce" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------- logs


@pytest.fixture
def logs(tmp_path: Path) -> tuple[Path, Path]:
    """Products that reach 500 TFLOPS and half of it at 300 operations a byte, and 8 ranks at 300 GB/s."""
    lengths = [(8192, n, n) for n in (256, 512, 1024, 2048, 4096, 8192)]
    rows = [
        f"{m},{k},{n},{(2 * m * k * n + 300 * 2 * (m * k + k * n + m * n)) / 500e9:.9f}"
        for m, k, n in lengths
    ]
    products = tmp_path / "products.csv"
    products.write_text("m,k,n,ms\n" + "\n".join(rows) + "\n")
    ranks = [f"#  Rank  {n} Group  0 Pid 10{n} on  host-a device  {n} [0x0f] NVIDIA H100" for n in range(8)]
    link = Link(latency_us=5, gb_per_s=300)
    times = [
        f"{size} {size // 4} float none -1 {1e3 * link.ms(7, size * 7 / 8):.6f} 1.0 1.0 0 9.9 1.0 1.0 0"
        for size in (2**power for power in range(16, 34, 2))
    ]
    nccl = tmp_path / "all_gather.log"
    nccl.write_text("\n".join(["# Collective test starting: all_gather_perf", *ranks, *times]))
    return products, nccl


def test_logs_make_a_cluster_that_simulate_takes(
    logs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    products, nccl = logs
    out = tmp_path / "ours.json"
    argv = ["calibrate", "--products", str(products), "--nccl-tests", str(nccl), "--out", str(out)]
    assert cli.main(argv) == 0
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "all_gather 5.00 (5.00-5.00) 300 (300-300) 0% 0%" in rows
    assert any(row.startswith("product ") and "500,000 (500,000-500,000) 0% 0%" in row for row in rows)
    assert any("reach 50.6% of 989 TFLOPS, and half of that with 300 operations" in row for row in rows)
    assert not any("Train is" in row for row in rows)
    made = Cluster.from_json(out.read_text())
    assert made.source == "zero-ref calibrate from products.csv, all_gather.log; else as h100-ib"
    assert (made.device.memory_gb_per_s, made.between) == (3350, cluster("h100-ib").between)
    assert cli.main(["simulate", "--model", "gpt2", "--ranks", "8", "--cluster", str(out), "--json"]) == 0


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--products", "PRODUCTS", "--cluster", "one"], "--cluster one: choose one of h100-ib"),
        (["--products", "NCCL"], "--products NCCL cannot be used: the table has the columns"),
        (["--nccl-tests", "PRODUCTS"], "--nccl-tests PRODUCTS cannot be used: a log of nccl-tests is of one"),
        (["--nccl-tests", "absent"], "--nccl-tests absent cannot be used: absent: No such file"),
        (
            ["--products", "PRODUCTS", "--cluster", "a100-ib"],
            "more than the 312 that A100 80 GB has at its peak",
        ),
        (["--products", "PRODUCTS", "--quick"], "--quick is for measuring"),
        (["--cluster", "a100-ib"], "--cluster is for logs"),
    ],
)
def test_logs_that_cannot_be_used_are_told(
    logs: tuple[Path, Path], capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    pytest.importorskip("rich")
    paths = {"PRODUCTS": str(logs[0]), "NCCL": str(logs[1])}
    assert cli.main(["calibrate", *(paths.get(each, each) for each in argv)]) == 2
    error = " ".join(capsys.readouterr().err.split())
    for name, path in paths.items():
        said = said.replace(name, path)
    assert said in error
