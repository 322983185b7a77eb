"""How a `model.py` is found and imported, and which modules it can import, in a real host."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.clients import Client, tensor
from tests.conftest import DEADLINE, ROOT, RepositoryBuilder, Serve
from tests.pythons import config as parameters
from tests.pythons import own_venv

BODY = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""


def test_a_model_is_a_module_of_its_version_and_may_be_imported_again(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    source = """
    import json, sys
    seen = dict(name=__name__, package=__package__)
    if __name__ == "1.model":
        from . import sibling
        from .sibling import VALUE
        import sibling as absolute
        import model
        seen["again"] = model.seen
        seen["distinct"] = model is not sys.modules[__name__]
        seen["siblings"] = [sibling.__name__, absolute.__name__, VALUE]
        print("seen", json.dumps(seen))
    """
    repository.add("m", BODY + textwrap.dedent(source), files={"1/sibling.py": "VALUE = 7\n"})
    host = serve(repository).wait_started()
    assert json.loads(host.wait_for(r"\[m:1\] seen (\{.*\})").group(1)) == {
        "name": "1.model",
        "package": "1",
        "again": {"name": "model", "package": ""},
        "distinct": True,
        "siblings": ["1.sibling", "sibling", 7],
    }


def test_the_version_the_model_and_pb_utils_come_last_on_the_path_in_this_order(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    path = repository.add("m", BODY + "\nimport json, sys\nprint('path', json.dumps(sys.path))\n")
    host = serve(repository).wait_started()
    seen = json.loads(host.wait_for(r"\[m:1\] path (\[.*\])").group(1))
    usual = [entry for entry in sys.path if entry in seen and entry != ""]
    assert seen[0] == ""
    added = [str(path / "1"), str(path)]
    assert seen[-3:] == [*added, str(ROOT)] or (str(ROOT) in usual and seen[-2:] == added)
    assert len(seen) == len(set(seen))


def test_a_model_may_use_the_modules_that_tritons_pb_utils_has_imported(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    source = """
    import triton_python_backend_utils as pb_utils
    from triton_python_backend_utils import *

    class TritonPythonModel:
        def initialize(self, args):
            self.name = json.loads(args["model_config"])["name"]

        def execute(self, requests):
            size = struct.calcsize("<I")
            array = pb_utils.np.full((1, size), len(self.name), dtype=np.float32)
            output = pb_utils.Tensor("OUTPUT0", array)
            return [pb_utils.InferenceResponse([output]) for _ in requests]
    """
    config = """
    backend: "python"
    max_batch_size: 4
    input [{ name: "INPUT0" data_type: TYPE_FP32 dims: [4] }]
    output [{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [4] }]
    """
    repository.add("m", source, config)
    with serve(repository).wait_started().client() as client:
        result = client.infer("m", [tensor("INPUT0", np.zeros((1, 4), dtype=np.float32))])
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), np.ones((1, 4), dtype=np.float32))


def test_installed_modules_win_over_the_models_folder_and_that_over_the_host(
    repository: RepositoryBuilder,
    serve: Serve,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    repository.add(
        "m",
        BODY + "\nimport numpy, benchmarks\nprint('from', numpy.__name__, benchmarks.MINE)\n",
        files={
            "1/numpy.py": "raise SystemExit('the neighbour')\n",
            "1/benchmarks.py": "MINE = 'the neighbour'\n",  # a folder beside pb_utils has its name
        },
    )
    assert (ROOT / "benchmarks").is_dir()
    monkeypatch.chdir(tmp_path)
    host = serve(repository).wait_started()
    host.wait_for("from numpy the neighbour")


def test_files_and_classes_that_are_not_there_are_named(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.add("wrong_class", "class Model: pass\n")
    repository.add("no_file", config="backend: 'python'", files={"1/main.py": ""})
    repository.add(
        "wrong_suffix",
        config="backend: 'python' default_model_filename: 'model.txt'",
        files={"1/model.txt": ""},
    )
    host = serve(repository, "--exit-on-error=false", "--log-verbose=1").wait_started()
    for name, text in {
        "wrong_class": "AttributeError: module '1.model' has no attribute 'TritonPythonModel';"
        " it defines 'Model'",
        "wrong_suffix": "Model name must end with '.py'. Model name is \"model.txt\".",
        "no_file": "Stub process '' is not healthy. Failed to preinitialize Python stub: Python"
        f" model file not found in '{repository.path}/no_file/1/model.py'; there is"
        " 'main.py', which default_model_filename can name",
    }.items():
        whole = f"failed to load '{name}' version 1: Internal: {text}"
        assert re.search(re.escape(whole) + "$", host.output, re.MULTILINE), name
        assert f"Failed to initialize Python stub for auto-complete: {text}" in host.output


NAMES = ("host", "stub", "pb_utils", "msgspec", "zmq")
FILES = {
    "module": {f"1/{name}.py": "MINE = True\n" for name in NAMES},
    "package": {
        f"1/{name}/{file}.py": f"MINE = {file == 'part'}\n"
        for name in NAMES
        for file in ("__init__", "part", "memory")
    },
}
SOURCE = {
    "module": "\n".join(f"import {name}; assert {name}.MINE" for name in NAMES),
    "package": "\n".join(
        f"from {name}.part import MINE; assert MINE\nfrom {name} import memory; memory.MINE"
        for name in NAMES
    ),
}
OURS = """
import os, pickle, sys
import triton_python_backend_utils as pb
import numpy

