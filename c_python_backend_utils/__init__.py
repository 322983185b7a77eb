"""The name under which Triton defines the classes of ``pb_utils``; a few are only here."""

import typing as _typing

from pb_utils import (
    InferenceRequest,
    InferenceResponse,
    Logger,
    MetricFamily,
    PreferredMemory,
    Tensor,
    TritonError,
    TritonModelException,
)
from pb_utils._iterator import ResponseIterator
from pb_utils._memory import MemoryType
from pb_utils._metrics import Metric, MetricKind
from pb_utils._request_fields import InferenceTrace
from pb_utils._sender import InferenceResponseSender
from pb_utils._shared_memory import SharedMemory, shared_memory
from pb_utils._suggestions import missing_name as _missing_name

__all__ = [
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "InferenceTrace",
    "Logger",
    "MemoryType",
    "Metric",
    "MetricFamily",
    "MetricKind",
    "PreferredMemory",
    "ResponseIterator",
    "SharedMemory",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "shared_memory",
]

if not _typing.TYPE_CHECKING:  # otherwise type checkers would accept any name

    def __getattr__(name: str) -> object:
        """Raises AttributeError, with the name that was probably meant."""
        raise _missing_name(__name__, name, __all__)
