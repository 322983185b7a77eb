"""Large inputs are shown to models without a copy, and neither models nor clients notice a
difference.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException
from tritonclient.utils import shared_memory as shm

from tests.clients import Client, InferStream, is_final, tensor
from tests.conftest import RepositoryBuilder, RunningHost, Serve, wait_until
from tests.unit.stub.test_copy_on_write import is_possible

COUNT = 1 << 20
SIZE = 4 * COUNT
PAGE = 4096
HEAD = """
import os
import threading

import numpy as np

import triton_python_backend_utils as pb_utils


def reply(array):
    return pb_utils.InferenceResponse([pb_utils.Tensor("Y", array)])


class TritonPythonModel:
    kept = []

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def x(self, request):
        return pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
"""
MODELS = {
    "mapped": """
    def answer(self, request):  # is its input an own copy, or pages of the caller's memory?
        address = self.x(request).__array_interface__["data"][0]
        with open("/proc/self/maps") as maps:
            for line in maps:
                first, end = (int(side, 16) for side in line.split()[0].split("-"))
                if first <= address < end:
                    shown = "memfd:" in line or "/dev/shm/" in line
        return reply(np.array([float(shown)], np.float32))
""",
    "keeps": """
    def answer(self, request):
        self.kept.append(self.x(request))
        return reply(np.array([array[::4096].sum() for array in self.kept], np.float32))
""",
    "writes": """
    def answer(self, request):
        array = self.x(request)
        array *= 2
        return reply(array)
""",
    "returns": """
    def answer(self, request):
        return reply(self.x(request))
""",
    "views": """
    def answer(self, request):
        return reply(request.inputs()[0].as_numpy(copy=False))
""",
    "passes": """
    def answer(self, request):  # its input itself, under the name of the output
        return pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("Y", request.inputs()[0])])
""",
    "asks": """
    def answer(self, request):
        question = pb_utils.Tensor("X", self.x(request))
        model = request.request_id() or "returns"
        answer = pb_utils.InferenceRequest(
            model_name=model, requested_output_names=["Y"], inputs=[question]
        ).exec()
        if answer.has_error():
            raise pb_utils.TritonModelException(answer.error().message())
        array = answer.output_tensors()[0].as_numpy()
        if model == "writes":
            array += 1
        assert self.x(request) is self.x(request)
        return reply(array)
""",
    "early": """
    def answer(self, request):
        if request.request_id() == "what was it":
            return reply(np.array([self.seen], np.float32))
        array = self.x(request)
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        request.get_response_sender().send(reply(np.zeros(1, np.float32)), final)
        for _ in range(6000):  # a minute
            if os.path.exists(request.request_id()):
                break
            threading.Event().wait(0.01)
        self.seen = array[::4096].sum()
        return None
""",
    "waits": """
    def answer(self, request):
        array, name = self.x(request), request.request_id()
        if name:
            open(name + ".begun", "w").close()
            for _ in range(6000):
                if os.path.exists(name):
                    break
                threading.Event().wait(0.01)
        return reply(array[::4096].sum(keepdims=True))
""",
    "awaits": """
    def execute(self, requests):
        (request,) = requests
        if request.request_id() == "what was it":
            return [reply(np.array([self.kept.pop()[::4096].sum()], np.float32))]
        self.kept.append(self.x(request))

        async def later():
            return [reply(np.zeros(1, np.float32))]

        return later()
""",
    "forks": """
    def answer(self, request):
        array = self.x(request)
        if request.request_id():  # of the file that the child waits for
            if os.fork() == 0:
                for _ in range(6000):
                    if os.path.exists(request.request_id()):
                        break
                    threading.Event().wait(0.01)
                with open(request.request_id() + ".seen", "w") as file:
                    file.write(str(array[::4096].sum()))
                os.rename(file.name, request.request_id() + ".done")
                os._exit(0)
        return reply(np.zeros(1, np.float32))
