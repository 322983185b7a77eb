"""Arrays over memory that somebody else owns, and the bytes of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    _Array = np.ndarray[Any, Any]
else:
    _Array = np.ndarray  # has no parameters before Python 3.9


def byte_view(array: npt.NDArray[Any]) -> memoryview:
    """Return the bytes of a C-contiguous array without a copy: format ``B``, one dimension.

    ``memoryview`` cannot do it for empty arrays nor, on some Pythons, for float16; bfloat16 has no
    buffer format at all. There numpy does the cast, which takes three times as long.
    """
    try:
        return array.data.cast("B")
    except (AttributeError, TypeError, ValueError):  # the first of masked arrays
        return np.asarray(array).reshape(-1).view(np.uint8).data


def address_of(array: npt.NDArray[Any]) -> int:
    """Return where the first element of an array lies."""
    address: int = array.__array_interface__["data"][0]
    return address


class _ArrayInterface:
    """Shows memory to numpy and keeps its owner alive: it is the ``base`` of the arrays."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, interface: dict[str, Any], owner: object) -> None:
        self.__array_interface__ = interface
        self._owner = owner


def array_at(
    address: int,
    dtype: np.dtype[Any],
    shape: Sequence[int],
    owner: object,
    *,
    strides: Sequence[int] | None = None,
    writable: bool = False,
) -> npt.NDArray[Any]:
    """Return an array over the memory at ``address`` that keeps ``owner`` alive.

    A read-only array stays so: numpy refuses to set its writeable flag.
    """
    interface = {
        "version": 3,
        "typestr": dtype.str,
        "shape": tuple(shape),
        "strides": None if strides is None else tuple(strides),
        "data": (address, not writable),
    }
    array: npt.NDArray[Any] = np.asarray(_ArrayInterface(interface, owner))
    return array


class _OwningBase(_Array):
    """The ``base`` of a view: numpy keeps it alive, and it keeps the owner of the memory alive."""

    owner: object


def read_only_view(
    data: memoryview | bytes, dtype: np.dtype[Any], shape: Sequence[int], owner: object
) -> npt.NDArray[Any]:
    """Return an array over bytes that keeps ``owner`` alive and that nobody can write to."""
    held = _OwningBase(tuple(shape), dtype, memoryview(data).toreadonly())
    held.owner = owner
    view: npt.NDArray[Any] = held.view(np.ndarray)
    return view
