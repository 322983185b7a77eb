"""Parameters of gRPC inference requests and of their tensors.

Source of texts and codes: docs/reference/protocol.md, "Parameters of ModelInferRequest", "Input
data" and "Classification".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from host.errors import HostError, invalid_argument
from host.inference.request import InferRequest, Parameter, checked_correlation_text
from host.instances.regions import RegionPart

SEQUENCE_PARAMETERS = ("sequence_id", "sequence_start", "sequence_end")
EMPTY_FINAL_RESPONSE = "triton_enable_empty_final_response"

_SHARED_MEMORY_OFFSET = "shared_memory_offset"
_UINT64 = 0xFFFFFFFFFFFFFFFF


def apply_parameters(parameters: Mapping[str, Any], request: InferRequest) -> None:
    """Sets known parameters in `request`, and adds the others to its `parameters`.

    Raises HostError INVALID_ARG, or UNSUPPORTED for a correlation id that is too long.
    """
    for key, value in parameters.items():
        kind = value.WhichOneof("parameter_choice")
        if key == "sequence_id":
            if kind == "int64_param":
                request.correlation_id = value.int64_param & _UINT64
            elif kind == "string_param":
                request.correlation_id = checked_correlation_text(value.string_param)
            else:
                raise _type_error(key, "int64_param or string_param")
        elif key in ("sequence_start", "sequence_end"):
            if kind != "bool_param":
                raise _type_error(key, "bool_param")
            if value.bool_param:
                request.flags |= 1 if key == "sequence_start" else 2
        elif key == "priority":
            request.priority = _priority(kind, value)
        elif key == "timeout":
            if kind != "int64_param":
                raise _type_error(key, "int64_param")
            request.timeout_us = value.int64_param & _UINT64
        elif key == EMPTY_FINAL_RESPONSE:  # used by the stream only, see InferMessage
            if kind != "bool_param":
                raise _type_error(key, "bool_param")
        else:
            request.parameters[key] = _custom_parameter(key, kind, value)


def _priority(kind: str | None, value: Any) -> int:
    if kind == "uint64_param":
        return int(value.uint64_param)
    if kind != "int64_param":
        raise _type_error("priority", "int64_param or uint64_param")
    if value.int64_param < 0:
        raise invalid_argument("invalid value for 'priority', expected value >= 0.")
    return int(value.int64_param)


def _custom_parameter(key: str, kind: str | None, value: Any) -> Parameter:
    if key.startswith("triton_"):
        raise invalid_argument(
            "parameter keys starting with 'triton_' are reserved for Triton usage. Only the "
            f"following keys starting with 'triton_' are allowed: {EMPTY_FINAL_RESPONSE}"
        )
    if kind is None or kind == "uint64_param":
        raise _type_error(key, "int64_param, bool_param, or string_param")
    parameter: Parameter = getattr(value, kind)
    return parameter


def _type_error(key: str, expected: str) -> HostError:
    return invalid_argument(f"invalid value type for '{key}' parameter, expected {expected}.")


def shared_memory_part(tensor: str, parameters: Mapping[str, Any]) -> RegionPart | None:
    """The place of a tensor in shared memory, if it has one. Raises HostError INVALID_ARG."""
    region = None
    if "shared_memory_region" in parameters:
        _require_kind(tensor, parameters, "shared_memory_region", "string_param")
        region = str(parameters["shared_memory_region"].string_param)
    for key in (_SHARED_MEMORY_OFFSET, "shared_memory_byte_size"):
        if key in parameters:
            if region is None:
                raise invalid_argument(
                    f"'{key}' can not be specified without 'shared_memory_region' parameter for "
                    f"tensor '{tensor}'"
                )
            _require_kind(tensor, parameters, key, "int64_param")
    if region is not None and "shared_memory_byte_size" not in parameters:
        raise invalid_argument(
            "'shared_memory_byte_size' must be specified along with 'shared_memory_region' "
            f"parameter for tensor '{tensor}'"
        )
    if region is None:
        return None
    offset = (
        parameters["shared_memory_offset"].int64_param if _SHARED_MEMORY_OFFSET in parameters else 0
    )
    return RegionPart(region, offset, parameters["shared_memory_byte_size"].int64_param)


def _require_kind(tensor: str, parameters: Mapping[str, Any], key: str, kind: str) -> None:
    if parameters[key].WhichOneof("parameter_choice") != kind:
        raise invalid_argument(
            f"invalid value type for '{key}' parameter for tensor '{tensor}', expected {kind}."
        )


def output_options(name: str, parameters: Mapping[str, Any]) -> tuple[RegionPart | None, int]:
    """The place of an output in shared memory, and the number of its top classes, or 0.

    Raises HostError INVALID_ARG.
    """
    part = shared_memory_part(name, parameters)
    class_count = 0
    if "classification" in parameters:
        value = parameters["classification"]
        if value.WhichOneof("parameter_choice") != "int64_param":
            raise invalid_argument(
                "invalid value type for 'classification' parameter, expected int64_param"
            )
        if value.int64_param <= 0:
            raise invalid_argument("invalid value for 'classification' parameter, expected >= 0")
        if part is not None:
            raise invalid_argument(
                "output can't set both 'shared_memory_region' and 'classification'"
            )
        class_count = value.int64_param
    return part, class_count