""",
}
CONFIG = """
backend: "python"
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
DOUBLES = """
    def answer(self, request):
        given = request.inputs()[0]
        second = given if request.request_id() == "raw" else given.as_numpy(copy=False)
        if request.request_id() != "raw":
            second = pb_utils.Tensor("X", second)
        doubled = pb_utils.Tensor("DOUBLED", given.as_numpy() * 2)
        return pb_utils.InferenceResponse([doubled, second])
"""
DOUBLES_CONFIG = """
backend: "python"
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [
  { name: "DOUBLED" data_type: TYPE_FP32 dims: [ -1 ] },
  { name: "X" data_type: TYPE_FP32 dims: [ -1 ] }
]
"""
STREAMS = """
    def execute(self, requests):
        (request,) = requests
        given, sender = request.inputs()[0], request.get_response_sender()
        overwriting = pb_utils.Tensor("X", np.zeros(given.shape(), np.float32))
        sender.send(pb_utils.InferenceResponse([overwriting]))
        if request.request_id() != "raw":
            given = pb_utils.Tensor("X", given.as_numpy(copy=request.request_id() == "array"))
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        sender.send(pb_utils.InferenceResponse([given]), final)
"""
STREAMS_CONFIG = """
backend: "python"
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } ]
model_transaction_policy { decoupled: true }
"""
PIPELINE = """
platform: "ensemble"
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] } ]
ensemble_scheduling { step [
  { model_name: "returns" model_version: -1
    input_map { key: "X" value: "X" } output_map { key: "Y" value: "a" } },
  { model_name: "returns" model_version: -1
    input_map { key: "X" value: "a" } output_map { key: "Y" value: "b" } },
  { model_name: "writes" model_version: -1
    input_map { key: "X" value: "b" } output_map { key: "Y" value: "Y" } }
] }
"""


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    for name, code in MODELS.items():
        module_repository.add(name, HEAD + code, CONFIG)
    module_repository.add("pipeline", None, PIPELINE)
    module_repository.add("streams", HEAD + STREAMS, STREAMS_CONFIG)
    module_repository.add("doubles", HEAD + DOUBLES, DOUBLES_CONFIG)
    return module_serve(module_repository, "--allow-client-shm=true").wait_started()


