"""What a student gets back: their own notebook, with the verdict of each exercise below its answer."""

from __future__ import annotations

import copy
import json
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from zero_ref_course.grading import Assigned, answer_cell_in
from zero_ref_course.marks import NO_COMMENTS, Comments, Scale, for_files, remarks, short, told, total
from zero_ref_course.notebook import tags_of
from zero_ref_course.submissions import Graded, notebook_with

TAG = "feedback"


def feedback(
    graded: Graded, assigned: Sequence[Assigned], scale: Scale, comments: Comments = NO_COMMENTS
) -> Iterator[tuple[str, str]]:
    """Each notebook that a student handed in, by the name of its file, with what is said of it.

    At its top a Markdown cell has the points and what concerns all of it, and below each answer one has the
    verdict. Cells of an earlier feedback are left out.
    """
    names = set[str]()
    for path, notebook in graded.submission.notebooks.items():
        made = copy.deepcopy(notebook)
        made["cells"] = [cell for cell in made["cells"] if TAG not in tags_of(cell)]
        with_ids = (made.setdefault("nbformat", 4), made.setdefault("nbformat_minor", 5)) >= (4, 5)
        for one in assigned:
            if notebook_with(graded.submission, one) == path:
                cell = answer_cell_in(made, one)
                place = next(number for number, other in enumerate(made["cells"]) if other is cell)
                said = _markdown(_heading(graded, one.exercise, scale), told(one.exercise, graded, comments))
                made["cells"].insert(place + 1, said)
        made["cells"].insert(0, _markdown(*_summary(graded, scale, comments)))
        for number, cell in enumerate(cell for cell in made["cells"] if TAG in tags_of(cell)):
            if with_ids:
                cell["id"] = f"{TAG}-{number}"
        name = path.name if path.name not in names else f"{path.parent.name}-{path.name}"
        names.add(name)
        yield name, json.dumps(made, indent=1) + "\n"


def _summary(graded: Graded, scale: Scale, comments: Comments) -> tuple[str, str]:
    lines = [f"{exercise}: {verdict.status}" for exercise, verdict in graded.verdicts.items()]
    worth = sum(map(scale.worth, graded.verdicts))
    heading = f"{short(total(graded, scale))} of {short(worth)} points"
    return heading, for_files("\n".join([*lines, *remarks(graded, scale, comments)]))


def _heading(graded: Graded, exercise: str, scale: Scale) -> str:
    score = scale.score(exercise, graded.verdicts[exercise])
    return f"{exercise}: {short(score)} of {short(scale.worth(exercise))} points"


def _markdown(heading: str, text: str) -> dict[str, Any]:
    """A cell in which the text is indented, and so is shown as it is: it quotes what the student wrote."""
    source = f"**{heading}**\n\n{textwrap.indent(text, ' ' * 4)}"
    return {"cell_type": "markdown", "metadata": {"tags": [TAG]}, "source": source}
