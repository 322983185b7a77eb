"""BLS requests of a stub: joined in bursts, with one thread that reads their responses."""

import os
import select
import threading
import time
from contextlib import contextmanager, suppress
from typing import Callable, Dict, Iterator, Optional, Sequence, Tuple

from stub.stub_channel import Channel
from stub.wire.messages import ToHost

_BURST_SECONDS = 0.0005  # requests that follow each other more quickly are joined
_FLUSH_MILLISECONDS = 2  # how long a blocked event loop can delay a joined request
_IDLE_CHECKS = 25  # without joined requests, after which the service thread stops checking


class BlsBursts:
    """Sends the first request of a burst at once, and the others in one frame at the end of a turn.

    A coroutine may compute while its requests run, so that the turn ends late. Therefore the
    service thread sends what has waited since its last check, as long as there are bursts.
    """

    def __init__(self, channel: Channel, wake: Callable[[], None]) -> None:
        """`wake`: wakes the service thread."""
        self._channel = channel
        self._wake = wake
        self._lock = threading.RLock()  # reentrant: finalisers of the model send requests
        self._last_sent = 0.0
        self._turn_open = False
        self._joined = False  # since the last check
        self._idle_checks = _IDLE_CHECKS

    def send(self, messages: Sequence[ToHost]) -> None:
        """Sends or queues messages, on the thread of the event loop."""
        now = time.monotonic()
        burst = now - self._last_sent < _BURST_SECONDS
        self._last_sent = now
        if not burst:
            self._channel.send(messages)
            return
        self._channel.queue(messages)
        if not self._turn_open:
            import asyncio  # a model without coroutines starts faster without it

            self._turn_open = True
            asyncio.get_running_loop().call_soon(self._end_turn)
            with self._lock:
                self._joined = True
                if self._idle_checks >= _IDLE_CHECKS:
                    self._idle_checks = 0
                    self._wake()

    def _end_turn(self) -> None:
        self._turn_open = False
        self._channel.flush()

    def check(self) -> Optional[int]:
        """Sends requests that wait; returns milliseconds to the next check, None if there is none.

        Only the service thread calls it.
        """
        with self._lock:
            if self._idle_checks >= _IDLE_CHECKS:
                return None
            self._idle_checks = 0 if self._joined else self._idle_checks + 1
            self._joined = False
        self._channel.flush()
        return _FLUSH_MILLISECONDS


