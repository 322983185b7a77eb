"""The name under which Triton defines the classes of ``pb_utils``; a few are only here."""

from pb_utils import (
    InferenceRequest,
    InferenceResponse,
    Logger,
    PreferredMemory,
    Tensor,
    TritonError,
    TritonModelException,
)
from pb_utils._memory import MemoryType
from pb_utils._trace import InferenceTrace

__all__ = [
    "InferenceRequest",
    "InferenceResponse",
    "InferenceTrace",
    "Logger",
    "MemoryType",
    "PreferredMemory",
    "Tensor",
    "TritonError",
    "TritonModelException",
]
