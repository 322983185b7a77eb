"""Checks of arguments: types and error texts (docs/reference/model-module.md, "Arguments")."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import deque
from typing import Any

import numpy as np
import pytest

from c_python_backend_utils import MemoryType
from pb_utils import (
    TRITONSERVER_MEMORY_CPU,
    InferenceRequest,
    InferenceResponse,
    Logger,
    PreferredMemory,
    Tensor,
    TritonError,
    unload_model,
)

CONSTRUCTOR = r"^__init__\(\): incompatible constructor arguments\."


def tensor() -> Tensor:
    return Tensor("x", np.zeros(1))


def request(**changes: Any) -> InferenceRequest:
    arguments: dict[str, Any] = {
        "inputs": [],
        "requested_output_names": [],
        "model_name": "m",
        **changes,
    }
    return InferenceRequest(**arguments)


@pytest.mark.parametrize("name", ["x", b"x", bytearray(b"x"), np.str_("x"), np.bytes_(b"x")])
def test_text_may_be_str_bytes_or_bytearray_and_comes_back_as_str(name: Any) -> None:
    got = Tensor(name, np.zeros(1)).name()
    assert got == "x"
    assert type(got) is str


@pytest.mark.parametrize("name", [None, 1, ["x"], "\ud800"])
def test_values_that_are_not_text_are_rejected(name: Any) -> None:
    with pytest.raises(TypeError, match=CONSTRUCTOR + ".*'name' must be"):
        Tensor(name, np.zeros(1))


def test_invalid_utf8_is_rejected_as_a_name() -> None:
    with pytest.raises(UnicodeDecodeError):
        Tensor(b"\xff", np.zeros(1))


@pytest.mark.parametrize("value", [7, np.int8(7), np.uint64(7), np.array(7)])
def test_integer_accepts_any_object_with_index(value: Any) -> None:
    assert request(flags=value).flags() == 7
    assert type(request(timeout=value).timeout()) is int


def test_integer_accepts_bool() -> None:
    assert request(flags=True).flags() == 1


@pytest.mark.parametrize("value", [None, 1.0, "1", -1, 1 << 32])
def test_integer_rejects_other_types_and_out_of_range_values(value: Any) -> None:
    with pytest.raises(TypeError, match=CONSTRUCTOR + ".*'flags' must be an integer"):
        request(flags=value)
    with pytest.raises(TypeError, match=r"^set_flags\(\): incompatible function arguments\."):
        request().set_flags(value)


@pytest.mark.parametrize(
    ("argument", "low", "high"),
    [
        ("model_version", -(1 << 63), (1 << 63) - 1),
        ("flags", 0, (1 << 32) - 1),
        ("timeout", 0, (1 << 64) - 1),
    ],
)
def test_integers_have_a_width(argument: str, low: int, high: int) -> None:
    for value in (low, high):
        request(**{argument: value})
    for value in (low - 1, high + 1):
        with pytest.raises(TypeError, match=CONSTRUCTOR):
            request(**{argument: value})


@pytest.mark.parametrize("value", [[], (), np.array([], dtype=object), deque()])
def test_sequence_accepts_any_sequence_type(value: Any) -> None:
    assert request(inputs=value).inputs() == []
    assert InferenceResponse(value).output_tensors() == []


@pytest.mark.parametrize("value", [None, "x", b"x", bytearray(), {"x"}, {}, iter([]), 1])
def test_sequence_rejects_text_sets_iterators_and_none(value: Any) -> None:
    for argument in ("inputs", "requested_output_names"):
        with pytest.raises(TypeError, match=CONSTRUCTOR + f".*'{argument}' must be a sequence"):
            request(**{argument: value})
    with pytest.raises(TypeError, match=CONSTRUCTOR + ".*'output_tensors' must be a sequence"):
        InferenceResponse(value)


def test_elements_of_a_sequence_are_checked() -> None:
    with pytest.raises(TypeError, match=CONSTRUCTOR):
        request(inputs=[np.zeros(1)])
    with pytest.raises(TypeError, match=CONSTRUCTOR):
        InferenceResponse([tensor(), "x"])  # type: ignore[list-item]  # wrong on purpose
    with pytest.raises(TypeError, match=CONSTRUCTOR):
        request(requested_output_names=[None])
    names = request(requested_output_names=np.array([b"a", "b"], dtype=object))
    assert names.requested_output_names() == {"a", "b"}


@pytest.mark.parametrize("argument", ["inputs", "requested_output_names", "model_name"])
def test_a_missing_argument_is_named(argument: str) -> None:
    arguments: dict[str, Any] = {"inputs": [], "requested_output_names": [], "model_name": "m"}
    del arguments[argument]
    with pytest.raises(TypeError, match=CONSTRUCTOR + f" Missing required argument '{argument}'"):
        InferenceRequest(**arguments)


def test_missing_and_unknown_arguments_have_the_same_wording() -> None:
    untyped: Any = Tensor
    with pytest.raises(TypeError, match=CONSTRUCTOR):
        untyped("x")
    with pytest.raises(TypeError, match=CONSTRUCTOR):
        untyped("x", np.zeros(1), 3)
    with pytest.raises(TypeError, match=CONSTRUCTOR):
        request(unknown=1)
    untyped = TritonError
    with pytest.raises(TypeError, match=CONSTRUCTOR):
        untyped()
    untyped = Logger
    with pytest.raises(TypeError, match=r"^log_info\(\): incompatible function arguments\."):
        untyped.log_info()
    untyped = Tensor.from_dlpack
    with pytest.raises(TypeError, match=r"^from_dlpack\(\): incompatible function arguments\."):
        untyped("x")


def test_long_values_are_shortened_in_messages() -> None:
    with pytest.raises(TypeError) as caught:
        Tensor("x", [1.0] * 10_000)  # type: ignore[arg-type]  # wrong on purpose
    assert len(str(caught.value)) < 250
    assert "<class 'list'>" in str(caught.value)


def test_enumeration_members_behave_like_named_integers() -> None:
    assert TRITONSERVER_MEMORY_CPU is MemoryType.TRITONSERVER_MEMORY_CPU
    assert (TRITONSERVER_MEMORY_CPU.name, TRITONSERVER_MEMORY_CPU.value) == (
        "TRITONSERVER_MEMORY_CPU",
        1,
    )
    assert int(TRITONSERVER_MEMORY_CPU) == 1
    assert [10, 11][TRITONSERVER_MEMORY_CPU] == 11
    cpu: Any = TRITONSERVER_MEMORY_CPU
    assert cpu == 1
    assert cpu != 0
    assert cpu != MemoryType.TRITONSERVER_MEMORY_GPU
    assert cpu != Logger.WARNING  # a member of another enumeration
    assert cpu != "1"
    assert {cpu: "cpu"}[MemoryType(1)] == "cpu"
    assert {cpu: "cpu"}[1] == "cpu"
    assert not isinstance(cpu, int)
    with pytest.raises(TypeError):
        TRITONSERVER_MEMORY_CPU < MemoryType.TRITONSERVER_MEMORY_GPU  # type: ignore[operator]  # noqa: B015


def test_enumeration_parameters_take_members_only() -> None:
    PreferredMemory(TRITONSERVER_MEMORY_CPU, 1)
    PreferredMemory(preferred_memory_type=TRITONSERVER_MEMORY_CPU, preferred_device_id=0)
    for wrong in (1, None, Logger.WARNING):
        with pytest.raises(TypeError, match=CONSTRUCTOR):
            PreferredMemory(wrong)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(TypeError, match=CONSTRUCTOR):
        PreferredMemory(TRITONSERVER_MEMORY_CPU, "0")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(TypeError, match=r"^log\(\): incompatible function arguments\."):
        Logger.log("m", 1)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(TypeError, match=CONSTRUCTOR):
        TritonError("m", 1)  # type: ignore[arg-type]  # wrong on purpose


def test_refused_arguments_are_freed_without_the_garbage_collector() -> None:
    argument: Any = deque()
    freed = weakref.ref(argument)
    gc.disable()
    try:
        with contextlib.suppress(TypeError):
            InferenceResponse(error=argument)
        del argument
        assert freed() is None
    finally:
        gc.enable()


class Undecided:
    """As a tensor of torch with several elements."""

    def __bool__(self) -> bool:
        raise RuntimeError("Boolean value of Tensor with more than one value is ambiguous")


@pytest.mark.parametrize("flags", [np.array([True, False]), Undecided()], ids=["array", "torch"])
def test_an_array_of_several_elements_is_not_a_bool(flags: Any) -> None:
    with pytest.raises(TypeError, match=r"^unload_model\(\): incompatible.*must be a bool"):
        unload_model("m", flags)
