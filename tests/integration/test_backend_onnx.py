"""Models in ONNX's format, built here, in a real host."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.grpc as grpcclient

from pb_utils import testing
from stub.user_model import ModelFailure
from tests.clients import Client, infer_error, tensor
from tests.conftest import DEADLINE, ROOT, RepositoryBuilder, RunningHost, Serve
from tests.lazy_import import lazy_import

onnx = lazy_import("onnx")
onnxruntime = lazy_import("onnxruntime")

BACKEND = ROOT / "stub" / "backends" / "onnxruntime"

FLOAT = "FLOAT"
SLOW_BATCHES = "max_batch_size: 64 dynamic_batching { max_queue_delay_microseconds: 200000 }"
ACCELERATOR = "optimization { execution_accelerators { cpu_execution_accelerator { name: '%s' } } }"
KINDS = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FLOAT16": np.float16,
    "FLOAT": np.float32,
    "DOUBLE": np.float64,
    "STRING": np.object_,
}

Shape = Sequence[int | str | None] | None
Info = tuple[str, str, Shape]


def save(
    folder: Path,
    inputs: Sequence[Info],
    outputs: Sequence[Info],
    nodes: Sequence[tuple[str, Sequence[str], Sequence[str]]],
    initializers: Sequence[tuple[str, Any]] = (),
    opset: int = 17,
    name: str = "model.onnx",
) -> None:
    """Writes a graph of nodes (operator, inputs, outputs) as a version's file."""
    helper = onnx.helper

    def value(name: str, kind: str, shape: Shape) -> Any:
        return helper.make_tensor_value_info(name, getattr(onnx.TensorProto, kind), shape)

    graph = helper.make_graph(
        [helper.make_node(operator, taken, given) for operator, taken, given in nodes],
        "graph",
        [value(*info) for info in inputs],
        [value(*info) for info in outputs],
        [onnx.numpy_helper.from_array(array, name) for name, array in initializers],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    path = folder / "1" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString())


def save_sum(folder: Path, name: str = "model.onnx", first: int | str = "N", **more: Any) -> None:
    """SUM and DIFF of two inputs of three columns."""
    shape = [first, 3]
    save(
        folder,
        [("A", FLOAT, shape), ("B", FLOAT, shape)],
        [("SUM", FLOAT, shape), ("DIFF", FLOAT, shape)],
        [("Add", ["A", "B"], ["SUM"]), ("Sub", ["A", "B"], ["DIFF"])],
        name=name,
        **more,
    )


def save_all_kinds(folder: Path) -> None:
    """Every data type, through an Identity."""
    save(
        folder,
        [(kind, kind, ["N", "M"]) for kind in KINDS],
        [(f"{kind}_OUT", kind, ["N", "M"]) for kind in KINDS],
        [("Identity", [kind], [f"{kind}_OUT"]) for kind in KINDS],
    )


WIDE = 1 << 19


def save_wide(folder: Path, misnamed: bool = False) -> None:
    """MANY: two megabytes for each row of X, twice as many if `misnamed`; FEW: one number."""
    save(
        folder,
        [("X", FLOAT, ["N", 1])],
        [("MANY", FLOAT, ["N", WIDE]), ("FEW", FLOAT, ["N", 1])],
        [
            ("Tile", ["X", "TIMES"], ["TIMED"]),
            ("MatMul", ["TIMED", "COUNT"], ["MANY"]),
            ("Neg", ["X"], ["FEW"]),
        ],
        [
            ("COUNT", np.arange(WIDE, dtype=np.float32)[None]),
            ("TIMES", np.array([2 if misnamed else 1, 1])),
        ],
    )


def entry(name: str, dims: str = "3", kind: str = "TYPE_FP32", more: str = "") -> str:
    return f"{{ name: '{name}' data_type: {kind} dims: [{dims}] {more} }}"


SUM_TENSORS = f"input [{entry('A')}, {entry('B')}] output [{entry('SUM')}, {entry('DIFF')}]"

