"""A host in a control group with little memory."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.http as httpclient

from host.system.resources import MemoryGroup
from tests import uploads
from tests.clients import infer_error, run_script, tensor
from tests.conftest import DEADLINE, RepositoryBuilder, Serve, wait_until

LIMIT = 600 << 20
ENTER = 'echo $$ > "$0/cgroup.procs" && exec "$@"'

PLUS_ONE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def respond(self, request):
        array = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array + 1)])
"""
ONE_TENSOR = """
input [{name: "INPUT0", data_type: TYPE_FP32, dims: [-1]}]
output [{name: "OUTPUT0", data_type: TYPE_FP32, dims: [-1]}]
instance_group [{count: 1, kind: KIND_CPU}]
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with a limit of memory, for processes of this test."""
    parent = MemoryGroup()._folder
    folder = parent / f"pbhost-test-{uuid.uuid4().hex}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error.strerror}")
    try:
        for name in ("memory.max", "memory.limit_in_bytes"):
            if (folder / name).exists():
                (folder / name).write_text(str(LIMIT))
                break
        else:
            pytest.skip("no control group can limit memory here")
        for name in ("memory.swap.max", "memory.memsw.limit_in_bytes"):
            with suppress(OSError):  # without swap there is no such file
                (folder / name).write_text("0" if name == "memory.swap.max" else str(LIMIT))
        yield folder
    finally:
        wait_until(lambda: removed(folder), "the group to be empty")


def http_tensor(name: str, array: npt.NDArray[np.float32]) -> httpclient.InferInput:
    return httpclient.InferInput(name, array.shape, "FP32").set_data_from_numpy(array)


def removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError:
        return False
    return True


def test_a_model_that_runs_out_of_memory_is_told_so(
    repository: RepositoryBuilder, serve: Serve, group: Path
) -> None:
    """The limit is named to the client; the server lives, and so does the other model."""
    repository.copy("script", "identity")
    under = ["sh", "-c", ENTER, str(group)]
    flag = f"--receive-buffer-byte-size={LIMIT}"  # so that the bound of the arena is reached
    host = serve(repository, flag, under=under).wait_started()
    with host.client() as client:
        before = host.stubs("identity_0")
        status, text = infer_error(
            run_script, client, "return len(b'a' * (800 << 20))", client_timeout=DEADLINE
        )
        assert status == "StatusCode.UNAVAILABLE"
        assert (
            "It was ended by SIGKILL (the memory of the control group ran out: at most" in text
        ), text
        assert "600 MiB allowed) while it ran this request." in text
        wait_until(lambda: client.is_model_ready("script"), "the model to be replaced")
        assert run_script(client, "return 1") == 1
        assert host.stubs("identity_0") == before
        array = np.zeros(LIMIT // 3 // 4, np.float32)  # more than a quarter of the limit
        text = infer_error(client.infer, "identity", [tensor("INPUT0", array)])[1]
        assert "Failed to increase the shared memory pool size" in text
        assert client.is_server_live()
    assert host.stop() == 0
    assert os.path.exists(group)


def test_large_requests_of_several_clients_do_not_run_the_server_out_of_memory(
    repository: RepositoryBuilder, serve: Serve, group: Path
) -> None:
    """Their sum exceeds the limit. One of them is served, the others are refused."""
    uploads.add_model(repository)
    host = serve(
        repository, "--grpc-engine=h2", under=["sh", "-c", ENTER, str(group)]
    ).wait_started()
    before = host.stubs()
    size = 100 << 20
    with ExitStack() as stack:
        clients = [
            stack.enter_context(upload(host, size))
            for upload in [uploads.GrpcUpload, uploads.HttpUpload] * 2
        ]
        for _ in range(11):
            for client in clients:
                client.send(10 << 20)
        statuses = [client.wait_for_status() for client in clients]
        assert sorted(statuses[::2]) in ([0, 8], [8, 8]), statuses
        assert sorted(statuses[1::2]) in ([200, 503], [503, 503]), statuses
        assert [client.refused for client in clients] == [status in (8, 503) for status in statuses]
        assert any(status in (0, 200) for status in statuses), statuses
    assert host.stubs() == before
    assert host.stop() == 0


def test_the_largest_request_fits_and_a_larger_one_is_refused(
    repository: RepositoryBuilder, serve: Serve, group: Path
) -> None:
    """No process is killed, although the model answers with a new array of the same size."""
    repository.add("plus_one", PLUS_ONE, ONE_TENSOR)
    host = serve(repository, under=["sh", "-c", ENTER, str(group)]).wait_started()
    before = host.stubs()
    too_large, fits = (np.zeros(size << 18, np.float32) for size in (200, 120))
    with host.client() as client, httpclient.InferenceServerClient(host.http_url) as http:
        for each, tensors in ((client, tensor), (http, http_tensor)):
            text = infer_error(each.infer, "plus_one", [tensors("INPUT0", too_large)])[1]
            assert "Not enough memory to receive the request" in text
        response = client.infer("plus_one", [tensor("INPUT0", fits)]).as_numpy("OUTPUT0")
        assert response[0] == response[-1] == 1
    assert host.stubs() == before
    assert host.stop() == 0


def test_the_kernel_prefers_processes_of_models_to_the_server(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    def score(pid: int) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    repository.copy("identity")
    host = serve(repository).wait_started()
    (stub,) = host.stubs()
    assert score(stub.pid) == min(score(host.process.pid) + 100, 1000)
