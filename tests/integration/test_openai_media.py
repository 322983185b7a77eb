"""Images and speech of the OpenAI routes on a real host, with the official client."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import openapi_spec_validator
import pytest

from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve
from tests.lazy_import import lazy_import
from tests.openai_models import LETTERS, LETTERS_CONFIG, send

openai = lazy_import("openai")
image_files = lazy_import("PIL.Image")

PAINTER = """
import io
import json
import numpy as np
from PIL import Image
import triton_python_backend_utils as pb_utils

def value(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy().reshape(-1)[0]

class TritonPythonModel:
    def execute(self, requests):
        return [self.paint(request) for request in requests]

    def paint(self, request):
        prompt, seed = value(request, "prompt").decode(), value(request, "seed")
        if prompt == "FAIL":
            raise ValueError("the model has no colours")
        if prompt == "PARAMETERS":
            prompt = request.parameters()
            images = [prompt.encode()]
        else:
            size = (value(request, "size") or b"4x2").decode().split("x")
            image = Image.new("RGB", tuple(map(int, size)), (0, 0, int(seed or 0) % 256))
            file = io.BytesIO()
            image.save(file, "PNG")
            images = [] if prompt == "NOTHING" else [file.getvalue()]
        array = np.array(images, dtype=np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor("image", array)])
"""
PAINTER_CONFIG = """
backend: "python"
input [
  { name: "prompt" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "size" data_type: TYPE_STRING dims: [ 1 ] optional: true },
  { name: "seed" data_type: TYPE_INT64 dims: [ 1 ] optional: true }
]
output [ { name: "image" data_type: TYPE_STRING dims: [ -1 ] } ]
parameters { key: "OPENAI" value { string_value: "images" } }
"""
SPEAKER = """
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            text = pb_utils.get_input_tensor_by_name(request, "input").as_numpy()[0]
            voice = pb_utils.get_input_tensor_by_name(request, "voice")
            voice = b"none" if voice is None else voice.as_numpy()[0]
            for word in text.split():
                if word == b"FAIL":
                    error = pb_utils.TritonError("the model is hoarse")
                    sender.send(pb_utils.InferenceResponse(error=error))
                    break
                sound = np.array([voice + b":" + word + b"\\x00\\xff"], dtype=np.object_)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("audio", sound)]))
            sender.send(flags=FINAL)
