"""Reads the folder of one model as a server does, to run the model without a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from host.config.json_form import to_json
from host.config.model_config import LoadedConfig, load_config
from host.config.schema import is_ensemble
from host.errors import invalid_argument
from host.models.backends import Backends
from host.repository.repository import list_versions, select_versions
from stub.wire.messages import ModelSource


def read_model(
    directory: Path,
    version: int | None = None,
    *,
    backend_directory: str = "",
    gpus: Sequence[int] = (),
    least_capability: float = 0.0,
) -> tuple[ModelSource, LoadedConfig]:
    """Reads the configuration of a model, and finds its version and its backend.

    `version`: None for the one that clients of a server get. `gpus`, `least_capability`: as for
    `load_config`. Raises HostError.
    """
    loaded = load_config(directory, strict=False, gpus=gpus, least_capability=least_capability)
    if is_ensemble(loaded.config):
        raise invalid_argument(
            f"model '{loaded.config.name}' is an ensemble, so it has no code to run"
        )
    chosen = _choose_version(directory, loaded, version)
    return Backends(Path(backend_directory)).find_backend(directory, chosen, loaded)


def describe_model(source: ModelSource, loaded: LoadedConfig) -> Mapping[str, Any]:
    """Returns what `pb_utils.testing.load` needs: directory, version, backend and config."""
    return {
        "directory": source.directory,
        "version": source.version,
        "backend": source.backend,
        "config": to_json(loaded.config),
    }


def _choose_version(directory: Path, loaded: LoadedConfig, wanted: int | None) -> int:
    """Returns the wanted version, by default the one that clients get. Raises HostError."""
    available = list_versions(directory)
    if wanted is None:
        return select_versions(loaded.config, available)[-1]
    if wanted not in available:
        found = ", ".join(map(str, available)) or "none"
        raise invalid_argument(
            f"model '{loaded.config.name}' has no version {wanted}; its versions are: {found}"
        )
    return wanted
