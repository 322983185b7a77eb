"""Models that call other models (BLS)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.clients import Client, infer_error, infer_through
from tests.conftest import RepositoryBuilder, RunningHost, Serve

OUTSIDE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def {hook}(self, *args):
        response = pb_utils.InferenceRequest(
            model_name="identity", inputs=[], requested_output_names=[]
        ).exec()

    def execute(self, requests):
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    module_repository.copy("ask", "identity")
    three = module_repository.path / "ask3"
    module_repository.copy("misbehave")
    module_repository.add(
        "ask3",
        (module_repository.path / "ask" / "1" / "model.py").read_text(),
        (module_repository.path / "ask" / "config.pbtxt").read_text()
        + "instance_group [ { count: 3 } ]",
    )
    assert three.is_dir()
    return module_serve(module_repository).wait_started()


@pytest.fixture
def client(host: RunningHost) -> Iterator[Client]:
    with host.client() as client:
        yield client


@pytest.mark.parametrize("count", [1, 16, 5000, 1_000_000])
def test_model_calls_another_model(client: Client, count: int) -> None:
    array = np.arange(count, dtype=np.float32)
    np.testing.assert_array_equal(infer_through(client, "identity", array), array)


def test_chain_of_models_forwards_tensors(client: Client) -> None:
    array = np.arange(100_000, dtype=np.float32)
    np.testing.assert_array_equal(infer_through(client, "ask3>ask3>identity:1", array), array)


def test_many_pipelines_run_concurrently(client: Client) -> None:
    arrays = [np.full(30_000, number, dtype=np.float32) for number in range(40)]
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda array: infer_through(client, "identity", array), arrays)
        for array, answer in zip(arrays, answers, strict=True):
            np.testing.assert_array_equal(answer, array)


def test_failed_bls_requests_return_error_responses(client: Client) -> None:
    array = np.ones(2, dtype=np.float32)
    assert infer_error(infer_through, client, "missing", array) == (
        "StatusCode.INTERNAL",
        (
            "Model missing - Error when running inference: Request for unknown model: 'missing' is"
            " not found"
        ),
    )
    _, text = infer_error(infer_through, client, "identity:9", array)
    assert text.endswith("Request for unknown model: 'identity' version 9 is not found")
    _, text = infer_error(infer_through, client, "misbehave", array)
    assert text.startswith("Model misbehave - Error when running inference: ")


def test_model_that_waits_for_itself_gets_an_error(client: Client) -> None:
    array = np.ones(2, dtype=np.float32)
    status, text = infer_error(infer_through, client, "ask>identity", array)
    assert status == "StatusCode.INTERNAL"
    assert "the request waits for itself: every instance of model 'ask' is busy" in text
    np.testing.assert_array_equal(infer_through(client, "identity", array), array)


def test_recursion_depth_is_limited_by_instances(client: Client) -> None:
    array = np.ones(2, dtype=np.float32)
    deep = "ask3>ask3>identity"
    np.testing.assert_array_equal(infer_through(client, deep, array, model="ask3"), array)
    _, text = infer_error(infer_through, client, f"ask3>{deep}", array, model="ask3")
    assert "waits for itself" in text


def test_deadlock_of_models_is_an_error(client: Client) -> None:
    array = np.ones(2, dtype=np.float32)
    _, text = infer_error(infer_through, client, "ask3>ask>identity", array)
    assert "waits for itself" in text


def test_concurrent_recursion_neither_hangs_nor_loses_a_call(client: Client) -> None:
    """Three pipelines of depth two share three instances: each succeeds or gets the cycle error."""
    array = np.ones(2, dtype=np.float32)

    def attempt(_: int) -> str:
        try:
            np.testing.assert_array_equal(
                infer_through(client, "ask3>identity", array, "ask3"), array
            )
        except Exception as error:
            return "cycle" if "waits for itself" in str(error) else str(error)
        return "answered"

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(attempt, range(60)))
    assert set(results) <= {"answered", "cycle"}
    assert "answered" in results


@pytest.mark.parametrize("hook", ["initialize", "finalize"])
def test_bls_outside_execute_is_rejected(
    repository: RepositoryBuilder, serve: Serve, hook: str
) -> None:
    repository.copy("identity")
    repository.add("outside", OUTSIDE.format(hook=hook))
    host = serve(repository, "--exit-on-error=false").wait_started()
    host.stop()
    host.wait_for("BLS is only supported during the 'execute' function.")
