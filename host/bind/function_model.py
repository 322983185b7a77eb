"""Adapts a bound function to the interface of a `TritonPythonModel`, and checks its outputs."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import pb_utils
from host.bind.decorators import outputs_by_name, shape_matches
from host.bind.requests import Array, Request, batch_size, model_context
from host.bind.specs import (
    BadCallError,
    BadSpecError,
    ModelSpec,
    UnrecoverableError,
    triton_datatype,
)

_Requests = Sequence[pb_utils.InferenceRequest]


class Binding:
    """A model and its functions. Each function serves at most one instance at a time."""

    def __init__(self, spec: ModelSpec, functions: Sequence[Callable[..., Any]]) -> None:
        self.spec = spec
        self.failure = ""
        """Why the functions must no longer be called; empty while they may be."""
        self._free_functions = list(functions)
        self._lock = threading.Lock()

    def create_instance(self) -> FunctionModel | None:
        """Creates an instance with a free function; returns None if no function is free."""
        with self._lock:
            return (
                FunctionModel(self, self._free_functions.pop(0)) if self._free_functions else None
            )

    def release_function(self, function: Callable[..., Any]) -> None:
        """Frees the function of a finalized instance."""
        with self._lock:
            self._free_functions.append(function)


class FunctionModel:
    """One instance, which the worker calls like a `TritonPythonModel`.

    Source: docs/reference/model-methods.md, "Life of a TritonPythonModel".
    """

    def __init__(self, binding: Binding, function: Callable[..., Any]) -> None:
        self._binding = binding
        self._spec = binding.spec
        self._function = function

    def finalize(self) -> None:
        """Frees the function for another instance."""
        self._binding.release_function(self._function)

    def is_ready(self) -> bool:
        """Whether the function may be called. Raises UnrecoverableError with the reason if not."""
        self._check_usable()
        return True

    def _check_usable(self) -> None:
        if self._binding.failure:
            raise UnrecoverableError(
                f"model '{self._spec.name}' accepts no more requests: {self._binding.failure}"
            )

    def execute(self, requests: _Requests) -> Any:
        """Calls the function; returns the responses, or an awaitable of them.

        Raises BadCallError, and every exception that the function raises.
        """
        self._check_usable()
        try:
            with model_context(self._spec):
                returned = self._function([Request.received(request) for request in requests])
                if inspect.isawaitable(returned) or inspect.isasyncgen(returned):
                    return self._handle_async_result(requests, returned)
                return self._handle_result(requests, returned)
        except UnrecoverableError as error:
            self._mark_unrecoverable(error)
            raise

    def _mark_unrecoverable(self, error: UnrecoverableError) -> None:
        self._binding.failure = self._binding.failure or str(error)

    def _handle_result(self, requests: _Requests, returned: Any) -> Any:
        if not self._spec.config.decoupled:
            if inspect.isgenerator(returned):
                raise BadCallError("a generator needs a model that is bound with decoupled=True")
            return self._responses(requests, returned)
        for outputs in returned if inspect.isgenerator(returned) else [returned]:
            self._send(requests, outputs)
            if all(request.is_cancelled() for request in requests):
                break  # no client waits for more responses
        _send_final(requests)
        return None

    async def _handle_async_result(self, requests: _Requests, returned: Any) -> Any:
        try:
            with model_context(self._spec):
                if inspect.isawaitable(returned):
                    return self._handle_result(requests, await returned)
                if not self._spec.config.decoupled:
                    raise BadCallError(
                        "a generator needs a model that is bound with decoupled=True"
                    )
                async for outputs in returned:
                    self._send(requests, outputs)
                    if all(request.is_cancelled() for request in requests):
                        break
                _send_final(requests)
                return None
        except UnrecoverableError as error:
            self._mark_unrecoverable(error)
            raise

    def _send(self, requests: _Requests, outputs: Any) -> None:
        for request, response in zip(requests, self._responses(requests, outputs), strict=True):
            if response is not None:
                request.get_response_sender().send(response)

    def _responses(
        self, requests: _Requests, returned: Any
    ) -> list[pb_utils.InferenceResponse | None]:
        """Checks what the function returned and converts it to responses. Raises BadCallError."""
        if not isinstance(returned, (list, tuple)):
            raise BadCallError(
                "the function must return a list with a dict of arrays for each request; it"
                f" returned {_type_name(returned)}. For one dict, use @batch or @sample"
            )
        if len(returned) != len(requests):
            raise BadCallError(
                f"the function was called with {len(requests)} requests and returned"
                f" {len(returned)} results"
            )
        decoupled = self._spec.config.decoupled
        return [
            None if result is None and decoupled else self._response(request, result)
            for request, result in zip(requests, returned, strict=True)
        ]

    def _response(
        self, request: pb_utils.InferenceRequest, result: Any
    ) -> pb_utils.InferenceResponse:
        outputs = outputs_by_name(result)
        known = {str(output.name): output for output in self._spec.outputs}
        for name, array in outputs.items():
            if name not in known:
                raise BadCallError(
                    f"the function returned an output '{name}', but the outputs of model"
                    f" '{self._spec.name}' are {', '.join(known)}"
                )
            if not isinstance(array, np.ndarray):
                raise BadCallError(
                    f"output '{name}' must be a numpy array, got {_type_name(array)}"
                )
        if self._spec.strict:
            self._check_outputs(request, outputs)
        return pb_utils.InferenceResponse([_tensor(name, array) for name, array in outputs.items()])

    def _check_outputs(self, request: pb_utils.InferenceRequest, outputs: dict[str, Array]) -> None:
        """Checks dtypes and shapes against the specs. Raises BadCallError."""
        size = batch_size(Request.received(request)) if self._spec.config.batching else 0
        for spec in self._spec.outputs:
            name = str(spec.name)
            if name not in outputs:
                raise BadCallError(f"the function returned no output '{name}'")
            array = outputs[name]
            if _datatype(array) != triton_datatype(spec.dtype):
                raise BadCallError(
                    f"output '{name}' must have dtype {np.dtype(spec.dtype)}, got {array.dtype}"
                )
            shape = array.shape
            if self._spec.config.batching:
                # A response of a decoupled model may have any number of samples.
                if not shape or (shape[0] != size and not self._spec.config.decoupled):
                    raise BadCallError(
                        f"output '{name}' must have a first dimension of {size}, as the inputs of"
                        f" its request, got shape {shape}"
                    )
                shape = shape[1:]
            if not shape_matches(shape, spec.shape):
                beside = " after the batch dimension" if self._spec.config.batching else ""
                raise BadCallError(
                    f"output '{name}' must have shape {tuple(spec.shape)}{beside}, got {shape}"
                )


def _datatype(array: Array) -> str:
    """Returns the data type of an array, "" if the protocol does not have it."""
    try:
        return triton_datatype(array.dtype)
    except BadSpecError:
        return ""


def _tensor(name: str, array: Array) -> pb_utils.Tensor:
    if array.dtype.kind == "U":
        array = array.astype(np.object_)
    try:
        return pb_utils.Tensor(name, array)
    except pb_utils.TritonModelException as error:
        raise BadCallError(f"output '{name}' of dtype {array.dtype}: {error}") from error


def _send_final(requests: _Requests) -> None:
    for request in requests:
        request.get_response_sender().send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _type_name(value: object) -> str:
    return type(value).__name__
