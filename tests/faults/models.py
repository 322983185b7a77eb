"""The models of the campaign."""

from __future__ import annotations

from tests.conftest import RepositoryBuilder


def add_models(repository: RepositoryBuilder) -> None:
    """Adds `identity` and `witness`, which return their input, `script`, `stream` and `ask`."""
    repository.copy("identity", "script", "stream", "ask")
    identity = repository.path / "identity"
    repository.add(
        "witness",
        (identity / "1" / "model.py").read_text(),
        (identity / "config.pbtxt").read_text(),
    )