BROKEN = {
    "no_file": (
        'backend: "onnxruntime"',
        r"failed to stat file \S+/no_file/1/model.onnx",
    ),
    "no_inner_file": (
        "",
        r"unable to find '\S+/model.onnx/model.onnx' for model instance 'no_inner_file'",
    ),
    "corrupt": ("", r"cannot use '\S+/corrupt/1/model.onnx': .*Protobuf parsing failed"),
    "new_opset": ("", r"cannot use '\S+': .*till opset \d+"),
    "unknown_operator": ("", r"cannot use '\S+': .*NoSuchOperator"),
    "wrong_type": (
        (
            f"max_batch_size: 8 input [{entry('A', kind='TYPE_INT32')}, {entry('B')}] "
            f"output [{entry('SUM')}]"
        ),
        (
            "unable to load model 'wrong_type', configuration expects datatype TYPE_INT32 "
            "for input "
            "'A', model provides TYPE_FP32"
        ),
    ),
    "wrong_rank": (
        f"max_batch_size: 8 input [{entry('A', '3, 1')}, {entry('B')}] output [{entry('SUM')}]",
        (
            r"model 'wrong_rank', tensor 'A': the model expects 2 dimensions \(shape "
            r"\[-1,3\]\) but the"
            r" model configuration specifies 3 dimensions \(an initial batch dimension because "
            r"max_batch_size > 0 followed by the explicit tensor shape, making complete shape "
            r"\[-1,3,1\]\)"
        ),
    ),
    "wrong_size": (
        f"input [{entry('A', '-1, 4')}, {entry('B', '-1, 3')}] output [{entry('SUM', '-1, 3')}]",
        (
            r"model 'wrong_size', tensor 'A': the model expects 2 dimensions \(shape "
            r"\[-1,3\]\) but the"
            r" model configuration specifies 2 dimensions \(shape \[-1,4\]\)"
        ),
    ),
    "too_few": (
        f"max_batch_size: 8 input [{entry('A')}] output [{entry('SUM')}]",
        "unable to load model 'too_few', configuration expects 1 inputs, model provides 2",
    ),
    "wrong_input": (
        f"max_batch_size: 8 input [{entry('A')}, {entry('C')}] output [{entry('SUM')}]",
        "unexpected inference input 'C', allowed inputs are: A, B",
    ),
    "wrong_output": (
        f"max_batch_size: 8 input [{entry('A')}, {entry('B')}] output [{entry('X')}]",
        "unexpected inference output 'X', allowed outputs are: DIFF, SUM",
    ),
    "not_optional": (
        (
            f"max_batch_size: 8 input [{entry('A')}, {entry('B', more='optional: true')}] "
            f"output [{entry('SUM')}]"
        ),
        (
            "'optional' is set to true for input 'B' while the backend model doesn't support "
            "optional "
            "input"
        ),
    ),
    "cannot_batch": (
        "max_batch_size: 4",
        (
            "autofill failed for model 'cannot_batch': model does not support batching while "
            "non-zero "
            "max_batch_size is specified"
        ),
    ),
    "bad_level": ("optimization { graph { level: 7 } }", "level must be -1 .*, got 7"),
    "bad_threads": (
        'parameters { key: "intra_op_thread_count" value { string_value: "many" } }',
        (
            "model 'bad_threads' cannot be loaded: parameter 'intra_op_thread_count' must be "
            "a whole "
            "number, got 'many'"
        ),
    ),
    "openvino": (
        ACCELERATOR % "openvino",
        (
            "its instance 'openvino_0' needs the execution provider "
            "OpenVINOExecutionProvider, which "
            "the installed onnxruntime .* does not offer .*; install onnxruntime-openvino in its "
            "place, or configure no cpu_execution_accelerator"
        ),
    ),
    "abacus": (
        ACCELERATOR % "abacus",
        "unknown Execution Accelerator 'abacus' is requested",
    ),
    "no_operators": (
        'model_operations { op_library_filename: "ops.so" }',
        "its library of custom operators 'ops.so' cannot be used: ",
    ),
}


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    """Serves all that can be served, and reports the rest."""
    repository = module_repository
    save_sum(repository.path / "auto")
    save_sum(repository.path / "folder", "model.onnx/model.onnx")
    save_all_kinds(repository.path / "kinds")
    save_sum(repository.path / "fixed", first=2)
    save_sum(
        repository.add(
            "renamed", config="default_model_filename: 'net.bin' backend: 'onnxruntime'"
        ),
        "net.bin",
    )
    save_sum(repository.add("complete", config=f"max_batch_size: 8 {SUM_TENSORS}"))
    save_sum(
        repository.add(
            "large",
            config=SLOW_BATCHES,
        )
    )
    tuned = """
        instance_group [{ count: 1 }]
        optimization { graph { level: 1 } }
        parameters { key: "execution_mode" value { string_value: "1" } }
        parameters { key: "intra_op_thread_count" value { string_value: "1" } }
        parameters { key: "inter_op_thread_count" value { string_value: "1" } }
        parameters { key: "enable_mem_arena" value { string_value: "0" } }
        parameters { key: "enable_mem_pattern" value { string_value: "0" } }
        parameters { key: "session.set_denormal_as_zero" value { string_value: "1" } }
        parameters { key: "memory.enable_memory_arena_shrinkage" value { string_value: "" } }
    """
    save_sum(repository.add("tuned", config=tuned))
    save(
        repository.path / "rows",
        [("X", FLOAT, ["N"])],
        [("Y", FLOAT, ["N"])],
        [("Neg", ["X"], ["Y"])],
    )
    save(
        repository.path / "scalar",
        [("X", FLOAT, [])],
        [("Y", FLOAT, [])],
        [("Neg", ["X"], ["Y"])],
    )
    save(
        repository.path / "optional",
        [("X", FLOAT, ["N"]), ("BIAS", FLOAT, [1])],
        [("Y", FLOAT, ["N"])],
        [("Add", ["X", "BIAS"], ["Y"])],
        [("BIAS", np.array([10], np.float32))],
    )
    flat = entry("X", "-1", more="allow_ragged_batch: true")
    ragged = f"{SLOW_BATCHES} input [{flat}] output [{entry('N', '1', 'TYPE_INT64')}]"
    save(
        repository.add("ragged", config=ragged),
        [("X", FLOAT, [None])],
        [("N", "INT64", ["N", 1])],
        [("NonZero", ["X"], ["PLACES"]), ("Transpose", ["PLACES"], ["N"])],
    )
    save(
        repository.path / "hungry",
        [("SIZE", "INT64", [1])],
        [("ZEROS", FLOAT, [None])],
        [("ConstantOfShape", ["SIZE"], ["ZEROS"])],
    )
    save_wide(repository.add("wide", config=f"{SLOW_BATCHES} instance_group {{ count: 1 }}"))
    for name, (config, _) in BROKEN.items():
        folder = repository.add(name, config=config)
        save_sum(folder, first=2 if name == "cannot_batch" else "N")
    file = {name: repository.path / name / "1" / "model.onnx" for name in BROKEN}
    file["no_file"].unlink()
    file["no_inner_file"].unlink()
    file["no_inner_file"].mkdir()
    file["corrupt"].write_bytes(b"this is no model")
    save_sum(repository.path / "new_opset", opset=999)
    save(
        repository.path / "unknown_operator",
        [("X", FLOAT, [1])],
        [("Y", FLOAT, [1])],
        [("NoSuchOperator", ["X"], ["Y"])],
    )
    host = module_serve(repository, "--exit-on-error=false", "--strict-readiness=false")
    return host.wait_started()


