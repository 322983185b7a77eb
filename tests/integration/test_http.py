"""The HTTP endpoint with the official clients and with curl: inference in all forms."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import shutil
import subprocess
import uuid
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gevent
import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.http.aio as httpclient_aio
from tritonclient.utils import InferenceServerException, np_to_triton_dtype
from tritonclient.utils import shared_memory as shm

from tests.clients import run_command, tensor
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until

ECHO = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUTPUT0", request.inputs()[0].as_numpy())],
                parameters={"id": request.request_id(), "sent": request.parameters()},
            )
            for request in requests
        ]
"""
CONFIG = """
backend: "python"
input [ {{ name: "INPUT0" data_type: TYPE_{0} dims: [ -1, 2 ] }} ]
output [ {{ name: "OUTPUT0" data_type: TYPE_{0} dims: [ -1, 2 ] }} ]
"""
TOKENS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0].decode()
            for word in text.split():
                array = np.array([word.encode()], dtype=np.object_)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", array)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
TOKENS_CONFIG = """
backend: "python"
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"
SCORES = """
backend: "python"
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] label_filename: "labels.txt" } ]
"""
INTEGERS: dict[str, type[np.integer[Any]]] = {
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
}
ARRAYS: dict[str, npt.NDArray[Any]] = {
    "BOOL": np.array([[True, False], [False, True]]),
    **{
        name: np.array([[0, 1], [np.iinfo(kind).min, np.iinfo(kind).max]], kind)
        for name, kind in INTEGERS.items()
    },
    "FP16": np.array([[0.5, -2], [1.25, 3]], np.float16),
    "FP32": np.array([[0.5, -2], [1.25, 3e38]], np.float32),
    "FP64": np.array([[0.5, -2], [-1.7e308, 1.7e308]], np.float64),
    "STRING": np.array([["a", ""], ["ü☃", 'q"\\\n']], np.object_),
}

Client = Any  # of tritonclient.http


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    for name in ARRAYS:
        module_repository.add(
            f"echo_{name}", ECHO.replace(', "sent": request.parameters()', ""), CONFIG.format(name)
        )
    module_repository.add("words", TOKENS, TOKENS_CONFIG + DECOUPLED)
    module_repository.add(
        "scores",
        ECHO.replace(', "sent": request.parameters()', ""),
        SCORES,
        files={"labels.txt": "zero\none\ntwo\n"},
    )
    module_repository.copy("script")
    flags = ("--model-control-mode=explicit", "--load-model=*", "--allow-client-shm=true")
    return module_serve(module_repository, *flags).wait_started()


@pytest.fixture
def client(host: RunningHost) -> Iterator[Client]:
    with closing(httpclient.InferenceServerClient(host.http_url)) as client:
        yield client


def given(array: npt.NDArray[Any], binary: bool) -> httpclient.InferInput:
    made = httpclient.InferInput("INPUT0", array.shape, np_to_triton_dtype(array.dtype))
    made.set_data_from_numpy(array, binary_data=binary)
    return made


def send_request(
    host: RunningHost, method: str, path: str, body: bytes = b"", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Returns status, headers and body of the response."""
    connection = http.client.HTTPConnection(host.http_url, timeout=DEADLINE)
    with closing(connection):
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, names)
        response = connection.getresponse()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return response.status, headers, response.read()


def asked(host: RunningHost, method: str, path: str, body: object = None) -> Any:
    """Sends a JSON request and returns the JSON of the response."""
    status, _, answer = send_request(
        host, method, path, b"" if body is None else json.dumps(body).encode()
    )
    assert status == 200, answer
    return json.loads(answer) if answer else None


def as_text(array: npt.NDArray[Any]) -> list[Any]:
    return [text.decode() if isinstance(text, bytes) else text for text in array.ravel()]


