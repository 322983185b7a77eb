"""Shared memory regions that clients have registered, and outputs that are written into them.

Source: docs/reference/protocol.md, "Shared memory".
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import posix_ipc

from host.errors import ErrorCode, HostError, internal, invalid_argument, not_found, unsupported
from host.inference.request import Buffer, SharedMemoryBytes, Tensor, read_bytes
from host.instances.arenas import Arenas
from stub.wire.arena import Block
from stub.wire.messages import OpenArena
from stub.wire.shared_file import PAGE
from stub.wire.shared_file import Mapping as FileMapping

_RESERVED_PREFIX = "triton_python_backend_shm_region_"
_UINT64 = 0xFFFFFFFFFFFFFFFF
_NOT_MAPPED = memoryview(b"")
_DISABLED = (
    "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
)


@dataclass(frozen=True, slots=True)
class RegionStatus:
    """A registered region, with the `offset` and `byte_size` of its registration."""

    name: str
    key: str
    offset: int
    byte_size: int


class RegionPart(NamedTuple):
    """The place of a tensor in a region: offset and size in bytes."""

    name: str
    offset: int
    byte_size: int


class RegionBlock(SharedMemoryBytes, Block):
    """A part of a region, and the bytes of the tensor in it."""

    __slots__ = ("_region",)

    def __init__(
        self, region: Region, offset: int, size: int, on_drop: Callable[[int, int], None]
    ) -> None:
        super().__init__(region.number, offset, size, _NOT_MAPPED, on_drop)
        self._region = region

    def __len__(self) -> int:
        return self.size

    def __bytes__(self) -> bytes:
        return self._region.read(self.offset, self.size)

    def read_part(self, begin: int, size: int) -> bytes:
        return self._region.read(self.offset + begin, size)

    def write(self, data: Buffer) -> None:
        """Writes bytes to its start. Raises OSError."""
        self._region.write(self.offset, data)


class Region:
    """One registration. The host does not map it: its blocks are references."""

    def __init__(self, status: RegionStatus, number: int, descriptor: int) -> None:
        self.status = status
        self.number = number
        self.unregistered = False
        self._descriptor = descriptor
        self._locked = self._is_locked()
        # Stubs must be able to map it.
        FileMapping(descriptor, status.byte_size, True, status.offset).unmap()
        self._blocks_created = 0
        self._blocks_dropped: deque[None] = deque()  # by finalisers, in any thread

    @property
    def in_use(self) -> bool:
        """Whether a tensor in the region is in use."""
        return self._blocks_created > len(self._blocks_dropped)

    @property
    def abandoned(self) -> bool:
        """Whether a client had locked the object when it registered it, and does not any more."""
        return self._locked and not self._is_locked()

    def _is_locked(self) -> bool:
        """Whether a process holds a lock (flock) of the object, which the kernel ends with it."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return False

    def announcement(self) -> OpenArena:
        """The message that a stub gets before it gets blocks of this region."""
        status = self.status
        path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        return OpenArena(self.number, path, status.byte_size, status.offset, True)

    def block(self, offset: int, size: int) -> RegionBlock:
        """A part of the region. Raises ValueError if it lies outside."""
        if offset < 0 or size < 0 or offset + size > self.status.byte_size:
            raise ValueError(f"{size} bytes at {offset} lie outside region '{self.status.name}'")
        self._blocks_created += 1
        return RegionBlock(self, offset, size, self._on_block_drop)

    def _on_block_drop(self, arena: int, offset: int) -> None:
        self._blocks_dropped.append(None)

    def read(self, offset: int, size: int) -> bytes:
        """A copy of the bytes. Raises HostError if the client has shrunk the object."""
        name, begin = self.status.name, self.status.offset + offset
        data = b""
        while len(data) < size:  # one call reads 2 GiB at most
            try:
                more = os.pread(self._descriptor, size - len(data), begin + len(data))
            except OSError as error:
                raise internal(
                    f"shared memory region '{name}' cannot be read: {error.strerror}"
                ) from error
            if not more:
                raise internal(
                    f"shared memory region '{name}' has become too small: it has {len(data)} of"
                    f" the {size} bytes at offset {offset} that a tensor needs. Make it as large as"
                    " it was when it was registered, or register it again"
                )
            data += more
        return data

    def write(self, offset: int, data: Buffer) -> None:
        """Writes bytes. Raises OSError."""
        begin, left = self.status.offset + offset, memoryview(data)
        while left:  # one call writes 2 GiB at most
            written = os.pwrite(self._descriptor, left, begin)
            begin, left = begin + written, left[written:]

    def close(self) -> None:
        """Closes the region; nothing can be read or written any more."""
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)


