"""Models on GPUs, one replica for each; a simulated driver takes the place of NVIDIA's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tritonclient.grpc as grpcclient

from tests.conftest import RepositoryBuilder, wait_until
from tests.gpu.conftest import simulated_driver as simulated_driver
from tests.ray.conftest import GRPC, RayCluster

pytest.importorskip("ray", reason="ray is not installed: make test-ray")

WHERE = """
import os

import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        kind, number = args["model_instance_kind"], args["model_instance_device_id"]
        self.place = f"{kind} {number} of {os.environ['CUDA_VISIBLE_DEVICES']}"

    def execute(self, requests):
        place = pb_utils.Tensor("PLACE", np.array([self.place], dtype=np.object_))
        return [pb_utils.InferenceResponse([place]) for _ in requests]
"""
CONFIG = """
output [{name: "PLACE", data_type: TYPE_STRING, dims: [1]}]
instance_group [{kind: KIND_GPU, count: 2, gpus: [0, 1]}]
"""


def test_each_gpu_of_a_group_has_a_replica(
    cluster: RayCluster, simulated_driver: Path, repository: RepositoryBuilder
) -> None:
    from host.ray import model_apps

    repository.add("where", WHERE, CONFIG)
    driver = {"LD_LIBRARY_PATH": str(simulated_driver), "SIMULATED_CUDA_DEVICES": "9.0"}
    options = {"num_cpus": 0.2, "num_gpus": 1, "runtime_env": {"env_vars": driver}}
    application = model_apps(
        {
            "model_repository": str(repository.path),
            "log_info": False,
            "deployments": {"where": {"ray_actor_options": options}},
        }
    )
    places: set[str] = set()

    def both_have_answered() -> bool:
        with ThreadPoolExecutor() as threads:  # a request alone goes to the first replica
            asked = [threads.submit(client.infer, "where", []) for _ in range(8)]
        places.update(one.result().as_numpy("PLACE")[0].decode() for one in asked)
        return len(places) == 2

    with cluster.deploy(application), grpcclient.InferenceServerClient(GRPC) as client:
        wait_until(both_have_answered, "answers of both replicas", state=lambda: places)
        assert places == {"GPU 0 of 0", "GPU 0 of 1"}
        (group,) = client.get_model_config("where").config.instance_group
        assert (group.count, list(group.gpus)) == (2, [0])
