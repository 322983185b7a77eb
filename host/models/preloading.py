"""Which models are prepared once, in a process that their instances are forked from."""

from __future__ import annotations

import os
import re
from pathlib import Path

from host.config.json_form import to_json
from host.config.load_parameters import wants_preload
from host.config.model_config import ModelConfig
from stub.wire.messages import ModelSource

_STATIC_PRELOAD = re.compile(rb"^[ \t]+@staticmethod\s+def[ \t]+preload\b", re.MULTILINE)
_MAX_SOURCE_BYTES = 1 << 24


def is_prepared(config: ModelConfig, source: ModelSource) -> bool:
    """Whether a model is prepared: its configuration says so, or its code has `preload`. Blocks."""
    wanted = wants_preload(config)
    if wanted is not None:
        return wanted
    folder = source.backend or os.path.join(source.directory, str(source.version))
    try:
        with open(os.path.join(folder, source.file), "rb") as file:
            return _STATIC_PRELOAD.search(file.read(_MAX_SOURCE_BYTES)) is not None
    except OSError:  # the stub says what is wrong with the file
        return False


def preload_arguments(config: ModelConfig, directory: Path, version: int) -> dict[str, str]:
    """The argument of `preload`: that of `initialize` without what differs between instances.

    `config`: the configuration before the model has completed it.
    """
    return {
        "model_config": to_json(config),
        "model_repository": str(directory),
        "model_version": str(version),
        "model_name": config.name,
    }
