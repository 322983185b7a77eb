"""The routes under /v1 with LangChain, LlamaIndex, the client for Node, and curl.

`make openai-clients` installs the first three.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DEADLINE, ROOT, RepositoryBuilder, RunningHost, Serve
from tests.openai_models import LETTERS, LETTERS_CONFIG, add_models

PROGRAMS = ROOT / "tests" / "openai_clients"
PYTHON = ROOT / ".venv-openai-clients" / "bin" / "python"
NODE_MODULES = PROGRAMS / "node_modules"
EMBED = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            texts = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy().reshape(-1)
            rows = np.array([[len(text), text[0], 0.5] for text in texts], dtype=np.float32)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("VECTOR", rows)]))
        return answers
"""
EMBED_CONFIG = """
backend: "python"
max_batch_size: 8
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "VECTOR" data_type: TYPE_FP32 dims: [ 3 ] } ]
parameters { key: "OPENAI" value { string_value: "embeddings" } }
"""
TALKER_CONFIG = (
    LETTERS_CONFIG.replace("acme/letters", "acme/talker")
    + """
input [
  { name: "response_format" data_type: TYPE_STRING dims: [ 1 ] optional: true },
  { name: "tools" data_type: TYPE_STRING dims: [ 1 ] optional: true }
]
parameters { key: "OPENAI_TOOL_PARSER" value { string_value: "hermes" } }
"""
)
VECTORS = [[1, 97, 0.5], [2, 98, 0.5]]

needs_python_clients = pytest.mark.skipif(not PYTHON.exists(), reason="make openai-clients")


@pytest.fixture(scope="module")
def url(module_serve: Serve, module_repository: RepositoryBuilder) -> Iterator[str]:
    add_models(module_repository)
    module_repository.add("embed", EMBED, EMBED_CONFIG)
    module_repository.add("talker", LETTERS, TALKER_CONFIG)
    host: RunningHost = module_serve(module_repository).wait_started()
    yield f"http://{host.http_url}/v1"


def run(*command: str | Path) -> Any:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=2 * DEADLINE, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_python_clients
def test_langchain_is_served(url: str) -> None:
    assert run(PYTHON, PROGRAMS / "langchain_client.py", url) == {
        "whole": "Hello",
        "usage": 4,
        "streamed": ["Hel", "lo"],
        "batch": ["ab", "cd"],
        "async": "xy",
        "documents": VECTORS,
        "call": ["weather", {"city": "Oslo"}, "sunny in Oslo"],
        "structured": {"city": "Oslo", "degrees": 3},
        "query": [3, 99, 0.5],
    }


@pytest.mark.test_all(reason="its imports take 4 s of CPU time; LangChain uses the same routes")
@needs_python_clients
def test_llama_index_is_served(url: str) -> None:
    assert run(PYTHON, PROGRAMS / "llama_index_client.py", url) == {
        "chat": "Hello",
        "streamed": ["Hel", "lo"],
        "completion": "ab",
        "pieces": ["a", "b"],
        "vectors": VECTORS,
    }


@pytest.mark.skipif(
    shutil.which("node") is None or not NODE_MODULES.exists(), reason="make openai-clients"
)
def test_the_client_for_node_is_served(url: str) -> None:
    assert run("node", PROGRAMS / "node_client.mjs", url) == {
        "whole": "Hello",
        "usage": 4,
        "streamed": ["Hel", "lo"],
        "final": "Hello",
        "completion": "ab",
        "vectors": VECTORS,
        "response": "Hello",
        "call": ['{"city": "Oslo"}'],
        "structured": {"city": "Oslo"},
        "missing": "NotFoundError 404 model_not_found",
    }


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_is_served(url: str) -> None:
    body = {"model": "letters", "messages": [{"role": "user", "content": "Hel|lo"}]}

    def ask(**fields: object) -> list[str | Path]:
        content = ["--header", "content-type: application/json"]
        data = ["--data", json.dumps({**body, **fields})]
        return ["curl", "--silent", "--no-buffer", *content, *data, f"{url}/chat/completions"]

    assert run(*ask())["choices"][0]["message"]["content"] == "Hello"
    streamed = subprocess.run(
        ask(stream=True), capture_output=True, text=True, timeout=DEADLINE, check=True
    ).stdout
    events = [line.removeprefix("data: ") for line in streamed.splitlines() if line]
    assert events.pop() == "[DONE]"
    texts = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(texts) == "Hello"
