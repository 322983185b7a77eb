"""The error of a response, and the exception of the API."""

from __future__ import annotations

from typing import Any

import pytest

from pb_utils import TritonError, TritonModelException

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
