"""Large tensors of a request that are written to shared memory as they are received."""

from __future__ import annotations

import asyncio
import gc
import os
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from host.errors import HostError
from host.frontends.grpc.cached_responses import is_repeatable
from host.frontends.grpc.grpc_admin import admin_services
from host.frontends.grpc.h2.grpc_messages import PREFIX, MessageReader
from host.frontends.grpc.infer_request import (
    Shapes,
    parse_infer_request,
    read_placed_request,
    read_usual_request,
    to_request,
)
from host.frontends.grpc.methods import Metadata
from host.frontends.grpc.protobuf_wire import MAX_FIELDS, PlacedMessage
from host.frontends.grpc.service import GrpcService
from host.frontends.receive_memory import MIN_PLACED_BYTES, ReceiveBudget
from host.inference.request import InferRequest
from host.instances.regions import Regions
from host.lane import state
from stub.wire.arena import Arena, Block, create_arena_file
from tests.unit.host.frontends.grpc.echo_core import EchoCore, echo

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


def reserve(arena: Arena, size: int) -> tuple[Block, memoryview]:
    views: list[memoryview] = []
    return arena.write_with(size, views.append), views[0]


def receive(data: bytes, arena: Arena, piece: int, flag: int = 0) -> bytes:
    """What a reader makes of a message that arrives in pieces of `piece` bytes."""
    reader = MessageReader(1 << 30, ReceiveBudget(reserve_block=partial(reserve, arena)), True)
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


def test_a_message_of_many_fields_is_kept_from_there_on(arena: Arena) -> None:
    """Reading the head of each field takes a microsecond, and a message has room for millions."""
    data = request(LARGE, *[0] * 3000, LARGE).SerializeToString()
    assert type(receive(data, arena, 16384)) is bytes, "the tensors come after 3002 inputs"
    first = request(LARGE)
    first.ClearField("inputs")
    message = receive(first.SerializeToString() + data, arena, 16384)
    assert isinstance(message, PlacedMessage) and len(message.blocks) == 1
    assert message.whole() == first.SerializeToString() + data


@pytest.mark.parametrize("inputs", [2, MAX_FIELDS, MAX_FIELDS + 1])
def test_the_fields_around_placed_tensors_are_counted(arena: Arena, inputs: int) -> None:
    """As long as all others are short, a large tensor is not joined with them."""
    message = pb.ModelInferRequest(model_name="model", raw_input_contents=[content(LARGE), b"x"])
    message.raw_input_contents.append(content(60_000))
    for index in range(inputs):
        message.inputs.add(name=str(index), datatype="UINT8", shape=[LARGE])
    encoded = message.SerializeToString()
    inputs_first = encoded.index(b"\x2a")
    raw_first = encoded.index(content(LARGE)) - 4  # its tag and its length
    data = encoded[:inputs_first] + encoded[raw_first:] + encoded[inputs_first:raw_first]
    placed = receive(data, arena, 16384)
    assert isinstance(placed, PlacedMessage) and len(placed) == len(data) - LARGE
    if inputs > MAX_FIELDS:
        with pytest.raises(HostError, match=f"expected at most {MAX_FIELDS} 'inputs' fields"):
            parse_infer_request(placed)
        return
    raw = parse_infer_request(placed).raw
    assert isinstance(raw[0], Block) and bytes(raw[0].data) == content(LARGE)
    assert raw[1:] == [b"x", content(60_000)]


def test_a_message_is_collected_without_a_second_copy(arena: Arena) -> None:
    data = request(*[60_000] * 300).SerializeToString()
    tracemalloc.start()
    try:
        message = receive(data, arena, 16384)
        assert type(message) is bytes and message == data
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2.6 * len(data)  # with the framed data, and the quarter that comes first


def test_a_discarded_message_gives_its_blocks_back(arena: Arena) -> None:
    data = request(LARGE, LARGE).SerializeToString()
    reader = MessageReader(LIMIT, ReceiveBudget(LIMIT, partial(reserve, arena)), True)
    reader.feed(PREFIX.pack(0, len(data)) + data[: LARGE + 1000])
    assert arena.used > LARGE
    reader.discard()
    assert arena.free_bytes() == LIMIT


def test_tensors_without_room_in_shared_memory_stay_in_the_message(arena: Arena) -> None:
    def no_room(size: int) -> None:
        return None

    data = request(LARGE, LARGE).SerializeToString()
    reader = MessageReader(LIMIT, ReceiveBudget(LIMIT, no_room), True)
    reader.feed(PREFIX.pack(0, len(data)) + data[: LARGE // 2])
    reader.feed(data[LARGE // 2 :])
    ((_, message, _),) = reader.messages
    assert type(message) is bytes and message == data


def test_a_compressed_message_is_kept(arena: Arena) -> None:
    data = request(LARGE).SerializeToString()
    assert type(receive(data, arena, 1000, flag=1)) is bytes


@pytest.mark.skipif(read_usual_request is None, reason=f"the compiled lane is {state}")
@pytest.mark.parametrize(
    "sizes", [(LARGE,), (LARGE, 3, 2 * LARGE), (3, LARGE), (60_000, LARGE), (LARGE, 0)]
)
def test_the_compiled_lane_reads_requests_with_large_tensors(
    arena: Arena, sizes: tuple[int, ...]
) -> None:
    shapes = Shapes()
    found: list[InferRequest] = []
    for name in ("one", "two"):
        placed = receive(request(*sizes, request_id=name).SerializeToString(), arena, 16384)
        read = read_placed_request(placed, shapes)
        if 0 in sizes:
            assert read is None  # an empty tensor looks like one in shared memory
            continue
        assert read is not None
        found.append(read)
        expected = to_request(parse_infer_request(placed), Regions(None))
        assert [one.owner for one in read.inputs] == [one.owner for one in expected.inputs]
        expected.shape = read.shape
        assert_equal(read, expected)
    others = [*sizes[:-1], sizes[-1] + 1]
    other = read_placed_request(receive(request(*others).SerializeToString(), arena, 16384), shapes)
    assert not found or found[0].shape is found[1].shape
    assert not found or (other is not None and other.shape is not found[0].shape)


def test_a_request_is_not_known_by_its_bytes_alone(arena: Arena) -> None:
    message = receive(request(LARGE).SerializeToString(), arena, 16384)
    assert len(message) < 100 and not is_repeatable(message)
    assert is_repeatable(bytes(message))


def test_tensors_of_repeated_requests_are_released_by_their_last_user(
    arena: Arena,
) -> None:
    """A step of an ensemble, say; the response may arrive long after."""
    message = request(LARGE)
    message.model_name = "hold"
    data = message.SerializeToString()

    async def run() -> None:
        core = EchoCore()
        service = GrpcService(core, admin_services(core))
        for _ in range(2):
            service.start_infer(receive(data, arena, 16384), lambda answer: None, Metadata())
            call = core.held.get_nowait()
            assert arena.free_bytes() < LIMIT
            call.request.inputs = []
            gc.collect()
            assert arena.free_bytes() == LIMIT
            call.respond(echo(call.request))

    asyncio.run(run())
