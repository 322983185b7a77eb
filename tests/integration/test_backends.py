"""Models without code of their own: Python-based backends, in a real host."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import numpy as np
import pytest

from tests.clients import Client, tensor
from tests.conftest import RepositoryBuilder, Serve, wait_until

BACKEND = """
import json, os, sys
import triton_python_backend_utils as pb_utils
import helper

try:
    from . import helper as relative
except ImportError as error:
    RELATIVE = str(error)
IMPORTED = dict(name=__name__, package=__package__, path=list(sys.path))

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        completing = config.as_dict()
        config.add_output({"name": "SEEN", "data_type": "TYPE_STRING", "dims": [1]})
        config.add_output({"name": "SUM", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [-1]})
        return config

    def initialize(self, args):
        import model
        data = json.load(open(os.path.join(pb_utils.get_model_dir(), "data.json")))
        self.added = data["add"]
        config = json.loads(args["model_config"])
        self.seen = dict(
            IMPORTED,
            relative=RELATIVE,
            helper=helper.VALUE,
            again=model.TritonPythonModel is TritonPythonModel,
            directory=pb_utils.get_model_dir(),
            repository=args["model_repository"],
            version=args["model_version"],
            backend=config["backend"],
            runtime=config["runtime"],
        )

    def execute(self, requests):
        seen = pb_utils.Tensor("SEEN", np.array([json.dumps(self.seen)], dtype=object))
        x = [pb_utils.get_input_tensor_by_name(r, "X").as_numpy() for r in requests]
        return [
            pb_utils.InferenceResponse([seen, pb_utils.Tensor("SUM", v + np.float32(self.added))])
            for v in x
        ]

