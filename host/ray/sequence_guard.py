"""Refuses requests of sequences that may not reach the replica of their sequence."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from host.core import Core
from host.errors import HostError, unsupported
from host.frontends.grpc.infer_request import parse_infer_request
from host.frontends.http1.asgi import Message
from host.frontends.request_headers import Header
from host.ray.deployment_options import behind_haproxy

BALANCE_VARIABLE = "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM"

_INFERENCE = re.compile(
    r"/v2/models/([^/]+)(?:/versions/[^/]+)?/(?:infer|generate|generate_stream)$"
)

_BY_HEADER = "hdr("
"""How the algorithm of HAProxy begins that keeps the requests with one header on one replica."""


class SequenceGuard:
    """Knows how requests reach this replica, one of several.

    Ray's own proxies read the sequence of unary gRPC requests, see `host.ray.sequence_router`, and
    the header `x-session-id` of HTTP requests. HAProxy reads only the header that its algorithm
    names.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._haproxy = behind_haproxy()
        algorithm = os.environ.get(BALANCE_VARIABLE, "")
        self._header = (
            algorithm[len(_BY_HEADER) : -1].lower() if algorithm.startswith(_BY_HEADER) else ""
        )  # requests have names of headers in lower case

    def check_rpc(self, message: bytes, metadata: Sequence[Header]) -> None:
        """Checks a ModelInfer request. Raises HostError UNSUPPORTED."""
        if not self._haproxy or b"sequence_id" not in message:
            return
        if self._header and any(name == self._header for name, _ in metadata):
            return
        name = parse_infer_request(message).model_name
        if self._has_sequences(name):
            raise unsupported(
                f"model '{name}' has sequences, and HAProxy sends a unary request to any replica:"
                " send a sequence in one stream (ModelStreamInfer), or set"
                f" {BALANCE_VARIABLE}='hdr(x-session-id)' for the cluster and send that metadata"
            )

    def check_http(self, scope: Message) -> None:
        """Checks an HTTP request by its path and headers. Raises HostError UNSUPPORTED."""
        found = _INFERENCE.search(scope["path"])
        if found is None or not self._has_sequences(found[1]):
            return
        wanted = self._header if self._haproxy else "x-session-id"
        if wanted and any(name.decode("latin-1") == wanted for name, _ in scope["headers"]):
            return
        raise unsupported(
            f"model '{found[1]}' has sequences, and the proxy does not see which one an HTTP"
            " request belongs to: send the header x-session-id with the same value for all requests"
            " of a sequence"
            + (f", and set {BALANCE_VARIABLE}='hdr(x-session-id)'" if self._haproxy else "")
            + "; or use gRPC"
        )

    def _has_sequences(self, name: str) -> bool:
        try:
            return bool(self._core.model_config(name, "").HasField("sequence_batching"))
        except HostError:
            return False  # the endpoint says what is wrong
