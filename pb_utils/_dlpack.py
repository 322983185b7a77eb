"""DLPack export and import of tensors on the CPU and on GPUs.

numpy makes the exported capsules; ctypes reads the received ones.
"""

from __future__ import annotations

import ctypes
import struct
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pb_utils import _datatypes, _gpu
from pb_utils._exceptions import TritonModelException
from pb_utils._storage import address_of, array_at

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

CPU_DEVICE = (1, 0)
CUDA = 2
_CPU, _CUDA_HOST = 1, 3
_INT, _UINT, _FLOAT, _BFLOAT, _BOOL = 0, 1, 2, 4, 6
_READ_ONLY = 1
_LEGACY, _VERSIONED = b"dltensor", b"dltensor_versioned"
# Must stay at this address: capsules keep a pointer to it.
_CONSUMED_NAME = ctypes.create_string_buffer(b"used_dlpack")

_CODES = {
    (_BOOL, 8): _datatypes.BOOL,
    **{(_UINT, 8 << i): 2 + i for i in range(4)},
    **{(_INT, 8 << i): 6 + i for i in range(4)},
    **{(_FLOAT, 16 << i): 10 + i for i in range(3)},
    (_BFLOAT, 16): _datatypes.BF16,
}
_EXPORT_TYPE_CODES = {_datatypes.BOOL: _BOOL, _datatypes.BF16: _BFLOAT}
"""The types that numpy exports as integers."""

_TENSOR = "PiiiBBHPPQ"  # the fields of _DLTensor
_MANAGED = struct.Struct(f"@{_TENSOR}PP")  # tensor, context, deleter
_MANAGED_VERSIONED = struct.Struct(f"@IIPPQ{_TENSOR}")  # version, context, deleter, flags, tensor
_DEVICE_OFFSET = struct.calcsize("@P")
_DTYPE_CODE_OFFSET = struct.calcsize("@Piii")

# Separate prototypes, because argtypes set on ctypes.pythonapi would affect all other users of it.
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_set_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(
    ("PyCapsule_SetName", ctypes.pythonapi)
)
_set_destructor = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(
    ("PyCapsule_SetDestructor", ctypes.pythonapi)
)
_Deleter = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)  # called with the GIL held


class ReceivedTensor(NamedTuple):
    """A tensor that was received by DLPack.

    Attributes:
        code: code of the data type.
        shape: the shape.
        array: an array over the producer's memory, which it keeps alive; for a tensor on a GPU, the
            memory there.
    """

    code: int
    shape: list[int]
    array: npt.NDArray[Any] | _gpu.DeviceMemory


def export(owner: object, storage: npt.NDArray[Any], code: int, shape: list[int]) -> Any:
    """Returns a DLPack capsule ``dltensor`` over an array.

    The capsule holds one reference to ``owner``. numpy makes the capsule, because its deleter is
    native code: a consumer may call it on any thread, and after the interpreter has ended.
    numpy cannot export BOOL and BF16, so their type is set in the finished capsule.

    Args:
        owner: the object that keeps the memory alive.
        storage: a writable array over the bytes.
        code: code of the data type.
        shape: the shape.
    """
    return _capsule(address_of(storage), (owner, storage), code, shape)


def export_from_gpu(owner: object, region: _gpu.DeviceMemory, code: int, shape: list[int]) -> Any:
    """Returns a DLPack capsule over memory on a GPU, as ``export`` does.

    numpy makes this capsule too. It does not access the memory, so a device address is safe.
    """
    capsule = _capsule(region.address, (owner, region), code, shape)
    address = _get_pointer(capsule, _LEGACY) + _DEVICE_OFFSET
    (ctypes.c_int32 * 2).from_address(address)[:] = [CUDA, region.device]
    return capsule


def _capsule(address: int, owner: object, code: int, shape: list[int]) -> Any:
    dtype = np.dtype(np.uint8) if code == _datatypes.BOOL else _datatypes.STORAGE[code]
    capsule = array_at(address, dtype, shape, owner, writable=True).__dlpack__()
    if code in _EXPORT_TYPE_CODES:
        address_of_code = _get_pointer(capsule, _LEGACY) + _DTYPE_CODE_OFFSET
        ctypes.c_uint8.from_address(address_of_code).value = _EXPORT_TYPE_CODES[code]
    return capsule


