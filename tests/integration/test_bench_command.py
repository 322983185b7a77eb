"""`pbhost bench`: load in closed and open loop, over each protocol."""

from __future__ import annotations

import base64
import csv
import io
import json
import os
import pty
import re
import resource
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from host.cli.bench import main
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until

DOUBLE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            with open(SEEN, "a") as file:
                file.write(f"{list(x.shape)} {x.ravel()[0]} {request.parameters()}\\n")
            if x.shape[1] == 7 and x.any():
                error = pb_utils.TritonError("seven is too many")
                responses.append(pb_utils.InferenceResponse(error=error))
            else:
                out = pb_utils.Tensor("Y", 2 * x)
                responses.append(pb_utils.InferenceResponse([out]))
        return responses
"""
DOUBLE_CONFIG = """
max_batch_size: 4
input [
  { name: "X" data_type: TYPE_FP32 dims: [ -1 ] },
  { name: "Z" data_type: TYPE_STRING dims: [ 1 ] optional: true }
]
output { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }
"""
COUNT = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            count = int(pb_utils.get_input_tensor_by_name(request, "N").as_numpy()[0])
            if count < 0:
                error = pb_utils.TritonError("negative")
                sender.send(pb_utils.InferenceResponse([], error))
            for number in range(count):
                out = pb_utils.Tensor("I", np.array([number], np.int32))
                sender.send(pb_utils.InferenceResponse([out]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
COUNT_CONFIG = """
model_transaction_policy { decoupled: true }
input { name: "N" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "I" data_type: TYPE_INT32 dims: [ 1 ] }
"""
WORDS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0]
            for word in text.split():
                out = pb_utils.Tensor("text_output", np.array([word], dtype=np.object_))
                sender.send(pb_utils.InferenceResponse([out]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
WORDS_CONFIG = """
model_transaction_policy { decoupled: true }
input { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] }
parameters { key: "OPENAI_CHAT_TEMPLATE" value { string_value: "last" } }
"""
SUMS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.open = {}

    def tell(self, text):
        with open(SEEN, "a") as file:
            file.write(text)

    def execute(self, requests):
        responses = []
        for request in requests:
            read = lambda name: pb_utils.get_input_tensor_by_name(request, name).as_numpy().item()
            if read("READY") and read("START"):
                self.open[read("ID")] = 0
                self.tell("START ")
            if read("READY"):
                self.open[read("ID")] += 1  # KeyError for a sequence without a start
            if read("READY") and read("END"):
                del self.open[read("ID")]
                self.tell("END ")
            out = pb_utils.Tensor("Y", np.array([[1]], np.int32))
            responses.append(pb_utils.InferenceResponse([out]))
        return responses
"""
SUMS_CONFIG = """
max_batch_size: 4
input { name: "X" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] }
sequence_batching { max_sequence_idle_microseconds: 600000000 control_input [
  { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } },
  { name: "END" control { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } },
  { name: "READY" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } },
  { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
] }
"""
KEY = ("--header=key:secret", "--header=triton-grpc-protocol-key:secret")
SHORT = ("--window=0.1", "--warmup=0", "--stability=10")
"""Flags for three windows that need not be alike."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the model `double` was sent: a line for each request."""
    return tmp_path_factory.mktemp("seen") / "requests"


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve, seen: Path) -> RunningHost:
    module_repository.add("double", f"SEEN = {str(seen)!r}\n{DOUBLE}", DOUBLE_CONFIG)
    module_repository.add("count", COUNT, COUNT_CONFIG)
    module_repository.add("words", WORDS, WORDS_CONFIG)
    module_repository.add("sums", f"SEEN = {str(seen)!r}\n{SUMS}", SUMS_CONFIG)
    return module_serve(
        module_repository,
        "--http-restricted-api=inference:key=secret",
        "--grpc-restricted-protocol=inference:key=secret",
        "--allow-recording=true",
    ).wait_started()


def command(*arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pbhost", "bench", *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
    )  # fmt: skip


def bench(*arguments: str | Path) -> tuple[int, str, str]:
    """Runs the command in this process; returns exit status, output and errors."""
    out, error = io.TextIOWrapper(io.BytesIO()), io.StringIO()
    on_interrupt = signal.getsignal(signal.SIGINT)
    try:
        with redirect_stdout(out), redirect_stderr(error), pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
    finally:
        signal.signal(signal.SIGINT, on_interrupt)
    out.seek(0)
    status = ended.value.code
    assert isinstance(status, int)
    return status, out.read(), error.getvalue()


