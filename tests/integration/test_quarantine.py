"""Requests that have killed two stubs are refused for a while."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests

from tests.clients import infer_error, kill_stub, run_command, tensor
from tests.conftest import DEADLINE, ROOT, RepositoryBuilder, RunningHost, Serve, wait_until


def post(
    host: RunningHost, path: str, body: dict[str, Any] | None = None, status: int = 200
) -> Any:
    response = requests.post(f"http://{host.http_url}{path}", json=body, timeout=DEADLINE)
    assert response.status_code == status, response.text
    return response.json()


def get(host: RunningHost, path: str) -> Any:
    return requests.get(f"http://{host.http_url}{path}", timeout=DEADLINE).json()


def refusals(host: RunningHost) -> int:
    text = requests.get(f"http://{host.metrics_url}/metrics", timeout=DEADLINE).text
    series = r'pbhost_quarantine_refusals_total\{model="misbehave",version="1"\} (\d+)'
    (count,) = re.findall(series, text)
    return int(count)


def crashes(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pbhost", "crashes", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE, check=True,
    )  # fmt: skip
    return done.stdout


def test_a_request_that_has_killed_two_stubs_is_refused_until_that_is_lifted(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("misbehave")
    host = serve(repository).wait_started()
    kill_stub(host, "aborts")
    assert get(host, "/v2/quarantine") == {"requests": []}
    kill_stub(host, "aborts", request_id="again")
    records = [one["id"] for one in get(host, "/v2/crashes")["crashes"]]
    with host.client() as client:
        status, text = infer_error(run_command, client, "aborts", request_id="third")
        assert run_command(client, "echo well") == "well"
        assert run_command(client, "echo  1234") == " 1234"  # as many bytes as the refused one
        _, other = infer_error(run_command, client, "aborts", parameters={"other": 1})
        assert "while it ran this request" in other
    assert status == "StatusCode.INVALID_ARGUMENT"
    assert re.fullmatch(
        "request to model 'misbehave' is in quarantine: the same inputs and parameters ended 2"
        rf" processes of version 1 \(crash records {records[1]}, {records[0]}\); it is refused"
        " until [-0-9]+T[:.0-9]+Z; to lift this: pbhost crashes URL --lift, or unload and load"
        " the model",
        text,
    )
    assert refusals(host) == 1
    (refused,) = get(host, "/v2/quarantine")["requests"]
    assert (refused["model"], refused["version"]) == ("misbehave", 1)
    assert refused["crashes"] == [records[1], records[0]]
    assert refused["request"]["inputs"] == [{"name": "COMMAND", "datatype": "BYTES", "shape": [1]}]
    url = f"http://{host.http_url}"
    assert f"are refused until {refused['until']}, see {records[1]}, {records[0]}:\n" in crashes(
        url
    )
    assert json.loads(crashes(url, "--format=json"))["quarantine"] == [refused]
    assert crashes(url, "--lift", "--model=misbehave") == "1 request accepted again\n"
    assert get(host, "/v2/quarantine") == {"requests": []}
    host.wait_for("restarted")
    kill_stub(host, "aborts")  # the deaths before no longer count
    assert get(host, "/v2/quarantine") == {"requests": []}


def test_the_quarantine_ends_by_itself_and_begins_again_with_the_next_death(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("misbehave")
    host = serve(repository, "--quarantine-secs=0.2").wait_started()
    kill_stub(host, "aborts")
    kill_stub(host, "aborts")
    wait_until(lambda: get(host, "/v2/quarantine") == {"requests": []}, "the end")
    kill_stub(host, "aborts")
    assert host.output.count("quarantine: requests to model 'misbehave' version 1") == 2


def test_nothing_is_refused_without_quarantine(repository: RepositoryBuilder, serve: Serve) -> None:
    repository.copy("misbehave")
    host = serve(repository, "--quarantine-secs=0").wait_started()
    for _ in range(3):
        kill_stub(host, "aborts")


def test_a_process_that_others_kill_says_nothing_of_its_request(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("misbehave")
    host = serve(repository).wait_started()
    for _ in range(3):
        restarts = host.output.count("] restarted")
        with host.client() as client:
            given = tensor("COMMAND", np.array([b"loops"], dtype=np.object_))
            client.async_infer("misbehave", [given], lambda result, error: None)
            wait_until(lambda: bool(get(host, "/v2/stacks")["instances"][0]["requests"]), "it runs")
            host.stubs("misbehave_0")[0].kill()
            wait_until(lambda: host.output.count("] restarted") > restarts, "a restart")  # noqa: B023
    assert get(host, "/v2/quarantine") == {"requests": []}
    assert len(get(host, "/v2/crashes")["crashes"]) == 3


def test_models_that_ask_by_bls_are_refused_too(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("misbehave")
    repository.add(
        "asks",
        "import triton_python_backend_utils as pb_utils\n"
        "class TritonPythonModel:\n"
        "    def execute(self, requests):\n"
        "        given = requests[0].inputs()\n"
        "        asked = pb_utils.InferenceRequest(\n"
        "            model_name='misbehave', inputs=given, requested_output_names=['ANSWER'])\n"
        "        answer = asked.exec()\n"
        "        return [pb_utils.InferenceResponse(error=answer.error())]\n",
        'input { name: "COMMAND" data_type: TYPE_STRING dims: [ 1 ] }\n'
        'output { name: "ANSWER" data_type: TYPE_STRING dims: [ 1 ] }\n',
    )
    host = serve(repository).wait_started()
    kill_stub(host, "aborts", model="asks")
    kill_stub(host, "aborts", model="asks")
    with host.client() as client:
        _, text = infer_error(run_command, client, "aborts", model="asks")
    assert "is in quarantine" in text


@pytest.mark.parametrize("way", ["a changed file", "unloaded before"])
def test_a_loaded_model_starts_anew(repository: RepositoryBuilder, serve: Serve, way: str) -> None:
    repository.copy("misbehave")
    host = serve(repository, "--model-control-mode=explicit", "--load-model=*").wait_started()
    kill_stub(host, "aborts")
    kill_stub(host, "aborts")
    with host.client() as client:
        infer_error(run_command, client, "aborts")
        assert refusals(host) == 1
        if way == "a changed file":
            code = repository.path / "misbehave" / "1" / "model.py"
            code.write_text(f"{code.read_text()}\n")
        else:
            client.unload_model("misbehave")
            host.wait_for("successfully unloaded 'misbehave'")
        client.load_model("misbehave")
    kill_stub(host, "aborts")
    if way == "a changed file":
        assert refusals(host) == 1  # the metric continues where it was


def test_numbers_that_json_lacks_harm_neither_records_nor_the_quarantine(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    repository.copy("misbehave")
    flags = f"--crash-directory={tmp_path}", "--crash-tensor-byte-size=1000"
    host = serve(repository, *flags).wait_started()
    kill_stub(host, "aborts", parameters={"a": float("nan")})
    kill_stub(host, "aborts", parameters={"a": float("nan")})
    with host.client() as client:
        _, text = infer_error(run_command, client, "aborts", parameters={"a": float("nan")})
    assert "is in quarantine" in text
    for summary in get(host, "/v2/crashes")["crashes"]:
        line = (tmp_path / f"{summary['id']}.requests" / "recording.jsonl").read_text()
        assert '"parameters":{"a":"nan"}' in line


def test_an_unknown_model_cannot_be_lifted(repository: RepositoryBuilder, serve: Serve) -> None:
    host = serve(repository, "--http-restricted-api=logging:key=value").wait_started()
    assert post(host, "/v2/quarantine/lift", {"model": "x"}, 404) == {
        "error": "Request for unknown model: 'x' is not found"
    }
    assert "expected a string" in post(host, "/v2/quarantine/lift", {"model": 1}, 400)["error"]
    assert post(host, "/v2/quarantine/lift") == {"lifted": 0}
    assert "expecting header 'key'" in get(host, "/v2/quarantine")["error"]
