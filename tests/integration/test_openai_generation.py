"""Chats and completions of the OpenAI routes on a real host: texts, streams, errors, ends."""

from __future__ import annotations

import gzip
import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve
from tests.openai_models import Reply, add_models, chat, complete, send


@pytest.fixture(scope="module")
def host(module_serve: Serve, module_repository: RepositoryBuilder) -> Iterator[RunningHost]:
    add_models(module_repository)
    yield module_serve(module_repository).wait_started()


def texts(reply: Reply) -> str:
    """The text of the first choice of a streamed completion."""
    return "".join(event["choices"][0]["text"] for event in reply.events[:-1] if event["choices"])


def test_a_completion_joins_the_pieces_of_a_decoupled_model(host: RunningHost) -> None:
    reply = complete(host, "Hel|lo")
    assert reply.status == 200
    answer = reply.json
    assert answer["choices"] == [
        {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}
    ]
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    assert (answer["object"], answer["model"]) == ("text_completion", "letters")
    assert answer["id"].startswith("cmpl-") and reply.headers["x-request-id"] == answer["id"]


def test_an_ordinary_batching_model_writes_a_completion(host: RunningHost) -> None:
    answer = complete(host, "loud", model="whole").json
    assert answer["choices"][0]["text"] == "LOUD" and answer["usage"] is None


def test_a_chat_has_a_message(host: RunningHost) -> None:
    answer = chat(host, "Hel|lo").json
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]