class TritonPythonModel:
    def initialize(self, args):
        assert pb.get_model_dir().endswith("/1")
        assert pickle.loads(pickle.dumps(pb.TritonModelException("x"))).args == ("x",)
        pb.Logger.log_info("logged by the model")

    def execute(self, requests):
        if requests[0].request_id() == "exit":
            os._exit(1)
        got = pb.get_input_tensor_by_name(requests[0], "IN").as_numpy()
        return [pb.InferenceResponse([pb.Tensor("OUT", got + 1)]) for _ in requests]
"""
CONFIG = """
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
"""


def infer_one(client: Client) -> int:
    result = client.infer("m", [tensor("IN", np.zeros(1, np.int32))])
    return int(result.as_numpy("OUT")[0])


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_models_modules_win_over_the_hosts_of_the_same_names(
    repository: RepositoryBuilder, serve: Serve, kind: str, start: str
) -> None:
    repository.add("m", SOURCE[kind] + OURS, CONFIG, files=FILES[kind])
    host = serve(repository, f"--stub-start={start}").wait_started()
    host.wait_for("logged by the model")
    with host.client() as client:
        assert infer_one(client) == 1
        inputs = [tensor("IN", np.zeros(1, np.int32))]
        with pytest.raises(InferenceServerException, match="is not healthy"):
            client.infer("m", inputs, request_id="exit")
        host.wait_for("restarted")
        assert infer_one(client) == 1


def test_modules_in_a_folder_that_the_model_adds_to_the_path_win_over_the_hosts(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    source = "import sys, os\nsys.path.append(os.path.dirname(__file__) + '/lib')\n"
    files = {name.replace("1/", "1/lib/"): text for name, text in FILES["module"].items()}
    repository.add("m", source + SOURCE["module"] + OURS, CONFIG, files=files)
    with serve(repository).wait_started().client() as client:
        assert infer_one(client) == 1


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_modules_of_the_users_path_win_over_the_libraries_of_the_host(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path, start: str
) -> None:
    names = ("msgspec", "zmq")
    for name in names:
        (tmp_path / f"{name}.py").write_text("MINE = True\n")
    source = "\n".join(f"import {name}; assert {name}.MINE" for name in names)
    repository.add("m", source + OURS, CONFIG)
    host = serve(repository, f"--stub-start={start}", env={"PYTHONPATH": str(tmp_path)})
    with host.wait_started().client() as client:
        assert infer_one(client) == 1


def test_a_model_without_such_modules_gets_the_hosts(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    source = """
import pb_utils
import triton_python_backend_utils
import pb_utils._tensor
import zmq
assert pb_utils.Tensor is triton_python_backend_utils.Tensor is pb_utils._tensor.Tensor
assert zmq.Context
"""
    repository.add("m", source + OURS, CONFIG)
    with serve(repository).wait_started().client() as client:
        assert infer_one(client) == 1


@pytest.mark.parametrize("kind", FILES)
def test_a_models_modules_win_at_the_terminal_as_well(
    repository: RepositoryBuilder, kind: str
) -> None:
    path = repository.add("m", SOURCE[kind] + OURS, CONFIG, files=FILES[kind])
    done = subprocess.run(
        [sys.executable, "-m", "pbhost", "run", str(path), "--input=IN=[1]"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[2]" in done.stdout


TRITONS_FILE = """
import json
import struct

