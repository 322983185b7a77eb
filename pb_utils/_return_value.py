"""Calls ``execute`` of a model, and checks what it returned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, Iterable, List, Mapping, Optional, Sequence

from pb_utils._datatypes import NAMES
from pb_utils._model_methods import defines
from pb_utils._request import TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
from pb_utils._response import InferenceResponse
from pb_utils._sender import MORE_THAN_ONE, Responder

if TYPE_CHECKING:
    from pb_utils._request import InferenceRequest
    from pb_utils._tensor import Tensor


def find_mismatches(
    response: InferenceResponse, config: Mapping[str, Any], requested: Sequence[str] = ()
) -> List[str]:
    """Returns a sentence for each output that differs. A server passes such a response on.

    Args:
        response: a response that is not an error.
        config: the configuration of the model; a decoupled model may leave outputs out.
        requested: names of the requested outputs; all outputs if empty.
    """
    declared: Dict[str, Mapping[str, Any]] = {entry["name"]: entry for entry in config["output"]}
    tensors = {tensor.name(): tensor for tensor in response.output_tensors()}
    found: List[str] = []
    for name, entry in declared.items():
        shape = declared_shape(entry, config["max_batch_size"])
        expected = f"the configuration declares {entry['data_type']} {shape}"
        tensor = tensors.get(name)
        if tensor is None:
            if not _is_decoupled(config) and (not requested or name in requested):
                found.append(f"output '{name}' is missing; {expected}")
            continue
        given = "TYPE_" + NAMES[tensor.triton_dtype()].replace("BYTES", "STRING")
        sizes = tensor.shape()
        fits = len(sizes) == len(shape) and all(
            wanted in (-1, size) for wanted, size in zip(shape, sizes)
        )
        if given != entry["data_type"] or not fits:
            found.append(f"output '{name}' is {given} {list(sizes)}; {expected}")
    return found


def describe_undeclared(
    model: str, outputs: Iterable[Tensor], declared: Sequence[str]
) -> Optional[str]:
    """Returns a sentence about the outputs that are not declared; None if there are none.

    Args:
        model: name of the model.
        outputs: the outputs of a response.
        declared: names of the outputs of its configuration.
    """
    names = [tensor._name for tensor in outputs if tensor._name not in declared]
    if not names:
        return None
    return (
        f"model '{model}' returned an output {_quote(names)}, which its configuration does not"
        f" have; the configuration has: {_quote(declared)}"
    )


def _quote(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "no output"


def declared_shape(entry: Mapping[str, Any], max_batch_size: int) -> List[int]:
    """Returns the shape of a tensor for the model, with the batch dimension; -1 is any size."""
    dims = entry.get("reshape", {}).get("shape", entry["dims"])
    return [-1, *dims] if max_batch_size > 0 else list(dims)


def _is_decoupled(config: Mapping[str, Any]) -> bool:
    return bool(config.get("model_transaction_policy", {}).get("decoupled"))


class InvalidReturnValue(Exception):
    """A batch cannot be answered by what the model did; the text is what a server sends."""


def call_execute(model: Any, path: object, requests: Sequence[InferenceRequest]) -> Any:
    """Calls ``execute`` of a model, whose file is ``path``.

    Raises:
        InvalidReturnValue: the model has no such method.
        Exception: any exception of the model.
    """
    if not defines(model, "execute"):
        raise InvalidReturnValue(f"Python model {path} does not implement `execute` method.")
    return model.execute(requests)


def check_return_value(
    instance: str,
    decoupled: bool,
    requests: Sequence[InferenceRequest],
    responders: Sequence[Responder],
    returned: Any,
) -> None:
    """Checks a value that is not None.

    Args:
        instance: name of the model instance.
        decoupled: whether the model is decoupled.
        requests: the requests of the batch, in the list that the model got.
        responders: their responders.
        returned: the value.

    Raises:
        InvalidReturnValue: the value is not a list with one response, or None, for each request.
    """
    if decoupled:
        raise InvalidReturnValue(
            f"Python model '{instance}' is using the decoupled mode and the execute function must "
            "return None."
        )
    if not isinstance(returned, list):
        raise InvalidReturnValue(
            f"Expected a list in the execute return, found type '{type(returned)}'."
        )
    if len(returned) != len(responders):
        raise InvalidReturnValue(
            "Number of InferenceResponse objects do not match the number of InferenceRequest "
            f"objects. InferenceRequest(s) size is:{len(responders)}, and InferenceResponse(s) "
            f"size is:{len(returned)}\n"
        )
    for request, responder, response in zip(requests, responders, returned):
        if response is None:
            continue
        if request._release_flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE:
            raise InvalidReturnValue(
                "Expected a None object in the execute function return list for reschduled "
                f"request, found type '{type(response)}'."
            )
        if not isinstance(response, InferenceResponse):
            raise InvalidReturnValue(
                "Expected an 'InferenceResponse' object in the execute function return list, "
                f"found type '{type(response)}'."
            )
        if responder.has_response:
            raise InvalidReturnValue(MORE_THAN_ONE)