def levels(*arguments: str | Path) -> list[dict[str, Any]]:
    """Returns the levels of the JSON report of a successful run."""
    status, out, error = bench(*arguments, *KEY, "--format=json")
    assert (status, error) == (0, ""), out
    found: list[dict[str, Any]] = json.loads(out)["levels"]
    return found


def urls(host: RunningHost) -> list[str]:
    return [f"http://{host.http_url}", f"grpc://{host.url}"]


def test_levels_of_concurrency_are_measured_over_http_and_grpc(host: RunningHost) -> None:
    for url in urls(host):
        one, three = levels(url, "double", "--concurrency=1:3:2", *SHORT)
        assert (one["concurrency"], three["concurrency"]) == (1, 3)
        for level in (one, three):
            assert level["requests"] >= 30
            assert level["failed"] == 0
            assert level["requests_per_second"] > 0
            assert level["latency_p50_ms"] <= level["latency_p99_ms"] <= level["latency_p99.9_ms"]
            assert level["server_compute_infer_ms"] <= level["latency_mean_ms"]
            assert level["server_batch"] == 1
            assert 0 < level["client_cpu"] < 1.5
            assert level["stable"]


def test_the_table_has_a_line_for_each_level_and_csv_has_the_same_figures(
    host: RunningHost,
) -> None:
    url = f"grpc://{host.url}"
    status, out, error = bench(url, "double", "--concurrency=2", "--requests=20", *KEY)
    assert (status, error) == (0, "")
    head, titles, line = out.splitlines()[:3]
    assert head == "model 'double', gRPC, 20 requests; times in ms"
    assert re.split(" {2,}", titles.strip())[:3] == ["concurrency", "requests/s", "p50"]
    assert re.split(" {2,}", line.strip())[0] == "2"
    status, out, _ = bench(url, "double", "--rate=200,400", "--requests=20", *KEY, "--format=csv")
    rows = list(csv.DictReader(out.splitlines()))
    assert status == 0
    assert [(row["rate"], row["requests"]) for row in rows] == [("200.0", "20"), ("400.0", "20")]


def test_a_number_of_requests_is_sent_exactly(host: RunningHost, seen: Path) -> None:
    for flags in (["--concurrency=3"], ["--rate=500"], ["--rate=500", "--distribution=constant"]):
        for url in urls(host):
            seen.write_text("")
            (level,) = levels(url, "double", "--requests=25", "--warmup=0", *flags)
            assert level["requests"] == 25
            assert len(seen.read_text().splitlines()) == 25 + 1  # the first one shows that it works


def test_open_loop_counts_from_the_time_when_a_request_was_due(host: RunningHost) -> None:
    (level,) = levels(f"grpc://{host.url}", "double", "--rate=300", *SHORT)
    assert level["rate"] == 300
    assert level["lateness_p50_ms"] <= level["latency_p50_ms"]


def test_several_processes_share_a_load(host: RunningHost, seen: Path) -> None:
    cases = [(["--concurrency=3", "--processes=2"], 25), (["--rate=500", "--processes=3"], 2)]
    for flags, requests in cases:
        seen.write_text("")
        (level,) = levels(
            f"grpc://{host.url}", "double", f"--requests={requests}", "--warmup=0", *flags
        )
        assert level["requests"] == requests
        assert level["client_processes"] == 2  # not more than requests
        assert len(seen.read_text().splitlines()) == requests + 1


def test_the_time_of_a_number_of_requests_is_from_the_first_to_the_last(host: RunningHost) -> None:
    (level,) = levels(f"grpc://{host.url}", "double", "--requests=1", "--warmup=0")
    assert 1000 * level["seconds"] < 2 * level["latency_mean_ms"]


def test_levels_before_one_that_fails_are_reported(host: RunningHost) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = max(map(int, os.listdir("/proc/self/fd"))) + 60
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limits[1]))
    try:
        flags = (*KEY, "--concurrency=1,1000", "--requests=5", "--warmup=0", "--format=json")
        status, out, error = bench(f"http://{host.http_url}", "double", *flags)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert [level["requests"] for level in json.loads(out)["levels"]] == [5]
    assert status == 1
    assert f"Too many open files; a process of the client may open {soft}: raise ulimit" in error


