"""Stacking an input of a batch, and splitting results."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from pb_utils import InferenceRequest, Tensor, TritonModelException, stack_inputs


def batch(*shapes: Sequence[int]) -> list[InferenceRequest]:
    """Requests with an input X of these shapes, whose elements count up through the batch."""
    requests, start = [], 0
    for shape in shapes:
        size = int(np.prod(shape))
        x = np.arange(start, start + size, dtype=np.float32).reshape(shape)
        start += size
        requests.append(
            InferenceRequest(inputs=[Tensor("X", x)], model_name="", requested_output_names=[])
        )
    return requests


def refusal(requests: list[InferenceRequest], name: str = "X") -> str:
    with pytest.raises(TritonModelException) as caught:
        stack_inputs(requests, name)
    return str(caught.value)


@pytest.mark.parametrize("shapes", [[[2, 3]], [[1, 3], [2, 3], [1, 3]], [[0, 3], [2, 3]], [[4]]])
def test_inputs_are_stacked_and_results_split(shapes: list[list[int]]) -> None:
    requests = batch(*shapes)
    x, split = stack_inputs(requests, "X")
    assert x.ravel().tolist() == list(range(x.size))
    parts = split(2 * x)
    assert [list(part.shape) for part in parts] == shapes
    for part, request in zip(parts, requests, strict=True):
        assert (part == 2 * request.inputs()[0].as_numpy()).all()
    assert [len(part) for part in split(np.zeros(len(x)))] == [shape[0] for shape in shapes]


def test_the_stacked_array_may_be_changed() -> None:
    requests = batch([1, 2], [1, 2])
    stack_inputs(requests, "X")[0][:] = 7
    assert requests[0].inputs()[0].as_numpy().tolist() == [[0, 1]]


def test_texts_are_stacked() -> None:
    requests = [
        InferenceRequest(
            inputs=[Tensor("X", np.array([[text]], np.object_))],
            model_name="",
            requested_output_names=[],
        )
        for text in (b"a", b"b")
    ]
    assert stack_inputs(requests, "X")[0].tolist() == [[b"a"], [b"b"]]


def test_requests_that_cannot_be_stacked_are_named() -> None:
    assert refusal([]) == "There are no requests to stack."
    assert refusal(batch([1, 2], [1, 2]), "Y") == "Request 0 of the batch has no input 'Y'."
    assert refusal(batch([1, 2], [3, 4])) == (
        "Input 'X' cannot be stacked: its shape is [1, 2] in request 0 and [3, 4] in request 1 of"
        " the batch."
    )
    assert "its shape is [] in request 0" in refusal(batch([]))


def test_a_result_with_another_batch_size_is_refused() -> None:
    _, split = stack_inputs(batch([1, 2], [2, 2]), "X")
    with pytest.raises(TritonModelException) as caught:
        split(np.zeros((2, 2)))
    assert str(caught.value) == (
        "The result cannot be split: its shape is [2, 2], but the first dimension of the stacked"
        " input 'X' is 3."
    )
