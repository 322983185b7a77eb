"""Transcriptions of the OpenAI routes on a real host: forms, formats, streams and refusals."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator

import openapi_spec_validator
import pytest

from tests.conftest import RepositoryBuilder, RunningHost, Serve
from tests.openai_models import LETTERS, LETTERS_CONFIG, Reply, send

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("python_multipart") is None, reason="needs python-multipart"
)
PATH = "/v1/audio/transcriptions"
SCRIBE = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

def tensor(name, value):
    return pb_utils.Tensor(name, np.array([value], dtype=np.object_))

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            sound = pb_utils.get_input_tensor_by_name(request, "audio").as_numpy()[0]
            if sound == b"PARAMETERS":
                sound = request.parameters().encode()
            if sound.startswith(b"BAD"):
                sender.send(pb_utils.InferenceResponse([tensor("segments", sound[3:])]))
            for number, word in enumerate(sound.split(b" ")):
                if word == b"FAIL":
                    error = pb_utils.TritonError("the model is deaf")
                    sender.send(pb_utils.InferenceResponse(error=error))
                    break
                times = {"start": number * 3600.5, "end": number * 3600.5 + 1}
                sender.send(pb_utils.InferenceResponse([
                    tensor("text", word + b" "),
                    tensor("segments", json.dumps([{**times, "text": word.decode("latin-1")}])),
                    tensor("language", "en"),
                    pb_utils.Tensor("duration", np.array([1.5], np.float32)),
                ]))
            sender.send(flags=FINAL)
"""
SCRIBE_CONFIG = """
backend: "python"
input [ { name: "audio" data_type: TYPE_STRING dims: [ 1 ] } ]
output [
  { name: "text" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "segments" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "language" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "duration" data_type: TYPE_FP32 dims: [ 1 ] }
]
model_transaction_policy { decoupled: true }
parameters { key: "OPENAI" value { string_value: "transcriptions" } }
"""


@pytest.fixture(scope="module")
def host(module_serve: Serve, module_repository: RepositoryBuilder) -> Iterator[RunningHost]:
    module_repository.add("scribe", SCRIBE, SCRIBE_CONFIG)
    module_repository.add("letters", LETTERS, LETTERS_CONFIG)
    yield module_serve(module_repository, "--http-max-input-size=1000000").wait_started()


def form(*parts: tuple[str, bytes], boundary: str = "xyz", end: str = "--") -> bytes:
    """The body of a form; the part `file` has a file name."""
    lines = b""
    for name, value in parts:
        file = '; filename="a.wav"\r\nContent-Type: audio/wav' if name == "file" else ""
        lines += f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{file}\r\n'.encode()
        lines += b"\r\n" + value + b"\r\n"
    return lines + f"--{boundary}{end}\r\n".encode()


def post(host: RunningHost, body: bytes, kind: str = "multipart/form-data; boundary=xyz") -> Reply:
    return send(host, "POST", PATH, body, {"content-type": kind})


def transcribe(host: RunningHost, sound: bytes, **fields: str) -> Reply:
    fields = {"model": "scribe", **fields}
    parts = [(name, value.encode()) for name, value in fields.items()]
    return post(host, form(*parts, ("file", sound)))


def test_a_sound_becomes_a_text_in_each_format(host: RunningHost) -> None:
    assert transcribe(host, b"hello you").json == {"text": "hello you "}
    plain = transcribe(host, b"hello you", response_format="text")
    assert plain.headers["content-type"] == "text/plain; charset=utf-8"
    assert plain.body == b"hello you \n"
    assert transcribe(host, b"a b", response_format="srt").body.decode() == (
        "1\n00:00:00,000 --> 00:00:01,000\na\n\n2\n01:00:00,500 --> 01:00:01,500\nb\n\n"
    )
    assert transcribe(host, b"a", response_format="vtt").body.decode() == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.000\na\n\n"
    )
    assert transcribe(host, b"a", response_format="verbose_json").json == {
        "task": "transcribe",
        "language": "en",
        "duration": 1.5,
        "text": "a ",
        "segments": [{"id": 0, "start": 0.0, "end": 1.0, "text": "a"}],
    }


def test_bytes_of_a_file_arrive_as_they_are(host: RunningHost) -> None:
    sound = bytes(range(256)).replace(b" ", b"") + b"\r\n--xy\r\n" + b"x" * 200_000
    text = transcribe(host, sound).json["text"]
    assert text == sound.decode("utf-8", "replace") + " "


