"""The backend `tensorrt` without a GPU: profiles, graphs, files and configurations."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pb_utils import testing
from stub.backends.batch import InvalidInput
from stub.backends.model_contract import ModelContract
from stub.backends.model_settings import model_path
from stub.backends.tensorrt.model import TritonPythonModel
from stub.backends.tensorrt.tensorrt_plan import (
    Extent,
    GraphSpec,
    Layout,
    Plan,
    PlanTensor,
    ProfileRange,
    check_config,
    choose_graph,
    choose_profile,
    complete_config,
    graph_specs,
    instance_group_of,
    profiles_of_group,
)
from stub.user_model import ModelFailure
from tests.conftest import ROOT

SMALL = ProfileRange((1, 3), (2, 3), (4, 3))
LARGE = ProfileRange((1, 3), (8, 3), (16, 3))
PLAN = Plan(
    (
        PlanTensor("x", True, "TYPE_FP32", (-1, 3), (SMALL, LARGE)),
        PlanTensor("y", False, "TYPE_FP32", (-1, 5)),
    ),
    profiles=2,
)
SHAPED = Plan(
    (
        PlanTensor("x", True, "TYPE_FP32", (-1, -1), (ProfileRange((1, 1), (2, 4), (8, 9)),)),
        PlanTensor(
            "n", True, "TYPE_INT32", (2,), (ProfileRange((1, 1), (2, 6), (8, 9)),), True, True
        ),
        PlanTensor("y", False, "TYPE_FP32", (-1, -1)),
    )
)
CHW4 = Layout(False, 1, 4, "CHW4")
VECTORS = Plan(
    (
        PlanTensor(
            "x",
            True,
            "TYPE_INT8",
            (-1, 3, 2, 2),
            (ProfileRange(*[(n, 3, 2, 2) for n in (1, 2, 4)]),),
        ),
        PlanTensor("y", False, "TYPE_INT8", (-1, 3, 2, 2), layout=CHW4),
    )
)
FIXED = Plan((PlanTensor("x", True, "TYPE_FP32", (2, 3), (ProfileRange((2, 3), (2, 3), (2, 3)),)),))
IMPLICIT = Plan(
    (PlanTensor("x", True, "TYPE_FP32", (3,)), PlanTensor("y", False, "TYPE_FP32", (5,))),
    implicit_max_batch=16,
)
BACKEND = ROOT / "stub" / "backends" / "tensorrt"
TORCH = "pip install torch"


def entry(name: str, dims: list[int], kind: str = "TYPE_FP32", **more: Any) -> dict[str, Any]:
    return {"name": name, "data_type": kind, "dims": dims, **more}


def config(size: int, *inputs: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "name": "m",
        "max_batch_size": size,
        "input": list(inputs) or [entry("x", [3])],
        "output": [entry("y", [5])],
        **more,
    }


def graphs(size: int, plan: Plan = PLAN, **more: Any) -> list[GraphSpec]:
    cuda = {"graphs": True, **more.pop("cuda", {})}
    return graph_specs(config(size, optimization={"cuda": cuda}, **more), plan, [0])


def refusal(given: dict[str, Any], plan: Plan, profiles: tuple[int, ...] = (0,)) -> str:
    with pytest.raises(ModelFailure) as caught:
        check_config(ModelContract(given), given["max_batch_size"], plan, profiles)
    return str(caught.value)


@pytest.mark.parametrize(
    ("rows", "profile"), [(1, 0), (4, 0), (5, 1), (16, 1)], ids=["1", "4", "5", "16"]
)
def test_the_nearest_profile_that_takes_a_batch_is_chosen(rows: int, profile: int) -> None:
    assert choose_profile(PLAN, [0, 1], {"x": (rows, 3)}) == profile
    assert choose_profile(PLAN, [1], {"x": (rows, 3)}) == 1


def test_a_batch_that_no_profile_allows_is_an_invalid_argument() -> None:
    with pytest.raises(InvalidInput) as caught:
        choose_profile(PLAN, [0, 1], {"x": (17, 3)})
    assert str(caught.value) == (
        "input 'x' has the shape [17,3], which no optimization profile of this instance takes; they"
        " take 0: [1,3] to [4,3], 1: [1,3] to [16,3]"
    )
    with pytest.raises(InvalidInput, match=r"input 'n' has the values \[2,10\], which no"):
        choose_profile(SHAPED, [0], {"x": (2, 2), "n": (2, 10)})


def test_inputs_that_need_different_profiles_are_named_together() -> None:
    first, second = ProfileRange((1,), (1,), (2,)), ProfileRange((3,), (3,), (4,))
    both = tuple(PlanTensor(name, True, "TYPE_FP32", (-1,), (first, second)) for name in "ab")
    with pytest.raises(InvalidInput) as caught:
        choose_profile(Plan(both, 2), [0, 1], {"a": (1,), "b": (4,)})
    assert str(caught.value) == (
        "no optimization profile of this instance takes these inputs together: 'a' [1], 'b' [4]"
    )


def test_an_instance_has_the_profiles_of_its_group() -> None:
    groups = [{"name": "m_0"}, {"name": "m_1", "profile": ["1", "0", "1"]}]
    assert profiles_of_group("m", instance_group_of({"instance_group": groups}, "m_1_3"), PLAN) == [
        0,
        1,
    ]
    assert profiles_of_group("m", instance_group_of({"instance_group": groups}, "m_0_0"), PLAN) == [
        0
    ]
    assert instance_group_of({"instance_group": groups}, "other_0") == {}
    with pytest.raises(ModelFailure) as caught:
        profiles_of_group("m", {"name": "m_0", "profile": ["0", "2"]}, PLAN)
    assert str(caught.value) == (
        "model 'm' cannot be loaded: its instance group 'm_0' names the optimization profile 2, and"
        " the engine has 2, counted from 0"
    )


def test_the_largest_batch_is_what_some_profile_takes_of_all_inputs() -> None:
    assert PLAN.max_batch([0]) == 4
    assert PLAN.max_batch([0, 1]) == 16
    assert SHAPED.max_batch([0]) == 8
    assert FIXED.max_batch([0]) == 0
    assert IMPLICIT.max_batch([0]) == 16


def test_a_vectorized_layout_is_padded() -> None:
    assert CHW4.elements((2, 3, 2, 2)) == 2 * 4 * 2 * 2
    assert CHW4.elements((2, 8, 1, 1)) == 16
    assert VECTORS.outputs[0].nbytes((1, 3, 2, 2)) == 16
    assert PLAN.inputs[0].nbytes((2, 3)) == 24


def test_a_plan_completes_a_configuration() -> None:
    given: dict[str, Any] = {"name": "m"}
    complete_config(given, PLAN, [0, 1])
    assert given == {
        "name": "m",
        "max_batch_size": 16,
        "dynamic_batching": {},
        "input": [entry("x", [3])],
        "output": [entry("y", [5])],
    }


@pytest.mark.parametrize(
    ("plan", "inputs", "outputs"),
    [
        (
            SHAPED,
            [entry("x", [-1]), entry("n", [1], "TYPE_INT32", is_shape_tensor=True)],
            [entry("y", [-1])],
        ),
        (
            VECTORS,
            [entry("x", [3, 2, 2], "TYPE_INT8")],
            [entry("y", [3, 2, 2], "TYPE_INT8", is_non_linear_format_io=True)],
        ),
        (IMPLICIT, [entry("x", [3])], [entry("y", [5])]),
    ],
    ids=["shape tensor", "layout", "implicit"],
)
def test_a_completed_configuration_agrees_with_its_plan(
    plan: Plan, inputs: list[Any], outputs: list[Any]
) -> None:
    given: dict[str, Any] = {"name": "m"}
    complete_config(given, plan, [0])
    assert (given["input"], given["output"]) == (inputs, outputs)
    check_config(ModelContract(given), given["max_batch_size"], plan, [0])


def test_a_plan_without_a_batch_dimension_is_completed_without_batches() -> None:
    given: dict[str, Any] = {"name": "m", "output": [entry("y", [5])]}
    complete_config(given, FIXED, [0])
    assert given["input"] == [entry("x", [2, 3])]
    assert "dynamic_batching" not in given and "max_batch_size" not in given


def test_configured_shapes_with_the_batch_dimension_disable_batching() -> None:
    given = config(0, entry("x", [-1, 3]))
    complete_config(given, PLAN, [0])
    assert given["max_batch_size"] == 0
    given = config(0, entry("x", [3]))
    complete_config(given, PLAN, [0])
    assert given["max_batch_size"] == 4


def test_a_configured_scheduler_is_kept() -> None:
    given = config(2, sequence_batching={})
    complete_config(given, PLAN, [0])
    assert "dynamic_batching" not in given
    assert given["max_batch_size"] == 2


def test_a_batch_size_beyond_the_plans_is_not_completed() -> None:
    with pytest.raises(ModelFailure) as caught:
        complete_config({"name": "m", "max_batch_size": 17}, PLAN, [0, 1])
    assert str(caught.value) == (
        "autofill failed for model 'm': configuration specified max-batch 17 but TensorRT engine"
        " only supports max-batch 16"
    )


@pytest.mark.parametrize(
    ("given", "plan", "text"),
    [
        (
            config(5),
            PLAN,
            (
                "configuration specifies max_batch_size 5, and the engine takes at most 4 with the"
                " optimization profiles 0"
            ),
        ),
        (
            config(5),
            FIXED,
            (
                "configuration specifies max_batch_size 5, and the engine has no dynamic batch"
                " dimension with the optimization profiles 0"
            ),
        ),
        (
            config(0),
            IMPLICIT,
            (
                "configuration specifies max_batch_size 0, and the engine has an implicit batch"
                " dimension: set it, to at most 16"
            ),
        ),
        (
            config(4, entry("x", [-1]), entry("n", [1], "TYPE_INT32")),
            SHAPED,
            (
                "configuration does not set is_shape_tensor for input 'n', which is a shape tensor"
                " in the engine"
            ),
        ),
        (
            config(4, entry("x", [3], is_shape_tensor=True)),
            PLAN,
            (
                "configuration sets is_shape_tensor for input 'x', which is not a shape tensor in"
                " the engine"
            ),
        ),
        (
            config(4, entry("x", [3, 2, 2], "TYPE_INT8"), output=[entry("y", [3, 2, 2])]),
            VECTORS,
            (
                "configuration does not set is_non_linear_format_io for output 'y', which is of a"
                " non-linear format (CHW4) in the engine"
            ),
        ),
        (
            config(4, entry("x", [3], "TYPE_FP16")),
            PLAN,
            "configuration expects datatype TYPE_FP16 for input 'x', model provides TYPE_FP32",
        ),
    ],
    ids=["batch", "fixed", "implicit", "shape tensor", "no shape tensor", "layout", "type"],
)
def test_a_mismatch_with_the_plan_is_refused_with_both_values(
    given: dict[str, Any], plan: Plan, text: str
) -> None:
    assert refusal(given, plan) == f"unable to load model 'm', {text}"


def test_no_graphs_are_recorded_unless_configured() -> None:
    assert graph_specs(config(4), PLAN, [0]) == []
    assert graphs(4, IMPLICIT) == []


def test_graphs_are_for_one_item_and_the_preferred_sizes_unless_specified() -> None:
    preferred = {"preferred_batch_size": [4, 2, 4]}
    found = graphs(4, dynamic_batching=preferred)
    assert [graph.extents for graph in found] == [{"x": (n, 3)} for n in (1, 2, 4)]
    without = graphs(0)
    assert [graph.extents for graph in without] == [{"x": (2, 3)}]


def test_a_graph_spec_names_shapes_and_the_values_of_shape_tensors() -> None:
    spec = {"batch_size": 2, "input": {"x": {"dim": ["7"]}, "n": {"dim": ["9"]}}}
    (graph,) = graphs(4, SHAPED, cuda={"graph_spec": [spec]})
    assert graph.extents == {"x": (2, 7), "n": (2, 9)}
    (graph,) = graphs(4, SHAPED, cuda={"graph_spec": [{"batch_size": 2}]})
    assert graph.extents == {"x": (2, 4), "n": (2, 6)}  # the optimum of the profile


@pytest.mark.parametrize(
    ("size", "spec", "text"),
    [
        (4, {"batch_size": 5}, "its batch_size must be from 1 to 4, got 5"),
        (4, {}, "its batch_size must be from 1 to 4, got 0"),
        (0, {"batch_size": 1}, "its batch_size must be 0, as there is no max_batch_size, got 1"),
        (4, {"batch_size": 1, "input": {"z": {"dim": [3]}}}, "the engine has no input 'z'"),
        (
            4,
            {"batch_size": 1, "input": {"x": {"dim": [3, 1]}}},
            "its input 'x' must have 1 dimensions, got 2",
        ),
        (
            4,
            {"batch_size": 1, "input": {"x": {"dim": [9]}}},
            (
                "input 'x' has the shape [1,9], which no optimization profile of this instance"
                " takes; they take 0: [1,3] to [4,3]"
            ),
        ),
    ],
    ids=["large", "none", "unbatched", "unknown", "rank", "profile"],
)
def test_a_graph_spec_that_does_not_fit_is_refused(size: int, spec: Any, text: str) -> None:
    with pytest.raises(ModelFailure) as caught:
        graphs(size, cuda={"graph_spec": [spec]})
    assert str(caught.value) == (
        f"model 'm' cannot be loaded: a graph_spec of optimization.cuda does not fit: {text}"
    )


def test_the_smallest_graph_that_covers_a_batch_is_chosen() -> None:
    specs = [
        {"batch_size": 4, "graph_lower_bound": {"batch_size": 2}},
        {"batch_size": 3, "graph_lower_bound": {"batch_size": 3}},
        {"batch_size": 1},
    ]
    found = graphs(4, cuda={"graph_spec": specs})

    def chosen(rows: int) -> Extent | None:
        graph = choose_graph(found, {"x": (rows, 3)})
        return graph and graph.extents["x"]

    assert [chosen(rows) for rows in (1, 2, 3, 4, 5)] == [(1, 3), (4, 3), (3, 3), (4, 3), None]


def test_the_file_for_a_gpus_capability_comes_before_the_default() -> None:
    given = {
        "default_model_filename": "model.plan",
        "cc_model_filenames": {"8.6": "ampere.plan", "9.0": "hopper.plan"},
    }
    found = {each: model_path(given, "/m/1", each) for each in ("8.6", "9.0", "7.5")}
    assert found == {"8.6": "/m/1/ampere.plan", "9.0": "/m/1/hopper.plan", "7.5": "/m/1/model.plan"}


def without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, library: str) -> None:
    (tmp_path / "tensorrt.py").write_text(library)
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))


def load(tmp_path: Path, kind: str = "KIND_GPU", **more: Any) -> str:
    (tmp_path / "m" / "1").mkdir(parents=True)
    groups = [{"name": "m", "kind": kind, "count": 1, **more}]
    given = config(4, backend="tensorrt", instance_group=groups)
    with pytest.raises(ModelFailure) as caught:
        testing.load(tmp_path / "m", given, backend=BACKEND)
    return str(caught.value)


@pytest.mark.parametrize(
    ("library", "how"),
    [
        ("raise ModuleNotFoundError('gone')", "is not installed (gone)"),
        ("raise ImportError('libnvinfer.so.10: no')", "cannot be imported (libnvinfer.so.10: no)"),
    ],
    ids=["missing", "broken"],
)
def test_a_library_that_is_missing_is_named_with_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, how: str
) -> None:
    pytest.importorskip("torch", reason=TORCH)
    without(monkeypatch, tmp_path, library)
    assert load(tmp_path) == (
        "model 'm' cannot be loaded: its backend 'tensorrt' needs the Python package tensorrt,"
        f" which {how}; to install it: {sys.executable} -m pip install 'pbhost[tensorrt]'"
    )


@pytest.mark.parametrize("kind", ["CPU", "MODEL"])
def test_an_instance_that_is_not_on_a_gpu_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    pytest.importorskip("torch", reason=TORCH)
    without(monkeypatch, tmp_path, "")
    args = {"model_instance_name": "m_0", "model_instance_kind": kind}
    args |= {"model_config": json.dumps(config(4)), "model_instance_device_id": "0"}
    with pytest.raises(ModelFailure) as caught:
        TritonPythonModel().initialize(args)
    assert str(caught.value) == (
        f"model 'm' cannot be loaded: its instance 'm_0' is to run on KIND_{kind}, and TensorRT"
        " runs on GPUs alone; configure KIND_GPU, on a machine that has one"
    )


def test_a_missing_gpu_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason=TORCH)
    without(monkeypatch, tmp_path, "")
    assert load(tmp_path, gpus=[99]) == (
        "model 'm' cannot be loaded: its instance 'm_0' is to run on GPU 99, and torch"
        f" {torch.__version__} sees {torch.cuda.device_count()} GPUs; TensorRT needs one, and a"
        " torch that is built for the machine's CUDA"
    )
