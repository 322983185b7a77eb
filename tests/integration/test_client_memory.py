"""System shared memory of clients: tensors that are not sent, but lie where both can reach them."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import posix_ipc
import pytest
import requests
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import serialize_byte_tensor
from tritonclient.utils import shared_memory as shm

from tests.clients import Client, infer_error, tensor
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until

SIZE = 1 << 20
MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", r.inputs()[0].as_numpy())])
                for r in requests]
"""
CONFIG = """
backend: "python"
input [ {{ name: "INPUT0" data_type: {0} dims: [ -1 ] }} ]
output [ {{ name: "OUTPUT0" data_type: {0} dims: [ -1 ] }} ]
"""


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    module_repository.copy("script", "identity", "ask")
    module_repository.add("strings", MODEL, CONFIG.format("TYPE_STRING"))
    module_repository.add("bytes", MODEL, CONFIG.format("TYPE_UINT8"))
    return module_serve(module_repository, "--allow-client-shm=true").wait_started()


@pytest.fixture
def client(host: RunningHost) -> Iterator[Client]:
    with host.client() as client:
        yield client
        client.unregister_system_shared_memory()


class Memory:
    """A client's shared memory object, registered as `name`."""

    def __init__(self, client: Client, byte_size: int = SIZE, registered: bool = True) -> None:
        self.name = f"region-{uuid.uuid4().hex}"
        self.key = f"/test-{uuid.uuid4().hex}"
        self.size = byte_size
        self.handle = shm.create_shared_memory_region(self.name, self.key, byte_size)
        if registered:
            client.register_system_shared_memory(self.name, self.key, byte_size)

    def write(self, array: npt.NDArray[Any], offset: int = 0) -> None:
        shm.set_shared_memory_region(self.handle, [array], offset)

    def read(self, datatype: Any, shape: list[int], offset: int = 0) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = shm.get_contents_as_numpy(self.handle, datatype, shape, offset)
        return found

    def close(self) -> None:
        shm.destroy_shared_memory_region(self.handle)


@pytest.fixture
def memory(client: Client) -> Iterator[Memory]:
    memory = Memory(client)
    yield memory
    memory.close()


def input_in_region(
    memory: Memory, shape: list[int], datatype: str, byte_size: int, offset: int = 0
) -> grpcclient.InferInput:
    given = grpcclient.InferInput("INPUT0", shape, datatype)
    given.set_shared_memory(memory.name, byte_size, offset)
    return given


def output_in_region(
    memory: Memory, byte_size: int, offset: int = 0
) -> grpcclient.InferRequestedOutput:
    wanted = grpcclient.InferRequestedOutput("OUTPUT0")
    wanted.set_shared_memory(memory.name, byte_size, offset)
    return wanted


@pytest.mark.parametrize("count", [1, 100, 10_000, 100_000])
@pytest.mark.parametrize("model", ["identity", "bytes"])
def test_tensors_are_read_and_written_in_place(
    client: Client, memory: Memory, count: int, model: str
) -> None:
    kind, datatype = (np.float32, "FP32") if model == "identity" else (np.uint8, "UINT8")
    array = (np.arange(count) % 251).astype(kind)
    half = SIZE // 2
    memory.write(array)
    result = client.infer(
        model,
        [input_in_region(memory, [count], datatype, array.nbytes)],
        outputs=[output_in_region(memory, half, half)],
    )
    output = result.get_output("OUTPUT0")
    assert (list(output.shape), output.datatype) == ([count], datatype)
    assert result.get_response().raw_output_contents == [b""]
    np.testing.assert_array_equal(memory.read(kind, [count], half), array)


LARGE = [
    (
        1 << 42,
        (
            "tensor 'INPUT0' has 4398046511104 bytes in shared memory, which have to be copied,"
            " and there is not enough memory for that"
        ),
    ),
    (
        1 << 30,
        (
            "unexpected number of string elements 3 for inference input 'INPUT0' for model"
            " 'strings', expecting 2"
        ),
    ),
]


