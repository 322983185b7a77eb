"""The host's connection to one stub: two rings in shared memory, and ZeroMQ for the rest."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from host.instances.busy_polling import Attention
from host.instances.channel import SERVICE, WORK, Channel
from stub.wire.messages import (
    ToStub,
    encode,
)
from stub.wire.ring import RingError, RingReader, RingWriter, create_file, map_file


class Link:
    """`received` is called with every frame of the stub, in the order in which it sent them;
    `broken`, with the reason, if its ring holds something else. Raises OSError.
    """

    def __init__(
        self,
        channel: Channel,
        attention: Attention,
        received: Callable[[bytes], None],
        broken: Callable[[Exception], None],
    ) -> None:
        self.token = secrets.token_hex(8)
        with ExitStack() as opened:
            self.rings_fd = create_file("pbhost-rings")
            opened.callback(os.close, self.rings_fd)
            self.work_event = os.eventfd(0, os.EFD_CLOEXEC)
            opened.callback(os.close, self.work_event)
            self.host_event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            opened.callback(os.close, self.host_event)
            to_stub, to_host = map_file(self.rings_fd)
            self._descriptors = opened.pop_all()
        self._bell = attention.bell(self.work_event)
        self._ring = RingWriter(to_stub)
        self.most_inline = self._ring.most_inline  # bytes of tensors in the next frame of work
        self._inbox = RingReader(to_host)
        self._address = self.token.encode()
        self._channel = channel
        self._received = received
        self._broken = broken
        self._connected = 0  # sockets that have said hello
        self._announced = 0  # frames in the ring, or elsewhere, that are to be read
        self._elsewhere: deque[bytes] = deque()
        self._missing = False  # the ring says elsewhere, and it is not there yet
        self.caught_up = asyncio.Event()  # set unless that is so
        self.caught_up.set()
        self._open = True
        self._deaf = False
        channel.register(self.token, self._from_channel)
        asyncio.get_running_loop().add_reader(self.host_event, self._signalled)

    def send_work(self, messages: Sequence[ToStub]) -> None:
        """Send a frame to the stub's main thread. One that is gone gets nothing."""
        if not self._open:
            return
        frame = encode(messages)
        if not self._ring.put(frame):
            # The lanes bound what is under way, so there is always room for this word.
            if not self._ring.put_elsewhere():
                self._broken(RingError("it does not read what it is sent"))
                return
            self._channel.send(self._address + WORK, frame)
        self._bell.announce()

    def send_service(self, messages: Sequence[ToStub]) -> None:
        """Send a frame to the stub's service thread."""
        self._channel.send(self._address + SERVICE, encode(messages))

    def drain(self) -> None:
        """Read what has been announced up to now."""
        if self._open and not self._deaf:
            self._signalled()

    def deafen(self) -> None:
        """Hear nothing more of the stub: what it says is not to be understood."""
        if self._open:
            self._announced = 0
            asyncio.get_running_loop().remove_reader(self.host_event)
            self._channel.forget(self.token)
            self._deaf = True
            self.caught_up.set()

    def close(self) -> None:
        """Forget the stub."""
        if self._open:
            self._open = False
            self.caught_up.set()
            asyncio.get_running_loop().remove_reader(self.host_event)
            self._channel.forget(self.token)
            self._bell.close()
            self._descriptors.close()
            self._ring.close()
            self._inbox.close()

    def _signalled(self) -> None:
        try:
            self._announced += os.eventfd_read(self.host_event)
        except BlockingIOError:
            pass  # nothing new
        else:
            self._bell.answered()
        self._read()

    def _from_channel(self, frame: bytes) -> None:
        if self._connected < 3:
            self._connected += 1
            if self._connected == 3:
                self._received(frame)
            return
        self._elsewhere.append(frame)
        self.caught_up.set()
        self._read()

    def _read(self) -> None:
        """Hand on frames, up to one that has been announced but is not here yet."""
        while self._announced and self._open and not self._deaf:
            try:
                frame = None if self._missing else self._inbox.take()
            except RingError as error:
                self._broken(error)
                return
            if frame is None:
                self._missing = not self._elsewhere
                if self._missing:
                    self.caught_up.clear()
                    return
                frame = self._elsewhere.popleft()
            self._announced -= 1
            self._received(frame)
