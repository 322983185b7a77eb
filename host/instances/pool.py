"""All stubs of one server, and what they share: sockets, arenas, and how they are started."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from host.errors import HostError, internal, unavailable
from host.inference import Call, InferRequest
from host.instances.arenas import Arenas
from host.instances.channel import Channel
from host.instances.instance import Instance
from host.instances.process import Launcher

_log = logging.getLogger("pbhost")

_TRIM_SECONDS = 2.0

_LEVELS = (logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG)
"""`pb_utils.Logger` levels, in their order (pb_utils spec 3.12)."""


class StubPool:
    """Fulfils the services that instances need; `ask` starts a BLS request.

    `arena_limit` is what the tensors of one process may take, in bytes. Raises OSError.
    """

    def __init__(
        self,
        launcher: Launcher,
        arena_limit: int,
        ask: Callable[[InferRequest], Call],
        break_circle: Callable[[Call], None],
    ) -> None:
        self.channel = Channel()
        self.arenas = Arenas(arena_limit)
        self.launcher = launcher
        self.ask = ask
        self.break_circle = break_circle
        self._alive: set[Instance] = set()
        self._closing = False
        self._empty = asyncio.Event()
        self._empty.set()
        self._trim()

    def _trim(self) -> None:
        """Give back tensor memory that was not needed of late."""
        self.arenas.host.trim()
        self._timer = asyncio.get_running_loop().call_later(_TRIM_SECONDS, self._trim)

    async def start(self, name: str, label: str) -> Instance:
        """A started stub. Raises HostError."""
        if self._closing:
            raise unavailable("the server is stopping")
        try:
            instance = Instance(name, label, self)
        except OSError as error:
            raise _no_stub(label, error) from error
        self._alive.add(instance)
        self._empty.clear()
        try:
            await instance.start()
        except OSError as error:
            self.gone(instance)
            raise _no_stub(label, error) from error
        except BaseException:
            instance.kill()
            raise
        return instance

    def gone(self, instance: Instance) -> None:
        """The instance's process has ended."""
        self._alive.discard(instance)
        if not self._alive:
            self._empty.set()

    def model_log(self, label: str, level: int, file: str, line: int, text: str) -> None:
        """Log what a model logged."""
        extra = {"instance": label, "source": f"{file}:{line}"}
        _log.log(_LEVELS[level] if 0 <= level < 4 else logging.INFO, text, extra=extra)

    def printed(self, label: str, line: str, error: bool) -> None:
        """Log what a stub printed."""
        _log.log(
            logging.WARNING if error else logging.INFO,
            line,
            extra={"instance": label, "printed": True},
        )

    async def close(self) -> None:
        """Kill what is left, wait for it to be gone, and give everything back."""
        self._closing = True
        for instance in list(self._alive):
            instance.kill()
        await self._empty.wait()
        self._timer.cancel()
        await self.launcher.close()
        self.channel.close()
        self.arenas.close()


def _no_stub(label: str, error: OSError) -> HostError:
    return internal(
        f"cannot start a stub process for '{label}': {error.strerror or error}; the host may need"
        " a higher limit of open files (ulimit -n) or more memory"
    )
