"""A request of a sequence, with the control tensors and the states that it gets."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format

from host.config.schema import pb
from host.errors import ErrorCode, HostError
from host.scheduling.sequence_call import SequenceStates

INITIAL = 'name: "n" data_type: TYPE_INT32 dims: 2'


def states_of(directory: Path, text: str, largest: int = 0, copies: int = 1) -> SequenceStates:
    config = pb.ModelConfig(name="m", max_batch_size=largest)
    state = f'input_name: "s" output_name: "t" data_type: TYPE_INT32 dims: -1 {text}'
    text_format.Parse(f"sequence_batching {{ {f'state {{ {state} }}' * copies} }}", config)
    return SequenceStates(config, directory)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f"initial_state {{ {INITIAL} }} initial_state {{ {INITIAL} }}",
            (
                "initial_state field for state input 's' must contain exactly one or zero element."
                " Found '2' elements."
            ),
        ),
        (
            'initial_state { name: "n" data_type: TYPE_FP32 dims: 1 }',
            (
                "The data type used for 'initial_state' field of state 's' does not match the state"
                " data type."
            ),
        ),
        (
            "initial_state { data_type: TYPE_INT32 dims: 1 }",
            "Field 'name' must be set when using initial_state for state input 's'.",
        ),
        (
            f"initial_state {{ {INITIAL} dims: 1 }}",
            (
                "Number of dimensions in 'initial_state' doesn't match the size of 'state'"
                " dimensions for state input 's'. 2 != 1"
            ),
        ),
        (
            'initial_state { name: "n" data_type: TYPE_INT32 dims: -1 }',
            "'initial_state' field for state input name 's' contains variable dimensions.",
        ),
        (
            f"dims: 3 initial_state {{ {INITIAL} dims: 1 zero_data: true }}",
            "'initial_state' dim for input name 's' doesn't match 'state' dim description. 1 != 3",
        ),
        (
            f"initial_state {{ {INITIAL} }}",
            "initial_state setting expects state's' to have state_data set",
        ),
        (
            f'initial_state {{ {INITIAL} data_file: "short" }}',
            (
                "initial_state setting expects 8 bytes, but the data provided from shortonly has 3"
                " bytes."
            ),
        ),
    ],
    ids=["many", "type", "name", "rank", "variable", "dim", "source", "short"],
)
def test_initial_states_are_checked(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state" / "short").write_bytes(b"abc")
    with pytest.raises(HostError) as caught:
        states_of(tmp_path, text)
    assert (caught.value.code, caught.value.message) == (ErrorCode.INVALID_ARG, expected)


def test_a_state_has_one_input(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="^State input name 's' specified more than once.$"):
        states_of(tmp_path, "", copies=2)


def test_files_lie_in_their_folder(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="is outside of its folder 'initial_state'$"):
        states_of(tmp_path, f'initial_state {{ {INITIAL} data_file: "../f" }}')


@pytest.mark.parametrize(("largest", "lead"), [(0, []), (4, [1])])
def test_states_begin_with_zeros_of_the_smallest_shape(
    tmp_path: Path, largest: int, lead: list[int]
) -> None:
    (tensor,) = states_of(tmp_path, "dims: 3", largest).initial_states().values()
    assert (tensor.name, tensor.shape, bytes(tensor.data)) == ("s", [*lead, 1, 3], bytes(12))


def test_zero_data_gives_zeros_whatever_its_value(tmp_path: Path) -> None:
    for word in ("true", "false"):
        states = states_of(tmp_path, f"initial_state {{ {INITIAL} zero_data: {word} }}")
        (tensor,) = states.initial_states().values()
        assert (tensor.shape, bytes(tensor.data)) == ([2], bytes(8))


def test_variable_dimensions_come_from_the_initial_state(tmp_path: Path) -> None:
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state" / "f").write_bytes(b"\1\0\0\0\2\0\0\0")
    (tensor,) = (
        states_of(tmp_path, f'initial_state {{ {INITIAL} data_file: "f" }}')
        .initial_states()
        .values()
    )
    assert (tensor.shape, bytes(tensor.data)) == ([2], b"\1\0\0\0\2\0\0\0")


def test_memory_that_grows_needs_a_gpu(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = pb.ModelConfig(name="m")
    state = 'input_name: "s" use_growable_memory: true use_same_buffer_for_input_output: true'
    text_format.Parse(f"instance_group {{ kind: KIND_CPU }} sequence_batching {{ state {{ {state}"
                      " } }", config)  # fmt: skip
    assert SequenceStates(config, tmp_path).initial_states() == {}
    assert (
        "Failed to initialize sequence state: 'use_growable_memory' can only work with KIND_GPU"
        " model instances right now. Please either change the instance type to KIND_GPU or set"
        " 'use_growable_memory' to false for state input 's'."
    ) in caplog.text
