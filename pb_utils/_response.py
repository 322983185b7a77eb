"""The response that a model returns, or receives from another model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pb_utils import _arguments, _parameters
from pb_utils._errors import TritonError
from pb_utils._model_exception import TritonModelException
from pb_utils._suggestions import SuggestingType
from pb_utils._tensor import Tensor

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class InferenceResponse(metaclass=SuggestingType):
    """An inference response: output tensors or an error, and custom parameters.

    The rules are in ``docs/reference/model-api.md``, 3.8.
    """

    __slots__ = ("__weakref__", "_error", "_output_tensors", "_parameters")

    _output_tensors: list[Tensor]
    _error: TritonError | None
    _parameters: Mapping[str, object] | None

    @_arguments.with_argument_errors
    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: dict[str, bool | int | str] | None = None,
    ) -> None:
        """Creates a response.

        Args:
            output_tensors: output tensors of any shape and data type. The server removes outputs
                that the client did not request.
            error: makes the request fail with this error. The server then ignores output tensors
                and parameters.
            parameters: custom parameters for the client, a dict of str to bool, int (signed, 64
                bits) or str.

        Raises:
            TypeError: an argument has the wrong type. ``error`` must be a ``TritonError``, not a
                str.
            TritonModelException: an output tensor is None, or ``parameters`` is not a dict of str
                to bool, int or str.

        Examples:
            >>> pb_utils.InferenceResponse([pb_utils.Tensor("Y", array)])
            >>> pb_utils.InferenceResponse(error=pb_utils.TritonError("X must be positive"))
        """
        tensors = _arguments.check_elements("__init__", "output_tensors", output_tensors, Tensor)
        if error is not None:
            _arguments.check_instance("__init__", "error", error, TritonError)
        self._parameters = _arguments.check_parameters(parameters)
        self._output_tensors = [tensor for tensor in tensors if tensor is not None]
        if len(self._output_tensors) != len(tensors):
            raise TritonModelException("Output tensor for inference response should not be empty.")
        self._error = error

    @classmethod
    def _from_wire(
        cls,
        output_tensors: list[Tensor],
        error: TritonError | None,
        parameters: Mapping[str, object] | None,
    ) -> InferenceResponse:
        """Creates a received response; ``parameters`` is None if it cannot have any."""
        response = cls.__new__(cls)
        response._output_tensors = output_tensors
        response._error = error
        response._parameters = parameters
        return response

    def output_tensors(self) -> list[Tensor]:
        """Returns the output tensors as a new list."""
        return list(self._output_tensors)

    def has_error(self) -> bool:
        """Returns whether the response is an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """Returns the error; None if the request succeeded."""
        return self._error

    def parameters(self) -> str:
        """Returns the custom parameters as JSON text; ``{}`` if there are none.

        The text is empty for a received error, and for the empty final response of a decoupled
        model (docs/reference/model-api.md, "Calls").

        Raises:
            TritonModelException: the value of a received parameter is not a bool, int, float or
                str.
        """
        return "" if self._parameters is None else _parameters.to_json(self._parameters)

    def __repr__(self) -> str:
        """Shows the error or the outputs."""
        if self._error is not None:
            return f"InferenceResponse(error={self._error!r})"
        return f"InferenceResponse(output_tensors={self._output_tensors!r})"


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """Returns the first output tensor with a name.

    Args:
        inference_response: the response.
        name: name of the output.

    Returns:
        The tensor, or None if the response has no such output.
    """
    for tensor in inference_response.output_tensors():
        if tensor.name() == name:
            return tensor
    return None
