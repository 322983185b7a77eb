"""The handshake of a connection between replicas: both ends prove that they know its secret.

The server has given the secret to its clients through Ray; it is never sent here. The client sends
a nonce. The server answers with its own nonce and a proof, and then the client sends its proof. A
proof is the HMAC (RFC 2104) with SHA-256 of both nonces and the side. Until then, neither end reads
anything else.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets

SECRET_BYTES = 32
NONCE_BYTES = 32
PROOF_BYTES = 32
ANSWER_BYTES = NONCE_BYTES + PROOF_BYTES


def answer_client(secret: bytes, nonce: bytes) -> bytes:
    """The answer of a server to the nonce of a client."""
    own = secrets.token_bytes(NONCE_BYTES)
    return own + _prove(secret, b"server", nonce, own)


def answer_server(secret: bytes, nonce: bytes, answer: bytes) -> bytes:
    """The proof of a client. Raises PermissionError if the server does not know the secret."""
    theirs, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(proof, _prove(secret, b"server", nonce, theirs)):
        raise PermissionError("the server does not know the secret of the replica")
    return _prove(secret, b"client", nonce, theirs)


async def greet_server(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes
) -> None:
    """The client's end. Raises OSError, also if the server does not know the secret or leaves."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    writer.write(nonce)
    try:
        answer = await reader.readexactly(ANSWER_BYTES)
    except asyncio.IncompleteReadError:
        raise ConnectionAbortedError("the server has ended the handshake") from None
    writer.write(answer_server(secret, nonce, answer))


async def accept_client(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes
) -> bool:
    """The server's end; whether the client knows the secret.

    Raises IncompleteReadError and OSError if it leaves.
    """
    nonce = await reader.readexactly(NONCE_BYTES)
    answer = answer_client(secret, nonce)
    writer.write(answer)
    proof = await reader.readexactly(PROOF_BYTES)
    expected = _prove(secret, b"client", nonce, answer[:NONCE_BYTES])
    return hmac.compare_digest(proof, expected)


def _prove(secret: bytes, side: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(secret, side + b"".join(nonces), "sha256")
