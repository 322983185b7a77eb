"""Instances on GPUs: how they are assigned, and which settings are refused. The driver is
simulated.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.clients import tensor
from tests.conftest import DEADLINE, RepositoryBuilder, Serve
from tests.gpu import models

KEYS = ("model_instance_name", "model_instance_kind", "model_instance_device_id")
SAYS_WHO_IT_IS = """
import json

import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        pb_utils.Logger.log_info("I am " + json.dumps(args))

    def execute(self, requests):
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""
CONFIG = """
backend: "python"
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
ADVICE = (
    "; set KIND_CPU, or KIND_AUTO to use a GPU only if there is one; or start the server on a"
    " machine with a GPU of the required compute capability and NVIDIA's driver"
)
REFUSED = "has kind KIND_GPU but server does not support GPUs"


def instances(output: str) -> list[tuple[str, ...]]:
    """Name, kind and device of every instance that has reported them."""
    told = [
        json.loads(line.partition("I am ")[2].rstrip('"'))
        for line in output.splitlines()
        if "I am {" in line
    ]
    return sorted(tuple(args[key] for key in KEYS) for args in told)


def test_a_model_without_groups_has_an_instance_on_every_gpu(
    repository: RepositoryBuilder, serve: Serve, simulated_environment: dict[str, str]
) -> None:
    repository.add("m", SAYS_WHO_IT_IS, CONFIG)
    host = serve(repository, env=simulated_environment).wait_started()
    assert instances(host.output) == [("m_0", "GPU", "0"), ("m_0", "GPU", "1")]
    for number, capability in enumerate(("9.0", "7.5")):
        host.wait_for(rf"I\d{{4}} .*\] GPU {number} has CUDA compute capability {capability}\n")
    with host.client() as client:
        (group,) = client.get_model_config("m").config.instance_group
        assert (group.kind, list(group.gpus), group.count) == (1, [0, 1], 1)


def test_groups_get_the_gpus_that_they_list(
    repository: RepositoryBuilder, serve: Serve, simulated_environment: dict[str, str]
) -> None:
    groups = """
    instance_group [ { kind: KIND_GPU gpus: 1 count: 2 }, { kind: KIND_CPU }, { count: 1 } ]
    """
    repository.add("m", SAYS_WHO_IT_IS, CONFIG + groups)
    host = serve(repository, env=simulated_environment).wait_started()
    assert instances(host.output) == [
        ("m_0_0", "GPU", "1"),
        ("m_0_1", "GPU", "1"),
        ("m_1_0", "CPU", "0"),
        ("m_2_0", "GPU", "0"),
        ("m_2_0", "GPU", "1"),
    ]


def test_a_gpu_of_too_little_capability_is_not_used(
    repository: RepositoryBuilder, serve: Serve, simulated_environment: dict[str, str]
) -> None:
    repository.add("m", SAYS_WHO_IT_IS, CONFIG)
    repository.add("n", SAYS_WHO_IT_IS, CONFIG + "instance_group [ { gpus: 1 kind: KIND_GPU } ]")
    host = serve(
        repository,
        "--min-supported-compute-capability=8.0",
        "--exit-on-error=false",
        env=simulated_environment,
    ).wait_started()
    assert instances(host.output) == [("m_0", "GPU", "0")]
    assert "GPU 1 has CUDA compute capability 7.5, which is not enough; it is not used" in (
        host.output
    )
    assert (
        "instance group n_0 of model n specifies invalid or unsupported gpu id 1. GPUs with at"
        " least the minimum required CUDA compute compatibility of 8.000000 are: 0 ("
    ) in host.output


def test_gpus_that_are_hidden_are_not_there(
    repository: RepositoryBuilder, serve: Serve, simulated_environment: dict[str, str]
) -> None:
    path = repository.add("m", SAYS_WHO_IT_IS, CONFIG + "instance_group [ { kind: KIND_GPU } ]")
    repository.add("n", SAYS_WHO_IT_IS, CONFIG)
    host = serve(
        repository,
        "--exit-on-error=false",
        env={**simulated_environment, "CUDA_VISIBLE_DEVICES": ""},
    ).wait_started()
    assert instances(host.output) == [("n_0", "CPU", "0")]
    place = f" ({path}/config.pbtxt:5:20, field 'instance_group[0].kind')"
    assert f"instance group m_0 of model m {REFUSED}{place}{ADVICE}" in host.output
    assert "GPUs are not used" not in host.output


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        ("cuInit=803", "cuInit failed with CUDA_ERROR_UNKNOWN (803): unknown error"),
        ("cuInit=exit", "'the search for GPUs' ended with status 3"),
    ],
)
def test_a_driver_that_does_not_work_is_reported(
    repository: RepositoryBuilder,
    serve: Serve,
    simulated_environment: dict[str, str],
    failure: str,
    reason: str,
) -> None:
    repository.add("m", SAYS_WHO_IT_IS, CONFIG)
    host = serve(
        repository, env={**simulated_environment, "SIMULATED_CUDA_FAIL": failure}
    ).wait_started()
    assert f"GPUs are not used: {reason}" in host.output
    assert instances(host.output) == [("m_0", "CPU", "0")]


def test_no_process_uses_the_driver_before_a_tensor_does(
    repository: RepositoryBuilder, serve: Serve, simulated_environment: dict[str, str]
) -> None:
    models.add(repository, "returns", models.RETURNS, models.CONFIG)
    host = serve(repository, env=simulated_environment).wait_started()
    log = Path(simulated_environment["SIMULATED_CUDA_LOG"])
    (searcher,) = {int(line.split()[0]) for line in log.read_text().splitlines()}
    assert searcher != host.process.pid
    assert not psutil.pid_exists(searcher)
    with host.client() as client:
        client.infer("returns", [tensor("X", np.zeros(1, np.float32))])
    users = {int(line.split()[0]) for line in log.read_text().splitlines()} - {searcher}
    assert len(users) == 1
    assert users <= {stub.pid for stub in host.stubs()}


def test_a_model_at_the_terminal_runs_on_the_first_gpu(
    repository: RepositoryBuilder, simulated_environment: dict[str, str]
) -> None:
    path = repository.add("m", SAYS_WHO_IT_IS.replace("pb_utils.Logger.log_info", "print"), CONFIG)
    done = subprocess.run(
        [sys.executable, "-m", "pbhost", "run", path, "--input", "X=1"],
        env={**os.environ, **simulated_environment},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert instances(done.stdout) == [("m_0", "GPU", "0")]
