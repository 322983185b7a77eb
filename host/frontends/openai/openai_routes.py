"""The OpenAI routes, and the parser of their paths."""

from __future__ import annotations

from urllib.parse import unquote_to_bytes

from host.frontends.http.routes import Endpoint, Route

CHAT_COMPLETIONS = Endpoint(("POST",), "inference")
COMPLETIONS = Endpoint(("POST",), "inference")
EMBEDDINGS = Endpoint(("POST",), "inference")
RESPONSES = Endpoint(("POST",), "inference")
TRANSCRIPTIONS = Endpoint(("POST",), "inference")
IMAGES = Endpoint(("POST",), "inference")
SPEECH = Endpoint(("POST",), "inference")
LOAD_MODEL = Endpoint(("POST",), "model-repository")
UNLOAD_MODEL = Endpoint(("POST",), "model-repository")
MODELS = Endpoint(("GET",), "metadata")
MODEL = Endpoint(("GET",), "metadata")
HEALTH = Endpoint(("GET",), "health")
UNKNOWN = Endpoint((), "")

_PREFIX = b"/v1/"
_FIXED = {
    b"/v1/chat/completions": Route(CHAT_COMPLETIONS),
    b"/v1/completions": Route(COMPLETIONS),
    b"/v1/embeddings": Route(EMBEDDINGS),
    b"/v1/responses": Route(RESPONSES),
    b"/v1/audio/transcriptions": Route(TRANSCRIPTIONS),
    b"/v1/images/generations": Route(IMAGES),
    b"/v1/audio/speech": Route(SPEECH),
    b"/v1/models": Route(MODELS),
    b"/health": Route(HEALTH),
    b"/health/ready": Route(HEALTH),
}
_MODEL_PREFIX = b"/v1/models/"
_ACTIONS = {b"load": LOAD_MODEL, b"unload": UNLOAD_MODEL}
_UNKNOWN = Route(UNKNOWN)


def find_openai_route(path: bytes) -> Route | None:
    """Returns the route of a path (not decoded, without its query).

    The endpoint of other paths under `/v1/` is UNKNOWN; for all other paths, None is returned.
    """
    route = _FIXED.get(path)
    if route is not None:
        return route
    if not path.startswith(_PREFIX):
        return None
    name = path[len(_MODEL_PREFIX) :] if path.startswith(_MODEL_PREFIX) else b""
    if not name:
        return _UNKNOWN
    endpoint = MODEL
    owner, _, action = name.rpartition(b"/")
    if owner and action in _ACTIONS:
        name, endpoint = owner, _ACTIONS[action]
    return Route(endpoint, unquote_to_bytes(name).decode("utf-8", "replace"))
