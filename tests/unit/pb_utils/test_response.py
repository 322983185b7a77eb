"""Responses."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from pb_utils import (
    InferenceResponse,
    Tensor,
    TritonError,
    TritonModelException,
    get_output_tensor_by_name,
)

CODES = [
    "UNKNOWN",
    "INTERNAL",
    "NOT_FOUND",
    "INVALID_ARG",
    "UNAVAILABLE",
    "UNSUPPORTED",
    "ALREADY_EXISTS",
    "CANCELLED",
]


@pytest.mark.parametrize(("value", "name"), list(enumerate(CODES)))
def test_codes_are_attributes_of_the_class(value: int, name: str) -> None:
    code: Any = getattr(TritonError, name)
    assert code == value
    assert code.name == name
    assert TritonError("text", code).code() is code


def test_an_error_is_internal_unless_said_otherwise() -> None:
    error = TritonError("text")
    assert error.message() == "text"
    assert error.code() is TritonError.INTERNAL
    assert repr(error) == "TritonError('text', code=TritonError.INTERNAL)"
    by_keyword = TritonError(message="text", code=TritonError.CANCELLED)
    assert by_keyword.code() == TritonError.CANCELLED


def test_a_code_is_printed_as_in_triton() -> None:
    assert str(TritonError.NOT_FOUND) == "__ErrorCode.NOT_FOUND"
    assert repr(TritonError.NOT_FOUND) == "<__ErrorCode.NOT_FOUND: 2>"


def test_an_error_is_no_exception() -> None:
    assert not isinstance(TritonError("text"), BaseException)


def test_messages_are_always_readable_text() -> None:
    assert TritonError(b"text").message() == "text"
    assert TritonError(b"a\xffb").message() == r"a\xffb"
    assert TritonError("a\udcffb").message() == r"a\udcffb"
    assert TritonError("\u00e4").message() == "\u00e4"


@pytest.mark.parametrize("message", [None, 1, ValueError("x")])
def test_a_message_must_be_text(message: Any) -> None:
    with pytest.raises(TypeError, match=r"^__init__\(\): incompatible constructor arguments\."):
        TritonError(message)


def test_the_exception_is_an_ordinary_one() -> None:
    assert issubclass(TritonModelException, Exception)
    assert str(TritonModelException("boom")) == "boom"
    assert str(TritonModelException()) == ""
    assert TritonModelException.__name__ == "TritonModelException"


def tensor(name: str = "x") -> Tensor:
    return Tensor(name, np.zeros(1))


def test_empty_response_has_no_outputs_and_no_error() -> None:
    response = InferenceResponse()
    assert response.output_tensors() == []
    assert response.has_error() is False
    assert response.error() is None
    assert response.parameters() == "{}"


def test_constructor_arguments_can_be_read() -> None:
    x, error = tensor(), TritonError("boom")
    response = InferenceResponse(output_tensors=[x], error=error, parameters={"a": 1})
    assert response.output_tensors() == [x]
    assert response.has_error() is True
    assert response.error() is error
    assert json.loads(response.parameters()) == {"a": 1}
    assert InferenceResponse([x], None, None).output_tensors() == [x]


def test_reading_the_tensors_gives_a_new_list() -> None:
    response = InferenceResponse([tensor()])
    response.output_tensors().clear()
    assert len(response.output_tensors()) == 1


def test_a_list_changed_later_does_not_change_the_response() -> None:
    tensors, parameters = [tensor()], {"a": 1}
    response = InferenceResponse(tensors, None, dict(parameters))
    tensors.clear()
    assert len(response.output_tensors()) == 1


def test_an_output_tensor_may_not_be_none() -> None:
    missing: Any = [tensor(), None]
    with pytest.raises(TritonModelException) as caught:
        InferenceResponse(missing)
    assert str(caught.value) == "Output tensor for inference response should not be empty."


@pytest.mark.parametrize("error", ["boom", 1, ValueError("boom")])
def test_an_error_must_be_a_triton_error(error: Any) -> None:
    with pytest.raises(TypeError, match=r"^__init__\(\): incompatible constructor arguments\."):
        InferenceResponse([], error)


@pytest.mark.parametrize("parameters", [["a"], "a", 1, (("a", 1),)])
def test_parameters_must_be_a_dict(parameters: Any) -> None:
    with pytest.raises(TritonModelException) as caught:
        InferenceResponse(parameters=parameters)
    assert str(caught.value) == f"Expect dict, got {type(parameters)}"


def test_parameter_keys_must_be_text() -> None:
    wrong: Any = {1: "a"}
    with pytest.raises(TritonModelException) as caught:
        InferenceResponse(parameters=wrong)
    assert str(caught.value) == (
        "Expect parameters keys to have type str, found type <class 'int'>"
    )


@pytest.mark.parametrize("value", [1.5, None, [1], np.int64(1), np.bool_(True), b"a"])
def test_parameter_values_must_be_bool_int_or_str(value: Any) -> None:
    with pytest.raises(TritonModelException) as caught:
        InferenceResponse(parameters={"a": value})
    assert str(caught.value) == (
        f"Expect parameters values to have type bool/int/str, found type {type(value)}"
    )


def test_parameters_are_json_text() -> None:
    parameters: Any = {"b": True, "i": -(1 << 63), "s": 'a"\u00e4'}
    assert json.loads(InferenceResponse(parameters=parameters).parameters()) == parameters


def test_a_received_response_without_parameters_gives_empty_text() -> None:
    response = InferenceResponse._from_wire([], TritonError("boom"), None)
    assert response.parameters() == ""
    assert InferenceResponse._from_wire([], None, {"f": 0.5}).parameters() == '{"f":0.5}'


def test_outputs_are_found_by_name() -> None:
    first, second = tensor("a"), tensor("b")
    response = InferenceResponse([first, second, tensor("b")])
    assert get_output_tensor_by_name(response, "b") is second
    assert get_output_tensor_by_name(response, "c") is None


def test_repr_shows_error_or_outputs() -> None:
    assert "name='x'" in repr(InferenceResponse([tensor()]))
    assert "boom" in repr(InferenceResponse(error=TritonError("boom")))
