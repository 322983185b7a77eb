"""The shared memory endpoints (docs/reference/protocol.md, "Shared memory")."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from host.core import Core
from host.errors import invalid_argument
from host.frontends.http import json_text as json
from host.frontends.http.exchange import HttpExchange
from host.frontends.http.json_body import read_json_body
from host.frontends.http.routes import Route


class SharedMemoryHandler:
    """Has one method per endpoint. All raise HostError. `max_input_size` is in bytes."""

    def __init__(self, core: Core, max_input_size: int) -> None:
        self._core = core
        self._max_input_size = max_input_size

    async def system_status(self, exchange: HttpExchange, route: Route) -> None:
        """Answers with the status of one region or of all regions."""
        regions = self._core.regions.status(route.resource)
        await exchange.send_json(json.dump([asdict(region) for region in regions]))

    async def system_register(self, exchange: HttpExchange, route: Route) -> None:
        """Registers a shared-memory object of the client."""
        request = await self._read_request(exchange, route, "system")
        _require(request, "key")
        key = json.as_text(request["key"])
        offset = json.as_unsigned(request.get("offset", 0))
        _require(request, "byte_size")
        size = json.as_unsigned(request["byte_size"])
        self._core.regions.register(route.resource, key, offset, size)
        await exchange.send_empty()

    async def system_unregister(self, exchange: HttpExchange, route: Route) -> None:
        """Unregisters one region or all regions."""
        self._core.regions.unregister(route.resource)
        await exchange.send_empty()

    async def cuda_status(self, exchange: HttpExchange, route: Route) -> None:
        """Answers with an empty list; a named region is never found."""
        self._core.regions.cuda_status(route.resource)
        await exchange.send_json(b"[]")

    async def cuda_register(self, exchange: HttpExchange, route: Route) -> None:
        """Validates the request, then refuses it: CUDA regions are not supported."""
        request = await self._read_request(exchange, route, "cuda")
        _require(request, "raw_handle")
        json.as_text(json.member(request["raw_handle"], "b64"))
        for name in ("byte_size", "device_id"):
            json.as_unsigned(json.member(request, name))
        self._core.regions.register_cuda(route.resource)
        await exchange.send_empty()

    async def cuda_unregister(self, exchange: HttpExchange, route: Route) -> None:
        """Succeeds without an effect: there are no CUDA regions."""
        self._core.regions.require_enabled()
        await exchange.send_empty()

    async def _read_request(
        self, exchange: HttpExchange, route: Route, kind: str
    ) -> dict[str, Any]:
        self._core.regions.require_enabled()
        if not route.resource:
            raise invalid_argument(
                f"'region name' is necessary to register {kind} shared memory region"
            )
        body = await read_json_body(exchange, self._max_input_size)
        document = json.parse(body)
        return document if isinstance(document, dict) else {}


def _require(request: dict[str, Any], name: str) -> None:
    if name not in request:
        raise invalid_argument(f"Shared memory register request has no '{name}' field")
