"""Requests and their options, and the messages of requests and responses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from host.client.shared_memory import Region
from host.client.signature import EncodedTensor, Signature, decode
from host.errors import internal, invalid_argument
from host.inference.request import Parameter, Result
from pb_utils._datatypes import SIZES

UNKNOWN_MODEL = "Request for unknown model"
"""How errors about models that are not loaded begin."""

EMPTY_FINAL = "triton_enable_empty_final_response"
_FINAL = "triton_final_response"


@dataclass(slots=True)  # not frozen, which would triple the time to make one
class RequestOptions:
    """All of a request but its inputs. `retried`: False for requests of sequences."""

    model: str
    version: int = -1
    request_id: str = ""
    outputs: Sequence[str] = ()
    classes: Mapping[str, int] = field(default_factory=dict)
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    priority: int = 0
    queue_timeout: float | None = None
    timeout: float | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    retried: bool = True

    @property
    def written_version(self) -> str:
        """The version as the protocol has it."""
        return written_version(self.version)

    def check_classes(self) -> None:
        """Raises HostError INVALID_ARG for classes of an output that is not requested."""
        for name in self.classes:
            if self.outputs and name not in self.outputs:
                raise invalid_argument(
                    f"`classes` has '{name}', which is not one of the requested `outputs`"
                )


def written_version(version: int) -> str:
    """A version as the protocol has it."""
    return "" if version == -1 else str(version)


def new_request(
    model: str,
    version: str,
    request_id: str = "",
    outputs: Sequence[str] = (),
    parameters: Mapping[str, Parameter] = MappingProxyType({}),
) -> Any:
    """Returns a request without inputs. Raises HostError INVALID_ARG for a parameter."""
    message = pb.ModelInferRequest(model_name=model, model_version=version, id=request_id)
    for name, value in parameters.items():
        set_parameter(message, name, value)
    for name in outputs:
        message.outputs.add(name=name)
    return message


def to_message(options: RequestOptions, signature: Signature) -> Any:
    """Returns the message of a request without its inputs. Raises HostError INVALID_ARG."""
    message = new_request(
        options.model, options.written_version, options.request_id, options.outputs,
        options.parameters,
    )  # fmt: skip
    if options.priority:
        set_parameter(message, "priority", options.priority)
    if options.queue_timeout is not None:
        set_parameter(message, "timeout", round(options.queue_timeout * 1_000_000))
    if options.classes:
        if not options.outputs:
            for name in signature.outputs:
                message.outputs.add(name=name)
        for entry in message.outputs:
            if entry.name in options.classes:
                entry.parameters["classification"].int64_param = options.classes[entry.name]
    return message


def unfit_request(model: str, version: str) -> Any:
    """Returns a request that every model refuses; a model that loads on demand is loaded by it."""
    message = new_request(model, version)
    add_input(message, EncodedTensor("an input that no model has", "INT32", (1,), bytes(4)))
    return message


def add_input(message: Any, tensor: EncodedTensor) -> None:
    """Adds an input with its content to a request."""
    message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    content = tensor.content
    message.raw_input_contents.append(content if isinstance(content, bytes) else content.tobytes())


def set_parameter(message: Any, name: str, value: Parameter) -> None:
    """Sets a parameter of a request. Raises HostError INVALID_ARG for an unsupported value."""
    parameter = message.parameters[name]
    if isinstance(value, bool):  # before int, of which it is a subclass
        parameter.bool_param = value
    elif isinstance(value, int) and -(2**63) <= value < 2**63:
        parameter.int64_param = value
    elif isinstance(value, int) and 0 <= value < 2**64:
        parameter.uint64_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    elif isinstance(value, str):
        parameter.string_param = value
    else:
        raise invalid_argument(
            f"parameter '{name}': expected a bool, an int of 64 bits, a float or a str, got"
            f" {value!r}"
        )


def to_result(
    response: Any,
    region: Region | None = None,
    places: Mapping[str, tuple[int, int]] = MappingProxyType({}),
) -> Result:
    """Returns a response; outputs with a place in the region are copied. Raises HostError."""
    contents = response.raw_output_contents
    raw = iter(contents)
    # Some servers have no entry for an output in shared memory.
    complete = len(contents) == len(response.outputs)
    outputs = {}
    for output in response.outputs:
        name, datatype, shape = output.name, output.datatype, tuple(output.shape)
        if region is not None and name in places:
            if complete:
                next(raw)
            offset, space = places[name]
            size = math.prod(shape) * SIZES.get(datatype, 0)
            content: Any = region.read(offset, min(size, space))
        else:
            content = next(raw, None)
            if content is None:
                raise internal(f"the server sent output '{name}' not in raw form")
        outputs[name] = decode(name, datatype, shape, content)
    version = response.model_version
    return Result(
        response.model_name,
        int(version) if version.isdigit() else -1,
        response.id,
        outputs,
        parameter_values(response.parameters) if response.parameters else {},
    )


def parameter_values(parameters: Mapping[str, Any]) -> dict[str, Parameter]:
    """Returns the parameters of a message by name."""
    return {
        name: getattr(value, kind)
        for name, value in parameters.items()
        if (kind := value.WhichOneof("parameter_choice")) is not None
    }


def take_final(response: Any) -> bool:
    """Whether no response follows this one of a stream; removes the parameter that says so."""
    if _FINAL not in response.parameters:
        return False
    final: bool = response.parameters[_FINAL].bool_param
    del response.parameters[_FINAL]
    return final
