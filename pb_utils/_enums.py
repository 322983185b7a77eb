"""Enumerations that behave like those of Triton's C++ binding: named, unordered integers."""

from __future__ import annotations

import enum


class NamedInt(enum.Enum):
    """A member equals its integer value and hashes like it, but is no ``int`` and has no order.

    A parameter of such a type takes only the member itself, never a plain number
    (docs/reference/model_api.md, 3.2).
    """

    def __eq__(self, other: object) -> bool:
        """Compare with a member of the same enumeration, or with an integer."""
        if isinstance(other, NamedInt):
            return self is other
        return isinstance(other, int) and bool(self._value_ == other)

    def __hash__(self) -> int:
        """Hash like the integer value."""
        return hash(self._value_)

    def __int__(self) -> int:
        """Return the integer value."""
        return int(self._value_)

    def __index__(self) -> int:
        """Return the integer value."""
        return int(self._value_)
