"""Memory of NVIDIA GPUs. This is the only module that calls CUDA.

It calls the library of the NVIDIA driver, which is present on every machine with a usable GPU, so
it needs no array library. Like PyTorch and CuPy it uses the *primary context* of each GPU, so
memory that they allocate can be used here. The library is loaded, and CUDA is initialised, on the
first call.

Run as a script, it prints the GPUs as JSON. The server does that in a child process, so that it
does not initialise CUDA in its own process.
"""

from __future__ import annotations

import ctypes
import functools
import json
from typing import Any

LIBRARY = "libcuda.so.1"

_NO_DEVICE = 100
_DEVICE_MEMORY = 2
_CAPABILITY = (75, 76)  # device attributes: major and minor compute capability
_LEGACY_STREAM = None  # the legacy default stream, which synchronises with all blocking streams

_int, _size, _handle, _address = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_uint64


class _Copy2D(ctypes.Structure):
    """The C struct ``CUDA_MEMCPY2D``: rows of bytes, whose starts are one pitch apart."""

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
    """A call of the driver failed, or there is no driver.

    Attributes:
        status: the number of the CUDA error; 0 if the driver's library cannot be loaded.
    """

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class _Driver:
    """The loaded library of the driver. ctypes releases the GIL during calls."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise CudaError(f"the NVIDIA driver's library cannot be loaded: {error}") from error
        for name, types in _FUNCTIONS.items():
            getattr(self._library, name).argtypes = types
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function of the library.

        Raises:
            CudaError: the function returned an error.
        """
        status = getattr(self._library, name)(*arguments)
        if status:
            code, text = ctypes.c_char_p(), ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(code))
            self._library.cuGetErrorString(status, ctypes.byref(text))
            parts = [(part.value or b"unknown").decode() for part in (code, text)]
            raise CudaError(f"{name} failed with {parts[0]} ({status}): {parts[1]}", status)


@functools.lru_cache
def _driver() -> _Driver:
    return _Driver()


def is_installed() -> bool:
    """Returns whether the driver's library can be loaded. There may still be no usable GPU."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def device_count() -> int:
    """Returns the number of usable GPUs; 0 without a driver. Initialises CUDA."""
    try:
        return _device_count()
    except CudaError:
        return 0


def _device_count() -> int:
    number = _int()
    _driver().call("cuDeviceGetCount", ctypes.byref(number))
    return number.value


def capabilities() -> dict[int, tuple[int, int]]:
    """Returns the compute capability ``(major, minor)`` of each usable GPU, by device number.

    The result is empty if the driver works and finds no GPU.

    Raises:
        CudaError: there is no driver, or it does not work.
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
    """One GPU. In a ``with`` block, it is the current CUDA device of the thread.

    Attributes:
        number: the device number among the GPUs that this process can see.
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
        """The private CUDA stream for which DLPack producers make their data ready."""
        stream = _handle()
        with self:
            self._driver.call("cuStreamCreate", ctypes.byref(stream), 0)
        assert stream.value is not None
        return stream.value

    def synchronise(self) -> None:
        """Waits until all work on the private stream is done."""
        with self:
            self._driver.call("cuStreamSynchronize", self.stream)

    def allocate(self, nbytes: int) -> DeviceMemory:
        """Returns ``nbytes`` of new, uninitialised memory on this GPU."""
        address = _address()
        if not nbytes:  # cuMemAlloc refuses a size of 0
            return DeviceMemory(self.number, 0, 0, None)
        with self:
            self._driver.call("cuMemAlloc_v2", ctypes.byref(address), nbytes)
        return DeviceMemory(self.number, address.value, nbytes, _Allocation(self, address.value))

    def free(self, address: int) -> None:
        """Frees memory at an address that ``allocate`` returned."""
        with self:
            self._driver.call("cuMemFree_v2", address)

    def copy(self, function: str, *arguments: Any) -> None:
        """Calls a copy function of the driver and waits for its end.

        Copies to a GPU are asynchronous in CUDA and may otherwise still run on return.
        """
        with self:
            self._driver.call(function, *arguments)
            self._driver.call("cuStreamSynchronize", _LEGACY_STREAM)


@functools.lru_cache
def open_gpu(number: int) -> Gpu:
    """Returns the GPU with a device number. The object is cached.

    The first call creates the primary context of the GPU, unless another library has done so.

    Raises:
        CudaError: there is no such GPU, or it cannot be used.
    """
    return Gpu(number)


class DeviceMemory:
    """A block of memory on a GPU.

    The block keeps ``owner`` alive, which in turn keeps the memory allocated. All methods are
    synchronous, and raise CudaError.

    Attributes:
        device: the device number of the GPU.
        address: the device address of the first byte; 0 if the block is empty.
        nbytes: the size in bytes.
    """

    __slots__ = ("_owner", "address", "device", "nbytes")

    def __init__(self, device: int, address: int, nbytes: int, owner: object) -> None:
        self.device = device
        self.address = address
        self.nbytes = nbytes
        self._owner = owner

    def copy_to_host(self, address: int) -> None:
        """Copies the content to host memory at ``address``."""
        if self.nbytes:
            open_gpu(self.device).copy("cuMemcpyDtoH_v2", address, self.address, self.nbytes)

    def duplicate(self) -> DeviceMemory:
        """Returns a copy of the content on the same GPU."""
        copied = open_gpu(self.device).allocate(self.nbytes)
        if self.nbytes:
            open_gpu(self.device).copy("cuMemcpyDtoD_v2", copied.address, self.address, self.nbytes)
        return copied


class _Allocation:
    """Owns memory that ``cuMemAlloc`` returned, and frees it on deletion."""

    __slots__ = ("_address", "_gpu")

    def __init__(self, gpu: Gpu, address: int) -> None:
        self._gpu = gpu
        self._address = address

    def __del__(self) -> None:
        try:
            self._gpu.free(self._address)
        except CudaError:
            pass  # at exit, CUDA may be shut down before this object; that frees all memory


def upload(device: int, address: int, nbytes: int) -> DeviceMemory:
    """Copies ``nbytes`` from host memory at ``address`` to new memory on a GPU."""
    region = open_gpu(device).allocate(nbytes)
    if nbytes:
        open_gpu(device).copy("cuMemcpyHtoD_v2", region.address, address, nbytes)
    return region


def gather(device: int, address: int, rows: int, width: int, pitch: int) -> DeviceMemory:
    """Copies rows that have gaps between them to contiguous new memory on the same GPU.

    Args:
        device: device number of the GPU.
        address: device address of the first row.
        rows: number of rows.
        width: size of a row in bytes.
        pitch: distance between the starts of two rows in bytes.

    Raises:
        CudaError: the allocation or the copy failed.
    """
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
