"""A ring buffer of frames in shared memory, with one writer and one reader process.

The ring does not signal: the writer adds the number of new frames to an eventfd, and that system
call also orders memory between the two. So the reader sees only complete frames, and a writer that
is killed while it writes has not announced the frame.
"""

import struct
from typing import Optional, Tuple

from stub.wire.payload import INLINE_ALWAYS, INLINE_LIMIT
from stub.wire.shared_file import Mapping, create_shared_file

RING_BYTES = 1 << 19
"""Bytes of shared memory in one ring. Frames over a quarter of it are sent by ZeroMQ."""

WAKE_EARLY = 1 << 32
"""Added to a stub's eventfd shortly before work is sent; each frame adds one."""

RECLAIMABLE = 1 << 7
"""Flag of the ring of work: the host may reclaim announced frames, so the stub takes one at a time.

The lower bits are the log levels that the host writes.
"""

END_OF_OVERFLOW = b""
"""Sent by ZeroMQ: the next BLS responses are in their ring again."""

BUSY_POLL_SECONDS = 500e-6
"""How long either end busy-polls for a message that is announced."""

_MAX_FRAME = RING_BYTES // 4
_START = 64  # the reader's position and the flags have their own cache line
_FLAGS = 8  # offset of the flags
_LENGTH = struct.Struct("<I")
_WRAP, _OVERFLOW = 0xFFFFFFFE, 0xFFFFFFFF  # special values of a length
_CAPACITY = RING_BYTES - _START


def create_ring_file(name: str) -> int:
    """Creates a file for three rings; returns its descriptor. Raises OSError."""
    return create_shared_file(name, 3 * RING_BYTES)


def map_rings(fd: int) -> Tuple[memoryview, memoryview]:
    """Returns the memory of the ring of work to the stub, and of the ring to the host."""
    view = Mapping(fd, 2 * RING_BYTES, writable=True).view
    return view[:RING_BYTES], view[RING_BYTES:]


def map_bls_ring(fd: int) -> memoryview:
    """Returns the memory of the ring of BLS responses to the stub."""
    return Mapping(fd, 3 * RING_BYTES, writable=True).view[2 * RING_BYTES :]


class RingError(Exception):
    """The ring holds data that the protocol does not write."""


class RingWriter:
    """Writes frames into `memory` (RING_BYTES long), which is zeroed at first."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._position = _position_view(memory)
        self._written = 0  # bytes since the start; modulo _CAPACITY it is the position

    def try_write(self, frame: bytes) -> bool:
        """Writes a frame; returns False if it is too long, or the ring too full."""
        size = len(frame)
        if size > _MAX_FRAME:
            return False
        position = self._written % _CAPACITY
        tail = _CAPACITY - position
        needed = (_LENGTH.size + size + 3) & ~3  # a record starts at a word: none wraps around
        if needed > tail:
            needed += tail  # the end of the ring stays unused
        # Reserves one word for an overflow marker.
        if needed + _LENGTH.size > _CAPACITY - (self._written - self._position[0]):
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
        """Marks that the next frame is sent by ZeroMQ; returns False if even the marker has no
        room.
        """
        if self._free_bytes() < _LENGTH.size:
            return False
        _LENGTH.pack_into(self._memory, _START + self._written % _CAPACITY, _OVERFLOW)
        self._written += _LENGTH.size
        return True

    def inline_limit(self) -> int:
        """Returns the bytes of inline tensors for the next frame that leave room for further
        frames.
        """
        return max(INLINE_ALWAYS, min(INLINE_LIMIT, self._free_bytes() // 4))

    def is_empty(self) -> bool:
        """Whether the reader has read all that was written."""
        return self._free_bytes() == _CAPACITY

    @property
    def position(self) -> int:
        """Where the next frame starts."""
        return self._written

    def rewind(self, position: int) -> None:
        """Removes the frames from this position on; the reader must not have been told of them."""
        self._written = position

    def set_flags(self, flags: int) -> None:
        """Shows the reader a byte, which it sees without being woken."""
        self._memory[_FLAGS] = flags

    def close(self) -> None:
        """Releases the memory; no frame can be written any more."""
        self._memory, self._position = memoryview(b""), _position_view(memoryview(bytes(8)))

    def _free_bytes(self) -> int:
        return _CAPACITY - (self._written - self._position[0])


class RingReader:
    """Reads announced frames, in order."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._position = _position_view(memory)
        self._read = 0

    def read_frame(self) -> Optional[bytes]:
        """Returns the next frame; None if it is sent by ZeroMQ. Raises RingError.

        Call it exactly once for each announced frame.
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
            self._read += (_LENGTH.size + size + 3) & ~3
        self._position[0] = self._read
        return frame

    def flags(self) -> int:
        """Returns the writer's byte."""
        return self._memory[_FLAGS]

    def close(self) -> None:
        """Releases the memory."""
        self._memory = self._position = memoryview(b"")


def _position_view(memory: memoryview) -> memoryview:
    """Returns the reader's position as one 64-bit word; pack_into would not write it atomically."""
    return memory[:8].cast("Q")
