"""Where the code of a model is looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from host.config.model_config import LoadedConfig
from host.config.schema import new_config
from host.errors import ErrorCode, HostError
from host.models.backends import Backends
from stub.wire.messages import ModelSource


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of the Python-based backend `own`, in `<tmp_path>/backends`."""
    folder = tmp_path / "backends" / "own"
    folder.mkdir(parents=True)
    (folder / "model.py").touch()
    (tmp_path / "m" / "1").mkdir(parents=True)
    return folder


def found(folder: Path, backend: str, runtime: str = "", **parameters: str) -> LoadedConfig:
    """The configuration that a model `m` gets, having checked its source."""
    config = new_config()
    config.name, config.backend, config.runtime = "m", backend, runtime
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    before = config.SerializeToString(deterministic=True)
    model = folder.parents[1] / "m"
    source, loaded = Backends(folder.parent).find_backend(model, 1, LoadedConfig(config, None))
    assert source == ModelSource(str(model), 1, "model.py", str(folder))
    assert config.SerializeToString(deterministic=True) == before, "other versions share it"
    return loaded


def refusal(
    folder: Path, backend: str, runtime: str = "", code: ErrorCode = ErrorCode.INVALID_ARG
) -> str:
    with pytest.raises(HostError) as caught:
        found(folder, backend, runtime)
    assert caught.value.code is code
    return caught.value.message


@pytest.mark.parametrize("runtime", ["", "model.py"])
def test_a_file_in_the_backends_folder_is_the_code_and_becomes_the_runtime(
    folder: Path, runtime: str
) -> None:
    assert found(folder, "own", runtime).config.runtime == "model.py"


@pytest.mark.parametrize("runtime", ["", "libtriton_python.so"])
def test_a_python_model_brings_its_code_along(folder: Path, runtime: str) -> None:
    config = new_config()
    config.backend, config.runtime = "python", runtime
    config.default_model_filename = "mine.py"
    loaded = LoadedConfig(config, None)
    source, same = Backends(folder.parent).find_backend(folder, 3, loaded)
    assert source == ModelSource(str(folder), 3, "mine.py")
    assert same is loaded
    assert config.runtime == runtime


def test_a_folder_that_is_a_link_is_as_good(folder: Path) -> None:
    (folder.parent / "linked").symlink_to(folder)
    model = folder.parents[1] / "m"
    config = new_config()
    config.backend = "linked"
    source, _ = Backends(folder.parent).find_backend(model, 1, LoadedConfig(config, None))
    assert source.backend == str(folder.parent / "linked")


def test_a_backend_that_is_not_found_is_named_with_the_searched_places(folder: Path) -> None:
    assert refusal(folder, "none") == (
        "unable to find backend library for backend 'none', try specifying runtime on the model "
        "configuration."
    )
    assert refusal(folder, "pyton").endswith("model configuration. Did you mean 'python'?")
    assert refusal(folder, "openvin").endswith("model configuration.")  # it cannot be served
    assert refusal(folder, "none", "model.py") == (
        "unable to find Python backend based backend library 'model.py' for model 'm', searched: "
        f"'{folder.parent}/none/model.py'"
    )
    model = folder.parents[1] / "m"
    assert refusal(folder, "own", "libother.so") == (
        f"unable to find backend library 'libother.so' for model 'm', searched: '{model}/1' "
        f"'{model}' '{folder}' "
    )


def test_the_python_backend_itself_has_no_file_to_run(folder: Path) -> None:
    assert refusal(folder, "python", "model.py") == (
        "unable to find Python backend based backend library 'model.py' for model 'm', searched: "
        f"'{folder.parent}/python/model.py'"
    )


@pytest.mark.parametrize("name", ["..", ".", "../own", "own/", "own/../own", "a\0b"])
def test_a_backends_name_cannot_lead_out_of_the_directory(folder: Path, name: str) -> None:
    assert refusal(folder, name) == (
        f"backend name '{name}' escapes backend directory '{folder.parent}', for model 'm', check "
        "model config backend field"
    )
    assert "escapes backend directory" in refusal(folder, str(folder))