def test_fields_without_an_input_are_parameters_of_the_request(host: RunningHost) -> None:
    fields = {"language": "de", "temperature": "0.5", "prompt": "p", "chunking_strategy": "auto"}
    text = transcribe(host, b"PARAMETERS", **fields).json["text"]
    assert json.loads(text) == {
        "language": "de",
        "temperature": 0.5,
        "openai_route": "audio/transcriptions",
    }


def test_a_stream_has_deltas_and_the_whole_text(host: RunningHost) -> None:
    assert transcribe(host, b"a b", stream="true").events == [
        {"type": "transcript.text.delta", "delta": "a "},
        {"type": "transcript.text.delta", "delta": "b "},
        {"type": "transcript.text.done", "text": "a b "},
    ]


def test_a_stream_that_fails_ends_with_an_error(host: RunningHost) -> None:
    events = transcribe(host, b"a FAIL", stream="true").events
    assert events[-1]["error"]["message"] == "the model is deaf"
    assert not any(event.get("type") == "transcript.text.done" for event in events)
    assert transcribe(host, b"FAIL", stream="true").status == 500


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"response_format": "xml"}, "response_format", "invalid_value"),
        ({"temperature": "warm"}, "temperature", "invalid_type"),
        ({"temperature": "2"}, "temperature", "invalid_value"),
        ({"temperature": "nan"}, "temperature", "invalid_value"),
        ({"stream": "maybe"}, "stream", "invalid_type"),
        ({"stream": "true", "response_format": "srt"}, "stream", "invalid_value"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities", "invalid_value"),
        (
            {"timestamp_granularities[]": "word", "response_format": "verbose_json"},
            "timestamp_granularities",
            "unsupported_field",
        ),
        ({"include[]": "logprobs"}, "include", "unsupported_field"),
        ({"model": "letters"}, "model", "unsupported_route"),
        ({"language": "x" * 65537}, "language", "invalid_value"),
        ({"priority": "first"}, "priority", None),
    ],
)
def test_wrong_fields_are_refused(
    host: RunningHost, fields: dict[str, str], param: str, code: str | None
) -> None:
    reply = transcribe(host, b"a", **fields)
    assert reply.status == 400 and reply.error["param"] == param, reply.body
    assert code is None or reply.error["code"] == code


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"--xyz",
        form(("model", b"scribe"), ("file", b"a"), end=""),
        form(("model", b"scribe"), ("file", b"a"), boundary="other"),
        form(("", b"a")),
        form(*[("f", b"")] * 65),
        b"--xyz\r\n" + b"a" * 10_000 + b": b\r\n\r\n",
        b"--xyz\r\nContent-Disposition: form-data\r\n\r\na\r\n--xyz--\r\n",
    ],
)
def test_a_body_that_is_no_form_is_refused(host: RunningHost, body: bytes) -> None:
    assert post(host, body).error["code"] == "invalid_value"


def test_missing_or_double_fields_and_other_content_types_are_refused(host: RunningHost) -> None:
    model, file = ("model", b"scribe"), ("file", b"a")
    assert post(host, form(model)).error["message"] == "'file' is missing"
    assert post(host, form(file)).error["message"] == "'model' is missing"
    assert post(host, form(model, ("file", b""))).error["code"] == "invalid_value"
    assert post(host, form(model, model, file)).error["param"] == "model"
    assert post(host, form(("model", b"\xff"), file)).error["param"] == "model"
    for kind in ("application/json", "multipart/form-data", "multipart/form-data; boundary="):
        assert post(host, form(model, file), kind).error["param"] == "content-type"


def test_a_large_file_is_refused_before_it_is_read(host: RunningHost) -> None:
    headers = {"content-type": "multipart/form-data; boundary=xyz", "content-length": "1000001"}
    reply = send(host, "POST", PATH, None, headers)
    assert (reply.status, reply.error["code"]) == (413, "content_too_large")


@pytest.mark.parametrize("segments", [b"{}", b"[1]", b'[{"start": "0"}]', b"no_json"])
def test_wrong_segments_of_a_model_are_an_error(host: RunningHost, segments: bytes) -> None:
    reply = transcribe(host, b"BAD" + segments, response_format="srt")
    assert reply.status == 500 and "output 'segments'" in reply.error["message"]


def test_the_openapi_document_has_the_route_as_a_form(host: RunningHost) -> None:
    document = send(host, "GET", "/openapi.json").json
    openapi_spec_validator.validate(document)
    body = document["paths"][PATH]["post"]["requestBody"]["content"]["multipart/form-data"]
    assert body["schema"]["properties"]["model"] == {"enum": ["scribe"]}
    assert body["schema"]["required"] == ["model", "file"]
