"""Requests that are wide, deep, large or many, over both protocols."""

from __future__ import annotations

import gzip
import http.client
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import grpc
import numpy as np
import pytest
import tritonclient.utils.shared_memory as shm
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.clients import InferStream, tensor
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve
from tests.faults.campaign import REPEATS, SCALE, fault
from tests.faults.models import add_models

JSON_SIZE = (48 if SCALE else 6) << 20
"""Bytes of a wide JSON body; a host takes at most 64 MiB."""
TENSOR_ELEMENTS = (16 if SCALE else 4) << 20  # of 4 bytes
MESSAGE_SIZE = (64 if SCALE else 6) << 20
"""Bytes of a wide message of gRPC."""
PATH = "/v2/models/identity/infer"


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    """A host whose clients may load models and register shared memory."""
    add_models(module_repository)
    module_repository.add("broken", "raise RuntimeError('not today')")
    return module_serve(
        module_repository,
        "--model-control-mode=explicit",
        "--load-model=identity",
        "--load-model=witness",
        "--load-model=script",
        "--load-model=stream",
        "--load-model=ask",
        "--allow-client-shm=true",
        "--grpc-engine=h2",
    ).wait_started()


# Bodies of HTTP requests; each is refused with a reason


def post(host: RunningHost, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, str]:
    """The status and the error of an infer request."""
    with closing(http.client.HTTPConnection(host.http_url, timeout=DEADLINE)) as connection:
        connection.request("POST", PATH, body, headers or {})
        response = connection.getresponse()
        return response.status, json.loads(response.read() or b"{}").get("error", "")


