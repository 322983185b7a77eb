"""The core's end of a link, in a thread of the test."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

from host.frontend_processes import frontend_messages as m
from host.frontend_processes.frontend_link import MessageLink
from host.instances.ring_link import RingFiles

DEADLINE = 60


class CoreThread:
    """The other end of a link, with an event loop of its own, as the frontend's is blocked."""

    def __init__(self) -> None:
        self.files = RingFiles("pbhost-test-rings", 2)
        self.events = self.files.events[0], self.files.events[1]
        self.received: list[m.ToCore] = []
        self.answer = b"found"
        self.silent = False  # whether it replies to no question, as if its loop were blocked
        self.error_of: Callable[[m.ToCore], m.WireError | None] = lambda question: None
        self.before_reply: m.ToFrontend | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._started.wait(DEADLINE)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._closed = asyncio.Event()
        self._link = MessageLink(
            self.files.memory, self.events, True, self._on_frames, self._on_error, lambda: None
        )
        self._started.set()
        await self._closed.wait()
        self._link.close()

    def _on_frames(self, frames: Sequence[bytes]) -> None:
        for message in [message for frame in frames for message in m.decode_to_core(frame)]:
            self.received.append(message)
            if isinstance(message, (m.FindModel, m.Authorize)) and not self.silent:
                if self.before_reply is not None:
                    self._send(self.before_reply)
                self._send(m.Reply(message.number, self.answer, self.error_of(message)))

    def _on_error(self, error: Exception) -> None:
        raise error

    def _send(self, *messages: m.ToFrontend) -> None:
        for message in messages:
            self._link.send(message)
        self._link.flush()

    def send(self, *messages: m.ToFrontend) -> None:
        """Sends messages in one frame."""
        self._loop.call_soon_threadsafe(self._send, *messages)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._closed.set)
        self._thread.join(DEADLINE)
        self.files.close()