@pytest.mark.parametrize("endpoint", ["grpc", "http"])
@pytest.mark.parametrize(("size", "complaint"), LARGE, ids=["4 TiB", "1 GiB"])
def test_error_in_too_many_strings_is_reported(
    host: RunningHost, client: Client, endpoint: str, size: int, complaint: str
) -> None:
    key = f"/test-{uuid.uuid4().hex}"
    memory = posix_ipc.SharedMemory(key, posix_ipc.O_CREX, size=size)  # takes none: all zeros
    try:
        client.register_system_shared_memory(key, key, size)
        library: Any = grpcclient if endpoint == "grpc" else httpclient
        url = host.url if endpoint == "grpc" else host.http_url
        with library.InferenceServerClient(url) as asker:
            wanted = library.InferInput("INPUT0", [2], "BYTES")
            wanted.set_shared_memory(key, size)
            status, text = infer_error(asker.infer, "strings", [wanted])
        assert status == ("StatusCode.INVALID_ARGUMENT" if endpoint == "grpc" else "400")
        assert text.endswith(complaint)
    finally:
        memory.close_fd()
        memory.unlink()


def test_strings_travel_in_shared_memory_too(client: Client, memory: Memory) -> None:
    array = np.array([b"one", b"", b"drei", b"\x00" * 5000], dtype=np.object_)
    data = serialize_byte_tensor(array)
    size = data.item().__len__()
    memory.write(np.frombuffer(data.item(), dtype=np.uint8))
    client.infer(
        "strings",
        [input_in_region(memory, [4], "BYTES", size)],
        outputs=[output_in_region(memory, 10_000, 100_000)],
    )
    np.testing.assert_array_equal(memory.read(np.object_, [4], 100_000), array)


def test_an_input_in_memory_may_have_its_output_in_the_message(
    client: Client, memory: Memory
) -> None:
    array = np.arange(50_000, dtype=np.float32)
    memory.write(array, 4096)
    result = client.infer(
        "identity", [input_in_region(memory, [50_000], "FP32", array.nbytes, 4096)]
    )
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array)


def test_passed_on_tensor_is_not_copied(client: Client, memory: Memory) -> None:
    """Over BLS, by reference, and back into the same region."""
    array = np.arange(100_000, dtype=np.float32)
    memory.write(array)
    given = input_in_region(memory, [100_000], "FP32", array.nbytes)
    named = np.array([b"identity"], dtype=np.object_)
    half = SIZE // 2
    client.infer(
        "ask", [tensor("MODEL", named), given], outputs=[output_in_region(memory, half, half)]
    )
    np.testing.assert_array_equal(memory.read(np.float32, [100_000], half), array)


def test_requests_may_share_an_offset_with_different_sizes(client: Client, memory: Memory) -> None:
    array = np.arange(SIZE // 8, dtype=np.float32)
    memory.write(array)

    def send_request(count: int) -> None:
        given = input_in_region(memory, [count], "FP32", count * 4)
        result = client.infer("identity", [given])
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array[:count])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(send_request, (100_000, 10, 3000, 99_999) * 5))


@pytest.mark.parametrize("count", [100, 50_000])
def test_output_too_large_for_its_region_fails_only_its_request(
    client: Client, memory: Memory, count: int
) -> None:
    array = np.zeros(count, dtype=np.float32)
    memory.write(array)
    given = input_in_region(memory, [count], "FP32", array.nbytes)
    assert infer_error(
        client.infer, "identity", [given], outputs=[output_in_region(memory, 16, 0)]
    ) == (
        "StatusCode.INTERNAL",
        (
            "shared memory size specified with the request for output 'OUTPUT0' (16 bytes) should"
            f" be at least {array.nbytes} bytes to hold the results"
        ),
    )
    client.infer("identity", [given], outputs=[output_in_region(memory, array.nbytes, 0)])