def receive(obj: Any) -> ReceivedTensor:
    """Imports the tensor of a DLPack capsule, or of an object with ``__dlpack__``.

    Raises:
        TritonModelException: the object is not a DLPack producer, its memory is not on the CPU or
            on a usable GPU, Triton has no such data type, the tensor is not C-contiguous, or the
            capsule has been consumed (docs/reference/model-tensors.md, "from_dlpack").
    """
    capsule = obj if type(obj).__name__ == "PyCapsule" else _request_capsule(obj)
    name = next((name for name in (_LEGACY, _VERSIONED) if _is_valid(capsule, name)), None)
    if name is None:
        raise TritonModelException(
            "Provided DLPack capsule holds no tensor, or has already been consumed."
        )
    address = _get_pointer(capsule, name)
    tensor, deleter, writable = _read_capsule(address, versioned=name == _VERSIONED)
    _check_device(tensor.device_type)
    shape = _integers(tensor.shape, tensor.ndim)
    strides = _integers(tensor.strides, tensor.ndim) if tensor.strides else None
    _check_contiguous(shape, strides, tensor.device_type)
    code = _code_of(tensor)
    _set_name(capsule, ctypes.addressof(_CONSUMED_NAME))
    _set_destructor(capsule, None)
    owner = _TensorDeleter(address, deleter)
    if tensor.device_type == CUDA:
        return ReceivedTensor(code, shape, _as_region(tensor, code, shape, strides, owner))
    return ReceivedTensor(code, shape, _as_array(tensor, code, shape, strides, owner, writable))


class _DLTensor(NamedTuple):
    data: int
    device_type: int
    device_id: int
    ndim: int
    dtype_code: int
    bits: int
    lanes: int
    shape: int
    strides: int
    byte_offset: int


class _TensorDeleter:
    """Owns the managed tensor of a capsule, and calls the producer's deleter on deletion."""

    __slots__ = ("_address", "_deleter")

    def __init__(self, address: int, deleter: int) -> None:
        self._address = address
        self._deleter = _Deleter(deleter) if deleter else None

    def __del__(self) -> None:
        if self._deleter is not None:
            self._deleter(self._address)


def _read_capsule(address: int, versioned: bool) -> tuple[_DLTensor, int, bool]:
    """Returns the tensor, the deleter and whether the memory is writable, from a managed tensor."""
    if not versioned:
        *tensor, _, deleter = _MANAGED.unpack(ctypes.string_at(address, _MANAGED.size))
        return _DLTensor(*tensor), deleter, True
    raw = ctypes.string_at(address, _MANAGED_VERSIONED.size)
    major, _, _, deleter, flags, *tensor = _MANAGED_VERSIONED.unpack(raw)
    if major != 1:
        raise TritonModelException(f"DLPack version {major} is not supported.")
    return _DLTensor(*tensor), deleter, not flags & _READ_ONLY


def _integers(address: int, count: int) -> list[int]:
    return list(struct.unpack(f"@{count}q", ctypes.string_at(address, 8 * count))) if count else []


def _request_capsule(producer: Any) -> Any:
    if not (hasattr(producer, "__dlpack__") and hasattr(producer, "__dlpack_device__")):
        raise TritonModelException(
            "Provided tensor is not supported. Tensor must be a DLPack capsule"
            "         or have `__dlpack__` and `__dlpack_device__` attributes"
        )
    kind, device = map(int, producer.__dlpack_device__())
    _check_device(kind)
    return (
        _request_capsule_on_gpu(producer, device) if kind == CUDA else _call_dlpack(producer, None)
    )


