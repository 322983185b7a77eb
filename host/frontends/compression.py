"""Compresses bodies, and decompresses them in steps, so that their memory is reserved first.

The encodings are gzip, and deflate, which is a zlib stream.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence

from host.errors import HostError, invalid_argument
from host.frontends.receive_memory import ReservedBytes
from host.inference.request import Buffer

_STEP_BYTES = 8 << 20  # bytes of decompressed data


async def decompress_in_steps(
    data: bytes, wbits: int, max_size: int, reserved: ReservedBytes, in_thread: bool
) -> tuple[bytes, bool]:
    """Returns the decompressed data, and whether it is complete.

    The first byte over `max_size` is the last one to be decompressed. The memory of `data` is
    released from `reserved`, that of the result is added; after an error, all is released.

    Args:
        data: Compressed data.
        wbits: The format, as `zlib.decompressobj` takes it.
        max_size: The limit in bytes.
        reserved: The memory of the request.
        in_thread: Whether to run in a thread, because it may take long.

    Raises:
        zlib.error: The data is damaged.
        OutOfReceiveMemory: There is no memory for the result.
    """
    engine = zlib.decompressobj(wbits)
    packed_size = reserved.size
    parts: list[bytes] = []
    size = 0
    try:
        while True:
            step = min(_STEP_BYTES, max_size + 1 - size)
            if in_thread:
                part = await asyncio.to_thread(engine.decompress, data, step)
            else:
                part = engine.decompress(data, step)
            reserved.add(len(part))
            parts.append(part)
            size += len(part)
            data = engine.unconsumed_tail
            if engine.eof or size > max_size or len(part) < step:
                break
        reserved.subtract(packed_size)
        if len(parts) == 1:
            return parts[0], engine.eof
        return await asyncio.to_thread(b"".join, parts), engine.eof
    except BaseException:  # also after a cancellation
        reserved.release()
        raise


_MIN_THREAD_BYTES = 65536  # bytes; smaller bodies are compressed in the event loop
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS  # zlib detects the format
_COMPRESSION_OVERHEAD = 65536  # overhead that compression may add to incompressible data

SUPPORTED_ENCODINGS = ("gzip", "deflate")


def max_compressed_size(max_size: int) -> int:
    """Returns the largest size of a compressed body that has at most `max_size` bytes of data."""
    return max_size + max_size // 100 + _COMPRESSION_OVERHEAD


def decompressed_too_large(max_size: int) -> HostError:
    """Returns the error for a body with more than `max_size` bytes of decompressed data."""
    return invalid_argument(
        f"Decompressed data size exceeds the maximum allowed value of {max_size} bytes. Use"
        " --http-max-input-size to increase the limit."
    )


async def decompress(body: bytes, max_size: int, reserved: ReservedBytes) -> bytes:
    """Decompresses a gzip or deflate body, whose memory is counted in `reserved`.

    Raises HostError INVALID_ARG if the data exceeds `max_size` bytes, or is in neither format, and
    OutOfReceiveMemory if the server has no memory for it.
    """
    if not body:
        raise invalid_argument("nothing to be decompressed")
    # The time depends on the decompressed size, which is not known yet.
    in_thread = len(body) >= 1024
    try:
        data, complete = await decompress_in_steps(
            body, _GZIP_OR_ZLIB, max_size, reserved, in_thread
        )
    except zlib.error as error:
        raise invalid_argument(f"the request body cannot be decompressed: {error}") from None
    if len(data) > max_size:
        raise decompressed_too_large(max_size)
    if not complete:
        raise invalid_argument("the request body cannot be decompressed: its end is missing")
    return data


def choose_encoding(accepted: bytes) -> str:
    """Returns the encoding with the highest weight in `Accept-Encoding`, "" for none.

    The first of equal weights counts. Unknown encodings and invalid weights are ignored.
    """
    best, weight = "", 0.0
    for item in accepted.decode("latin-1").split(","):
        name, _, options = item.partition(";")
        name = name.strip()
        if name not in ("identity", *SUPPORTED_ENCODINGS):
            continue
        own = _parse_weight(options)
        if own is not None and own > weight:
            best, weight = name, own
    return "" if best == "identity" else best


def _parse_weight(options: str) -> float | None:
    key, equals, value = options.strip().partition("=")
    if not options.strip():
        return 1.0
    if key.strip() != "q" or not equals:
        return None
    try:
        return float(value)
    except ValueError:
        return None


async def compress(parts: Sequence[Buffer], encoding: str) -> bytes:
    """Compresses the parts of a body into one body."""
    if sum(len(part) for part in parts) < _MIN_THREAD_BYTES:
        return compress_parts(parts, encoding)
    return await asyncio.to_thread(compress_parts, parts, encoding)


def compress_parts(parts: Sequence[Buffer], encoding: str) -> bytes:
    """As `compress`. Blocks."""
    bits = zlib.MAX_WBITS + (16 if encoding == "gzip" else 0)
    stream = zlib.compressobj(wbits=bits)
    return b"".join([*(stream.compress(part) for part in parts), stream.flush()])
