"""The stub's end of the ZeroMQ connection; the only stub module that knows of zmq.

Three sockets, because a ZeroMQ socket belongs to one thread: the main thread waits for work on
one, the service thread for everything else on another, and any thread sends through the third,
one at a time. So a request reaches user code, and its answer the host, without a thread switch.
"""

import threading
from typing import List, Optional, Sequence

import zmq

from stub.wire.messages import Hello, ToHost, ToStub, decode_to_stub, encode
from stub.wire.session import Session

WORK, SERVICE, OUTBOX = b"w", b"s", b"o"
"""Suffixes of the three sockets' identities, behind the stub's token."""


class Channel:
    """Connects on construction. `token` is the name the host gave this process."""

    def __init__(self, endpoint: str, token: str, pid: int) -> None:
        self._context = zmq.Context()
        self._session = Session()
        self._lock = threading.Lock()
        hello = encode([Hello(pid)])
        self._work = self._connect(endpoint, token.encode() + WORK, hello)
        self._service = self._connect(endpoint, token.encode() + SERVICE, hello)
        self._outbox = self._connect(endpoint, token.encode() + OUTBOX, hello)
        self._session.step(Hello(pid))

    def _connect(self, endpoint: str, identity: bytes, hello: bytes) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.SNDHWM, 0)  # what is under way is bounded by the host's lanes
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 5000)  # last words must arrive; a dead host must not hold us
        socket.connect(endpoint)
        socket.send(hello)
        return socket

    def send(self, messages: Sequence[ToHost]) -> None:
        """Send one frame; any thread."""
        frame = encode(messages)
        with self._lock:
            for message in messages:
                self._session.step(message)
            self._outbox.send(frame)

    def receive_work(self) -> List[ToStub]:
        """Wait for the next frame of work; main thread only."""
        return self._accept(self._work.recv())

    def receive_service(self, descriptors: Sequence[int], wait_ms: Optional[int]) -> "Wakeup":
        """Wait for a service frame, for one of the descriptors, or until the time is over.

        Service thread only; `wait_ms` in milliseconds, None for no limit.
        """
        poller = zmq.Poller()
        poller.register(self._service, zmq.POLLIN)
        for descriptor in descriptors:
            poller.register(descriptor, zmq.POLLIN)
        ready = dict(poller.poll(wait_ms))
        messages = self._accept(self._service.recv()) if self._service in ready else []
        return Wakeup(messages, [d for d in descriptors if d in ready])

    def _accept(self, frame: bytes) -> List[ToStub]:
        messages = decode_to_stub(frame)
        with self._lock:
            for message in messages:
                self._session.step(message)
        return messages

    def close(self) -> None:
        """Deliver what was sent, then disconnect. The service thread must have ended."""
        for socket in (self._work, self._service, self._outbox):
            socket.close()
        self._context.term()


class Wakeup:
    """Why the service thread woke up: messages, and descriptors that have something to read."""

    __slots__ = ("messages", "descriptors")

    def __init__(self, messages: List[ToStub], descriptors: List[int]) -> None:
        self.messages = messages
        self.descriptors = descriptors
