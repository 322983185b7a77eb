"""The variables of processes in an environment, and the modules that they can import."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from host.environments.environment import Environment, StubSources, check_interpreter
from host.errors import ErrorCode, HostError
from tests.conftest import DEADLINE, ROOT
from tests.pythons import empty_venv, site_packages


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


def test_links_to_packages_are_made_at_the_next_load_if_the_disk_was_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = empty_venv(tmp_path / "env")
    for name in ("numpy", "numpy.libs"):
        (site_packages(env) / name).symlink_to(Path(np.__file__).parents[1] / name)
    (tmp_path / "sources").mkdir()
    environment = Environment(env, StubSources(tmp_path / "sources"))
    symlink_to = Path.symlink_to

    def link_or_fail(self: Path, target: Path) -> None:
        if self.name == "msgspec":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        symlink_to(self, target)

    with monkeypatch.context() as full_disk, pytest.raises(HostError) as caught:
        full_disk.setattr(Path, "symlink_to", link_or_fail)
        asyncio.run(check_interpreter(environment, DEADLINE, "{packages}"))
    assert caught.value.code is ErrorCode.INTERNAL
    assert caught.value.message == (
        f"The Python environment {env} lacks pyzmq, msgspec, and links to those of the server"
        " cannot be made: [Errno 28] No space left on device"
    )
    assert sorted(os.listdir(tmp_path)) == ["env", "sources"]
    lent = asyncio.run(check_interpreter(environment, DEADLINE, "{packages}"))
    assert (lent.sources.entry.parents[1] / "msgspec").is_dir()
