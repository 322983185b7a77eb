"""A bound function in the place of a `TritonPythonModel`: requests in, its answers out, checked."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import pb_utils
from host.bind.context import called_for
from host.bind.decorators import fits
from host.bind.errors import BadCallError, BadSpecError, UnrecoverableError
from host.bind.requests import Array, Request, batch_size
from host.bind.specs import ModelSpec, datatype
from host.bind.wrapping import outputs_by_name

_Requests = Sequence[pb_utils.InferenceRequest]


class Binding:
    """A model and its functions, each for one instance at a time."""

    def __init__(self, spec: ModelSpec, functions: Sequence[Callable[..., Any]]) -> None:
        self.spec = spec
        self.trouble = ""
        """Why no function can be called any more."""
        self._free = list(functions)
        self._lock = threading.Lock()

    def take(self) -> FunctionModel | None:
        """An instance with a function that no other one has; None if there is none."""
        with self._lock:
            return FunctionModel(self, self._free.pop(0)) if self._free else None

    def give_back(self, function: Callable[..., Any]) -> None:
        """Its instance has ended."""
        with self._lock:
            self._free.append(function)


class FunctionModel:
    """One instance: what the worker calls as it calls a `TritonPythonModel` (pb_utils spec 2)."""

    def __init__(self, binding: Binding, function: Callable[..., Any]) -> None:
        self._binding = binding
        self._spec = binding.spec
        self._function = function

    def finalize(self) -> None:
        """The function is free for another instance."""
        self._binding.give_back(self._function)

    def is_ready(self) -> bool:
        """Whether the function may be called. Raises UnrecoverableError with the reason if not."""
        self._check()
        return True

    def _check(self) -> None:
        if self._binding.trouble:
            raise UnrecoverableError(
                f"model '{self._spec.name}' cannot be asked any more: {self._binding.trouble}"
            )

    def execute(self, requests: _Requests) -> Any:
        """The responses, or what they are to be awaited from.

        Raises BadCallError, and what the function raises.
        """
        self._check()
        try:
            with called_for(self._spec):
                returned = self._function([Request.received(request) for request in requests])
                if inspect.isawaitable(returned) or inspect.isasyncgen(returned):
                    return self._answer_later(requests, returned)
                return self._answer(requests, returned)
        except UnrecoverableError as error:
            self._give_up(error)
            raise

    def _give_up(self, error: UnrecoverableError) -> None:
        self._binding.trouble = self._binding.trouble or str(error)

    def _answer(self, requests: _Requests, returned: Any) -> Any:
        if not self._spec.config.decoupled:
            if inspect.isgenerator(returned):
                raise BadCallError("a generator needs a model that is bound with decoupled=True")
            return self._responses(requests, returned)
        for answers in returned if inspect.isgenerator(returned) else [returned]:
            self._send(requests, answers)
            if all(request.is_cancelled() for request in requests):
                break  # nobody waits for the rest
        _end(requests)
        return None

    async def _answer_later(self, requests: _Requests, returned: Any) -> Any:
        try:
            with called_for(self._spec):
                if inspect.isawaitable(returned):
                    return self._answer(requests, await returned)
                if not self._spec.config.decoupled:
                    raise BadCallError(
                        "a generator needs a model that is bound with decoupled=True"
                    )
                async for answers in returned:
                    self._send(requests, answers)
                    if all(request.is_cancelled() for request in requests):
                        break
                _end(requests)
                return None
        except UnrecoverableError as error:
            self._give_up(error)
            raise

    def _send(self, requests: _Requests, answers: Any) -> None:
        for request, response in zip(requests, self._responses(requests, answers), strict=True):
            if response is not None:
                request.get_response_sender().send(response)

    def _responses(
        self, requests: _Requests, returned: Any
    ) -> list[pb_utils.InferenceResponse | None]:
        """What the function returned, checked. Raises BadCallError."""
        if not isinstance(returned, (list, tuple)):
            raise BadCallError(
                "the function must return a list with a dict of arrays for each request; it"
                f" returned {_kind(returned)}. For one dict, use @batch or @sample"
            )
        if len(returned) != len(requests):
            raise BadCallError(
                f"the function was called with {len(requests)} requests and returned"
                f" {len(returned)} answers"
            )
        decoupled = self._spec.config.decoupled
        return [
            None if answer is None and decoupled else self._response(request, answer)
            for request, answer in zip(requests, returned, strict=True)
        ]

    def _response(
        self, request: pb_utils.InferenceRequest, answer: Any
    ) -> pb_utils.InferenceResponse:
        outputs = outputs_by_name(answer)
        known = {str(output.name): output for output in self._spec.outputs}
        for name, array in outputs.items():
            if name not in known:
                raise BadCallError(
                    f"the function returned an output '{name}', but the outputs of model"
                    f" '{self._spec.name}' are {', '.join(known)}"
                )
            if not isinstance(array, np.ndarray):
                raise BadCallError(f"output '{name}' must be a numpy array, got {_kind(array)}")
        if self._spec.strict:
            self._compare(request, outputs)
        return pb_utils.InferenceResponse([_tensor(name, array) for name, array in outputs.items()])

    def _compare(self, request: pb_utils.InferenceRequest, outputs: dict[str, Array]) -> None:
        """Hold the outputs against the specs. Raises BadCallError."""
        size = batch_size(Request.received(request)) if self._spec.config.batching else 0
        for spec in self._spec.outputs:
            name = str(spec.name)
            if name not in outputs:
                raise BadCallError(f"the function returned no output '{name}'")
            array = outputs[name]
            if _datatype(array) != datatype(spec.dtype):
                raise BadCallError(
                    f"output '{name}' must have dtype {np.dtype(spec.dtype)}, got {array.dtype}"
                )
            shape = array.shape
            if self._spec.config.batching:
                # A decoupled model's answers may be about any number of samples.
                if not shape or (shape[0] != size and not self._spec.config.decoupled):
                    raise BadCallError(
                        f"output '{name}' must have a first dimension of {size}, as the inputs of"
                        f" its request, got shape {shape}"
                    )
                shape = shape[1:]
            if not fits(shape, spec.shape):
                beside = " after the batch dimension" if self._spec.config.batching else ""
                raise BadCallError(
                    f"output '{name}' must have shape {tuple(spec.shape)}{beside}, got {shape}"
                )


def _datatype(array: Array) -> str:
    """Its data type, "" if it has none."""
    try:
        return datatype(array.dtype)
    except BadSpecError:
        return ""


def _tensor(name: str, array: Array) -> pb_utils.Tensor:
    if array.dtype.kind == "U":
        array = array.astype(np.object_)
    try:
        return pb_utils.Tensor(name, array)
    except pb_utils.TritonModelException as error:
        raise BadCallError(f"output '{name}' of dtype {array.dtype}: {error}") from error


def _end(requests: _Requests) -> None:
    for request in requests:
        request.get_response_sender().send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _kind(value: object) -> str:
    return type(value).__name__
