"""The endpoints of health, metadata, statistics, model control, settings and shared memory.

The rules are in docs/reference/http.md, "Health and readiness" to "Model repository", and
docs/reference/metrics.md, "Members" to "Errors".
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import asdict
from typing import Any

import msgspec

from host.config.json_form import to_json
from host.core import Core
from host.errors import internal, invalid_argument, unsupported
from host.frontends.http import json_text as json
from host.frontends.http.http_exchange import JSON, HttpExchange, read_json_body, read_json_object
from host.frontends.http.routes import Route
from host.inference.metadata import ModelStatistics
from host.inference.request import Parameter
from host.logs.log_settings import HTTP
from host.models.traffic_splits import TrafficChange
from host.release import RELEASE
from host.tracing.trace_settings import NUMBERS, SettingChanges, to_change


class AdminHandler:
    """Has one method per endpoint. All raise HostError. `max_input_size` is in bytes."""

    def __init__(self, core: Core, max_input_size: int) -> None:
        self._core = core
        self._max_input_size = max_input_size
        metadata = {**asdict(core.server_metadata()), "pbhost_version": RELEASE}
        self._metadata = json.dump(metadata)

    async def live(self, exchange: HttpExchange, route: Route) -> None:
        """Answers with status 200 if the server is live, otherwise 400; the body is empty."""
        await _send_health(exchange, self._core.health.live())

    async def ready(self, exchange: HttpExchange, route: Route) -> None:
        """Answers with status 200 if the server is ready, otherwise 400; the body is empty."""
        await _send_health(exchange, await self._core.health.ready())

    async def model_ready(self, exchange: HttpExchange, route: Route) -> None:
        """Answers with an empty body if the model is ready, otherwise with an error."""
        if not await self._core.health.model_ready(route.resource, route.version):
            self._core.model_config(route.resource, route.version)  # raises if the model is unknown
            raise invalid_argument("Model version not ready")
        await exchange.send_empty()

    async def server_metadata(self, exchange: HttpExchange, route: Route) -> None:
        """Answers with name, versions and extensions of the server."""
        await exchange.send_json(self._metadata)

    async def model_metadata(self, exchange: HttpExchange, route: Route) -> None:
        """Answers with versions, inputs and outputs of a model."""
        await self._core.refresh_remote(route.resource)
        metadata = self._core.model_metadata(route.resource, route.version)
        await exchange.send_json(json.dump(asdict(metadata)))

    async def model_config(self, exchange: HttpExchange, route: Route) -> None:
        """Answers with the complete configuration of a model."""
        await self._core.refresh_remote(route.resource)
        config = self._core.model_config(route.resource, route.version)
        await exchange.send_json(to_json(config).encode())

    async def statistics(self, exchange: HttpExchange, route: Route) -> None:
        """Answers with the inference statistics of one model or of all models."""
        found = await self._core.collect_statistics(route.resource, route.version)
        await exchange.send_json(
            json.dump({"model_stats": [_statistics_json(entry) for entry in found]})
        )

    async def repository_index(self, exchange: HttpExchange, route: Route) -> None:
        """Answers with the models in the repositories."""
        ready = (await read_json_object(exchange, self._max_input_size)).get("ready", False)
        if type(ready) is not bool:
            raise invalid_argument("Invalid value for 'ready': expected a boolean")
        entries = await self._core.repository_index(ready)
        lines = [{k: v for k, v in asdict(entry).items() if v} for entry in entries]
        await exchange.send_json(json.dump(lines))

    async def load_model(self, exchange: HttpExchange, route: Route) -> None:
        """Loads or reloads a model; the client can send a configuration and files."""
        document = await read_json_object(exchange, self._max_input_size)
        parameters: dict[str, Parameter | bytes] = {}
        for key, value in json.members(document.get("parameters", {})):
            text = json.as_text(value)
            if key == "config":
                parameters.setdefault(key, text)
            elif key.startswith("file:"):
                parameters.setdefault(json.as_text(key), _decode_file(key, text))
            else:
                raise internal("unexpected error on creating Triton parameter")
        await self._core.control.load_model(route.resource, parameters)
        await exchange.send_empty()

    async def unload_model(self, exchange: HttpExchange, route: Route) -> None:
        """Starts to unload a model."""
        document = await read_json_object(exchange, self._max_input_size)
        parameters = dict(json.members(document.get("parameters", {})))
        dependents = json.as_bool(parameters.get("unload_dependents", False))
        await self._core.control.unload_model(route.resource, dependents)
        await exchange.send_empty()

    async def control_in_repository(self, exchange: HttpExchange, route: Route) -> None:
        """Refuses a named repository (docs/reference/http.md, "Model repository")."""
        raise unsupported("'repository_name' specification is not supported")

    async def trace_setting(self, exchange: HttpExchange, route: Route) -> None:
        """Answers with the trace settings of one model, or with the global ones."""
        # Reports an unknown model before an invalid body.
        shown = self._core.trace_settings(route.resource)
        if exchange.method == "POST":
            change = trace_change(await self._read_settings(exchange))
            shown = self._core.trace_settings(route.resource, change)
        await exchange.send_json(json.dump(shown))

    async def log_settings(self, exchange: HttpExchange, route: Route) -> None:
        """Answers with the log settings."""
        log = self._core.log
        if exchange.method == "POST":
            document = await self._read_settings(exchange)
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
            self._core.control.change_traffic(route.resource, change)
        await exchange.send_json(msgspec.json.encode(self._core.traffic.describe(route.resource)))

    async def system_status(self, exchange: HttpExchange, route: Route) -> None:
        """Answers with the status of one region or of all regions."""
        regions = self._core.regions.status(route.resource)
        await exchange.send_json(json.dump([asdict(region) for region in regions]))

    async def system_register(self, exchange: HttpExchange, route: Route) -> None:
        """Registers a shared-memory object of the client."""
        request = await self._read_region(exchange, route, "system")
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
        request = await self._read_region(exchange, route, "cuda")
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

    async def _read_region(self, exchange: HttpExchange, route: Route, kind: str) -> dict[str, Any]:
        self._core.regions.require_enabled()
        if not route.resource:
            raise invalid_argument(
                f"'region name' is necessary to register {kind} shared memory region"
            )
        document = await self._read_json(exchange)
        return document if isinstance(document, dict) else {}

    async def _read_settings(self, exchange: HttpExchange) -> dict[str, Any]:
        """Reads the body as a JSON object; `null`, which some clients send, is an empty one."""
        given = await self._read_json(exchange)
        document: dict[str, Any] = {} if given is None else given
        json.members(document)  # raises unless it is an object
        return document

    async def _read_json(self, exchange: HttpExchange) -> Any:
        return json.parse(await read_json_body(exchange, self._max_input_size))


async def _send_health(exchange: HttpExchange, good: bool) -> None:
    await exchange.send_response(JSON, (), status=200 if good else 400)


def _decode_file(key: str, text: str) -> bytes:
    try:
        return base64.b64decode(text)
    except (binascii.Error, ValueError) as error:
        raise invalid_argument(
            f"load parameter '{key}' must be the base64 form of the file's content: {error}"
        ) from None


def _statistics_json(entry: ModelStatistics) -> dict[str, Any]:
    """Returns the statistics of one version with all members, in the order of Triton."""
    known = asdict(entry)
    batches = known.pop("batch_stats")
    responses = known.pop("response_stats", {})
    memory = known.pop("memory_usage", [])
    return {
        **known,
        "response_stats": responses,
        "batch_stats": batches,
        "memory_usage": memory,
    }


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


def _require(request: dict[str, Any], name: str) -> None:
    if name not in request:
        raise invalid_argument(f"Shared memory register request has no '{name}' field")
