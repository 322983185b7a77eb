"""Requests against a model's configuration: every documented refusal, and what passes."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2

from host.errors import ErrorCode, HostError
from host.inference.call import Call
from host.inference.request import InferRequest, RequestShape, Tensor
from host.inference.tensor_spec import InvalidBytesTensor, check_elements, check_elements_in_chunks
from host.inference.validation import Signature

RID = "[request id: r1] "
NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be"
    " prepended to each input shape. If you want to specify the full shape including the batch dim"
    " in your input dims config, try setting max_batch_size to zero. See the model configuration"
    " docs for more info on max_batch_size."
)
FLAT = """
    input { name: "A" data_type: TYPE_FP32 dims: [ 16 ] }
    output { name: "O" data_type: TYPE_FP32 dims: [ 16 ] }
    output { name: "P" data_type: TYPE_FP32 dims: [ 16 ] }
"""
BATCHING = """
    max_batch_size: 4
    input { name: "A" data_type: TYPE_FP32 dims: [ 2 ] }
    input { name: "B" data_type: TYPE_INT64 dims: [ -1 ] optional: true }
    output { name: "O" data_type: TYPE_FP32 dims: [ 2 ] }
"""
PAIR = """
    input { name: "A" data_type: TYPE_INT8 dims: [ 1 ] }
    input { name: "B" data_type: TYPE_INT8 dims: [ 1 ] }
