"""Folders that vanish, files that change while they are read, and a disk that is full."""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
from tritonclient.utils import InferenceServerException

from tests.clients import run_script, tensor
from tests.conftest import RepositoryBuilder, RunningHost, Serve, wait_until
from tests.faults.campaign import REPEATS, fault
from tests.faults.models import add_models


def serves(host: RunningHost, model: str) -> bool:
    """Whether a model returns its input."""
    with host.client() as client, suppress(InferenceServerException):
        client.infer(model, [tensor("INPUT0", np.ones(1, np.float32))], client_timeout=10)
        return True
    return False


def test_a_log_on_a_full_disk_harms_no_request(repository: RepositoryBuilder, serve: Serve) -> None:
    """The lines are lost, the requests are not."""
    add_models(repository)
    host = serve(repository).wait_started()
    with fault("the log is on a full disk", host), host.client() as client:
        for name in ("script", "identity"):
            assert client.is_model_ready(name)
        for _ in range(REPEATS):
            run_script(
                client,
                "for n in range(1000): pb_utils.Logger.log_info(f'line {n}')",
            )


def test_a_folder_for_temporary_files_that_is_emptied_harms_no_model(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    """As programs that clean it do. A process that dies then is replaced all the same."""
    add_models(repository)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    host = serve(repository, env={"TMPDIR": str(temporary)}).wait_started()
    with fault("TMPDIR is emptied", host):
        for _ in range(10 * REPEATS):
            for entry in temporary.iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            (stub,) = host.stubs("identity_0")
            stub.kill()
            wait_until(
                lambda: bool(host.stubs("identity_0")) and serves(host, "identity"),
                "another process",
            )
    assert host.stop() == 0


def test_a_repository_that_changes_while_it_is_polled_harms_no_model(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    """Models come, change, break and go; files are half written, links lead nowhere."""
    add_models(repository)
    host = serve(
        repository,
        "--model-control-mode=poll",
        "--repository-poll-secs=1",
        "--exit-on-error=false",
    ).wait_started()
    code = (repository.path / "identity" / "1" / "model.py").read_text()
    config = (repository.path / "identity" / "config.pbtxt").read_text()
    with fault("the repository changes", host):
        for number in range(10 * REPEATS):
            name = f"passing{number}"
            repository.add(name, code, config)
            (repository.path / f"link{number}").symlink_to(repository.path / "nowhere")
            (repository.path / name / "loop").symlink_to(repository.path / name)
            if number % 3 == 0:
                repository.write(repository.path / name / "config.pbtxt", "backend: [")
            if number % 3 == 1:
                os.mkfifo(repository.path / name / "fifo")
            if number > 2:
                shutil.rmtree(repository.path / f"passing{number - 3}")
            threading.Event().wait(0.2)  # the changes shall fall between polls, and into them
        for number in range(10 * REPEATS):
            (repository.path / f"link{number}").unlink()
            shutil.rmtree(repository.path / f"passing{number}", ignore_errors=True)
        repository.add("last", code, config)
        wait_until(lambda: serves(host, "last"), "the model that arrived last")
        shutil.rmtree(repository.path / "last")
        wait_until(lambda: not serves(host, "last"), "it to be unloaded")
        wait_until(
            lambda: not any(host.stubs(f"passing{n}_0") for n in range(10 * REPEATS)),
            "the processes of these models to end",
        )


def test_a_repository_that_vanishes_harms_no_loaded_model(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    """Loaded models serve on, and their processes are replaced if the files are there again."""
    add_models(repository)
    host = serve(repository, "--model-control-mode=poll", "--repository-poll-secs=1")
    host.wait_started()
    away = repository.path.with_name("away")
    with fault("the repository vanishes", host):
        for _ in range(REPEATS):
            repository.path.rename(away)
            with host.client() as client:
                assert run_script(client, "return 1") == 1
            away.rename(repository.path)
            wait_until(lambda: serves(host, "identity"), "the model to be served")
