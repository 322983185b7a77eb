"""Calls ``execute`` of a model, and checks what it returned (docs/reference/model-api.md, "execute:
returned responses").
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Sequence

from pb_utils._model_methods import defines
from pb_utils._request import TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
from pb_utils._response import InferenceResponse
from pb_utils._sender import MORE_THAN_ONE, Responder

if TYPE_CHECKING:
    from pb_utils._request import InferenceRequest


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