@pytest.mark.parametrize("runtime", ["../own/../model.py", "/etc/passwd", "a/../../b.so"])
def test_a_runtime_cannot_lead_out_of_the_backends_folder(folder: Path, runtime: str) -> None:
    (folder.parent / "model.py").touch()
    (folder.parent / "b.so").touch()
    assert refusal(folder, "own", runtime) == (
        f"backend library name '{runtime}' escapes backend directory '{folder}', for model 'm', "
        "check model config runtime field"
    )


@pytest.mark.parametrize("place", ["m/1", "m", "backends/own"])
def test_a_native_library_is_found_first_and_cannot_be_run(folder: Path, place: str) -> None:
    library = folder.parents[1] / place / "libtriton_own.so"
    library.touch()
    assert refusal(folder, "own", code=ErrorCode.UNSUPPORTED) == (
        f"model 'm' cannot be loaded: its backend 'own' is the native library '{library}', and "
        "only backends written in Python can be run, from 'model.py' in the backend's folder; "
        'where that is there too, choose it by runtime: "model.py"'
    )
    assert found(folder, "own", "model.py").config.runtime == "model.py"


def test_a_runtime_that_is_another_file_cannot_be_run(folder: Path) -> None:
    (folder / "libother.so").touch()
    (folder / "other.py").touch()
    text = refusal(folder, "own", "libother.so", ErrorCode.UNSUPPORTED)
    assert f"is the native library '{folder}/libother.so'" in text
    text = refusal(folder, "own", "other.py", ErrorCode.UNSUPPORTED)
    assert f"is the file '{folder}/other.py'" in text


def test_an_environment_in_the_backends_folder_is_the_default(folder: Path) -> None:
    assert "EXECUTION_ENV_PATH" not in found(folder, "own").config.parameters
    archive = folder / "pb_exec_env_model.py.tar.gz"
    archive.touch()
    parameters = found(folder, "own").config.parameters
    assert parameters["EXECUTION_ENV_PATH"].string_value == str(archive)
    parameters = found(folder, "own", EXECUTION_ENV_PATH="/other").config.parameters
    assert parameters["EXECUTION_ENV_PATH"].string_value == "/other"


@pytest.mark.parametrize("runtime", ["", "libtriton_onnxruntime.so"])
def test_a_framework_has_a_backend_of_ours_in_the_place_of_the_native_one(
    folder: Path, runtime: str
) -> None:
    native = folder.parent / "onnxruntime"
    native.mkdir()
    (native / "libtriton_onnxruntime.so").touch()
    config = new_config()
    config.name, config.backend, config.runtime = "m", "onnxruntime", runtime
    loaded = LoadedConfig(config, None)
    model = folder.parents[1] / "m"
    settings = {"": {"a": "1", "b": "2"}, "onnxruntime": {"b": "3"}, "python": {"c": "4"}}
    source, same = Backends(folder.parent, settings).find_backend(model, 1, loaded)
    assert Path(source.backend).parts[-3:] == ("stub", "backends", "onnxruntime")
    assert (source.file, source.settings) == ("model.py", {"a": "1", "b": "3"})
    assert same is loaded


def test_a_backend_of_the_users_own_comes_before_ours(folder: Path) -> None:
    own = folder.parent / "pytorch"
    own.mkdir()
    (own / "model.py").touch()
    config = new_config()
    config.name, config.backend = "m", "pytorch"
    source, _ = Backends(folder.parent).find_backend(
        folder.parents[1] / "m", 1, LoadedConfig(config, None)
    )
    assert source.backend == str(own)


def test_a_native_library_of_the_model_itself_is_not_replaced_by_ours(folder: Path) -> None:
    (folder.parents[1] / "m" / "libtriton_onnxruntime.so").touch()
    text = refusal(folder, "onnxruntime", code=ErrorCode.UNSUPPORTED)
    assert "its backend 'onnxruntime' is the native library" in text
