"""The base class of the API's enumerations, which behave like those of Triton's C++ binding."""

from __future__ import annotations

import enum


class NamedInt(enum.Enum):
    """An enumeration with integer values. Its members have no order and are not ``int``.

    A member equals its value, and has the same hash. A parameter of such a type accepts members
    only, not plain numbers (docs/reference/model-api.md, "Arguments").
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
