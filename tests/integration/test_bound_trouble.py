"""Programs that do with `host.bind` what they should not, or what few do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from host.bind import BadSpecError, DynamicBatcher, Host, HostFailure, TensorSpec, batch
from tests.asking import tensor

X = TensorSpec(name="x", dtype=np.float32, shape=(-1,))
Y = TensorSpec(name="y", dtype=np.float32, shape=(-1,))

double = batch(lambda x: [2 * x])


def new_host(**flags: Any) -> Host:
    return Host(grpc_port=0, allow_http=False, allow_metrics=False, **flags)


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with new_host() as host:
        host.bind("double", double, [X], [Y])
        yield host.run()


def ask(host: Host, model: str = "double") -> Any:
    """What it says of 1 and 2."""
    with grpcclient.InferenceServerClient(host.grpc_url) as client:
        given = tensor("x", np.array([[1, 2]], dtype=np.float32))
        result: Any = client.infer(model, [given])
        return result.as_numpy("y").tolist()


@pytest.mark.parametrize(
    "name", [".", "a\0b", "n" * 256, " double", 5], ids=["dot", "NUL", "long", "space", "number"]
)
def test_a_name_that_no_folder_can_have_harms_no_model(host: Host, name: Any) -> None:
    with pytest.raises(BadSpecError, match=r"name of a model.*must be"):
        host.bind(name, double, [X], [Y])
    assert ask(host) == [[2, 4]]
    with grpcclient.InferenceServerClient(host.grpc_url) as client:
        client.load_model("double")  # its files are there


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"model_version": -1}, "model_version of 'm' must be an int from 0 on, got -1"),
        ({"model_version": "../1"}, "model_version of 'm' must be an int from 0 on, got '../1'"),
        ({"inputs": X}, "inputs must be a list of TensorSpec, got TensorSpec"),
        ({"outputs": None}, "outputs must be a list of TensorSpec, got NoneType"),
        ({"max_batch_size": "4"}, "max_batch_size must be an int, got '4'"),
        ({"batcher": 5}, "batcher must be a DynamicBatcher or None, got int"),
        ({"config": {}}, "config must be a ModelConfig, got dict"),
    ],
    ids=["version", "path", "inputs", "outputs", "size", "batcher", "config"],
)
def test_an_argument_of_the_wrong_kind_is_named(
    host: Host, arguments: dict[str, Any], text: str
) -> None:
    whole = {"model_name": "m", "infer_func": double, "inputs": [X], "outputs": [Y], **arguments}
    with pytest.raises(BadSpecError, match=re.escape(text)):
        host.bind(**whole)


def test_preferred_sizes_are_a_list() -> None:
    with pytest.raises(BadSpecError, match="preferred_batch_size must be a list of sizes, got 4"):
        DynamicBatcher(preferred_batch_size=4)  # type: ignore[arg-type]


def test_a_model_that_cannot_be_written_is_refused_and_the_others_serve(host: Host) -> None:
    with pytest.raises(HostFailure, match="cannot write model 'm'"):
        # A version of this length is a name that no file system takes.
        host._child._ask({"bind": {"name": "m"}, "version": "1" * 300})  # type: ignore[union-attr]
    assert ask(host) == [[2, 4]]
