"""Busy polling for messages that arrive soon, and early wake-ups of stubs before their work.

It takes a sleeping process a third of the time of a small request to run again on another core
(docs/explanation/decisions/0020).
"""

from __future__ import annotations

import asyncio
import os
import select
import time
from collections.abc import Callable

from stub.wire.ring import WAKE_EARLY

ConnectionHooks = Callable[[], Callable[[], None]]
"""Gives each new client connection a function to call whenever a request may have arrived."""

_REPEATS_BEFORE_WAKE = 3  # batches in a row to one stub before it is woken early
_MAX_USELESS_POLLS = 4  # polls in a row without waiting, which show that there is enough to do
_BACK_OFF_POLLS = 64  # polls to skip then
_CONTENDED_SECONDS = 0.001  # a yield that takes longer gave this core to a process that computes
_CONTENDED_BACK_OFF_POLLS = 1024  # polls to skip then, as the next yields would wait as long


def no_connection_hook() -> Callable[[], None]:
    """The hook of an endpoint that sends no work to stubs."""
    return lambda: None


class BusyPoller:
    """Predicts what one event loop will wait for. Does nothing until `seconds` is set.

    `seconds`: how long it polls at most, for stubs and clients that were faster than that the last
    time. `clock`: returns seconds. Only event loops of uvloop can poll.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = 0.0
        self.clock = clock
        self._stubs_awaited = 0  # busy stubs that were fast the last time
        self._answered_at = 0.0  # when a stub was, if no client has sent anything since
        # Whether a client sent something soon after that the last time.
        self._client_is_quick = False
        # The last source of work, if no work came of it yet.
        self._last_source: _WorkSource | None = None
        self._scheduled = False
        self._useless_polls = 0  # in a row
        self._polls_to_skip = 0  # polls still to skip
        self._loop: asyncio.AbstractEventLoop | None = None
        self._poll: Callable[[int], object] | None = None

    def connection_hook(self) -> Callable[[], None]:
        """Returns the function that a new connection calls when a request may have arrived."""
        source = _WorkSource()

        def on_activity() -> None:
            if self._stubs_awaited:
                # Several requests run, so stubs need the cores.
                self._polls_to_skip = max(self._polls_to_skip, _BACK_OFF_POLLS)
            if self._answered_at:
                self._client_is_quick = self.clock() - self._answered_at < self.seconds
                self._answered_at = 0.0
            self._last_source = source
            if source.woken or (source.repeats >= _REPEATS_BEFORE_WAKE and not self._polls_to_skip):
                self._wake_early(source)

        return on_activity

    def doorbell(self, event: int, on_full: Callable[[], None]) -> Doorbell:
        """The doorbell of a new stub, which waits for work at this eventfd.

        `on_full` is called if the counter of the eventfd, which does not block, is full.
        """
        return Doorbell(self, event, on_full)

    def _wake_early(self, source: _WorkSource) -> None:
        """Wakes the stub that always gets the work of this source, unless that was without need."""
        if source.woken:
            source.woken = False
            source.repeats = 0
        else:
            assert source.doorbell is not None
            source.woken = source.doorbell.wake_early()

    def _on_stub_answered(self, now: float) -> None:
        self._answered_at = now
        if self._client_is_quick:
            self._schedule_busy_poll()

    def _schedule_busy_poll(self) -> None:
        """Polls for a while before the event loop sleeps."""
        if self._scheduled:
            return
        if self._polls_to_skip:
            self._polls_to_skip -= 1
            return
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._open_poller(loop)
        if self._poll is not None:
            self._scheduled = True
            loop.call_soon(self._busy_poll)

    def _open_poller(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._poll = loop, None
        backend = getattr(loop, "_get_backend_id", None)
        if backend is not None:
            poller = select.poll()
            poller.register(backend(), select.POLLIN)  # readable when an event of the loop is due
            self._poll = poller.poll

    def _busy_poll(self) -> None:
        self._scheduled = False
        poll, clock = self._poll, self.clock
        assert poll is not None
        if poll(0):
            self._useless_polls += 1
            if self._useless_polls == _MAX_USELESS_POLLS:
                self._useless_polls, self._polls_to_skip = 0, _BACK_OFF_POLLS
            return
        self._useless_polls = 0
        now = clock()
        end = now + self.seconds
        while not poll(0) and now < end:
            before = now
            os.sched_yield()  # lets another process use this core, maybe the one that is waited for
            now = clock()
            if now - before > _CONTENDED_SECONDS:
                self._polls_to_skip = _CONTENDED_BACK_OFF_POLLS
                return


class Doorbell:
    """Wakes one stub, and remembers how fast it responds."""

    __slots__ = (
        "_busy_poller",
        "_event",
        "_on_full",
        "_is_quick",
        "_woken",
        "sent_at",
        "_source",
    )

    def __init__(self, busy_poller: BusyPoller, event: int, on_full: Callable[[], None]) -> None:
        self._busy_poller = busy_poller
        self._event = event
        self._on_full = on_full
        self._source = _WorkSource()
        self.sent_at = 0.0
        """When it was sent work, if it has not responded since; otherwise 0."""
        self._is_quick = False  # whether it responded at once the last time
        self._woken = False  # since it was sent work

    def announce_frames(self, number: int = 1) -> None:
        """Notifies the stub of more frames of work."""
        self._woken = False
        busy_poller = self._busy_poller
        source = busy_poller._last_source
        if source is not None:
            busy_poller._last_source = None
            source.woken = False
            if source.doorbell is self:
                source.repeats += 1
            else:
                source.doorbell, source.repeats = self, 1
        self._add(number)
        if not self.sent_at:
            self.sent_at = busy_poller.clock()
            if self._is_quick:
                busy_poller._stubs_awaited += 1
                busy_poller._schedule_busy_poll()

    def withdraw_frames(self) -> int:
        """Returns the number of frames that the stub has not taken, and can no longer take."""
        try:
            return os.eventfd_read(self._event) % WAKE_EARLY
        except BlockingIOError:
            return 0  # the stub has taken all that it was notified of

    def restore_frames(self, number: int) -> None:
        """Lets the stub take withdrawn frames after all."""
        self._add(number)

    def stub_answered(self) -> None:
        """Called when the stub has sent something."""
        busy_poller = self._busy_poller
        if self.sent_at:
            now = busy_poller.clock()
            busy_poller._stubs_awaited -= self._is_quick
            self._is_quick = now - self.sent_at < busy_poller.seconds
            self.sent_at = 0.0
            if self._is_quick:
                busy_poller._on_stub_answered(now)
        source = busy_poller._last_source = self._source
        if source.woken or (
            source.repeats >= _REPEATS_BEFORE_WAKE and not busy_poller._polls_to_skip
        ):
            busy_poller._wake_early(source)

    def wake_early(self) -> bool:
        """Wakes the stub if it sleeps and is fast; returns whether it was woken."""
        if self.sent_at or not self._is_quick or self._woken or self._event < 0:
            return False
        self._woken = True
        self._add(WAKE_EARLY)
        return True

    def _add(self, number: int) -> None:
        try:
            os.eventfd_write(self._event, number)
        except BlockingIOError:
            self._on_full()

    def close(self) -> None:
        """Called when the stub and its eventfd are gone."""
        self._event = -1
        if self.sent_at:
            self._busy_poller._stubs_awaited -= self._is_quick
            self.sent_at = 0.0


class _WorkSource:
    """A client connection or a stub, whose messages lead to work for stubs."""

    __slots__ = ("doorbell", "repeats", "woken")

    def __init__(self) -> None:
        self.doorbell: Doorbell | None = None  # of the stub that got the last work
        self.repeats = 0  # in a row to the same stub
        self.woken = False  # woken early, and nothing sent since
