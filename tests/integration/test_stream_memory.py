"""Shared memory is released while requests still run, and after a process has died."""

from __future__ import annotations

import os
import signal
import uuid
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import shared_memory as shm

from tests.clients import InferStream, run_command, tensor
from tests.conftest import RepositoryBuilder, RunningHost, Serve, wait_until

CONFIG = """
backend: "python"
input [ {{ name: "COMMAND" data_type: TYPE_STRING dims: [ 1 ] }} ]
output [ {{ name: "ANSWER" data_type: {} dims: [ -1 ] }} ]
"""

LARGE = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        array = np.full(1_000_000, os.getpid(), np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("ANSWER", array)])]
"""

ASKING = """
from concurrent.futures import ThreadPoolExecutor
import numpy as np
import triton_python_backend_utils as pb_utils

def question():
    command = pb_utils.Tensor("COMMAND", np.array([b""], dtype=np.object_))
    return pb_utils.InferenceRequest(model_name="large", requested_output_names=["ANSWER"],
                                     inputs=[command])

class TritonPythonModel:
    def execute(self, requests):
        text = pb_utils.get_input_tensor_by_name(requests[0], "COMMAND").as_numpy()[0].decode()
        ask = getattr(self, text)
        for number in range(40):
            answer = ask()
            if answer.has_error():
                raise ValueError(f"round {number}: {answer.error().message()}")
        array = np.array([b"done"], dtype=np.object_)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("ANSWER", array)])]

    def waits(self):
        return question().exec()

    def waits_with_a_limit(self):
        return question().exec(execution_timeout=60_000_000)

    def streams(self):
        answers = question().exec(decoupled=True)
        return [answer for answer in answers if answer.output_tensors()][0]

    def asks_from_a_thread(self):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(self.waits).result()
"""

SENDING = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        sender = requests[0].get_response_sender()
        for number in range(8):
            array = np.full(500_000, number, np.float32)
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("ANSWER", array)]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"
ARENA = 32 << 20  # limit of each process; the responses to one request have 160 MB in total


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    module_repository.add("large", LARGE, CONFIG.format("TYPE_FP32"))
    module_repository.add("asking", ASKING, CONFIG.format("TYPE_STRING"))
    module_repository.add("sending", SENDING, CONFIG.format("TYPE_FP32") + DECOUPLED)
    flags = (f"--arena-byte-size={ARENA}", "--allow-client-shm=true")
    return module_serve(module_repository, *flags).wait_started()


@pytest.mark.parametrize("way", ["waits", "waits_with_a_limit", "streams", "asks_from_a_thread"])
def test_dropped_responses_are_released_while_execute_runs(host: RunningHost, way: str) -> None:
    with host.client() as client:
        assert run_command(client, way, "asking") == "done"


def arenas(host: RunningHost) -> int:
    """Returns the number of tensor files of model processes that the server has open."""
    names: list[str] = []
    for link in Path(f"/proc/{host.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed by the server meanwhile
            names.append(os.readlink(link))
    return sum("pbhost-stub" in name for name in names)


def has_restarted(host: RunningHost, times: int) -> bool:
    return host.output.count("[large:1/large_0] restarted") == times


def test_memory_of_a_dead_process_is_released(host: RunningHost) -> None:
    with host.client() as client:
        text = [tensor("COMMAND", np.array([b""], dtype=np.object_))]
        before = arenas(host)
        for times in range(1, 4):
            pid = int(client.infer("large", text).as_numpy("ANSWER")[0])
            psutil.Process(pid).send_signal(signal.SIGKILL)
            wait_until(partial(has_restarted, host, times), "another process")
        wait_until(lambda: arenas(host) == before, "the arenas of the dead to go")


def test_stream_into_client_memory_completes(host: RunningHost) -> None:
    """Sends more bytes than may be outstanding, directly into the client's shared memory."""
    key = f"/test-{uuid.uuid4().hex}"
    handle = shm.create_shared_memory_region("streamed", key, 2_000_000)
    try:
        with host.client() as client:
            client.register_system_shared_memory("streamed", key, 2_000_000)
            output = grpcclient.InferRequestedOutput("ANSWER")
            output.set_shared_memory("streamed", 2_000_000)
            with InferStream(host) as stream:
                stream.send("", model="sending", outputs=[output])
                for _ in range(8):
                    stream.next()
            client.unregister_system_shared_memory("streamed")
    finally:
        shm.destroy_shared_memory_region(handle)
