"""The stub's end of the connection to the host; the only stub module that knows of zmq.

The main thread, or the event loop of a coroutine function, receives work. Any thread sends
responses, and one thread at a time receives BLS responses. Each of the three uses a ring in shared
memory. ZeroMQ carries the other frames for the service thread.
"""

import gc
import os
import select
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Callable, Deque, Dict, List, Optional, Sequence, Tuple

import zmq

from stub.wire.messages import (
    Execute,
    Hello,
    ToHost,
    ToStub,
    decode_to_stub,
    encode,
    encode_message,
    join_messages,
)
from stub.wire.ring import (
    BLS_RING,
    BUSY_POLL_SECONDS,
    HOST_RING,
    WORK_RING,
    RingReader,
    RingWriter,
    map_ring,
)
from stub.wire.session import Session, State
from stub.wire.spawn import SpawnArguments

_STUB_THREADS = 3  # two of ZeroMQ, and the service thread
_MAX_QUEUED = 8  # messages of a frame: the host works on them while the others are made
_MAX_QUEUED_BYTES = 1 << 14  # so that a frame fits into the ring
_FULL_RING_POLL_MS = 1  # poll interval while the ring is full


class HostGone(Exception):
    """The host has ended, but this process continues."""


class ThreadsUnavailable(Exception):
    """This process may not start the threads that a stub needs."""


