"""The health of the server: liveness, readiness, and a watchdog of its event loop.

Source: docs/reference/http.md, "Health and readiness".
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from dataclasses import dataclass

from host.errors import unavailable
from host.logs.formats import model_fields
from host.models.registry import (
    UNLOADED,
    Model,
    ModelVersion,
    Registry,
    VersionState,
    parse_version,
)
from host.remote_models import RemoteModels

_log = logging.getLogger("pbhost")

_PERIOD = 0.1  # seconds between two measurements
_LIMIT = 1.0  # seconds; a longer turn of the loop is logged with its stack
_REPORT_PERIOD = 60.0  # seconds between two such reports
_WINDOW = 15.0  # seconds


class EventLoopWatchdog:
    """Asks the loop it was made in, from a thread, to run a callback ten times per second."""

    def __init__(self, limit: float = _LIMIT) -> None:
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._longest = 0.0  # of this window
        self._longest_before = 0.0  # of the window before
        self._window_started = time.monotonic()
        self._reported_at = float("-inf")
        self._ran = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._measure, name="pbhost-event-loop-watchdog", daemon=True
        )
        self._thread.start()

    def lag(self) -> float:
        """The longest time in seconds that a callback waited, in the last 15 to 30 seconds."""
        self._start_window()
        return max(self._longest, self._longest_before)

    def close(self) -> None:
        """Stops measuring."""
        self._closing.set()
        self._ran.set()
        self._thread.join()

    def _measure(self) -> None:
        while not self._closing.wait(_PERIOD):
            self._ran.clear()
            try:
                self._loop.call_soon_threadsafe(self._record_lag, time.monotonic())
            except RuntimeError:
                return  # the loop is closed
            if not self._ran.wait(self._limit):
                self._report()
                self._ran.wait()

    def _record_lag(self, asked_at: float) -> None:
        self._start_window()
        self._longest = max(self._longest, time.monotonic() - asked_at)
        self._ran.set()

    def _start_window(self) -> None:
        windows = (time.monotonic() - self._window_started) // _WINDOW
        if windows:
            self._longest_before = self._longest if windows == 1 else 0.0
            self._longest = 0.0
            self._window_started = time.monotonic()

    def _report(self) -> None:
        """Logs what the thread of the loop does now."""
        now = time.monotonic()
        frame = sys._current_frames().get(self._loop_thread)
        if frame is None or now < self._reported_at + _REPORT_PERIOD:
            return
        self._reported_at = now
        _log.warning(
            "The event loop has not run for %g seconds, so that all clients wait. It is at:\n%s",
            self._limit,
            "".join(traceback.format_stack(frame)).rstrip(),
        )


@dataclass(slots=True)
class ServerState:
    """The progress of a server between its start and its exit."""

    started: bool = False
    """Start-up is complete."""

    failed: bool = False
    """The start has failed, and the server runs without models (`--exit-on-error=false`)."""

    exiting: bool = False
    """The exit has started. Health requests fail; other requests are served until it is over."""

    @property
    def accepts_model_control(self) -> bool:
        """Whether start-up is complete and the exit has not started."""
        return self.started and not self.exiting


async def is_model_ready(model: Model | None) -> bool:
    """Whether a version is ready, by its instances and by its own `is_ready`.

    Source: docs/reference/model-methods.md, "is_ready".
    """
    if model is None:
        return False
    if model.ready and not model.defines_is_ready:
        return True
    return await ask_if_ready(model)


async def ask_if_ready(model: Model) -> bool:
    """Asks a version whether it is ready. The reason why it is not goes to the log."""
    reason = await model.why_not_ready()
    if reason:
        name, number = model.name, model.version
        _log.debug(
            "Model '%s' version %d is not ready: %s",
            name, number, reason, extra=model_fields(name, number),
        )  # fmt: skip
    return not reason


class Health:
    """`strict_readiness`: a server with a model that failed to load is not ready.

    `remote`: the models of other servers.
    """

    def __init__(
        self,
        registry: Registry,
        state: ServerState,
        strict_readiness: bool,
        remote: RemoteModels | None = None,
    ) -> None:
        self._remote = remote
        self._registry = registry
        self._state = state
        self._strict_readiness = strict_readiness

    def live(self) -> bool:
        """Whether the start has not failed. Raises HostError during the exit."""
        self._refuse_exiting()
        return not self._state.failed

    async def ready(self) -> bool:
        """Whether every model is ready; without strict readiness, whether the server has started.

        A model that loads on demand counts only while it is loaded.
        Raises HostError during the exit.
        """
        return await self.own_ready() and (self._remote is None or await self._remote.ready())

    async def own_ready(self) -> bool:
        """As `ready`, without the models of other servers. Raises HostError during the exit."""
        self._refuse_exiting()
        if not self._state.started:
            return False
        if not self._strict_readiness:
            return True
        on_demand = self._registry.on_demand
        failures = self._registry.failures.items()
        if any(failure.counts for name, failure in failures if name not in on_demand):
            return False
        for name, entry in list(self._registry.list_entries()):
            if not entry.versions and name not in on_demand:
                return False
            for version in list(entry.versions.values()):
                if name in on_demand and version.state is not VersionState.READY:
                    continue  # the next request loads it
                if not await _is_version_healthy(version):
                    return False
        return True

    async def model_ready(self, name: str, version: str) -> bool:
        """Whether this model is ready. Raises HostError if it is unknown."""
        self._refuse_exiting()
        number = parse_version(version)
        if self._remote is not None:
            await self._remote.refresh(name)
        versions = self._registry.versions(self._registry.resolve_name(name))
        if not versions and number == -1 and self._registry.is_remote(name):
            return False  # its server has unloaded it
        if not versions or (number != -1 and number not in versions):
            self._registry.find(name, number)  # raises for an unknown model
        for known in versions.values():
            if number in (-1, known.number) and known.state is VersionState.READY:
                if await is_model_ready(known.model):
                    return True
        return False

    def _refuse_exiting(self) -> None:
        if self._state.exiting:
            raise unavailable("Server exiting")


async def _is_version_healthy(version: ModelVersion) -> bool:
    """Whether a version does not keep a server with strict readiness from being ready."""
    if version.state is VersionState.READY:
        return await is_model_ready(version.model)
    return version.state is VersionState.UNAVAILABLE and version.reason == UNLOADED
