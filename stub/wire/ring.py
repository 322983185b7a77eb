"""A ring of frames in shared memory, with one writer and one reader process, and its eventfd.

The writer adds the number of new records to the eventfd, and that system call also orders memory
between the two. So the reader sees only complete records, and a writer that is killed while it
writes has not announced the record. A long frame is written as several records. What the ring has
no room for waits in the writer, so there is one order.
"""

import os
import struct
import sys
from collections import deque
from typing import Deque, List, Optional, Union

from stub.wire.messages import INLINE_ALWAYS, INLINE_LIMIT
from stub.wire.shared_file import Mapping, create_shared_file

RING_BYTES = 1 << 19
"""Bytes of shared memory in one ring."""

WORK_RING, HOST_RING, BLS_RING = 0, 1, 2
"""The rings of a stub: work for it, its frames for the host, and BLS responses for it."""

WAKE_EARLY = 1 << 32
"""Added to a stub's eventfd shortly before work is sent; each record adds one."""

RECLAIMABLE = 1 << 7
"""Flag of the ring of work: the host may reclaim announced frames, so the stub takes one at a time.

The lower bits are the log levels that the host writes.
"""

BUSY_POLL_SECONDS = 500e-6
"""How long either end busy-polls for a message that is announced."""

_MAX_RECORD = RING_BYTES // 4
_PIECE_BYTES = 1 << 16  # of a frame that needs several records
_START = 64  # the reader's position and the flags have their own cache line
_FLAGS = 8  # offset of the flags
_LENGTH = struct.Struct("<I")
_WRAP = 0xFFFFFFFF  # instead of a length: the next record is at the start
_MORE = 1 << 31  # flag of a length: the frame continues in the next record
_CAPACITY = RING_BYTES - _START


def create_ring_file(name: str, rings: int) -> int:
    """Creates a file for rings; returns its descriptor. Raises OSError."""
    return create_shared_file(name, rings * RING_BYTES)


def map_ring(fd: int, number: int) -> memoryview:
    """Returns the memory of one of the rings in a file."""
    return Mapping(fd, RING_BYTES, writable=True, offset=number * RING_BYTES).view


class RingError(Exception):
    """The ring holds data that the protocol does not write."""


