"""The commands that the course adds to `zero-ref`; its pyproject.toml names them as entry points."""
