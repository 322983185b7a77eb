"""A sandbox of Jinja whose single operations take neither much memory nor much time.

An operation of Python cannot be interrupted, and stops all other threads while it runs: the time
limit of a rendering works only between operations. So their results are limited here.

Import this on first use: Jinja takes time to import, and most servers have no chat template.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sized
from functools import wraps
from typing import Any

from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MAX_REPEATED = 1 << 20
"""Elements of a repeated or padded text, or of a repeated list."""
_MAX_JOINED = 1 << 27
"""Characters, or elements, of what several texts or lists become together."""
_MAX_BITS = 1 << 16
"""Bits of an integer."""
_MAX_NESTED_CALLS = 64
"""Calls of macros within each other. Each takes several of the 1,000 frames that Python allows."""

_LARGE_WIDTH = re.compile(r"[0-9]{7}|[*]")  # of a format; `*` takes it from the values
_FORMAT_FIELD = re.compile(r"%[^%a-zA-Z]*")
_PADDING_FILTERS = ("batch", "center", "indent", "slice", "truncate", "wordwrap")


class _Generator(CodeGenerator):
    """Compiles `~` to a call of the sandbox."""

    def visit_Concat(self, node: Any, frame: Any) -> None:
        self.write("environment.concat((")
        for part in node.nodes:
            self.write("str(")
            self.visit(part, frame)
            self.write("), ")
        self.write("))")


class _NestedCalls(threading.local):
    """How many calls of a template run in this thread, each within the one before.

    A recursion that takes all frames of Python would fail wherever the thread happens to be, also
    in finalisers that the garbage collector calls.
    """

    count = 0


class Sandbox(ImmutableSandboxedEnvironment):
    """Refuses operations whose result takes much memory."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])
    code_generator_class = _Generator

    def __init__(self, **options: Any) -> None:
        """`options` are those of `jinja2.Environment`."""
        # Without `optimized`, constant expressions are computed while a template is compiled.
        super().__init__(optimized=False, **options)
        for name in _PADDING_FILTERS:
            self.filters[name] = _check_arguments(self.filters[name])
        for name in ("join", "replace"):
            self.filters[name] = _check_joining(self.filters[name], name)
        self.filters["format"] = _format
        del self.globals["lipsum"]
        self._nested = _NestedCalls()

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Computes an operation of `intercepted_binops`."""
        if operator == "+" and type(left) is str and type(right) is str:  # nearly always
            if len(left) + len(right) > _MAX_JOINED:
                raise _too_large("a joined text")
            return left + right
        _check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __function: Any, *args: Any, **named: Any) -> Any:
        """Calls a function or a method of a template."""
        owner = getattr(__function, "__self__", None)
        if isinstance(owner, str):
            _check_text_method(owner, __function.__name__, args)
        nested = __self._nested
        if nested.count >= _MAX_NESTED_CALLS:
            raise SecurityError(f"more than {_MAX_NESTED_CALLS} calls are nested")
        nested.count += 1
        try:
            return super().call(__context, __function, *args, **named)
        finally:
            nested.count -= 1

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Returns the method `format` of a text, or `format_map`, with a check of its fields."""
        format_text = super().wrap_str_format(value)
        if format_text is None:
            return None
        text = value.__self__

        def checked(*args: Any, **named: Any) -> str:
            if _LARGE_WIDTH.search(text):
                raise _too_large("a width")
            _check_numbers((*args, *named.values()))
            return format_text(*args, **named)

        return checked

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Joins texts: those of `~`, of macros and of blocks."""
        parts = list(parts)
        if sum(map(len, parts)) > _MAX_JOINED:
            raise _too_large("a joined text")
        return "".join(parts)


def _too_large(what: str) -> Exception:
    return SecurityError(f"{what} is too large")


def _check_operation(operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if operator == "*":
            bits = left.bit_length() + right.bit_length()
        else:
            bits = left.bit_length() * abs(right) if operator == "**" else 0
        if bits > _MAX_BITS:
            raise _too_large("an integer")
    elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
        if len(left) + len(right) > _MAX_JOINED:
            raise _too_large("a joined text or list")
    elif operator == "*":
        for one, other in ((left, right), (right, left)):
            if isinstance(one, Sized) and isinstance(other, int):
                if len(one) * other > _MAX_REPEATED:
                    raise _too_large("a repeated text or list")
    elif operator == "%" and isinstance(left, str):
        _check_format(left)


def _check_text_method(text: str, name: str, args: tuple[Any, ...]) -> None:
    _check_numbers(args)
    if name == "join" and args and len(text) > _MAX_REPEATED // 1024:
        raise _too_large("a separator")
    if name == "replace" and len(args) > 1 and isinstance(args[1], str):
        if (text.count(str(args[0])) * len(args[1])) > _MAX_JOINED:
            raise _too_large("a replaced text")


def _check_numbers(values: Iterable[Any]) -> None:
    if any(isinstance(value, int) and abs(value) > _MAX_REPEATED for value in values):
        raise _too_large("a number")


def _check_format(text: str) -> None:
    if any(map(_LARGE_WIDTH.search, _FORMAT_FIELD.findall(text))):
        raise _too_large("a width")


def _check_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a filter that checks its numbers, but not the value that it filters."""

    @wraps(function)  # also the marks of Jinja on the function
    def checked(value: Any, *args: Any, **named: Any) -> Any:
        _check_numbers((*args, *named.values()))
        return function(value, *args, **named)

    return checked


def _check_joining(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Returns the filter `join` or `replace` with the check of the method of that name."""

    @wraps(function)
    def checked(context: Any, value: Any, *args: Any, **named: Any) -> Any:
        texts = tuple(map(str, (*args, *named.values())))
        owner = texts[0] if name == "join" and texts else str(value)
        _check_text_method(owner, name, texts)
        return function(context, value, *args, **named)

    return checked


def _format(text: Any, *args: Any, **named: Mapping[str, Any]) -> str:
    """The filter `format`: the operator `%`."""
    _check_format(str(text))
    return str(text) % (named or args)
