"""The name under which Triton defines the classes of ``pb_utils``; a few are only here."""

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
