"""Arrays over memory of other objects, and access to the bytes of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    _Array = np.ndarray[Any, Any]
else:
    _Array = np.ndarray  # np.ndarray has no type parameters before Python 3.9


def byte_view(array: npt.NDArray[Any]) -> memoryview:
    """Returns the bytes of a C-contiguous array as a one-dimensional view of format ``B``.

    ``memoryview.cast`` fails for empty arrays and, on some Python versions, for float16. bfloat16
    does not have a buffer format. In these cases numpy does the cast, which takes three times as
    long.
    """
    try:
        return array.data.cast("B")
    except (AttributeError, TypeError, ValueError):  # AttributeError: masked arrays
        return np.asarray(array).reshape(-1).view(np.uint8).data


def address_of(array: npt.NDArray[Any]) -> int:
    """Returns the memory address of the first element of an array."""
    address: int = array.__array_interface__["data"][0]
    return address


class _ArrayInterface:
    """Gives numpy access to memory. It is the ``base`` of the array and keeps the owner alive."""

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
    """Returns an array over memory, which keeps the owner of the memory alive.

    A read-only array cannot be made writable: numpy refuses to set its flag.

    Args:
        address: address of the first element.
        dtype: dtype of the array.
        shape: shape of the array.
        owner: the object that keeps the memory alive.
        strides: strides in bytes; C-contiguous if None.
        writable: whether the array is writable.
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
    """The ``base`` of a view. numpy keeps it alive, and it keeps the owner of the memory alive."""

    owner: object


def read_only_view(
    data: memoryview | bytes, dtype: np.dtype[Any], shape: Sequence[int], owner: object
) -> npt.NDArray[Any]:
    """Returns a read-only array over bytes, which keeps the owner of the bytes alive."""
    base = _OwningBase(tuple(shape), dtype, memoryview(data).toreadonly())
    base.owner = owner
    view: npt.NDArray[Any] = base.view(np.ndarray)
    return view
