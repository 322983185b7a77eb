"""`pbhost.Client` and `pbhost.AsyncClient` against a real server, and against Triton."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

import pbhost
from benchmarks.peer import Peer
from benchmarks.servers import free_port, theirs
from pbhost import ErrorCode, HostError
from tests.clients import Client
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until
from tests.integration.test_tls import Certificates

COPY = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse(
            [pb_utils.Tensor("Y", pb_utils.get_input_tensor_by_name(r, "X").as_numpy())])
            for r in requests]
"""
COPY_CONFIG = """
backend: "python"
max_batch_size: {batch}
input [ {{ name: "X", data_type: {type}, dims: [ {dims} ] }} ]
output [ {{ name: "Y", data_type: {type}, dims: [ {dims} ] }} ]
"""
FACTS = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(r) for r in requests]

    def answer(self, request):
        facts = {"id": request.request_id(), "sequence": request.correlation_id(),
                 "flags": request.flags(), "timeout": request.timeout(),
                 "parameters": json.loads(request.parameters())}
        text = np.array([json.dumps(facts).encode()], np.object_)
        scores = np.array([0.1, 0.7, 0.2], np.float32)
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("FACTS", text), pb_utils.Tensor("SCORES", scores)])
"""
FACTS_CONFIG = """
backend: "python"
input [ { name: "X", data_type: TYPE_INT32, dims: [ 1 ], optional: true },
        { name: "Z", data_type: TYPE_INT32, dims: [ 1 ] } ]
output [ { name: "FACTS", data_type: TYPE_STRING, dims: [ 1 ] },
         { name: "SCORES", data_type: TYPE_FP32, dims: [ 3 ] } ]
