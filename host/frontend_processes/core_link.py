"""A frontend process's connection to the core: messages, questions and their replies."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import struct
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import NoReturn

import msgspec

from host.errors import ErrorCode, HostError
from host.frontend_processes.frontend_link import MessageLink, SharedState
from host.frontend_processes.frontend_messages import (
    Cancel,
    Reply,
    ToCore,
    ToFrontend,
    decode_error,
    decode_to_frontend,
)
from host.instances.ring_link import FULL_RING_PAUSE
from stub.wire.messages import BlockRelease

ARENA = struct.Struct("<QQ")
"""The number and the limit of an arena, sent with its descriptor."""

CORE_GONE_STATUS = 1
"""The exit status of a frontend process that no longer has a core, or has lost its messages."""

OUT_OF_MEMORY_STATUS = 2
"""The exit status of a frontend process that has got no memory."""

_ANSWER_SECONDS = 30.0  # the core replies at once, unless its event loop is blocked


class CoreSilent(HostError):
    """The core has not replied to a question."""


class CoreLink(MessageLink):
    """`on_message` is called with every message but replies; `on_arena` with each new arena.

    The process ends if the core does, or if it breaks the protocol.
    """

    def __init__(
        self,
        rings: int,
        events: tuple[int, int],
        control: socket.socket,
        on_message: Callable[[ToFrontend], None],
        on_arena: Callable[[int, int, int], None],
        collect_releases: Callable[[], BlockRelease | None],
    ) -> None:
        super().__init__(rings, events, False, self._on_frames, self._on_error, collect_releases)
        self.state = SharedState(rings)
        self.numbers = itertools.count(1)
        self._on_message = on_message
        self._on_arena = on_arena
        self._replies: dict[int, asyncio.Future[bytes]] = {}
        self._awaited = 0  # the number of the question that blocks this process
        self._answers: list[Reply] = []  # to that question
        self._deferred: deque[ToFrontend] = deque()  # came, and wait to be handled
        self._handling = False
        self._control = control
        control.setblocking(False)
        self._loop.add_reader(control.fileno(), self.read_arenas)

    async def ask(self, question: ToCore, number: int) -> bytes:
        """Sends a question, and waits for its reply. Raises HostError.

        A caller that is cancelled while it waits cancels what the core does for it.
        """
        reply: asyncio.Future[bytes] = self._loop.create_future()
        self._replies[number] = reply
        self.send(question)
        try:
            return await reply
        except asyncio.CancelledError:
            self.send(Cancel(number))
            raise
        finally:
            del self._replies[number]

    def ask_now(self, question: ToCore, number: int) -> bytes:
        """As `ask`, but blocks this process: only for questions that are rare and replied at once.

        Raises HostError.
        """
        self.send(question)
        self.flush()
        self._awaited = number
        end = time.monotonic() + _ANSWER_SECONDS
        try:
            while not self._answers:
                left = end - time.monotonic()
                if left <= 0:
                    raise CoreSilent(
                        ErrorCode.UNAVAILABLE,
                        f"the server did not respond within {_ANSWER_SECONDS:g} s",
                    )
                if not self.sender.send_unsent():  # the ring is full: no timer runs meanwhile
                    left = min(left, FULL_RING_PAUSE)
                if self.receiver.wait(left):
                    self.receiver.read_announced()
            answer = self._answers.pop()
        finally:
            self._awaited = 0
            if self._deferred and not self._handling:
                self._loop.call_soon(self._handle_deferred)
        if answer.error is not None:
            raise decode_error(answer.error)
        return answer.data

    def _on_frames(self, frames: Sequence[bytes]) -> None:
        for frame in frames:
            try:
                messages = decode_to_frontend(frame)
            except msgspec.DecodeError as error:
                self._on_error(error)
                return
            except MemoryError:
                end_without_memory()
            for message in messages:
                if self._awaited and isinstance(message, Reply) and message.number == self._awaited:
                    self._answers.append(message)
                else:
                    self._deferred.append(message)
        if not self._awaited and not self._handling:
            self._handle_deferred()

    def _handle_deferred(self) -> None:
        """Handles all messages in order. One that asks `ask_now` lets more of them arrive."""
        self._handling = True
        try:
            while self._deferred:
                self._handle(self._deferred.popleft())
        finally:
            self._handling = False

    def _handle(self, message: ToFrontend) -> None:
        try:
            if isinstance(message, Reply):
                self._handle_reply(message)
            else:
                self._on_message(message)
        except (KeyError, ValueError, IndexError) as error:
            self._on_error(error)
        except MemoryError:
            end_without_memory()
        except Exception:  # a defect of ours: requests would wait for what is lost
            _end(CORE_GONE_STATUS, f"unexpected failure\n{traceback.format_exc()}")

    def _handle_reply(self, message: Reply) -> None:
        reply = self._replies.get(message.number)
        if reply is None or reply.done():
            return
        if message.error is None:
            reply.set_result(message.data)
        else:
            reply.set_exception(decode_error(message.error))

    def read_arenas(self) -> None:
        """Opens the arenas that the core has announced by now. Ends the process without a core."""
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._control, ARENA.size, 1)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                os._exit(CORE_GONE_STATUS)
            number, limit = ARENA.unpack(data)
            self._on_arena(number, descriptors[0], limit)

    def _on_error(self, error: Exception) -> None:
        # Nothing that this process knows is certain any more. The core starts another one.
        _end(CORE_GONE_STATUS, f"the core broke the protocol: {error!r}")


def end_without_memory() -> NoReturn:
    """Ends this process, which has got no memory: what it was about to do is lost."""
    _end(OUT_OF_MEMORY_STATUS, "out of memory")


def _end(status: int, reason: str) -> NoReturn:
    os.write(2, f"pbhost-frontend: {reason}\n".encode())
    os._exit(status)
