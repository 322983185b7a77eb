"""Replicas whose models lie in an object store."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from tests.conftest import DEADLINE
from tests.object_stores import ENVIRONMENT, S3Server
from tests.ray.conftest import GRPC, RayCluster

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


def test_replicas_of_a_node_fetch_a_model_once(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from host.ray import app

    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)  # for this process, which reads the configurations
    s3 = S3Server()
    try:
        url = s3.url("models")
        s3.put_files("models/doubles", {"config.pbtxt": CONFIG, "1/model.py": DOUBLES})
        command = [sys.executable, "-m", "pbhost", "ray", "check", url, "--per-model=true"]
        checked = subprocess.run(
            command, capture_output=True, text=True, timeout=DEADLINE, env={**os.environ}
        )
        assert checked.stdout.startswith("doubles: a replica needs 0 GPUs"), checked
        s3.objects_read()
        target = app(
            {
                "model_repository": [url],
                "repository_cache_directory": str(tmp_path / "cache"),
                "deployment": {
                    "num_replicas": 2,
                    "ray_actor_options": {
                        "num_cpus": 1,
                        "resources": {"head": 1},
                        "runtime_env": {"env_vars": ENVIRONMENT},
                    },
                },
            }
        )
        with cluster.deploy(target), grpcclient.InferenceServerClient(GRPC) as client:
            given = grpcclient.InferInput("X", [1], "INT32")
            given.set_data_from_numpy(np.array([21], np.int32))
            answer = client.infer("doubles", [given]).as_numpy("Y")
            assert answer is not None and answer.tolist() == [42]
        assert s3.objects_read().count("models/doubles/1/model.py") == 1
    finally:
        s3.close()
