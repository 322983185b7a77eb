"""Responses on the wire, read back with protobuf."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from host.errors import ErrorCode, HostError
from host.frontends.grpc import infer_response
from host.frontends.grpc.infer_response import (
    encode_empty_stream_response,
    encode_infer_response,
)
from host.inference.request import InferResponse, Tensor

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
tensors = st.builds(
    Tensor,
    name=texts,
    datatype=texts,
    shape=st.lists(st.integers(0, 2**63 - 1), max_size=4),
    data=st.binary(max_size=300) | st.binary(max_size=300).map(lambda data: memoryview(data)),
)
parameters = st.dictionaries(
    texts,
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | texts | st.floats(allow_nan=False),
    max_size=4,
)
responses = st.builds(
    InferResponse,
    model_name=texts,
    model_version=st.integers(0, 2**40),
    id=texts,
    outputs=st.lists(tensors, max_size=4),
    parameters=parameters,
)


def message_of(response: InferResponse) -> pb.ModelInferResponse:
    """The same response built with protobuf."""
    message = pb.ModelInferResponse(
        model_name=response.model_name, model_version=str(response.model_version), id=response.id
    )
    for tensor in response.outputs:
        message.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_output_contents.append(bytes(tensor.data))
    kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    for key, value in response.parameters.items():
        setattr(message.parameters[key], kinds[type(value)], value)
    return message


@given(responses)
def test_an_encoded_response_equals_protobufs(response: InferResponse) -> None:
    data = encode_infer_response(response)
    assert pb.ModelInferResponse.FromString(data) == message_of(response)


@given(responses, st.booleans())
def test_a_streamed_response_says_whether_it_is_the_last(
    response: InferResponse, final: bool
) -> None:
    response.parameters.pop("triton_final_response", None)
    message = pb.ModelStreamInferResponse.FromString(encode_infer_response(response, final))
    assert message.error_message == ""
    expected = message_of(response)
    expected.parameters["triton_final_response"].bool_param = final
    assert message.infer_response == expected


def test_an_output_of_wide_items_counts_bytes() -> None:
    data = np.arange(3, dtype="<i4").data
    response = InferResponse("m", 1, outputs=[Tensor("o", "INT32", [3], data)])
    message = pb.ModelInferResponse.FromString(encode_infer_response(response))
    assert message.raw_output_contents[0] == data.tobytes()
    streamed = pb.ModelStreamInferResponse.FromString(encode_infer_response(response, True))
    assert streamed.infer_response.raw_output_contents[0] == data.tobytes()


def test_a_response_that_grpc_cannot_carry() -> None:
    data = np.empty(2**31 - 1, np.uint8).data  # never touched: it costs address space only
    response = InferResponse("m", 1, outputs=[Tensor("o", "UINT8", [data.nbytes], data)])
    with pytest.raises(HostError) as caught:
        encode_infer_response(response)
    header = pb.ModelInferResponse(model_name="m", model_version="1")
    header.outputs.add(name="o", datatype="UINT8", shape=[data.nbytes])
    size = header.ByteSize() + 1 + 5 + data.nbytes  # a tag and a length of five bytes
    assert caught.value.code is ErrorCode.INVALID_ARG
    assert caught.value.message == (
        f"Response has byte size {size} which exceeds gRPC's byte size limit 2147483647."
    )
    with pytest.raises(HostError, match="exceeds gRPC's byte size limit"):
        encode_infer_response(response, True)


def test_the_size_limit_is_inclusive(monkeypatch: pytest.MonkeyPatch) -> None:
    response = InferResponse("m", 1, outputs=[Tensor("o", "UINT8", [200], bytes(200))])
    size = len(encode_infer_response(response))
    monkeypatch.setattr(infer_response, "MAX_MESSAGE_BYTES", size)
    assert len(encode_infer_response(response)) == size
    monkeypatch.setattr(infer_response, "MAX_MESSAGE_BYTES", size - 1)
    monkeypatch.setattr(infer_response, "encode_response", None)  # it takes small ones only
    with pytest.raises(HostError, match=f"byte size {size} which"):
        encode_infer_response(response)


@pytest.mark.parametrize(
    "response",
    [
        InferResponse("m", 1, parameters={"p": 2**63}),
        InferResponse("m", 1, parameters={"p": object()}),  # type: ignore[dict-item]  # wrong on purpose
        InferResponse("m", 1, outputs=[Tensor("o", "UINT8", [2**63], b"")]),
        InferResponse("m", 1, outputs=[Tensor("\udcff", "UINT8", [0], b"")]),
        InferResponse("m", 1, outputs=[Tensor("o", "UINT8", [1], None)]),  # type: ignore[arg-type]  # wrong on purpose
    ],
)
def test_responses_that_cannot_be_encoded_are_an_internal_error(response: InferResponse) -> None:
    with pytest.raises(HostError, match="response of model 'm' cannot be sent") as caught:
        encode_infer_response(response)
    assert caught.value.code is ErrorCode.INTERNAL
    with pytest.raises(HostError):
        encode_infer_response(response, True)


def test_an_early_error_carries_the_id_only() -> None:
    message = pb.ModelStreamInferResponse.FromString(encode_empty_stream_response("no", "7"))
    expected = pb.ModelStreamInferResponse(error_message="no")
    expected.infer_response.id = "7"
    assert message == expected


def test_an_error_response_names_the_requested_model() -> None:
    data = encode_empty_stream_response("no", "7", "m", "2", True)
    message = pb.ModelStreamInferResponse.FromString(data)
    expected = pb.ModelStreamInferResponse(error_message="no")
    expected.infer_response.CopyFrom(
        pb.ModelInferResponse(id="7", model_name="m", model_version="2")
    )
    expected.infer_response.parameters["triton_final_response"].bool_param = True
    assert message == expected


def test_text_that_utf8_cannot_carry_is_replaced() -> None:
    message = pb.ModelStreamInferResponse.FromString(encode_empty_stream_response("no \udcff", ""))
    assert message.error_message == "no ?"
