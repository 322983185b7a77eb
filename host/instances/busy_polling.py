"""Staying awake for what comes at once, and waking a stub up before its work is there.

Until a process that sleeps runs again on another core, a third as much time passes as host and stub
need for a small request (decision 20).
"""

from __future__ import annotations

import asyncio
import os
import select
import time
from collections.abc import Callable

from stub.wire.ring import ROUSE

Sources = Callable[[], Callable[[], None]]
"""Gives a new client's connection what it is to call whenever it may have sent a request."""

_SURE = 3  # times in a row that the same stub was sent work, before it is roused for it
_USELESS = 4  # looks in a row that did not have to wait: there is enough to do without them
_REST = 64  # times that nobody looks then
_MOST_UNTOLD = 16  # frames of work that wait before a busy stub is told of them


def nobody() -> Callable[[], None]:
    """Sources of a door behind which there are no stubs."""
    return lambda: None


class Attention:
    """What one event loop expects. It sleeps, and rouses nobody, until `seconds` is set.

    That is how long it stays awake at most, for stubs and clients that were quicker the last time.
    `clock` tells seconds. Only uvloop's loops can stay awake.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = 0.0
        self.clock = clock
        self._awaited = 0  # stubs that are at work and were quick the last time
        self._answered_at = 0.0  # when a stub was, if no client spoke since
        self._prompt = False  # whether a client spoke soon after that the last time
        self._source: _Source | None = None  # what spoke last, if no work came of it yet
        self._looking = False
        self._useless = 0  # looks in a row
        self._rest = 0  # times that are still to pass without one
        self._loop: asyncio.AbstractEventLoop | None = None
        self._poll: Callable[[int], object] | None = None

    def source(self) -> Callable[[], None]:
        """What a new client's connection is to call whenever it may have sent a request."""
        source = _Source()

        def heard() -> None:
            if self._awaited:
                self._rest = _REST  # several requests are under way: stubs need the cores
            if self._answered_at:
                self._prompt = self.clock() - self._answered_at < self.seconds
                self._answered_at = 0.0
            self._heard(source)

        return heard

    def bell(self, event: int) -> Bell:
        """That of a new stub, which waits for its work at this eventfd."""
        return Bell(self, event)

    def _heard(self, source: _Source) -> None:
        self._source = source
        if source.roused:  # for nothing
            source.roused = False
            source.times = 0
        elif source.times >= _SURE and not self._rest:
            assert source.bell is not None
            source.roused = source.bell.rouse()

    def _sent(self, bell: Bell) -> None:
        source, self._source = self._source, None
        if source is None:
            return
        source.roused = False
        if source.bell is bell:
            source.times += 1
        else:
            source.bell, source.times = bell, 1

    def _answered(self, now: float) -> None:
        self._answered_at = now
        if self._prompt:
            self._expect()

    def _expect(self) -> None:
        """Before the loop goes to sleep, look for a while whether there is something to do."""
        if self._looking:
            return
        if self._rest:
            self._rest -= 1
            return
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._open(loop)
        if self._poll is not None:
            self._looking = True
            loop.call_soon(self._look)

    def _open(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._poll = loop, None
        backend = getattr(loop, "_get_backend_id", None)
        if backend is not None:
            poller = select.poll()
            poller.register(backend(), select.POLLIN)  # ready if anything is that the loop awaits
            self._poll = poller.poll

    def _look(self) -> None:
        self._looking = False
        poll, clock = self._poll, self.clock
        assert poll is not None
        if poll(0):
            self._useless += 1
            if self._useless == _USELESS:
                self._useless, self._rest = 0, _REST
            return
        self._useless = 0
        end = clock() + self.seconds
        while not poll(0) and clock() < end:
            os.sched_yield()  # to whoever is on this core, maybe the one that is waited for


class Bell:
    """Wakes one stub up, and keeps in mind how soon it answers."""

    __slots__ = ("_attention", "_event", "_prompt", "_roused", "_sent_at", "_source", "_untold")

    def __init__(self, attention: Attention, event: int) -> None:
        self._attention = attention
        self._event = event
        self._source = _Source()
        self._sent_at = 0.0  # when it was sent work, if it has said nothing since
        self._prompt = False  # whether it answered at once the last time
        self._roused = False  # since it was sent work
        self._untold = 0  # frames of work that it was not told of yet

    def announce(self) -> None:
        """There is one more frame of work for the stub.

        One that has work is told of more when the loop has read what else has come: whoever is
        woken up on this core takes it at once, and would do so for every request (decision 20).
        """
        self._roused = False
        attention = self._attention
        attention._sent(self)
        self._untold += 1
        if not self._sent_at:
            self._tell()
            self._sent_at = attention.clock()
            if self._prompt:
                attention._awaited += 1
                attention._expect()
        elif self._untold == _MOST_UNTOLD:
            self._tell()
        elif self._untold == 1:
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        untold, self._untold = self._untold, 0
        if untold and self._event >= 0:
            os.eventfd_write(self._event, untold)

    def answered(self) -> None:
        """The stub has said something."""
        attention = self._attention
        if self._sent_at:
            now = attention.clock()
            attention._awaited -= self._prompt
            self._prompt = now - self._sent_at < attention.seconds
            self._sent_at = 0.0
            if self._prompt:
                attention._answered(now)
        attention._heard(self._source)

    def rouse(self) -> bool:
        """Wake the stub up if it sleeps and is quick. Returns whether it was told."""
        if self._sent_at or not self._prompt or self._roused or self._event < 0:
            return False
        self._roused = True
        os.eventfd_write(self._event, ROUSE)
        return True

    def close(self) -> None:
        """The stub is gone, and so is its eventfd."""
        self._event = -1
        if self._sent_at:
            self._attention._awaited -= self._prompt
            self._sent_at = 0.0


class _Source:
    """A client's connection, or a stub: what it says leads to work for stubs."""

    __slots__ = ("bell", "roused", "times")

    def __init__(self) -> None:
        self.bell: Bell | None = None  # of the stub that was sent work the last time
        self.times = 0  # in a row that it was this one
        self.roused = False  # it was, and has been sent nothing yet
