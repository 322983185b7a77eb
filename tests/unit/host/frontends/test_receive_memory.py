"""The memory of requests that are being received: its budget, and the buffers that join pieces."""

from __future__ import annotations

import asyncio
import gc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from host.frontends import receive_memory
from host.frontends.compression import decompress_in_steps
from host.frontends.grpc.h2.grpc_messages import PREFIX, MessageReader, RpcError, StatusCode
from host.frontends.receive_memory import (
    SMALL_BYTES,
    FilledMessage,
    OutOfReceiveMemory,
    ReceiveBudget,
    ReceiveBuffer,
    ReservedBytes,
)

MIB = 1 << 20


def test_bytes_count_until_their_object_is_deleted() -> None:
    budget = ReceiveBudget(100)
    first, second = ReservedBytes(budget, 40), ReservedBytes(budget)
    second.add(30)
    assert budget.reserved_bytes == 70
    second.subtract(10)
    assert (second.size, budget.reserved_bytes) == (20, 60)
    del first
    assert budget.reserved_bytes == 20
    second.release()
    second.release()
    assert budget.reserved_bytes == 0


def test_an_error_names_sizes_flag_and_advice() -> None:
    budget = ReceiveBudget(10 * MIB)
    other, own = ReservedBytes(budget, 6 * MIB), ReservedBytes(budget, 3 * MIB)
    with pytest.raises(OutOfReceiveMemory) as caught:
        own.add(MIB + 1, 5 * MIB)
    assert caught.value.message == (
        f"Not enough memory to receive the request: it needs {5 * MIB} bytes, and other requests"
        f" hold {6 * MIB} of {10 * MIB} bytes. Send it again later, or raise"
        " --receive-buffer-byte-size"
    )
    assert own.size == 3 * MIB
    assert budget.reserved_bytes == 9 * MIB
    with pytest.raises(OutOfReceiveMemory, match="Send less, or raise --receive-buffer-byte-size"):
        own.check_room(10 * MIB + 1)
    own.check_room(4 * MIB)
    other.release()
    own.check_room(10 * MIB)


def test_small_requests_may_use_an_eighth_more() -> None:
    budget = ReceiveBudget(16 * SMALL_BYTES)
    large = ReservedBytes(budget, 16 * SMALL_BYTES)
    small = [ReservedBytes(budget, SMALL_BYTES) for _ in range(2)]
    with pytest.raises(OutOfReceiveMemory):
        ReservedBytes(budget, 1)
    with pytest.raises(OutOfReceiveMemory):
        small[0].add(1)
    large.release()
    assert budget.reserved_bytes == 2 * SMALL_BYTES


