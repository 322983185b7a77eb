"""Frontend processes: they come and go, what they may do, and what the core checks of them."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests import uploads
from tests.clients import check_binary_outputs
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until
from tests.frontends import add_hold, connect, frontends, in_flight, only, wait_complete


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gate") / "open"


@pytest.fixture(scope="module")
def host(module_serve: Serve, module_repository: RepositoryBuilder, gate: Path) -> RunningHost:
    module_repository.copy("identity")
    add_hold(module_repository, gate)
    return module_serve(module_repository, "--frontend-processes=2").wait_started()


@pytest.fixture
def clients(host: RunningHost) -> Iterator[list[grpcclient.InferenceServerClient]]:
    """One client at each process."""
    found: list[grpcclient.InferenceServerClient] = []
    for process in wait_complete(host, 2):
        with only(process, host):
            found.append(connect(host))
    yield found
    for client in found:
        client.close()


def infer(
    client: grpcclient.InferenceServerClient, model: str, values: np.ndarray, **options: object
) -> np.ndarray:
    name, output = ("IN", "OUT") if model == "hold" else ("INPUT0", "OUTPUT0")
    entry = grpcclient.InferInput(name, list(values.shape), "FP32")
    entry.set_data_from_numpy(values)
    found = client.infer(model, [entry], **options).as_numpy(output)
    assert isinstance(found, np.ndarray)
    return found


def submit(
    client: grpcclient.InferenceServerClient, values: np.ndarray
) -> tuple[threading.Thread, list[object]]:
    """Sends a request to the model that waits for the gate; its result, or its error."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(infer(client, "hold", values))
        except InferenceServerException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


def test_large_tensors_pass_unchanged_through_each_process(
    clients: list[grpcclient.InferenceServerClient],
) -> None:
    values = np.arange(1 << 19, dtype=np.float32)
    for client in clients:
        assert np.array_equal(infer(client, "identity", values), values)


def test_outputs_are_binary_as_without_frontend_processes(host: RunningHost) -> None:
    check_binary_outputs(f"http://{host.http_url}")


def test_all_processes_count_in_the_same_statistics(
    clients: list[grpcclient.InferenceServerClient],
) -> None:
    def count(client: grpcclient.InferenceServerClient) -> int:
        (shown,) = client.get_inference_statistics("identity").model_stats
        return int(shown.inference_count)

    before = count(clients[0])
    for client in clients:
        infer(client, "identity", np.zeros(3, np.float32))
    assert [count(client) for client in clients] == [before + 2, before + 2]


def test_a_model_that_one_process_unloads_is_gone_for_the_other_at_once(
    serve: Serve, repository: RepositoryBuilder
) -> None:
    repository.copy("identity")
    host = serve(
        repository,
        "--frontend-processes=2",
        "--model-control-mode=explicit",
        "--load-model=identity",
    ).wait_started()
    entry = httpclient.InferInput("INPUT0", [2], "FP32")
    entry.set_data_from_numpy(np.ones(2, np.float32))
    with host.client() as control, httpclient.InferenceServerClient(host.http_url) as client:
        for _ in range(5):
            assert client.infer("identity", [entry]).as_numpy("OUTPUT0") is not None
            control.unload_model("identity")
            with pytest.raises(InferenceServerException, match="unknown model: 'identity'"):
                client.infer("identity", [entry])
            control.load_model("identity")


def test_a_killed_process_takes_only_its_connections_with_it(
    host: RunningHost, clients: list[grpcclient.InferenceServerClient], gate: Path
) -> None:
    gate.unlink(missing_ok=True)
    values = np.arange(1 << 16, dtype=np.float32)
    victim, other = frontends(host)
    lost, lost_outcome = submit(clients[0], values)
    kept, kept_outcome = submit(clients[1], values)
    wait_until(lambda: in_flight(host) == 2, "both requests")
    victim.send_signal(signal.SIGKILL)
    lost.join()
    gate.touch()
    kept.join()
    (error,) = lost_outcome
    assert isinstance(error, InferenceServerException)
    (result,) = kept_outcome
    assert isinstance(result, np.ndarray) and np.array_equal(result, values)
    host.wait_for(r"pbhost-frontend 0 has ended: it .*SIGKILL.*; its connections are closed")
    replaced, stayed = wait_complete(host, 2)
    assert replaced.pid != victim.pid and stayed.pid == other.pid
    with host.client() as client:
        assert np.array_equal(infer(client, "identity", values), values)
    wait_until(lambda: in_flight(host) == 0, "the end of all requests")


def test_a_process_may_start_no_process_and_holds_no_file_of_the_repository(
    host: RunningHost, repository: RepositoryBuilder
) -> None:
    wait_complete(host, 2)
    assert "runs without" not in host.output
    for process in frontends(host):
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert re.search(r"^Seccomp:\t2$", status, re.MULTILINE)
        assert re.search(r"^NoNewPrivs:\t1$", status, re.MULTILINE)
        assert not [file.path for file in process.open_files() if "/repository" in file.path]


def test_frontends_end_with_a_host_that_is_killed(
    serve: Serve, repository: RepositoryBuilder, tmp_path: Path
) -> None:
    """One receives a body then, and one waits for a response. Other tests see what is left."""
    gate = tmp_path / "gate"
    add_hold(repository, gate)
    uploads.add_model(repository)
    host = serve(repository, "--frontend-processes=2", "--grpc-engine=h2").wait_started()
    first, second = wait_complete(host, 2)
    with only(first, host):
        client = connect(host)
        upload = uploads.GrpcUpload(host, 1 << 22)
    with client, upload:
        upload.send(1 << 20)
        upload.wait_read()
        waiting, outcome = submit(client, np.ones(1 << 16, np.float32))
        wait_until(lambda: in_flight(host) == 1, "the request")
        host.process.kill()
        waiting.join()
    assert isinstance(outcome[0], InferenceServerException)
    gone, alive = psutil.wait_procs([first, second], timeout=DEADLINE)
    assert not alive


def test_what_the_processes_cannot_do_is_refused(
    serve: Serve, repository: RepositoryBuilder
) -> None:
    host = serve(repository, "--frontend-processes=1", "--grpc-engine=grpcio")
    host.wait_for("in the server itself, so it cannot be used with --frontend-processes=1")
    assert host.process.wait(DEADLINE) == 1
