"""DLPack export and import (docs/reference/model-tensors.md, "from_dlpack")."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from typing import Any

import numpy as np
import pytest

from pb_utils import Tensor, TritonModelException, _gpu
from tests.unit.pb_utils.tensors import BFLOAT16, NUMERIC, Block, received, wire_tensor

NOT_CONTIGUOUS = (
    "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order "
    "are supported."
)
GPU_MISSING = (
    "DLPack capsule passed pointer to memory allocated on GPU device,           "
    "when GPU is not available"
)
NO_PRODUCER = (
    "Provided tensor is not supported. Tensor must be a DLPack capsule         "
    "or have `__dlpack__` and `__dlpack_device__` attributes"
)


def capsule_of(array: Any) -> Any:
    return array.__dlpack__()


def patched(array: Any, offset: int, kind: Any, value: int) -> Any:
    """Returns a capsule with one field of its managed tensor overwritten."""
    capsule = capsule_of(array)
    get = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    kind.from_address(get(capsule, b"dltensor") + offset).value = value
    return capsule


def refusal(obj: Any, name: str = "x") -> str:
    with pytest.raises(TritonModelException) as caught:
        Tensor.from_dlpack(name, obj)
    return str(caught.value)


class TestExport:
    @pytest.mark.parametrize("kind", NUMERIC.values())
    @pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 3), (1, 1)])
    def test_numpy_reads_every_type_and_shape(self, kind: Any, shape: tuple[int, ...]) -> None:
        array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(kind)
        for tensor in (Tensor("x", array), wire_tensor(array)):
            got = np.from_dlpack(tensor)
            assert (got.dtype, got.shape) == (array.dtype, shape)
            np.testing.assert_array_equal(got, array)

    def test_the_device_is_the_cpu(self) -> None:
        assert Tensor("x", np.zeros(1)).__dlpack_device__() == (1, 0)

    def test_bytes_are_refused(self) -> None:
        tensor = Tensor("x", np.array([b"a"], dtype=np.object_))
        for export in (tensor.to_dlpack, tensor.__dlpack__, lambda: tensor.__dlpack__(copy=True)):
            with pytest.raises(TritonModelException) as caught:
                export()
            assert str(caught.value) == "DLPack does not have support for string tensors."
        assert refusal(tensor) == "DLPack does not have support for string tensors."

    def test_a_capsule_holds_exactly_one_reference(self) -> None:
        for tensor in (Tensor("x", np.zeros(3)), wire_tensor(np.zeros(3))):
            before = sys.getrefcount(tensor)
            capsule = tensor.to_dlpack()
            assert sys.getrefcount(tensor) == before + 1
            second = tensor.__dlpack__()
            assert sys.getrefcount(tensor) == before + 2
            del capsule, second
            assert sys.getrefcount(tensor) == before

    def test_a_consumer_holds_exactly_one_reference(self) -> None:
        tensor = Tensor("x", np.zeros(3))
        before = sys.getrefcount(tensor)
        array = np.from_dlpack(tensor)
        assert sys.getrefcount(tensor) == before + 1
        again = Tensor.from_dlpack("y", tensor)
        assert sys.getrefcount(tensor) == before + 2
        del array, again
        gc.collect()
        assert sys.getrefcount(tensor) == before

    def test_a_capsule_outlives_its_tensor(self) -> None:
        tensor = wire_tensor(np.arange(3.0))
        capsule = tensor.to_dlpack()
        del tensor
        gc.collect()
        assert Tensor.from_dlpack("y", capsule).as_numpy().tolist() == [0, 1, 2]

    def test_a_capsule_keeps_its_memory_when_the_tensor_is_sent(self) -> None:
        tensor = wire_tensor(np.arange(1000.0))
        array = np.from_dlpack(tensor)
        tensor._set_wire_data(memoryview(bytes(tensor._wire_data())), Block())
        others = [np.full(1000, -1.0) for _ in range(10)]  # reuse memory that was freed too early
        assert array.tolist() == list(range(1000))
        assert len(others) == 10

    def test_an_array_is_exported_without_a_copy(self) -> None:
        array = np.zeros(3)
        assert np.shares_memory(np.from_dlpack(Tensor("x", array)), array)

    def test_copy_can_be_requested(self) -> None:
        array = np.zeros(3)
        tensor = Tensor("x", array)
        capsule = tensor.__dlpack__(copy=True)
        del tensor
        copied = Tensor.from_dlpack("y", capsule).as_numpy(copy=False)
        assert not np.shares_memory(copied, array)
        assert copied.tolist() == array.tolist()

    def test_the_keywords_of_consumers_are_understood(self) -> None:
        tensor = Tensor("x", np.zeros(3))
        tensor.__dlpack__(None)
        tensor.__dlpack__(stream=None, max_version=(1, 0), dl_device=(1, 0), copy=None)
        with pytest.raises(BufferError):
            tensor.__dlpack__(dl_device=(2, 0))

    def test_changes_through_an_export_are_sent_and_not_shared(self) -> None:
        data, owner = memoryview(bytearray(8)).toreadonly(), Block()
        tensor = Tensor._from_wire("x", 11, [2], data, owner)
        shared = Tensor.from_dlpack("y", tensor)
        writable = np.frombuffer(shared._wire_data(), np.float32)
        writable[0] = 5
        assert received(tensor).as_numpy().tolist() == [5, 0]
        assert bytes(data) == bytes(8)
        assert tensor._owner is None
        assert tensor.as_numpy().tolist() == [0, 0]  # the content at the time of from_dlpack
        assert np.from_dlpack(tensor).tolist() == [5, 0]

    def test_export_does_not_change_the_array_of_as_numpy(self) -> None:
        tensor = wire_tensor(np.zeros(2))
        array = tensor.as_numpy()
        array[0] = 1
        assert np.from_dlpack(tensor).tolist() == [0, 0]
        assert tensor.as_numpy() is array

    def test_a_read_only_array_cannot_be_changed_through_an_export(self) -> None:
        array = np.frombuffer(bytes(8), np.float32)
        tensor = Tensor("x", array)
        writable = Tensor.from_dlpack("y", tensor)
        np.frombuffer(writable._wire_data(), np.float32)[0] = 1
        assert array.tolist() == [0, 0]
        assert tensor.as_numpy() is array
        assert received(tensor).as_numpy().tolist() == [1, 0]

    def test_sent_bytes_cannot_be_changed_through_an_export(self) -> None:
        tensor, block = Tensor("x", np.zeros(2, np.uint8)), bytearray(2)
        tensor._set_wire_data(memoryview(block), Block())
        np.frombuffer(Tensor.from_dlpack("y", tensor)._wire_data(), np.uint8)[0] = 1
        assert block == bytearray(2)
        assert bytes(tensor._wire_data()) == b"\1\0"


class TestImport:
    @pytest.mark.parametrize(("code", "kind"), NUMERIC.items())
    @pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 3), (1, 2, 1)])
    def test_every_type_and_shape_is_imported(
        self, code: int, kind: Any, shape: tuple[int, ...]
    ) -> None:
        array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(kind)
        for producer in (array, capsule_of(array), Tensor("y", array)):
            tensor = Tensor.from_dlpack("x", producer)
            assert (tensor.name(), tensor.triton_dtype(), tensor.shape()) == (
                "x",
                code,
                list(shape),
            )
            np.testing.assert_array_equal(tensor.as_numpy(), array)
            assert bytes(tensor._wire_data()) == array.tobytes()

    def test_the_producers_memory_is_sent_and_as_numpy_is_a_snapshot(self) -> None:
        array = np.zeros(2)
        tensor = Tensor.from_dlpack("x", array)
        array[0] = 1
        assert tensor.as_numpy().tolist() == [0, 0]
        assert tensor.as_numpy().flags.writeable
        assert received(tensor).as_numpy().tolist() == [1, 0]
        assert np.shares_memory(tensor.as_numpy(copy=False), array)
        assert tensor._owner is None

    def test_the_producers_memory_is_held_until_the_tensor_dies(self) -> None:
        array = np.zeros(2)
        alive = weakref.ref(array)
        tensor = Tensor.from_dlpack("x", array)
        del array
        gc.collect()
        assert alive() is not None
        data = tensor._wire_data()
        del tensor
        assert alive() is not None
        del data
        assert alive() is None

    @pytest.mark.parametrize("shape", [(3,), (0,)])
    def test_read_only_memory_is_imported_and_not_exported_as_writable(
        self, shape: tuple[int, ...]
    ) -> None:
        array = np.zeros(shape)
        array.flags.writeable = False
        tensor = Tensor.from_dlpack("x", array)
        assert tensor.as_numpy().tolist() == array.tolist()
        assert shape == (0,) or not np.shares_memory(np.from_dlpack(tensor), array)

    def test_gaps_in_the_first_dimension_are_closed(self) -> None:
        for array in (np.arange(6)[::2], np.arange(12).reshape(4, 3)[::2], np.arange(4)[::-1]):
            tensor = Tensor.from_dlpack("x", array)
            assert tensor.as_numpy().tolist() == array.tolist()
            assert received(tensor).as_numpy().tolist() == array.tolist()

    @pytest.mark.parametrize(
        "array", [np.zeros((2, 3)).T, np.zeros((2, 4))[:, ::2], np.zeros((2, 4, 2))[:, ::2]]
    )
    def test_other_gaps_are_refused(self, array: Any) -> None:
        assert refusal(array) == NOT_CONTIGUOUS

    def test_strides_of_dimensions_of_one_element_do_not_matter(self) -> None:
        array = np.zeros((3, 2))[:, :1]
        assert Tensor.from_dlpack("x", array).shape() == [3, 1]

    @pytest.mark.parametrize("name", ["", b""])
    def test_an_empty_name_is_refused_first(self, name: Any) -> None:
        for obj in (None, np.zeros(1)):
            assert refusal(obj, name) == "Tensor name cannot be an empty string."

    def test_a_name_must_be_text(self) -> None:
        with pytest.raises(TypeError, match=r"^from_dlpack\(\): incompatible function arguments\."):
            Tensor.from_dlpack(None, np.zeros(1))  # type: ignore[arg-type]  # wrong on purpose

    def test_objects_without_dlpack_are_refused(self) -> None:
        class Half:
            def __dlpack__(self) -> None: ...

        for obj in (None, [1.0], Half()):
            assert refusal(obj) == NO_PRODUCER

    @pytest.mark.parametrize("kind", [4, 10])
    def test_unknown_devices_are_refused(self, kind: int) -> None:
        text = f"DLDevice type {kind} is not support by Python backend."
        assert refusal(patched(np.zeros(1), 8, ctypes.c_int32, kind)) == text

    def test_gpu_memory_is_refused_before_it_is_exported(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(_gpu, "LIBRARY", "libcuda-is-not-here.so")
        _gpu._driver.cache_clear()

        class OnGpu:
            def __dlpack_device__(self) -> tuple[int, int]:
                return (2, 0)

            def __dlpack__(self, stream: Any = None) -> Any:
                raise AssertionError("must not be called")

        assert refusal(OnGpu()) == GPU_MISSING
        assert refusal(patched(np.zeros(1), 8, ctypes.c_int32, 2)) == GPU_MISSING

    def test_pinned_memory_counts_as_cpu(self) -> None:
        capsule = patched(np.ones(1), 8, ctypes.c_int32, 3)
        assert Tensor.from_dlpack("x", capsule).as_numpy().tolist() == [1]

    def test_a_byte_offset_is_honoured(self) -> None:
        capsule = patched(np.arange(3.0)[:2], 40, ctypes.c_uint64, 8)
        assert Tensor.from_dlpack("x", capsule).as_numpy().tolist() == [1, 2]

    def test_unknown_element_types_are_refused(self) -> None:
        assert refusal(np.zeros(1, np.complex64)) == "Dtype is invalid."
        assert refusal(patched(np.zeros(1), 22, ctypes.c_uint16, 2)) == "Dtype is invalid."
        assert refusal(patched(np.zeros(1), 20, ctypes.c_uint8, 4)) == (
            "Expected BF16 tensor to have 16 bits, but had: 64"
        )

    def test_a_refused_capsule_can_still_be_used(self) -> None:
        capsule = capsule_of(np.zeros((2, 3)).T)
        assert refusal(capsule) == NOT_CONTIGUOUS
        assert '"dltensor"' in repr(capsule)

    def test_a_consumed_capsule_is_renamed_and_refused(self) -> None:
        capsule = capsule_of(np.zeros(1))
        Tensor.from_dlpack("x", capsule)
        assert '"used_dlpack"' in repr(capsule)
        assert "has already been consumed" in refusal(capsule)

    def test_cpu_producers_are_called_without_a_stream(self) -> None:
        calls = []

        class Producer:
            array = np.ones(1)

            def __dlpack_device__(self) -> tuple[int, int]:
                return (1, 0)

            def __dlpack__(self, **arguments: Any) -> Any:
                calls.append(arguments)
                return self.array.__dlpack__()

        Tensor.from_dlpack("x", Producer())
        assert calls == [{"stream": None}]

    def test_errors_of_a_producer_pass_through(self) -> None:
        class Refuses:
            def __dlpack_device__(self) -> tuple[int, int]:
                return (1, 0)

            def __dlpack__(self, stream: Any = None) -> Any:
                raise BufferError("not now")

        with pytest.raises(BufferError, match="not now"):
            Tensor.from_dlpack("x", Refuses())

    def test_many_tensors_do_not_leak_memory(self) -> None:
        array = np.zeros(1000)
        before = sys.getrefcount(array)
        for _ in range(100):
            np.from_dlpack(Tensor.from_dlpack("x", array))
        gc.collect()
        assert sys.getrefcount(array) == before


def test_bf16_passes_between_tensors() -> None:
    tensor = Tensor.from_dlpack("y", Tensor("x", np.array([1.5], BFLOAT16)))
    assert tensor.triton_dtype() == 14
    assert received(tensor).as_bfloat16().tolist() == [1.5]


class TestTorch:
    @pytest.fixture
    def torch(self) -> Any:
        return pytest.importorskip("torch")

    @pytest.mark.parametrize("name", ["bool", "uint8", "int8", "int16", "int32", "int64"])
    def test_integers_round_trip(self, torch: Any, name: str) -> None:
        self.check(torch, torch.tensor([[0, 1], [1, 0]], dtype=getattr(torch, name)))

    @pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
    def test_floats_round_trip(self, torch: Any, name: str) -> None:
        self.check(torch, torch.tensor([[0.5, -1.0]], dtype=getattr(torch, name)))

    @pytest.mark.parametrize("name", ["bool", "bfloat16", "float32"])
    def test_empty_and_zero_dimensional_tensors_round_trip(self, torch: Any, name: str) -> None:
        self.check(torch, torch.zeros((), dtype=getattr(torch, name)))
        self.check(torch, torch.zeros((2, 0), dtype=getattr(torch, name)))

    @staticmethod
    def check(torch: Any, given: Any) -> None:
        tensor = received(Tensor.from_dlpack("x", given))
        for got in (
            torch.from_dlpack(tensor),
            torch.utils.dlpack.from_dlpack(tensor),
            torch.utils.dlpack.from_dlpack(tensor.to_dlpack()),
        ):
            assert got.dtype == given.dtype
            assert got.shape == given.shape
            assert torch.equal(got, given)

    def test_legacy_capsule_is_imported(self, torch: Any) -> None:
        capsule = torch.utils.dlpack.to_dlpack(torch.ones(2))
        assert Tensor.from_dlpack("x", capsule).as_numpy().tolist() == [1, 1]

    def test_writing_through_torch_changes_what_is_sent(self, torch: Any) -> None:
        tensor = wire_tensor(np.zeros(2, np.float32))
        torch.from_dlpack(tensor)[1] = 3
        assert received(tensor).as_numpy().tolist() == [0, 3]

    def test_a_consumer_holds_exactly_one_reference(self, torch: Any) -> None:
        tensor = Tensor("x", np.zeros(3))
        before = sys.getrefcount(tensor)
        taken = torch.utils.dlpack.from_dlpack(tensor.to_dlpack())
        assert sys.getrefcount(tensor) == before + 1
        del taken
        assert sys.getrefcount(tensor) == before

    def test_a_transposed_tensor_is_refused(self, torch: Any) -> None:
        assert refusal(torch.zeros(2, 3).T) == NOT_CONTIGUOUS
