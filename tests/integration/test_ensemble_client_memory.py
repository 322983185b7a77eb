"""Ensembles whose inputs and outputs lie in memory of their client."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.grpc as grpcclient

from tests.clients import Client, infer_error
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve
from tests.integration.ensemble_models import add_ensemble, add_member
from tests.integration.test_client_memory import Memory

MEGABYTE = 1 << 20
BIG = 16 * MEGABYTE


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    """Tensors of its own may have 4 MB."""
    repository = module_repository
    add_member(repository, "next", 'return {"A": x + 1}', inputs="X", outputs="A")
    add_member(repository, "sum", 'return {"A": x + y}', inputs="X Y", outputs="A")
    add_member(
        repository, "echoes", 'return [{"A": x}, {"A": x + 1}]',
        inputs="X", outputs="A", decoupled=True,
    )  # fmt: skip
    cached = "response_cache { enable: true }"
    add_member(repository, "kept", 'return {"A": x + 1}', inputs="X", outputs="A", extra=cached)
    add_ensemble(repository, "inner", "I", "O", [("next", {"X": "I"}, {"A": "O"})])
    add_ensemble(repository, "outer", "I", "O", [("inner", {"I": "I"}, {"O": "O"})])
    add_ensemble(
        repository, "again", "I", "O P",
        [("next", {"X": "I"}, {"A": "O"}), ("sum", {"X": "I", "Y": "O"}, {"A": "P"})],
    )  # fmt: skip
    add_ensemble(repository, "by_heart", "I", "O", [("kept", {"X": "I"}, {"A": "O"})])
    add_ensemble(
        repository, "stream", "I", "O", [("echoes", {"X": "I"}, {"A": "O"})],
        extra="model_transaction_policy { decoupled: true }",
    )  # fmt: skip
    return module_serve(
        repository,
        "--allow-client-shm=true",
        f"--arena-byte-size={4 * MEGABYTE}",
        "--cache-config=local,size=1048576",
    ).wait_started()


@pytest.fixture
def client(host: RunningHost) -> Iterator[Client]:
    with host.client() as client:
        yield client
        client.unregister_system_shared_memory()


@pytest.fixture
def memory(client: Client) -> Iterator[Memory]:
    memory = Memory(client, 2 * BIG)
    yield memory
    memory.close()


def given(memory: Memory, array: npt.NDArray[Any], offset: int = 0) -> grpcclient.InferInput:
    memory.write(array, offset)
    tensor = grpcclient.InferInput("I", list(array.shape), "FP32")
    tensor.set_shared_memory(memory.name, array.nbytes, offset)
    return tensor


def wanted(
    memory: Memory, name: str, byte_size: int, offset: int
) -> grpcclient.InferRequestedOutput:
    output = grpcclient.InferRequestedOutput(name)
    output.set_shared_memory(memory.name, byte_size, offset)
    return output


@pytest.mark.parametrize("ensemble", ["inner", "outer"])
def test_outputs_in_client_memory_take_no_memory_of_the_host(
    client: Client, memory: Memory, ensemble: str
) -> None:
    """16 MB in and out, where every arena has 4 MB."""
    array = np.arange(BIG // 4, dtype=np.float32)
    result = client.infer(ensemble, [given(memory, array)], outputs=[wanted(memory, "O", BIG, BIG)])
    assert list(result.get_output("O").shape) == [len(array)]
    np.testing.assert_array_equal(memory.read(np.float32, [len(array)], BIG), array + 1)


def test_an_output_may_take_the_place_of_an_input_that_is_needed_to_the_end(
    client: Client, memory: Memory
) -> None:
    array = np.arange(100_000, dtype=np.float32)
    size = array.nbytes
    outputs = [wanted(memory, "O", size, 0), wanted(memory, "P", size, size)]
    client.infer("again", [given(memory, array)], outputs=outputs)
    np.testing.assert_array_equal(memory.read(np.float32, [len(array)], 0), array + 1)
    np.testing.assert_array_equal(memory.read(np.float32, [len(array)], size), 2 * array + 1)


@pytest.mark.parametrize("ensemble", ["inner", "outer", "again", "by_heart"])
@pytest.mark.parametrize("count", [10, 10_000])
def test_an_output_that_the_client_has_no_room_for_is_an_error(
    client: Client, memory: Memory, ensemble: str, count: int
) -> None:
    array = np.full(count, 3, np.float32)
    memory.write(np.zeros(100, np.float32), BIG)
    assert infer_error(
        client.infer, ensemble, [given(memory, array)], outputs=[wanted(memory, "O", 16, BIG)]
    ) == (
        "StatusCode.INTERNAL",
        (
            "shared memory size specified with the request for output 'O' (16 bytes) should be at"
            f" least {array.nbytes} bytes to hold the results"
        ),
    )
    assert not memory.read(np.float32, [100], BIG).any()


def test_a_cached_output_of_a_member_is_the_same_in_every_place(
    client: Client, memory: Memory
) -> None:
    array = np.arange(20_000, dtype=np.float32)
    places = [BIG, BIG + array.nbytes]
    for place in places:
        source = [given(memory, array)]
        client.infer("by_heart", source, outputs=[wanted(memory, "O", array.nbytes, place)])
        memory.write(np.zeros(10, np.float32), BIG)  # the client continues with its memory
    np.testing.assert_array_equal(memory.read(np.float32, [20_000], places[1]), array + 1)
    (stats,) = client.get_inference_statistics("kept").model_stats
    assert stats.inference_stats.cache_hit.count >= 1


def test_each_response_of_a_stream_takes_the_place_of_the_one_before(
    client: Client, memory: Memory
) -> None:
    array = np.arange(20_000, dtype=np.float32)
    answers: queue.Queue[tuple[object, object]] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    client.async_stream_infer(
        "stream", [given(memory, array)], outputs=[wanted(memory, "O", array.nbytes, BIG)]
    )
    for _ in range(2):
        assert answers.get(timeout=DEADLINE)[1] is None
    client.stop_stream()
    np.testing.assert_array_equal(memory.read(np.float32, [20_000], BIG), array + 1)
