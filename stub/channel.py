"""The stub's end of the connection to the host; the only stub module that knows of zmq.

Work comes to the main thread, and answers leave from whichever thread has them, through two rings
in shared memory. What a ring has no room for comes by ZeroMQ, and so does everything for the
service thread. A ZeroMQ socket belongs to one thread, hence three of them.
"""

import os
import select
import threading
import time
from collections import deque
from typing import Deque, List, Optional, Sequence, Tuple

import zmq

from stub.wire.messages import (
    Hello,
    ToHost,
    ToStub,
    decode_to_stub,
    encode,
)
from stub.wire.ring import BUSY_POLL_SECONDS, WAKE_EARLY, RingReader, RingWriter, map_rings
from stub.wire.session import Session, State
from stub.wire.spawn import SpawnArguments

WORK, SERVICE, OUTBOX = b"w", b"s", b"o"
"""Suffixes of the three sockets' identities, behind the stub's token."""

_ONE = (1).to_bytes(8, "little")  # to add to an eventfd
_FULL_RING_POLL_SECONDS = 0.001  # between looks at a ring that the host has yet to empty


class HostGone(Exception):
    """The host has ended, and this process goes on without it."""


class Channel:
    """Connects on construction."""

    def __init__(self, spawn: SpawnArguments) -> None:
        to_stub, to_host = map_rings(spawn.rings_fd)
        self._inbox = RingReader(to_stub)
        self._ring = RingWriter(to_host)
        self.inline_limit = self._ring.inline_limit  # bytes of tensors in the next frame
        self._work_event = spawn.work_event_fd
        self._host_event = spawn.host_event_fd
        has_work = select.poll()
        has_work.register(self._work_event, select.POLLIN)
        self._has_work = has_work.poll
        self._pending_frames = 0
        self._waited = True
        self._host_gone = False
        self._pid = os.getpid()
        self._context = zmq.Context()
        self._session = Session()
        # A finaliser of the user's may run anywhere below, and have something to say: whoever has
        # the lock takes it again, and what is said in the middle of something else waits here.
        self._lock = threading.RLock()
        self._sending = False
        self._unsent: Deque[Tuple[bytes, Sequence[ToHost]]] = deque()
        hello = Hello()
        self._sockets = [
            self._connect(spawn.endpoint, spawn.token.encode() + suffix, hello)
            for suffix in (WORK, SERVICE, OUTBOX)
        ]
        self._work, self._service, self._outbox = self._sockets
        self._session.advance(hello)

    def _connect(self, endpoint: str, identity: bytes, hello: Hello) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.SNDHWM, 0)  # what is under way is bounded by the host's lanes
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 5000)  # last words must arrive; a dead host must not hold us
        socket.connect(endpoint)
        socket.send(encode([hello]))
        return socket

    def send(self, messages: Sequence[ToHost]) -> None:
        """Send one frame; any thread. Raises what encoding raises, and then has sent nothing.

        Raises RuntimeError in a forked child, whose frames would fall into the parent's.
        """
        if os.getpid() != self._pid:
            raise RuntimeError("a forked child cannot use its parent's connection to the host")
        frame = encode(messages)
        with self._lock:
            self._unsent.append((frame, messages))
            self._send_unsent()

    def _send_unsent(self) -> None:
        """Send what is to be sent, unless that is what the lock's owner is doing already."""
        while self._unsent and not self._sending:
            self._sending = True
            try:
                while self._unsent:
                    self._send_frame(*self._unsent.popleft())
            finally:
                self._sending = False

    def _send_frame(self, frame: bytes, messages: Sequence[ToHost]) -> None:
        if self._session.state is State.ENDED:
            return  # the last words are said; what threads of the model add is for nobody
        for message in messages:
            self._session.advance(message)
        if self._ring.try_write(frame):
            os.write(self._host_event, _ONE)
            return
        # The host always gets round to its rings; if it is gone, so are we (see the worker).
        while not self._ring.write_overflow_marker():
            if self._host_gone:
                return
            time.sleep(_FULL_RING_POLL_SECONDS)
        os.write(self._host_event, _ONE)
        self._outbox.send(frame)

    def is_idle(self) -> bool:
        """Whether the main thread waited for the work that it has, and there is no more."""
        if not self._waited or self._pending_frames:
            return False
        has_work = select.poll()  # only one thread at a time may use one
        has_work.register(self._work_event, select.POLLIN)
        return not has_work.poll(0)

    def receive_work(self) -> List[ToStub]:
        """Wait for the next frame of work; main thread only. Raises HostGone if abandoned."""
        self._waited = not self._pending_frames and not self._has_work(0)
        while not self._pending_frames:
            self._pending_frames = (
                int.from_bytes(os.read(self._work_event, 8), "little") % WAKE_EARLY
            )
            if not self._pending_frames:
                self._waited = True
                self._busy_poll()
        if self._host_gone:
            raise HostGone
        self._pending_frames -= 1
        frame = self._inbox.read_frame()
        return self._decode_frame(self._work.recv() if frame is None else frame)

    def _busy_poll(self) -> None:
        """Wait a while for work that is about to come: who sleeps would be too late for it."""
        end = time.monotonic() + BUSY_POLL_SECONDS
        while not self._has_work(0) and time.monotonic() < end:
            os.sched_yield()  # to whoever is on this core, maybe the host

    def receive_service(self, descriptors: Sequence[int], wait_ms: Optional[int]) -> "Wakeup":
        """Wait for a service frame, for one of the descriptors, or until the time is over.

        Service thread only; `wait_ms` in milliseconds, None for no limit.
        """
        poller = zmq.Poller()
        poller.register(self._service, zmq.POLLIN)
        for descriptor in descriptors:
            poller.register(descriptor, zmq.POLLIN)
        ready = dict(poller.poll(wait_ms))
        messages = self._decode_frame(self._service.recv()) if self._service in ready else []
        return Wakeup(messages, [d for d in descriptors if d in ready])

    def _decode_frame(self, frame: bytes) -> List[ToStub]:
        messages = decode_to_stub(frame)
        with self._lock:
            self._sending = True
            try:
                for message in messages:
                    self._session.advance(message)
            finally:
                self._sending = False
            self._send_unsent()
        return messages

    def mark_host_gone(self) -> None:
        """The host is gone: nothing is sent any more, and who waits for work is told."""
        self._host_gone = True
        self._session.state = State.ENDED
        os.write(self._work_event, _ONE)

    def close(self) -> None:
        """Deliver what was sent, then disconnect. The service thread must have ended."""
        for socket in self._sockets:
            socket.close(0 if self._host_gone else None)
        self._context.term()


class Wakeup:
    """Why the service thread woke up: messages, and descriptors that have something to read."""

    __slots__ = ("messages", "descriptors")

    def __init__(self, messages: List[ToStub], descriptors: List[int]) -> None:
        self.messages = messages
        self.descriptors = descriptors
