"""Write what `make install` installs: each package at one version, with the hashes of PyPI's files.

    make lock           # the versions stay where requirements.txt allows it
    make lock UPGRADE=1 # the newest versions that requirements.txt allows

Reads requirements.txt, notebook.in and nbgrader.in, writes five files for Python 3.11 to 3.13 on Linux,
macOS and Windows:

- locked.txt: all but torch;
- torch.txt: torch, with the hashes of PyPI's builds and of pytorch.org's CPU builds for Linux;
- cuda.txt: the CUDA libraries that PyPI's build of torch for Linux needs and a CPU build does not;
- notebook.txt: JupyterLab, for `make notebook`;
- nbgrader.txt: nbgrader, for `make thorough`.

pip installs nothing from these files whose hash is not in them, whatever index it comes from. Needs PyPI,
which is asked through uv in an environment of its own.
"""

import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
UV = "uv==0.13.9"
CUDA = re.compile(r"(nvidia|cuda)-|triton$")

# What https://download.pytorch.org/whl/cpu/torch/ lists for Linux: CPython 3.11, 3.12 and 3.13 on
# x86-64, then on aarch64. A new version of torch needs new ones: `pip download --no-deps`, then `pip hash`.
# PyPI's builds for macOS and Windows are for CPUs already.
TORCH_CPU = {
    "2.13.0": [
        "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
        "4ca4a9394b0c771238a4f73590fdbbc4debad85ed0fa63d026ae1b085da7d6e2",
        "3fbf9c9d1f3c10c2d59d04aca426dee9ccc6ceb32d255c61e93acc3b4f75fae6",
        "84453b69508ec79902f899c5ed9495acb9e2bbe9fda5f1d5d6f19e3c3842e1a7",
        "6f307c2c32d764ffc6ff6893b801fad6d4752f3e67966cb8abf1843427c02604",
        "0b8f7d0423027ae8b90c7977c627f3379f325363a08224dffad9b4b2d684a83d",
    ]
}


def resolve(uv: Path, sources: list[Path], scratch: Path) -> dict[str, str]:
    """Each package that the sources need, directly or not: its name, and its lines of a requirements file."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PIP_"))}
    command = [uv, "pip", "compile", *sources, "--universal", "--python-version=3.11", "--generate-hashes"]
    output = scratch / "all.txt"  # the versions in it are kept
    command += ["--no-config", "--no-header", "--no-annotate", "--quiet", "--output-file", output]
    subprocess.run(command, check=True, env=environment)
    entries: dict[str, str] = {}
    for entry in re.split(r"^(?=\S)", output.read_text(), flags=re.MULTILINE)[1:]:
        name = entry.partition("==")[0]  # one name has two entries where Pythons differ
        entries[name] = entries.get(name, "") + entry
    return entries


def write(name: str, entries: dict[str, str]) -> None:
    """Write one of the files, in the order of names."""
    heading = "# Written by `make lock`; requirements/lock.py says what it is.\n"
    (HERE / name).write_text(heading + "".join(entries[package] for package in sorted(entries)))


def main() -> None:
    """Write the five files."""
    names = ("locked.txt", "torch.txt", "cuda.txt", "notebook.txt", "nbgrader.txt")
    written = [HERE / name for name in names]
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        venv.create(scratch / "venv", with_pip=True)
        programs = scratch / "venv" / ("Scripts" if sys.platform == "win32" else "bin")
        subprocess.run([programs / "python", "-m", "pip", "install", "--quiet", UV], check=True)
        if not os.environ.get("UPGRADE"):
            # Without hashes: uv would keep those, the CPU builds' too.
            pins = [pin for path in written for pin in re.findall(r"^[^\s#][^\\]*", path.read_text(), re.M)]
            (scratch / "all.txt").write_text("\n".join(pins))
        uv = programs / "uv"
        ours = resolve(uv, [ROOT / "requirements.txt"], scratch)
        beside = {
            name: resolve(uv, [ROOT / "requirements.txt", HERE / f"{name}.in"], scratch)
            for name in ("notebook", "nbgrader")
        }
    version = re.search(r"==(\S+)", ours["torch"])[1]
    if version not in TORCH_CPU:
        sys.exit(
            f"requirements/lock.py: TORCH_CPU has no hashes of the CPU builds of torch {version}: add them"
        )
    cpu = "".join(f" \\\n    --hash=sha256:{digest}" for digest in TORCH_CPU[version])
    write("torch.txt", {"torch": ours["torch"].rstrip() + cpu + "\n"})
    write("cuda.txt", {name: entry for name, entry in ours.items() if CUDA.match(name)})
    write("locked.txt", {n: entry for n, entry in ours.items() if n != "torch" and not CUDA.match(n)})
    # Those of ours too that are needed on more platforms than before.
    for name, theirs in beside.items():
        write(f"{name}.txt", {one: entry for one, entry in theirs.items() if entry != ours.get(one)})


if __name__ == "__main__":
    main()