@given(
    st.lists(st.binary(min_size=1, max_size=20_000), min_size=1),
    st.booleans(),
    st.integers(1, 100_000),
)
def test_a_buffer_counts_what_it_has_received(
    parts: list[bytes], announced: bool, min_filled: int
) -> None:
    budget = ReceiveBudget()
    size = sum(map(len, parts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(receive_memory, "_MIN_FILLED_BYTES", min_filled)
        buffer = ReceiveBuffer(budget, size if announced else None)
        for part in parts:
            buffer.append(part)
            assert buffer.size <= budget.reserved_bytes <= size
        assert buffer.finish() == b"".join(parts)
    reserved = buffer.reserved
    del buffer
    assert budget.reserved_bytes == reserved.size == size
    del reserved
    assert budget.reserved_bytes == 0


def test_a_large_message_reserves_all_when_a_quarter_has_come() -> None:
    budget = ReceiveBudget(50 * MIB)
    buffer = ReceiveBuffer(budget, 40 * MIB)
    assert budget.reserved_bytes == 0
    for _ in range(9):
        buffer.append(bytes(MIB))
    assert budget.reserved_bytes == 9 * MIB
    buffer.append(bytes(MIB))
    assert budget.reserved_bytes == 40 * MIB
    with pytest.raises(OutOfReceiveMemory):
        ReceiveBuffer(budget, 11 * MIB)
    buffer.discard()
    assert budget.reserved_bytes == 0


def test_a_body_of_unknown_size_needs_room_for_a_copy() -> None:
    budget = ReceiveBudget(40 * MIB)
    buffer = ReceiveBuffer(budget, None)
    for _ in range(21):
        buffer.append(bytes(MIB))
    with pytest.raises(OutOfReceiveMemory):
        buffer.finish()
    buffer.discard()
    assert budget.reserved_bytes == 0


def test_a_message_in_one_piece_is_not_counted() -> None:
    budget = ReceiveBudget(0)
    reader = MessageReader(MIB, budget)
    framed = PREFIX.pack(0, 1000) + bytes(1000)
    reader.feed(framed)
    reader.feed(framed + framed)
    assert [reserved for _, _, reserved in reader.messages] == [None] * 3


@given(st.integers(1, 3 * MIB), st.lists(st.integers(1, MIB), min_size=1, max_size=5))
def test_a_reader_releases_what_it_discards(size: int, cuts: list[int]) -> None:
    budget = ReceiveBudget()
    reader = MessageReader(1 << 30, budget)
    data = (PREFIX.pack(0, size) + bytes(size)) * 2
    position = 0
    for cut in cuts:
        reader.feed(data[position : position + cut])
        position += cut
        assert budget.reserved_bytes <= position
    reader.discard()
    assert budget.reserved_bytes == 0


def test_a_message_without_room_is_refused_when_it_is_announced() -> None:
    budget = ReceiveBudget(MIB)
    reader = MessageReader(1 << 30, budget)
    with pytest.raises(RpcError) as caught:
        reader.feed(PREFIX.pack(0, MIB + 1) + b"a")
    assert caught.value.code == StatusCode.RESOURCE_EXHAUSTED
    assert "it needs 1048577 bytes, and other requests hold 0 of 1048576" in str(caught.value)


def run_decompression(packed: bytes, most: int, reserved: ReservedBytes) -> tuple[bytes, bool]:
    return asyncio.run(decompress_in_steps(packed, zlib.MAX_WBITS, most, reserved, True))


def test_decompressed_data_counts_instead_of_the_compressed_data() -> None:
    budget = ReceiveBudget(50 * MIB)
    data = bytes(20 * MIB) + b"end"
    packed = zlib.compress(data)
    reserved = ReservedBytes(budget, len(packed))
    assert run_decompression(packed, 30 * MIB, reserved) == (data, True)
    assert budget.reserved_bytes == reserved.size == len(data)


@pytest.mark.parametrize("limit", [1, 8, 15])
def test_decompression_stops_when_memory_is_short(limit: int) -> None:
    budget = ReceiveBudget(limit * MIB)
    packed = zlib.compress(bytes(16 * MIB))
    reserved = ReservedBytes(budget, len(packed))
    with pytest.raises(OutOfReceiveMemory):
        run_decompression(packed, 30 * MIB, reserved)
    assert budget.reserved_bytes == 0


def test_decompression_ends_one_byte_over_the_limit_or_before_the_end() -> None:
    budget = ReceiveBudget()
    packed = zlib.compress(bytes(20 * MIB))
    whole, complete = run_decompression(packed, 10 * MIB, ReservedBytes(budget))
    assert (len(whole), complete) == (10 * MIB + 1, False)
    whole, complete = run_decompression(packed[:-5], 30 * MIB, ReservedBytes(budget))
    assert not complete
    with pytest.raises(zlib.error):
        run_decompression(b"no zlib", 10, ReservedBytes(budget))
    assert budget.reserved_bytes == 0


def test_messages_of_many_sizes_leave_nothing_for_the_garbage_collector() -> None:
    gc.collect()
    for size in range(70_000, 70_050):
        message = FilledMessage(size)
        message.append(b"x" * size)
        assert len(message.finish()) == size
    del message
    assert gc.collect() == 0
