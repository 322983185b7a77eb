"""Models of TensorFlow, built here, held in a harness and in a real host: make test-tensorflow."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from host.config.json_form import to_json
from host.config.model_config import ConfigSettings, load_config
from pb_utils import testing
from stub.user_model import ModelFailure
from tests.clients import tensor
from tests.conftest import ROOT, RepositoryBuilder, Serve
from tests.readmes import walkthroughs, without_digits, write

if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("tensorflow is large: make test-tensorflow", allow_module_level=True)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
pytestmark = pytest.mark.filterwarnings("ignore")

import tensorflow as tf  # noqa: E402

BACKEND = ROOT / "stub" / "backends" / "tensorflow"
A = np.arange(6, dtype=np.float32).reshape(2, 3)
ROWS = [None, 3]


def save(folder: Path) -> None:
    """SUM of two inputs, and a text that is given back, as a saved model."""

    def run(a: Any, b: Any, t: Any) -> dict[str, Any]:
        return {"SUM": a + b, "SAME": tf.identity(t)}

    module = tf.Module()
    module.run = tf.function(run)
    spec = tf.TensorSpec(ROWS, tf.float32)
    signature = module.run.get_concrete_function(
        a=spec, b=spec, t=tf.TensorSpec([None, 1], tf.string)
    )
    path = folder / "1" / "model.savedmodel"
    tf.saved_model.save(module, str(path), signatures={"serving_default": signature})


def freeze(folder: Path) -> None:
    """y = 2 x as a frozen graph."""
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, ROWS, "x")
        tf.multiply(x, 2.0, name="y")
    path = folder / "1" / "model.graphdef"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(graph.as_graph_def().SerializeToString())


def one(name: str, out: str, kind: str = "TYPE_FP32") -> str:
    return (
        f"max_batch_size: 8 input {{ name: '{name}' data_type: {kind} dims: [3] }} "
        f"output {{ name: '{out}' data_type: TYPE_FP32 dims: [3] }}"
    )


BROKEN = {
    "no_file": ("platform: 'tensorflow_savedmodel'", r"unable to find '\S+/model.savedmodel' for"),
    "corrupt": ("", r"tensorflow \S+ cannot use '\S+/model.savedmodel': "),
    "garbled": (
        "platform: 'tensorflow_graphdef' " + one("x", "y"),
        r"tensorflow \S+ cannot use '\S+/model.graphdef': ",
    ),
    "no_signature": (
        "parameters { key: 'TF_SIGNATURE_DEF' value { string_value: 'other' } }",
        "has no signature 'other', there is serving_default",
    ),
    "undescribed": ("", "a frozen graph does not say which of its tensors they are"),
    "wrong_name": (
        one("z", "y"),
        "unexpected inference input 'z', the graph has no operation of that name",
    ),
    "wrong_type": (
        one("x", "y", "TYPE_INT32"),
        "configuration expects datatype TYPE_INT32 for input 'x', model provides TYPE_FP32",
    ),
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> RepositoryBuilder:
    """All models of this module."""
    repository = RepositoryBuilder(tmp_path_factory.mktemp("repository"))
    save(repository.path / "saved")
    freeze(repository.add("frozen", config=one("x", "y")))
    for name, (config, _) in BROKEN.items():
        folder = repository.add(name, config=config)
        if name in ("undescribed", "wrong_name", "wrong_type"):
            freeze(folder)
        elif name == "no_signature":
            save(folder)
        elif name == "corrupt":
            (folder / "1" / "model.savedmodel").mkdir()
        elif name == "garbled":
            (folder / "1" / "model.graphdef").write_bytes(b"this is no model")
    return repository


Hold = Callable[[str], testing.ModelHarness]


@pytest.fixture
def hold(repository: RepositoryBuilder, monkeypatch: pytest.MonkeyPatch) -> Hold:
    """Loads a model with its configuration as the host reads it."""
    # Threads and devices can be set once in a process. A stub has one model; this one has many.
    name = "stub.backends.tensorflow.graph.configure_tensorflow"
    monkeypatch.setattr(name, lambda *arguments: None)

    def hold(name: str) -> testing.ModelHarness:
        folder = repository.path / name
        return testing.load(
            folder, to_json(load_config(folder, ConfigSettings()).config), backend=BACKEND
        )

    return hold


def test_a_frozen_graph_answers(hold: Hold) -> None:
    with hold("frozen") as held:
        assert held.infer({"x": A})["y"].tolist() == (2 * A).tolist()


@pytest.mark.parametrize("model", BROKEN)
def test_a_model_that_cannot_be_served_says_why(hold: Hold, model: str) -> None:
    with pytest.raises(ModelFailure) as caught:
        hold(model)
    assert re.search(BROKEN[model][1], str(caught.value)), caught.value


def test_a_saved_model_needs_no_configuration(serve: Serve, tmp_path: Path) -> None:
    save(tmp_path / "saved")
    with serve(tmp_path).wait_started().client() as client:
        config = client.get_model_config("saved", as_json=True)["config"]
        assert (config["platform"], config["max_batch_size"]) == ("tensorflow_savedmodel", 4)
        texts = np.array([[b"\xff"], [b"two"]], dtype=np.object_)
        inputs = [tensor("a", A), tensor("b", A), tensor("t", texts)]
        result = client.infer("saved", inputs)
        assert result.as_numpy("SUM").tolist() == (2 * A).tolist()
        assert result.as_numpy("SAME").tolist() == texts.tolist()


def test_the_readme_of_the_classifier_works(serve: Serve, tmp_path: Path) -> None:
    example = walkthroughs("image_classifier")[1]
    write([example], tmp_path)
    answer = example.answer(serve(tmp_path).wait_started())
    assert without_digits(answer) == without_digits(example.expected)
