"""Models that are prepared once, in a process that their instances are forked from."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from host.system.resources import proportional_bytes
from tests.clients import infer_error, run_command
from tests.conftest import RepositoryBuilder, RunningHost, Serve, wait_until
from tests.integration.control_models import CONFIG, MODEL
from tests.integration.on_demand_models import parameter
from tests.pythons import own_venv

MIB = 1 << 20
COMMANDS = """
    def token(self, _):
        return str(TOKEN)

    def parent(self, _):
        return str(os.getppid())

    def helper(self, _):
        return str(TritonPythonModel.helper_process.pid)
"""
FAILURES = {
    "raises": ("raise ValueError('no weights')", "preload failed: ValueError: no weights"),
    "exits": ("raise SystemExit(3)", "preload failed: SystemExit: 3"),
    "dies": ("os._exit(3)", "its process ended in preload: exited"),
    "crashes": ("os.kill(os.getpid(), 11)", "its process ended in preload: was ended by SIGSEGV"),
    "threads": (
        "threading.Thread(target=threading.Event().wait, name='feeder', daemon=True).start()",
        "preload has left threads running, which a forked instance does not get: 'feeder'.",
    ),
    "native": (
        "ctypes.CDLL(None).pthread_create(ctypes.byref(ctypes.c_ulong()), None, PAUSE, None)",
        "preload has left 1 native threads running",
    ),
}


def prepared(body: str, static: bool = True) -> str:
    """A model with `preload`, which runs `body`; `token` is that of the module."""
    start = """
import ctypes
import random
import subprocess
import sys
import threading

TOKEN = random.random()
PAUSE = ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p)


class TritonPythonModel:
"""
    method = f"""
    {"@staticmethod" if static else ""}
    def preload(args):
        print("prepares", sorted(args), flush=True)
        {body}
"""
    return MODEL.replace("\nclass TritonPythonModel:\n", start + method) + COMMANDS


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory, module_serve: Serve) -> RunningHost:
    repository = RepositoryBuilder(tmp_path_factory.mktemp("preload"))
    four = CONFIG + "instance_group [ { count: 4 } ]\n"
    weights = f"TritonPythonModel.weights = np.ones({60 * MIB}, np.uint8)"
    repository.add("shared", prepared(weights), four)
    repository.add("imported", prepared("pass", static=False), four + parameter("PRELOAD", "yes"))
    repository.add("private", prepared("pass"), four + parameter("PRELOAD", "no"))
    repository.add("ordinary", prepared("pass", static=False), four)
    helper = "TritonPythonModel.helper_process = subprocess.Popen(['sleep', '1000'])"
    repository.add("helped", prepared(helper), CONFIG)
    for name, (body, _) in FAILURES.items():
        repository.add(name, prepared(body), CONFIG)
    return module_serve(repository, "--model-control-mode=explicit").wait_started()


def prepared_count(host: RunningHost, name: str) -> int:
    """How often the model has been prepared."""
    return sum("prepares" in line and f"[{name}:" in line for line in host.output.splitlines())


# Sharing


def test_instances_are_forks_of_a_process_that_has_prepared_the_model(host: RunningHost) -> None:
    with host.client() as client:
        client.load_model("shared")
        parent = psutil.Process(int(run_command(client, "parent", "shared")))
        assert run_command(client, "pid", "shared") in {str(c.pid) for c in parent.children()}
        stubs = parent.children()
        assert len(stubs) == 4
        together = sum(map(proportional_bytes, [parent.pid, *(stub.pid for stub in stubs)]))
        assert together < 1.3 * (60 * MIB + 40 * MIB)
        assert prepared_count(host, "shared") == 1
        host.wait_for(
            r"prepares \['model_config', 'model_name', 'model_repository', 'model_version'\]"
        )
        client.unload_model("shared")
        wait_until(lambda: not parent.is_running(), "the process to end")


@pytest.mark.parametrize(
    ("name", "count"), [("shared", 1), ("imported", 0), ("private", 4), ("ordinary", 0)]
)
def test_what_is_shared(host: RunningHost, name: str, count: int) -> None:
    before = prepared_count(host, name)
    with host.client() as client:
        client.load_model(name)
        parent = psutil.Process(int(run_command(client, "parent", name)))
        forked = name in ("shared", "imported")
        assert (f"pbhost-preload {name}" in " ".join(parent.cmdline())) == forked
        assert prepared_count(host, name) == before + count
        client.unload_model(name)


def test_an_instance_that_was_killed_comes_from_the_same_process(host: RunningHost) -> None:
    with host.client() as client:
        client.load_model("shared")
        count = prepared_count(host, "shared")
        parent = run_command(client, "parent", "shared")
        token = run_command(client, "token", "shared")
        stubs = {stub.pid for stub in psutil.Process(int(parent)).children()}
        for pid in stubs:
            os.kill(pid, signal.SIGKILL)
        wait_until(
            lambda: (
                client.is_model_ready("shared")
                and len({c.pid for c in psutil.Process(int(parent)).children()} - stubs) == 4
            ),
            "new instances",
            state=lambda: host.output,
        )
        assert run_command(client, "parent", "shared") == parent
        assert run_command(client, "token", "shared") == token
        assert prepared_count(host, "shared") == count
        client.unload_model("shared")


def test_a_prepared_process_that_was_killed_is_started_again(host: RunningHost) -> None:
    with host.client() as client:
        client.load_model("shared")
        count = prepared_count(host, "shared")
        parent = int(run_command(client, "parent", "shared"))
        os.kill(parent, signal.SIGKILL)
        wait_until(
            lambda: prepared_count(host, "shared") == count + 1 and client.is_model_ready("shared"),
            "the model to be prepared again",
            state=lambda: host.output,
        )
        assert int(run_command(client, "parent", "shared")) != parent
        client.unload_model("shared")


def test_processes_that_preload_has_started_end_with_the_model(host: RunningHost) -> None:
    with host.client() as client:
        client.load_model("helped")
        helper = psutil.Process(int(run_command(client, "helper", "helped")))
        client.unload_model("helped")
        wait_until(lambda: not helper.is_running(), "the process to end")


def test_without_forks_each_process_prepares_the_model(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.add("a", prepared("pass"), CONFIG + "instance_group [ { count: 2 } ]\n")
    host = serve(repository, "--stub-start=spawn").wait_started()
    assert host.output.count("prepares") == 2


def test_a_model_completes_its_configuration(repository: RepositoryBuilder, serve: Serve) -> None:
    completes = """
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "COMMAND", "data_type": "TYPE_STRING", "dims": [1]})
        config.add_output({"name": "ANSWER", "data_type": "TYPE_STRING", "dims": [1]})
        return config
