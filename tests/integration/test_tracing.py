"""Traces in files, and trace settings over HTTP and gRPC."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from tests.clients import InferStream, infer_error, tensor
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until
from tests.integration.ensemble_models import CHAIN

ASKER = """
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            return [self.answer(request) for request in requests]

        def answer(self, request):
            assert request.trace().get_context() is None
            return pb_utils.InferenceRequest(
                request_id="inner",
                model_name="identity",
                requested_output_names=["OUTPUT0"],
                inputs=request.inputs(),
                trace=request.trace(),
            ).exec()
    """
UNLUCKY = """
    class TritonPythonModel:
        def execute(self, requests):
            raise ValueError("no luck")
    """
CONFIG = """
    input [ { name: "INPUT0", data_type: TYPE_FP32, dims: [ -1 ] } ]
    output [ { name: "OUTPUT0", data_type: TYPE_FP32, dims: [ -1 ] } ]
    """
DEFAULTS = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
}
GRPC_STAMPS = ["GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "GRPC_SEND_START", "GRPC_SEND_END"]
HTTP_STAMPS = ["HTTP_RECV_START", "HTTP_RECV_END", "HTTP_SEND_START", "HTTP_SEND_END"]
CORE_STAMPS = [
    "REQUEST_START",
    "QUEUE_START",
    "COMPUTE_START",
    "COMPUTE_INPUT_END",
    "COMPUTE_OUTPUT_START",
    "COMPUTE_END",
    "REQUEST_END",
]


@pytest.fixture(scope="module")
def models(module_repository: RepositoryBuilder) -> RepositoryBuilder:
    module_repository.copy("identity", "stream")
    module_repository.add("asker", ASKER, CONFIG)
    module_repository.add("unlucky", UNLUCKY, CONFIG)
    module_repository.add("chain", config=CHAIN)
    return module_repository


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def host(models: RepositoryBuilder, module_serve: Serve, folder: Path) -> Iterator[RunningHost]:
    host = module_serve(
        models, f"--trace-config=triton,file={folder}/traces", "--model-control-mode=explicit",
        "--load-model=*",
    ).wait_started()  # fmt: skip
    yield host
    assert "Traceback" not in host.output.replace("no luck", "")


class SettingsApi:
    """Trace settings over one protocol: values as in JSON, errors as (status, text)."""

    def __init__(self, host: RunningHost, protocol: str) -> None:
        self._protocol = protocol
        self._url = host.http_url if protocol == "http" else host.url

    def get(self, model: str = "") -> dict[str, Any]:
        return self.set({}, model) if self._protocol == "grpc" else self._http(model, None)

    def set(self, settings: dict[str, Any], model: str = "") -> dict[str, Any]:
        if self._protocol == "http":
            return self._http(model, json.dumps(settings).encode())
        with grpcclient.InferenceServerClient(self._url) as client:
            shown: Any = client.update_trace_settings(model, settings, as_json=True)
        values = {name: value["value"] for name, value in shown["settings"].items()}
        return {k: v if k == "trace_level" else v[0] for k, v in values.items()}

    def _http(self, model: str, body: bytes | None) -> dict[str, Any]:
        scope = f"models/{model}/" if model else ""
        url = f"http://{self._url}/v2/{scope}trace/setting"
        with urllib.request.urlopen(url, body, DEADLINE) as answer:
            shown: dict[str, Any] = json.load(answer)
            return shown

    def fails(self, settings: dict[str, Any], model: str = "") -> str:
        """Status and text of a change that is refused."""
        if self._protocol == "grpc":
            status, text = infer_error(self.set, settings, model)
            return f"{status.split('.')[1]} {text}"
        with pytest.raises(urllib.error.HTTPError) as caught:
            self.set(settings, model)
        with caught.value as error:
            return f"{error.code} {json.load(error)['error']}"


@pytest.fixture(params=["grpc", "http"])
def api(request: pytest.FixtureRequest, host: RunningHost) -> Iterator[SettingsApi]:
    api = SettingsApi(host, request.param)
    yield api
    clear = dict.fromkeys(DEFAULTS)
    for model in ("", "identity", "asker"):
        api.set(clear, model)


def send_request(host: RunningHost, model: str, request_id: str = "", http: bool = False) -> None:
    array = np.array([1.5, -2], np.float32)
    if http:
        with httpclient.InferenceServerClient(host.http_url) as client:
            given = httpclient.InferInput("INPUT0", [2], "FP32")
            given.set_data_from_numpy(array)
            client.infer(model, [given], request_id=request_id)
        return
    with host.client() as grpc_client:
        grpc_client.infer(model, [tensor("INPUT0", array)], request_id=request_id)


class Files:
    """The numbered trace files of a host, starting with the next one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next = len(list(folder.glob("traces.*")))

    def read(self) -> list[dict[str, Any]]:
        """Waits for the next file and returns its elements."""
        path = self._folder / f"traces.{self._next}"
        self._next += 1
        wait_until(lambda: path.exists() and path.read_text().endswith("]"), f"{path}")
        elements: list[dict[str, Any]] = json.loads(path.read_text())
        return elements


