"""Faults during streams: full memory, and models, clients and hosts that end."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator

import numpy as np
import psutil
import pytest
from tritonclient.utils import InferenceServerException

from tests.clients import Client, InferStream, is_final, run_script, tensor
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until

NO_ROOM = re.compile(
    r"Failed to increase the shared memory pool size for key 'pbhost-stub' to \d+ bytes. Error: "
    r"\d+ bytes were requested from a tensor arena that uses \d+ of 8388608 bytes"
)


@pytest.fixture
def small(repository: RepositoryBuilder, serve: Serve) -> RunningHost:
    """A host with a limit of 8 MiB of tensors for each process."""
    repository.copy("script", "identity", "stream")
    return serve(repository, "--arena-byte-size=8388608").wait_started()


@pytest.fixture
def client(small: RunningHost) -> Iterator[Client]:
    with small.client() as client:
        yield client


def test_full_memory_during_bls_fails_one_request(
    client: Client,
) -> None:
    """Four requests wait in a model that does not respond; the fifth finds no room in memory."""
    found = run_script(
        client,
        """
        import threading

        array = np.zeros(1 << 19, dtype=np.float32)
        iterators, errors = [], []
        for _ in range(6):
            request = ask('stream', command('thread:respond cancelled'))
            iterators.append(request.exec(decoupled=True))
            response = ask('identity', pb_utils.Tensor('INPUT0', array)).exec()
            if response.has_error():
                errors.append(response.error().message())
            else:
                iterators.append(response)
        return errors
        """,
    )
    assert found
    assert all(NO_ROOM.search(text) for text in found)
    assert (
        run_script(
            client,
            """
        array = np.zeros(1 << 19, dtype=np.float32)
        response = ask('identity', pb_utils.Tensor('INPUT0', array)).exec()
        return response.has_error()
        """,
        )
        is False
    )


def test_response_without_room_in_memory_is_an_error_response(small: RunningHost) -> None:
    with InferStream(small) as stream:
        stream.send("respond=9000000 respond=1000 last")
        with pytest.raises(InferenceServerException, match="Failed to increase the shared memory"):
            stream.next()
        assert stream.next().as_numpy("DATA").shape == (1000,)
        assert is_final(stream.next())


def test_unread_responses_are_released(small: RunningHost) -> None:
    """Clients disconnect in mid-stream, with more responses in total than the memory can hold."""

    def has_response(command: str, size: int) -> bool:
        with InferStream(small) as stream:
            stream.send(command)
            try:
                answered = stream.next().as_numpy("DATA").shape == (size,)
            except InferenceServerException as error:
                assert NO_ROOM.search(str(error)), error
                return False  # the stream before is not over yet
            stream.cancel()
            return bool(answered)

    for command, size in [
        *[("thread:" + "respond=1000000 " * 8 + "last", 1_000_000)] * 5,
        ("respond=7000000 last", 7_000_000),
    ]:
        wait_until(lambda: has_response(command, size), "the memory to be given back")  # noqa: B023


def test_sending_thread_ends_with_its_host(repository: RepositoryBuilder, serve: Serve) -> None:
    repository.copy("stream")
    host = serve(repository).wait_started()
    stubs = host.stubs()
    with InferStream(host) as stream:
        stream.send("thread:many=1000000 last")
        stream.next()
        host.process.send_signal(signal.SIGKILL)
        host.process.wait(DEADLINE)
    gone, alive = psutil.wait_procs(stubs, timeout=DEADLINE)
    assert gone and not alive


LEAKY = """
import threading
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        threading.Thread(target=threading.Event().wait).start()
        return [pb_utils.InferenceResponse([r.inputs()[0]]) for r in requests]

    def finalize(self):
        print("finalized", threading.active_count() > 1)
        {ending}
"""
CONFIG = """
backend: "python"
input [ { name: "COMMAND" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "COMMAND" data_type: TYPE_STRING dims: [ 1 ] } ]
"""


@pytest.mark.parametrize(
    "ending", ["pass", "raise ValueError('at the end')", "threading.Event().wait()"]
)
def test_leaked_threads_and_failing_finalize_do_not_delay_the_exit(
    repository: RepositoryBuilder, serve: Serve, ending: str
) -> None:
    repository.add("leaky", LEAKY.replace("{ending}", ending), CONFIG)
    seconds = 5 if "wait" in ending else 600
    host = serve(repository, f"--exit-timeout-secs={seconds}").wait_started()
    stubs = host.stubs()
    with host.client() as client:
        for _ in range(3):
            array = np.array([b"x"], dtype=np.object_)
            client.infer("leaky", [tensor("COMMAND", array)])
    assert host.stop() in (0, 1)
    assert "finalized True" in host.output
    if "raise" in ending:
        assert "ValueError: at the end" in host.output
    wait_until(lambda: not any(stub.is_running() for stub in stubs), "the stub to be gone")


def test_many_clients_can_disconnect_at_once(small: RunningHost) -> None:
    def vanish(number: int) -> None:
        with InferStream(small) as stream:
            for request in range(20):
                stream.send("thread:many=200 last", request_id=f"{number}-{request}")
            stream.next()

    threads = [threading.Thread(target=vanish, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with InferStream(small) as stream:
        stream.send("many=10 last")
        assert stream.read_numbers() == list(range(11))
