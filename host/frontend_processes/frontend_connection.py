"""The core's connection to one frontend process."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

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
from host.frontends.http1.asgi import App
from host.instances.arenas import Arenas
from host.instances.ring_link import RingFiles
from stub.wire.messages import BlockRelease

_log = logging.getLogger("pbhost")

_Reply = TypeVar("_Reply", m.Drained, m.TlsReloaded)


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
        self._replies: dict[type, asyncio.Future[Any]] = {}
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
        requests, exchanges = self._requests, self._exchanges
        self._handlers: dict[type, Callable[[Any], None]] = {
            m.Infer: requests.start,
            m.RepeatedInfer: requests.repeat,
            m.CancelInfer: lambda message: requests.cancel(message.number),
            m.ResponseAck: lambda message: requests.acknowledge(message.number),
            m.FinishTrace: requests.finish_trace,
            BlockRelease: self._memory.release_blocks,
            m.FindModel: exchanges.find_model,
            m.AwaitModel: exchanges.await_model,
            m.Authorize: exchanges.authorize,
            m.CallRpc: exchanges.call_rpc,
            m.OpenExchange: exchanges.open_exchange,
            m.ExchangeBody: exchanges.body_received,
            m.ExchangeSent: lambda message: exchanges.part_sent(message.number),
            m.Cancel: lambda message: exchanges.cancel(message.number),
            m.LogRecord: _log_record,
            m.Hello: self._on_hello,
            m.Drained: self._on_reply,
            m.TlsReloaded: self._on_reply,
            m.OpenRequestCounts: self._on_counts,
            m.Pong: self._on_pong,
        }

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
                    self._handlers[type(message)](message)
        except (msgspec.DecodeError, KeyError, ValueError, IndexError) as error:
            self._fail(error)
        except Exception as error:  # a defect of ours: messages of the frame are lost
            _log.exception("unexpected failure while messages of %s were handled", self._name)
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if self._open:
            self._link.close()
            self._on_fault(error)

    async def ask(
        self, question: m.ToFrontend, kind: type[_Reply], seconds: float
    ) -> _Reply | None:
        """Sends a question; returns the reply of a kind, None if the process ends before.

        Raises TimeoutError.
        """
        reply: asyncio.Future[_Reply | None] = asyncio.get_running_loop().create_future()
        self._replies[kind] = reply
        self.send(question)
        return await asyncio.wait_for(reply, seconds)

    def _on_reply(self, message: m.Drained | m.TlsReloaded) -> None:
        reply = self._replies.get(type(message))
        if reply is not None and not reply.done():
            reply.set_result(message)

    def _on_hello(self, message: m.Hello) -> None:
        if not self.hello.done():
            self.hello.set_result(None)
            if message.unrestricted:
                without = " and without ".join(message.unrestricted)
                _log.warning("%s runs without %s", self._name, without)

    def _on_counts(self, message: m.OpenRequestCounts) -> None:
        self.open_http, self.open_grpc = message.http, message.grpc

    def _on_pong(self, message: m.Pong) -> None:
        self.pong = True

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
        for waiting in (self.hello, *self._replies.values()):
            if not waiting.done():
                waiting.set_result(None)


def _log_record(record: m.LogRecord) -> None:
    if _log.isEnabledFor(record.level):
        _log.handle(
            _log.makeRecord(
                _log.name, record.level, record.path, record.line, record.text, (), None
            )
        )
