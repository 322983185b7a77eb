"""Converts typed `InferTensorContents` to tensor bytes; large ones in a thread, in parts."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from host.errors import HostError, unavailable
from host.frontends.grpc import contents as converters
from host.frontends.grpc.contents import MIN_LARGE_INPUT_BYTES, split_contents
from host.frontends.grpc.grpc_admin import admin_services
from host.frontends.grpc.infer_request import parse_infer_request, to_request
from host.frontends.grpc.methods import Metadata
from host.frontends.grpc.protobuf_wire import encode_varint
from host.frontends.grpc.service import GrpcService
from host.inference.request import InferRequest, Tensor
from host.instances.regions import Regions
from tests.conftest import DEADLINE
from tests.unit.host.frontends.grpc.echo_core import EchoCore

COUNT = MIN_LARGE_INPUT_BYTES
CONTENTS = pb.ModelInferRequest.InferInputTensor.DESCRIPTOR.fields_by_name["contents"].number
INTS = pb.InferTensorContents.DESCRIPTOR.fields_by_name["int_contents"].number


def infer(model: str = "echo", datatype: str = "INT32", **contents: Any) -> Any:
    """A request with one input of typed contents."""
    message = pb.ModelInferRequest(model_name=model)
    tensor = message.inputs.add(name="INPUT0", datatype=datatype, shape=[COUNT])
    tensor.contents.CopyFrom(pb.InferTensorContents(**contents))
    return message


def decode(message: Any) -> InferRequest:
    """The request of a message with a large input."""
    parsed = parse_infer_request(message.SerializeToString())
    assert parsed.large_inputs
    for large in parsed.large_inputs:
        large.decode("echo", lambda: False)
    return to_request(parsed, Regions(None))


def invalid(message: Any) -> str:
    with pytest.raises(HostError) as caught:
        decode(message)
    return caught.value.message


def field(number: int, value: bytes) -> bytes:
    return bytes([number << 3 | 2]) + encode_varint(len(value)) + value


VALUES = {
    "bool_contents": st.booleans(),
    "int_contents": st.integers(-(2**31), 2**31 - 1),
    "int64_contents": st.integers(-(2**63), 2**63 - 1),
    "uint_contents": st.integers(0, 2**32 - 1),
    "uint64_contents": st.integers(0, 2**64 - 1),
    "fp32_contents": st.floats(width=32, allow_nan=False),
    "fp64_contents": st.floats(allow_nan=False),
    "bytes_contents": st.binary(max_size=90),
}


@given(st.data(), st.sampled_from(sorted(VALUES)), st.sampled_from([8, 16, 64]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_parts_hold_the_same_elements(
    monkeypatch: pytest.MonkeyPatch, data: st.DataObject, name: str, part_bytes: int
) -> None:
    monkeypatch.setattr(converters, "_PART_BYTES", part_bytes)
    values = data.draw(st.lists(VALUES[name], max_size=60))
    parts = list(split_contents(pb.InferTensorContents(**{name: values}).SerializeToString()))
    joined = [x for part in parts for x in getattr(pb.InferTensorContents.FromString(part), name)]
    assert joined == values
    assert all(len(part) <= part_bytes + 102 for part in parts)


def test_large_integers_are_decoded() -> None:
    values = np.arange(COUNT) * 37 - 5
    (tensor,) = decode(infer(int_contents=values.tolist())).inputs
    assert tensor == Tensor("INPUT0", "INT32", [COUNT], values.astype("<i4").tobytes())


def test_large_strings_are_decoded() -> None:
    (tensor,) = decode(infer(datatype="BYTES", bytes_contents=[b"ab"] * COUNT)).inputs
    assert tensor.data == b"\2\0\0\0ab" * COUNT


def test_one_large_string_is_decoded() -> None:
    (tensor,) = decode(infer(datatype="BYTES", bytes_contents=[b"a" * COUNT])).inputs
    assert tensor.data == COUNT.to_bytes(4, "little") + b"a" * COUNT


def test_elements_that_are_not_packed_are_decoded() -> None:
    """Each is a field of its own, and the contents come in two fields."""
    head = pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="INT32", shape=[COUNT])
    contents = field(CONTENTS, bytes([INTS << 3, 7]) * (COUNT // 2)) * 2
    data = field(1, b"echo") + field(5, contents + head.SerializeToString())
    (tensor,) = decode(pb.ModelInferRequest.FromString(data)).inputs
    parsed = parse_infer_request(data)
    (large,) = parsed.large_inputs
    large.decode("echo", lambda: False)
    assert large.data() == tensor.data == (7).to_bytes(4, "little") * COUNT
    assert (large.name, large.shape) == ("INPUT0", (COUNT,))


def test_a_large_input_of_the_wrong_type_is_refused() -> None:
    assert invalid(infer(datatype="FP32", int_contents=[1] * COUNT)) == (
        "unexpected explicit tensor data for input tensor 'INPUT0' for model 'echo' of type "
        "'INT32', expected datatype 'FP32'"
    )


def test_large_contents_in_two_fields_are_refused() -> None:
    assert invalid(infer(int_contents=[1] * COUNT, fp64_contents=[1] * COUNT)) == (
        "unexpected explicit tensor data for input tensor 'INPUT0' for model 'echo', binary data "
        "was already supplied."
    )


def test_large_contents_beside_raw_data_are_refused() -> None:
    message = infer(int_contents=[1] * COUNT)
    message.raw_input_contents.append(b"")
    assert invalid(message) == (
        "contents field must not be specified when using raw_input_contents for 'INPUT0' for "
        "model 'echo'"
    )


def test_large_contents_beside_shared_memory_are_refused() -> None:
    message = infer(int_contents=[1] * COUNT)
    message.inputs[0].parameters["shared_memory_region"].string_param = "r"
    message.inputs[0].parameters["shared_memory_byte_size"].int64_param = 8
    assert invalid(message) == (
        "unexpected 'content' provided when using shared memory for input tensor 'INPUT0' for "
        "model 'echo'"
    )


@pytest.mark.parametrize("broken", [b"\xff" * COUNT, b"\x10" * (COUNT - 1) + b"\x80"])
def test_invalid_contents_are_refused(broken: bytes) -> None:
    head = field(1, b"x") + field(2, b"INT32")
    data = field(1, b"echo") + field(5, head + field(CONTENTS, field(INTS, broken)))
    (large,) = parse_infer_request(data).large_inputs
    large.decode("echo", lambda: False)
    with pytest.raises(HostError, match="invalid contents of input 'x'"):
        large.data()


def test_a_large_input_without_contents_is_parsed_as_a_small_one() -> None:
    message = pb.ModelInferRequest(model_name="echo")
    message.inputs.add(name="a" * COUNT, datatype="INT32", shape=[1])
    message.raw_input_contents.append(b"1234")
    parsed = parse_infer_request(message.SerializeToString())
    assert not parsed.large_inputs and parsed.inputs[0][0] == "a" * COUNT


def test_cancelled_decoding_ends() -> None:
    (large,) = parse_infer_request(infer(int_contents=[1] * COUNT).SerializeToString()).large_inputs
    large.decode("echo", lambda: True)
    assert large.data().nbytes == 0


def test_a_large_request_is_answered() -> None:
    values = np.arange(COUNT, dtype="<i4")

    async def run() -> bytes | HostError:
        answer: asyncio.Future[bytes | HostError] = asyncio.get_running_loop().create_future()
        service = GrpcService(EchoCore(), admin_services(EchoCore()))
        data = infer(int_contents=values.tolist()).SerializeToString()
        service.start_infer(data, answer.set_result, Metadata())
        assert not answer.done() and service.open_requests == 1
        result = await answer
        assert await service.drain(DEADLINE) and service.open_requests == 0
        return result

    result = asyncio.run(run())
    assert isinstance(result, bytes)
    assert pb.ModelInferResponse.FromString(result).raw_output_contents == [values.tobytes()]


@pytest.mark.parametrize(
    "model, text",
    [("missing", "Request for unknown model: 'missing' is not found"), ("bug", "unexpected")],
)
def test_an_error_of_a_large_request_is_answered(model: str, text: str) -> None:
    async def run() -> bytes | HostError:
        answer: asyncio.Future[bytes | HostError] = asyncio.get_running_loop().create_future()
        data = infer(model, int_contents=[1] * COUNT).SerializeToString()
        GrpcService(EchoCore(), admin_services(EchoCore())).start_infer(
            data, answer.set_result, Metadata()
        )
        return await answer

    error = asyncio.run(run())
    assert isinstance(error, HostError) and text in error.message


def test_cancelling_a_large_request_cancels_its_call() -> None:
    async def run() -> bool:
        core = EchoCore()
        data = infer("hold", int_contents=[1] * COUNT).SerializeToString()
        running = GrpcService(core, admin_services(core)).start_infer(
            data, lambda answer: None, Metadata()
        )
        call = await asyncio.to_thread(core.held.get, True, DEADLINE)
        running.cancel()
        await asyncio.to_thread(core.cancelled.get, True, DEADLINE)
        return call.cancelled

    assert asyncio.run(run())


class Client:
    """The other end of a stream. `reads`: whether the stream allows the next message."""

    def __init__(self) -> None:
        self.core = EchoCore()
        self.ids: list[str] = []
        self.ended = asyncio.Event()
        self.error: Exception | None = None
        self.reads = asyncio.Event()
        self.stream = GrpcService(self.core, admin_services(self.core))._open_stream(
            self, Metadata()
        )

    def write_message(self, message: bytes, more: bool) -> bool:
        response = pb.ModelStreamInferResponse.FromString(message)
        assert not response.error_message, response.error_message
        self.ids.append(response.infer_response.id)
        return True

    def resume_reading(self) -> None:
        self.reads.set()

    def finish_stream(self, error: Exception | None = None, retry: int | None = None) -> None:
        self.error = error
        self.ended.set()


def test_responses_of_a_stream_keep_the_order_of_large_requests() -> None:
    async def run() -> Client:
        client = Client()
        for number in range(3):
            message = infer(int_contents=[number] * COUNT)
            message.id = f"large {number}"
            client.reads.clear()
            assert not client.stream.message_received(message.SerializeToString())
            await asyncio.wait_for(client.reads.wait(), DEADLINE)
            small = infer(int_contents=[1])
            small.id = f"small {number}"
            assert client.stream.message_received(small.SerializeToString())
        client.stream.half_closed()
        await asyncio.wait_for(client.ended.wait(), DEADLINE)
        return client

    client = asyncio.run(run())
    assert client.error is None
    assert client.ids == [f"{size} {n}" for n in range(3) for size in ("large", "small")]


def test_a_stream_that_is_cancelled_drops_the_request_that_is_decoded() -> None:
    async def run() -> Client:
        client = Client()
        message = infer("hold", int_contents=[1] * COUNT)
        client.stream.message_received(message.SerializeToString())
        client.stream.cancel()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait(tasks, timeout=DEADLINE)
        return client

    client = asyncio.run(run())
    assert client.core.held.empty() and not client.ids and not client.reads.is_set()


def test_a_drained_stream_ends_after_the_request_that_is_decoded() -> None:
    async def run() -> Client:
        client = Client()
        client.stream.message_received(infer(int_contents=[1] * COUNT).SerializeToString())
        client.stream.finish_after_open_requests(unavailable("bye"))
        assert not client.ended.is_set()
        await asyncio.wait_for(client.ended.wait(), DEADLINE)
        return client

    assert len(asyncio.run(run()).ids) == 1
