"""Run the notebooks of the table of contents, as many at a time as there are cores, for the book to show.

    python book/execute.py

jupyter-book would run them one after another. It does not run notebooks that are in its cache, so this fills
the cache before it starts. The cache knows a notebook by its cells and not by the package that they import,
so `make book` empties it first. In `make test` nbval has run the notebooks before, and none has to run twice:
tests/library/executed.py has kept the outputs of their cells.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import yaml
from jupyter_cache import get_cache
from jupyter_cache.base import CacheBundleIn
from jupyter_cache.executors import load_executor

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.append(str(Path(__file__).resolve().parent / "_ext"))

import streams  # book/_ext/streams.py
from library.executed import kept  # tests/library/executed.py

CACHE = "_build/.jupyter_cache"  # where jupyter-book looks


def main() -> int:
    """Execute and cache; 1 if a notebook failed, with its traceback."""
    root = Path(__file__).resolve().parent.parent
    toc = yaml.safe_load((root / "_toc.yml").read_text())
    timeout = yaml.safe_load((root / "_config.yml").read_text())["execute"]["timeout"]
    pages = [chapter["file"] for part in toc["parts"] for chapter in part["chapters"]]
    cache = get_cache(root / CACHE)
    taken = 0
    for page in pages:
        notebook = root / f"{page}.ipynb"
        if not notebook.exists():
            continue
        cache.add_nb_to_project(str(notebook))
        executed = kept(notebook)
        if executed:
            taken += 1
            cache.cache_notebook_bundle(CacheBundleIn(executed, str(notebook)), check_validity=False)
    print(f"{taken} notebooks taken as nbval has run them, the others run now", flush=True)
    streams.join()
    os.environ["ZERO_REF_PAGE"] = "1"  # an explorer gives a piece of page, not widgets that need a kernel
    logger = logging.getLogger("execute")
    logger.setLevel(logging.ERROR)  # what fails is told below
    result = load_executor("local-parallel", cache, logger=logger).run_and_cache(timeout=timeout)
    failed = [*result.excepted, *result.errored]
    for uri in failed:
        print(f"{uri} failed:\n{cache.get_project_record(uri).traceback}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
