"""The JSON form of the custom parameters of requests and responses."""

from __future__ import annotations

import json
from collections.abc import Mapping

from pb_utils._model_exception import TritonModelException


def to_json(parameters: Mapping[str, object]) -> str:
    """Returns received parameters as JSON text; ``{}`` without any.

    As in Triton, it has no spaces, and letters outside ASCII stand as they are.

    Raises:
        TritonModelException: a value is not a bool, int, float or str.
    """
    for name, value in parameters.items():
        if not isinstance(value, (bool, int, str, float)):
            raise TritonModelException(f"Unsupported parameter type for parameter '{name}'.")
    if not parameters:
        return "{}"
    return json.dumps(parameters, separators=(",", ":"), ensure_ascii=False)
