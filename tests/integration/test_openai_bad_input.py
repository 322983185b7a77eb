"""Hostile requests, and models that answer wrongly, on the OpenAI routes of a real host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RepositoryBuilder, RunningHost, Serve, wait_until
from tests.openai_models import Reply, add_models, chat, complete, send

WRONG = """
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

def outputs(prompt):
    if prompt == b"number":
        return [pb_utils.Tensor("text_output", np.array([1.5], np.float32))]
    if prompt == b"several":
        return [pb_utils.Tensor("text_output", np.array([b"a", b"b"], np.object_))]
    if prompt == b"utf8":
        return [pb_utils.Tensor("text_output", np.array([b"a\\xff\\xc3"], np.object_))]
    return [pb_utils.Tensor("text_output", np.array([b"fine"], np.object_))]

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            prompt = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0]
            if prompt.endswith(b"late"):
                sender.send(pb_utils.InferenceResponse(outputs(b"")))
            sender.send(pb_utils.InferenceResponse(outputs(prompt.removesuffix(b" late"))))
            if prompt == b"raise late":
                raise ValueError("the model is confused")
            if prompt != b"unfinished":
                sender.send(flags=FINAL)
"""
SILENT = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        reason = pb_utils.Tensor("finish_reason", np.array([b"stop"], np.object_))
        return [pb_utils.InferenceResponse([reason]) for _ in requests]
"""
SILENT_CONFIG = """
backend: "python"
input [ { name: "%s" data_type: TYPE_STRING dims: [ 1 ] } ]
output [
  { name: "%s" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "finish_reason" data_type: TYPE_STRING dims: [ 1 ] }
]
parameters { key: "OPENAI_CHAT_TEMPLATE" value { string_value: "last" } }
"""
WRONG_CONFIG = """
backend: "python"
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
model_transaction_policy { decoupled: true }
"""


@pytest.fixture(scope="module")
def host(module_serve: Serve, module_repository: RepositoryBuilder) -> Iterator[RunningHost]:
    add_models(module_repository)
    module_repository.add("wrong", WRONG, WRONG_CONFIG)
    texts = SILENT_CONFIG % ("text_input", "text_output")
    module_repository.add("silent_text", SILENT, texts)
    whole = SILENT_CONFIG % ("openai_request", "openai_response")
    module_repository.add("silent_json", SILENT, whole)
    yield module_serve(module_repository).wait_started()


@pytest.mark.parametrize("output", ["number", "several"])
def test_a_wrong_output_is_an_error_and_never_a_complete_stream(
    host: RunningHost, output: str
) -> None:
    whole = complete(host, output, model="wrong")
    assert whole.status in (400, 500) and whole.error["message"], whole.body
    streamed = complete(host, f"{output} late", model="wrong", stream=True)
    assert streamed.status == 200 and "[DONE]" not in streamed.events
    assert streamed.events[-1]["error"]["message"]
    assert complete(host, "a", model="wrong").json["choices"][0]["text"] == "fine"


@pytest.mark.parametrize(
    ("model", "output"), [("silent_text", "text_output"), ("silent_json", "openai_response")]
)
def test_a_response_without_the_text_is_an_error(
    host: RunningHost, model: str, output: str
) -> None:
    text = f"model '{model}' gave no output '{output}'"
    whole = chat(host, "a", model=model)
    assert (whole.status, whole.error["message"]) == (500, text)
    streamed = chat(host, "a", model=model, stream=True)
    assert text.encode() in streamed.body and b"[DONE]" not in streamed.body


def test_invalid_utf8_of_a_model_becomes_replacement_characters(host: RunningHost) -> None:
    choice = complete(host, "utf8", model="wrong").json["choices"][0]
    assert choice["text"] == "a\ufffd\ufffd"
    events = complete(host, "utf8", model="wrong", stream=True).events
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "a\ufffd\ufffd"


def test_a_model_that_drops_a_request_without_a_final_response_is_an_error(
    host: RunningHost,
) -> None:
    reply = complete(host, "unfinished", model="wrong")
    assert reply.status == 500 and "FINAL" in reply.error["message"]
    events = complete(host, "unfinished", model="wrong", stream=True).events
    assert events[0]["choices"][0]["text"] == "fine" and events[-1]["error"]["message"]
    assert "[DONE]" not in events


def test_ten_megabytes_of_messages_are_answered(host: RunningHost) -> None:
    messages = [{"role": "user", "content": "x" * 1000} for _ in range(10_000)]
    body = {"model": "letters", "messages": [*messages, {"role": "user", "content": "a|b"}]}
    reply = send(host, "POST", "/v1/chat/completions", body)
    assert reply.json["choices"][0]["message"]["content"] == "ab"
    reply = chat(host, "y" * 10_000_000)
    assert len(reply.json["choices"][0]["message"]["content"]) == 10_000_000


def test_a_tool_of_ten_thousand_properties_reaches_the_model(host: RunningHost) -> None:
    properties = {f"p{number}": {"type": "string"} for number in range(10_000)}
    function = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    tools = [{"type": "function", "function": function}]
    reply = chat(host, '{"content": "fine"}', model="agent", tools=tools)
    assert reply.json["choices"][0]["message"]["content"] == "fine"
    assert chat(host, "a", tools=tools).error["param"] == "tools"


@pytest.mark.parametrize("role", ["", "System", "human", "tool\n", 5, None, ["user"], {"a": 1}])
def test_unknown_roles_are_refused(host: RunningHost, role: object) -> None:
    body = {"model": "letters", "messages": [{"role": role, "content": "a"}]}
    reply = send(host, "POST", "/v1/chat/completions", body)
    assert (reply.status, reply.error["param"]) == (400, "messages[0].role")


@pytest.mark.parametrize(
    "fields",
    [{"text": 5}, {"text": "x"}, {"text": {"format": 5}}, {"reasoning": []}, {"tools": 5}],
)
def test_wrong_types_of_a_response_are_refused(host: RunningHost, fields: dict[str, Any]) -> None:
    body = {"model": "letters", "input": "a", **fields}
    reply = send(host, "POST", "/v1/responses", body)
    assert (reply.status, reply.error["code"]) == (400, "invalid_type")


def test_members_of_another_format_are_ignored(host: RunningHost) -> None:
    form = {"type": "text", "json_schema": 5}
    assert chat(host, "a", response_format=form).status == 200


def test_a_stream_whose_model_raises_after_its_first_piece_has_no_end(host: RunningHost) -> None:
    reply = complete(host, "raise late", model="wrong", stream=True)
    assert "[DONE]" not in reply.events and "confused" in reply.events[-1]["error"]["message"]


def test_api_keys_are_never_logged(
    serve: Serve, repository: RepositoryBuilder, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("team right-key-1\n")
    repository.copy("identity")
    arguments = (f"--openai-api-key-file={keys}", "--log-verbose=2")
    host = serve(repository, *arguments).wait_started()

    def ask(key: str) -> Reply:
        return send(host, "GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})

    assert ask("right-key-1").status == 200
    assert ask("wrong-key-1").status == 401
    keys.write_text("team right-key-2\nshort\n")
    wait_until(
        lambda: ask("right-key-1").status == 200 and "cannot be read again" in host.output,
        "the complaint about the file",
    )
    assert "right-key" not in host.output and "wrong-key" not in host.output
