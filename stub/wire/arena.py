"""Arenas: shared memory that one process writes and others read, in an unnamed file.

The file is sparse and has its final length from the start. Memory is reserved block by block, so
that a lack of memory is an error of one allocation and never a SIGBUS. Freed blocks keep their
memory until `trim`.
"""

import ctypes
import os
import threading
from collections import Counter, deque
from typing import Callable, Deque, Dict, Iterable, List, Optional, Tuple

from stub.wire.messages import BlockRelease
from stub.wire.shared_file import PAGE, Mapping, create_shared_file, file_identity

# A block never changes its size class, so an arena uses more addresses than bytes.
_ADDRESS_FACTOR = 4


class ArenaFull(Exception):
    """An arena has no room for a block. `requested`, `used` and `allowed` are in bytes."""

    def __init__(self, requested: int, used: int, allowed: int, reason: str) -> None:
        super().__init__(
            f"{requested} bytes were requested from a tensor arena that uses {used} of {allowed}"
            f" bytes ({reason})"
        )
        self.requested = requested
        self.used = used
        self.allowed = allowed


def create_arena_file(name: str, limit: int) -> int:
    """Creates the file of a new arena; returns its descriptor.

    `limit` is the maximum number of bytes in use at once. Raises OSError.
    """
    return create_shared_file(name, file_size(limit))


def file_size(limit: int) -> int:
    """Returns the length of an arena's file and of its mappings, in bytes."""
    return (limit * _ADDRESS_FACTOR + PAGE - 1) // PAGE * PAGE


def _size_class(size: int) -> int:
    """Returns the smallest block size for `size`: 4 to 7 quarters of a power of 2, in pages."""
    pages = (size + PAGE - 1) // PAGE
    if pages <= 4:
        return max(pages, 1) * PAGE
    quarter = 1 << (pages.bit_length() - 3)
    return (pages + quarter - 1) // quarter * quarter * PAGE


class Block:
    """Bytes in an arena; they stay valid and unchanged while this object lives."""

    __slots__ = ("__weakref__", "arena", "offset", "size", "data", "_on_drop")

    def __init__(
        self,
        arena: int,
        offset: int,
        size: int,
        data: memoryview,
        on_drop: Callable[[int, int], None],
    ) -> None:
        self.arena = arena
        self.offset = offset
        self.size = size
        self.data = data
        self._on_drop = on_drop

    def __del__(self) -> None:
        self._on_drop(self.arena, self.offset)


class Arena:
    """The writing end of an arena. Any thread may write; finalisers may drop blocks anywhere.

    `number` identifies the arena in messages.
    """

    def __init__(self, number: int, fd: int, limit: int) -> None:
        self.number = number
        self.limit = limit
        self.used = 0  # bytes in living blocks
        self.warm = 0  # bytes in free blocks that keep their memory
        self._fd = fd
        self._mapping = Mapping(fd, file_size(limit), writable=True)
        self._view = self._mapping.view
        self._top = 0
        self._peak = 0
        self._sizes: Dict[int, int] = {}
        self._free: Dict[int, List[int]] = {}
        self._punched: Dict[int, List[int]] = {}  # free blocks without memory
        self._dropped: Deque[int] = deque()  # a finaliser cannot wait for the lock
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Refuses new blocks; the memory is freed with the last living block."""
        with self._lock:
            self._closed = True
            self._view = memoryview(b"")
            self._mapping.unmap()

    def write(self, data: memoryview) -> Block:
        """Copies `data` (bytes, C-contiguous, format 'B') into a new block. Raises ArenaFull."""
        size = data.nbytes
        offset = self._allocate(size)
        view = self._view[offset : offset + size]
        view[:] = data
        return Block(self.number, offset, size, view.toreadonly(), self._on_block_drop)

    def write_with(self, size: int, fill: Callable[[memoryview], None]) -> Block:
        """Reserves a block that `fill` writes. Raises ArenaFull, and what `fill` raises."""
        offset = self._allocate(size)
        view = self._view[offset : offset + size]
        block = Block(self.number, offset, size, view.toreadonly(), self._on_block_drop)
        fill(view)
        return block

    def free_bytes(self, excluding: Iterable[Block] = ()) -> int:
        """Returns the unused bytes of the limit; the blocks in `excluding` count as unused."""
        with self._lock:
            self._collect_dropped()
            others = sum(self._sizes[offset] for offset in {block.offset for block in excluding})
            return self.limit - self.used + others

    def trim(self) -> bool:
        """Returns memory to the system that was not needed since the last call.

        Returns whether a later call may return more.
        """
        with self._lock:
            if self._closed:
                return False
            self._collect_dropped()
            peak, self._peak = self._peak, self.used
            self._punch_free_blocks(max(0, peak - self.used))
            return self.warm > 0

    def _on_block_drop(self, arena: int, offset: int) -> None:
        self._dropped.append(offset)

    def _collect_dropped(self) -> None:
        drops = self._dropped
        while drops:
            offset = drops.popleft()
            size = self._sizes[offset]
            self.used -= size
            self.warm += size
            self._free.setdefault(size, []).append(offset)

    def _allocate(self, requested: int) -> int:
        size = _size_class(requested)
        with self._lock:
            if self._closed:
                raise ArenaFull(requested, self.used, self.limit, "it is closed")
            self._collect_dropped()
            stack = self._free.get(size)
            if stack:
                offset = stack.pop()
                self.warm -= size
            else:
                offset = self._reserve(requested, size)
            self.used += size
            if self.used > self._peak:
                self._peak = self.used
            return offset

    def _reserve(self, requested: int, size: int) -> int:
        """Reserves memory for a block; returns its offset. Raises ArenaFull."""
        if self.used + self.warm + size > self.limit:
            self._punch_free_blocks(max(0, self.limit - self.used - size))
        if self.used + size > self.limit:
            raise ArenaFull(requested, self.used, self.limit, "its limit")
        bare = self._punched.get(size)
        if bare:
            offset = bare.pop()
        elif self._has_addresses(size):
            offset = self._top
            self._top += size
        else:
            raise ArenaFull(requested, self.used, self.limit, "too many different sizes")
        self._sizes[offset] = size
        try:
            os.posix_fallocate(self._fd, offset, size)
        except OSError as error:
            self._punched.setdefault(size, []).append(offset)
            raise ArenaFull(
                requested, self.used, self.limit, error.strerror or "no memory"
            ) from error
        return offset

    def _has_addresses(self, size: int) -> bool:
        """Returns whether addresses are left for a block. An empty arena starts again at 0."""
        if self._top + size > len(self._view) and not self.used:
            self._mapping.punch_hole(0, self._top)
            self._top = self.warm = 0
            for record in (self._sizes, self._free, self._punched):
                record.clear()
        return self._top + size <= len(self._view)

    def _punch_free_blocks(self, keep: int) -> None:
        """Punches free blocks out of the file, largest first, until only `keep` bytes keep their
        memory.
        """
        for size in sorted(self._free, reverse=True):
            stack = self._free[size]
            while stack and self.warm > keep:
                offset = stack.pop()
                self._mapping.punch_hole(offset, size)
                self._punched.setdefault(size, []).append(offset)
                self.warm -= size


class ArenaReader:
    """The reading end of an arena: its file, mapped read-only."""

    def __init__(self, fd: int, limit: int) -> None:
        self.file = file_identity(fd)
        self._view = Mapping(fd, file_size(limit), writable=False).view

    def slice(self, offset: int, size: int) -> memoryview:
        """Returns the bytes at `offset`. Raises ValueError if they lie outside the arena."""
        if offset < 0 or size < 0 or offset + size > len(self._view):
            raise ValueError(f"block at {offset} of {size} bytes lies outside its arena")
        return self._view[offset : offset + size]


class RegionMapping:
    """A client's shared memory, mapped for reading inputs and writing outputs."""

    def __init__(self, fd: int, offset: int, size: int) -> None:
        self.file = file_identity(fd)
        self.offset = offset
        self._view = Mapping(fd, size, True, offset).view
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._view))

    def slice(self, offset: int, size: int) -> memoryview:
        """Returns the bytes at `offset`, read-only. Raises ValueError if they lie outside."""
        return self.writable(offset, size).toreadonly()

    def holds(self, address: int) -> bool:
        """Whether the byte at the memory address is one of the region."""
        return self.address <= address < self.address + len(self._view)

    def writable(self, offset: int, size: int) -> memoryview:
        """Returns the bytes at `offset`, writable. Raises ValueError if they lie outside."""
        if offset < 0 or size < 0 or offset + size > len(self._view):
            raise ValueError(f"{size} bytes at {offset} lie outside the region")
        return self._view[offset : offset + size]


