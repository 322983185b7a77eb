"""A request from the cache equals the same request parsed in full.

The compiled lane, which reads most requests before they are looked up here, is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from host.errors import HostError
from host.frontends.grpc import request_cache as request_cache_module
from host.frontends.grpc.infer_request import parse_infer_request, to_request
from host.frontends.grpc.request_cache import RequestCache
from host.inference.request import InferRequest
from host.instances.regions import Regions


@pytest.fixture(autouse=True, scope="module")
def _without_lane() -> Iterator[None]:
    with patch.object(request_cache_module, "read_usual_request", None):
        yield


NAMES = st.text(max_size=5) | st.sampled_from(["x" * 127, "x" * 128])
SHAPES = st.lists(st.integers(-1, 300), max_size=3)
SIZES = st.sampled_from([0, 1, 64, 127, 128, 300, 20_000])


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


def parsed(data: bytes) -> InferRequest | None:
    try:
        return to_request(parse_infer_request(data), Regions(None))
    except HostError:
        return None


def remember(request_cache: RequestCache, data: bytes) -> None:
    for _ in range(2):  # a request that arrives only once is not cached
        message = parse_infer_request(data)
        request_cache.remember(data, message, to_request(message, Regions(None)))


def looked_up(request_cache: RequestCache, data: bytes) -> InferRequest | None:
    """What it is known as; what goes with it says the same as the parser does."""
    known = request_cache.lookup(data)
    if known is None:
        return None
    request, said = known
    assert said is not None
    whole = parse_infer_request(data)
    for name in ("sequence_id", "sequence_start", "sequence_end"):
        whole.parameters.pop(name, None)
    assert dataclasses.replace(said, id=whole.id, raw=whole.raw) == whole
    return request


def plain(request: InferRequest | None) -> InferRequest | None:
    """With bytes instead of views, and without what it has in common with others."""
    if request is not None:
        request.shape = None
        for tensor in request.inputs:
            tensor.data = bytes(tensor.data)
    return request


@given(requests(), NAMES, st.lists(SIZES, min_size=3, max_size=3))
def test_a_cached_request_equals_a_parsed_one(
    message: pb.ModelInferRequest, request_id: str, sizes: list[int]
) -> None:
    request_cache = RequestCache()
    remember(request_cache, message.SerializeToString())
    data = again(message, request_id, sizes)
    known = looked_up(request_cache, data)
    if known is not None:
        assert plain(known) == plain(parsed(data))


def test_another_id_and_other_tensors_hit_the_cache() -> None:
    message = pb.ModelInferRequest(model_name="m", model_version="3", id="a")
    message.inputs.add(name="x", datatype="FP32", shape=[2, 2])
    message.outputs.add(name="y")
    message.raw_input_contents.append(bytes(16))
    request_cache = RequestCache()
    remember(request_cache, message.SerializeToString())
    for request_id, size in (("", 16), ("b" * 127, 16), ("c", 127), ("c", 128), ("", 1 << 15)):
        known = looked_up(request_cache, again(message, request_id, [size]))
        assert known is not None, (request_id, size)
        assert known.id == request_id
        assert len(known.inputs[0].data) == size
        assert (known.model_name, known.model_version) == ("m", 3)
        assert known.requested_outputs == ["y"]


def test_a_cached_request_shares_no_state_with_the_next_one() -> None:
    message = pb.ModelInferRequest(model_name="m")
    message.inputs.add(name="x", datatype="FP32", shape=[2])
    message.outputs.add(name="y")
    message.parameters["kept"].bool_param = True
    message.raw_input_contents.append(bytes(8))
    request_cache = RequestCache()
    data = message.SerializeToString()
    remember(request_cache, data)
    first = looked_up(request_cache, data)
    assert first is not None
    first.inputs[0].shape.append(1)
    first.requested_outputs.clear()
    first.parameters["more"] = 1
    second = looked_up(request_cache, data)
    assert second is not None
    assert (second.inputs[0].shape, second.requested_outputs) == ([2], ["y"])
    assert second.parameters == {"kept": True}


@given(requests(), st.data())
def test_different_requests_do_not_match_a_template(
    message: pb.ModelInferRequest, data: st.DataObject
) -> None:
    request_cache = RequestCache()
    good = message.SerializeToString()
    remember(request_cache, good)
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        if bad:
            at = data.draw(st.integers(0, min(len(bad) - 1, 600)))
            kind = data.draw(st.integers(0, 2))
            if kind == 0:
                bad[at] = data.draw(st.integers(0, 255))
            elif kind == 1:
                del bad[at:]
            else:
                bad[at:at] = data.draw(st.binary(max_size=4))
    known = looked_up(request_cache, bytes(bad))
    if known is not None:
        assert plain(known) == plain(parsed(bytes(bad)))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (2, 0, 1), (0, 2, 1)])
def test_fields_in_any_order_are_understood(order: tuple[int, ...]) -> None:
    name = pb.ModelInferRequest(model_name="m")
    inputs = pb.ModelInferRequest()
    inputs.inputs.add(name="x", datatype="FP32", shape=[1])
    raw = pb.ModelInferRequest(raw_input_contents=[bytes(4)])
    parts = [name.SerializeToString(), inputs.SerializeToString(), raw.SerializeToString()]
    data = b"".join(parts[index] for index in order)
    request_cache = RequestCache()
    remember(request_cache, data)
    known = looked_up(request_cache, data)
    assert known is None or plain(known) == plain(parsed(data))


def test_requests_of_a_load_generator_hit_the_cache() -> None:
    """It asks for the end of decoupled answers, whatever the model."""
    message = pb.ModelInferRequest(model_name="m")
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    message.inputs.add(name="x", datatype="FP32", shape=[2])
    message.raw_input_contents.append(bytes(8))
    request_cache = RequestCache()
    remember(request_cache, message.SerializeToString())
    assert looked_up(request_cache, again(message, "7", [8])) is not None


def sequence_request(*parameters: tuple[str, str, object]) -> bytes:
    """A request with parameters in this order: name, field and value."""
    message = pb.ModelInferRequest(model_name="m", id="7")
    tensor = pb.ModelInferRequest(raw_input_contents=[bytes(8)])
    tensor.inputs.add(name="x", datatype="FP32", shape=[2])
    data = bytes(message.SerializeToString())
    for name, field, value in parameters:
        entry = pb.ModelInferRequest()
        setattr(entry.parameters[name], field, value)
        data += entry.SerializeToString()
    return data + bytes(tensor.SerializeToString())


WANTS_END = ("triton_enable_empty_final_response", "bool_param", True)
CUSTOM = ("custom", "int64_param", 5)


@pytest.mark.parametrize("field, first, other", [
    ("int64_param", 1, -1), ("int64_param", 1 << 62, 7), ("string_param", "a", "ä" * 64),
])  # fmt: skip
def test_all_sequences_share_a_template(field: str, first: object, other: object) -> None:
    """A new sequence hits the cache, at its start and end, with parameters in any order."""
    request_cache = RequestCache()
    begin = (("sequence_start", "bool_param", True), ("sequence_end", "bool_param", False))
    remember(request_cache, sequence_request(WANTS_END, CUSTOM, ("sequence_id", field, first)))
    for parameters in (
        [("sequence_id", field, other), *begin, WANTS_END, CUSTOM],
        [begin[0], CUSTOM, ("sequence_id", field, other), WANTS_END],
        [CUSTOM, ("sequence_end", "bool_param", True), WANTS_END, ("sequence_id", field, first)],
        [WANTS_END, CUSTOM],
    ):
        data = sequence_request(*parameters)
        known = looked_up(request_cache, data)
        assert known is not None, parameters
        assert plain(known) == plain(parsed(data))
    assert len(request_cache._templates) == 1


@pytest.mark.parametrize("parameter", [
    ("sequence_id", "bool_param", True), ("sequence_id", "string_param", "x" * 129),
    ("sequence_start", "int64_param", 1), ("custom", "string_param", "x" * 1000),
])  # fmt: skip
def test_invalid_and_long_parameters_miss_the_cache(parameter: tuple[str, str, object]) -> None:
    request_cache = RequestCache()
    remember(request_cache, sequence_request(("sequence_id", "int64_param", 1)))
    assert looked_up(request_cache, sequence_request(parameter)) is None


def test_the_last_one_of_equal_parameters_applies() -> None:
    request_cache = RequestCache()
    remember(request_cache, sequence_request(("sequence_id", "int64_param", 1)))
    starts = [("sequence_start", "bool_param", value) for value in (True, False)]
    data = sequence_request(("sequence_id", "int64_param", 2), *starts)
    known = looked_up(request_cache, data)
    assert known is not None
    assert (known.correlation_id, known.flags) == (2, 0)
    assert plain(known) == plain(parsed(data))


@pytest.mark.parametrize("sequence", ["x", "yy"])
def test_a_parameter_may_contain_what_follows_the_parameters(sequence: str) -> None:
    whole, tail = sequence_request(), bytes(8)
    follows = whole[whole.index(b"7") + 1 : -len(tail)]
    request_cache = RequestCache()
    remember(request_cache, sequence_request(("custom", "string_param", "a")))
    for parameters in (
        [("sequence_id", "string_param", sequence + follows.decode())],
        [("custom", "string_param", follows.decode() + sequence)],
        [("custom", "string_param", "a"), ("sequence_id", "string_param", follows.decode())],
    ):
        data = sequence_request(*parameters)
        known = looked_up(request_cache, data)
        assert known is None or plain(known) == plain(parsed(data))


def test_fields_between_parameters_and_inputs_are_not_lost() -> None:
    request_cache = RequestCache()
    first = sequence_request(("sequence_id", "int64_param", 1))
    remember(request_cache, first)
    position = first.index(b"7") + 1
    unknown = bytes([15 << 3 | 2, 0])
    for field in (
        pb.ModelInferRequest(id="8").SerializeToString(),
        pb.ModelInferRequest(model_version="2").SerializeToString(),
        pb.ModelInferRequest(raw_input_contents=[bytes(8)]).SerializeToString(),
        *(bytes([number << 3 | 2, 0]) for number in (1, 2, 3)),  # empty: model, version and id
        unknown,
    ):
        data = first[:position] + field + first[position:]
        assert looked_up(request_cache, data) is None


def test_alternating_requests_all_hit_the_cache() -> None:
    request_cache = RequestCache()
    kinds = []
    for rows in range(1, 50):
        message = pb.ModelInferRequest(model_name="m")
        message.parameters["rows"].int64_param = rows
        message.inputs.add(name="x", datatype="FP32", shape=[rows])
        message.raw_input_contents.append(bytes(4 * rows))
        kinds.append(message.SerializeToString())
    for _ in range(2):
        for data in kinds:
            parsed = parse_infer_request(data)
            request_cache.remember(data, parsed, to_request(parsed, Regions(None)))
    for rows, data in enumerate(kinds, 1):
        known = looked_up(request_cache, data)
        assert known is not None
        assert known.parameters == {"rows": rows}


def test_the_cache_is_bounded() -> None:
    request_cache = RequestCache()
    for number in range(2000):
        message = pb.ModelInferRequest(model_name=f"m{number}")
        message.inputs.add(name="x", datatype="FP32", shape=[1])
        message.raw_input_contents.append(bytes(4))
        remember(request_cache, message.SerializeToString())
    assert len(request_cache._last_by_model) <= 256
    for number in range(2000):
        message = pb.ModelInferRequest(model_name="m")
        message.inputs.add(name="x", datatype="FP32", shape=[number])
        message.raw_input_contents.append(bytes(4))
        remember(request_cache, message.SerializeToString())
    assert len(request_cache._templates) <= 1024
    assert len(request_cache._seen_once) <= 256


def send(request_cache: RequestCache, data: bytes) -> bool:
    """Whether the request was recognised; it is remembered if it has to be parsed."""
    known = request_cache.lookup(data)
    if known is not None:
        return True
    message = parse_infer_request(data)
    request_cache.remember(data, message, to_request(message, Regions(None)))
    return False


def request_of(elements: int, model: str = "m") -> bytes:
    message = pb.ModelInferRequest(model_name=model)
    message.inputs.add(name="i", datatype="FP32", shape=[elements])
    message.raw_input_contents.append(bytes(4 * elements))
    return bytes(message.SerializeToString())


def test_requests_of_a_model_that_never_recur_are_soon_not_remembered() -> None:
    request_cache = RequestCache()
    assert not any(send(request_cache, request_of(elements)) for elements in range(1, 200))
    assert len(request_cache._seen_once) < 100
    other = [send(request_cache, request_of(1, "other")) for _ in range(3)]
    assert other == [False, False, True], "another model is not concerned"


def test_a_model_whose_requests_recur_at_last_is_remembered_again() -> None:
    request_cache = RequestCache()
    for elements in range(1, 300):
        send(request_cache, request_of(elements))
    found = [send(request_cache, request_of(1000)) for _ in range(100)]
    assert found[-1]
    assert found == sorted(found), "once it is recognised, all that follow are"
