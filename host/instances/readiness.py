"""One instance's say on whether it is ready: the model's own `is_ready` (pb_utils spec 2.11)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from stub.wire import messages as m

_SECONDS = 5.0


class Readiness:
    """At most one check is under way; `tell` sends it to the stub."""

    def __init__(self, tell: Callable[[m.CheckReady], None]) -> None:
        self.defined = False  # whether the model has a say
        self._tell = tell
        self._number = 0
        self._check: asyncio.Future[str] | None = None

    async def check(self) -> str:
        """Why the model is not ready; "" if it is. Waits 5 s; a check under way is joined."""
        joined = self._check is not None
        if self._check is None:
            self._check = asyncio.get_running_loop().create_future()
            self._number += 1
            self._tell(m.CheckReady(self._number))
        done, _ = await asyncio.wait([self._check], timeout=_SECONDS)
        if not done:
            which = "in-flight" if joined else "user-defined"
            return f"Timed out waiting for {which} is_ready() response"
        return done.pop().result()

    def checked(self, message: m.Checked) -> None:
        """The model has said it."""
        reason = message.reason or "User-defined is_ready() failed with unknown error"
        self._settle("" if message.ready else reason)

    def end(self) -> None:
        """The stub is gone."""
        self._settle(
            "Stub process is not healthy while waiting for user-defined is_ready() response"
        )

    def _settle(self, reason: str) -> None:
        check, self._check = self._check, None
        if check is not None:
            check.set_result(reason)
