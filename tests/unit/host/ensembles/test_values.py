"""Tensors between steps: their shapes and their sequences."""

from __future__ import annotations

import pytest

from host.ensembles.values import EnsembleTensor, SequencePosition
from host.errors import HostError
from host.inference.request import Parameter, Tensor

PLAIN = SequencePosition(0, 0)


def named(shape: list[int], made: int, dims: list[int], batches: bool) -> list[int]:
    tensor = Tensor("a", "FP32", shape, b"")
    found = EnsembleTensor(tensor, made, PLAIN, 1).to_step_input("b", dims, batches)
    assert found is not None
    assert found.name == "b"
    assert tensor.shape == shape, "the tensor itself may be on its way to others"
    return found.shape


@pytest.mark.parametrize(
    ("shape", "made", "dims", "batches", "expected"),
    [
        pytest.param([3, 16], 3, [16], True, [3, 16], id="both batch"),
        pytest.param([16], 0, [16], False, [16], id="neither batches"),
        pytest.param([16], 0, [16], True, [1, 16], id="a batch of one is made"),
        pytest.param([4, 16], 0, [16], True, [4, 16], id="it has a batch dimension already"),
        pytest.param([1, 16], 1, [16], False, [16], id="a batch of one is unmade"),
        pytest.param([1, 16], 1, [-1, 16], False, [1, 16], id="it fits with its batch dimension"),
        pytest.param([2, 16], 2, [16], False, [2, 16], id="a larger batch stays"),
    ],
)
def test_a_batch_dimension_of_one_comes_and_goes(
    shape: list[int], made: int, dims: list[int], batches: bool, expected: list[int]
) -> None:
    assert named(list(shape), made, dims, batches) == expected


def test_an_output_that_was_not_made_has_no_tensor() -> None:
    assert EnsembleTensor(None, 0, PLAIN, 1).to_step_input("b", [1], True) is None


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, SequencePosition(5, 1)),
        ({"other": 3}, SequencePosition(5, 1)),
        ({"sequence_id": 7}, SequencePosition(7, 1, True)),
        ({"sequence_id": "x"}, SequencePosition("x", 1, True)),
        ({"sequence_start": False}, SequencePosition(5, 0, True)),
        ({"sequence_end": True}, SequencePosition(5, 3, True)),
    ],
)
def test_a_members_response_may_change_the_sequence(
    parameters: dict[str, Parameter], expected: SequencePosition
) -> None:
    assert SequencePosition(5, 1).updated_by(parameters) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [("sequence_id", 1.5), ("sequence_id", True), ("sequence_start", 1), ("sequence_end", "")],
)
def test_a_sequence_of_the_wrong_type_is_refused(name: str, value: Parameter) -> None:
    with pytest.raises(HostError, match=f"parameter '{name}' to be TRITONSERVER_PARAMETER_"):
        PLAIN.updated_by({name: value})
