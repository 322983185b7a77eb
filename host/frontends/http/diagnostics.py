"""The endpoints that show what a server does and did, and those that record requests.

The rules are in docs/reference/metrics.md, "Overview" and "Records of crashes" to "Lines of the
log".
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from urllib.parse import parse_qsl

import msgspec

from host.core import Core
from host.crashes.records import summarize
from host.errors import invalid_argument, unsupported
from host.frontends.http.http_exchange import HttpExchange, read_json_body, read_json_object
from host.frontends.http.routes import Route
from host.inference.request import Buffer
from host.recording.recorder import RecordingSettings

_KIND = b"application/x-pbhost-recording"
_MAX_BODY_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 20


class DiagnosticsHandler:
    """Has one method per endpoint. All raise HostError. `max_input_size` is in bytes.

    `allow_recording`: whether the server may send what other clients sent.
    """

    def __init__(self, core: Core, max_input_size: int, allow_recording: bool) -> None:
        self._core = core
        self._max_input_size = max_input_size
        self._allow_recording = allow_recording

    async def stacks(self, exchange: HttpExchange, route: Route) -> None:
        """Answers with what the instances of one model, or of all models, do now."""
        found = await self._core.describe_activity(route.resource)
        wanted = [one for one in found if route.version in ("", str(one.version))]
        await exchange.send_json(msgspec.json.encode({"instances": wanted}))

    async def overview(self, exchange: HttpExchange, route: Route) -> None:
        """Answers with what the models and their instances do, in numbers."""
        await exchange.send_json(msgspec.json.encode(self._core.overview()))

    async def log_lines(self, exchange: HttpExchange, route: Route) -> None:
        """Answers with the lines of the log that the client does not have yet."""
        after = _read_line_number(exchange.query())
        await exchange.send_json(msgspec.json.encode(self._core.log.lines_after(after)))

    async def crashes(self, exchange: HttpExchange, route: Route) -> None:
        """Answers with a line for each record of a crash, the newest first."""
        summaries = [summarize(record) for record in self._core.crash_records.newest()]
        await exchange.send_json(msgspec.json.encode({"crashes": summaries}))

    async def crash(self, exchange: HttpExchange, route: Route) -> None:
        """Answers with one record of a crash."""
        record = self._core.crash_records.find(route.resource)
        if exchange.client is not None:
            exchange.client.check_model(record.model)
        await exchange.send_json(msgspec.json.encode(record))

    async def quarantine(self, exchange: HttpExchange, route: Route) -> None:
        """Answers with the requests that are refused because they ended processes."""
        found = self._core.list_quarantined()
        await exchange.send_json(msgspec.json.encode({"requests": found}))

    async def lift_quarantine(self, exchange: HttpExchange, route: Route) -> None:
        """Accepts the requests in quarantine again, of one model or of all."""
        model = (await read_json_object(exchange, self._max_input_size)).get("model", "")
        if not isinstance(model, str):
            raise invalid_argument("Invalid value for 'model': expected a string")
        lifted = self._core.lift_quarantine(model)
        await exchange.send_json(msgspec.json.encode({"lifted": lifted}))

    async def record(self, exchange: HttpExchange, route: Route) -> None:
        """Records requests to a model, and streams them; a disconnect of the client ends that.

        Raises HostError.
        """
        settings = _parse_settings(await read_json_body(exchange, _MAX_BODY_BYTES))
        if not self._allow_recording:
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
        if not self._allow_recording:
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


def _read_line_number(query: str) -> int:
    """Returns the number of a query `after=NUMBER`, 0 without one. Raises HostError."""
    text = dict(parse_qsl(query, keep_blank_values=True)).get("after", "0")
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise invalid_argument(f"'after' must be the number of a line of the log, got '{text}'")
    return int(text)