class Memory:
    """Room for an input and an output, which the client and the host share."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.name = uuid.uuid4().hex
        self.handle = shm.create_shared_memory_region(self.name, f"/test-{self.name}", 2 * SIZE)
        client.register_system_shared_memory(self.name, f"/test-{self.name}", 2 * SIZE)

    def write(self, array: npt.NDArray[np.float32]) -> None:
        shm.set_shared_memory_region(self.handle, [array])

    def content(self, offset: int = 0) -> npt.NDArray[np.float32]:
        found: npt.NDArray[np.float32] = shm.get_contents_as_numpy(
            self.handle, np.float32, [COUNT], offset
        )
        return found

    def infer(self, model: str, into: int | None = None, id: str = "") -> npt.NDArray[np.float32]:
        """The response to the array, in the same memory at `into` or as the host sends it."""
        given = grpcclient.InferInput("X", [COUNT], "FP32")
        given.set_shared_memory(self.name, SIZE)
        wanted = grpcclient.InferRequestedOutput("Y")
        if into is not None:
            wanted.set_shared_memory(self.name, SIZE, into)
        result = self.client.infer(model, [given], outputs=[wanted], request_id=id)
        if into is not None:
            return self.content(into)
        found: npt.NDArray[np.float32] = result.as_numpy("Y")
        return found


@pytest.fixture
def memory(host: RunningHost) -> Iterator[Memory]:
    with host.client() as client:
        memory = Memory(client)
        yield memory
        client.unregister_system_shared_memory()
        shm.destroy_shared_memory_region(memory.handle)


def numbers(seed: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).random(COUNT, np.float32)


def filled(value: int) -> npt.NDArray[np.float32]:
    return np.full(COUNT, value, np.float32)


SAMPLES = COUNT // 4096


@pytest.mark.skipif(
    not is_possible(), reason="needs Linux 5.14 or later, overcommit, and no limit of addresses"
)
def test_a_large_input_is_not_copied(memory: Memory) -> None:
    memory.write(numbers(1))
    assert memory.infer("mapped") == 1
    result = memory.client.infer("mapped", [tensor("X", numbers(2))])
    assert result.as_numpy("Y") == 1


def test_an_array_that_a_model_keeps_of_client_memory_does_not_change(memory: Memory) -> None:
    memory.write(filled(7))
    sums = memory.infer("keeps").tolist()  # of all that the model has kept
    for value in (1, 2, 3, 4, 9):
        memory.write(filled(value))
        sums.append(value * SAMPLES)
        assert memory.infer("keeps").tolist() == sums


@pytest.mark.parametrize("model", ["writes", "pipeline"])
def test_in_place_writes_are_visible_to_their_model_only(memory: Memory, model: str) -> None:
    for seed in range(3):
        array = numbers(seed)
        memory.write(array)
        np.testing.assert_array_equal(memory.infer(model), 2 * array)
        np.testing.assert_array_equal(memory.content(), array)
        np.testing.assert_array_equal(memory.infer(model, into=SIZE), 2 * array)
        np.testing.assert_array_equal(memory.content(), array)
        result = memory.client.infer(model, [tensor("X", array)])
        np.testing.assert_array_equal(result.as_numpy("Y"), 2 * array)


@pytest.mark.parametrize("into", [0, 64, SIZE // 2])
@pytest.mark.parametrize("model", ["returns", "views", "passes"])
def test_a_response_may_overwrite_its_request(memory: Memory, model: str, into: int) -> None:
    for seed in range(3):
        array = numbers(seed)
        memory.write(array)
        np.testing.assert_array_equal(memory.infer(model, into), array)


@pytest.mark.parametrize("id", ["raw", "view"])
@pytest.mark.parametrize("into", [None, SIZE, 0])
def test_an_output_may_overwrite_the_input_that_another_one_returns(
    memory: Memory, id: str, into: int | None
) -> None:
    """`into`: the place of the input that is returned; 0: both change places."""
    array = numbers(4)
    given = grpcclient.InferInput("X", [COUNT], "FP32")
    given.set_shared_memory(memory.name, SIZE, SIZE if into == 0 else 0)
    shm.set_shared_memory_region(memory.handle, [array], SIZE if into == 0 else 0)
    doubled, same = map(grpcclient.InferRequestedOutput, ("DOUBLED", "X"))
    doubled.set_shared_memory(memory.name, SIZE, SIZE if into == 0 else 0)
    if into is not None:
        same.set_shared_memory(memory.name, SIZE, into)
    result = memory.client.infer("doubles", [given], outputs=[doubled, same], request_id=id)
    returned = result.as_numpy("X") if into is None else memory.content(into)
    np.testing.assert_array_equal(returned, array)
    np.testing.assert_array_equal(memory.content(SIZE if into == 0 else 0), 2 * array)


@pytest.mark.parametrize("into", [0, 64, SIZE // 2])
@pytest.mark.parametrize("id", ["array", "view", "raw"])
def test_a_response_may_return_the_input_that_an_earlier_one_overwrote(
    host: RunningHost, memory: Memory, id: str, into: int
) -> None:
    array = numbers(5)
    memory.write(array)
    given = grpcclient.InferInput("X", [COUNT], "FP32")
    given.set_shared_memory(memory.name, SIZE)
    wanted = grpcclient.InferRequestedOutput("X")
    wanted.set_shared_memory(memory.name, SIZE, into)
    with InferStream(host) as stream:
        stream.send_inputs("streams", given, outputs=[wanted], request_id=id)
        assert not is_final(stream.next())
        assert is_final(stream.next())
    np.testing.assert_array_equal(memory.content(into), array)


@pytest.mark.parametrize("model", ["streams", "doubles"])
def test_outputs_in_another_registration_of_the_memory_may_overwrite_inputs(
    host: RunningHost, memory: Memory, model: str
) -> None:
    """The outputs are in the second part of the memory, which overlaps the input by all but a page.

    X is the last response of a stream, or the other output of a response.
    """
    array, other = numbers(6), memory.name + "b"
    memory.write(array)
    memory.client.register_system_shared_memory(other, f"/test-{memory.name}", SIZE, PAGE)
    given = grpcclient.InferInput("X", [COUNT], "FP32")
    given.set_shared_memory(memory.name, SIZE)
    names = ["X"] if model == "streams" else ["DOUBLED", "X"]
    wanted = [grpcclient.InferRequestedOutput(name) for name in names]
    wanted[0].set_shared_memory(other, SIZE)
    if model == "streams":
        with InferStream(host) as stream:
            stream.send_inputs(model, given, outputs=wanted, request_id="raw")
            assert not is_final(stream.next())
            assert is_final(stream.next())
        np.testing.assert_array_equal(memory.content(PAGE), array)
    else:
        result = memory.client.infer(model, [given], outputs=wanted, request_id="raw")
        np.testing.assert_array_equal(memory.content(PAGE), 2 * array)
        np.testing.assert_array_equal(result.as_numpy("X"), array)


@pytest.mark.parametrize("inner", ["returns", "writes"])
def test_arrays_pass_through_other_models(memory: Memory, inner: str) -> None:
    for seed in range(3):
        array = numbers(seed)
        memory.write(array)
        expected = array if inner == "returns" else 2 * array + 1
        np.testing.assert_array_equal(memory.infer("asks", id=inner), expected)
        np.testing.assert_array_equal(memory.infer("asks", SIZE, inner), expected)
        np.testing.assert_array_equal(memory.content(), array)


def test_concurrent_requests_get_their_own_responses(memory: Memory, host: RunningHost) -> None:
    def send_request(seed: int) -> None:
        with host.client() as client:
            array = numbers(seed)
            for model in ("returns", "asks", "writes", "pipeline") * 3:
                expected = array if model in ("returns", "asks") else 2 * array
                result = client.infer(model, [tensor("X", array)])
                np.testing.assert_array_equal(result.as_numpy("Y"), expected)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(send_request, range(4)))


def test_a_client_may_write_once_it_is_answered_also_if_execute_goes_on(
    memory: Memory, tmp_path: Path
) -> None:
    flag = tmp_path / "go"
    memory.write(filled(3))
    memory.infer("early", id=str(flag))
    memory.write(filled(9))
    flag.touch()
    assert memory.infer("early", id="what was it").item() == 3 * SAMPLES


def test_a_client_that_shrinks_its_memory_harms_its_own_request_only(
    memory: Memory, host: RunningHost, tmp_path: Path
) -> None:
    flag, begun = tmp_path / "go", tmp_path / "go.begun"
    memory.write(filled(3))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(memory.infer, "waits", id=str(flag))
        wait_until(begun.exists, "the model to have its input")
        os.truncate(f"/dev/shm/test-{memory.name}", 0)
        flag.touch()
        with pytest.raises(InferenceServerException, match="SIGBUS"):
            asked.result()
    with host.client() as client:
        wait_until(lambda: client.is_model_ready("waits"), "the model to be back")
        result = client.infer("waits", [tensor("X", filled(2))])
        assert result.as_numpy("Y").item() == 2 * SAMPLES


def test_a_client_may_write_once_it_is_answered_by_a_coroutine(memory: Memory) -> None:
    for value in range(20):
        memory.write(filled(value))
        memory.infer("awaits")
        memory.write(filled(99))
        assert memory.infer("awaits", id="what was it").item() == value * SAMPLES


def test_a_forked_child_keeps_what_it_was_given(memory: Memory, tmp_path: Path) -> None:
    flag = tmp_path / "go"
    memory.write(filled(3))
    memory.infer("forks", id=str(flag))
    memory.write(filled(9))
    memory.infer("forks")
    flag.touch()
    done = tmp_path / "go.done"
    wait_until(done.exists, "the child to say what it has seen")
    assert float(done.read_text()) == 3 * SAMPLES
