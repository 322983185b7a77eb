"""The exception of the API, the errors of misspelt names, and enumerations that raise them."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class TritonModelException(Exception):
    """A call of the API failed, or a model rejects a request.

    All calls of the API raise it, unless their description names another one. ``str(error)`` is the
    message.
    """


def suggestion(name: str, known: Iterable[str]) -> str:
    """Returns the end of an error text, empty if no known name is similar."""
    if name.startswith("_"):  # libraries look for such names to find out what an object supports
        return ""
    import difflib

    by_lower_case = {one.lower(): one for one in known if not one.startswith("_")}
    close = difflib.get_close_matches(name.lower(), by_lower_case, n=1)
    return f", did you mean '{by_lower_case[close[0]]}'?" if close else ""


def missing_name(module: str, name: str, known: Iterable[str]) -> AttributeError:
    """Returns the error for a name that a module does not have."""
    return AttributeError(f"module '{module}' has no attribute '{name}'{suggestion(name, known)}")


def missing_attribute(obj: object, name: str) -> str:
    """Returns the suggestion for an attribute that an object does not have."""
    return suggestion(name, dir(obj))


if TYPE_CHECKING:
    SuggestingType = type  # type checkers know the attributes, and report others themselves
else:

    class SuggestingType(type):
        """The type of classes whose errors about missing class attributes have a suggestion.

        Instances have none, because ``__getattr__`` in a class makes every access to an attribute
        slower. The server adds it to the text of the exception instead.
        """

        def __getattr__(cls, name: str) -> object:
            """Raises AttributeError."""
            raise AttributeError(
                f"type object '{cls.__name__}' has no attribute '{name}'"
                f"{missing_attribute(cls, name)}"
            )


class NamedInt(enum.Enum):
    """An enumeration with integer values. Its members have no order and are not ``int``.

    A member equals its value, and has the same hash. A parameter of such a type accepts members
    only, not plain numbers (docs/reference/model-module.md, "Arguments").
    """

    def __eq__(self, other: object) -> bool:
        """Compares with a member of the same enumeration, or with an integer."""
        if isinstance(other, NamedInt):
            return self is other
        return isinstance(other, int) and bool(self._value_ == other)

    def __hash__(self) -> int:
        """Returns the hash of the integer value."""
        return hash(self._value_)

    def __int__(self) -> int:
        """Returns the integer value."""
        return int(self._value_)

    def __index__(self) -> int:
        """Returns the integer value."""
        return int(self._value_)
