"""Tensors: accepted arrays, views and copies of the content, and the bytes that are sent."""

from __future__ import annotations

import builtins
import gc
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pb_utils import Tensor, TritonModelException
from tests.unit.pb_utils.tensors import BFLOAT16, NUMERIC, Block, received, wire_tensor

numeric_arrays = st.sampled_from(list(NUMERIC.values())).flatmap(
    lambda kind: hnp.arrays(kind, hnp.array_shapes(min_dims=0, min_side=0, max_side=4))
)
bytes_arrays = hnp.arrays(
    np.object_, hnp.array_shapes(min_dims=0, min_side=0, max_side=4), elements=st.binary()
)


@given(numeric_arrays | bytes_arrays)
def test_every_array_arrives_as_it_was_sent(array: Any) -> None:
    sent = Tensor("x", array)
    data = sent._wire_data()
    assert memoryview(data).format == "B"
    assert memoryview(data).ndim == 1
    assert array.dtype == np.object_ or len(data) == array.nbytes
    got = received(sent)
    assert (got.name(), got.shape(), got.triton_dtype()) == (
        "x",
        list(array.shape),
        sent.triton_dtype(),
    )
    assert got.as_numpy().dtype == array.dtype
    assert got.as_numpy().shape == array.shape
    assert got.as_numpy().tobytes() == array.tobytes() or array.dtype == np.object_
    np.testing.assert_array_equal(got.as_numpy(), array)


def test_a_masked_array_is_sent_without_its_mask() -> None:
    masked = np.ma.masked_array(np.arange(3, dtype=np.float32), mask=[False, True, False])
    assert received(Tensor("x", masked)).as_numpy().tolist() == [0, 1, 2]


@given(numeric_arrays)
def test_arrays_that_are_not_contiguous_are_copied(array: Any) -> None:
    transposed = array.T
    tensor = Tensor("x", transposed)
    assert tensor.as_numpy().flags.c_contiguous
    np.testing.assert_array_equal(received(tensor).as_numpy(), transposed)


@pytest.mark.parametrize(("code", "kind"), [*NUMERIC.items(), (13, np.object_), (13, "S4")])
def test_the_data_type_follows_the_dtype(code: int, kind: Any) -> None:
    assert Tensor("x", np.zeros((2, 3), kind)).triton_dtype() == code


@pytest.mark.parametrize("kind", ["c8", "M8[s]", ">f4", ">i8", np.longdouble, [("a", "f4")], "V2"])
def test_unsupported_dtypes_are_refused(kind: Any) -> None:
    with pytest.raises(TritonModelException, match=r"^NumPy dtype is not supported\.$"):
        Tensor("x", np.zeros(1, kind))


def test_an_array_of_str_is_refused_with_what_takes_one() -> None:
    kinds = np.array(["setosa", "virginica"])  # as classifiers of scikit-learn predict them
    with pytest.raises(TritonModelException) as refused:
        Tensor("KIND", kinds)
    assert str(refused.value) == (
        "NumPy dtype is not supported. 'KIND' is an array of str: Tensor.from_strings('KIND', ...)"
        " makes a tensor of it."
    )
    assert Tensor.from_strings("KIND", kinds).as_strings().tolist() == ["setosa", "virginica"]


@pytest.mark.parametrize("array", [None, [1.0], 1.0, np.float32(1)])
@pytest.mark.parametrize("name", ["x", ""])
def test_array_type_is_checked_before_the_name(array: Any, name: str) -> None:
    with pytest.raises(TypeError, match=r"^__init__\(\): incompatible constructor arguments\."):
        Tensor(name, array)


@pytest.mark.parametrize("name", ["", b"", bytearray()])
def test_the_name_may_not_be_empty(name: Any) -> None:
    with pytest.raises(TritonModelException, match=r"^Tensor name cannot be an empty string\.$"):
        Tensor(name, np.zeros(1))


def test_name_shape_and_type_can_be_read() -> None:
    tensor = Tensor("x", np.zeros((2, 3), np.float32))
    assert tensor.is_cpu() is True
    assert tensor.shape() == [2, 3]
    assert repr(tensor) == "Tensor(name='x', datatype=FP32, shape=[2, 3])"
    tensor.shape().append(4)
    assert tensor.shape() == [2, 3]