def test_streams_have_times_of_the_first_response_and_between_responses(host: RunningHost) -> None:
    url = f"grpc://{host.url}"
    for flag in ("--concurrency=3", "--rate=200"):
        (level,) = levels(url, "count", "--input=N=[4]", flag, "--requests=12", "--warmup=0")
        assert level["requests"] == 12
        assert level["responses_per_second"] == pytest.approx(
            4 * level["requests_per_second"], rel=1e-3
        )
        assert level["first_p50_ms"] <= level["latency_p50_ms"]
        assert level["gap_p99_ms"] is not None
    (level,) = levels(url, "count", "--input=N=[0]", "--requests=3", "--warmup=0")
    assert (level["requests"], level["first_p50_ms"]) == (3, None)
    (level,) = levels(url, "double", "--streaming", "--requests=9", "--warmup=0")
    assert level["requests"] == 9
    status, _, error = bench(f"http://{host.http_url}", "count", *KEY)
    assert status == 1
    assert "decoupled" in error


def test_streams_of_v1_have_times_of_tokens(host: RunningHost) -> None:
    url = f"http://{host.http_url}"
    for api in ("chat", "completions"):
        flags = (f"--api={api}", "--requests=6", "--warmup=0", "--prompt=one two three")
        (level,) = levels(url, "words", *flags)
        assert level["requests"] == 6
        assert level["responses_per_second"] == pytest.approx(
            3 * level["requests_per_second"], rel=1e-3
        )
        (level,) = levels(url, "words", *flags, "--stream=false")
        assert (level["requests"], level["first_p50_ms"]) == (6, None)


def test_sequences_are_complete_and_in_order(host: RunningHost) -> None:
    for url in urls(host):
        flags = ("--sequence-length=4", "--concurrency=3", "--requests=30", "--warmup=0")
        (level,) = levels(url, "sums", *flags)
        assert (level["requests"], level["failed"]) == (30, 0)
        (level,) = levels(url, "sums", *flags, "--processes=2")
        assert (level["requests"], level["failed"]) == (30, 0)
    assert "--concurrency" in bench(urls(host)[0], "sums", *KEY, "--rate=10")[2]


def test_sequences_that_the_end_of_a_load_cuts_off_are_ended(host: RunningHost, seen: Path) -> None:
    url, grpc = urls(host)
    for arguments in ([url], [grpc], [grpc, "--streaming"], [grpc, "--processes=2"]):
        seen.write_text("")
        # Half of the sequences wait until others end: there are four slots.
        flags = ("--sequence-length=1000", "--concurrency=8", "--requests=30", "--warmup=0.1")
        (level,) = levels(*arguments, "sums", *flags, f"--timeout={DEADLINE}")
        assert (level["requests"], level["failed"]) == (30, 0)
        told = seen.read_text().split()
        assert told.count("START") == told.count("END") == 1 + 2 * 8, arguments


def test_inputs_have_the_shape_the_batch_and_the_values_that_were_asked_for(
    host: RunningHost, seen: Path, tmp_path: Path
) -> None:
    once = ("--requests=2", "--warmup=0")
    sent = {
        ("--shape=X:5", "--batch-size=3"): "[3, 5] ",
        ("--shape=X:2", "--zero-input"): "[1, 2] 0.0 ",
        ("--input=X=[8, 9]", "--parameter=color=red"): '[1, 2] 8.0 {"color":"red"}',
    }
    for flags, line in sent.items():
        for url in urls(host):
            seen.write_text("")
            levels(url, "double", *once, *flags)
            assert all(found.startswith(line) for found in seen.read_text().splitlines())
    raw = base64.b64encode(np.array([6, 7], np.float32).tobytes()).decode()
    steps = [
        {"X": [4.0, 5.0]},
        {"X": {"content": [5, 5], "shape": [2]}},
        [{"X": {"content": {"b64": raw}, "shape": [2]}}],
    ]
    (tmp_path / "data.json").write_text(json.dumps({"data": steps}))
    seen.write_text("")
    levels(
        urls(host)[1], "double", "--requests=6", "--warmup=0", f"--input-data={tmp_path}/data.json"
    )
    values = [line.split("] ")[1].split()[0] for line in seen.read_text().splitlines()[1:]]
    assert values == ["4.0", "5.0", "6.0"] * 2
    (tmp_path / "X").write_bytes(np.array([3.0], np.float32).tobytes())
    seen.write_text("")
    levels(urls(host)[0], "double", *once, f"--input-data={tmp_path}")
    assert seen.read_text().startswith("[1, 1] 3.0")


def test_tensors_of_megabytes_are_sent_and_received(host: RunningHost) -> None:
    url, grpc = urls(host)
    for arguments in ([url], [grpc], [grpc, "--streaming"], [grpc, "--processes=2"]):
        flags = ("--shape=X:1000000", "--concurrency=2", "--requests=5", "--warmup=0")
        (level,) = levels(*arguments, "double", *flags)
        assert (level["requests"], level["failed"]) == (5, 0)


