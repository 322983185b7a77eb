"""The shared memory of a stub: its own arena, and blocks imported from other processes."""

import os
import sys
import threading
import weakref
from collections import deque
from typing import Callable, Dict, Iterable, NamedTuple, Optional, Tuple, Union

import numpy as np

from pb_utils._storage import address_of, copy_into
from stub.copy_on_write import CopyOnWriteMapping, CopyOnWriteViews, RegionBlock
from stub.wire.arena import (
    Arena,
    ArenaReader,
    Block,
    BlockReferences,
    DroppedBlocks,
    RegionMapping,
    collect_releases,
    file_size,
)
from stub.wire.messages import (
    INLINE_ALWAYS,
    INLINE_LIMIT,
    BlockRelease,
    OpenArena,
    OutputPlacement,
    WireTensor,
)
from stub.wire.shared_file import file_identity


class SharedMemoryUnavailable(Exception):
    """The shared memory of a tensor is gone: its process ended, or its client removed it."""


_BETWEEN_BATCHES = 0
_IN_EXECUTE = 1  # the next BLS request also carries the releases
_AFTER_EXECUTE = sys.maxsize  # the batch's last frame carries all releases
"""Numbers of releases after which the service thread is woken to report them to the host."""


class FileRange(NamedTuple):
    """Bytes of a file: its device and inode, and their offset and number."""

    file: Tuple[int, int]
    offset: int
    size: int

    def begins_with(self, other: "Optional[FileRange]") -> bool:
        """Whether both have the same first byte."""
        return other is not None and (self.file, self.offset) == (other.file, other.offset)

    def overlaps(self, other: "FileRange") -> bool:
        """Whether at least one byte is in both."""
        return (
            self.file == other.file
            and self.offset < other.offset + other.size
            and other.offset < self.offset + self.size
        )


