"""Large requests of several clients at once: the memory that the server has for them is limited."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import re
from contextlib import closing
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.clients import Client, InferStream, infer_error, tensor
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until
from tests.uploads import GrpcUpload, HttpUpload, add_model

MIB = 1 << 20
LIMIT = 8 * MIB
FLAG = f"--receive-buffer-byte-size={LIMIT}"

GATE = """
import os, pathlib, select
import triton_python_backend_utils as pb_utils

FOLDER = pathlib.Path({folder!r})

class TritonPythonModel:
    def initialize(self, args):
        self.gate = os.open(FOLDER / "gate", os.O_RDWR)

    def execute(self, requests):
        (FOLDER / "started").touch()
        select.select([self.gate], [], [], 120)  # nothing reads it, so it stays open
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""
GATE_CONFIG = """
input [{name: "INPUT0", data_type: TYPE_FP32, dims: [-1]}]
output [{name: "OUTPUT0", data_type: TYPE_FP32, dims: [-1]}]
instance_group [{count: 1, kind: KIND_CPU}]
"""


def add_gate(repository: RepositoryBuilder, folder: Path) -> None:
    """Adds the model `gate`, whose requests wait until something is written to a pipe."""
    os.mkfifo(folder / "gate")
    repository.add("gate", GATE.format(folder=str(folder)), GATE_CONFIG)


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    """A host that holds 8 MiB of large requests at once."""
    module_repository.copy("identity", "stream")
    add_model(module_repository)
    return module_serve(module_repository, "--grpc-engine=h2", FLAG).wait_started()


