"""Explorers: pictures that move, with the standard library only, so that they run in a page as in a notebook.

>>> answer = EXPLORERS["memory"].answer(model="gpt2", ranks=4)
>>> answer.words.split(": ")[1]
'each rank holds up to 9.07 GB of the 85.5 GB of an H100 80 GB. Plain data parallelism would hold 10.2 GB.'

Each is a list of controls and a function from their values to an answer: an SVG, the same in words, the
numbers behind it. In a page of the book Python runs in the browser and calls `controls` and `answer`; in a
notebook `zero_ref.lab.widgets` shows the same. What is computed is the package's own plan and simulator. The
same Python runs cells that a reader edits in a page: `run_cell`.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from zero_ref.live import cell
from zero_ref.live.buckets import BUCKETS
from zero_ref.live.explorer import Explorer
from zero_ref.live.memory import MEMORY
from zero_ref.live.overlap import OVERLAP
from zero_ref.live.partition import PARTITION
from zero_ref.live.ring import RING
from zero_ref.live.search import SEARCH
from zero_ref.live.which import WHICH
from zero_ref.simulator._checks import check_name

EXPLORERS: dict[str, Explorer] = {
    one.name: one for one in (MEMORY, RING, PARTITION, BUCKETS, OVERLAP, WHICH, SEARCH)
}


def explorer(name: str) -> Explorer:
    """An explorer by its name.

    Raises:
        ValueError: the name is not in EXPLORERS.
    """
    check_name("explorer", name, EXPLORERS)
    return EXPLORERS[name]


def controls(name: str) -> str:
    """Return the JSON with which a page shows an explorer's controls, a list of `Control.as_dict`."""
    return json.dumps([control.as_dict() for control in explorer(name).controls])


def answer(name: str, values: str, width: float) -> str:
    """An explorer's answer to values given as a JSON object: JSON, `Answer.as_dict`."""
    return json.dumps(explorer(name).answer(width, **json.loads(values)).as_dict())


def run_cell(before: str, source: str) -> str:
    """Run a cell after the pieces of code in a JSON list, and return its outcome as JSON, a `cell.Ran`."""
    return json.dumps(asdict(cell.run(json.loads(before), source)))
