"""The progress of loading, as one line on the terminal."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Sequence
from types import TracebackType

from host.logs.handler import CLEAR_LINE, LogHandler
from host.models.registry import Registry, VersionState

_REFRESH_SECONDS = 0.2


class LoadProgress:
    """While entered, repaints `loaded 3/20, loading: a, b`; silent if stderr is no terminal.

    Lines of `log` overwrite it.
    """

    def __init__(self, registry: Registry, names: Sequence[str], log: LogHandler) -> None:
        self._log = log
        self._registry = registry
        self._names = names
        self._shown = sys.stderr.isatty()
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> LoadProgress:
        if self._shown:
            self._log.progress_line = True
            self._refresh()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._log.progress_line = False
            sys.stderr.write(CLEAR_LINE)
            sys.stderr.flush()

    def _refresh(self) -> None:
        states = {
            name: [version.state for version in self._registry.versions(name).values()]
            for name in self._names
        }
        loading = [name for name, known in states.items() if VersionState.LOADING in known]
        loaded = sum(VersionState.READY in known for known in states.values())
        text = f"loaded {loaded}/{len(self._names)}, loading: {', '.join(loading)}"
        sys.stderr.write(CLEAR_LINE + text[: shutil.get_terminal_size().columns - 1])
        sys.stderr.flush()
        self._timer = asyncio.get_running_loop().call_later(_REFRESH_SECONDS, self._refresh)
