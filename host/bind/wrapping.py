"""Makes decorators for functions and methods, including coroutine functions and generators."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from host.bind.context import current_model
from host.bind.errors import BadCallError

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
