"""A library of arrays on GPUs, as small as it can be: what torch is to a model, without torch.

It calls the CUDA driver itself, whether real or simulated, and is copied beside models of tests.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

LIBRARY = "libcuda.so.1"

_CODES = {"b": 6, "u": 1, "i": 0, "f": 2}  # DLPack's, by numpy's kind
_BFLOAT = (4, 16)


class Driver:
    """The functions of the driver."""

    def __init__(self, path: str) -> None:
        self._library: Any = ctypes.CDLL(path)
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self.call("cuInit", 0)

    def call(self, function: str, *arguments: Any) -> None:
        """Calls a function that needs no context."""
        status = getattr(self._library, function)(*arguments)
        if status:
            raise RuntimeError(f"{function} returned {status}")

    def run(self, device: int, function: str, *arguments: Any) -> None:
        """Calls a function in the context that everybody uses on that device."""
        if device not in self._contexts:
            context = ctypes.c_void_p()
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._contexts[device] = context  # only now, as other threads use it at once
        self.call("cuCtxPushCurrent_v2", self._contexts[device])
        try:
            self.call(function, *arguments)
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def write(self, device: int, address: int, array: Any) -> None:
        """Copies an array to a GPU at once."""
        source, size = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)
        self.run(device, "cuMemcpyHtoD_v2", ctypes.c_uint64(address), source, size)

    def read(self, device: int, address: int, like: Any) -> Any:
        """Returns an array like another one from a GPU."""
        got = np.empty_like(like)
        target, size = ctypes.c_void_p(got.ctypes.data), ctypes.c_size_t(got.nbytes)
        if got.nbytes:
            self.run(device, "cuMemcpyDtoH_v2", target, ctypes.c_uint64(address), size)
        return got


@functools.lru_cache
def _driver(path: str) -> Driver:
    return Driver(path)


def driver() -> Driver:
    """Returns the driver of LIBRARY."""
    return _driver(LIBRARY)


class OnGpu:
    """An array on a GPU. Its content arrives when the stream of a consumer is waited for.

    ``shape``, ``strides`` (in elements) and ``offset`` (in bytes) are what consumers are told, if
    that is not the whole array.
    """

    def __init__(
        self,
        array: Any,
        device: int = 0,
        *,
        shape: list[int] | None = None,
        strides: list[int] | None = None,
        offset: int = 0,
        bfloat16: bool = False,
    ) -> None:
        self.source: Any = np.ascontiguousarray(array)
        self.device = device
        self.shape = list(array.shape) if shape is None else shape
        self.strides = strides
        self.offset = offset
        self.streams: list[int | None] = []  # that consumers have requested
        self.devices: list[int] = []  # that were the current one then
        self.given_back = 0
        kind = (_CODES[self.source.dtype.kind], 8 * self.source.itemsize)
        self._kind = _BFLOAT if bfloat16 else kind
        self._driver = driver()
        address = ctypes.c_uint64()
        if self.source.nbytes:
            size = ctypes.c_size_t(self.source.nbytes)
            self._driver.run(device, "cuMemAlloc_v2", ctypes.byref(address), size)
        self.address: int = address.value

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            self._driver.run(self.device, "cuMemFree_v2", ctypes.c_uint64(self.address))

    def __dlpack_device__(self) -> tuple[int, int]:
        """Returns CUDA's device type and the number of the GPU."""
        return (2, self.device)

    def __dlpack__(self, stream: int | None = None) -> Any:
        """Begins to fill the memory, as work of the stream, and returns a capsule."""
        current = ctypes.c_int()
        self._driver.call("cuCtxGetDevice", ctypes.byref(current))
        self.streams.append(stream)
        self.devices.append(current.value)
        if self.source.nbytes:
            self._driver.run(
                self.device,
                "cuMemcpyHtoDAsync_v2",
                ctypes.c_uint64(self.address),
                ctypes.c_void_p(self.source.ctypes.data),
                ctypes.c_size_t(self.source.nbytes),
                ctypes.c_void_p(stream),
            )
        return self.capsule()

    def capsule(self) -> Any:
        """Returns a bare capsule, and begins nothing."""
        return _capsule(self, self._kind)

    def fill(self, array: Any = None) -> OnGpu:
        """Fills the memory at once, with another array of the same size if there is one."""
        content = self.source if array is None else np.ascontiguousarray(array)
        self._driver.write(self.device, self.address, content)
        return self


class Consumed:
    """The content of a capsule, which the consumer keeps."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule
        found = _Managed.from_address(_get_pointer(capsule, b"dltensor"))
        self.place = (found.device_type, found.device_id)
        self.kind = (found.code, found.bits, found.lanes)
        self.shape = found.shape[: found.ndim]
        self._address = found.data + found.byte_offset

    def read(self, like: Any) -> Any:
        """Returns the content, which is like an array."""
        return driver().read(self.place[1], self._address, like)

    def write(self, array: Any) -> None:
        """Overwrites the content."""
        driver().write(self.place[1], self._address, np.ascontiguousarray(array))


class _Managed(ctypes.Structure):
    """``DLManagedTensor``."""

    _fields_ = [
        ("data", ctypes.c_uint64),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


_lent: dict[int, tuple[_Managed, OnGpu, object]] = {}


def _give_back(address: int) -> None:
    _, owner, _ = _lent.pop(address)
    owner.given_back += 1


_deleter = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_give_back)


_new_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _capsule(array: OnGpu, kind: tuple[int, int]) -> Any:
    count = len(array.shape)
    shape = (ctypes.c_int64 * count)(*array.shape)
    strides = None if array.strides is None else (ctypes.c_int64 * count)(*array.strides)
    managed = _Managed(
        data=array.address,
        device_type=2,
        device_id=array.device,
        ndim=count,
        code=kind[0],
        bits=kind[1],
        lanes=1,
        shape=shape,
        strides=strides,
        byte_offset=array.offset,
        deleter=ctypes.cast(_deleter, ctypes.c_void_p).value,
    )
    address = ctypes.addressof(managed)
    _lent[address] = managed, array, (shape, strides)
    return _new_capsule(address, b"dltensor", None)
