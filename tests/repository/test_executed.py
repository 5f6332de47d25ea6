"""The book shows what nbval saw, as long as nothing has changed since."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import pytest
from library import executed


def said(kind: str, of: str = "this cell", **content: Any) -> dict[str, Any]:
    """A kernel's message."""
    return {
        "msg_type": kind,
        "header": {"msg_type": kind},
        "parent_header": {"msg_id": of},
        "content": content,
    }


def shown(text: str) -> dict[str, Any]:
    return said("display_data", data={"text/plain": text}, metadata={})


def printed(text: str, name: str = "stdout") -> dict[str, Any]:
    return said("stream", name=name, text=text)


IDLE = said("status", execution_state="idle")


def test_outputs_stay_in_their_order_and_a_print_in_pieces_is_one() -> None:
    heard = [printed("on"), printed("e\n"), shown("picture"), printed("two\n"), printed("!", "stderr"), IDLE]
    found = [output.get("text") or output["data"]["text/plain"] for output in executed.outputs(heard) or []]
    assert found == ["one\n", "picture", "two\n", "!"]


def test_what_the_cell_before_says_late_is_not_this_ones() -> None:
    assert executed.outputs([said("stream", "before", name="stdout", text="late"), printed("own"), IDLE]) == [
        nbformat.v4.new_output("stream", name="stdout", text="own")
    ]


def test_a_notebook_is_taken_until_it_or_the_package_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, notebook, folder = tmp_path / "zero_ref" / "lab", tmp_path / "01_a.ipynb", tmp_path / "kept"
    course = tmp_path / "zero_ref_course"
    package.mkdir(parents=True)
    course.mkdir()
    folder.mkdir()
    (package / "ranks.py").write_text("one = 1")
    notebook.write_text("cells")
    monkeypatch.setattr(executed, "ROOT", tmp_path)
    monkeypatch.setenv(executed.FOLDER, str(folder))
    assert executed.kept(notebook) is None, "nothing was kept"

    nbformat.write(
        nbformat.v4.new_notebook(metadata={"digest": executed.digest(notebook)}), folder / "01_a.ipynb"
    )
    assert executed.kept(notebook) is not None
    for path, now in (
        (notebook, "sells"),
        (package / "ranks.py", "one = 2"),
        (package / "new.py", ""),
        (course / "new.py", ""),
    ):
        before = path.read_text() if path.exists() else None
        path.write_text(now)
        assert executed.kept(notebook) is None, path
        path.unlink() if before is None else path.write_text(before)
    assert executed.kept(notebook) is not None
    monkeypatch.delenv(executed.FOLDER)
    assert executed.kept(notebook) is None, "`make book` alone runs it"


@contextmanager
def kernel() -> Iterator[tuple[Any, Any]]:
    """A kernel's manager and its client, as nbval gets them from the plugin."""
    with tempfile.TemporaryDirectory(prefix="kernels-") as sockets:
        manager = executed.without_ports(sockets)()
        manager.start_kernel()
        client = manager.client()
        try:
            client.start_channels()
            client.wait_for_ready(timeout=300)
            yield manager, client
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)


def test_a_kernel_is_spoken_to_without_ports() -> None:
    with kernel() as (manager, _):
        known = manager.get_connection_info()
        assert Path(f"{known['ip']}-{known['shell_port']}").is_socket()


@pytest.mark.thorough
def test_nothing_that_a_long_cell_says_is_lost() -> None:
    """nbval reads it when the cell has ended, up to the kernel's word that it is idle."""
    # Said little by little: a kernel too drops what is not sent, a thousand messages behind.
    source = """
        import time
        from IPython.display import clear_output
        for _ in range(12):
            for _ in range(100):
                clear_output()
            time.sleep(0.4)
    """
    with kernel() as (_, client):
        own = client.execute(source)
        while client.get_shell_msg(timeout=300)["parent_header"].get("msg_id") != own:
            pass
        heard, idle = 0, False
        while not idle:
            message = client.get_iopub_msg(timeout=60)
            heard += message["msg_type"] == "clear_output"
            of_cell = message["parent_header"].get("msg_id") == own
            idle = of_cell and message["content"].get("execution_state") == "idle"
    assert heard == 12 * 100
