"""What models say with tensors and parameters; metrics, traces and limits as on /v2."""

from __future__ import annotations

import base64
import json
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until
from tests.lazy_import import lazy_import
from tests.openai_models import LETTERS, LETTERS_CONFIG, WHOLE, WHOLE_CONFIG, chat, complete, send

openai = lazy_import("openai")

ECHO = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    '''Answers with its inputs as JSON.'''
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        given = {}
        for tensor in request.inputs():
            values = tensor.as_numpy().reshape(-1).tolist()
            given[tensor.name()] = [
                value.decode() if isinstance(value, bytes) else value for value in values]
        given["parameters"] = json.loads(request.parameters())
        text = json.dumps(given).encode()
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("text_output", np.array([text], dtype=np.object_))])
"""
TALKER = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

def text(name, value):
    return pb_utils.Tensor(name, np.array([value], dtype=np.object_))

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            calls = [{"id": "c1", "type": "function", "function": {
                "name": "f", "arguments": json.dumps({"n": 1})}}]
            answers.append(pb_utils.InferenceResponse([
                text("text", b""), text("tool_calls", json.dumps(calls).encode()),
                text("reasoning", b"I think")]))
        return answers
"""
COUNTER = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    '''Counts its tokens and knows no limit: it writes until it is cancelled.'''
    async def execute(self, requests):
        import asyncio
        for request in requests:
            sender = request.get_response_sender()
            while not sender.is_cancelled():
                tensor = pb_utils.Tensor("text_output", np.array([b"x"], dtype=np.object_))
                count = pb_utils.Tensor("num_output_tokens", np.array([1], dtype=np.int32))
                sender.send(pb_utils.InferenceResponse([tensor, count]))
                await asyncio.sleep(0)
            print("cancelled", flush=True)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
GATED = """
import os
import threading
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    '''Answers with its prompt once the file exists that the prompt names.'''
    def execute(self, requests):
        answers = []
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()
            print("waiting", flush=True)
            while not os.path.exists(text.reshape(-1)[0].decode()):
                threading.Event().wait(0.005)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text)]))
        return answers
"""


def tensors(kind: str, **entries: str) -> str:
    """Writes tensors; a `?` after the type makes an input optional."""
    listed = ", ".join(
        f'{{ name: "{name}" data_type: TYPE_{kind.rstrip("?")} dims: [ -1 ]'
        + (" optional: true }" if kind.endswith("?") else " }")
        for name, kind in entries.items()
    )
    return f"{kind} [ {listed} ]\n"


def parameters(**values: str) -> str:
    return "".join(
        f'parameters {{ key: "{key}" value {{ string_value: {json.dumps(value)} }} }}\n'
        for key, value in values.items()
    )


TEXT_OUTPUT = tensors("output", text_output="STRING")
NAMED = (
    tensors("input", Q="STRING", K="INT32?", TEMPERATURE="FP32?", HEAT="FP64?")
    + TEXT_OUTPUT.replace("text_output", "ANSWER")
    + parameters(
        OPENAI="completions, chat",
        OPENAI_INPUTS="Q=prompt, K=max_tokens, HEAT=temperature",
        OPENAI_OUTPUTS="ANSWER=text",
        OPENAI_DEFAULTS='{"max_tokens": 3, "top_k": 4}',
        OPENAI_CHAT_TEMPLATE="plain",
    )
)
MESSAGES = tensors("input", messages="STRING", sampling_parameters="STRING?") + TEXT_OUTPUT
TAKES_TOOLS = (
    tensors("input", prompt="STRING", tools="STRING?", tool_choice="STRING?", seed="INT64?")
    + tensors("output", text="STRING", tool_calls="STRING", reasoning="STRING")
    + parameters(OPENAI="chat", OPENAI_CHAT_TEMPLATE="last")
)
SEES = (
    tensors(
        "input",
        prompt="STRING",
        images="STRING?",
        AUDIO="STRING?",
        seed="INT64?",
        response_format="STRING?",
    )
    + TEXT_OUTPUT
    + parameters(OPENAI="chat", OPENAI_CHAT_TEMPLATE="last")
)
GUIDED = (
    tensors(
        "input",
        prompt="STRING",
        guided_decoding_guide_type="STRING?",
        guided_decoding_guide="STRING?",
    )
    + TEXT_OUTPUT
    + parameters(OPENAI="chat, completions", OPENAI_CHAT_TEMPLATE="last")
)
CACHED = TEXT_OUTPUT + tensors("input", text_input="STRING") + "response_cache { enable: true }\n"
COUNTING = (
    tensors("input", text_input="STRING")
    + tensors("output", text_output="STRING", num_output_tokens="INT32")
    + "model_transaction_policy { decoupled: true }\n"
)


