"""A server that may have no more processes or threads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from tests.clients import infer_error, tensor
from tests.conftest import RepositoryBuilder, Serve, wait_until
from tests.control_groups import joining, new_control_group

STARTS_A_THREAD = """
import threading
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def is_ready(self):
        return True

    def execute(self, requests):
        array = pb_utils.get_input_tensor_by_name(requests[0], "INPUT0").as_numpy()
        if array.shape == (1,):
            threading.Thread(target=print).start()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array)]) for _ in requests]
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
        send_request(client, "threads", 4)
        send_request(client, "identity", 4)
        assert not client.is_model_ready("threads")  # its check needs a thread
        assert host.stubs() == before
        (group / "pids.max").write_text("max")
        send_request(client, "threads", 1)
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
    assert "Traceback" not in host.output + printed()
