"""Its presence puts this folder on `sys.path`, so that tests in subfolders can import `training` too."""

from hypothesis import settings

# No test is timed: on a busy machine Hypothesis would call an example slow that is not.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# pytest loads these by itself. To look into them for doctests it would import both under one name.
collect_ignore = ["conftest.py", "browser/conftest.py"]
