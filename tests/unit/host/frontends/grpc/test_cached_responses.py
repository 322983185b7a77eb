"""Repeated requests that the response cache has answered get the response that parsing gives."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from host.cache.local import LocalStore
from host.cache.responses import CacheHit, ResponseCache
from host.errors import HostError
from host.frontends.grpc.cached_responses import CachedResponses
from host.frontends.grpc.infer_request import parse_infer_request, to_request
from host.frontends.grpc.infer_response import encode_infer_response
from host.inference.request import InferRequest, InferResponse, Tensor
from host.instances.regions import Regions
from host.metrics.statistics import InferenceCounters
from tests.unit.host.frontends.grpc.echo_core import EchoCore

KEY = b"key"
NAMES = st.text(max_size=5) | st.sampled_from(["x" * 127, "x" * 128])
SHAPES = st.lists(st.integers(-1, 300), max_size=3)
SIZES = st.sampled_from([0, 1, 64, 127, 128, 300, 20_000])
IDS = st.sampled_from(["", "a", "ä" * 60, "x" * 127, "x" * 128])


@st.composite
def requests(draw: Any) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(
        model_name=draw(NAMES), model_version=draw(st.sampled_from(["", "1", "7"])), id=draw(NAMES)
    )
    for index in range(draw(st.integers(0, 3))):
        message.inputs.add(name=f"i{index}", datatype="FP32", shape=draw(SHAPES))
        message.raw_input_contents.append(bytes(draw(SIZES)))
    for index in range(draw(st.integers(0, 2))):
        message.outputs.add(name=f"o{index}")
    for name in draw(st.sets(st.sampled_from(["p", "q", "timeout", "priority", "sequence_id"]))):
        message.parameters[name].int64_param = draw(st.integers(0, 300))
    if draw(st.booleans()):
        message.parameters["sequence_id"].string_param = draw(NAMES)
    for name in draw(st.sets(st.sampled_from(["sequence_start", "sequence_end"]))):
        message.parameters[name].bool_param = draw(st.booleans())
    if draw(st.booleans()):
        message.parameters["triton_enable_empty_final_response"].bool_param = True
    return message


def again(message: pb.ModelInferRequest, request_id: str, sizes: list[int]) -> bytes:
    """The same request with another id and other tensors."""
    other = pb.ModelInferRequest()
    other.CopyFrom(message)
    other.id = request_id
    for index, size in enumerate(sizes[: len(other.raw_input_contents)]):
        other.raw_input_contents[index] = b"\x1a" * size
    return bytes(other.SerializeToString())


class CachingCore(EchoCore):
    """A core with one entry in its response cache, for all models."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs = [Tensor("y", "UINT8", [3], b"123")]
        self.store = LocalStore(2000)
        self.store.insert(KEY, self.outputs, lambda error: None)
        self.counters = InferenceCounters("m", "1")
        self.cache = ResponseCache(self.store, 1, self.counters, lambda *_: None)
        self.hit = CacheHit(self.cache, KEY, self.outputs)

    def repeat_cache_hit(self, name: str, version: int, hit: CacheHit) -> bool:
        return self.cache.repeat_hit(hit)

    def response(self, request: InferRequest) -> InferResponse:
        return InferResponse(request.model_name, 1, request.id, self.outputs, cache_hit=self.hit)

    def evict(self) -> None:
        self.store.insert(b"other", [Tensor("y", "UINT8", [1400], bytes(1400))], lambda error: None)

    @property
    def hits(self) -> int:
        return self.counters.snapshot().inference_stats.cache_hit.count


def remember(core: CachingCore, cached: CachedResponses, data: bytes) -> None:
    request = to_request(parse_infer_request(data), Regions(None))
    response = core.response(request)
    cached.remember(data, request, response, encode_infer_response(response))


def simple(request_id: str = "", value: bytes = b"1234") -> bytes:
    message = pb.ModelInferRequest(model_name="m", model_version="1", id=request_id)
    message.inputs.add(name="x", datatype="INT32", shape=[1])
    message.raw_input_contents.append(value)
    return bytes(message.SerializeToString())


def without_id(data: bytes) -> tuple[pb.ModelInferRequest, str]:
    message = pb.ModelInferRequest.FromString(data)
    request_id = message.id
    message.id = ""
    return message, request_id


