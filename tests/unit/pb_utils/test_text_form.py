"""The text form of tensors: of inputs on the command line, and of responses at a terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import pb_utils
from pb_utils._text_form import InvalidInput, read_inputs


def read(
    text: str, data_type: str = "TYPE_FP32", dims: tuple[int, ...] = (-1,), batch: int = 0
) -> Any:
    """Parses a text as input X of the given type."""
    entry = {"name": "X", "data_type": data_type, "dims": list(dims)}
    return read_inputs([("X", text)], {"max_batch_size": batch, "input": [entry]})["X"]


def same(array: npt.NDArray[Any], expected: npt.NDArray[Any]) -> bool:
    return array.dtype == expected.dtype and bool(np.array_equal(array, expected))


def complaint(*arguments: Any, **options: Any) -> str:
    with pytest.raises(InvalidInput) as caught:
        read(*arguments, **options)
    return str(caught.value)


def test_json_is_typed_by_the_configuration() -> None:
    assert same(read("[1, 2.5]"), np.array([1, 2.5], np.float32))
    assert same(read("[1, 2]", "TYPE_UINT8"), np.array([1, 2], np.uint8))
    assert same(read("[true]", "TYPE_BOOL"), np.array([True]))
    top = 2**64 - 1
    assert same(read(f"[{top}]", "TYPE_UINT64"), np.array([top], np.uint64))
    assert same(read("[]"), np.array([], np.float32))
    assert same(read("[[1, 2], [3, 4]]", dims=(2, -1)), np.array([[1, 2], [3, 4]], np.float32))


@pytest.mark.parametrize(
    ("text", "data_type", "problem"),
    [
        ("[1.5]", "TYPE_INT32", "expected whole numbers, got '[1.5]'"),
        ("[300]", "TYPE_UINT8", "expected numbers from 0 to 255"),
        ("[-1]", "TYPE_UINT64", "expected numbers from 0 to 18446744073709551615"),
        ("[true]", "TYPE_FP32", "expected numbers, got '[true]'"),
        ("[1]", "TYPE_BOOL", "expected true or false, got '[1]'"),
        ('["1"]', "TYPE_INT8", "expected whole numbers"),
        ("[1]", "TYPE_STRING", "expected texts, got '1'"),
        ("null", "TYPE_FP32", "expected numbers, got 'null'"),
        ("[1,", "TYPE_FP32", "'[1,' is not JSON"),
        ('[["a"], ["b", "c"]]', "TYPE_STRING", "its lists differ in length"),
        ("@x.txt", "TYPE_FP32", "'x.txt' must end in .npy or .json"),
        ("@nowhere.npy", "TYPE_FP32", "No such file"),
    ],
)
def test_a_value_outside_the_type_is_refused_and_never_rounded(
    text: str, data_type: str, problem: str
) -> None:
    said = complaint(text, data_type)
    assert said.startswith(f"input X {data_type} [-1]: ")
    assert problem in said


def test_text_for_a_string_input_needs_no_quotes() -> None:
    for text in ("hello there", '"hello there"', '["hello there"]'):
        array = read(text, "TYPE_STRING")
        assert array.dtype == np.object_
        assert array.tolist() == [b"hello there"]
    assert read('["a\\u0000", ""]', "TYPE_STRING").tolist() == [b"a\0", b""]
    assert read('"é"', "TYPE_STRING").tolist() == ["é".encode()]
    assert read("[]", "TYPE_STRING").shape == (0,)
    nested = read('[["a", "b"]]', "TYPE_STRING", dims=(1, 2))
    assert nested.tolist() == [[b"a", b"b"]]


def test_missing_batch_dimensions_are_added() -> None:
    assert read("1", dims=(1, -1)).shape == (1, 1)
    assert read("[1, 2]", batch=8).shape == (1, 2)
    assert read("[[1, 2], [3, 4]]", batch=8).shape == (2, 2)
    assert read("1", dims=()).shape == ()
    assert read("1", dims=(), batch=8).shape == (1,)


def test_other_shapes_are_refused() -> None:
    assert complaint("[1, 2]", dims=(3,)) == ("input X TYPE_FP32 [3]: expected that shape, got [2]")
    assert complaint("1", dims=(3,)).endswith("expected that shape, got []")
    assert complaint("[[1], [2], [3]]", batch=2) == (
        "input X TYPE_FP32 [-1, -1] (the first is the batch, at most 2): expected that shape, got"
        " [3, 1]"
    )


def test_a_reshaped_input_has_the_shape_that_the_model_gets() -> None:
    entry = {"name": "X", "data_type": "TYPE_FP32", "dims": [1], "reshape": {"shape": []}}
    inputs = read_inputs([("X", "7")], {"max_batch_size": 0, "input": [entry]})
    assert np.shape(inputs["X"]) == ()


def test_files_hold_json_or_arrays(tmp_path: Path) -> None:
    values = tmp_path / "x.json"
    values.write_text("[1, 2]")
    assert same(read(f"@{values}"), np.array([1, 2], np.float32))
    array = tmp_path / "x.npy"
    np.save(array, np.array([3, 4], np.float32))
    assert same(read(f"@{array}"), np.array([3, 4], np.float32))
    assert f"expected int64, '{array}' holds float32: convert it" in complaint(
        f"@{array}", "TYPE_INT64"
    )
    np.save(array, np.array(["é", "b"]))
    assert read(f"@{array}", "TYPE_STRING").tolist() == ["é".encode(), b"b"]
    np.save(array, np.array([b"\xff"]))
    assert read(f"@{array}", "TYPE_STRING").tolist() == [b"\xff"]
    np.save(array, np.array([1]))
    assert "expected an array of texts" in complaint(f"@{array}", "TYPE_STRING")
    np.save(array, np.array([object()]), allow_pickle=True)
    assert "allow_pickle" in complaint(f"@{array}", "TYPE_STRING"), "pickles run code"


def test_any_other_file_is_one_element_of_a_string_input(tmp_path: Path) -> None:
    image = tmp_path / "cat.png"
    image.write_bytes(b"\x89PNG\0\xff\0")
    assert read(f"@{image}", "TYPE_STRING").tolist() == [b"\x89PNG\0\xff\0"]
    assert read(f"@{image}", "TYPE_STRING", batch=8).shape == (1, 1)
    assert "No such file" in complaint("@nowhere.png", "TYPE_STRING")
    assert "Is a directory" in complaint(f"@{tmp_path}", "TYPE_STRING")


@pytest.mark.parametrize("data_type", [*pb_utils.TRITON_STRING_TO_NUMPY, "TYPE_BF16"])
def test_random_values_are_reproducible_for_every_type(data_type: str) -> None:
    first, second = (read("random", data_type, dims=(-1, 5), batch=2) for _ in range(2))
    if data_type == "TYPE_BF16":
        assert first.shape() == [1, 1, 5]
        assert bytes(first._wire_data()) == bytes(second._wire_data())
    else:
        assert first.shape == (1, 1, 5)
        assert first.dtype == pb_utils.triton_string_to_numpy(data_type)
        assert first.tolist() == second.tolist()


def test_bf16_is_rounded_to_the_nearest_as_torch_does() -> None:
    torch = pytest.importorskip("torch")
    numbers = [0.0, -0.0, 1.0, 1.00390625, 1.01171875, 3.4e38, -1e-40, 65504.5, float("nan")]
    tensor = read(json.dumps(numbers), "TYPE_BF16")
    assert (tensor.triton_dtype(), tensor.shape()) == (14, [len(numbers)])
    halves = np.frombuffer(tensor._wire_data(), np.int16)
    expected = torch.tensor(numbers, dtype=torch.float32).to(torch.bfloat16)
    got = torch.from_numpy(halves.copy()).view(torch.bfloat16)
    assert torch.equal(got[:-1].view(torch.int16), expected[:-1].view(torch.int16))
    assert bool(torch.isnan(got[-1]))


def test_inputs_that_are_missing_or_unknown_are_named_with_what_is_expected() -> None:
    config = {
        "max_batch_size": 4,
        "input": [
            {"name": "A", "data_type": "TYPE_FP32", "dims": [2]},
            {"name": "B", "data_type": "TYPE_STRING", "dims": [-1]},
            {"name": "C", "data_type": "TYPE_INT8", "dims": [1], "optional": True},
        ],
    }
    with pytest.raises(InvalidInput) as caught:
        read_inputs([], config)
    assert str(caught.value) == (
        "the model requires more inputs:\n"
        "  --input A=VALUE  for A TYPE_FP32 [-1, 2] (the first is the batch, at most 4)\n"
        "  --input B=VALUE  for B TYPE_STRING [-1, -1] (the first is the batch, at most 4)\n"
        "VALUE may be 'random'"
    )
    with pytest.raises(
        InvalidInput, match=r"no input 'D'; its inputs are\n  A TYPE_FP32 \[-1, 2\]"
    ):
        read_inputs([("D", "1")], config)
    with pytest.raises(InvalidInput, match="input 'A' is given twice"):
        read_inputs([("A", "[1, 2]"), ("A", "[1, 2]")], config)
    assert list(read_inputs([("A", "[1, 2]"), ("B", "x")], config)) == ["A", "B"]


def test_an_error_about_a_model_without_inputs_lists_none() -> None:
    with pytest.raises(InvalidInput, match="as it declares none: add its inputs to config.pbtxt"):
        read_inputs([("X", "1")], {"max_batch_size": 0, "input": []})
