"""Models whose tensors lie on a GPU, in real hosts; the GPU is simulated where there is none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from tests.clients import Client, infer_error, tensor
from tests.conftest import RepositoryBuilder, Serve, wait_until
from tests.gpu import models
from tests.gpu.conftest import copies
from tests.integration.test_client_memory import Memory

ONE = "instance_group [ { kind: KIND_CPU } ]"
ASKING = ("passes_on", "doubles")
LARGE = 100_000
"""Elements that do not go inside a message."""


def infer(client: Client, model: str, array: Any) -> Any:
    return client.infer(model, [tensor("X", array)]).as_numpy("Y")


def ramp(count: int) -> Any:
    return np.arange(count, dtype=np.float32)


@pytest.mark.parametrize("count", [0, 1, LARGE])
def test_outputs_on_a_gpu_arrive(
    repository: RepositoryBuilder, serve: Serve, gpu_environment: dict[str, str], count: int
) -> None:
    models.add(repository, "returns", models.RETURNS, models.CONFIG + ONE)
    host = serve(repository, env=gpu_environment).wait_started()
    with host.client() as client:
        for _ in range(3):
            got = infer(client, "returns", ramp(count))
            assert got.tolist() == (ramp(count) + 1).tolist()
    assert host.stop() == 0
    assert "Traceback" not in host.output, host.output


def test_a_sender_sends_from_a_gpu(
    repository: RepositoryBuilder, serve: Serve, gpu_environment: dict[str, str]
) -> None:
    models.add(repository, "sends", models.SENDS, models.DECOUPLED + ONE)
    host = serve(repository, env=gpu_environment).wait_started()
    got: list[Any] = []
    with host.client() as client:
        client.start_stream(lambda result, error: got.append(error or result.as_numpy("Y")))
        client.async_stream_infer("sends", [tensor("X", ramp(LARGE))])
        wait_until(lambda: len(got) == 3, "three responses")
    for number, array in enumerate(got):
        np.testing.assert_array_equal(array, ramp(LARGE) + number)


@pytest.mark.parametrize(
    ("model", "count"), [("passes_on", 0), *((m, n) for n in (1, LARGE) for m in ASKING)]
)
def test_responses_of_other_models_can_be_on_a_gpu(
    repository: RepositoryBuilder,
    serve: Serve,
    gpu_environment: dict[str, str],
    model: str,
    count: int,
) -> None:
    models.add(repository, "returns", models.RETURNS, models.CONFIG + ONE)
    models.add(repository, "passes_on", models.PASSES_ON, models.CONFIG + ONE)
    models.add(repository, "doubles", models.DOUBLES, models.CONFIG + ONE)
    host = serve(repository, env=gpu_environment).wait_started()
    with host.client() as client:
        got = infer(client, model, ramp(count))
    expected = (ramp(count) + 1) * (2 if model == "doubles" else 1)
    np.testing.assert_array_equal(got, expected)


def test_every_tensor_is_copied_once(
    repository: RepositoryBuilder, serve: Serve, simulated_environment: dict[str, str]
) -> None:
    models.add(repository, "returns", models.RETURNS, models.CONFIG + ONE)
    models.add(repository, "passes_on", models.PASSES_ON, models.CONFIG + ONE)
    log = Path(simulated_environment["SIMULATED_CUDA_LOG"])
    host = serve(repository, env=simulated_environment).wait_started()
    with host.client() as client:
        infer(client, "returns", ramp(LARGE))
        assert copies(log) == [f"to host {4 * LARGE}"]
        infer(client, "passes_on", ramp(LARGE))
    # The input of the other model and its output; the answer is passed on by reference.
    assert copies(log) == [f"to host {4 * LARGE}"] * 3


def test_an_output_is_copied_straight_into_a_clients_memory(
    repository: RepositoryBuilder, serve: Serve, simulated_environment: dict[str, str]
) -> None:
    models.add(repository, "returns", models.RETURNS, models.CONFIG + ONE)
    host = serve(repository, "--allow-client-shm=true", env=simulated_environment).wait_started()
    size = 4 * LARGE
    with host.client() as client:
        memory = Memory(client)
        try:
            wanted = grpcclient.InferRequestedOutput("Y")
            wanted.set_shared_memory(memory.name, size)
            given = [tensor("X", ramp(LARGE))]
            client.infer("returns", given, outputs=[wanted])
            np.testing.assert_array_equal(memory.read(np.float32, [LARGE]), ramp(LARGE) + 1)
            log = Path(simulated_environment["SIMULATED_CUDA_LOG"])
            assert copies(log) == [f"to host {size}"]
            wanted.set_shared_memory(memory.name, size - 1)
            _, text = infer_error(client.infer, "returns", given, outputs=[wanted])
            assert f"should be at least {size} bytes to hold the results" in text
        finally:
            memory.close()


def test_a_failing_copy_fails_its_response_alone(
    repository: RepositoryBuilder, serve: Serve, simulated_environment: dict[str, str]
) -> None:
    breaking = models.RETURNS.replace(
        "return [",
        "import os; os.environ['SIMULATED_CUDA_FAIL'] ="
        " 'cuMemcpyDtoH_v2=700' if x_of(requests[0])[0] < 0 else ''; return [",
    )
    models.add(repository, "returns", breaking, models.CONFIG + ONE)
    models.add(
        repository,
        "asks",
        models.PASSES_ON.replace("class Triton", "import os\n\nclass Triton").replace(
            "asked.exec()",
            "(os.environ.update(SIMULATED_CUDA_FAIL='cuMemcpyDtoH_v2=700'), asked.exec())[1]",
        ),
        models.CONFIG + ONE,
    )
    host = serve(repository, env=simulated_environment).wait_started()
    with host.client() as client:
        for count in (1, LARGE):
            status, text = infer_error(infer, client, "returns", -ramp(count) - 1)
            assert status == "StatusCode.INTERNAL"
            assert text == (
                "Tensor 'Y' cannot be copied from GPU 0: cuMemcpyDtoH_v2 failed with "
                "CUDA_ERROR_ILLEGAL_ADDRESS (700): an illegal memory access was encountered"
            )
            np.testing.assert_array_equal(infer(client, "returns", ramp(count)), ramp(count) + 1)
        _, text = infer_error(infer, client, "asks", ramp(LARGE))
        assert "Tensor 'X' cannot be copied from GPU 0: cuMemcpyDtoH_v2 failed with" in text


def test_preferred_memory_is_the_cpu_without_a_gpu(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    models.add(
        repository,
        "asks",
        models.PASSES_ON.replace("from producer import Consumed, OnGpu", "")
        .replace('on_gpu("X", x_of(request))', 'pb_utils.Tensor("X", x_of(request))')
        .replace("assert not y.is_cpu()", "assert y.is_cpu() and y.as_numpy()[1] == 1"),
        models.CONFIG,
    )
    repository.add(
        "returns",
        """
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def execute(self, requests):
                return [
                    pb_utils.InferenceResponse([
                        pb_utils.Tensor("Y", request.inputs()[0].as_numpy())
                    ])
                    for request in requests
                ]
        """,
        models.CONFIG,
    )
    host = serve(repository).wait_started()
    with host.client() as client:
        np.testing.assert_array_equal(infer(client, "asks", ramp(2)), ramp(2))


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("yes", "Forcing CPU only input tensors."),
        (
            "no",
            "Input tensors can be both in CPU and GPU. FORCE_CPU_ONLY_INPUT_TENSORS is off.",
        ),
    ],
)
def test_inputs_are_on_the_cpu_whatever_is_configured(
    repository: RepositoryBuilder,
    serve: Serve,
    simulated_environment: dict[str, str],
    value: str,
    line: str,
) -> None:
    parameter = (
        f'parameters {{ key: "FORCE_CPU_ONLY_INPUT_TENSORS" value {{ string_value: "{value}" }} }}'
    )
    models.add(repository, "returns", models.RETURNS, models.CONFIG + ONE + parameter)
    host = serve(repository, env=simulated_environment).wait_started()
    host.wait_for(rf"I\d{{4}} .*\] {re.escape(line)}")
    assert host.output.count(line) == 1
    with host.client() as client:
        np.testing.assert_array_equal(infer(client, "returns", ramp(2)), ramp(2) + 1)


def test_nothing_is_said_of_inputs_if_nothing_is_configured(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("identity")
    host = serve(repository).wait_started()
    assert "nput tensors" not in host.output