class Channel:
    """The connection to the host, open after construction. Raises ThreadsUnavailable."""

    def __init__(self, spawn: SpawnArguments) -> None:
        _check_threads()
        self.work_event = spawn.work_event_fd  # readable if there is work
        self._inbox = RingReader(
            map_ring(spawn.rings_fd, WORK_RING), self.work_event, reclaimable=True
        )
        self._ring = RingWriter(map_ring(spawn.rings_fd, HOST_RING))
        self._unannounced = 0  # records
        self.inline_limit = self._ring.inline_limit  # bytes of inline tensors for the next frame
        self.bls_event = spawn.bls_event_fd  # readable if there are BLS responses
        self._bls_inbox = RingReader(map_ring(spawn.rings_fd, BLS_RING), self.bls_event)
        self._bls_lock = threading.RLock()
        self._pollers: Dict[Tuple[int, ...], zmq.Poller] = {}  # of the service thread
        self._reading_bls = False
        self._host_event = spawn.host_event_fd
        self._lifeline = spawn.lifeline_fd
        has_work = select.poll()
        has_work.register(self.work_event, select.POLLIN)
        self._has_work = has_work.poll
        self._waited = True
        self._host_gone = False
        self._pid = os.getpid()
        self._context = zmq.Context()
        self._session = Session()
        # The user's finalisers may run anywhere below and send messages. So the lock is
        # reentrant, and messages that are sent during another send wait here.
        self._lock = threading.RLock()
        self._sending = False
        self._unsent: Deque[Tuple[bytes, Sequence[ToHost]]] = deque()
        self._queued: List[Tuple[bytes, ToHost]] = []  # messages of the next frame
        self._queued_bytes = 0
        self._service = self._context.socket(zmq.DEALER)
        self._service.setsockopt(zmq.IDENTITY, spawn.token.encode())
        self._service.setsockopt(zmq.RCVHWM, 0)
        self._service.setsockopt(zmq.LINGER, 0)
        self._service.connect(spawn.endpoint)
        hello = Hello()
        self._service.send(encode([hello]))
        self._session.advance(hello)

    def is_log_level_on(self, level: int) -> bool:
        """Tells whether the host writes log lines of this level now."""
        return bool(self._inbox.flags() >> level & 1)

    def send(self, messages: Sequence[ToHost]) -> None:
        """Sends one frame, from any thread. If encoding raises, nothing was sent.

        Raises RuntimeError in a forked child, whose frames would fall into the parent's.
        """
        self.check_process()
        frame = encode(messages)
        with self._lock:
            self._join_queued()
            self._unsent.append((frame, messages))
            self._send_unsent()

    def queue(self, messages: Sequence[ToHost]) -> None:
        """Queues messages until `flush`, until the next frame is sent, or until they are many.

        If encoding raises, nothing was queued. Raises RuntimeError in a forked child.
        """
        self.check_process()
        encoded = [(encode_message(message), message) for message in messages]
        with self._lock:
            self._queued += encoded
            self._queued_bytes += sum(len(content) for content, _ in encoded)
            if len(self._queued) >= _MAX_QUEUED or self._queued_bytes >= _MAX_QUEUED_BYTES:
                self.flush()

    def flush(self) -> None:
        """Sends the queued messages in one frame; a forked child leaves them to its parent."""
        if self._queued and os.getpid() == self._pid:
            with self._lock:
                self._join_queued()
                self._send_unsent()

    def _join_queued(self) -> None:
        if self._queued:
            queued, self._queued, self._queued_bytes = self._queued, [], 0
            frame = join_messages([content for content, _ in queued])
            self._unsent.append((frame, [message for _, message in queued]))

    def check_process(self) -> None:
        """Raises RuntimeError in a forked child."""
        if os.getpid() != self._pid:
            raise RuntimeError("a forked child cannot use its parent's connection to the host")

    def _send_unsent(self) -> None:
        """Sends the waiting frames, unless a caller on this thread already sends them."""
        while self._unsent and not self._sending:
            self._sending = True
            try:
                while self._unsent:
                    self._send_frame(*self._unsent.popleft())
            finally:
                self._sending = False

    def _send_frame(self, frame: bytes, messages: Sequence[ToHost]) -> None:
        if self._session.state is State.ENDED:
            return  # the session has ended; messages of the model's threads are dropped
        for message in messages:
            self._session.advance(message)
        self._unannounced += self._ring.write(frame)
        self._announce()
        if self._ring.unsent:
            self._wait_for_room()

    def _wait_for_room(self) -> None:
        """Waits until everything is written; a live host empties its rings.

        The service thread may wait for this one, so this one looks for the end of the host, too.
        """
        host_ended = select.poll()
        host_ended.register(self._lifeline, select.POLLIN)
        while self._ring.unsent and not self._host_gone:
            if host_ended.poll(_FULL_RING_POLL_MS):
                return
            self._unannounced += self._ring.flush()
            self._announce()

    def _announce(self) -> None:
        """Announces also the records whose announcement a signal handler of the model prevented."""
        if self._unannounced:
            announcement = self._unannounced.to_bytes(8, sys.byteorder)
            self._unannounced = 0  # first: a handler that runs after the call must not repeat it
            os.write(self._host_event, announcement)

    def is_idle(self) -> bool:
        """Tells whether the main thread waited for its current work and no more is queued."""
        if not self._waited or self._inbox.announced:
            return False
        has_work = select.poll()  # a poll object is not thread-safe
        has_work.register(self.work_event, select.POLLIN)
        return not has_work.poll(0)

    def receive_work(self) -> List[ToStub]:
        """Waits for the next frame of work; main thread only. Raises HostGone."""
        inbox = self._inbox
        ready = inbox.announced or self._has_work(0)
        self._waited = not ready
        while True:
            if self._host_gone:
                raise HostGone
            frame = inbox.read_frame()
            if frame is not None:
                return self._note_waiting(self._decode_frame(frame))
            if not ready:
                self._has_work(None)  # a read does not block
            if inbox.receive_announcements():
                ready = False  # if these are not all records of a frame
            else:
                self._waited = True
                ready = self._busy_poll()

    def receive_announced_work(self, busy_poll: bool) -> List[ToStub]:
        """Returns the messages of the frames of work that were announced; does not wait for them.

        If the host has only woken this process early, and with `busy_poll`, it polls for work. An
        event loop calls it instead of `receive_work`. Raises HostGone.
        """
        inbox = self._inbox
        if not inbox.receive_announcements() and busy_poll and self._busy_poll():
            inbox.receive_announcements()
        self._waited = inbox.announced <= 1
        messages: List[ToStub] = []
        while inbox.announced:
            if self._host_gone:
                raise HostGone
            frame = inbox.read_frame()
            if frame is not None:
                messages += self._decode_frame(frame)
        return self._note_waiting(messages)

    def _note_waiting(self, messages: List[ToStub]) -> List[ToStub]:
        """Notes whether more than one of these messages is a batch."""
        if len(messages) > 1 and sum(isinstance(each, Execute) for each in messages) > 1:
            self._waited = False
        return messages

    def _busy_poll(self) -> bool:
        """Busy-polls briefly for work, because waking from sleep takes longer; whether it came."""
        end = time.monotonic() + BUSY_POLL_SECONDS
        while not self._has_work(0):
            if time.monotonic() >= end:
                return False
            os.sched_yield()  # let another process use this core, maybe the host
        return True

    def receive_service(
        self, descriptors: Sequence[int], wait_ms: Optional[int]
    ) -> Tuple[List[ToStub], List[int]]:
        """Waits for a service frame, for one of the descriptors, or for the timeout.

        Returns the messages of the frame, and the readable descriptors. Service thread only;
        `wait_ms` in milliseconds, None for no limit.
        """
        key = tuple(descriptors)
        poller = self._pollers.get(key)
        if poller is None:
            poller = self._pollers[key] = zmq.Poller()
            poller.register(self._service, zmq.POLLIN)
            for descriptor in descriptors:
                poller.register(descriptor, zmq.POLLIN)
        ready = dict(poller.poll(wait_ms))
        messages = self._decode_frame(self._service.recv()) if self._service in ready else []
        return messages, [d for d in descriptors if d in ready]

    def read_bls_responses(self, handle: Callable[[ToStub], None]) -> None:
        """Passes the messages in the ring of BLS responses to `handle`; any thread may call."""
        with self._bls_lock:  # also while they are handled, or threads would change their order
            if self._reading_bls:
                return  # a finaliser of the model runs inside `handle`
            self._reading_bls = True
            collects = gc.isenabled()
            gc.disable()  # a finaliser that waits for a response would wait for this thread
            try:
                self._bls_inbox.receive_announcements()  # another thread may have read them
                while self._bls_inbox.announced:
                    frame = self._bls_inbox.read_frame()
                    if frame is not None:
                        for message in self._decode_frame(frame):
                            handle(message)
            finally:
                self._reading_bls = False
                if collects:
                    gc.enable()

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
        """Marks the host as gone: nothing is sent any more, and `receive_work` raises HostGone."""
        self._host_gone = True
        self._session.state = State.ENDED
        with suppress(BlockingIOError):  # a full counter wakes the main thread as well
            os.write(self.work_event, (1).to_bytes(8, sys.byteorder))

    def close(self) -> None:
        """Disconnects. The service thread must have ended."""
        self._service.close()
        self._context.term()


def _check_threads() -> None:
    """Starts as many threads as a stub needs. Raises ThreadsUnavailable if that fails.

    ZeroMQ aborts the process if it cannot start one of its two threads.
    """
    release = threading.Event()
    threads = [threading.Thread(target=release.wait, daemon=True) for _ in range(_STUB_THREADS)]
    started: List[threading.Thread] = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        raise ThreadsUnavailable(str(error)) from error
    finally:
        release.set()
        for thread in started:
            thread.join()
