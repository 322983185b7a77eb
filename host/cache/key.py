"""What makes two requests the same for the response cache (configuration spec 7.2)."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from operator import attrgetter

from host.inference.request import Buffer, InferRequest
from host.inference.shared_memory_bytes import read_bytes
from host.repository.qualified_name import qualified_name

KEY_SIZE = 16
"""Bytes of a key: so many that no two requests ever share one by accident."""


def request_key(request: InferRequest, version: int, namespace: str = "") -> bytes:
    """The key of a checked request to that version of its model.

    Over the model, its version, every input's name, data type, shape and bytes, and the names of
    the requested outputs, in whatever order they came. Nothing else has a say: not the id, the
    parameters, or the priority.
    """
    digest = blake2b(digest_size=KEY_SIZE)
    for part in _parts(request, version, namespace):
        # With its length before it, no part can pass for the end of another one.
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _parts(request: InferRequest, version: int, namespace: str) -> Iterator[Buffer]:
    yield qualified_name(namespace, request.model_name).encode()
    yield str(version).encode()
    inputs = sorted(request.inputs, key=attrgetter("name"))
    yield str(len(inputs)).encode()
    for tensor in inputs:
        yield tensor.name.encode()
        yield tensor.datatype.encode()
        yield str(tensor.shape).encode()
        data = read_bytes(tensor.data)
        yield data if isinstance(data, bytes) else data.cast("B")
    for name in sorted(request.requested_outputs):
        yield name.encode()


def format_key(key: bytes) -> str:
    """The key as the log shows it: a decimal number."""
    return str(int.from_bytes(key, "little"))