"""
STRINGS = 'input { name: "S" data_type: TYPE_STRING dims: [ -1 ] }'
ANY = 'input { name: "A" data_type: TYPE_FP32 dims: [ -1, -1 ] }'


def signature(config: str) -> Signature:
    return Signature(text_format.Parse(f'name: "m" {config}', model_config_pb2.ModelConfig()))


def tensor(name: str, shape: list[int], data: bytes = b"", datatype: str = "FP32") -> Tensor:
    return Tensor(name, datatype, shape, data)


def request(*inputs: Tensor, outputs: list[str] | None = None, **fields: Any) -> InferRequest:
    fields.setdefault("id", "r1")
    return InferRequest("m", list(inputs), requested_outputs=outputs or [], **fields)


def serialize(*elements: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


def strings(shape: list[int], data: bytes) -> Tensor:
    return tensor("S", shape, data, "BYTES")


def refusal(config: str, asked: InferRequest) -> str:
    with pytest.raises(HostError) as caught:
        signature(config).validate_request(asked)
    assert caught.value.code is ErrorCode.INVALID_ARG
    return caught.value.message


A16 = tensor("A", [16], bytes(64))


def test_valid_request_without_batching_has_batch_size_one() -> None:
    asked = request(A16, batch_size=7)
    signature(FLAT).validate_request(asked)
    assert asked.batch_size == 1
    assert asked.inputs[0] is A16


def test_batch_size_is_the_first_dimension() -> None:
    asked = request(tensor("A", [3, 2], bytes(24)))
    signature(BATCHING).validate_request(asked)
    assert asked.batch_size == 3


def test_batch_of_nothing_is_legal() -> None:
    asked = request(tensor("A", [0, 2]))
    signature(BATCHING).validate_request(asked)
    assert asked.batch_size == 0


def test_requests_of_a_shape_that_has_passed_pass() -> None:
    ours, shape = signature(BATCHING), RequestShape()
    for _ in range(2):
        asked = request(tensor("A", [3, 2], bytes(24)), shape=shape)
        ours.validate_request(asked)
        assert asked.batch_size == 3


def test_a_shape_that_was_refused_is_refused_again() -> None:
    ours, shape = signature(BATCHING), RequestShape()
    for _ in range(2):
        with pytest.raises(HostError, match="batch-size must be <= 4"):
            ours.validate_request(request(tensor("A", [5, 2], bytes(40)), shape=shape))


def test_a_shape_that_one_signature_has_accepted_is_validated_by_another() -> None:
    shape = RequestShape()
    asked = request(tensor("A", [3, 2], bytes(24)), shape=shape)
    signature(BATCHING).validate_request(asked)
    smaller = signature(BATCHING.replace("max_batch_size: 4", "max_batch_size: 2"))
    with pytest.raises(HostError, match="batch-size must be <= 2"):
        smaller.validate_request(asked)


def test_the_content_of_strings_is_checked_in_every_request_of_a_shape() -> None:
    ours, shape = signature(STRINGS), RequestShape()
    ours.validate_request(request(strings([1], serialize(b"abcd")), shape=shape))
    with pytest.raises(HostError, match="incomplete string data"):
        ours.validate_request(request(strings([1], b"\xff\xff\0\0abcd"), shape=shape))


def test_every_request_of_a_shape_is_reshaped() -> None:
    config = 'input { name: "A" data_type: TYPE_INT8 dims: [ 1 ] reshape { shape: [ ] } }'
    ours, shape = signature(config), RequestShape()
    for _ in range(2):
        asked = request(tensor("A", [1], b"x", "INT8"), shape=shape)
        ours.validate_request(asked)
        assert asked.inputs[0].shape == []


def test_memoryviews_of_any_item_size_are_measured_in_bytes() -> None:
    data = np.zeros(16, np.float32).data
    signature(FLAT).validate_request(request(Tensor("A", "FP32", [16], data)))


@pytest.mark.parametrize(
    ("config", "asked", "text"),
    [
        (FLAT, request(A16, A16), RID + "input 'A' already exists in request"),
        (
            FLAT,
            request(A16, outputs=["O", "P", "O"]),
            RID + "output 'O' already exists in request",
        ),
        (
            FLAT,
            request(A16, outputs=["Z", "O", "X"]),
            "unexpected inference output 'X' for model 'm'",
        ),
        (
            PAIR,
            request(tensor("A", [1])),
            RID + "expected 2 inputs but got 1 inputs for model 'm'. Got input(s) ['A'], but"
            " missing required input(s) ['B']. Please provide all required input(s).",
        ),
        (
            PAIR,
            request(),
            RID + "expected 2 inputs but got 0 inputs for model 'm'. Got input(s) [], but missing"
            " required input(s) ['A','B']. Please provide all required input(s).",
        ),
        (
            BATCHING,
            request(),
            RID + "expected number of inputs between 1 and 2 but got 0 inputs for model 'm'. Got"
            " input(s) [], but missing required input(s) ['A']. Please provide all required"
            " input(s).",
        ),
        (
            BATCHING,
            request(tensor("A", []), tensor("B", []), tensor("C", [])),
            RID + "expected number of inputs between 1 and 2 but got 3 inputs for model 'm'. Got"
            " input(s) ['C','B','A'], but missing required input(s) ]. Please provide all required"
            " input(s).",
        ),
        (
            "",
            request(A16),
            RID + "expected 0 inputs but got 1 inputs for model 'm'. Got input(s) ['A'], but"
            " missing required input(s) ]. Please provide all required input(s).",
        ),
        (FLAT, request(tensor("C", [16])), "unexpected inference input 'C' for model 'm'"),
        (
            BATCHING,
            request(tensor("A", [])),
            RID + "input 'A' has no shape but model requires batch dimension for 'm'",
        ),
        (
            BATCHING,
            request(tensor("A", [1, 2], bytes(8)), tensor("B", [2, 1], bytes(16), "INT64")),
            RID + "input 'B' batch size does not match other inputs for 'm'",
        ),
        (
            BATCHING,
            request(tensor("A", [5, 2], bytes(40))),
            RID + "inference request batch-size must be <= 4 for 'm'",
        ),
        (
            BATCHING,
            request(tensor("A", [-1, 2])),
            RID + "inference request batch-size must be <= 4 for 'm'",
        ),
        (
            FLAT,
            request(tensor("A", [16], bytes(64), "INT32")),
            RID + "inference input 'A' data-type is 'INT32', but model 'm' expects 'FP32'",
        ),
        (
            STRINGS,
            request(tensor("S", [1], bytes(64), "STRING")),
            RID + "inference input 'S' data-type is '<invalid>', but model 'm' expects 'BYTES'",
        ),
        (
            BATCHING,
            request(tensor("A", [1, -1])),
            RID + "All input dimensions should be specified for input 'A' for model 'm', got"
            " [1,-1]",
        ),
        (
            FLAT,
            request(tensor("A", [1, 16], bytes(64))),
            RID + "unexpected shape for input 'A' for model 'm'. Expected [16], got [1,16]. ",
        ),
        (
            FLAT,
            request(tensor("A", [])),
            RID + "unexpected shape for input 'A' for model 'm'. Expected [16], got []. ",
        ),
        (
            BATCHING,
            request(tensor("A", [1, 3], bytes(12))),
            RID
            + f"unexpected shape for input 'A' for model 'm'. Expected [-1,2], got [1,3]. {NOTE}",
        ),
        (
            FLAT,
            request(tensor("A", [16], bytes(65))),
            RID + "input byte size mismatch for input 'A' for model 'm'. Expected 64, got 65",
        ),
        (
            BATCHING,
            request(tensor("A", [2, 2], bytes(8))),
            RID + "input byte size mismatch for input 'A' for model 'm'. Expected 16, got 8",
        ),
        (
            ANY,
            request(tensor("A", [2, 3])),
            RID + "input byte size mismatch for input 'A' for model 'm'. Expected 24, got 0",
        ),
        (
            ANY,
            request(tensor("A", [-5, 3])),
            "tensor 'A' contains an invalid dimension [-5,3]",
        ),
        (
            ANY,
            request(tensor("A", [2**31, 2**31])),
            "byte size for tensor 'A' exceeds maximum size of 9223372036854775807",
        ),
        (
            ANY,
            request(tensor("A", [2**62, 0])),
            "byte size for tensor 'A' exceeds maximum size of 9223372036854775807",
        ),
        (
            ANY,
            request(tensor("A", [2**70, 2**70])),
            "byte size for tensor 'A' exceeds maximum size of 9223372036854775807",
        ),
        (
            STRINGS,
            request(strings([-2], b"")),
            "tensor 'S' contains an invalid dimension in shape [-2]",
        ),
        (
            STRINGS,
            request(strings([2**63], b"")),
            "element count for tensor 'S' exceeds maximum size of 9223372036854775807",
        ),
        (
            STRINGS,
            request(strings([2], serialize(b"a", b"b") + b"xx")),
            RID + "incomplete string length indicator for inference input 'S' for model 'm',"
            " expecting 4 bytes but only 2 bytes available. Please make sure the string length"
            " indicator is in one buffer.",
        ),
        (
            STRINGS,
            request(strings([2], serialize(b"a", b"b", b"c", b"d"))),
            RID + "unexpected number of string elements 3 for inference input 'S' for model 'm',"
            " expecting 2",
        ),
        (
            STRINGS,
            request(strings([0], serialize(b"a"))),
            RID + "unexpected number of string elements 1 for inference input 'S' for model 'm',"
            " expecting 0",
        ),
        (
            STRINGS,
            request(strings([3], serialize(b"a", b"b"))),
            RID + "expected 3 string elements for inference input 'S' for model 'm', got 2",
        ),
        (
            STRINGS,
            request(strings([2], serialize(b"a", b"bcd")[:-1])),
            RID + "incomplete string data for inference input 'S', expecting string of length 3"
            " but only 2 bytes available",
        ),
        (
            STRINGS,
            request(strings([4], serialize(b"a", b"bcd")[:-1])),
            RID + "expected 4 string elements for inference input 'S' for model 'm', got 2",
        ),
        (
            STRINGS,
            request(strings([2**62], serialize(b"a"))),
            RID + "expected 4611686018427387904 string elements for inference input 'S' for model"
            " 'm', got 1",
        ),
        (
            FLAT,
            request(tensor("A", [16]), id=""),
            (
                "[request id: <id_unknown>] input byte size mismatch for input 'A' for model 'm'."
                " Expected 64, got 0"
            ),
        ),
    ],
)
def test_an_invalid_request_is_refused(config: str, asked: InferRequest, text: str) -> None:
    assert refusal(config, asked) == text


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (request(A16, A16, outputs=["X"]), "input 'A' already exists in request"),
        (request(outputs=["X"]), "unexpected inference output 'X'"),
        (request(tensor("C", []), tensor("A", [])), "expected 1 inputs"),
        (request(tensor("A", [2], b"", "INT8")), "data-type is 'INT8'"),
        (request(tensor("A", [2], b"")), "unexpected shape"),
    ],
)
def test_the_first_fault_in_the_documented_order_is_reported(
    asked: InferRequest, text: str
) -> None:
    assert text in refusal(FLAT, asked)


def test_optional_input_may_be_left_out_or_given() -> None:
    first = tensor("A", [1, 2], bytes(8))
    signature(BATCHING).validate_request(request(first))
    signature(BATCHING).validate_request(request(first, tensor("B", [1, 3], bytes(24), "INT64")))


def test_a_request_without_inputs_has_batch_size_one() -> None:
    asked = request()
    signature(
        'max_batch_size: 4 input { name: "A" data_type: TYPE_FP32 dims: [1] optional: true }'
    ).validate_request(asked)
    assert asked.batch_size == 1


@pytest.mark.parametrize(
    "type_name", [n for n in model_config_pb2.DataType.keys() if n != "TYPE_INVALID"]
)
def test_every_data_type_has_its_wire_name_and_size(type_name: str) -> None:
    wire = "BYTES" if type_name == "TYPE_STRING" else type_name.removeprefix("TYPE_")
    sizes = {"BOOL": 1, "BYTES": 7, "FP16": 2, "BF16": 2, "FP32": 4, "FP64": 8}
    size = sizes.get(wire) or int(wire.lstrip("UINT")) // 8
    data = serialize(b"abc") if wire == "BYTES" else bytes(size)
    checked = signature(f'input {{ name: "A" data_type: {type_name} dims: [ 1 ] }}')
    checked.validate_request(request(tensor("A", [1], data, wire)))
    with pytest.raises(HostError):
        checked.validate_request(request(tensor("A", [1], data + b"x", wire)))


def test_wildcard_takes_zero_and_needs_no_data() -> None:
    signature(ANY).validate_request(request(tensor("A", [0, 3])))
    signature(STRINGS).validate_request(request(strings([0], b"")))


def test_non_linear_format_skips_the_byte_size() -> None:
    config = 'input { name: "A" data_type: TYPE_FP32 dims: [ 3 ] is_non_linear_format_io: true }'
    signature(config).validate_request(request(tensor("A", [3], bytes(99))))


RESHAPE = """
    max_batch_size: 8
    input { name: "A" data_type: TYPE_INT8 dims: [-1, 4, -1] reshape { shape: [2, -1, 2, -1] } }
    output { name: "O" data_type: TYPE_INT8 dims: [-1, 4, -1] reshape { shape: [2, -1, 2, -1] } }
    output { name: "P" data_type: TYPE_INT8 dims: [ 1 ] reshape { shape: [ ] } }
    output { name: "Q" data_type: TYPE_INT8 dims: [ 1 ] }
