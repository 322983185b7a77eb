"""The version of pbhost; `pyproject.toml` reads it as the version of the package."""

RELEASE = "0.2.0"
