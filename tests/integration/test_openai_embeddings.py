"""Embeddings of the OpenAI routes on a real host, in the shapes that models take texts."""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve
from tests.openai_models import Reply, send

EMBED = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            texts = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy().reshape(-1)
            if b"fail" in texts:
                answers.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("tired")))
                continue
            last = np.nan if b"nan" in texts else 0.5
            rows = np.array([[len(t), t[0], last] for t in texts if t != b"lost"], dtype=np.{0})
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("VECTOR", rows)],
                parameters={{"prompt_tokens": len(texts)}}))
        return answers
"""
WIDE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        rows = np.arange(100_000, dtype=np.float32).reshape(1, -1)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("VECTOR", rows)]) for _ in requests]
"""
CONFIG = """
backend: "python"
max_batch_size: {0}
input [ {{ name: "TEXT" data_type: TYPE_STRING dims: [ {1} ] }} ]
output [ {{ name: "VECTOR" data_type: TYPE_{2} dims: [ {3} ] }} ]
parameters {{ key: "OPENAI" value {{ string_value: "embeddings" }} }}
"""


@pytest.fixture(scope="module")
def host(module_serve: Serve, module_repository: RepositoryBuilder) -> Iterator[RunningHost]:
    add = module_repository.add
    add("batched", EMBED.format("float32"), CONFIG.format(2, 1, "FP32", 3))
    add("all", EMBED.format("float16"), CONFIG.format(0, -1, "FP16", "-1, 3"))
    add("one", EMBED.format("float64"), CONFIG.format(0, 1, "FP64", "-1, 3"))
    add("wide", WIDE, CONFIG.format(2, 1, "FP32", 100_000))
    yield module_serve(module_repository).wait_started()


def embed(host: RunningHost, model: str, value: object, **fields: object) -> Reply:
    return send(host, "POST", "/v1/embeddings", {"model": model, "input": value, **fields})


@pytest.mark.parametrize("model", ["batched", "all", "one"])
def test_every_text_gets_its_vector(host: RunningHost, model: str) -> None:
    answer = embed(host, model, ["a", "bb", "ccc"]).json
    assert (answer["object"], answer["model"]) == ("list", model)
    assert answer["data"] == [
        {"object": "embedding", "index": index, "embedding": [index + 1, 97 + index, 0.5]}
        for index in range(3)
    ]
    assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 3}


@pytest.mark.parametrize("model", ["batched", "all", "one"])
def test_vectors_in_base64_are_little_endian_fp32(host: RunningHost, model: str) -> None:
    (entry,) = embed(host, model, "a", encoding_format="base64").json["data"]
    vector = np.frombuffer(base64.b64decode(entry["embedding"]), "<f4")
    assert vector.tolist() == [1, 97, 0.5]


def test_wrong_requests_and_answers_have_errors(host: RunningHost) -> None:
    ids = embed(host, "all", [1, 2])
    assert (ids.status, ids.error["message"]) == (
        400,
        (
            "model 'all' takes text, not token ids; with LangChain, set"
            " check_embedding_ctx_length=False"
        ),
    )
    size = embed(host, "all", "a", dimensions=2)
    assert (size.status, size.error["message"]) == (
        400,
        "'dimensions' must be 3, which model 'all' gives, got 2",
    )
    assert embed(host, "all", "a", dimensions=3).status == 200
    lost = embed(host, "all", ["a", "lost"])
    assert (lost.status, lost.error["message"]) == (
        500,
        "model 'all' gave 1 embeddings for 2 texts",
    )
    failed = embed(host, "one", ["a", "fail", "b"])
    assert (failed.status, failed.error["message"]) == (500, "tired")
    assert embed(host, "all", "a", encoding_format="int8").status == 400


def test_a_request_id_of_the_client_is_answered(host: RunningHost) -> None:
    body = {"model": "one", "input": "a"}
    reply = send(host, "POST", "/v1/embeddings", body, {"x-request-id": "mine"})
    assert reply.headers["x-request-id"] == "mine"
    assert embed(host, "one", "a").headers["x-request-id"].startswith("embd-")


def test_one_text_gets_the_same_answer_as_a_list_of_one(host: RunningHost) -> None:
    """One text is answered without a task, a list is not."""
    for value in ("a", "lost", "fail"):
        one, listed = embed(host, "batched", value), embed(host, "batched", [value])
        assert (one.status, one.json) == (listed.status, listed.json)
        assert set(one.headers) == set(listed.headers)
    assert embed(host, "batched", "lost").error["message"] == (
        "output 'VECTOR' of model 'batched' has vectors of length 0"
    )
    assert embed(host, "batched", "fail").headers["x-should-retry"] == "false"


def test_a_long_vector_is_answered_whole(host: RunningHost) -> None:
    (entry,) = embed(host, "wide", "a").json["data"]
    assert entry["embedding"] == list(range(100_000))


def test_requests_on_one_connection_get_ids_of_their_own(host: RunningHost) -> None:
    client = http.client.HTTPConnection(host.http_url, timeout=DEADLINE)
    ids = []
    with closing(client):
        for _ in range(3):
            client.request("POST", "/v1/embeddings", json.dumps({"model": "one", "input": "a"}))
            response = client.getresponse()
            assert json.load(response)["data"][0]["embedding"] == [1, 97, 0.5]
            ids.append(response.headers["x-request-id"])
    assert len(set(ids)) == 3


def test_numbers_that_json_cannot_have_are_an_error(host: RunningHost) -> None:
    for texts in ("nan", ["a", "nan"]):
        reply = send(host, "POST", "/v1/embeddings", {"model": "all", "input": texts})
        assert reply.status == 500 and "numbers that are not finite" in reply.error["message"]
    body = {"model": "all", "input": "nan", "encoding_format": "base64"}
    assert send(host, "POST", "/v1/embeddings", body).status == 200