@pytest.fixture
def files(folder: Path) -> Files:
    return Files(folder)


def stamps(elements: list[dict[str, Any]], number: int) -> dict[str, int]:
    """The events of one trace with their times."""
    return {
        stamp["name"]: stamp["ns"]
        for element in elements
        if element["id"] == number
        for stamp in element.get("timestamps", ())
    }


def heads(elements: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [element for element in elements if "model_name" in element]


ONE = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_count": "1"}


# Settings


def test_the_initial_settings_are_those_of_the_command_line(api: SettingsApi, folder: Path) -> None:
    expected = {**DEFAULTS, "trace_file": f"{folder}/traces", "trace_mode": "triton"}
    assert api.get() == expected
    assert api.get("identity") == expected


def test_a_model_follows_the_global_settings_that_it_does_not_override(api: SettingsApi) -> None:
    assert api.set({"trace_rate": "7"}, "identity")["trace_rate"] == "7"
    api.set({"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "9"})
    assert api.get("identity")["trace_level"] == ["TIMESTAMPS", "TENSORS"]
    assert api.get("identity")["trace_rate"] == "7"
    assert api.get("asker")["trace_rate"] == "9"


def test_a_cleared_model_setting_follows_the_global_one_again(api: SettingsApi) -> None:
    api.set({"trace_rate": "7", "log_frequency": "3"}, "identity")
    api.set({"trace_rate": "9"})
    assert api.set({"trace_rate": None}, "identity")["trace_rate"] == "9"
    assert api.get("identity")["log_frequency"] == "3"
    api.set({"log_frequency": None}, "identity")
    api.set({"log_frequency": "5"})
    assert api.get("identity")["log_frequency"] == "5"


def test_a_cleared_global_setting_returns_to_its_initial_value(api: SettingsApi) -> None:
    changed = api.set({"trace_level": ["TENSORS"], "trace_rate": "1", "trace_count": "4"})
    assert (changed["trace_level"], changed["trace_count"]) == (["TENSORS"], "4")
    cleared = api.set({"trace_level": None, "trace_rate": None, "trace_count": None})
    assert {name: cleared[name] for name in DEFAULTS} == DEFAULTS


def test_a_count_of_zero_is_accepted(api: SettingsApi) -> None:
    assert api.set({"trace_count": "0"})["trace_count"] == "0"
    assert api.set({"trace_count": None})["trace_count"] == "-1"


def test_unknown_settings_are_ignored(api: SettingsApi) -> None:
    assert api.set({"trace_colour": "red", "trace_level": ["LOUD"]})["trace_level"] == ["OFF"]


def test_an_unknown_level_is_logged(
    api: SettingsApi, host: RunningHost, request: pytest.FixtureRequest
) -> None:
    level = f"LOUD of {request.node.callspec.id}"
    assert api.set({"trace_level": ["TENSORS", level]})["trace_level"] == ["TENSORS"]
    text = f"trace_level: '{level}' is ignored; the levels are OFF, TIMESTAMPS, TENSORS"
    wait_until(lambda: text in host.output, "the warning")


def test_over_http_only_null_clears_the_level(host: RunningHost) -> None:
    api = SettingsApi(host, "http")
    assert api.set({"trace_level": ["TIMESTAMPS"]})["trace_level"] == ["TIMESTAMPS"]
    assert api.set({"trace_level": []})["trace_level"] == ["TIMESTAMPS"]
    assert api.set({"trace_level": None})["trace_level"] == ["OFF"]


def test_null_changes_nothing_over_http(host: RunningHost) -> None:
    before = SettingsApi(host, "http").get()
    with httpclient.InferenceServerClient(host.http_url) as client:
        assert client.update_trace_settings("", None) == before
        assert client.update_trace_settings("identity", None) == before


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"trace_level": ["OFF", "TENSORS"]}, "Expect only one trace level 'OFF' is specified"),
    ({"trace_rate": "often"}, "Unable to parse 'trace_rate', got: often"),
    (
        {"trace_rate": "4294967296"},
        "Unable to parse 'trace_rate', value is out of range [ 0, 4294967295 ], got: 4294967296",
    ),
    (
        {"log_frequency": "-1"},
        "Unable to parse 'log_frequency', value is out of range [ 0, 4294967295 ], got: -1",
    ),
    (
        {"trace_count": "2147483648"},
        "Unable to parse 'trace_count', value is out of range [ -1, 2147483647 ], got: 2147483648",
    ),
    (
        {"trace_level": ["TIMESTAMPS"], "trace_rate": "0"},
        "Attempting to set invalid trace setting :sample rate must be non-zero",
    ),
]


