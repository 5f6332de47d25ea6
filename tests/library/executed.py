"""pytest plugin beside nbval: patient with kernels, without ports, and keeps what cells put out for the book.

`make test` names a folder in ZERO_REF_EXECUTED. When all cells of a notebook have passed, it is written there
with their outputs. book/execute.py takes it, if neither the notebook nor the package has changed since.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.manager import KernelManager

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "ZERO_REF_EXECUTED"
# nbval gives a kernel 5 seconds for what it has to say after a cell. On a busy machine that is not enough.
PATIENCE = 10
WIDGET = "application/vnd.jupyter.widget-view+json"
AS_PAGE = "import os as _os; _os.environ['ZERO_REF_PAGE'] = '1'"
AS_NOTEBOOK = "del _os.environ['ZERO_REF_PAGE'], _os"


def digest(notebook: Path) -> str:
    """Return a digest of all that determines a notebook's outputs: cells, packages, installed versions."""
    found = hashlib.sha256(sys.version.encode())
    packages = [*(ROOT / "zero_ref").rglob("*"), *(ROOT / "zero_ref_course").rglob("*")]
    for path in [notebook, *sorted(packages)]:
        if path.is_file() and "__pycache__" not in path.parts:
            found.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    # A set, since a build in the clone leaves a second record of the package, seen from some folders only.
    found.update(" ".join(sorted({f"{one.name} {one.version}" for one in distributions()})).encode())
    return found.hexdigest()


def kept(notebook: Path) -> Any:
    """The notebook with the outputs that nbval saw; None if there are none or something has changed."""
    folder = os.environ.get(FOLDER)
    if not folder or not Path(folder, notebook.name).is_file():
        return None
    executed = nbformat.read(Path(folder, notebook.name), as_version=4)
    return executed if executed.metadata.pop("digest") == digest(notebook) else None


def outputs(heard: list[dict[str, Any]]) -> list[Any] | None:
    """Return a cell's outputs, as a notebook stores them, from the kernel's messages up to the last one.

    None if outputs were changed afterwards, which only nbclient follows.
    """
    found: list[Any] = []
    for message in heard:
        kind = message["msg_type"]
        if message["parent_header"].get("msg_id") != heard[-1]["parent_header"].get("msg_id"):
            continue
        if kind in ("clear_output", "update_display_data"):
            return None
        if kind in ("stream", "display_data", "execute_result", "error"):
            new = nbformat.v4.output_from_msg(message)
            if found and kind == found[-1].output_type == "stream" and new.name == found[-1].name:
                found[-1].text += new.text  # a print that came in two pieces
            else:
                found.append(new)
    return found


def ask(kernel: Any, source: str) -> list[Any] | None:
    """Run `source` in the kernel, and return its outputs."""
    kernel.heard.clear()
    message = kernel.execute_cell_input(source, allow_stdin=False)
    kernel.await_reply(message, 60)
    kernel.await_idle(message, 60)
    return outputs(kernel.heard)


class Keeper:
    """Writes a notebook when all its cells have passed."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Iterator[None]:
        """nbval runs a cell; what it puts out becomes part of the notebook that nbval has read."""
        notebook = item.parent
        if item.cell_num == 0:
            notebook.digest, notebook.done = digest(Path(notebook.path)), []
        notebook.kernel.heard.clear()
        try:
            yield
        except pytest.skip.Exception:
            self._add(notebook, [])  # a cell that the book does not run either
            raise
        new = outputs(notebook.kernel.heard)
        if any(WIDGET in output.get("data", {}) for output in new or ()):
            # A page has no kernel: there the same cell shows a piece of page in place of widgets.
            ask(notebook.kernel, AS_PAGE)
            new = ask(notebook.kernel, item.cell.source)
            ask(notebook.kernel, AS_NOTEBOOK)
        self._add(notebook, new)

    def _add(self, notebook: Any, new: list[Any] | None) -> None:
        notebook.done.append(new)
        code = [cell for cell in notebook.nb.cells if cell.cell_type == "code"]
        if len(notebook.done) == len(code) and None not in notebook.done:
            for cell, found in zip(code, notebook.done, strict=True):
                cell.outputs = found
            notebook.nb.metadata["digest"] = notebook.digest
            notebook.nb.metadata["language_info"] = language_info(notebook.kernel)
            nbformat.write(notebook.nb, self.folder / Path(notebook.path).name)


def language_info(kernel: Any) -> Any:
    """Return the kernel's description of its language, by which pages colour the cells."""
    return kernel.kc.kernel_info(reply=True, timeout=600)["content"]["language_info"]


class Attentive(KernelManager):
    """A manager whose clients lose nothing that a kernel says.

    nbval listens to a cell when the cell has ended. Until then a socket keeps a thousand messages at most and
    drops what comes later, down to the word that the cell has ended. A progress bar says as much in a minute.
    """

    def client(self, **options: Any) -> Any:
        client = super().client(**options)
        client.context.rcvhwm = 0  # no limit, for the sockets that it opens from now on
        return client


def without_ports(folder: str) -> Callable[..., KernelManager]:
    """Makes managers of kernels that are spoken to by files in a folder, and not by ports.

    Jupyter chooses a kernel's ports before the process exists. Until the kernel listens there, another
    process may take one, as tests on ranks do all the time; then the kernel ends, or nobody hears it.
    The folder's path is short: that of a socket has some 100 characters at the most.
    """

    def manager(**options: Any) -> KernelManager:
        own = tempfile.mkdtemp(dir=folder)
        files = {"ip": f"{own}/ipc", "connection_file": f"{own}/kernel.json"}
        return Attentive(transport="ipc", **files, **options)

    return manager


def pytest_configure(config: pytest.Config) -> None:
    """Only where nbval runs notebooks."""
    if not (config.getoption("nbval", False) or config.getoption("nbval_lax", False)):
        return
    import nbval.kernel
    from nbval.kernel import RunningKernel

    get_message = RunningKernel.get_message

    def patiently(kernel: Any, stream: str, timeout: float | None = None) -> Any:
        message = get_message(kernel, stream, timeout and timeout * PATIENCE)
        kernel.__dict__.setdefault("heard", []).append(message)
        return message

    RunningKernel.get_message = patiently
    sockets = tempfile.TemporaryDirectory(prefix="kernels-")
    config.add_cleanup(sockets.cleanup)
    nbval.kernel.KernelManager = without_ports(sockets.name)
    if os.environ.get(FOLDER):
        config.pluginmanager.register(Keeper(os.environ[FOLDER]))