def test_a_streamed_chat_has_role_pieces_reason_usage_and_end(host: RunningHost) -> None:
    reply = chat(host, "Hel|lo", stream=True, stream_options={"include_usage": True})
    *chunks, end = reply.events
    assert end == "[DONE]"
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo"},
        {},
    ]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    assert reasons == [None, None, None, "stop"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["total_tokens"] == 4
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert reply.headers["cache-control"] == "no-cache"


def test_a_streamed_completion_has_the_same_text_as_a_whole_one(host: RunningHost) -> None:
    reply = complete(host, "a|b|c", stream=True)
    assert texts(reply) == "abc" and reply.events[-1] == "[DONE]"


def test_a_character_that_is_cut_between_responses_stays_whole(host: RunningHost) -> None:
    assert chat(host, "漢|字|é").json["choices"][0]["message"]["content"] == "漢字é"


def test_the_token_limit_reaches_the_model_and_is_the_finish_reason(host: RunningHost) -> None:
    answer = complete(host, "a|b|c", max_tokens=2).json
    assert answer["choices"][0]["text"] == "ab"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert (
        chat(host, "a|b", max_tokens=2, max_completion_tokens=1).json["choices"][0]["message"][
            "content"
        ]
        == "a"
    )


def test_the_host_stops_at_a_stop_sequence_and_cancels_the_call(host: RunningHost) -> None:
    reply = complete(host, "one ST|OP two|WAIT", stop="STOP")
    choice = reply.json["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("one ", "stop")
    host.wait_for("cancelled b'one ST")


def test_several_prompts_and_choices_have_their_indices(host: RunningHost) -> None:
    answer = complete(host, ["a", "b|c"], n=2).json
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [
        (0, "a"), (1, "a"), (2, "bc"), (3, "bc")
    ]  # fmt: skip
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}


def test_choices_of_a_stream_come_mixed_and_complete(host: RunningHost) -> None:
    found = dict.fromkeys(range(3), "")
    for event in complete(host, "a|b|c", n=3, stream=True).events[:-1]:
        found[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert set(found.values()) == {"abc"}


def test_an_echo_comes_before_the_text(host: RunningHost) -> None:
    assert complete(host, "a|b", echo=True).json["choices"][0]["text"] == "a|bab"
    assert texts(complete(host, "a|b", echo=True, stream=True)) == "a|bab"
    only = complete(host, "a|b", echo=True, max_tokens=0).json["choices"][0]
    assert (only["text"], only["finish_reason"]) == ("a|b", "length")


def test_fields_without_an_input_become_parameters_of_the_request(host: RunningHost) -> None:
    answer = complete(host, "PARAMETERS", temperature=0.5, top_k=5, extra={"a": [1]}, user="me")
    assert json.loads(answer.json["choices"][0]["text"]) == {
        "temperature": 0.5,
        "top_k": 5,
        "extra": '{"a":[1]}',
        "user": "me",
        "openai_route": "completions",
    }


def test_a_model_of_the_whole_request_answers_with_deltas(host: RunningHost) -> None:
    lines: list[dict[str, Any]] = [
        {"content": "Let me see. "},
        {"tool_calls": [{"index": 0, "id": "c1", "type": "function",
                         "function": {"name": "f", "arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]},
        {"usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}},
    ]  # fmt: skip
    content = "\n".join(map(json.dumps, lines))
    tools = [{"type": "function", "function": {"name": "f"}}]
    answer = chat(host, content, model="agent", tools=tools).json
    choice = answer["choices"][0]
    assert choice["message"]["content"] == "Let me see. "
    assert choice["message"]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    ]
    assert choice["finish_reason"] == "tool_calls" and answer["usage"]["total_tokens"] == 3
    streamed = chat(host, content, model="agent", tools=tools, stream=True).events
    deltas = [event["choices"][0]["delta"] for event in streamed[:-1]]
    assert [delta["tool_calls"] for delta in deltas if "tool_calls" in delta] == [
        lines[1]["tool_calls"],
        lines[2]["tool_calls"],
    ]


def test_a_model_of_the_whole_request_may_answer_with_objects_of_openai(host: RunningHost) -> None:
    choices = [
        {"index": index, "message": {"role": "assistant", "content": f"c{index}"},
         "finish_reason": "length"}
        for index in range(2)
    ]  # fmt: skip
    answer = chat(host, json.dumps({"id": "x", "choices": choices}), model="agent", n=2).json
    found = [(c["message"]["content"], c["finish_reason"]) for c in answer["choices"]]
    assert found == [("c0", "length"), ("c1", "length")] and answer["id"] != "x"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("rubbish", "model 'agent' gave output 'openai_response' that is no JSON object: rubbish"),
        ('{"index":3}', ("model 'agent' gave output 'openai_response' that is no choice that was"
         ' asked for: {"index":3}')),
        ('{"finish_reason":"abort"}', "model 'agent' ended with finish reason 'abort'"),
    ],
)  # fmt: skip
def test_a_chunk_that_cannot_be_answered_is_an_error(
    host: RunningHost, line: str, text: str
) -> None:
    reply = chat(host, line, model="agent")
    assert reply.status == 500 and reply.error["message"] == text


# Errors


def test_the_error_of_a_model_has_a_status_and_no_retry(host: RunningHost) -> None:
    for stream in (False, True):
        reply = complete(host, "FAIL", stream=stream)
        assert reply.status == 500 and reply.headers["x-should-retry"] == "false"
        assert reply.error == {
            "message": "the model is tired", "type": "server_error", "param": None, "code": None
        }  # fmt: skip


def test_an_error_within_a_stream_is_an_event_without_the_end(host: RunningHost) -> None:
    *chunks, last = complete(host, "a|b|FAIL", stream=True).events
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "b"]
    assert last["error"]["message"] == "the model is tired"


def test_an_error_of_one_choice_is_the_error_of_all(host: RunningHost) -> None:
    reply = complete(host, ["a|WAIT", "FAIL"])
    assert reply.error["message"] == "the model is tired"


def test_a_stub_that_dies_within_a_stream_is_an_error_event(
    serve: Serve, repository: RepositoryBuilder
) -> None:
    add_models(repository)
    host = serve(repository).wait_started()
    events = complete(host, "a|DIE", stream=True).events
    assert "error" in events[-1] and "[DONE]" not in events
    assert events[-1]["error"]["type"] == "server_error"


@pytest.mark.parametrize(
    ("fields", "status", "code", "text"),
    [
        (
            {"model": "ghost"}, 404, "model_not_found",
            "there is no model 'ghost' here; GET /v1/models lists those that can be asked",
        ),
        (
            {"model": "identity"}, 400, "unsupported_route",
            "model 'identity' does not do completions; its configuration may say so with OPENAI",
        ),
        (
            {"prompt": [1, 2]}, 400, "unsupported_field",
            ("model 'letters' takes text, not token ids; with LangChain, set"
            " check_embedding_ctx_length=False"),
        ),
        (
            {"suffix": "x"}, 400, "unsupported_field",
            "model 'letters' does not take 'suffix': it has no input 'suffix' or 'openai_request'",
        ),
        (
            {"sequence_id": 5}, 400, "unsupported_field",
            "'sequence_id' is reserved and cannot be sent",
        ),
        (
            {"prompt": ["a"] * 3, "n": 100}, 400, "invalid_value",
            "'n' and 'prompt' ask for 300 choices, at most 128 are possible",
        ),
        ({"max_tokens": 1 << 40}, 400, "invalid_type",
         "'max_tokens' must be an integer of INT32, got a number"),
        ({"prompt": [[1]], "echo": True}, 400, "unsupported_field", None),
    ],
)  # fmt: skip
def test_a_request_that_the_model_cannot_answer_is_refused(
    host: RunningHost, fields: dict[str, Any], status: int, code: str, text: str | None
) -> None:
    reply = complete(host, fields.pop("prompt", "a"), **fields)
    assert (reply.status, reply.error["code"]) == (status, code)
    assert text is None or reply.error["message"] == text


def test_a_model_without_a_chat_template_says_what_to_add(host: RunningHost) -> None:
    reply = chat(host, "a", model="whole")
    assert reply.status == 400 and reply.error["message"] == (
        "model 'whole' does not do chat: it takes a prompt and has no chat template; put"
        " chat_template.jinja into its folder, or set OPENAI_CHAT_TEMPLATE in its configuration"
    )


def test_tools_need_a_model_that_takes_them(host: RunningHost) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    reply = chat(host, "a", tools=tools)
    assert reply.status == 400 and reply.error["param"] == "tools"
    assert chat(host, "a", tools=tools, tool_choice="none").status == 200


def test_a_body_that_is_nested_too_deeply_is_refused(host: RunningHost) -> None:
    deep = b"[" * 50_000 + b"]" * 50_000
    body = b'{"model": "letters", "prompt": "a", "x": %b}' % deep
    reply = send(host, "POST", "/v1/completions", body)
    assert (reply.status, reply.error["code"]) == (400, "invalid_json")


def test_a_body_that_declares_too_large_a_size_is_not_read(
    serve: Serve, repository: RepositoryBuilder
) -> None:
    add_models(repository)
    host = serve(repository, "--http-max-input-size=4000").wait_started()
    with closing(http.client.HTTPConnection(host.http_url, timeout=DEADLINE)) as connection:
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("content-length", "5000")
        connection.endheaders()
        response = connection.getresponse()
        error = json.loads(response.read())["error"]
    assert (response.status, error["code"]) == (413, "content_too_large")
    many = complete(host, "a" * 100, n=100)
    assert (many.status, many.error["code"]) == (413, "content_too_large")


def test_bodies_may_be_compressed(host: RunningHost) -> None:
    body = gzip.compress(json.dumps({"model": "letters", "prompt": "a"}).encode())
    reply = send(host, "POST", "/v1/completions", body, {"content-encoding": "gzip"})
    assert reply.json["choices"][0]["text"] == "a"
    refused = send(host, "POST", "/v1/completions", body, {"content-encoding": "br"})
    assert refused.status == 400


# Cancellation


@pytest.mark.parametrize("stream", [True, False])
def test_a_model_sees_that_the_client_has_gone(
    serve: Serve, repository: RepositoryBuilder, stream: bool
) -> None:
    add_models(repository)
    host = serve(repository).wait_started()
    body = json.dumps({"model": "letters", "prompt": "a|WAIT", "stream": stream})
    with closing(http.client.HTTPConnection(host.http_url, timeout=DEADLINE)) as connection:
        connection.request("POST", "/v1/completions", body)
        host.wait_for("waiting")
        if stream:
            assert connection.getresponse().readline().startswith(b"data: ")
    host.wait_for("cancelled")


# Models, health, restrictions


def test_models_that_speak_a_route_are_listed(host: RunningHost) -> None:
    answer = send(host, "GET", "/v1/models").json
    assert answer["object"] == "list"
    names = [model["id"] for model in answer["data"]]
    assert names == ["agent", "letters", "acme/letters", "whole"]
    one = send(host, "GET", "/v1/models/acme%2Fletters").json
    assert (one["id"], one["object"], one["owned_by"]) == ("acme/letters", "model", "pbhost")
    assert type(one["created"]) is int
    assert send(host, "GET", "/v1/models/identity").status == 404


def test_a_model_is_found_by_its_other_name_and_its_version(host: RunningHost) -> None:
    for name in ("acme/letters", "letters:1", "acme/letters:1"):
        answer = complete(host, "a", model=name).json
        assert (answer["model"], answer["choices"][0]["text"]) == (name, "a")
    assert complete(host, "a", model="letters:7").status == 404


def test_unknown_urls_and_methods_have_errors_of_openai(host: RunningHost) -> None:
    unknown = send(host, "POST", "/v1/assistants", {})
    assert (unknown.status, unknown.error["code"]) == (404, "unknown_url")
    wrong = send(host, "GET", "/v1/completions")
    assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
    assert wrong.error["message"] == "Method Not Allowed"


def test_health_is_answered_without_a_body(host: RunningHost) -> None:
    for path in ("/health", "/health/ready"):
        reply = send(host, "GET", path)
        assert (reply.status, reply.body) == (200, b"")


def test_a_request_id_of_the_client_is_answered(host: RunningHost) -> None:
    body = {"model": "letters", "prompt": "a"}
    reply = send(host, "POST", "/v1/completions", body, {"x-request-id": "abc"})
    assert reply.headers["x-request-id"] == "abc"


def test_a_restricted_category_is_restricted_here_as_well(
    serve: Serve, repository: RepositoryBuilder
) -> None:
    add_models(repository)
    host = serve(repository, "--http-restricted-api=inference:key=secret").wait_started()
    reply = complete(host, "a")
    assert (reply.status, reply.error["code"]) == (403, "restricted")
    assert reply.error["message"] == "This API is restricted, expecting header 'key'"
    body = {"model": "letters", "prompt": "a"}
    assert send(host, "POST", "/v1/completions", body, {"key": "secret"}).status == 200
    assert send(host, "GET", "/v1/models").status == 200


def test_without_the_routes_their_paths_are_unknown(
    serve: Serve, repository: RepositoryBuilder
) -> None:
    repository.copy("identity")
    host = serve(repository, "--allow-openai=false").wait_started()
    for path in ("/v1/models", "/health"):
        reply = send(host, "GET", path)
        assert (reply.status, reply.json) == (404, {"error": "Not Found"})
