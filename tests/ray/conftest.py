"""A Ray cluster of two simulated nodes, in a network namespace with the loopback interface."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CLONE_NEWNET = 0x40000000
HTTP, GRPC = "127.0.0.1:8000", "127.0.0.1:9000"
"""The ports of Ray Serve's proxies."""


def pytest_configure(config: pytest.Config) -> None:
    """Warnings of Ray's own modules are not ours."""
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

    def __init__(self, cluster: Any, node: Any) -> None:
        self.cluster = cluster
        self.node = node
        """The second node."""

    def deploy(self, target: Any, name: str = "pbhost") -> None:
        """Run an application until it is ready."""
        from ray import serve

        serve.run(target, name=name, route_prefix="/")


@contextmanager
def ray_cluster(**environment: str) -> Iterator[RayCluster]:
    """Start a cluster and Ray Serve; stop both."""
    pytest.importorskip("ray", reason="ray is not installed: make test-ray")
    with pytest.MonkeyPatch.context() as patch, loopback_alone():
        folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # paths of sockets must be short
        for name, value in {
            "RAY_TMPDIR": folder,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS": "0",
            "CUDA_VISIBLE_DEVICES": "",
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
        nodes.add_node(num_cpus=4, include_dashboard=False, resources={"head": 100})
        second = nodes.add_node(num_cpus=4, resources={"second": 100})
        ray.init(address=nodes.address, namespace="serve", log_to_driver=False)
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": "127.0.0.1", "port": int(HTTP.split(":")[1])},
            grpc_options={
                "port": int(GRPC.split(":")[1]),
                "grpc_servicer_functions": ["host.ray.servicer.add_servicer"],
            },
        )
        yield RayCluster(nodes, second)
    finally:
        serve.shutdown()
        ray.shutdown()
        nodes.shutdown()


@pytest.fixture(scope="session")
def cluster(check_nothing_left_behind: None) -> Iterator[RayCluster]:
    """A cluster for all tests of the session."""
    with ray_cluster() as started:
        yield started
