"""Requirements are exact: versions of packages with hashes, actions of workflows by commit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INSTALLED = ["locked.txt", "torch.txt", "cuda.txt", "notebook.txt", "nbgrader.txt"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PIN = re.compile(r"^([\w.-]+)==(\S+)")


def entries(name: str) -> dict[str, list[str]]:
    """The lines of each package of a file in requirements/, by name and version."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in (ROOT / "requirements" / name).read_text().splitlines():
        if pin := PIN.match(line):
            lines = found[pin[0]] = []
        else:
            assert line.startswith((" ", "#")), (
                f"{name}: no option such as an index, and no other requirement"
            )
        lines.append(line)
    return found


@pytest.mark.parametrize("name", INSTALLED)
def test_every_package_that_is_installed_has_one_version_and_hashes(name: str) -> None:
    for package, (_, *lines) in entries(name).items():
        hashes = [line for line in lines if re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line)]
        assert hashes, f"{package} in {name} has no hash: run `make lock`"
        assert len(set(hashes)) == len(lines)


def test_what_is_installed_is_what_the_readable_lists_say() -> None:
    locked = {package for name in INSTALLED for package in entries(name)}
    for source in ("requirements.txt", "requirements/notebook.in", "requirements/nbgrader.in"):
        asked = [pin[0] for line in (ROOT / source).read_text().splitlines() if (pin := PIN.match(line))]
        assert asked
        assert set(asked) <= locked, f"{source} was changed: run `make lock`"


def test_torch_is_locked_by_itself_and_cuda_comes_only_with_a_build_that_needs_it() -> None:
    assert [package.split("==")[0] for package in entries("torch.txt")] == ["torch"]
    assert not [
        package for package in entries("locked.txt") if re.match(r"torch=|nvidia|cuda|triton", package)
    ]
    assert {re.split(r"[-=]", package)[0] for package in entries("cuda.txt")} == {"nvidia", "cuda", "triton"}


def test_no_index_is_given_beside_pypi() -> None:
    # With two indexes pip takes a name from the one with the higher version. --index-url is in place of PyPI.
    for path in [ROOT / "Makefile", ROOT / ".ci" / "run", *WORKFLOWS, *(ROOT / ".binder").iterdir()]:
        assert not re.search(r"extra.index", path.read_text(), re.IGNORECASE), path
        for line in path.read_text().splitlines():
            if re.search(r"pip .*--index-url", line):
                assert "--no-deps" in line, f"{path}: {line}"


def test_pip_resolves_nothing_itself() -> None:
    # accelerate asks for torch, whose hash is in a file of its own: pip must not look for it.
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^PIP_LOCKED := .*--require-hashes --no-deps ", makefile, re.MULTILINE)
    assert not re.findall(r"\$\(PIP\) (?!--require-hashes --no-deps|--no-deps)", makefile)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_named_by_commit(path: Path) -> None:
    uses = re.findall(r"uses: (.*)", path.read_text())
    assert uses
    for action in uses:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v\d+(\.\d+)*", action), f"{path.name}: {action}"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_job_that_runs_something_may_only_read(path: Path) -> None:
    head, _, jobs = path.read_text().partition("\njobs:\n")
    assert re.search(r"^permissions:\n  contents: read\n(\n|\Z)", head, re.MULTILINE)
    for job in re.split(r"^  (?=\w)", jobs, flags=re.MULTILINE)[1:]:
        if re.search(r"^ +- (run|uses: actions/checkout)", job, re.MULTILINE):
            assert "permissions:" not in job, job
        checkouts = re.findall(r"uses: actions/checkout.*\n +with:\n +persist-credentials: false\n", job)
        assert len(checkouts) == job.count("actions/checkout@")
