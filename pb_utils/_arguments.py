"""Argument rules of the API: what is taken for a text, a number or a list, and what is refused."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from pb_utils._model_exception import TritonModelException

_F = TypeVar("_F", bound="Callable[..., Any]")
_T = TypeVar("_T")

MISSING: Any = object()
"""Stands for an argument that must be given although ones before it may be left out."""


def with_argument_errors(function: _F) -> _F:
    """Give a call that does not fit the signature at all the same wording as a wrong argument."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            trace = error.__traceback__
            if trace is not None and trace.tb_next is None:  # the function was never entered
                raise TypeError(f"{_error_prefix(function.__name__)} {error}") from None
            raise

    return cast("_F", call)


def type_error(function: str, argument: str, expected: str, value: object) -> TypeError:
    """Return the error for a value that an argument does not accept."""
    if value is MISSING:
        return TypeError(f"{_error_prefix(function)} Missing required argument '{argument}'.")
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return TypeError(
        f"{_error_prefix(function)} Argument '{argument}' must be {expected}, got {shown} "
        f"of {type(value)}."
    )


def check_text(function: str, argument: str, value: object) -> str:
    """Take str, bytes or bytearray; raise TypeError, or UnicodeDecodeError for broken UTF-8."""
    if isinstance(value, str):
        if not value.isascii():  # the common case needs no second look
            try:
                value.encode("utf-8")
            except UnicodeEncodeError:
                raise type_error(
                    function, argument, "text without lone surrogates", value
                ) from None
        return str(value)
    if isinstance(value, (bytes, bytearray)):
        return value.decode("utf-8")
    raise type_error(function, argument, "str, bytes or bytearray", value)


def check_message(function: str, argument: str, value: object) -> str:
    r"""Take a text meant for people: what is not valid UTF-8 is kept readable as ``\x..``."""
    if isinstance(value, str):
        if value.isascii():
            return str(value)
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, (bytes, bytearray)):
        return value.decode("utf-8", "backslashreplace")
    raise type_error(function, argument, "str, bytes or bytearray", value)


def check_integer(
    function: str, argument: str, value: object, bits: int, signed: bool = False
) -> int:
    """Take an int or anything with ``__index__`` that fits the given width; raise TypeError."""
    low = -(1 << (bits - 1)) if signed else 0
    high = (1 << (bits - 1 if signed else bits)) - 1
    try:
        number = operator.index(cast("Any", value))
    except TypeError:
        raise type_error(function, argument, "an integer", value) from None
    if not low <= number <= high:
        raise type_error(function, argument, f"an integer between {low} and {high}", value)
    return number


def check_number(function: str, argument: str, value: object) -> float:
    """Take a number or anything with ``__float__``; raise TypeError."""
    if hasattr(type(value), "__float__") or hasattr(type(value), "__index__"):
        try:
            return float(cast("Any", value))
        except (TypeError, ValueError, OverflowError):
            pass  # an array of several numbers, an integer beyond all floats
    raise type_error(function, argument, "a number", value)


def check_seconds(function: str, argument: str, value: object) -> float | None:
    """Take a duration above 0, or None; raise TypeError."""
    if value is None:
        return None
    number = check_number(function, argument, value)
    if not number > 0:
        raise type_error(function, argument, "a number of seconds above 0, or None", value)
    return number


def check_boolean(function: str, argument: str, value: object) -> bool:
    """Take a bool or any object with ``__bool__`` other than None; raise TypeError."""
    if value is None or not hasattr(type(value), "__bool__"):
        raise type_error(function, argument, "a bool", value)
    return bool(value)


def check_sequence(function: str, argument: str, value: Any, of: str) -> list[Any]:
    """Take any sequence but text and bytes, as a new list; raise TypeError."""
    if isinstance(value, (list, tuple)):
        return list(value)
    if hasattr(type(value), "__getitem__") and not isinstance(
        value, (str, bytes, bytearray, memoryview, Mapping)
    ):
        return list(value)
    raise type_error(function, argument, f"a sequence of {of}", value)


def check_elements(function: str, argument: str, value: Any, kind: type[_T]) -> list[_T | None]:
    """Take any sequence of objects of this type or None, as a new list; raise TypeError."""
    items = check_sequence(function, argument, value, kind.__name__)
    for item in items:
        if not isinstance(item, kind) and item is not None:
            raise type_error(function, argument, f"a sequence of {kind.__name__}", value)
    return items


def check_instance(function: str, argument: str, value: object, kind: type[_T]) -> _T:
    """Take an object of exactly this type or a subclass; raise TypeError."""
    if isinstance(value, kind):
        return value
    raise type_error(function, argument, f"a {kind.__qualname__}", value)


def check_parameters(value: object) -> dict[str, bool | int | str]:
    """Take None or a dict of str to bool, int or str, as a new dict.

    Raises:
        TritonModelException: it is something else.
    """
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise TritonModelException(f"Expect dict, got {type(value)}")
    for key, item in value.items():
        if not isinstance(key, str):
            raise TritonModelException(
                f"Expect parameters keys to have type str, found type {type(key)}"
            )
        if not isinstance(item, (bool, int, str)):
            raise TritonModelException(
                f"Expect parameters values to have type bool/int/str, found type {type(item)}"
            )
    return dict(value)


def _error_prefix(function: str) -> str:
    kind = "constructor" if function == "__init__" else "function"
    return f"{function}(): incompatible {kind} arguments."
