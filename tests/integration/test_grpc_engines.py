"""Both gRPC engines under real clients: what must not depend on which one it is."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
from collections.abc import Coroutine, Iterator
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as grpcclient_aio
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.clients import InferStream, infer_error, run_command, run_script, tensor
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until

INFER = "/inference.GRPCInferenceService/ModelInfer"


@pytest.fixture(scope="module")
def models(module_repository: RepositoryBuilder) -> RepositoryBuilder:
    module_repository.copy("identity", "misbehave", "script", "stream")
    return module_repository


@pytest.fixture(scope="module", params=["grpcio", "h2"])
def host(
    request: pytest.FixtureRequest, models: RepositoryBuilder, module_serve: Serve
) -> Iterator[RunningHost]:
    host = module_serve(models, f"--grpc-engine={request.param}", "--log-verbose=1").wait_started()
    yield host
    assert "Traceback" not in host.output, host.output


@pytest.fixture(scope="module", params=["grpcio", "h2"])
def compressing(
    request: pytest.FixtureRequest, models: RepositoryBuilder, module_serve: Serve
) -> RunningHost:
    """It compresses its responses, which takes seconds where they are large."""
    flags = [f"--grpc-engine={request.param}", "--grpc-infer-response-compression-level=low"]
    return module_serve(models, *flags).wait_started()


def floats(count: int) -> np.ndarray[Any, Any]:
    return np.arange(count, dtype=np.float32)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, DEADLINE))


def test_an_unknown_engine_is_refused(models: RepositoryBuilder, serve: Serve) -> None:
    host = serve(models, "--grpc-engine=fast")
    host.process.wait(DEADLINE)
    host.stop()
    assert "invalid argument for --grpc-engine" in host.output


@pytest.mark.parametrize("count", [0, 1, 1000, 1 << 20, 1 << 24])
def test_tensors_of_any_size_come_back(host: RunningHost, count: int) -> None:
    array = floats(count)
    with host.client() as client:
        for _ in range(2):
            result = client.infer("identity", [tensor("INPUT0", array)])
            assert np.array_equal(result.as_numpy("OUTPUT0"), array)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate", None])
def test_requests_and_responses_may_be_compressed(
    compressing: RunningHost, algorithm: str | None
) -> None:
    array = np.zeros(1 << 20, np.float32)
    with compressing.client() as client:
        result = client.infer(
            "identity", [tensor("INPUT0", array)], compression_algorithm=algorithm
        )
    assert np.array_equal(result.as_numpy("OUTPUT0"), array)


def test_concurrent_calls_of_one_connection_get_their_own_responses(host: RunningHost) -> None:
    async def main() -> None:
        async with grpcclient_aio.InferenceServerClient(host.url) as client:

            async def one(number: int) -> None:
                array = floats(number * 37 % 5000) + number
                result = await client.infer(
                    "identity", [tensor("INPUT0", array)], request_id=str(number)
                )
                assert result.get_response().id == str(number)
                assert np.array_equal(result.as_numpy("OUTPUT0"), array)

            await asyncio.gather(*map(one, range(500)))

    run(main())


def test_large_and_small_requests_share_a_connection(host: RunningHost) -> None:
    async def main() -> None:
        async with grpcclient_aio.InferenceServerClient(host.url) as client:

            async def one(count: int) -> None:
                array = floats(count)
                result = await client.infer("identity", [tensor("INPUT0", array)])
                assert np.array_equal(result.as_numpy("OUTPUT0"), array)

            await asyncio.gather(*(one(4 << 20 if n % 10 == 0 else n) for n in range(60)))

    run(main())


def test_many_connections_are_served_at_once(host: RunningHost) -> None:
    alone = [("grpc.use_local_subchannel_pool", 1)]
    clients = [grpcclient.InferenceServerClient(host.url, channel_args=alone) for _ in range(50)]
    for client in clients:
        assert client.is_server_live()
    for client in clients:
        assert run_command(client, "pid")
        client.close()


def test_a_stream_carries_large_messages_both_ways(host: RunningHost) -> None:
    async def main() -> None:
        arrays = [floats(count) for count in (1, 1 << 20, 3, 1 << 22, 5)]
        async with grpcclient_aio.InferenceServerClient(host.url) as client:

            async def requests() -> Any:
                for array in arrays:
                    yield {"model_name": "identity", "inputs": [tensor("INPUT0", array)]}

            results = []
            async for result, error in client.stream_infer(requests()):
                assert error is None
                results.append(result.as_numpy("OUTPUT0"))
            assert all(map(np.array_equal, results, arrays)) and len(results) == len(arrays)

    run(main())


def test_ten_thousand_responses_keep_their_order(host: RunningHost) -> None:
    with InferStream(host) as stream:
        stream.send("thread:many=10000 final", enable_empty_final_response=True)
        assert stream.read_numbers() == list(range(10000))


def test_an_unread_stream_holds_no_memory_and_delays_no_other(host: RunningHost) -> None:
    """A client takes one response of many large ones, and then nothing."""
    process = psutil.Process(host.process.pid)
    with grpc.insecure_channel(host.url) as channel, host.client() as other:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        request = pb.ModelInferRequest(model_name="stream")
        request.inputs.add(name="COMMAND", datatype="BYTES", shape=[1])
        steps = b"thread:" + b"respond=100000 " * 3000  # 300 MB
        request.raw_input_contents.append(len(steps).to_bytes(4, "little") + steps)
        answers = stub.ModelStreamInfer(iter([request]), timeout=DEADLINE)
        next(answers)
        before = process.memory_info().rss
        for _ in range(20):
            other.infer("identity", [tensor("INPUT0", floats(1000))])
        assert process.memory_info().rss - before < 100e6
        answers.cancel()


def test_a_client_process_that_is_killed_cancels_its_requests(host: RunningHost) -> None:
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=send_waiting_request, args=(host.url,))
    known = host.output.count("waits to be cancelled")
    child.start()
    wait_until(lambda: host.output.count("waits to be cancelled") > known, "the request")
    assert child.pid is not None
    psutil.Process(child.pid).send_signal(signal.SIGKILL)
    child.join(DEADLINE)
    wait_until(lambda: host.output.count("was cancelled") > known, "the cancellation")


def send_waiting_request(url: str) -> None:
    """A client that never gets an answer."""
    with grpcclient.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: None)
        steps = np.array([b"thread:cancelled"], dtype=np.object_)
        client.async_stream_infer("stream", [tensor("COMMAND", steps)])
        signal.pause()


def test_deadlines_and_errors_have_the_same_status(host: RunningHost) -> None:
    with host.client() as client:
        array = [tensor("INPUT0", floats(3))]
        assert infer_error(client.infer, "missing", array)[0] == "StatusCode.NOT_FOUND"
        status, text = infer_error(
            client.infer, "stream", [tensor("COMMAND", np.array([b"x"], "O"))]
        )
        assert status == "StatusCode.UNIMPLEMENTED"
        waits = "until(request.is_cancelled, 'the request to be cancelled')"
        status, text = infer_error(run_script, client, waits, client_timeout=0.2)
        assert (status, text) == ("StatusCode.DEADLINE_EXCEEDED", "Deadline Exceeded")


def test_methods_that_do_not_exist(host: RunningHost) -> None:
    with grpc.insecure_channel(host.url) as channel:
        for path in ("/inference.GRPCInferenceService/No", "/no.Service/Infer"):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(path, bytes, bytes)(b"", timeout=DEADLINE)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("garbage", [b"\xff" * 50, b"\x0a\xff", b"\x08\x01" * 10])
def test_malformed_messages_are_invalid(host: RunningHost, garbage: bytes) -> None:
    with grpc.insecure_channel(host.url) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(INFER, bytes, bytes)(garbage, timeout=DEADLINE)
        assert caught.value.code() in (
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.NOT_FOUND,
        )


def test_a_long_error_reaches_the_client(host: RunningHost) -> None:
    """Longer than what clients take as metadata."""
    with host.client() as client:
        name = "x" * 100000
        with pytest.raises(InferenceServerException) as caught:
            client.infer(name, [tensor("INPUT0", floats(1))])
    assert caught.value.status() in ("StatusCode.NOT_FOUND", "StatusCode.RESOURCE_EXHAUSTED")


def test_stopping_a_host_ends_its_connections(models: RepositoryBuilder, serve: Serve) -> None:
    for engine in ("grpcio", "h2"):
        host = serve(models, f"--grpc-engine={engine}").wait_started()
        with host.client() as client:
            assert client.is_server_live()
            assert host.stop() == 0
            with pytest.raises(InferenceServerException) as caught:
                client.is_server_live()
            assert caught.value.status() == "StatusCode.UNAVAILABLE"
