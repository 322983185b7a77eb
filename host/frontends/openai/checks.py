"""Building blocks of the field checks: checks of JSON values.

`place` says where a value stands in the body, such as `messages[0].role`. A wrong value raises
OpenAIError, with the place and what was expected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from host.frontends.openai.errors import invalid_type, invalid_value, missing_field

Check = Callable[[str, Any], None]
"""Checks the value at a place of the body. Raises OpenAIError."""


def string(place: str, value: Any) -> None:
    """Checks that a value is a string."""
    if type(value) is not str:
        raise invalid_type(place, "a string", value)


def boolean(place: str, value: Any) -> None:
    """Checks that a value is a boolean."""
    if type(value) is not bool:
        raise invalid_type(place, "a boolean", value)


def number(low: float, high: float) -> Check:
    """Returns the check of a number from `low` to `high`."""

    def check(place: str, value: Any) -> None:
        if type(value) not in (int, float):
            raise invalid_type(place, "a number", value)
        if not low <= value <= high:
            raise invalid_value(f"'{place}' must be from {low} to {high}, got {value}", place)

    return check


def integer(low: int, high: int | None = None) -> Check:
    """Returns the check of an integer from `low` to `high`; None is no limit."""

    def check(place: str, value: Any) -> None:
        if type(value) is not int:
            raise invalid_type(place, "an integer", value)
        if value < low or (high is not None and value > high):
            limits = f"{low} or more" if high is None else f"from {low} to {high}"
            raise invalid_value(f"'{place}' must be {limits}, got {value}", place)

    return check


def one_of(allowed: Sequence[str]) -> Check:
    """Returns the check of a string that must be one of several."""

    def check(place: str, value: Any) -> None:
        string(place, value)
        if value not in allowed:
            names = ", ".join(f"'{name}'" for name in allowed)
            raise invalid_value(f"'{place}' must be one of {names}; got '{value[:80]}'", place)

    return check


def not_empty_string(place: str, value: Any) -> None:
    """Checks that a value is a string with at least one character."""
    string(place, value)
    if not value:
        raise invalid_value(f"'{place}' must not be empty", place)


def array(place: str, value: Any, low: int, high: int | None) -> None:
    """Checks that a value is an array of `low` to `high` elements; None is no limit."""
    if type(value) is not list:
        raise invalid_type(place, "an array", value)
    if len(value) < low or (high is not None and len(value) > high):
        limits = f"{low} or more" if high is None else f"from {low} to {high}"
        raise invalid_value(f"'{place}' must have {limits} elements, got {len(value)}", place)


def json_object(place: str, value: Any) -> None:
    """Checks that a value is an object."""
    if not isinstance(value, dict):
        raise invalid_type(place, "an object", value)


def check_member(place: str, owner: Any, name: str, check: Check, required: bool = True) -> None:
    """Checks a member of an object, if it is there or `required`."""
    value = owner.get(name)
    if value is not None:
        check(f"{place}.{name}", value)
    elif required:
        raise missing_field(f"{place}.{name}")
