"""Memory of NVIDIA GPUs: the only module that knows CUDA.

It speaks to the driver's own library, which is wherever a GPU can be used. So no array library is
needed, and what torch, cupy and others allocate can be used beside it: they all work in a GPU's
*primary context*. The library is loaded, and CUDA initialised, when the first tensor asks for it.

Run as a script it prints which GPUs there are, for a process that is to stay free of CUDA.
"""

from __future__ import annotations

import ctypes
import functools
import json
from typing import Any

LIBRARY = "libcuda.so.1"

_NO_DEVICE = 100
_DEVICE_MEMORY = 2
_CAPABILITY = (75, 76)  # attributes of a device: major and minor number
_LEGACY_STREAM = None  # the stream that every blocking stream waits for

_int, _size, _handle, _address = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_uint64


class _Copy2D(ctypes.Structure):
    """``CUDA_MEMCPY2D``: rows of bytes at a distance (the pitch) from each other."""

    _fields_ = [
        (f"{side}_{name}", kind)
        for side in ("source", "target")
        for name, kind in (
            ("x", _size),
            ("y", _size),
            ("memory_type", _int),
            ("host", _handle),
            ("device", _address),
            ("array", _handle),
            ("pitch", _size),
        )
    ] + [("width", _size), ("height", _size)]


_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGetCount": (ctypes.POINTER(_int),),
    "cuDeviceGet": (ctypes.POINTER(_int), _int),
    "cuDeviceGetAttribute": (ctypes.POINTER(_int), _int, _int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(_handle), _int),
    "cuCtxPushCurrent_v2": (_handle,),
    "cuCtxPopCurrent_v2": (ctypes.POINTER(_handle),),
    "cuStreamCreate": (ctypes.POINTER(_handle), ctypes.c_uint),
    "cuStreamSynchronize": (_handle,),
    "cuMemAlloc_v2": (ctypes.POINTER(_address), _size),
    "cuMemFree_v2": (_address,),
    "cuMemcpyDtoH_v2": (_handle, _address, _size),
    "cuMemcpyHtoD_v2": (_address, _handle, _size),
    "cuMemcpyDtoD_v2": (_address, _address, _size),
    "cuMemcpy2D_v2": (ctypes.POINTER(_Copy2D),),
    "cuGetErrorName": (_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuGetErrorString": (_int, ctypes.POINTER(ctypes.c_char_p)),
}


class CudaError(Exception):
    """A call of the driver failed, or there is no driver. ``status`` is CUDA's number, or 0."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class _Driver:
    """The functions of the library. They run without the interpreter's lock."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise CudaError(f"the NVIDIA driver's library cannot be loaded: {error}") from error
        for name, types in _FUNCTIONS.items():
            getattr(self._library, name).argtypes = types
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> None:
        """Raise CudaError unless the call succeeds."""
        status = getattr(self._library, name)(*arguments)
        if status:
            code, text = ctypes.c_char_p(), ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(code))
            self._library.cuGetErrorString(status, ctypes.byref(text))
            words = [(part.value or b"unknown").decode() for part in (code, text)]
            raise CudaError(f"{name} failed with {words[0]} ({status}): {words[1]}", status)


@functools.lru_cache
def _driver() -> _Driver:
    return _Driver()