def test_offset_and_size_of_a_tensor_are_checked(
    host: RunningHost, client: Client, memory: Memory
) -> None:
    def send_request(byte_size: int, offset: int) -> tuple[str, str]:
        given = input_in_region(memory, [4], "FP32", byte_size, offset)
        return infer_error(client.infer, "identity", [given])

    name = memory.name
    assert send_request(16, SIZE) == (
        "StatusCode.INVALID_ARGUMENT",
        f"Invalid offset for shared memory region: '{name}'",
    )
    assert (
        send_request(16, SIZE - 8)[1]
        == f"Invalid offset + byte size for shared memory region: '{name}'"
    )
    outside = f"Invalid offset for shared memory region: '{name}'"
    assert send_request(16, -16)[1] == outside
    assert (
        send_request(-16, 0)[1] == f"Invalid offset + byte size for shared memory region: '{name}'"
    )
    assert send_request(-16, 16)[1] == (
        "Integer overflow detected: byte_size (18446744073709551600) + offset (16) exceeds maximum"
        f" value (18446744073709551615) for region '{name}'"
    )
    with httpclient.InferenceServerClient(host.http_url) as http:
        given = httpclient.InferInput("INPUT0", [4], "FP32").set_shared_memory(name, 16, 2**64 - 32)
        assert infer_error(http.infer, "identity", [given]) == ("400", outside)
    assert "Expected 16, got 8" in send_request(8, 0)[1]
    given = grpcclient.InferInput("INPUT0", [4], "FP32")
    given.set_shared_memory("unheard-of", 16)
    assert infer_error(client.infer, "identity", [given]) == (
        "StatusCode.NOT_FOUND",
        "Unable to find shared memory region: 'unheard-of'",
    )


# Registration


def gone(client: Client, memory: Memory) -> None:
    """Checks that a region that was never used is not mapped."""
    assert memory.name not in client.get_system_shared_memory_status().regions


def test_regions_are_listed_and_unregistered(client: Client) -> None:
    first, second = Memory(client), Memory(client, 2 * SIZE)
    try:
        regions = client.get_system_shared_memory_status(as_json=True)["regions"]
        assert regions[second.name] == {
            "name": second.name,
            "key": second.key,
            "byte_size": str(2 * SIZE),
        }
        one = client.get_system_shared_memory_status(first.name).regions
        assert list(one) == [first.name]
        client.unregister_system_shared_memory(first.name)
        client.unregister_system_shared_memory(first.name)
        gone(client, first)
        assert second.name in client.get_system_shared_memory_status().regions
        client.unregister_system_shared_memory()
        gone(client, second)
        assert infer_error(client.get_system_shared_memory_status, first.name) == (
            "StatusCode.NOT_FOUND",
            f"Unable to find system shared memory region: '{first.name}'",
        )
    finally:
        first.close()
        second.close()


def test_regions_are_listed_by_their_names(client: Client, host: RunningHost) -> None:
    memory = Memory(client, registered=False)
    names = [f"{letter}-{memory.name}" for letter in "bca"]
    try:
        for name in names:
            client.register_system_shared_memory(name, memory.key, SIZE)
        with httpclient.InferenceServerClient(host.http_url) as http:
            listed = [region["name"] for region in http.get_system_shared_memory_status()]
        assert [name for name in listed if name in names] == sorted(names)
    finally:
        for name in names:
            client.unregister_system_shared_memory(name)
        memory.close()


def test_a_registration_may_start_inside_the_object(client: Client) -> None:
    memory = Memory(client, registered=False)
    try:
        client.register_system_shared_memory(memory.name, memory.key, 8192, 4096)
        array = np.arange(500, dtype=np.float32)
        memory.write(array, 4096 + 100)
        result = client.infer("identity", [input_in_region(memory, [500], "FP32", 2000, 100)])
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array)
    finally:
        memory.close()


