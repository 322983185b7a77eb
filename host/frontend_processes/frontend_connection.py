"""The core's connection to one frontend process."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence

import msgspec

from host.access.api_keys import ApiKeys
from host.access.clients import Admission
from host.core import Core
from host.frontend_processes import frontend_messages as m
from host.frontend_processes.core_link import ARENA
from host.frontend_processes.exchanged_memory import CoreMemory
from host.frontend_processes.frontend_link import (
    CORE_RING,
    FRONTEND_RING,
    BudgetFile,
    FrontendSpawn,
    MessageLink,
    SharedState,
)
from host.frontend_processes.served_exchanges import ServedExchanges
from host.frontend_processes.served_requests import ServedRequests
from host.frontends.grpc.methods import Services
from host.frontends.http1.cycle import App
from host.instances.arenas import Arenas
from host.instances.ring_link import RingFiles
from stub.wire.messages import BlockRelease

_log = logging.getLogger("pbhost")


class FrontendConnection:
    """Serves one frontend process. Belongs to the event loop. Raises OSError.

    `name`: the process in log lines. `api_keys`: the keys that clients need. `on_activity` is
    called whenever a request may have arrived. `on_fault` is called once if the process breaks the
    protocol.
    """

    def __init__(
        self,
        name: str,
        core: Core,
        services: Services,
        app: App,
        api_keys: ApiKeys | None,
        arenas: Arenas,
        on_activity: Callable[[], None],
        on_fault: Callable[[Exception], None],
    ) -> None:
        self._name = name
        self._arenas = arenas
        self._on_activity = on_activity
        self._on_fault = on_fault
        self._open = True
        self.hello: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.drained: asyncio.Future[bool] | None = None
        self.tls_reloaded: asyncio.Future[None] | None = None
        self.pong = True
        self.open_http = self.open_grpc = 0  # inference requests, while it drains
        self._files = RingFiles("pbhost-frontend-rings", 2)
        try:
            self._control, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            self._files.close()
            raise
        self._control.setblocking(False)
        self.state = SharedState(self._files.memory)
        self._link = MessageLink(
            self._files.memory,
            (self._files.events[FRONTEND_RING], self._files.events[CORE_RING]),
            True,
            self._on_frames,
            self._fail,
            lambda: self._memory.collect_releases(),
        )
        self._memory = CoreMemory(
            arenas,
            self._send_arena,
            self.send,
            self._link.flush_releases,
            self._link.inline_limit,
        )
        admissions: dict[int, Admission] = {}
        self._requests = ServedRequests(core, self._memory, self.send, api_keys, admissions)
        self._exchanges = ServedExchanges(core, services, app, api_keys, admissions, self.send)

    def spawn_arguments(
        self, index: int, grpc: int, http: int, budget: BudgetFile
    ) -> FrontendSpawn:
        """The arguments of the process; `grpc` and `http` are listening sockets, -1 for none."""
        arena, files = self._memory.arena, self._files
        return FrontendSpawn(
            index=index,
            control=self._theirs.fileno(),
            rings=files.memory,
            to_frontend=files.events[FRONTEND_RING],
            to_core=files.events[CORE_RING],
            arena=arena.number,
            arena_fd=arena.fd,
            limit=arena.limit,
            host_arena_fd=self._arenas.host_fd,
            grpc=grpc,
            http=http,
            budget=budget.fd,
            budget_size=budget.size,
        )

    def process_started(self) -> None:
        """Closes what only the process needs."""
        self._theirs.close()

    def send(self, message: m.ToFrontend) -> None:
        """As `MessageLink.send`; nothing is sent after the end of the process."""
        if self._open:
            self._link.send(message)

    def _send_arena(self, number: int, limit: int, descriptor: int) -> None:
        # If the process does not read them, it fails at the first message about the arena.
        try:
            socket.send_fds(self._control, [ARENA.pack(number, limit)], [descriptor])
        except OSError as error:  # it has ended, or it does not read
            self._fail(error)

    def _on_frames(self, frames: Sequence[bytes]) -> None:
        self._on_activity()
        try:
            for frame in frames:
                for message in m.decode_to_core(frame):
                    if not self._open:
                        return
                    _HANDLERS[type(message)](self, message)
        except (msgspec.DecodeError, KeyError, ValueError, IndexError) as error:
            self._fail(error)
        except Exception as error:  # a defect of ours: messages of the frame are lost
            _log.exception("unexpected failure while messages of %s were handled", self._name)
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if self._open:
            self._link.close()
            self._on_fault(error)

    def _on_hello(self, unrestricted: Sequence[str] = ()) -> None:
        if not self.hello.done():
            self.hello.set_result(None)
            if unrestricted:
                _log.warning("%s runs without %s", self._name, " and without ".join(unrestricted))

    def _on_drained(self, in_time: bool) -> None:
        if self.drained is not None and not self.drained.done():
            self.drained.set_result(in_time)

    def _on_tls_reloaded(self) -> None:
        if self.tls_reloaded is not None and not self.tls_reloaded.done():
            self.tls_reloaded.set_result(None)

    def _on_counts(self, message: m.OpenRequestCounts) -> None:
        self.open_http, self.open_grpc = message.http, message.grpc

    def _on_pong(self) -> None:
        self.pong = True

    def _log_record(self, record: m.LogRecord) -> None:
        if _log.isEnabledFor(record.level):
            _log.handle(
                _log.makeRecord(
                    _log.name, record.level, record.path, record.line, record.text, (), None
                )
            )

    def close(self) -> None:
        """Ends all requests of the process, which has ended. A second call does nothing."""
        if not self._open:
            return
        self._open = False
        self._requests.close()
        self._exchanges.close()
        self._memory.process_exited()
        self._link.close()
        self._control.close()
        self._theirs.close()
        self._files.close()
        self._on_hello()
        self._on_drained(True)
        self._on_tls_reloaded()


_HANDLERS: dict[type, Callable[..., None]] = {
    m.Infer: lambda self, message: self._requests.start(message),
    m.RepeatedInfer: lambda self, message: self._requests.repeat(message),
    m.CancelInfer: lambda self, message: self._requests.cancel(message.number),
    m.ResponseAck: lambda self, message: self._requests.acknowledge(message.number),
    m.FinishTrace: lambda self, message: self._requests.finish_trace(message),
    BlockRelease: lambda self, message: self._memory.release_blocks(message),
    m.FindModel: lambda self, message: self._exchanges.find_model(message),
    m.AwaitModel: lambda self, message: self._exchanges.await_model(message),
    m.Authorize: lambda self, message: self._exchanges.authorize(message),
    m.CallRpc: lambda self, message: self._exchanges.call_rpc(message),
    m.OpenExchange: lambda self, message: self._exchanges.open_exchange(message),
    m.ExchangeBody: lambda self, message: self._exchanges.body_received(message),
    m.ExchangeSent: lambda self, message: self._exchanges.part_sent(message.number),
    m.Cancel: lambda self, message: self._exchanges.cancel(message.number),
    m.LogRecord: lambda self, message: self._log_record(message),
    m.Hello: lambda self, message: self._on_hello(message.unrestricted),
    m.Drained: lambda self, message: self._on_drained(message.in_time),
    m.OpenRequestCounts: lambda self, message: self._on_counts(message),
    m.TlsReloaded: lambda self, message: self._on_tls_reloaded(),
    m.Pong: lambda self, message: self._on_pong(),
}
