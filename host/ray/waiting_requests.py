"""Requests to other deployments, which end if their deployment no longer has a replica."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

_CHECK_SECONDS = 10.0
_CHECKS = 6  # without a replica, before requests are given up


@dataclass(eq=False, slots=True)
class WaitingRequest:
    """A request to a deployment; `give_up` cancels it."""

    name: str
    give_up: Callable[[], None]
    given_up: bool = False


class WaitingRequests:
    """Ray Serve lets requests wait for a replica without a deadline; this gives them one.

    `has_replica`: tells whether a replica of a model's deployment lives. Requests that wait for a
    busy replica continue. Belongs to the event loop.
    """

    def __init__(
        self, has_replica: Callable[[str], Awaitable[bool]], check_seconds: float = _CHECK_SECONDS
    ) -> None:
        self._has_replica = has_replica
        self._check_seconds = check_seconds
        self._waiting: dict[str, set[WaitingRequest]] = {}
        self._checks: dict[str, asyncio.Task[None]] = {}

    def add(self, name: str, give_up: Callable[[], None]) -> WaitingRequest:
        """A request to a model that has been sent now."""
        request = WaitingRequest(name, give_up)
        self._waiting.setdefault(name, set()).add(request)
        if name not in self._checks:
            self._checks[name] = asyncio.get_running_loop().create_task(self._check(name))
        return request

    def discard(self, request: WaitingRequest) -> None:
        """To be called when the request has ended."""
        self._waiting[request.name].discard(request)

    async def _check(self, name: str) -> None:
        """Goes on while requests wait, and gives up those that had no replica all the time."""
        waiting, before = self._waiting[name], set[WaitingRequest]()
        missing = 0
        try:
            while waiting:
                before = before & waiting if missing else set(waiting)
                await asyncio.sleep(self._check_seconds)
                if before.isdisjoint(waiting) or await self._has_replica(name):
                    missing = 0
                    continue
                missing += 1
                if missing < _CHECKS:
                    continue
                missing = 0
                for request in before & waiting:
                    request.given_up = True
                    request.give_up()
        finally:
            del self._checks[name]