import numpy as np

TRITON_STRING_TO_NUMPY = {"TYPE_BOOL": bool, "TYPE_INT32": np.int32}

def serialize_byte_tensor(input_tensor):
    return b""

def get_input_tensor_by_name(inference_request, name):
    for input_tensor in inference_request.inputs():
        if input_tensor.name() == name:
            return input_tensor
    return None

def triton_string_to_numpy(triton_type_string):
    return TRITON_STRING_TO_NUMPY[triton_type_string]
"""
"""What identifies a `triton_python_backend_utils.py` of Triton."""
OLD_FILE = f"""
{TRITONS_FILE}
np.no_longer_there

class Tensor:
    def __init__(self, name, numpy_array):
        self._name, self._array = name, numpy_array

class InferenceResponse:
    def __init__(self, output_tensors, error=None):
        self._output_tensors = output_tensors

class TritonModelException(Exception):
    pass
"""
"""One of 2020: with classes of its own, and made for an older numpy."""
API, CORE, PACKAGED = "triton_python_backend_utils", "c_python_backend_utils", "mine/__init__.py"
COPIES = {
    "version_folder": (f"import {API} as pb", {f"1/{API}.py": TRITONS_FILE}, f"1/{API}.py"),
    "model_folder": (f"import {API} as pb", {f"{API}.py": TRITONS_FILE}, f"{API}.py"),
    "old": (f"import {API} as pb", {f"1/{API}.py": OLD_FILE}, f"1/{API}.py"),
    "package": (
        f"import {API} as pb",
        {f"1/{API}/__init__.py": TRITONS_FILE},
        f"1/{API}/__init__.py",
    ),
    "for_an_editor": (f"import {API} as pb", {f"1/{API}.py": "class Tensor: ...\n"}, f"1/{API}.py"),
    "core": (
        f"import {API} as pb, {CORE}",
        {f"1/{CORE}.py": "class Tensor: ...\n"},
        f"1/{CORE}.py",
    ),
    "in_a_package": (
        f"from mine import {API} as pb",
        {f"1/mine/{API}.py": TRITONS_FILE, "1/mine/__init__.py": ""},
        f"1/mine/{API}.py",
    ),
    "relative": (f"from . import {API} as pb", {f"1/{API}.py": TRITONS_FILE}, f"1/{API}.py"),
    "short_name": ("import pb_utils as pb", {"1/pb_utils.py": TRITONS_FILE}, "1/pb_utils.py"),
}
"""How a model imports the API, its files, and the one of them that is not imported."""
USES_API = """
class TritonPythonModel:
    def initialize(self, args):
        assert pb.get_model_dir().endswith("/1")

    def execute(self, requests):
        got = pb.get_input_tensor_by_name(requests[0], "IN").as_numpy()
        return [pb.InferenceResponse([pb.Tensor("OUT", got + 1)]) for _ in requests]
"""
PRELOADS = """
    @staticmethod
    def preload(args):
        pass