@pytest.mark.parametrize(("settings", "text"), REFUSED, ids=[str(n) for n in range(len(REFUSED))])
def test_an_invalid_change_is_refused_and_changes_nothing(
    api: SettingsApi, settings: dict[str, Any], text: str
) -> None:
    before = api.get()
    assert api.fails({"log_frequency": "2", **settings}).split(" ", 1) in (
        ["400", text],
        ["INVALID_ARGUMENT", text],
    )
    assert api.get() == before


def test_a_count_below_minus_one_has_the_error_text_of_each_protocol(host: RunningHost) -> None:
    text = "Unable to parse 'trace_count'. Expecting value >= -1, got:"
    assert SettingsApi(host, "http").fails({"trace_count": "-2"}) == f"400 {text}-2"
    assert SettingsApi(host, "grpc").fails({"trace_count": "-2"}) == f"INVALID_ARGUMENT {text} -2"


def test_the_file_cannot_be_changed(host: RunningHost) -> None:
    text = "trace file location can not be updated through network protocol"
    assert SettingsApi(host, "http").fails({"trace_file": "x"}) == f"501 {text}"
    assert SettingsApi(host, "grpc").fails({"trace_file": "x"}) == f"UNIMPLEMENTED {text}"


def test_values_of_the_wrong_type_are_refused(host: RunningHost) -> None:
    several = SettingsApi(host, "grpc").fails({"trace_rate": ["1", "2"]})
    assert several == "INVALID_ARGUMENT expect only 1 value for 'trace_rate'"
    http = SettingsApi(host, "http")
    assert http.fails({"trace_rate": 1}) == "500 attempt to access JSON non-string as string"
    assert http.fails({"trace_level": "OFF"}) == "500 attempt to access JSON non-array as array"


def test_a_change_over_http_requires_a_body(host: RunningHost) -> None:
    url = f"http://{host.http_url}/v2/trace/setting"
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(url, b"", DEADLINE)
    with caught.value as error:
        assert error.code == 500
        text = "failed to parse the request JSON buffer: The document is empty. at 0"
        assert json.load(error) == {"error": text}


def test_settings_of_unknown_models_are_refused(host: RunningHost) -> None:
    http, grpc = SettingsApi(host, "http"), SettingsApi(host, "grpc")
    unknown = "Request for unknown model : missing"
    for change in ({}, {"trace_file": "x"}):  # the model is looked up first
        assert http.fails(change, "missing") == f"400 {unknown}"
        assert grpc.fails(change, "missing") == f"INVALID_ARGUMENT {unknown}"
    with host.client() as client:
        client.unload_model("unlucky")
        try:
            wait_until(lambda: not client.is_model_ready("unlucky"), "the unload")
            text = "Request for unknown model : unlucky"
            assert http.fails({}, "unlucky") == f"400 {text}"
            assert grpc.fails({}, "unlucky") == f"INVALID_ARGUMENT {text}"
        finally:
            client.load_model("unlucky")


# Traces


