"""The examples for OpenAI clients, by the commands of their READMEs."""

from __future__ import annotations

import re
from contextlib import closing
from typing import Any

import pytest

from tests import readmes
from tests.conftest import DEADLINE, ROOT, RunningHost, Serve
from tests.lazy_import import lazy_import

openai = lazy_import("openai")


@pytest.mark.parametrize("example", ["chat", "embeddings"])
def test_the_readmes_command_works(serve: Serve, example: str) -> None:
    text = (ROOT / "examples" / example / "README.md").read_text()
    found = re.search(
        r"^\$ pbhost serve --model-repository=(.+)\n\$ (python .+)\n([^`]+)", text, re.MULTILINE
    )
    assert found is not None
    host = serve(ROOT / found[1]).wait_started()
    assert readmes.run(found[2].replace("localhost:8000", host.http_url)) == found[3]
    further = re.findall(r"^```console\n\$ (python .+)\n([^`]+)", text, re.MULTILINE)
    for command, output in further:
        assert readmes.run(command.replace("localhost:8000", host.http_url)) == output
    assert len(further) == (example == "chat")


@pytest.fixture(scope="module")
def host(module_serve: Serve) -> RunningHost:
    return module_serve(ROOT / "examples" / "chat" / "models").wait_started()


@pytest.fixture
def client(host: RunningHost) -> Any:
    address = f"http://{host.http_url}/v1"
    with openai.OpenAI(base_url=address, api_key="any", timeout=DEADLINE) as client:
        yield client


def write(client: Any, prompt: str, model: str = "tiny_chat", **fields: Any) -> Any:
    return client.completions.create(model=model, prompt=prompt, **fields)


def test_both_models_write_the_same_text(client: Any) -> None:
    texts = [
        write(client, "Once", model, max_tokens=20, seed=4).choices[0].text
        for model in ("tiny_chat", "tiny_chat_iterative")
    ]
    assert texts[0] == texts[1] and len(texts[0]) == 20


def test_equal_seeds_write_equal_texts_whatever_else_is_written(client: Any) -> None:
    alone = write(client, "Once", max_tokens=20, seed=4).choices[0].text
    with closing(write(client, "Other", max_tokens=200, seed=9, stream=True)) as other:
        next(other)
        assert write(client, "Once", max_tokens=20, seed=4).choices[0].text == alone
    assert len(alone) == 20


@pytest.mark.parametrize("model", ["tiny_chat", "tiny_chat_iterative"])
def test_texts_are_written_at_the_same_time(client: Any, model: str) -> None:
    with (
        closing(write(client, "a", model, max_tokens=240, stream=True)) as first,
        closing(write(client, "b", model, max_tokens=240, stream=True)) as second,
    ):
        assert next(first).choices[0].text and next(second).choices[0].text
        assert next(first).choices[0].text and next(second).choices[0].text
