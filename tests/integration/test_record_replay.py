"""Recordings: made by `pbhost record`, and sent again by `pbhost replay`."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shm

from tests.clients import infer_error, run_command, tensor
from tests.conftest import (
    DEADLINE,
    ROOT,
    RepositoryBuilder,
    RunningHost,
    Serve,
    run_pbhost,
    wait_until,
)

SCALE = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            factor = json.loads(request.parameters() or "{}").get("factor", FACTOR)
            if x.size and x.flat[0] < 0:
                error = pb_utils.TritonError("negative")
                responses.append(pb_utils.InferenceResponse(error=error))
                continue
            text = np.array([f"{request.correlation_id()} {len(x)}".encode()], dtype=np.object_)
            outputs = [pb_utils.Tensor("Y", x * np.float32(factor)), pb_utils.Tensor("T", text)]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
"""
SCALE_CONFIG = """
input { name: "X" data_type: TYPE_FP32 dims: [ -1 ] }
output [
  { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] },
  { name: "T" data_type: TYPE_STRING dims: [ 1 ] }
]
"""
COUNT = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            count = int(pb_utils.get_input_tensor_by_name(request, "N").as_numpy()[0])
            for number in range(count + MORE):
                out = pb_utils.Tensor("I", np.array([number], np.int32))
                sender.send(pb_utils.InferenceResponse([out]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
COUNT_CONFIG = """
model_transaction_policy { decoupled: true }
input { name: "N" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "I" data_type: TYPE_INT32 dims: [ 1 ] }
"""
KEY = "--http-restricted-api=recording:key=value"
HEADER = "--header=key:value"


def add_models(repository: RepositoryBuilder, factor: str = "2.0", more: int = 0) -> None:
    repository.add("scale", SCALE.replace("FACTOR", factor), SCALE_CONFIG)
    repository.add("count", COUNT.replace("MORE", str(more)), COUNT_CONFIG)


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    add_models(module_repository)
    flags = "--allow-recording=true", "--allow-client-shm=true", KEY
    return module_serve(module_repository, *flags).wait_started()


def command(name: str, *arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pbhost", name, *map(str, arguments)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
        text=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exits status, output and errors."""
    out, error = process.communicate(timeout=DEADLINE)
    return process.returncode, out, error


def replay(*arguments: str | Path) -> tuple[int, str, str]:
    done = run_pbhost("replay", *arguments)
    return done.returncode, done.stdout, done.stderr


@contextmanager
def recording(
    host: RunningHost, folder: Path, *flags: str, model: str = "scale"
) -> Iterator[list[str]]:
    """Records what is sent inside; afterwards the list has the line that the command printed."""
    process = command(
        "record", f"http://{host.http_url}", folder, f"--model={model}", HEADER,
        "--seconds=600", *flags,
    )  # fmt: skip
    printed: list[str] = []
    try:
        wait_until(lambda: (folder / "recording.jsonl").exists(), "the recording")
        yield printed
        if not any(flag.startswith("--max-requests") for flag in flags):
            process.send_signal(signal.SIGINT)
        status, out, error = finish(process)
        assert (status, error) == (0, "")
        printed.append(out)
    finally:
        process.kill()
        process.communicate()


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "recording.jsonl").read_text().splitlines()]


def scale(host: RunningHost, *values: float, **options: Any) -> Any:
    given = tensor("X", np.array(values, np.float32))
    with host.client() as client:
        return client.infer("scale", [given], **options).as_numpy("Y")


def count(host: RunningHost, number: int) -> None:
    """Asks the decoupled model, and waits for the last response."""
    with host.client() as client:
        answers: list[Any] = []
        client.start_stream(lambda result, error: answers.append(error or result))
        given = tensor("N", np.array([number], np.int32))
        client.async_stream_infer("count", [given], enable_empty_final_response=True)
        wait_until(lambda: len(answers) == number + 1, "all responses")
        client.stop_stream()


def test_requests_of_both_protocols_are_recorded_and_replayed(
    host: RunningHost, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    with recording(host, folder, "--max-requests=4") as printed:
        scale(host, 1, 2, request_id="grpc", parameters={"factor": 3})
        with httpclient.InferenceServerClient(host.http_url) as client:
            given = httpclient.InferInput("X", [3], "FP32")
            given.set_data_from_numpy(np.array([5, 6, 7], np.float32))
            client.infer("scale", [given], request_id="http")
        with host.client() as grpc:
            infer_error(grpc.infer, "scale", [tensor("X", np.array([-1], np.float32))])
        scale(host, sequence_id=7, sequence_start=True)
    assert re.fullmatch(
        rf"recorded 4 requests of 4, \d+ bytes of tensors, in {folder}: the limit of requests was"
        " reached\n",
        printed[0],
    )
    header, first, second, third, fourth, end = lines(folder)
    assert (header["kind"], header["format"]) == ("recording", "pbhost recording 1")
    assert (first["model"], first["version"], first["id"]) == ("scale", "", "grpc")
    assert first["parameters"] == {"factor": 3}
    assert first["inputs"] == [
        {"name": "X", "datatype": "FP32", "shape": [2], "offset": 0, "size": 8}
    ]
    assert [one["name"] for one in first["responses"][0]["outputs"]] == ["Y", "T"]
    assert second["id"] == "http"
    assert third["responses"] == [{"error": "negative"}]
    assert fourth["parameters"] == {"sequence_id": 7, "sequence_start": True, "sequence_end": False}
    assert end == {
        "kind": "end", "reason": "the limit of requests was reached", "seen": 4, "recorded": 4,
        "dropped": 0,
    }  # fmt: skip
    content = (folder / "tensors.bin").read_bytes()
    assert np.frombuffer(content[:8], np.float32).tolist() == [1, 2]
    output = first["responses"][0]["outputs"][0]
    found = content[output["offset"] : output["offset"] + output["size"]]
    assert np.frombuffer(found, np.float32).tolist() == [3, 6]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    for url in (f"http://{host.http_url}", f"grpc://{host.url}"):
        status, out, error = replay(folder, f"--against={url}", "--speed=max")
        assert (status, error) == (0, ""), out
        assert "4 requests in" in out
        assert ": 4 equal, 0 different, 0 failed\n" in out
        assert out.count("latency ") == 2


def test_differences_are_told_with_the_first_element(
    host: RunningHost, repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    with recording(host, folder, "--max-requests=2"):
        scale(host, 0, 1, 2, request_id="a")
        scale(host, 4, request_id="b", parameters={"factor": 1})
    add_models(repository, "2.002")
    other = serve(repository).wait_started()
    url = f"http://{other.http_url}"
    status, out, error = replay(folder, f"--against={url}", "--speed=1000")
    assert (status, error) == (1, "")
    assert out.startswith(
        "request 1 to 'scale' (id 'a'): response 1: output 'Y' FP32 [3]: 2 of 3 elements differ,"
        " the first at [1]: 2.00200009"
    )
    assert "instead of 2.0; the largest difference is 0.00400019\n" in out
    assert ": 1 equal, 1 different, 0 failed\n" in out
    assert replay(folder, f"--against={url}", "--tolerance=0.01", "--speed=max")[0] == 0
    status, out, _ = replay(folder, f"--against={url}", "--format=json", "--speed=max")
    found = json.loads(out)
    assert (status, found["equal"], found["different"]) == (1, 1, 1)
    assert [one["number"] for one in found["differences"]] == [1]
    gone = replay(folder, f"--against={url}", "--model=none", "--speed=max")
    assert gone[0] == 1
    assert "error 'Request for unknown model: 'none' is not found' instead of outputs" in gone[1]


def test_responses_of_decoupled_models_are_compared(
    host: RunningHost, repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    with recording(host, folder, "--max-requests=2", model="count"):
        count(host, 3)
        count(host, 0)
    _, first, second, _ = lines(folder)
    assert (first["decoupled"], len(first["responses"])) == (True, 3)
    assert second["responses"] == []
    status, out, _ = replay(folder, f"--against=grpc://{host.url}")
    assert status == 0, out
    status, _, error = replay(folder, f"--against=http://{host.http_url}")
    assert status == 1
    add_models(repository, more=1)
    other = serve(repository).wait_started()
    status, out, _ = replay(folder, f"--against=grpc://{other.url}", "--speed=max")
    assert status == 1
    assert "request 1 to 'count' (id ''): 4 responses instead of 3\n" in out


def test_a_sample_is_a_share_and_takes_whole_sequences(host: RunningHost, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with recording(host, folder, "--sample=0.5") as printed, host.client() as client:
        given = [tensor("X", np.ones(1, np.float32))]
        for sequence in range(1, 41):
            for step in range(3):
                client.infer(
                    "scale", given, sequence_id=sequence, sequence_start=step == 0,
                    sequence_end=step == 2,
                )  # fmt: skip
        for _ in range(100):
            client.infer("scale", given)
        wait_until(lambda: len(lines(folder)) > 60, "recorded requests")
    sequences = [
        one["parameters"]["sequence_id"]
        for one in lines(folder)[1:]
        if one["kind"] == "request" and one["parameters"]
    ]
    assert 0 < len(sequences) < 120
    assert all(sequences.count(one) == 3 for one in sequences)
    assert printed[0].endswith(": interrupted\n")
    assert replay(folder, f"--against=grpc://{host.url}", "--speed=max")[0] == 0


def test_the_limit_of_bytes_ends_a_recording(host: RunningHost, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    process = command(
        "record", f"http://{host.http_url}", folder, "--model=scale", HEADER, "--max-bytes=1000"
    )
    wait_until(lambda: (folder / "recording.jsonl").exists(), "the recording")
    for _ in range(2):
        scale(host, *range(100))
    status, out, _ = finish(process)
    assert (status, lines(folder)[-1]["reason"]) == (0, "the limit of bytes was reached")
    assert "recorded 1 request of 2, " in out
    assert (folder / "tensors.bin").stat().st_size <= 1000


def test_one_recording_of_a_model_at_a_time_and_a_gone_reader_ends_it(
    host: RunningHost, tmp_path: Path
) -> None:
    with recording(host, tmp_path / "first"):
        second = command(
            "record", f"http://{host.http_url}", tmp_path / "second", "--model=scale", HEADER
        )
        assert finish(second) == (
            1, "", "pbhost record: requests to model 'scale' are being recorded already\n",
        )  # fmt: skip
        assert not (tmp_path / "second").exists()

    def starts_again() -> bool:
        answer = requests.post(
            f"http://{host.http_url}/v2/models/scale/record",
            json={"seconds": 0.01}, headers={"key": "value"}, timeout=DEADLINE,
        )  # fmt: skip
        return answer.status_code == 200

    wait_until(starts_again, "the end of the recording")


def test_a_recording_ends_with_its_time_and_with_the_server(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    add_models(repository)
    host = serve(repository, "--allow-recording=true").wait_started()
    url = f"http://{host.http_url}/v2/models/scale/record"
    short = requests.post(url, json={"seconds": 0.01}, timeout=DEADLINE)
    assert json.loads(short.content.splitlines()[-1])["reason"] == "the time was over"
    process = command("record", f"http://{host.http_url}", tmp_path / "out", "--model=scale")
    wait_until(lambda: (tmp_path / "out" / "recording.jsonl").exists(), "the recording")
    assert host.stop() == 0
    status, out, _ = finish(process)
    assert (status, lines(tmp_path / "out")[-1]["reason"]) == (0, "the server stopped"), out


def test_a_server_records_only_if_it_was_told_to(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path, host: RunningHost
) -> None:
    add_models(repository)
    other = serve(repository).wait_started()
    refused = finish(command("record", f"http://{other.http_url}", tmp_path, "--model=scale"))
    assert refused == (
        1,
        "",
        "pbhost record: this server does not record; start it with --allow-recording=true\n",
    )
    url = f"http://{host.http_url}"
    assert finish(command("record", url, tmp_path, "--model=scale")) == (
        1, "", "pbhost record: This API is restricted, expecting header 'key'\n",
    )  # fmt: skip
    unknown = finish(command("record", url, tmp_path, "--model=none", HEADER))
    assert unknown[2] == "pbhost record: Request for unknown model: 'none' is not found\n"
    assert finish(command("record", url, tmp_path))[0] == 2
    assert list(tmp_path.glob("*.jsonl")) == []


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"sample": 0}, "`sample`|> 0.0|sample"),
        ({"seconds": "x"}, "seconds"),
        ({"path": "/etc"}, "path"),
        ([], "object"),
    ],
)
def test_wrong_settings_are_refused(host: RunningHost, body: Any, text: str) -> None:
    answer = requests.post(
        f"http://{host.http_url}/v2/models/scale/record",
        json=body, headers={"key": "value"}, timeout=DEADLINE,
    )  # fmt: skip
    assert answer.status_code == 400
    assert re.search(f"invalid settings of a recording: .*{text}", answer.json()["error"])


def test_a_recorded_request_runs_in_the_foreground(
    host: RunningHost, repository: RepositoryBuilder, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    with recording(host, folder, "--max-requests=2"):
        scale(host, 1)
        scale(host, 1, 2, parameters={"factor": 5}, sequence_id=9, sequence_start=True)
    add_models(repository)
    status, out, error = replay(folder, f"--run={repository.path / 'scale'}", "--request=2")
    assert (status, error) == (0, "")
    assert "  Y FP32 [2]\n    [ 5., 10.]\n" in out
    assert "9 2" in out
    missing = replay(folder, f"--run={repository.path / 'scale'}", "--request=3")
    assert missing == (
        1, "", "pbhost replay: the recording has 2 requests, and no request 3\n",
    )  # fmt: skip
    assert replay(folder)[0] == 2


def test_a_breakpoint_works_in_a_replayed_request(
    host: RunningHost, repository: RepositoryBuilder, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    with recording(host, folder, "--max-requests=1"):
        scale(host, 20, 22)
    code = SCALE.replace("FACTOR", "1.0").replace(
        "if x.size", "breakpoint()\n            if x.size"
    )
    repository.add("scale", code, SCALE_CONFIG)
    done = subprocess.run(
        [sys.executable, "-m", "pbhost", "replay", folder, f"--run={repository.path / 'scale'}"],
        cwd=ROOT, input="p int(x.sum())\nc\n", capture_output=True, text=True, timeout=DEADLINE,
        check=True,
    )  # fmt: skip
    assert "(Pdb) 42\n" in done.stdout
    assert "[20., 22.]" in done.stdout


def test_tensors_in_shared_memory_of_a_client_are_copied_or_left_out(
    host: RunningHost, tmp_path: Path
) -> None:
    folder, key = tmp_path / "out", f"/pbhost-test-{os.getpid()}"
    given = np.array([3, 4], np.float32)
    region = shm.create_shared_memory_region("both", key, 16)
    try:
        shm.set_shared_memory_region(region, [given])
        with host.client() as client, recording(host, folder, "--max-requests=1"):
            client.register_system_shared_memory("both", key, 16)
            x = grpcclient.InferInput("X", [2], "FP32")
            x.set_shared_memory("both", 8)
            y = grpcclient.InferRequestedOutput("Y")
            y.set_shared_memory("both", 8, offset=8)
            client.infer("scale", [x], outputs=[y])
            shm.set_shared_memory_region(region, [np.zeros(2, np.float32)])
            client.unregister_system_shared_memory("both")
    finally:
        shm.destroy_shared_memory_region(region)
    _, request, _ = lines(folder)
    assert request["responses"][0]["left_out"] == ["Y"]
    assert np.array_equal(np.frombuffer((folder / "tensors.bin").read_bytes()[:8], "<f4"), given)
    assert replay(folder, f"--against=grpc://{host.url}")[0] == 0


def test_a_full_disk_ends_a_recording_with_what_fits(host: RunningHost, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=16k none "$0" && exec "$@"']
    if subprocess.run([*mounted, disk, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system in a namespace")
    process = subprocess.Popen(
        [*mounted, disk, sys.executable, "-m", "pbhost", "record", f"http://{host.http_url}",
         disk / "out", "--model=scale", HEADER],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    seen = Path(f"/proc/{process.pid}/root", *disk.parts[1:], "out", "recording.jsonl")
    wait_until(seen.exists, "the recording")
    for _ in range(3):
        scale(host, *range(1000))
    status, out, error = finish(process)
    assert (status, out) == (1, "")
    assert error == (
        f"pbhost record: cannot write the recording to '{disk / 'out'}': No space left on device\n"
    )


def test_a_folder_that_is_not_empty_or_goes_away_is_told(host: RunningHost, tmp_path: Path) -> None:
    taken, folder = tmp_path / "taken", tmp_path / "out"
    taken.mkdir()
    kept = taken / "recording.jsonl"
    kept.symlink_to(tmp_path / "nowhere")  # as a stranger could leave one
    start = ("record", f"http://{host.http_url}")
    assert finish(command(*start, taken, "--model=scale", HEADER)) == (
        1, "", f"pbhost record: cannot write the recording to '{taken}': File exists\n",
    )  # fmt: skip
    kept.unlink()
    kept.write_text("mine")
    assert finish(command(*start, taken, "--model=scale", HEADER)) == (
        1, "", f"pbhost record: '{taken}' has a recording already; choose another directory\n",
    )  # fmt: skip
    assert kept.read_text() == "mine"
    process = command(*start, folder, "--model=scale", HEADER, "--max-requests=1")
    wait_until(lambda: (folder / "tensors.bin").exists(), "the recording")
    shutil.rmtree(folder)
    scale(host, 1)
    assert finish(process) == (
        1, "", f"pbhost record: '{folder}' was removed meanwhile, and the recording with it\n",
    )  # fmt: skip


def test_the_tensors_of_a_crash_can_be_sent_again(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    repository.copy("misbehave")
    crashes = tmp_path / "crashes"
    host = serve(
        repository, f"--crash-directory={crashes}", "--crash-tensor-byte-size=100",
        "--crash-records=1", "--quarantine-secs=0",
    ).wait_started()  # fmt: skip
    for text in ("aborts", "aborts " + "x" * 100):
        with host.client() as client:
            infer_error(run_command, client, text, request_id="culprit")
        if text == "aborts":
            wait_until(lambda: list(crashes.glob("*.json")) != [], "the record")
            (folder,) = crashes.glob("*.requests")
            kept = tmp_path / "kept"
            shutil.copytree(folder, kept)
            assert folder.stat().st_mode & 0o777 == 0o700
            shown = finish(command("crashes", f"http://{host.http_url}", "--show=newest"))[1]
            assert f"pbhost replay {folder.name} --against=URL" in shown
    wait_until(lambda: len(list(crashes.iterdir())) == 1, "the end of the older record")
    assert list(crashes.glob("*.requests")) == []  # the newer request was too large
    status, out, error = replay(kept, f"--against=http://{host.http_url}")
    assert (status, error) == (1, "")
    assert "request 1 to 'misbehave' (id 'culprit'): error 'Stub process 'misbehave_0'" in out
    assert ": 0 equal, 0 different, 1 failed\n" in out


def test_damaged_recordings_of_strangers_are_refused(host: RunningHost, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with recording(host, folder, "--max-requests=1"):
        scale(host, 1)
    good = (folder / "recording.jsonl").read_text().splitlines(keepends=True)
    against = f"--against=http://{host.http_url}"

    def refused(*changed: str) -> str:
        (folder / "recording.jsonl").write_text("".join(changed))
        status, out, error = replay(folder, against)
        assert (status, out) == (1, "")
        assert error.count("\n") == 1
        return error

    assert "its first line is not that of a recording" in refused(good[1])
    assert "its first line is not that of a recording" in refused()
    for later in (
        good[0].replace("pbhost recording 1", "pbhost recording 2"),
        '{"kind":"session","format":"pbhost recording 2","began":[2030]}\n',
    ):
        assert refused(later) == (
            "pbhost replay: the recording has the format 'pbhost recording 2', expected 'pbhost"
            " recording 1': use the version of pbhost that recorded it\n"
        )
    assert "a line of the recording is damaged" in refused(good[0], "{")
    assert "a line of the recording is damaged" in refused(good[0], "[" * 100_000)
    assert "has 4 bytes" in refused(good[0], good[1].replace('"shape":[1]', '"shape":[2]', 1))
    huge = re.sub(r'"offset":\d+', f'"offset":{2**61}', good[1])
    assert "ends after tensors.bin" in refused(good[0], huge)
    (folder / "recording.jsonl").write_text("".join(good))
    secret = tmp_path / "secret"
    (folder / "tensors.bin").rename(secret)
    (folder / "tensors.bin").symlink_to(secret)
    status, _, error = replay(folder, against)
    assert (status, "no recording in" in error) == (1, True)
    status, _, error = replay(tmp_path / "nothing", against)
    assert error.startswith(f"pbhost replay: no recording in '{tmp_path}/nothing'")


def test_a_server_that_does_not_answer_is_told_in_a_line(host: RunningHost, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with recording(host, folder, "--max-requests=1"):
        scale(host, 1)
    for url in ("http://127.0.0.1:1", "grpc://127.0.0.1:1"):
        status, out, error = replay(folder, f"--against={url}")
        assert (status, out) == (1, "")
        assert error.startswith(f"pbhost replay: no answer from {url}: ")
        assert error.count("\n") == 1


@contextmanager
def record_from(
    answer: bytes, folder: Path
) -> Iterator[tuple[subprocess.Popen[str], socket.socket]]:
    """`pbhost record` at a server that has sent this answer, and the server's connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(DEADLINE)
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with (
            command("record", url, folder, "--model=scale") as process,
            server.accept()[0] as connection,
        ):
            connection.settimeout(DEADLINE)
            assert connection.recv(1 << 16).startswith(b"POST /v2/models/scale/record ")
            connection.sendall(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + answer)
            yield process, connection


def test_ctrl_c_before_the_server_has_begun_to_record_is_told(tmp_path: Path) -> None:
    with record_from(b"", tmp_path / "out") as (process, _):
        process.send_signal(signal.SIGINT)
        status, out, error = finish(process)
    assert (status, out) == (1, "")
    assert error == "pbhost record: interrupted before the recording began; nothing is recorded\n"
    assert not (tmp_path / "out").exists()


def test_a_server_that_ends_before_it_has_begun_to_record_is_told(tmp_path: Path) -> None:
    with record_from(b"", tmp_path / "out") as (process, connection):
        connection.close()
        status, out, error = finish(process)
    assert (status, out) == (1, "")
    assert error == (
        "pbhost record: the server has ended the recording early; nothing is recorded\n"
    )


def test_a_server_that_resets_the_connection_ends_a_recording(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    header = (
        b'{"kind":"recording","format":"pbhost recording 1","started":"2026-01-01T00:00:00Z"}\n'
    )
    with record_from(header, folder) as (process, connection):
        wait_until((folder / "recording.jsonl").exists, "the recording")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        status, out, error = finish(process)
    assert (status, out) == (1, "")
    assert error == (
        "pbhost record: the server has ended the recording early: [Errno 104] Connection reset by"
        " peer\n"
    )
