"""The tensor: an input or an output of a model."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from pb_utils import _arguments, _datatypes, _dlpack, _gpu
from pb_utils._datatypes import BF16, BYTES, INVALID, NAMES, STORAGE, code_of
from pb_utils._exceptions import SuggestingType, TritonModelException
from pb_utils._storage import (
    address_of,
    byte_view,
    copy_array,
    copy_from_shared_memory,
    read_only_view,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt


class Tensor(metaclass=SuggestingType):
    """A named array of one of Triton's data types.

    The data types are listed in docs/reference/model-module.md, "Constants"; the rules are in
    docs/reference/model-tensors.md, "Tensors".

    Examples:
        >>> tensor = pb_utils.Tensor("Y", np.zeros((2, 3), np.float32))
        >>> tensor.shape(), tensor.as_numpy().sum()
    """

    __slots__ = (
        "__weakref__",
        "_array",
        "_code",
        "_data",
        "_name",
        "_on_gpu",
        "_owner",
        "_received",
        "_shape",
    )

    # docs/reference/model-tensors.md, "What as_numpy returns" and "When output data is read", has
    # the rules for these fields.
    _name: str
    _code: int
    _shape: list[int]
    # The array that as_numpy() returns: that of the constructor, or a private one that the first
    # call creates as a copy or a copy-on-write mapping. Always set if _data and _on_gpu are None.
    _array: npt.NDArray[Any] | None
    # The bytes to send. None: the current content of _array.
    _data: memoryview | bytes | None
    # Keeps the memory of _data alive; None if the tensor owns it.
    _owner: object
    # Data and owner as they were received, after a DLPack export has replaced them.
    _received: tuple[memoryview | bytes, object] | None
    # None: the content is on the CPU. Memory of a GPU: _data holds only what a send has captured
    # from it. A device number: the first export copies _data to that GPU.
    _on_gpu: _gpu.DeviceMemory | int | None

    @_arguments.with_argument_errors
    def __init__(self, name: str | bytes | bytearray, numpy_array: npt.NDArray[Any]) -> None:
        """Creates a tensor from an array of any shape.

        The tensor shares the memory of the array. Changes to the array count until the tensor is
        first sent (docs/reference/model-tensors.md, "When output data is read").

        Args:
            name: name of the model's output, or of another model's input.
            numpy_array: array of dtype bool, (u)int8 to (u)int64, float16, float32, float64 or
                ``ml_dtypes.bfloat16``; or of dtype object or ``S<n>``, which becomes BYTES and is
                serialised at once. An array that is not C-contiguous is copied.

        Raises:
            TypeError: ``numpy_array`` is not a ``numpy.ndarray``, or ``name`` is not text.
            TritonModelException: the name is empty, or Triton has no data type for the dtype.
        """
        if not isinstance(numpy_array, np.ndarray):
            raise _arguments.type_error("__init__", "numpy_array", "a numpy.ndarray", numpy_array)
        self._name = _checked_name("__init__", name)
        self._code = code_of(numpy_array.dtype)
        if self._code == INVALID:
            text = "NumPy dtype is not supported."
            if numpy_array.dtype.kind == "U":
                text += f" {name!r} is an array of str: Tensor.from_strings({name!r}, ...) makes"
                text += " a tensor of it."
            raise TritonModelException(text)
        if not numpy_array.flags.c_contiguous:
            numpy_array = np.ascontiguousarray(numpy_array)
        self._array = numpy_array
        self._shape = list(numpy_array.shape)
        self._data = _datatypes.encode(numpy_array) if self._code == BYTES else None
        self._owner = self._received = self._on_gpu = None

    @classmethod
    def _from_wire(
        cls, name: str, code: int, shape: list[int], data: memoryview, owner: object
    ) -> Tensor:
        """Creates a tensor over received bytes, which ``owner`` keeps alive, without checks."""
        tensor = cls.__new__(cls)
        tensor._name = name
        tensor._code = code
        tensor._shape = shape
        tensor._data = data
        tensor._owner = owner
        tensor._array = tensor._received = tensor._on_gpu = None
        return tensor

    @staticmethod
    @_arguments.with_argument_errors
    def from_dlpack(name: str | bytes | bytearray, obj: object) -> Tensor:
        """Creates a tensor that shares the memory of another library's tensor.

        GPU memory stays on the GPU. If ``obj`` is not a capsule, the call waits for pending work on
        that GPU. The rules are in docs/reference/model-tensors.md, "from_dlpack".

        Args:
            name: name of the tensor.
            obj: a DLPack capsule, or an object with ``__dlpack__`` and ``__dlpack_device__``, of
                any shape, of data type bool, (u)int8 to (u)int64, float16, float32, float64 or
                bfloat16. A tensor with gaps along its first dimension is copied.

        Returns:
            The tensor.

        Raises:
            TypeError: ``name`` is not text.
            TritonModelException: the name is empty, ``obj`` does not support DLPack, its memory is
                not on the CPU or on a usable CUDA GPU, Triton has no such data type, the tensor is
                not C-contiguous, or the capsule has been consumed.

        Examples:
            >>> tensor = pb_utils.Tensor.from_dlpack("Y", torch.zeros(2, 3))
        """
        name = _checked_name("from_dlpack", name)
        received = _dlpack.receive(obj)
        memory = received.array
        tensor = Tensor.__new__(Tensor)
        tensor._name = name
        tensor._code = received.code
        tensor._shape = received.shape
        tensor._data = tensor._owner = tensor._array = tensor._received = tensor._on_gpu = None
        if isinstance(memory, _gpu.DeviceMemory):
            tensor._on_gpu = memory
            return tensor
        tensor._data = byte_view(memory)
        if received.code != BF16:
            tensor._array = copy_array(memory)  # as_numpy() returns the content at this time
        return tensor

    @staticmethod
    @_arguments.with_argument_errors
    def from_strings(
        name: str | bytes | bytearray, values: Sequence[Any] | npt.NDArray[Any]
    ) -> Tensor:
        """Creates a BYTES tensor from texts, encoded in UTF-8. Triton does not have this method.

        Args:
            name: name of the tensor.
            values: a list of str, nested lists of str, or an array of str; its shape is that of the
                tensor.

        Raises:
            TypeError: ``name`` is not text, ``values`` is a single str, or an element is not a str.
            TritonModelException: the name is empty, or a text cannot be encoded.

        Examples:
            >>> tensor = pb_utils.Tensor.from_strings("ANSWER", [["yes"], ["no"]])
        """
        if isinstance(values, (str, bytes)):
            raise _arguments.type_error("from_strings", "values", "a list of str", values)
        array: npt.NDArray[Any] = np.array(values, dtype=np.object_)
        for value in array.ravel().tolist():
            if not isinstance(value, str):
                raise _arguments.type_error("from_strings", "values", "a list of str", value)
        try:
            return Tensor(name, array)
        except UnicodeEncodeError as error:
            raise TritonModelException(f"A text cannot be encoded in UTF-8: {error}") from error

    def name(self) -> str:
        """Returns the name."""
        return self._name

    def shape(self) -> list[int]:
        """Returns the shape as a new list of int, ``[]`` if there are no dimensions."""
        return list(self._shape)

    def triton_dtype(self) -> int:
        """Returns the code of the data type.

        The codes are 1 BOOL, 2 to 5 UINT8 to UINT64, 6 to 9 INT8 to INT64, 10 to 12 FP16 to FP64,
        13 BYTES and 14 BF16 (docs/reference/model-module.md, "Constants"). Triton raises here.
        """
        return self._code

    def is_cpu(self) -> bool:
        """Returns True if the content is in host memory, pinned or not; False if it is on a GPU."""
        return self._on_gpu is None

    def as_numpy(self, copy: bool = True) -> npt.NDArray[Any]:
        """Returns the content as an array in the shape of the tensor.

        The rules are in docs/reference/model-tensors.md, "What as_numpy returns".

        Args:
            copy: True returns an array that the model may change: the one from which the tensor was
                created, or a private copy for a received tensor and after ``from_dlpack``. Each
                call returns the same array. False returns a read-only view without a copy. BYTES
                tensors always give an object array. Triton does not have this argument.

        Returns:
            The array; its dtype is the numpy type of the data type.

        Raises:
            TritonModelException: the tensor is BF16, which numpy does not have, or is on a GPU.
        """
        self._check_on_cpu()
        if self._code == BF16:
            raise TritonModelException(
                "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and "
                "from_dlpack() instead."
            )
        if copy or self._code == BYTES:
            return self._own_array()
        if self._data is None:
            assert self._array is not None
            view: npt.NDArray[Any] = self._array.view()
            view.flags.writeable = False
            return view
        return read_only_view(self._data, STORAGE[self._code], self._shape, self._owner)

    def as_bfloat16(self) -> npt.NDArray[Any]:
        """Returns the content of a BF16 tensor as an array of dtype ``ml_dtypes.bfloat16``.

        As with ``as_numpy``, each call returns the same array.

        Raises:
            ImportError: the package ml_dtypes is not installed.
            TritonModelException: the tensor has another data type, or is on a GPU.
        """
        self._check_on_cpu()
        if self._code != BF16:
            raise TritonModelException(f"Tensor dtype is {NAMES[self._code]}, not BF16.")
        try:
            from ml_dtypes import bfloat16
        except ImportError as error:
            raise ImportError(
                "as_bfloat16() needs the package ml_dtypes: pip install ml_dtypes"
            ) from error
        if self._array is None:
            self._array = self._own_array().view(bfloat16)
        return self._array

    def as_strings(self) -> npt.NDArray[np.object_]:
        """Returns the texts of a BYTES tensor. Triton does not have this method.

        Returns:
            A new object array of str in the shape of the tensor.

        Raises:
            TritonModelException: the tensor has another data type, or an element is not valid
                UTF-8.

        Examples:
            >>> for name in pb_utils.get_input_tensor_by_name(request, "NAME").as_strings().flat:
        """
        if self._code != BYTES:
            raise TritonModelException(f"Tensor dtype is {NAMES[self._code]}, not BYTES.")
        strings: npt.NDArray[np.object_] = np.empty(self._shape, np.object_)
        flat = strings.reshape(-1)
        for index, element in enumerate(_datatypes.decode(self._wire_data()).tolist()):
            try:
                flat[index] = element.decode()
            except UnicodeDecodeError as error:
                raise TritonModelException(
                    f"Element {index} of tensor '{self._name}' is not valid UTF-8: {error}"
                ) from error
        return strings

    def to_dlpack(self) -> Any:
        """Returns a DLPack capsule over the memory of the tensor.

        The capsule keeps the tensor alive. If a consumer writes to the memory, the tensor sends the
        new content, except after a tensor on a GPU has been sent. A received tensor gets a private
        copy first, because other processes read its memory (docs/explanation/decisions/0004).

        Returns:
            A capsule ``dltensor``, in the shape and data type of the tensor.

        Raises:
            TritonModelException: the tensor is BYTES, or the preferred GPU does not have enough
                free memory.
        """
        if self._on_gpu is not None:
            return _dlpack.export_from_gpu(self, self._device_memory(), self._code, self._shape)
        return _dlpack.export(self, self._writable_storage(), self._code, self._shape)

    def __dlpack__(
        self,
        stream: Any = None,
        *,
        copy: bool | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
    ) -> Any:
        """Returns a DLPack capsule, as ``to_dlpack`` does, or one over a copy.

        Args:
            stream: ignored, because no GPU work is pending on the memory.
            copy: True copies the content, False forbids a copy.
            max_version: ignored, because every consumer can read the capsule.
            dl_device: ``(1, 0)`` copies the content of a tensor on a GPU to host memory.

        Raises:
            BufferError: the export needs a copy to a GPU, or a copy that ``copy`` forbids.
            TritonModelException: as for ``to_dlpack``, or the copy fails.
        """
        current = self.__dlpack_device__()
        target = current if dl_device is None else tuple(map(int, dl_device))
        if target == current and not copy:
            return self.to_dlpack()
        self._check_exportable()
        if target == current and self._on_gpu is not None:
            with self._raise_cuda_errors("copied on"):
                region = self._device_memory().duplicate()
            return _dlpack.export_from_gpu(region, region, self._code, self._shape)
        if target != _dlpack.CPU_DEVICE or (target != current and copy is False):
            raise BufferError(
                f"The tensor is in {'host memory' if self.is_cpu() else 'memory of a GPU'} and "
                "cannot be exported elsewhere" + (" without a copy." if copy is False else ".")
            )
        storage = copy_array(np.frombuffer(self._wire_data(), np.uint8))
        return _dlpack.export(storage, storage, self._code, self._shape)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Returns the DLPack device: ``(1, 0)`` for the CPU, ``(2, id)`` for a GPU."""
        if self._on_gpu is None:
            return _dlpack.CPU_DEVICE
        return _dlpack.CUDA, self._on_gpu if isinstance(self._on_gpu, int) else self._on_gpu.device

    def __repr__(self) -> str:
        """Shows name, data type and shape."""
        return f"Tensor(name={self._name!r}, datatype={NAMES[self._code]}, shape={self._shape})"

    def _wire_data(self) -> memoryview | bytes:
        """Returns the bytes to send: contiguous, one-dimensional, as many as the tensor has."""
        if self._data is not None:
            return self._data
        if self._array is not None:
            return byte_view(self._array)
        region = self._unsent_device_memory()
        assert region is not None
        buffer: npt.NDArray[Any] = np.empty(region.nbytes, np.uint8)
        self._copy_to_host(buffer.data)
        return buffer.data

    def _unsent_device_memory(self) -> _gpu.DeviceMemory | None:
        """Returns the memory on a GPU that is to be sent; None if the bytes are in host memory."""
        if self._data is None and isinstance(self._on_gpu, _gpu.DeviceMemory):
            return self._on_gpu
        return None

    def _copy_to_host(self, buffer: memoryview) -> None:
        """Copies the content from the GPU into host memory.

        Raises:
            TritonModelException: the copy fails.
        """
        with self._raise_cuda_errors("copied from"):
            self._device_memory().copy_to_host(address_of(np.frombuffer(buffer, np.uint8)))

    def _prefer_gpu(self, device: int) -> None:
        """Lets the first export copy the content to a GPU, if there is such a GPU."""
        if self._code != BYTES and 0 <= device < _gpu.device_count():
            self._on_gpu = device

    def _device_memory(self) -> _gpu.DeviceMemory:
        """Returns the content as memory on the GPU, which the tensor sends from now on."""
        data, device = self._data, self._on_gpu
        if not isinstance(device, int):
            assert device is not None
            return device
        with self._raise_cuda_errors("copied to"):
            source = np.frombuffer(data or b"", np.uint8)
            region = _gpu.upload(device, address_of(source), source.nbytes)
        self._on_gpu = region  # set before _data is cleared, because another thread may read both
        self._data = self._owner = None
        return region

    @contextmanager
    def _raise_cuda_errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except _gpu.CudaError as error:
            device = self.__dlpack_device__()[1]
            raise TritonModelException(
                f"Tensor '{self._name}' cannot be {action} GPU {device}: {error}"
            ) from error

    def _set_wire_data(self, data: memoryview, owner: object) -> None:
        """Stores the bytes of the first send, which later sends repeat."""
        self._data = data.toreadonly()
        self._owner = owner

    def _own_array(self) -> npt.NDArray[Any]:
        """Returns the private array of the tensor; the first call creates it."""
        if self._array is None:
            assert self._data is not None
            data, owner = self._received or (self._data, self._owner)
            if self._code == BYTES:
                self._array = _datatypes.decode(data).reshape(self._shape)
            else:
                array = np.ndarray(self._shape, STORAGE[self._code], data)
                # A view, as in Triton: models may rely on its `base`.
                self._array = copy_from_shared_memory(array, owner)[...]
            self._received = None
        return self._array

    def _writable_storage(self) -> npt.NDArray[Any]:
        """Returns memory that consumers of an export may write to; the tensor sends it from now on.

        Received and read-only bytes are replaced by a private copy, because others may read them.
        """
        self._check_exportable()
        data = self._wire_data()
        view = memoryview(data)
        if view.readonly or self._owner is not None:
            private = copy_from_shared_memory(np.frombuffer(data, np.uint8), self._owner)
            if self._array is None:
                self._received = (data, self._owner)
            self._data, self._owner = private.data, None
            return private
        return np.frombuffer(data, np.uint8)

    def _check_on_cpu(self) -> None:
        if self._on_gpu is not None:
            raise TritonModelException("Tensor is stored in GPU and cannot be converted to NumPy.")

    def _check_exportable(self) -> None:
        if self._code == BYTES:
            raise TritonModelException("DLPack does not have support for string tensors.")


def _checked_name(function: str, name: object) -> str:
    checked = _arguments.check_text(function, "name", name)
    if not checked:
        raise TritonModelException("Tensor name cannot be an empty string.")
    return checked
