"""Models of the vLLM backend on the OpenAI routes, with the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve
from tests.lazy_import import lazy_import
from tests.openai_models import chat, complete, send
from tests.openai_vllm import add_vllm_backend, add_vllm_model

openai = lazy_import("openai")

TEMPLATE = """
{%- for part in messages[-1].content if part is mapping %}
{{- part.text if part.type == "text" else "[" ~ part.type ~ "]" }}
{%- endfor %}
{%- if messages[-1].content is string %}{{ messages[-1].content }}{% endif %}
{%- if "TOOLS" in messages[-1].content %}
{%- if tools %} {{ tools[0].function.name }}{% endif %}
{%- if tool_choice %} {{ tool_choice }}{% endif %}
{%- endif %}
"""
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
TIME = {"type": "function", "function": {"name": "time"}}
PIXEL = "iVBORw0KGgo="


@pytest.fixture(scope="module")
def host(
    module_serve: Serve,
    module_repository: RepositoryBuilder,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[RunningHost]:
    folder = tmp_path_factory.mktemp("vllm")
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "chat_template.jinja").write_text(TEMPLATE)
    snapshot = folder / "hub" / "models--acme--cached" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    tools = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    config = {"chat_template": tools, "bos_token": "<s>"}
    (snapshot / "tokenizer_config.json").write_text(json.dumps(config))
    add_vllm_model(module_repository, "v", str(tokenizer))
    add_vllm_model(module_repository, "parsed", str(tokenizer), OPENAI_TOOL_PARSER="hermes")
    add_vllm_model(module_repository, "cached", "acme/cached", OPENAI_TOOL_PARSER="hermes")
    add_vllm_model(module_repository, "bare", "acme/absent")
    loras = ("loud", "a/b")
    add_vllm_model(
        module_repository, "base", str(tokenizer), loras, OPENAI_LORA_SEPARATOR="-lora-",
        OPENAI_NAMES="acme/base",
    )  # fmt: skip
    flag = add_vllm_backend(folder / "backends")
    environment = {"HF_HUB_CACHE": str(folder / "hub")}
    yield module_serve(module_repository, flag, env=environment).wait_started()


@pytest.fixture
def client(host: RunningHost) -> Iterator[Any]:
    address = f"http://{host.http_url}/v1"
    with openai.OpenAI(base_url=address, api_key="any", timeout=DEADLINE) as client:
        yield client


def content(host: RunningHost, text: object, **fields: object) -> str:
    reply = chat(host, text, **{"model": "v", **fields})
    assert reply.status == 200, reply.body
    return str(reply.json["choices"][0]["message"]["content"])


def test_models_speak_what_their_tensors_and_templates_say(host: RunningHost) -> None:
    for name, routes in [
        ("v", "chat, completions, embeddings"),
        ("cached", "chat, completions, embeddings"),
        ("bare", "completions, embeddings"),
    ]:
        assert f"model '{name}' speaks {routes} (/v1)" in host.output


def test_chats_and_completions_have_texts_reasons_and_counts(client: Any) -> None:
    for stream in (False, True):
        made = client.completions.create(
            model="v", prompt="a|b|c", max_tokens=2, stream=stream,
            **({"stream_options": {"include_usage": True}} if stream else {}),
        )  # fmt: skip
        chunks = list(made) if stream else [made]
        choices = [choice for chunk in chunks for choice in chunk.choices]
        assert "".join(choice.text for choice in choices) == "ab"
        assert choices[-1].finish_reason == "length"
        usage = chunks[-1].usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (5, 2)
    made = client.chat.completions.create(model="v", messages=[{"role": "user", "content": "a|b"}])
    assert made.choices[0].message.content == "ab"
    assert made.choices[0].finish_reason == "stop"


def test_sampling_parameters_have_what_was_sent_and_a_limit_of_tokens(host: RunningHost) -> None:
    assert json.loads(content(host, "SAMPLING")) == {"max_tokens": 1024}
    reply = complete(host, "SAMPLING", model="v")
    assert json.loads(reply.json["choices"][0]["text"]) == {"max_tokens": 16}
    sent = {"temperature": 0.5, "top_p": 1, "seed": 4, "top_k": 5, "ignore_eos": True}
    hidden = {"user": "u", "metadata": {"a": "b"}, "store": True, "presence_penalty": None}
    sampling = json.loads(
        content(host, "SAMPLING", stop="x!", max_completion_tokens=9, **sent, **hidden)
    )
    assert sampling == {**sent, "stop": ["x!"], "max_tokens": 9}


def test_schemas_become_structured_outputs(host: RunningHost) -> None:
    for form, expected in [
        ({"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}, {"json": SCHEMA}),
        ({"type": "json_object"}, {"json_object": True}),
    ]:
        sampling = json.loads(content(host, "SAMPLING", response_format=form))
        assert json.loads(sampling["structured_outputs"]) == expected
    assert "structured" not in content(host, "SAMPLING", response_format={"type": "text"})


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_demanded_call_has_the_text_as_its_arguments(client: Any, choice: object) -> None:
    asked = {
        "model": "v",
        "messages": [{"role": "user", "content": '{"city"|: "Oslo"}|SAMPLING'}],
        "tools": [WEATHER],
        "tool_choice": choice,
    }
    whole = client.chat.completions.create(**asked).choices[0]
    (call,) = whole.message.tool_calls
    assert (call.function.name, whole.message.content) == ("weather", None)
    arguments, sampling = call.function.arguments.split("}", 1)
    assert arguments == '{"city": "Oslo"'
    assert json.loads(json.loads(sampling)["structured_outputs"]) == {"json": SCHEMA}
    asked["messages"] = [{"role": "user", "content": '{"city"|: "Oslo"}'}]
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.message.tool_calls[0].function.arguments == '{"city": "Oslo"}'
    assert streamed.message.tool_calls[0].id


@pytest.mark.parametrize("model", ["v", "parsed"])
@pytest.mark.parametrize("stream", [False, True])
def test_one_of_several_required_functions_is_called(
    host: RunningHost, model: str, stream: bool
) -> None:
    asked = {"model": model, "tools": [TIME, WEATHER], "tool_choice": "required", "stream": stream}
    reply = chat(host, '{"name": "wea|ther", "parameters": {"city": "Ås"}}', **asked)
    assert reply.status == 200, reply.body
    if stream:
        deltas = [event["choices"][0]["delta"] for event in reply.events[:-1]]
        assert not any(delta.get("content") for delta in deltas)
        (calls,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
        reason = reply.events[-2]["choices"][0]["finish_reason"]
    else:
        choice = reply.json["choices"][0]
        calls, reason = choice["message"]["tool_calls"], choice["finish_reason"]
    assert [call["function"] for call in calls] == [
        {"name": "weather", "arguments": '{"city": "Ås"}'}
    ]
    assert reason == "tool_calls"


@pytest.mark.parametrize(
    "text", ["a text", '{"name": "other", "parameters": {}}', '{"name": "time"}', "[1]", ""]
)
def test_an_answer_without_a_required_call_is_an_error(host: RunningHost, text: str) -> None:
    asked = {"model": "v", "tools": [TIME, WEATHER], "tool_choice": "required"}
    reply = chat(host, text, **asked)
    assert reply.status == 500 and "model 'v' called " in reply.error["message"]
    events = chat(host, text, stream=True, **asked).body
    assert b'"error"' in events and b"[DONE]" not in events


def test_calls_are_parsed_from_the_text_of_a_model_with_a_parser(client: Any) -> None:
    text = 'Well.|<tool_call>{"name": "time",| "arguments": {}}</tool_call>'
    asked = {
        "model": "parsed",
        "messages": [{"role": "user", "content": text}],
        "tools": [TIME],
    }
    whole = client.chat.completions.create(**asked).choices[0]
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    assert whole.message.content == "Well."
    assert [call.function.name for call in whole.message.tool_calls] == ["time"]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "Well."
    calls = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert [call.function.arguments for call in calls] == ["{}"]
    assert whole.finish_reason == chunks[-1].finish_reason == "tool_calls"


def test_tools_reach_the_template(host: RunningHost) -> None:
    assert content(host, "TOOLS", model="parsed", tools=[TIME]) == "TOOLS time"
    automatic = content(host, "TOOLS", model="parsed", tools=[TIME], tool_choice="auto")
    assert automatic == "TOOLS time auto"
    assert content(host, "TOOLS", tools=[TIME], tool_choice="none") == "TOOLS none"


def test_tools_choose_the_template_for_tools(host: RunningHost) -> None:
    assert content(host, "a", model="cached") == "plain"
    assert content(host, "a", model="cached", tools=[TIME]) == "tools"
    assert content(host, "a", model="cached", tools=[TIME], tool_choice="none") == "plain"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TIME]}, "tools"),
        ({"tools": [TIME, WEATHER], "tool_choice": "auto"}, "tools"),
        ({"logit_bias": {"1": 1}}, "logit_bias"),
    ],
)
def test_fields_without_effect_on_the_engine_are_refused(
    host: RunningHost, fields: dict[str, Any], param: str
) -> None:
    reply = chat(host, "a", **{"model": "v", **fields})
    assert (reply.status, reply.error["param"]) == (400, param)
    assert reply.error["code"] == "unsupported_field"


def test_a_chat_has_log_probabilities(client: Any) -> None:
    asked = {
        "model": "v", "messages": [{"role": "user", "content": "é|b"}], "logprobs": True,
        "top_logprobs": 2, "max_tokens": 2,
    }  # fmt: skip
    whole = client.chat.completions.create(**asked).choices[0].logprobs.content
    chunks = list(client.chat.completions.create(**asked, stream=True))
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    streamed = [token for part in parts if part is not None for token in part.content]
    for tokens in (whole, streamed):
        assert [token.token for token in tokens] == ["é", "b"]
        assert tokens[0].bytes == [0xC3, 0xA9] and tokens[0].logprob == -2
        assert [one.token for one in tokens[0].top_logprobs] == ["best", "next"]


def test_a_response_has_log_probabilities(client: Any) -> None:
    asked = {
        "model": "v", "input": "é|b", "include": ["message.output_text.logprobs"],
        "top_logprobs": 2, "max_output_tokens": 2,
    }  # fmt: skip
    whole = client.responses.create(**asked).output[0].content[0].logprobs
    events = list(client.responses.create(**asked, stream=True))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    streamed = [token for event in deltas for token in event.logprobs]
    done = next(event for event in events if event.type == "response.output_text.done").logprobs
    for tokens in (whole, streamed, done):
        assert [token.token for token in tokens] == ["é", "b"]
        assert tokens[0].logprob == -2
        assert [one.token for one in tokens[0].top_logprobs] == ["best", "next"]


def test_a_completion_has_log_probabilities(client: Any) -> None:
    made = client.completions.create(model="v", prompt="ab|c", logprobs=1).choices[0].logprobs
    assert (made.tokens, made.token_logprobs, made.text_offset) == (["ab", "c"], [-2, -2], [0, 2])
    assert made.top_logprobs == [{"best": -0.5}, {"best": -0.5}]
    with pytest.raises(openai.BadRequestError, match="'logprobs' cannot be combined with 'echo'"):
        client.completions.create(model="v", prompt="ab|c", logprobs=1, echo=True)
    assert client.completions.create(model="v", prompt="a").choices[0].logprobs is None


def test_embeddings_are_asked_once_per_text(client: Any, host: RunningHost) -> None:
    made = client.embeddings.create(model="v", input=["a", "bb"])
    assert [entry.embedding for entry in made.data] == [[1, 0.5], [2, 0.5]]
    assert made.usage.prompt_tokens == 6
    assert client.embeddings.create(model="v", input="a", dimensions=3).data[0].embedding == [
        1, 0.5, 0.25,
    ]  # fmt: skip
    ids = {"model": "v", "input": [[1, 2, 3], [4]]}
    data = send(host, "POST", "/v1/embeddings", ids).json["data"]
    assert [entry["embedding"][0] for entry in data] == [3, 1]


def test_images_reach_the_model_as_base64_and_the_template_as_parts(host: RunningHost) -> None:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    parts = [image, {"type": "text", "text": "|IMAGES"}]
    assert content(host, parts) == f"[image]['{PIXEL}']"
    for url, text in [
        ("data:image/png;base64,%%", "'messages[0].content[0].image_url.url' must be base64"),
        ("data:image/bmp;base64,AAAA", "jpeg, webp or gif"),
        ("http://example.org/a.png", "this server fetches nothing"),
    ]:
        wrong = {"type": "image_url", "image_url": {"url": url}}
        reply = chat(host, [wrong], model="v")
        assert reply.status == 400 and text in reply.error["message"]


def test_adapters_are_models_of_their_own_to_clients(client: Any, host: RunningHost) -> None:
    listed = {model.id for model in client.models.list()}
    assert {"base", "acme/base", "base-lora-loud", "base-lora-a/b"} <= listed
    assert client.models.retrieve("base-lora-a/b").id == "base-lora-a/b"
    for name, adapter in [
        ("base-lora-loud", "loud"),
        ("base-lora-loud:1", "loud"),
        ("base-lora-a/b", "a/b"),
        ("base", None),
        ("acme/base", None),
    ]:
        reply = chat(host, "SAMPLING", model=name)
        sampling = json.loads(reply.json["choices"][0]["message"]["content"])
        assert (reply.json["model"], sampling.get("lora_name")) == (name, adapter)
    reply = complete(host, "SAMPLING", model="base-lora-loud")
    assert json.loads(reply.json["choices"][0]["text"])["lora_name"] == "loud"


@pytest.mark.parametrize(
    "name", ["base-lora-", "base-lora-quiet", "base-lora-loud:2", "v-lora-loud"]
)
def test_unknown_adapters_are_unknown_models(client: Any, name: str) -> None:
    with pytest.raises(openai.NotFoundError, match=f"there is no model '{name}'"):
        client.completions.create(model=name, prompt="a")


def test_adapters_do_not_embed(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="'base-lora-loud' is a LoRA adapter of model"):
        client.embeddings.create(model="base-lora-loud", input="a")


def test_a_damaged_list_of_adapters_fails_the_load(
    serve: Serve, repository: RepositoryBuilder, tmp_path: Path
) -> None:
    add_vllm_model(repository, "list", "acme/absent", ["a"], OPENAI_LORA_SEPARATOR="-")
    (repository.path / "list" / "1" / "multi_lora.json").write_text("[]")
    flag = add_vllm_backend(tmp_path / "backends")
    host = serve(repository, flag, "--exit-on-error=false").wait_started()
    text = "OPENAI_LORA_SEPARATOR of model 'list': 'multi_lora.json' must be a JSON object"
    assert text in host.output


def test_an_absent_cache_of_templates_is_no_error(
    serve: Serve, repository: RepositoryBuilder, tmp_path: Path
) -> None:
    add_vllm_model(repository, "bare", "acme/absent")
    environment = {"HF_HOME": str(tmp_path / "nowhere")}
    flag = add_vllm_backend(tmp_path / "backends")
    host = serve(repository, flag, env=environment).wait_started()
    assert complete(host, "a|b", model="bare").json["choices"][0]["text"] == "ab"
    assert chat(host, "a", model="bare").error["code"] == "unsupported_route"
