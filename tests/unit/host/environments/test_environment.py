"""The variables of processes in an environment, and the modules that they can import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from host.environments.environment import Environment, StubSources
from tests.conftest import ROOT


def environment(tmp_path: Path) -> Environment:
    folder = tmp_path / "sources"
    folder.mkdir()
    return Environment(Path("/env"), StubSources(folder))


def test_folders_of_the_environment_come_first_and_pythonhome_is_removed(tmp_path: Path) -> None:
    host = {"PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": "/cuda", "PYTHONHOME": "/x", "A": "b"}
    assert environment(tmp_path).variables(host) == {
        "PATH": "/env/bin:/usr/bin:/bin",
        "LD_LIBRARY_PATH": "/env/lib:/cuda",
        "VIRTUAL_ENV": "/env",
        "VIRTUAL_ENV_PROMPT": "(/env)",
        "A": "b",
    }


def test_search_paths_have_no_empty_entry(tmp_path: Path) -> None:
    variables = environment(tmp_path).variables({"LD_LIBRARY_PATH": ""})
    assert variables["PATH"] == "/env/bin"
    assert variables["LD_LIBRARY_PATH"] == "/env/lib"


def test_stub_sources_have_only_the_packages_that_a_stub_imports(tmp_path: Path) -> None:
    sources = environment(tmp_path).sources
    folder = sources.entry.parents[1]
    assert sorted(path.name for path in folder.iterdir()) == [
        "c_python_backend_utils", "pb_utils", "stub", "triton_python_backend_utils",
    ]  # fmt: skip
    code = (
        f"import sys; sys.path[:] = [{str(folder)!r}] + [p for p in sys.path if p]\n"
        "import stub.worker, triton_python_backend_utils, c_python_backend_utils\n"
        "print(stub.worker.__file__, triton_python_backend_utils.__file__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert str(ROOT) not in done.stdout