@pytest.mark.parametrize("out", [True, False], ids=["binary_out", "json_out"])
@pytest.mark.parametrize("binary", [True, False], ids=["binary_in", "json_in"])
@pytest.mark.parametrize("name", ARRAYS)
def test_every_datatype_travels_in_every_form(
    client: Client, name: str, binary: bool, out: bool
) -> None:
    array = ARRAYS[name]
    if name == "FP16" and not (binary and out):
        pytest.skip("FP16 has no JSON form")
    outputs = [httpclient.InferRequestedOutput("OUTPUT0", binary_data=out)]
    result = client.infer(f"echo_{name}", [given(array, binary)], outputs=outputs, request_id="7")
    answer = result.as_numpy("OUTPUT0")
    assert answer.shape == array.shape
    if name == "STRING":
        assert as_text(answer) == as_text(array)
    else:
        assert answer.dtype == array.dtype
        np.testing.assert_array_equal(answer, array)
    assert result.get_response()["id"] == "7"
    assert result.get_response()["parameters"]["id"] == "7"


@pytest.mark.parametrize("data", [[[1, 2], [3, 4]], [1, 2, 3, 4]], ids=["nested", "flat"])
def test_json_tensors_nested_and_flat(host: RunningHost, data: object) -> None:
    body = {"inputs": [{"name": "INPUT0", "datatype": "INT32", "shape": [2, 2], "data": data}]}
    assert asked(host, "POST", "/v2/models/echo_INT32/versions/1/infer", body) == {
        "model_name": "echo_INT32",
        "model_version": "1",
        "parameters": {"id": ""},
        "outputs": [
            {"name": "OUTPUT0", "datatype": "INT32", "shape": [2, 2], "data": [1, 2, 3, 4]}
        ],
    }


def test_fp16_has_no_json_form(host: RunningHost) -> None:
    body = {"inputs": [{"name": "INPUT0", "datatype": "FP16", "shape": [1, 2], "data": [1, 2]}]}
    status, _, answer = send_request(
        host, "POST", "/v2/models/echo_FP16/infer", json.dumps(body).encode()
    )
    assert status == 400
    assert "FP16" in json.loads(answer)["error"]


@pytest.mark.parametrize("way", ["gzip", "deflate"])
def test_compressed_requests_and_responses(client: Client, host: RunningHost, way: str) -> None:
    array = np.zeros((5000, 2), np.float32)
    result = client.infer(
        "echo_FP32",
        [given(array, True)],
        request_compression_algorithm=way,
        response_compression_algorithm=way,
    )
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array)
    data = {"name": "INPUT0", "datatype": "FP32", "shape": [500, 2], "data": [0] * 1000}
    body = json.dumps({"inputs": [data]}).encode()
    packed = gzip.compress(body) if way == "gzip" else zlib.compress(body)
    status, headers, answer = send_request(
        host, "POST", "/v2/models/echo_FP32/infer", packed,
        Content_Encoding=way, Accept_Encoding=way,
    )  # fmt: skip
    assert (status, headers["content-encoding"]) == (200, way)
    unpacked = gzip.decompress(answer) if way == "gzip" else zlib.decompress(answer)
    assert json.loads(unpacked)["outputs"][0]["data"] == [0.0] * 1000


def test_a_raw_tensor_body_is_an_input(host: RunningHost) -> None:
    """Raw binary data without JSON (docs/reference/http.md, "HTTP/REST")."""
    status, headers, answer = send_request(
        host, "POST", "/v2/models/scores/infer", np.array([3, 4], np.float32).tobytes(),
        Inference_Header_Content_Length="0",
    )  # fmt: skip
    assert status == 200, answer
    size = int(headers["inference-header-content-length"])
    assert json.loads(answer[:size])["outputs"][0]["shape"] == [2]
    assert np.frombuffer(answer[size:], np.float32).tolist() == [3, 4]


def test_errors_are_json_with_the_servers_text(client: Client, host: RunningHost) -> None:
    with pytest.raises(InferenceServerException) as caught:
        client.infer("missing", [given(ARRAYS["FP32"], True)])
    assert caught.value.status() == "404"
    assert "Request for unknown model: 'missing' is not found" in str(caught.value)
    with pytest.raises(InferenceServerException, match="INPUT0"):
        client.infer("echo_FP32", [given(ARRAYS["FP64"], True)])
    status, _, answer = send_request(host, "GET", "/v2/nothing/here")
    assert status == 404
    assert "error" in json.loads(answer)
    assert send_request(host, "DELETE", "/v2/health/live")[0] == 405


