"""The repository's public address: set once, in pyproject.toml, and written to all files that name it.

    python book/address.py            # write it to the notebooks, README.md and CITATION.cff
    python book/address.py --check    # fail if one of them says anything else; `make lint` does this

The book reads the setting when it is built, so this is a Sphinx extension too: each chapter gets buttons that
open it on Colab and on Binder. Until there is an address there are no buttons, and the notebooks say the one
line that installs the package from a clone. Standard library only.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BRANCH = "main"
COLAB, BINDER = "https://colab.research.google.com", "https://mybinder.org"
KAGGLE = "https://www.kaggle.com/kernels/welcome"
GITHUB = re.compile(r"https://github\.com/[\w.-]+/[\w.-]*[\w-](?<!\.git)")
HERE_IN_README = re.compile(r"(?<=<!-- address -->\n).*?(?=<!-- end -->\n)", re.DOTALL)
HERE_IN_CITATION = re.compile(r"^(?:repository-code: .*\n)?version: ", re.MULTILINE)


def read_address(root: Path = ROOT) -> str | None:
    """The address, such as `https://github.com/OWNER/NAME`, or None while it is not set.

    Raises:
        ValueError: it is not the address of a repository on GitHub.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address = project.get("urls", {}).get("Repository")
    if address is not None and not GITHUB.fullmatch(address):
        raise ValueError(
            f"pyproject.toml has the repository at {address!r}. Write it as https://github.com/OWNER/NAME, "
            "with no .git and no slash at its end: Colab opens notebooks from GitHub."
        )
    return address


# ---------------------------------------------------------------------------------- what each place says


def install_cell(address: str | None) -> str:
    """The source of a notebook's first code cell, which installs the package and its course if necessary.

    While there is no address, the cell raises an error that names the command to install them from a clone.

    >>> print(install_cell("https://github.com/OWNER/NAME"))
    # On Colab and Kaggle this installs the package, unless it is installed already.
    from importlib import invalidate_caches
    from importlib.util import find_spec
    <BLANKLINE>
    address = "git+https://github.com/OWNER/NAME"
    if find_spec("zero_ref_course") is None:
        %pip install --quiet "zero_ref[lab] @ {address}"
        %pip install --quiet "zero_ref_course @ {address}#subdirectory=zero_ref_course"
        invalidate_caches()
        if find_spec("zero_ref_course") is None:
            raise ModuleNotFoundError(
                "pip has not installed the package: its lines above say why. On Kaggle, "
                "turn on Internet in the notebook's settings, then run this cell again."
            )
    """
    if address is None:
        return (
            "# The package comes with the repository. Where it is installed this does nothing.\n"
            "from importlib.util import find_spec\n"
            "from pathlib import Path\n"
            "\n"
            'if find_spec("zero_ref_course") is None:\n'
            "    folders = [Path.cwd(), *Path.cwd().parents]\n"
            '    clones = [one for one in folders if (one / "zero_ref_course").is_dir()]\n'
            '    clone = clones[0] if clones else "CLONE"\n'
            '    meaning = "" if clones else " (CLONE is the folder of your clone)"\n'
            "    raise ModuleNotFoundError(\n"
            '        "The package is not installed here. Run this line in a new cell, on Colab "\n'
            """        f'and Kaggle too: %pip install "{clone}[lab]" "{clone}/zero_ref_course"'\n"""
            """        f"{meaning}. In a terminal in a clone of the repository, run "\n"""
            """        f'`make notebook FOLDER="{folders[0]}"`, which installs it too.'\n"""
            "    )"
        )
    return (
        "# On Colab and Kaggle this installs the package, unless it is installed already.\n"
        "from importlib import invalidate_caches\n"
        "from importlib.util import find_spec\n"
        "\n"
        f'address = "git+{address}"\n'
        'if find_spec("zero_ref_course") is None:\n'
        '    %pip install --quiet "zero_ref[lab] @ {address}"\n'
        '    %pip install --quiet "zero_ref_course @ {address}#subdirectory=zero_ref_course"\n'
        "    invalidate_caches()\n"
        '    if find_spec("zero_ref_course") is None:\n'
        "        raise ModuleNotFoundError(\n"
        '            "pip has not installed the package: its lines above say why. On Kaggle, "\n'
        """            "turn on Internet in the notebook's settings, then run this cell again."\n"""
        "        )"
    )


def readme_lines(address: str | None) -> str:
    """Return the lines that say how to get the repository, and where to read with nothing installed."""
    if address is None:
        return "Run them in a clone of this repository.\n"
    name = address.removeprefix("https://github.com/")
    colab = f"{COLAB}/github/{name}/blob/{BRANCH}/notebooks/01_ledger.ipynb"
    kaggle = f"{KAGGLE}?src={address}/blob/{BRANCH}/notebooks/01_ledger.ipynb"
    binder = f"{BINDER}/v2/gh/{name}/{BRANCH}?urlpath=lab/tree/notebooks"
    return (
        f"Run them in a clone: `git clone {address}`. To work through the chapters with nothing installed,\n"
        f"open them [on Colab]({colab}),\n"
        f"[on Kaggle]({kaggle})\n"
        f"or [on Binder]({binder}).\n"
    )


def written(text: str, path: Path, address: str | None) -> str:
    """Return the content of a file, with the address as it is set.

    Raises:
        ValueError: the file has no place for it.
    """
    if path.suffix == ".ipynb":
        notebook = json.loads(text)
        for cell in notebook["cells"]:
            if "install" in cell["metadata"].get("tags", ()):
                cell["source"] = install_cell(address).splitlines(keepends=True)
                return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"  # as Jupyter writes it
        raise ValueError(f"{path} has no code cell tagged `install`: copy that of another notebook.")
    if path.suffix == ".cff":
        line = "" if address is None else f'repository-code: "{address}"\n'
        place, says = HERE_IN_CITATION, line + "version: "
    else:
        place, says = HERE_IN_README, readme_lines(address)
    made, places = place.subn(lambda _: says, text)
    if places != 1:
        raise ValueError(f"{path} has {places} places for the address, and not one.")
    return made


def files(root: Path = ROOT) -> Iterator[Path]:
    """The files that have the address in them."""
    yield root / "README.md"
    yield root / "CITATION.cff"
    yield from sorted((root / "notebooks").glob("*.ipynb"))


# ---------------------------------------------------------------------------------- script and extension


def main(root: Path = ROOT, check: bool = False) -> int:
    """Write the address, or with `check` only look; 1 if a file says something else."""
    address = read_address(root)
    behind = []
    for path in files(root):
        text = path.read_text(encoding="utf-8")
        made = written(text, path, address)
        if made != text:
            behind.append(path.relative_to(root))
            if not check:
                path.write_text(made, encoding="utf-8")
    for path in behind:
        print(f"{path}: {'is not as pyproject.toml says' if check else 'written'}")
    if check and behind:
        print("The repository's address is set in pyproject.toml. To write it: python book/address.py")
    return 1 if check and behind else 0


def add_buttons(app: Any, config: Any) -> None:
    """Give the theme the address: buttons for the repository and, on each chapter, for Colab and Binder."""
    address = read_address()
    if address is not None:
        config.html_theme_options |= {
            "repository_url": address,
            "repository_branch": BRANCH,
            "use_repository_button": True,
            "use_issues_button": True,
            "launch_buttons": {
                "notebook_interface": "jupyterlab",
                "binderhub_url": BINDER,
                "colab_url": COLAB,
            },
        }


def setup(app: Any) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("config-inited", add_buttons, priority=100)  # before the theme reads its options
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))