def test_a_terminal_shows_a_line_while_it_measures(host: RunningHost) -> None:
    terminal, theirs = pty.openpty()
    arguments = [f"grpc://{host.url}", "double", *KEY, "--requests=5", "--warmup=0.1"]
    with open(terminal, "rb", buffering=0) as shown:
        process = subprocess.Popen(
            [sys.executable, "-m", "pbhost", "bench", *arguments],
            stdout=subprocess.DEVNULL, stderr=theirs, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs)
        try:
            text = b""
            while b"5 requests: " not in text:
                text += shown.read(4096)
            assert process.wait(DEADLINE) == 0
        finally:
            process.kill()
    assert b"\r\x1b[Kconcurrency 1, warm-up: " in text


def test_the_requests_of_a_recording_are_sent_in_turn(
    host: RunningHost, seen: Path, tmp_path: Path
) -> None:
    url = f"http://{host.http_url}"
    folder = tmp_path / "recorded"
    recorder = subprocess.Popen(
        [sys.executable, "-m", "pbhost", "record", url, folder, "--model=double",
         "--max-requests=3", "--seconds=600"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    wait_until(lambda: (folder / "recording.jsonl").exists(), "the recording")
    levels(url, "double", "--input=X=[1, 2, 3]", "--requests=2", "--warmup=0")
    recorder.communicate(timeout=DEADLINE)
    for each in urls(host):
        seen.write_text("")
        levels(each, "double", f"--recording={folder}", "--requests=3", "--warmup=0")
        assert all(line.startswith("[1, 3] 1.0") for line in seen.read_text().splitlines())
    status, _, error = bench(url, "count", *KEY, f"--recording={folder}")
    assert status == 1
    status, _, error = bench(f"grpc://{host.url}", "sums", *KEY, f"--recording={folder}")
    assert (status, error) == (
        1, f"pbhost bench: the recording in '{folder}' has no request to model 'sums'\n",
    )  # fmt: skip


def test_failures_are_counted_by_their_status(host: RunningHost, tmp_path: Path) -> None:
    steps = [{"X": [1.0]}, {"X": [7.0] * 7}]
    (tmp_path / "data.json").write_text(json.dumps({"data": steps}))
    flags = (*KEY, f"--input-data={tmp_path}/data.json", "--requests=10", "--warmup=0")
    for url, reason in zip(urls(host), ("HTTP 500 Internal Server Error", "INTERNAL"), strict=True):
        status, out, error = bench(url, "double", *flags, "--format=json")
        assert (status, error) == (1, "")
        (level,) = json.loads(out)["levels"]
        assert (level["requests"], level["failed"]) == (5, 5)
        assert level["failures"] == {reason: {"count": 5, "message": "seven is too many"}}
        _, out, _ = bench(url, "double", *flags)
        assert f"concurrency 1: 5 failed with {reason}: seven is too many" in out
    steps = [{"N": [1]}, {"N": [-1]}]
    (tmp_path / "data.json").write_text(json.dumps({"data": steps}))
    _, out, _ = bench(f"grpc://{host.url}", "count", *flags)
    assert "concurrency 1: 5 failed with stream error: negative" in out


def test_what_cannot_be_measured_is_told_in_a_line(host: RunningHost, tmp_path: Path) -> None:
    url, grpc = urls(host)
    (tmp_path / "bad.json").write_text('{"data": [{"X": [[1, 2]], "W": [1]}]}')
    cases: list[tuple[list[str], int, str]] = [
        (["http://127.0.0.1:1", "double"], 1, "no answer from http://127.0.0.1:1"),
        (["grpc://127.0.0.1:1", "double"], 1, "no answer from grpc://127.0.0.1:1"),
        ([grpc, "caf\udce9"], 2, "expected UTF-8, got 'caf\\udce9'"),
        ([url, "caf\udce9"], 2, "expected UTF-8, got 'caf\\udce9'"),
        ([grpc.replace("grpc", "http"), "double"], 1, "its answer is not one of HTTP/1.1; is it"),
        ([host.http_url, "double"], 2, "expected http://HOST:PORT or grpc://HOST:PORT"),
        ([url, "nothing"], 1, "Request for unknown model: 'nothing' is not found"),
        ([grpc, "nothing"], 1, "Request for unknown model: 'nothing' is not found"),
        ([url, "double", "--header=key:wrong"], 1, "This API is restricted"),
        ([grpc, "double", "--header=key:wrong"], 1, "This protocol is restricted"),
        ([url, "double", "--shape=X:1,2"], 2, "expected dimensions [-1] for input 'X'"),
        ([url, "double", "--shape=W:1"], 2, "the model has no input 'W'; its inputs are X, Z"),
        ([url, "double", "--batch-size=9"], 2, "expected at most max_batch_size 4, got 9"),
        ([url, "double", "--shape=X:7"], 1, "seven is too many"),
        ([url, "double", f"--input-data={tmp_path}/bad.json"], 2, "has no input 'W'"),
        ([url, "double", f"--input-data={tmp_path}/no.json"], 1, "cannot be read"),
        (
            [url, "nothing", "--api=chat"],
            1,
            "/v1/chat/completions: there is no model 'nothing' here",
        ),
        ([grpc, "words", "--api=chat"], 1, "--api needs the address of the HTTP port"),
        ([url, "double", "--rate=1", "--concurrency=1"], 2, "either --concurrency or --rate"),
        ([url, "double", "--input-data=x", "--zero-input"], 2, "--zero-input has no effect with"),
        ([url, "double", "--recording=x", "--batch-size=2"], 2, "--batch-size has no effect with"),
        ([url, "words", "--api=chat", "--streaming"], 2, "--streaming has no effect with --api"),
        ([url, "double", "--max-tokens=3"], 2, "--max-tokens needs --api"),
        ([url, "double", "--seed=3"], 2, "--seed needs --rate"),
        ([url, "double", "--requests=3", "--window=1"], 2, "--window has no effect with"),
        ([url, "double", "--sequence-length=9"], 2, "'double' has no sequence batcher"),
        ([grpc, "count", "--batch-size=2"], 2, "--batch-size: the server shows no max_batch_size"),
    ]
    for arguments, expected, text in cases:
        key = [] if any(one.startswith("--header") for one in arguments) else KEY
        status, out, error = bench(*arguments, *key)
        assert (status, out) == (expected, ""), error
        assert error.startswith("pbhost bench: ")
        assert text in error
        assert error.count("\n") == 1
    for flag in (
        "--concurrency=0",
        "--rate=1:1e308:1e-10",
        "--rate=1:2:0",
        "--shape=X",
        "--windows=0",
    ):
        assert bench(url, "double", flag)[0] == 2


def test_ctrl_c_prints_what_was_measured(host: RunningHost, seen: Path) -> None:
    seen.write_text("")
    process = command(f"grpc://{host.url}", "double", *KEY, "--warmup=0", "--window=600")
    try:
        wait_until(lambda: len(seen.read_text().splitlines()) > 20, "requests")
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
    assert (process.returncode, error) == (1, "")
    assert "concurrency 1: interrupted after " in out
    assert float(re.split(" {2,}", out.splitlines()[2].strip())[1]) > 0


def test_ctrl_c_in_the_warm_up_is_told_in_a_line(host: RunningHost, seen: Path) -> None:
    seen.write_text("")
    process = command(f"grpc://{host.url}", "double", *KEY, "--warmup=600")
    try:
        wait_until(lambda: len(seen.read_text().splitlines()) > 20, "requests")
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
    assert (process.returncode, out) == (1, "")
    assert error == "pbhost bench: interrupted before anything was measured\n"


@pytest.mark.test_all(reason="loads a server for seconds, twice")
def test_a_load_survives_that_connections_end_and_not_that_the_server_stops(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    seen.write_text("")
    repository.add("double", f"SEEN = {str(seen)!r}\n{DOUBLE}", DOUBLE_CONFIG)
    repository.add("count", COUNT, COUNT_CONFIG)
    age = ("--grpc-max-connection-age=50", "--grpc-max-connection-age-grace=1500")
    host = serve(repository, *age).wait_started()
    flags = ("--input=N=[1]", "--concurrency=2", "--window=0.7", "--warmup=0", "--stability=10")
    (level,) = levels(urls(host)[1], "count", *flags)
    assert level["failed"] == 0
    processes = [command(url, "double", "--warmup=0", "--window=600") for url in urls(host)]
    try:
        wait_until(lambda: len(seen.read_text().splitlines()) > 50, "requests")
        host.stop()
        for process in processes:
            out, error = process.communicate(timeout=DEADLINE)
            assert process.returncode == 1
            assert error.startswith("pbhost bench: no answer from "), out
    finally:
        for process in processes:
            process.kill()
