"""Large tensors of a request that are written to shared memory as they are received."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from host.frontends.grpc.cached_responses import is_repeatable
from host.frontends.grpc.codec import parse_infer_request, to_request
from host.frontends.grpc.h2.messages import PREFIX, MessageReader
from host.frontends.grpc.placed_message import MIN_PLACED_BYTES, PlacedMessage
from host.frontends.grpc.request_cache import RequestCache
from host.frontends.receive_budget import ReceiveBudget
from host.inference.request import InferRequest
from host.instances.regions import Regions
from stub.wire.arena import Arena, Block, create_arena_file

LIMIT = 1 << 24
LARGE = MIN_PLACED_BYTES + 4


@pytest.fixture
def arena() -> Iterator[Arena]:
    descriptor = create_arena_file("pbhost-test", LIMIT)
    arena = Arena(3, descriptor, LIMIT)
    yield arena
    arena.close()
    os.close(descriptor)


def content(size: int) -> bytes:
    return bytes(np.arange(size, dtype=np.uint8))


def request(*sizes: int, request_id: str = "") -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="model", id=request_id)
    for index, size in enumerate(sizes):
        message.inputs.add(name=f"INPUT{index}", datatype="UINT8", shape=[size])
        message.raw_input_contents.append(content(size))
    return message


def receive(data: bytes, arena: Arena, piece: int, flag: int = 0) -> bytes:
    """What a reader makes of a message that comes in pieces of so many bytes."""

    def reserve(size: int) -> tuple[Block, memoryview]:
        views: list[memoryview] = []
        return arena.write_with(size, views.append), views[0]

    reader = MessageReader(LIMIT, ReceiveBudget(LIMIT), reserve)
    framed = memoryview(PREFIX.pack(flag, len(data)) + data)
    for start in range(0, len(framed), piece):
        reader.feed(framed[start : start + piece])
    ((_, message, _),) = reader.messages
    return message


def assert_equal(found: InferRequest, expected: InferRequest) -> None:
    assert [bytes(one.data) for one in found.inputs] == [bytes(one.data) for one in expected.inputs]
    for one in (*found.inputs, *expected.inputs):
        one.data, one.owner = b"", None
    assert found == expected


@pytest.mark.parametrize("piece", [997, 16384, 50_000])
@pytest.mark.parametrize("sizes", [(LARGE,), (LARGE, 3, 2 * LARGE), (3, LARGE), (LARGE, 0)])
def test_large_tensors_are_blocks(arena: Arena, sizes: tuple[int, ...], piece: int) -> None:
    data = request(*sizes, request_id="one").SerializeToString()
    message = receive(data, arena, piece)
    assert isinstance(message, PlacedMessage) and message.whole() == data
    found = to_request(parse_infer_request(message), Regions(None))
    for tensor in found.inputs:
        assert (len(tensor.data) > MIN_PLACED_BYTES) == isinstance(tensor.owner, Block)
        if isinstance(tensor.owner, Block):
            assert tensor.owner.arena == 3 and tensor.owner.offset % 4096 == 0
    assert_equal(found, to_request(parse_infer_request(data), Regions(None)))


def test_each_byte_may_come_alone(arena: Arena) -> None:
    data = request(LARGE, LARGE).SerializeToString()
    message = receive(data, arena, 1)
    assert isinstance(message, PlacedMessage) and message.whole() == data


@pytest.mark.parametrize(
    "change",
    [
        lambda data: request(*[60_000] * 2).SerializeToString(),
        lambda data: b"\x80\x01" + data,  # a tag of two bytes
        lambda data: data[: data.find(content(8)) - 3] + b"\xff\xff\x7f" + content(LARGE),
    ],
    ids=["small", "tag", "length"],
)
def test_other_messages_are_kept(arena: Arena, change: Callable[[bytes], bytes]) -> None:
    data = change(request(LARGE).SerializeToString())
    message = receive(data, arena, 1000)
    assert type(message) is bytes and message == data
    assert not arena.used


def test_an_unknown_field_is_read_by_protobuf(arena: Arena) -> None:
    data = request(LARGE).SerializeToString() + b"\x7a\x01x"  # field 15
    message = receive(data, arena, 1000)
    assert isinstance(message, PlacedMessage)
    found = to_request(parse_infer_request(message), Regions(None))
    assert_equal(found, to_request(parse_infer_request(data), Regions(None)))


def test_many_fields_are_checked_in_the_whole_message(arena: Arena) -> None:
    data = request(LARGE, *[0] * 2000).SerializeToString()
    message = receive(data, arena, 1000)
    assert type(message) is bytes and message == data


def test_a_compressed_message_is_kept(arena: Arena) -> None:
    data = request(LARGE).SerializeToString()
    assert type(receive(data, arena, 1000, flag=1)) is bytes


@pytest.mark.parametrize("sizes", [(LARGE,), (LARGE, 8)])
def test_repeated_requests_are_recognised(arena: Arena, sizes: tuple[int, ...]) -> None:
    cache = RequestCache()
    for name in ("one", "two", "three"):
        data = request(*sizes, request_id=name).SerializeToString()
        placed = receive(data, arena, 16384)
        known = cache.lookup(placed)
        parsed = parse_infer_request(placed)
        found = to_request(parsed, Regions(None))
        if known is None:
            cache.remember(placed, parsed, found)
            assert name != "three"
            continue
        assert name == "three"
        assert (known[0].validation_key is not None) == (len(sizes) == 1)
        known[0].validation_key = None
        assert isinstance(known[0].inputs[0].owner, Block)
        assert_equal(known[0], found)
    assert cache.lookup(receive(request(LARGE + 1).SerializeToString(), arena, 16384)) is None
    received_whole = cache.lookup(request(*sizes, request_id="four").SerializeToString())
    assert received_whole is not None and received_whole[0].inputs[0].owner is None


def test_a_request_is_not_known_by_its_bytes_alone(arena: Arena) -> None:
    message = receive(request(LARGE).SerializeToString(), arena, 16384)
    assert len(message) < 100 and not is_repeatable(message)
    assert is_repeatable(bytes(message))
