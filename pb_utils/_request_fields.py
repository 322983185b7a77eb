"""The fields of a request, for modules that read them and need none of its methods."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pb_utils._memory import PreferredMemory
from pb_utils._sender import InferenceResponseSender, Responder
from pb_utils._tensor import Tensor
from pb_utils._trace import InferenceTrace


class RequestFields:
    """What ``InferenceRequest`` holds. ``_handle`` is None for a request that the model made."""

    __slots__ = (
        "__weakref__",
        "_cancelled",
        "_correlation_id",
        "_flags",
        "_handle",
        "_inputs",
        "_model_name",
        "_model_version",
        "_parameters",
        "_preferred_memory",
        "_release_flags",
        "_request_id",
        "_requested_output_names",
        "_sender",
        "_timeout",
        "_trace",
    )

    _request_id: str
    _correlation_id: int | str
    _inputs: list[Tensor]
    _requested_output_names: Iterable[str]
    _model_name: str
    _model_version: int
    _flags: int
    _timeout: int
    _parameters: Mapping[str, object]
    _preferred_memory: PreferredMemory
    _trace: InferenceTrace
    _handle: Responder | None
    _sender: InferenceResponseSender | None
    _release_flags: int
    _cancelled: bool
