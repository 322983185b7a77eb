"""Reads the names of the LoRA adapters of a model from its folder (docs/how-to/openai.md)."""

from __future__ import annotations

import json
from pathlib import Path

from host.config.model_config import ModelConfig
from host.config.openai_parameters import LORA_SEPARATOR, openai_parameter
from host.system.regular_file import read_file

_FILE = "multi_lora.json"
_MAX_BYTES = 1 << 20


def read_lora_adapters(directory: Path, version: int, config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the adapters in `multi_lora.json` of a version. Blocks.

    There are none without `OPENAI_LORA_SEPARATOR`. Raises ValueError if the file cannot be used.
    """
    if not openai_parameter(config, LORA_SEPARATOR):
        return ()
    path = directory / str(version) / _FILE
    prefix = f"{LORA_SEPARATOR} of model '{config.name}'"
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES} bytes")
        document = json.loads(read_file(path))
    except OSError as error:
        raise ValueError(f"{prefix}: cannot read '{_FILE}': {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{prefix}: cannot read '{_FILE}': {error}") from None
    if not isinstance(document, dict):
        raise ValueError(f"{prefix}: '{_FILE}' must be a JSON object of folders by adapter name")
    return tuple(document)
