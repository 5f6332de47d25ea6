"""One setting says where the repository is; notebooks, README, CITATION.cff and the book follow it."""

from __future__ import annotations

import ast
import doctest
import importlib.util
import json
import os
import re
import shutil
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from IPython.core.inputtransformer2 import TransformerManager

ROOT = Path(__file__).parents[2]
ELSEWHERE = "https://github.com/example/sharded-books"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("address", ROOT / "book" / "address.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


address = load_script()


def copy_of_what_names_it(folder: Path) -> Path:
    for path in [ROOT / "pyproject.toml", *address.files(ROOT)]:
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(path, copy)
    return folder


def set_address(root: Path, to: str | None) -> None:
    """As CONTRIBUTING.md says: the two lines in pyproject.toml, without or with their #."""
    text = (root / "pyproject.toml").read_text()
    hidden = "# " if to is None else ""
    text, tables = re.subn(r"^(# )?\[project\.urls\]", f"{hidden}[project.urls]", text, flags=re.MULTILINE)
    text, lines = re.subn(r"^(# )?Repository = .*", f'{hidden}Repository = "{to}"', text, flags=re.MULTILINE)
    assert (tables, lines) == (1, 1)
    (root / "pyproject.toml").write_text(text)


def texts(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): path.read_text() for path in address.files(root)}


def test_every_file_says_what_is_set() -> None:
    assert address.main(check=True) == 0


def test_one_setting_reaches_every_file_and_can_be_taken_back(tmp_path: Path) -> None:
    root = copy_of_what_names_it(tmp_path)
    set_address(root, None)
    address.main(root)
    unset = texts(root)
    assert not any(ELSEWHERE in text for text in unset.values())

    set_address(root, ELSEWHERE)
    assert address.main(root, check=True) == 1
    assert texts(root) == unset, "looking changed a file"
    assert address.main(root) == 0
    assert [name for name, text in texts(root).items() if ELSEWHERE not in text] == []
    assert address.main(root, check=True) == 0

    set_address(root, ELSEWHERE + "-2")  # a second time: no address is left of the first
    address.main(root)
    assert not any(ELSEWHERE in text.replace(ELSEWHERE + "-2", "") for text in texts(root).values())

    set_address(root, None)
    address.main(root)
    assert texts(root) == unset


def test_a_file_that_was_changed_by_hand_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = copy_of_what_names_it(tmp_path)
    readme = root / "README.md"
    readme.write_text(readme.read_text().replace("<!-- address -->\n", "<!-- address -->\nSee elsewhere.\n"))
    assert address.main(root, check=True) == 1
    named, what_to_do = capsys.readouterr().out.splitlines()
    assert named == "README.md: is not as pyproject.toml says"
    assert "python book/address.py" in what_to_do


@pytest.mark.parametrize(
    "mistaken",
    ["", "example/zero_ref", ELSEWHERE + "/", ELSEWHERE + ".git", "https://gitlab.com/example/zero_ref"],
)
def test_what_colab_could_not_open_is_refused(tmp_path: Path, mistaken: str) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    set_address(tmp_path, mistaken)
    with pytest.raises(ValueError, match="Write it as https://github"):
        address.read_address(tmp_path)


def test_the_example_of_a_cell_is_what_a_cell_is() -> None:
    assert doctest.testmod(address) == (0, 1)


@pytest.mark.parametrize("where", [None, ELSEWHERE])
def test_the_cell_does_nothing_where_the_package_is(where: str | None) -> None:
    source = TransformerManager().transform_cell(address.install_cell(where))
    commands: list[str] = []
    ipython = SimpleNamespace(run_line_magic=lambda *words: commands.append(" ".join(words)))
    exec(source, {"get_ipython": lambda: ipython})
    assert commands == []


def run_where_the_package_is_missing(where: str | None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run the cell; gives the commands that it ran. Nothing is installed, so in the end it raises."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    source = TransformerManager().transform_cell(address.install_cell(where))
    commands: list[str] = []
    ipython = SimpleNamespace(run_line_magic=lambda *words: commands.append(" ".join(words)))
    with pytest.raises(ModuleNotFoundError) as raised:
        exec(source, {"get_ipython": lambda: ipython})
    return [*commands, str(raised.value)]


def test_where_the_package_is_missing_the_cell_installs_it_and_says_if_it_could_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    *commands, told = run_where_the_package_is_missing(ELSEWHERE, monkeypatch)
    # IPython puts the value in for {address} before pip sees the line.
    assert commands == [
        'pip install --quiet "zero_ref[lab] @ {address}"',
        'pip install --quiet "zero_ref_course @ {address}#subdirectory=zero_ref_course"',
    ]
    assert "On Kaggle, turn on Internet" in told


@pytest.mark.parametrize("folder", ["notebooks", "."])
def test_without_an_address_the_cell_says_the_one_line_that_installs_from_a_clone(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT / folder)
    (told,) = run_where_the_package_is_missing(None, monkeypatch)
    assert f': %pip install "{ROOT}[lab]" "{ROOT}/zero_ref_course". ' in told
    assert f'in a clone of the repository, run `make notebook FOLDER="{os.getcwd()}"`' in told
    assert 'jupyter lab "$(FOLDER)"' in (ROOT / "Makefile").read_text()
    for project, name in ((ROOT, "zero_ref"), (ROOT / "zero_ref_course", "zero_ref_course")):
        made = tomllib.loads((project / "pyproject.toml").read_text())["project"]
        assert made["name"] == name
        assert name != "zero_ref" or "lab" in made["optional-dependencies"]


@pytest.mark.parametrize("notebook", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_imports_the_package_only_after_it_is_installed(notebook: Path) -> None:
    code = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    tags = [cell["metadata"].get("tags", []) for cell in code]
    assert tags[0] == ["install", "remove-cell"]
    assert [cell for cell in tags[1:] if "install" in cell] == []
    imports = ast.walk(ast.parse(TransformerManager().transform_cell("".join(code[0]["source"]))))
    modules = {node.module for node in imports if isinstance(node, ast.ImportFrom)}
    assert modules <= {"importlib", "importlib.util", "pathlib"}