class StubMemory:
    """The arenas that a stub reads and writes.

    `wake` wakes the service thread, which reports released blocks to the host.
    """

    def __init__(self, own: Arena, wake: Callable[[], None]) -> None:
        self.own = own
        self.ring_free_bytes: Callable[[], int] = lambda: INLINE_LIMIT  # bytes in the next frame
        self._batch_requests = 1
        self.exported = BlockReferences()
        self._wake = wake
        self._readers: Dict[int, Union[ArenaReader, RegionMapping]] = {}
        self._sources: Dict[int, OpenArena] = {}  # regions are mapped when they are used
        self._view_mappings: Dict[int, Optional[CopyOnWriteMapping]] = {}
        self.views = CopyOnWriteViews(self._mapping_for_views, wake)
        self._unsent_releases: DroppedBlocks = deque()
        self._imported_blocks: Optional[weakref.WeakSet[Block]] = None
        self._imported_lock = threading.Lock()
        self._releases_before_wake = _BETWEEN_BATCHES
        self._released_in_time = False  # the service thread looks for releases without being woken

    def add_inherited_arena(self, number: int, fd: int, limit: int) -> None:
        """Opens an arena for reading by an inherited descriptor."""
        self._readers[number] = ArenaReader(fd, limit)
        self._sources[number] = OpenArena(number, f"/proc/self/fd/{fd}", limit)

    def open_arena(self, message: OpenArena) -> None:
        """Opens another process's arena, or registers a client's region.

        Raises OSError if it is gone.
        """
        if not message.region and message.arena not in self._readers:
            fd = os.open(message.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._readers[message.arena] = ArenaReader(fd, message.limit)
            finally:
                os.close(fd)
        self._sources[message.arena] = message

    def _reader(self, number: int) -> Union[ArenaReader, RegionMapping, None]:
        """Returns None if the memory is gone, or while the client's region is too small."""
        reader = self._readers.get(number)
        message = self._sources.get(number) if reader is None else None
        if message is None:
            return reader
        try:
            fd = os.open(message.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                reader = self._readers[number] = RegionMapping(fd, message.offset, message.limit)
            finally:
                os.close(fd)
        except (OSError, ValueError):  # ValueError: it is smaller
            return None
        return reader

    def output_buffer(self, size: int, placement: OutputPlacement) -> Optional[memoryview]:
        """Returns the client's memory for an output, writable; None if the output does not fit."""
        arena, offset, room = placement
        region = self._reader(arena) if size <= room else None
        if not isinstance(region, RegionMapping):
            return None
        self.views.detach_from_range(region.file, region.offset + offset, size)
        return region.writable(offset, size)

    def placement_bytes(self, placement: OutputPlacement) -> Optional[FileRange]:
        """Returns where the client's memory for an output is; None if it is gone."""
        arena, offset, room = placement
        region = self._reader(arena)
        if not isinstance(region, RegionMapping):
            return None
        return FileRange(region.file, region.offset + offset, room)

    def region_bytes(self, data: memoryview) -> Optional[FileRange]:
        """Returns where bytes in a client's memory are; None for other bytes, and for none."""
        if not data.nbytes:
            return None
        address = address_of(np.frombuffer(data, np.uint8))
        for region in tuple(self._readers.values()):
            if isinstance(region, RegionMapping) and region.holds(address):
                offset = region.offset + address - region.address
                return FileRange(region.file, offset, data.nbytes)
        return None

    def close_arena(self, number: int) -> None:
        """Closes an arena; its mapping ends with the last tensor in it."""
        self._readers.pop(number, None)
        self._sources.pop(number, None)
        mapping = self._view_mappings.pop(number, None)
        if mapping is not None:
            self.views.release_mapping(mapping)

    def _mapping_for_views(self, number: int) -> Optional[CopyOnWriteMapping]:
        """Returns the copy-on-write mapping of an arena; None if it is gone or cannot be mapped."""
        mapping = self._view_mappings.get(number)
        if mapping is not None and mapping.released:
            self._view_mappings.pop(number, None)  # the service thread may have done it
        if number not in self._view_mappings:
            reader, source = self._readers.get(number), self._sources.get(number)
            if reader is None or source is None:
                return None
            self._view_mappings[number] = mapping = _map_copy_on_write(source, reader.file)
        return mapping

    def import_block(self, tensor: WireTensor) -> Block:
        """Imports the block of a tensor; deleting the returned object releases it.

        Raises SharedMemoryUnavailable.
        """
        reader = self._reader(tensor.arena)
        if reader is None:
            # Releases the block, which the host holds for this process.
            self._on_import_dropped(tensor.arena, tensor.offset)
            raise SharedMemoryUnavailable(
                f"the shared memory in which tensor '{tensor.name}' lay is gone"
            )
        view = reader.slice(tensor.offset, tensor.size)
        kind = RegionBlock if isinstance(reader, RegionMapping) else Block
        block = kind(tensor.arena, tensor.offset, tensor.size, view, self._on_import_dropped)
        if isinstance(block, RegionBlock):
            block.batch = self.views.batch
        elif self._imported_blocks is not None:  # blocks of client regions use no arena
            with self._imported_lock:
                self._imported_blocks.add(block)
        return block

    def free_bytes(self) -> int:
        """Returns the bytes that stay free if the arena holds all tensors that this process keeps.

        Imported blocks count, exported blocks do not. Imports are counted from the first call on,
        so that models without such a call do not pay for it.
        """
        with self._imported_lock:
            if self._imported_blocks is None:
                self._imported_blocks = weakref.WeakSet()
            blocks = list(self._imported_blocks)
        imported = sum({(block.arena, block.offset): block.size for block in blocks}.values())
        return max(0, self.own.free_bytes(excluding=self.exported.exported_blocks()) - imported)

    def inline_limit(self, tensors: int) -> int:
        """Returns the bytes that each of `tensors` tensors may have inside the next message."""
        return max(
            INLINE_ALWAYS, self.ring_free_bytes() // (self._batch_requests * max(1, tensors))
        )

    def write_block(self, data: memoryview) -> Block:
        """Writes bytes into the own arena. Raises ArenaFull."""
        return self.own.write_with(data.nbytes, lambda room: copy_into(room, data))

    def cancel_export(self, blocks: Iterable[Block]) -> None:
        """Reverts `export_blocks`: the message to the host was not sent."""
        for block in blocks:
            if block.arena == self.own.number:
                self.exported.release_block(block.arena, block.offset, 1)

    def export_blocks(self, blocks: Iterable[Block]) -> None:
        """Keeps blocks that a message is about to name until the host releases them.

        Imported blocks need no reference here: the host holds them for this process.
        """
        for block in blocks:
            if block.arena == self.own.number:
                self.exported.export_block(block)

    def take_releases(self) -> Optional[BlockRelease]:
        """Returns a message with the imported blocks that were released since the last call.

        A response that refers to an imported block keeps it until the response is sent.
        """
        return collect_releases(self._unsent_releases)

    def set_released_in_time(self, in_time: bool) -> bool:
        """Sets whether the service thread soon calls `take_releases` without being woken.

        Returns whether it has to be called now.
        """
        self._released_in_time = in_time
        return not in_time and bool(self._unsent_releases)

    def begin_batch(self, requests: int = 1) -> None:
        """Begins a batch of `requests` requests, on the main thread."""
        self._releases_before_wake = _IN_EXECUTE
        self._batch_requests = requests

    def execute_returned(self) -> None:
        """Notes that `execute` has returned."""
        self._releases_before_wake = _AFTER_EXECUTE

    def end_batch(self) -> Optional[BlockRelease]:
        """Ends the batch, after its responses were sent; returns what they have released.

        The main thread sends it: to wake the service thread for it takes longer.
        """
        self._releases_before_wake = _BETWEEN_BATCHES
        return None if self._released_in_time else self.take_releases()

    def _on_import_dropped(self, arena: int, offset: int) -> None:
        self._unsent_releases.append((arena, offset))
        if len(self._unsent_releases) > self._releases_before_wake and not self._released_in_time:
            self._wake()


def _map_copy_on_write(source: OpenArena, file: Tuple[int, int]) -> Optional[CopyOnWriteMapping]:
    size = source.limit if source.region else file_size(source.limit)
    try:
        fd = os.open(source.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if file_identity(fd) != file:  # the descriptor was closed and reused
                return None
            return CopyOnWriteMapping(fd, size, source.offset, source.region)
        finally:
            os.close(fd)
    except (OSError, ValueError):  # an older kernel, or addresses are limited
        return None
