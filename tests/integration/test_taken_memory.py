"""Clients that make their shared memory smaller, or change it, when the host has yet to look at it.

A process that touches memory which is gone is ended by SIGBUS. The host must not be that process.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import posix_ipc
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from tests.clients import Client, infer_error, tensor
from tests.conftest import RepositoryBuilder, RunningHost, Serve, wait_until
from tests.integration.ensemble_models import CHAIN
from tests.integration.test_client_memory import (
    CONFIG,
    MODEL,
    SIZE,
    Memory,
    input_in_region,
    output_in_region,
)

COUNT = 10_000
ARRAY = np.arange(COUNT, dtype=np.float32)

ASKS_LATER = """
import threading
from pathlib import Path
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        pb_utils.Logger.log_info(f"the model has {{requests[0].request_id()}}")
        for _ in range(12_000):  # two minutes
            if Path("{go}").exists():
                break
            threading.Event().wait(0.01)
        return [
            pb_utils.InferenceRequest(
                model_name="cached",
                inputs=request.inputs(),
                requested_output_names=["OUTPUT0"],
                trace=request.trace(),
            ).exec()
            for request in requests
        ]
"""
ADDS_UP = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        given, state = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy()
            for name in ("INPUT0", "STATE_IN")
        )
        total = given + state
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUTPUT0", total), pb_utils.Tensor("STATE_OUT", total)]
        )
"""
ADDS_UP_CONFIG = f"""
backend: "python"
input [ {{ name: "INPUT0", data_type: TYPE_FP32, dims: [ {COUNT} ] }} ]
output [
  {{ name: "OUTPUT0", data_type: TYPE_FP32, dims: [ {COUNT} ] }},
  {{ name: "STATE_OUT", data_type: TYPE_FP32, dims: [ {COUNT} ] }}
]
sequence_batching {{
  state [ {{ input_name: "STATE_IN", output_name: "STATE_OUT", data_type: TYPE_FP32,
    dims: [ {COUNT} ] }} ]
}}
"""

PAIRS = """
max_batch_size: 2
dynamic_batching { preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 600000000 }
"""