def _request_capsule_on_gpu(producer: Any, device: int) -> Any:
    """Asks a producer for a capsule whose data is ready on our private stream, and waits for it.

    The producer's GPU is the current device meanwhile, because libraries look there for pending
    work.
    """
    with _failing_as("Failed to get current CUDA device id."):
        gpu = _gpu.open_gpu(device)
        gpu.__enter__()
    try:
        with _failing_as("Failed to create a CUDA stream for a DLPack call."):
            stream = gpu.stream
        capsule = _call_dlpack(producer, stream)
        with _failing_as(f"Failed to synchronize CUDA device with id {device}"):
            gpu.synchronise()
    finally:
        gpu.__exit__()
    return capsule


def _call_dlpack(producer: Any, stream: int | None) -> Any:
    try:
        return producer.__dlpack__(stream=stream)
    except BufferError as refusal:  # read-only memory needs version 1 of the protocol
        try:
            return producer.__dlpack__(stream=stream, max_version=(1, 0))
        except TypeError:
            raise refusal from None


@contextmanager
def _failing_as(text: str) -> Iterator[None]:
    try:
        yield
    except _gpu.CudaError as error:
        raise TritonModelException(text) from error


def _check_device(kind: int) -> None:
    if kind == CUDA and not _gpu.device_count():
        raise TritonModelException(
            "DLPack capsule passed pointer to memory allocated on GPU device,"
            "           when GPU is not available"
        )
    if kind not in (_CPU, CUDA, _CUDA_HOST):
        raise TritonModelException(f"DLDevice type {kind} is not support by Python backend.")


def _check_contiguous(shape: list[int], strides: list[int] | None, kind: int) -> None:
    """Checks that a tensor is C-contiguous, except for gaps between rows of the first dimension.

    A copy removes these gaps. On a GPU, it can neither repeat rows nor reverse their order.
    """
    expected = 1
    for index, (size, stride) in reversed(list(enumerate(zip(shape, strides or ())))):
        if size == 1 or 0 in shape:
            continue
        gap = index == 0 and (kind != CUDA or stride > expected)
        if stride != expected and not gap:
            raise TritonModelException(
                "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored "
                "in C-Order are supported."
            )
        expected *= size


def _code_of(tensor: _DLTensor) -> int:
    if tensor.dtype_code == _BFLOAT and tensor.bits != 16:
        raise TritonModelException(f"Expected BF16 tensor to have 16 bits, but had: {tensor.bits}")
    code = _CODES.get((tensor.dtype_code, tensor.bits), _datatypes.INVALID)
    if code == _datatypes.INVALID or tensor.lanes != 1:
        raise TritonModelException("Dtype is invalid.")
    return code


def _as_array(
    tensor: _DLTensor,
    code: int,
    shape: list[int],
    strides: list[int] | None,
    owner: _TensorDeleter,
    writable: bool,
) -> npt.NDArray[Any]:
    dtype = _datatypes.STORAGE[code]
    if 0 in shape:
        return np.empty(shape, dtype)
    array = array_at(
        tensor.data + tensor.byte_offset,
        dtype,
        shape,
        owner,
        strides=strides and [stride * dtype.itemsize for stride in strides],
        writable=writable,
    )
    return array if array.flags.c_contiguous else array.copy()


def _as_region(
    tensor: _DLTensor,
    code: int,
    shape: list[int],
    strides: list[int] | None,
    owner: _TensorDeleter,
) -> _gpu.DeviceMemory:
    size = _datatypes.STORAGE[code].itemsize
    address = tensor.data + tensor.byte_offset
    for length in shape:
        size *= length
    if not size:
        return _gpu.DeviceMemory(tensor.device_id, 0, 0, None)
    if not strides or shape[0] == 1:
        return _gpu.DeviceMemory(tensor.device_id, address, size, owner)
    row, pitch = size // shape[0], strides[0] * _datatypes.STORAGE[code].itemsize
    if row == pitch:
        return _gpu.DeviceMemory(tensor.device_id, address, size, owner)
    try:
        return _gpu.gather(tensor.device_id, address, shape[0], row, pitch)
    except _gpu.CudaError as error:
        raise TritonModelException(
            f"The rows of a DLPack tensor on GPU {tensor.device_id} cannot be copied to contiguous "
            "memory: "
            f"{error}"
        ) from error