class BlockReferences:
    """Keeps exported blocks alive until the peer releases them, once for each export."""

    def __init__(self) -> None:
        self._exported: Dict[Tuple[int, int], List[Block]] = {}
        self._lock = threading.Lock()

    def export_block(self, block: Block) -> None:
        """Keeps the block until the peer releases it."""
        with self._lock:
            self._exported.setdefault((block.arena, block.offset), []).append(block)

    def release_block(self, arena: int, offset: int, count: int) -> None:
        """Removes the `count` latest references to a block. Raises KeyError if there are fewer.

        The latest go first, because a block may return to its owner and be exported again: the
        second export refers to the first one, which must outlive it.
        """
        with self._lock:
            held = self._exported[(arena, offset)]
            if count > len(held):
                raise KeyError((arena, offset))
            released = held[len(held) - count :]
            del held[len(held) - count :]
            if not held:
                del self._exported[(arena, offset)]
        del released  # outside the lock, because dropping a block may drop others

    def release_blocks(self, message: BlockRelease) -> None:
        """Releases the blocks that the peer no longer reads. Raises KeyError for unknown blocks."""
        for arena, offset, count in message.blocks:
            self.release_block(arena, offset, count)

    def exported_blocks(self) -> List[Block]:
        """Returns the blocks that the peer holds, once for each export."""
        with self._lock:
            return [block for held in self._exported.values() for block in held]

    def find_block(self, arena: int, offset: int) -> Block:
        """Returns a block that the peer holds. Raises KeyError."""
        with self._lock:
            return self._exported[(arena, offset)][-1]

    def release_all(self) -> None:
        """Releases all blocks: the peer has ended."""
        with self._lock:
            exported, self._exported = self._exported, {}
        exported.clear()

    def __len__(self) -> int:
        return sum(map(len, self._exported.values()))


DroppedBlocks = Deque[Tuple[int, int]]
"""The places of imported blocks that were dropped: (arena, offset)."""


def collect_releases(dropped: DroppedBlocks) -> Optional[BlockRelease]:
    """Returns a message about all blocks in `dropped`, and empties it; None if there are none.

    Any thread may call it, and add others meanwhile.
    """
    if not dropped:
        return None
    counts: Counter[Tuple[int, int]] = Counter()
    try:
        while True:
            counts[dropped.popleft()] += 1
    except IndexError:
        pass  # empty; another thread may have taken the last ones
    if not counts:
        return None
    return BlockRelease([(arena, offset, count) for (arena, offset), count in counts.items()])
