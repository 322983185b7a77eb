"""The requests that frontend processes pass on, in the core: gRPC methods, and HTTP requests."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from host.access.api_keys import ApiKeys
from host.access.clients import Admission
from host.core import Core
from host.errors import HostError
from host.frontend_processes.frontend_messages import (
    Authorize,
    AwaitModel,
    CallRpc,
    EndExchange,
    ExchangeBody,
    FindModel,
    OpenExchange,
    ReceiveBody,
    Reply,
    SendBody,
    SendHead,
    ToFrontend,
    encode_error,
)
from host.frontends.grpc.methods import Metadata, Services, UnaryMethod, to_host_error
from host.frontends.http1.asgi import RAW_HEADER_NAMES, App, Message
from host.inference.request import InferRequest

_log = logging.getLogger("pbhost")


class ServedExchanges:
    """Answers what one frontend process passes on.

    `services`: the gRPC methods that the core answers. `app`: the ASGI application that answers
    HTTP requests. `api_keys`: the keys that clients need. `admissions`: the requests of clients
    whose models are loaded now, by the number of their `AwaitModel`.
    """

    def __init__(
        self,
        core: Core,
        services: Services,
        app: App,
        api_keys: ApiKeys | None,
        admissions: dict[int, Admission],
        send: Callable[[ToFrontend], None],
    ) -> None:
        self._core = core
        self._api_keys = api_keys
        self._admissions = admissions
        self._methods = {
            (service, method.name): method
            for service, methods in services.items()
            for method in methods
            if isinstance(method, UnaryMethod)
        }
        self._app = app
        self._send = send
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._exchanges: dict[int, _Exchange] = {}

    def find_model(self, message: FindModel) -> None:
        """Replies with the configuration of a model."""
        version = "" if message.version == -1 else str(message.version)
        try:
            config = self._core.model_config(message.model, version)
            reply = Reply(message.number, config.SerializeToString())
        except HostError as error:
            reply = Reply(message.number, b"", encode_error(error))
        self._send(reply)

    def authorize(self, message: Authorize) -> None:
        """Replies whether a client may send inference requests to a model."""
        reply = Reply(message.number, b"")
        try:
            if self._api_keys is not None:
                client = self._api_keys.authorize("inference", message.authorization)
                if message.model:
                    client.check_model(message.model)
        except HostError as error:
            reply.error = encode_error(error)
        self._send(reply)

    def await_model(self, message: AwaitModel) -> None:
        """Replies when a model is loaded."""
        request = InferRequest(
            message.model,
            [],
            message.version,
            priority=message.priority,
            timeout_us=message.timeout_us,
        )
        version = "" if message.version == -1 else str(message.version)

        async def wait() -> bytes:
            admission = self._admit(message)
            try:
                await self._core.start_when_loaded(
                    request, lambda: self._core.model_config(message.model, version)
                )
            except BaseException:  # also if the client has gone
                if admission is not None:
                    admission.withdraw()
                raise
            if admission is not None:
                self._admissions[message.number] = admission
            return b""

        self._run(message.number, self._reply(message.number, wait()))

    def _admit(self, message: AwaitModel) -> Admission | None:
        """Counts the request that waits, if clients need keys. Raises HostError."""
        if self._api_keys is None:
            return None
        client = self._api_keys.authorize("inference", message.authorization)
        client.check_model(message.model)
        return client.admit()

    def call_rpc(self, message: CallRpc) -> None:
        """Replies with what a gRPC method answers. Raises KeyError for an unknown method."""
        method = self._methods[message.service, message.method]
        key = message.authorization
        context = Metadata([] if key is None else [("authorization", key)])

        async def call() -> bytes:
            return await method.handler(message.data, context)

        self._run(message.number, self._reply(message.number, call()))

    async def _reply(self, number: int, working: Coroutine[None, None, bytes]) -> None:
        try:
            reply = Reply(number, await working)
        except Exception as error:  # a defect is logged, and the client gets an error
            reply = Reply(number, b"", encode_error(to_host_error(error)))
        self._send(reply)

    def open_exchange(self, message: OpenExchange) -> None:
        """Starts to answer an HTTP request. Raises ValueError for a number that is in use."""
        if message.number in self._exchanges:
            raise ValueError(f"exchange {message.number} is open already")
        exchange = self._exchanges[message.number] = _Exchange(message.number, self._send)
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "method": message.method,
            "raw_path": message.raw_path,
            "query_string": message.query,
            "headers": message.headers,
            "extensions": {} if message.names is None else {RAW_HEADER_NAMES: message.names},
        }
        task = self._run(message.number, self._answer(exchange, scope))
        # Not in `_answer`: a task that is cancelled before it runs never enters it.
        task.add_done_callback(lambda _: self._end_exchange(message.number))

    def _end_exchange(self, number: int) -> None:
        self._exchanges.pop(number, None)
        self._send(EndExchange(number))

    async def _answer(self, exchange: _Exchange, scope: Message) -> None:
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except Exception:  # a defect of ours: the frontend closes the connection
            _log.exception("unexpected failure of an HTTP request of a frontend process")

    def body_received(self, message: ExchangeBody) -> None:
        """Takes a part of a body."""
        exchange = self._exchanges.get(message.number)
        if exchange is not None:
            exchange.body_received(message)

    def part_sent(self, number: int) -> None:
        """Lets an application send the next part."""
        exchange = self._exchanges.get(number)
        if exchange is not None:
            exchange.part_sent()

    def cancel(self, number: int) -> None:
        """Cancels what runs for the process under a number, and withdraws what it has admitted."""
        if (admission := self._admissions.pop(number, None)) is not None:
            admission.withdraw()
        task = self._tasks.get(number)
        if task is not None:
            task.cancel()

    def _run(self, number: int, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = self._tasks[number] = asyncio.ensure_future(work)
        task.add_done_callback(lambda _: self._tasks.pop(number, None))
        return task

    def close(self) -> None:
        """Cancels everything: the process has ended."""
        for exchange in self._exchanges.values():
            exchange.disconnected = True
        while self._admissions:
            self._admissions.popitem()[1].withdraw()
        for task in list(self._tasks.values()):
            task.cancel()


class _Exchange:
    """One HTTP request: the application waits here for the frontend process."""

    def __init__(self, number: int, send: Callable[[ToFrontend], None]) -> None:
        self.number = number
        self.disconnected = False  # the frontend process has ended
        self._send = send
        self._body: asyncio.Future[ExchangeBody] | None = None
        self._sent: deque[asyncio.Future[None]] = deque()  # parts that wait, the oldest first

    async def receive(self) -> Message:
        """Receives the next part of the body."""
        if self.disconnected:
            return {"type": "http.disconnect"}
        self._body = asyncio.get_running_loop().create_future()
        self._send(ReceiveBody(self.number))
        part = await self._body
        if part.disconnected:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": part.body, "more_body": part.more}

    async def send(self, message: Message) -> None:
        """Sends a part of the response, and waits until the connection takes more."""
        if self.disconnected:
            return
        sent = asyncio.get_running_loop().create_future()
        self._sent.append(sent)
        if message["type"] == "http.response.start":
            headers = [(bytes(name), bytes(value)) for name, value in message["headers"]]
            self._send(SendHead(self.number, message["status"], headers))
        else:
            body = bytes(message.get("body", b""))
            self._send(SendBody(self.number, body, message.get("more_body", False)))
        await sent

    def body_received(self, part: ExchangeBody) -> None:
        """Called with the next part of the body."""
        if self._body is not None and not self._body.done():
            self._body.set_result(part)

    def part_sent(self) -> None:
        """Called when the connection takes more."""
        if self._sent and not (sent := self._sent.popleft()).done():
            sent.set_result(None)
