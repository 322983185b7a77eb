"""The texts that describe exceptions of models."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pb_utils
from stub.user_model import describe_exception


def description(obj: Any, name: str) -> str:
    """The first line of the text about an attribute that an object does not have."""
    with pytest.raises(AttributeError) as caught:
        getattr(obj, name)
    return describe_exception(caught.value).splitlines()[0]


@pytest.mark.skipif(sys.version_info < (3, 10), reason="errors do not have the object")
def test_a_misspelt_attribute_of_an_object_is_followed_by_the_one_that_was_meant() -> None:
    tensor = pb_utils.Tensor("X", np.zeros(1))
    problem = "AttributeError: 'Tensor' object has no attribute 'as_nunpy'"
    assert description(tensor, "as_nunpy") == f"{problem}, did you mean 'as_numpy'?"
    assert description(tensor, "volume") == problem.replace("as_nunpy", "volume")
    missing = "AttributeError: 'NoneType' object has no attribute"
    assert description(None, "as_numpy") == (
        f"{missing} 'as_numpy'; if it is from get_input_tensor_by_name, the request has no such"
        " input"
    )
    for name in ("append", "shape"):  # arrays of many libraries have a shape
        assert description(None, name) == f"{missing} '{name}'"
    assert description([], "apend") == "AttributeError: 'list' object has no attribute 'apend'"


def test_a_misspelt_attribute_of_a_class_has_one_suggestion() -> None:
    assert description(pb_utils.Logger, "log_eror") == (
        "AttributeError: type object 'Logger' has no attribute 'log_eror',"
        " did you mean 'log_error'?"
    )


def test_a_file_that_lies_beside_the_model_is_named_where_a_relative_path_misses_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "weights.npz").touch()
    source = compile("def load(name): open(name)", str(tmp_path / "model.py"), "exec")
    module: dict[str, Any] = {}
    exec(source, module)

    def described(name: str) -> str:
        with pytest.raises(FileNotFoundError) as raised:
            module["load"](name)
        return describe_exception(raised.value).partition("\n")[0]

    missing = "FileNotFoundError: [Errno 2] No such file or directory:"
    assert described("weights.npz") == (
        f"{missing} 'weights.npz'; it lies in {tmp_path}, but a relative path starts at the"
        " working directory of the server: use Path(__file__).parent / 'weights.npz'"
    )
    assert described("other.npz") == f"{missing} 'other.npz'"
    assert described("/weights.npz") == f"{missing} '/weights.npz'"


def test_an_error_that_is_raised_again_has_the_line_of_the_call_too() -> None:
    def fails() -> None:
        raise KeyError("k")

    def raises_again() -> None:
        try:
            fails()
        except KeyError as error:
            raise error

    with pytest.raises(KeyError) as caught:
        raises_again()
    lines = [line.rpartition("(")[2] for line in describe_exception(caught.value).splitlines()]
    first = raises_again.__code__.co_firstlineno
    assert lines[4:6] == [f"{first + 2}): raises_again", f"{first + 4}): raises_again"]


class _UnreadableError(Exception):
    def __str__(self) -> str:
        raise self


def test_an_error_without_a_readable_message_is_followed_by_the_reason() -> None:
    class OddError(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    first, *frames = describe_exception(OddError()).splitlines()
    assert first == "OddError: <MESSAGE UNAVAILABLE DUE TO ANOTHER EXCEPTION>"
    assert frames[:3] == ["MESSAGE UNAVAILABLE DUE TO EXCEPTION: ValueError: no text", "", "At:"]
    assert "__str__" in frames[3]


def test_a_message_that_can_never_be_read_is_described_once() -> None:
    lines = describe_exception(_UnreadableError()).splitlines()
    text = "_UnreadableError: <MESSAGE UNAVAILABLE DUE TO ANOTHER EXCEPTION>"
    assert lines[0] == text
    assert [line for line in lines if "EXCEPTION: " in line] == [
        f"MESSAGE UNAVAILABLE DUE TO EXCEPTION: {text}"
    ]


class _BrokenList(list[str]):
    def __iter__(self) -> Iterator[str]:
        raise ValueError("never")


@pytest.mark.parametrize("notes", [5, "text", None, np.zeros(2), _BrokenList(["note"])])
def test_notes_that_are_no_list_are_left_out(notes: object) -> None:
    error = ValueError("broken")
    vars(error)["__notes__"] = notes
    assert describe_exception(error) == "ValueError: broken"
