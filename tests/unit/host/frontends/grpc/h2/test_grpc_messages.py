"""gRPC messages and statuses: framing inside of a stream's data, compression, header blocks."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from host.frontends import receive_memory
from host.frontends.grpc.h2.grpc_messages import PREFIX, MessageReader, RpcError
from host.frontends.receive_memory import ReceiveBudget

MIB = 1 << 20


def framed(*parts: bytes) -> bytes:
    return b"".join(PREFIX.pack(0, len(part)) + part for part in parts)


def read(data: bytes, cuts: list[int]) -> list[bytes]:
    """The messages in data that arrives in pieces."""
    reader = MessageReader(1 << 30, ReceiveBudget())
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    for start, stop in zip(places, places[1:], strict=False):
        reader.feed(data[start:stop])
    assert reader.at_message_boundary
    return [message for _, message, _ in reader.messages]


@given(
    st.lists(st.binary(max_size=300), min_size=1, max_size=4),
    st.lists(st.integers(0, 2000), max_size=30),
    st.integers(0, 200),
)
def test_messages_do_not_depend_on_the_pieces(
    parts: list[bytes], cuts: list[int], limit: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(receive_memory, "_MIN_FILLED_BYTES", limit)
        assert read(framed(*parts), cuts) == parts


@pytest.mark.parametrize("size", [16 * MIB - 1, 16 * MIB, 40 * MIB + 3])
def test_a_large_message_is_whole(size: int) -> None:
    message = bytes(range(256)) * (size // 256) + bytes(size % 256)
    (found,) = read(framed(message), list(range(0, size, 100_000)))
    assert type(found) is bytes
    assert found == message
    assert hash(found) == hash(message)


def test_memory_is_taken_for_what_has_arrived_and_not_for_what_is_announced() -> None:
    reader = MessageReader(1 << 31, ReceiveBudget())
    tracemalloc.start()
    try:
        reader.feed(PREFIX.pack(0, 1 << 30))
        for _ in range(64):
            reader.feed(bytes(MIB // 4))
        assert tracemalloc.get_traced_memory()[0] < 20 * MIB
    finally:
        tracemalloc.stop()


def test_a_message_without_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(size: int) -> None:
        raise MemoryError

    monkeypatch.setattr(receive_memory, "FilledMessage", no_memory)
    reader = MessageReader(1 << 31, ReceiveBudget())
    with pytest.raises(RpcError, match="no memory for a message of 16777216 bytes"):
        reader.feed(PREFIX.pack(0, 16 * MIB) + bytes(8 * MIB))