def refusal(client: Client, size: int) -> str:
    """Sends a request of this size; returns the error if memory is short, "" if it is served."""
    array = np.zeros(size // 4, np.float32)
    try:
        result = client.infer("identity", [tensor("INPUT0", array)], client_timeout=DEADLINE)
    except InferenceServerException as error:
        assert error.status() == "StatusCode.RESOURCE_EXHAUSTED", error
        return str(error.message())
    assert result.as_numpy("OUTPUT0").shape == array.shape
    return ""


def wait_queued(host: RunningHost) -> None:
    """Waits until a request waits for the model `gate`."""

    def queued() -> bool:
        with urlopen(f"http://{host.metrics_url}/metrics", timeout=DEADLINE) as answer:
            text = answer.read().decode()
        pattern = r'pending_request_count{model="gate".*} 1(\.0)?$'
        return re.search(pattern, text, re.MULTILINE) is not None

    wait_until(queued, "a request to be queued")


def wait_refused(client: Client, size: int) -> str:
    """Waits until requests of this size are refused; returns the error.

    What holds the memory must have arrived: these requests might take it first.
    """
    found: list[str] = []

    def refused() -> bool:
        found[:] = [refusal(client, size)]
        return bool(found[0])

    wait_until(refused, "a request to be refused")
    return found[0]


def wait_served(client: Client, size: int = 7 * MIB) -> None:
    """Waits until a request of nearly the whole limit is served: nothing else is counted."""

    def served() -> bool:
        array = np.zeros(size // 4, np.float32)
        try:
            client.infer("identity", [tensor("INPUT0", array)], client_timeout=DEADLINE)
        except InferenceServerException:
            return False
        return True

    wait_until(served, "the memory to be released")


@pytest.mark.parametrize("upload", [GrpcUpload, HttpUpload])
def test_a_request_that_exceeds_the_limit_is_refused_and_others_go_on(
    host: RunningHost, upload: type[GrpcUpload] | type[HttpUpload]
) -> None:
    with host.client() as client, upload(host, 7 * MIB) as slow:
        slow.send(6 * MIB)
        slow.wait_read()
        text = wait_refused(client, 4 * MIB)
        assert text.startswith(
            f"Not enough memory to receive the request: it needs {4 * MIB + 36} bytes, and other"
            " requests hold "
        ), text
        assert text.endswith(
            f" of {LIMIT} bytes. Send it again later, or raise --receive-buffer-byte-size"
        ), text
        assert not refusal(client, 4), "its connection continues"
        slow.send(2 * MIB)
        assert slow.wait_for_status() in (0, 200)
        wait_served(client)


def test_a_refusal_over_http_is_503_and_its_connection_goes_on(host: RunningHost) -> None:
    with (
        host.client() as client,
        GrpcUpload(host, 7 * MIB) as slow,
        closing(http.client.HTTPConnection(host.http_url, timeout=DEADLINE)) as connection,
    ):
        slow.send(6 * MIB)
        slow.wait_read()
        wait_refused(client, 4 * MIB)
        path = "/v2/models/identity/infer"
        entry = {"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [1]}
        head = json.dumps({"inputs": [entry]}).encode()
        body = head + b" " * (4 * MIB)
        for _ in range(2):
            connection.request("POST", path, body)
            response = connection.getresponse()
            text = json.loads(response.read())["error"]
            assert (response.status, text[:39]) == (503, "Not enough memory to receive the reques")
            assert connection.sock is not None, "the connection continues"
            connection.request("POST", path, head)
            response = connection.getresponse()
            assert response.status == 200, response.read()
            response.read()


def test_a_request_larger_than_the_limit_is_refused_before_it_is_sent(host: RunningHost) -> None:
    with GrpcUpload(host, 20 * MIB) as upload:
        upload.send(5)
        assert upload.wait_for_status() == 8
        assert upload.refused
    with HttpUpload(host, 20 * MIB) as web:
        assert web.wait_for_status() == 503
        assert web.refused
    with host.client() as client:
        text = refusal(client, 20 * MIB)
        assert text.endswith("bytes. Send less, or raise --receive-buffer-byte-size"), text


def test_a_chunked_body_is_refused_when_it_exceeds_the_limit(host: RunningHost) -> None:
    with HttpUpload(host, 20 * MIB, chunked=True) as upload, host.client() as client:
        upload.send(20 * MIB)
        assert upload.wait_for_status() == 503
        wait_served(client)


def test_compressed_requests_count_with_their_data(host: RunningHost) -> None:
    """A few kilobytes on the wire are 40 MiB."""
    array = np.zeros(10 * MIB, np.float32)
    with host.client() as client:
        status, text = infer_error(
            client.infer, "identity", [tensor("INPUT0", array)], compression_algorithm="gzip"
        )
        assert status == "StatusCode.RESOURCE_EXHAUSTED"
        assert text.startswith("Not enough memory to receive the request: it needs ")
        with closing(http.client.HTTPConnection(host.http_url, timeout=DEADLINE)) as connection:
            body = gzip.compress(b" " * (40 * MIB))
            connection.request(
                "POST", "/v2/models/identity/infer", body, {"Content-Encoding": "gzip"}
            )
            response = connection.getresponse()
            assert (response.status, b"Not enough memory" in response.read()) == (503, True)
        wait_served(client)
        result = client.infer(
            "identity", [tensor("INPUT0", array[:MIB])], compression_algorithm="gzip"
        )
        assert result.as_numpy("OUTPUT0").shape == (MIB,)
        wait_served(client)


def test_a_stream_ends_with_a_message_that_exceeds_the_limit(host: RunningHost) -> None:
    with InferStream(host) as stream, host.client() as client:
        array = np.zeros(5 * MIB, np.float32)
        stream._client.async_stream_infer("identity", [tensor("INPUT0", array)])
        with pytest.raises(InferenceServerException, match="Not enough memory to receive"):
            stream.next()
        wait_served(client)


def test_small_requests_are_served_while_large_ones_use_the_limit_up(host: RunningHost) -> None:
    web = httpclient.InferenceServerClient(host.http_url)
    with GrpcUpload(host, 8 * MIB - 1024) as first, host.client() as client:
        first.send(8 * MIB - 2048)
        first.wait_read()
        wait_refused(client, 512 << 10)
        for size in (1, 1000, 15000):  # numbers
            array = np.zeros(size, np.float32)
            client.infer("identity", [tensor("INPUT0", array)], client_timeout=DEADLINE)
            entry = httpclient.InferInput("INPUT0", [size], "FP32")
            web.infer("identity", [entry.set_data_from_numpy(array)])
    web.close()


@pytest.mark.parametrize("upload", [GrpcUpload, HttpUpload])
@pytest.mark.parametrize("sent", [MIB, 6 * MIB])
def test_the_memory_of_a_client_that_vanishes_is_released(
    host: RunningHost, upload: type[GrpcUpload] | type[HttpUpload], sent: int
) -> None:
    with host.client() as client:
        with upload(host, 7 * MIB) as slow:
            slow.send(sent)
            slow.wait_read()
            wait_refused(client, 8 * MIB - sent // 2)
            slow.reset()
            wait_served(client)
        with upload(host, 7 * MIB) as slow:
            slow.send(sent)
            slow.wait_read()
            wait_refused(client, 8 * MIB - sent // 2)
        wait_served(client)


def test_the_memory_of_a_request_that_times_out_is_released(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("identity")
    add_model(repository)
    host = serve(
        repository,
        "--grpc-engine=h2",
        FLAG,
        "--grpc-body-timeout-secs=0.5",
        "--http-body-timeout-secs=0.5",
    ).wait_started()
    with host.client() as client:
        for upload, status in (
            (lambda: GrpcUpload(host, 7 * MIB, timeout="200m"), 4),
            (lambda: GrpcUpload(host, 7 * MIB), 4),
            (lambda: HttpUpload(host, 7 * MIB), 408),
        ):
            with upload() as slow:  # begins after the one before has given its memory back
                slow.send(6 * MIB)
                assert slow.wait_for_status() == status
                wait_served(client)


def test_requests_count_until_a_model_takes_them(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    """The first one runs, so it does not count; the second one waits for the model."""
    repository.copy("identity")
    add_gate(repository, tmp_path)
    host = serve(repository, "--grpc-engine=h2", FLAG).wait_started()
    given = [tensor("INPUT0", np.zeros(6 * MIB // 4, np.float32))]
    ended: list[object] = []

    def callback(result: object, error: object) -> None:
        ended.append(error)

    with host.client() as client, host.client() as other:
        client.async_infer("gate", given, callback)
        wait_until((tmp_path / "started").exists, "the model to run")
        wait_served(other)
        waiting = client.async_infer("gate", given, callback)
        wait_queued(host)
        wait_refused(other, 4 * MIB)
        waiting.cancel()
        wait_served(other)
        client.async_infer("gate", given, callback)
        wait_queued(host)
        wait_refused(other, 4 * MIB)
        (tmp_path / "gate").write_bytes(b"open")
        wait_until(lambda: len(ended) == 3, "all requests to end")
        assert [error for error in ended if error is None] == [None, None]
        wait_served(other)


def test_the_engine_grpcio_counts_what_it_has_received(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    repository.copy("identity")
    add_gate(repository, tmp_path)
    host = serve(repository, "--grpc-engine=grpcio", FLAG).wait_started()
    given = [tensor("INPUT0", np.zeros(6 * MIB // 4, np.float32))]
    ended: list[object] = []
    with host.client() as client, host.client() as other:
        client.async_infer("gate", given, lambda result, error: ended.append(error))
        wait_until((tmp_path / "started").exists, "the model to run")
        assert "Not enough memory to receive the request" in wait_refused(other, 4 * MIB)
        assert "larger than max" in refusal(other, 20 * MIB)
        with InferStream(host) as stream:
            array = np.zeros(MIB, np.float32)
            stream._client.async_stream_infer("identity", [tensor("INPUT0", array)])
            with pytest.raises(InferenceServerException, match="Not enough memory to receive"):
                stream.next()
        (tmp_path / "gate").write_bytes(b"open")
        wait_until(lambda: bool(ended), "the request to end")
        assert ended == [None]
        wait_served(other)
