"""Optional packages stay optional: a plain install is this package and torch."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from setuptools import find_packages

from zero_ref import cli

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
COURSE = tomllib.loads((ROOT / "zero_ref_course" / "pyproject.toml").read_text())["project"]
EXTRAS = {
    extra: {re.match(r"[\w-]+", each)[0].lower() for each in needed}  # type: ignore[index]
    for extra, needed in PROJECT["optional-dependencies"].items()
}
PULLED_BY_CLIENTS = {"pytorch_lightning"}

IMPORT_ALL = """
import importlib, pkgutil, sys

kept_out = set(sys.argv[1].split(","))

class KeptOut:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in kept_out:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, KeptOut())
import zero_ref
for found in pkgutil.walk_packages(zero_ref.__path__, "zero_ref.", onerror=lambda name: None):
    if not found.name.endswith("__main__"):
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            print(found.name, error.name)
for name in zero_ref.__all__:
    getattr(zero_ref, name)
print("of extras:", *sorted({name.partition(".")[0] for name in sys.modules} & set(sys.argv[2].split(","))))
"""


def import_all(*kept_out: str) -> list[list[str]]:
    """Return the modules that cannot be imported, with the missing packages; last, imported extras."""
    every = ",".join({*PULLED_BY_CLIENTS, *set().union(*EXTRAS.values())})
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, ",".join(kept_out), every],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def test_a_plain_install_brings_torch_alone() -> None:
    assert [re.match(r"\w+", each)[0] for each in PROJECT["dependencies"]] == ["torch"]  # type: ignore[index]


def test_without_any_extra_all_but_the_lab_and_the_doctor_can_be_imported() -> None:
    *failed, _ = import_all(
        *(EXTRAS["lab"] | EXTRAS["clients"]) - {"numpy"}
    )  # torch takes numpy if it is there
    assert failed
    for module, package in failed:
        assert module.split(".")[1] in ("lab", "doctor"), (module, package)
        assert package in EXTRAS["lab"], (module, package)
    needs_lab = {module for module, _ in failed}
    for module in (
        "zero_ref.lab.config",
        "zero_ref.lab.searched",
        "zero_ref.lab.settings",
        "zero_ref.lab.simulated",
    ):
        assert module not in needs_lab


def test_with_the_lab_s_packages_every_module_can_be_imported_and_pulls_no_client_s() -> None:
    *failed, (_, _, *pulled) = import_all("")
    assert failed == []
    assert {"rich", "matplotlib"} <= set(pulled), "it sees what is imported"
    assert not (EXTRAS["clients"] | PULLED_BY_CLIENTS) & set(pulled)


# ------------------------------------------------------------------------------------------- the course


def test_the_package_is_installed_without_the_course() -> None:
    found = find_packages(str(ROOT), **PYPROJECT["tool"]["setuptools"]["packages"]["find"])
    assert "zero_ref.cli" in found
    assert [name for name in found if not re.match(r"zero_ref(\.|$)", name)] == []


def test_the_course_needs_this_version_of_the_package_with_its_lab() -> None:
    assert COURSE["version"] == PROJECT["version"]
    assert COURSE["dependencies"] == [f"zero_ref[lab]=={PROJECT['version']}"]


@pytest.mark.parametrize("words", [["--help"], ["03_partition.ipynb", "--for", "-"]])
@pytest.mark.parametrize("command", cli.OF_THE_COURSE)
def test_without_the_course_its_commands_say_how_to_get_it(
    command: str, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "entry_points", lambda group: ())
    assert cli.main([command, *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith(f"zero-ref {command}: ")
    assert "pip install ./zero_ref_course" in printed.err


def test_the_course_adds_its_commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = "zero_ref.commands"
    added = [EntryPoint(name, value, group) for name, value in COURSE["entry-points"][group].items()]
    monkeypatch.setattr(cli, "entry_points", lambda group: added)
    assert [one.name for one in added] == [*cli.OF_THE_COURSE]
    for command in cli.OF_THE_COURSE:
        with pytest.raises(SystemExit) as ended:
            cli.main([command, "--help"])
        assert ended.value.code == 0
        assert f"usage: zero-ref {command}" in capsys.readouterr().out


def test_looking_for_the_commands_of_the_course_imports_no_torch() -> None:
    program = "import sys, zero_ref_course; from zero_ref import cli; cli.make_parser(); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=600, cwd=ROOT
    )
    assert "zero_ref.cli" in done.stdout.split(), done.stderr
    assert "torch" not in done.stdout.split()
