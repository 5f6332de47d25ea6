"""The museum: real mistakes of distributed training, each re-created in a few lines.

An exhibit has the program with the mistake, the program without it, and the address of the public report.

- `right`: a right program; most exhibits get one method of it wrong;
- `exhibits`: the class `Exhibit`, and the list of all exhibits;
- `gradients`, `steps`, `loads`: the exhibits; the docstring of each says what happened;
- `training`: a small training whose loss chapter 15 draws with and without each mistake.

>>> len(all_exhibits()) >= 20
True
"""

from __future__ import annotations

from zero_ref_course.gallery.exhibits import Exhibit

__all__ = ["Exhibit", "all_exhibits"]


def all_exhibits() -> dict[str, Exhibit]:
    """All exhibits by name: mistakes in gradients first, then in the step, then in saving and loading."""
    from zero_ref_course.gallery import gradients, loads, steps  # noqa: F401  # they register what they have
    from zero_ref_course.gallery.exhibits import gallery

    return {exhibit.name: exhibit for exhibit in gallery}
