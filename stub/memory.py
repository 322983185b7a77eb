"""The stub's shared memory: its own arena, others' blocks on loan, and who must be told what."""

import os
import sys
import threading
import weakref
from collections import Counter, deque
from typing import Callable, Deque, Dict, Iterable, Optional, Tuple, Union

from pb_utils._copying import copy_into
from stub.copy_on_write_mapping import PrivateMapping
from stub.copy_on_write_views import RegionBlock, Snapshots
from stub.wire.arena import Arena, ArenaReader, Block, Ledger, RegionMap, span_of
from stub.wire.messages import (
    OpenArena,
    Return,
)
from stub.wire.payload import (
    INLINE_ALWAYS,
    INLINE_LIMIT,
    Slot,
    WireTensor,
)
from stub.wire.shared_file import identity


class MemoryGone(Exception):
    """A process that has ended, or a client, had a tensor in memory that is no longer there."""


_BETWEEN_BATCHES = 0
_IN_EXECUTE = 1  # the next question that `execute` asks takes one along
_LEAVING = sys.maxsize  # the batch's last frame is about to take them all
"""So many loans may have ended before somebody is woken to tell the host."""


class Memory:
    """`wake` is called when a loan ended outside a batch, so that somebody tells the host."""

    def __init__(self, own: Arena, wake: Callable[[], None]) -> None:
        self.own = own
        self.ring_takes: Callable[[], int] = lambda: INLINE_LIMIT  # bytes in the next frame
        self._crowd = 1
        self.lent = Ledger()
        self._wake = wake
        self._readers: Dict[int, Union[ArenaReader, RegionMap]] = {}
        self._sources: Dict[int, OpenArena] = {}  # regions are mapped when they are used
        self._private: Dict[int, Optional[PrivateMapping]] = {}
        self.snapshots = Snapshots(self._private_mapping, wake)
        self._ended: Deque[Tuple[int, int]] = deque()
        self._loans: Optional[weakref.WeakSet[Block]] = None
        self._counting = threading.Lock()
        self._patience = _BETWEEN_BATCHES

    def add(self, number: int, fd: int, limit: int) -> None:
        """Read an arena whose descriptor was inherited."""
        self._readers[number] = ArenaReader(fd, limit)
        self._sources[number] = OpenArena(number, f"/proc/self/fd/{fd}", limit)

    def open(self, message: OpenArena) -> None:
        """Read another process's arena, or a client's region. Raises OSError if it is gone."""
        if not message.region and message.arena not in self._readers:
            fd = os.open(message.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._readers[message.arena] = ArenaReader(fd, message.limit)
            finally:
                os.close(fd)
        self._sources[message.arena] = message

    def _reader(self, number: int) -> Union[ArenaReader, RegionMap, None]:
        """None if it is gone, or if the client has made a region smaller, for as long as it is."""
        reader = self._readers.get(number)
        message = self._sources.get(number) if reader is None else None
        if message is None:
            return reader
        try:
            fd = os.open(message.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                reader = self._readers[number] = RegionMap(fd, message.offset, message.limit)
            finally:
                os.close(fd)
        except (OSError, ValueError):  # ValueError: it is smaller
            return None
        return reader

    def room(self, size: int, slot: Slot) -> Optional[memoryview]:
        """Where the client wants an output, writable; None if it has no room for it there."""
        arena, offset, room = slot
        region = self._reader(arena) if size <= room else None
        if not isinstance(region, RegionMap):
            return None
        self.snapshots.part_from(region.file, region.place + offset, size)
        return region.writable(offset, size)

    def close(self, number: int) -> None:
        """Forget an arena; its mapping goes with the last tensor that lies in it."""
        self._readers.pop(number, None)
        self._sources.pop(number, None)
        mapping = self._private.pop(number, None)
        if mapping is not None:
            self.snapshots.release(mapping)

    def _private_mapping(self, number: int) -> Optional[PrivateMapping]:
        """The arena once more, for snapshots. None if there is none, or if it cannot be."""
        mapping = self._private.get(number)
        if mapping is not None and mapping.released:
            self._private.pop(number, None)  # the service thread may have done it
        if number not in self._private:
            reader, source = self._readers.get(number), self._sources.get(number)
            if reader is None or source is None:
                return None
            self._private[number] = mapping = _map_privately(source, reader.file)
        return mapping

    def borrow(self, tensor: WireTensor) -> Block:
        """The block that the tensor names, on loan until the returned object dies.

        Raises MemoryGone.
        """
        reader = self._reader(tensor.arena)
        if reader is None:
            self._end(tensor.arena, tensor.offset)  # else the host would hold it for this process
            raise MemoryGone(f"the shared memory in which tensor '{tensor.name}' lay is gone")
        view = reader.slice(tensor.offset, tensor.size)
        kind = RegionBlock if isinstance(reader, RegionMap) else Block
        block = kind(tensor.arena, tensor.offset, tensor.size, view, self._end)
        if isinstance(block, RegionBlock):
            block.batch = self.snapshots.batch
        elif self._loans is not None:  # what lies in a client's memory takes nothing of an arena
            with self._counting:
                self._loans.add(block)
        return block

    def free(self) -> int:
        """Bytes that the own arena would have left if it had all that this process keeps.

        That is what others have lent it, but not what they read. Loans count from the first call
        on: few models ask, and the others need not pay for it.
        """
        with self._counting:
            if self._loans is None:
                self._loans = weakref.WeakSet()
            loans = list(self._loans)
        borrowed = sum({(loan.arena, loan.offset): loan.size for loan in loans}.values())
        return max(0, self.own.free(but=self.lent.blocks()) - borrowed)

    def most_inline(self, tensors: int) -> int:
        """Bytes that each of so many tensors may have to travel inside the next message."""
        return max(INLINE_ALWAYS, self.ring_takes() // (self._crowd * max(1, tensors)))

    def place(self, data: memoryview) -> Block:
        """Write bytes into the own arena. Raises ArenaFull."""
        return self.own.fill(data.nbytes, lambda room: copy_into(room, data))

    def place_from(self, size: int, fill: Callable[[memoryview], None]) -> Block:
        """As `place`, of bytes that `fill` writes. Raises what it raises as well."""
        return self.own.fill(size, fill)

    def untell(self, blocks: Iterable[Block]) -> None:
        """The host has not been told of them after all."""
        for block in blocks:
            if block.arena == self.own.number:
                self.lent.returned(block.arena, block.offset, 1)

    def tell(self, blocks: Iterable[Block]) -> None:
        """The host is about to be told of these blocks: keep each until it is returned.

        A block on loan needs no keeping: the host itself holds it for this process.
        """
        for block in blocks:
            if block.arena == self.own.number:
                self.lent.lend(block)

    def ended(self) -> Optional[Return]:
        """The loans that ended since the last call, as the message that says so.

        An answer that refers to a loan keeps it from ending before it is sent.
        """
        ended = self._ended
        if not ended:
            return None
        counts: Counter[Tuple[int, int]] = Counter()
        try:
            while True:
                counts[ended.popleft()] += 1
        except IndexError:
            pass  # that was all; another thread may have taken the last ones
        if not counts:
            return None
        return Return([(arena, offset, count) for (arena, offset), count in counts.items()])

    def open_batch(self, requests: int = 1) -> None:
        """The main thread is about to run `execute` with so many requests."""
        self._patience = _IN_EXECUTE
        self._crowd = requests

    def leave_batch(self) -> None:
        """`execute` has returned."""
        self._patience = _LEAVING

    def close_batch(self) -> None:
        """The batch's answers are sent."""
        self._patience = _BETWEEN_BATCHES
        if self._ended:
            self._wake()

    def _end(self, arena: int, offset: int) -> None:
        self._ended.append((arena, offset))
        if len(self._ended) > self._patience:
            self._wake()


def _map_privately(source: OpenArena, file: Tuple[int, int]) -> Optional[PrivateMapping]:
    size = source.limit if source.region else span_of(source.limit)
    try:
        fd = os.open(source.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if identity(fd) != file:  # its owner, or the model, has closed that descriptor
                return None
            return PrivateMapping(fd, size, source.offset, source.region)
        finally:
            os.close(fd)
    except (OSError, ValueError):  # an older kernel; no addresses to spare
        return None
