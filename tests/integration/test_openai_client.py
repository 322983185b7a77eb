"""The routes under /v1 with the official Python client of OpenAI."""

from __future__ import annotations

import asyncio
import json
from asyncio import gather
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve
from tests.lazy_import import lazy_import
from tests.openai_models import add_models

openai = lazy_import("openai")


@pytest.fixture(scope="module")
def host(module_serve: Serve, module_repository: RepositoryBuilder) -> Iterator[RunningHost]:
    add_models(module_repository)
    yield module_serve(module_repository).wait_started()


@pytest.fixture
def client(host: RunningHost) -> Iterator[Any]:
    address = f"http://{host.http_url}/v1"
    with openai.OpenAI(base_url=address, api_key="any", timeout=DEADLINE) as client:
        yield client


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_chats_and_completions_whole_and_streamed(client: Any) -> None:
    chats, completions = client.chat.completions, client.completions
    answer = chats.create(model="letters", messages=user("Hel|lo"))
    assert answer.choices[0].message.content == "Hello" and answer.usage.total_tokens == 4
    chunks = list(chats.create(model="letters", messages=user("Hel|lo"), stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello"
    assert completions.create(model="letters", prompt="a|b").choices[0].text == "ab"
    pieces = completions.create(model="letters", prompt="a|b", stream=True)
    assert [piece.choices[0].text for piece in pieces] == ["a", "b", ""]
    with chats.stream(model="letters", messages=user("Hel|lo")) as stream:
        assert stream.get_final_completion().choices[0].message.content == "Hello"


def test_answers_are_parsed_as_objects(client: Any) -> None:
    pydantic = pytest.importorskip("pydantic")
    city = pydantic.create_model("City", name=(str, ...))
    line = json.dumps({"content": '{"name": "Oslo"}'})
    asked = {"model": "agent", "messages": user(line), "response_format": city}
    parsed = client.chat.completions.parse(**asked).choices[0].message.parsed
    assert parsed.name == "Oslo"
    with client.chat.completions.stream(**asked) as stream:
        assert stream.get_final_completion().choices[0].message.parsed.name == "Oslo"
    response = client.responses.parse(model="agent", input=line, text_format=city)
    assert response.output_parsed.name == "Oslo"


def test_the_asynchronous_client_is_served(host: RunningHost) -> None:
    async def read() -> list[str]:
        address = f"http://{host.http_url}/v1"
        async with openai.AsyncOpenAI(base_url=address, api_key="any", timeout=DEADLINE) as client:
            made = [
                client.completions.create(model="letters", prompt=f"{number}|b")
                for number in range(8)
            ]
            stream = await client.chat.completions.create(
                model="letters", messages=user("Hel|lo"), stream=True
            )
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return ["".join(pieces), *(whole.choices[0].text for whole in await gather(*made))]

    assert asyncio.run(read()) == ["Hello", *(f"{number}b" for number in range(8))]


def test_models_are_listed_and_retrieved(client: Any) -> None:
    assert "letters" in [model.id for model in client.models.list()]
    assert client.models.retrieve("acme/letters").id == "acme/letters"


def test_errors_are_the_exceptions_of_the_client(client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="ghost", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="does not take 'suffix'"):
        client.completions.create(model="letters", prompt="a", suffix="b")
    with pytest.raises(openai.InternalServerError, match="the model is tired"):
        client.completions.create(model="letters", prompt="FAIL")
    with pytest.raises(openai.NotFoundError) as named:
        client.completions.create(model="ghost", prompt="a", extra_headers={"x-request-id": "me"})
    assert missing.value.request_id.startswith("req_") and named.value.request_id == "me"
    with pytest.raises(openai.InternalServerError) as failed:
        client.chat.completions.create(model="letters", messages=user("FAIL"))
    assert failed.value.request_id.startswith("chatcmpl-")


def test_an_error_within_a_stream_is_raised(client: Any) -> None:
    stream = client.completions.create(model="letters", prompt="a|FAIL", stream=True)
    assert next(stream).choices[0].text == "a"
    with pytest.raises(openai.APIError, match="the model is tired"):
        next(stream)


def test_a_stream_that_is_closed_cancels_its_call(host: RunningHost, client: Any) -> None:
    stream = client.completions.create(model="letters", prompt="closed|WAIT", stream=True)
    assert next(stream).choices[0].text == "closed"
    stream.close()
    host.wait_for("cancelled b'closed")
