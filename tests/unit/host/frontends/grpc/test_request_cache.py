"""What is recognised is understood as what it would be if it were taken apart."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from host.errors import HostError
from host.frontends.grpc.codec import parse_infer_request, to_request
from host.frontends.grpc.request_cache import Recurring
from host.inference.request import InferRequest
from host.instances.regions import Regions

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


def understood(data: bytes) -> InferRequest | None:
    try:
        return to_request(parse_infer_request(data), Regions(None))
    except HostError:
        return None


def learn(recurring: Recurring, data: bytes) -> None:
    for _ in range(2):  # what comes once only is not worth it
        message = parse_infer_request(data)
        recurring.learn(data, message, to_request(message, Regions(None)))


def recognised(recurring: Recurring, data: bytes) -> InferRequest | None:
    """What it is known as; what goes with it says the same as the codec does."""
    known = recurring.request(data)
    if known is None:
        return None
    request, said = known
    whole = parse_infer_request(data)
    assert dataclasses.replace(said, id=whole.id, raw=whole.raw) == whole
    return request


def plain(request: InferRequest | None) -> InferRequest | None:
    """With bytes in place of views, and without what it has in common with others."""
    if request is not None:
        request.form = None
        for tensor in request.inputs:
            tensor.data = bytes(tensor.data)
    return request


@given(requests(), NAMES, st.lists(SIZES, min_size=3, max_size=3))
def test_the_next_request_is_understood_as_without_memory(
    message: pb.ModelInferRequest, request_id: str, sizes: list[int]
) -> None:
    recurring = Recurring()
    learn(recurring, message.SerializeToString())
    data = again(message, request_id, sizes)
    known = recognised(recurring, data)
    if known is not None:
        assert plain(known) == plain(understood(data))


def test_another_id_and_other_tensors_are_recognised() -> None:
    message = pb.ModelInferRequest(model_name="m", model_version="3", id="a")
    message.inputs.add(name="x", datatype="FP32", shape=[2, 2])
    message.outputs.add(name="y")
    message.raw_input_contents.append(bytes(16))
    recurring = Recurring()
    learn(recurring, message.SerializeToString())
    for request_id, size in (("", 16), ("b" * 127, 16), ("c", 127), ("c", 128), ("", 1 << 15)):
        known = recognised(recurring, again(message, request_id, [size]))
        assert known is not None, (request_id, size)
        assert known.id == request_id
        assert len(known.inputs[0].data) == size
        assert (known.model_name, known.model_version) == ("m", 3)
        assert known.requested_outputs == ["y"]


def test_what_is_recognised_shares_nothing_with_the_next_request() -> None:
    message = pb.ModelInferRequest(model_name="m")
    message.inputs.add(name="x", datatype="FP32", shape=[2])
    message.outputs.add(name="y")
    message.parameters["kept"].bool_param = True
    message.raw_input_contents.append(bytes(8))
    recurring = Recurring()
    data = message.SerializeToString()
    learn(recurring, data)
    first = recognised(recurring, data)
    assert first is not None
    first.inputs[0].shape.append(1)
    first.requested_outputs.clear()
    first.parameters["more"] = 1
    second = recognised(recurring, data)
    assert second is not None
    assert (second.inputs[0].shape, second.requested_outputs) == ([2], ["y"])
    assert second.parameters == {"kept": True}


@given(requests(), st.data())
def test_no_bytes_are_mistaken_for_a_known_request(
    message: pb.ModelInferRequest, data: st.DataObject
) -> None:
    recurring = Recurring()
    good = message.SerializeToString()
    learn(recurring, good)
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
    known = recognised(recurring, bytes(bad))
    if known is not None:
        assert plain(known) == plain(understood(bytes(bad)))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (2, 0, 1), (0, 2, 1)])
def test_fields_in_any_order_are_understood(order: tuple[int, ...]) -> None:
    name = pb.ModelInferRequest(model_name="m")
    inputs = pb.ModelInferRequest()
    inputs.inputs.add(name="x", datatype="FP32", shape=[1])
    raw = pb.ModelInferRequest(raw_input_contents=[bytes(4)])
    parts = [name.SerializeToString(), inputs.SerializeToString(), raw.SerializeToString()]
    data = b"".join(parts[index] for index in order)
    recurring = Recurring()
    learn(recurring, data)
    known = recognised(recurring, data)
    assert known is None or plain(known) == plain(understood(data))


def test_what_a_load_generator_sends_is_recognised() -> None:
    """It asks for the end of decoupled answers, whatever the model."""
    message = pb.ModelInferRequest(model_name="m")
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    message.inputs.add(name="x", datatype="FP32", shape=[2])
    message.raw_input_contents.append(bytes(8))
    recurring = Recurring()
    learn(recurring, message.SerializeToString())
    assert recognised(recurring, again(message, "7", [8])) is not None


def test_requests_that_take_turns_are_all_recognised() -> None:
    recurring = Recurring()
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
            recurring.learn(data, parsed, to_request(parsed, Regions(None)))
    for rows, data in enumerate(kinds, 1):
        known = recognised(recurring, data)
        assert known is not None
        assert known.parameters == {"rows": rows}


def test_memory_is_bounded() -> None:
    recurring = Recurring()
    for number in range(2000):
        message = pb.ModelInferRequest(model_name=f"m{number}")
        message.inputs.add(name="x", datatype="FP32", shape=[1])
        message.raw_input_contents.append(bytes(4))
        learn(recurring, message.SerializeToString())
    assert len(recurring._last) <= 256
    for number in range(2000):
        message = pb.ModelInferRequest(model_name="m")
        message.inputs.add(name="x", datatype="FP32", shape=[number])
        message.raw_input_contents.append(bytes(4))
        learn(recurring, message.SerializeToString())
    assert len(recurring._known) <= 1024
    assert len(recurring._seen) <= 256