import numpy as np
"""


@pytest.fixture
def backends(tmp_path: Path) -> Path:
    """A backend directory that holds the backend `adder`."""
    folder = tmp_path / "backends" / "adder"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(textwrap.dedent(BACKEND))
    (folder / "helper.py").write_text("VALUE = 'a sibling'\n")
    return folder.parent


def send_request(client: Client, model: str, version: int) -> tuple[float, dict[str, object]]:
    """The result of `adder` for 1, and the surroundings that it saw."""
    result = client.infer(
        model, [tensor("X", np.ones(1, dtype=np.float32))], model_version=str(version)
    )
    return float(result.as_numpy("SUM")[0]), json.loads(result.as_numpy("SEEN")[0])


def test_a_python_based_backend_serves_models_that_hold_only_data(
    repository: RepositoryBuilder, backends: Path, serve: Serve
) -> None:
    implicit = repository.add("implicit", config="backend: 'adder'", files={"1/data.json": "{}"})
    repository.add("implicit", files={"1/data.json": '{"add": 10}'})
    repository.add(
        "explicit",
        config="backend: 'adder' runtime: 'model.py'",
        files={"1/data.json": '{"add": 20}', "1/model.py": "raise SystemExit('not this one')"},
    )
    host = serve(repository, f"--backend-directory={backends}").wait_started()
    with host.client() as client:
        total, seen = send_request(client, "implicit", 1)
        assert total == 11
        assert send_request(client, "explicit", 1)[0] == 21
        for model in ("implicit", "explicit"):
            config = client.get_model_config(model, as_json=True)["config"]
            assert (config["backend"], config["runtime"]) == ("adder", "model.py")
    path = seen.pop("path")
    assert isinstance(path, list)
    folder = str(backends / "adder")
    assert folder in path
    assert not [entry for entry in path if entry.startswith(str(implicit))]
    assert path[0] == ""
    assert seen == {
        "name": "model",
        "package": "",
        "relative": "attempted relative import with no known parent package",
        "helper": "a sibling",
        "again": True,
        "directory": str(implicit / "1"),
        "repository": str(implicit),
        "version": "1",
        "backend": "adder",
        "runtime": "model.py",
    }


def test_the_working_directory_cannot_take_a_backends_place(
    repository: RepositoryBuilder, backends: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.add("m", config="backend: 'adder'", files={"1/data.json": '{"add": 1}'})
    elsewhere = backends.parent / "cwd"
    elsewhere.mkdir()
    (elsewhere / "model.py").write_text("raise SystemExit('the wrong model')\n")
    monkeypatch.chdir(elsewhere)
    host = serve(repository, f"--backend-directory={backends}").wait_started()
    with host.client() as client:
        assert send_request(client, "m", 1)[0] == 2


def test_several_versions_of_a_model_live_in_processes_of_their_own(
    repository: RepositoryBuilder, backends: Path, serve: Serve
) -> None:
    config = "backend: 'adder' version_policy { all {} }"
    repository.add("m", config=config, files={"1/data.json": '{"add": 1}'})
    repository.add("m", version=2, files={"2/data.json": '{"add": 2}'})
    host = serve(repository, f"--backend-directory={backends}").wait_started()
    assert len(host.stubs()) == 2
    with host.client() as client:
        for version in (1, 2):
            total, seen = send_request(client, "m", version)
            assert total == 1 + version
            assert seen["directory"] == str(repository.path / "m" / str(version))


def test_a_dead_instance_of_a_backend_is_replaced(
    repository: RepositoryBuilder, backends: Path, serve: Serve
) -> None:
    repository.add("m", config="backend: 'adder'", files={"1/data.json": '{"add": 1}'})
    host = serve(repository, f"--backend-directory={backends}").wait_started()
    (stub,) = host.stubs("m_0")
    stub.kill()
    host.wait_for("restarted")
    with host.client() as client:
        assert send_request(client, "m", 1)[0] == 2


def test_a_backend_that_cannot_be_found_or_run_fails_the_load_with_its_reason(
    repository: RepositoryBuilder, backends: Path, serve: Serve
) -> None:
    (backends / "native").mkdir()
    (backends / "native" / "libtriton_native.so").touch()
    configs = {
        "missing": "backend: 'none'",
        "explicit": "backend: 'none' runtime: 'model.py'",
        "library": "backend: 'adder' runtime: 'libother.so'",
        "native": "backend: 'native'",
        "escapes": "backend: 'adder' runtime: '../adder/../x.so'",
        "outside": "backend: '../backends/adder'",
        "broken": "backend: 'adder'",
    }
    for name, config in configs.items():
        repository.add(name, config=config)
    host = serve(
        repository, f"--backend-directory={backends}", "--exit-on-error=false"
    ).wait_started()
    m, b = repository.path, backends
    for name, reason in {
        "missing": "Invalid argument: unable to find backend library for backend 'none', try"
        " specifying runtime on the model configuration.",
        "explicit": "Invalid argument: unable to find Python backend based backend library"
        f" 'model.py' for model 'explicit', searched: '{b}/none/model.py'",
        "library": "Invalid argument: unable to find backend library 'libother.so' for model"
        f" 'library', searched: '{m}/library/1' '{m}/library' '{b}/adder' ",
        "native": "Unsupported: model 'native' cannot be loaded: its backend 'native' is the native"
        f" library '{b}/native/libtriton_native.so', and only backends written in Python can be"
        " run, from 'model.py' in the backend's folder",
        "escapes": "Invalid argument: backend library name '../adder/../x.so' escapes backend"
        f" directory '{b}/adder', for model 'escapes', check model config runtime field",
        "outside": "Invalid argument: backend name '../backends/adder' escapes backend directory"
        f" '{b}', for model 'outside', check model config backend field",
        "broken": "Internal: FileNotFoundError: ",
    }.items():
        assert f"failed to load '{name}' version 1: {reason}" in host.output
    wait_until(lambda: host.stubs() == [], "an end of the stubs of what failed")


def test_the_settings_of_a_python_based_backend_are_those_of_python(
    repository: RepositoryBuilder, backends: Path, serve: Serve
) -> None:
    repository.add("m", config="backend: 'adder'", files={"1/data.json": '{"add": 1}'})
    host = serve(
        repository,
        f"--backend-directory={backends}",
        "--backend-config=adder,shm-default-byte-size=1",
        "--backend-config=python,shm-default-byte-size=2097152",
    ).wait_started()
    # One mebibyte is the minimum for `python`; other backends do not read the setting.
    assert "setting 'shm-default-byte-size' of backend 'adder' is not used" in host.output
    assert "setting 'shm-default-byte-size' of backend 'python'" not in host.output
