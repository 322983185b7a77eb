"""The API for Python models: tensors, requests, responses, errors, logs and metrics.

Models import it as ``triton_python_backend_utils``. ``pbhost.testing`` runs a model in a test,
without a server. ``docs/reference/model-api.md`` describes all rules and error texts.
"""

import typing as _typing

from pb_utils._bls import ResponseIterator
from pb_utils._datatypes import (
    TRITON_STRING_TO_NUMPY,
    deserialize_bytes_tensor,
    numpy_to_triton_type,
    serialize_byte_tensor,
    triton_string_to_numpy,
    triton_to_numpy_type,
)
from pb_utils._exceptions import missing_name as _missing_name
from pb_utils._logger import Logger
from pb_utils._metrics import Metric, MetricFamily, MetricKind
from pb_utils._model_config import (
    ModelConfig,
    get_input_config_by_name,
    get_output_config_by_name,
    get_parameter,
    using_decoupled_model_transaction_policy,
)
from pb_utils._model_control import is_model_ready, load_model, unload_model
from pb_utils._request import (
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    TRITONSERVER_REQUEST_RELEASE_ALL,
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    InferenceRequest,
    get_input_tensor_by_name,
    stack_inputs,
)
from pb_utils._request_fields import (
    TRITONSERVER_MEMORY_CPU,
    TRITONSERVER_MEMORY_GPU,
    InferenceTrace,
    MemoryType,
    PreferredMemory,
)
from pb_utils._response import (
    TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    InferenceResponse,
    InferenceResponseSender,
    TritonError,
    TritonModelException,
    get_output_tensor_by_name,
)
from pb_utils._runtime import SharedMemory, get_model_dir
from pb_utils._tensor import Tensor

if not _typing.TYPE_CHECKING:  # otherwise type checkers would accept any name

    def __getattr__(name: str) -> object:
        """Raises AttributeError, with the name that was probably meant."""
        raise _missing_name(__name__, name, __all__)


__all__ = [
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "TRITON_STRING_TO_NUMPY",
    "InferenceRequest",
    "InferenceResponse",
    "Logger",
    "MetricFamily",
    "ModelConfig",
    "PreferredMemory",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "deserialize_bytes_tensor",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_model_dir",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "get_parameter",
    "is_model_ready",
    "load_model",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "stack_inputs",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "unload_model",
    "using_decoupled_model_transaction_policy",
]

# As in Triton, these classes report `c_python_backend_utils` as their module. Models print, compare
# and pickle them under that name.
for _bound in (
    InferenceRequest,
    InferenceResponse,
    InferenceResponseSender,
    InferenceTrace,
    Logger,
    Logger.LogLevel,
    MemoryType,
    Metric,
    MetricFamily,
    MetricKind,
    PreferredMemory,
    ResponseIterator,
    SharedMemory,
    Tensor,
    TritonError,
    TritonError.ErrorCode,
    TritonModelException,
):
    _bound.__module__ = "c_python_backend_utils"
del _bound, InferenceResponseSender, InferenceTrace, MemoryType, Metric, MetricKind
del ResponseIterator, SharedMemory
