"""The one reply that a stub owes its host: expected, come, or not to come any more."""

from __future__ import annotations

import asyncio

from host.errors import HostError, internal
from stub.wire import messages as m


class PendingReply:
    """At most one is expected at a time; what nobody expects is dropped."""

    def __init__(self) -> None:
        self._future: asyncio.Future[m.ToHost] | None = None
        self._exit_error: HostError | None = None

    def expect_reply(self) -> None:
        """The stub is about to be asked, although it may be gone by now."""
        self._future = asyncio.get_running_loop().create_future()
        if self._exit_error is not None:
            self.stub_exited(self._exit_error)

    def set_reply(self, message: m.ToHost) -> None:
        """The stub has replied."""
        if self._future is not None and not self._future.done():
            self._future.set_result(message)

    def stub_exited(self, error: HostError) -> None:
        """There will be none, now and in future."""
        self._exit_error = error
        if self._future is not None and not self._future.done():
            self._future.set_exception(error)
            self._future.exception()  # whoever waits gets it; nobody need wait

    async def wait_for_reply(self, seconds: float | None, late: HostError) -> m.ToHost:
        """What came. Raises HostError: the model's failure, the loss, or `late`."""
        assert self._future is not None
        done, _ = await asyncio.wait([self._future], timeout=seconds)
        if not done:
            raise late
        message = self._future.result()
        self._future = None
        if isinstance(message, m.LoadFailed):
            raise internal(message.text)
        return message