"""
SUM = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        return [self.add(r) for r in requests]

    def add(self, request):
        id, flags = request.correlation_id(), request.flags()
        if flags & 1:
            self.sums[id] = 0
        self.sums[id] += int(pb_utils.get_input_tensor_by_name(request, "X").as_numpy()[0, 0])
        total = self.sums[id]
        if flags & 2:
            del self.sums[id]
        answer = np.array([[total, len(self.sums)]], np.int32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", answer)])
"""
SUM_CONFIG = """
backend: "python"
max_batch_size: 4
input [ { name: "X", data_type: TYPE_INT32, dims: [ 1 ] } ]
output [ { name: "Y", data_type: TYPE_INT32, dims: [ 2 ] } ]
sequence_batching { oldest { max_candidate_sequences: 8 } }
"""
STEPS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        for request in requests:
            id, flags = request.correlation_id(), request.flags()
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            total = 0 if flags & 1 else self.sums[id]
            sender = request.get_response_sender()
            for _ in range(2):
                total += int(x.ravel()[0])
                answer = np.array([total], np.int32)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", answer)]))
            self.sums[id] = total
            if flags & 2:
                del self.sums[id]
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
STEPS_CONFIG = """
backend: "python"
input [ { name: "X", data_type: TYPE_INT32, dims: [ -1 ] } ]
output [ { name: "Y", data_type: TYPE_INT32, dims: [ 1 ] } ]
sequence_batching { direct { } }
model_transaction_policy { decoupled: true }
"""
WAITS = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        print("waits to be cancelled", flush=True)
        until = time.monotonic() + 60
        while not requests[0].is_cancelled() and time.monotonic() < until:
            time.sleep(0.005)
        print("waits: was cancelled", flush=True)
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError("late"))]
"""
LARGE = 1 << 19  # FP32 elements of 2 MiB


def add_models(repository: RepositoryBuilder) -> None:
    repository.add("pairs", COPY, COPY_CONFIG.format(type="TYPE_INT32", dims="2", batch=4))
    repository.add("texts", COPY, COPY_CONFIG.format(type="TYPE_STRING", dims="-1", batch=0))
    repository.add("floats", COPY, COPY_CONFIG.format(type="TYPE_FP32", dims="-1", batch=0))
    repository.add("large", COPY, COPY_CONFIG.format(type="TYPE_FP32", dims=LARGE, batch=2))
    repository.add("facts", FACTS, FACTS_CONFIG)
    repository.add("sum", SUM, SUM_CONFIG)
    repository.add("waits", WAITS, COPY_CONFIG.format(type="TYPE_FP32", dims="-1", batch=0))
    repository.add("steps", STEPS, STEPS_CONFIG)
    repository.copy("stream", "script")


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    add_models(module_repository)
    flags = ("--allow-client-shm=true", "--model-control-mode=explicit", "--load-model=*")
    return module_serve(module_repository, *flags).wait_started()


@pytest.fixture
def client(host: RunningHost) -> Iterator[pbhost.Client]:
    with pbhost.Client(host.url, timeout=DEADLINE) as client:
        yield client


@pytest.fixture(params=["grpc", "http"])
def either(host: RunningHost, request: pytest.FixtureRequest) -> Iterator[pbhost.Client]:
    """A client of each port, for what both protocols have."""
    with pbhost.Client(url_of(host, request.param), timeout=DEADLINE) as client:
        yield client


def url_of(host: RunningHost, protocol: str) -> str:
    return host.url if protocol == "grpc" else f"http://{host.http_url}"


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    peer = Peer(Path(os.environ.get("PEER", "/tmp/triton-peer")))
    if not peer.python.exists():
        pytest.skip("Triton is not installed: python -m benchmarks --keep installs it")
    repository = RepositoryBuilder(tmp_path_factory.mktemp("repository"))
    add_models(repository)
    with theirs(repository.path, peer) as server:
        yield f"127.0.0.1:{server.grpc_port}"


def error_of(call: Callable[[], Any]) -> tuple[ErrorCode, str]:
    with pytest.raises(HostError) as caught:
        call()
    return caught.value.code, caught.value.message


def check_values(client: pbhost.Client) -> None:
    """Checks that inputs become what the metadata of the model say."""
    pairs = client.infer("pairs", X=[1, 2])["Y"]
    assert (pairs.dtype.name, pairs.tolist()) == ("int32", [[1, 2]])
    assert client.infer("pairs", X=np.ones((3, 2), np.int32))["Y"].shape == (3, 2)
    pairs += 1  # outputs have memory of their own
    texts = client.infer("texts", X=["a", "äö", b"\xff"])["Y"]
    assert texts.tolist() == [b"a", "äö".encode(), b"\xff"]
    assert client.infer("texts", {"X": "one"})["Y"].tolist() == [b"one"]
    assert client.infer("texts", X=np.array(["x", "yz"]))["Y"].tolist() == [b"x", b"yz"]
    assert client.infer("floats", X=1)["Y"].tolist() == [1.0]
    assert client.infer("floats", X=np.arange(6, dtype=np.float32)[::2])["Y"].tolist() == [0, 2, 4]


def check_stream(client: pbhost.Client) -> None:
    """Checks all responses of a decoupled model, and that of another one."""
    numbers = [r["NUMBER"].tolist() for r in client.stream("stream", COMMAND="many=3 last")]
    assert numbers == [[0], [1], [2], [3]]
    assert len(list(client.stream("stream", COMMAND="many=2 final"))) == 2
    assert [r["Y"].tolist() for r in client.stream("floats", X=[2])] == [[2.0]]
    stream = client.stream("stream", COMMAND="respond last_error=sad")
    assert next(stream)["NUMBER"] == [0]
    assert error_of(lambda: next(stream)) == (ErrorCode.NOT_FOUND, "sad")
    assert list(stream) == []


def check_sequence(client: pbhost.Client) -> None:
    """Checks that two sequences keep their sums, and end when their `with` is left."""
    with client.sequence("sum") as first, client.sequence("sum") as second:
        assert first.infer(X=1)["Y"].tolist() == [[1, 1]]
        assert second.infer(X=10)["Y"].tolist() == [[10, 2]]
        assert first.infer(X=2)["Y"].tolist() == [[3, 2]]
        assert second.infer(X=20, end=True)["Y"].tolist() == [[30, 1]]
        assert error_of(lambda: second.infer(X=1))[0] is ErrorCode.INVALID_ARG
    with client.sequence("sum", sequence_id=7) as third:
        assert third.infer(X=5)["Y"].tolist() == [[5, 1]]


def check_sequence_of_streams(client: pbhost.Client) -> None:
    """Checks a sequence whose requests have several responses each."""
    with client.sequence("steps") as sequence:
        assert [r["Y"].item() for r in sequence.stream(X=[1])] == [1, 2]
        assert [r["Y"].item() for r in sequence.stream(X=[10])] == [12, 22]
        assert [r["Y"].item() for r in sequence.stream(X=[100], end=True)] == [122, 222]
        assert error_of(lambda: sequence.stream(X=[1]))[0] is ErrorCode.INVALID_ARG
    for _ in range(2):  # the first sequence ends with its block, or the second could not start
        with client.sequence("steps", sequence_id=9) as sequence:
            assert [r["Y"].item() for r in sequence.stream(X=[1])] == [1, 2]
        assert error_of(lambda: sequence.stream(X=[1]))[0] is ErrorCode.INVALID_ARG


def check_memory_of_streams(client: pbhost.Client, official: Client) -> None:
    """Checks that large inputs of streams go by shared memory."""
    ones = np.ones(2 * LARGE, np.int32)
    with client.sequence("steps") as sequence:
        assert [r["Y"].item() for r in sequence.stream(X=ones)] == [1, 2]
        assert [r["Y"].item() for r in sequence.stream(X=ones, end=True)] == [3, 4]
    regions = [one.byte_size for one in official.get_system_shared_memory_status().regions.values()]
    assert regions == [4 << 20]
    # A server that has been started again does not know the region.
    official.unregister_system_shared_memory()
    with client.sequence("steps") as sequence:
        assert [r["Y"].item() for r in sequence.stream(X=ones, end=True)] == [1, 2]
    client.close()
    assert not official.get_system_shared_memory_status().regions


def check_memory(client: pbhost.Client, official: Client) -> None:
    """Checks that large tensors go by shared memory, until the client is closed."""
    array = np.arange(LARGE, dtype=np.float32)
    for _ in range(3):
        np.testing.assert_array_equal(client.infer("floats", X=array)["Y"], array)
    np.testing.assert_array_equal(client.infer("large", X=array[None])["Y"], array[None])
    assert client.infer("floats", X=[1.0])["Y"].tolist() == [1.0]
    regions = [one.byte_size for one in official.get_system_shared_memory_status().regions.values()]
    assert sorted(regions) == [2 << 20, 4 << 20]
    assert not list(Path("/dev/shm").glob(f"pbhost-client-{os.getpid()}-*"))
    client.close()
    assert not official.get_system_shared_memory_status().regions


def test_infer_of_a_decoupled_model_names_the_method_for_it(either: pbhost.Client) -> None:
    code, text = error_of(lambda: either.infer("stream", COMMAND="respond last"))
    assert code is ErrorCode.UNSUPPORTED
    assert text.endswith(
        "doesn't support models with decoupled transaction policy; use `stream` of the client"
    )


def test_an_output_that_is_not_there_is_named_beside_those_that_are(either: pbhost.Client) -> None:
    with pytest.raises(KeyError, match=r"model 'floats' has no output 'X'; it has Y"):
        either.infer("floats", X=1)["X"]


def test_values_become_what_the_metadata_of_the_model_say(either: pbhost.Client) -> None:
    check_values(either)


def test_a_stream_yields_all_responses_and_its_error(client: pbhost.Client) -> None:
    check_stream(client)


def test_a_sequence_begins_and_ends_with_its_block(either: pbhost.Client) -> None:
    check_sequence(either)


def test_requests_of_a_sequence_may_have_streams(client: pbhost.Client) -> None:
    check_sequence_of_streams(client)


def test_large_inputs_of_streams_go_by_shared_memory(
    host: RunningHost, client: pbhost.Client
) -> None:
    with host.client() as official:
        check_memory_of_streams(client, official)


def test_large_tensors_go_by_shared_memory(host: RunningHost, either: pbhost.Client) -> None:
    with host.client() as official:
        check_memory(either, official)


@pytest.mark.test_all(reason="starts Triton")
def test_triton_answers_the_client_as_well(triton: str) -> None:
    with (
        pbhost.Client(triton, timeout=DEADLINE) as client,
        grpcclient.InferenceServerClient(triton) as official,
    ):
        check_values(client)
        check_stream(client)
        check_sequence(client)
        assert error_of(lambda: client.infer("floats", Q=1))[0] is ErrorCode.INVALID_ARG
        assert error_of(lambda: client.infer("nope", Q=1))[0] is ErrorCode.NOT_FOUND
        facts = client.infer("facts", Z=0, classes={"SCORES": 1}, outputs=["SCORES"], priority=1)
        assert facts["SCORES"].tolist() == [b"0.700000:1"]
        check_sequence_of_streams(client)
        check_memory(client, official)


@pytest.mark.parametrize(
    ("model", "inputs", "text"),
    [
        ("pairs", {"Q": 1}, "model 'pairs' has no input 'Q'; its inputs are X INT32 [-1, 2]"),
        ("pairs", {}, "model 'pairs' requires more inputs: X INT32 [-1, 2]"),
        ("facts", {"X": 1}, "model 'facts' requires more inputs: Z INT32 [1]"),
        ("pairs", {"X": [1, 2, 3]}, "got the shape [3]"),
        ("pairs", {"X": np.ones(2, np.int32)}, "expected INT32 [-1, 2], got the shape [2]"),
        ("pairs", {"X": np.ones((1, 2))}, "got FP64 [1, 2]: convert it with .astype()"),
        ("pairs", {"X": [1.5, 2]}, "got [1.5, 2]"),
        ("pairs", {"X": [1, 1 << 40]}, "got a number outside -2147483648 to 2147483647"),
        ("pairs", {"X": [[1], [1, 2]]}, "got lists that differ in length"),
        ("pairs", {"X": None}, "got None"),
        ("pairs", {"X": [[1, 2]] * 5}, "got a batch of 5, the model takes at most 4"),
        ("texts", {"X": [1]}, "got an element of type int, not str or bytes"),
        ("floats", {"X": np.ones(1, np.complex64)}, "got complex64 [1]"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_before_they_are_sent(
    client: pbhost.Client, host: RunningHost, model: str, inputs: dict[str, Any], text: str
) -> None:
    with host.client() as official:
        before = official.get_inference_statistics(model)
        code, message = error_of(lambda: client.infer(model, inputs))
        assert official.get_inference_statistics(model) == before
    assert code is ErrorCode.INVALID_ARG
    assert text in message


def test_an_unknown_output_or_model_is_refused(either: pbhost.Client) -> None:
    code, text = error_of(lambda: either.infer("floats", X=1, outputs=["Q"]))
    assert (code, text) == (
        ErrorCode.INVALID_ARG,
        "model 'floats' has no output 'Q'; its outputs are Y FP32 [-1]",
    )
    for model, version in (("nope", -1), ("floats", 9)):
        code, _ = error_of(lambda: either.infer(model, X=1, version=version))  # noqa: B023
        assert code in (ErrorCode.NOT_FOUND, ErrorCode.INVALID_ARG)


def test_a_request_has_the_options_of_its_call(either: pbhost.Client) -> None:
    result = either.infer(
        "facts", Z=0, request_id="r1", parameters={"a": True, "b": 2, "c": 0.5, "d": "x"},
        priority=3, queue_timeout=1.5, version=1,
    )  # fmt: skip
    facts = result["FACTS"][0].decode()
    for fact in ('"id": "r1"', '"timeout": 1500000', '"a": true', '"b": 2', '"c": 0.5', '"d": "x"'):
        assert fact in facts
    assert (result.model_name, result.model_version, result.id) == ("facts", 1, "r1")
    only = either.infer("facts", Z=0, outputs=["SCORES"])
    assert list(only.outputs) == ["SCORES"]
    classes = either.infer("facts", Z=0, classes={"SCORES": 2})
    assert classes["SCORES"].tolist() == [b"0.700000:1", b"0.200000:2"]
    assert len(classes["FACTS"]) == 1
    refused: Any = {"p": [1]}
    assert "parameter 'p'" in error_of(lambda: either.infer("facts", Z=0, parameters=refused))[1]


def test_leaving_the_loop_cancels_the_request(host: RunningHost, client: pbhost.Client) -> None:
    before = host.output.count("was cancelled")
    for _ in client.stream("stream", COMMAND="respond cancelled final"):
        break
    wait_until(lambda: host.output.count("was cancelled") == before + 1, "the cancellation")
    with client.stream("stream", COMMAND="respond cancelled final") as stream:
        next(stream)
    wait_until(lambda: host.output.count("was cancelled") == before + 2, "the cancellation")

    async def leave() -> None:
        async with pbhost.AsyncClient(host.url) as other:
            async for _ in other.stream("stream", COMMAND="respond cancelled final"):
                break

    asyncio.run(leave())
    wait_until(lambda: host.output.count("was cancelled") == before + 3, "the cancellation")


def test_a_stub_that_dies_ends_the_stream_with_an_error(client: pbhost.Client) -> None:
    stream = client.stream("stream", COMMAND="respond dies")
    assert next(stream)["NUMBER"] == [0]
    assert error_of(lambda: next(stream))[0] is ErrorCode.UNAVAILABLE
    wait_until(lambda: client.is_ready("stream"), "the next stub")
    code, text = error_of(lambda: list(client.stream("stream", COMMAND="dies")))
    assert code is ErrorCode.UNAVAILABLE
    assert text.endswith("while it ran this request.")  # and not that it is in quarantine
    wait_until(lambda: client.is_ready("stream"), "the next stub")


def test_a_server_that_is_killed_ends_the_stream_with_an_error(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("stream")
    host = serve(repository).wait_started()
    with pbhost.Client(host.url, timeout=DEADLINE) as client:
        stream = client.stream("stream", COMMAND="respond cancelled")
        assert next(stream)["NUMBER"] == [0]
        host.stop(signal.SIGKILL)
        assert error_of(lambda: next(stream))[0] is ErrorCode.UNAVAILABLE
        assert list(stream) == []


def test_a_timeout_ends_a_call(client: pbhost.Client) -> None:
    assert (
        error_of(lambda: list(client.stream("stream", COMMAND="cancelled", timeout=0.5)))[0]
        is ErrorCode.DEADLINE_EXCEEDED
    )
    assert "more than 0 seconds" in error_of(lambda: client.infer("floats", X=1, timeout=0))[1]


def test_metadata_are_read_again_when_a_model_changes(
    host: RunningHost, module_repository: RepositoryBuilder, either: pbhost.Client
) -> None:
    module_repository.add("changing", COPY, COPY_CONFIG.format(type="TYPE_FP32", dims=-1, batch=0))
    either.load_model("changing")
    assert either.infer("changing", X=[1, 2])["Y"].dtype == np.float32
    module_repository.add("changing", COPY, COPY_CONFIG.format(type="TYPE_INT64", dims=-1, batch=0))
    either.load_model("changing")
    # The first one is refused by the server, the second one would be by the either.
    assert either.infer("changing", X=[1, 2])["Y"].dtype == np.int64
    module_repository.add("changing", COPY, COPY_CONFIG.format(type="TYPE_INT8", dims=2, batch=0))
    either.load_model("changing")
    assert either.infer("changing", X=np.ones(2, np.int8))["Y"].dtype == np.int8
    either.unload_model("changing")
    wait_until(lambda: not either.is_ready("changing"), "the unload")
    assert error_of(lambda: either.infer("changing", X=[1, 2]))[0] is ErrorCode.NOT_FOUND


def test_what_a_server_says_about_itself_and_its_models(either: pbhost.Client) -> None:
    wait_until(either.is_ready, "the server")  # a stub may have died before
    assert either.is_ready("floats") and not either.is_ready("nope")
    assert either.metadata()["name"] == "triton"
    assert either.metadata("floats")["inputs"] == [{"name": "X", "datatype": "FP32", "shape": [-1]}]
    assert either.config("pairs")["max_batch_size"] == 4
    assert {"name": "sum", "version": "1", "state": "READY", "reason": ""} in either.models()


def test_the_asynchronous_client_does_the_same(host: RunningHost) -> None:
    array = np.arange(LARGE, dtype=np.float32)

    async def ask() -> None:
        async with pbhost.AsyncClient(host.url, timeout=DEADLINE) as client:
            results = await asyncio.gather(*(client.infer("pairs", X=[n, 0]) for n in range(20)))
            assert [result["Y"].tolist() for result in results] == [[[n, 0]] for n in range(20)]
            responses = client.stream("stream", COMMAND="many=3 last")
            assert [r["NUMBER"].item() async for r in responses] == [0, 1, 2, 3]
            async with client.sequence("sum") as sequence:
                assert (await sequence.infer(X=1))["Y"][0, 0] == 1
                assert (await sequence.infer(X=2))["Y"][0, 0] == 3
            async with client.sequence("steps") as sequence:
                assert [r["Y"].item() async for r in sequence.stream(X=[1])] == [1, 2]
            with pytest.raises(HostError, match="this sequence has ended"):
                await sequence.infer(X=[1])
            for _ in range(2):
                result = await client.infer("floats", X=array)
                np.testing.assert_array_equal(result["Y"], array)
            with pytest.raises(HostError, match="has no input 'Q'"):
                await client.infer("pairs", Q=1)
            with pytest.raises(HostError, match="has no input 'Q'"):
                async for _ in client.stream("stream", Q=1):
                    pass
            with pytest.raises(HostError, match="sad"):
                async for _ in client.stream("stream", COMMAND="last_error=sad"):
                    pass
            assert await client.is_ready("sum") and (await client.config("sum"))["name"] == "sum"
            assert (await client.metadata())["name"] and await client.models()
            await client.load_model("sum")
        with pytest.raises(HostError, match="this client is closed"):
            await client.is_ready()

    asyncio.run(ask())
    with host.client() as official:
        assert not official.get_system_shared_memory_status().regions


def test_the_asynchronous_client_does_the_same_over_http(host: RunningHost) -> None:
    array = np.arange(LARGE, dtype=np.float32)

    async def ask() -> None:
        async with pbhost.AsyncClient(f"http://{host.http_url}", timeout=DEADLINE) as client:
            results = await asyncio.gather(*(client.infer("pairs", X=[n, 0]) for n in range(20)))
            assert [result["Y"].tolist() for result in results] == [[[n, 0]] for n in range(20)]
            async with client.sequence("sum") as sequence:
                assert (await sequence.infer(X=1))["Y"][0, 0] == 1
            result = await client.infer("floats", X=array)
            np.testing.assert_array_equal(result["Y"], array)
            with pytest.raises(HostError, match="HTTP has no streams of tensors"):
                async for _ in client.stream("stream", COMMAND="many=3 last"):
                    pass
            started = host.output.count("waits to be cancelled")
            waiting = asyncio.ensure_future(client.infer("waits", X=[1]))
            await asyncio.to_thread(
                wait_until,
                lambda: host.output.count("waits to be cancelled") > started,
                "the request",
            )
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await asyncio.to_thread(
                wait_until, lambda: "waits: was cancelled" in host.output, "the cancellation"
            )
        with pytest.raises(HostError, match="this client is closed"):
            await client.is_ready()

    asyncio.run(ask())


def test_closing_the_asynchronous_client_is_an_error_of_its_calls(host: RunningHost) -> None:
    async def ask() -> None:
        client = pbhost.AsyncClient(host.url, timeout=DEADLINE)
        await client.metadata("stream")
        before = host.output.count("waits to be cancelled")
        stream = client.stream("stream", COMMAND="cancelled final")
        calls = anext(stream), *(send_again_and_again(client) for _ in range(9))
        tasks = [asyncio.ensure_future(call) for call in calls]
        started = lambda: host.output.count("waits to be cancelled") > before  # noqa: E731
        await asyncio.to_thread(wait_until, started, "the request")
        await client.close()
        ended = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), DEADLINE)
        codes = [getattr(error, "code", error) for error in ended]
        assert codes[0] is ErrorCode.CANCELLED
        assert {*codes[1:]} <= {ErrorCode.CANCELLED, ErrorCode.UNAVAILABLE}  # between requests

    async def send_again_and_again(client: pbhost.AsyncClient) -> None:
        while True:
            await client.infer("floats", X=[1])

    asyncio.run(ask())


def test_an_asynchronous_client_belongs_to_one_event_loop(host: RunningHost) -> None:
    client = pbhost.AsyncClient(host.url, timeout=DEADLINE)
    assert asyncio.run(client.is_ready("floats"))
    code, text = error_of(lambda: asyncio.run(client.is_ready("floats")))
    assert code is ErrorCode.INVALID_ARG
    assert text == "this client belongs to another event loop; create one in each"


def test_a_cancelled_call_does_not_reuse_its_memory(host: RunningHost) -> None:
    """The model may still read the request, and write its response."""
    with host.client() as official:
        with pbhost.Client(host.url, timeout=DEADLINE) as client:
            array = np.zeros(LARGE, np.float32)
            client.infer("floats", X=array)
            before = set(official.get_system_shared_memory_status().regions)
            with pytest.raises(HostError) as caught:
                for _ in range(1000):  # gRPC rounds timeouts up, and some requests are faster
                    client.infer("floats", X=array, timeout=1e-6)
            assert caught.value.code is ErrorCode.DEADLINE_EXCEEDED
            np.testing.assert_array_equal(client.infer("floats", X=array + 1)["Y"], array + 1)
            assert set(official.get_system_shared_memory_status().regions) - before
        assert not official.get_system_shared_memory_status().regions


KILLED = """
import os, sys
import numpy as np
import pbhost