@pytest.fixture
def client(host: RunningHost) -> Iterator[Client]:
    with host.client() as client:
        yield client


def rows(count: int, start: int = 0) -> Any:
    return np.arange(start, start + 3 * count, dtype=np.float32).reshape(count, 3)


def send_request(client: Client, inputs: Any, model: str = "large") -> Future[Any]:
    """Sends a request and does not wait for the answer."""
    future: Future[Any] = Future()

    def done(result: Any, error: Any) -> None:
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    client.async_infer(model, inputs, done)
    return future


def executions(client: Client, model: str) -> int:
    statistics = client.get_inference_statistics(model, as_json=True)["model_stats"][0]
    return int(statistics.get("execution_count", 0))


@pytest.mark.parametrize("model", ["auto", "folder", "renamed", "complete", "tuned", "large"])
def test_a_model_answers(client: Client, model: str) -> None:
    a, b = rows(2), rows(2, 100)
    result = client.infer(model, [tensor("A", a), tensor("B", b)])
    np.testing.assert_array_equal(result.as_numpy("SUM"), a + b)
    np.testing.assert_array_equal(result.as_numpy("DIFF"), a - b)


def test_a_model_without_a_configuration_is_batched(client: Client) -> None:
    config = client.get_model_config("auto", as_json=True)["config"]
    assert (config["backend"], config["platform"]) == ("onnxruntime", "onnxruntime_onnx")
    assert config["default_model_filename"] == "model.onnx"
    assert config["max_batch_size"] == 4
    assert config["dynamic_batching"]["preferred_batch_size"] == [4]
    assert config["input"] == [
        {"name": name, "data_type": "TYPE_FP32", "dims": ["3"]} for name in ("A", "B")
    ]
    assert [output["name"] for output in config["output"]] == ["SUM", "DIFF"]
    assert [group["count"] for group in config["instance_group"]] == [2]


