"""The backend `pytorch` in a test harness, which imports PyTorch only once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import pb_utils
from host.config.json_form import to_json
from host.config.model_config import ConfigSettings, load_config
from pb_utils import testing
from stub.user_model import ModelFailure
from tests.conftest import ROOT, RepositoryBuilder
from tests.lazy_import import lazy_import

torch = lazy_import("torch")
torch_models = lazy_import("tests.torch_models")

BACKEND = ROOT / "stub" / "backends" / "pytorch"
SUM = (
    "input [{ name: '%s' data_type: TYPE_FP32 dims: [3] }, "
    "{ name: '%s' data_type: TYPE_FP32 dims: [3] }] "
    "output [{ name: '%s' data_type: TYPE_FP32 dims: [3] }, "
    "{ name: '%s' data_type: TYPE_FP32 dims: [3] }]"
)
BATCHES = "max_batch_size: 8 "
ONE = (
    "input [{ name: 'x' data_type: TYPE_FP32 dims: [%s] }] "
    "output [{ name: 'y' data_type: %s dims: [%s] }] "
)
PARAMETER = "parameters { key: '%s' value { string_value: '%s' } } "

BROKEN: Mapping[str, tuple[str, str]] = {
    "no_file": (
        BATCHES + SUM % ("a", "b", "SUM", "DIFF"),
        r"unable to find '\S+/no_file/1/model.pt' for model 'no_file'",
    ),
    "corrupt": (
        BATCHES + SUM % ("a", "b", "SUM", "DIFF"),
        (
            r"torch \S+ cannot use '\S+/corrupt/1/model.pt': it is not a PyTorch archive, or it is "
            "damaged"
        ),
    ),
    "cut_off": (
        BATCHES + SUM % ("a", "b", "SUM", "DIFF"),
        "it is not a PyTorch archive, or it is damaged",
    ),
    "weights": (
        BATCHES + SUM % ("a", "b", "SUM", "DIFF"),
        "it holds pickled Python objects, such as weights, and no program",
    ),
    "undescribed": (
        "",
        (
            "model 'undescribed' cannot be loaded: its configuration must have inputs and "
            "outputs, as "
            "its file does not say their data types and shapes"
        ),
    ),
    "too_many": (
        BATCHES
        + "input { name: 'c' data_type: TYPE_FP32 dims: [3] } "
        + SUM % ("a", "d", "x", "y"),
        (
            r"unable to load model 'too_many', configuration expects 3 inputs, model provides 2: "
            r"forward\(a, b\)"
        ),
    ),
    "too_few": (
        BATCHES + ONE % ("3", "TYPE_FP32", "3"),
        r"its configuration has no input for the argument 'b' of forward\(a, b\)",
    ),
    "same_index": (
        BATCHES + SUM % ("IN__0", "OTHER__0", "x", "y"),
        "its inputs 'IN__0' and 'OTHER__0' have the same index",
    ),
    "large_index": (
        BATCHES + SUM % ("IN__0", "IN__2", "x", "y"),
        "the index of its input 'IN__2' is too large, forward takes 2 arguments",
    ),
    "unsigned": (
        BATCHES + (SUM % ("a", "b", "x", "y")).replace("FP32", "UINT16", 1),
        (
            "unsupported datatype TYPE_UINT16 for input 'a' for model 'unsigned': the "
            "backend pytorch "
            "has TYPE_BOOL, "
        ),
    ),
    "no_texts": (
        BATCHES + (SUM % ("a", "b", "x", "y")).replace("FP32", "STRING", 1),
        "configuration expects datatype TYPE_STRING for input 'a', model provides a tensor",
    ),
    "bad_flag": (
        BATCHES + SUM % ("a", "b", "x", "y") + PARAMETER % ("INFERENCE_MODE", "maybe"),
        (
            "model 'bad_flag' cannot be loaded: parameter 'INFERENCE_MODE' must be true or "
            "false, got "
            "'maybe'"
        ),
    ),
    "wrong_type_exported": (
        BATCHES + ONE % ("4", "TYPE_FP16", "2"),
        "configuration expects datatype TYPE_FP16 for output 'y', model provides TYPE_FP32",
    ),
    "wrong_rank_exported": (
        BATCHES + ONE % ("4, 1", "TYPE_FP32", "2"),
        (
            r"tensor 'x': the model expects 2 dimensions \(shape \[-1,4\]\) but the model "
            "configuration specifies 3 dimensions"
        ),
    ),
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> RepositoryBuilder:
    """Returns a repository with all models of this module."""
    repository = RepositoryBuilder(tmp_path_factory.mktemp("repository"))
    torch.manual_seed(7)
    add = repository.add
    torch_models.script(
        add("indexed", config=BATCHES + SUM % ("X__1", "Y__0", "D__1", "S__0")),
        torch_models.SumDiff(),
    )
    torch_models.script(
        add("named", config=BATCHES + SUM % ("b", "a", "S__0", "D__1")), torch_models.SumDiff()
    )
    torch_models.script(
        add("ordered", config=BATCHES + SUM % ("FIRST", "SECOND", "S", "D")), torch_models.SumDiff()
    )
    torch_models.script(add("unbatched", config=SUM % ("a", "b", "S", "D")), torch_models.SumDiff())
    torch_models.script(
        add("of_dict", config=BATCHES + SUM % ("left", "right", "S", "D")), torch_models.OfDict()
    )
    torch_models.script(
        add("to_dict", config=BATCHES + SUM % ("a", "b", "DIFF", "SUM")), torch_models.ToDict()
    )
    torch_models.script(
        add("in_place", config=BATCHES + ONE % ("3", "TYPE_FP32", "3")), torch_models.InPlace()
    )
    defaulted = "input { name: 'bias' data_type: TYPE_FP32 dims: [3] optional: true } "
    torch_models.script(
        add("defaulted", config=BATCHES + defaulted + ONE % ("3", "TYPE_FP32", "3")),
        torch_models.Defaulted(),
    )
    texts = "{ name: '%s' data_type: TYPE_STRING dims: [%s] }"
    exclaim = f"input {texts % ('t', 1)} output {texts % ('LOUD', 1)}"
    torch_models.script(add("exclaim", config=BATCHES + exclaim), torch_models.Exclaim())
    typed = " ".join(
        f"{way} {{ name: '{name}' data_type: TYPE_{name} dims: [-1] }}"
        for name in torch_models.Typed.NAMES
        for way in ("input", "output")
    )
    torch_models.script(add("typed", config=typed), torch_models.Typed())
    placed = "instance_group { kind: KIND_MODEL } "
    torch_models.script(
        add("placed", config=BATCHES + placed + SUM % ("a", "b", "S", "D")), torch_models.SumDiff()
    )
    torch_models.script(
        add("wrong_output", config=BATCHES + ONE % ("3", "TYPE_FP64", "3")), torch_models.InPlace()
    )
    torch_models.script(
        add("few_results", config=BATCHES + SUM % ("a", "b", "S__0", "D__2")),
        torch_models.SumDiff(),
    )
    torch_models.script(
        add("other_keys", config=BATCHES + SUM % ("a", "b", "SUM", "PRODUCT")),
        torch_models.ToDict(),
    )
    torch_models.script(
        add("no_texts_out", config=BATCHES + ONE % ("3", "TYPE_STRING", "1")),
        torch_models.InPlace(),
    )
    torch_models.export(repository.path / "exported", torch_models.Network(), torch.randn(2, 4))
    torch_models.export(
        add("exported_named", config=BATCHES + SUM % ("b", "a", "S", "D")),
        torch_models.SumDiff(),
        *_two(),
    )
    torch_models.export(
        repository.path / "exported_dicts", torch_models.Named(), {"u": _two()[0], "v": _two()[1]}
    )
    torch_models.export(
        repository.path / "exported_fixed", torch_models.Bias(), torch.randn(2, 3), batches=False
    )
    in_place = ONE % ("3", "TYPE_FP32", "3")
    torch_models.export(
        add("exported_in_place", config=BATCHES + in_place),
        torch_models.InPlace(),
        torch.randn(2, 3),
    )
    for name, (config, _) in BROKEN.items():
        if name.endswith("_exported"):
            torch_models.export(add(name, config=config), torch_models.Network(), torch.randn(2, 4))
        else:
            torch_models.script(
                add(name, config=f"backend: 'pytorch' {config}"), torch_models.SumDiff()
            )
    file = {name: repository.path / name / "1" / "model.pt" for name in BROKEN}
    file["no_file"].unlink()
    file["corrupt"].write_bytes(b"this is no model")
    file["cut_off"].write_bytes(file["cut_off"].read_bytes()[:2000])
    torch.save({"weight": torch.ones(3)}, file["weights"])
    return repository


Hold = Callable[[str], testing.ModelHarness]


@pytest.fixture
def hold(repository: RepositoryBuilder) -> Hold:
    """Returns a function that loads a model, with its configuration as the host reads it."""

    def hold(name: str) -> testing.ModelHarness:
        folder = repository.path / name
        config = to_json(load_config(folder, ConfigSettings()).config)
        return testing.load(folder, config, backend=BACKEND)

    return hold


def _two() -> tuple[Any, Any]:
    return torch.randn(2, 3), torch.randn(2, 3)


A = np.arange(6, dtype=np.float32).reshape(2, 3)
B = np.full((2, 3), 100, np.float32)


@pytest.mark.parametrize(
    ("model", "inputs", "outputs"),
    [
        ("indexed", ("Y__0", "X__1"), ("S__0", "D__1")),
        ("named", ("a", "b"), ("S__0", "D__1")),
        ("ordered", ("FIRST", "SECOND"), ("S", "D")),
        ("unbatched", ("a", "b"), ("S", "D")),
        ("of_dict", ("left", "right"), ("S", "D")),
        ("to_dict", ("a", "b"), ("SUM", "DIFF")),
        ("placed", ("a", "b"), ("S", "D")),
        ("exported_named", ("a", "b"), ("S", "D")),
        ("exported_dicts", ("u", "v"), ("SUM", "DIFF")),
    ],
)
def test_inputs_are_mapped_to_arguments_and_outputs_to_results(
    hold: Hold, model: str, inputs: tuple[str, str], outputs: tuple[str, str]
) -> None:
    a, b = (A[0], B[0]) if model == "unbatched" else (A, B)
    with hold(model) as held:
        result = held.infer({inputs[1]: b, inputs[0]: a})
    np.testing.assert_array_equal(result[outputs[0]], a + b)
    np.testing.assert_array_equal(result[outputs[1]], a - b)


def test_requests_of_a_batch_get_their_own_parts(hold: Hold) -> None:
    with hold("named") as held:
        requests = [held.request({"a": A + n, "b": B}) for n in range(3)]
        requests.append(held.request({"a": A[:1], "b": B[:1]}, requested_outputs=["D__1"]))
        *three, last = held.execute(requests)
    for n, response in enumerate(three):
        total, difference = (tensor.as_numpy() for tensor in response.output_tensors())
        np.testing.assert_array_equal(total, A + n + B)
        np.testing.assert_array_equal(difference, A + n - B)
    (only,) = last.output_tensors()
    np.testing.assert_array_equal(only.as_numpy(), A[:1] - B[:1])


@pytest.mark.parametrize("model", ["in_place", "exported_in_place"])
def test_a_model_that_modifies_its_inputs_gets_copies(hold: Hold, model: str) -> None:
    x = np.full((2, 3), -5, np.float32)
    with hold(model) as held:
        assert not held.infer({"x": x})["y"].any()
    assert (x == -5).all()


@pytest.mark.parametrize("model", ["named", "exported_named"])
def test_a_model_that_only_reads_gets_no_copy(hold: Hold, model: str) -> None:
    with hold(model) as held:
        assert not held.model._program.modifies_inputs


def test_an_argument_with_a_default_may_be_left_out(hold: Hold) -> None:
    with hold("defaulted") as held:
        assert held.infer({"x": A})["y"].tolist() == (A + 1).tolist()
        assert held.infer({"x": A, "bias": B})["y"].tolist() == (A + B).tolist()


def test_texts_are_lists(hold: Hold) -> None:
    texts = np.array([["hé".encode()], [b""], [b"you"]], dtype=np.object_)
    with hold("exclaim") as held:
        result = held.infer({"t": texts})["LOUD"]
    assert result.tolist() == [["hé!".encode()], [b"!"], [b"you!"]]


def test_bytes_that_are_not_utf8_are_an_invalid_argument(hold: Hold) -> None:
    good = np.array([[b"good"]], dtype=np.object_)
    with hold("exclaim") as held:
        fine, failed = held.execute(
            [held.request({"t": good}), held.request({"t": np.array([[b"\xff"]], np.object_)})]
        )
    assert not fine.has_error()
    error = failed.error()
    assert error is not None and error.code() == error.INVALID_ARG
    assert error.message().startswith("input 't' must be text in UTF-8: ")


def test_values_of_every_data_type_are_unchanged(hold: Hold) -> None:
    arrays = {
        name: np.array([1, 0, 1]).astype(kind)
        for name, kind in torch_models.Typed.NAMES.items()
        if kind
    }
    brain = np.array([1, -2, 0.5], ml_dtypes.bfloat16)
    with hold("typed") as held:
        result = held.infer({**arrays, "BF16": brain})
    for name, array in arrays.items():
        assert result[name].dtype == array.dtype
        np.testing.assert_array_equal(result[name], array)
    assert result["BF16"].tolist() == [1, -2, 0.5]


def test_an_exported_program_needs_no_configuration(hold: Hold) -> None:
    with hold("exported") as held:
        config = held.config
        result = held.infer({"x": np.ones((3, 4), np.float32)})["OUTPUT__0"]
    assert (config["platform"], config["default_model_filename"]) == ("torch_aoti", "model.pt2")
    assert (config["max_batch_size"], config["dynamic_batching"]) == (4, {})
    (x,), (y,) = config["input"], config["output"]
    assert (x["name"], x["data_type"], x["dims"]) == ("x", "TYPE_FP32", [4])
    assert (y["name"], y["data_type"], y["dims"]) == ("OUTPUT__0", "TYPE_FP32", [2])
    assert result.shape == (3, 2)
    assert (result == result[0]).all()


def test_an_exported_program_of_fixed_size_is_not_batched(hold: Hold) -> None:
    with hold("exported_fixed") as held:
        assert held.config["max_batch_size"] == 0
        assert held.infer({"x": A})["OUTPUT__0"].tolist() == (A + 1).tolist()


@pytest.mark.parametrize(
    ("model", "inputs", "text"),
    [
        (
            "wrong_output",
            {"x": A},
            (
                "configuration expects datatype TYPE_FP64 for output 'y' of model 'wrong_output',"
                " model provides TYPE_FP32"
            ),
        ),
        (
            "few_results",
            {"a": A, "b": B},
            (
                "model 'few_results' returned 2 results, and the output 'D__2' is number 2 of them,"
                " counted from 0"
            ),
        ),
        (
            "other_keys",
            {"a": A, "b": B},
            (
                "model 'other_keys' returned a dict without the output 'PRODUCT', its keys "
                "are: SUM,"
                " DIFF"
            ),
        ),
        (
            "no_texts_out",
            {"x": A},
            (
                "configuration expects datatype TYPE_STRING for output 'y' of model "
                "'no_texts_out' with"
                " shape [-1,1], model provides Tensor"
            ),
        ),
    ],
)
def test_results_that_are_not_as_configured_are_errors(
    hold: Hold, model: str, inputs: dict[str, Any], text: str
) -> None:
    with hold(model) as held, pytest.raises(pb_utils.TritonModelException) as caught:
        held.infer(inputs)
    assert text in str(caught.value)


@pytest.mark.parametrize("model", BROKEN)
def test_a_model_that_cannot_be_served_says_why(hold: Hold, model: str) -> None:
    with pytest.raises(ModelFailure) as caught:
        hold(model)
    assert re.search(BROKEN[model][1], str(caught.value)), caught.value


def test_a_gpu_that_the_library_does_not_see_is_named(
    hold: Hold, repository: RepositoryBuilder
) -> None:
    config = json.loads(to_json(load_config(repository.path / "named", ConfigSettings()).config))
    config["instance_group"] = [{"name": "named", "kind": "KIND_GPU", "gpus": [99]}]
    with pytest.raises(ModelFailure) as caught:
        testing.load(repository.path / "named", config, backend=BACKEND)
    assert re.fullmatch(
        r"model 'named' cannot be loaded: its instance 'named_0' is to run on GPU 99, and torch"
        r" \S+ sees \d+ GPUs; install a torch that is built for the machine's CUDA, or configure"
        r" KIND_CPU",
        str(caught.value),
    )
