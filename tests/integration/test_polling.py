"""Poll mode: the server follows the files on disk."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.clients import Client, infer_error, run_command
from tests.conftest import RepositoryBuilder, RunningHost, Serve, wait_until
from tests.integration.control_models import CONFIG, index, model

POLL = ("--model-control-mode=poll", "--repository-poll-secs=1")


@pytest.fixture
def host(repository: RepositoryBuilder, serve: Serve) -> Iterator[RunningHost]:
    """A host that polls and serves `x` and `beacon`."""
    repository.add("x", model("x"), CONFIG)
    repository.add("beacon", model("0"), CONFIG)
    yield serve(repository, *POLL).wait_started()


@pytest.fixture
def client(host: RunningHost) -> Iterator[Client]:
    with host.client() as client:
        yield client


def named(client: Client, name: str, answer: str) -> Callable[[], bool]:
    return lambda: run_command(client, "name", name) == answer


def two_polls(repository: RepositoryBuilder, client: Client) -> None:
    """Returns when one whole poll has run since the call, and another poll has begun."""
    for _ in range(2):
        count = int(run_command(client, "name", "beacon")) + 1
        repository.add("beacon", model(str(count)))
        wait_until(named(client, "beacon", str(count)), "a poll to find the new beacon")


def test_changes_of_models_and_versions_are_followed(
    repository: RepositoryBuilder, client: Client
) -> None:
    repository.add("x", model("changed"))
    wait_until(named(client, "x", "changed"), "the change")
    repository.add("x", model("second"), version=2)
    wait_until(named(client, "x", "second"), "the new version")
    both = [("1", "UNAVAILABLE", "unloaded"), ("2", "READY", "")]
    wait_until(lambda: index(client, "x") == both, "the end of the version before")
    shutil.rmtree(repository.path / "x" / "2")
    wait_until(named(client, "x", "changed"), "the version before")
    repository.add("x", model("third"), version=3)
    gone = [(number, "UNAVAILABLE", "unloaded") for number in ("1", "2")]
    every = [*gone, ("3", "READY", "")]
    wait_until(lambda: index(client, "x") == every, "the index to list every version")

    repository.add("y", model("y"), CONFIG)
    wait_until(lambda: index(client, "y") == [("1", "READY", "")], "the new model")
    assert run_command(client, "name", "y") == "y"
    shutil.rmtree(repository.path / "y")
    wait_until(lambda: index(client, "y") == [], "the model to be gone from the index")
    wait_until(lambda: not client.is_model_ready("y"), "the model to be unloaded")
    assert infer_error(run_command, client, "name", "y")[1].endswith("has no available versions")
    wait_until(client.is_server_ready, "the server to be ready")


@pytest.fixture
def unreadable() -> Iterator[Path]:
    """A directory that exists and that no process can list: one of a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        path = Path(f"/proc/{process.pid}/net")
        with pytest.raises(OSError):
            os.listdir(path)
        yield path


def test_a_model_whose_directory_cannot_be_read_stays_as_it_was(
    repository: RepositoryBuilder,
    host: RunningHost,
    client: Client,
    unreadable: Path,
    tmp_path: Path,
) -> None:
    def link(target: Path) -> None:
        (tmp_path / "link").symlink_to(target)
        (tmp_path / "link").replace(repository.path / "linked")

    source = RepositoryBuilder(tmp_path / "elsewhere")
    source.add("linked", model("linked"), CONFIG)
    link(source.path / "linked")
    wait_until(lambda: index(client, "linked") == [("1", "READY", "")], "the model")
    pid = run_command(client, "pid", "linked")
    link(unreadable)
    two_polls(repository, client)
    two_polls(repository, client)
    link(source.path / "linked")
    two_polls(repository, client)
    assert run_command(client, "pid", "linked") == pid
    assert index(client, "linked") == [("1", "READY", "")]
    told = f"failed to poll model 'linked': failed to read directory {repository.path}/linked: "
    assert host.output.count(told) == 1
    assert "never retrieved" not in host.output
    assert "Traceback" not in host.output, host.output


