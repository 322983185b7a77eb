"""Whether a model is ready, which the model itself may decide."""

from __future__ import annotations

import logging

from host.logs.formats import model_fields
from host.models.registry import Model

_log = logging.getLogger("pbhost")


async def is_model_ready(model: Model | None) -> bool:
    """Whether a version is ready, by its instances and by its own `is_ready`.

    The reason why it is not goes to the log. Source: docs/reference/model-api.md, "is_ready".
    """
    if model is None:
        return False
    if model.ready and not model.defines_is_ready:
        return True
    reason = await model.why_not_ready()
    if reason:
        name, number = model.name, model.version
        _log.debug(
            "Model '%s' version %d is not ready: %s",
            name, number, reason, extra=model_fields(name, number),
        )  # fmt: skip
    return not reason