class TestCreatedFromAnArray:
    def test_as_numpy_returns_that_array(self) -> None:
        for array in (np.zeros(3), np.array([b"a"], dtype=np.object_), np.array([b"a"])):
            assert Tensor("x", array).as_numpy() is array

    def test_changes_are_sent_until_the_first_send(self) -> None:
        array = np.zeros(2, np.uint8)
        tensor = Tensor("x", array)
        array[0] = 1
        captured = memoryview(bytes(tensor._wire_data()))
        owner = Block()
        tensor._set_wire_data(captured, owner)
        array[1] = 1
        assert bytes(tensor._wire_data()) == b"\x01\x00"
        assert tensor._owner is owner
        assert tensor.as_numpy() is array

    def test_bytes_are_captured_at_construction(self) -> None:
        array = np.array([b"a"], dtype=np.object_)
        tensor = Tensor("x", array)
        array[0] = b"changed"
        assert received(tensor).as_numpy().tolist() == [b"a"]

    def test_sending_does_not_copy(self) -> None:
        array = np.zeros(4)
        data = np.frombuffer(Tensor("x", array)._wire_data(), np.float64)
        assert np.shares_memory(data, array)
        array.flags.writeable = False
        assert np.shares_memory(np.frombuffer(Tensor("x", array)._wire_data(), float), array)

    def test_the_array_is_kept_alive(self) -> None:
        array = np.arange(3)
        tensor, alive = Tensor("x", array), weakref.ref(array)
        del array
        assert alive() is tensor.as_numpy()

    def test_bytes_elements_become_text(self) -> None:
        array = np.array([b"raw\0", "\u00e4", 5, None], dtype=np.object_)
        assert received(Tensor("x", array)).as_numpy().tolist() == [
            b"raw\0",
            "\u00e4".encode(),
            b"5",
            b"None",
        ]

    def test_a_view_without_a_copy_is_read_only(self) -> None:
        array = np.zeros(2)
        view = Tensor("x", array).as_numpy(copy=False)
        assert np.shares_memory(view, array)
        with pytest.raises(ValueError):
            view[0] = 1


class TestReceived:
    def test_as_numpy_is_one_private_writable_copy(self) -> None:
        tensor = wire_tensor(np.arange(6, dtype=np.int32).reshape(2, 3))
        array = tensor.as_numpy()
        assert array.flags.writeable
        assert array.flags.c_contiguous
        assert array.flags.aligned
        assert array.base is not None
        assert tensor.as_numpy() is array
        array[:] = 0
        np.testing.assert_array_equal(
            received(tensor).as_numpy(), np.arange(6, dtype=np.int32).reshape(2, 3)
        )

    def test_a_copy_outlives_tensor_and_owner(self) -> None:
        owner = Block()
        alive = weakref.ref(owner)
        tensor = wire_tensor([1.0, 2.0], owner=owner)
        del owner
        array = tensor.as_numpy()
        assert alive() is not None
        del tensor
        assert alive() is None
        assert array.tolist() == [1.0, 2.0]

    def test_a_view_keeps_the_owner_alive(self) -> None:
        owner = Block()
        alive = weakref.ref(owner)
        tensor = wire_tensor(np.arange(4.0), owner=owner)
        row = tensor.as_numpy(copy=False).reshape(2, 2)[1]
        del owner, tensor
        gc.collect()
        assert alive() is not None
        assert row.tolist() == [2.0, 3.0]
        del row
        assert alive() is None

    def test_a_view_shares_memory_and_cannot_be_written(self) -> None:
        data = memoryview(bytes(8))
        tensor = Tensor._from_wire("x", 11, [2], data, None)
        view = tensor.as_numpy(copy=False)
        assert np.shares_memory(view, np.frombuffer(data, np.uint8))
        assert type(view) is np.ndarray
        with pytest.raises(ValueError):
            view.flags.writeable = True
        assert tensor.as_numpy().flags.writeable  # a private copy can still be made later

    def test_received_bytes_are_forwarded_with_their_owner(self) -> None:
        owner, data = Block(), memoryview(bytes(4))
        tensor = Tensor._from_wire("x", 11, [1], data, owner)
        tensor.as_numpy()[0] = 7
        assert tensor._wire_data() is data
        assert tensor._owner is owner

    def test_bytes_are_an_object_array_in_the_tensors_shape(self) -> None:
        elements = np.array([[b"a\0", b""], [b"\xff", b"b"]], dtype=np.object_)
        array = wire_tensor(elements).as_numpy()
        assert array.dtype == np.object_
        assert array.tolist() == elements.tolist()
        assert wire_tensor(elements).as_numpy(copy=False).tolist() == elements.tolist()

    @pytest.mark.parametrize("kind", [*NUMERIC.values(), np.object_])
    @pytest.mark.parametrize("shape", [(0,), (2, 0, 3), (1, 0)])
    def test_empty_tensors_keep_their_shape(self, kind: Any, shape: tuple[int, ...]) -> None:
        tensor = wire_tensor(np.zeros(shape, kind))
        assert tensor.as_numpy().shape == shape
        assert tensor.as_numpy(copy=False).shape == shape

    def test_zero_dimensional_tensors_have_one_element(self) -> None:
        tensor = wire_tensor(np.float16(1.5))
        assert tensor.shape() == []
        assert tensor.as_numpy()[()] == tensor.as_numpy(copy=False)[()] == 1.5
        assert wire_tensor(np.array(b"x", dtype=np.object_)).as_numpy()[()] == b"x"

    def test_memory_that_is_not_aligned_is_read_correctly(self) -> None:
        data = memoryview(b"\0" + np.arange(3.0).tobytes())[1:]
        tensor = Tensor._from_wire("x", 12, [3], data, None)
        assert tensor.as_numpy(copy=False).tolist() == tensor.as_numpy().tolist() == [0, 1, 2]