def is_installed() -> bool:
    """Return whether the driver's library is there, which says nothing about GPUs."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def device_count() -> int:
    """Return how many GPUs this process can use, 0 without a driver. Initialises CUDA."""
    try:
        return _device_count()
    except CudaError:
        return 0


def _device_count() -> int:
    number = _int()
    _driver().call("cuDeviceGetCount", ctypes.byref(number))
    return number.value


def capabilities() -> dict[int, tuple[int, int]]:
    """Return the compute capability of each GPU that this process can use, by its number.

    Raises:
        CudaError: the driver is not there or does not work. No GPU is no error.
    """
    try:
        found = range(_device_count())
    except CudaError as error:
        if error.status == _NO_DEVICE:
            return {}
        raise
    return {number: _capability(number) for number in found}


def _capability(number: int) -> tuple[int, int]:
    handle, value, values = _int(), _int(), []
    _driver().call("cuDeviceGet", ctypes.byref(handle), number)
    for attribute in _CAPABILITY:
        _driver().call("cuDeviceGetAttribute", ctypes.byref(value), attribute, handle)
        values.append(value.value)
    return values[0], values[1]


class Gpu:
    """One GPU. Within ``with gpu:`` it is the current device of this thread.

    ``number`` counts the GPUs that this process can see.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._driver = _driver()
        handle = _int()
        self._driver.call("cuDeviceGet", ctypes.byref(handle), number)
        self._context = _handle()
        self._driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), handle)

    def __enter__(self) -> Gpu:
        self._driver.call("cuCtxPushCurrent_v2", self._context)
        return self

    def __exit__(self, *raised: object) -> None:
        self._driver.call("cuCtxPopCurrent_v2", ctypes.byref(_handle()))

    @functools.cached_property
    def stream(self) -> int:
        """Return the stream for which producers are asked to be ready; it is of this process."""
        stream = _handle()
        with self:
            self._driver.call("cuStreamCreate", ctypes.byref(stream), 0)
        assert stream.value is not None
        return stream.value

    def synchronise(self) -> None:
        """Wait for all work that the private stream waits for."""
        with self:
            self._driver.call("cuStreamSynchronize", self.stream)

    def allocate(self, nbytes: int) -> DeviceMemory:
        """Return new memory with arbitrary content."""
        address = _address()
        if not nbytes:  # the driver refuses to allocate nothing
            return DeviceMemory(self.number, 0, 0, None)
        with self:
            self._driver.call("cuMemAlloc_v2", ctypes.byref(address), nbytes)
        return DeviceMemory(self.number, address.value, nbytes, _Allocation(self, address.value))

    def free(self, address: int) -> None:
        """Give back what was allocated."""
        with self:
            self._driver.call("cuMemFree_v2", address)

    def copy(self, function: str, *arguments: Any) -> None:
        """Run a copying function to its end: those to a GPU may return before they are done."""
        with self:
            self._driver.call(function, *arguments)
            self._driver.call("cuStreamSynchronize", _LEGACY_STREAM)


@functools.lru_cache
def open_gpu(number: int) -> Gpu:
    """Return the GPU of that number; using it costs the context that other libraries use too.

    Raises:
        CudaError: there is no such GPU, or it cannot be used.
    """
    return Gpu(number)


class DeviceMemory:
    """Bytes on a GPU; ``keeper`` lives as long as this object, and the memory as long as it.

    All methods raise CudaError, and return when what they do is done.
    """

    __slots__ = ("_keeper", "address", "device", "nbytes")

    def __init__(self, device: int, address: int, nbytes: int, keeper: object) -> None:
        self.device = device
        self.address = address
        self.nbytes = nbytes
        self._keeper = keeper

    def copy_to_host(self, address: int) -> None:
        """Write the content to host memory."""
        if self.nbytes:
            open_gpu(self.device).copy("cuMemcpyDtoH_v2", address, self.address, self.nbytes)

    def duplicate(self) -> DeviceMemory:
        """Return a copy of the content on the same GPU."""
        copied = open_gpu(self.device).allocate(self.nbytes)
        if self.nbytes:
            open_gpu(self.device).copy("cuMemcpyDtoD_v2", copied.address, self.address, self.nbytes)
        return copied


class _Allocation:
    """Memory that is given back with this object."""

    __slots__ = ("_address", "_gpu")

    def __init__(self, home: Gpu, address: int) -> None:
        self._gpu = home
        self._address = address

    def __del__(self) -> None:
        try:
            self._gpu.free(self._address)
        except CudaError:
            pass  # at the end of the process the driver may go first, and takes all memory along


def upload(device: int, address: int, nbytes: int) -> DeviceMemory:
    """Return a copy, on a GPU, of host memory."""
    region = open_gpu(device).allocate(nbytes)
    if nbytes:
        open_gpu(device).copy("cuMemcpyHtoD_v2", region.address, address, nbytes)
    return region


def gather(device: int, address: int, rows: int, width: int, pitch: int) -> DeviceMemory:
    """Return a copy without gaps of rows of ``width`` bytes, ``pitch`` bytes from each other."""
    region = open_gpu(device).allocate(rows * width)
    copy = _Copy2D(
        source_memory_type=_DEVICE_MEMORY,
        source_device=address,
        source_pitch=pitch,
        target_memory_type=_DEVICE_MEMORY,
        target_device=region.address,
        target_pitch=width,
        width=width,
        height=rows,
    )
    open_gpu(device).copy("cuMemcpy2D_v2", ctypes.byref(copy))
    return region


def _report() -> dict[str, Any]:
    try:
        return {"gpus": list(capabilities().items())}
    except CudaError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    import sys

    sys.stdout.write(json.dumps(_report()) + "\n")
