"""Type checkers accept code that authors write, and infer its types."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import host_flags

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
REVEALED = {
    "author_model.py": [
        "Metric",
        "str",
        "set[str]",
        "list[int]",
        "InferenceResponse",
        "list[InferenceResponse]",
        "ResponseIterator",
        "ResponseIterator",
        "InferenceResponseSender",
    ],
    "author_harness.py": [
        "ModelHarness",
        "tuple[Any, ...]",
        "list[InferenceResponse]",
        "list[str]",
        "list[dtype[Any]]",
        "ResponseIterator",
        "InferenceResponse",
        "float",
        "list[list[float]]",
        "list[tuple[str, dict[str, bytes]]]",
        "bool",
    ],
    "author_program.py": [
        "int",
        "bool",
        "ErrorCode",
        "str",
        "ModelHarness",
    ],
}
MISTAKES = """
import numpy as np
import pbhost
import triton_python_backend_utils as pb_utils

pb_utils.Tensor("x", [1.0])  # WRONG
pb_utils.Tensor(None, np.zeros(1))  # WRONG
pb_utils.InferenceResponse(error="boom")  # WRONG
pb_utils.InferenceResponse([None])  # WRONG
pb_utils.InferenceResponse(parameters={"a": 1.5})  # WRONG
pb_utils.InferenceRequest(inputs=[], model_name="m")  # WRONG
pb_utils.Logger.log("m", 1)  # WRONG
pb_utils.Logger.log_wrn("m")  # WRONG
pb_utils.Tenor  # WRONG
pb_utils.TritonError("m", 1)  # WRONG
pb_utils.PreferredMemory(1)  # WRONG
pb_utils.MetricFamily("n", "d", 0)  # WRONG
pb_utils.MetricFamily("n", "d", pb_utils.MetricFamily.GAUGE).Metric(labels=["a"])  # WRONG
pb_utils.is_model_ready("m", 1)  # WRONG
pb_utils.load_model("m", {"backend": "python"})  # WRONG
request = pb_utils.InferenceRequest(inputs=[], requested_output_names=[], model_name="m")
request.exec(False, 1.0)  # WRONG
request.exec(decoupled=True).has_error()  # WRONG
request.get_response_sender().send("text")  # WRONG
print(pb_utils.ResponseIterator)  # WRONG
print(pb_utils.Tensor("x", np.zeros(1)).shape())
print(pb_utils.NoSuchName)  # WRONG
pbhost.Sever  # WRONG
pbhost.bind.Hots  # WRONG
pbhost.bind.Host(grpc_prt=1)  # WRONG
pbhost.bind.Host(grpc_port="eight")  # WRONG
pbhost.bind.Host(grpc_port=1, load_model=["a"], cache_config="local,size=1048576")
pbhost.Client("localhost:8001", retrys=1)  # WRONG
pbhost.Client("localhost:8001").infer("m", X=[1])["Y"]
"""


def run(*arguments: str) -> tuple[int, str]:
    """Runs a checker as a module of this interpreter, on this checkout."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def mypy(*paths: Path) -> tuple[int, str]:
    return run("mypy", "--strict", "--no-error-summary", *map(str, paths))


def pyright(*paths: Path) -> tuple[int, str]:
    return run("basedpyright", "--pythonpath", sys.executable, *map(str, paths))


checkers = pytest.mark.parametrize("checker", [mypy, pyright])


@checkers
def test_type_checkers_accept_and_understand_the_code_of_authors(
    checker: Callable[..., tuple[int, str]],
) -> None:
    code, output = checker(*(HERE / name for name in REVEALED))
    assert code == 0, output
    revealed: dict[str, list[str]] = {name: [] for name in REVEALED}
    pattern = r'(author_\w+\.py):\d+.*(?:Revealed type is|Type of ".*" is) "(.*)"'
    for name, found in re.findall(pattern, output):
        revealed[name].append(re.sub(r"\w+\.", "", found))
    assert revealed == REVEALED


@checkers
def test_mistakes_of_authors_are_found(
    checker: Callable[[Path], tuple[int, str]], tmp_path: Path
) -> None:
    model = tmp_path / "mistakes.py"
    model.write_text(MISTAKES)
    code, output = checker(model)
    assert code != 0
    lines = enumerate(MISTAKES.splitlines(), 1)
    wrong = {number for number, line in lines if line.endswith("# WRONG")}
    found = re.findall(r"mistakes\.py:(\d+):(?:\d+ -)? error", output)
    assert set(map(int, found)) == wrong, output


def test_every_public_name_has_a_complete_type() -> None:
    code, output = run("basedpyright", "--verifytypes", "pb_utils", "--ignoreexternal")
    assert code == 0, output
    assert "Type completeness score: 100%" in output


SHIPPED = ["triton_python_backend_utils", "c_python_backend_utils", "pb_utils", "pbhost", "host"]


@checkers
def test_an_installed_copy_is_as_typed_as_a_checkout(
    checker: Callable[[Path], tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv.create(tmp_path / "env", symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    (installed,) = (tmp_path / "env").glob("lib/python3*/site-packages")
    (installed / "others.pth").write_text(sysconfig.get_path("purelib"))
    for name in SHIPPED:
        (installed / name).symlink_to(ROOT / name)
    model = tmp_path / "user" / "model.py"
    model.parent.mkdir()
    model.write_text(
        "import c_python_backend_utils\n"
        "import triton_python_backend_utils as pb_utils\n"
        "from pbhost import testing\n"
        "print(c_python_backend_utils.MemoryType, pb_utils.Tensor, testing.load)\n"
    )
    monkeypatch.chdir(model.parent)
    caches = f"--cache-dir={ROOT / '.mypy_cache'}"
    if checker is mypy:
        arguments = ["mypy", "--strict", caches, "--python-executable", str(python), "model.py"]
    else:
        arguments = ["basedpyright", "--level=error", "--pythonpath", str(python), "model.py"]
    (model.parent / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    done = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_packages_have_type_markers(name: str) -> None:
    assert (ROOT / name / "py.typed").is_file()
    assert '"*" = ["py.typed"]' in (ROOT / "pyproject.toml").read_text()


def test_the_flags_of_a_host_have_types() -> None:
    assert host_flags.module() == host_flags.MODULE.read_text(), "python -m tests.host_flags"
