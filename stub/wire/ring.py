"""A queue of frames in shared memory, for one writer and one reader in different processes.

It carries no signal: the writer tells the reader through an eventfd how many frames there are,
and that system call also orders memory between the two. So a frame is read only after it was
written whole, and a writer killed in the middle of one has never announced it.
"""

import struct
from typing import Optional, Tuple

from stub.wire.payload import INLINE_ALWAYS, INLINE_LIMIT
from stub.wire.shared_file import Mapping, create

BYTES = 1 << 19
"""Shared memory of one ring. Frames of more than a quarter of it travel elsewhere."""

ROUSE = 1 << 32
"""What is added to a stub's eventfd when work is about to come; one is added for each frame."""

AWAKE_SECONDS = 500e-6
"""How long either end stays awake for what is about to come."""

_LONGEST = BYTES // 4
_START = 64  # the reader's position has a cache line of its own
_WORD = struct.Struct("<I")
_WRAP, _ELSEWHERE = 0xFFFFFFFE, 0xFFFFFFFF  # in place of a length
_ROOM = BYTES - _START


def create_file(name: str) -> int:
    """Descriptor of a file for two rings. Raises OSError."""
    return create(name, 2 * BYTES)


def map_file(fd: int) -> Tuple[memoryview, memoryview]:
    """The memory of the ring towards the stub, and of the one towards the host."""
    view = Mapping(fd, 2 * BYTES, writable=True).view
    return view[:BYTES], view[BYTES:]


class RingError(Exception):
    """What stands in the ring was not written by the protocol."""


class RingWriter:
    """Writes frames into `memory` (BYTES long), which starts zeroed."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._position = _position(memory)
        self._written = 0  # bytes since the beginning; the position is this modulo _ROOM

    def put(self, frame: bytes) -> bool:
        """Write a frame; False if it is too long for now or for ever."""
        size = len(frame)
        if size > _LONGEST:
            return False
        position = self._written % _ROOM
        tail = _ROOM - position
        needed = _padded(_WORD.size + size)
        if needed > tail:
            needed += tail  # the rest of the round stays unused
        # One word is kept for an `elsewhere`.
        if needed + _WORD.size > self._free():
            return False
        if needed > tail:
            _WORD.pack_into(self._memory, _START + position, _WRAP)
            position = 0
        at = _START + position
        _WORD.pack_into(self._memory, at, size)
        at += _WORD.size
        self._memory[at : at + size] = frame
        self._written += needed
        return True

    def put_elsewhere(self) -> bool:
        """Say that the next frame comes on another way; False if there is no room even for that."""
        if self._free() < _WORD.size:
            return False
        _WORD.pack_into(self._memory, _START + self._written % _ROOM, _ELSEWHERE)
        self._written += _WORD.size
        return True

    def most_inline(self) -> int:
        """Bytes of tensors that the next frame may carry, so that others find room behind it."""
        return max(INLINE_ALWAYS, min(INLINE_LIMIT, self._free() // 4))

    def close(self) -> None:
        """Let go of the memory; nothing may be put any more."""
        self._memory, self._position = memoryview(b""), _position(memoryview(bytes(8)))

    def _free(self) -> int:
        return _ROOM - (self._written - self._position[0])


class RingReader:
    """Reads what was announced, in order."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._position = _position(memory)
        self._read = 0

    def take(self) -> Optional[bytes]:
        """The next frame; None if it comes on another way. Raises RingError.

        To be called once for each announced frame, no more.
        """
        position = self._read % _ROOM
        size: int = _WORD.unpack_from(self._memory, _START + position)[0]
        if size == _WRAP:
            self._read += _ROOM - position
            position = 0
            size = _WORD.unpack_from(self._memory, _START)[0]
        if size == _ELSEWHERE:
            self._read += _WORD.size
            frame = None
        else:
            at = _START + position + _WORD.size
            if size > _LONGEST or at + size > BYTES:
                raise RingError(f"a frame of {size} bytes at {position}")
            frame = bytes(self._memory[at : at + size])
            self._read += _padded(_WORD.size + size)
        self._position[0] = self._read
        return frame

    def close(self) -> None:
        """Let go of the memory."""
        self._memory = self._position = memoryview(b"")


def _position(memory: memoryview) -> memoryview:
    """The reader's position, to be read and written whole: pack_into would zero it in between."""
    return memory[:8].cast("Q")


def _padded(size: int) -> int:
    """Records begin at words, so that a word never wraps."""
    return (size + 3) & ~3