class Regions:
    """All regions of one server. CUDA regions would share their names, but there are none.

    `arenas`: gets each region; None where clients may not register any.
    """

    def __init__(self, arenas: Arenas | None) -> None:
        self._arenas = arenas
        self._regions: dict[str, Region] = {}

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Registers a client's shared memory object. Raises HostError."""
        arenas = self._require_arenas()
        self.close_unregistered()
        if name in self._regions:
            raise HostError(
                ErrorCode.ALREADY_EXISTS, f"shared memory region '{name}' already in manager"
            )
        bare = key.lstrip("/")
        if not bare:
            raise invalid_argument(
                f"cannot register shared memory region '{name}' - invalid shm key '{key}'"
            )
        if bare.startswith(_RESERVED_PREFIX):
            raise invalid_argument(
                f"cannot register shared memory region '{name}' with key '{key}' as the key"
                f" contains the reserved prefix '{_RESERVED_PREFIX}'"
            )
        descriptor = _open_shared_memory(bare, key)
        try:
            status = RegionStatus(name, key, offset, byte_size)
            region = _map_region(status, arenas.next_number(), descriptor)
        except BaseException:  # also if cancelled, as the descriptor has no other owner
            os.close(descriptor)
            raise
        self._regions[name] = region
        arenas.add_region(region)

    def require_enabled(self) -> None:
        """Raises HostError unless clients may register regions."""
        self._require_arenas()

    def _require_arenas(self) -> Arenas:
        if self._arenas is None:
            raise unsupported(_DISABLED)
        return self._arenas

    def unregister(self, name: str) -> None:
        """Unregisters a region, or all without a name; one in use closes with its last user."""
        self.require_enabled()
        for region in [self._regions.get(name)] if name else list(self._regions.values()):
            if region is not None:
                region.unregistered = True
        self.close_unregistered()

    def close_unregistered(self) -> None:
        """Closes unregistered regions that are no longer in use.

        Also those of clients that have exited, so that their memory does not stay for ever.
        """
        for name, region in list(self._regions.items()):
            if (region.unregistered or region.abandoned) and not region.in_use:
                del self._regions[name]
                self._require_arenas().remove_region(region)
                region.close()

    def status(self, name: str) -> list[RegionStatus]:
        """One region, or all without a name. Raises HostError NOT_FOUND."""
        self.close_unregistered()
        if not name:
            return [self._regions[known].status for known in sorted(self._regions)]
        if name not in self._regions:
            raise not_found(f"Unable to find system shared memory region: '{name}'")
        return [self._regions[name].status]

    def cuda_status(self, name: str) -> None:
        """Raises HostError NOT_FOUND for any name, as there are no CUDA regions."""
        if name and name in self._regions:
            raise not_found(
                f"The region named '{name}' is registered as system shared memory, not CUDA shared"
                " memory"
            )
        if name:
            raise not_found(f"Unable to find cuda shared memory region: '{name}'")

    def register_cuda(self, name: str) -> None:
        """Raises HostError, as CUDA regions are not supported."""
        self.require_enabled()
        raise invalid_argument(
            f"failed to register CUDA shared memory region: '{name}', GPUs not supported"
        )

    def find_block(self, name: str, offset: int, byte_size: int) -> RegionBlock:
        """The place of a tensor in a region. Raises HostError."""
        region = self._regions.get(name)
        if region is None:
            raise not_found(f"Unable to find shared memory region: '{name}'")
        size = region.status.byte_size
        # As unsigned numbers, as the protocol has them.
        offset, byte_size = offset & _UINT64, byte_size & _UINT64
        if offset >= size:
            raise invalid_argument(f"Invalid offset for shared memory region: '{name}'")
        if offset + byte_size > _UINT64:
            raise invalid_argument(
                f"Integer overflow detected: byte_size ({byte_size}) + offset ({offset}) exceeds"
                f" maximum value ({_UINT64}) for region '{name}'"
            )
        if offset + byte_size > size:
            raise invalid_argument(f"Invalid offset + byte size for shared memory region: '{name}'")
        return region.block(offset, byte_size)

    def close(self) -> None:
        """Closes all regions."""
        for region in self._regions.values():
            self._require_arenas().remove_region(region)
            region.close()
        self._regions.clear()


def _open_shared_memory(bare: str, key: str) -> int:
    cannot = internal(f"Unable to open shared memory region: '{key}'")
    if "\0" in bare:
        raise cannot  # posix_ipc 1.3.2 would crash
    try:
        memory = posix_ipc.SharedMemory(f"/{bare}")
    except (OSError, ValueError, posix_ipc.Error) as error:
        raise cannot from error
    return int(memory.fd)


def _map_region(status: RegionStatus, number: int, descriptor: int) -> Region:
    failed = f"failed to register shared memory region '{status.name}'"
    if status.offset + status.byte_size > os.fstat(descriptor).st_size:
        raise invalid_argument(f"{failed}: invalid args")
    if not status.byte_size or status.offset % PAGE:
        reason = os.strerror(errno.EINVAL)
        raise invalid_argument(f"{failed}: unable to process address space{reason}")
    try:
        return Region(status, number, descriptor)
    except OSError as error:
        raise invalid_argument(
            f"{failed}: unable to process address space{error.strerror or error}"
        ) from error


def is_in_place(tensor: Tensor, placement: object) -> bool:
    """Whether a stub has made the tensor where the client wants it."""
    block = tensor.owner
    return (
        isinstance(block, Block)
        and isinstance(placement, Block)
        and (block.arena, block.offset) == (placement.arena, placement.offset)
        and block.size <= placement.size
    )


def write_outputs(placement: Mapping[str, object], outputs: list[Tensor]) -> HostError | None:
    """Writes outputs to where the client wants them; returns the error if that fails.

    Outputs that a stub has written there already are left alone.
    """
    for index, output in enumerate(outputs):
        slot = placement.get(output.name)
        if slot is None:
            continue
        assert isinstance(slot, RegionBlock)
        if not is_in_place(output, slot):
            size = len(output.data)
            if size > slot.size:
                return _too_small(output.name, slot.size, size)
            try:
                slot.write(read_bytes(output.data))
            except OSError as error:
                return internal(f"output '{output.name}' cannot be written: {error.strerror}")
        outputs[index] = Tensor(output.name, output.datatype, output.shape, b"")
    return None


def _too_small(output: str, room: int, size: int) -> HostError:
    """The error with its documented text.

    Source: docs/reference/protocol.md, "Shared memory".
    """
    return internal(
        f"shared memory size specified with the request for output '{output}' ({room} bytes)"
        f" should be at least {size} bytes to hold the results"
    )
