"""Bodies of HTTP requests that are written to shared memory as they arrive."""

from __future__ import annotations

import hashlib
import json
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing
from http.client import HTTPResponse

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until

DIGESTS = """
import hashlib
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(r) for r in requests]

    def answer(self, request):
        digests = [hashlib.sha1(t.as_numpy().tobytes()).hexdigest() for t in request.inputs()]
        output = pb_utils.Tensor("DIGESTS", np.array(digests, np.object_))
        return pb_utils.InferenceResponse([output])
"""
CONFIG = """
backend: "python"
input [
  { name: "A" data_type: TYPE_UINT8 dims: [ -1 ] },
  { name: "B" data_type: TYPE_UINT8 dims: [ -1 ] optional: true },
  { name: "C" data_type: TYPE_UINT8 dims: [ -1 ] optional: true }
]
output [ { name: "DIGESTS" data_type: TYPE_STRING dims: [ -1 ] } ]
"""
MIB = 1 << 20


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    module_repository.add("digests", DIGESTS, CONFIG)
    return module_serve(module_repository).wait_started()


@pytest.fixture
def connection(host: RunningHost) -> Iterator[socket.socket]:
    with connect(host) as connected:
        yield connected


def connect(host: RunningHost) -> socket.socket:
    address, port = host.http_url.split(":")
    return socket.create_connection((address, int(port)), DEADLINE)


def request(sizes: Sequence[int], wrong: int = 0, name: str = "") -> tuple[bytes, list[str]]:
    """A request with an input of each size, and their digests; the last one is `wrong` bytes longer
    than the header says.
    """
    contents = [np.random.default_rng(size).bytes(size) for size in sizes]
    header = json.dumps(
        {
            "id": name,
            "inputs": [
                {
                    "name": input_name,
                    "datatype": "UINT8",
                    "shape": [size],
                    "parameters": {"binary_data_size": size},
                }
                for input_name, size in zip("ABC", sizes, strict=False)
            ],
        }
    ).encode()
    if wrong:
        contents[-1] = bytes(sizes[-1] + wrong)
    body = b"".join((header, *contents))
    head = (
        "POST /v2/models/digests/infer HTTP/1.1\r\nHost: x\r\n"
        f"Inference-Header-Content-Length: {len(header)}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body, [hashlib.sha1(content).hexdigest() for content in contents]


def answer(connection: socket.socket) -> tuple[int, str | list[str]]:
    """The status, and the digests or the error."""
    with closing(HTTPResponse(connection)) as response:
        response.begin()
        body = json.loads(response.read())
    if response.status != 200:
        return response.status, body["error"]
    return response.status, body["outputs"][0]["data"]


@pytest.mark.parametrize(
    "sizes",
    [
        (65537,),
        (4 * MIB,),
        (4 * MIB, 3, 2 * MIB),
        (3, 2 * MIB, 0),
        (2 * MIB, 2 * MIB, 2 * MIB),
        (0, 0, MIB),
    ],
)
def test_inputs_arrive_as_they_were_sent(connection: socket.socket, sizes: tuple[int, ...]) -> None:
    data, digests = request(sizes)
    for _ in range(2):  # on one connection
        connection.sendall(data)
        assert answer(connection) == (200, digests)


@given(
    sizes=st.lists(st.integers(0, 700_000), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 1_500_000), max_size=6),
)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_pieces_may_end_anywhere(
    connection: socket.socket, sizes: list[int], cuts: list[int]
) -> None:
    data, digests = request(sizes)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    start = 0
    for end in sorted(cut for cut in cuts if cut < len(data)):
        connection.sendall(data[start:end])
        start = end
    connection.sendall(data[start:])
    assert answer(connection) == (200, digests)


def test_the_next_request_may_follow_at_once(connection: socket.socket) -> None:
    first, second = request((2 * MIB,)), request((MIB, 5))
    connection.sendall(first[0] + second[0] + first[0])
    for _, digests in (first, second, first):
        assert answer(connection) == (200, digests)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (7, "unexpected additional input data for model 'digests'"),
        (-9, "unexpected size for input 'B', expecting 9 additional bytes for model 'digests'"),
    ],
)
def test_a_body_of_another_size_is_refused(
    connection: socket.socket, wrong: int, text: str
) -> None:
    connection.sendall(request((MIB, 2 * MIB), wrong)[0])
    assert answer(connection) == (400, text)
    data, digests = request((2 * MIB,))
    connection.sendall(data)
    assert answer(connection) == (200, digests)


def used_memory(host: RunningHost) -> float:
    """Bytes of the host's arena."""
    (line,) = re.findall(r'pbhost_arena_used_bytes\{owner="host"\} (\S+)', host.read_metrics())
    return float(line)


def test_a_client_that_goes_in_the_middle_leaves_no_memory(host: RunningHost) -> None:
    data, digests = request((8 * MIB, 8 * MIB))
    for part in (len(data) // 3, len(data) // 2, len(data) - 1):
        with connect(host) as leaving:
            leaving.sendall(data[:part])
    with connect(host) as connected:
        connected.sendall(data)
        assert answer(connected) == (200, digests)
    wait_until(lambda: used_memory(host) < MIB, "the release")


@pytest.mark.test_all(reason="sends 2,100 requests")
def test_a_body_that_arrives_slowly_beside_many_others_leaves_no_memory(host: RunningHost) -> None:
    """Its JSON part has left the cache of such parts when the body is complete."""
    data, digests = request((8 * MIB,))
    with connect(host) as slow, connect(host) as other:
        slow.sendall(data[: 4 * MIB])
        for number in range(2100):
            small, expected = request((number % 50 + 1,), name=f"r{number}")
            other.sendall(small)
            assert answer(other) == (200, expected)
        slow.sendall(data[4 * MIB :])
        assert answer(slow) == (200, digests)
    wait_until(lambda: used_memory(host) < MIB, "the release")
