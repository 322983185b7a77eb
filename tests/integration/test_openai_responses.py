"""`POST /v1/responses` on a real host: whole and streamed, with raw requests and the client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve
from tests.lazy_import import lazy_import
from tests.openai_models import Reply, add_models, send

openai = lazy_import("openai")

TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
CALL = {
    "tool_calls": [{"index": 0, "id": "c1", "function": {"name": "weather", "arguments": '{"a'}}]
}
REST = {"tool_calls": [{"index": 0, "function": {"arguments": '":1}'}}]}
MIRROR = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "openai_request").as_numpy()[0]
            answer = json.dumps({"content": text.decode()}).encode()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor(
                "openai_response", np.array([answer], dtype=np.object_))]))
        return responses
"""
MIRROR_CONFIG = """
backend: "python"
input [ { name: "openai_request" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "openai_response" data_type: TYPE_STRING dims: [ 1 ] } ]
"""


@pytest.fixture(scope="module")
def host(module_serve: Serve, module_repository: RepositoryBuilder) -> Iterator[RunningHost]:
    add_models(module_repository)
    module_repository.add("mirror", MIRROR, MIRROR_CONFIG)
    yield module_serve(module_repository).wait_started()


@pytest.fixture
def client(host: RunningHost) -> Iterator[Any]:
    address = f"http://{host.http_url}/v1"
    with openai.OpenAI(base_url=address, api_key="any", timeout=DEADLINE) as client:
        yield client


def respond(host: RunningHost, content: object, **fields: object) -> Reply:
    return send(host, "POST", "/v1/responses", {"model": "letters", "input": content, **fields})


def events(reply: Reply) -> list[dict[str, Any]]:
    """The events of a stream, whose names and sequence numbers are checked."""
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    *parts, rest = reply.body.decode().split("\n\n")
    assert rest == ""
    found = []
    for number, part in enumerate(parts):
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == number
        found.append(event)
    return found


def test_a_whole_response_has_the_text_and_the_usage(host: RunningHost) -> None:
    reply = respond(host, "Hel|lo", max_output_tokens=10, metadata={"a": "b"}, store=True)
    response = reply.json
    assert reply.status == 200 and response["id"].startswith("resp_")
    assert (response["object"], response["status"]) == ("response", "completed")
    assert response["output"][0]["content"] == [
        {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}
    ]
    assert response["usage"]["input_tokens"] == 2 and response["usage"]["total_tokens"] == 4
    assert (response["store"], response["metadata"]) == (False, {"a": "b"})
    assert response["max_output_tokens"] == 10 and response["tool_choice"] == "auto"


def test_a_streamed_response_has_numbered_events_and_no_done(host: RunningHost) -> None:
    found = events(respond(host, "Hel|lo", stream=True))
    assert [event["type"].removeprefix("response.") for event in found] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["delta"] for event in found if "delta" in event] == ["Hel", "lo"]
    last = found[-1]["response"]
    assert last["output"] == [found[-2]["item"]] and last["status"] == "completed"
    assert last["output"][0]["content"][0]["text"] == "Hello"


def test_a_response_that_reaches_the_limit_is_incomplete(host: RunningHost) -> None:
    for stream in (False, True):
        reply = respond(host, "a|b|c", max_output_tokens=2, stream=stream)
        response = events(reply)[-1]["response"] if stream else reply.json
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["output"][0]["status"] == "incomplete"
    assert events(reply)[-1]["type"] == "response.incomplete"


def test_an_error_before_the_first_event_has_a_status(host: RunningHost) -> None:
    reply = respond(host, "FAIL", stream=True)
    assert reply.status == 500 and reply.error["message"] == "the model is tired"


def test_an_error_after_the_first_event_is_the_last_event(host: RunningHost) -> None:
    last = events(respond(host, "a|FAIL", stream=True))[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "the model is tired"}


def test_function_calls_are_items_of_the_output(host: RunningHost) -> None:
    lines = "\n".join(map(json.dumps, [{"content": "so"}, CALL, REST]))
    whole = respond(host, lines, model="agent", tools=[TOOL]).json["output"]
    assert [item["type"] for item in whole] == ["message", "function_call"]
    assert {**whole[1], "id": ""} == {
        "id": "",
        "type": "function_call",
        "status": "completed",
        "call_id": "c1",
        "name": "weather",
        "arguments": '{"a":1}',
    }
    found = events(respond(host, lines, model="agent", tools=[TOOL], stream=True))
    names = [event["type"].removeprefix("response.") for event in found]
    assert names[names.index("content_part.done") :] == [
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]


def test_reasoning_is_an_item_before_the_message(host: RunningHost) -> None:
    lines = "\n".join(map(json.dumps, [{"reasoning_content": "hm"}, {"content": "so"}]))
    output = respond(host, lines, model="agent").json["output"]
    assert [item["type"] for item in output] == ["reasoning", "message"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "hm"}]