"""


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_the_names_of_the_api_mean_the_servers_modules_whatever_lies_beside_a_model(
    repository: RepositoryBuilder,
    serve: Serve,
    tmp_path_factory: pytest.TempPathFactory,
    start: str,
) -> None:
    three = CONFIG + "instance_group { count: 3 }"
    for name, (line, files, _) in COPIES.items():
        repository.add(name, f"{line}\n{USES_API}", three, files=files)
    line, files, _ = COPIES["version_folder"]
    repository.add("preloaded", f"{line}\n{USES_API}{PRELOADS}", three, files=files)
    venv = own_venv(tmp_path_factory.mktemp("own") / "env")
    repository.add(
        "environment",
        f"{line}\n{USES_API}",
        CONFIG + parameters(EXECUTION_ENV_PATH=str(venv)),
        files=files,
    )
    ignored = {name: file for name, (_, _, file) in COPIES.items()}
    ignored |= dict.fromkeys(("preloaded", "environment"), ignored["version_folder"])
    host = serve(repository, f"--stub-start={start}").wait_started()
    with host.client() as client:
        for name in ignored:
            result = client.infer(name, [tensor("IN", np.zeros(1, np.int32))])
            assert result.as_numpy("OUT") == [1], name
    for name, file in ignored.items():
        path = repository.path / name / file
        warnings = [row for row in host.lines if f"'{path}' is not imported" in row]
        assert len(warnings) == 1, (name, warnings)
        assert warnings[0].startswith("W") and f"[{name}:1" in warnings[0]
        assert ("can be deleted" in warnings[0]) == (name not in ("in_a_package", "relative"))


def test_names_that_only_the_models_copy_has_are_those_of_the_copy(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    added = "\ndef make(array):\n    return Tensor('OUT', array)\n"
    copy = {f"1/{API}.py": TRITONS_FILE + added}
    source = f"""
import {API} as pb
from {API} import make
assert not hasattr(pb, "no_such_name")

class TritonPythonModel:
    def execute(self, requests):
        got = pb.get_input_tensor_by_name(requests[0], "IN").as_numpy()
        return [pb.InferenceResponse([pb.make(got + 1)]) for _ in requests]
"""
    repository.add("m", source, CONFIG, files=copy)
    with serve(repository).wait_started().client() as client:
        assert infer_one(client) == 1


def test_a_module_of_the_user_that_is_no_copy_keeps_its_name(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    wrapper = f"from {API} import *\nimport {API} as _all\nTensor = _all.Tensor\nMINE = True\n"
    files = {
        "1/pb_utils.py": "MINE = True\n",
        "1/mine/__init__.py": "",
        f"1/mine/{API}.py": wrapper,
    }
    line = f"import pb_utils\nfrom mine import {API} as pb\nassert pb_utils.MINE and pb.MINE\n"
    repository.add("m", line + USES_API, CONFIG, files=files)
    host = serve(repository).wait_started()
    with host.client() as client:
        assert infer_one(client) == 1
    assert "is not imported" not in host.output


@pytest.mark.parametrize("name", COPIES)
def test_the_names_of_the_api_mean_its_modules_at_the_terminal_as_well(
    repository: RepositoryBuilder, name: str
) -> None:
    line, files, ignored = COPIES[name]
    path = repository.add("m", f"{line}\n{USES_API}", CONFIG, files=files)
    done = subprocess.run(
        [sys.executable, "-m", "host", "run", str(path), "--input=IN=[1]"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[2]" in done.stdout
    assert done.stderr.count(f"warning: '{path / ignored}' is not imported") == 1


TESTS_MODEL = """
import numpy as np
from model import TritonPythonModel
from pb_utils import testing

config = {"input": [], "output": [{"name": "OUT", "data_type": "TYPE_INT32", "dims": [1]}]}
for model in (TritonPythonModel, FOLDER):
    with testing.load(model, config) as loaded:
        assert loaded.infer({"IN": np.int32([1])})["OUT"] == [2]
print("done")
"""


@pytest.mark.parametrize("name", sorted(COPIES.keys() - {"relative", "short_name", "in_a_package"}))
def test_the_names_of_the_api_mean_its_modules_in_tests_beside_the_model(
    repository: RepositoryBuilder, name: str
) -> None:
    line, files, ignored = COPIES[name]
    path = repository.add("m", f"{line}\n{USES_API}", CONFIG, files=files)
    source = TESTS_MODEL.replace("FOLDER", repr(str(path)))
    if name == "old":  # such a file can be imported by nobody
        source = "import pb_utils.testing\n" + source
    (path / "1" / "try_model.py").write_text(source)
    done = subprocess.run(
        [sys.executable, str(path / "1" / "try_model.py")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count(f"'{path / ignored}' is not imported") == 1