def test_invalid_registration_is_refused(client: Client, memory: Memory) -> None:
    register = client.register_system_shared_memory
    assert infer_error(register, memory.name, memory.key, SIZE) == (
        "StatusCode.ALREADY_EXISTS",
        f"shared memory region '{memory.name}' already in manager",
    )
    assert infer_error(register, "r", "//", SIZE) == (
        "StatusCode.INVALID_ARGUMENT",
        "cannot register shared memory region 'r' - invalid shm key '//'",
    )
    reserved = "/triton_python_backend_shm_region_1"
    assert infer_error(register, "r", reserved, SIZE)[1] == (
        f"cannot register shared memory region 'r' with key '{reserved}' as the key contains the"
        " reserved prefix 'triton_python_backend_shm_region_'"
    )
    assert infer_error(register, "r", "/no-such-object", SIZE) == (
        "StatusCode.INTERNAL",
        "Unable to open shared memory region: '/no-such-object'",
    )
    for key in ("/../../etc/passwd", "/a/b", "/" + "x" * 300):
        assert infer_error(register, "r", key, SIZE) == (
            "StatusCode.INTERNAL",
            f"Unable to open shared memory region: '{key}'",
        )
    assert infer_error(register, "r", memory.key, SIZE + 1) == (
        "StatusCode.INVALID_ARGUMENT",
        "failed to register shared memory region 'r': invalid args",
    )
    for byte_size, offset in ((0, 0), (100, 100)):
        assert infer_error(register, "r", memory.key, byte_size, offset)[1] == (
            "failed to register shared memory region 'r': unable to process address space"
            "Invalid argument"
        )
    assert not client.get_system_shared_memory_status().regions.get("r")


def test_cuda_memory_is_refused_where_there_is_no_gpu(client: Client, memory: Memory) -> None:
    assert infer_error(client.register_cuda_shared_memory, "c", b"aGFuZGxl", 0, 64) == (
        "StatusCode.INVALID_ARGUMENT",
        "failed to register CUDA shared memory region: 'c', GPUs not supported",
    )
    assert infer_error(client.get_cuda_shared_memory_status, "c")[1] == (
        "Unable to find cuda shared memory region: 'c'"
    )
    assert infer_error(client.get_cuda_shared_memory_status, memory.name)[1] == (
        f"The region named '{memory.name}' is registered as system shared memory, not CUDA shared"
        " memory"
    )
    client.register_system_shared_memory("", memory.key, SIZE)
    assert not client.get_cuda_shared_memory_status().regions
    client.unregister_cuda_shared_memory("c")


def test_unregistered_region_is_closed_after_its_last_use(
    host: RunningHost, client: Client
) -> None:
    """The model holds the request back; meanwhile the region is unregistered."""
    memory = Memory(client)
    try:
        text = b"""
            pb_utils.Logger.log_info("the region is in use")
            until(request.is_cancelled, "the request to be cancelled")
            """
        given = tensor("COMMAND", np.array([text], dtype=np.object_))
        wanted = grpcclient.InferRequestedOutput("ANSWER")
        wanted.set_shared_memory(memory.name, 1000)
        call = client.async_infer("script", [given], lambda result, error: None, outputs=[wanted])
        host.wait_for("the region is in use")
        client.unregister_system_shared_memory(memory.name)
        assert memory.name in client.get_system_shared_memory_status().regions
        assert infer_error(client.register_system_shared_memory, memory.name, memory.key, SIZE)[
            0
        ] == ("StatusCode.ALREADY_EXISTS")
        call.cancel()
        wait_until(
            lambda: memory.name not in client.get_system_shared_memory_status().regions,
            "the region to be let go of",
        )
    finally:
        memory.close()


def test_client_memory_is_off_by_default(repository: RepositoryBuilder, serve: Serve) -> None:
    repository.copy("identity")
    host = serve(repository).wait_started()
    off = (
        "StatusCode.UNIMPLEMENTED",
        (
            "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to"
            " enable."
        ),
    )
    with host.client() as client:
        assert infer_error(client.register_system_shared_memory, "r", "/key", 64) == off
        assert infer_error(client.unregister_system_shared_memory, "r") == off
        assert infer_error(client.register_cuda_shared_memory, "r", b"aGFuZGxl", 0, 64) == off
        assert not client.get_system_shared_memory_status().regions


