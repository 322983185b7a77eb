"""Tensors between pb_utils and torch on a real GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pb_utils import Tensor, TritonModelException
from tests.clients import tensor as client_tensor
from tests.conftest import RepositoryBuilder, Serve

pytestmark = pytest.mark.gpu

LONG = 200_000_000
"""Cycles of a GPU: about a tenth of a second."""


@pytest.fixture(scope="module")
def torch() -> Any:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this build of torch does not use CUDA")
    return torch


@pytest.mark.parametrize(
    "name",
    ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32"]
    + ["float64"],
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 3)])
def test_every_type_and_shape_goes_there_and_back(
    torch: Any, name: str, shape: tuple[int, ...]
) -> None:
    given = torch.ones(shape, dtype=getattr(torch, name), device="cuda")
    tensor = Tensor.from_dlpack("x", given)
    assert not tensor.is_cpu()
    assert tensor.__dlpack_device__() == (2, 0)
    for got in (
        torch.from_dlpack(tensor),
        torch.utils.dlpack.from_dlpack(tensor),
        torch.utils.dlpack.from_dlpack(tensor.to_dlpack()),
    ):
        assert (got.dtype, got.shape, got.device) == (given.dtype, given.shape, given.device)
        assert torch.equal(got, given)
        assert not given.numel() or got.data_ptr() == given.data_ptr()
    content = given.cpu().reshape(-1).view(torch.uint8).numpy()
    assert bytes(tensor._wire_data()) == content.tobytes()


def test_numpy_gets_a_copy_if_it_requests_one(torch: Any) -> None:
    tensor = Tensor.from_dlpack("x", torch.arange(6, device="cuda").reshape(2, 3))
    with pytest.raises(TritonModelException, match="stored in GPU"):
        tensor.as_numpy()
    capsule = tensor.__dlpack__(dl_device=(1, 0))
    assert Tensor.from_dlpack("y", capsule).as_numpy().tolist() == [[0, 1, 2], [3, 4, 5]]


def test_work_on_the_producers_stream_is_waited_for(torch: Any) -> None:
    stream = torch.cuda.Stream()
    array = torch.zeros(1_000_000, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        array.fill_(1)
        assert not stream.query()
        tensor = Tensor.from_dlpack("x", array)
        assert stream.query()
    assert np.frombuffer(tensor._wire_data(), np.float32).sum() == 1_000_000


def test_work_on_the_default_stream_is_waited_for(torch: Any) -> None:
    array = torch.zeros(1_000_000, device="cuda")
    torch.cuda._sleep(LONG)
    array.fill_(1)
    tensor = Tensor.from_dlpack("x", array)
    assert torch.cuda.current_stream().query()
    assert np.frombuffer(tensor._wire_data(), np.float32).sum() == 1_000_000


def test_a_capsule_is_taken_over_as_it_is(torch: Any) -> None:
    stream = torch.cuda.Stream()
    array = torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        array.fill_(1)
        tensor = Tensor.from_dlpack("x", torch.utils.dlpack.to_dlpack(array))
        assert not stream.query()
    stream.synchronize()
    assert np.frombuffer(tensor._wire_data(), np.float32).sum() == 1000


def test_values_that_torch_writes_are_sent(torch: Any) -> None:
    tensor = Tensor.from_dlpack("x", torch.zeros(3, device="cuda"))
    torch.from_dlpack(tensor)[1] = 5
    assert np.frombuffer(tensor._wire_data(), np.float32).tolist() == [0, 5, 0]


def test_memory_is_held_as_long_as_it_is_used(torch: Any) -> None:
    before = torch.cuda.memory_allocated()
    tensor = Tensor.from_dlpack("x", torch.ones(1_000_000, device="cuda"))
    assert torch.cuda.memory_allocated() >= before + 4_000_000
    capsule = tensor.to_dlpack()
    del tensor
    got = torch.utils.dlpack.from_dlpack(capsule)
    del capsule
    assert got.sum().item() == 1_000_000
    del got
    assert torch.cuda.memory_allocated() == before


def test_gaps_in_the_first_dimension_are_closed_and_others_refused(torch: Any) -> None:
    array = torch.arange(12, device="cuda").reshape(4, 3)
    tensor = Tensor.from_dlpack("x", array[::2])
    assert np.frombuffer(tensor._wire_data(), np.int64).tolist() == [0, 1, 2, 6, 7, 8]
    for other in (array.T, array[:, :2], array[:1].expand(4, 3)):
        with pytest.raises(TritonModelException, match="not contiguous"):
            Tensor.from_dlpack("x", other)


def test_a_slice_keeps_its_place(torch: Any) -> None:
    tensor = Tensor.from_dlpack("x", torch.arange(12, device="cuda")[5:8])
    assert np.frombuffer(tensor._wire_data(), np.int64).tolist() == [5, 6, 7]


def test_received_content_goes_to_the_gpu_before_any_stream_reads_it(torch: Any) -> None:
    array = np.arange(10_000_000, dtype=np.float32)
    for _ in range(5):
        tensor = Tensor._from_wire("x", 11, [array.size], memoryview(array.tobytes()), None)
        tensor._prefer_gpu(0)
        with torch.cuda.stream(torch.cuda.Stream()):
            got = torch.from_dlpack(tensor)
            assert got.device.type == "cuda"
            assert torch.equal(got.cpu(), torch.from_numpy(array))


def test_a_copy_is_apart(torch: Any) -> None:
    tensor = Tensor.from_dlpack("x", torch.zeros(3, device="cuda"))
    copied = torch.utils.dlpack.from_dlpack(tensor.__dlpack__(copy=True))
    torch.from_dlpack(tensor).fill_(1)
    assert copied.tolist() == [0, 0, 0]


def test_tensors_of_another_gpu_than_the_current_one_are_waited_for(torch: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    array = torch.zeros(1_000_000, device="cuda:1")
    with torch.cuda.device(1):
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LONG)
            array.fill_(1)
            with torch.cuda.device(0):
                tensor = Tensor.from_dlpack("x", array)
                assert torch.cuda.current_device() == 0
            assert stream.query()
    assert tensor.__dlpack_device__() == (2, 1)
    assert np.frombuffer(tensor._wire_data(), np.float32).sum() == 1_000_000


def test_the_threads_current_device_is_left_alone(torch: Any) -> None:
    before = torch.cuda.current_device()
    Tensor.from_dlpack("x", torch.zeros(3, device="cuda"))._wire_data()
    assert torch.cuda.current_device() == before
    assert torch.ones(3, device="cuda").sum().item() == 3


ON_A_GPU = """
import torch
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        assert args["model_instance_kind"] == "GPU"
        self.device = torch.device("cuda", int(args["model_instance_device_id"]))
        self.weight = torch.tensor(2.0, device=self.device)

    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X")
            y = torch.from_dlpack(x).to(self.device) * self.weight
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("Y", y)]))
        return responses
