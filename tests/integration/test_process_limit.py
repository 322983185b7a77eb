"""A server that may have no more processes, threads or open files."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient

from tests.clients import infer_error, tensor
from tests.conftest import RepositoryBuilder, RunningHost, Serve, wait_until
from tests.control_groups import joining, new_control_group

STARTS_A_THREAD = """
import threading
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def is_ready(self):
        return True

    def execute(self, requests):
        array = pb_utils.get_input_tensor_by_name(requests[0], "INPUT0").as_numpy()
        pb_utils.Logger.log_info(f"elements: {array.size}")
        if array.shape == (1,):
            threading.Thread(target=print).start()
        answer = [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array)]) for _ in requests]
        return self.respond_later(answer) if array.shape == (2,) else answer

    async def respond_later(self, answer):
        return answer

    def finalize(self):
        pb_utils.Logger.log_info("finalized")
        print("printed by finalize")
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A new control group that can limit processes and threads."""
    with new_control_group("pids") as folder:
        yield folder


def send_request(client: grpcclient.InferenceServerClient, model: str, count: int) -> None:
    array = np.ones(count, dtype=np.float32)
    result = client.infer(model, [tensor("INPUT0", array)])
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array)


def test_thread_that_a_model_cannot_start_is_an_error_of_its_request(
    group: Path, repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("identity")
    config = (repository.path / "identity" / "config.pbtxt").read_text()
    repository.add("threads", STARTS_A_THREAD, config)
    host = serve(repository, under=joining(group)).wait_started()
    with host.client() as client:
        before = host.stubs()
        (group / "pids.max").write_text("1")
        _, text = infer_error(send_request, client, "threads", 1)
        assert "RuntimeError: can't start new thread" in text
        for _ in range(2):  # the event loop of the coroutine needs a thread
            _, text = infer_error(send_request, client, "threads", 2)
            assert "RuntimeError: can't start new thread" in text
        send_request(client, "threads", 4)
        host.wait_for("elements: 4")
        send_request(client, "identity", 4)
        assert not client.is_model_ready("threads")  # its check needs a thread
        assert host.stubs() == before
        (group / "pids.max").write_text("max")
        send_request(client, "threads", 1)
        send_request(client, "threads", 2)
        assert client.is_model_ready("threads")


@pytest.mark.parametrize("more", range(3))
def test_load_without_more_processes_or_threads_fails_by_name(
    group: Path, repository: RepositoryBuilder, serve: Serve, more: int
) -> None:
    repository.copy("identity")
    config = (repository.path / "identity" / "config.pbtxt").read_text()
    repository.add("threads", STARTS_A_THREAD, config)
    host = serve(
        repository, "--model-control-mode=explicit", "--load-model=threads", under=joining(group)
    ).wait_started()
    with host.client() as client:
        (stub,) = host.stubs()
        limit = int((group / "pids.current").read_text()) + more
        (group / "pids.max").write_text(str(limit))
        _, text = infer_error(client.load_model, "identity")
        assert "no more processes or threads are allowed; raise the limit" in text
        assert stub.is_running()
        send_request(client, "threads", 4)
        (group / "pids.max").write_text("max")
        client.load_model("identity")
        send_request(client, "identity", 4)
    assert "failed to load 'identity'" in host.output
    assert "Logging error" not in host.output
    assert "Fatal Python error" not in host.output


@pytest.mark.parametrize("to_file", [False, True], ids=["console", "file"])
def test_server_at_the_limit_of_processes_and_threads_logs_and_stops(
    group: Path, repository: RepositoryBuilder, serve: Serve, tmp_path: Path, to_file: bool
) -> None:
    repository.copy("identity")
    log = tmp_path / "log"
    log.touch()
    flags = [f"--log-file={log}"] if to_file else []
    config = (repository.path / "identity" / "config.pbtxt").read_text()
    repository.add("threads", STARTS_A_THREAD, config)
    host = serve(
        repository,
        "--model-control-mode=explicit",
        "--load-model=threads",
        *flags,
        under=joining(group),
    )

    def printed() -> str:
        return log.read_text() if to_file else host.output

    started = r"Started GRPCInferenceService at (\S+:\d+)"
    wait_until(lambda: "Started Metrics Service" in printed(), "the server")
    found = re.search(started, printed())
    assert found is not None
    (group / "pids.max").write_text("1")
    with grpcclient.InferenceServerClient(found.group(1)) as client:
        _, text = infer_error(client.load_model, "identity")
        assert "no more processes or threads are allowed; raise the limit" in text
    assert host.stop() == 0, host.output
    assert "failed to load 'identity'" in printed()
    assert "[threads:1/threads_0] finalized" in printed()
    assert "printed by finalize" in host.output + printed()
    assert "Traceback" not in host.output + printed()


def limit_open_files(process: psutil.Process, limit: int) -> None:
    """Sets the limit of a running process; descriptors above it stay open."""
    _, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (limit, hard))


def processes(host: RunningHost) -> list[psutil.Process]:
    server = psutil.Process(host.process.pid)
    return [server, *server.children(recursive=True)]


@pytest.mark.parametrize(
    "flags", [[], ["--frontend-processes=1", "--stub-start=spawn"]], ids=["plain", "processes"]
)
def test_server_at_the_limit_of_open_files_reports_loads_that_fail_and_stops(
    repository: RepositoryBuilder, serve: Serve, flags: Sequence[str]
) -> None:
    repository.copy("identity")
    config = (repository.path / "identity" / "config.pbtxt").read_text()
    repository.add("threads", STARTS_A_THREAD, config)
    host = serve(
        repository, "--model-control-mode=explicit", "--load-model=threads", *flags
    ).wait_started()
    with host.client() as client:
        send_request(client, "threads", 4)
        server = psutil.Process(host.process.pid)
        highest = max(int(entry.name) for entry in Path(f"/proc/{server.pid}/fd").iterdir())
        texts = []
        for more in range(1, 5):
            limit_open_files(server, highest + 1 + more)
            texts.append(infer_error(client.load_model, "identity")[1])
        for process in processes(host):
            limit_open_files(process, 3)
        texts.append(infer_error(client.load_model, "identity")[1])
        send_request(client, "threads", 4)
    assert any("the host may need a higher limit of open files (ulimit -n)" in t for t in texts)
    assert texts[-1] == "failed to load 'identity', failed to poll from model repository"
    assert host.stop() == 0, host.output
    assert len(re.findall("failed to load 'identity'.*Too many open files", host.output)) == 5
    assert "[threads:1/threads_0] finalized" in host.output
    assert "Traceback" not in host.output
