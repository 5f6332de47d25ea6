"""Sphinx extension: plain Markdown links of a chapter lead to words of the glossary, figures and equations.

    [shards](../book/glossary.md#term-shard)    [Fig. 2.1](02_collectives.ipynb#fig-ring)

Such links work wherever a notebook is shown: on GitHub and in Jupyter they open the page, in the book they
lead to the place. MyST follows them to headings only, so this adds the other places to those that it knows.
"""

from typing import Any

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment


def slug(term: str) -> str:
    """Return the anchor of a word of the glossary.

    >>> slug("Newton-Schulz iteration"), slug("Ψ")
    ('term-newton-schulz-iteration', 'term-psi')
    """
    return "term-" + term.lower().replace("ψ", "psi").replace(" ", "-")


def add_places(app: Sphinx, env: BuildEnvironment) -> list[str]:
    """Add words, figures and equations to the places of each page, once all pages are read."""
    standard = env.get_domain("std")
    places = [
        (page, slug(name), place)
        for (kind, name), (page, place) in standard.objects.items()  # type: ignore[attr-defined]
        if kind == "term"
    ]
    places += [(page, name, place) for name, (page, place) in standard.anonlabels.items()]  # type: ignore[attr-defined]
    equations = env.get_domain("math").equations  # type: ignore[attr-defined]
    places += [(page, name, f"equation-{name}") for name, (page, _) in equations.items()]
    for page, name, place in places:
        env.metadata[page].setdefault("myst_slugs", {}).setdefault(name, (0, place, ""))
    return []


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("env-updated", add_places)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