class TestBf16:
    array = np.array([[1.5, -2.0]], BFLOAT16)

    @pytest.mark.parametrize("copy", [True, False])
    def test_as_numpy_refuses(self, copy: bool) -> None:
        for tensor in (Tensor("x", self.array), received(Tensor("x", self.array))):
            with pytest.raises(TritonModelException) as caught:
                tensor.as_numpy(copy=copy)
            assert str(caught.value) == (
                "Tensor dtype is BF16 and cannot be converted to NumPy. "
                "Use to_dlpack() and from_dlpack() instead."
            )

    def test_bf16_round_trips_as_ml_dtypes(self) -> None:
        tensor = Tensor("x", self.array)
        assert tensor.triton_dtype() == 14
        assert tensor.as_bfloat16() is self.array
        assert len(tensor._wire_data()) == 4
        got = received(tensor).as_bfloat16()
        assert got.dtype == ml_dtypes.bfloat16
        assert got.tolist() == self.array.tolist()

    def test_received_bf16_is_one_private_copy(self) -> None:
        tensor = received(Tensor("x", self.array))
        array = tensor.as_bfloat16()
        array[:] = 0
        assert tensor.as_bfloat16() is array
        assert array.dtype == ml_dtypes.bfloat16
        assert received(tensor).as_bfloat16().tolist() == self.array.tolist()

    def test_empty_and_zero_dimensional_bf16_tensors_work(self) -> None:
        for shape in ((), (0, 2)):
            assert received(Tensor("x", np.zeros(shape, BFLOAT16))).as_bfloat16().shape == shape

    def test_other_types_are_refused(self) -> None:
        with pytest.raises(TritonModelException, match="Tensor dtype is FP64, not BF16"):
            Tensor("x", np.zeros(1)).as_bfloat16()

    def test_missing_ml_dtypes_error_names_the_package(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tensor = received(Tensor("x", self.array))
        real = builtins.__import__

        def no_ml_dtypes(name: str, *rest: Any) -> Any:
            if name == "ml_dtypes":
                raise ImportError(name)
            return real(name, *rest)

        monkeypatch.setattr(builtins, "__import__", no_ml_dtypes)
        with pytest.raises(ImportError, match="pip install ml_dtypes"):
            tensor.as_bfloat16()


@pytest.mark.parametrize(
    ("values", "shape"),
    [
        (["a", "", "\u00e4\u20ac"], [3]),
        ([["a", "b"]], [1, 2]),
        ([], [0]),
        (np.array([["a"], ["bc"]]), [2, 1]),
        (np.array(["a", "bc"], dtype=np.object_), [2]),
    ],
)
def test_texts_become_a_tensor_and_texts_again(values: Any, shape: list[int]) -> None:
    tensor = Tensor.from_strings("T", values)
    assert (tensor.name(), tensor.shape(), tensor.triton_dtype()) == ("T", shape, 13)
    strings = tensor.as_strings()
    assert strings.dtype == np.object_
    assert strings.tolist() == np.asarray(values).tolist()
    assert all(type(text) is str for text in strings.flat)


@pytest.mark.parametrize("values", ["text", b"text", [b"x"], [1], [["a"], ["b", "c"]], [None]])
def test_only_texts_become_a_tensor_of_texts(values: Any) -> None:
    with pytest.raises(TypeError, match="Argument 'values' must be a list of str, got "):
        Tensor.from_strings("T", values)


def test_a_tensor_of_another_type_has_no_texts() -> None:
    with pytest.raises(TritonModelException) as caught:
        Tensor("X", np.zeros(1, np.float32)).as_strings()
    assert str(caught.value) == "Tensor dtype is FP32, not BYTES."


def test_an_element_that_is_not_utf_8_is_named() -> None:
    tensor = Tensor("X", np.array([b"a", b"\xff"], dtype=np.object_))
    with pytest.raises(TritonModelException, match="^Element 1 of tensor 'X' is not valid UTF-8: "):
        tensor.as_strings()
