"""The service on each of its engines, called by real clients."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import queue
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest
import tritonclient.grpc as client
import uvloop
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

from host.errors import ErrorCode, HostError
from host.frontends.grpc.grpc_admin import admin_services
from host.frontends.grpc.grpcio_engine import GrpcAioFrontend
from host.frontends.grpc.h2.frontend import H2Frontend
from host.frontends.grpc.methods import GrpcOptions
from host.frontends.grpc.service import SHUTTING_DOWN, GrpcService
from host.frontends.tls import TlsFiles
from host.inference.call import Call
from host.inference.request import InferResponse, Tensor
from tests.conftest import DEADLINE
from tests.unit.host.frontends.grpc.echo_core import EchoCore, echo

TLS = Path(__file__).parent / "tls"

ENGINES = {"grpcio": GrpcAioFrontend, "h2": H2Frontend}

T = TypeVar("T")


class Loop:
    """An event loop in its own thread, as the host's would be to a client."""

    def __init__(self, engine: type[GrpcAioFrontend] | type[H2Frontend]) -> None:
        self.engine = engine
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        result: T = self.start(work).result(DEADLINE)
        return result

    def call(self, function: Callable[[], object]) -> None:
        """Runs a function in the loop, and returns when it has run."""

        async def run() -> None:
            function()

        self.run(run())

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE)
        self._loop.close()


@pytest.fixture(scope="module", params=ENGINES)
def loop(request: pytest.FixtureRequest) -> Iterator[Loop]:
    loop = Loop(ENGINES[request.param])
    yield loop
    loop.close()


class Served:
    """A core behind a listening frontend."""

    def __init__(self, loop: Loop, options: GrpcOptions | None = None) -> None:
        self.core = EchoCore()
        self.loop = loop
        self.frontend = loop.engine(
            GrpcService(self.core, admin_services(self.core)), "127.0.0.1", 0, options
        )
        self.port = loop.run(self.frontend.start())
        self.target = f"127.0.0.1:{self.port}"

    def respond(self, call: Call) -> None:
        self.loop.call(lambda: call.respond(echo(call.request)))

    def close(self) -> None:
        self.loop.run(self.frontend.stop(0))


@pytest.fixture
def served(loop: Loop) -> Iterator[Served]:
    served = Served(loop)
    yield served
    served.close()


@pytest.fixture
def triton(served: Served) -> Iterator[Any]:
    with client.InferenceServerClient(served.target) as triton:
        yield triton


@pytest.fixture
def stub(served: Served) -> Iterator[Any]:
    with grpc.insecure_channel(served.target) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def tensor(array: np.ndarray[Any, Any], name: str = "INPUT0") -> Any:
    value = client.InferInput(name, list(array.shape), client.np_to_triton_dtype(array.dtype))
    value.set_data_from_numpy(array)
    return value


def message(model: str, request_id: str = "", answers: int = 1) -> Any:
    request = pb.ModelInferRequest(model_name=model, id=request_id)
    request.inputs.add(name="INPUT0", datatype="INT32", shape=[1])
    request.raw_input_contents.append(answers.to_bytes(4, "little"))
    return request


def raw_method(channel: grpc.Channel, path: str) -> Any:
    """An RPC of bytes."""
    return channel.unary_unary(f"/{path}", None, None)


class Requests:
    """The requests of a stream: they are sent as the test puts them."""

    def __init__(self, *requests: Any) -> None:
        self._queue: queue.Queue[Any] = queue.Queue()
        for request in requests:
            self._queue.put(request)

    def close(self) -> None:
        self._queue.put(None)

    def __iter__(self) -> Iterator[Any]:
        return iter(functools.partial(self._queue.get, timeout=DEADLINE), None)


def test_the_client_gets_back_what_it_sent(triton: Any) -> None:
    numbers = np.arange(32, dtype=np.float32).reshape(2, 16)
    words = np.array([b"one", b""], dtype=object)
    result = triton.infer(
        "echo", [tensor(numbers), tensor(words, "INPUT1")], request_id="7", parameters={"who": "me"}
    )
    assert np.array_equal(result.as_numpy("OUTPUT0"), numbers)
    assert result.as_numpy("OUTPUT1").tolist() == words.tolist()
    assert result.get_response().id == "7"
    assert result.get_response().parameters["who"].string_param == "me"


