"""Records of stubs that died: over HTTP, and in a directory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests

from tests.clients import infer_error, kill_stub, run_command, tensor
from tests.conftest import (
    DEADLINE,
    RepositoryBuilder,
    RunningHost,
    Serve,
    run_pbhost,
    wait_until,
)


def get(host: RunningHost, path: str, status: int = 200) -> Any:
    response = requests.get(f"http://{host.http_url}{path}", timeout=DEADLINE)
    assert response.status_code == status, response.text
    return response.json()


def newest(host: RunningHost) -> dict[str, Any]:
    record = get(host, "/v2/crashes/" + get(host, "/v2/crashes")["crashes"][0]["id"])
    assert isinstance(record, dict)
    return record


def test_a_crash_in_native_code_is_recorded_with_what_ran(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("misbehave")
    host = serve(repository).wait_started()
    assert get(host, "/v2/crashes") == {"crashes": []}
    with host.client() as client:
        _, text = infer_error(run_command, client, "segfaults")
    (line,) = get(host, "/v2/crashes")["crashes"]
    record = newest(host)
    assert text == line["reason"].rstrip(".") + " while it ran this request."
    assert line == {name: record[name] for name in line}
    assert (record["model"], record["version"], record["instance"]) == (
        "misbehave",
        1,
        "misbehave_0",
    )
    assert (record["signal"], record["status"], record["phase"]) == ("SIGSEGV", None, "execute")
    assert record["request_count"] == 1
    (request,) = record["requests"]
    assert [one["name"] for one in request["inputs"]] == ["COMMAND"]
    assert record["stacks"][0] == "Fatal Python error: Segmentation fault"
    assert any("in segfaults" in line for line in record["stacks"])
    assert record["stacks"][0] in record["output"]


def test_a_killed_idle_stub_is_recorded(repository: RepositoryBuilder, serve: Serve) -> None:
    repository.copy("identity")
    host = serve(repository).wait_started()
    (stub,) = host.stubs("identity_0")
    stub.kill()
    host.wait_for("restarted")
    record = newest(host)
    assert (record["pid"], record["signal"]) == (stub.pid, "SIGKILL")
    assert (record["phase"], record["requests"]) == ("between requests", [])
    assert record["stacks"] == []


def test_an_exit_while_loading_is_recorded_with_its_last_output(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.add(
        "leaves",
        "import os\n"
        "class TritonPythonModel:\n"
        "    def initialize(self, args):\n"
        "        print('about to leave', flush=True)\n"
        "        os._exit(3)\n",
    )
    repository.copy("identity")
    host = serve(repository, "--exit-on-error=false").wait_started()
    record = newest(host)
    assert (record["model"], record["status"], record["signal"]) == ("leaves", 3, "")
    assert record["phase"] == "import or initialize"
    assert record["output"] == ["about to leave"]


def test_an_unload_is_no_crash(repository: RepositoryBuilder, serve: Serve) -> None:
    repository.copy("identity")
    host = serve(repository, "--model-control-mode=explicit", "--load-model=*").wait_started()
    with host.client() as client:
        client.unload_model("identity")
        wait_until(lambda: not host.stubs(), "the end of the stub")
        client.load_model("identity")
    assert get(host, "/v2/crashes") == {"crashes": []}


def test_an_unknown_record_is_not_found(repository: RepositoryBuilder, serve: Serve) -> None:
    host = serve(repository).wait_started()
    assert get(host, "/v2/crashes/1%2F..", 404)["error"] == (
        "there is no record of a crash '1/..'; the server keeps the newest 32"
    )


def test_records_of_an_earlier_server_are_read_from_their_directory(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    repository.copy("identity")
    folder = tmp_path / "crashes"
    flag = f"--crash-directory={folder}"
    host = serve(repository, flag, "--crash-records=2").wait_started()
    for number in range(3):
        (stub,) = host.stubs("identity_0")
        stub.kill()
        wait_until(lambda count=number: host.output.count("restarted") > count, "a restart")  # type: ignore[misc]
    records = get(host, "/v2/crashes")["crashes"]
    assert host.stop() == 0
    assert len(records) == 2
    assert sorted(path.stem for path in folder.iterdir()) == [r["id"] for r in reversed(records)]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    (folder / "20200101T000000000000-1.json").write_text("{")
    again = serve(repository, flag, "--crash-records=10").wait_started()
    assert get(again, "/v2/crashes")["crashes"] == records
    again.wait_for("the record of a crash .*20200101T000000000000-1.json.* cannot be read")


def test_a_directory_that_is_gone_is_made_again(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    repository.copy("identity")
    folder = tmp_path / "crashes"
    host = serve(repository, f"--crash-directory={folder}").wait_started()
    folder.rmdir()
    host.stubs("identity_0")[0].kill()
    wait_until(lambda: len(list(folder.glob("*.json"))) == 1, "a record")
    (path,) = folder.glob("*.json")
    assert json.loads(path.read_text()) == newest(host)


def test_a_record_that_cannot_be_written_is_told_and_harms_no_model(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    repository.copy("identity")
    folder = tmp_path / "crashes"
    host = serve(repository, f"--crash-directory={folder}").wait_started()
    folder.rmdir()
    folder.write_text("a file in its place")
    host.stubs("identity_0")[0].kill()
    host.wait_for(f"cannot keep the record of a crash in '{folder}': .*exists")
    host.wait_for("restarted")
    with host.client() as client:
        client.infer("identity", [tensor("INPUT0", np.ones(1, np.float32))])
    assert newest(host)["signal"] == "SIGKILL"


def test_the_tensors_of_a_crash_can_be_read_where_that_is_allowed(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    repository.copy("misbehave")
    host = serve(
        repository, f"--crash-directory={tmp_path}", "--crash-tensor-byte-size=2000",
        "--allow-recording=true", "--quarantine-secs=0",
    ).wait_started()  # fmt: skip
    long = "aborts " + "x" * 1000
    kill_stub(host, long, request_id="culprit", parameters={"kind": 1})
    path = f"/v2/crashes/{newest(host)['id']}/requests"
    (request,) = get(host, path)["requests"]
    (given,) = request["inputs"]
    assert (request["id"], request["parameters"]) == ("culprit", {"kind": 1})
    assert given == {
        "name": "COMMAND",
        "datatype": "BYTES",
        "shape": [1],
        "size": 4 + len(long),
        "text": f"['{long[:400]}']",
    }
    (lines,) = tmp_path.glob("*.requests/recording.jsonl")
    written = lines.read_text()
    lines.write_text(written.replace('"shape":[1]', f'"shape":{[1] * 65}'))
    assert "the recording is damaged: tensor 'COMMAND'" in get(host, path, 400)["error"]
    lines.write_text(written)
    (tensors,) = tmp_path.glob("*.requests/tensors.bin")
    tensors.write_bytes(b"\xff" * tensors.stat().st_size)
    assert "the recording is damaged: tensor 'COMMAND'" in get(host, path, 400)["error"]
    tensors.unlink()
    assert "no recording in" in get(host, path, 404)["error"]
    kill_stub(host, "aborts " + "x" * 2000)
    path = f"/v2/crashes/{newest(host)['id']}/requests"
    assert get(host, path, 404)["error"].endswith(
        "were not kept; a server keeps them with --crash-directory and --crash-tensor-byte-size"
    )


def test_a_directory_that_cannot_be_used_ends_the_start(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    taken = tmp_path / "taken"
    taken.write_text("")
    host = serve(repository, f"--crash-directory={taken}/crashes")
    assert host.process.wait(DEADLINE) == 1
    host.wait_for(
        f"cannot keep records of crashes in '{taken}/crashes' \\(--crash-directory\\):"
        " Not a directory"
    )


@pytest.mark.parametrize("path", ["/v2/crashes", "/v2/crashes/1"])
def test_records_can_be_restricted_with_the_log(
    repository: RepositoryBuilder, serve: Serve, path: str
) -> None:
    host = serve(repository, "--http-restricted-api=logging:key=value").wait_started()
    assert "expecting header 'key'" in get(host, path, 403)["error"]


def test_a_stub_that_the_user_stops_is_recorded_with_its_signal(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("identity")
    host = serve(repository).wait_started()
    (stub,) = host.stubs("identity_0")
    os.kill(stub.pid, signal.SIGBUS)
    host.wait_for("restarted")
    record = newest(host)
    assert record["signal"] == "SIGBUS"
    assert record["stacks"][0] == "Fatal Python error: Bus error"


def crashes(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_pbhost("crashes", *arguments)


def test_the_command_shows_records_of_a_server_and_of_a_directory(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    repository.copy("misbehave")
    folder = tmp_path / "crashes"
    host = serve(repository, f"--crash-directory={folder}").wait_started()
    url = f"http://{host.http_url}"
    assert crashes(url).stdout == "no crash\n"
    missing = crashes(url, "--show=newest")
    assert (missing.returncode, missing.stderr) == (
        1,
        "pbhost crashes: there is no record of a crash\n",
    )
    with host.client() as client:
        infer_error(run_command, client, "aborts")
    record = newest(host)
    listed = crashes(url).stdout
    assert record["id"] in listed
    assert "was ended by SIGABRT" in listed
    shown = crashes(url, "--show=newest")
    assert shown.returncode == 0
    assert "  id '': COMMAND BYTES [1]\n" in shown.stdout
    assert "Python stacks:\n  Fatal Python error: Aborted\n" in shown.stdout
    assert json.loads(crashes(url, f"--show={record['id']}", "--format=json").stdout) == record
    assert crashes(url, "--model=other").stdout == "no crash\n"
    assert host.stop() == 0
    assert crashes(str(folder), "--show=newest").stdout == shown.stdout
    assert crashes(str(folder)).stdout == listed
    gone = crashes(url)
    assert gone.returncode == 1
    assert gone.stderr.startswith(f"pbhost crashes: no answer from {url}: ")


def test_the_command_sends_the_header_of_a_restricted_server(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    host = serve(repository, "--http-restricted-api=logging:key=value").wait_started()
    url = f"http://{host.http_url}"
    refused = crashes(url)
    assert (refused.returncode, refused.stderr) == (
        1,
        "pbhost crashes: This API is restricted, expecting header 'key'\n",
    )
    assert crashes(url, "--header=key:value").stdout == "no crash\n"


def test_the_command_refuses_what_is_no_source(tmp_path: Path) -> None:
    path, form = tmp_path / "nothing", "(http://HOST:PORT)"
    refused = crashes(str(path))
    assert (refused.returncode, refused.stderr) == (
        1,
        f"pbhost crashes: '{path}' is neither a directory nor the address of a server {form}\n",
    )
    bad = crashes("http://localhost:1", "--header=key")
    assert bad.returncode == 2
    assert "expected NAME:VALUE, got 'key'" in bad.stderr


def test_a_full_disk_is_told_and_leaves_no_half_of_a_file(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    repository.copy("identity")
    folder = tmp_path / "crashes"
    folder.mkdir()
    mounted = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=4k none "$0" && exec "$@"']
    if subprocess.run([*mounted, folder, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system in a namespace")
    host = serve(repository, f"--crash-directory={folder}", under=[*mounted, str(folder)])
    host.wait_started()
    seen_by_host = Path(f"/proc/{host.process.pid}/root", *folder.parts[1:])
    (seen_by_host / "filler").write_bytes(bytes(4096))
    host.stubs("identity_0")[0].kill()
    host.wait_for(f"cannot keep the record of a crash in '{folder}': .*No space left")
    host.wait_for("restarted")
    assert [path.name for path in seen_by_host.iterdir()] == ["filler"]
    assert newest(host)["signal"] == "SIGKILL"


def test_a_directory_that_cannot_be_written_ends_the_start(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    folder = tmp_path / "crashes"
    folder.mkdir()
    mounted = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o ro none "$0" && exec "$@"']
    if subprocess.run([*mounted, folder, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system in a namespace")
    host = serve(repository, f"--crash-directory={folder}", under=[*mounted, str(folder)])
    assert host.process.wait(DEADLINE) == 1
    host.wait_for("--crash-directory.*: this user may not read and write there")


def test_files_of_others_in_the_directory_are_left_alone(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    repository.copy("identity")
    folder = tmp_path / "crashes"
    folder.mkdir()
    names = {"2024-report.json", "1.json", "notes.txt"}
    for name in names:
        (folder / name).write_text("{}")
    os.mkfifo(folder / "20200101T000000000000-1.json")  # which nobody writes
    host = serve(repository, f"--crash-directory={folder}", "--crash-records=1").wait_started()
    host.wait_for("cannot be read: it is not an ordinary file")
    host.stubs("identity_0")[0].kill()
    wait_until(lambda: len(list(folder.glob("2*T*.json"))) == 1, "a record")
    wait_until(lambda: get(host, "/v2/crashes")["crashes"], "the record")
    assert {path.name for path in folder.iterdir()} >= names
    assert host.stop() == 0
