"""Passes requests on to the core, in a frontend process: all but inference."""

from __future__ import annotations

import asyncio
from functools import partial

from host.frontend_processes.core_link import CoreLink
from host.frontend_processes.frontend_messages import (
    CallRpc,
    Cancel,
    EndExchange,
    ExchangeBody,
    ExchangeSent,
    OpenExchange,
    ReceiveBody,
    SendBody,
    SendHead,
)
from host.frontends.grpc.grpc_admin import ADMIN_METHODS
from host.frontends.grpc.methods import RpcContext, Services, UnaryMethod
from host.frontends.http1.cycle import RAW_HEADER_NAMES, Message, Receive, Send

ExchangeMessage = ReceiveBody | SendHead | SendBody | EndExchange


class Forwarder:
    """Passes gRPC calls and HTTP requests on to the core. Belongs to the event loop."""

    def __init__(self, link: CoreLink) -> None:
        self._link = link
        self._exchanges: dict[int, asyncio.Queue[ExchangeMessage]] = {}

    def services(self) -> Services:
        """The gRPC methods that the core answers."""
        return {
            service: [
                UnaryMethod(name, partial(self._call_rpc, service, name), category)
                for name, category in methods.items()
            ]
            for service, methods in ADMIN_METHODS.items()
        }

    async def _call_rpc(self, service: str, method: str, data: bytes, context: RpcContext) -> bytes:
        number = next(self._link.numbers)
        authorization = context.metadata("authorization")
        return await self._link.ask(CallRpc(number, service, method, data, authorization), number)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Lets the core answer one HTTP request; an ASGI 3 application."""
        number = next(self._link.numbers)
        commands = self._exchanges[number] = asyncio.Queue[ExchangeMessage]()
        ended = False
        try:
            self._link.send(
                OpenExchange(
                    number,
                    scope["method"],
                    scope["raw_path"],
                    scope.get("query_string", b""),
                    scope["headers"],
                    scope.get("extensions", {}).get(RAW_HEADER_NAMES),
                )
            )
            try:
                while not ended:
                    ended = await self._obey(await commands.get(), receive, send)
            except asyncio.CancelledError:
                # The client has gone, or this process stops; the core may still send an error.
                self._link.send(Cancel(number))
                while not ended:
                    ended = await self._obey(await commands.get(), receive, send)
        finally:
            del self._exchanges[number]
            if not ended:  # this process has failed
                self._link.send(Cancel(number))
                while not commands.empty():
                    self._decline(commands.get_nowait())

    async def _obey(self, command: ExchangeMessage, receive: Receive, send: Send) -> bool:
        """Does what the application in the core asks for; returns whether that was the last."""
        number = command.number
        if isinstance(command, EndExchange):
            return True
        if isinstance(command, ReceiveBody):
            part = await receive()
            gone = part["type"] != "http.request"
            body, more = part.get("body", b""), part.get("more_body", False)
            self._link.send(ExchangeBody(number, body, more, gone))
            return False
        try:
            if isinstance(command, SendHead):
                headers = command.headers
                await send(
                    {"type": "http.response.start", "status": command.status, "headers": headers}
                )
            else:
                await send(
                    {"type": "http.response.body", "body": command.body, "more_body": command.more}
                )
        finally:  # the core waits for as many as it has sent
            self._link.send(ExchangeSent(number))
        return False

    def handle(self, message: ExchangeMessage) -> None:
        """Takes a message about an HTTP request; that may have ended."""
        commands = self._exchanges.get(message.number)
        if commands is not None:
            commands.put_nowait(message)
        else:
            self._decline(message)

    def _decline(self, command: ExchangeMessage) -> None:
        """Answers the application in the core as if the client had gone, so that it ends."""
        if isinstance(command, ReceiveBody):
            self._link.send(ExchangeBody(command.number, b"", False, True))
        elif not isinstance(command, EndExchange):
            self._link.send(ExchangeSent(command.number))
