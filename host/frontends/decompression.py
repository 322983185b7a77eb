"""Decompresses request data in steps, so that its memory is reserved before it is used up."""

from __future__ import annotations

import asyncio
import zlib

from host.frontends.receive_budget import ReservedBytes

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
    try:
        return await _decompress(data, wbits, max_size, reserved, in_thread)
    except BaseException:  # also after a cancellation
        reserved.release()
        raise


async def _decompress(
    data: bytes, wbits: int, max_size: int, reserved: ReservedBytes, in_thread: bool
) -> tuple[bytes, bool]:
    engine = zlib.decompressobj(wbits)
    packed_size = reserved.size
    parts: list[bytes] = []
    size = 0
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
    whole = await asyncio.to_thread(b"".join, parts)
    return whole, engine.eof
