"""Sphinx extension: pages load MathJax from book/vendor/ if filled, else from a CDN."""

from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.util import logging

VENDOR = Path(__file__).resolve().parents[1] / "vendor"
MATHJAX_CDN = "https://cdn.jsdelivr.net/npm/mathjax@3.2.2/es5/tex-mml-chtml.js"


def use_vendored_scripts(app: Sphinx, config: Config) -> None:
    """Point Sphinx's and MyST-NB's settings at the vendored files; runs before they are read."""
    logger = logging.getLogger(__name__)
    config.nb_ipywidgets_js = {}  # no page shows a widget that would need a kernel
    if not (VENDOR / "versions.json").is_file():
        config.mathjax_path = MATHJAX_CDN
        logger.info("book/vendor/ is empty: pages will load MathJax from a CDN")
        return
    config.html_static_path.append(str(VENDOR))
    config.mathjax_path = "mathjax/es5/tex-mml-chtml.js"
    logger.info("book/vendor/ is filled: pages will read offline")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    # Before MyST-NB (500) takes its own copy of the settings.
    app.connect("config-inited", use_vendored_scripts, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