class BlsReader:
    """Lets a thread read that waits for a response anyway, so that a response wakes one thread.

    The event loop of the model's coroutines reads once it has sent a request. Of the threads that
    are in `wait`, one reads for all of them; when it has its response, it hands over to
    another one. The service thread reads while there are requests whose senders do not wait there,
    or while the event loop is blocked: the loop may be blocked until others have their responses.
    """

    def __init__(self, event: int, read: Callable[[], None], wake: Callable[[], None]) -> None:
        """`event`: readable if there are responses. `wake`: wakes the service thread."""
        self._event = event
        self._read = read
        self._wake = wake
        self._lock = threading.RLock()  # reentrant: finalisers of the model send requests
        self._loop_thread = 0
        self._attached = False
        self._unattended = 0  # requests, and blocked calls, for which the service thread reads
        self._service_reads = True
        self._leader: Optional[BlsWaiter] = None  # the waiting thread that reads
        self._followers: Dict[BlsWaiter, None] = {}  # the others, the oldest first
        # Wakes the leader if another thread has read its response. Writing to `event` would not do:
        # other readers of it would take that away.
        self._leader_wake, self._wake_leader = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        readable = select.poll()
        readable.register(event, select.POLLIN)
        readable.register(self._leader_wake, select.POLLIN)
        self._poll = readable.poll  # a poll object has one caller at a time: the leader

    @property
    def descriptors(self) -> Tuple[int, int]:
        """The descriptors of its pipe, which are open until the process ends."""
        return self._leader_wake, self._wake_leader

    def set_loop_thread(self, thread: int) -> None:
        """Sets the thread of the event loop, before its first coroutine runs."""
        self._loop_thread = thread

    def attach_running_loop(self) -> bool:
        """Lets the event loop read if this is its thread; returns whether it is."""
        if threading.get_ident() != self._loop_thread:
            return False
        if not self._attached:
            import asyncio  # a model without coroutines starts faster without it

            asyncio.get_running_loop().add_reader(self._event, self._read)
            self._attached = True
        return True

    def detach_loop(self) -> None:
        """Called on the loop's thread when the loop has stopped: the service thread reads again."""
        with self._lock:
            self._loop_thread = 0
            if self._attached:
                self._attached = False
                self._let_service_read()

    def choose_thread(self) -> bool:
        """Returns whether the service thread has to wait for responses. Only that thread calls.

        It continues until another thread reads, or each request would wake it.
        """
        with self._lock:
            # The event loop may be blocked until followers without a leader have their responses.
            attended = self._leader is not None or (self._attached and not self._followers)
            if not self._unattended and attended:
                self._service_reads = False
            return self._service_reads

    def _let_service_read(self) -> None:
        if not self._service_reads:
            self._service_reads = True
            self._wake()

    def add_unattended(self) -> None:
        """Counts a request whose sender may not wait for it; `remove_unattended` follows."""
        with self._lock:
            self._unattended += 1
            self._let_service_read()

    def remove_unattended(self) -> None:
        """Ends what `add_unattended` has begun."""
        with self._lock:
            self._unattended -= 1

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """Lets the service thread read within a `with` block, in which this thread may wait."""
        self.add_unattended()
        try:
            yield
        finally:
            self.remove_unattended()

    def wait(self, waiter: "BlsWaiter") -> None:
        """Waits on the waiter's thread until `notify`; it may read the responses of others."""
        try:
            if self._begin_wait(waiter):
                waiter.sleep.acquire()
            if self._leader is waiter:
                self._read_until_notified(waiter)
        finally:
            self._end_wait(waiter)

    def _begin_wait(self, waiter: "BlsWaiter") -> bool:
        """Makes a waiter the leader or a follower; returns whether it has to sleep first."""
        with self._lock:
            if waiter.notified:
                return False
            if self._leader is None and not self._unattended:
                self._leader = waiter
                return False
            self._followers[waiter] = None
            return True

    def _read_until_notified(self, waiter: "BlsWaiter") -> None:
        while not waiter.notified:
            for descriptor, _ in self._poll():
                if descriptor == self._event:
                    self._read()
                else:
                    os.read(self._leader_wake, 64)

    def _end_wait(self, waiter: "BlsWaiter") -> None:
        """Removes a waiter; if it was the leader, the oldest follower becomes the next one."""
        with self._lock:
            self._followers.pop(waiter, None)
            if self._leader is waiter:
                self._leader = next(iter(self._followers), None)
                if self._leader is not None:
                    del self._followers[self._leader]
                    self._leader.sleep.release()

    def notify(self, waiter: "BlsWaiter") -> None:
        """Ends the wait of a waiter; any thread may call."""
        with self._lock:
            waiter.notified = True
            if waiter in self._followers:
                del self._followers[waiter]
                waiter.sleep.release()
            elif self._leader is waiter and waiter.thread != threading.get_ident():
                with suppress(BlockingIOError):  # a full pipe wakes the thread as well
                    os.write(self._wake_leader, b"\0")


class BlsWaiter:
    """A wait of the thread that creates it, for `BlsReader.wait` and `BlsReader.notify`."""

    __slots__ = ("notified", "sleep", "thread")

    def __init__(self) -> None:
        self.notified = False
        self.thread = threading.get_ident()
        self.sleep = threading.Lock()
        """Released for a follower that was notified, or has become the leader."""
        self.sleep.acquire()
