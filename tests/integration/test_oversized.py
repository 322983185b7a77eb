"""Messages that claim to be larger than any may be."""

from __future__ import annotations

import socket
import struct

import numpy as np
import psutil

from tests.clients import tensor
from tests.conftest import DEADLINE, RepositoryBuilder, Serve

DATA, HEADERS, SETTINGS = 0, 1, 4
END_HEADERS = 4


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """An HTTP/2 frame (RFC 9113 section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def literal(name: str, value: str) -> bytes:
    """A header field without indexing and without Huffman coding (RFC 7541 section 6.2.2)."""
    return b"".join((b"\0", bytes([len(name)]), name.encode(), bytes([len(value)]), value.encode()))


def test_a_message_that_claims_four_gigabytes_allocates_no_memory(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("identity")
    host = serve(repository).wait_started()
    process = psutil.Process(host.process.pid)
    before = process.memory_info().rss
    headers = b"".join(
        literal(name, value)
        for name, value in {
            ":method": "POST",
            ":scheme": "http",
            ":path": "/inference.GRPCInferenceService/ModelInfer",
            ":authority": host.url,
            "content-type": "application/grpc",
            "te": "trailers",
        }.items()
    )
    with socket.create_connection(("127.0.0.1", host.port), timeout=DEADLINE) as sock:
        sock.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            + frame(SETTINGS, 0, 0, b"")
            + frame(HEADERS, END_HEADERS, 1, headers)
            + frame(DATA, 0, 1, b"\0" + struct.pack(">I", 0xFFFFFFFF) + b"only this much")
        )
        with host.client() as client:
            client.infer("identity", [tensor("INPUT0", np.ones(2, dtype=np.float32))])
        assert process.memory_info().rss - before < 100 << 20
    assert host.stop() == 0
