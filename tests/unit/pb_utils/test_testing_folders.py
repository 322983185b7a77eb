"""How pb_utils.testing reads the folder of a model: as a server does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import triton_python_backend_utils as pb_utils
from pb_utils import testing
from tests.conftest import RepositoryBuilder

CONFIG = """
    backend: "python" max_batch_size: 8
    input { name: "X" data_type: TYPE_FP32 dims: [ -1 ] }
    output { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }
    instance_group { count: 2 kind: KIND_CPU }
    parameters { key: "limit" value { string_value: "10" } }
"""
MODEL = """
import json
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.limit = float(config["parameters"]["limit"]["string_value"])
        self.version = int(args["model_version"])

    def execute(self, requests):
        x = pb_utils.get_input_tensor_by_name(requests[0], "X").as_numpy()
        y = pb_utils.Tensor("Y", x.clip(max=self.limit) + self.version)
        return [pb_utils.InferenceResponse([y])]
"""
ENSEMBLE = """
    platform: "ensemble"
    input { name: "X" data_type: TYPE_FP32 dims: [ 1 ] }
    output { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }
    ensemble_scheduling { step {
        model_name: "other" model_version: -1
        input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" }
    } }
"""
X = {"X": np.array([[1, 20]], np.float32)}


def clip(repository: RepositoryBuilder, config: str = CONFIG, *versions: int) -> Path:
    """Adds the model `clip`; its outputs say which version has made them."""
    for version in versions or (1,):
        folder = repository.add("clip", MODEL, config, version)
    return folder


def test_the_configuration_is_that_of_the_folder(repository: RepositoryBuilder) -> None:
    with testing.load(clip(repository)) as model:
        assert model.config["max_batch_size"] == 8 and model.config["name"] == "clip"
        assert model.infer(X)["Y"].tolist() == [[2, 11]]


def test_parameters_are_added_and_a_given_configuration_replaces_it(
    repository: RepositoryBuilder,
) -> None:
    folder = clip(repository)
    with testing.load(folder, parameters={"limit": "5"}) as model:
        assert model.infer(X)["Y"].tolist() == [[2, 6]]
    with testing.load(folder, {"name": "own"}, parameters={"limit": "5"}) as model:
        assert model.config["max_batch_size"] == 0 and model.config["name"] == "own"


def test_a_backend_of_the_configuration_is_found_where_the_test_says(
    repository: RepositoryBuilder, tmp_path: Path
) -> None:
    folder = clip(repository, CONFIG.replace('"python"', '"clipping"'))
    backend = tmp_path / "backends" / "clipping"
    backend.mkdir(parents=True)
    (folder / "1" / "model.py").rename(backend / "model.py")
    with testing.load(folder, backend=backend) as model:
        assert model.config["backend"] == "clipping"
        assert model.infer(X)["Y"].tolist() == [[2, 11]]


def test_the_version_is_the_one_that_clients_get(repository: RepositoryBuilder) -> None:
    policy = f"{CONFIG} version_policy {{ specific {{ versions: [ 2 ] }} }}"
    folder = clip(repository, policy, 2, 3)
    with testing.load(folder) as model:
        assert model.args["model_version"] == "2"
    with testing.load(folder, version=3) as model:
        assert model.infer(X)["Y"].tolist() == [[4, 13]]


@pytest.mark.parametrize(
    ("config", "version", "text"),
    [
        ("max_batch_size: -1", None, "max_batch_size"),
        (CONFIG, 7, "model 'clip' has no version 7; its versions are: 1"),
        (CONFIG, "new", "the version of a model is a number, not 'new'"),
        (ENSEMBLE, None, "model 'clip' is an ensemble, so it has no code to run"),
    ],
    ids=["wrong", "no version", "no number", "ensemble"],
)
def test_a_folder_that_cannot_be_used_is_an_error_that_names_the_cause(
    repository: RepositoryBuilder, config: str, version: int | str | None, text: str
) -> None:
    with pytest.raises(pb_utils.TritonModelException) as refused:
        testing.load(clip(repository, config), version=version)
    assert text in str(refused.value)
