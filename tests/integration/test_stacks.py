"""What the instances of a running server do: over HTTP, and by `pbhost stacks`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.clients import run_command
from tests.conftest import DEADLINE, ROOT, RepositoryBuilder, RunningHost, Serve, wait_until
from tests.waiting import UNTIL_SOURCE


@pytest.fixture
def host(repository: RepositoryBuilder, serve: Serve) -> Iterator[RunningHost]:
    repository.copy("script")
    repository.copy("identity")
    yield serve(repository).wait_started()


def get(host: RunningHost, path: str, status: int = 200) -> Any:
    response = requests.get(f"http://{host.http_url}{path}", timeout=DEADLINE)
    assert response.status_code == status, response.text
    return response.json()


def stacks(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pbhost", "stacks", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


def test_instances_tell_what_they_do(host: RunningHost, tmp_path: Path) -> None:
    idle = get(host, "/v2/stacks")["instances"]
    assert [one["instance"] for one in idle] == ["identity_0", "script_0"]
    assert {(one["phase"], one["request_count"], one["problem"]) for one in idle} == {
        ("between requests", 0, "")
    }
    assert all(one["stacks"][0] == "thread MainThread:" for one in idle)
    begun, go = tmp_path / "begun", tmp_path / "go"
    script = f"""
    import os
    open({str(begun)!r}, "w").close()
    until(lambda: os.path.exists({str(go)!r}), "the word to continue")
    """
    with ThreadPoolExecutor(1) as pool, host.client() as client:
        running = pool.submit(run_command, client, script, "script")
        wait_until(begun.exists, "the request to begin")
        (busy,) = get(host, "/v2/models/script/versions/1/stacks")["instances"]
        shown = stacks(f"http://{host.http_url}", "--model=script")
        go.touch()
        running.result(DEADLINE)
    assert (busy["model"], busy["version"], busy["phase"]) == ("script", 1, "execute")
    assert [one["name"] for one in busy["requests"][0]["inputs"]] == ["COMMAND"]
    assert any("in execute" in line for line in busy["stacks"])
    (stub,) = host.stubs("script_0")
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[:3] == [
        f"script:1, instance script_0, process {stub.pid}: execute",
        "requests: 1",
        "  id '': COMMAND BYTES [1]",
    ]
    assert any("in execute" in line for line in lines)


def test_a_stopped_process_is_told_and_holds_up_no_other(host: RunningHost) -> None:
    (stub,) = host.stubs("script_0")
    stub.send_signal(signal.SIGSTOP)
    wait_until(lambda: stub.status() == "stopped", "the process to stop")
    try:
        healthy, stopped = get(host, "/v2/stacks")["instances"]
    finally:
        stub.send_signal(signal.SIGCONT)
    assert healthy["stacks"]
    assert stopped["stacks"] == []
    assert stopped["problem"] == "no answer in 5 s: the process is stopped"
    assert get(host, "/v2/models/script/stacks")["instances"][0]["problem"] == ""


def test_a_model_that_hangs_in_initialize_shows_where(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    repository.add(
        "slow",
        UNTIL_SOURCE + "import os\n"
        "class TritonPythonModel:\n"
        "    def initialize(self, args):\n"
        f"        until(lambda: os.path.exists({str(go)!r}), 'the word to continue')\n",
    )
    host = serve(repository, "--model-control-mode=explicit").wait_started()
    with ThreadPoolExecutor(1) as pool, host.client() as client:
        loading = pool.submit(client.load_model, "slow", client_timeout=DEADLINE)

        def hanging() -> bool:
            (instance,) = get(host, "/v2/stacks")["instances"] or [{"stacks": []}]
            return any("in initialize" in line for line in instance["stacks"])

        wait_until(hanging, "initialize")
        (instance,) = get(host, "/v2/stacks")["instances"]
        assert instance["phase"] == "import or initialize"
        go.touch()
        loading.exception(DEADLINE)


def test_unknown_models_and_servers_are_told(host: RunningHost) -> None:
    assert get(host, "/v2/models/other/stacks", 404) == {"error": "model 'other' has no instance"}
    url = f"http://{host.http_url}"
    unknown = stacks(url, "--model=other")
    assert (unknown.returncode, unknown.stderr) == (
        1,
        "pbhost stacks: model 'other' has no instance\n",
    )
    wrong = stacks("localhost:8000")
    assert wrong.stderr == "pbhost stacks: expected http://HOST:PORT, got 'localhost:8000'\n"
    other = stacks(f"http://{host.url}")  # the gRPC port
    assert other.returncode == 1
    assert other.stderr.startswith(f"pbhost stacks: no answer from http://{host.url}: ")
    assert "Traceback" not in other.stderr
    whole = json.loads(stacks(url, "--format=json").stdout)
    assert [one["model"] for one in whole["instances"]] == ["identity", "script"]
