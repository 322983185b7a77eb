"""Custom parameters of requests and responses, as the JSON text in which models read them."""

from __future__ import annotations

import json
from collections.abc import Mapping

from pb_utils._model_exception import TritonModelException


def to_json(parameters: Mapping[str, object]) -> str:
    """Return the parameters as JSON text.

    Raises:
        TritonModelException: a value is neither bool, int, str nor float.
    """
    for name, value in parameters.items():
        if not isinstance(value, (bool, int, str, float)):
            raise TritonModelException(f"Unsupported parameter type for parameter '{name}'.")
    return json.dumps(parameters, separators=(",", ":")) if parameters else "{}"
