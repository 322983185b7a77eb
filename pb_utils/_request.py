"""The request that a model receives, or sends to another model (BLS)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, overload

from pb_utils import _arguments, _bls, _parameters
from pb_utils._iterator import ResponseIterator
from pb_utils._memory import PreferredMemory
from pb_utils._model_exception import TritonModelException
from pb_utils._request_fields import NO_TRACE, InferenceTrace, RequestFields
from pb_utils._response import InferenceResponse
from pb_utils._sender import InferenceResponseSender, Responder
from pb_utils._tensor import Tensor

if TYPE_CHECKING:
    import asyncio

    Text = str | bytes | bytearray
    Parameters = dict[str, bool | int | str]

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2

_NO_PARAMETERS: Mapping[str, object] = {}
_NO_PREFERENCE = PreferredMemory._none()


class InferenceRequest(RequestFields):
    """A request with its input tensors: received by ``execute``, or created for another model."""

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
        """Create a request to another model.

        Args:
            request_id: appears in the other model's ``request_id()`` and in logs.
            correlation_id: sequence of a stateful model; an int of 64 bits without sign, or a str.
            inputs: tensors of any shape and data type.
            requested_output_names: outputs to return; all if empty.
            model_name: name of the other model.
            model_version: its version; -1 lets the model's version policy choose.
            flags: ``TRITONSERVER_REQUEST_FLAG_SEQUENCE_START`` and ``..._END`` or-ed.
            timeout: microseconds, applied to queueing only if the model's configuration allows.
            preferred_memory: preferred memory for the outputs.
            trace: trace that the request becomes part of.
            parameters: custom parameters, a dict of str to bool, int or str.

        Raises:
            TypeError: an argument has another type, is out of range, or is missing.
            RuntimeError: ``correlation_id`` is negative or needs more than 64 bits.
            TritonModelException: ``correlation_id`` is neither int nor str, an input is None, an
                output name is empty, or ``parameters`` is not a dict of str to bool, int or str.
        """
        take = "__init__"
        self._request_id = _arguments.check_text(take, "request_id", request_id)
        tensors = _arguments.check_elements(take, "inputs", inputs, Tensor)
        names = _arguments.check_sequence(
            take, "requested_output_names", requested_output_names, "str"
        )
        names = [_arguments.check_text(take, "requested_output_names", name) for name in names]
        self._model_name = _arguments.check_text(take, "model_name", model_name)
        self._model_version = _arguments.check_integer(
            take, "model_version", model_version, 64, True
        )
        self._flags = _arguments.check_integer(take, "flags", flags, 32)
        self._timeout = _arguments.check_integer(take, "timeout", timeout, 64)
        self._preferred_memory = _arguments.check_instance(
            take, "preferred_memory", preferred_memory, PreferredMemory
        )
        self._trace = _arguments.check_instance(take, "trace", trace, InferenceTrace)
        self._correlation_id = _checked_correlation_id(correlation_id)
        self._parameters = _arguments.check_parameters(parameters)
        self._inputs = [tensor for tensor in tensors if tensor is not None]
        self._requested_output_names = list(dict.fromkeys(names))
        if len(self._inputs) != len(tensors):
            raise self._lacks("Input tensor")
        if "" in names:
            raise self._lacks("Requested output name")
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
        """Make an incoming request. Nothing is checked, and nothing computed ahead of its use."""
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
        """Return the input tensors as a new list; optional inputs that were left out are absent."""
        return list(self._inputs)

    def request_id(self) -> str:
        """Return the request id that the client sent, or empty text."""
        return self._request_id

    def correlation_id(self) -> int | str:
        """Return the id of the sequence, 0 if there is none; int or str as the client sent it."""
        return self._correlation_id

    def flags(self) -> int:
        """Return the sequence flags, ``TRITONSERVER_REQUEST_FLAG_SEQUENCE_...`` or-ed."""
        return self._flags

    @_arguments.with_argument_errors
    def set_flags(self, flags: int) -> None:
        """Replace the sequence flags.

        Raises:
            TypeError: ``flags`` is not an unsigned integer of 32 bits.
        """
        self._flags = _arguments.check_integer("set_flags", "flags", flags, 32)

    @_arguments.with_argument_errors
    def set_release_flags(self, flags: int) -> None:
        """Set whether a request is released or rescheduled after ``execute`` returns.

        Args:
            flags: ``TRITONSERVER_REQUEST_RELEASE_ALL`` or ``..._RESCHEDULE``.

        Raises:
            TypeError: ``flags`` is not an unsigned integer of 32 bits.
            TritonModelException: the model created this request itself.
        """
        checked = _arguments.check_integer("set_release_flags", "flags", flags, 32)
        self._incoming("set_release_flags()")
        self._release_flags = checked

    def timeout(self) -> int:
        """Return the request's timeout in microseconds, 0 if none. The model must apply it."""
        return self._timeout

    def parameters(self) -> str:
        """Return the custom parameters as JSON text, ``{}`` if there are none.

        Raises:
            TritonModelException: a parameter is neither bool, int, str nor float.
        """
        return _parameters.to_json(self._parameters)

    def requested_output_names(self) -> set[str]:
        """Return the names of the requested outputs; all outputs if the client named none."""
        return set(self._requested_output_names)

    def trace(self) -> InferenceTrace:
        """Return the trace; pass it to requests that become part of it."""
        return self._trace

    def is_cancelled(self) -> bool:
        """Return whether the client has cancelled the request; once true it stays so.

        Raises:
            TritonModelException: the model created this request itself.
        """
        if not self._cancelled:
            self._cancelled = self._incoming("is_cancelled()").is_cancelled()
        return self._cancelled

    def get_response_sender(self) -> InferenceResponseSender:
        """Return the request's sender, always the same one.

        It stays valid after the request is deleted. The sender of a request that the model created
        cannot send.
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
        """Send the request to its model and wait. It may be sent repeatedly.

        Args:
            decoupled: whether the model may give any number of responses.
            execution_timeout: seconds until the last response; then the request is cancelled and
                answered with an error, UNAVAILABLE. None for no limit. Triton does not have this
                argument.

        Returns:
            The response; if ``decoupled``, an iterator, after the first response has arrived. If
            the model fails or does not exist, the response has an error.

        Raises:
            TypeError: ``decoupled`` is not a bool, or ``execution_timeout`` not a number above 0.
            TritonModelException: called outside of ``execute``.
        """
        several = _arguments.check_boolean("exec", "decoupled", decoupled)
        seconds = _arguments.check_seconds("exec", "execution_timeout", execution_timeout)
        return _bls.exec_and_wait(self, several, seconds)

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
        """Send the request like ``exec``, without blocking the running event loop.

        Returns:
            A future of what ``exec`` returns. Cancelling it cancels the request.

        Raises:
            TypeError: ``decoupled`` is not a bool, or ``execution_timeout`` not a number above 0.
            RuntimeError: no event loop is running.
            TritonModelException: raised by the future: called outside of ``execute``.
        """
        several = _arguments.check_boolean("async_exec", "decoupled", decoupled)
        seconds = _arguments.check_seconds("async_exec", "execution_timeout", execution_timeout)
        return _bls.exec_on_event_loop(self, several, seconds)

    def __repr__(self) -> str:
        """Show id, model and inputs."""
        return (
            f"InferenceRequest(request_id={self._request_id!r}, "
            f"model_name={self._model_name!r}, inputs={self._inputs!r})"
        )

    def _lacks(self, what: str) -> TritonModelException:
        return TritonModelException(
            f"{what} for request with id '{self._request_id}' and model name "
            f"'{self._model_name}' should not be empty."
        )

    def _incoming(self, call: str) -> Responder:
        if self._handle is None:
            raise TritonModelException(
                f"{call} is only supported on requests that were passed to 'execute'."
            )
        return self._handle


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """Return the request's first input tensor of that name, or None if it has none."""
    for tensor in inference_request.inputs():
        if tensor.name() == name:
            return tensor
    return None


def _checked_correlation_id(value: object) -> int | str:
    if value is None:
        raise _arguments.type_error("__init__", "correlation_id", "an int or str", value)
    if isinstance(value, str):
        return _arguments.check_text("__init__", "correlation_id", value)
    if not isinstance(value, int):
        raise TritonModelException("Correlation ID must be integer or string")
    if not 0 <= value < 1 << 64:
        raise RuntimeError(f"Correlation ID {value} does not fit 64 bits without sign")
    return int(value)