client = pbhost.Client(sys.argv[1])
client.infer("floats", X=np.ones(1 << 20, np.float32))
print("sent", flush=True)
sys.stdin.read()
"""


def test_a_client_that_is_killed_leaves_no_memory(host: RunningHost) -> None:
    with (
        host.client() as official,
        subprocess.Popen(
            [sys.executable, "-c", KILLED, host.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == b"sent\n"
        assert official.get_system_shared_memory_status().regions
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE)
        assert not list(Path("/dev/shm").glob(f"pbhost-client-{process.pid}-*"))
        wait_until(
            lambda: not official.get_system_shared_memory_status().regions, "the end of the region"
        )


def test_a_server_that_starts_later_or_again_is_found(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.add("floats", COPY, COPY_CONFIG.format(type="TYPE_FP32", dims=-1, batch=0))
    array = np.ones(LARGE, np.float32)
    port = free_port()
    flags = (f"--grpc-port={port}", "--allow-client-shm=true")
    with pbhost.Client(f"grpc://127.0.0.1:{port}", timeout=DEADLINE, retries=50) as client:
        ready: list[Any] = []
        thread = threading.Thread(target=lambda: ready.append(client.infer("floats", X=array)))
        thread.start()
        first = serve(repository, *flags)
        thread.join(DEADLINE)
        np.testing.assert_array_equal(ready[0]["Y"], array)
        first.stop()
        serve(repository, *flags[:1]).wait_started()  # this one allows no shared memory
        for _ in range(2):
            np.testing.assert_array_equal(client.infer("floats", X=array)["Y"], array)
    assert not list(Path("/dev/shm").glob(f"pbhost-client-{os.getpid()}-*"))


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("ftp://localhost:8000", "expected grpc://HOST:PORT, grpcs://, http:// or https://, got"),
        ("localhost", "expected grpc://HOST:PORT, grpcs://, http:// or https://, got 'localhost'"),
        ("grpc://localhost:99999", "expected a port from 1 to 65535"),
        ("http://localhost:0", "expected a port from 1 to 65535"),
        ("grpc://localhost:8001/v2", "expected grpc://HOST:PORT"),
        ("", "expected grpc://HOST:PORT"),
    ],
)
def test_a_wrong_url_is_refused_at_once(url: str, text: str) -> None:
    for kind in (pbhost.Client, pbhost.AsyncClient):
        code, message = error_of(lambda: kind(url))  # noqa: B023
        assert code is ErrorCode.INVALID_ARG
        assert text in message


def test_wrong_options_are_refused_at_once(tmp_path: Path) -> None:
    for options, text in (
        ({"ca_file": "x"}, "certificates need TLS: use grpcs://localhost:1"),
        ({"compression": "zip"}, "expected a compression of none, gzip, deflate, got 'zip'"),
        ({"retries": -1}, "expected 0 or more retries"),
        ({"timeout": 0}, "more than 0 seconds"),
        ({"headers": {"a b": "1"}}, "header 'a b' cannot be sent"),
        (
            {"api_key": "k", "headers": {"Authorization": "x"}},
            "expected either api_key or",
        ),
        ({"api_key": "ä"}, "header 'authorization' cannot be sent"),
    ):
        given: Any = options
        assert text in error_of(lambda: pbhost.Client("localhost:1", **given))[1]  # noqa: B023
    missing = str(tmp_path / "missing.pem")
    other = tmp_path / "other.pem"
    other.write_text("no certificate")
    unfit = f"cannot use the certificates of {other}"
    for files, text in (
        ({"ca_file": str(other)}, unfit),
        ({"certificate_file": str(other), "key_file": str(other)}, unfit),
        ({"ca_file": missing}, f"cannot read '{missing}'"),
        ({"key_file": missing}, "needs both certificate_file and key_file"),
    ):
        given = files
        for scheme in ("grpcs", "https"):
            url = f"{scheme}://localhost:1"
            assert text in error_of(lambda: pbhost.Client(url, **given))[1]  # noqa: B023


def test_no_server_is_one_line(host: RunningHost) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    for url, port in (
        (f"grpcs://{host.url}", "gRPC port, with TLS"),
        (nobody, "gRPC port, without TLS"),
        (f"https://{host.http_url}", "HTTP port, with TLS"),
        (f"http://{nobody}", "HTTP port, without TLS"),
        (f"http://{host.url}", "HTTP port, without TLS"),
    ):
        with pbhost.Client(url, retries=0, timeout=DEADLINE) as client:
            code, text = error_of(client.is_ready)
        assert code is ErrorCode.UNAVAILABLE
        assert text.startswith("no answer from ")
        assert text.endswith(f"is it the address of the {port}?")
        assert "\n" not in text


def test_the_answer_of_another_server_is_one_line() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with pbhost.Client(f"http://127.0.0.1:{server.server_port}") as client:
                code, text = error_of(client.models)
        finally:
            server.shutdown()
            thread.join(DEADLINE)
    assert code is ErrorCode.INTERNAL
    assert text.startswith("unexpected answer (status 501) from http://127.0.0.1:")


def test_an_answer_before_the_body_was_read_is_the_error_of_the_call() -> None:
    asked = []

    class Refusal(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            self.send_response(401)
            self.end_headers()
            self.wfile.write(b'{"error": "who are you?"}')

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusal) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with pbhost.Client(f"http://127.0.0.1:{server.server_port}") as client:
                files = {"1/weights": bytes(32 << 20)}
                refused = error_of(lambda: client.load_model("m", files=files))
        finally:
            server.shutdown()
            thread.join(DEADLINE)
    assert refused == (ErrorCode.UNAUTHENTICATED, "who are you?")
    assert len(asked) == 1


def test_keys_certificates_and_compression(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    certificates = Certificates.make(tmp_path)
    keys = tmp_path / "keys"
    keys.write_text("me a-long-secret-key\n")
    repository.copy("identity")
    host = serve(
        repository,
        f"--api-key-file={keys}",
        "--grpc-use-ssl=true",
        f"--grpc-server-cert={certificates['server.pem']}",
        f"--grpc-server-key={certificates['server.key']}",
        "--http-use-ssl=true",
        f"--http-server-cert={certificates['server.pem']}",
        f"--http-server-key={certificates['server.key']}",
    ).wait_started()
    ca_file = certificates["root.pem"]
    for url in (f"grpcs://{host.url}", f"https://{host.http_url}"):
        for compression in ("gzip", "deflate"):
            with pbhost.Client(
                url, ca_file=ca_file, api_key="a-long-secret-key", compression=compression
            ) as client:
                assert client.infer("identity", INPUT0=[1])["OUTPUT0"] == [1]
        with pbhost.Client(url, ca_file=ca_file, api_key="another-key") as client:
            assert error_of(lambda: client.infer("identity", INPUT0=[1]))[0] is (
                ErrorCode.UNAUTHENTICATED
            )
        with pbhost.Client(url, retries=0) as client:
            assert error_of(client.is_ready)[0] is ErrorCode.UNAVAILABLE  # the authority is unknown
    with pbhost.Client(host.url, retries=0) as plain:
        assert error_of(plain.is_ready)[0] is ErrorCode.UNAVAILABLE
