"""The reply of a stub that its host waits for."""

from __future__ import annotations

import asyncio

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