"""


def test_input_reaches_the_model_reshaped_and_the_clients_tensor_is_untouched() -> None:
    mine = tensor("A", [3, 5, 4, 7], bytes(3 * 5 * 4 * 7), "INT8")
    asked = request(mine)
    signature(RESHAPE).validate_request(asked)
    assert asked.inputs[0].shape == [3, 2, 5, 2, 7]
    assert asked.inputs[0].data is mine.data
    assert mine.shape == [3, 5, 4, 7]
    assert asked.batch_size == 3


def test_scalar_items_are_reshaped_both_ways() -> None:
    config = """max_batch_size: 8
        input { name: "A" data_type: TYPE_INT8 dims: [ 1 ] reshape { shape: [ ] } }"""
    asked = request(tensor("A", [3, 1], bytes(3), "INT8"))
    signature(config).validate_request(asked)
    assert asked.inputs[0].shape == [3]
    assert signature(RESHAPE).restore_output_shape(tensor("P", [3])).shape == [3, 1]


def test_output_is_restored_for_the_client() -> None:
    data = bytes(3 * 5 * 4 * 7)
    restored = signature(RESHAPE).restore_output_shape(tensor("O", [3, 2, 5, 2, 7], data, "INT8"))
    assert restored.shape == [3, 5, 4, 7]
    assert restored.data is data


@pytest.mark.parametrize("shape", [[3, 5, 4, 7], [3, 1, 5, 2, 7], []])
def test_output_that_is_not_of_the_reshaped_form_stays(shape: list[int]) -> None:
    output = tensor("O", shape)
    assert signature(RESHAPE).restore_output_shape(output) is output


def test_outputs_without_reshape_are_handed_back() -> None:
    for output in (tensor("Q", [3, 1]), tensor("unknown", [3])):
        assert signature(RESHAPE).restore_output_shape(output) is output
    assert signature(FLAT).restore_output_shape(A16) is A16


def sequence_model(data_type: str) -> str:
    return f"""sequence_batching {{ control_input {{ name: "ID" control {{
        kind: CONTROL_SEQUENCE_CORRID data_type: {data_type} }} }} }}"""


@pytest.mark.parametrize(
    ("data_type", "given_id", "given_type", "expected"),
    [
        ("TYPE_STRING", 7, "UINT64", "BYTES"),
        ("TYPE_UINT64", "seven", "BYTES", "UINT64"),
        ("TYPE_INT32", "seven", "BYTES", "INT32"),
    ],
)
def test_correlation_id_of_the_wrong_type_is_refused(
    data_type: str, given_id: int | str, given_type: str, expected: str
) -> None:
    assert refusal(sequence_model(data_type), request(correlation_id=given_id)) == (
        f"{RID}sequence batching control 'ID' data-type is '{given_type}',"
        f" but model 'm' expects '{expected}'"
    )


@pytest.mark.parametrize(
    ("data_type", "given_id"),
    [("TYPE_STRING", "s"), *((f"TYPE_{t}", 5) for t in ("INT32", "UINT32", "INT64", "UINT64"))],
)
def test_correlation_id_of_a_fitting_type_passes(data_type: str, given_id: int | str) -> None:
    signature(sequence_model(data_type)).validate_request(request(correlation_id=given_id))


def calls(*requests: InferRequest) -> list[Call]:
    return [Call(one) for one in requests]


def test_calls_with_equal_variable_shapes_share_a_batch() -> None:
    config = """max_batch_size: 8
        input { name: "A" data_type: TYPE_INT8 dims: [ -1 ] }
        input { name: "R" data_type: TYPE_INT8 dims: [ -1 ] allow_ragged_batch: true }"""
    rule = signature(config).can_share_batch
    one, same, other = calls(
        request(tensor("A", [1, 3]), tensor("R", [1, 3])),
        request(tensor("R", [2, 9]), tensor("A", [2, 3])),
        request(tensor("A", [1, 4]), tensor("R", [1, 3])),
    )
    assert rule(one, same)
    assert not rule(one, other)


def test_calls_share_a_batch_only_with_the_same_optional_inputs() -> None:
    rule = signature(BATCHING).can_share_batch
    a, b = tensor("A", [1, 2]), tensor("B", [1, 2])
    one, same, other = calls(request(a, b), request(b, a), request(a))
    assert rule(one, same)
    assert not rule(one, other)
    assert not rule(other, one)


def test_calls_of_fixed_shape_always_share_a_batch() -> None:
    one, two = calls(request(tensor("A", [1, 16])), request(tensor("A", [4, 16])))
    assert signature(f"max_batch_size: 4 {FLAT}").can_share_batch(one, two)


def test_calls_that_want_different_outputs_share_a_batch() -> None:
    one, two = calls(request(A16, outputs=["O"]), request(A16, outputs=["P"]))
    assert signature(FLAT).can_share_batch(one, two)


def test_it_is_the_models_shape_that_has_to_be_equal() -> None:
    """Both requests have four elements each, which the model gets in different shapes."""
    config = """max_batch_size: 8
        input { name: "A" data_type: TYPE_INT8 dims: [ -1, -1 ]
                reshape { shape: [ -1, 1, -1 ] } }"""
    checked = signature(config)
    one, same, other = (
        request(tensor("A", [1, *shape], bytes(4), "INT8")) for shape in ([2, 2], [2, 2], [4, 1])
    )
    for each in (one, same, other):
        checked.validate_request(each)
    assert one.inputs[0].shape == [1, 2, 1, 2]
    first, second, third = calls(one, same, other)
    assert checked.can_share_batch(first, second)
    assert not checked.can_share_batch(first, third)


SHAPED = """max_batch_size: 4
    input { name: "N" data_type: TYPE_INT32 dims: [ 2 ] is_shape_tensor: true }
    input { name: "A" data_type: TYPE_INT8 dims: [ -1 ] }"""


def sizes(*values: int) -> Tensor:
    return tensor("N", [len(values)], struct.pack(f"<{len(values)}i", *values), "INT32")


def test_a_shape_tensor_has_the_size_of_the_batch_as_its_first_value_and_no_batch() -> None:
    asked = request(sizes(2, 5, 6), tensor("A", [2, 3], bytes(6), "INT8"))
    signature(SHAPED).validate_request(asked)
    assert asked.batch_size == 2
    assert asked.inputs[0].shape == [3]
    short = request(sizes(5, 6), tensor("A", [2, 3], bytes(6), "INT8"))
    assert "Expected [3], got [2]" in refusal(SHAPED, short)


def test_calls_share_a_batch_only_with_equal_shape_tensors_but_for_the_first_value() -> None:
    a = tensor("A", [1, 3], bytes(3), "INT8")
    one, same, other = calls(*(request(sizes(n, 5, m), a) for n, m in ((1, 6), (2, 6), (1, 7))))
    assert signature(SHAPED).can_share_batch(one, same)
    assert not signature(SHAPED).can_share_batch(one, other)


def test_tensors_in_other_formats_may_have_any_number_of_bytes() -> None:
    config = """input { name: "A" data_type: TYPE_INT8 dims: [ 3, 2, 2 ]
        is_non_linear_format_io: true }"""
    signature(config).validate_request(request(tensor("A", [3, 2, 2], bytes(128), "INT8")))


def reference(data: bytes, count: int) -> bool:
    """Whether the data is exactly `count` elements, the plain way."""
    while len(data) >= 4:
        length = int.from_bytes(data[:4], "little")
        if len(data) - 4 < length:
            return False
        data = data[4 + length :]
        count -= 1
    return not data and count == 0


def walks(data: bytes | memoryview, count: int) -> bool:
    try:
        check_elements(data, count)
    except InvalidBytesTensor:
        return False
    return True


elements = st.lists(
    st.one_of(st.binary(max_size=6), st.integers(0, 300).map(bytes), st.just(b"text")), max_size=80
) | st.lists(st.text("ab", min_size=1, max_size=9).map(str.encode), min_size=64, max_size=99)


@given(elements)
def test_walk_accepts_what_serialising_makes(items: list[bytes]) -> None:
    data = serialize(*items)
    assert walks(data, len(items))
    assert walks(memoryview(data), len(items))
    assert not walks(data, len(items) + 1)


@given(st.binary(max_size=40), st.integers(0, 12))
def test_walk_agrees_with_the_reference_on_noise(data: bytes, count: int) -> None:
    assert walks(data, count) == reference(data, count)


@given(elements, st.integers(0, 2**32), st.integers(0, 255), st.integers(-2, 2))
def test_walk_agrees_with_the_reference_on_damaged_data(
    items: list[bytes], place: int, value: int, extra: int
) -> None:
    data = bytearray(serialize(*items))
    if data:
        data[place % len(data)] = value
    count = max(0, len(items) + extra)
    assert walks(bytes(data), count) == reference(bytes(data), count)


@given(st.integers(64, 90), st.integers(0, 5), st.integers(0, 2**32), st.integers(0, 255))
def test_walk_agrees_with_the_reference_on_damaged_elements_of_one_length(
    count: int, length: int, place: int, value: int
) -> None:
    data = bytearray(serialize(*[b"x" * length] * count))
    data[place % len(data)] = value
    assert walks(bytes(data), count) == reference(bytes(data), count)


@given(elements, st.integers(4, 40), st.integers(0, 2**32), st.integers(0, 255), st.integers(-2, 2))
def test_walk_in_pieces_says_what_a_walk_over_all_says(
    items: list[bytes], most: int, place: int, value: int, extra: int
) -> None:
    damaged = bytearray(serialize(*items))
    if damaged:
        damaged[place % len(damaged)] = value
    for data in (serialize(*items), bytes(damaged)):
        count = max(0, len(items) + extra)
        said: list[str] = []
        for size in (most, max(4, len(data))):
            given: list[int] = []

            def part(
                begin: int, length: int, data: bytes = data, given: list[int] = given
            ) -> bytes:
                given.append(length)
                return data[begin : begin + length]

            try:
                check_elements_in_chunks(part, len(data), count, size)
            except InvalidBytesTensor as fault:
                said.append(fault.text("T", "m"))
            else:
                said.append("fine")
            assert max(given, default=0) <= size
        assert said[0] == said[1]
        assert (said[0] == "fine") == reference(data, count)


def test_walk_does_not_take_longer_for_more_declared_elements() -> None:
    assert not walks(serialize(b"a"), 2**62)
    assert not walks(b"", 2**62)


def test_length_beyond_the_buffer_is_not_followed() -> None:
    assert not walks(b"\xff\xff\xff\xff", 1)
    assert not walks(b"\xff\xff\xff\xff" * 100, 100)
