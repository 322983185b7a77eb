"""The version of pbhost, of which `pyproject.toml` makes that of the package."""

RELEASE = "0.2.0"
