"""Sphinx extension: a cell's prints appear as one text, with line breaks only where the cell printed them.

A kernel sends prints in pieces that may end in the middle of a line. MyST-NB shows each piece as a block of
its own, or with nb_merge_streams puts a line break after each. nbclient can join them as they came, but
MyST-NB has no setting for that.
"""

from typing import Any

import nbclient.client
from sphinx.application import Sphinx
from traitlets import Bool


class JoiningClient(nbclient.client.NotebookClient):
    """nbclient's own, with its merging of streams on."""

    coalesce_streams = Bool(True)


def join() -> None:
    """Join the streams of all notebooks that this process and its forks execute from now on."""
    nbclient.client.NotebookClient = JoiningClient  # type: ignore[misc]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    join()
    return {"parallel_read_safe": True, "parallel_write_safe": True}
