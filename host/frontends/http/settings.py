"""The endpoints of trace, log and traffic settings (docs/reference/protocol.md, "Trace settings",
"Log settings").
"""

from __future__ import annotations

from typing import Any

import msgspec

from host.core import Core
from host.errors import invalid_argument
from host.frontends.http import json_text as json
from host.frontends.http.exchange import HttpExchange
from host.frontends.http.json_body import read_json_body
from host.frontends.http.routes import Route
from host.logs.settings import HTTP
from host.tracing.settings import NUMBERS, SettingChanges, to_change
from host.traffic.splits import TrafficChange


class SettingsHandler:
    """Has one method per endpoint: GET returns the settings, POST changes and returns them.

    All methods raise HostError. `max_input_size` is `--http-max-input-size`.
    """

    def __init__(self, core: Core, max_input_size: int) -> None:
        self._core = core
        self._max_input_size = max_input_size

    async def trace_setting(self, exchange: HttpExchange, route: Route) -> None:
        """Answers with the trace settings of one model, or with the global ones."""
        # Reports an unknown model before an invalid body.
        shown = self._core.trace_settings(route.resource)
        if exchange.method == "POST":
            change = trace_change(await self._read_json_object(exchange))
            shown = self._core.trace_settings(route.resource, change)
        await exchange.send_json(json.dump(shown))

    async def log_settings(self, exchange: HttpExchange, route: Route) -> None:
        """Answers with the log settings."""
        log = self._core.log
        if exchange.method == "POST":
            document = await self._read_json_object(exchange)
            log.update({k: v for k, v in document.items() if v is not None}, HTTP)
        await exchange.send_json(json.dump(log.describe()))

    async def traffic(self, exchange: HttpExchange, route: Route) -> None:
        """Answers with how the requests to a model are split, after a change if there is one."""
        self._core.refuse_while_loading()
        if route.version:
            raise invalid_argument("the requests to a model are split, not those to a version")
        if exchange.method == "POST":
            body = await read_json_body(exchange, self._max_input_size)
            try:
                change = msgspec.json.decode(body, type=TrafficChange)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise invalid_argument(
                    'expected {"canary": {"version": N, "percent": N}, "shadow": null}, with one'
                    f" of the two or both: {error}"
                ) from None
            self._core.change_traffic(route.resource, change)
        await exchange.send_json(msgspec.json.encode(self._core.traffic.describe(route.resource)))

    async def _read_json_object(self, exchange: HttpExchange) -> dict[str, Any]:
        """Reads the body as a JSON object; the first of equal names counts.

        `null` means an empty object: clients without settings send it.
        """
        body = await read_json_body(exchange, self._max_input_size)
        document: dict[str, Any] = {}
        given = json.parse(body)
        for name, value in json.members({} if given is None else given):
            document.setdefault(name, value)
        return document


def trace_change(document: dict[str, Any]) -> SettingChanges:
    """Converts a JSON object to a change of trace settings. Raises HostError."""
    levels: list[str] | None = None
    if "trace_level" in document:
        given = document["trace_level"]
        if given is None:
            levels = []  # null clears the setting; an empty array leaves it unchanged
        elif names := [json.as_text(level) for level in json.as_array(given)]:
            levels = names
    numbers = {
        name: None if document[name] is None else json.as_text(document[name])
        for name in NUMBERS
        if name in document
    }
    return to_change(levels, numbers, file="trace_file" in document, space="")
