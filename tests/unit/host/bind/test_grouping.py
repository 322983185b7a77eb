"""Groups of samples: whatever arrived is answered in its place, whatever the groups are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from host.bind import (
    BadCallError,
    BadSpecError,
    ConstantPadder,
    Request,
    batch,
    first_value,
    group_by_keys,
    group_by_values,
)

SAMPLES = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([b"", b"a", b"b"])), min_size=1),
    min_size=1,
    max_size=5,
)
"""For each request, a number and a text for each of its samples."""


def request(samples: list[tuple[int, bytes]], first: int = 0) -> Request:
    size = len(samples)
    return Request(
        {
            "place": np.arange(first, first + size).reshape(size, 1),
            "number": np.array([[number] for number, _ in samples]),
            "text": np.array([[text] for _, text in samples], dtype=np.object_),
        }
    )


def requests(listed: list[list[tuple[int, bytes]]]) -> list[Request]:
    return [request(samples, 100 * index) for index, samples in enumerate(listed)]


@given(SAMPLES, st.sampled_from([("number",), ("text",), ("number", "text")]))
def test_a_group_has_all_samples_of_its_values_and_answers_go_back(
    listed: list[list[tuple[int, bytes]]], keys: tuple[str, ...]
) -> None:
    calls: list[Any] = []

    @group_by_values(*keys)
    @batch
    def echo(place: Any, number: Any, text: Any) -> Any:
        values = {"number": number, "text": text}
        calls.append(tuple(values[key][0].item() for key in keys))
        for key in keys:
            assert (values[key] == values[key][0]).all()
        return {"place": place, "size": np.full_like(place, len(place))}

    came = requests(listed)
    answers = echo(came)
    assert len(calls) == len(set(calls)), "each group is one call"
    for asked, answer in zip(came, answers, strict=True):
        np.testing.assert_array_equal(answer["place"], asked["place"])
        assert len(answer["size"]) == len(asked["place"])


@given(SAMPLES)
def test_below_batch_it_groups_samples_by_name(listed: list[list[tuple[int, bytes]]]) -> None:
    @batch
    @group_by_values("number")
    @first_value("number")
    def times(number: Any, place: Any, text: Any) -> Any:
        return {"product": place * number}

    came = requests(listed)
    for asked, answer in zip(came, times(came), strict=True):
        np.testing.assert_array_equal(answer["product"], asked["place"] * asked["number"])


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(-3, 3))
def test_padding_makes_arrays_alike_and_keeps_what_they_had(lengths: list[int], pad: int) -> None:
    came = [Request({"x": np.arange(2 * n).reshape(2, n) + 10}) for n in lengths]
    before = [each["x"] for each in came]
    ConstantPadder(pad)(came)
    for array, now in zip(before, came, strict=True):
        length = array.shape[1]
        assert now["x"].shape == (2, max(lengths))
        np.testing.assert_array_equal(now["x"][:, :length], array)
        assert (now["x"][:, length:] == pad).all()


def test_requests_of_different_lengths_are_padded_into_a_batch() -> None:
    @group_by_values("k", pad_fn=ConstantPadder(-1))
    @batch
    def total(x: Any, k: Any) -> Any:
        return {"sum": x.sum(axis=1), "words": x}

    came = [
        Request({"x": np.array([[1, 2, 3]]), "k": np.array([1])}),
        Request({"x": np.array([[4]]), "k": np.array([1])}),
    ]
    assert [answer["sum"].tolist() for answer in total(came)] == [[6], [2]]


def test_text_is_padded_with_empty_text_and_ranks_must_agree() -> None:
    words = [Request({"x": np.array([[b"a"], [b"b"]][:1], dtype=object)}), Request({"x": two()})]
    ConstantPadder(0)(words)
    assert words[0]["x"].tolist() == [[b"a", b""]]
    with pytest.raises(BadCallError, match="input 'x': its arrays have different numbers"):
        ConstantPadder(0)([Request({"x": np.ones(2)}), Request({"x": np.ones((2, 2))})])


def two() -> Any:
    return np.array([[b"c", b"d"]], dtype=object)


def test_grouping_errors_name_their_cause() -> None:
    with pytest.raises(BadSpecError, match="needs the name of an input"):
        group_by_values()
    echo = group_by_values("k")(lambda requests: requests)
    with pytest.raises(BadCallError, match="needs input 'k', which a request lacks"):
        echo([Request({"x": np.ones(1)})])
    different = group_by_values("k")(lambda requests: [{str(requests[0]["k"][0]): np.ones(1)}])
    with pytest.raises(BadCallError, match="different outputs"):
        different([Request({"k": np.array([1, 2])})])
    unlike = group_by_values("k")(lambda requests: [{"y": np.ones((1, requests[0]["k"][0]))}])
    with pytest.raises(BadCallError, match="cannot join the results of one request"):
        unlike([Request({"k": np.array([1, 2])})])

    def stream(requests: Any) -> Any:
        yield requests

    for grouping in (group_by_keys, group_by_values("k")):
        with pytest.raises(BadCallError, match="so it cannot be a generator"):
            grouping(stream)([Request({"k": np.ones(1)})])