@pytest.mark.parametrize("http", [False, True], ids=["grpc", "http"])
def test_a_trace_has_timestamps_from_arrival_to_response(
    host: RunningHost, files: Files, http: bool
) -> None:
    api = SettingsApi(host, "grpc")
    assert api.set(ONE)["trace_count"] == "1"
    send_request(host, "identity", "my id", http)
    elements = files.read()
    number = elements[0]["id"]
    assert elements[0] == {
        "id": number, "model_name": "identity", "model_version": 1, "request_id": "my id",
    }  # fmt: skip
    assert all(len(element["timestamps"]) == 1 for element in elements[1:])
    times = stamps(elements, number)
    outside = HTTP_STAMPS if http else GRPC_STAMPS
    assert set(times) == {*outside, *CORE_STAMPS, "INFER_RESPONSE_COMPLETE"}
    order = [*outside[:2], *CORE_STAMPS, *outside[2:]]
    assert [times[name] for name in order] == sorted(times[name] for name in order)
    assert api.get()["trace_count"] == "0"
    api.set(dict.fromkeys(ONE))


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
def test_a_trace_of_generate_has_timestamps(host: RunningHost, files: Files, verb: str) -> None:
    api = SettingsApi(host, "grpc")
    api.set(ONE)
    url = f"http://{host.http_url}/v2/models/identity/{verb}"
    with urllib.request.urlopen(url, b'{"INPUT0": [1, 2]}', DEADLINE) as answer:
        assert answer.read()
    elements = files.read()
    expected = {*HTTP_STAMPS, *CORE_STAMPS, "INFER_RESPONSE_COMPLETE"}
    assert set(stamps(elements, elements[0]["id"])) == expected
    api.set(dict.fromkeys(ONE))


@pytest.mark.parametrize("empty_final", [False, True])
def test_each_response_of_a_stream_has_a_timestamp(
    host: RunningHost, files: Files, empty_final: bool
) -> None:
    api = SettingsApi(host, "grpc")
    api.set(ONE)
    sent = 4 if empty_final else 3
    with InferStream(host) as stream:
        stream.send("thread:many=3 final", enable_empty_final_response=empty_final)
        for _ in range(sent):
            stream.next()
        elements = files.read()
    names = [s["name"] for element in elements for s in element.get("timestamps", ())]
    assert names.count("GRPC_SEND_START") == names.count("GRPC_SEND_END") == sent
    assert set(names) == {*GRPC_STAMPS, *CORE_STAMPS, "INFER_RESPONSE_COMPLETE"}
    api.set(dict.fromkeys(ONE))


@pytest.mark.parametrize(("work", "events"), [("thread:many=3 final", 3), ("thread:final", 0)])
def test_each_event_of_generate_stream_has_a_timestamp(
    host: RunningHost, files: Files, work: str, events: int
) -> None:
    api = SettingsApi(host, "grpc")
    api.set(ONE)
    url = f"http://{host.http_url}/v2/models/stream/generate_stream"
    with urllib.request.urlopen(url, json.dumps({"COMMAND": work}).encode(), DEADLINE) as answer:
        assert answer.read().count(b"data: ") == events
    names = [s["name"] for element in files.read() for s in element.get("timestamps", ())]
    sent = max(events, 1)  # a stream without events sends its head
    assert names.count("HTTP_SEND_START") == names.count("HTTP_SEND_END") == sent
    api.set(dict.fromkeys(ONE))


def test_every_nth_request_is_traced(host: RunningHost, files: Files) -> None:
    api = SettingsApi(host, "grpc")
    api.set({"trace_level": ["TIMESTAMPS"], "trace_rate": "3", "trace_count": "2"}, "identity")
    for number in range(1, 8):
        send_request(host, "identity", str(number))
    assert [head["request_id"] for head in heads(files.read())] == ["3", "6"]
    api.set(dict.fromkeys(ONE), "identity")


def test_a_file_is_written_after_every_log_frequency_traces(
    host: RunningHost, files: Files
) -> None:
    api = SettingsApi(host, "grpc")
    setting = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "log_frequency": "2"}
    api.set(setting)
    for number in range(5):
        send_request(host, "identity", str(number + 1))
    assert [head["request_id"] for head in heads(files.read())] == ["1", "2"]
    assert [head["request_id"] for head in heads(files.read())] == ["3", "4"]
    api.set(dict.fromkeys(setting))
    assert [head["request_id"] for head in heads(files.read())] == ["5"]