@given(requests(), IDS, IDS, st.data())
def test_a_response_is_repeated_only_to_an_equal_request(
    message: pb.ModelInferRequest, first_id: str, next_id: str, data: st.DataObject
) -> None:
    core = CachingCore()
    cached = CachedResponses(core)
    try:
        remember(core, cached, again(message, first_id, []))
    except HostError:
        return
    near = bytearray(again(message, next_id, []))
    for _ in range(data.draw(st.integers(0, 2))):
        place = data.draw(st.integers(0, len(near) - 1))
        near[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
        if not near:
            return
    answer = cached.respond(bytes(near))
    if answer is None:
        assert not core.hits
        return
    assert core.hits == 1
    asked, request_id = without_id(bytes(near))
    assert asked == without_id(again(message, first_id, []))[0]
    request = to_request(parse_infer_request(bytes(near)), Regions(None))
    assert request.id == request_id
    expected = encode_infer_response(core.response(request))
    assert pb.ModelInferResponse.FromString(answer) == pb.ModelInferResponse.FromString(expected)


@pytest.mark.parametrize("first_id", ["", "first"])
@pytest.mark.parametrize("next_id", ["", "first", "other", "x" * 127])
def test_an_equal_request_with_any_short_id_is_recognised(first_id: str, next_id: str) -> None:
    core = CachingCore()
    cached = CachedResponses(core)
    assert cached.respond(simple(next_id)) is None
    remember(core, cached, simple(first_id))
    answer = cached.respond(simple(next_id))
    assert answer is not None
    assert pb.ModelInferResponse.FromString(answer).id == next_id
    assert cached.respond(simple(next_id, b"1235")) is None
    assert core.hits == 1


def test_a_second_id_is_not_mistaken_for_the_rest() -> None:
    core = CachingCore()
    cached = CachedResponses(core)
    remember(core, cached, simple("a"))
    start = len(pb.ModelInferRequest(model_name="m", model_version="1").SerializeToString())
    data = simple("a")
    assert cached.respond(data) is not None
    assert cached.respond(data[: start + 3] + b"\x1a\x01b" + data[start + 3 :]) is None


@pytest.mark.parametrize(
    "data", [simple("x" * 128), simple() + bytes(pb.ModelInferRequest(id="a").SerializeToString())]
)
def test_an_id_that_is_long_or_at_the_end_stays_in_the_response(data: bytes) -> None:
    core = CachingCore()
    cached = CachedResponses(core)
    request = to_request(parse_infer_request(data), Regions(None))
    response = core.response(request)
    cached.remember(data, request, response, encode_infer_response(response))
    answer = cached.respond(data)
    assert answer is None or pb.ModelInferResponse.FromString(answer).id == request.id


@pytest.mark.parametrize("replaced", [False, True])
def test_an_evicted_response_is_not_repeated(replaced: bool) -> None:
    core = CachingCore()
    cached = CachedResponses(core)
    remember(core, cached, simple())
    assert cached.respond(simple()) is not None
    core.evict()
    if replaced:
        core.store.insert(KEY, [Tensor("y", "UINT8", [3], b"321")], lambda error: None)
    assert cached.respond(simple("a")) is None
    assert core.hits == 1


def test_a_request_that_ends_in_its_id_is_not_answered() -> None:
    core = CachingCore()
    cached = CachedResponses(core)
    data = pb.ModelInferRequest(model_name="m", model_version="1", id="ab").SerializeToString()
    remember(core, cached, data)
    assert cached.respond(data) is not None
    with pytest.raises(HostError):
        parse_infer_request(data[:-1])
    assert cached.respond(data[:-1]) is None


def test_large_requests_and_responses_are_not_remembered() -> None:
    core = CachingCore()
    cached = CachedResponses(core)
    large = simple(value=bytes(1024))
    remember(core, cached, large)
    assert cached.respond(large) is None
    core.outputs = [Tensor("y", "UINT8", [5000], bytes(5000))]
    remember(core, cached, simple())
    assert cached.respond(simple()) is None


NAME = bytes(pb.ModelInferRequest(model_name="m").SerializeToString())


def parts(request_id: bytes, *, version: bytes = b"", end: bytes = b"") -> bytes:
    """A request of which some fields are encoded in an unusual way."""
    content = b"\x1a\x02ab" * 40 + b"\x1a\x01q"
    rest = pb.ModelInferRequest(raw_input_contents=[content])
    rest.inputs.add(name="x", datatype="UINT8", shape=[len(content)])
    return NAME + version + request_id + bytes(rest.SerializeToString()) + end


@pytest.mark.parametrize("first", [
    parts(b"", version=b"\x12\x81\x001", end=b"\x1a\x01e"),
    parts(b"\x1a\x01x", end=b"\x1a\x00"),
    parts(b"", end=b"\x1a\x00"),
    parts(b"\x1a\x01x", end=b"\x1a\x01y"),
    parts(b"", version=b"\x12\x81\x001"),
    parts(b"\x12\x81\x001", version=b"\x1a\x01x"),  # the id before the version
])  # fmt: skip
def test_no_request_gets_the_response_of_another_however_it_is_encoded(first: bytes) -> None:
    core = CachingCore()
    cached = CachedResponses(core)
    remember(core, cached, first)
    tried = []
    for base in (first, first.replace(b"\x1a\x01x", b"")):
        for at in range(len(base) + 1):
            tried += [base[:at] + base[at + size :] for size in (0, 1, 2, 3, 4)]
            tried.append(base[:at] + b"\x1a\x01z" + base[at:])
    for data in tried:
        answer = cached.respond(data) if len(data) > 1 else None
        if answer is not None:
            asked, expected = parse_infer_request(data), parse_infer_request(first)
            assert pb.ModelInferResponse.FromString(answer).id == asked.id
            assert dataclasses.replace(asked, id="") == dataclasses.replace(expected, id="")
