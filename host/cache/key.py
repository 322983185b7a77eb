"""Computes the keys of the response cache (docs/reference/configuration_and_scheduling.md, 7.2)."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from operator import attrgetter

from host.inference.request import Buffer, InferRequest
from host.inference.shared_memory_bytes import read_bytes
from host.repository.qualified_name import qualified_name

KEY_SIZE = 16
"""Length of a key in bytes: long enough that two requests never have the same key by chance."""


def request_key(request: InferRequest, version: int, namespace: str = "") -> bytes:
    """Compute the key of a validated request to a version of its model.

    The key depends on the model, its version, the name, data type, shape and bytes of every input,
    and the names of the requested outputs. It does not depend on the order of inputs and outputs,
    nor on anything else, such as the request id, parameters or the priority.
    """
    digest = blake2b(digest_size=KEY_SIZE)
    for part in _parts(request, version, namespace):
        # The length comes first, so different parts never give the same bytes when joined.
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
    """The key as a decimal number, for the log."""
    return str(int.from_bytes(key, "little"))
