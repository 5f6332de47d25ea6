"""The museum: real mistakes of distributed training, re-created in a few lines, each with its report.

- `right`: a right program; most exhibits get one method of it wrong;
- `exhibits`: what an exhibit is, and the list of all;
- `gradients`, `steps`, `loads`: the exhibits; the docstring of each says what happened.

>>> len(all_exhibits()) >= 20
True
"""

from __future__ import annotations

from zero_ref_course.gallery.exhibits import Exhibit

__all__ = ["Exhibit", "all_exhibits"]


def all_exhibits() -> dict[str, Exhibit]:
    """The exhibits by name, gradients first, then steps, then what comes back from a save."""
    from zero_ref_course.gallery import gradients, loads, steps  # noqa: F401  # they register what they have
    from zero_ref_course.gallery.exhibits import gallery

    return {exhibit.name: exhibit for exhibit in gallery}
