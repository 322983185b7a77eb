"""The endpoints that send contents of requests (docs/reference/protocol.md, "Records of crashes"
and "Recordings").
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing

import msgspec

from host.core import Core
from host.errors import invalid_argument, unsupported
from host.frontends.http.exchange import HttpExchange
from host.frontends.http.json_body import read_json_body
from host.frontends.http.routes import Route
from host.inference.request import Buffer
from host.recording.recorder import RecordingSettings

_KIND = b"application/x-pbhost-recording"
_MAX_BODY_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 20


class RecordingHandler:
    """Sends recordings while they are made, and the tensors of crashes.

    `allowed`: whether the server may send what other clients sent.
    """

    def __init__(self, core: Core, allowed: bool) -> None:
        self._core = core
        self._allowed = allowed

    async def record(self, exchange: HttpExchange, route: Route) -> None:
        """Records requests to a model, and streams them; a disconnect of the client ends that.

        Raises HostError.
        """
        settings = _parse_settings(await read_json_body(exchange, _MAX_BODY_BYTES))
        if not self._allowed:
            raise unsupported("this server does not record; start it with --allow-recording=true")
        with self._core.record(route.resource, route.version, settings) as recording:
            await exchange.start_response(_KIND)
            async with aclosing(recording.lines()) as lines:
                async for parts in lines:
                    await _send(exchange, parts)
            await exchange.send_chunk(b"", more=False)

    async def crash_requests(self, exchange: HttpExchange, route: Route) -> None:
        """Answers with the requests that ran when a stub died, and their tensors as text.

        Raises HostError.
        """
        records = self._core.crash_records
        if exchange.client is not None:
            exchange.client.check_model(records.find(route.resource).model)
        if not self._allowed:
            raise unsupported(
                "this server does not send the tensors of requests; start it with"
                " --allow-recording=true"
            )
        found = await records.read_requests(route.resource)
        await exchange.send_json(msgspec.json.encode({"requests": found}))


def _parse_settings(body: bytes) -> RecordingSettings:
    """Raises HostError INVALID_ARG."""
    try:
        return msgspec.json.decode(body or b"{}", type=RecordingSettings)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid_argument(f"invalid settings of a recording: {error}") from error


async def _send(exchange: HttpExchange, parts: Sequence[Buffer]) -> None:
    """Sends a line and its tensors: small ones together, and large ones in pieces."""
    joined: list[Buffer] = []
    size = 0
    for part in parts:
        for begin in range(0, len(part), _CHUNK_BYTES):
            piece = part[begin : begin + _CHUNK_BYTES]
            joined.append(piece)
            size += len(piece)
            if size >= _CHUNK_BYTES:
                await exchange.send_chunk(b"".join(joined))
                joined, size = [], 0
    if joined:
        await exchange.send_chunk(b"".join(joined))
