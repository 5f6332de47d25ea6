"""What is optional stays optional: a plain install is this package and torch."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {
    extra: {re.match(r"[\w-]+", each)[0].lower() for each in needed}  # type: ignore[index]
    for extra, needed in PROJECT["optional-dependencies"].items()
}

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
print("of extras:", *sorted({name.partition(".")[0] for name in sys.modules} & set(sys.argv[2].split(","))))
"""


def import_all(*kept_out: str) -> list[list[str]]:
    """What cannot be imported, and for want of what; last, the packages of extras that came along."""
    every = ",".join(set().union(*EXTRAS.values()))
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


def test_without_any_extra_all_but_the_lab_can_be_imported() -> None:
    *failed, _ = import_all(
        *(EXTRAS["lab"] | EXTRAS["clients"]) - {"numpy"}
    )  # torch takes numpy if it is there
    assert failed
    for module, package in failed:
        assert module.split(".")[1] in ("lab", "course"), (module, package)
        assert package in EXTRAS["lab"], (module, package)
    needs_lab = {module for module, _ in failed}
    for module in (
        "zero_ref.lab.config",
        "zero_ref.lab.logs",
        "zero_ref.lab.searched",
        "zero_ref.lab.settings",
        "zero_ref.lab.simulated",
    ):
        assert module not in needs_lab


def test_with_the_lab_s_packages_every_module_can_be_imported_and_pulls_no_client_s() -> None:
    *failed, (_, _, *pulled) = import_all(*EXTRAS["clients"])
    assert failed == []
    *failed, (_, _, *pulled) = import_all("")
    assert failed == []
    assert {"rich", "matplotlib"} <= set(pulled), "it sees what is imported"
    assert not EXTRAS["clients"] & set(pulled)
