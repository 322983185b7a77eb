"""Requests of bound functions: arrays by input name, and parameters; and the current model."""

from __future__ import annotations

import contextvars
import json
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

import pb_utils
from host.bind.specs import ModelConfig, ModelSpec, TensorSpec, with_default_names

_current: contextvars.ContextVar[ModelSpec | None] = contextvars.ContextVar(
    "pbhost_bound_model", default=None
)


def current_model() -> ModelSpec | None:
    """Returns the current model; None in a test that calls the function directly."""
    return _current.get()


@contextmanager
def model_context(model: ModelSpec) -> Iterator[None]:
    """Makes this model the current one inside the block."""
    token = _current.set(model)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def bound_as(
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    config: ModelConfig | None = None,
    *,
    name: str = "test",
) -> Iterator[ModelSpec]:
    """For tests: makes a model with these tensors the current one, without a host.

    Raises BadSpecError.
    """
    model = ModelSpec(
        name,
        with_default_names(inputs, "INPUT"),
        with_default_names(outputs, "OUTPUT"),
        config or ModelConfig(),
    )
    with model_context(model):
        yield model


Array = npt.NDArray[Any]


class Request(MutableMapping[str, Array]):
    """A mapping of input names to arrays. Text is an object array of bytes.

    The arrays are writable copies. `parameters` are those of the client. `span` has the
    OpenTelemetry headers of the request's trace as JSON, None without a trace.
    `requested_output_names` are the outputs that the client requested.
    """

    def __init__(
        self,
        data: Mapping[str, Array],
        parameters: Mapping[str, object] | None = None,
        span: Any = None,
        requested_output_names: list[str] | None = None,
    ) -> None:
        self._arrays: dict[str, Array | None] = dict(data)
        self._received: dict[str, pb_utils.Tensor] = {}
        self.parameters = dict(parameters or {})
        self.span = span
        self.requested_output_names = requested_output_names

    @classmethod
    def received(cls, request: pb_utils.InferenceRequest) -> Request:
        """Wraps a received request. An array is copied from shared memory when it is first read."""
        made = cls(
            {},
            json.loads(request.parameters()),
            request.trace().get_context(),
            sorted(request.requested_output_names()),
        )
        made._received = {tensor.name(): tensor for tensor in request.inputs()}
        made._arrays = dict.fromkeys(made._received)
        return made

    @property
    def data(self) -> dict[str, Array]:
        """Returns all arrays by input name."""
        return dict(self.items())

    def view(self, name: str) -> Array:
        """Returns an array that must not be changed, without a copy. Raises KeyError."""
        array = self._arrays[name]
        return self._received[name].as_numpy(copy=False) if array is None else array

    def shape(self, name: str) -> list[int]:
        """Returns the shape of an array, without copying the array. Raises KeyError."""
        array = self._arrays[name]
        return self._received[name].shape() if array is None else list(np.shape(array))

    def with_data(self, data: Mapping[str, Array]) -> Request:
        """Returns this request with other arrays."""
        return Request(data, self.parameters, self.span, self.requested_output_names)

    def __getitem__(self, name: str) -> Array:
        array = self._arrays[name]
        if array is None:
            array = self._arrays[name] = self._received[name].as_numpy()
        return array

    def __setitem__(self, name: str, array: Array) -> None:
        self._arrays[name] = array

    def __delitem__(self, name: str) -> None:
        del self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        shapes = {name: tuple(self.shape(name)) for name in self}
        return f"Request({shapes}, parameters={self.parameters})"


def batch_size(request: Mapping[str, Array]) -> int:
    """Returns the number of samples of a request: the first dimension of its first input."""
    if isinstance(request, Request):
        shape = request.shape(next(iter(request)))
    else:
        shape = list(np.shape(next(iter(request.values()))))
    return shape[0] if shape else 1
