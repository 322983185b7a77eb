"""Health, metadata, statistics and model control.

The rules are in docs/reference/protocol.md, "Health and readiness" to "Model repository" and
"Members" to "Errors".
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import asdict
from typing import Any

from host.config.json_form import to_json
from host.core import Core
from host.errors import internal, invalid_argument, unsupported
from host.frontends.http import json_text as json
from host.frontends.http.exchange import JSON, HttpExchange
from host.frontends.http.json_body import read_json_object
from host.frontends.http.routes import Route
from host.inference.metadata import ModelStatistics
from host.inference.request import Parameter
from host.release import RELEASE


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
        await self._core.load_model(route.resource, parameters)
        await exchange.send_empty()

    async def unload_model(self, exchange: HttpExchange, route: Route) -> None:
        """Starts to unload a model."""
        document = await read_json_object(exchange, self._max_input_size)
        parameters = dict(json.members(document.get("parameters", {})))
        dependents = json.as_bool(parameters.get("unload_dependents", False))
        await self._core.unload_model(route.resource, dependents)
        await exchange.send_empty()

    async def control_in_repository(self, exchange: HttpExchange, route: Route) -> None:
        """Refuses a named repository (docs/reference/protocol.md, "Model repository")."""
        raise unsupported("'repository_name' specification is not supported")


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
