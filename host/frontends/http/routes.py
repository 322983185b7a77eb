"""The HTTP endpoints, and the parser of request paths (docs/reference/http.md, "Endpoints")."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote_to_bytes


@dataclass(frozen=True, eq=False, slots=True)
class Endpoint:
    """One kind of request: its HTTP methods, and the API category that can be restricted.

    Endpoints are compared by identity. `HttpApp` has the table of their handlers.
    """

    methods: tuple[str, ...]
    category: str
    about_models: bool = False
    """Whether requests are about the model that the route names, or about all models."""


@dataclass(frozen=True, slots=True)
class Route:
    """The meaning of a path: `resource` is the named model or region, `version` has digits only."""

    endpoint: Endpoint
    resource: str = ""
    version: str = ""


_GET, _POST, _GET_OR_POST = ("GET",), ("POST",), ("GET", "POST")

SERVER_LIVE = Endpoint(_GET, "health")
SERVER_READY = Endpoint(_GET, "health")
SERVER_METADATA = Endpoint(_GET, "metadata")
MODEL_READY = Endpoint(_GET, "health")
MODEL_METADATA = Endpoint(_GET, "metadata", True)
MODEL_CONFIG = Endpoint(_GET, "model-config", True)
STATISTICS = Endpoint(_GET, "statistics", True)
TRACE_SETTING = Endpoint(_GET_OR_POST, "trace", True)
TRAFFIC = Endpoint(_GET_OR_POST, "model-repository", True)
LOG_SETTINGS = Endpoint(_GET_OR_POST, "logging")
LOG_LINES = Endpoint(_GET, "logging", True)
STACKS = Endpoint(_GET, "logging", True)
OVERVIEW = Endpoint(_GET, "statistics", True)
CRASHES = Endpoint(_GET, "logging", True)
CRASH = Endpoint(_GET, "logging")
CRASH_REQUESTS = Endpoint(_GET, "recording")
QUARANTINE = Endpoint(_GET, "logging", True)
RECORD = Endpoint(_POST, "recording", True)
LIFT_QUARANTINE = Endpoint(_POST, "model-repository", True)
INFER = Endpoint(_POST, "inference", True)
GENERATE = Endpoint(_POST, "inference", True)
GENERATE_STREAM = Endpoint(_POST, "inference", True)
REPOSITORY_INDEX = Endpoint(_POST, "model-repository", True)
LOAD_MODEL = Endpoint(_POST, "model-repository", True)
UNLOAD_MODEL = Endpoint(_POST, "model-repository", True)
NAMED_REPOSITORY_CONTROL = Endpoint(_POST, "model-repository")
SYSTEM_STATUS = Endpoint(_GET, "shared-memory")
SYSTEM_REGISTER = Endpoint(_POST, "shared-memory")
SYSTEM_UNREGISTER = Endpoint(_POST, "shared-memory")
CUDA_STATUS = Endpoint(_GET, "shared-memory")
CUDA_REGISTER = Endpoint(_POST, "shared-memory")
CUDA_UNREGISTER = Endpoint(_POST, "shared-memory")

_SERVER_ENDPOINTS = {
    "": SERVER_METADATA,
    "/health/live": SERVER_LIVE,
    "/health/ready": SERVER_READY,
    "/models/stats": STATISTICS,
    "/trace/setting": TRACE_SETTING,
    "/logging": LOG_SETTINGS,
    "/logging/lines": LOG_LINES,
    "/crashes": CRASHES,
    "/quarantine": QUARANTINE,
    "/quarantine/lift": LIFT_QUARANTINE,
    "/overview": OVERVIEW,
    "/stacks": STACKS,
}
_MODEL_ENDPOINTS = {
    "": MODEL_METADATA,
    "ready": MODEL_READY,
    "config": MODEL_CONFIG,
    "stats": STATISTICS,
    "stacks": STACKS,
    "traffic": TRAFFIC,
    "record": RECORD,
    "infer": INFER,
    "generate": GENERATE,
    "generate_stream": GENERATE_STREAM,
}
_MODEL_CONTROL = {"load": LOAD_MODEL, "unload": UNLOAD_MODEL}
_SHARED_MEMORY = {
    "systemsharedmemory": {
        "status": SYSTEM_STATUS,
        "register": SYSTEM_REGISTER,
        "unregister": SYSTEM_UNREGISTER,
    },
    "cudasharedmemory": {
        "status": CUDA_STATUS,
        "register": CUDA_REGISTER,
        "unregister": CUDA_UNREGISTER,
    },
}


def find_route(path: bytes) -> Route | None:
    """Returns the route of a path (not decoded, without its query); None if it is unknown."""
    parts = path.decode("latin-1").split("/")
    if parts[:2] != ["", "v2"]:
        return None
    fixed = _SERVER_ENDPOINTS.get("/".join(["", *parts[2:]]) if len(parts) > 2 else "")
    if fixed is not None:
        return Route(fixed)
    match parts[2:]:
        case ["models", model, *rest] if model:
            return _model_route(_unquote(model), rest)
        case ["crashes", identifier] if identifier:
            return Route(CRASH, _unquote(identifier))
        case ["crashes", identifier, "requests"] if identifier:
            return Route(CRASH_REQUESTS, _unquote(identifier))
        case ["repository", *repository, "index"] if len(repository) < 2 and "" not in repository:
            return Route(REPOSITORY_INDEX)
        case ["repository", "models", model, ("load" | "unload") as verb] if model:
            return Route(_MODEL_CONTROL[verb], _unquote(model))
        case ["repository", repository, "models", model, "load" | "unload"] if repository and model:
            return Route(NAMED_REPOSITORY_CONTROL)
        case [memory, verb] if verb in _SHARED_MEMORY.get(memory, ()):
            return Route(_SHARED_MEMORY[memory][verb])
        case [memory, "region", region, verb] if region and verb in _SHARED_MEMORY.get(memory, ()):
            return Route(_SHARED_MEMORY[memory][verb], _unquote(region))
    return None


def _model_route(model: str, rest: list[str]) -> Route | None:
    match rest:
        case ["trace", "setting"]:
            return Route(TRACE_SETTING, model)
        case ["versions", version, *tail] if version.isascii() and version.isdigit():
            pass
        case tail:
            version = ""
    name = tail[0] if len(tail) == 1 else "" if not tail else "/"
    endpoint = _MODEL_ENDPOINTS.get(name)
    # A path that ends with "/" is not the path without it.
    return None if endpoint is None or tail == [""] else Route(endpoint, model, version)


def _unquote(name: str) -> str:
    """Decodes the percent escapes of a name.

    Text that is not a valid escape stays as it is. Invalid UTF-8 becomes replacement characters.
    """
    return unquote_to_bytes(name.encode("latin-1")).decode("utf-8", "replace")
