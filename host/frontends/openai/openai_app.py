"""Routes the requests under /v1 to their handlers, and answers errors in OpenAI's form."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from functools import partial
from urllib.parse import unquote_to_bytes

from host.access.api_keys import ApiKeys
from host.core import Core
from host.errors import HostError
from host.frontends.http import json_text as json
from host.frontends.http.api_schemas import Operations, Schema
from host.frontends.http.http_exchange import (
    JSON,
    Handler,
    HttpExchange,
    answer_exchange,
    authorize,
    check_method,
    check_restriction,
)
from host.frontends.http.routes import Endpoint, Route
from host.frontends.http1.asgi import Header
from host.frontends.inference_core import OpenRequests
from host.frontends.openai.api_paths import openai_paths
from host.frontends.openai.bodies import BodyReader, set_request_id
from host.frontends.openai.embeddings import PATH, EmbeddingsHandler
from host.frontends.openai.fields import CHAT, COMPLETIONS
from host.frontends.openai.generation import GenerationHandler
from host.frontends.openai.media_generation import ImageHandler, SpeechHandler
from host.frontends.openai.model_directory import ModelDirectory
from host.frontends.openai.openai_errors import OpenAIError, from_host_error, unknown_model
from host.frontends.openai.response_fields import RESPONSES
from host.frontends.openai.template import PromptRenderer
from host.frontends.openai.transcriptions import TranscriptionHandler
from host.frontends.request_headers import HeaderForwarding, Restrictions

_EVERY_ORIGIN = b"*"
_PREFLIGHT_SECONDS = b"600"  # browsers ask again after this time


_CHAT_COMPLETIONS = Endpoint(("POST",), "inference")
_COMPLETIONS = Endpoint(("POST",), "inference")
_EMBEDDINGS = Endpoint(("POST",), "inference")
_RESPONSES = Endpoint(("POST",), "inference")
_TRANSCRIPTIONS = Endpoint(("POST",), "inference")
_IMAGES = Endpoint(("POST",), "inference")
_SPEECH = Endpoint(("POST",), "inference")
_LOAD_MODEL = Endpoint(("POST",), "model-repository", True)
_UNLOAD_MODEL = Endpoint(("POST",), "model-repository", True)
_MODELS = Endpoint(("GET",), "metadata")
_MODEL = Endpoint(("GET",), "metadata")
_HEALTH = Endpoint(("GET",), "health")
_UNKNOWN = Endpoint((), "")

_PREFIX = b"/v1/"
_FIXED = {
    b"/v1/chat/completions": Route(_CHAT_COMPLETIONS),
    b"/v1/completions": Route(_COMPLETIONS),
    PATH: Route(_EMBEDDINGS),
    b"/v1/responses": Route(_RESPONSES),
    b"/v1/audio/transcriptions": Route(_TRANSCRIPTIONS),
    b"/v1/images/generations": Route(_IMAGES),
    b"/v1/audio/speech": Route(_SPEECH),
    b"/v1/models": Route(_MODELS),
    b"/health": Route(_HEALTH),
    b"/health/ready": Route(_HEALTH),
}
_MODEL_PREFIX = b"/v1/models/"
_ACTIONS = {b"load": _LOAD_MODEL, b"unload": _UNLOAD_MODEL}
_UNKNOWN_ROUTE = Route(_UNKNOWN)


def find_openai_route(path: bytes) -> Route | None:
    """Returns the route of a path (not decoded, without its query).

    The endpoint of other paths under `/v1/` is `_UNKNOWN`; for all other paths, None is returned.
    """
    route = _FIXED.get(path)
    if route is not None:
        return route
    if not path.startswith(_PREFIX):
        return None
    name = path[len(_MODEL_PREFIX) :] if path.startswith(_MODEL_PREFIX) else b""
    if not name:
        return _UNKNOWN_ROUTE
    endpoint = _MODEL
    owner, _, action = name.rpartition(b"/")
    if owner and action in _ACTIONS:
        name, endpoint = owner, _ACTIONS[action]
    return Route(endpoint, unquote_to_bytes(name).decode("utf-8", "replace"))


class CrossOrigin:
    """Adds the headers for web pages of allowed origins; `*` allows every origin."""

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(origin.encode() for origin in origins)

    def add_headers(self, exchange: HttpExchange) -> None:
        """Adds the headers to the response that will be sent."""
        if not self._origins:
            return
        exchange.response_headers += ((b"vary", b"Origin"),)
        if self._allows(exchange):
            exchange.response_headers += (
                (b"access-control-allow-origin", exchange.headers[b"origin"]),
                (b"access-control-expose-headers", b"x-request-id, retry-after, x-should-retry"),
            )

    def is_preflight(self, exchange: HttpExchange) -> bool:
        """Returns whether a browser asks if a page of an allowed origin may send a request."""
        asks = b"access-control-request-method" in exchange.headers
        return exchange.method == "OPTIONS" and asks and self._allows(exchange)

    def preflight_headers(
        self, exchange: HttpExchange, methods: Iterable[str]
    ) -> tuple[Header, ...]:
        """Returns the headers of the answer to a preflight request."""
        asked = exchange.headers.get(b"access-control-request-headers", b"")
        headers = (
            (b"access-control-allow-methods", ", ".join(methods).encode()),
            (b"access-control-max-age", _PREFLIGHT_SECONDS),
        )
        return (*headers, (b"access-control-allow-headers", asked)) if asked else headers

    def _allows(self, exchange: HttpExchange) -> bool:
        origin = exchange.headers.get(b"origin")
        return origin is not None and (origin in self._origins or _EVERY_ORIGIN in self._origins)


class OpenAIApp:
    """Serves the OpenAI routes of one core. Call it in the thread of the event loop only.

    `max_input_size` is `--http-max-input-size`. `open_requests` counts inference requests.
    `keys`: what clients must send; None lets every client in. `cors_origins`: the origins of web
    pages that may read the answers.
    """

    def __init__(
        self,
        core: Core,
        max_input_size: int,
        restrictions: Restrictions,
        forwarding: HeaderForwarding,
        open_requests: OpenRequests,
        keys: ApiKeys | None,
        cors_origins: Iterable[str],
    ) -> None:
        self._keys = keys
        self._core = core
        self._restrictions = restrictions
        self._open_requests = open_requests
        self._models = ModelDirectory(core)
        bodies = BodyReader(max_input_size)
        prompts = PromptRenderer(core, max_input_size, self._models.refresh)
        parts = core, self._models, bodies, forwarding
        generation = GenerationHandler(*parts, prompts)
        origins = tuple(cors_origins)
        restricted = _EMBEDDINGS.category in restrictions
        checked = keys is not None or bool(origins) or restricted
        embeddings = EmbeddingsHandler(*parts, checked, open_requests)
        self._handlers: dict[Endpoint, Handler] = {
            _CHAT_COMPLETIONS: partial(generation.answer, CHAT),
            _COMPLETIONS: partial(generation.answer, COMPLETIONS),
            _RESPONSES: partial(generation.answer, RESPONSES),
            _EMBEDDINGS: embeddings.answer,
            _TRANSCRIPTIONS: TranscriptionHandler(*parts).answer,
            _IMAGES: ImageHandler(*parts).answer,
            _SPEECH: SpeechHandler(*parts).answer,
            _LOAD_MODEL: self._load_model,
            _UNLOAD_MODEL: self._unload_model,
            _MODELS: self._list_models,
            _MODEL: self._describe_model,
            _HEALTH: self._health,
        }
        self._cross_origin = CrossOrigin(origins)
        self.fast_path = embeddings.find_handler
        """Finds the handler of a request without a task (`host.frontends.http1.parser`)."""

    async def handle(self, exchange: HttpExchange, route: Route) -> None:
        """Answers one request."""
        if route.endpoint is not _HEALTH:
            self._cross_origin.add_headers(exchange)
        await answer_exchange(exchange, self._dispatch(exchange, route), _send_error, "OpenAI")

    def describe_paths(self, operations: Operations) -> dict[str, Schema]:
        """Returns the OpenAPI paths of the routes that models speak now."""
        names: dict[str, list[str]] = {}
        for name in self._models.list_names():
            for route in self._models.find_any(name).contract.routes:
                names.setdefault(route, []).append(name)
        return openai_paths(names, operations)

    async def _dispatch(self, exchange: HttpExchange, route: Route) -> None:
        endpoint = route.endpoint
        is_v1 = endpoint not in (_HEALTH, _UNKNOWN)
        if is_v1 and self._cross_origin.is_preflight(exchange):  # which carries no key
            headers = self._cross_origin.preflight_headers(exchange, endpoint.methods)
            await exchange.send_response(JSON, (), headers)
            return
        if self._keys is not None and endpoint is not _HEALTH:
            authorize(exchange, route, self._keys)
        if endpoint is _UNKNOWN:
            raise OpenAIError("this server has no such URL", "unknown_url", None, 404)
        check_restriction(exchange, endpoint, self._restrictions)
        check_method(exchange, endpoint.methods)
        if endpoint is not _HEALTH:
            self._core.refuse_while_loading()
        if endpoint.category != "inference":
            await self._handlers[endpoint](exchange, route)
            return
        with self._open_requests, exchange.count_request():
            await self._handlers[endpoint](exchange, route)

    async def _load_model(self, exchange: HttpExchange, route: Route) -> None:
        await self._core.control.load_model(route.resource, {})
        await exchange.send_json(json.dump(self._models.describe(route.resource)))

    async def _unload_model(self, exchange: HttpExchange, route: Route) -> None:
        await self._core.control.unload_model(route.resource, False)
        await exchange.send_json(json.dump({"status": "success", "model": route.resource}))

    async def _health(self, exchange: HttpExchange, route: Route) -> None:
        status = 200 if await self._core.health.ready() else 503
        await exchange.send_response(JSON, (), (), status)

    async def _describe_model(self, exchange: HttpExchange, route: Route) -> None:
        contract = self._models.find_any(route.resource).contract
        if not contract.routes:
            raise unknown_model(route.resource)
        if exchange.client is not None:
            exchange.client.check_model(contract.model)
        await exchange.send_json(json.dump(self._models.describe(route.resource)))

    async def _list_models(self, exchange: HttpExchange, route: Route) -> None:
        client = exchange.client
        data = [
            self._models.describe(name)
            for name in self._models.list_names()
            if client is None or client.may_ask_model(self._models.find_any(name).contract.model)
        ]
        await exchange.send_json(json.dump({"object": "list", "data": data}))


async def _send_error(exchange: HttpExchange, error: HostError) -> None:
    if all(name != b"x-request-id" for name, _ in exchange.response_headers):
        set_request_id(exchange, f"req_{uuid.uuid4().hex}")
    found = from_host_error(error)
    await exchange.send_response(JSON, (found.body(),), found.headers, found.status)
