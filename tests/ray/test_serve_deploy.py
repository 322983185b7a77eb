"""`serve deploy` of a configuration file: Ray's dashboard takes it by REST."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DEADLINE, ROOT, wait_until
from tests.ray.conftest import HAPROXY, haproxy_environment, loopback_alone

pytest.importorskip("ray", reason="ray is not installed: make test-ray")
yaml = pytest.importorskip("yaml")

MODELS = ROOT / "model_repository"
PORT, DASHBOARD_PORT = 6380, 8265
HTTP_PORT, GRPC_PORT = 8000, 9000
CLIENT = f"""
import sys
import numpy as np
import tritonclient.grpc as grpcclient

with grpcclient.InferenceServerClient("127.0.0.1:{GRPC_PORT}") as client:
    inputs = [grpcclient.InferInput(name, [1, 4], "FP32") for name in ("INPUT0", "INPUT1")]
    for one in inputs:
        one.set_data_from_numpy(np.ones((1, 4), dtype=np.float32))
    print(client.infer(sys.argv[1], inputs).as_numpy("SUM").tolist())
"""


class Ray:
    """A Ray of one node with a dashboard, as `ray start` makes it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = {**os.environ, **environment}

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a program of the environment to its end."""
        program, *arguments = command
        return subprocess.run(
            [str(Path(sys.executable).with_name(program)), *arguments],
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            env=self._environment,
            cwd=ROOT,
        )

    @contextmanager
    def started(self, folder: str) -> Iterator[None]:
        """Within the block, the dashboard answers."""
        arguments = [
            *("start", "--head", "--block", f"--port={PORT}", "--num-cpus=4"),
            *("--include-dashboard=true", f"--dashboard-port={DASHBOARD_PORT}"),
            *("--node-ip-address=127.0.0.1", f"--temp-dir={folder}/ray", "--disable-usage-stats"),
        ]
        program = str(Path(sys.executable).with_name("ray"))
        process = subprocess.Popen(
            [program, *arguments], env=self._environment, stdout=subprocess.DEVNULL
        )
        try:
            wait_until(lambda: not self.run("serve", "config").returncode, "Ray's dashboard")
            yield
        finally:
            process.terminate()
            process.wait(DEADLINE)

    def deploy(self, config: Mapping[str, Any], file: Path) -> None:
        """Deploys a configuration file; does not wait for the application."""
        file.write_text(yaml.safe_dump(dict(config)))
        done = self.run("serve", "deploy", str(file))
        assert done.returncode == 0, done.stdout + done.stderr

    def replicas(self) -> dict[str, int]:
        """The replicas that run, by deployment, if the application runs."""
        status = yaml.safe_load(self.run("serve", "status").stdout) or {}
        application = status.get("applications", {}).get("pbhost", {})
        if application.get("status") != "RUNNING":
            return {}
        deployments: dict[str, Any] = application["deployments"]
        return {name: one["replica_states"].get("RUNNING", 0) for name, one in deployments.items()}

    def answers(self, model: str) -> bool:
        """Whether a client of the gRPC proxy gets a response of the model."""
        return self.run("python", "-c", CLIENT, model).stdout.strip() == "[[2.0, 2.0, 2.0, 2.0]]"

    def write_config(self, *arguments: str) -> dict[str, Any]:
        """What `pbhost ray config` writes."""
        ports = f"--http-port={HTTP_PORT}", f"--grpc-port={GRPC_PORT}"
        done = self.run("python", "-m", "pbhost", "ray", "config", str(MODELS), *ports, *arguments)
        assert done.returncode == 0, done.stderr
        config: dict[str, Any] = yaml.safe_load(done.stdout)
        return config


@pytest.fixture
def ray_with_dashboard() -> Iterator[Ray]:
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # paths of sockets must be short
    environment = {
        "RAY_ADDRESS": f"127.0.0.1:{PORT}",
        "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{DASHBOARD_PORT}",
        "RAY_AUTH_MODE": "disabled",  # no other process reaches this network
        "CUDA_VISIBLE_DEVICES": "",
        **(haproxy_environment(folder) if HAPROXY else {}),
    }
    try:
        with loopback_alone():
            ray = Ray(environment)
            with ray.started(folder):
                yield ray
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.timeout(600)
def test_a_file_of_pbhost_is_deployed_and_changed(ray_with_dashboard: Ray, tmp_path: Path) -> None:
    ray = ray_with_dashboard
    explicit = "--argument", "model_control_mode=explicit"
    config = ray.write_config("--replicas=1", *explicit)
    (deployment,) = config["applications"][0]["deployments"]
    deployment["ray_actor_options"] = {"num_cpus": 0.5}
    deployment["user_config"] = {"load_model": ["add_sub"]}
    ray.deploy(config, tmp_path / "serve.yaml")
    wait_until(lambda: ray.replicas() == {"pbhost": 1}, "the replica")
    wait_until(lambda: ray.answers("add_sub"), "a response through the proxy")
    deployment["num_replicas"] = 2
    ray.deploy(config, tmp_path / "serve.yaml")
    wait_until(lambda: ray.replicas() == {"pbhost": 2}, "the second replica")
    assert ray.answers("add_sub")