def test_a_tensor_of_64_mib_is_echoed(triton: Any) -> None:
    numbers = np.arange(16 << 20, dtype=np.float32)  # 64 MiB
    assert np.array_equal(triton.infer("echo", [tensor(numbers)]).as_numpy("OUTPUT0"), numbers)


def test_compressed_requests(triton: Any) -> None:
    numbers = np.zeros(1000, np.float32)
    result = triton.infer("echo", [tensor(numbers)], compression_algorithm="gzip")
    assert np.array_equal(result.as_numpy("OUTPUT0"), numbers)


def test_the_triton_client_can_call_all_other_rpcs(triton: Any, served: Served) -> None:
    assert triton.is_server_live() and triton.is_server_ready() and triton.is_model_ready("echo")
    assert triton.get_server_metadata().version == "1.2.3"
    assert triton.get_model_metadata("echo").versions == ["1"]
    assert triton.get_model_config("echo").config.name == "echo"
    assert triton.get_inference_statistics("echo").model_stats[0].inference_count == 8
    assert [m.name for m in triton.get_model_repository_index().models] == ["echo", "new"]
    triton.load_model("echo", config="{}", files={"file:1/model.py": b"code"})
    triton.unload_model("echo")
    assert served.core.control.loaded == [("echo", {"config": "{}", "file:1/model.py": b"code"})]
    assert served.core.control.unloaded == [("echo", False)]