@pytest.fixture(scope="module")
def go(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Once it is there, `asks_later` continues."""
    return tmp_path_factory.mktemp("signals") / "go"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def host(
    module_repository: RepositoryBuilder, module_serve: Serve, go: Path, folder: Path
) -> Iterator[RunningHost]:
    plain = CONFIG.format("TYPE_FP32")
    module_repository.copy("identity")
    module_repository.add("strings", MODEL, CONFIG.format("TYPE_STRING"))
    module_repository.add("asks_later", ASKS_LATER.format(go=go), plain)
    module_repository.add("cached", MODEL, plain + "response_cache { enable: true }")
    module_repository.add("chain", config=CHAIN)
    module_repository.add("adds_up", ADDS_UP, ADDS_UP_CONFIG)
    module_repository.add("pairs", MODEL, plain + PAIRS)
    host = module_serve(
        module_repository,
        "--allow-client-shm=true",
        "--cache-config=local,size=1048576",
        f"--trace-config=triton,file={folder}/traces",
    ).wait_started()
    yield host
    assert host.stop() == 0  # no request is left
    assert "Traceback" not in host.output, host.output


@pytest.fixture
def client(host: RunningHost) -> Iterator[Client]:
    with host.client() as client:
        yield client
        client.unregister_system_shared_memory()
        wait_until(
            lambda: not client.get_system_shared_memory_status().regions,
            "all regions to be unregistered",
        )


class TakenMemory(Memory):
    """Its client can make it smaller, and as large as it was."""

    def cut(self, size: int = 0) -> None:
        file = posix_ipc.SharedMemory(self.key).fd
        os.ftruncate(file, size)
        os.close(file)


@pytest.fixture
def memory(client: Client) -> Iterator[TakenMemory]:
    memory = TakenMemory(client)
    memory.write(ARRAY)
    yield memory
    memory.close()


@pytest.fixture
def traced(client: Client) -> Iterator[None]:
    """Requests are traced, with their tensors."""
    client.update_trace_settings(settings={"trace_level": ["TENSORS"], "trace_rate": "1"})
    yield
    client.update_trace_settings(settings={"trace_level": None, "trace_rate": None})


def input_of(memory: Memory, offset: int = 0) -> grpcclient.InferInput:
    return input_in_region(memory, [COUNT], "FP32", ARRAY.nbytes, offset)


def gone(memory: Memory, size: int = ARRAY.nbytes, offset: int = 0, left: int = 0) -> str:
    return (
        f"shared memory region '{memory.name}' has become too small: it has {left} of the"
        f" {size} bytes at offset {offset} that a tensor needs. Make it as large as it was when"
        " it was registered, or register it again"
    )


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("model", ["identity", "chain"])
def test_an_input_that_is_gone_when_it_is_traced_is_an_error(
    client: Client, memory: TakenMemory, model: str
) -> None:
    memory.cut()
    expected = "StatusCode.INTERNAL", gone(memory)
    assert infer_error(client.infer, model, [input_of(memory)]) == expected
    memory.cut(SIZE)
    memory.write(ARRAY)
    answer = client.infer(model, [input_of(memory)]).as_numpy("OUTPUT0")
    np.testing.assert_array_equal(answer, ARRAY)


@pytest.mark.usefixtures("traced")
def test_an_input_that_is_traced_is_shown_as_it_was(
    client: Client, memory: TakenMemory, folder: Path
) -> None:
    given = input_in_region(memory, [3], "FP32", 12, 8)
    client.infer("identity", [given])
    client.update_trace_settings(settings={"trace_level": ["OFF"]})  # has the file written
    wait_until(
        lambda: any('"data":"2,3,4"' in path.read_text() for path in folder.iterdir()), "the trace"
    )


def test_an_input_whose_content_counts_is_an_error_when_it_is_gone(
    client: Client, memory: TakenMemory
) -> None:
    memory.cut(4096)
    expected = "StatusCode.INTERNAL", gone(memory, offset=4000, left=96)
    assert infer_error(client.infer, "cached", [input_of(memory, 4000)]) == expected


@pytest.mark.parametrize("kind", [grpcclient, httpclient], ids=["grpc", "http"])
def test_strings_that_are_gone_are_an_error(
    host: RunningHost, memory: TakenMemory, kind: Any
) -> None:
    url = host.url if kind is grpcclient else host.http_url
    with kind.InferenceServerClient(url) as client:
        given = kind.InferInput("INPUT0", [2], "BYTES")
        given.set_shared_memory(memory.name, 8)
        memory.write(np.zeros(2, np.uint32))
        answer = client.infer("strings", [given]).as_numpy("OUTPUT0")
        np.testing.assert_array_equal(answer, np.array([b"", b""], np.object_))
        memory.cut()
        status, text = infer_error(client.infer, "strings", [given])
        assert status in ("StatusCode.INTERNAL", "500")
        assert text == gone(memory, 8)


def later(host: RunningHost, client: Client, memory: TakenMemory, go: Path) -> Any:
    """The result of a request whose input is gone when the model sends a BLS request."""
    request_id = uuid.uuid4().hex
    with ThreadPoolExecutor(1) as pool:
        options = {"request_id": request_id}
        asked = pool.submit(client.infer, "asks_later", [input_of(memory)], **options)
        try:
            host.wait_for(f"the model has {request_id}")
            memory.cut()
        finally:
            go.touch()
        try:
            return asked.result()
        finally:
            go.unlink()


def test_an_input_that_goes_before_a_bls_request_is_an_error_of_the_caller(
    host: RunningHost, client: Client, memory: TakenMemory, go: Path
) -> None:
    status, text = infer_error(later, host, client, memory, go)
    assert status == "StatusCode.INTERNAL"
    assert text.endswith(gone(memory))


@pytest.mark.usefixtures("traced")
def test_the_traced_value_is_the_value_passed_on(
    host: RunningHost, client: Client, memory: TakenMemory, go: Path
) -> None:
    answer = later(host, client, memory, go).as_numpy("OUTPUT0")
    np.testing.assert_array_equal(answer, ARRAY)


def test_a_client_that_shrinks_its_memory_fails_only_its_request_of_a_batch(
    client: Client, memory: TakenMemory
) -> None:
    memory.cut()
    taken = input_in_region(memory, [1, COUNT], "FP32", ARRAY.nbytes)
    sent = tensor("INPUT0", ARRAY.reshape(1, COUNT))
    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(infer_error, client.infer, "pairs", [taken])
        answer = client.infer("pairs", [sent]).as_numpy("OUTPUT0")
        status, text = refused.result()
    np.testing.assert_array_equal(answer, [ARRAY])
    assert status == "StatusCode.INTERNAL"
    assert "the shared memory in which tensor 'INPUT0' lay is gone" in text


def test_a_model_reads_memory_that_is_back(client: Client, memory: TakenMemory) -> None:
    memory.cut()
    status, text = infer_error(client.infer, "identity", [input_of(memory)])
    assert status == "StatusCode.INTERNAL"
    assert "the shared memory in which tensor 'INPUT0' lay is gone" in text
    memory.cut(SIZE)
    memory.write(ARRAY)
    answer = client.infer("identity", [input_of(memory)]).as_numpy("OUTPUT0")
    np.testing.assert_array_equal(answer, ARRAY)


@pytest.mark.parametrize("count", [4, COUNT])
def test_an_output_goes_to_memory_that_was_too_small_for_it(
    client: Client, memory: TakenMemory, count: int
) -> None:
    """The model cannot write there, but the host can: the memory grows."""
    memory.cut()
    given, room = tensor("INPUT0", ARRAY[:count]), output_in_region(memory, SIZE // 2, 8192)
    client.infer("identity", [given], outputs=[room])
    np.testing.assert_array_equal(memory.read(np.float32, [count], 8192), ARRAY[:count])


@pytest.mark.parametrize("output", ["OUTPUT0", "STATE_OUT"])
def test_a_state_is_out_of_reach_of_the_client_that_wants_it_as_an_output(
    client: Client, memory: TakenMemory, output: str
) -> None:
    given = tensor("INPUT0", ARRAY)
    wanted = grpcclient.InferRequestedOutput(output)
    wanted.set_shared_memory(memory.name, ARRAY.nbytes)
    client.infer("adds_up", [given], outputs=[wanted], sequence_id=1, sequence_start=True)
    np.testing.assert_array_equal(memory.read(np.float32, [COUNT]), ARRAY)
    memory.write(ARRAY * 100)
    client.infer("adds_up", [given], outputs=[wanted], sequence_id=1)
    np.testing.assert_array_equal(memory.read(np.float32, [COUNT]), 2 * ARRAY)
    memory.cut()
    answer = client.infer("adds_up", [given], sequence_id=1, sequence_end=True)
    np.testing.assert_array_equal(answer.as_numpy(output), 3 * ARRAY)
