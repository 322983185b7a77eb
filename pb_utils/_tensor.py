"""The tensor that a model reads as an input and makes as an output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pb_utils import _arguments, _bytes_codec, _dlpack
from pb_utils._datatypes import BF16, BYTES, INVALID, NAMES, STORAGE, code_of
from pb_utils._model_exception import TritonModelException
from pb_utils._storage import byte_view, read_only_view

if TYPE_CHECKING:
    import numpy.typing as npt


class Tensor:
    """A named array of one of Triton's data types.

    Where the content lies (pb_utils spec 4.1, 4.2):

    * ``_array`` is what ``as_numpy`` returns: the array the tensor was made from, or a private
      copy made on the first call.
    * ``_data`` are the bytes to send. None means: those of ``_array``, whatever they are then.
    * ``_owner`` keeps the memory of ``_data`` alive while it is borrowed; None if it is ours.
    * ``_received`` are data and owner as they came, once an export by DLPack has replaced them.
    """

    __slots__ = (
        "__weakref__",
        "_array",
        "_code",
        "_data",
        "_name",
        "_owner",
        "_received",
        "_shape",
    )

    _name: str
    _code: int
    _shape: list[int]
    _array: npt.NDArray[Any] | None
    _data: memoryview | bytes | None
    _owner: object
    _received: tuple[memoryview | bytes, object] | None

    @_arguments.checked
    def __init__(self, name: str | bytes | bytearray, numpy_array: npt.NDArray[Any]) -> None:
        """Make a tensor of an array of any shape, sharing its memory until it is first sent.

        Args:
            name: name of the model's output, or of another model's input.
            numpy_array: array of bool, (u)int8 ... (u)int64, float16, float32, float64, of dtype
                object or ``S<n>`` (BYTES, serialised now), or of ``ml_dtypes.bfloat16``. One that
                is not C-contiguous is copied.

        Raises:
            TypeError: ``numpy_array`` is no ndarray, or ``name`` no text.
            TritonModelException: the name is empty, or the dtype has no data type of Triton.
        """
        if not isinstance(numpy_array, np.ndarray):
            raise _arguments.mismatch("__init__", "numpy_array", "a numpy.ndarray", numpy_array)
        self._name = _checked_name("__init__", name)
        self._code = code_of(numpy_array.dtype)
        if self._code == INVALID:
            raise TritonModelException("NumPy dtype is not supported.")
        if not numpy_array.flags.c_contiguous:
            numpy_array = np.ascontiguousarray(numpy_array)
        self._array = numpy_array
        self._shape = list(numpy_array.shape)
        self._data = _bytes_codec.encode(numpy_array) if self._code == BYTES else None
        self._owner = self._received = None

    @classmethod
    def _from_wire(
        cls, name: str, code: int, shape: list[int], data: memoryview, owner: object
    ) -> Tensor:
        """Make a tensor over received bytes, which ``owner`` keeps alive. Nothing is checked."""
        tensor = cls.__new__(cls)
        tensor._name = name
        tensor._code = code
        tensor._shape = shape
        tensor._data = data
        tensor._owner = owner
        tensor._array = tensor._received = None
        return tensor

    @staticmethod
    @_arguments.checked
    def from_dlpack(name: str | bytes | bytearray, obj: object) -> Tensor:
        """Make a tensor over the CPU memory of another library, which is held until it dies.

        Args:
            name: name of the tensor.
            obj: a DLPack capsule, or an object with ``__dlpack__`` and ``__dlpack_device__``, of
                any shape and of bool, (u)int8 ... (u)int64, float16/32/64 or bfloat16. A tensor
                that has gaps along its first dimension is copied.

        Raises:
            TypeError: ``name`` is no text.
            TritonModelException: the name is empty, or the object is not supported: no DLPack, not
                on the CPU, an unknown type, not contiguous in C order, or consumed before.
        """
        name = _checked_name("from_dlpack", name)
        received = _dlpack.receive(obj)
        data = byte_view(received.array)
        tensor = Tensor._from_wire(name, received.code, received.shape, data, None)
        if received.code != BF16:
            tensor._array = received.array.copy()  # as_numpy() shows the content as it is now
        return tensor

    def name(self) -> str:
        """Return the name."""
        return self._name

    def shape(self) -> list[int]:
        """Return the size of each dimension; empty for a zero-dimensional tensor."""
        return list(self._shape)

    def triton_dtype(self) -> int:
        """Return the data-type code: 1 BOOL, 2-5 UINT8..64, 6-9 INT8..64, 10-12 FP16..64, ..."""
        return self._code

    def is_cpu(self) -> bool:
        """Return whether the content lies in host memory, which is always so."""
        return True

    def as_numpy(self, copy: bool = True) -> npt.NDArray[Any]:
        """Return the content as an array of the tensor's shape.

        Args:
            copy: True gives the array the tensor was made from, or for a received tensor a
                writable private copy; it is the same array on every call. False gives a read-only
                view of the content without a copy. BYTES are an object array of ``bytes`` always.

        Raises:
            TritonModelException: the tensor is BF16, which numpy does not know.
        """
        if self._code == BF16:
            raise TritonModelException(
                "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and "
                "from_dlpack() instead."
            )
        if copy or self._code == BYTES:
            return self._copied()
        if self._data is None:
            assert self._array is not None
            view: npt.NDArray[Any] = self._array.view()
            view.flags.writeable = False
            return view
        return read_only_view(self._data, STORAGE[self._code], self._shape, self._owner)

    def as_bfloat16(self) -> npt.NDArray[Any]:
        """Return a BF16 tensor as an array of ``ml_dtypes.bfloat16``, by the rules of ``as_numpy``.

        Raises:
            ImportError: the package ml_dtypes is not installed.
            TritonModelException: the tensor has another data type.
        """
        if self._code != BF16:
            raise TritonModelException(f"Tensor dtype is {NAMES[self._code]}, not BF16.")
        try:
            from ml_dtypes import bfloat16
        except ImportError as error:
            raise ImportError(
                "as_bfloat16() needs the package ml_dtypes: pip install ml_dtypes"
            ) from error
        if self._array is None:
            self._array = self._copied().view(bfloat16)
        return self._array

    def to_dlpack(self) -> Any:
        """Return a DLPack capsule over the tensor's own storage; it keeps the tensor alive.

        Changes made through it are sent along with the tensor, and seen by nobody else.

        Raises:
            TritonModelException: the tensor is BYTES.
        """
        return _dlpack.export(self, self._writable_storage(), self._code, self._shape)

    def __dlpack__(
        self,
        stream: Any = None,
        *,
        copy: bool | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
    ) -> Any:
        """Return a DLPack capsule like ``to_dlpack``, or over a copy of it if ``copy`` is True.

        Raises:
            BufferError: another device than the CPU is asked for.
            TritonModelException: the tensor is BYTES.
        """
        if dl_device is not None and tuple(map(int, dl_device)) != _dlpack.CPU_DEVICE:
            raise BufferError("The tensor is in host memory and cannot be exported elsewhere.")
        if not copy:
            return self.to_dlpack()
        self._check_exportable()
        storage = np.frombuffer(self._wire_data(), np.uint8).copy()
        return _dlpack.export(storage, storage, self._code, self._shape)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return device type and id; ``(1, 0)`` is the CPU."""
        return _dlpack.CPU_DEVICE

    def __repr__(self) -> str:
        """Show name, data type and shape."""
        return f"Tensor(name={self._name!r}, datatype={NAMES[self._code]}, shape={self._shape})"

    def _wire_data(self) -> memoryview | bytes:
        """Return the bytes to send: contiguous, one-dimensional, of exactly the tensor's size."""
        if self._data is not None:
            return self._data
        assert self._array is not None
        return byte_view(self._array)

    def _adopt(self, data: memoryview, owner: object) -> None:
        """Let bytes captured by a first send be what later sends carry."""
        self._data = data.toreadonly()
        self._owner = owner

    def _copied(self) -> npt.NDArray[Any]:
        """Return the array that belongs to the tensor, made on the first call."""
        if self._array is None:
            assert self._data is not None
            data = self._received[0] if self._received else self._data
            if self._code == BYTES:
                self._array = _bytes_codec.decode(data).reshape(self._shape)
            else:
                array = np.ndarray(self._shape, STORAGE[self._code], data)
                self._array = array.copy()[...]  # a view of the copy, which models may rely on
            self._received = None
        return self._array

    def _writable_storage(self) -> npt.NDArray[Any]:
        """Return memory that consumers of an export may write to: the bytes sent from now on.

        Borrowed and read-only bytes are replaced by a private copy, as others may read them.
        """
        self._check_exportable()
        data = self._wire_data()
        view = memoryview(data)
        if view.readonly or self._owner is not None:
            private: npt.NDArray[Any] = np.frombuffer(data, np.uint8).copy()
            if self._array is None:
                self._received = (data, self._owner)
            self._data, self._owner = private.data, None
            return private
        return np.frombuffer(data, np.uint8)

    def _check_exportable(self) -> None:
        if self._code == BYTES:
            raise TritonModelException("DLPack does not have support for string tensors.")


def _checked_name(function: str, name: object) -> str:
    checked = _arguments.text(function, "name", name)
    if not checked:
        raise TritonModelException("Tensor name cannot be an empty string.")
    return checked