def fill(before: bytes, each: bytes, after: bytes, size: int = JSON_SIZE) -> bytes:
    """A body of `size` bytes that repeats `each`, separated by commas."""
    return before + b",".join([each] * (size // (len(each) + 1))) + after


ENTRY = b'{"name":"INPUT0","datatype":"FP32","shape":[1],"data":[1]}'
HEAD = b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1],"data":['
BODIES: dict[str, Callable[[], bytes]] = {
    "numbers": lambda: fill(HEAD, b"1", b"]}]}"),
    "strings": lambda: fill(HEAD, b'"a"', b"]}]}"),
    "empty lists": lambda: fill(HEAD, b"[]", b"]}]}"),
    "inputs": lambda: fill(b'{"inputs":[', ENTRY, b"]}"),
    "empty inputs": lambda: fill(b'{"inputs":[', b"{}", b"]}"),
    "outputs": lambda: fill(b'{"inputs":[' + ENTRY + b'],"outputs":[', b'{"name":"x"}', b"]}"),
    "shapes": lambda: fill(
        b'{"inputs":[{"name":"INPUT0","datatype":"FP32","data":[1],"shape":[', b"1", b"]}]}"
    ),
    "parameters": lambda: (
        b'{"inputs":['
        + ENTRY
        + b'],"parameters":{'
        + b",".join(b'"%d":1' % number for number in range(2_000_000))
        + b"}}"
    ),  # fmt: skip
    "unknown members": lambda: fill(b'{"inputs":[' + ENTRY + b'],"x":[', b"1", b"]}"),
    "a long name": lambda: ENTRY.replace(b"INPUT0", b"a" * JSON_SIZE).join([b'{"inputs":[', b"]}"]),
    "depth": lambda: HEAD + b"[" * (JSON_SIZE // 2) + b"]" * (JSON_SIZE // 2) + b"]}]}",
    "escapes": lambda: fill(b'{"id":"', rb"\u0061", b'","inputs":[' + ENTRY + b"]}"),
    "no end": lambda: b'{"inputs":[' + b" " * JSON_SIZE,
}


@pytest.mark.parametrize("name", BODIES)
def test_a_wide_body_harms_no_other(host: RunningHost, name: str) -> None:
    body = BODIES[name]()
    with fault(f"JSON: {name}", host):
        for _ in range(REPEATS):
            status, _ = post(host, body)
            assert status in (200, 400, 413, 500)


def test_a_compressed_body_harms_no_other(host: RunningHost) -> None:
    """It is 1,000 times as large as what is sent."""
    body = gzip.compress(b" " * (512 << 20), 1)
    with fault("gzip", host):
        for _ in range(REPEATS):
            assert post(host, body, {"Content-Encoding": "gzip"})[0] in (400, 413)


# Messages of gRPC


def field(number: int, value: bytes) -> bytes:
    """A field of protobuf that holds bytes."""
    assert number < 16
    length, size = b"", len(value)
    while size > 127:
        length, size = length + bytes([size & 127 | 128]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + value


def repeat(number: int, value: bytes, size: int = MESSAGE_SIZE) -> bytes:
    """A request to `identity`, and a field of it as often as `size` allows."""
    request = pb.ModelInferRequest(model_name="identity")
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[1])
    request.raw_input_contents.append(b"\0\0\x80?")
    one = field(number, value)
    data: bytes = request.SerializeToString()
    return data + one * (size // len(one))


def parameters() -> bytes:
    """A million parameters."""
    one = pb.InferParameter(int64_param=1).SerializeToString()
    names = (str(number).encode() for number in range(1_000_000))
    return repeat(5, b"", 0) + b"".join(field(4, field(1, name) + field(2, one)) for name in names)


def typed(datatype: str, field_number: int, contents: bytes, count: int) -> bytes:
    """A request to `identity` whose tensor comes as typed contents."""
    request = pb.ModelInferRequest(model_name="identity")
    request.inputs.add(name="INPUT0", datatype=datatype, shape=[count])
    data: bytes = request.inputs[0].SerializeToString()
    return field(1, b"identity") + field(5, data + field(5, field(field_number, contents)))


MESSAGES: dict[str, Callable[[], bytes]] = {
    "ids": lambda: repeat(3, b"a"),
    "model names": lambda: repeat(1, b"identity"),
    "empty raw contents": lambda: repeat(7, b""),
    "small raw contents": lambda: repeat(7, b"\0\0\x80?"),
    "inputs": lambda: repeat(5, field(1, b"INPUT0")),
    "empty inputs": lambda: repeat(5, b""),
    "outputs": lambda: repeat(6, field(1, b"OUTPUT0")),
    "empty outputs": lambda: repeat(6, b""),
    "parameters": parameters,
    "shapes": lambda: repeat(5, field(1, b"x") + field(3, b"\1" * (32 << 20))),
    "typed contents": lambda: repeat(5, field(1, b"x") + field(5, field(2, b"\1" * (16 << 20)))),
    "floats": lambda: typed("FP32", 6, bytes(MESSAGE_SIZE), MESSAGE_SIZE // 4),
    "integers": lambda: typed("INT32", 2, b"\1" * (MESSAGE_SIZE // 4), MESSAGE_SIZE // 4),
    "unknown fields": lambda: repeat(15, b""),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_wide_message_harms_no_other(host: RunningHost, name: str) -> None:
    message = MESSAGES[name]()
    options = [("grpc.max_send_message_length", -1)]
    with (
        fault(f"gRPC: {name}", host),
        grpc.insecure_channel(host.url, options=options) as channel,
    ):
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", bytes, bytes)
        for _ in range(REPEATS):
            try:
                infer(message, timeout=DEADLINE)
            except grpc.RpcError as error:
                expected = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
                assert error.code() in expected, error


# Many requests


def cancel(host: RunningHost) -> None:
    """500 requests, each of which is cancelled at once."""
    with host.client() as client:
        inputs = [tensor("INPUT0", np.ones(1000, np.float32))]
        for _ in range(500):
            client.async_infer("identity", inputs, lambda result, error: None).cancel()


def cancel_streams(host: RunningHost) -> None:
    """20 clients leave in the middle of a stream."""
    for _ in range(20):
        with InferStream(host) as stream:
            stream.send("many=2000 final")
            stream.next()


def ask_for_everything(host: RunningHost) -> None:
    """Eight clients read statistics, index, metadata and metrics."""

    def read(number: int) -> None:
        with (
            host.client() as client,
            closing(http.client.HTTPConnection(host.metrics_url, timeout=DEADLINE)) as metrics,
        ):
            for _ in range(50):
                client.get_inference_statistics()
                client.get_model_repository_index()
                client.get_model_config("identity")
                metrics.request("GET", "/metrics")
                assert metrics.getresponse().read()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, range(8)))


def load_and_unload(host: RunningHost) -> None:
    """Four clients load and unload models; one of them does not load."""

    def load(name: str) -> None:
        with host.client() as client:
            for _ in range(5):
                try:
                    client.load_model(name)
                except InferenceServerException as error:
                    assert "not today" in str(error) or name != "broken", error
                client.unload_model(name)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(load, ["broken", "broken", "missing", "missing"]))


def override_files(host: RunningHost) -> None:
    """Four load requests with a file of 30 MB for a model that does not load."""
    config = json.dumps({"backend": "python"})
    files = {"file:1/model.py": b"raise 1\n", "file:1/data": b"a" * (30 << 20)}
    with host.client() as client:
        for _ in range(4):
            with pytest.raises(InferenceServerException):
                client.load_model("broken", config=config, files=files)
            client.unload_model("broken")


def register_memory(host: RunningHost) -> None:
    """Registers and removes a region 500 times, and names that do not exist."""
    with host.client() as client, ExitStack() as stack:
        region = shm.create_shared_memory_region("faults", "/faults", 1 << 20)
        stack.callback(shm.destroy_shared_memory_region, region)
        for _ in range(500):
            client.register_system_shared_memory("faults", "/faults", 1 << 20)
            client.unregister_system_shared_memory("faults")
        for name in ("/missing", "/../etc/passwd", "", "/" + "a" * 10_000):
            with pytest.raises(InferenceServerException):
                client.register_system_shared_memory("missing", name, 1 << 20)


def change_settings(host: RunningHost) -> None:
    """Changes the settings of log and traces 500 times."""
    with grpc.insecure_channel(host.url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for number in range(500):
            request = pb.LogSettingsRequest()
            request.settings["log_verbose_level"].uint32_param = number % 2
            stub.LogSettings(request, timeout=DEADLINE)
        request = pb.LogSettingsRequest()
        request.settings["log_verbose_level"].uint32_param = 0
        stub.LogSettings(request, timeout=DEADLINE)


def send_large_tensors(host: RunningHost) -> None:
    """Four clients send and receive large tensors at once."""

    def infer(number: int) -> None:
        with host.client() as client:
            array = np.full(TENSOR_ELEMENTS, number, np.float32)
            for _ in range(3):
                result = client.infer("identity", [tensor("INPUT0", array)])
                assert np.array_equal(result.as_numpy("OUTPUT0"), array)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(infer, range(4)))


def read_large_json(host: RunningHost) -> None:
    """400,000 numbers as JSON, both ways."""
    entry = {"name": "INPUT0", "datatype": "FP32", "shape": [400_000], "data": [0.5] * 400_000}
    assert post(host, json.dumps({"inputs": [entry]}).encode())[0] == 200


STORMS: list[Callable[[RunningHost], None]] = [
    cancel,
    cancel_streams,
    ask_for_everything,
    load_and_unload,
    override_files,
    register_memory,
    change_settings,
    send_large_tensors,
    read_large_json,
]


@pytest.mark.parametrize("act", STORMS, ids=lambda act: act.__name__)
def test_many_requests_harm_no_other(host: RunningHost, act: Callable[[RunningHost], None]) -> None:
    with fault(act.__name__, host):
        for _ in range(REPEATS):
            act(host)