def test_a_model_of_fixed_size_is_not_batched(client: Client) -> None:
    config = client.get_model_config("fixed", as_json=True)["config"]
    assert "dynamic_batching" not in config and "max_batch_size" not in config
    assert config["input"][0]["dims"] == ["2", "3"]
    result = client.infer("fixed", [tensor("A", rows(2)), tensor("B", rows(2))])
    np.testing.assert_array_equal(result.as_numpy("SUM"), 2 * rows(2))


def test_a_complete_configuration_is_left_alone(client: Client) -> None:
    config = client.get_model_config("complete", as_json=True)["config"]
    assert config["max_batch_size"] == 8
    assert "dynamic_batching" not in config


def test_only_requested_outputs_are_returned(client: Client) -> None:
    asked = [grpcclient.InferRequestedOutput("DIFF")]
    result = client.infer("auto", [tensor("A", rows(1)), tensor("B", rows(1))], outputs=asked)
    assert result.as_numpy("SUM") is None
    np.testing.assert_array_equal(result.as_numpy("DIFF"), np.zeros((1, 3)))


def test_every_data_type_goes_through(client: Client) -> None:
    arrays: dict[str, npt.NDArray[Any]] = {
        kind: np.array([[1, 0], [1, 1]]).astype(dtype) for kind, dtype in KINDS.items()
    }
    arrays["STRING"] = np.array([["naïve".encode(), b""], [b"x", b"longer"]], dtype=np.object_)
    result = client.infer("kinds", [tensor(kind, array) for kind, array in arrays.items()])
    for kind, array in arrays.items():
        np.testing.assert_array_equal(result.as_numpy(f"{kind}_OUT"), array)


def test_bytes_that_are_no_text_are_the_senders_fault(client: Client) -> None:
    arrays: dict[str, npt.NDArray[Any]] = {
        kind: np.zeros((1, 1), dtype) for kind, dtype in KINDS.items()
    }
    arrays["STRING"] = np.array([[b"\xff"]], dtype=np.object_)
    inputs = [tensor(kind, array) for kind, array in arrays.items()]
    status, text = infer_error(client.infer, "kinds", inputs)
    assert status == "StatusCode.INVALID_ARGUMENT"
    assert text.startswith("input 'STRING' must be text in UTF-8: 'utf-8' codec can't decode byte")


def test_items_without_dimensions_are_served_as_one_element(client: Client) -> None:
    config = client.get_model_config("rows", as_json=True)["config"]
    assert config["input"][0]["dims"] == ["1"] and "reshape" in config["input"][0]
    x = np.array([[1], [2]], np.float32)
    np.testing.assert_array_equal(client.infer("rows", [tensor("X", x)]).as_numpy("Y"), -x)
    x = np.array([5], np.float32)
    np.testing.assert_array_equal(client.infer("scalar", [tensor("X", x)]).as_numpy("Y"), -x)


def test_an_initializer_is_an_optional_input(client: Client) -> None:
    config = client.get_model_config("optional", as_json=True)["config"]
    assert {each["name"]: each.get("optional", False) for each in config["input"]} == {
        "X": False,
        "BIAS": True,
    }
    x, bias = np.ones(2, np.float32), np.array([4], np.float32)
    assert client.infer("optional", [tensor("X", x)]).as_numpy("Y").tolist() == [11, 11]
    result = client.infer("optional", [tensor("X", x), tensor("BIAS", bias)])
    assert result.as_numpy("Y").tolist() == [5, 5]


