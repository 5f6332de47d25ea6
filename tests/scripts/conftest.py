"""Scripts as users wrote them, for tests to run. Not to be imported in search of doctests.

One needs FairScale, which is not installed; others import modules of torch that warn.
"""

collect_ignore_glob = ["*.py"]
