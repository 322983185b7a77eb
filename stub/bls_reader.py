"""Chooses the thread that reads the responses to BLS requests."""

import threading
from contextlib import contextmanager
from typing import Callable, Iterator


class BlsReader:
    """The event loop of the model's coroutines reads BLS responses once it has sent a request.

    So a response wakes one thread, not two. While other threads wait for responses, or the loop's
    thread blocks for one, the service thread reads, too: the loop may be blocked until they have
    their responses. Without such a loop, the service thread reads them.
    """

    def __init__(self, event: int, read: Callable[[], None], wake: Callable[[], None]) -> None:
        """`event`: readable if there are responses. `wake`: wakes the service thread."""
        self._event = event
        self._read = read
        self._wake = wake
        self._lock = threading.RLock()  # reentrant: finalisers of the model send requests
        self._loop_thread = 0
        self._attached = False
        self._blocked = 0  # requests of other threads, and calls of the loop's that block
        self._service_reads = True

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
                self._wake()

    def choose_thread(self) -> bool:
        """Returns whether the service thread has to wait for responses. Only that thread calls."""
        with self._lock:
            self._service_reads = self._blocked > 0 or not self._attached
            return self._service_reads

    def add_blocked(self) -> None:
        """Counts a thread that may wait for a response; `remove_blocked` follows."""
        with self._lock:
            self._blocked += 1
            if not self._service_reads:
                self._service_reads = True
                self._wake()

    def remove_blocked(self) -> None:
        """Ends what `add_blocked` has begun."""
        with self._lock:
            self._blocked -= 1

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """Counts this thread as blocked within a `with` block."""
        self.add_blocked()
        try:
            yield
        finally:
            self.remove_blocked()
