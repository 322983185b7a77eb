"""Default values: version policy, schedulers, backend, platform, file name."""

from __future__ import annotations

from pathlib import Path

import pytest

from host.config.defaults import is_version, normalise_config, resolve_backend
from host.config.pbtxt import parse_pbtxt
from host.config.schema import ModelConfig
from host.errors import ErrorCode, HostError


def normalised(text: str) -> ModelConfig:
    config = parse_pbtxt(text, "config.pbtxt")
    normalise_config(config)
    return config


def test_the_version_policy_defaults_to_the_latest_version() -> None:
    assert normalised("").version_policy.latest.num_versions == 1
    assert normalised("version_policy { latest {} }").version_policy.latest.num_versions == 0
    assert normalised("version_policy { all {} }").version_policy.HasField("all")


@pytest.mark.parametrize(
    "batcher", ["dynamic_batching { %s }", "sequence_batching { oldest { %s } }"]
)
def test_the_preferred_batch_size_defaults_to_the_maximum(batcher: str) -> None:
    def preferred(text: str, setting: str = "") -> list[int]:
        config = normalised(f"{text} {batcher % setting}")
        choice = config.dynamic_batching
        if config.HasField("sequence_batching"):
            choice = config.sequence_batching.oldest
        return list(choice.preferred_batch_size)

    assert preferred("max_batch_size: 8") == [8]
    assert preferred("max_batch_size: 0") == []
    assert preferred("max_batch_size: 8", "preferred_batch_size: 2") == [2]


def test_the_sequence_idle_timeout_defaults_to_one_second() -> None:
    assert normalised("sequence_batching {}").sequence_batching.max_sequence_idle_microseconds == (
        1_000_000
    )
    given = normalised("sequence_batching { max_sequence_idle_microseconds: 5 }")
    assert given.sequence_batching.max_sequence_idle_microseconds == 5


def test_pinned_memory_is_enabled_by_default() -> None:
    optimization = normalised("optimization { input_pinned_memory {} }").optimization
    assert not optimization.input_pinned_memory.enable
    assert optimization.output_pinned_memory.enable


def test_an_ensemble_gets_no_optimization() -> None:
    assert not normalised('platform: "ensemble"').HasField("optimization")


def test_normalising_again_changes_nothing() -> None:
    once = normalised("max_batch_size: 3 dynamic_batching {}")
    twice = parse_pbtxt("", "c")
    twice.CopyFrom(once)
    normalise_config(twice)
    assert once == twice


def resolved(text: str, files: tuple[str, ...], directory: Path, model: str = "m") -> list[str]:
    """Backend, platform and file name; a file is in version 1 unless its path names another."""
    (directory / "1").mkdir()
    for name in files:
        path = directory / (name if name[0].isdigit() else f"1/{name}")
        path.parent.mkdir(exist_ok=True)
        path.mkdir(exist_ok=True) if name.endswith("/") else path.touch()
    config = normalised(text)
    resolve_backend(config, model, directory)
    return [config.backend, config.platform, config.default_model_filename]


@pytest.mark.parametrize(
    ("text", "files", "expected"),
    [
        ("", ["model.py"], ["python", "", "model.py"]),
        ('backend: "python"', [], ["python", "", "model.py"]),
        ('backend: "python" default_model_filename: "x.py"', [], ["python", "", "x.py"]),
        ('default_model_filename: "model.py"', [], ["python", "", "model.py"]),
        ('platform: "x" default_model_filename: "model.py"', [], ["python", "x", "model.py"]),
        ('backend: "python"', ["model.onnx"], ["python", "", "model.py"]),
        ("", ["model.onnx"], ["onnxruntime", "onnxruntime_onnx", "model.onnx"]),
        ("", ["model.onnx/"], ["onnxruntime", "onnxruntime_onnx", "model.onnx"]),
        ("", ["model.plan", "model.py"], ["tensorrt", "tensorrt_plan", "model.plan"]),
        ("", ["model.plan/", "model.py"], ["python", "", "model.py"]),
        ("", ["model.xml"], ["openvino", "", "model.xml"]),
        ("", ["model.pt"], ["pytorch", "pytorch_libtorch", "model.pt"]),
        ("", ["model.pt2"], ["pytorch", "torch_aoti", "model.pt2"]),
        ('platform: "torch_aoti"', [], ["pytorch", "torch_aoti", "model.pt2"]),
        ('platform: "libtorch"', [], ["pytorch", "libtorch", "model.pt"]),
        ('backend: "pytorch"', [], ["pytorch", "pytorch_libtorch", "model.pt"]),
        ("", ["model.graphdef"], ["tensorflow", "tensorflow_graphdef", "model.graphdef"]),
        ("", ["model.savedmodel/"], ["tensorflow", "tensorflow_savedmodel", "model.savedmodel"]),
        ('backend: "tensorflow"', [], ["tensorflow", "", ""]),
        ('platform: "ensemble"', ["model.py"], ["", "ensemble", ""]),
        ('backend: "own"', ["model.py"], ["own", "", ""]),
        ('default_model_filename: "other"', ["model.py"], ["", "", "other"]),
    ],
)
def test_backend_platform_and_file_name_imply_each_other(
    text: str, files: list[str], expected: list[str], tmp_path: Path
) -> None:
    assert resolved(text, tuple(files), tmp_path) == expected