def test_the_fields_become_those_of_a_chat(host: RunningHost) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "What?"}]},
        {"type": "message", "role": "assistant", "content": "I look"},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "this"},
                {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "low"},
            ],
        },
    ]
    form = {"type": "json_schema", "name": "s", "schema": {"type": "object"}, "strict": True}
    response = respond(
        host,
        items,
        model="mirror",
        instructions="Be short.",
        tools=[TOOL],
        tool_choice={"type": "function", "name": "weather"},
        text={"format": form},
        reasoning={"effort": "low"},
        max_output_tokens=5,
        temperature=0.5,
        top_k=3,
    ).json
    request = json.loads(response["output"][0]["content"][0]["text"])
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    image = {"url": "data:image/png;base64,AA==", "detail": "low"}
    assert request["messages"] == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "What?"},
        {"role": "assistant", "content": "I look", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "this"},
                {"type": "image_url", "image_url": image},
            ],
        },
    ]
    function = {"name": "weather", "parameters": {"type": "object"}}
    assert request["tools"] == [{"type": "function", "function": function}]
    assert request["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    schema = {"name": "s", "schema": {"type": "object"}, "strict": True}
    assert request["response_format"] == {"type": "json_schema", "json_schema": schema}
    assert (request["reasoning_effort"], request["max_tokens"]) == ("low", 5)
    assert (request["temperature"], request["top_k"]) == (0.5, 3)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"previous_response_id": "resp_1"}, "unsupported_field", "previous_response_id"),
        ({"conversation": "conv_1"}, "unsupported_field", "conversation"),
        ({"prompt": {"id": "p"}}, "unsupported_field", "prompt"),
        ({"background": True}, "unsupported_field", "background"),
        ({"n": 2}, "unsupported_field", "n"),
        ({"max_tokens": 2}, "unsupported_field", "max_tokens"),
        ({"tools": [{"type": "web_search"}]}, "unsupported_field", "tools[0].type"),
        ({"tool_choice": {"type": "file_search"}}, "unsupported_field", "tool_choice.type"),
        ({"include": ["message.output_text.logprobs"]}, "unsupported_field", "logprobs"),
        ({"input": None}, "missing_field", "input"),
        ({"input": 3}, "invalid_type", "input"),
        ({"input": []}, "invalid_value", "input"),
        ({"input": ["a"]}, "invalid_type", "input[0]"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "unsupported_field", "input[0].type"),
        ({"input": [{"role": "king", "content": "a"}]}, "invalid_value", "input[0].role"),
        ({"input": [{"role": "user"}]}, "missing_field", "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            "unsupported_field",
            "input[0].content[0].type",
        ),
        ({"max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
        ({"max_output_tokens": True}, "invalid_type", "max_output_tokens"),
        ({"temperature": 3}, "invalid_value", "temperature"),
        ({"instructions": 1}, "invalid_type", "instructions"),
        ({"text": {"format": {}}}, "missing_field", "text.format.type"),
    ],
)
def test_a_field_that_cannot_be_honoured_is_refused(
    host: RunningHost, fields: dict[str, object], code: str, param: str
) -> None:
    reply = send(host, "POST", "/v1/responses", {"model": "letters", "input": "a", **fields})
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, code, param)


def test_fields_that_clients_send_by_habit_have_no_effect(host: RunningHost) -> None:
    reply = respond(
        host,
        "a",
        tools=[],
        tool_choice="auto",
        include=["reasoning.encrypted_content"],
        truncation="auto",
        background=False,
        text={"format": {"type": "text"}},
    )
    assert reply.status == 200


def test_the_python_client_reads_responses(client: Any) -> None:
    response = client.responses.create(model="letters", input="Hel|lo")
    assert response.output_text == "Hello" and response.usage.output_tokens == 2
    stream = client.responses.create(model="letters", input="Hel|lo", stream=True)
    deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert deltas == ["Hel", "lo"]
    with client.responses.stream(model="letters", input="Hel|lo") as helper:
        final = helper.get_final_response()
    assert final.output_text == "Hello" and final.status == "completed"


def test_the_python_client_reads_function_calls(client: Any) -> None:
    lines = "\n".join(map(json.dumps, [CALL, REST]))
    tool = {**TOOL, "strict": False}
    with client.responses.stream(model="agent", input=lines, tools=[tool]) as helper:
        call = helper.get_final_response().output[0]
    assert (call.name, call.arguments, call.call_id) == ("weather", '{"a":1}', "c1")
    answer = {"type": "function_call_output", "call_id": "c1", "output": '{"content": "rain"}'}
    question = [{"role": "user", "content": "?"}, call.model_dump(exclude_none=True), answer]
    assert client.responses.create(model="agent", input=question).output_text == "rain"


def test_the_python_client_raises_errors(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="'previous_response_id' is not supported"):
        client.responses.create(model="letters", input="a", previous_response_id="resp_1")
    with pytest.raises(openai.InternalServerError, match="the model is tired"):
        client.responses.create(model="letters", input="FAIL", stream=True)


def test_a_response_that_is_closed_cancels_its_call(host: RunningHost, client: Any) -> None:
    stream = client.responses.create(model="letters", input="left|WAIT", stream=True)
    assert any(event.type == "response.output_text.delta" for event in stream)
    stream.close()
    host.wait_for("cancelled b'left")
