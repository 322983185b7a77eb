"""How values become tensors, without a server."""

from __future__ import annotations

import json
import math
from http.client import HTTPMessage as Message
from typing import Any

import numpy as np
import pytest

from host.client.http_transport import to_http
from host.client.messages import new_request, to_result
from host.client.signature import Signature, TensorSpec
from host.errors import ErrorCode, HostError


def encode(datatype: str, value: Any) -> Any:
    spec = TensorSpec("X", datatype, (-1,))
    (tensor,) = Signature("m", ("1",), {"X": spec}, {}, 0).encode({"X": value})
    return tensor.content


def refusal(datatype: str, value: Any) -> str:
    with pytest.raises(HostError) as caught:
        encode(datatype, value)
    assert caught.value.code is ErrorCode.INVALID_ARG
    return caught.value.message


def test_an_array_of_bits_is_no_bf16() -> None:
    assert "got UINT16 [2]: convert it" in refusal("BF16", np.array([1, 2], np.uint16))
    assert encode("BF16", np.array([1.0], np.float32)).tolist() == [0x3F80]
    assert encode("BF16", [1, 2.0]).tolist() == [0x3F80, 0x4000]


@pytest.mark.parametrize("values", [[1, 2**63], [0, 2**64 - 1], [[2**63, 3]], [2**64 - 1]])
def test_lists_hold_any_integer_of_the_data_type(values: list[Any]) -> None:
    spec = TensorSpec("X", "UINT64", (-1,) * np.ndim(values))
    (tensor,) = Signature("m", ("1",), {"X": spec}, {}, 0).encode({"X": values})
    content: Any = tensor.content
    assert content.tolist() == values
    assert content.dtype == np.uint64


@pytest.mark.parametrize(
    ("datatype", "value"),
    [
        ("UINT64", [1, 2**64]),
        ("UINT64", [-1, 2**63]),
        ("INT64", [1, 2**63]),
        ("UINT64", [1, 2**63, 0.5]),
        ("INT8", [1.0]),
    ],
)
def test_lists_of_other_numbers_are_refused(datatype: str, value: list[Any]) -> None:
    assert "got " in refusal(datatype, value)


@pytest.mark.parametrize(
    ("datatype", "value", "largest"),
    [
        ("FP16", [1e6], "65504"),
        ("FP16", [100_000], "65504"),
        ("FP32", [1.0, -1e300], "3.40282e+38"),
        ("BF16", [3.402e38], "3.38953e+38"),
        ("BF16", [1e39], "3.38953e+38"),
    ],
)
def test_numbers_that_are_too_large_do_not_become_infinite(
    datatype: str, value: list[Any], largest: str
) -> None:
    assert f"got a number outside -{largest} to {largest}" in refusal(datatype, value)


@pytest.mark.parametrize("datatype", ["FP16", "FP32", "FP64", "BF16"])
def test_infinite_numbers_and_nan_may_be_sent(datatype: str) -> None:
    assert len(encode(datatype, [math.inf, -math.inf, math.nan, 1])) == 4


def test_outputs_of_a_server_without_binary_data_are_read_over_http() -> None:
    values = {"BYTES": ["a", "b\0"], "BF16": [1.5, -2], "INT64": [3, 4], "BOOL": [True, False]}
    answer = {
        "model_name": "m",
        "outputs": [
            {"name": name, "datatype": name, "shape": [2], "data": data}
            for name, data in values.items()
        ],
    }
    read = to_http("ModelInfer", new_request("m", "")).read
    result = to_result(read(Message(), memoryview(json.dumps(answer).encode())))
    assert result["BYTES"].tolist() == [b"a", b"b\0"]
    assert result["BF16"].astype(float).tolist() == [1.5, -2]
    assert [result[name].tolist() for name in ("INT64", "BOOL")] == [[3, 4], [True, False]]