def test_traced_tensors_have_their_elements(host: RunningHost, files: Files) -> None:
    api = SettingsApi(host, "grpc")
    api.set({**ONE, "trace_level": ["TENSORS"]})
    send_request(host, "identity")
    head, *rest = files.read()
    shown = {"data": "1.5,-2", "shape": "2", "dtype": "FP32"}
    number = head["id"]
    assert rest == [
        {"id": number, "activity": "TENSOR_QUEUE_INPUT", "tensor": {"name": "INPUT0", **shown}},
        {"id": number, "activity": "TENSOR_BACKEND_OUTPUT", "tensor": {"name": "OUTPUT0", **shown}},
    ]
    api.set(dict.fromkeys(ONE))


@pytest.mark.parametrize("model", ["asker", "chain"])
def test_bls_requests_and_ensemble_steps_are_child_traces(
    host: RunningHost, files: Files, model: str
) -> None:
    api = SettingsApi(host, "grpc")
    api.set(ONE)
    send_request(host, model, "outer")
    elements = files.read()
    outer, inner = heads(elements)
    assert (outer["model_name"], outer["request_id"]) == (model, "outer")
    assert inner == {
        "id": outer["id"] + 1,
        "model_name": "identity",
        "model_version": 1,
        "request_id": "inner" if model == "asker" else "outer",
        "parent_id": outer["id"],
    }
    assert [element["id"] for element in elements] == sorted(e["id"] for e in elements)
    assert set(stamps(elements, inner["id"])) == set(CORE_STAMPS)
    api.set(dict.fromkeys(ONE))


@pytest.mark.parametrize("http", [False, True], ids=["grpc", "http"])
def test_a_request_that_fails_is_traced_to_its_end(
    host: RunningHost, files: Files, http: bool
) -> None:
    api = SettingsApi(host, "grpc")
    api.set(ONE)
    assert "no luck" in infer_error(send_request, host, "unlucky", http=http)[1]
    times = stamps(elements := files.read(), elements[0]["id"])
    outside = HTTP_STAMPS if http else GRPC_STAMPS
    assert {"REQUEST_START", "COMPUTE_END", "REQUEST_END", *outside} <= set(times)
    api.set(dict.fromkeys(ONE))


def test_a_rejected_request_has_the_events_of_the_endpoint(host: RunningHost, files: Files) -> None:
    api = SettingsApi(host, "grpc")
    api.set(ONE, "identity")
    with host.client() as client:
        wrong = [tensor("OTHER", np.zeros(2, np.float32))]
        infer_error(client.infer, "identity", wrong)
    elements = files.read()
    assert not heads(elements)
    assert set(stamps(elements, elements[0]["id"])) == set(GRPC_STAMPS[:2])
    api.set(dict.fromkeys(ONE), "identity")


def test_buffered_traces_are_written_when_their_setting_is_replaced(
    host: RunningHost, folder: Path
) -> None:
    api = SettingsApi(host, "grpc")
    path = folder / "traces"

    def has_written(text: str) -> bool:
        return path.exists() and text in path.read_text()

    for request_id in ("first", "second"):
        api.set({"trace_level": ["TIMESTAMPS"], "trace_rate": "1"})
        send_request(host, "identity", request_id)
        api.set(dict.fromkeys(ONE))
        wait_until(partial(has_written, f'"request_id":"{request_id}"'), "traces")
    assert [head["request_id"] for head in heads(json.loads(path.read_text()))] == [
        "first", "second",
    ]  # fmt: skip


# The command line


def test_requests_are_traced_from_the_start_and_written_at_the_end(
    models: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    flags = ["triton,file=" + str(tmp_path / "t"), "level=TIMESTAMPS", "rate=2"]
    host = serve(
        models, *(f"--trace-config={flag}" for flag in flags), "--model-control-mode=explicit",
        "--load-model=identity",
    ).wait_started()  # fmt: skip
    for number in range(5):
        send_request(host, "identity", str(number + 1))
    assert host.stop() == 0
    elements = json.loads((tmp_path / "t").read_text())
    assert [head["request_id"] for head in heads(elements)] == ["2", "4"]
    assert [head["id"] for head in heads(elements)] == [1, 2]


def test_a_level_without_a_file_gives_a_warning_and_traces_nothing(
    models: RepositoryBuilder, serve: Serve
) -> None:
    host = serve(
        models, "--trace-config=level=TIMESTAMPS", "--model-control-mode=explicit",
    ).wait_started()  # fmt: skip
    host.wait_for("requests are not traced: trace file name is not given")
    text = "Attempting to set invalid trace setting :trace file name is not given"
    assert SettingsApi(host, "http").fails({"trace_level": ["TENSORS"]}) == f"400 {text}"
