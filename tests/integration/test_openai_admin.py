"""The OpenAI routes beside inference: load, unload, and requests of web pages (CORS)."""

from __future__ import annotations

import time
from pathlib import Path

import openapi_spec_validator
import pytest

from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until
from tests.openai_models import LETTERS, LETTERS_CONFIG, add_models, send

PAGE = "https://chat.example.com"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


def is_listed(host: RunningHost, name: str) -> bool:
    return name in [model["id"] for model in send(host, "GET", "/v1/models").json["data"]]


def test_a_model_is_loaded_and_unloaded(serve: Serve, repository: RepositoryBuilder) -> None:
    add_models(repository)
    host = serve(repository, "--model-control-mode=explicit").wait_started()
    assert not is_listed(host, "letters")
    loaded = send(host, "POST", "/v1/models/letters/load")
    assert (loaded.status, loaded.json["id"], loaded.json["object"]) == (200, "letters", "model")
    assert is_listed(host, "letters")
    unloaded = send(host, "POST", "/v1/models/letters/unload")
    assert unloaded.json == {"status": "success", "model": "letters"}
    wait_until(lambda: not is_listed(host, "letters"), "the end of the unload")
    failed = send(host, "POST", "/v1/models/ghost/load")
    assert failed.status == 500 and "failed to load 'ghost'" in failed.error["message"]
    wrong = send(host, "GET", "/v1/models/letters/load")
    assert (wrong.status, wrong.headers["allow"]) == (405, "POST")


def test_without_explicit_control_nothing_is_loaded(
    serve: Serve, repository: RepositoryBuilder
) -> None:
    add_models(repository)
    host = serve(repository).wait_started()
    for action in ("load", "unload"):
        reply = send(host, "POST", f"/v1/models/letters/{action}")
        assert reply.status in (400, 503)
        assert "explicit model load / unload is not allowed" in reply.error["message"]
    assert is_listed(host, "letters")


def test_restrictions_and_keys_hold_for_loads(
    serve: Serve, repository: RepositoryBuilder, tmp_path: Path
) -> None:
    add_models(repository)
    keys = tmp_path / "keys"
    keys.write_text("the-only-key\n")
    host = serve(
        repository,
        "--model-control-mode=explicit",
        "--http-restricted-api=model-repository:x-admin=yes",
        f"--openai-api-key-file={keys}",
    ).wait_started()
    path, key = "/v1/models/letters/load", {"Authorization": "Bearer the-only-key"}
    assert send(host, "POST", path).status == 401
    assert send(host, "POST", path, headers=key).status == 403
    assert send(host, "POST", path, headers={**key, "x-admin": "yes"}).status == 200


def test_a_page_of_an_allowed_origin_may_read_answers(
    serve: Serve, repository: RepositoryBuilder, tmp_path: Path
) -> None:
    add_models(repository)
    keys = tmp_path / "keys"
    keys.write_text("the-only-key\n")
    host = serve(
        repository,
        f"--openai-cors-origins=http://localhost:3000,{PAGE}",
        f"--openai-api-key-file={keys}",
    ).wait_started()
    preflight = send(host, "OPTIONS", "/v1/chat/completions", headers=PREFLIGHT)
    assert preflight.status == 200 and preflight.body == b""
    assert preflight.headers["access-control-allow-origin"] == PAGE
    assert preflight.headers["access-control-allow-methods"] == "POST"
    assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
    for headers, status in [({}, 401), ({"Authorization": "Bearer the-only-key"}, 200)]:
        answer = send(host, "GET", "/v1/models", headers={**headers, "Origin": PAGE})
        assert answer.status == status and answer.headers["vary"] == "Origin"
        assert answer.headers["access-control-allow-origin"] == PAGE
    stream = send(
        host,
        "POST",
        "/v1/completions",
        {"model": "letters", "prompt": "a|b", "stream": True},
        {"Authorization": "Bearer the-only-key", "Origin": PAGE},
    )
    assert stream.events[-1] == "[DONE]"
    assert stream.headers["access-control-allow-origin"] == PAGE


