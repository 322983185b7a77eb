"""Decorators of bound functions, called as in a test of a user's: without any host."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from host.bind import (
    BadCallError,
    BadSpecError,
    ConstantPadder,
    DynamicBatcher,
    ModelConfig,
    Request,
    TensorSpec,
    batch,
    bound_as,
    fill_optionals,
    first_value,
    group_by_keys,
    group_by_values,
    pad_batch,
    sample,
    triton_context,
)
from tests.conftest import ROOT

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


X = TensorSpec(name="x", dtype=np.float32, shape=(2,))
Y = TensorSpec(name="y", dtype=np.float32, shape=(2,))
Z = TensorSpec(name="z", dtype=np.float32, shape=(1,), optional=True)


def rows(*sizes: int) -> list[Request]:
    """Requests of these numbers of samples; each sample has a number of its own."""
    ends = np.cumsum(sizes)
    numbers = np.arange(ends[-1], dtype=np.float32).repeat(2).reshape(-1, 2)
    return [
        Request({"x": numbers[end - size : end]}) for size, end in zip(sizes, ends, strict=True)
    ]


def inputs_of(requests: list[Request]) -> list[Any]:
    return [{name: array.tolist() for name, array in request.items()} for request in requests]


def test_batch_joins_requests_and_takes_the_outputs_apart() -> None:
    calls: list[Any] = []

    @batch
    def double(x: Any) -> Any:
        calls.append(x.shape)
        return {"y": 2 * x}

    requests = rows(1, 3, 2)
    answers = double(requests)
    assert calls == [(6, 2)]
    for request, answer in zip(requests, answers, strict=True):
        np.testing.assert_array_equal(answer["y"], 2 * request["x"])


def test_a_list_of_outputs_gets_the_names_of_the_model() -> None:
    @batch
    def double(x: Any) -> Any:
        return [2 * x]

    with bound_as([X], [Y]):
        (answer,) = double(rows(2))
    assert list(answer) == ["y"]
    with pytest.raises(BadCallError, match="a list of outputs has names only while"):
        double(rows(2))
    with (
        bound_as([X], [Y, Z]),
        pytest.raises(BadCallError, match="a list of 1 arrays, but the model has 2 outputs: y, z"),
    ):
        double(rows(2))


def test_methods_and_objects_can_be_decorated() -> None:
    class Network:
        factor = 3

        @fill_optionals(z=np.array([1], np.float32))
        @batch
        def run(self, x: Any, z: Any) -> Any:
            """Runs."""
            return {"y": self.factor * x + z}

        __call__ = run

    network = Network()
    for function in (network, network.run):
        (answer,) = function(rows(1))
        assert answer["y"].tolist() == [[1, 1]]
    assert Network.run.__doc__ == "Runs."


def test_generators_and_coroutines_are_changed_when_they_give_something() -> None:
    @batch
    def count(x: Any) -> Iterator[Any]:
        yield {"y": x}
        yield {"y": x + 1}

    @batch
    async def count_later(x: Any) -> AsyncIterator[Any]:
        yield {"y": x}
        yield {"y": x + 1}

    @sample
    async def later(x: Any) -> Any:
        await asyncio.sleep(0)
        return {"y": x}

    async def gather() -> tuple[list[Any], list[Any]]:
        return [each async for each in count_later(rows(1, 1))], await later(rows(1))

    expected = [[[[0, 0]], [[1, 1]]], [[[1, 1]], [[2, 2]]]]
    listed = [[part["y"].tolist() for part in each] for each in count(rows(1, 1))]
    assert listed == expected
    streamed, (once,) = asyncio.run(gather())
    assert [[part["y"].tolist() for part in each] for each in streamed] == expected
    assert once["y"].tolist() == [[0, 0]]


def test_sample_passes_on_the_only_request() -> None:
    @sample
    def negate(x: Any) -> Any:
        return {"y": -x}

    (answer,) = negate([Request({"x": np.array([1, 2], np.float32)})])
    assert answer["y"].tolist() == [-1, -2]
    with pytest.raises(BadCallError, match="@sample takes one request at a time, got 2"):
        negate(rows(1, 1))


def test_first_value_is_that_of_all_samples() -> None:
    @batch
    @first_value("k", "missing")
    def scale(x: Any, k: Any) -> Any:
        assert np.isscalar(k)
        return {"y": x * k}

    @first_value("k", squeeze_single_values=False, strict=False)
    def look(requests: Any) -> Any:
        return [request["k"] for request in requests]

    def request(*values: int) -> Request:
        return Request({"x": np.ones((len(values), 2)), "k": np.array([[v] for v in values])})

    assert scale([request(3), request(3, 3)])[1]["y"].tolist() == [[3, 3], [3, 3]]
    with pytest.raises(BadCallError, match="values of input 'k' differ within the batch"):
        scale([request(3), request(4)])
    assert [each.tolist() for each in look([request(3, 4)])] == [[3]]
    with pytest.raises(BadSpecError, match="'triton_context', which is not an input"):
        first_value("triton_context")
    with bound_as([X], [Y], ModelConfig(batching=False)), pytest.raises(BadCallError):
        scale([request(3)])


def test_fill_optionals_gives_every_sample_the_default() -> None:
    @fill_optionals(z=np.array([5], np.float32))
    def look(requests: Any) -> Any:
        return inputs_of(requests)

    given = Request({"x": np.zeros((1, 2), np.float32), "z": np.array([[7]], np.float32)})
    with bound_as([X, Z], [Y]):
        filled = look([*rows(2), given])
    assert [each["z"] for each in filled] == [[[5], [5]], [[7]]]
    with bound_as([X, Z], [Y], ModelConfig(batching=False)):
        assert look([Request({"x": np.array([1, 2], np.float32)})])[0]["z"] == [5]


@pytest.mark.parametrize(
    ("default", "text"),
    [
        ({"z": 5}, "needs a numpy array for 'z', got int"),
        (
            {"w": np.array([5], np.float32)},
            "a default for 'w', but model 'test' has the inputs x, z",
        ),
        ({"z": np.array([5])}, "default of 'z' has dtype int64, and the input float32"),
        (
            {"z": np.array([[5]], np.float32)},
            r"default of 'z' has shape \(1, 1\), and the input \(1,\)",
        ),
    ],
    ids=["no array", "no input", "dtype", "shape"],
)
def test_a_default_that_does_not_fit_is_refused(default: Any, text: str) -> None:
    with bound_as([X, Z], [Y]), pytest.raises(BadSpecError, match=text):
        fill_optionals(**default)(len)(rows(1))


def test_pad_batch_fills_up_to_the_next_size() -> None:
    sizes: list[int] = []

    @batch
    @pad_batch
    def double(x: Any) -> Any:
        sizes.append(len(x))
        return {"y": 2 * x}

    config = ModelConfig(max_batch_size=8, batcher=DynamicBatcher(preferred_batch_size=[4]))
    with bound_as([X], [Y], config):
        for size in (1, 4, 5, 8):
            (answer,) = double(rows(size))
            np.testing.assert_array_equal(answer["y"], 2 * rows(size)[0]["x"])
    assert sizes == [4, 4, 8, 8]
    with pytest.raises(BadCallError, match="@pad_batch takes the size from the model"):
        double(rows(1))
    with bound_as([X], [Y]), pytest.raises(BadCallError, match="put @batch above it"):
        pad_batch(len)(rows(1))


def test_triton_context_is_what_the_function_is_bound_as() -> None:
    @batch
    @triton_context
    def look(triton_context: Any, x: Any) -> Any:
        return {"y": np.full(len(x), triton_context.max_batch_size)}

    with bound_as([X], [Y], ModelConfig(max_batch_size=16)):
        assert look(rows(1))[0]["y"].tolist() == [16]


def test_group_by_keys_calls_once_for_the_same_inputs() -> None:
    calls: list[Any] = []

    @group_by_keys
    @batch
    def add(x: Any, z: Any = 0) -> Any:
        calls.append(len(x))
        return {"y": x + z}

    one, two, three = rows(1, 1, 1)
    two["z"] = np.array([[10]], np.float32)
    answers = add([one, two, three])
    assert [answer["y"].tolist() for answer in answers] == [[[0, 0]], [[11, 11]], [[2, 2]]]
    assert sorted(calls) == [1, 2]
    with pytest.raises(BadCallError, match="expects a list with a result for each of 2 requests"):
        group_by_keys(lambda requests: [])(rows(1, 1))


@pytest.mark.parametrize(
    ("function", "requests", "text"),
    [
        (lambda x: {"y": x[:1]}, rows(1, 1), r"first dimension of 2, .* 'y' has shape \(1, 2\)"),
        (lambda x: {"y": 3}, rows(1), "output 'y' must be a numpy array, got int"),
        (lambda x: 3, rows(1), "must return a dict .* it returned int"),
        (lambda **inputs: inputs, [*rows(1), Request({"z": np.ones(1)})], "different inputs"),
        (lambda **inputs: inputs, [Request({"x": np.ones((1, n))}) for n in (1, 2)], "join input"),
        (lambda **inputs: inputs, [], "@batch needs a list of at least one request"),
    ],
    ids=["size", "no array", "no dict", "inputs", "shapes", "no request"],
)
def test_batch_says_what_is_wrong(function: Any, requests: Any, text: str) -> None:
    with pytest.raises(BadCallError, match=text):
        batch(function)(requests)


def test_functions_are_imported_and_decorated_without_a_server() -> None:
    code = (
        "import host.bind, sys; assert not {'pbhost.host.server.server', 'grpc'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