def test_health_metadata_and_configuration_can_be_read(client: Client) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("echo_FP32")
    assert client.is_model_ready("echo_FP32", "1")
    assert not client.is_model_ready("echo_FP32", "2")
    assert not client.is_model_ready("missing")
    about = client.get_server_metadata()
    assert about["name"] and "binary_tensor_data" in about["extensions"]
    assert about["pbhost_version"] == version("pbhost")
    model = client.get_model_metadata("echo_STRING")
    assert model["inputs"] == [{"name": "INPUT0", "datatype": "BYTES", "shape": [-1, 2]}]
    assert client.get_model_config("echo_FP32")["input"][0]["data_type"] == "TYPE_FP32"


def test_requests_are_in_the_statistics(client: Client) -> None:
    client.infer("echo_UINT8", [given(ARRAYS["UINT8"], True)])
    (one,) = client.get_inference_statistics("echo_UINT8")["model_stats"]
    assert one["inference_stats"]["success"]["count"] >= 1
    assert one["inference_count"] >= 1


def test_models_are_unloaded_and_loaded(client: Client) -> None:
    client.unload_model("echo_INT8")
    wait_until(lambda: not client.is_model_ready("echo_INT8"), "the model to go")
    states = {model["name"]: model.get("state") for model in client.get_model_repository_index()}
    assert states["echo_INT8"] != "READY"
    client.load_model("echo_INT8", config=json.dumps({"backend": "python", "max_batch_size": 0,
        "input": [{"name": "INPUT0", "data_type": "TYPE_INT8", "dims": [-1, 2]}],
        "output": [{"name": "OUTPUT0", "data_type": "TYPE_INT8", "dims": [-1, 2]}]}))  # fmt: skip
    assert client.is_model_ready("echo_INT8")
    with pytest.raises(InferenceServerException, match="failed to load 'missing'"):
        client.load_model("missing")


def test_the_highest_classes_of_an_output_are_returned(client: Client) -> None:
    array = np.array([0.5, 3, 2], np.float32)
    outputs = [httpclient.InferRequestedOutput("OUTPUT0", class_count=2, binary_data=False)]
    result = client.infer("scores", [given(array, True)], outputs=outputs)
    assert as_text(result.as_numpy("OUTPUT0")) == ["3.000000:1:one", "2.000000:2:two"]


def test_the_highest_classes_of_an_output_are_returned_over_grpc(host: RunningHost) -> None:
    outputs = [grpcclient.InferRequestedOutput("OUTPUT0", class_count=2)]
    with host.client() as client:
        scores = [tensor("INPUT0", np.array([0.5, 3, 2], np.float32))]
        result = client.infer("scores", scores, outputs=outputs)
    assert as_text(result.as_numpy("OUTPUT0")) == ["3.000000:1:one", "2.000000:2:two"]


def test_tensors_in_a_clients_shared_memory(client: Client) -> None:
    array = ARRAYS["FP32"]
    key = f"/test-{uuid.uuid4().hex}"
    handle = shm.create_shared_memory_region("both", key, 2 * array.nbytes)
    try:
        client.register_system_shared_memory("both", key, 2 * array.nbytes)
        shm.set_shared_memory_region(handle, [array])
        tensor_in = httpclient.InferInput("INPUT0", array.shape, "FP32")
        tensor_in.set_shared_memory("both", array.nbytes)
        tensor_out = httpclient.InferRequestedOutput("OUTPUT0")
        tensor_out.set_shared_memory("both", array.nbytes, offset=array.nbytes)
        client.infer("echo_FP32", [tensor_in], outputs=[tensor_out])
        got = shm.get_contents_as_numpy(handle, np.float32, array.shape, offset=array.nbytes)
        np.testing.assert_array_equal(got, array)
        (region,) = client.get_system_shared_memory_status()
        assert (region["name"], region["key"]) == ("both", key)
        client.unregister_system_shared_memory("both")
        assert client.get_system_shared_memory_status() == []
    finally:
        shm.destroy_shared_memory_region(handle)


