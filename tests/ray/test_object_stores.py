"""Replicas whose models lie in an object store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from tests.conftest import DEADLINE, ROOT, wait_until
from tests.object_stores import S3Server
from tests.ray.conftest import GRPC, RayCluster, model_is_ready

pytest.importorskip("ray", reason="ray is not installed: make test-ray")
pytest.importorskip("moto.server", reason="needs moto's server (pip install 'moto[server]')")
pytest.importorskip("obstore", reason="needs pbhost[cloud]")

DOUBLES = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([self.double(request)]) for request in requests]

    def double(self, request):
        return pb_utils.Tensor("Y", pb_utils.get_input_tensor_by_name(request, "X").as_numpy() * 2)
"""
CONFIG = """
backend: "python"
input { name: "X" data_type: TYPE_INT32 dims: 1 }
output { name: "Y" data_type: TYPE_INT32 dims: 1 }
"""


@pytest.fixture(scope="module")
def s3(cluster: RayCluster) -> Iterator[S3Server]:
    """A store in the network of the cluster, whose nodes have its keys."""
    server = S3Server()
    try:
        server.put_files("models/doubles", {"config.pbtxt": CONFIG, "1/model.py": DOUBLES})
        yield server
    finally:
        server.close()


def double() -> list[int]:
    with grpcclient.InferenceServerClient(GRPC) as client:
        given = grpcclient.InferInput("X", [1], "INT32")
        given.set_data_from_numpy(np.array([21], np.int32))
        answer = client.infer("doubles", [given]).as_numpy("Y")
        assert answer is not None
        doubled: list[int] = answer.tolist()
        return doubled


def test_replicas_of_a_node_fetch_a_model_once(
    cluster: RayCluster, s3: S3Server, tmp_path: Path
) -> None:
    from host.ray import app

    url = s3.url("models")
    command = [sys.executable, "-m", "pbhost", "ray", "check", url, "--per-model=true"]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    assert checked.stdout.startswith("doubles: a replica needs 0 GPUs"), checked
    s3.objects_read()
    target = app(
        {
            "model_repository": [url],
            "repository_cache_directory": str(tmp_path / "cache"),
            "deployment": {
                "num_replicas": 2,
                "ray_actor_options": {"num_cpus": 1, "resources": {"head": 1}},
            },
        }
    )
    with cluster.deploy(target):
        assert double() == [42]
    assert s3.objects_read().count("models/doubles/1/model.py") == 1


@pytest.mark.parametrize(
    "flags",
    [
        [],
        pytest.param(
            ["--per-model=true"],
            marks=pytest.mark.test_all(reason="a second application takes seconds to start"),
        ),
    ],
)
def test_run_serves_the_models_of_a_store_until_it_is_interrupted(
    cluster: RayCluster, s3: S3Server, tmp_path: Path, flags: list[str]
) -> None:
    from ray import serve

    command = ["ray", "run", s3.url("models"), f"--repository-cache-directory={tmp_path}", *flags]
    process = subprocess.Popen(
        [sys.executable, "-m", "pbhost", *command],
        env={**os.environ, "RAY_ADDRESS": cluster.address},
        cwd=ROOT,
    )
    try:
        wait_until(lambda: model_is_ready("doubles"), "the model")
        assert double() == [42]
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE) == 0
        assert "pbhost" not in serve.status().applications
    finally:
        process.kill()
        process.wait()
