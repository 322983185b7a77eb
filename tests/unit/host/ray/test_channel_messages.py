"""Requests and responses on their way between deployments."""

from __future__ import annotations

import pickle

import numpy as np

from host.errors import ErrorCode, HostError
from host.inference.request import InferRequest, InferResponse, Tensor
from host.ray.channel_messages import (
    LARGE_BYTES,
    pack_request,
    pack_response,
    unpack_request,
    unpack_response,
)


def test_a_request_arrives_as_it_was_sent() -> None:
    small = Tensor("A", "BYTES", [1], b"\x01\x00\x00\x00x")
    large = Tensor("B", "UINT8", [LARGE_BYTES], memoryview(bytes(LARGE_BYTES)))
    request = InferRequest(
        "m",
        [small, large],
        model_version=3,
        id="7",
        requested_outputs=["Y"],
        parameters={"a": 1.5},
        correlation_id="s",
        flags=2,
        priority=4,
        timeout_us=9,
        max_outstanding_responses=5,
    )
    packed = pack_request(request, {"traceparent": "00"})
    assert [type(buffer) for buffer in packed[1:]] == [bytes, np.ndarray]
    head, *buffers = pickle.loads(pickle.dumps(packed))
    assert head.headers == {"traceparent": "00"}
    arrived = unpack_request(head, buffers)
    for tensor in arrived.inputs:
        tensor.data, tensor.owner = bytes(tensor.data), None
    large.data = bytes(large.data)
    assert arrived == request


def test_responses_errors_and_ends_arrive_as_they_were_sent() -> None:
    output = Tensor("Y", "FP32", [1], bytes(4))
    response = InferResponse("m", 3, "7", [output], {"p": True})
    arrived, final = unpack_response(pickle.loads(pickle.dumps(pack_response(response, False))))
    assert arrived is not None and not final
    assert (arrived.id, arrived.parameters, bytes(arrived.outputs[0].data)) == (
        "7",
        {"p": True},
        bytes(4),
    )
    failed = InferResponse("m", 3, error=HostError(ErrorCode.NOT_FOUND, "no"))
    arrived, final = unpack_response(pickle.loads(pickle.dumps(pack_response(failed, True))))
    assert arrived is not None and arrived.error is not None and final
    assert (arrived.error.code, arrived.error.message) == (ErrorCode.NOT_FOUND, "no")
    assert unpack_response(pickle.loads(pickle.dumps(pack_response(None, True)))) == (None, True)
