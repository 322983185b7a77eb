"""Decorators of bound functions: convert a list of requests into the arrays of a model."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, MutableMapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from host.bind.context import current_model
from host.bind.errors import BadCallError, BadSpecError
from host.bind.requests import Array, Request, batch_size
from host.bind.specs import ModelSpec, triton_datatype
from host.bind.wrapping import Function, decorator, map_result, outputs_by_name

Requests = Sequence[MutableMapping[str, Array]]

CONTEXT = "triton_context"
"""The keyword argument that holds the model of the function; no input can have this name."""


def requests_argument(decorator_name: str, args: tuple[Any, ...]) -> Requests:
    """Returns the requests among the arguments of a decorated function. Raises BadCallError."""
    if len(args) == 1 and isinstance(args[0], Sequence) and not isinstance(args[0], (str, bytes)):
        requests: Requests = args[0]
        if requests and all(isinstance(request, MutableMapping) for request in requests):
            return requests
    raise BadCallError(
        f"@{decorator_name} needs a list of at least one request; put it above decorators that"
        " pass on named inputs, as @batch does"
    )


def check_sample_counts(decorator_name: str, outputs: dict[str, Any], size: int) -> None:
    """Checks that each output is an array of `size` samples. Raises BadCallError."""
    for name, output in outputs.items():
        if not isinstance(output, np.ndarray):
            raise BadCallError(
                f"output '{name}' must be a numpy array, got {type(output).__name__}"
            )
    wrong = {
        name: output.shape
        for name, output in outputs.items()
        if not output.ndim or output.shape[0] != size
    }
    if wrong:
        shapes = ", ".join(f"'{name}' has shape {shape}" for name, shape in wrong.items())
        raise BadCallError(
            f"@{decorator_name} expects outputs with a first dimension of {size}, one for each"
            f" sample: {shapes}"
        )


def _batch(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    requests = requests_argument("batch", args)
    names = list(requests[0])
    for request in requests:
        if set(request) != set(names):
            raise BadCallError(
                f"@batch cannot join requests with different inputs: {sorted(names)} and"
                f" {sorted(request)}; put @group_by_keys or @fill_optionals above it"
            )
    sizes = [batch_size(request) for request in requests]
    inputs = {name: _concatenate(name, requests) for name in names}
    outputs = function(**{**kwargs, **inputs})
    return map_result(outputs, partial(_split_outputs, sizes))


def _concatenate(name: str, requests: Requests) -> Array:
    """Joins the samples of all requests to a new, writable array."""
    if len(requests) == 1:
        return requests[0][name]
    try:
        return np.concatenate([_input_view(request, name) for request in requests])
    except ValueError as error:
        raise BadCallError(f"@batch cannot join input '{name}': {error}") from error


def _input_view(request: MutableMapping[str, Array], name: str) -> Array:
    return request.view(name) if isinstance(request, Request) else request[name]


def _split_outputs(sizes: list[int], returned: Any) -> list[dict[str, Array]]:
    outputs = outputs_by_name(returned)
    check_sample_counts("batch", outputs, sum(sizes))
    ends = np.cumsum(sizes).tolist()
    return [
        {name: output[end - size : end] for name, output in outputs.items()}
        for size, end in zip(sizes, ends, strict=True)
    ]


batch = decorator(_batch)
"""Joins each input of all requests to one array, and calls the function with them by name.

The function returns a dict of arrays, or a list of arrays in the order of the outputs. Each request
gets the outputs of its own samples. The generator of a decoupled model yields dicts or lists.
Raises BadCallError.
"""


def _sample(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    requests = requests_argument("sample", args)
    if len(requests) != 1:
        raise BadCallError(
            f"@sample takes one request at a time, got {len(requests)}; bind the function with"
            " batching=False, or use @batch"
        )
    inputs = {name: requests[0][name] for name in requests[0]}
    return map_result(function(**{**kwargs, **inputs}), lambda outputs: [outputs_by_name(outputs)])


sample = decorator(_sample)
"""Calls the function with the inputs of a single request by name; for `batching=False`.

