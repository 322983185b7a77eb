"""Readiness of one instance, by the model's own `is_ready`.

Source: docs/reference/model-api.md, "is_ready".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from stub.wire import messages as m

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