@pytest.fixture(scope="module")
def host(module_serve: Serve, module_repository: RepositoryBuilder) -> Iterator[RunningHost]:
    add = module_repository.add
    add("letters", LETTERS, LETTERS_CONFIG)
    add("named", ECHO.replace("text_output", "ANSWER"), NAMED)
    add("messages", ECHO, MESSAGES)
    add("talker", TALKER, TAKES_TOOLS)
    add("sees", ECHO, SEES)
    add("guided", ECHO, GUIDED)
    add("cached", ECHO, CACHED)
    add("counter", COUNTER, COUNTING)
    add("whole", WHOLE, WHOLE_CONFIG)
    yield module_serve(module_repository, "--cache-config=local,size=1048576").wait_started()


def text_of(reply: Any) -> Any:
    assert reply.status == 200, reply.body
    (choice,) = reply.json["choices"]
    return json.loads(choice["message"]["content"] if "message" in choice else choice["text"])


def test_parameters_of_the_configuration_name_inputs_outputs_and_defaults(
    host: RunningHost,
) -> None:
    given = text_of(complete(host, "ask", model="named", temperature=0.5))
    assert given == {
        "Q": ["ask"], "K": [3], "TEMPERATURE": [0.5], "HEAT": [0.5],
        "parameters": {"top_k": 4, "openai_route": "completions"},
    }  # fmt: skip
    given = text_of(chat(host, "ask", model="named", max_tokens=7, top_k=5, user="me"))
    assert given == {
        "Q": ["user: ask\nassistant:"], "K": [7],
        "parameters": {"top_k": 5, "openai_route": "chat/completions", "user": "me"},
    }  # fmt: skip


def test_a_model_of_messages_gets_them_checked_and_the_sampling_fields(host: RunningHost) -> None:
    assert "model 'messages' speaks chat (/v1)" in host.output
    given = text_of(chat(host, "hi", model="messages", temperature=1, top_k=2, metadata={"a": "b"}))
    assert json.loads(given["messages"][0]) == [{"role": "user", "content": "hi"}]
    sampling = json.loads(given["sampling_parameters"][0])
    assert sampling == {"temperature": 1, "top_k": 2, "max_tokens": 1024}
    parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    given = text_of(chat(host, parts, model="messages"))
    assert json.loads(given["messages"][0])[0]["content"] == parts
    assert complete(host, "a", model="messages").error["code"] == "unsupported_route"


def test_outputs_of_calls_and_reasoning_are_answered(host: RunningHost) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    address = f"http://{host.http_url}/v1"
    with openai.OpenAI(base_url=address, api_key="any", timeout=DEADLINE) as client:
        for choice in ("auto", "required"):
            made = client.chat.completions.create(
                model="talker",
                messages=[{"role": "user", "content": "a"}],
                tools=tools,
                tool_choice=choice,
            ).choices[0]
            assert made.finish_reason == "tool_calls"
            assert made.message.tool_calls[0].function.arguments == '{"n": 1}'
            assert made.message.reasoning_content == "I think" and made.message.content is None
        with client.chat.completions.stream(
            model="talker", messages=[{"role": "user", "content": "a"}], tools=tools
        ) as stream:
            streamed = stream.get_final_completion().choices[0]
    assert streamed.message.tool_calls[0].function.name == "f"


def test_images_and_sounds_are_bytes_of_inputs(host: RunningHost) -> None:
    image, sound = (base64.b64encode(text).decode() for text in (b"picture", b"song"))
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": "look"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}},
        {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{image}"}},
        {"type": "input_audio", "input_audio": {"data": sound, "format": "wav"}},
    ]
    given = text_of(chat(host, parts, model="sees"))
    assert given["images"] == ["picture", "picture"]
    assert (given["AUDIO"], given["prompt"]) == (["song"], ["look"])
    given = text_of(chat(host, "look", model="sees"))
    assert "images" not in given and "AUDIO" not in given
    parts[3]["input_audio"] = {"data": "?", "format": "wav"}
    reply = chat(host, parts, model="sees")
    assert reply.error["message"] == "'messages[0].content[3].input_audio.data' must be base64"
    refused = chat(host, [{"type": "file", "file": {}}], model="sees")
    assert refused.error["message"] == (
        "model 'sees' does not take 'messages[0].content[0]': it has no input for it"
    )


def test_a_response_format_is_json_of_its_input(host: RunningHost) -> None:
    given = text_of(chat(host, "a", model="sees", response_format={"type": "json_object"}))
    assert json.loads(given["response_format"][0]) == {"type": "json_object"}
    refused = chat(host, "a", model="named", response_format={"type": "json_object"})
    assert refused.error["param"] == "response_format"


def test_a_model_that_follows_a_schema_gets_that_of_the_format_or_of_the_demanded_call(
    host: RunningHost,
) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    given = text_of(chat(host, "a", model="guided", response_format=form))
    assert given["guided_decoding_guide_type"] == ["json_schema"]
    assert json.loads(given["guided_decoding_guide"][0]) == schema
    assert "guided_decoding_guide" not in text_of(complete(host, "a", model="guided"))
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    reply = chat(host, "a", model="guided", tools=tools, tool_choice="required")
    (call,) = reply.json["choices"][0]["message"]["tool_calls"]
    given = json.loads(call["function"]["arguments"])
    assert json.loads(given["guided_decoding_guide"][0]) == schema
    refused = chat(host, "a", model="guided", response_format={"type": "json_object"})
    assert refused.error["param"] == "response_format"


