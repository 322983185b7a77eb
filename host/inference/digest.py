"""Computes digests of requests: equal for requests that ask the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from operator import attrgetter

from host.inference.request import Buffer, InferRequest
from host.inference.shared_memory_bytes import read_bytes

DIGEST_SIZE = 16
"""Length of a digest in bytes: long enough that two requests never share one by chance."""


def digest_request(request: InferRequest, context: Sequence[bytes] = ()) -> bytes:
    """Computes a digest of the inputs and of the names of the requested outputs.

    It depends on the name, data type, shape and bytes of every input, not on their order, and on
    each part of `context`. Raises HostError INTERNAL if memory of a client is gone.
    """
    digest = blake2b(digest_size=DIGEST_SIZE)
    for part in _parts(request, context):
        # The length comes first, so different parts never give the same bytes when joined.
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _parts(request: InferRequest, context: Sequence[bytes]) -> Iterator[Buffer]:
    yield from context
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
