"""Requests with very many elements: they are refused early or decoded while others are served."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import grpc
import numpy as np
import psutil
import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.clients import tensor
from tests.conftest import DEADLINE, GRPC_ENGINE, RepositoryBuilder, RunningHost, Serve

MIB = 1 << 20
PATH = "/v2/models/identity/infer"
METHOD = "/inference.GRPCInferenceService/ModelInfer"
NAMED = pb.ModelInferRequest(model_name="identity").SerializeToString()


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    module_repository.copy("identity")
    return module_serve(module_repository).wait_started()


class Witness:
    """A client that sends small requests one after another, and sees the server's memory."""

    def __init__(self, host: RunningHost) -> None:
        self.answered = 0
        self.peak = 0
        self._host = host
        self._process = psutil.Process(host.process.pid)
        self._stop = threading.Event()
        self._answered = threading.Condition()

    def run(self) -> None:
        """Sends requests until `stop` is called. Raises if one of them fails."""
        given = [tensor("INPUT0", np.ones(4, dtype=np.float32))]
        with self._host.client() as client:
            while not self._stop.is_set():
                client.infer("identity", given, client_timeout=DEADLINE)
                self.peak = max(self.peak, self._process.memory_info().rss)
                with self._answered:
                    self.answered += 1
                    self._answered.notify_all()

    def wait_answered(self, count: int) -> None:
        """Waits until `count` more requests are answered."""
        with self._answered:
            expected = self.answered + count
            assert self._answered.wait_for(lambda: self.answered >= expected, DEADLINE)

    def stop(self) -> None:
        self._stop.set()


@contextmanager
def witness_of(host: RunningHost) -> Iterator[Witness]:
    """A witness that runs; at the end, none of its requests has failed."""
    witness = Witness(host)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(witness.run)
        try:
            witness.wait_answered(1)
            yield witness
            witness.wait_answered(1)
        finally:
            witness.stop()
            running.result(DEADLINE)


def post(
    host: RunningHost, body: bytes, sent: Callable[[], None] = lambda: None
) -> tuple[int, bytes]:
    """Status and body of the answer; `sent` is called when the whole request is sent."""
    with closing(http.client.HTTPConnection(host.http_url, timeout=DEADLINE)) as connection:
        connection.request("POST", PATH, body)
        sent()
        response = connection.getresponse()
        return response.status, response.read()