def test_the_part_after_the_first_dot_of_a_name_is_the_backend(tmp_path: Path) -> None:
    assert resolved("", (), tmp_path, "a.b.c") == ["b.c", "", "model.b.c"]


def test_a_model_without_any_hint_has_no_backend(tmp_path: Path) -> None:
    with pytest.raises(HostError) as caught:
        resolved("", (), tmp_path)
    assert caught.value.code is ErrorCode.INVALID_ARG
    assert caught.value.message == (
        "Invalid model name: Could not determine backend for model 'm' with no backend in model "
        "configuration. Expected model name of the form 'model.<backend_name>'."
    )


ONNX = ["onnxruntime", "onnxruntime_onnx", "model.onnx"]
AOTI = ["pytorch", "torch_aoti", "model.pt2"]
PYTHON = ["python", "", "model.py"]
ALL = "version_policy { all {} }"


@pytest.mark.parametrize(
    ("text", "files", "expected"),
    [
        ("", ["1/model.onnx", "2/model.py"], PYTHON),
        ("", ["9/model.onnx", "10/model.py"], PYTHON),
        ("version_policy { specific { versions: 2 } }", ["2/model.py", "3/model.onnx"], PYTHON),
        (ALL, ["1/", "2/model.py"], PYTHON),
        (ALL, ["1/model.py", "2/"], PYTHON),
        ("", ["1/model.py", "2/model.onnx", "3/"], ONNX),
        ("", ["1/model.py", "02/model.onnx", "3x/model.onnx"], PYTHON),
        (
            'backend: "pytorch"',
            ["1/model.pt", "2/model.pt2"],
            ["pytorch", "torch_aoti", "model.pt2"],
        ),
        (f'{ALL} backend: "python"', ["1/model.onnx", "2/model.py"], PYTHON),
    ],
)
def test_the_files_of_the_versions_that_the_policy_selects_decide(
    text: str, files: list[str], expected: list[str], tmp_path: Path
) -> None:
    assert resolved(text, tuple(files), tmp_path) == expected


@pytest.mark.parametrize(
    ("text", "files", "backends"),
    [
        (ALL, ["9/model.onnx", "10/model.py"], ["onnxruntime", "python"]),
        (
            'version_policy { latest { num_versions: 2 } } backend: "tensorflow"',
            ["9/model.savedmodel/", "10/model.graphdef"],
            ["tensorflow", "tensorflow"],
        ),
    ],
)
def test_selected_versions_of_different_kinds_are_refused(
    text: str, files: list[str], backends: list[str], tmp_path: Path
) -> None:
    with pytest.raises(HostError) as caught:
        resolved(text, tuple(files), tmp_path)
    assert caught.value.code is ErrorCode.INVALID_ARG
    assert caught.value.message == (
        f"versions 9 and 10 of model 'm' are of different kinds: '{files[0].rstrip('/')}' needs the"
        f" backend '{backends[0]}', and '{files[1]}' the backend '{backends[1]}'; all versions of a"
        " model have one backend and one file name: set 'backend' and 'default_model_filename', or"
        " let 'version_policy' select versions of one kind"
    )


def test_versions_are_plain_numbers() -> None:
    assert all(map(is_version, ["0", "1", "10", "9223372036854775807"]))
    assert not any(map(is_version, ["", "01", "-3", "1abc", "1 ", "²", "9223372036854775808"]))
