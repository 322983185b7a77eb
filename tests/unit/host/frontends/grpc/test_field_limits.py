"""The limits on the fields of a message."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from host.errors import ErrorCode, HostError
from host.frontends.grpc.field_limits import check_field_counts
from host.frontends.grpc.infer_request import parse_infer_request
from host.frontends.grpc.protobuf_wire import MAX_FIELDS

NAMED = pb.ModelInferRequest(model_name="m", model_version="2").SerializeToString()
INPUT = pb.ModelInferRequest.InferInputTensor
OUTPUT = pb.ModelInferRequest.InferRequestedOutputTensor


def request_with(**members: object) -> bytes:
    data: bytes = pb.ModelInferRequest(**members).SerializeToString()
    return data


def parameters(count: int) -> dict[str, pb.InferParameter]:
    return {f"key-{number}": pb.InferParameter(bool_param=True) for number in range(count)}


MANY: dict[str, Callable[[int], bytes]] = {
    "inputs": lambda count: request_with(inputs=[INPUT(name="i")] * count),
    "outputs": lambda count: request_with(outputs=[OUTPUT(name="o")] * count),
    "raw_input_contents": lambda count: request_with(raw_input_contents=[b""] * count),
    "parameters": lambda count: request_with(parameters=parameters(count)),
    "id": lambda count: b"\x1a\x00" * count,
    "model_name": lambda count: b"\n\x01m" * count,
    "unknown": lambda count: b"\xa0\x06\x01" * count,
}
MANY_INSIDE: dict[str, Callable[[int], bytes]] = {
    "'parameters' fields in InferInputTensor": lambda count: request_with(
        inputs=[INPUT(parameters=parameters(count))]
    ),
    "'parameters' fields in InferRequestedOutputTensor": lambda count: request_with(
        outputs=[OUTPUT(parameters=parameters(count))]
    ),
    "'shape' fields in InferInputTensor": lambda count: request_with(
        inputs=[INPUT(shape=[-1] * count)]
    ),
}


@pytest.mark.parametrize("name", MANY)
def test_more_fields_of_one_name_than_the_limit_are_refused(name: str) -> None:
    make = MANY[name]
    parse_infer_request(make(MAX_FIELDS))
    with pytest.raises(HostError) as refused:
        parse_infer_request(make(MAX_FIELDS + 1))
    assert refused.value.code is ErrorCode.INVALID_ARG
    assert refused.value.message == (
        f"expected at most 2048 '{name}' fields in ModelInferRequest, but got more"
    )


@pytest.mark.parametrize("name", MANY_INSIDE)
def test_more_fields_inside_of_a_tensor_than_the_limit_are_refused(name: str) -> None:
    make = MANY_INSIDE[name]
    parse_infer_request(make(MAX_FIELDS))
    with pytest.raises(HostError, match=f"expected at most 2048 {name}, but got more"):
        parse_infer_request(make(MAX_FIELDS + 1))


def test_a_model_with_more_tensors_raises_the_limit_to_their_number() -> None:
    def tensor_counts(model: str, version: str) -> tuple[int, int]:
        assert (model, version) == ("m", "2")
        return 3000, 5000

    for name, most in {"inputs": 3000, "raw_input_contents": 3000, "outputs": 5000}.items():
        make = MANY[name]
        parse_infer_request(NAMED + make(most), tensor_counts)
        with pytest.raises(HostError, match=f"expected at most {most} '{name}'"):
            parse_infer_request(NAMED + make(most + 1), tensor_counts)


def test_elements_of_typed_contents_are_not_limited() -> None:
    contents = pb.InferTensorContents(bytes_contents=[b"a"] * 10_000, int_contents=[1] * 10_000)
    data = request_with(inputs=[INPUT(name="i", contents=contents)])
    message = parse_infer_request(data).inputs[0][3]
    assert len(message.contents.bytes_contents) == 10_000


fields = st.builds(
    lambda number, wire, value: (
        pb.ModelInferRequest(id=value).SerializeToString()
        if wire == 2
        else bytes([number << 3 | wire]) + b"\1" * (8 if wire == 1 else 4 if wire == 5 else 1)
    ),
    st.integers(1, 15),
    st.sampled_from([0, 1, 2, 5]),
    st.text(max_size=200),
)


@given(st.lists(fields, max_size=50), st.integers(0, 100))
def test_messages_with_few_fields_of_any_kind_pass(parts: list[bytes], cut: int) -> None:
    data = b"".join(parts)
    check_field_counts(data)
    check_field_counts(data[:-cut])


@given(st.binary(max_size=2 * MAX_FIELDS))
def test_any_short_message_passes(data: bytes) -> None:
    check_field_counts(data)
