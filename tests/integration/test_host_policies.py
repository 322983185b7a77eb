"""Instances run on the CPUs, and take memory of the NUMA node, that their host policy names."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.conftest import RepositoryBuilder, RunningHost, Serve, wait_until

MODEL = """
    import ctypes
    import json
    import os

    import numpy as np  # with threads of its own
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            threads = os.listdir("/proc/self/task")
            cores = {core for thread in threads for core in os.sched_getaffinity(int(thread))}
            mode = ctypes.c_int(-1)
            ctypes.CDLL(None).syscall(239, ctypes.byref(mode), None, 0, None, 0)
            seen = {"cores": sorted(cores), "memory": mode.value, "pid": os.getpid()}
            text = np.array([json.dumps(seen)], dtype=object)
            return [pb_utils.InferenceResponse([pb_utils.Tensor("SEEN", text)])] * len(requests)
"""
CONFIG = """
    backend: "python"
    output [ {{ name: "SEEN", data_type: TYPE_STRING, dims: [ 1 ] }} ]
    instance_group [ {{ {group} }} ]
"""
BIND = 2
"""MPOL_BIND of Linux."""


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    for name, group in {
        "by_kind": "kind: KIND_CPU",
        "model": "kind: KIND_MODEL",
        "named": 'host_policy: "everywhere"',
        "elsewhere": 'host_policy: "elsewhere"',
        "nowhere": 'host_policy: "nowhere"',
    }.items():
        module_repository.add(name, MODEL, CONFIG.format(group=group))
    everywhere = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
    return module_serve(
        module_repository,
        f"--host-policy=cpu,cpu-cores={min(os.sched_getaffinity(0))}",
        "--host-policy=cpu,numa-node=0",
        f"--host-policy=everywhere,cpu-cores={everywhere}",
        "--host-policy=elsewhere,numa-node=4000",
        "--host-policy=nowhere,cpu-cores=4000-4001",
        "--exit-on-error=false",
    ).wait_started()


def seen(host: RunningHost, model: str) -> dict[str, object]:
    with host.client() as client:
        result = client.infer(model, [])
    array = result.as_numpy("SEEN")
    assert isinstance(array, np.ndarray)
    found: dict[str, object] = json.loads(array[0])
    return found


def test_all_threads_run_on_the_cpus_of_the_policy_of_their_kind(host: RunningHost) -> None:
    found = seen(host, "by_kind")
    assert found["cores"] == [min(os.sched_getaffinity(0))]
    assert found["memory"] == BIND or "memory is not bound to NUMA node 0" in host.output


def test_an_instance_that_comes_back_is_bound_again(host: RunningHost) -> None:
    (stub,) = host.stubs("by_kind_0_0")
    stub.kill()
    wait_until(lambda: [s.pid for s in host.stubs("by_kind_0_0")] not in ([], [stub.pid]), "a stub")
    found = seen(host, "by_kind")
    assert found["cores"] == [min(os.sched_getaffinity(0))]


def test_a_group_may_name_its_policy(host: RunningHost) -> None:
    assert seen(host, "named")["cores"] == sorted(os.sched_getaffinity(0))


def test_a_policy_without_settings_changes_nothing(host: RunningHost) -> None:
    found = seen(host, "model")
    assert found["cores"] == sorted(os.sched_getaffinity(0))
    assert found["memory"] != BIND


@pytest.mark.parametrize(
    "model, problem",
    [
        ("nowhere", "'cpu-cores' names CPUs that it cannot use: 4000, 4001"),
        ("elsewhere", "'numa-node' names node 4000, which does not exist"),
    ],
)
def test_a_machine_without_what_a_policy_names_fails_the_load(
    host: RunningHost, model: str, problem: str
) -> None:
    text = f"instance '{model}_0_0' cannot apply its host policy: {problem}"
    with grpcclient.InferenceServerClient(host.url) as client:
        index = client.get_model_repository_index(as_json=True)
        with pytest.raises(InferenceServerException):
            client.infer(model, [])
    (entry,) = [entry for entry in index["models"] if entry["name"] == model]
    assert entry["reason"] == f"Internal: {text}"