The function returns a dict of arrays, or a list of arrays in the order of the outputs. Raises
BadCallError.
"""


def first_value(
    *keys: str, squeeze_single_values: bool = True, strict: bool = True
) -> Callable[[Function], Function]:
    """Replaces these inputs by the value of their first sample, for settings of a whole batch.

    Can be above or below `@batch`. With `squeeze_single_values`, an array of one element becomes a
    scalar. With `strict`, all samples must have the same value. Missing inputs are skipped. Raises
    BadSpecError, and BadCallError if the samples differ.
    """
    if CONTEXT in keys:
        raise BadSpecError(f"@first_value cannot be used for '{CONTEXT}', which is not an input")

    def around(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        model = current_model()
        if model is not None and not model.config.batching:
            raise BadCallError("@first_value needs a model with batching")
        inputs: Requests = [kwargs] if kwargs else requests_argument("first_value", args)
        for request in inputs:
            for key in keys:
                if key in request:
                    first = _first(key, request[key], strict)
                    if squeeze_single_values and np.size(first) == 1:
                        first = np.reshape(first, -1)[0]
                    request[key] = first
        return function(*args, **kwargs)

    return decorator(around)


def _first(key: str, values: Array, strict: bool) -> Any:
    if strict and not all(np.array_equal(value, values[0]) for value in values[1:]):
        raise BadCallError(
            f"the values of input '{key}' differ within the batch, and @first_value takes the"
            f" first: {values!r}; group them with @group_by_values('{key}'), or set strict=False"
        )
    return values[0]


def fill_optionals(**defaults: Array) -> Callable[[Function], Function]:
    """Adds default values for the inputs that a request lacks.

    Each default is a numpy array without the batch dimension, and is repeated for each sample. Must
    be above `@batch`, `@sample`, `@group_by_keys` and `@group_by_values`. Raises BadSpecError for a
    default that is not an array, or that does not match the dtype or shape of its input.
    """
    for name, value in defaults.items():
        if not isinstance(value, np.ndarray):
            raise BadSpecError(
                f"@fill_optionals needs a numpy array for '{name}', got {type(value).__name__}"
            )

    def around(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        requests = requests_argument("fill_optionals", args)
        model = current_model()
        if model is not None:
            _check_defaults(model, defaults)
        batching = model is None or model.config.batching
        for request in requests:
            size = batch_size(request) if batching and request else 1
            for name, value in defaults.items():
                if name not in request:
                    copies = (size, *([1] * value.ndim))
                    request[name] = np.tile(value, copies) if batching else value.copy()
        return function(*args, **kwargs)

    return decorator(around)


def _check_defaults(model: ModelSpec, defaults: dict[str, Array]) -> None:
    specs = {str(spec.name): spec for spec in model.inputs}
    for name, value in defaults.items():
        spec = specs.get(name)
        if spec is None:
            raise BadSpecError(
                f"@fill_optionals has a default for '{name}', but model '{model.name}' has the"
                f" inputs {', '.join(specs)}"
            )
        if triton_datatype(value.dtype) != triton_datatype(spec.dtype):
            raise BadSpecError(
                f"@fill_optionals: the default of '{name}' has dtype {value.dtype}, and the input"
                f" {np.dtype(spec.dtype)}"
            )
        if not shape_matches(value.shape, spec.shape):
            raise BadSpecError(
                f"@fill_optionals: the default of '{name}' has shape {value.shape}, and the input"
                f" {tuple(spec.shape)}; defaults have no batch dimension"
            )


def shape_matches(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    """Returns whether a shape matches the wanted shape, in which -1 means any size."""
    return len(shape) == len(wanted) and all(
        expected in (-1, size) for size, expected in zip(shape, wanted, strict=True)
    )


def _pad_batch(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    model = current_model()
    if model is None:
        raise BadCallError(
            "@pad_batch takes the size from the model; in a test, call the function in"
            " `with host.bind.bound_as(inputs, outputs, config):`"
        )
    inputs = {name: value for name, value in kwargs.items() if name != CONTEXT}
    if args or not inputs:
        raise BadCallError("@pad_batch needs named inputs; put @batch above it")
    size = len(next(iter(inputs.values())))
    batcher = model.config.batcher
    preferred = sorted((batcher and batcher.preferred_batch_size) or ())
    sizes = [*preferred, model.config.max_batch_size]
    index = bisect_left(sizes, size)
    missing = sizes[index] - size if index < len(sizes) else 0
    if missing:
        kwargs = {**kwargs, **{name: _pad(value, missing) for name, value in inputs.items()}}

    def cut(returned: Any) -> dict[str, Array]:
        outputs = outputs_by_name(returned)
        check_sample_counts("pad_batch", outputs, size + missing)
        return {name: output[:size] for name, output in outputs.items()}

    return map_result(function(**kwargs), cut)


def _pad(array: Array, missing: int) -> Array:
    return np.concatenate([array, np.repeat(array[-1:], missing, axis=0)])


pad_batch = decorator(_pad_batch)
"""Repeats the last sample until the batch has the next preferred size, or the maximum size.

Must be below `@batch`. The outputs of the added samples are removed. Raises BadCallError.
"""


def _triton_context(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **{**kwargs, CONTEXT: current_model()})


triton_context = decorator(_triton_context)
"""Passes the `ModelSpec` of the function as `triton_context`; None outside of a host."""
