"""The connection to one stub: rings in shared memory, and ZeroMQ for its service thread."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Sequence

from host.instances.busy_polling import BusyPoller
from host.instances.host_channel import Channel
from host.instances.ring_link import (
    FrameReceiver,
    FrameSender,
    RingFiles,
    event_writer,
    full_counter_error,
)
from stub.wire.messages import BlsResponse, ToStub, encode, encode_message, join_messages
from stub.wire.ring import BLS_RING, HOST_RING, RECLAIMABLE, WORK_RING, map_ring

_BYTES_PER_FRAME = 128  # more bytes, with many messages, count as further frames
_MAX_QUEUED = 16  # batches that wait for the end of the turn
_MAX_RECLAIMABLE = 64  # the newest frames of work that can be reclaimed

ReclaimedFrame = tuple[int, tuple[ToStub, ...]]
"""The number of the batch in a reclaimed frame, and the other messages of the frame."""


class Link:
    """The connection to one stub. Frames that come before `start_reading` are ignored.

    Only the link knows what carries a message: a ring for work, for responses to BLS requests and
    for what the stub sends; ZeroMQ for the rest. `on_error` is called with the reason if the stub
    breaks the protocol of the rings. Raises OSError.
    """

    def __init__(
        self,
        channel: Channel,
        busy_poller: BusyPoller,
        on_error: Callable[[Exception], None],
    ) -> None:
        self.token = secrets.token_hex(8)
        self._files = RingFiles("pbhost-rings", 3)
        self.rings_fd = self._files.memory
        self.work_event, self.host_event, self.bls_event = self._files.events
        self._doorbell = busy_poller.doorbell(
            self.work_event, lambda: on_error(full_counter_error())
        )
        self._work = FrameSender(map_ring(self.rings_fd, WORK_RING), self._doorbell.announce_frames)
        # Encoded work of this turn of the event loop for a busy stub, and work that is held.
        self._queued: list[tuple[list[bytes], ReclaimedFrame | None]] = []
        self._turn_open = False  # `_end_turn` is due
        # The newest frames, if they can be reclaimed, and where they start in the ring.
        self._reclaimable: deque[tuple[int, ReclaimedFrame]] = deque(maxlen=_MAX_RECLAIMABLE)
        self._flags = 0
        self._bls = FrameSender(
            map_ring(self.rings_fd, BLS_RING), event_writer(self.bls_event, on_error)
        )
        self.bls_inline_limit = self._bls.inline_limit  # bytes of tensors in the next BLS responses
        self._inbox = FrameReceiver(
            map_ring(self.rings_fd, HOST_RING),
            self.host_event,
            on_error,
            bytes_per_frame=_BYTES_PER_FRAME,
        )
        self._channel = channel
        self._on_frames: Callable[[Sequence[bytes]], None] = lambda frames: None
        self.dropped_frames = 0  # frames by ZeroMQ after the first one
        self._connected = False
        self._open = True

    def start_reading(self, on_frames: Callable[[Sequence[bytes]], None]) -> None:
        """Calls `on_frames` with the frames of the stub, in the order in which they were sent."""
        self._on_frames = on_frames
        self._channel.register(self.token, self._on_channel_frame)
        self._inbox.start_reading(on_frames, self._doorbell.stub_answered)

    def _on_channel_frame(self, frame: bytes) -> None:
        """The first frame of a stub comes by ZeroMQ, which can send to it from then on."""
        if self._connected:
            self.dropped_frames += 1
        else:
            self._connected = True
            self._on_frames([frame])

    def send_work(
        self,
        messages: Sequence[ToStub],
        reclaimed: ReclaimedFrame | None = None,
        held: bool = False,
    ) -> None:
        """Sends messages to the stub's main thread. Those for a stub that is gone are dropped.

        A busy stub gets them once the loop has read all that arrived: a process that is woken on
        this core runs at once, and would do so for every request (docs/explanation/decisions/0020).
        A stub that waits for a BLS response gets it at once. `held`: it waits for one, and gets
        these messages with it or by `send_queued`, as it could only put them aside before.
        `reclaimed`: what `reclaim_frames` returns if it reclaims these messages.
        """
        queued, idle = self._queued, not self._doorbell.sent_at
        if idle and not (queued or self._reclaimable or reclaimed or held):
            self._work.send(encode(messages))
            return
        queued.append((list(map(encode_message, messages)), reclaimed))
        if held:
            return
        if idle or len(queued) >= _MAX_QUEUED or type(messages[-1]) is BlsResponse:
            self.send_queued()
        elif not self._turn_open:
            self._turn_open = True
            asyncio.get_running_loop().call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._turn_open = False
        self.send_queued()

    def send_queued(self) -> None:
        """Sends the work of this turn, and what is held."""
        queued, self._queued = self._queued, []
        if not queued or not self._open:
            return
        frames: list[list[bytes]] = []
        kept: list[ReclaimedFrame | None] = []  # for each frame
        for messages, reclaimed in queued:
            # What cannot be reclaimed shares a frame. The stub has to read what is about memory
            # before it starts the batches ahead of it, in a nested wait.
            if reclaimed is None and kept and kept[-1] is None and len(messages) == 1:
                frames[-1] += messages
            else:
                frames.append(messages)
                kept.append(reclaimed)
                if reclaimed is not None and not self._flags & RECLAIMABLE:
                    self._set_flags(self._flags | RECLAIMABLE)
        starts = self._work.send(*map(join_messages, frames))
        for start, reclaimed in zip(starts, kept, strict=False):
            if reclaimed is not None:
                self._reclaimable.append((start, reclaimed))
            elif self._reclaimable:
                self._reclaimable.clear()
        if len(starts) < len(frames):
            self._reclaimable.clear()

    def inline_limit(self) -> int:
        """Returns the bytes of inline tensors for the next messages of work."""
        queued = sum(len(message) for messages, _ in self._queued for message in messages)
        return self._work.inline_limit(queued)

    def reclaim_frames(self, most: int) -> list[ReclaimedFrame]:
        """Removes at most `most` of the newest frames of work that the stub has not taken.

        Returns the oldest first. What still waits for the end of the turn goes first.

        The counter of the eventfd decides which these are: what the host has read from it, the stub
        can no longer read. Nothing is reclaimed before a frame that was not sent to be reclaimed.
        """
        reclaimed: list[ReclaimedFrame] = []
        if not self._open:
            return reclaimed
        queued = self._queued
        while queued and len(reclaimed) < most and (frame := queued[-1][1]) is not None:
            queued.pop()
            reclaimed.append(frame)
        if self._reclaimable and not queued and len(reclaimed) < most:
            unread = self._doorbell.withdraw_frames()
            while unread and self._reclaimable and len(reclaimed) < most:
                start, frame = self._reclaimable.pop()
                self._work.rewind(start)
                reclaimed.append(frame)
                unread -= 1
            if unread:
                self._doorbell.restore_frames(unread)
        reclaimed.reverse()
        return reclaimed

    def send_bls_responses(self, messages: Sequence[ToStub]) -> None:
        """Sends a frame of BLS responses to the thread of the stub that reads them."""
        self._bls.send(encode(messages))

    def send_service(self, messages: Sequence[ToStub]) -> None:
        """Sends a frame to the stub's service thread."""
        self._channel.send(self.token, encode(messages))

    def set_log_levels(self, levels: int) -> None:
        """Tells the stub which levels of `pb_utils.Logger` are written; level n is bit n."""
        if self._open:
            self._set_flags(levels | (self._flags & RECLAIMABLE))

    def _set_flags(self, flags: int) -> None:
        self._flags = flags
        self._work.set_flags(flags)

    def read_announced(self) -> None:
        """Reads the frames that were announced so far, all in this turn of the loop."""
        self._inbox.read_announced()

    def stop_reading(self) -> None:
        """Reads nothing more from a stub that breaks the protocol."""
        if self._open:
            self._inbox.stop_reading()
            self._channel.unregister(self.token)

    def close(self) -> None:
        """Closes the connection."""
        if self._open:
            self._open = False
            self._queued.clear()
            self._channel.unregister(self.token)
            self._doorbell.close()
            self._work.close()
            self._bls.close()
            self._inbox.close()
            self._files.close()