def numbers(count: int, shape: int, closing_brackets: bytes = b"]") -> bytes:
    head = b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[%d],"data":[' % shape
    tail = b'%b}],"outputs":[{"name":"OUTPUT0","parameters":{"binary_data":true}}]}'
    return head + b"1.5," * (count - 1) + b"1.5" + tail % closing_brackets


def inputs(count: int) -> bytes:
    entry = b'{"name":"INPUT0","datatype":"FP32","shape":[1],"data":[1]}'
    return b'{"inputs":[' + b",".join([entry] * count) + b"]}"


def names(count: int) -> bytes:
    members = b",".join(b'"name-%d":1' % number for number in range(count))
    return b'{"parameters":{%b},%b' % (members, inputs(1)[1:])


WIDE_BODIES: dict[str, tuple[Callable[[], bytes], int, str]] = {
    "numbers beyond the shape": (
        lambda: numbers(12_000_000, 1),
        500,
        "Unable to parse 'data': Shape does not match true shape of 'data' field",
    ),
    "inputs": (
        lambda: inputs(100_000),
        400,
        "expected at most 393216 values besides tensor data in the request JSON, but got 400000",
    ),
    "short inputs": (
        lambda: inputs(10_000),
        400,
        "expected at most 2048 'inputs' in the request JSON, but got 10000",
    ),
    "names": (
        lambda: names(500_000),
        400,
        "expected at most 393216 values besides tensor data in the request JSON, but got 500004",
    ),
    "parameters": (
        lambda: names(10_000),
        400,
        "expected at most 2048 'parameters' in the request JSON, but got 10000",
    ),
    "bytes of names": (
        lambda: names(2_000_000),
        400,
        "expected at most 8388608 bytes besides tensor data in the request JSON, but got 32888976",
    ),
}


@pytest.mark.parametrize("case", WIDE_BODIES)
def test_wide_json_is_refused_before_it_takes_memory(host: RunningHost, case: str) -> None:
    make, status, text = WIDE_BODIES[case]
    body = make()
    with witness_of(host) as witness:
        before = witness.peak
        answer = post(host, body)
        witness.wait_answered(1)
        growth = witness.peak - before
    assert (answer[0], json.loads(answer[1])["error"]) == (status, text)
    assert growth < 3 * len(body) + 32 * MIB  # the parts, the whole, and what was decoded


def test_others_are_served_while_a_large_json_tensor_is_decoded(host: RunningHost) -> None:
    count = 8_000_000
    body = numbers(count, count)
    sent = threading.Event()
    with witness_of(host) as witness, ThreadPoolExecutor(1) as threads:
        answer = threads.submit(post, host, body, sent.set)
        assert sent.wait(DEADLINE)
        sent_at = witness.answered
        status, _ = answer.result(DEADLINE)
        answered_at = witness.answered
    assert status == 200
    assert answered_at - sent_at >= 40  # without the pieces, hardly any: those before and after


WIDE_MESSAGES = {
    "raw_input_contents": b"\x3a\0" * 1_000_000,
    "id": b"\x1a\0" * 10_000_000,
    "outputs": b"\x32\3\n\1o" * 3_000_000,
    "parameters": b"\x22\7\n\1p\x12\2\x08\1" * 1_000_000,
    "inputs": b"\x2a\3\n\1i" * 1_000_000,
    "unknown": b"\xa0\6\1" * 3_000_000,
}


@pytest.mark.parametrize("field", WIDE_MESSAGES)
def test_wide_grpc_messages_are_refused_before_they_are_decoded(
    host: RunningHost, field: str
) -> None:
    message = NAMED + WIDE_MESSAGES[field]
    options = [("grpc.max_send_message_length", -1)]
    with (
        witness_of(host) as witness,
        grpc.insecure_channel(host.url, options) as channel,
    ):
        before = witness.peak
        with pytest.raises(grpc.RpcError) as refused:
            call = channel.unary_unary(METHOD, bytes, bytes)
            call(message, timeout=DEADLINE)
        witness.wait_answered(1)
        growth = witness.peak - before
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details() == (
        f"expected at most 2048 '{field}' fields in ModelInferRequest, but got more"
    )
    if GRPC_ENGINE == "h2":
        assert growth < 3 * len(message) + 32 * MIB


def test_a_model_with_more_tensors_than_the_limit_is_served(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    count = 2100
    names = [f"I{number}" for number in range(count)]
    entries = ", ".join(f'{{name: "{name}" data_type: TYPE_INT32 dims: [1]}}' for name in names)
    code = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("N", np.array([len(r.inputs())], np.int32))]
            )
            for r in requests
        ]
"""
    output = '{name: "N" data_type: TYPE_INT32 dims: [1]}'
    config = f'backend: "python" input [{entries}] output [{output}]'
    repository.add("wide", code, config)
    host = serve(repository).wait_started()
    given = [tensor(name, np.ones(1, dtype=np.int32)) for name in names]
    with host.client() as client:
        assert client.infer("wide", given).as_numpy("N")[0] == count
    body = {
        "inputs": [{"name": name, "datatype": "INT32", "shape": [1], "data": [1]} for name in names]
    }
    with closing(http.client.HTTPConnection(host.http_url, timeout=DEADLINE)) as connection:
        connection.request("POST", "/v2/models/wide/infer", json.dumps(body))
        answer = json.loads(connection.getresponse().read())
    assert answer["outputs"][0]["data"] == [count]
