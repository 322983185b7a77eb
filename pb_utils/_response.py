"""The response that a model returns, or receives from another model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pb_utils import _arguments, _parameters
from pb_utils._errors import TritonError
from pb_utils._model_exception import TritonModelException
from pb_utils._tensor import Tensor

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class InferenceResponse:
    """Output tensors, or an error, and custom parameters."""

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
        """Create a response from output tensors of any shape and data type.

        Args:
            output_tensors: the outputs; those that the client did not request are dropped.
            error: fails the request; output tensors and parameters are then ignored.
            parameters: custom parameters for the client; integers of 64 bits.

        Raises:
            TypeError: an argument has another type; ``error`` may not be a str.
            TritonModelException: an output tensor is None, or ``parameters`` is no dict of str to
                bool, int or str.
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
        """Make a received response; parameters of None are those of one that cannot have any."""
        response = cls.__new__(cls)
        response._output_tensors = output_tensors
        response._error = error
        response._parameters = parameters
        return response

    def output_tensors(self) -> list[Tensor]:
        """Return the output tensors as a new list."""
        return list(self._output_tensors)

    def has_error(self) -> bool:
        """Return whether the request failed."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """Return the error if the request failed, else None."""
        return self._error

    def parameters(self) -> str:
        """Return the parameters as JSON text: ``{}`` if there are none.

        The text is empty for an error, and for an empty final response of another model.

        Raises:
            TritonModelException: a received parameter is neither bool, int, str nor float.
        """
        return "" if self._parameters is None else _parameters.to_json(self._parameters)

    def __repr__(self) -> str:
        """Show the error or the outputs."""
        if self._error is not None:
            return f"InferenceResponse(error={self._error!r})"
        return f"InferenceResponse(output_tensors={self._output_tensors!r})"


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """Return the response's first output tensor of that name, or None."""
    for tensor in inference_response.output_tensors():
        if tensor.name() == name:
            return tensor
    return None
