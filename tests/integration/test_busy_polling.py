"""One small request after another: host and stub expect the next one, and get something else."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.clients import Client, run_command, tensor
from tests.conftest import DEADLINE, RepositoryBuilder, Serve, wait_until

COUNT = 50  # requests after which the host polls for the stubs of these models


def send_request(client: Client, model: str, number: int) -> None:
    sent = np.full(4, number, np.float32)
    answer = client.infer(model, [tensor("INPUT0", sent)], client_timeout=DEADLINE).as_numpy(
        "OUTPUT0"
    )
    assert answer is not None and answer.tolist() == sent.tolist()


@pytest.mark.parametrize("enabled", ["true", "false"])
def test_responses_match_their_requests_with_and_without_busy_polling(
    repository: RepositoryBuilder, serve: Serve, enabled: str
) -> None:
    repository.copy("identity", "misbehave")
    host = serve(repository, f"--busy-poll={enabled}").wait_started()
    with host.client() as client, httpclient.InferenceServerClient(host.http_url) as http:
        for number in range(COUNT):
            send_request(client, "identity", number)
        for number in range(COUNT):  # another model in between, by another endpoint
            send_request(client, "identity", number)
            given = httpclient.InferInput("INPUT0", [4], "FP32")
            given.set_data_from_numpy(np.full(4, -number, np.float32))
            answer = http.infer("identity", [given]).as_numpy("OUTPUT0")
            assert answer is not None and answer.tolist() == [-number] * 4
            assert run_command(client, f"echo {number}") == str(number)


def test_awaited_stub_that_dies_is_replaced(repository: RepositoryBuilder, serve: Serve) -> None:
    repository.copy("identity", "misbehave")
    host = serve(repository).wait_started()
    with host.client() as client:
        for number in range(COUNT):
            assert run_command(client, f"echo {number}") == str(number)
        pid = int(run_command(client, "pid"))
        os.kill(pid, signal.SIGSTOP)
        os.kill(pid, signal.SIGKILL)

        def back() -> bool:
            try:
                return run_command(client, "echo again", client_timeout=DEADLINE) == "again"
            except InferenceServerException:
                return False

        wait_until(back, "another stub")
        for number in range(COUNT):
            send_request(client, "identity", number)
            assert run_command(client, f"echo {number}") == str(number)


def test_stopped_stub_is_not_busy_polled(repository: RepositoryBuilder, serve: Serve) -> None:
    """Clients of other stubs are served; messages to a stopped stub wait."""
    repository.copy("identity", "misbehave")
    host = serve(repository).wait_started()
    with host.client() as client, ThreadPoolExecutor(1) as pool:
        for number in range(COUNT):
            assert run_command(client, f"echo {number}") == str(number)
        pid = int(run_command(client, "pid"))
        os.kill(pid, signal.SIGSTOP)
        try:
            waits = pool.submit(run_command, client, "echo late", client_timeout=DEADLINE)
            with host.client() as other:
                for number in range(COUNT):
                    send_request(other, "identity", number)
            assert not waits.done()
            process = psutil.Process(host.process.pid)
            wait_until(lambda: process.status() == psutil.STATUS_SLEEPING, "the host to sleep")
        finally:
            os.kill(pid, signal.SIGCONT)
        assert waits.result() == "late"
