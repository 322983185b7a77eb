"""Replies of a stub that its host waits for, such as that of the model's own `is_ready`.

Source: docs/reference/model-methods.md, "is_ready".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from host.errors import HostError, internal
from stub.wire import messages as m


class PendingReply:
    """Holds at most one expected reply; unexpected replies are dropped."""

    def __init__(self) -> None:
        self._future: asyncio.Future[m.ToHost] | None = None
        self._exit_error: HostError | None = None

    def expect_reply(self) -> None:
        """Expects a reply, as a request is about to be sent."""
        self._future = asyncio.get_running_loop().create_future()
        if self._exit_error is not None:
            self.stub_exited(self._exit_error)

    def set_reply(self, message: m.ToHost) -> None:
        """Called with the reply."""
        if self._future is not None and not self._future.done():
            self._future.set_result(message)

    def stub_exited(self, error: HostError) -> None:
        """Fails this reply and all later ones."""
        self._exit_error = error
        if self._future is not None and not self._future.done():
            self._future.set_exception(error)
            self._future.exception()  # marks it as retrieved, as nothing may be waiting

    async def wait_for_reply(self, seconds: float | None, late: HostError) -> m.ToHost:
        """Waits for the reply. Raises HostError: the model's error, the stub's death, or `late`."""
        assert self._future is not None
        done, _ = await asyncio.wait([self._future], timeout=seconds)
        if not done:
            raise late
        message = self._future.result()
        self._future = None
        if isinstance(message, m.LoadFailed):
            raise internal(message.text)
        return message


_TIMEOUT = 5.0


class ReadinessCheck:
    """At most one check is in progress; `send` sends it to the stub."""

    def __init__(self, send: Callable[[m.CheckReady], None]) -> None:
        self.model_defines_is_ready = False  # whether the model defines `is_ready`
        self._send = send
        self._number = 0
        self._check: asyncio.Future[str] | None = None

    async def check(self) -> str:
        """The reason why the model is not ready, "" if it is. Waits 5 s at most."""
        joined = self._check is not None
        if self._check is None:
            self._check = asyncio.get_running_loop().create_future()
            self._number += 1
            self._send(m.CheckReady(self._number))
        done, _ = await asyncio.wait([self._check], timeout=_TIMEOUT)
        if not done:
            which = "in-flight" if joined else "user-defined"
            return f"Timed out waiting for {which} is_ready() response"
        return done.pop().result()

    def handle_result(self, message: m.ReadinessResult) -> None:
        """Called with the result of the model."""
        reason = message.reason or "User-defined is_ready() failed with unknown error"
        self._complete_check("" if message.ready else reason)

    def stub_exited(self) -> None:
        """Called when the stub is gone."""
        self._complete_check(
            "Stub process is not healthy while waiting for user-defined is_ready() response"
        )

    def _complete_check(self, reason: str) -> None:
        check, self._check = self._check, None
        if check is not None:
            check.set_result(reason)