"""
SPEAKER_CONFIG = """
backend: "python"
input [
  { name: "input" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "voice" data_type: TYPE_STRING dims: [ 1 ] optional: true }%s
]
output [ { name: "audio" data_type: TYPE_STRING dims: [ 1 ] } ]
model_transaction_policy { decoupled: true }
parameters { key: "OPENAI" value { string_value: "speech" } }
"""
WAV = """
parameters { key: "OPENAI_DEFAULTS" value { string_value: "{\\"response_format\\": \\"wav\\"}" } }
"""
FORMAT = ',\n  { name: "response_format" data_type: TYPE_STRING dims: [ 1 ] optional: true }'
NUMBERS = """
backend: "python"
input [ { name: "prompt" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "image" data_type: TYPE_UINT8 dims: [ -1 ] } ]
parameters { key: "OPENAI" value { string_value: "images" } }
"""


@pytest.fixture(scope="module")
def host(module_serve: Serve, module_repository: RepositoryBuilder) -> Iterator[RunningHost]:
    module_repository.add("painter", PAINTER, PAINTER_CONFIG)
    module_repository.add("speaker", SPEAKER, SPEAKER_CONFIG % "" + WAV)
    module_repository.add("any_format", SPEAKER, SPEAKER_CONFIG % FORMAT)
    module_repository.add("letters", LETTERS, LETTERS_CONFIG)
    yield module_serve(module_repository).wait_started()


@pytest.fixture
def client(host: RunningHost) -> Iterator[Any]:
    address = f"http://{host.http_url}/v1"
    with openai.OpenAI(base_url=address, api_key="any", timeout=DEADLINE, max_retries=0) as client:
        yield client


def opened(entry: Any) -> Any:
    return image_files.open(io.BytesIO(base64.b64decode(entry.b64_json)))


def test_a_prompt_becomes_images(client: Any) -> None:
    (one,) = client.images.generate(model="painter", prompt="a sky").data
    assert (opened(one).format, opened(one).size) == ("PNG", (4, 2))
    asked = {"prompt": "a sky", "size": "8x4", "response_format": "b64_json"}
    made = client.images.generate(model="painter", n=3, extra_body={"seed": 7}, **asked)
    assert [opened(entry).getpixel((0, 0)) for entry in made.data] == [
        (0, 0, blue) for blue in (7, 8, 9)
    ]
    assert opened(made.data[0]).size == (8, 4) and made.created > 0


def test_fields_of_images_without_an_input_become_parameters(client: Any) -> None:
    (entry,) = client.images.generate(model="painter", prompt="PARAMETERS", quality="high").data
    parameters = json.loads(base64.b64decode(entry.b64_json))
    assert parameters == {"quality": "high", "openai_route": "images/generations"}


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"response_format": "url"}, "invalid_value", "response_format"),
        ({"size": "large"}, "invalid_value", "size"),
        ({"n": 11}, "invalid_value", "n"),
        ({"n": "1"}, "invalid_type", "n"),
        ({"prompt": ""}, "invalid_value", "prompt"),
        ({"prompt": None}, "missing_field", "prompt"),
        ({"stream": True}, "invalid_value", "stream"),
        ({"output_format": "webp"}, "unsupported_field", "output_format"),
        ({"background": "transparent"}, "unsupported_field", "background"),
        ({"model": "letters"}, "unsupported_route", "model"),
    ],
)
def test_images_that_the_model_does_not_make_are_refused(
    host: RunningHost, fields: dict[str, Any], code: str, param: str
) -> None:
    body = {"model": "painter", "prompt": "a", **fields}
    reply = send(host, "POST", "/v1/images/generations", body)
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, code, param)


def test_a_model_that_makes_no_image_is_an_error(host: RunningHost) -> None:
    for prompt, text in [
        ("NOTHING", "model 'painter' gave 0 images, expected 1"),
        ("FAIL", "the model has no colours"),
    ]:
        body = {"model": "painter", "prompt": prompt}
        reply = send(host, "POST", "/v1/images/generations", body)
        assert reply.status == 500 and text in reply.error["message"]
        assert reply.headers["x-should-retry"] == "false"


def test_a_text_becomes_a_sound_as_it_comes(client: Any) -> None:
    speech = client.audio.speech
    asked = {"model": "speaker", "input": "hello you", "voice": "low"}
    whole = speech.create(**asked)
    assert whole.read() == b"low:hello\x00\xfflow:you\x00\xff"
    assert whole.response.headers["content-type"] == "audio/wav"
    with speech.with_streaming_response.create(**asked) as response:
        assert b"".join(response.iter_bytes()) == whole.content


@pytest.mark.parametrize(
    ("form", "kind"), [(None, "audio/mpeg"), ("opus", "audio/ogg"), ("pcm", "audio/pcm")]
)
def test_the_format_chooses_the_content_type(client: Any, form: str | None, kind: str) -> None:
    fields = {} if form is None else {"response_format": form}
    made = client.audio.speech.create(model="any_format", input="a", voice="low", **fields)
    assert made.response.headers["content-type"] == kind


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"response_format": "mp3"}, "unsupported_field", "response_format"),
        ({"response_format": "midi"}, "invalid_value", "response_format"),
        ({"stream_format": "sse"}, "invalid_value", "stream_format"),
        ({"speed": 5}, "invalid_value", "speed"),
        ({"input": ""}, "invalid_value", "input"),
        ({"voice": 5}, "invalid_type", "voice"),
        ({"model": "painter"}, "unsupported_route", "model"),
    ],
)
def test_speech_that_the_model_does_not_give_is_refused(
    host: RunningHost, fields: dict[str, Any], code: str, param: str
) -> None:
    body = {"model": "speaker", "input": "a", "voice": "low", **fields}
    reply = send(host, "POST", "/v1/audio/speech", body)
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, code, param)


def test_an_error_before_the_first_sound_has_a_status(client: Any) -> None:
    for text, message in [("FAIL", "the model is hoarse"), (" ", "'speaker' gave no sound")]:
        with pytest.raises(openai.InternalServerError, match=message):
            client.audio.speech.create(model="speaker", input=text, voice="low")


def test_a_sound_that_is_cut_off_does_not_look_complete(host: RunningHost, client: Any) -> None:
    asked = {"model": "speaker", "input": "one FAIL", "voice": "low"}
    with client.audio.speech.with_streaming_response.create(**asked) as response:
        with pytest.raises(Exception, match="incomplete chunked read"):
            list(response.iter_bytes())
    host.wait_for("was cut off: the model is hoarse")


def test_the_routes_are_documented_for_models_that_speak_them(host: RunningHost) -> None:
    document = send(host, "GET", "/openapi.json").json
    openapi_spec_validator.validate(document)
    paths = document["paths"]
    images = paths["/v1/images/generations"]["post"]["requestBody"]["content"]
    assert images["application/json"]["schema"]["properties"]["model"]["enum"] == ["painter"]
    assert "/v1/audio/speech" in paths


def test_images_must_be_files(serve: Serve, repository: RepositoryBuilder) -> None:
    repository.add("numbers", PAINTER, NUMBERS)
    host = serve(repository, "--exit-on-error=false").wait_started()
    assert (
        "output 'image' of model 'numbers' must have the bytes of files as TYPE_STRING, but is"
        " TYPE_UINT8" in host.output
    )