class RingWriter:
    """Writes frames into `memory` (RING_BYTES long), which is zeroed at first.

    Its caller announces the records that it has written.
    """

    def __init__(self, memory: memoryview) -> None:
        self.unsent: Deque[memoryview] = deque()
        """What the ring had no room for: frames, and the rest of a frame."""
        self._memory = memory
        self._position = _position_view(memory)
        self.written = 0
        """Where the next frame starts, in bytes since the start of the first one."""
        self._flushed = 0  # records that `flush` has written and not returned

    def write(self, frame: bytes) -> int:
        """Writes a frame; returns the records to announce. What has no room waits for `flush`."""
        if not self.unsent and self.try_write(frame):
            return 1
        self.unsent.append(memoryview(frame))
        return self.flush()

    def flush(self) -> int:
        """Writes what waits, as far as there is room; returns the records to announce.

        If a signal handler raises meanwhile, the next call returns also the records until then.
        """
        unsent = self.unsent
        while unsent:
            frame = unsent[0]
            if len(frame) <= _MAX_RECORD:
                if not self.try_write(frame):
                    break
                self._flushed += 1
                unsent.popleft()
            else:
                if not self.try_write(frame[:_PIECE_BYTES], _MORE):
                    break
                self._flushed += 1
                unsent[0] = frame[_PIECE_BYTES:]
        records, self._flushed = self._flushed, 0
        return records

    def try_write(self, frame: Union[bytes, memoryview], flag: int = 0) -> bool:
        """Writes a record; returns False if it is too long, or the ring too full."""
        size = len(frame)
        if size > _MAX_RECORD:
            return False
        position = self.written % _CAPACITY
        tail = _CAPACITY - position
        needed = (_LENGTH.size + size + 3) & ~3  # a record starts at a word: none wraps around
        if needed > tail:
            needed += tail  # the end of the ring stays unused
        if needed > _CAPACITY - (self.written - self._position[0]):
            return False
        if needed > tail:
            _LENGTH.pack_into(self._memory, _START + position, _WRAP)
            position = 0
        at = _START + position
        _LENGTH.pack_into(self._memory, at, size | flag)
        at += _LENGTH.size
        self._memory[at : at + size] = frame
        self.written += needed
        return True

    def inline_limit(self, reserved: int = 0) -> int:
        """Returns the bytes of inline tensors for the next frame that leave room for further
        frames; `reserved` bytes are for frames before it.
        """
        free = _CAPACITY - (self.written - self._position[0]) - reserved
        return max(INLINE_ALWAYS, min(INLINE_LIMIT, free // 4))

    def rewind(self, position: int) -> None:
        """Removes the frames from this position on; the reader must not have been told of them."""
        self.written = position

    def set_flags(self, flags: int) -> None:
        """Shows the reader a byte, which it sees without being woken."""
        self._memory[_FLAGS] = flags

    def close(self) -> None:
        """Releases the memory; no frame can be written any more."""
        self.unsent.clear()
        self._memory, self._position = memoryview(b""), _position_view(memoryview(bytes(8)))


class RingReader:
    """Reads announced frames, in order. `event`: the eventfd of the ring, which does not block.

    `max_bytes`: of a frame. `reclaimable`: the writer may set the flag RECLAIMABLE.
    """

    def __init__(
        self,
        memory: memoryview,
        event: int,
        max_bytes: int = sys.maxsize,
        reclaimable: bool = False,
    ) -> None:
        self.event = event
        self.announced = 0  # records that were not read
        self._memory = memory
        self._position = _position_view(memory)
        self._read = 0
        self._limit = sys.maxsize  # of `_read`, once records were announced
        self._max_bytes = max_bytes
        self._reclaimable = reclaimable
        self._pieces: List[bytes] = []  # of the frame whose next record was not read
        self._pieces_bytes = 0

    def receive_announcements(self) -> bool:
        """Learns of new records; returns whether there are any.

        If the writer may reclaim frames, it learns of one only.
        """
        try:
            announced = int.from_bytes(os.read(self.event, 8), sys.byteorder) % WAKE_EARLY
        except BlockingIOError:
            return False  # nothing new
        if announced > 1 and self._reclaimable and self._memory[_FLAGS] & RECLAIMABLE:
            os.write(self.event, (announced - 1).to_bytes(8, sys.byteorder))
            announced = 1
        self.announced += announced
        self._limit = self._read + _CAPACITY  # all that is announced is in the ring now
        return announced > 0

    def read_frame(self) -> Optional[bytes]:
        """Returns the next frame whose records were all announced, if any.

        Raises RingError, and MemoryError for a frame that does not fit into memory.
        """
        while self.announced:
            self.announced -= 1
            position = self._read % _CAPACITY
            size: int = _LENGTH.unpack_from(self._memory, _START + position)[0]
            more = 0
            if size > _MAX_RECORD:  # no length of a whole frame
                if size == _WRAP:
                    self._read += _CAPACITY - position
                    position = 0
                    size = _LENGTH.unpack_from(self._memory, _START)[0]
                more, size = size & _MORE, size & ~_MORE
            at = _START + position + _LENGTH.size
            if size > _MAX_RECORD or at + size > RING_BYTES or (more and not size):
                raise RingError(f"a record of {size} bytes at {position}")
            record = bytes(self._memory[at : at + size])
            self._read += (_LENGTH.size + size + 3) & ~3
            if self._read > self._limit:
                raise RingError("more records were announced than the ring holds")
            self._position[0] = self._read
            if more or self._pieces:
                self._pieces_bytes += size
                if self._pieces_bytes > self._max_bytes:
                    raise RingError(f"a frame of more than {self._max_bytes} bytes")
                self._pieces.append(record)
                if more:
                    continue
                record = self._join_pieces()
            return record
        return None

    def _join_pieces(self) -> bytes:
        pieces, size = self._pieces, self._pieces_bytes
        self._pieces, self._pieces_bytes = [], 0
        try:
            return b"".join(pieces)
        except MemoryError:
            raise MemoryError(f"no memory for a frame of {size} bytes") from None

    def flags(self) -> int:
        """Returns the writer's byte."""
        return self._memory[_FLAGS]

    def close(self) -> None:
        """Releases the memory."""
        self.announced = 0
        self._memory = self._position = memoryview(b"")


def _position_view(memory: memoryview) -> memoryview:
    """Returns the reader's position as one 64-bit word; pack_into would not write it atomically."""
    return memory[:8].cast("Q")
