"""Sphinx extension: pages load MathJax and widget scripts from book/vendor/ if filled, else from a CDN."""

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
    if not (VENDOR / "versions.json").is_file():
        config.mathjax_path = MATHJAX_CDN
        logger.info("book/vendor/ is empty: pages will load MathJax and widget scripts from a CDN")
        return
    config.html_static_path.append(str(VENDOR))
    config.mathjax_path = "mathjax/es5/tex-mml-chtml.js"
    config.nb_ipywidgets_js = {
        "requirejs/require.js": {},
        # Without data-jupyter-widgets-cdn the manager looks for no widget package anywhere else.
        "html-manager/dist/embed-amd.js": {},
    }
    logger.info("book/vendor/ is filled: pages will read offline")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    # Before MyST-NB (500) takes its own copy of the settings.
    app.connect("config-inited", use_vendored_scripts, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