def test_an_error_has_its_status_and_text(stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(message("missing"), timeout=DEADLINE)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert caught.value.details() == "Request for unknown model: 'missing' is not found"


def test_a_bug_is_an_internal_error_and_leaves_a_traceback(
    stub: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "pbhost"), pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(message("bug"), timeout=DEADLINE)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert caught.value.details() == "unexpected failure: RuntimeError"
    (record,) = caplog.records
    assert record.exc_info is not None and str(record.exc_info[1]) == "a bug in the core"


def test_unknown_methods_are_unimplemented_on_both_engines(stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.SystemSharedMemoryRegister(pb.SystemSharedMemoryRegisterRequest(), timeout=DEADLINE)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert caught.value.details()


@pytest.mark.parametrize("path", ["inference.GRPCInferenceService/No", "grpc.health.v1.Health/No"])
def test_unknown_methods_are_unimplemented(served: Served, path: str) -> None:
    with grpc.insecure_channel(served.target) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            raw_method(channel, path)(b"", timeout=DEADLINE)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_health_check(served: Served) -> None:
    with grpc.insecure_channel(served.target) as channel:
        check = raw_method(channel, "grpc.health.v1.Health/Check")
        assert check(b"", timeout=DEADLINE) == b"\x08\x01"
        served.core.health.exiting = True
        with pytest.raises(grpc.RpcError) as caught:
            check(b"", timeout=DEADLINE)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_client_that_cancels_cancels_its_call(stub: Any, served: Served) -> None:
    future = stub.ModelInfer.future(message("hold", "7"))
    served.core.held.get(timeout=DEADLINE)
    future.cancel()
    assert served.core.cancelled.get(timeout=DEADLINE) == "7"


def test_a_deadline_cancels_the_call(stub: Any, served: Served) -> None:
    for seconds in (0.2, 2, 20):  # time enough for it to get there
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(message("hold", "7"), timeout=seconds)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        if not served.core.held.empty():
            break
    assert served.core.cancelled.get(timeout=DEADLINE) == "7"


def test_a_stream_keeps_the_order_and_survives_early_errors(stub: Any, served: Served) -> None:
    requests = Requests(message("hold", "1"), message("missing", "2"), message("echo", "3"))
    requests.close()
    answers = stub.ModelStreamInfer(iter(requests), timeout=DEADLINE)
    served.respond(served.core.held.get(timeout=DEADLINE))
    got = list(answers)
    assert [answer.infer_response.id for answer in got] == ["1", "2", "3"]
    assert [bool(answer.error_message) for answer in got] == [False, True, False]
    assert answers.code() is grpc.StatusCode.OK


def test_the_triton_client_can_stream(triton: Any) -> None:
    got: queue.Queue[Any] = queue.Queue()
    triton.start_stream(lambda result, error: got.put(error or result))
    triton.async_stream_infer(
        "repeat", [tensor(np.array([3], np.int32))], enable_empty_final_response=True
    )
    answers = [got.get(timeout=DEADLINE).get_response() for _ in range(4)]
    finals = [answer.parameters["triton_final_response"].bool_param for answer in answers]
    assert finals == [False, False, False, True]
    triton.async_stream_infer("missing", [tensor(np.array([3], np.int32))])
    error = got.get(timeout=DEADLINE)
    assert isinstance(error, InferenceServerException)
    assert error.message() == "Request for unknown model: 'missing' is not found"
    triton.stop_stream()


def test_a_stream_can_request_grpc_errors(stub: Any, served: Served) -> None:
    requests = Requests(message("missing", "1"), message("hold", "2"), message("fail", "3"))
    metadata = [("triton_grpc_error", "true")]
    answers = stub.ModelStreamInfer(iter(requests), timeout=DEADLINE, metadata=metadata)
    early = next(answers)
    assert early.infer_response.id == "1" and early.error_message
    served.respond(served.core.held.get(timeout=DEADLINE))
    assert next(answers).infer_response.id == "2"
    with pytest.raises(grpc.RpcError):
        next(answers)
    assert answers.code() is grpc.StatusCode.INTERNAL
    assert answers.details() == "the model said no"
    requests.close()


@pytest.mark.parametrize("value", ["True", "1", "false"])
def test_grpc_errors_on_a_stream_need_exactly_true(stub: Any, value: str) -> None:
    requests = Requests(message("fail", "1"))
    requests.close()
    metadata = [("triton_grpc_error", value)]
    (got,) = stub.ModelStreamInfer(iter(requests), timeout=DEADLINE, metadata=metadata)
    assert got.error_message == "the model said no"


def test_a_cancelled_stream_cancels_its_calls(stub: Any, served: Served) -> None:
    requests = Requests(message("hold", "1"), message("hold", "2"))
    answers = stub.ModelStreamInfer(iter(requests), timeout=DEADLINE)
    for _ in range(2):
        served.core.held.get(timeout=DEADLINE)
    answers.cancel()
    assert {served.core.cancelled.get(timeout=DEADLINE) for _ in range(2)} == {"1", "2"}
    requests.close()


def test_a_client_that_disconnects_cancels_its_calls(served: Served) -> None:
    requests = Requests(message("hold", "1"))
    channel = grpc.insecure_channel(served.target)
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    answers = stub.ModelStreamInfer(iter(requests), timeout=DEADLINE)
    served.core.held.get(timeout=DEADLINE)
    channel.close()
    assert served.core.cancelled.get(timeout=DEADLINE) == "1"
    requests.close()
    assert answers.code() is grpc.StatusCode.CANCELLED


def test_stopping_refuses_new_requests_and_finishes_open_ones(stub: Any, served: Served) -> None:
    requests = Requests(message("echo", "1"))
    idle = stub.ModelStreamInfer(iter(requests), timeout=DEADLINE)
    assert next(idle).infer_response.id == "1"
    open_call = stub.ModelInfer.future(message("hold", "7"), timeout=DEADLINE)
    held = served.core.held.get(timeout=DEADLINE)
    stopping = served.loop.start(served.frontend.stop(DEADLINE))
    served.loop.call(lambda: None)  # it has begun
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(message("echo"), timeout=DEADLINE)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert caught.value.details() == SHUTTING_DOWN
    with pytest.raises(grpc.RpcError) as caught:
        next(stub.ModelStreamInfer(iter(Requests()), timeout=DEADLINE))
    assert caught.value.details() == SHUTTING_DOWN
    with pytest.raises(grpc.RpcError) as caught:  # an idle stream does not hold the server up
        next(idle)
    assert caught.value.details() == SHUTTING_DOWN
    assert stub.ServerLive(pb.ServerLiveRequest(), timeout=DEADLINE).live
    served.respond(held)
    assert open_call.result().id == "7"
    stopping.result(DEADLINE)
    requests.close()


def test_stopping_cancels_slow_calls(stub: Any, served: Served) -> None:
    open_call = stub.ModelInfer.future(message("hold", "7"), timeout=DEADLINE)
    served.core.held.get(timeout=DEADLINE)
    served.loop.run(served.frontend.stop(0))
    assert served.core.cancelled.get(timeout=DEADLINE) == "7"
    assert isinstance(open_call.exception(), grpc.RpcError)


def test_a_port_that_is_taken(served: Served) -> None:
    second = served.loop.engine(
        GrpcService(served.core, admin_services(served.core)), "127.0.0.1", served.port
    )
    with pytest.raises(HostError) as caught:
        served.loop.run(second.start())
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert caught.value.message == f"Socket '127.0.0.1:{served.port}' already in use "
    served.loop.run(second.stop(0))


def test_a_port_can_be_shared_on_purpose(loop: Loop) -> None:
    first = Served(loop, GrpcOptions(reuse_port=True))
    options = GrpcOptions(reuse_port=True)
    second = loop.engine(
        GrpcService(first.core, admin_services(first.core)), "127.0.0.1", first.port, options
    )
    assert loop.run(second.start()) == first.port
    loop.run(second.stop(0))
    first.close()


class Relay:
    """Passes one connection on to a server, and counts the bytes that it sends back."""

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.received = 0
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, args=(port,))]
        self._threads[0].start()

    def _accept(self, port: int) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(("127.0.0.1", port))
        self._ends = [near, far]
        back = threading.Thread(target=self._pump, args=(far, near, True))
        self._threads.append(back)
        back.start()
        self._pump(near, far, False)

    def _pump(self, source: socket.socket, sink: socket.socket, count: bool) -> None:
        with contextlib.suppress(OSError):  # either end may go first
            while data := source.recv(65536):
                self.received += len(data) if count else 0
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for thread in self._threads:
            thread.join(DEADLINE)
        for end in [self._listener, *self._ends]:
            end.close()


