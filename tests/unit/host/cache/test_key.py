"""Which requests have the same key in the response cache."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from host.cache.responses import format_key, request_key
from host.inference.request import DIGEST_SIZE, InferRequest, Tensor


def tensor(name: str = "A", datatype: str = "INT32", shape: tuple[int, ...] = (1, 1)) -> Tensor:
    return Tensor(name, datatype, list(shape), b"\1\0\0\0")


def request(*inputs: Tensor, outputs: tuple[str, ...] = ()) -> InferRequest:
    return InferRequest("m", list(inputs or [tensor()]), requested_outputs=list(outputs))


BASE = request_key(request(), 1)


@pytest.mark.parametrize(
    "other",
    [
        replace(request(), model_name="n"),
        request(tensor(name="B")),
        request(tensor(datatype="UINT32")),
        request(tensor(shape=(1,))),
        request(replace(tensor(), data=b"\2\0\0\0")),
        request(tensor(), tensor("B")),
        request(outputs=("X",)),
    ],
    ids=["model", "name", "data type", "shape", "bytes", "another input", "outputs"],
)
def test_each_part_of_the_key_changes_it(other: InferRequest) -> None:
    assert request_key(other, 1) != BASE


def test_each_version_has_its_own_keys() -> None:
    assert request_key(request(), 2) != BASE


@pytest.mark.parametrize(
    "other",
    [
        replace(request(), id="7"),
        replace(request(), parameters={"a": 1}),
        replace(request(), priority=2),
        replace(request(), timeout_us=5),
        replace(request(), model_version=1),
        request(replace(tensor(), data=memoryview(b"\1\0\0\0"))),
    ],
    ids=["id", "parameters", "priority", "timeout", "how it names the version", "kind of buffer"],
)
def test_other_parts_of_a_request_do_not_change_the_key(other: InferRequest) -> None:
    assert request_key(other, 1) == BASE


def test_the_order_of_inputs_and_outputs_does_not_change_the_key() -> None:
    ab, ba = request(tensor("A"), tensor("B")), request(tensor("B"), tensor("A"))
    assert request_key(ab, 1) == request_key(ba, 1)
    xy, yx = request(outputs=("X", "Y")), request(outputs=("Y", "X"))
    assert request_key(xy, 1) == request_key(yx, 1)


texts = st.text(max_size=3)
parts = st.tuples(texts, texts, st.lists(st.integers(0, 9), max_size=2), st.binary(max_size=5))
Parts = tuple[list[tuple[str, str, list[int], bytes]], set[str]]
"""Makes a request with these inputs (name, data type, shape, bytes) and requested outputs."""

shapes = st.tuples(st.lists(parts, max_size=2, unique_by=lambda part: part[0]), st.sets(texts))


@given(shapes, shapes)
def test_different_requests_have_different_keys(one: Parts, other: Parts) -> None:
    def key(made: Parts) -> bytes:
        inputs, outputs = made
        tensors = [Tensor(*part) for part in inputs]
        return request_key(InferRequest("m", tensors, requested_outputs=list(outputs)), 1)

    def meaning(made: Parts) -> object:
        inputs, outputs = made
        return sorted(inputs), outputs

    assert (key(one) == key(other)) == (meaning(one) == meaning(other))


def test_the_log_shows_the_key_as_a_number() -> None:
    assert format_key(bytes([1] + [0] * (DIGEST_SIZE - 1))) == "1"
    assert format_key(BASE).isdecimal()
