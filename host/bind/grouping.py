"""Decorators that call a function once for each group of requests, or of samples."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import numpy as np

from host.bind.decorators import CONTEXT, Requests, check_sample_counts, requests_argument
from host.bind.errors import BadCallError, BadSpecError
from host.bind.requests import Array, Request, batch_size
from host.bind.wrapping import Function, decorator, map_results, outputs_by_name

PadFunction = Callable[[list[Any]], list[Any]]
"""Pads the arrays of some requests to equal shapes, so that they can be joined."""


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
    *keys: str, pad_fn: PadFunction | None = None
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
