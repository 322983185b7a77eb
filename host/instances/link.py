"""The connection to one stub: three rings in shared memory, and ZeroMQ for all else."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from host.instances.busy_polling import BusyPoller
from host.instances.channel import SERVICE, WORK, Channel
from stub.wire.messages import (
    ToStub,
    encode,
)
from stub.wire.ring import (
    END_OF_OVERFLOW,
    RECLAIMABLE,
    RingError,
    RingReader,
    RingWriter,
    create_ring_file,
    map_bls_ring,
    map_rings,
)

_MAX_FRAMES_PER_TURN = 128  # frames of one stub that are handled before other callbacks run
_ALL_FRAMES = sys.maxsize
_BYTES_PER_FRAME = 128  # more bytes, with many messages, count as further frames
_MAX_RECLAIMABLE = 64  # the newest frames of work that can be reclaimed
_MAX_OVERFLOW_FRAMES = 32  # frames that wait for earlier ones in the ring, or for their marker

ReclaimedFrame = tuple[int, tuple[ToStub, ...]]
"""The number of the batch in a reclaimed frame, and the other messages of the frame."""


class Link:
    """The rings to and from one stub. Frames that come before `start_reading` are ignored.

    `on_error` is called with the reason if the stub breaks the protocol of the rings, or does not
    read them. Raises OSError.
    """

    def __init__(
        self,
        channel: Channel,
        busy_poller: BusyPoller,
        on_error: Callable[[Exception], None],
    ) -> None:
        self.token = secrets.token_hex(8)
        with ExitStack() as opened:
            self.rings_fd = create_ring_file("pbhost-rings")
            opened.callback(os.close, self.rings_fd)
            self.work_event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            opened.callback(os.close, self.work_event)
            self.host_event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            opened.callback(os.close, self.host_event)
            self.bls_event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            opened.callback(os.close, self.bls_event)
            to_stub, to_host = map_rings(self.rings_fd)
            bls_ring = map_bls_ring(self.rings_fd)
            self._descriptors = opened.pop_all()
        self._doorbell = busy_poller.doorbell(self.work_event, self._on_full_counter)
        self._ring = RingWriter(to_stub)
        self.inline_limit = self._ring.inline_limit  # bytes of tensors in the next frame of work
        # The newest frames, if they can be reclaimed, and where they start in the ring.
        self._reclaimable: deque[tuple[int, ReclaimedFrame]] = deque(maxlen=_MAX_RECLAIMABLE)
        self._flags = 0
        self._bls_ring = RingWriter(bls_ring)
        self.bls_inline_limit = self._bls_ring.inline_limit  # the same for BLS responses
        self._bls_overflow = False  # BLS responses use ZeroMQ until their ring is empty
        self._inbox = RingReader(to_host)
        self._address = self.token.encode()
        self._channel = channel
        self._on_frame: Callable[[bytes], None] = lambda frame: None
        self._on_error = on_error
        self.dropped_frames = 0  # frames by ZeroMQ beyond those that the ring announces
        self._hellos = 0  # sockets that have said hello
        self._announced = 0  # frames in the ring, or in ZeroMQ, that were not read
        self._overflow_frames: deque[bytes] = deque()
        # Whether the ring says that a frame comes by ZeroMQ, where it is not yet.
        self._awaiting_overflow = False
        self._delivered = 0
        # Futures, each done when that many frames are delivered.
        self._late: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._open = True
        self._stopped_reading = False
        self._delivers_later = False

    def start_reading(self, on_frame: Callable[[bytes], None]) -> None:
        """Calls `on_frame` with every frame of the stub, in the order in which it was sent."""
        self._on_frame = on_frame
        self._channel.register(self.token, self._on_channel_frame)
        asyncio.get_running_loop().add_reader(self.host_event, self._on_signal)

    def send_work(
        self, messages: Sequence[ToStub], reclaimed: ReclaimedFrame | None = None
    ) -> None:
        """Sends a frame to the stub's main thread. Frames for a stub that is gone are dropped.

        `reclaimed`: what `reclaim_frames` returns if it reclaims this frame.
        """
        if not self._open:
            return
        frame = encode(messages)
        start = 0 if reclaimed is None else self._ring.position
        if self._ring.try_write(frame):
            if reclaimed is not None:
                self._reclaimable.append((start, reclaimed))
                if not self._flags & RECLAIMABLE:
                    self._set_flags(self._flags | RECLAIMABLE)
            elif self._reclaimable:
                self._reclaimable.clear()
        else:
            self._reclaimable.clear()
            # The instances bound the number of frames, so that the marker always has room.
            if not self._ring.write_overflow_marker():
                self._on_error(RingError("it does not read what it is sent"))
                return
            self._channel.send(self._address + WORK, frame)
        self._doorbell.announce_frame()

    def reclaim_frames(self, most: int) -> list[ReclaimedFrame]:
        """Removes at most `most` of the newest frames of work that the stub has not taken.

        Returns the oldest first.

        The counter of the eventfd decides which these are: what the host has read from it, the stub
        can no longer read. Nothing is reclaimed before a frame that was not sent to be reclaimed.
        """
        reclaimed: list[ReclaimedFrame] = []
        if not self._open or not self._reclaimable:
            return reclaimed
        unread = self._doorbell.withdraw_frames()
        while unread and self._reclaimable and len(reclaimed) < most:
            start, frame = self._reclaimable.pop()
            self._ring.rewind(start)
            reclaimed.append(frame)
            unread -= 1
        if unread:
            self._doorbell.restore_frames(unread)
        reclaimed.reverse()
        return reclaimed

    def send_bls_responses(self, messages: Sequence[ToStub]) -> None:
        """Sends a frame of BLS responses to the thread of the stub that reads them.

        If the stub does not read its ring quickly enough, ZeroMQ carries a marker's frame and all
        later ones, in order, until the ring is empty.
        """
        if not self._open:
            return
        frame = encode(messages)
        if self._bls_overflow:
            if not self._bls_ring.is_empty():
                self._channel.send(self._address + SERVICE, frame)
                return
            self._bls_overflow = False
            self._channel.send(self._address + SERVICE, END_OF_OVERFLOW)
        if not self._bls_ring.try_write(frame):
            self._bls_ring.write_overflow_marker()  # every frame before it left room for it
            self._bls_overflow = True
            self._channel.send(self._address + SERVICE, frame)
        try:
            os.eventfd_write(self.bls_event, 1)
        except BlockingIOError:
            self._on_full_counter()

    def _on_full_counter(self) -> None:
        """Frames never fill a counter of 64 bits, so that the stub has done so."""
        self._on_error(RingError("it has filled the counter of the frames that it is sent"))

    def send_service(self, messages: Sequence[ToStub]) -> None:
        """Sends a frame to the stub's service thread."""
        self._channel.send(self._address + SERVICE, encode(messages))

    def set_log_levels(self, levels: int) -> None:
        """Tells the stub which levels of `pb_utils.Logger` are written; level n is bit n."""
        if self._open:
            self._set_flags(levels | (self._flags & RECLAIMABLE))

    def _set_flags(self, flags: int) -> None:
        self._flags = flags
        self._ring.set_flags(flags)

    def read_announced(self) -> asyncio.Future[None] | None:
        """Reads the frames that were announced so far, all in this turn of the loop.

        Returns what is done when those that are not here yet were read too; None if none is left.
        """
        if not self._open or self._stopped_reading:
            return None
        self._receive_signal()
        self._deliver_frames(_ALL_FRAMES)
        if not self._announced:
            return None
        last = self._delivered + self._announced
        if not self._late or self._late[-1][0] != last or self._late[-1][1].cancelled():
            self._late.append((last, asyncio.get_running_loop().create_future()))
        return self._late[-1][1]

    def stop_reading(self) -> None:
        """Reads nothing more from a stub that breaks the protocol."""
        if self._open:
            self._announced = 0
            asyncio.get_running_loop().remove_reader(self.host_event)
            self._channel.unregister(self.token)
            self._stopped_reading = True
            self._end_waits()

    def close(self) -> None:
        """Closes the connection."""
        if self._open:
            self._open = False
            self._end_waits()
            asyncio.get_running_loop().remove_reader(self.host_event)
            self._channel.unregister(self.token)
            self._doorbell.close()
            self._descriptors.close()
            self._ring.close()
            self._bls_ring.close()
            self._inbox.close()

    def _end_waits(self) -> None:
        while self._late:
            self._end_wait()

    def _end_wait(self) -> None:
        _, waiting = self._late.popleft()
        if not waiting.done():
            waiting.set_result(None)

    def _on_signal(self) -> None:
        self._receive_signal()
        self._deliver_frames()

    def _receive_signal(self) -> None:
        try:
            self._announced += os.eventfd_read(self.host_event)
        except BlockingIOError:
            pass  # nothing new
        else:
            self._doorbell.stub_answered()

    def _on_channel_frame(self, frame: bytes) -> None:
        if self._hellos < 3:
            self._hellos += 1
            if self._hellos == 3:
                self._on_frame(frame)
            return
        self._receive_signal()
        if len(self._overflow_frames) >= self._announced + _MAX_OVERFLOW_FRAMES:
            self.dropped_frames += 1  # an honest stub announces each frame before it sends it
        else:
            self._overflow_frames.append(frame)
        if len(self._overflow_frames) > _MAX_OVERFLOW_FRAMES:
            self._deliver_frames(_ALL_FRAMES)  # bounds their memory
        else:
            self._deliver_frames()

    def _deliver_later(self) -> None:
        if not self._delivers_later:
            self._delivers_later = True
            asyncio.get_running_loop().call_soon(self._continue_delivery)

    def _continue_delivery(self) -> None:
        self._delivers_later = False
        self._deliver_frames()

    def _deliver_frames(self, most: int = _MAX_FRAMES_PER_TURN) -> None:
        """Delivers frames, up to one that was announced and has not arrived.

        If there are more than `most`, the rest is delivered in a later turn of the loop. Large
        frames count as several.
        """
        while self._announced and self._open and not self._stopped_reading:
            if most <= 0:
                self._deliver_later()
                return
            try:
                frame = None if self._awaiting_overflow else self._inbox.read_frame()
            except RingError as error:
                self._on_error(error)
                return
            if frame is None:
                self._awaiting_overflow = not self._overflow_frames
                if self._awaiting_overflow:
                    return
                frame = self._overflow_frames.popleft()
            self._announced -= 1
            self._delivered += 1
            if self._late and self._delivered >= self._late[0][0]:
                self._end_wait()
            most -= 1 + len(frame) // _BYTES_PER_FRAME
            self._on_frame(frame)
