"""Environments that the host builds from the requirements of models."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from tests.clients import infer_error, run_command
from tests.conftest import ROOT, RepositoryBuilder, RunningHost, Serve, wait_until
from tests.pythons import EVALUATES, config, need_index, touch

EXPLICIT = "--model-control-mode=explicit"
WANTS = config(PYTHON_REQUIREMENTS="requirements.txt")
BUILDING = "building the Python environment "
BUILD_SECONDS = 300.0
"""Time limit of a build here: the package index may be far away and the machine busy."""

pytestmark = pytest.mark.timeout(3 * BUILD_SECONDS)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The index from which packages are installed."""
    need_index(tmp_path_factory.mktemp("downloads"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache for this module, so that each environment is built once."""
    return tmp_path_factory.mktemp("cache") / "environments"


def add(repository: RepositoryBuilder, name: str, requirements: str) -> Path:
    return repository.add(name, EVALUATES, WANTS, files={"requirements.txt": requirements})


def started(host: RunningHost) -> RunningHost:
    """Waits until the host has built its environments."""
    host.wait_for("Started GRPCInferenceService", BUILD_SECONDS)
    return host.wait_started()


def built(cache: Path) -> list[Path]:
    """The environments that are complete."""
    return sorted(path.parent for path in cache.glob("*/pbhost.json"))


SIX = "__import__('six').__version__"


@pytest.mark.usefixtures("index")
def test_requirements_are_installed_once_for_concurrent_and_later_servers(
    repository: RepositoryBuilder, serve: Serve, cache: Path
) -> None:
    for name in ("m", "n"):
        add(repository, name, "six==1.16.0\n")
    hosts = [serve(repository, f"--environment-cache-dir={cache}") for _ in range(2)]
    for host in hosts:
        started(host)
    (environment,) = built(cache)
    assert cache.stat().st_mode & 0o077 == 0
    for host in hosts:
        with host.client() as client:
            for model in ("m", "n"):
                assert run_command(client, SIX, model) == "1.16.0"
                assert run_command(client, "sys.prefix", model) == str(environment)
            assert str(ROOT) not in run_command(client, "sys.path", "m")
    output = "\n".join(host.output for host in hosts)
    assert output.count(BUILDING) == 1
    assert re.search(r"\[[mn]\] Successfully installed .*six-1.16.0", output)
    for host in hosts:
        assert host.stop() == 0

    again = serve(repository, f"--environment-cache-dir={cache}").wait_started()
    assert BUILDING not in again.output
    (stub,) = again.stubs("m_0")
    os.kill(stub.pid, signal.SIGKILL)
    again.wait_for(r"\[m:1/m_0\] restarted")
    with again.client() as client:
        assert run_command(client, "sys.prefix", "m") == str(environment)


@pytest.mark.usefixtures("index")
def test_different_requirements_get_different_environments(
    repository: RepositoryBuilder, serve: Serve, cache: Path
) -> None:
    folder = add(repository, "m", "six==1.16.0\n")
    flags = (EXPLICIT, "--load-model=m", f"--environment-cache-dir={cache}")
    host = started(serve(repository, *flags))
    with host.client() as client:
        assert run_command(client, SIX, "m") == "1.16.0"
        project = "[project]\nname = 'm'\ndependencies = ['six==1.15.0']\n"
        wants = config(PYTHON_REQUIREMENTS="$$TRITON_MODEL_DIRECTORY/pyproject.toml")
        repository.add("m", config=wants, files={"pyproject.toml": project})
        client.load_model("m")
        assert run_command(client, SIX, "m") == "1.15.0"
        builds = host.output.count(BUILDING)
        touch(folder / "pyproject.toml", 10)
        client.load_model("m")
        assert host.output.count(BUILDING) == builds, "the same content is the same"


@pytest.mark.test_all(reason="a build takes 5 s of CPU time, and this one takes two")
@pytest.mark.usefixtures("index")
def test_a_killed_build_is_started_again(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    add(repository, "m", "six\n")
    flag = f"--environment-cache-dir={tmp_path}/cache"
    host = serve(repository, flag)
    host.wait_for(BUILDING)
    wait_until(lambda: bool(list(tmp_path.glob("cache/*/bin/python"))), "a half-made environment")
    host.stop(signal.SIGKILL)
    assert not built(tmp_path / "cache")
    again = started(serve(repository, flag))
    again.wait_for(BUILDING)
    with again.client() as client:
        assert run_command(client, "sys.prefix", "m") == str(built(tmp_path / "cache")[0])


def test_a_server_stop_ends_a_build_and_removes_its_folder(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    add(repository, "m", "--no-index\nsix\n")
    host = serve(repository, f"--environment-cache-dir={tmp_path}/cache")
    host.wait_for(BUILDING)
    wait_until(lambda: bool(list(tmp_path.glob("cache/*/bin/python"))), "a half-made environment")
    family = psutil.Process(host.process.pid).children(recursive=True)
    assert host.stop() == 0
    wait_until(lambda: not any(child.is_running() for child in family), "the end of the build")
    assert not list(tmp_path.glob("cache/*/bin"))


class Refusals:
    """One host that loads invalid models one after the other."""

    def __init__(self, host: RunningHost, repository: RepositoryBuilder) -> None:
        self._host = host
        self._repository = repository

    @property
    def log(self) -> str:
        """The log of the host."""
        return self._host.output

    def of(self, config: str, code: str = "Invalid argument", **files: str) -> tuple[Path, str]:
        """The model's folder, and the reason why it does not load."""
        name = f"bad{len(list(self._repository.path.iterdir()))}"
        texts = {file.replace("_", "."): text for file, text in files.items()}
        folder = self._repository.add(name, EVALUATES, config, files=texts)
        with self._host.client() as client:
            _, text = infer_error(client.load_model, name)
        start = f"load failed for model '{name}': version 1 is at UNAVAILABLE state: {code}: "
        assert text.startswith(start), text
        return folder, text[len(start) :].rstrip("\n").removesuffix(";")


@pytest.fixture(scope="module")
def refusals(module_repository: RepositoryBuilder, module_serve: Serve, cache: Path) -> Refusals:
    flags = (EXPLICIT, f"--environment-cache-dir={cache}")
    return Refusals(module_serve(module_repository, *flags).wait_started(), module_repository)


def test_a_failed_installation_is_reported_with_the_last_lines_of_pip(
    refusals: Refusals, cache: Path
) -> None:
    before = built(cache)
    folder, text = refusals.of(
        WANTS, "Internal", requirements_txt="--no-index\nno-such-package==7\n"
    )
    assert text.startswith(
        f"cannot build the environment of model '{folder.name}' from {folder}/requirements.txt:"
        " 'pip install' ended with status 1; it printed:\n"
    )
    assert text.splitlines()[-1].startswith("ERROR: No matching distribution found for ")
    assert built(cache) == before
    assert len(list(cache.glob("*/bin"))) == len(before)


def test_a_missing_file_is_named_in_the_error(refusals: Refusals) -> None:
    folder, text = refusals.of(WANTS)
    assert text == (
        f"cannot read the requirements {folder}/requirements.txt: No such file or directory"
    )


@pytest.mark.parametrize(
    "value", ["../requirements.txt", "/etc/hosts", "$$TRITON_MODEL_DIRECTORY/../x.txt", "."]
)
def test_a_file_outside_the_models_folder_is_refused(refusals: Refusals, value: str) -> None:
    folder, text = refusals.of(config(PYTHON_REQUIREMENTS=value))
    assert text == (
        f"PYTHON_REQUIREMENTS of model '{folder.name}' must name a file in the model's directory"
        f" {folder}, not '{value}'"
    )


def test_the_content_of_a_file_outside_the_models_folder_is_not_shown(
    refusals: Refusals, tmp_path: Path
) -> None:
    (tmp_path / "secret.txt").write_text("password is swordfish\n")
    folder, text = refusals.of(WANTS, requirements_txt=f"six\n-r {tmp_path}/secret.txt\n")
    assert text == (
        f"cannot use the requirements {folder}/requirements.txt: line 2 names"
        f" '{tmp_path}/secret.txt', which is outside of the model's directory {folder}"
    )
    assert "swordfish" not in refusals.log


def test_the_output_of_pip_is_not_shown_if_a_url_is_included(
    refusals: Refusals, tmp_path: Path
) -> None:
    (tmp_path / "secret.txt").write_text("password is swordfish\n")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    (tmp_path / "remote.txt").write_text(f"-r {(tmp_path / 'secret.txt').as_uri()}\n")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        url = f"http://127.0.0.1:{server.server_port}/remote.txt"
        folder, text = refusals.of(WANTS, "Internal", requirements_txt=f"-r {url}\n")
        server.shutdown()
    assert text == (
        f"cannot build the environment of model '{folder.name}' from {folder}/requirements.txt:"
        " 'pip install' ended with status 1; its output is not shown, because the requirements"
        " include a file from another machine"
    )
    assert "swordfish" not in refusals.log


def test_an_invalid_pyproject_file_is_refused(refusals: Refusals) -> None:
    wants = config(PYTHON_REQUIREMENTS="pyproject.toml")
    folder, text = refusals.of(wants, pyproject_toml="[tool]\n")
    assert text == (
        f"cannot use the requirements {folder}/pyproject.toml: it has no list 'dependencies' in"
        " [project]"
    )


@pytest.mark.test_all(reason="a build takes 5 s of CPU time")
def test_a_pyproject_file_for_another_python_is_refused(refusals: Refusals) -> None:
    wants = config(PYTHON_REQUIREMENTS="pyproject.toml")
    project = "[project]\ndependencies = []\nrequires-python = '<3.9'\n"
    folder, text = refusals.of(wants, pyproject_toml=project)
    version = ".".join(map(str, sys.version_info[:3]))
    assert text == (
        f"cannot use the requirements {folder}/pyproject.toml: requires-python is '<3.9', and"
        f" environments are built with the host's Python {version}"
    )


def test_a_model_cannot_have_both_environment_parameters(refusals: Refusals) -> None:
    both = config(PYTHON_REQUIREMENTS="requirements.txt", EXECUTION_ENV_PATH="/env")
    folder, text = refusals.of(both, requirements_txt="")
    assert text == (
        f"model '{folder.name}' has both parameters EXECUTION_ENV_PATH and PYTHON_REQUIREMENTS;"
        " remove one of them: an environment is either given or built"
    )


def test_a_cache_folder_that_cannot_be_written_is_reported(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    add(repository, "m", "six\n")
    host = serve(
        repository, f"--environment-cache-dir={tmp_path}/file/cache", "--exit-on-error=false"
    )
    host.wait_for(
        f"cannot build environments in {tmp_path}/file/cache: Not a directory;"
        " set another folder with --environment-cache-dir"
    )


def test_a_build_over_its_time_limit_is_killed(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    add(repository, "m", "six\n")
    flags = (f"--environment-cache-dir={tmp_path}/cache", "--environment-timeout-secs=0.2")
    host = serve(repository, *flags, "--exit-on-error=false").wait_started()
    host.wait_for(
        "'python -m venv' was killed after 0.2 s, the limit of --environment-timeout-secs"
    )
    assert not built(tmp_path / "cache")


def test_the_wait_for_another_servers_build_has_a_time_limit(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    add(repository, "m", "--no-index\nsix\n")
    flag = f"--environment-cache-dir={tmp_path}/cache"
    first = serve(repository, flag)
    first.wait_for(BUILDING)
    wait_until(lambda: bool(list(tmp_path.glob("cache/*/bin/python"))), "a half-made environment")
    builders = psutil.Process(first.process.pid).children(recursive=True)
    assert builders
    for process in builders:  # each process before the processes that it has started
        with suppress(psutil.NoSuchProcess):
            process.suspend()
    second = serve(repository, flag, "--environment-timeout-secs=0.5", "--exit-on-error=false")
    second.wait_for(
        r"another server has been building \S+ for 0.5 s, the limit of --environment-timeout-secs"
    )
    for process in builders:
        with suppress(psutil.NoSuchProcess):
            process.resume()


def test_the_default_cache_folder_is_in_the_users_home(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    add(repository, "m", "--no-index\nsix\n")
    host = serve(repository, env={"XDG_CACHE_HOME": str(tmp_path / "xdg")})
    host.wait_for(f"{BUILDING}{tmp_path}/xdg/pbhost/environments/")
    assert host.stop() == 0
