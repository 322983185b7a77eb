"""The compiled lane gives what Python gives, or leaves it to Python."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from host.errors import HostError
from host.frontends.grpc import infer_response
from host.frontends.grpc.h2.frames import ConnectionLimits
from host.frontends.grpc.h2.frontend import Router
from host.frontends.grpc.h2.headers import check_request
from host.frontends.grpc.h2.hpack import HpackDecoder
from host.frontends.grpc.infer_request import (
    MIN_VIEW_BYTES,
    Shapes,
    describe_usual_request,
    parse_infer_request,
    read_usual_request,
    to_request,
)
from host.frontends.grpc.infer_response import encode_infer_response
from host.frontends.grpc.methods import GrpcOptions, RpcContext, UnaryMethod
from host.inference.request import InferRequest, InferResponse, RequestShape, Tensor
from host.instances.regions import Regions
from host.lane import encode_response, message_reader, state
from tests.conftest import ALL
from tests.unit.host.frontends.grpc.h2.test_hpack import (
    CAPTURED,
    FIELDS,
    MAX_LIST,
    encode,
    step,
)

pytestmark = pytest.mark.skipif(message_reader is None, reason=f"the compiled lane is {state}")


def assert_equal_headers(blocks: list[bytes]) -> list[bool]:
    """Returns which blocks were usual requests."""
    found = []
    services: Any = {"inference.GRPCInferenceService": [UnaryMethod("ModelInfer", refuse, "")]}
    router = Router(services, GrpcOptions(compression_level="low"), ConnectionLimits())
    ours, python = HpackDecoder(MAX_LIST), HpackDecoder(MAX_LIST)
    for block in blocks:
        expected: Any
        try:
            expected = python._decode(block)
        except ValueError as error:
            with pytest.raises(ValueError) as raised:
                ours.decode(block)
            assert str(raised.value) == str(error)
            break
        fields, size, usual = ours.decode(block)
        assert (fields, size) == expected
        assert ours.__dict__ == python.__dict__
        if usual is not None:
            assert usual == check_request(fields)
            for _ in range(2):  # then it is known
                route, expected = router.route(fields, size, usual), router.route(fields, size)
                assert route.acts_at_once == expected.acts_at_once
                assert route.stream.func is expected.stream.func  # type: ignore[attr-defined]
                assert route.stream.args == expected.stream.args  # type: ignore[attr-defined]
        found.append(usual is not None)
    return found


async def refuse(data: bytes, context: RpcContext) -> bytes:
    raise NotImplementedError


@pytest.mark.parametrize("client", CAPTURED)
def test_headers_of_clients_are_usual(client: str) -> None:
    blocks = [bytes.fromhex(block) for block in CAPTURED[client]]
    lasting = client != "h2load"  # which sends a content-length
    assert assert_equal_headers(blocks) == [lasting] * len(blocks)


@pytest.mark.parametrize("client", CAPTURED)
@pytest.mark.parametrize("change", [0, 1, 0x20, 0x7F, 0xFF])
def test_headers_with_a_changed_byte_are_equal(client: str, change: int) -> None:
    first, second = (bytes.fromhex(block) for block in CAPTURED[client][:2])
    for place in range(len(second)):
        assert_equal_headers(
            [first, second[:place] + bytes((change,)) + second[place + 1 :], second]
        )
        assert_equal_headers([first, second[:place]])


@given(st.lists(step, max_size=12), st.binary(max_size=60))
@settings(max_examples=3_000 if ALL else 150, deadline=None)
def test_encoded_and_damaged_headers_are_equal(steps: list[Any], last: bytes) -> None:
    assert_equal_headers([*encode(steps), last])


RULES = [
    [*FIELDS, ("te", "gzip")],
    [*FIELDS, ("connection", "close")],
    [*FIELDS, ("content-length", "5")],
    [*FIELDS, ("X", "1")],
    [*FIELDS, ("", "1")],
    [*FIELDS, ("x y", "1")],
    [*FIELDS, ("x", "a\nb")],
    [*FIELDS, ("x-bin", "YWI=")],
    *([*FIELDS, ("grpc-timeout", time)] for time in ("", "S", "123456789S", "1x", "1s", "-1S")),
    [*FIELDS, ("grpc-timeout", "1S"), ("grpc-timeout", "1S")],
    [*FIELDS, ("x", "a\0")],
    [*FIELDS, (":authority", "late")],
    [FIELDS[0], *FIELDS],
    [(":unknown", "x"), *FIELDS],
    [(":path", ""), *FIELDS[:2], *FIELDS[3:]],
    *(FIELDS[:index] + FIELDS[index + 1 :] for index in range(3)),
]


@pytest.mark.parametrize("timeout", ["0n", "1H", "12345678m", "20u", "7M", "99999999H", "3S"])
def test_timeouts_are_equal(timeout: str) -> None:
    fields = [*FIELDS, ("grpc-timeout", timeout), ("grpc-accept-encoding", "identity,gzip")]
    assert assert_equal_headers([hpack.Encoder().encode(fields)]) == [True]


@pytest.mark.parametrize("lengths", [(55,), (5, 700, 1), (1500, 1500, 1500)])
def test_headers_that_fill_the_dynamic_table_are_usual(lengths: tuple[int, ...]) -> None:
    """As those of clients that add all fields to the table, also those that differ each time."""
    encoder = hpack.Encoder()
    blocks = []
    for turn in range(120):
        text = f"{turn:0{lengths[turn % len(lengths)]}x}"
        blocks.append(encoder.encode([*FIELDS, ("traceparent", text)], huffman=bool(turn % 3)))
    assert assert_equal_headers(blocks) == [True] * len(blocks)


@pytest.mark.parametrize("fields", RULES)
def test_requests_that_may_break_a_rule_are_left_to_python(fields: list[tuple[str, str]]) -> None:
    assert assert_equal_headers([hpack.Encoder().encode(fields)]) == [False]


def parsed(data: bytes) -> InferRequest | HostError:
    try:
        return to_request(parse_infer_request(data), Regions(None))
    except HostError as error:
        return error


SHAPES = Shapes()
DESCRIBED: dict[RequestShape, object] = {}


def read(data: bytes) -> InferRequest | None:
    assert read_usual_request is not None
    return read_usual_request(data, SHAPES)


def description(request: InferRequest) -> object:
    """What requests of one shape have in common."""
    inputs = [(one.name, one.datatype, one.shape, len(one.data)) for one in request.inputs]
    return request.model_name, request.model_version, inputs, request.requested_outputs


def assert_equal_request(data: bytes) -> bool:
    """Returns whether the lane has taken the request."""
    request = read(data)
    if request is None:
        return False
    expected = parsed(data)
    assert isinstance(expected, InferRequest), f"Python refuses it: {expected}"
    assert [type(tensor.data) for tensor in request.inputs] == [
        type(tensor.data) for tensor in expected.inputs
    ]
    shape, request.shape = request.shape, None
    assert request == expected
    if shape is not None:
        assert DESCRIBED.setdefault(shape, description(request)) == description(request)
    types = [[type(value) for value in one.parameters.values()] for one in (request, expected)]
    assert types[0] == types[1]
    message = parse_infer_request(data)
    described = describe_usual_request(request.model_name, request.model_version)
    assert described.model_name == message.model_name
    assert described.model_version == message.model_version
    return True


NAMES = st.sampled_from(["", "m", "INPUT0", "é漢", "n" * 127, "n" * 128, "triton_x"])
NUMBERS = st.sampled_from([-1, 0, 1, 127, 128, 70_000, 2**31, 2**40, 2**63 - 1])
KEYS = st.sampled_from(
    [
        *("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "user", "é", ""),
        *("triton_x", "triton_enable_empty_final_response", "headers_x"),
    ]
)


@st.composite
def parameter(draw: Any) -> pb.InferParameter:
    value = pb.InferParameter()
    kind = draw(st.sampled_from(["bool", "int64", "string", "double", "uint64", ""]))
    if kind == "bool":
        value.bool_param = draw(st.booleans())
    elif kind == "int64":
        value.int64_param = draw(NUMBERS)
    elif kind == "string":
        value.string_param = draw(NAMES)
    elif kind == "double":
        value.double_param = draw(st.floats(allow_nan=False))
    elif kind:
        value.uint64_param = draw(st.integers(0, 9))
    return value


@st.composite
def requests(draw: Any) -> bytes:
    versions = st.sampled_from(["", "", "1", "12", "0", "01", "-1", "x", "9" * 9, "9" * 20])
    message = pb.ModelInferRequest(
        model_name=draw(NAMES), model_version=draw(versions), id=draw(NAMES)
    )
    for _ in range(draw(st.integers(0, 3))):
        tensor = message.inputs.add(name=draw(NAMES), datatype=draw(st.sampled_from(["FP32", ""])))
        tensor.shape.extend(draw(st.lists(NUMBERS, max_size=3)))
        if draw(st.integers(0, 9)) == 0:
            tensor.parameters["p"].CopyFrom(draw(parameter()))
        if draw(st.integers(0, 9)) == 0:
            tensor.contents.fp32_contents.append(1.0)
    sizes = st.sampled_from([0, 1, 64, 127, 128, 2000, MIN_VIEW_BYTES])
    more = draw(st.sampled_from([0, 0, 0, 0, 1, -1]))
    for _ in range(max(0, len(message.inputs) + more)):
        message.raw_input_contents.append(bytes(draw(sizes)))
    for _ in range(draw(st.integers(0, 2))):
        output = message.outputs.add(name=draw(NAMES))
        if draw(st.integers(0, 9)) == 0:
            output.parameters["classification"].int64_param = 1
    for key in draw(st.lists(KEYS, max_size=3)):
        message.parameters[key].CopyFrom(draw(parameter()))
    return bytes(message.SerializeToString())


DAMAGE = st.none() | st.tuples(st.integers(0, 300), st.binary(max_size=3), st.integers(0, 3))


def damaged(data: bytes, damage: tuple[int, bytes, int] | None) -> bytes:
    if damage is None:
        return data
    at, piece, cut = damage
    return data[:at] + piece + data[at + cut :]


@given(requests(), st.lists(DAMAGE, max_size=3))
@settings(max_examples=3_000 if ALL else 300, deadline=None)
def test_requests_are_equal(data: bytes, damages: list[Any]) -> None:
    for damage in damages:
        data = damaged(data, damage)
    assert_equal_request(data)


@given(st.lists(requests(), min_size=2, max_size=3), st.binary(max_size=9))
@settings(max_examples=100, deadline=None)
def test_fields_that_are_repeated_or_in_another_order_are_equal(
    parts: list[bytes], last: bytes
) -> None:
    assert_equal_request(b"".join(parts) + last)


def usual() -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="m", model_version="1", id="7")
    message.inputs.add(name="a", datatype="FP32", shape=[2, 3])
    message.inputs.add(name="b", datatype="BYTES", shape=[])
    message.outputs.add(name="c")
    message.raw_input_contents.extend([bytes(24), bytes(300)])
    message.parameters["user"].string_param = "x"
    message.parameters["attempt"].int64_param = 3
    message.parameters["fresh"].bool_param = True
    message.parameters["sequence_id"].int64_param = 12
    message.parameters["sequence_start"].bool_param = True
    message.parameters["sequence_end"].bool_param = False
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    return message


def test_usual_requests_are_taken() -> None:
    message = usual()
    assert assert_equal_request(message.SerializeToString())
    message.parameters["triton_enable_empty_final_response"].bool_param = False
    assert assert_equal_request(message.SerializeToString())
    large = usual()
    large.raw_input_contents[1] = bytes(100_000)
    assert assert_equal_request(large.SerializeToString())


def test_requests_that_differ_in_id_parameters_and_content_have_one_shape() -> None:
    message, shapes = usual(), []
    for number in range(4):
        message.id = "x" * number
        message.parameters["attempt"].int64_param = number
        message.raw_input_contents[1] = bytes((number,)) * 300
        request = read(message.SerializeToString())
        assert request is not None
        shapes.append(request.shape)
    assert shapes[0] is not None and len(set(shapes)) == 1
    for change in ("size", "name", "version", "output"):
        other = usual()
        if change == "size":
            other.raw_input_contents[1] += b"1"
        elif change == "name":
            other.inputs[1].name = "x"
        elif change == "version":
            other.model_version = ""
        else:
            other.outputs[0].name = "x"
        request = read(other.SerializeToString())
        assert request is not None
        assert request.shape is not None and request.shape not in shapes
        shapes.append(request.shape)


def test_few_shapes_are_kept_and_no_long_ones() -> None:
    message = pb.ModelInferRequest(model_name="m")
    message.inputs.add(name="a", datatype="FP32", shape=[1])
    message.raw_input_contents.append(b"1")
    for number in range(2000):
        message.inputs[0].name = f"{number}"
        assert read(message.SerializeToString()) is not None
    assert len(SHAPES) == 1024
    message.inputs[0].name = "x" * 2000
    request = read(message.SerializeToString())
    assert request is not None and request.shape is None


def test_a_usual_request_that_is_cut_or_has_a_changed_byte_is_equal() -> None:
    data = usual().SerializeToString()[:-290]
    for place in range(len(data)):
        assert_equal_request(data[:place])
        for change in (0, 1, 0x7F, 0x80, 0xFF):
            assert_equal_request(data[:place] + bytes((change,)) + data[place + 1 :])


@pytest.mark.parametrize(
    "field",
    [
        b"\x12\x01x",  # a second version
        b"\x1a\x01y",  # a second id
        b"\x0a\x01n",  # a second model
        b"\x42\x00",  # an unknown field
        b"\x3a\x85\x80\x80\x80\x00hello",  # a length of five bytes
        b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"\x22\x00",  # a parameter without a name
        b"\x22\x08\x0a\x04user\x12\x00",  # a parameter twice, without a value
    ],
)
def test_unusual_fields_are_left_to_python(field: bytes) -> None:
    data = usual().SerializeToString()
    assert read(data + field) is None
    assert read(field + data) is None


@pytest.mark.parametrize("request_id", ["", "7"])
def test_requests_without_inputs_are_left_to_python(request_id: str) -> None:
    message = pb.ModelInferRequest(model_name="m", id=request_id)
    assert read(message.SerializeToString()) is None


TEXTS = st.sampled_from(["", "m", "é漢", "n" * 127, "n" * 128, "\udc80"]) | st.text(max_size=5)
DATA = st.sampled_from([0, 1, 64, 127, 128, 300, 20_000, 1_100_000]).map(bytes)
RESPONSES = st.builds(
    InferResponse,
    model_name=TEXTS,
    model_version=st.integers(0, 2**40),
    id=TEXTS,
    outputs=st.lists(
        st.builds(
            Tensor,
            name=TEXTS,
            datatype=st.sampled_from(["FP32", "BYTES"]),
            shape=st.lists(NUMBERS, max_size=3),
            data=DATA | DATA.map(lambda data: memoryview(data)),
        ),
        max_size=3,
    ),
    parameters=st.dictionaries(TEXTS, st.booleans(), max_size=1),
)


@given(RESPONSES, st.sampled_from([None, False, True]))
@settings(max_examples=150, deadline=None)
def test_responses_are_equal(response: InferResponse, final: bool | None) -> None:
    def encode() -> bytes | str:
        try:
            return encode_infer_response(response, final)
        except HostError as error:
            return error.message

    with patch.object(infer_response, "encode_response", None):
        expected = encode()
    assert encode() == expected


def test_usual_responses_are_taken() -> None:
    assert encode_response is not None
    tensors = [Tensor("a", "FP32", [2, 3], bytes(24)), Tensor("b", "BYTES", [], bytes(300))]
    response = InferResponse("m", 1, "é" * 100, tensors)
    expected = [encode_infer_response(response, final) for final in (None, True)]
    flags = [None, infer_response._FINAL_FLAGS[True]]
    found = [encode_response(response, infer_response._heads, flag) for flag in flags]
    assert found == expected
    tensors[1].data = bytes(1 << 20)  # too large with the other
    assert encode_response(response, infer_response._heads, None) is None
    tensors[1].data = memoryview(bytes(300))
    assert encode_response(response, infer_response._heads, None) is None
