"""`pbhost ray` where Ray is not installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from tests.conftest import DEADLINE, RepositoryBuilder


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_a_machine_without_ray_is_told_what_to_install(repository: RepositoryBuilder) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pbhost", "ray", "check", str(repository.path)],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 2
    assert done.stderr == "pbhost ray: Ray is not installed; pip install 'pbhost[ray]'\n"