def test_generate_answers_with_one_object_and_streams_events(host: RunningHost) -> None:
    one = asked(host, "POST", "/v2/models/words/generate", {"text_input": "hello"})
    assert (one["model_name"], one["text_output"]) == ("words", "hello")
    status, headers, answer = send_request(
        host, "POST", "/v2/models/words/generate_stream", b'{"text_input": "a few words"}'
    )
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    events = [line for line in answer.decode().split("\n\n") if line]
    assert all(event.startswith("data: ") for event in events)
    assert [json.loads(event[6:])["text_output"] for event in events] == ["a", "few", "words"]


def test_generate_without_a_stream_allows_only_one_response(host: RunningHost) -> None:
    status, _, answer = send_request(
        host, "POST", "/v2/models/words/generate", b'{"text_input": "too many words"}'
    )
    assert (status, json.loads(answer)["error"]) == (
        200,
        (
            "generate expects model to produce exactly 1 response, use generate stream for model"
            " that generates various number of responses"
        ),
    )


def test_infer_refuses_a_decoupled_model(client: Client) -> None:
    words = httpclient.InferInput("text_input", [1], "BYTES")
    words.set_data_from_numpy(np.array([b"one two"], np.object_))
    with pytest.raises(InferenceServerException, match="decoupled"):
        client.infer("words", [words])


def test_a_disconnecting_client_cancels_its_request(host: RunningHost, tmp_path: Path) -> None:
    reached, seen = tmp_path / "reached", tmp_path / "seen"
    source = f"""
import pathlib
pathlib.Path({str(reached)!r}).touch()
until(request.is_cancelled, "the request to be cancelled")
pathlib.Path({str(seen)!r}).touch()
"""
    body = {"inputs": [{"name": "COMMAND", "datatype": "BYTES", "shape": [1], "data": [source]}]}
    connection = http.client.HTTPConnection(host.http_url, timeout=DEADLINE)
    connection.request("POST", "/v2/models/script/infer", json.dumps(body))
    wait_until(reached.exists, "the model to run")
    connection.close()
    wait_until(seen.exists, "the model to notice")
    with host.client() as client:
        assert run_command(client, "return 5", "script") == "5"


def test_concurrent_clients_get_their_own_responses(host: RunningHost) -> None:
    def one(number: int) -> bool:
        with closing(httpclient.InferenceServerClient(host.http_url)) as client:
            array = np.full((3, 2), number, np.int32)
            result = client.infer("echo_INT32", [given(array, number % 2 == 0)])
            same = bool((result.as_numpy("OUTPUT0") == array).all())
        gevent.get_hub().destroy(
            destroy_loop=True
        )  # the event loop of the client; each thread has its own
        return same

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(64)))


def test_the_asyncio_client_sends_an_inference_request(host: RunningHost) -> None:
    async def work() -> None:
        async with httpclient_aio.InferenceServerClient(host.http_url) as client:
            assert await client.is_server_ready()
            array = ARRAYS["INT64"]
            results = await asyncio.gather(
                *(client.infer("echo_INT64", [given(array, True)]) for _ in range(20))
            )
            for result in results:
                np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array)

    asyncio.run(asyncio.wait_for(work(), DEADLINE))


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl_sends_an_inference_request(host: RunningHost) -> None:
    body = '{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,2],"data":[1.5,2]}]}'
    done = subprocess.run(
        ["curl", "-sS", "-d", body, f"http://{host.http_url}/v2/models/echo_FP32/infer"],
        capture_output=True, text=True, timeout=DEADLINE, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout)["outputs"][0]["data"] == [1.5, 2.0]


def test_http_and_grpc_serve_the_same_models(host: RunningHost) -> None:
    with host.client() as client:
        array = ARRAYS["FP32"]
        answer = client.infer("echo_FP32", [tensor("INPUT0", array)]).as_numpy("OUTPUT0")
    np.testing.assert_array_equal(answer, array)
