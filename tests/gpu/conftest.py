"""A simulated CUDA driver for machines without a GPU, and what says whether there is a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pb_utils import _gpu
from tests.gpu import producer

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def simulated_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the simulated driver, built from its source."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("the simulated CUDA driver is built by a C compiler: install one as 'cc'")
    folder = tmp_path_factory.mktemp("cuda")
    subprocess.run(
        [
            *(compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"),
            *("-o", folder / _gpu.LIBRARY, HERE / "simulated_cuda.c"),
        ],
        check=True,
    )
    return folder


def _forget() -> None:
    _gpu._driver.cache_clear()
    _gpu.open_gpu.cache_clear()


@pytest.fixture
def cuda(
    simulated_driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], list[str]]]:
    """Two simulated GPUs in this process; returns the copies that have been made so far."""
    log = tmp_path / "copies"
    path = shutil.copy(simulated_driver / _gpu.LIBRARY, tmp_path)  # every test has its own state
    monkeypatch.setattr(_gpu, "LIBRARY", path)
    monkeypatch.setattr(producer, "LIBRARY", path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("SIMULATED_CUDA_DEVICES", "9.0,7.5")
    monkeypatch.setenv("SIMULATED_CUDA_LOG", str(log))
    _forget()
    yield lambda: copies(log)
    _forget()


def copies(log: Path) -> list[str]:
    """The copies of the simulated drivers so far, as `to host 24`, from their records."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [line.partition(" ")[2] for line in lines if "begin" not in line]


@pytest.fixture
def simulated_environment(simulated_driver: Path, tmp_path: Path) -> dict[str, str]:
    """Variables that give a host and its stubs two simulated GPUs."""
    return {
        "LD_LIBRARY_PATH": str(simulated_driver),
        "CUDA_VISIBLE_DEVICES": "0,1",
        "SIMULATED_CUDA_DEVICES": "9.0,7.5",
        "SIMULATED_CUDA_LOG": str(tmp_path / "copies"),
    }


def real_gpus() -> int:
    """How many GPUs this machine has for this process."""
    return _gpu.device_count()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests with the mark `gpu` need one."""
    if item.get_closest_marker("gpu") and not real_gpus():
        pytest.skip("needs an NVIDIA GPU and its driver; there is none")


@pytest.fixture(params=["simulated", pytest.param("real", marks=pytest.mark.gpu)])
def gpu_environment(
    request: pytest.FixtureRequest,
) -> dict[str, str]:
    """Variables with which a host and its stubs have a GPU, simulated or real."""
    if request.param == "simulated":
        variables: dict[str, str] = request.getfixturevalue("simulated_environment")
        return variables
    every = ",".join(map(str, range(real_gpus())))
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", every)}
