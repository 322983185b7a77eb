"""Engines of TensorRT on a real GPU; each test builds the small engine that it needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pb_utils
from pb_utils import testing
from stub.user_model import ModelFailure
from tests.clients import infer_error, tensor
from tests.conftest import ROOT, RepositoryBuilder, Serve
from tests.stories import tell_example

pytestmark = pytest.mark.gpu

BACKEND = ROOT / "stub" / "backends" / "tensorrt"
GROUP = {"name": "m", "kind": "KIND_GPU", "gpus": [0], "count": 1}
Shape = Sequence[int]


@pytest.fixture
def trt() -> Any:
    """The library; the tests that need it are skipped where it is not installed."""
    return pytest.importorskip(
        "tensorrt", reason="pip install 'pbhost[tensorrt]'", exc_type=ImportError
    )


class Build:
    """A network from which a plan is made."""

    def __init__(self, trt: Any) -> None:
        self.trt = trt
        self._logger = trt.Logger(trt.Logger.ERROR)
        self._builder = trt.Builder(self._logger)
        typed = trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED
        self.network = self._builder.create_network(1 << int(typed))
        self._config = self._builder.create_builder_config()

    def input(self, name: str, kind: Any, shape: Shape) -> Any:
        return self.network.add_input(name, kind, tuple(shape))

    def twice(self, x: Any) -> Any:
        total = self.trt.ElementWiseOperation.SUM
        return self.network.add_elementwise(x, x, total).get_output(0)

    def output(self, name: str, value: Any) -> Any:
        value.name = name
        self.network.mark_output(value)
        return value

    def profile(self, values: dict[str, list[Shape]] | None = None, **shapes: list[Shape]) -> None:
        """Ranges of inputs, least, best and most, and of the values of shape tensors."""
        profile = self._builder.create_optimization_profile()
        for name, ends in shapes.items():
            profile.set_shape(name, *(tuple(end) for end in ends))
        for name, ends in (values or {}).items():
            profile.set_shape_input(name, *(list(end) for end in ends))
        self._config.add_optimization_profile(profile)

    def save(self, path: Path) -> None:
        plan = self._builder.build_serialized_network(self.network, self._config)
        assert plan is not None, "the library could not build the network"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(plan))


def doubling(trt: Any, path: Path, *most: int) -> None:
    """y = 2 x, for rows of three; a profile for each largest batch, best for that one."""
    build = Build(trt)
    build.output("y", build.twice(build.input("x", trt.float32, (-1, 3))))
    for size in most or (8,):
        build.profile(x=[(1, 3), (size, 3), (size, 3)])
    build.save(path)


def config(size: int = 0, **more: Any) -> dict[str, Any]:
    given = {"name": "m", "backend": "tensorrt", "default_model_filename": "model.plan"}
    return {**given, "max_batch_size": size, "instance_group": [GROUP], **more}


def load(tmp_path: Path, given: dict[str, Any]) -> testing.ModelHarness:
    return testing.load(tmp_path / "m", given, backend=BACKEND)


def plan_of(tmp_path: Path, name: str = "model.plan") -> Path:
    return tmp_path / "m" / "1" / name


def rows(count: int) -> Any:
    return np.arange(3 * count, dtype=np.float32).reshape(count, 3)


@pytest.mark.parametrize("profiles", [["0"], ["0", "1"]], ids=["one", "both"])
def test_a_plan_is_completed_and_answers(trt: Any, tmp_path: Path, profiles: list[str]) -> None:
    doubling(trt, plan_of(tmp_path), 2, 16)
    most = 16 if "1" in profiles else 2
    given = config(most, instance_group=[{**GROUP, "profile": profiles}])
    with load(tmp_path, given) as held:
        (x,) = held.config["input"]
        assert (x["name"], x["data_type"], x["dims"]) == ("x", "TYPE_FP32", [3])
        for count in {1, 2, most}:
            np.testing.assert_array_equal(held.infer({"x": rows(count)})["y"], 2 * rows(count))


def test_large_outputs_are_whole(trt: Any, tmp_path: Path) -> None:
    doubling(trt, plan_of(tmp_path), 1 << 20)
    with load(tmp_path, config()) as held:
        x = rows(1 << 20)
        np.testing.assert_array_equal(held.infer({"x": x})["y"], 2 * x)


def test_graphs_serve_their_sizes_and_what_is_between(trt: Any, tmp_path: Path) -> None:
    doubling(trt, plan_of(tmp_path), 8)
    between = {"batch_size": 4, "graph_lower_bound": {"batch_size": 2}}
    cuda = {"graphs": True, "graph_spec": [{"batch_size": 1}, between]}
    with load(tmp_path, config(8, optimization={"cuda": cuda})) as held:
        assert [each.graph.extents["x"] for each in held.model._runner._recorded_graphs] == [
            (1, 3),
            (4, 3),
        ]
        for count in (1, 2, 3, 4, 5, 8, 2, 1):
            np.testing.assert_array_equal(held.infer({"x": rows(count)})["y"], 2 * rows(count))


def test_shape_tensors_decide_the_shape_of_an_output(trt: Any, tmp_path: Path) -> None:
    build = Build(trt)
    x = build.input("x", trt.float32, (-1, 6))
    shuffle = build.network.add_shuffle(x)
    shuffle.set_input(1, build.input("n", trt.int64, (3,)))
    build.output("y", build.twice(shuffle.get_output(0)))
    build.profile({"n": [(1, 1, 1), (2, 2, 3), (8, 6, 6)]}, x=[(1, 6), (2, 6), (8, 6)])
    build.save(plan_of(tmp_path))
    asked = [
        pb_utils.InferenceRequest(
            inputs=[
                pb_utils.Tensor("x", np.full((count, 6), count, np.float32)),
                pb_utils.Tensor("n", np.array([count, 3, 2], np.int64)),
            ],
            requested_output_names=["y"],
            model_name="m",
        )
        for count in (1, 2)
    ]
    with load(tmp_path, config()) as held:
        assert held.config["max_batch_size"] == 8
        assert held.config["input"][1]["is_shape_tensor"]
        first, second = held.model.execute(asked)
    got = [each.output_tensors()[0].as_numpy() for each in (first, second)]
    assert [each.shape for each in got] == [(1, 3, 2), (2, 3, 2)]
    assert [float(each.max()) for each in got] == [2, 4]


def test_a_format_in_vectors_takes_bytes_as_they_are(trt: Any, tmp_path: Path) -> None:
    build = Build(trt)
    x = build.input("x", trt.float16, (-1, 3, 2, 2))
    x.allowed_formats = 1 << int(trt.TensorFormat.HWC8)
    y = build.output("y", build.twice(x))
    y.allowed_formats = 1 << int(trt.TensorFormat.LINEAR)
    build.profile(x=[(1, 3, 2, 2), (2, 3, 2, 2), (4, 3, 2, 2)])
    build.save(plan_of(tmp_path))
    plain = np.arange(2 * 3 * 2 * 2, dtype=np.float16).reshape(2, 3, 2, 2)
    packed = np.zeros((2, 2, 2, 8), np.float16)
    packed[..., :3] = plain.transpose(0, 2, 3, 1)
    code = pb_utils.Tensor("x", plain).triton_dtype()
    with load(tmp_path, config()) as held:
        assert held.config["input"][0]["is_non_linear_format_io"]
        for data in (packed.tobytes(), packed.tobytes()[2:]):
            given = pb_utils.Tensor._from_wire("x", code, [2, 3, 2, 2], memoryview(data), None)
            asked = pb_utils.InferenceRequest(
                inputs=[given], requested_output_names=["y"], model_name="m"
            )
            (response,) = held.model.execute([asked])
            error = response.error()
            if error is None:
                result = response.output_tensors()[0].as_numpy()
                np.testing.assert_array_equal(result, 2 * plain)
    assert error is not None
    assert error.message() == (
        "input 'x' has 126 bytes, and the engine's format HWC8 takes 128 for the shape [2, 3, 2, 2]"
    )


def test_an_output_may_have_a_size_that_only_the_run_tells(trt: Any, tmp_path: Path) -> None:
    build = Build(trt)
    x = build.input("x", trt.float32, (6,))
    build.output("where", build.network.add_non_zero(x).get_output(0))
    build.save(plan_of(tmp_path))
    graphs = {"cuda": {"graphs": True}}  # which cannot be, and is no error
    given = config(output=[{"name": "where", "data_type": "TYPE_INT32", "dims": [1, -1]}])
    with load(tmp_path, {**given, "optimization": graphs}) as held:
        for values in ([0, 1, 0, 2, 3, 0], [0, 0, 0, 0, 0, 4]):
            x = np.array(values, np.float32)
            assert held.infer({"x": x})["where"].tolist() == [np.flatnonzero(x).tolist()]


def test_a_plan_for_the_gpus_capability_comes_before_the_default(trt: Any, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="pip install torch")
    doubling(trt, plan_of(tmp_path, "mine.plan"))
    capability = ".".join(map(str, torch.cuda.get_device_capability(0)))
    given = config(default_model_filename="no.plan", cc_model_filenames={capability: "mine.plan"})
    with load(tmp_path, given) as held:
        np.testing.assert_array_equal(held.infer({"x": rows(2)})["y"], 2 * rows(2))


def test_a_file_that_is_missing_or_no_plan_is_named(trt: Any, tmp_path: Path) -> None:
    path = plan_of(tmp_path)
    path.parent.mkdir(parents=True)
    with pytest.raises(ModelFailure, match=rf"unable to find '{path}' for model 'm'"):
        load(tmp_path, config())
    path.write_bytes(b"no plan")
    with pytest.raises(ModelFailure, match=rf"TensorRT \S+ cannot use '{path}' on a GPU of"):
        load(tmp_path, config())


def test_a_library_of_plugins_that_cannot_be_used_is_named(
    trt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubling(trt, plan_of(tmp_path))
    from stub.backends.model_settings import Settings
    from stub.backends.tensorrt import library

    with pytest.raises(ModelFailure, match="the library of plugins '/no.so' that --backend-config"):
        library.open_plan("m", str(plan_of(tmp_path)), Settings("m", {"plugins": "/no.so"}), {}, "")


def test_a_served_plan_needs_no_configuration(
    trt: Any, repository: RepositoryBuilder, serve: Serve
) -> None:
    doubling(trt, repository.add("doubles") / "1" / "model.plan")
    host = serve(repository).wait_started()
    with host.client() as client:
        got = client.get_model_config("doubles", as_json=True)["config"]
        assert (got["backend"], got["max_batch_size"]) == ("tensorrt", 8)
        assert got["dynamic_batching"]["preferred_batch_size"] == [8]
        result = client.infer("doubles", [tensor("x", rows(8))])
        np.testing.assert_array_equal(result.as_numpy("y"), 2 * rows(8))
        _, text = infer_error(client.infer, "doubles", [tensor("x", rows(9))])
        assert "inference request batch-size must be <= 8" in text


def test_the_example_builds_and_serves_its_plan(
    trt: Any, tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tell_example(ROOT / "examples" / "tensorrt_plan", tmp_path, serve)