def test_files_left_by_running_and_editing_a_model_are_no_change(
    host: RunningHost, repository: RepositoryBuilder, client: Client
) -> None:
    pid = run_command(client, "pid", "x")
    folder = repository.path / "x" / "1"
    (folder / "__pycache__").mkdir(exist_ok=True)
    for name in (".model.py.swp", "4913", "model.py~", "#model.py#", ".#model.py"):
        (folder / name).touch()
    (folder / "__pycache__" / "more.pyc").touch()
    two_polls(repository, client)
    (folder / "model.py~").unlink()
    two_polls(repository, client)
    assert run_command(client, "pid", "x") == pid
    os.utime(folder / "model.py")
    wait_until(lambda: run_command(client, "pid", "x") != pid, "a touched file to count")


def test_a_model_whose_reload_fails_serves_on_and_delays_no_other_model(
    host: RunningHost, repository: RepositoryBuilder, client: Client
) -> None:
    pid = run_command(client, "pid", "x")
    repository.add("x", "def broken(:\n")
    repository.add("new", "import no_such_library\n", CONFIG)
    repository.add("hangs", model().replace("self.args = args", "threading.Event().wait()"), CONFIG)
    host.wait_for("failed to load 'x' version 1: Internal: SyntaxError")
    host.wait_for("failed to load 'new' version 1: Internal: ModuleNotFoundError")
    host.wait_for("loading: hangs:1")
    two_polls(repository, client)
    assert run_command(client, "pid", "x") == pid
    assert host.output.count("failed to load 'x'") == 1, "the same failure is logged once"

    repository.add("x", config="no such thing")
    host.wait_for("failed to load 'x': Internal: failed to read text proto")
    two_polls(repository, client)
    assert run_command(client, "pid", "x") == pid

    repository.add("x", model("mended"), CONFIG)
    wait_until(named(client, "x", "mended"), "the mended model")
    for name in ("new", "hangs"):
        shutil.rmtree(repository.path / name)
    wait_until(lambda: not index(client, "new"), "the model to be gone")
    wait_until(lambda: bool(host.stubs("hangs_0")), "the stub that hangs")
    for stub in host.stubs("hangs_0"):
        stub.kill()
    wait_until(client.is_server_ready, "failures to be forgotten with their models")


def test_a_failed_load_is_tried_again_without_a_change(
    host: RunningHost, repository: RepositoryBuilder, client: Client
) -> None:
    marker = repository.path / "marker"
    body = f"self.args = args; open({str(marker)!r})"
    repository.add("new", model("new").replace("self.args = args", body), CONFIG)
    host.wait_for("failed to load 'new' version 1: Internal: FileNotFoundError")
    assert not client.is_server_ready()
    marker.touch()
    wait_until(lambda: index(client, "new") == [("1", "READY", "")], "another try")
    wait_until(client.is_server_ready, "the server to be ready")


def test_a_name_that_comes_to_be_in_two_repositories_is_unloaded(
    repository: RepositoryBuilder, serve: Serve, tmp_path_factory: pytest.TempPathFactory
) -> None:
    second = RepositoryBuilder(tmp_path_factory.mktemp("second"))
    repository.add("x", model("x"), CONFIG)
    host = serve(repository, f"--model-repository={second.path}", *POLL).wait_started()
    with host.client() as client:
        assert run_command(client, "name", "x") == "x"
        second.add("x", model("other"), CONFIG)
        host.wait_for("failed to poll model 'x': not unique across all model repositories")
        wait_until(lambda: not client.is_model_ready("x"), "the model to be unloaded")
        assert index(client, "x") == [
            ("", "UNAVAILABLE", "model appears in two or more repositories")
        ]
        shutil.rmtree(repository.path / "x")
        wait_until(lambda: index(client, "x")[-1] == ("1", "READY", ""), "the remaining version")
        assert run_command(client, "name", "x") == "other"


def test_models_of_a_repository_that_cannot_be_read_serve_on(
    host: RunningHost, repository: RepositoryBuilder, client: Client
) -> None:
    pid = run_command(client, "pid", "x")
    link = repository.path / "link"
    link.symlink_to(repository.path / "nowhere")
    host.wait_for(f"failed to poll model repository '{repository.path}': failed to stat file")
    assert run_command(client, "pid", "x") == pid
    link.unlink()
    two_polls(repository, client)
    assert run_command(client, "pid", "x") == pid


def test_an_interval_of_zero_loads_the_models_once(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.add("x", model("x"), CONFIG)
    host = serve(repository, "--model-control-mode=poll", "--repository-poll-secs=0")
    with host.wait_started().client() as client:
        assert run_command(client, "name", "x") == "x"
        assert infer_error(client.load_model, "x")[1] == (
            "explicit model load / unload is not allowed if polling is enabled"
        )
