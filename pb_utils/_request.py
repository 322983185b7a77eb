"""The request that a model receives, or sends to another model (BLS)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Callable, List, Literal, overload

import numpy as np

from pb_utils import _arguments, _bls, _response
from pb_utils._bls import ResponseIterator
from pb_utils._exceptions import SuggestingType, TritonModelException
from pb_utils._request_fields import NO_TRACE, InferenceTrace, PreferredMemory, RequestFields
from pb_utils._response import InferenceResponse, InferenceResponseSender, Responder
from pb_utils._tensor import Tensor

if TYPE_CHECKING:
    import asyncio

    import numpy.typing as npt

    Text = str | bytes | bytearray
    Parameters = dict[str, bool | int | str]
    SplitResult = Callable[[npt.NDArray[Any]], List[npt.NDArray[Any]]]

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2

_NO_PARAMETERS: Mapping[str, object] = {}
_NO_PREFERENCE = PreferredMemory._none()


class InferenceRequest(RequestFields, metaclass=SuggestingType):
    """An inference request: received by ``execute``, or created for another model (BLS).

    The rules are in docs/reference/model-tensors.md, "InferenceRequest", and
    docs/reference/model-bls.md.
    """

    __slots__ = ()

    @overload
    def __init__(
        self,
        request_id: Text = "",
        correlation_id: int | str = 0,
        *,
        inputs: Sequence[Tensor],
        requested_output_names: Sequence[Text],
        model_name: Text,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory = ...,
        trace: InferenceTrace = ...,
        parameters: Parameters | None = None,
    ) -> None: ...

    @overload
    def __init__(
        self,
        request_id: Text,
        correlation_id: int | str,
        inputs: Sequence[Tensor],
        requested_output_names: Sequence[Text],
        model_name: Text,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory = ...,
        trace: InferenceTrace = ...,
        parameters: Parameters | None = None,
    ) -> None: ...

    @_arguments.with_argument_errors
    def __init__(
        self,
        request_id: Text = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] = _arguments.MISSING,
        requested_output_names: Sequence[Text] = _arguments.MISSING,
        model_name: Text = _arguments.MISSING,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory = _NO_PREFERENCE,
        trace: InferenceTrace = NO_TRACE,
        parameters: Parameters | None = None,
    ) -> None:
        """Creates a request to another model.

        Args:
            request_id: id of the request, for the other model's ``request_id()`` and for logs.
            correlation_id: id of the sequence, for a stateful model: an unsigned 64-bit int, or a
                str.
            inputs: input tensors of any shape and data type; may be empty.
            requested_output_names: names of the outputs to return; all outputs if empty.
            model_name: name of the other model.
            model_version: version of the other model; -1 lets its version policy choose.
            flags: sequence flags, ``TRITONSERVER_REQUEST_FLAG_SEQUENCE_START`` and ``..._END``
                combined with ``|``.
            timeout: queue timeout in microseconds, 0 for none. It has an effect only if the queue
                policy of the other model allows it (docs/reference/model-bls.md, "Rules").
            preferred_memory: memory in which the outputs should be; no preference by default.
            trace: trace to which the request is added, for example ``request.trace()``.
            parameters: custom parameters, a dict of str to bool, int or str.

        Raises:
            TypeError: an argument is missing, has the wrong type or is out of range.
            RuntimeError: ``correlation_id`` is an int that is negative or needs more than 64 bits.
            TritonModelException: ``correlation_id`` is neither int nor str, an input is None, an
                output name is empty, or ``parameters`` is not a dict of str to bool, int or str.

        Examples:
            >>> request = pb_utils.InferenceRequest(
            ...     model_name="square", inputs=[tensor], requested_output_names=["Y"]
            ... )
            >>> response = request.exec()
        """
        function = "__init__"
        self._request_id = _arguments.check_text(function, "request_id", request_id)
        tensors = _arguments.check_elements(function, "inputs", inputs, Tensor)
        names = _arguments.check_sequence(
            function, "requested_output_names", requested_output_names, "str"
        )
        names = [_arguments.check_text(function, "requested_output_names", name) for name in names]
        self._model_name = _arguments.check_text(function, "model_name", model_name)
        self._model_version = _arguments.check_integer(
            function, "model_version", model_version, 64, True
        )
        self._flags = _arguments.check_integer(function, "flags", flags, 32)
        self._timeout = _arguments.check_integer(function, "timeout", timeout, 64)
        self._preferred_memory = _arguments.check_instance(
            function, "preferred_memory", preferred_memory, PreferredMemory
        )
        self._trace = _arguments.check_instance(function, "trace", trace, InferenceTrace)
        self._correlation_id = _checked_correlation_id(correlation_id)
        self._parameters = _arguments.check_parameters(parameters)
        self._inputs = [tensor for tensor in tensors if tensor is not None]
        self._requested_output_names = list(dict.fromkeys(names))
        if len(self._inputs) != len(tensors):
            raise self._empty_error("Input tensor")
        if "" in names:
            raise self._empty_error("Requested output name")
        self._handle = None
        self._sender = None
        self._release_flags = TRITONSERVER_REQUEST_RELEASE_ALL
        self._cancelled = False

    @classmethod
    def _from_wire(
        cls,
        *,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: list[Tensor],
        requested_output_names: Iterable[str] = (),
        model_name: str = "",
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        parameters: Mapping[str, object] = _NO_PARAMETERS,
        trace: InferenceTrace = NO_TRACE,
        handle: Responder,
    ) -> InferenceRequest:
        """Creates a received request. Its fields come from the runtime, so they are not checked."""
        request = cls.__new__(cls)
        request._request_id = request_id
        request._correlation_id = correlation_id
        request._inputs = inputs
        request._requested_output_names = requested_output_names
        request._model_name = model_name
        request._model_version = model_version
        request._flags = flags
        request._timeout = timeout
        request._parameters = parameters
        request._trace = trace
        request._handle = handle
        request._sender = None
        request._preferred_memory = _NO_PREFERENCE
        request._release_flags = TRITONSERVER_REQUEST_RELEASE_ALL
        request._cancelled = False
        return request

    def inputs(self) -> list[Tensor]:
        """Returns the input tensors as a new list.

        The list includes the control, state and batch inputs of the configuration. Optional inputs
        that the client left out are absent. The order is not defined.
        """
        return list(self._inputs)

    def request_id(self) -> str:
        """Returns the request id that the client sent; ``""`` if it sent none."""
        return self._request_id

    def correlation_id(self) -> int | str:
        """Returns the id of the sequence: int or str, as the client sent it; 0 if there is none."""
        return self._correlation_id

    def flags(self) -> int:
        """Returns the sequence flags.

        They are ``TRITONSERVER_REQUEST_FLAG_SEQUENCE_START`` and ``..._END`` combined with ``|``.
        """
        return self._flags

    @_arguments.with_argument_errors
    def set_flags(self, flags: int) -> None:
        """Replaces the sequence flags.

        Args:
            flags: ``TRITONSERVER_REQUEST_FLAG_SEQUENCE_START`` and ``..._END`` combined with ``|``.

        Raises:
            TypeError: ``flags`` is not an integer from 0 to 2**32 - 1.
        """
        self._flags = _arguments.check_integer("set_flags", "flags", flags, 32)

    @_arguments.with_argument_errors
    def set_release_flags(self, flags: int) -> None:
        """Sets whether the server releases or reschedules the request when ``execute`` returns.

        Rescheduling needs a model of iterative sequences (docs/reference/model-methods.md,
        "Rescheduling").

        Args:
            flags: ``TRITONSERVER_REQUEST_RELEASE_ALL`` or
                ``TRITONSERVER_REQUEST_RELEASE_RESCHEDULE``.

        Raises:
            TypeError: ``flags`` is not an integer from 0 to 2**32 - 1.
            TritonModelException: the model created the request itself.
        """
        checked = _arguments.check_integer("set_release_flags", "flags", flags, 32)
        self._received_handle("set_release_flags()")
        self._release_flags = checked

    def timeout(self) -> int:
        """Returns the timeout of the request in microseconds; 0 if there is none.

        The server applies it to the wait in the queue only. A model can apply it to its own work.
        """
        return self._timeout

    def parameters(self) -> str:
        """Returns the custom parameters as JSON text; ``{}`` if there are none.

        Raises:
            TritonModelException: the value of a parameter is not a bool, int, float or str.
        """
        if self._handle is None:  # the model's own: Triton gives them to json.dumps
            return json.dumps(self._parameters)
        return _response.to_json(self._parameters)

    def requested_output_names(self) -> set[str]:
        """Returns the names of the requested outputs; all outputs if the client named none."""
        return set(self._requested_output_names)

    def trace(self) -> InferenceTrace:
        """Returns the trace of the request.

        Pass it to requests to other models, so that they become part of the trace.
        """
        return self._trace

    def is_cancelled(self) -> bool:
        """Returns whether the client has cancelled the request. Once True, it stays True.

        Raises:
            TritonModelException: the model created the request itself.
        """
        if not self._cancelled:
            self._cancelled = self._received_handle("is_cancelled()").is_cancelled()
        return self._cancelled

    def get_response_sender(self) -> InferenceResponseSender:
        """Returns the response sender of the request; each call returns the same object.

        The sender stays valid after the request object is deleted. The sender of a request that the
        model created itself cannot send.
        """
        if self._sender is None:
            self._sender = InferenceResponseSender._from_responder(self._handle)
        return self._sender

    @overload
    def exec(
        self, decoupled: Literal[False] = False, *, execution_timeout: float | None = None
    ) -> InferenceResponse: ...

    @overload
    def exec(
        self, decoupled: Literal[True], *, execution_timeout: float | None = None
    ) -> ResponseIterator: ...

    @overload
    def exec(
        self, decoupled: bool, *, execution_timeout: float | None = None
    ) -> InferenceResponse | ResponseIterator: ...

    @_arguments.with_argument_errors
    def exec(
        self, decoupled: bool = False, *, execution_timeout: float | None = None
    ) -> InferenceResponse | ResponseIterator:
        """Sends the request to the other model and waits for the response.

        A request can be sent any number of times. The rules are in docs/reference/model-bls.md.

        Args:
            decoupled: whether to accept any number of responses, as a decoupled model sends them.
            execution_timeout: time limit in seconds, up to the last response. When it expires, the
                request is cancelled and its last response is an error, UNAVAILABLE. None is no
                limit. Triton does not have this argument.

        Returns:
            The response. If ``decoupled``, an iterator over the responses, as soon as the first one
            has arrived. A failure is a response whose ``has_error()`` is True.

        Raises:
            TypeError: ``decoupled`` is not a bool, or ``execution_timeout`` is not a number above
                0.
            TritonModelException: called before ``initialize`` has ended or after ``finalize`` has
                begun, or no server runs the model.
        """
        decoupled = _arguments.check_boolean("exec", "decoupled", decoupled)
        execution_timeout = _arguments.check_seconds("exec", "execution_timeout", execution_timeout)
        return _bls.exec_and_wait(self, decoupled, execution_timeout)

    @overload
    def async_exec(
        self, decoupled: Literal[False] = False, *, execution_timeout: float | None = None
    ) -> asyncio.Future[InferenceResponse]: ...

    @overload
    def async_exec(
        self, decoupled: Literal[True], *, execution_timeout: float | None = None
    ) -> asyncio.Future[ResponseIterator]: ...

    @overload
    def async_exec(
        self, decoupled: bool, *, execution_timeout: float | None = None
    ) -> asyncio.Future[InferenceResponse] | asyncio.Future[ResponseIterator]: ...

    @_arguments.with_argument_errors
    def async_exec(
        self, decoupled: bool = False, *, execution_timeout: float | None = None
    ) -> asyncio.Future[InferenceResponse] | asyncio.Future[ResponseIterator]:
        """Sends the request to the other model, without blocking the running event loop.

        Args:
            decoupled: as for ``exec``.
            execution_timeout: as for ``exec``.

        Returns:
            A future of the running event loop; its result is what ``exec`` returns. Cancelling the
            future cancels the request. The future raises TritonModelException where ``exec`` raises
            it.

        Raises:
            TypeError: ``decoupled`` is not a bool, or ``execution_timeout`` is not a number above
                0.
            RuntimeError: no event loop is running.

        Examples:
            >>> responses = await asyncio.gather(first.async_exec(), second.async_exec())
        """
        decoupled = _arguments.check_boolean("async_exec", "decoupled", decoupled)
        execution_timeout = _arguments.check_seconds(
            "async_exec", "execution_timeout", execution_timeout
        )
        return _bls.exec_on_event_loop(self, decoupled, execution_timeout)

    def __repr__(self) -> str:
        """Shows id, model and inputs."""
        return (
            f"InferenceRequest(request_id={self._request_id!r}, "
            f"model_name={self._model_name!r}, inputs={self._inputs!r})"
        )

    def _empty_error(self, what: str) -> TritonModelException:
        return TritonModelException(
            f"{what} for request with id '{self._request_id}' and model name "
            f"'{self._model_name}' should not be empty."
        )

    def _received_handle(self, call: str) -> Responder:
        if self._handle is None:
            raise TritonModelException(
                f"{call} is only supported on requests that were passed to 'execute'."
            )
        return self._handle


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """Returns the first input tensor with a name.

    Args:
        inference_request: the request.
        name: name of the input.

    Returns:
        The tensor, or None if the request has no such input, for example an optional input that the
        client left out.
    """
    for tensor in inference_request.inputs():
        if tensor.name() == name:
            return tensor
    return None


def _checked_correlation_id(value: object) -> int | str:
    if type(value) is int and 0 <= value < 1 << 64:
        return value
    if value is None:
        raise _arguments.type_error("__init__", "correlation_id", "an int or str", value)
    if isinstance(value, str):
        return _arguments.check_text("__init__", "correlation_id", value)
    if not isinstance(value, int):
        raise TritonModelException("Correlation ID must be integer or string")
    if not 0 <= value < 1 << 64:
        raise RuntimeError(f"Correlation ID {value} does not fit 64 bits without sign")
    return int(value)


def stack_inputs(
    requests: Sequence[InferenceRequest], name: str
) -> tuple[npt.NDArray[Any], SplitResult]:
    """Joins an input of all requests along the first dimension, the batch dimension.

    Triton does not have this function.

    Args:
        requests: the requests of ``execute``, at least one.
        name: name of the input. It must have the same shape in all requests, except for the first
            dimension.

    Returns:
        The joined array, which the model may change, and a function. The function takes an array
        with the same first dimension, such as the model's result, and returns a list with the part
        of each request, as views.

    Raises:
        TritonModelException: there are no requests, a request does not have the input, the shapes
            do not fit together, or a tensor cannot be converted to numpy.

    Examples:
        >>> x, split = pb_utils.stack_inputs(requests, "X")
        >>> return [
        ...     pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)]) for y in split(self.run(x))
        ... ]
    """
    tensors = [get_input_tensor_by_name(request, name) for request in requests]
    if not tensors:
        raise TritonModelException("There are no requests to stack.")
    found = [tensor for tensor in tensors if tensor is not None]
    if len(found) < len(tensors):
        index = tensors.index(None)
        raise TritonModelException(f"Request {index} of the batch has no input '{name}'.")
    first = found[0].shape()
    for index, tensor in enumerate(found):
        shape = tensor.shape()
        if not shape or shape[1:] != first[1:]:
            raise TritonModelException(
                f"Input '{name}' cannot be stacked: its shape is {first} in request 0 and {shape}"
                f" in request {index} of the batch."
            )
    ends = np.cumsum([tensor.shape()[0] for tensor in found]).tolist()
    if len(found) == 1:
        stacked = found[0].as_numpy()
    else:
        stacked = np.concatenate([tensor.as_numpy(copy=False) for tensor in found])

    def split(result: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        shape = list(np.shape(result))
        if shape[:1] != ends[-1:]:
            raise TritonModelException(
                f"The result cannot be split: its shape is {shape}, but the first dimension of the"
                f" stacked input '{name}' is {ends[-1]}."
            )
        return np.split(result, ends[:-1])

    return stacked, split
