"""Checks of the arguments of API calls (docs/reference/model-module.md, "Arguments").

Each ``check_...`` function gets the names of the API function and of the argument for its error
text. It returns the converted value, and raises TypeError unless its docstring says otherwise.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from pb_utils._exceptions import TritonModelException

_F = TypeVar("_F", bound="Callable[..., Any]")
_T = TypeVar("_T")

MISSING: Any = object()
"""The default value of an argument that is required, but follows optional arguments."""


def with_argument_errors(function: _F) -> _F:
    """Decorates an API function so that all its argument errors have the same prefix.

    Without it, a call with missing or unknown arguments has only the text of Python.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if _failed_before_body(error):
                raise TypeError(f"{_error_prefix(function.__name__)} {error}") from None
            raise

    return cast("_F", call)


def type_error(function: str, argument: str, expected: str, value: object) -> TypeError:
    """Returns the TypeError for an argument with a wrong value.

    Args:
        function: name of the API function.
        argument: name of the argument.
        expected: description of the accepted values.
        value: the wrong value; ``MISSING`` if the argument was not given.
    """
    if value is MISSING:
        return TypeError(f"{_error_prefix(function)} Missing required argument '{argument}'.")
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return TypeError(
        f"{_error_prefix(function)} Argument '{argument}' must be {expected}, got {shown} "
        f"of {type(value)}."
    )


def check_text(function: str, argument: str, value: object) -> str:
    """Returns a name or text as str. Accepts str without lone surrogates, bytes and bytearray.

    Raises:
        TypeError: the value is not text.
        UnicodeDecodeError: the bytes are not valid UTF-8.
    """
    if type(value) is str and value.isascii():  # nearly always; ASCII cannot contain surrogates
        return value
    if isinstance(value, str):
        if not value.isascii():
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
    """Returns a message as str. Accepts text; invalid UTF-8 becomes escapes."""
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
    """Returns an integer. Accepts int and any object with ``__index__`` within the range.

    Args:
        function: name of the API function.
        argument: name of the argument.
        value: the value.
        bits: width of the integer.
        signed: whether negative numbers are allowed.

    Raises:
        TypeError: the value is not an integer, or is out of range.
    """
    if type(value) is int and 0 <= value < 1 << (bits - 1):  # nearly always
        return value
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
    """Returns a number as float. Accepts any object with ``__float__`` or ``__index__``."""
    if hasattr(type(value), "__float__") or hasattr(type(value), "__index__"):
        try:
            return float(cast("Any", value))
        except (TypeError, ValueError, OverflowError):
            pass  # an array of several elements, or an int that is too large for a float
    raise type_error(function, argument, "a number", value)


def check_seconds(function: str, argument: str, value: object) -> float | None:
    """Returns a time in seconds as float, or None. Accepts numbers above 0 and None."""
    if value is None:
        return None
    number = check_number(function, argument, value)
    if not number > 0:
        raise type_error(function, argument, "a number of seconds above 0, or None", value)
    return number


def check_boolean(function: str, argument: str, value: object) -> bool:
    """Returns a bool. Accepts any object with ``__bool__`` except None."""
    if value is True or value is False:
        return value
    if value is None or not hasattr(type(value), "__bool__"):
        raise type_error(function, argument, "a bool", value)
    try:
        return bool(value)
    except Exception:  # `__bool__` may raise anything; Triton refuses the value, whatever it was
        raise type_error(function, argument, "a bool", value) from None


def check_sequence(function: str, argument: str, value: Any, of: str) -> list[Any]:
    """Returns a sequence as a new list. Accepts any sequence except text, bytes and mappings."""
    if isinstance(value, (list, tuple)):
        return list(value)
    if hasattr(type(value), "__getitem__") and not isinstance(
        value, (str, bytes, bytearray, memoryview, Mapping)
    ):
        return list(value)
    raise type_error(function, argument, f"a sequence of {of}", value)


def check_elements(function: str, argument: str, value: Any, kind: type[_T]) -> list[_T | None]:
    """Returns a sequence as a new list. Accepts elements of type ``kind`` and None."""
    items = check_sequence(function, argument, value, kind.__name__)
    for item in items:
        if not isinstance(item, kind) and item is not None:
            raise type_error(function, argument, f"a sequence of {kind.__name__}", value)
    return items


def check_instance(function: str, argument: str, value: object, kind: type[_T]) -> _T:
    """Returns the value if it is an instance of ``kind``."""
    if isinstance(value, kind):
        return value
    raise type_error(function, argument, f"a {kind.__qualname__}", value)


def check_parameters(value: object) -> dict[str, bool | int | str]:
    """Returns custom parameters as a new dict; an empty one for None.

    Raises:
        TritonModelException: the value is not a dict of str to bool, int or str.
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


def _failed_before_body(error: TypeError) -> bool:
    """Whether the traceback ends at the call.

    The caller keeps no traceback: with its own frame it would be a cycle, which holds the arguments
    until the garbage collector runs.
    """
    trace = error.__traceback__
    return trace is not None and trace.tb_next is None


def _error_prefix(function: str) -> str:
    kind = "constructor" if function == "__init__" else "function"
    return f"{function}(): incompatible {kind} arguments."