def test_requests_share_a_run_and_get_their_own_parts(client: Client) -> None:
    before = executions(client, "large")
    sizes = [1, 3, 2, 4, 1, 2]
    starts = list(itertools.accumulate(sizes, initial=0))
    futures = [
        send_request(client, [tensor("A", rows(size, 3 * start)), tensor("B", rows(size))])
        for size, start in zip(sizes, starts, strict=False)
    ]
    for future, size, start in zip(futures, sizes, starts, strict=False):
        expected = rows(size, 3 * start) + rows(size)
        np.testing.assert_array_equal(future.result(DEADLINE).as_numpy("SUM"), expected)
    assert executions(client, "large") - before < len(sizes)


def test_requests_get_their_own_parts_of_a_large_output(client: Client) -> None:
    columns = [np.full((size, 1), size, np.float32) for size in (1, 2, 1, 3)]
    futures = [send_request(client, [tensor("X", x)], "wide") for x in columns]
    for x, future in zip(columns, futures, strict=True):
        result = future.result(DEADLINE)
        np.testing.assert_array_equal(result.as_numpy("FEW"), -x)
        np.testing.assert_array_equal(
            result.as_numpy("MANY"), x * np.arange(WIDE, dtype=np.float32)
        )


def test_ragged_inputs_are_one_flat_tensor(client: Client) -> None:
    x = np.array([[0, 0, 1], [1, 0, 0]], np.float32)
    assert client.infer("ragged", [tensor("X", x)]).as_numpy("N").tolist() == [[2], [3]]


def test_an_output_that_is_too_short_for_the_batch_is_an_error(client: Client) -> None:
    x = np.array([[0, 1], [0, 0]], np.float32)
    status, text = infer_error(client.infer, "ragged", [tensor("X", x)], request_id="short")
    assert status == "StatusCode.UNIMPLEMENTED"
    assert text == (
        "[request id: short] failed to split the output tensor 'N' in responses: expected batch "
        "size of at least 2 in model output, got 1"
    )


def test_a_run_that_needs_too_much_memory_is_an_error_and_the_next_one_is_not(
    client: Client,
) -> None:
    def zeros(size: int) -> Any:
        given = [tensor("SIZE", np.array([size], np.int64))]
        return client.infer("hungry", given).as_numpy("ZEROS")

    status, text = infer_error(zeros, 1 << 46)
    assert status == "StatusCode.INTERNAL"
    assert "hungry" in text and re.search("bad_alloc|[Ff]ailed to allocate memory", text), text
    assert zeros(3).tolist() == [0, 0, 0]


def test_nan_and_infinity_are_unchanged(client: Client) -> None:
    a = np.array([[1, np.nan, 3], [4, np.inf, 6]], np.float32)
    result = client.infer("auto", [tensor("A", a), tensor("B", rows(2))])
    np.testing.assert_array_equal(result.as_numpy("SUM"), a + rows(2))


@pytest.mark.parametrize("model", BROKEN)
def test_a_model_that_cannot_be_served_says_why_and_the_others_serve(
    client: Client, host: RunningHost, model: str
) -> None:
    index = client.get_model_repository_index(as_json=True)["models"]
    (mine,) = [each for each in index if each["name"] == model]
    assert mine["state"] == "UNAVAILABLE"
    assert re.search(BROKEN[model][1], mine["reason"]), mine["reason"]
    assert client.is_model_ready("auto")


def test_a_gpu_without_its_execution_provider_is_an_error(tmp_path: Path) -> None:
    save_sum(tmp_path / "m")
    config = {
        "name": "m",
        "backend": "onnxruntime",
        "default_model_filename": "model.onnx",
        "max_batch_size": 8,
        "instance_group": [{"name": "m", "kind": "KIND_GPU", "gpus": [0], "count": 1}],
        "input": [{"name": n, "data_type": "TYPE_FP32", "dims": [3]} for n in ("A", "B")],
        "output": [{"name": "SUM", "data_type": "TYPE_FP32", "dims": [3]}],
    }
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("the installed onnxruntime is the one for GPUs")
    with pytest.raises(ModelFailure) as caught:
        testing.load(tmp_path / "m", config, backend=BACKEND)
    assert re.search(
        r"its instance 'm_0' needs the execution provider CUDAExecutionProvider, which the"
        r" installed onnxruntime \S+ does not offer .*; install onnxruntime-gpu in its place, or"
        r" configure KIND_CPU",
        str(caught.value),
    )
