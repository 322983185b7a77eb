"""Decorators of bound functions: convert a list of requests into the arrays of a model."""

from __future__ import annotations

import functools
import inspect
from bisect import bisect_left
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from functools import partial
from typing import Any

import numpy as np

from host.bind.requests import Array, Request, batch_size, current_model
from host.bind.specs import BadCallError, BadSpecError, ModelSpec, triton_datatype

Function = Callable[..., Any]
CallWrapper = Callable[[Function, tuple[Any, ...], dict[str, Any]], Any]
"""Called instead of the decorated function, with the function and its arguments."""


class Wrapped:
    """A decorated function. In a class, it is bound as a method, like a plain function."""

    def __init__(self, function: Function, call_wrapper: CallWrapper) -> None:
        # Must come first: it copies the attributes of another Wrapped.
        functools.update_wrapper(self, function)
        self._function = function
        self._call_wrapper = call_wrapper

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call_wrapper(self._function, args, kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Wrapped:
        if instance is None:
            return self
        return Wrapped(self._function.__get__(instance, owner), self._call_wrapper)


def decorator(call_wrapper: CallWrapper) -> Callable[[Function], Function]:
    """Makes a decorator whose functions are called through `call_wrapper`."""

    def decorate(function: Function) -> Function:
        return Wrapped(function, call_wrapper)

    return decorate


def map_result(result: Any, change: Callable[[Any], Any]) -> Any:
    """Applies `change` to a result, also to that of a coroutine and to each of a generator."""
    if inspect.isgenerator(result):
        return _map_generator(result, change)
    if inspect.isasyncgen(result):
        return _map_async_generator(result, change)
    if inspect.isawaitable(result):
        return _map_awaitable(result, change)
    return change(result)


def _map_generator(results: Iterator[Any], change: Callable[[Any], Any]) -> Iterator[Any]:
    for result in results:
        yield change(result)


async def _map_async_generator(
    results: AsyncIterator[Any], change: Callable[[Any], Any]
) -> AsyncIterator[Any]:
    async for result in results:
        yield change(result)


async def _map_awaitable(result: Awaitable[Any], change: Callable[[Any], Any]) -> Any:
    return change(await result)


def map_results(
    results: Sequence[Any], change: Callable[[list[Any]], Any], decorator_name: str
) -> Any:
    """Applies `change` to the list of results of several calls.

    Raises BadCallError for generators.
    """
    if any(inspect.isgenerator(result) or inspect.isasyncgen(result) for result in results):
        raise BadCallError(
            f"@{decorator_name} calls the function several times, so it cannot be a generator"
        )
    if any(inspect.isawaitable(result) for result in results):
        return _map_awaitables(results, change)
    return change(list(results))


async def _map_awaitables(results: Sequence[Any], change: Callable[[list[Any]], Any]) -> Any:
    return change([await result for result in results])


def outputs_by_name(outputs: Any) -> dict[str, Any]:
    """Converts what a function returned for one call to a dict by output name.

    Accepts a dict, or a list in the order of the outputs. Raises BadCallError.
    """
    if isinstance(outputs, Mapping):
        return dict(outputs)
    if not isinstance(outputs, (list, tuple)):
        raise BadCallError(
            "the function must return a dict of output names to arrays, or a list of arrays in the"
            f" order of its outputs; it returned {type(outputs).__name__}"
        )
    model = current_model()
    if model is None:
        raise BadCallError(
            "a list of outputs has names only while the function is bound; in a test, call it in"
            " `with host.bind.bound_as(inputs, outputs):`"
        )
    names = model.output_names
    if len(outputs) != len(names):
        raise BadCallError(
            f"the function returned a list of {len(outputs)} arrays, but the model has"
            f" {len(names)} outputs: {', '.join(names)}"
        )
    return dict(zip(names, outputs, strict=True))


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


def _group_by_keys(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    requests = requests_argument("group_by_keys", args)
    groups: dict[frozenset[str], list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(frozenset(request), []).append(index)
    results = [
        function([requests[index] for index in group], **kwargs) for group in groups.values()
    ]

    def ordered(returned: list[Any]) -> list[Any]:
        results: list[Any] = [None] * len(requests)
        for group, part in zip(groups.values(), returned, strict=True):
            _check_part("group_by_keys", part, len(group))
            for index, result in zip(group, part, strict=True):
                results[index] = result
        return results

    return map_results(results, ordered, "group_by_keys")


group_by_keys = decorator(_group_by_keys)
"""Calls the function once for all requests with the same set of inputs, for optional inputs.

Must be above `@batch`. Raises BadCallError.
"""


def _check_part(decorator_name: str, part: Any, count: int) -> None:
    if not isinstance(part, Sequence) or len(part) != count:
        what = f"{len(part)} results" if isinstance(part, Sequence) else type(part).__name__
        raise BadCallError(
            f"@{decorator_name} expects a list with a result for each of {count} requests,"
            f" got {what}"
        )


def group_by_values(
    *keys: str, pad_fn: Callable[[list[Any]], list[Any]] | None = None
) -> Callable[[Function], Function]:
    """Calls the function once for all samples with the same values of these inputs.

    Above `@batch`, the function gets lists of requests, which may be parts of the received ones;
    below `@batch`, it gets named inputs. `pad_fn` changes the requests of each group before the
    call, for example a `ConstantPadder`. Each request gets the outputs of its own samples. Raises
    BadSpecError, BadCallError.
    """
    if not keys:
        raise BadSpecError("@group_by_values needs the name of an input")

    def around(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shared = {name: kwargs.pop(name) for name in [CONTEXT] if name in kwargs}
        named = bool(kwargs) and not args
        requests: Requests = [kwargs] if named else requests_argument("group_by_values", args)
        groups = _samples_by_values(requests, keys)
        parts = [[_part(requests[index], rows) for index, rows in group] for group in groups]
        if pad_fn is not None:
            parts = [pad_fn(part) for part in parts]
        results = [
            function(**part[0], **shared) if named else function(part, **shared) for part in parts
        ]

        def joined(returned: list[Any]) -> Any:
            results: list[list[tuple[list[int], dict[str, Array]]]] = [[] for _ in requests]
            for group, part in zip(groups, returned, strict=True):
                part = [part] if named else part
                _check_part("group_by_values", part, len(group))
                for (index, rows), outputs in zip(group, part, strict=True):
                    by_name = outputs_by_name(outputs)
                    check_sample_counts("group_by_values", by_name, len(rows))
                    results[index].append((rows, by_name))
            merged = [_merge_parts(parts) for parts in results]
            return merged[0] if named else merged

        return map_results(results, joined, "group_by_values")

    return decorator(around)


_Group = list[tuple[int, list[int]]]
"""Pairs of a request's index and the indexes of its samples in the group."""


def _samples_by_values(requests: Requests, keys: Sequence[str]) -> list[_Group]:
    groups: dict[tuple[Any, ...], dict[int, list[int]]] = {}
    for index, request in enumerate(requests):
        missing = [key for key in keys if key not in request]
        if missing:
            raise BadCallError(
                f"@group_by_values needs input '{missing[0]}', which a request lacks; put"
                " @fill_optionals above it"
            )
        for row in range(batch_size(request)):
            values = tuple(_group_value(request[key][row]) for key in keys)
            groups.setdefault(values, {}).setdefault(index, []).append(row)
    return [list(group.items()) for group in groups.values()]


def _group_value(sample: Any) -> Any:
    """Returns a key that is equal for samples with equal values."""
    array = np.asarray(sample)
    return (array.shape, tuple(array.reshape(-1).tolist()))


def _part(request: MutableMapping[str, Array], rows: list[int]) -> Any:
    whole = len(rows) == batch_size(request)
    if whole and rows == list(range(len(rows))):
        data = {name: request[name] for name in request}
    else:
        data = {name: _select_rows(request[name], rows) for name in request}
    return request.with_data(data) if isinstance(request, Request) else data


def _select_rows(value: Any, rows: list[int]) -> Any:
    """Returns the samples at these rows; a scalar, such as one of @first_value, stays as it is."""
    return value[rows] if isinstance(value, np.ndarray) and value.ndim else value


def _merge_parts(parts: list[tuple[list[int], dict[str, Array]]]) -> dict[str, Array]:
    """Joins the outputs of one request, with its samples in their original order."""
    if len(parts) == 1:
        return parts[0][1]
    order = np.argsort([row for rows, _ in parts for row in rows])
    names = parts[0][1]
    for _, outputs in parts:
        if set(outputs) != set(names):
            raise BadCallError(
                "@group_by_values cannot join results with different outputs:"
                f" {sorted(names)} and {sorted(outputs)}"
            )
    try:
        return {
            name: np.concatenate([outputs[name] for _, outputs in parts])[order] for name in names
        }
    except ValueError as error:
        raise BadCallError(
            f"@group_by_values cannot join the results of one request: {error}"
        ) from error


class ConstantPadder:
    """A `pad_fn` that pads arrays at the end, to the largest size among the requests.

    Numbers are padded with `pad_value`, text with empty text. The batch dimension does not change.
    """

    def __init__(self, pad_value: float = 0) -> None:
        self.pad_value = pad_value

    def __call__(self, requests: list[Any]) -> list[Any]:
        """Pads the arrays of the requests and returns the requests.

        Raises BadCallError if the arrays of an input differ in their number of dimensions.
        """
        for name in {name for request in requests for name in request}:
            arrays = [np.asarray(request[name]) for request in requests if name in request]
            if len({array.ndim for array in arrays}) > 1:
                raise BadCallError(
                    f"ConstantPadder cannot pad input '{name}': its arrays have different numbers"
                    f" of dimensions, {sorted({array.ndim for array in arrays})}"
                )
            sizes = np.max([array.shape[1:] for array in arrays], axis=0).astype(int).tolist()
            for request in requests:
                if name in request:
                    request[name] = self._pad(request[name], sizes)
        return requests

    def _pad(self, array: Array, sizes: list[int]) -> Array:
        widths = [(0, wanted - size) for wanted, size in zip(sizes, array.shape[1:], strict=True)]
        if not any(after for _, after in widths):
            return array
        value: Any = b"" if array.dtype.kind in "SO" else self.pad_value
        return np.pad(array, [(0, 0), *widths], constant_values=value)