"""
    repository.add("a", prepared("pass").replace("\n    @static", completes + "\n    @static", 1))
    host = serve(repository).wait_started()
    with host.client() as client:
        assert run_command(client, "name", "a")
    assert host.output.count("prepares") == 1


def test_a_model_in_an_environment_is_prepared_there(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    venv = own_venv(tmp_path / "env")
    four = CONFIG + "instance_group [ { count: 4 } ]\n"
    environment = parameter("EXECUTION_ENV_PATH", venv)
    repository.add("a", prepared("print(sys.prefix)"), four + environment)
    host = serve(repository).wait_started()
    assert host.output.count("prepares") == 1
    host.wait_for(rf"\[a:1\] {venv}")
    with host.client() as client:
        parent = psutil.Process(int(run_command(client, "parent", "a")))
        assert len(parent.children()) == 4


# Failures


@pytest.mark.parametrize("name", FAILURES)
def test_a_preload_that_fails_is_a_load_error(host: RunningHost, name: str) -> None:
    with host.client() as client:
        _, text = infer_error(client.load_model, name)
        assert f"failed to prepare model '{name}': {FAILURES[name][1]}" in text
        assert not client.is_model_ready(name)
        assert client.is_server_live()
    assert not [
        process
        for process in psutil.Process(host.process.pid).children()
        if f"pbhost-preload {name}" in " ".join(process.cmdline())
    ]


def test_a_preload_that_hangs_is_a_load_error(repository: RepositoryBuilder, serve: Serve) -> None:
    repository.add("hangs", prepared("threading.Event().wait()"), CONFIG)
    host = serve(
        repository, "--model-control-mode=explicit", "--stub-load-timeout-secs=1"
    ).wait_started()
    with host.client() as client:
        _, text = infer_error(client.load_model, "hangs")
    assert "preload did not end within 1 s (--stub-load-timeout-secs)" in text
    assert not [
        process
        for process in psutil.Process(host.process.pid).children()
        if "pbhost-preload" in " ".join(process.cmdline())
    ]