def test_client_that_shrinks_its_region_affects_only_its_own_requests(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("identity")
    repository.add("strings", MODEL, CONFIG.format("TYPE_STRING"))
    host = serve(repository, "--allow-client-shm=true").wait_started()
    with host.client() as client:
        memory = Memory(client)
        try:
            file = posix_ipc.SharedMemory(memory.key).fd
            os.ftruncate(file, 0)
            os.close(file)
            status, _ = infer_error(
                client.infer, "strings", [input_in_region(memory, [1], "BYTES", 100)]
            )
            assert status == "StatusCode.INTERNAL"
            given = input_in_region(memory, [100_000], "FP32", 400_000)
            _, text = infer_error(client.infer, "identity", [given])
            assert "the shared memory in which tensor 'INPUT0' lay is gone" in text
            memory.close()
            memory = Memory(client)
            given = input_in_region(memory, [100_000], "FP32", 400_000)
            client.infer("identity", [given])
            file = posix_ipc.SharedMemory(memory.key).fd
            os.ftruncate(file, 0)
            os.close(file)
            _, text = infer_error(client.infer, "identity", [given])
            assert "Stub process 'identity_0' is not healthy. It was ended by SIGBUS" in text
            host.wait_for(
                "quarantine: a request that ended process 'identity_0' cannot be recognised:"
                f" shared memory region '{memory.name}' has become too small"
            )
            (crash,) = requests.get(f"http://{host.http_url}/v2/crashes", timeout=DEADLINE).json()[
                "crashes"
            ]
            assert crash["reason"].rstrip(".") in text
            assert "unexpected failure" not in host.output
        finally:
            memory.close()
        wait_until(lambda: client.is_model_ready("identity"), "the model to be back")
        array = np.ones(4, dtype=np.float32)
        sent = grpcclient.InferInput("INPUT0", [4], "FP32").set_data_from_numpy(array)
        np.testing.assert_array_equal(client.infer("identity", [sent]).as_numpy("OUTPUT0"), array)


PASSES_ON = """
import threading
from pathlib import Path
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        pb_utils.Logger.log_info("the model has its input")
        for _ in range(12_000):  # two minutes
            if Path("{go}").exists():
                break
            threading.Event().wait(0.01)
        return [pb_utils.InferenceResponse(request.inputs()) for request in requests]
"""


def test_passed_on_input_whose_region_was_truncated_is_an_error(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    config = CONFIG.format("TYPE_FP32").replace("OUTPUT0", "INPUT0")
    repository.add("passes_on", PASSES_ON.format(go=go), config)
    host = serve(repository, "--allow-client-shm=true").wait_started()
    with host.client() as client, ThreadPoolExecutor(1) as pool:
        memory = Memory(client)
        array = np.arange(100_000, dtype=np.float32)
        memory.write(array)
        given = input_in_region(memory, [100_000], "FP32", array.nbytes)
        try:
            asked = pool.submit(infer_error, client.infer, "passes_on", [given])
            host.wait_for("the model has its input")
            file = posix_ipc.SharedMemory(memory.key).fd
            os.ftruncate(file, 0)
            go.touch()
            status, text = asked.result()
            assert status == "StatusCode.INTERNAL"
            assert text.startswith(f"shared memory region '{memory.name}' has become too small")
            os.ftruncate(file, memory.size)
            os.close(file)
            memory.write(array)
            answer = client.infer("passes_on", [given]).as_numpy("INPUT0")
            np.testing.assert_array_equal(answer, array)
            client.unregister_system_shared_memory(memory.name)
            wait_until(
                lambda: memory.name not in client.get_system_shared_memory_status().regions,
                "the model's process to give back what it has passed on",
            )
        finally:
            go.touch()
            memory.close()


def test_passed_on_input_needs_enough_room_in_the_output_region(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    """It begins where the output is to begin, so nothing would have to be written."""
    config = CONFIG.format("TYPE_FP32").replace("OUTPUT0", "INPUT0")
    (tmp_path / "go").touch()
    repository.add("passes_on", PASSES_ON.format(go=tmp_path / "go"), config)
    host = serve(repository, "--allow-client-shm=true").wait_started()
    with host.client() as client:
        memory = Memory(client)
        try:
            given = input_in_region(memory, [100_000], "FP32", 400_000)
            wanted = grpcclient.InferRequestedOutput("INPUT0")
            wanted.set_shared_memory(memory.name, 64)
            assert infer_error(client.infer, "passes_on", [given], outputs=[wanted]) == (
                "StatusCode.INTERNAL",
                (
                    "shared memory size specified with the request for output 'INPUT0' (64 bytes)"
                    " should be at least 400000 bytes to hold the results"
                ),
            )
            wanted.set_shared_memory(memory.name, 400_000)
            client.infer("passes_on", [given], outputs=[wanted])
        finally:
            memory.close()