def test_other_pages_and_other_paths_get_no_permission(
    serve: Serve, repository: RepositoryBuilder
) -> None:
    add_models(repository)
    host = serve(repository, f"--openai-cors-origins={PAGE}").wait_started()
    other = {**PREFLIGHT, "Origin": "https://other.example.com"}
    cases = [
        (other, "OPTIONS", "/v1/chat/completions", 405),
        (other, "GET", "/v1/models", 200),
        (PREFLIGHT, "GET", "/health", 200),
        (PREFLIGHT, "OPTIONS", "/v2/models/letters/infer", 405),
        (PREFLIGHT, "OPTIONS", "/v1/ghosts", 404),
    ]
    for headers, method, path, status in cases:
        reply = send(host, method, path, headers=headers)
        assert reply.status == status, path
        if path != "/v1/ghosts":
            assert "access-control-allow-origin" not in reply.headers, path


def test_without_the_flag_no_page_gets_permission(
    serve: Serve, repository: RepositoryBuilder
) -> None:
    add_models(repository)
    host = serve(repository).wait_started()
    assert send(host, "OPTIONS", "/v1/chat/completions", headers=PREFLIGHT).status == 405
    reply = send(host, "GET", "/v1/models", headers={"Origin": PAGE})
    assert {"vary", "access-control-allow-origin"}.isdisjoint(map(str.lower, reply.headers))


def test_a_star_allows_every_page(serve: Serve, repository: RepositoryBuilder) -> None:
    add_models(repository)
    host = serve(repository, "--openai-cors-origins=*").wait_started()
    reply = send(host, "GET", "/v1/models", headers={"Origin": PAGE})
    assert reply.headers["access-control-allow-origin"] == PAGE


@pytest.mark.parametrize("origin", ["chat.example.com", "https://a.example/path"])
def test_a_wrong_origin_stops_the_start(
    serve: Serve, repository: RepositoryBuilder, origin: str
) -> None:
    repository.copy("identity")
    host = serve(repository, f"--openai-cors-origins={origin}")
    host.wait_for("--openai-cors-origins needs origins as")
    assert host.process.wait(DEADLINE) != 0


def test_the_openapi_document_has_the_routes_that_models_speak(
    serve: Serve, repository: RepositoryBuilder
) -> None:
    add_models(repository)
    host = serve(repository, "--model-control-mode=explicit", "--load-model=*").wait_started()
    document = send(host, "GET", "/openapi.json").json
    openapi_spec_validator.validate(document)
    paths = {path: item for path, item in document["paths"].items() if path.startswith("/v1/")}
    assert set(paths) == {
        "/v1/models",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/completions",
    }
    for path, item in paths.items():
        for method, operation in item.items():
            media = operation.get("requestBody", {"content": {}})["content"]
            body = media.get("application/json", {}).get("example")
            if body is not None:
                body["model"] = "letters"  # `agent` needs JSON in its messages
            assert send(host, method.upper(), path, body).status == 200, (path, body)
    media = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]
    names = media["schema"]["properties"]["model"]["enum"]
    assert {"letters", "acme/letters", "whole"} <= set(names) and "agent" not in names
    for name in ("letters", "whole", "agent"):
        send(host, "POST", f"/v1/models/{name}/unload")
    wait_until(lambda: not is_listed(host, "letters"), "the unload")
    wait_until(
        lambda: (
            not any("/v1/" in path for path in send(host, "GET", "/openapi.json").json["paths"])
        ),
        "a document without the routes",
    )


def test_a_model_is_created_when_it_has_loaded(serve: Serve, repository: RepositoryBuilder) -> None:
    repository.add("letters", LETTERS, LETTERS_CONFIG)
    host = serve(repository, "--model-control-mode=explicit", "--load-model=letters")
    host.wait_started()

    def created(model: str) -> int:
        return int(send(host, "GET", f"/v1/models/{model}").json["created"])

    first = created("letters")
    assert created("acme%2Fletters") == created("letters:1") == first <= time.time()
    assert send(host, "POST", "/v1/models/letters/unload").status == 200
    wait_until(lambda: time.time() >= first + 1, "the next second")
    assert send(host, "POST", "/v1/models/letters/load").json["created"] > first
    listed = send(host, "GET", "/v1/models").json["data"]
    assert {model["created"] for model in listed} == {created("letters")} != {first}