def test_choices_have_seeds_of_their_own(host: RunningHost) -> None:
    choices = chat(host, "a", model="sees", seed=5, n=3).json["choices"]
    seeds = [json.loads(choice["message"]["content"])["seed"] for choice in choices]
    assert seeds == [[5], [6], [7]]
    choices = chat(host, "a", model="sees", n=2).json["choices"]
    seeds = [json.loads(choice["message"]["content"])["seed"] for choice in choices]
    assert seeds[0] != seeds[1]


def test_a_model_with_a_response_cache_refuses_fields_without_an_input(host: RunningHost) -> None:
    assert complete(host, "a", model="cached").status == 200
    reply = complete(host, "a", model="cached", top_k=3)
    assert (reply.status, reply.error["code"]) == (400, "unsupported_field")
    assert reply.error["message"] == (
        "model 'cached' does not take 'top_k': it has a response cache and no input 'top_k'"
    )


def test_the_host_cuts_the_text_of_a_model_that_counts_but_knows_no_limit(
    host: RunningHost,
) -> None:
    reply = complete(host, "a", model="counter", max_tokens=3).json
    assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == ("xxx", "length")
    assert reply["usage"]["completion_tokens"] == 3
    host.wait_for("cancelled")


def test_statistics_and_metrics_count_requests_as_those_of_v2(host: RunningHost) -> None:
    def counts() -> tuple[int, str]:
        stats = send(host, "GET", "/v2/models/whole/stats").json["model_stats"][0]
        with urlopen(f"http://{host.metrics_url}/metrics", timeout=DEADLINE) as page:
            text = page.read().decode()
        found = re.search(r'nv_inference_request_success\{model="whole",version="1"\} (\d+)', text)
        assert found is not None
        return stats["inference_stats"]["success"]["count"], found[1]

    body = {"text_input": "a"}
    assert send(host, "POST", "/v2/models/whole/generate", body).json["text_output"] == "A"
    wait_until(lambda: counts() == (1, "1"), "the request of /v2 is counted")
    assert complete(host, "a", model="whole").json["choices"][0]["text"] == "A"
    wait_until(lambda: counts() == (2, "2"), "the request of /v1 is counted")


def test_requests_are_traced(serve: Serve, repository: RepositoryBuilder, tmp_path: Path) -> None:
    repository.add("whole", WHOLE, WHOLE_CONFIG)
    settings = [f"triton,file={tmp_path / 'trace'}", "level=TIMESTAMPS", "rate=1"]
    host = serve(repository, *(f"--trace-config={value}" for value in settings)).wait_started()
    body = {"model": "whole", "prompt": "a"}
    assert send(host, "POST", "/v1/completions", body, {"x-request-id": "mine"}).status == 200
    assert host.stop() == 0
    events = json.loads((tmp_path / "trace").read_text())
    assert [event["request_id"] for event in events if "model_name" in event] == ["mine"]
    stamps = {stamp["name"] for event in events for stamp in event.get("timestamps", ())}
    assert {"REQUEST_START", "COMPUTE_END"} < stamps
    assert {"HTTP_RECV_START", "HTTP_RECV_END", "HTTP_SEND_START", "HTTP_SEND_END"} < stamps


def test_a_full_queue_is_503_and_says_when_to_retry(
    serve: Serve, repository: RepositoryBuilder, tmp_path: Path
) -> None:
    queue = "dynamic_batching { default_queue_policy { max_queue_size: 1 } }"
    config = WHOLE_CONFIG.replace("max_batch_size: 8", "max_batch_size: 1") + queue
    repository.add("gated", GATED, config)
    host = serve(repository).wait_started()
    gate = tmp_path / "gate"

    def pending() -> bool:
        with urlopen(f"http://{host.metrics_url}/metrics", timeout=DEADLINE) as page:
            text = page.read().decode()
        return 'nv_inference_pending_request_count{model="gated",version="1"} 1' in text

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(complete, host, str(gate), model="gated")
        host.wait_for("waiting")
        second = pool.submit(complete, host, str(gate), model="gated")
        try:
            wait_until(pending, "a request in the queue")
            reply = complete(host, str(gate), model="gated")
        finally:
            gate.touch()
        assert (reply.status, reply.error["code"]) == (503, "unavailable")
        assert reply.headers["retry-after"] == "1"
        assert first.result(DEADLINE).status == second.result(DEADLINE).status == 200


def test_the_exit_waits_for_open_requests(
    serve: Serve, repository: RepositoryBuilder, tmp_path: Path
) -> None:
    repository.add("gated", GATED, WHOLE_CONFIG)
    host = serve(repository, "--exit-timeout-secs=600").wait_started()
    gate = tmp_path / "gate"
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(complete, host, str(gate), model="gated", stream=True)
        host.wait_for("waiting")
        host.process.send_signal(signal.SIGTERM)
        host.wait_for(r"Signal \(15\) received\.")
        gate.touch()
        assert answer.result(DEADLINE).events[-1] == "[DONE]"
    assert host.stop() == 0
