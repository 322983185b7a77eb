"""The API keys of the OpenAI routes on a real host."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until
from tests.openai_models import Reply, send


def models(host: RunningHost, authorization: str | None) -> Reply:
    headers = {} if authorization is None else {"Authorization": authorization}
    return send(host, "GET", "/v1/models", headers=headers)


def test_clients_need_a_key_of_the_file(
    serve: Serve, repository: RepositoryBuilder, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# keys\n\nteam first-key\nsecond-key\n")
    repository.copy("identity")
    host = serve(repository, f"--openai-api-key-file={keys}").wait_started()
    missing = models(host, None)
    assert (missing.status, missing.headers["www-authenticate"]) == (401, "Bearer")
    assert missing.error == {
        "message": "this server needs an API key: Authorization: Bearer KEY",
        "type": "authentication_error",
        "param": None,
        "code": "invalid_api_key",
    }
    assert models(host, "Bearer wrong-key").error["message"] == "unknown API key"
    assert models(host, "Bearer team").status == 401
    for known in ("Bearer first-key", "bearer second-key"):
        assert models(host, known).status == 200
    assert send(host, "GET", "/health").status == 200
    assert send(host, "GET", "/v2/health/live").status == 200

    keys.write_text("another-key\n")
    wait_until(lambda: models(host, "Bearer another-key").status == 200, "the new key")
    assert models(host, "Bearer first-key").status == 401
    keys.unlink()
    wait_until(
        lambda: (
            models(host, "Bearer another-key").status == 200
            and "cannot be read again" in host.output
        ),
        "the error in the log",
    )
    assert models(host, "Bearer another-key").status == 200


def test_an_unreadable_key_file_stops_the_start(
    serve: Serve, repository: RepositoryBuilder, tmp_path: Path
) -> None:
    repository.copy("identity")
    for name, text, complaint in [
        ("absent", None, "No such file or directory"),
        ("empty", "# none\n", "it has no key"),
        ("short", "abc\n", "line 1: the key has less than 8 characters"),
    ]:
        path = tmp_path / name
        if text is not None:
            path.write_text(text)
        host = serve(repository, f"--openai-api-key-file={path}")
        host.wait_for(f"failed to read the API keys in '{path}': .*{complaint}")
        assert host.process.wait(DEADLINE) != 0
