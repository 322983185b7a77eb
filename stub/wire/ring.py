"""A queue of frames in shared memory, for one writer and one reader in different processes.

It carries no signal: the writer tells the reader through an eventfd how many frames there are,
and that system call also orders memory between the two. So a frame is read only after it was
written whole, and a writer killed in the middle of one has never announced it.
"""

import struct
from typing import Optional, Tuple

from stub.wire.payload import INLINE_ALWAYS, INLINE_LIMIT
from stub.wire.shared_file import Mapping, create_shared_file

RING_BYTES = 1 << 19
"""Shared memory of one ring. Frames of more than a quarter of it travel elsewhere."""

WAKE_EARLY = 1 << 32
"""What is added to a stub's eventfd when work is about to come; one is added for each frame."""

BUSY_POLL_SECONDS = 500e-6
"""How long either end stays awake for what is about to come."""

_MAX_FRAME = RING_BYTES // 4
_START = 64  # the reader's position has a cache line of its own
_LENGTH = struct.Struct("<I")
_WRAP, _OVERFLOW = 0xFFFFFFFE, 0xFFFFFFFF  # in place of a length
_CAPACITY = RING_BYTES - _START


def create_ring_file(name: str) -> int:
    """Descriptor of a file for two rings. Raises OSError."""
    return create_shared_file(name, 2 * RING_BYTES)


def map_rings(fd: int) -> Tuple[memoryview, memoryview]:
    """The memory of the ring towards the stub, and of the one towards the host."""
    view = Mapping(fd, 2 * RING_BYTES, writable=True).view
    return view[:RING_BYTES], view[RING_BYTES:]


class RingError(Exception):
    """What stands in the ring was not written by the protocol."""


class RingWriter:
    """Writes frames into `memory` (BYTES long), which starts zeroed."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._position = _position_view(memory)
        self._written = 0  # bytes since the beginning; the position is this modulo _ROOM

    def try_write(self, frame: bytes) -> bool:
        """Write a frame; False if it is too long for now or for ever."""
        size = len(frame)
        if size > _MAX_FRAME:
            return False
        position = self._written % _CAPACITY
        tail = _CAPACITY - position
        needed = _align_to_word(_LENGTH.size + size)
        if needed > tail:
            needed += tail  # the rest of the round stays unused
        # One word is kept for an overflow marker.
        if needed + _LENGTH.size > self._free_bytes():
            return False
        if needed > tail:
            _LENGTH.pack_into(self._memory, _START + position, _WRAP)
            position = 0
        at = _START + position
        _LENGTH.pack_into(self._memory, at, size)
        at += _LENGTH.size
        self._memory[at : at + size] = frame
        self._written += needed
        return True

    def write_overflow_marker(self) -> bool:
        """Say that the next frame comes on another way; False if there is no room even for that."""
        if self._free_bytes() < _LENGTH.size:
            return False
        _LENGTH.pack_into(self._memory, _START + self._written % _CAPACITY, _OVERFLOW)
        self._written += _LENGTH.size
        return True

    def inline_limit(self) -> int:
        """Bytes of tensors that the next frame may carry, so that others find room behind it."""
        return max(INLINE_ALWAYS, min(INLINE_LIMIT, self._free_bytes() // 4))

    def close(self) -> None:
        """Let go of the memory; nothing may be put any more."""
        self._memory, self._position = memoryview(b""), _position_view(memoryview(bytes(8)))

    def _free_bytes(self) -> int:
        return _CAPACITY - (self._written - self._position[0])


class RingReader:
    """Reads what was announced, in order."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._position = _position_view(memory)
        self._read = 0

    def read_frame(self) -> Optional[bytes]:
        """The next frame; None if it comes on another way. Raises RingError.

        To be called once for each announced frame, no more.
        """
        position = self._read % _CAPACITY
        size: int = _LENGTH.unpack_from(self._memory, _START + position)[0]
        if size == _WRAP:
            self._read += _CAPACITY - position
            position = 0
            size = _LENGTH.unpack_from(self._memory, _START)[0]
        if size == _OVERFLOW:
            self._read += _LENGTH.size
            frame = None
        else:
            at = _START + position + _LENGTH.size
            if size > _MAX_FRAME or at + size > RING_BYTES:
                raise RingError(f"a frame of {size} bytes at {position}")
            frame = bytes(self._memory[at : at + size])
            self._read += _align_to_word(_LENGTH.size + size)
        self._position[0] = self._read
        return frame

    def close(self) -> None:
        """Let go of the memory."""
        self._memory = self._position = memoryview(b"")


def _position_view(memory: memoryview) -> memoryview:
    """The reader's position, to be read and written whole: pack_into would zero it in between."""
    return memory[:8].cast("Q")


def _align_to_word(size: int) -> int:
    """Records begin at words, so that a word never wraps."""
    return (size + 3) & ~3
