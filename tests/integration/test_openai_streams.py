"""Streams of the OpenAI routes whose clients are slow, or leave."""

from __future__ import annotations

import http.client
import json
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until
from tests.openai_models import add_models, complete

FLOOD = '''
"""Sends many large pieces, and logs how far it got."""
import threading
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request,)).start()

    def answer(self, request):
        sender = request.get_response_sender()
        array = np.array([b"x" * 10000], dtype=np.object_)
        sent = 0
        while sent < 20000 and not sender.is_cancelled():
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", array)]))
            sent += 1
            if sent == 100:
                print("flowing", flush=True)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        print("flood ended after", sent, flush=True)
'''
FLOOD_CONFIG = """
backend: "python"
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
model_transaction_policy { decoupled: true }
"""


@pytest.fixture(scope="module")
def host(module_serve: Serve, module_repository: RepositoryBuilder) -> Iterator[RunningHost]:
    add_models(module_repository)
    module_repository.add("flood", FLOOD, FLOOD_CONFIG)
    yield module_serve(module_repository).wait_started()


def used_arenas(host: RunningHost) -> list[str]:
    """The metrics of the shared memory that tensors use."""
    with closing(http.client.HTTPConnection(host.metrics_url, timeout=DEADLINE)) as connection:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    found = re.findall(r"^pbhost_arena_used_bytes\S* \S+$", text, re.MULTILINE)
    assert len(found) == 2
    return found


def open_stream(host: RunningHost, stack: ExitStack, model: str, prompt: str) -> None:
    """Opens a stream and reads its first event. The stack closes the connection."""
    connection = http.client.HTTPConnection(host.http_url, timeout=DEADLINE)
    stack.enter_context(closing(connection))
    body = {"model": model, "prompt": prompt, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body))
    response = connection.getresponse()
    stack.callback(response.close)
    assert response.status == 200 and response.readline().startswith(b"data: ")


def test_the_calls_of_64_clients_that_leave_are_cancelled(host: RunningHost) -> None:
    before = used_arenas(host)
    with ExitStack() as stack:
        for number in range(64):
            open_stream(host, stack, "letters", f"many {number}|WAIT")
        assert "cancelled b'many" not in host.output
    wait_until(lambda: host.output.count("cancelled b'many") == 64, "64 cancellations")
    wait_until(lambda: used_arenas(host) == before, "the memory of the calls")
    assert complete(host, "still|here").json["choices"][0]["text"] == "stillhere"


def test_a_client_that_does_not_read_stops_the_model(host: RunningHost) -> None:
    before = used_arenas(host)
    with ExitStack() as stack:
        open_stream(host, stack, "flood", "go")
        host.wait_for("flowing")
        for _ in range(50):  # other clients are answered meanwhile
            assert complete(host, "a|b").status == 200
        assert "flood ended" not in host.output
    ended = host.wait_for(r"flood ended after (\d+)")
    assert int(ended.group(1)) < 20000
    wait_until(lambda: used_arenas(host) == before, "the memory of the responses")


def test_a_client_of_http_1_0_gets_a_stream_without_chunks(host: RunningHost) -> None:
    body = b'{"model": "letters", "prompt": "a|b", "stream": true}'
    name, port = host.http_url.split(":")
    with socket.create_connection((name, int(port)), DEADLINE) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.0\r\n")
        connection.sendall(b"content-length: %d\r\n\r\n%b" % (len(body), body))
        with connection.makefile("rb") as reader:
            head, _, events = reader.read().partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head and b"connection: close" in head
    assert events.startswith(b"data: {") and events.endswith(b"\n\ndata: [DONE]\n\n")
