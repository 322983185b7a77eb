"""The ends of rings in an event loop: of those to stubs, and to frontend processes.

The processes of frontends need this, too, so it does not import ZeroMQ.
"""

from __future__ import annotations

import asyncio
import os
import select
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from host.lane import read_record, write_record
from stub.wire.ring import RingError, RingReader, RingWriter, create_ring_file

_MAX_FRAMES_PER_TURN = 128  # that are handled before other callbacks run
FULL_RING_PAUSE = 0.001  # seconds until the next attempt to write
_MAX_PAUSE = 0.016  # as long as the other end reads nothing
_MAX_FRAME_BYTES = (1 << 31) + (1 << 24)  # a message of gRPC, and more


class RingFiles:
    """The memory of some rings, and an eventfd for each. Raises OSError."""

    def __init__(self, name: str, rings: int) -> None:
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        with ExitStack() as opened:
            self.memory = create_ring_file(name, rings)
            opened.callback(os.close, self.memory)
            self.events: list[int] = []
            for _ in range(rings):
                self.events.append(os.eventfd(0, flags))
                opened.callback(os.close, self.events[-1])
            self.close = opened.pop_all().close


class FrameSender(RingWriter):
    """Sends frames. What the ring has no room for follows when the other end has read some of it.

    `announce`: announces as many records to the other end. Frames after `close` are dropped.
    """

    def __init__(self, memory: memoryview, announce: Callable[[int], None]) -> None:
        super().__init__(memory)
        self._announce = announce
        self._pause = FULL_RING_PAUSE
        self._timer: asyncio.TimerHandle | None = None
        self._open = True

    def send(self, *frames: bytes) -> list[int]:
        """Sends frames; returns where those start that were written at once, as one record each."""
        starts: list[int] = []
        if not self._open:
            return starts
        for frame in frames:
            start = self.written
            if not self.unsent and self.try_write(frame):
                starts.append(start)
            else:
                self.unsent.append(memoryview(frame))
        if starts:
            self._announce(len(starts))
        if self.unsent and self._timer is None:
            self._flush_until_sent()
        return starts

    def try_write(self, frame: bytes | memoryview, flag: int = 0) -> bool:
        """As the base class; the compiled lane writes whole frames."""
        if write_record is not None and type(frame) is bytes and not flag:
            written = write_record(self._memory, self.written, frame)
            if written:
                self.written = written
                return True
        return super().try_write(frame, flag)

    def send_unsent(self) -> bool:
        """Sends what the ring has room for now; returns whether nothing is left."""
        records = self.flush()
        if records:
            self._announce(records)
            self._pause = FULL_RING_PAUSE
        return not self.unsent

    def _flush_until_sent(self) -> None:
        self._timer = None
        if not self.send_unsent():
            self._timer = asyncio.get_running_loop().call_later(self._pause, self._flush_until_sent)
            self._pause = min(2 * self._pause, _MAX_PAUSE)

    def close(self) -> None:
        """Sends nothing any more."""
        self._open = False
        if self._timer is not None:
            self._timer.cancel()
        super().close()


class FrameReceiver(RingReader):
    """Delivers the frames of the other end, in order. Its descriptors outlive it.

    `on_error` is called with the reason if the ring holds something else, or a frame that does not
    fit into memory; nothing is read then.
    """

    def __init__(
        self,
        memory: memoryview,
        event: int,
        on_error: Callable[[Exception], None],
        bytes_per_frame: int = sys.maxsize,
    ) -> None:
        """`bytes_per_frame`: if a frame has more, it counts as several in a turn of the loop."""
        super().__init__(memory, event, _MAX_FRAME_BYTES)
        self._on_error = on_error
        self._bytes_per_frame = bytes_per_frame
        self._on_frames: Callable[[Sequence[bytes]], None] = lambda frames: None
        self._on_signal: Callable[[], None] | None = None
        self._reading = False
        self._continuing = False

    def start_reading(
        self,
        on_frames: Callable[[Sequence[bytes]], None],
        on_signal: Callable[[], None] | None = None,
    ) -> None:
        """Calls `on_frames` with the next frames, and before that `on_signal` when some came."""
        self._on_frames, self._on_signal = on_frames, on_signal
        self._reading = True
        asyncio.get_running_loop().add_reader(self.event, self._deliver)

    def read_announced(self) -> None:
        """Delivers all frames that were announced so far, in this turn of the event loop."""
        if self._reading:
            self._deliver(sys.maxsize)

    def wait(self, seconds: float) -> bool:
        """Blocks until a record was announced; returns whether one was in time."""
        if self.announced:
            return True
        poller = select.poll()
        poller.register(self.event, select.POLLIN)
        return bool(poller.poll(seconds * 1000))

    def read_frames(self, frames: list[bytes], most: int) -> None:
        """Reads the frames that were announced, or so many that they count as `most`.

        The compiled lane reads those of one record. Raises as `read_frame`.
        """
        while self.announced and most > 0:
            frame = None
            if read_record is not None and not self._pieces:
                frame = read_record(self._memory, self._read, self._limit)
            if frame is not None:
                self.announced -= 1
                self._read = self._position[0] = self._read + (len(frame) + 7 & ~3)
            else:
                frame = self.read_frame()
            if frame is not None:
                most -= 1 + len(frame) // self._bytes_per_frame
                frames.append(frame)

    def _deliver(self, most: int = _MAX_FRAMES_PER_TURN) -> None:
        """Delivers frames; if there are more than `most`, the rest in a later turn of the loop."""
        if self.receive_announcements() and self._on_signal is not None:
            self._on_signal()
        if not self._reading:
            return
        frames: list[bytes] = []
        fault: Exception | None = None
        try:
            self.read_frames(frames, most)
        except (RingError, MemoryError) as error:
            self.stop_reading()
            fault = error
        if self.announced and not fault and not self._continuing:
            self._continuing = True
            asyncio.get_running_loop().call_soon(self._continue)
        if frames:
            self._on_frames(frames)
        if fault is not None:
            self._on_error(fault)

    def _continue(self) -> None:
        self._continuing = False
        if self._reading:
            self._deliver()

    def stop_reading(self) -> None:
        """Delivers nothing any more."""
        if self._reading:
            self._reading = False
            asyncio.get_running_loop().remove_reader(self.event)

    def close(self) -> None:
        """Stops reading, and releases the memory."""
        self.stop_reading()
        super().close()


def event_writer(event: int, on_error: Callable[[Exception], None]) -> Callable[[int], None]:
    """Returns the function that announces records by an eventfd."""

    def announce(records: int) -> None:
        try:
            os.eventfd_write(event, records)
        except BlockingIOError:
            on_error(full_counter_error())

    return announce


def full_counter_error() -> RingError:
    """Records never fill a counter of 64 bits, so that the other end has done so."""
    return RingError("it has filled the counter of the frames that it is sent")
