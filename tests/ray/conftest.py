"""A Ray cluster of two simulated nodes, in a network namespace with the loopback interface."""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpcclient

from tests.conftest import DEADLINE
from tests.object_stores import ENVIRONMENT as KEYS_OF_STORES

CLONE_NEWNET = 0x40000000
HTTP, GRPC = "127.0.0.1:8000", "127.0.0.1:9000"
"""The ports of Ray Serve's proxies."""
METRICS = "127.0.0.1:9301", "127.0.0.1:9302"
"""Where the nodes have their metrics."""
HAPROXY = os.environ.get("PBHOST_TEST_RAY_PROXY") == "haproxy"
"""Whether HAProxy takes the place of Ray's own proxies."""


def pytest_configure(config: pytest.Config) -> None:
    """Ignores what Ray itself warns of."""
    ignore_warnings(config)


def ignore_warnings(config: pytest.Config) -> None:
    """Ignores what Ray warns of, in its own modules and, by category, in those that it calls."""
    config.addinivalue_line("filterwarnings", "ignore:::ray")
    for text in ("ResourceWarning", "FutureWarning", "DeprecationWarning", "UserWarning"):
        config.addinivalue_line("filterwarnings", f"ignore::{text}")


@contextmanager
def loopback_alone() -> Iterator[None]:
    """Moves this thread, and what it starts, into a network namespace of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        if libc.unshare(CLONE_NEWNET) != 0:
            why = os.strerror(ctypes.get_errno())
            pytest.skip(f"network namespaces are not permitted here: {why}")
        try:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            yield
        finally:
            libc.setns(before, CLONE_NEWNET)
    finally:
        os.close(before)


class RayCluster:
    """Two nodes with Ray Serve on the first, and a proxy on each."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._second: Any = None

    @property
    def address(self) -> str:
        """The address for RAY_ADDRESS."""
        return str(self._cluster.address)

    def add_second_node(self) -> None:
        """Adds the node that is not the head."""
        port = int(METRICS[1].split(":")[1])
        self._second = self._cluster.add_node(
            num_cpus=4,
            num_gpus=2,  # Ray counts them; nothing looks for them without a driver
            metrics_export_port=port,
            resources={"second": 100},
        )

    def remove_second_node(self) -> None:
        """Kills all processes of that node."""
        self._cluster.remove_node(self._second, allow_graceful=False)

    @contextmanager
    def deploy_config(self, config: Mapping[str, Any]) -> Iterator[Replicas]:
        """Deploys a configuration file; its application is gone after the block."""
        from ray import serve

        replicas = Replicas("pbhost")
        replicas.update(config)
        try:
            yield replicas
        finally:
            serve.delete("pbhost")

    @contextmanager
    def deploy(self, target: Any, name: str = "pbhost") -> Iterator[Replicas]:
        """Runs an application; it is ready within the block, and gone after it."""
        from ray import serve

        serve.run(target, name=name, route_prefix="/")
        try:
            yield Replicas(name)
        finally:
            serve.delete(name)


def kill(process_id: int) -> float:
    """Kills a process, and returns when it had ended, by the monotonic clock.

    What it had open is closed by then: nothing that is sent later can reach it.
    """
    process = os.pidfd_open(process_id)
    try:
        signal.pidfd_send_signal(process, signal.SIGKILL)
        ended, _, _ = select.select([process], [], [], DEADLINE)
        assert ended, f"process {process_id} has not ended within {DEADLINE} s"
        return time.monotonic()
    finally:
        os.close(process)


class Replicas:
    """The replicas of an application."""

    def __init__(self, name: str) -> None:
        self.name = name

    def update(self, config: Mapping[str, Any]) -> None:
        """Deploys a configuration file, as `serve run` does with one."""
        # Applications that `serve.run` deploys again get new replicas.
        from ray.serve._private.api import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        schema = ServeDeploySchema.model_validate(config)
        _get_global_client().deploy_apps(schema, _blocking=True)

    def running(self) -> list[Any]:
        """Ray Serve's description of each replica that runs."""
        # The public status has no process ids.
        from ray.serve._private.api import _get_global_client

        details = _get_global_client().get_serve_details()
        replicas = details["applications"][self.name]["deployments"]["pbhost"]["replicas"]
        return [replica for replica in replicas if replica["state"] == "RUNNING"]

    def process_ids(self) -> list[int]:
        """The processes of the replicas that run."""
        return [replica["pid"] for replica in self.running()]

    def logged(self, text: str) -> bool:
        """Whether a server has written a text to the output of its replica."""
        return self.count_logs(text) > 0

    def count_logs(self, text: str, process: str = "") -> int:
        """How many outputs of processes have a text; of one process, if its id is given."""
        folder = Path(os.environ["RAY_TMPDIR"], "ray")
        logs = folder.glob(f"session_2*/logs/worker-*{process}.*")
        return sum(text in log.read_text(errors="replace") for log in logs)

    def that_logged(self, text: str) -> set[int]:
        """The processes of those replicas whose server has written a text to their output."""
        return {one for one in self.process_ids() if self.count_logs(text, f"-{one}")}


def model_is_ready(name: str) -> bool:
    """Whether a model is ready, through the proxy."""
    with grpcclient.InferenceServerClient(GRPC) as client:
        try:
            return bool(client.is_model_ready(name))
        except grpcclient.InferenceServerException:
            return False  # the proxy does not know the application yet


def haproxy_environment(folder: str) -> dict[str, str]:
    """The settings of a cluster with HAProxy, which Ray brings along."""
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/admin.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/server-state",
    }


@contextmanager
def ray_cluster(**environment: str) -> Iterator[RayCluster]:
    """Starts a cluster and Ray Serve; stops both."""
    pytest.importorskip("ray", reason="ray is not installed: make test-ray")
    with pytest.MonkeyPatch.context() as patch, loopback_alone():
        folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # paths of sockets must be short
        for name, value in {
            "RAY_TMPDIR": folder,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS": "0",
            "CUDA_VISIBLE_DEVICES": "0,1",  # for the processes of Ray; others see no GPU
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
            "RAY_metrics_report_interval_ms": "1000",
            **KEYS_OF_STORES,
            **(haproxy_environment(folder) if HAPROXY else {}),
            **environment,
        }.items():
            patch.setenv(name, value)
        try:
            with _running_cluster(Path(folder)) as cluster:
                yield cluster
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _running_cluster(folder: Path) -> Iterator[RayCluster]:
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    (folder / "ray").mkdir()
    nodes = Cluster()
    try:
        port = int(METRICS[0].split(":")[1])
        head = {"head": 100}
        nodes.add_node(
            num_cpus=4,
            num_gpus=0,
            include_dashboard=False,
            metrics_export_port=port,
            resources=head,
        )
        cluster = RayCluster(nodes)
        cluster.add_second_node()
        ray.init(address=nodes.address, namespace="serve", log_to_driver=False)
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": "127.0.0.1", "port": int(HTTP.split(":")[1])},
            grpc_options={
                "port": int(GRPC.split(":")[1]),
                "grpc_servicer_functions": ["pbhost.ray.add_servicer"],
            },
        )
        yield cluster
    finally:
        serve.shutdown()
        ray.shutdown()
        nodes.shutdown()


@pytest.fixture(scope="session")
def cluster(check_nothing_left_behind: None) -> Iterator[RayCluster]:
    """A cluster for all tests of the session."""
    with ray_cluster() as started:
        yield started
