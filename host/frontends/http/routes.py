"""From the path of a request to what it is about (protocol spec 1.2)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

_CACHE_SIZE = 4096  # paths
_MAX_CACHED_BYTES = 256  # bytes of a path


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A kind of request: the methods it has, and the category that may be restricted."""

    name: str
    methods: tuple[str, ...]
    category: str


@dataclass(frozen=True, slots=True)
class Route:
    """What a path means. `resource` is the model or region that it names, `version` has digits."""

    endpoint: Endpoint
    resource: str = ""
    version: str = ""


_GET, _POST, _BOTH = ("GET",), ("POST",), ("GET", "POST")

_SERVER_ENDPOINTS = {
    "": Endpoint("server_metadata", _GET, "metadata"),
    "/health/live": Endpoint("live", _GET, "health"),
    "/health/ready": Endpoint("ready", _GET, "health"),
    "/models/stats": Endpoint("statistics", _GET, "statistics"),
    "/trace/setting": Endpoint("trace_setting", _BOTH, "trace"),
    "/logging": Endpoint("log_settings", _BOTH, "logging"),
}
_MODEL_ENDPOINTS = {
    "": Endpoint("model_metadata", _GET, "metadata"),
    "ready": Endpoint("model_ready", _GET, "health"),
    "config": Endpoint("model_config", _GET, "model-config"),
    "stats": Endpoint("statistics", _GET, "statistics"),
    "infer": Endpoint("infer", _POST, "inference"),
    "generate": Endpoint("generate", _POST, "inference"),
    "generate_stream": Endpoint("generate_stream", _POST, "inference"),
}
_REPOSITORY_INDEX = Endpoint("repository_index", _POST, "model-repository")
_MODEL_CONTROL = {
    "load": Endpoint("load_model", _POST, "model-repository"),
    "unload": Endpoint("unload_model", _POST, "model-repository"),
}
_NAMED_REPOSITORY_CONTROL = Endpoint("control_in_repository", _POST, "model-repository")
_SHARED_MEMORY = {
    f"{kind}sharedmemory": {
        verb: Endpoint(f"{kind}_{verb}", methods, "shared-memory")
        for verb, methods in (("status", _GET), ("register", _POST), ("unregister", _POST))
    }
    for kind in ("system", "cuda")
}


def find_route(path: bytes) -> Route | None:
    """What a path (not decoded, without its query) means; None if it means nothing."""
    return _cached_parse_path(path) if len(path) <= _MAX_CACHED_BYTES else _parse_path(path)


def _parse_path(path: bytes) -> Route | None:
    parts = path.decode("latin-1").split("/")
    if parts[:2] != ["", "v2"]:
        return None
    fixed = _SERVER_ENDPOINTS.get("/".join(["", *parts[2:]]) if len(parts) > 2 else "")
    if fixed is not None:
        return Route(fixed)
    match parts[2:]:
        case ["models", model, *rest] if model:
            return _model_route(_unquote(model), rest)
        case ["repository", *repository, "index"] if len(repository) < 2 and "" not in repository:
            return Route(_REPOSITORY_INDEX)
        case ["repository", "models", model, ("load" | "unload") as verb] if model:
            return Route(_MODEL_CONTROL[verb], _unquote(model))
        case ["repository", repository, "models", model, "load" | "unload"] if repository and model:
            return Route(_NAMED_REPOSITORY_CONTROL)
        case [memory, verb] if verb in _SHARED_MEMORY.get(memory, ()):
            return Route(_SHARED_MEMORY[memory][verb])
        case [memory, "region", region, verb] if region and verb in _SHARED_MEMORY.get(memory, ()):
            return Route(_SHARED_MEMORY[memory][verb], _unquote(region))
    return None


_cached_parse_path = functools.lru_cache(_CACHE_SIZE)(_parse_path)


def _model_route(model: str, rest: list[str]) -> Route | None:
    match rest:
        case ["trace", "setting"]:
            return Route(_SERVER_ENDPOINTS["/trace/setting"], model)
        case ["versions", version, *tail] if version.isascii() and version.isdigit():
            pass
        case tail:
            version = ""
    name = tail[0] if len(tail) == 1 else "" if not tail else "/"
    endpoint = _MODEL_ENDPOINTS.get(name)
    # An empty last part is not the same as none.
    return None if endpoint is None or tail == [""] else Route(endpoint, model, version)


def _unquote(name: str) -> str:
    """A name as clients mean it: they escape what may not stand in a path.

    What is no escape stands for itself, and bytes that are no UTF-8 become replacement characters.
    """
    return unquote_to_bytes(name.encode("latin-1")).decode("utf-8", "replace")
