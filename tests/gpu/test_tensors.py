"""Tensors on GPUs, with the driver simulated: whatever touched device memory itself would crash."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from pb_utils import Tensor, TritonModelException
from tests.gpu.producer import Consumed, OnGpu
from tests.unit.pb_utils.tensors import NUMERIC, Block, received, wire_tensor

Copies = Callable[[], list[str]]

pytestmark = pytest.mark.usefixtures("cuda")

ON_GPU = "Tensor is stored in GPU and cannot be converted to NumPy."
NOT_CONTIGUOUS = (
    "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order "
    "are supported."
)


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(TritonModelException) as caught:
        call()
    return str(caught.value)


def taken(array: Any, device: int = 0, **arguments: Any) -> Tensor:
    """A tensor that was made of an array on a GPU."""
    return Tensor.from_dlpack("x", OnGpu(array, device, **arguments))


class TestImport:
    @pytest.mark.parametrize(("code", "kind"), NUMERIC.items())
    @pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 3), (1, 2, 1)])
    def test_every_type_and_shape_is_taken_over(
        self, code: int, kind: Any, shape: tuple[int, ...]
    ) -> None:
        array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(kind)
        tensor = taken(array)
        assert (tensor.name(), tensor.triton_dtype(), tensor.shape()) == ("x", code, list(shape))
        assert not tensor.is_cpu()
        assert bytes(tensor._wire_data()) == array.tobytes()

    def test_bfloat16_is_taken_over(self) -> None:
        array = np.arange(3, dtype=np.uint16)
        tensor = taken(array, bfloat16=True)
        assert tensor.triton_dtype() == 14
        assert bytes(tensor._wire_data()) == array.tobytes()
        assert Consumed(tensor.to_dlpack()).kind == (4, 16, 1)

    def test_nothing_is_copied_before_it_is_sent(self, cuda: Copies) -> None:
        tensor = taken(np.arange(3))
        assert cuda() == []
        tensor._wire_data()
        assert cuda() == ["to host 24"]

    def test_pending_work_is_waited_for_on_a_stream_of_our_own(self) -> None:
        producer = OnGpu(np.arange(3))
        first, second = (Tensor.from_dlpack("x", producer) for _ in range(2))
        assert producer.streams[0] not in (None, 0, 1, 2)
        assert producer.streams[0] == producer.streams[1]
        assert bytes(first._wire_data()) == producer.source.tobytes()
        assert bytes(second._wire_data()) == producer.source.tobytes()

    def test_a_bare_capsule_is_not_waited_for(self) -> None:
        producer = OnGpu(np.arange(3))
        tensor = Tensor.from_dlpack("x", producer.capsule())
        assert not tensor.is_cpu()
        assert producer.streams == []
        producer.fill()
        assert bytes(tensor._wire_data()) == producer.source.tobytes()

    def test_the_producers_device_is_current_while_it_exports(self) -> None:
        producer = OnGpu(np.arange(3), device=1)
        tensor = Tensor.from_dlpack("x", producer)
        assert producer.devices == [1]
        assert tensor.__dlpack_device__() == (2, 1)
        assert bytes(tensor._wire_data()) == producer.source.tobytes()

    def test_the_producers_memory_is_held_until_the_tensor_dies(self) -> None:
        producer = OnGpu(np.arange(3))
        tensor = Tensor.from_dlpack("x", producer)
        capsule = tensor.to_dlpack()
        del tensor
        gc.collect()
        assert producer.given_back == 0
        del capsule
        assert producer.given_back == 1

    def test_empty_memory_is_given_back_at_once(self) -> None:
        producer = OnGpu(np.zeros((0, 3)))
        tensor = Tensor.from_dlpack("x", producer)
        assert producer.given_back == 1
        assert not tensor.is_cpu()
        assert Consumed(tensor.to_dlpack()).shape == [0, 3]

    def test_a_byte_offset_is_honoured(self) -> None:
        tensor = taken(np.arange(3, dtype=np.int32), shape=[2], offset=4)
        assert np.frombuffer(tensor._wire_data(), np.int32).tolist() == [1, 2]

    def test_strides_of_contiguous_tensors_are_understood(self, cuda: Copies) -> None:
        array = np.arange(6, dtype=np.int32).reshape(2, 3)
        tensor = taken(array, strides=[3, 1])
        assert bytes(tensor._wire_data()) == array.tobytes()
        assert taken(array, shape=[1, 3], strides=[99, 1]).shape() == [1, 3]
        assert cuda() == ["to host 24"]

    def test_gaps_in_the_first_dimension_are_closed(self, cuda: Copies) -> None:
        array = np.arange(12, dtype=np.int16).reshape(4, 3)
        producer = OnGpu(array, shape=[2, 3], strides=[6, 1])
        tensor = Tensor.from_dlpack("x", producer)
        assert producer.given_back == 1
        assert bytes(tensor._wire_data()) == array[::2].tobytes()
        assert cuda() == ["on device 12", "to host 12"]

    @pytest.mark.parametrize(
        ("shape", "strides"), [([3, 4], [1, 3]), ([4, 2], [3, 2]), ([4, 3], [0, 1]), ([4], [-1])]
    )
    def test_other_gaps_repetitions_and_reversals_are_refused(
        self, shape: list[int], strides: list[int]
    ) -> None:
        array = np.arange(12).reshape(4, 3)
        assert refusal(lambda: taken(array, shape=shape, strides=strides)) == NOT_CONTIGUOUS

    def test_a_device_that_is_not_there_is_refused(self) -> None:
        class Elsewhere:
            def __dlpack_device__(self) -> tuple[int, int]:
                return (2, 7)

            def __dlpack__(self, stream: Any = None) -> Any:
                raise AssertionError("must not be called")

        text = refusal(lambda: Tensor.from_dlpack("x", Elsewhere()))
        assert text == "Failed to get current CUDA device id."

    @pytest.mark.parametrize(
        ("failure", "text"),
        [
            ("cuDevicePrimaryCtxRetain=2", "Failed to get current CUDA device id."),
            ("cuCtxPushCurrent_v2=2", "Failed to get current CUDA device id."),
            ("cuStreamCreate=2", "Failed to create a CUDA stream for a DLPack call."),
            ("cuStreamSynchronize=700", "Failed to synchronize CUDA device with id 1"),
        ],
    )
    def test_failures_of_the_driver_have_their_texts(
        self, failure: str, text: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        producer = OnGpu(np.arange(3), device=1)
        with monkeypatch.context() as patch:
            patch.setenv("SIMULATED_CUDA_FAIL", failure)
            with pytest.raises(TritonModelException) as caught:
                Tensor.from_dlpack("x", producer)
        assert str(caught.value) == text
        assert failure.partition("=")[0] in str(caught.value.__cause__)
        assert not Tensor.from_dlpack("x", producer).is_cpu()  # no context was left behind

    def test_rows_for_which_there_is_no_room_are_an_error(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        producer = OnGpu(np.arange(4), shape=[2], strides=[2])
        monkeypatch.setenv("SIMULATED_CUDA_BYTES", "40")
        assert refusal(lambda: Tensor.from_dlpack("x", producer)) == (
            "The rows of a DLPack tensor on GPU 0 cannot be copied to contiguous memory: "
            "cuMemAlloc_v2 failed with CUDA_ERROR_OUT_OF_MEMORY (2): out of memory"
        )
        gc.collect()  # the traceback of the error
        assert producer.given_back == 1

    def test_without_a_device_the_gpu_is_not_available(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        producer = OnGpu(np.arange(3))
        monkeypatch.setenv("SIMULATED_CUDA_FAIL", "cuDeviceGetCount=100")
        for obj in (producer, producer.capsule()):
            assert refusal(partial(Tensor.from_dlpack, "x", obj)) == (
                "DLPack capsule passed pointer to memory allocated on GPU device,           "
                "when GPU is not available"
            )
        assert producer.streams == []

    def test_threads_may_take_over_at_the_same_time(self) -> None:
        array = np.arange(1000)
        results: list[bool] = []

        def take() -> None:
            results.extend(
                bytes(taken(array, device)._wire_data()) == array.tobytes()
                for device in (0, 1) * 20
            )

        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [True] * 160


class TestReading:
    def test_numpy_cannot_have_it(self) -> None:
        for tensor in (taken(np.zeros(1)), taken(np.zeros(1, np.uint16), bfloat16=True)):
            assert refusal(tensor.as_numpy) == ON_GPU
            assert refusal(partial(tensor.as_numpy, copy=False)) == ON_GPU
            assert refusal(tensor.as_bfloat16) == ON_GPU

    def test_a_copy_on_the_cpu_can_be_requested(self) -> None:
        array = np.arange(6, dtype=np.float16).reshape(2, 3)
        capsule = taken(array, 1).__dlpack__(dl_device=(1, 0))
        assert Tensor.from_dlpack("y", capsule).as_numpy().tolist() == array.tolist()

    def test_no_copy_is_made_for_consumers_that_forbid_it(self) -> None:
        for place, copy in (((1, 0), False), ((2, 1), None), ((2, 1), True)):
            with pytest.raises(BufferError, match="memory of a GPU"):
                taken(np.zeros(1)).__dlpack__(dl_device=place, copy=copy)
        with pytest.raises(BufferError, match="host memory"):
            Tensor("x", np.zeros(1)).__dlpack__(dl_device=(2, 0))


class TestExport:
    @pytest.mark.parametrize("kind", NUMERIC.values())
    def test_a_consumer_finds_the_same_memory(self, kind: Any, cuda: Copies) -> None:
        array = np.arange(6).reshape(2, 3).astype(kind)
        producer = OnGpu(array, 1)
        theirs = Consumed(producer.capsule())
        ours = Consumed(Tensor.from_dlpack("x", producer).to_dlpack())
        assert (ours.place, ours.kind, ours.shape) == ((2, 1), theirs.kind, [2, 3])
        assert ours._address == theirs._address
        assert ours.read(array).tolist() == array.tolist()

    def test_a_capsule_holds_exactly_one_reference(self) -> None:
        tensor = taken(np.arange(3))
        before = sys.getrefcount(tensor)
        capsule = tensor.to_dlpack()
        assert sys.getrefcount(tensor) == before + 1
        second = tensor.__dlpack__(stream=5, max_version=(1, 0), dl_device=(2, 0))
        assert sys.getrefcount(tensor) == before + 2
        del capsule, second
        assert sys.getrefcount(tensor) == before

    def test_a_tensor_is_a_producer_itself(self, cuda: Copies) -> None:
        again = Tensor.from_dlpack("y", taken(np.arange(3), 1))
        assert again.__dlpack_device__() == (2, 1)
        assert cuda() == []
        assert bytes(again._wire_data()) == np.arange(3).tobytes()

    def test_a_copy_is_apart(self) -> None:
        tensor = taken(np.arange(3))
        copied = Consumed(tensor.__dlpack__(copy=True))
        Consumed(tensor.to_dlpack()).write(np.zeros(3, int))
        assert copied.place == (2, 0)
        assert copied.read(np.arange(3)).tolist() == [0, 1, 2]
        assert Consumed(taken(np.zeros((0, 2))).__dlpack__(copy=True)).shape == [0, 2]

    def test_a_copy_for_which_there_is_no_room_is_an_error(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tensor = taken(np.arange(3))
        monkeypatch.setenv("SIMULATED_CUDA_BYTES", "30")
        assert refusal(lambda: tensor.__dlpack__(copy=True)) == (
            "Tensor 'x' cannot be copied on GPU 0: cuMemAlloc_v2 failed with "
            "CUDA_ERROR_OUT_OF_MEMORY (2): out of memory"
        )


class TestSending:
    def test_changes_are_sent_until_the_first_send(self) -> None:
        producer = OnGpu(np.zeros(2, np.uint8))
        tensor = Tensor.from_dlpack("x", producer)
        producer.fill(np.array([1, 2], np.uint8))
        assert bytes(tensor._wire_data()) == b"\1\2"
        tensor._set_wire_data(memoryview(b"\1\2"), Block())
        producer.fill(np.array([3, 4], np.uint8))
        assert bytes(tensor._wire_data()) == b"\1\2"
        assert not tensor.is_cpu()
        assert Consumed(tensor.to_dlpack()).read(np.zeros(2, np.uint8)).tolist() == [3, 4]

    def test_a_failing_copy_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tensor = taken(np.arange(3))
        monkeypatch.setenv("SIMULATED_CUDA_FAIL", "cuMemcpyDtoH_v2=700")
        assert refusal(tensor._wire_data) == (
            "Tensor 'x' cannot be copied from GPU 0: cuMemcpyDtoH_v2 failed with "
            "CUDA_ERROR_ILLEGAL_ADDRESS (700): an illegal memory access was encountered"
        )


class TestPreferredMemory:
    @staticmethod
    def preferred(array: Any, device: int = 1) -> Tensor:
        tensor = wire_tensor(array)
        tensor._prefer_gpu(device)
        return tensor

    def test_the_content_goes_to_the_gpu_when_it_is_first_exported(self, cuda: Copies) -> None:
        array = np.arange(6, dtype=np.float32).reshape(2, 3)
        tensor = self.preferred(array)
        assert not tensor.is_cpu()
        assert tensor.__dlpack_device__() == (2, 1)
        assert refusal(tensor.as_numpy) == ON_GPU
        assert cuda() == []
        consumed = [Consumed(tensor.to_dlpack()) for _ in range(2)]
        assert cuda() == ["to device 24"]
        assert [one.read(array).tolist() for one in consumed] == [array.tolist()] * 2
        assert consumed[0]._address == consumed[1]._address

    def test_a_tensor_passed_on_unseen_never_goes_to_the_gpu(self, cuda: Copies) -> None:
        tensor, array = self.preferred(np.arange(3)), np.arange(3)
        assert received(tensor).as_numpy().tolist() == array.tolist()
        assert cuda() == []

    def test_values_written_on_the_gpu_are_sent(self, cuda: Copies) -> None:
        owner = Block()
        tensor = wire_tensor(np.arange(3), owner=owner)
        tensor._prefer_gpu(0)
        consumed = Consumed(tensor.to_dlpack())
        assert tensor._owner is None
        consumed.write(np.array([7, 8, 9]))
        assert received(tensor).as_numpy().tolist() == [7, 8, 9]

    def test_memory_of_the_gpu_is_given_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SIMULATED_CUDA_BYTES", "30")
        for _ in range(5):
            assert Consumed(self.preferred(np.arange(3)).to_dlpack()).shape == [3]

    def test_a_full_gpu_is_an_error_of_the_export(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tensor = self.preferred(np.arange(3), 0)
        monkeypatch.setenv("SIMULATED_CUDA_BYTES", "20")
        assert refusal(tensor.to_dlpack) == (
            "Tensor 'x' cannot be copied to GPU 0: cuMemAlloc_v2 failed with "
            "CUDA_ERROR_OUT_OF_MEMORY (2): out of memory"
        )
        assert received(tensor).as_numpy().tolist() == [0, 1, 2]

    @pytest.mark.parametrize("device", [-1, 2])
    def test_a_gpu_that_is_not_there_is_not_preferred(self, device: int) -> None:
        assert self.preferred(np.arange(3), device).as_numpy().tolist() == [0, 1, 2]

    def test_texts_stay_on_the_cpu(self) -> None:
        tensor = self.preferred(np.array([b"a"], np.object_))
        assert tensor.as_numpy().tolist() == [b"a"]

    def test_empty_content_can_be_on_a_gpu(self) -> None:
        consumed = Consumed(self.preferred(np.zeros((2, 0))).to_dlpack())
        assert (consumed.place, consumed.shape) == ((2, 1), [2, 0])

    def test_without_a_gpu_it_stays_on_the_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SIMULATED_CUDA_FAIL", "cuDeviceGetCount=100")
        assert self.preferred(np.arange(3), 0).as_numpy().tolist() == [0, 1, 2]