@pytest.mark.parametrize("level, compressed", [("none", False), ("low", True), ("high", True)])
def test_responses_can_be_compressed(loop: Loop, level: str, compressed: bool) -> None:
    served = Served(loop, GrpcOptions(compression_level=level))
    relay = Relay(served.port)
    with client.InferenceServerClient(f"127.0.0.1:{relay.port}") as triton:
        zeros = np.zeros(1 << 18, np.float32)
        assert np.array_equal(triton.infer("echo", [tensor(zeros)]).as_numpy("OUTPUT0"), zeros)
    relay.close()
    assert (relay.received < zeros.nbytes // 10) is compressed
    served.close()


def files(mutual: bool) -> GrpcOptions:
    cert, key = str(TLS / "cert.pem"), str(TLS / "key.pem")
    return GrpcOptions(tls=TlsFiles("grpc", cert, key, cert, mutual))


def infer_over_tls(served: Served, **credentials: Any) -> Any:
    credentials["root_certificates"] = (TLS / "cert.pem").read_bytes()
    secure = grpc.ssl_channel_credentials(**credentials)
    options = [("grpc.ssl_target_name_override", "localhost")]
    with grpc.secure_channel(served.target, secure, options) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        return stub.ModelInfer(message("echo", "7"), timeout=DEADLINE)


def test_a_client_over_tls_is_served(loop: Loop) -> None:
    served = Served(loop, files(mutual=False))
    assert infer_over_tls(served).id == "7"
    served.close()


def test_mutual_tls_needs_a_client_certificate(loop: Loop) -> None:
    served = Served(loop, files(mutual=True))
    cert, key = (TLS / "cert.pem").read_bytes(), (TLS / "key.pem").read_bytes()
    assert infer_over_tls(served, certificate_chain=cert, private_key=key).id == "7"
    with pytest.raises(grpc.RpcError) as caught:
        infer_over_tls(served)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    served.close()


def test_a_response_that_cannot_be_sent_is_an_error(
    stub: Any, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("host.frontends.grpc.infer_response.MAX_MESSAGE_BYTES", 1 << 20)
    size = (1 << 20) + 1  # the compiled lane leaves this to Python
    future = stub.ModelInfer.future(message("hold"), timeout=DEADLINE)
    call = served.core.held.get(timeout=DEADLINE)
    output = Tensor("OUTPUT0", "UINT8", [size], bytes(size))
    served.loop.call(lambda: call.respond(InferResponse("hold", 1, outputs=[output])))
    assert future.exception().code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "exceeds gRPC's byte size limit" in future.exception().details()


def test_very_long_times_are_accepted(loop: Loop) -> None:
    long = 10**11  # milliseconds
    options = GrpcOptions(handshake_timeout=long, keepalive_time=long, max_connection_age=long)
    served = Served(loop, options)
    try:
        with client.InferenceServerClient(served.target) as triton:
            assert triton.is_server_live()
    finally:
        served.close()