"""
PIPELINE = """
import torch
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = torch.from_dlpack(pb_utils.get_input_tensor_by_name(request, "X")).cuda()
            for _ in range(2):
                answer = pb_utils.InferenceRequest(
                    model_name="doubles",
                    inputs=[pb_utils.Tensor.from_dlpack("X", x)],
                    requested_output_names=["Y"],
                    preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_GPU),
                ).exec()
                if answer.has_error():
                    raise pb_utils.TritonModelException(answer.error().message())
                y = pb_utils.get_output_tensor_by_name(answer, "Y")
                assert not y.is_cpu()
                x = torch.from_dlpack(y) + 1
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("Y", x)]))
        return responses
"""
CONFIG = """
backend: "python"
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""


@pytest.mark.timeout(300)
def test_models_of_torch_pass_tensors_on_and_keep_no_memory(
    torch: Any, repository: RepositoryBuilder, serve: Serve
) -> None:
    group = "instance_group [ { kind: KIND_GPU gpus: 0 } ]"
    repository.add("doubles", ON_A_GPU, CONFIG + group)
    repository.add("pipeline", PIPELINE, CONFIG + group)
    host = serve(repository, env={"CUDA_VISIBLE_DEVICES": "0"}).wait_started()
    with host.client() as client:
        for count in (1, 1000, 1_000_000):
            x = np.arange(count, dtype=np.float32)
            y = client.infer("pipeline", [client_tensor("X", x)]).as_numpy("Y")
            np.testing.assert_array_equal(y, (x * 2 + 1) * 2 + 1)
        x = np.zeros(10_000_000, np.float32)  # 40 MB
        for _ in range(5):
            client.infer("pipeline", [client_tensor("X", x)])
        free, _ = torch.cuda.mem_get_info()
        for _ in range(25):
            client.infer("pipeline", [client_tensor("X", x)])
        assert torch.cuda.mem_get_info()[0] >= free - 100_000_000
    assert host.stop() == 0
