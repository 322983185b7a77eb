"""Computes the keys of the response cache (docs/reference/configuration-and-scheduling.md,
"Response cache").
"""

from __future__ import annotations

from host.inference.digest import digest_request
from host.inference.request import InferRequest
from host.repository.qualified_name import qualified_name


def request_key(request: InferRequest, version: int, namespace: str = "") -> bytes:
    """Computes the key of a validated request to a version of its model, `DIGEST_SIZE` bytes.

    The key depends on the model, its version, the name, data type, shape and bytes of every input,
    and the names of the requested outputs. It does not depend on the order of inputs and outputs,
    nor on anything else, such as the request id, parameters or the priority.
    """
    model = qualified_name(namespace, request.model_name)
    return digest_request(request, (model.encode(), str(version).encode()))


def format_key(key: bytes) -> str:
    """The key as a decimal number, for the log."""
    return str(int.from_bytes(key, "little"))
