"""Requests on the wire, and what the parser makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from host.errors import ErrorCode, HostError
from host.frontends.grpc.infer_request import parse_infer_request, read_model_name, to_request
from host.inference.request import Classification, InferRequest, Tensor, read_bytes
from host.instances.regions import Regions
from stub.wire.arena import Block


def request(raw: list[bytes] | None = None, **fields: Any) -> Any:
    """A message for model `m` with one INT32[2] input `x`."""
    message = pb.ModelInferRequest(model_name="m", **fields)
    message.inputs.add(name="x", datatype="INT32", shape=[2])
    message.raw_input_contents.extend([b"12345678"] if raw is None else raw)
    return message


def typed(datatype: str, shape: list[int] | None = None, **contents: Any) -> Any:
    message = pb.ModelInferRequest(model_name="m")
    tensor = message.inputs.add(name="x", datatype=datatype, shape=shape or [2])
    tensor.contents.CopyFrom(pb.InferTensorContents(**contents))
    return message


def decoded(data: bytes) -> InferRequest:
    return to_request(parse_infer_request(data), Regions(None))


def decode(message: Any) -> InferRequest:
    return decoded(message.SerializeToString())


def refusal(message: Any) -> HostError:
    with pytest.raises(HostError) as caught:
        decode(message)
    return caught.value


def invalid(message: Any) -> str:
    error = refusal(message)
    assert error.code is ErrorCode.INVALID_ARG
    return error.message


def test_a_request_arrives_complete() -> None:
    message = request(id="7", model_version="3")
    message.inputs.add(name="y", datatype="BYTES", shape=[1])
    message.raw_input_contents.append(b"\1\0\0\0a")
    message.outputs.add(name="o")
    message.parameters["who"].string_param = "me"
    assert decode(message) == InferRequest(
        "m",
        [Tensor("x", "INT32", [2], b"12345678"), Tensor("y", "BYTES", [1], b"\1\0\0\0a")],
        model_version=3,
        id="7",
        requested_outputs=["o"],
        parameters={"who": "me"},
    )


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (pb.ModelInferRequest(model_name="größe", id="1").SerializeToString(), "größe"),
        (pb.ModelInferRequest(model_name="m" * 127).SerializeToString(), "m" * 127),
        (pb.ModelInferRequest(model_name="m" * 128).SerializeToString(), ""),
        (pb.ModelInferRequest(id="1").SerializeToString(), ""),
        (b"", ""),
        (b"\n", ""),
    ],
)
def test_the_model_is_read_without_the_rest(data: bytes, name: str) -> None:
    assert read_model_name(data) == name


def test_requests_do_not_share_their_shapes() -> None:
    data = request().SerializeToString()
    decoded(data).inputs[0].shape.insert(0, 1)
    assert decoded(data).inputs[0].shape == [2]


def test_a_large_tensor_is_a_view_of_the_message() -> None:
    data = request(raw=[bytes(100_000)]).SerializeToString()
    tensor = decoded(data).inputs[0]
    assert isinstance(tensor.data, memoryview) and tensor.data.obj is data
    assert tensor.data.nbytes == 100_000


def test_surplus_raw_entries_are_ignored() -> None:
    assert len(decode(request(raw=[b"12345678", b"more"])).inputs) == 1


@pytest.mark.parametrize("text, number", [("", -1), ("1", 1), ("007", 7), ("0", 0)])
def test_valid_versions_are_parsed(text: str, number: int) -> None:
    assert decode(request(model_version=text)).model_version == number


@pytest.mark.parametrize("text", ["x", "1x", "1_0", "1.0", "٣", "9" * 19, "9" * 99, "-" + "9" * 30])
def test_a_version_that_is_no_number_is_refused(text: str) -> None:
    assert invalid(request(model_version=text)) == (
        f"failed to get model version from specified version string '{text}' (details: stol), "
        "version should be an integral value > 0"
    )


def test_a_negative_version_is_refused() -> None:
    assert invalid(request(model_version="-1")) == (
        "invalid model version specified '-1' , version should be an integral value > 0"
    )


def test_known_parameters_go_to_their_place() -> None:
    message = request()
    message.parameters["sequence_id"].int64_param = -1
    message.parameters["sequence_start"].bool_param = True
    message.parameters["sequence_end"].bool_param = True
    message.parameters["priority"].uint64_param = 2**63
    message.parameters["timeout"].int64_param = 250
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    decoded = decode(message)
    assert decoded.correlation_id == 2**64 - 1  # a 64-bit pattern, as the reference reads it
    assert (decoded.flags, decoded.priority, decoded.timeout_us) == (3, 2**63, 250)
    assert decoded.parameters == {}
    assert decoded.wants_empty_final


def test_an_empty_final_response_is_not_sent_unless_requested() -> None:
    message = request()
    assert not decode(message).wants_empty_final
    message.parameters["triton_enable_empty_final_response"].bool_param = False
    assert not decode(message).wants_empty_final


def test_other_parameters_keep_their_types() -> None:
    message = request()
    message.parameters["i"].int64_param = -5
    message.parameters["b"].bool_param = False
    message.parameters["s"].string_param = "é"
    message.parameters["d"].double_param = 0.5
    message.parameters["binary_data_output"].bool_param = True
    parameters = decode(message).parameters
    assert parameters == {"i": -5, "b": False, "s": "é", "d": 0.5, "binary_data_output": True}
    assert type(parameters["b"]) is bool and type(parameters["i"]) is int


@pytest.mark.parametrize(
    "key, field, value, expected",
    [
        ("sequence_id", "bool_param", True, "int64_param or string_param"),
        ("sequence_id", "uint64_param", 1, "int64_param or string_param"),
        ("sequence_start", "int64_param", 1, "bool_param"),
        ("sequence_end", "string_param", "true", "bool_param"),
        ("priority", "string_param", "1", "int64_param or uint64_param"),
        ("timeout", "uint64_param", 1, "int64_param"),
        ("triton_enable_empty_final_response", "int64_param", 1, "bool_param"),
        ("mine", "uint64_param", 1, "int64_param, bool_param, or string_param"),
        ("mine", None, None, "int64_param, bool_param, or string_param"),
    ],
)
def test_a_parameter_of_the_wrong_type_is_refused(
    key: str, field: str | None, value: Any, expected: str
) -> None:
    message = request()
    message.parameters[key].SetInParent()
    if field is not None:
        setattr(message.parameters[key], field, value)
    assert invalid(message) == f"invalid value type for '{key}' parameter, expected {expected}."


def test_a_negative_priority_is_refused() -> None:
    message = request()
    message.parameters["priority"].int64_param = -1
    assert invalid(message) == "invalid value for 'priority', expected value >= 0."


def test_reserved_parameters_are_refused() -> None:
    message = request()
    message.parameters["triton_mine"].bool_param = True
    assert invalid(message) == (
        "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following "
        "keys starting with 'triton_' are allowed: triton_enable_empty_final_response"
    )


def test_a_string_correlation_id_has_a_limit() -> None:
    message = request()
    message.parameters["sequence_id"].string_param = "é" * 64
    assert decode(message).correlation_id == "é" * 64
    for text in ("x" * 129, "é" * 64 + "x"):  # it is bytes that count
        message.parameters["sequence_id"].string_param = text
        error = refusal(message)
        assert error.code is ErrorCode.UNSUPPORTED
        assert error.message == "string correlation ID cannot be longer than 128 characters"


def test_duplicates_are_refused() -> None:
    message = request()
    message.inputs.add(name="x", datatype="INT32", shape=[2])
    assert invalid(message) == "[request id: <id_unknown>] input 'x' already exists in request"
    message = request(id="4")
    message.outputs.add(name="o")
    message.outputs.add(name="o")
    assert invalid(message) == "[request id: 4] output 'o' already exists in request"


def test_the_version_is_checked_before_parameters_and_those_before_data() -> None:
    message = request(raw=[], model_version="x")
    message.parameters["priority"].int64_param = -1
    assert "version" in invalid(message)
    message.model_version = ""
    assert "priority" in invalid(message)
    message.parameters.clear()
    assert invalid(message) == "unable to find data for input tensor 'x' for model 'm' in request."


@pytest.mark.parametrize(
    "datatype, contents, expected",
    [
        ("BOOL", {"bool_contents": [True, False]}, b"\1\0"),
        ("INT8", {"int_contents": [-1, 300]}, b"\xff\x2c"),
        ("INT16", {"int_contents": [-2, 65537]}, np.array([-2, 1], "<i2").tobytes()),
        ("INT32", {"int_contents": [-3, 4]}, np.array([-3, 4], "<i4").tobytes()),
        ("INT64", {"int64_contents": [-3, 2**40]}, np.array([-3, 2**40], "<i8").tobytes()),
        ("UINT8", {"uint_contents": [255, 300]}, b"\xff\x2c"),
        ("UINT16", {"uint_contents": [1, 65538]}, np.array([1, 2], "<u2").tobytes()),
        ("UINT32", {"uint_contents": [1, 2**31]}, np.array([1, 2**31], "<u4").tobytes()),
        ("UINT64", {"uint64_contents": [1, 2**63]}, np.array([1, 2**63], "<u8").tobytes()),
        ("FP32", {"fp32_contents": [0.5, -1]}, np.array([0.5, -1], "<f4").tobytes()),
        ("FP64", {"fp64_contents": [0.1, -1]}, np.array([0.1, -1], "<f8").tobytes()),
        ("BYTES", {"bytes_contents": [b"ab", b""]}, b"\2\0\0\0ab\0\0\0\0"),
        ("FP32", {}, b""),
    ],
)
def test_typed_contents_are_decoded(
    datatype: str, contents: dict[str, Any], expected: bytes
) -> None:
    assert decode(typed(datatype, **contents)).inputs == [Tensor("x", datatype, [2], expected)]


def test_large_typed_contents_are_not_remembered() -> None:
    values = list(range(10_000))
    data = decode(typed("INT32", [10_000], int_contents=values)).inputs[0].data
    assert np.frombuffer(read_bytes(data), "<i4").tolist() == values


@pytest.mark.parametrize(
    "datatype, contents, field_type, expected",
    [
        ("FP32", {"int_contents": [1]}, "INT32", "FP32"),
        ("INT64", {"int_contents": [1]}, "INT32", "INT64"),
        ("FP16", {"fp32_contents": [1]}, "FP32", "FP16"),
        ("BF16", {"bytes_contents": [b"12"]}, "BYTES", "BF16"),
        ("INT8", {"bool_contents": [True]}, "BOOL", "INT8"),
        ("UINT64", {"uint_contents": [1]}, "UINT32", "UINT64"),
        ("FLOAT", {"fp64_contents": [1]}, "FP64", "<invalid>"),
    ],
)
def test_contents_in_the_wrong_field_are_refused(
    datatype: str, contents: dict[str, Any], field_type: str, expected: str
) -> None:
    assert invalid(typed(datatype, **contents)) == (
        "unexpected explicit tensor data for input tensor 'x' for model 'm' of type "
        f"'{field_type}', expected datatype '{expected}'"
    )


def test_contents_in_two_fields_are_refused() -> None:
    assert invalid(typed("INT32", int_contents=[1], fp32_contents=[1])) == (
        "unexpected explicit tensor data for input tensor 'x' for model 'm', "
        "binary data was already supplied."
    )


def test_contents_beside_raw_data_are_refused() -> None:
    message = typed("INT32", int_contents=[1])
    message.raw_input_contents.append(b"")
    assert invalid(message) == (
        "contents field must not be specified when using raw_input_contents for 'x' for model 'm'"
    )


def with_parameters(part: str, **parameters: Any) -> Any:
    """A request whose input `x` or output `o` has these parameters, by type."""
    message = request()
    message.outputs.add(name="o")
    tensor = (message.inputs if part == "x" else message.outputs)[0]
    for key, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
        setattr(tensor.parameters[key], kind, value)
    return message


@pytest.mark.parametrize("part", ["x", "o"])
def test_shared_memory_parameters_are_checked(part: str) -> None:
    region, offset, size = "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"
    wrong = "invalid value type for '{}' parameter for tensor '{}', expected {}."

    def text(**parameters: Any) -> str:
        return invalid(with_parameters(part, **parameters))

    assert text(**{region: 1}) == wrong.format(region, part, "string_param")
    assert text(**{region: "r", offset: "1"}) == wrong.format(offset, part, "int64_param")
    assert text(**{region: "r", size: "1"}) == wrong.format(size, part, "int64_param")
    for key in (offset, size):
        assert text(**{key: 1}) == (
            f"'{key}' can not be specified without 'shared_memory_region' parameter for tensor "
            f"'{part}'"
        )
    assert text(**{region: "r"}) == (
        "'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter "
        f"for tensor '{part}'"
    )
    error = refusal(with_parameters(part, **{region: "r", offset: 0, size: 8}))
    assert error.code is ErrorCode.NOT_FOUND
    assert error.message == "Unable to find shared memory region: 'r'"


def test_contents_beside_shared_memory() -> None:
    message = with_parameters("x", shared_memory_region="r", shared_memory_byte_size=8)
    message.inputs[0].contents.int_contents.append(1)
    assert invalid(message) == (
        "unexpected 'content' provided when using shared memory for input tensor 'x' for model 'm'"
    )


def test_classification_is_read_and_checked() -> None:
    assert invalid(with_parameters("o", classification="3")) == (
        "invalid value type for 'classification' parameter, expected int64_param"
    )
    assert invalid(with_parameters("o", classification=0)) == (
        "invalid value for 'classification' parameter, expected >= 0"
    )
    both = {"shared_memory_region": "r", "shared_memory_byte_size": 4}
    assert invalid(with_parameters("o", classification=1, **both)) == (
        "output can't set both 'shared_memory_region' and 'classification'"
    )
    assert decode(with_parameters("o", classification=3)).classification == Classification({"o": 3})


def test_malformed_messages_are_rejected() -> None:
    with pytest.raises(HostError, match="failed to parse the ModelInferRequest message") as caught:
        decoded(b"\xff\xff\xff")
    assert caught.value.code is ErrorCode.INVALID_ARG


def test_unknown_fields_are_skipped() -> None:
    data = request().SerializeToString()
    unknown = b"\xa0\x06\x01"  # field 100, a varint
    assert decoded(unknown + data + unknown) == decoded(data)


texts = st.text(max_size=5)
parameters = st.dictionaries(
    texts,
    st.one_of(
        st.builds(pb.InferParameter, bool_param=st.booleans()),
        st.builds(pb.InferParameter, int64_param=st.integers(-(2**63), 2**63 - 1)),
        st.builds(pb.InferParameter, string_param=texts),
        st.just(pb.InferParameter()),
    ),
    max_size=3,
)
shapes = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4)
contents = st.none() | st.builds(
    pb.InferTensorContents, int_contents=st.lists(st.integers(-5, 5), max_size=300)
)
inputs = st.builds(
    pb.ModelInferRequest.InferInputTensor,
    name=texts,
    datatype=texts,
    shape=shapes,
    parameters=parameters,
    contents=contents,
)
outputs = st.builds(
    pb.ModelInferRequest.InferRequestedOutputTensor, name=texts, parameters=parameters
)
raw = st.binary(max_size=200) | st.integers(0, 20_000).map(lambda size: b"\x2a" * size)
messages = st.builds(
    pb.ModelInferRequest,
    model_name=texts,
    model_version=texts,
    id=texts,
    parameters=parameters,
    inputs=st.lists(inputs, max_size=3),
    outputs=st.lists(outputs, max_size=3),
    raw_input_contents=st.lists(raw, max_size=3),
).map(lambda message: message.SerializeToString())


def known_fields(message: Any) -> Any:
    """A copy without unknown fields, which protobuf compares too although they mean nothing."""
    copy = type(message)()
    copy.CopyFrom(message)
    copy.DiscardUnknownFields()
    return copy


def assert_read_as_protobuf_reads_it(data: bytes) -> None:
    try:
        expected = known_fields(pb.ModelInferRequest.FromString(data))
    except DecodeError:
        with pytest.raises(HostError):
            parse_infer_request(data)
        return
    message = parse_infer_request(data)
    assert message.model_name == expected.model_name
    assert message.model_version == expected.model_version
    assert message.id == expected.id
    parameters = {key: known_fields(value) for key, value in message.parameters.items()}
    assert parameters == dict(expected.parameters)
    assert [head[:3] for head in message.inputs] == [
        (tensor.name, tensor.datatype, tuple(tensor.shape)) for tensor in expected.inputs
    ]
    for head, tensor in zip(message.inputs, expected.inputs, strict=True):
        special = tensor.HasField("contents") or bool(tensor.parameters)
        assert (head[3] and known_fields(head[3])) == (tensor if special else None)
    parsed_outputs = [(name, output and known_fields(output)) for name, output in message.outputs]
    assert parsed_outputs == [
        (output.name, output if output.parameters else None) for output in expected.outputs
    ]
    raw = [bytes(entry) for entry in message.raw if not isinstance(entry, Block)]
    assert raw == list(expected.raw_input_contents)


def test_a_parameter_with_unknown_fields_is_dropped_as_protobuf_does() -> None:
    assert_read_as_protobuf_reads_it(b'\n\x01m"\x04\n\x00\x08\x00')


@pytest.mark.parametrize("path", ["parameters", "input", "output"])
@pytest.mark.parametrize("at_top", [False, True], ids=["only inside", "inside and at the top"])
def test_unknown_fields_inside_of_parameter_values_change_nothing(path: str, at_top: bool) -> None:
    unknown = b"\xa0\x06\x01"  # field 100, a varint
    message = request()
    message.outputs.add(name="o")
    owner = {"parameters": message, "input": message.inputs[0], "output": message.outputs[0]}[path]
    owner.parameters["k"].MergeFromString(b"\x08\x01" + unknown)  # bool_param: true
    data = message.SerializeToString()
    assert data.count(unknown) == 1
    data += unknown if at_top else b""
    assert_read_as_protobuf_reads_it(data)
    parameters: Any = parse_infer_request(data).parameters
    if path == "input":
        parameters = parse_infer_request(data).inputs[0][3].parameters
    elif path == "output":
        parameters = parse_infer_request(data).outputs[0][1].parameters
    assert parameters["k"].bool_param is True


@given(messages)
def test_messages_are_read_as_protobuf_reads_them(data: bytes) -> None:
    assert_read_as_protobuf_reads_it(data)


@given(messages, messages)
def test_fields_may_come_in_any_order_and_twice(first: bytes, second: bytes) -> None:
    assert_read_as_protobuf_reads_it(second + first)


@given(messages, st.data())
def test_damaged_messages_are_read_as_protobuf_reads_them(data: bytes, draw: st.DataObject) -> None:
    damaged = bytearray(data or b"\0")
    for _ in range(draw.draw(st.integers(1, 3))):
        place = draw.draw(st.integers(0, min(len(damaged), 60) - 1))
        damaged[place] = draw.draw(st.integers(0, 255))
    cut = draw.draw(st.integers(0, len(damaged)))
    assert_read_as_protobuf_reads_it(bytes(damaged))
    assert_read_as_protobuf_reads_it(bytes(damaged[:cut]))
